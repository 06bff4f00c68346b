"""The ASGI application: how a request's bytes become fields, and how an answer becomes bytes.

The path of a request is written for speed: a dictionary finds the route, one pass reads the headers, and no middleware
of our own wraps it. Starlette provides the lifespan, and the middleware that an embedding program adds.
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
from .requests import (
    Body,
    ClientDisconnected,
    ErrorAnswer,
    Receive,
    RequestContext,
    Service,
    Target,
    find,
    presentable_error,
    read_fields,
    read_query,
)
from .routes import HANDLERS, HELD_ROUTES, stream

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, MutableMapping

    from ..planes.plane import Plane
    from .tokens import TokenFile

__all__ = ["ControlPlane", "create_app"]

Scope: TypeAlias = "MutableMapping[str, Any]"
Send: TypeAlias = "Callable[[MutableMapping[str, Any]], Awaitable[None]]"
Headers: TypeAlias = "tuple[tuple[bytes, bytes], ...]"

CLIENT_DISCONNECTED = 499
"""The status in the log and the metrics of a request whose client disconnected before its answer."""
MAX_UNREAD_BODY_BYTES = 64 << 10
"""Bytes of an unread body that uvicorn may skip after an error answer; for a longer body the connection is closed."""
CLOSE_TIMEOUT = 5.0
"""Seconds for which the end of the lifespan waits for held requests."""

logger = logging.getLogger("dreamlake.lakeshore.server")

_GIVEN_ID = re.compile(rb"[0-9A-Za-z_-]{1,64}")
_MSGPACK = CONTENT_TYPE.encode()
_STREAM = STREAM_TYPE.encode()
_JSON = b"application/json"
_TEXT = b"text/plain"
_ID_HEADER = REQUEST_ID.encode()
_SEND_ERRORS = (OSError, RuntimeError)
"""What sending to a disconnected client may raise; uvloop raises RuntimeError on a closed transport."""


class _Endpoint:
    """The ASGI callable of an application: its access rules, its limits, and the planes of its namespaces."""

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
        """The id that the client gave, if it is well formed; else a new one."""
        if given is not None and _GIVEN_ID.fullmatch(given):
            return given
        return b"%s-%x" % (self._id_prefix, next(self._id_numbers))

    def plane_of(self, ns: str) -> Plane:
        """The plane of a namespace, made on first use. Raises ForbiddenRequest if there are too many."""
        if ns == self.plane.ns:
            return self.plane
        found = self._other_planes.get(ns)
        if found is None:
            if len(self._other_planes) >= self.limits.namespaces:
                raise ForbiddenRequest(
                    f"expected one of the {len(self._other_planes)} namespaces in use, the server's maximum, got {ns!r:.80}"
                )
            found = self._other_planes[ns] = self.plane.within(ns)
        return found

    async def ready(self) -> bool:
        """Whether the plane answers a read in time, and the server is not shutting down."""
        with anyio.move_on_after(self.limits.readiness):
            try:
                await self.plane.current_outcomes(["ready"])
            except LakeshoreError as exc:
                logger.warning("the server is not ready: %s", exc)
                return False
            return not self.service.polls.draining
        return False

    async def close(self) -> None:
        """End held requests, then close the planes that this endpoint has made."""
        self.service.polls.drain()
        with anyio.move_on_after(CLOSE_TIMEOUT):
            await self.service.polls.idle()
        with anyio.CancelScope(shield=True):
            while self._other_planes:
                await self._other_planes.popitem()[1].aclose()


class _Exchange:
    """One request and its answer."""

    def __init__(self, app: _Endpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self._began = perf_counter()
        self._app = app
        self._scope = scope
        self._receive = receive
        self._send = send
        self._headers: dict[bytes, bytes] = dict(scope["headers"])
        self._method: str = scope["method"]
        self._id = app.request_id(self._headers.get(_ID_HEADER))
        self._body = Body(app.service, self._headers, receive)
        self._name = "unknown"
        self._label = "unknown"
        self._ns = "-"
        self._status = CLIENT_DISCONNECTED
        self._started = False
        self._json = False

    async def run(self) -> None:
        """Answer the request, whatever happens, then count and log it."""
        try:
            try:
                await self._serve()
            except Exception as exc:
                await self._send_error(exc)
        except ClientDisconnected:
            self._status = CLIENT_DISCONNECTED
        finally:
            self._body.release()
            seconds = perf_counter() - self._began
            self._app.service.metrics.observe(self._name, self._method, self._status, seconds)
            if logger.isEnabledFor(logging.INFO):
                method = self._method if self._method.isalpha() and len(self._method) < 10 else "-"
                values = (method, self._label, self._status, seconds, self._id.decode(), self._ns)
                logger.info("%s %s %d %.4f s id=%s ns=%s", *values)

    async def _serve(self) -> None:
        app = self._app
        headers = self._headers
        self._json = self._method == "GET" and _JSON in headers.get(b"accept", b"")
        path: str = self._scope["path"]
        root: str = self._scope.get("root_path") or ""
        if root and path.startswith(root):
            path = path[len(root) :]
        target, named, id = find(path)
        if target is None:
            await self._serve_unrouted(path)
            return
        self._name = target.name
        self._label = target.label
        app.access.check_browser(headers, self._scope)
        if self._method != target.method:
            allow = (b"allow", target.method.encode())
            raise ErrorAnswer(405, "NoSuchMethod", f"expected the method {target.method} for {target.label}", allow)
        ns = app.access.authorize(headers, target.role, named)
        self._ns = ns
        request = RequestContext(app.service, app.plane_of(ns), ns, id and check_id(id))
        if self._method == "POST":
            self._check_type()
            request.fields = read_fields(await self._body.read(), target.label)
        else:
            request.query = read_query(self._scope.get("query_string", b""))
        if target.name in HELD_ROUTES:
            request.authorize = partial(app.access.authorize, headers, target.role, ns)
            await self._run_watched(target, request)
        else:
            await self._run_handler(target, request)

    async def _serve_unrouted(self, path: str) -> None:
        """Serve the paths that are not routes of the protocol; answer 404 for any that does not exist."""
        if path in ("/healthz", "/readyz", "/metrics"):
            self._name = path[1:]
            self._label = path
        if path == "/healthz":
            await self._send_response(200, b"ok\n", _TEXT)
        elif path == "/readyz":
            if await self._app.ready():
                await self._send_response(200, b"ready\n", _TEXT)
            else:
                await self._send_response(503, b"not ready\n", _TEXT)
        else:
            self._app.access.check_browser(self._headers, self._scope)
            if path != "/metrics":
                raise ErrorAnswer(404, "NoSuchRoute", f"no route {path[:100]!r} on this server")
            plane = self._app.plane_of(self._app.access.authorize(self._headers, "admin", None))
            await self._send_response(200, await self._app.service.metrics.render(plane), METRICS_TYPE.encode())

    async def _run_watched(self, target: Target, request: RequestContext) -> None:
        """Answer within a task group that can watch for the client's disconnect if the handler holds the request."""
        failure: Exception | None = None
        async with anyio.create_task_group() as group:
            request.watch_with(group, self._receive)
            try:
                if target.name == "stream":
                    await self._send_stream(request)
                else:
                    await self._run_handler(target, request)
            except Exception as exc:  # raised below, so that it is not wrapped in a group
                failure = exc
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure

    async def _run_handler(self, target: Target, request: RequestContext) -> None:
        sent = False
        try:
            fields = await HANDLERS[target.name](request)
            request.recheck_access()
            body = self._encoded(fields)
            if request.disconnected or (request.undo_unsent is not None and not await request.still_connected()):
                raise ClientDisconnected
            await self._send_response(200, body)
            sent = True
        finally:
            if request.undo_unsent is not None and not sent:
                with anyio.CancelScope(shield=True):
                    await self._undo(request.undo_unsent)

    async def _undo(self, undo: Callable[[], Awaitable[object]]) -> None:
        try:
            await undo()
        except Exception:
            logger.exception(
                "request %s: its answer was not sent, and its operation could not be undone", self._id.decode()
            )

    async def _send_stream(self, request: RequestContext) -> None:
        """Send frames as they come. An error in the middle closes the connection, and the reader connects again."""
        async with aclosing(stream(request)) as chunks:
            chunk = await anext(chunks)
            await self._start_response(200, [(b"content-type", _STREAM), (_ID_HEADER, self._id)])
            await self._send_body(chunk, more=True)
            async for chunk in chunks:
                await self._send_body(chunk, more=True)
        if request.disconnected:
            raise ClientDisconnected
        await self._send_body(b"", more=False)

    # Answers

    def _encoded(self, fields: Mapping[str, Any]) -> bytes:
        if self._json:
            return json.dumps(fields, default=_not_shown).encode() + b"\n"
        return encode(fields)

    async def _send_error(self, exc: Exception) -> None:
        """Answer with the error. If an answer has started already, only log the error: the answer stays incomplete."""
        if isinstance(exc, ClientDisconnected):
            raise exc
        headers: Headers = ()
        if isinstance(exc, ErrorAnswer):
            status = exc.status
            fields = exc.fields
            headers = exc.headers
        else:
            exc = presentable_error(exc)
            status = status_of(exc)
            fields = encode_error(exc)
        if status == 500 or self._started:
            trace = exc if status == 500 else None
            kind = fields["error"]["type"] if isinstance(exc, ErrorAnswer) else type(exc).__name__
            logger.error("request %s to %s failed: %s", self._id.decode(), self._label, kind, exc_info=trace)
        if self._started:
            self._status = status
            return
        fields["error"]["request_id"] = self._id.decode()
        await self._send_response(status, self._encoded(fields), headers=headers)

    async def _send_response(self, status: int, body: bytes, kind: bytes = b"", *, headers: Headers = ()) -> None:
        if not kind:
            kind = _JSON if self._json else _MSGPACK
        head = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), (_ID_HEADER, self._id), *headers]
        closing = status == 408 or (status >= 400 and self._body.unread > MAX_UNREAD_BODY_BYTES)
        if closing:
            head.append((b"connection", b"close"))
        await self._start_response(status, head)
        await self._send_body(body, more=closing)
        if closing:
            if status != 408:
                await self._body.skip()
            await self._send_body(b"", more=False)

    async def _start_response(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self._status = status
        self._started = True
        try:
            await self._send({"type": "http.response.start", "status": status, "headers": headers})
        except _SEND_ERRORS:
            raise ClientDisconnected from None

    async def _send_body(self, chunk: bytes, *, more: bool) -> None:
        try:
            await self._send({"type": "http.response.body", "body": chunk, "more_body": more})
        except _SEND_ERRORS:
            raise ClientDisconnected from None

    def _check_type(self) -> None:
        """Reject other content types. No form of a web page can send this one, so this too keeps web pages out."""
        given = self._headers.get(b"content-type", b"")
        if given != _MSGPACK and given.partition(b";")[0].strip().lower() != _MSGPACK:
            raise ErrorAnswer(
                415, "Refused", f"expected the content type {CONTENT_TYPE}, got {given[:80].decode('latin-1')!r}"
            )


def _not_shown(value: object) -> None:
    """Encode a value that JSON cannot represent, such as an Envelope, as null."""


class ControlPlane(Starlette):
    """The application that `create_app` makes."""

    def __init__(self, endpoint: _Endpoint) -> None:
        super().__init__(lifespan=_lifespan)
        self.endpoint = endpoint
        self.router.redirect_slashes = False
        self.router.default = endpoint

    def build_middleware_stack(self) -> Any:
        """Use the middleware that was added, and none of Starlette's own: the endpoint answers with its own errors."""
        app: Any = self.router
        for cls, args, kwargs in reversed(self.user_middleware):
            app = cls(app, *args, **kwargs)
        return app

    def drain(self) -> None:
        """Answer held requests, end streams, and hold no further request. Call it on the event loop that serves."""
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
    """Make an ASGI application that serves `plane` over the HTTP protocol.

    Call the application's `drain` when the server is to end: servers end the lifespan only after the last answer.

    Args:
        plane: serves the namespace `plane.ns`. Planes of other namespaces are made from it on first use, and closed when
            the lifespan ends. Pass it before it is opened; closing it remains the caller's task.
        tokens: the tokens that the server accepts. Without any, every caller may do everything in every namespace.
        allowed_hosts: names of this server, besides loopback names and the address of the connection. If there are
            some, a request must name one of them even when a token is required.
        limits: sizes, times and numbers; each has a default.
        target_versions: by namespace, the version that polls return as `target_nymph_version`.

    Returns:
        The application.
    """
    plane.serving = True
    limits = limits or Limits()
    service = Service(limits, Metrics(plane), target_versions or {})
    access = Access(tokens, allowed_hosts, plane.ns)
    return ControlPlane(_Endpoint(plane, access, limits, service))
