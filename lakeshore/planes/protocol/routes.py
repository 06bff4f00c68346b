"""The routes of the HTTP protocol, their roles and their limits, for client and server.

Bodies are msgpack maps in both directions (`CONTENT_TYPE`), errors too: see `protocol.fields` and `protocol.errors`.

Batch routes take `{items: [...]}` and answer `{results: [...]}`: for each item, in order, an answer or `{error}`. The
routes marked `added` are not in the function protocol's own text: a server may lack them. It then answers 404 with an
error that is not InvocationNotFound.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = [
    "AWAIT_S",
    "CONTENT_TYPE",
    "REQUEST_ID",
    "ROUTES",
    "STREAM_TYPE",
    "Route",
]

CONTENT_TYPE = "application/x-msgpack"
STREAM_TYPE = "application/x-msgpack-stream"
REQUEST_ID = "x-request-id"
"""The header with the request's id; the server repeats it in the response."""

AWAIT_S = 60.0
"""Seconds that an await is held when it names no time."""


class Route(NamedTuple):
    """One route. role: the least that its token must have. path: `:id` stands for the invocation that it names."""

    method: str
    path: str
    role: str
    added: bool = True


ROUTES: dict[str, Route] = {
    "submit": Route("POST", "/producer/submit", "producer", added=False),
    "submit_many": Route("POST", "/producer/submit-many", "producer"),
    "await": Route("POST", "/producer/await", "producer", added=False),
    "await_many": Route("POST", "/producer/await-many", "producer"),
    "cancel": Route("POST", "/producer/cancel", "producer"),
    "stream": Route("GET", "/producer/invocations/:id/result/stream", "producer", added=False),
    "invocation": Route("GET", "/producer/invocations/:id", "producer"),
    "invocations": Route("GET", "/producer/invocations", "producer"),
    "queues": Route("GET", "/producer/queues", "producer"),
    "poll": Route("POST", "/daemon/poll", "worker", added=False),
    "ack": Route("POST", "/daemon/ack", "worker", added=False),
    "ack_many": Route("POST", "/daemon/ack-many", "worker"),
    "chunk": Route("POST", "/daemon/result-chunk", "worker", added=False),
    "chunks": Route("POST", "/daemon/result-chunks", "worker"),
    "heartbeat": Route("POST", "/daemon/heartbeat", "worker"),
    "release": Route("POST", "/daemon/release", "worker"),
    "retry": Route("POST", "/daemon/retry", "worker"),
    "reap": Route("POST", "/admin/reap", "admin"),
    "purge": Route("POST", "/admin/purge", "admin"),
}
"""By name; each is below `/v1` and below `/v1/namespaces/:ns`."""


# Bodies -------------------------------------------------------------------------------------------------------------


# Errors -------------------------------------------------------------------------------------------------------------
