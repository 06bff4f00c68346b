"""The HTTP protocol's names: routes, roles, limits, fields and errors, written once for client and server.

Bodies are msgpack maps both ways (`CONTENT_TYPE`), errors too: `{error: {type, message, ...}}`. A reader ignores fields
that it does not know. Nothing here decodes a user's value: envelopes, results and frames are bytes.

Batch routes take `{items: [...]}` and answer `{results: [...]}`, an answer or `{error}` for each item in order. The
routes marked `added` are not in the function protocol's own text: a peer may lack them, and says so by a 404 whose
error is not InvocationNotFound.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar, cast

from ...errors import (
    ClaimLost,
    DispatchError,
    InvocationNotFound,
    LakeshoreError,
    NotAuthorized,
    PlaneUnavailable,
    WireError,
)
from ...ids import check_id, check_queue
from ...wire._msgpack import READ_ERRORS, packb, unpackb
from ..contract.records import Failure

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "AWAIT_S",
    "CONTENT_TYPE",
    "MAX_BODY",
    "MAX_HELD_S",
    "MAX_ITEMS",
    "REQUEST_ID",
    "ROUTES",
    "STREAM_TYPE",
    "STUB",
    "Refused",
    "Route",
    "TooLarge",
    "decode",
    "encode",
    "error_fields",
    "failure_from",
    "field",
    "is_list",
    "number",
    "raised",
    "read_items",
    "read_names",
    "read_pairs",
    "status_of",
    "whole",
]

T = TypeVar("T")

CONTENT_TYPE = "application/x-msgpack"
STREAM_TYPE = "application/x-msgpack-stream"
REQUEST_ID = "x-request-id"

MAX_BODY = 128 << 20
"""Bytes of a request's body that a server takes unless told otherwise; larger ones are a 413."""
MAX_ITEMS = 10_000
"""Items of one batch request, or ids and streams of one await-many."""
MAX_HELD_S = 300.0
"""Seconds that a server holds a request at most, whatever the request asks for."""
AWAIT_S = 60.0
"""Seconds that an await is held when it does not say."""

STUB: dict[str, str] = {"module": "_native_wire", "qualname": "_native_wire.envelope", "version": "v1"}
"""What stands for the function on the outside: the callable's identity is inside the Envelope."""


class Route(NamedTuple):
    """One route. role: the least that a token must have. A path holds `:id` where an invocation is named in it."""

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
"""By name; each stands below `/v1` and below `/v1/namespaces/:ns`."""


class TooLarge(DispatchError):
    """One item, or one answer, that is larger than the far side takes: nothing is gained by repeating it."""


class Refused(DispatchError):
    """A request that is not allowed for what it is, whoever asks: from a page of another origin, to a foreign host."""


# Bodies -------------------------------------------------------------------------------------------------------------


def encode(fields: Mapping[str, Any]) -> bytes:
    """A body's bytes."""
    return packb(fields, use_bin_type=True)


def decode(body: bytes, where: str) -> dict[str, Any]:
    """A body's fields; an empty body has none. Raises WireError, which names `where` it came from."""
    if not body:
        return {}
    try:
        fields: Any = unpackb(body, raw=False, strict_map_key=False)
    except READ_ERRORS as exc:
        said = f"{type(exc).__name__}: {exc}" if str(exc) else type(exc).__name__
        raise WireError(f"expected a msgpack map as the body of {where}, got {len(body)} bytes: {said[:200]}") from None
    if not isinstance(fields, dict):
        raise WireError(f"expected a msgpack map as the body of {where}, got a {type(fields).__name__}")
    return cast("dict[str, Any]", fields)


def is_list(value: object) -> TypeGuard[list[Any]]:
    return isinstance(value, list)


def shown(value: object, most: int) -> str:
    """The beginning of a value's text; of one that is nested too deep to have one, its type."""
    try:
        return f"{value!r:.{most}}"
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to be shown"


_MISSING: Any = object()
_KINDS: dict[Any, str] = {
    str: "text",
    bytes: "bytes",
    int: "a whole number",
    bool: "true or false",
    dict: "a map",
    list: "a list",
}


def field(fields: Mapping[str, Any], name: str, kind: type[T], default: T = _MISSING) -> T:
    """The field, of this type; nil counts as absent. Raises WireError where it is missing or of another type."""
    value = fields.get(name)
    if value is None:
        if default is _MISSING:
            raise WireError(f"expected the field `{name}`, {_KINDS[kind]}, which is missing")
        return default
    if type(value) is not kind:
        raise WireError(f"expected the field `{name}` to be {_KINDS[kind]}, got a {type(value).__name__}")
    return value


def number(fields: Mapping[str, Any], name: str, default: float, most: float = float("inf")) -> float:
    """A field of seconds: finite and not negative, cut down to `most`. Raises WireError for anything else."""
    value = fields.get(name)
    if value is None:
        return default
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise WireError(f"expected the field `{name}` to be a number of seconds from 0, got {shown(value, 60)}")
    return min(float(value), most)


def whole(fields: Mapping[str, Any], name: str, default: int = _MISSING, least: int = 0) -> int:
    """A field that is a whole number, from `least` to 2^62. Raises WireError."""
    value = field(fields, name, int, default)
    if not least <= value < 2**62:
        raise WireError(f"expected the field `{name}` from {max(least, 0)} to 2^62, got {value}")
    return value


def read_items(fields: Mapping[str, Any], name: str = "items") -> list[dict[str, Any]]:
    """A batch: a list of maps, at most MAX_ITEMS of them. Raises WireError."""
    items: list[Any] = field(fields, name, list, [])
    if len(items) > MAX_ITEMS:
        raise WireError(f"expected at most {MAX_ITEMS} `{name}` in one request, got {len(items)}: send several")
    for item in items:
        if type(item) is not dict:
            raise WireError(f"expected each of `{name}` to be a map, got a {type(item).__name__}")
    return items


def read_pairs(fields: Mapping[str, Any], name: str) -> tuple[tuple[str, int], ...]:
    """Claims as pairs of id and attempt. Raises WireError."""
    pairs: list[Any] = field(fields, name, list, [])
    if len(pairs) > MAX_ITEMS:
        raise WireError(f"expected at most {MAX_ITEMS} `{name}` in one request, got {len(pairs)}: send several")
    return tuple(_read_pair(pair, name) for pair in pairs)


def _read_pair(pair: Any, name: str) -> tuple[str, int]:
    id, attempt = pair if is_list(pair) and len(pair) == 2 else (None, None)
    if not isinstance(attempt, int) or not 0 <= attempt < 2**62:
        raise WireError(f"expected each of `{name}` to be a pair of id and attempt, got {shown(pair, 100)}")
    return check_id(id), attempt


def read_names(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The queues of a poll: `queues`, else `queue`, else the one called default. Raises WireError."""
    names: Sequence[Any] = field(fields, "queues", list, []) or [field(fields, "queue", str, "") or "default"]
    if len(names) > 100:
        raise WireError(f"expected at most 100 `queues` in one poll, got {len(names)}")
    for name in names:
        if not isinstance(name, str):
            raise WireError(f"expected each of `queues` to be text, the name of a queue, got a {type(name).__name__}")
    return tuple(map(check_queue, names))


def failure_from(error: object) -> Failure | None:
    """What an ack says of a failure: a map of type, message and traceback; a bare text is a DaemonError's message."""
    if error is None:
        return None
    if isinstance(error, dict):
        return Failure.from_dict(cast("dict[str, Any]", error))
    return Failure("DaemonError", error if isinstance(error, str) else shown(error, 1000))


# Errors -------------------------------------------------------------------------------------------------------------


def status_of(exc: Exception) -> int:
    """The status of the answer that says `exc`."""
    if isinstance(exc, InvocationNotFound):
        return 404
    if isinstance(exc, ClaimLost):
        return 409
    if isinstance(exc, TooLarge):
        return 413
    if isinstance(exc, (NotAuthorized, Refused)):
        return 403
    if isinstance(exc, PlaneUnavailable):
        return 503
    return 400 if isinstance(exc, ValueError) else 500


def error_fields(exc: Exception) -> dict[str, Any]:
    """The body, or the item of a batch, that says `exc`. Of an exception that is not ours nothing but its class."""
    if isinstance(exc, ClaimLost):
        return {"error": {"type": "ClaimLost", "message": str(exc), "id": exc.id, "reason": exc.reason}}
    if isinstance(exc, InvocationNotFound):
        return {"error": {"type": "InvocationNotFound", "message": str(exc), "id": exc.id}}
    if isinstance(exc, (LakeshoreError, ValueError)):
        return {"error": {"type": type(exc).__name__, "message": str(exc)}}
    return {"error": {"type": "ServerError", "message": f"the server failed with {type(exc).__name__}; see its log"}}


def raised(error: object, status: int, where: str, id: str = "") -> Exception:
    """The exception that an error of the far side means here. where: route and request id, for the sentence."""
    fields = cast("dict[str, Any]", error) if isinstance(error, dict) else {}
    kind, message = str(fields.get("type") or ""), str(fields.get("message") or f"status {status}")
    named = str(fields.get("id") or id)
    if kind == "InvocationNotFound":
        return InvocationNotFound(named)
    if kind == "ClaimLost" or status == 409:
        return ClaimLost(named, str(fields.get("reason") or message))
    said = f"{message} ({where})"
    if kind == "TooLarge" or status == 413:
        return TooLarge(said)
    if status == 401:
        return NotAuthorized(f"{said}: it is given with LAKESHORE_CLIENT_TOKEN, --token-file or token=")
    if status == 403:
        return NotAuthorized(said)
    if kind == "PlaneUnavailable" or status in (429, 502, 503, 504):
        return PlaneUnavailable(said)
    if kind == "WireError":
        return WireError(said)
    return ValueError(said) if kind == "ValueError" else DispatchError(f"{kind or 'the server'}: {said}")
