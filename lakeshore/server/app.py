"""The ASGI application: how a request's bytes become fields, and how an answer becomes bytes.

What every request goes through is written for speed: a dictionary finds the route, one pass reads the headers, nothing
is wrapped. Starlette brings the lifespan, and the middleware of who embeds the application.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
from starlette.applications import Starlette

from ..errors import LakeshoreError
from ..ids import check_id
from ..planes.protocol.errors import ForbiddenRequest, encode_error, status_of
from ..planes.protocol.fields import encode
from ..planes.protocol.routes import CONTENT_TYPE, REQUEST_ID, STREAM_TYPE
from .auth import Access
from .limits import Limits
from .metrics import METRICS_TYPE, Metrics
from .requests import Body, Call, ErrorAnswer, Left, Receive, Service, Target, find, read_fields, read_query, told
from .routes import HANDLERS, HELD, stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, MutableMapping

    from ..planes.plane import Plane
    from .tokens import TokenFile

__all__ = ["ControlPlane", "create_app"]

Scope: TypeAlias = "MutableMapping[str, Any]"
Send: TypeAlias = "Callable[[MutableMapping[str, Any]], Awaitable[None]]"
Headers: TypeAlias = "tuple[tuple[bytes, bytes], ...]"

CLIENT_LEFT = 499  # in the log and the metrics only
SMALL = 64 << 10
"""Bytes of an unwanted body that are left to the server to skip; before a longer one the connection is closed."""
CLOSING_S = 5.0

logger = logging.getLogger("dreamlake.lakeshore.server")

_GIVEN_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")
_MSGPACK, _STREAM, _JSON, _TEXT = CONTENT_TYPE.encode(), STREAM_TYPE.encode(), b"application/json", b"text/plain"
_ID_HEADER = REQUEST_ID.encode()
_DEAF = (OSError, RuntimeError)
"""What sending to a client that has gone may raise; uvloop, on a transport that is closed, the second."""


class _Endpoint:
    """What an application's requests are checked against, and the planes that answer them."""

    def __init__(self, plane: Plane, access: Access, limits: Limits, service: Service) -> None:
        self.plane = plane
        self.access = access
        self.limits = limits
        self.service = service
        self._other_planes: dict[str, Plane] = {}
        self._id_prefix = secrets.token_hex(4).encode()
        self._id_numbers = count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await _Exchange(self, scope, receive, send).run()
        else:
            await send({"type": "websocket.close", "code": 1000})

    def request_id(self, given: bytes | None) -> bytes:
        if given is not None and _GIVEN_ID.fullmatch(given):
            return given
        return b"%s-%x" % (self._id_prefix, next(self._id_numbers))

    def plane_of(self, ns: str) -> Plane:
        if ns == self.plane.ns:
            return self.plane
        found = self._other_planes.get(ns)
        if found is None:
            if len(self._other_planes) >= self.limits.namespaces:
                raise ForbiddenRequest(
                    f"expected one of the {len(self._other_planes)} namespaces in use, the most that there may be"
                )
            found = self._other_planes[ns] = self.plane.within(ns)
        return found

    async def ready(self) -> bool:
        """Whether the plane answers a read in time."""
        with anyio.move_on_after(self.limits.readiness):
            try:
                await self.plane.current_outcomes(["ready"])
            except LakeshoreError as exc:
                logger.warning("not ready: %s", exc)
                return False
            return not self.service.polls.draining
        return False

    async def close(self) -> None:
        """End what is held, then close the planes that were made here."""
        self.service.polls.drain()
        with anyio.move_on_after(CLOSING_S):
            await self.service.polls.idle()
        with anyio.CancelScope(shield=True):
            while self._other_planes:
                await self._other_planes.popitem()[1].aclose()


class _Exchange:
    """One request and its answer."""

    def __init__(self, app: _Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._began = perf_counter()
        self._app, self._scope, self._receive, self._send = app, scope, receive, send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._method: str = scope["method"]
        self._id = app.request_id(self._headers.get(_ID_HEADER))
        self._body = Body(app.service, self._headers, receive)
        self._name, self._label, self._ns = "unknown", "unknown", "-"
        self._status, self._started, self._json = CLIENT_LEFT, False, False

    async def run(self) -> None:
        """Answer, whatever happens, and take note of it."""
        try:
            try:
                await self._serve()
            except Exception as exc:
                await self._fail(exc)
        except Left:
            self._status = CLIENT_LEFT
        finally:
            self._body.done()
            seconds = perf_counter() - self._began
            self._app.service.metrics.observe(self._name, self._method, self._status, seconds)
            if logger.isEnabledFor(logging.INFO):
                method = self._method if self._method.isalpha() and len(self._method) < 10 else "-"
                said = (method, self._label, self._status, seconds, self._id.decode(), self._ns)
                logger.info("%s %s %d %.4f s id=%s ns=%s", *said)

    async def _serve(self) -> None:
        app, headers = self._app, self._headers
        self._json = self._method == "GET" and _JSON in headers.get(b"accept", b"")
        path: str = self._scope["path"]
        root: str = self._scope.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        target, named, id = find(path)
        if target is None:
            await self._beside(path)
            return
        self._name, self._label = target.name, target.label
        app.access.check_browser(headers, self._scope)
        if self._method != target.method:
            allow = (b"allow", target.method.encode())
            raise ErrorAnswer(405, "NoSuchMethod", f"expected the method {target.method} for {target.label}", allow)
        ns = self._ns = app.access.authorize(headers, target.role, named)
        call = Call(app.service, app.plane_of(ns), ns, id and check_id(id))
        if self._method == "POST":
            self._check_type()
            call.fields = read_fields(await self._body.read(), target.label)
        else:
            call.query = read_query(self._scope.get("query_string", b""))
        if target.name in HELD:
            call.allowed = partial(app.access.authorize, headers, target.role, ns)
            await self._watched(target, call)
        else:
            await self._answer(target, call)

    async def _beside(self, path: str) -> None:
        """What lies beside the protocol's routes; quickly a 404 for what does not exist."""
        if path in ("/healthz", "/readyz", "/metrics"):
            self._name, self._label = path[1:], path
        if path == "/healthz":
            await self._say(200, b"ok\n", _TEXT)
        elif path == "/readyz":
            ready = await self._app.ready()
            await self._say(200 if ready else 503, b"ready\n" if ready else b"not ready\n", _TEXT)
        else:
            self._app.access.check_browser(self._headers, self._scope)
            if path != "/metrics":
                raise ErrorAnswer(404, "NoSuchRoute", f"no route {path[:100]!r} on this server")
            plane = self._app.plane_of(self._app.access.authorize(self._headers, "admin", None))
            await self._say(200, await self._app.service.metrics.render(plane), METRICS_TYPE.encode())

    async def _watched(self, target: Target, call: Call) -> None:
        """Answer with somebody to watch for the client's leaving, in case the handler takes a turn."""
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            call.watched_by(group, self._receive)
            try:
                await (self._stream(call) if target.name == "stream" else self._answer(target, call))
            except Exception as exc:  # raised below, out of the group's wrapping
                failure = exc
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _answer(self, target: Target, call: Call) -> None:
        sent = False
        try:
            fields = await HANDLERS[target.name](call)
            call.check_again()
            body = self._encoded(fields)
            if call.gone or (call.unsent is not None and not await call.still_there()):
                raise Left
            await self._say(200, body)
            sent = True
        finally:
            if call.unsent is not None and not sent:
                with anyio.CancelScope(shield=True):
                    await self._undo(call.unsent)

    async def _undo(self, undo: Callable[[], Awaitable[object]]) -> None:
        try:
            await undo()
        except Exception:
            logger.exception("request %s: what its client never heard of could not be undone", self._id.decode())

    async def _stream(self, call: Call) -> None:
        """Frames as they come. What goes wrong in the middle breaks the connection off, which readers see as a drop."""
        async with aclosing(stream(call)) as chunks:
            chunk = await anext(chunks)
            await self._start(200, [(b"content-type", _STREAM), (_ID_HEADER, self._id)])
            await self._write(chunk, more=True)
            async for chunk in chunks:
                await self._write(chunk, more=True)
        if call.gone:
            raise Left
        await self._write(b"", more=False)

    # Answers

    def _encoded(self, fields: Mapping[str, Any]) -> bytes:
        return json.dumps(fields, default=_not_shown).encode() + b"\n" if self._json else encode(fields)

    async def _fail(self, exc: Exception) -> None:
        """Answer with the error; after the answer's beginning it can only be broken off."""
        if isinstance(exc, Left):
            raise exc
        headers: Headers = ()
        if isinstance(exc, ErrorAnswer):
            status, fields, headers = exc.status, exc.fields, exc.headers
        else:
            exc = told(exc)
            status, fields = status_of(exc), encode_error(exc)
        if status == 500 or self._started:
            trace = exc if status == 500 else None
            kind = fields["error"]["type"] if isinstance(exc, ErrorAnswer) else type(exc).__name__
            logger.error("request %s to %s failed: %s", self._id.decode(), self._label, kind, exc_info=trace)
        if self._started:
            self._status = status
            return
        fields["error"]["request_id"] = self._id.decode()
        await self._say(status, self._encoded(fields), headers=headers)

    async def _say(self, status: int, body: bytes, kind: bytes = b"", *, headers: Headers = ()) -> None:
        kind = kind or (_JSON if self._json else _MSGPACK)
        head = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (_ID_HEADER, self._id), *headers]
        closing = status == 408 or (status >= 400 and self._body.unread > SMALL)
        if closing:
            head.append((b"connection", b"close"))
        await self._start(status, head)
        await self._write(body, more=closing)
        if closing:
            if status != 408:
                await self._body.skip()
            await self._write(b"", more=False)

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status, self._started = status, True
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        except _DEAF:
            raise Left from None

    async def _write(self, chunk: bytes, *, more: bool) -> None:
        try:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        except _DEAF:
            raise Left from None

    def _check_type(self) -> None:
        """No form of a page in a browser has this type: another way in is closed."""
        given = self._headers.get(b"content-type", b"")
        if given != _MSGPACK and given.partition(b";")[0].strip().lower() != _MSGPACK:
            raise ErrorAnswer(
                415, "Refused", f"expected the content type {CONTENT_TYPE}, got {given[:80].decode('latin-1')!r}"
            )


def _not_shown(value: object) -> None:
    """What JSON has no form for: envelopes."""


class ControlPlane(Starlette):
    """The application that `create_app` makes."""

    def __init__(self, endpoint: _Endpoint) -> None:
        super().__init__(lifespan=_lifespan)
        self.endpoint = endpoint
        self.router.redirect_slashes, self.router.default = False, endpoint

    def build_middleware_stack(self) -> Any:
        """Middleware that was added, and none of Starlette's own: the endpoint answers for its errors."""
        app: Any = self.router
        for cls, args, kwargs in reversed(self.user_middleware):
            app = cls(app, *args, **kwargs)
        return app

    def drain(self) -> None:
        """Answer what is held, end the streams, and hold nothing from now on. On the event loop that serves."""
        self.endpoint.service.polls.drain()


@asynccontextmanager
async def _lifespan(app: ControlPlane) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        await app.endpoint.close()


def create_app(
    plane: Plane,
    *,
    tokens: TokenFile | None = None,
    allowed_hosts: Collection[str] = (),
    limits: Limits | None = None,
    target_versions: Mapping[str, str] | None = None,
) -> ControlPlane:
    """An ASGI application that puts `plane` behind the HTTP protocol.

    plane: serves the namespace `plane.ns`; others are made of it on first use, and closed when the lifespan ends. It is
    the caller's to close, and to be given unopened. tokens: without any, everybody may do everything in every namespace.
    allowed_hosts: names for this server besides those of loopback and the address that a connection came to; with some,
    they are checked also where a token is required. target_versions: by namespace, what polls are told as
    `target_nymph_version`.

    Call `drain` when the server is to end: servers end the lifespan only after the last answer.
    """
    plane.serving = True
    limits = limits or Limits()
    service = Service(limits, Metrics(plane), target_versions or {})
    access = Access(tokens, allowed_hosts, plane.ns)
    return ControlPlane(_Endpoint(plane, access, limits, service))
