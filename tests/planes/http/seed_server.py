"""A control plane that speaks the function protocol's own six routes and no other: what our client meets abroad.

It shares no code with the package, keeps everything in memory, and does no more than the protocol's text says: a claim
has no attempt and no lease, a poll hands out one command of the one `queue` it names, an ack needs no worker and the
last one wins. Whatever else is asked of it is a 404 that looks like a stranger's.

`SeedServer()` is an ASGI application for asyncio and trio. `python seed_server.py --port 0` serves one with uvicorn on
the loopback and prints its port.

Tests make it fail by `faults(...)`, over the wire by a POST of the same fields to `/-/faults`:

    unavailable_s   for so many seconds every request is a 503
    lose_answers    {"poll": 2}: the next two polls are served, and their connections dropped instead of an answer
    drop_streams    [n, ...]: the connection of the next stream is dropped after n bytes of its body
    end_streams     [n, ...]: the body of the next stream ends after n bytes, as if it were complete
    plain_unknown   an unknown invocation is answered like a route that is not there

`seen` counts the requests by method and path, `under_way` those of them that have no answer yet; over the wire they are
`GET /-/seen` and `GET /-/under-way`.
"""

from __future__ import annotations

import argparse
import math
import re
import socket
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import anyio
import msgpack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Fields = dict[str, Any]
    Receive = Callable[[], Awaitable[Any]]
    Send = Callable[[Any], Awaitable[None]]

TERMINAL = ("succeeded", "failed", "killed", "timeout")
PATHS = re.compile(r"/v1(?:/namespaces/(?P<ns>[^/]+))?/(?P<route>.+)")
POSTS = ("producer/submit", "producer/await", "daemon/poll", "daemon/ack", "daemon/result-chunk")
STREAM = re.compile(r"producer/invocations/(?P<id>[^/]+)/result/stream")


class Refusal(Exception):
    """An answer other than 200."""

    def __init__(self, status: int, body: bytes, kind: str = "application/x-msgpack") -> None:
        super().__init__(status)
        self.status, self.body, self.kind = status, body, kind


class Dropped(Exception):
    """The connection ends here, whatever was sent of the answer."""


def refusal(status: int, type: str, message: str) -> Refusal:
    return Refusal(status, msgpack.packb({"error": {"type": type, "message": message}}))


def no_route(route: str = "") -> Refusal:
    """Strangers do not agree on what a 404 looks like; none of these says which error it is."""
    if route.startswith("producer/"):
        return Refusal(404, b"<html><h1>Nothing here</h1></html>", "text/html")
    if route.startswith("daemon/"):
        return Refusal(404, msgpack.packb({"error": "not found"}))
    return Refusal(404, b"Not Found", "text/plain")


@dataclass
class Invocation:
    """One row."""

    id: str
    queue: str
    function: Any
    args_blob: bytes
    run_config: Fields
    priority: int
    parent: str | None
    root: str
    state: str = "queued"
    result_blob: bytes = b""
    error: Any = None
    worker: str | None = None
    started: float | None = None
    finished: float | None = None
    frames: dict[int, bytes] = field(default_factory=dict[int, bytes])
    closed: bool = False
    """A final frame was written."""


class Bell:
    """Wakes all that wait for any change."""

    def __init__(self) -> None:
        self._event: anyio.Event | None = None

    def ring(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.set()

    async def wait(self) -> None:
        if self._event is None:
            self._event = anyio.Event()
        await self._event.wait()


def whole(priority: Any) -> int:
    """A number without its fraction; anything else counts as 0."""
    if isinstance(priority, bool) or not isinstance(priority, (int, float)) or not math.isfinite(priority):
        return 0
    return int(priority)


class Namespace:
    """The invocations of one namespace, and what the six routes do to them."""

    def __init__(self) -> None:
        self.rows: dict[str, Invocation] = {}  # in submit order
        self.keys: dict[tuple[str, str], str] = {}
        self.bell = Bell()

    def submit(self, fields: Fields) -> Fields:
        id, body = fields.get("invocation_id"), fields.get("args_blob")
        if not isinstance(id, str) or not isinstance(body, bytes):
            raise refusal(400, "BadRequest", "invocation_id and args_blob are needed")
        queue = fields.get("queue") or "default"
        config = {**(fields.get("run_config") or {}), "queue": queue}
        key = config.get("key")
        known = self.keys.setdefault((queue, key), id) if key else id
        if known not in self.rows:
            parent = fields.get("parent_invocation_id")
            root = self.rows[parent].root if parent in self.rows else parent or id
            priority = whole(config.get("priority"))
            self.rows[id] = Invocation(id, queue, fields.get("function"), body, config, priority, parent, root)
            self.bell.ring()
        return {"invocation_id": known, "queue": queue}

    def claim(self, queue: str, worker: str | None) -> Fields | None:
        ready = [row for row in self.rows.values() if row.state == "queued" and row.queue == queue]
        if not ready:
            return None
        row = max(ready, key=lambda row: row.priority)  # of equals the first
        row.state, row.worker, row.started = "running", worker, time.time()
        body: Fields = {
            "invocation_id": row.id,
            "function": row.function,
            "args_blob": row.args_blob,
            "run_config": row.run_config,
        }
        if row.run_config.get("prefix"):
            body["prefix"] = row.run_config["prefix"]
        return {"commands": [{"id": f"cmd-{row.id}", "kind": "run", "body": body}]}

    def ack(self, row: Invocation, fields: Fields) -> Fields:
        if fields.get("state") not in TERMINAL:
            raise refusal(400, "BadRequest", f"no terminal state: {fields.get('state')!r}")
        row.state, row.finished = fields["state"], time.time()
        row.result_blob, row.error = fields.get("result_blob") or b"", fields.get("error")
        self.bell.ring()
        return {"ok": True}

    def append(self, row: Invocation, fields: Fields) -> Fields:
        seq, frame = fields.get("seq"), fields.get("bytes")
        if not isinstance(seq, int) or not isinstance(frame, bytes):
            raise refusal(400, "BadRequest", "seq and bytes are needed")
        if seq in row.frames:
            return {"ok": True, "seq": seq, "duplicate": True}
        row.frames[seq] = frame
        row.closed = row.closed or bool(fields.get("final"))
        self.bell.ring()
        return {"ok": True, "seq": seq}


class SeedServer:
    """namespaced: the routes are there below `/v1/namespaces/:ns` too. token: what every request has to bear."""

    def __init__(self, *, namespaced: bool = False, token: str | None = None) -> None:
        self.namespaced, self.token = namespaced, token
        self.namespaces: defaultdict[str, Namespace] = defaultdict(Namespace)
        self.seen: Counter[str] = Counter()
        self.under_way: Counter[str] = Counter()
        self.unavailable_until = 0.0
        self.lose_answers: Counter[str] = Counter()
        self.cuts: list[tuple[int, bool]] = []
        """Of the next streams: after how many bytes, and whether the connection is dropped."""
        self.plain_unknown = False

    def faults(
        self,
        *,
        unavailable_s: float = 0.0,
        lose_answers: dict[str, int] | None = None,
        drop_streams: list[int] | None = None,
        end_streams: list[int] | None = None,
        plain_unknown: bool = False,
    ) -> None:
        """What goes wrong from now on, in place of what was said before."""
        self.unavailable_until = time.monotonic() + unavailable_s
        self.lose_answers = Counter(lose_answers or {})
        self.cuts = [(size, True) for size in drop_streams or ()] + [(size, False) for size in end_streams or ()]
        self.plain_unknown = plain_unknown

    # The ASGI side ---------------------------------------------------------------------------------------------------

    async def __call__(self, scope: Fields, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        try:
            answer = await self._serve(scope, receive, send)
        except Refusal as exc:
            await _send(send, exc.status, exc.body, exc.kind)
        else:
            if answer is not None:
                await _send(send, 200, msgpack.packb(answer))

    async def _serve(self, scope: Fields, receive: Receive, send: Send) -> Fields | None:
        method, path = scope["method"], scope["path"]
        body = await _body(receive)
        if path == "/-/faults":
            self.faults(**_fields(body))
            return {}
        if path == "/-/seen":
            return dict(self.seen)
        if path == "/-/under-way":
            return dict(+self.under_way)
        self.seen[f"{method} {path}"] += 1
        self.under_way[f"{method} {path}"] += 1
        try:
            return await self._answer(scope, path, body, receive, send)
        finally:
            self.under_way[f"{method} {path}"] -= 1

    async def _answer(self, scope: Fields, path: str, body: bytes, receive: Receive, send: Send) -> Fields | None:
        method = scope["method"]
        if time.monotonic() < self.unavailable_until:
            raise Refusal(503, b"no healthy upstream", "text/plain")
        namespace, route = self._find(path, dict(scope["headers"]))
        if method == "GET" and (match := STREAM.fullmatch(route)):
            since = int(parse_qs(scope["query_string"].decode()).get("since", ["-1"])[0])
            await self._stream(namespace, self._row(namespace, match["id"]), since, receive, send)
            return None
        if method != "POST":
            raise no_route(route)
        if route not in POSTS:
            raise no_route(route)
        answer = await self._post(namespace, route, _fields(body), receive)
        name = route.rpartition("/")[2]
        if self.lose_answers[name] > 0:
            self.lose_answers[name] -= 1
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
            raise Dropped
        return answer

    def _find(self, path: str, headers: dict[bytes, bytes]) -> tuple[Namespace, str]:
        if self.token is not None and headers.get(b"authorization") != b"Bearer " + self.token.encode():
            raise Refusal(401, b"who are you?", "text/plain")
        match = PATHS.fullmatch(path)
        if match is None or (match["ns"] is not None and not self.namespaced):
            raise no_route()
        return self.namespaces[match["ns"] or "default"], match["route"]

    def _row(self, namespace: Namespace, id: Any) -> Invocation:
        row = namespace.rows.get(id) if isinstance(id, str) else None
        if row is None:
            raise no_route() if self.plain_unknown else refusal(404, "InvocationNotFound", f"no invocation {id!r}")
        return row

    async def _post(self, namespace: Namespace, route: str, fields: Fields, receive: Receive) -> Fields:
        if route == "producer/submit":
            return namespace.submit(fields)
        if route == "producer/await":
            row, timeout = self._row(namespace, fields.get("invocation_id")), fields.get("timeout_s", 60)
            return await _held(namespace, receive, timeout, lambda: _outcome(row)) or {"state": "pending"}
        if route == "daemon/poll":
            queue, worker = fields.get("queue") or "default", fields.get("worker_id")
            timeout = fields.get("timeout_s", 30)
            found = await _held(namespace, receive, timeout, lambda: namespace.claim(queue, worker))
            return found or {"commands": []}
        if route == "daemon/ack":
            return namespace.ack(self._row(namespace, fields.get("invocation_id")), fields)
        return namespace.append(self._row(namespace, fields.get("invocation_id")), fields)

    async def _stream(self, namespace: Namespace, row: Invocation, since: int, receive: Receive, send: Send) -> None:
        """Frames after `since` as they are, until a final one or the end of the invocation."""
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"application/x-msgpack-stream")],
            }
        )
        left, dropped = self.cuts.pop(0) if self.cuts else (sys.maxsize, False)

        def news() -> list[int] | None:
            new = [seq for seq in sorted(row.frames) if seq > since]
            return new or ([] if row.closed or row.state in TERMINAL else None)

        while new := await _held(namespace, receive, math.inf, news):
            body = b"".join(row.frames[seq] for seq in new)
            since = new[-1]
            await send({"type": "http.response.body", "body": body[:left], "more_body": True})
            left -= len(body)
            if left <= 0:
                break
        if dropped:
            raise Dropped
        await send({"type": "http.response.body", "body": b""})


def _outcome(row: Invocation) -> Fields | None:
    if row.state not in TERMINAL:
        return None
    return {"state": row.state, "result_blob": row.result_blob, "error": row.error}


async def _held(namespace: Namespace, receive: Receive, timeout: float, look: Callable[[], Any]) -> Any:
    """What `look` finds, now or after some change; None when the time is over or the client has gone."""
    found = look()
    if found is not None or timeout <= 0:
        return found
    async with anyio.create_task_group() as group:

        async def leave() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            group.cancel_scope.cancel()

        group.start_soon(leave)
        with anyio.move_on_after(timeout):
            while found is None:
                await namespace.bell.wait()
                found = look()
        group.cancel_scope.cancel()
    return found


async def _body(receive: Receive) -> bytes:
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def _fields(body: bytes) -> Fields:
    if not body:
        return {}
    try:
        fields = msgpack.unpackb(body)
    except Exception:
        raise refusal(400, "BadRequest", "the body is no msgpack") from None
    if not isinstance(fields, dict):
        raise refusal(400, "BadRequest", "the body is no map")
    return fields


async def _send(send: Send, status: int, body: bytes, kind: str = "application/x-msgpack") -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def main(*args: str) -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description="Serve the protocol's own routes on the loopback.")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token")
    parser.add_argument("--namespaced", action="store_true")
    said = parser.parse_args(args)
    with socket.create_server(("127.0.0.1", said.port)) as listener:
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        app = SeedServer(namespaced=said.namespaced, token=said.token)
        config = uvicorn.Config(app, ws="none", log_level="critical", access_log=False, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
