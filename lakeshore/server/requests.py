"""One request as a handler receives it: its context, its body and its fields; and the route that a path names."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from urllib.parse import parse_qsl

import anyio
from anyio.lowlevel import checkpoint

from ..errors import PlaneUnavailable, WireError
from ..planes.protocol.errors import TooLarge
from ..planes.protocol.fields import decode, seconds
from ..planes.protocol.routes import ROUTES
from ..wire._msgpack import READ_ERRORS, unpackb
from .polls import Polls, Renewals

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Mapping, MutableMapping

    from anyio.abc import TaskGroup

    from ..planes.plane import Plane
    from .limits import Limits
    from .metrics import Metrics
    from .polls import HeldRequest, Name

__all__ = [
    "Body",
    "ClientDisconnected",
    "ErrorAnswer",
    "Receive",
    "RequestContext",
    "Service",
    "Target",
    "find",
    "presentable_error",
    "read_fields",
    "read_query",
    "whole",
]  # fmt: skip

Fields = dict[str, Any]
Receive: TypeAlias = "Callable[[], Awaitable[MutableMapping[str, Any]]]"

DISCONNECT_LOOP_PASSES = 4
"""Passes of the event loop after which the end of a connection is known here: uvicorn reads it, closes the connection,
sends http.disconnect, and the watching task receives it."""
UNCOUNTED_BODY_BYTES = 64 << 10
"""A body up to this size is decoded without counting its values."""
MAX_VALUES = 1_000_000
"""Values in a body of more than UNCOUNTED_BODY_BYTES bytes: each may take a hundred times its own byte of memory."""
MAX_CONTAINER_LENGTH = 100_000
"""Elements of one array or map in such a body."""


class Service:
    """What all requests of one server share.

    target_versions: by namespace, the version that polls return as `target_nymph_version`.
    body_bytes: bytes in memory of all bodies that came in several pieces.
    """

    def __init__(self, limits: Limits, metrics: Metrics, target_versions: Mapping[str, str]) -> None:
        self.limits = limits
        self.metrics = metrics
        self.target_versions = target_versions
        self.polls = Polls(limits.polls)
        self.renewals = Renewals()
        self.body_bytes = 0


class RequestContext:
    """One request, as a handler receives it.

    id: the invocation that the path names, or "".
    disconnected: the client is known to have disconnected; only watched while the request is held.
    undo_unsent: undoes the operation if the answer could not be sent.
    undo_forbidden: undoes it if the caller may no longer get the answer.
    authorize: raises if the caller may not use the route.
    """

    __slots__ = (
        "_group", "_held", "_receive", "authorize", "disconnected", "fields", "id", "ns", "plane", "query", "service",
        "undo_forbidden", "undo_unsent",
    )  # fmt: skip

    def __init__(self, service: Service, plane: Plane, ns: str, id: str) -> None:
        self.service = service
        self.plane = plane
        self.ns = ns
        self.id = id
        self.fields: Fields = {}
        self.query: Mapping[str, str] = {}
        self.disconnected = False
        self.undo_unsent: Callable[[], Awaitable[object]] | None = None
        self.undo_forbidden: Callable[[], Awaitable[object]] | None = None
        self.authorize: Callable[[], object] | None = None
        self._group: TaskGroup | None = None
        self._receive: Receive | None = None
        self._held: HeldRequest | None = None

    def watch_with(self, group: TaskGroup, receive: Receive) -> None:
        """Watch for the client's disconnect, in this group, as soon as the request is held."""
        self._group = group
        self._receive = receive

    @contextmanager
    def hold(self, name: Name | None = None) -> Generator[HeldRequest]:
        """Hold the request inside the block; the disconnect of its client ends it.

        Raises:
            PlaneUnavailable: the server already holds as many requests as it may.
        """
        with self.service.polls.hold(name) as held:
            self._held = held
            if self._group is not None and self._receive is not None:
                self._group.start_soon(self._watch, self._receive)
            yield held

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.disconnected = True
        if self._held is not None:
            self._held.end()

    def recheck_access(self) -> None:
        """Check the caller's access again after a wait: its token may have been revoked meanwhile."""
        if self.authorize is not None and self._held is not None and self._held.waited:
            undo_unsent = self.undo_unsent
            self.undo_unsent = self.undo_forbidden  # if the next line raises
            self.authorize()
            self.undo_unsent = undo_unsent

    async def still_connected(self) -> bool:
        """Whether the client is still connected. Call it right before an answer that can be given only once.

        uvicorn silently drops an answer to a client that has disconnected, and sends http.disconnect one pass of the event
        loop later than it sets its own flag. So this reads the flag too.
        """
        for _ in range(DISCONNECT_LOOP_PASSES):
            await checkpoint()
        server = getattr(self._receive, "__self__", None)
        return not (self.disconnected or getattr(server, "disconnected", False))

    def seconds(self, name: str, default: float) -> float:
        """Read a field with the time to hold the request, at most the server's own limit."""
        return min(seconds(self.fields, name, default), self.service.limits.held)


class ErrorAnswer(Exception):
    """An error answer with its own status, type and headers."""

    def __init__(self, status: int, kind: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.fields: Fields = {"error": {"type": kind, "message": message}}


def presentable_error(exc: Exception) -> Exception:
    """The error to send for `exc`: a value that is nested too deep for an error sentence is the client's own mistake."""
    if isinstance(exc, RecursionError):
        return WireError("expected values that are not nested too deep to be shown in an error, got one that is")
    return exc


class ClientDisconnected(Exception):
    """The client has disconnected, so the request gets no answer."""


class Body:
    """The body of one request.

    unread: bytes that are not read yet; infinite if the request does not announce its length.
    """

    __slots__ = ("_buffered", "_limits", "_receive", "_service", "unread")

    def __init__(self, service: Service, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._service = service
        self._limits = service.limits
        self._receive = receive
        self._buffered = 0
        announced = headers.get(b"content-length", b"0")
        self.unread = math.inf if b"transfer-encoding" in headers or not announced.isdigit() else int(announced)

    async def read(self) -> bytes:
        """Read the whole body; each piece restarts the timeout.

        Raises:
            TooLarge: the body is larger than the server accepts.
            ErrorAnswer: the next piece did not come in time (status 408).
            PlaneUnavailable: the bodies of all requests together take too much memory.
            ClientDisconnected: the client disconnected.
        """
        timeout = self._limits.body_timeout
        if self._limits.body < self.unread < math.inf:
            raise self._too_large()
        if getattr(getattr(self._receive, "__self__", None), "more_body", True) is False:
            return await self._pieces(None)  # uvicorn has all of it already, and a deadline costs more than the read
        with anyio.move_on_after(timeout) as scope:
            return await self._pieces(scope)
        message = f"expected the rest of the body within {timeout:g} s, got {self._buffered} bytes of it: send it again"
        raise ErrorAnswer(408, "PlaneUnavailable", message)

    async def _pieces(self, scope: anyio.CancelScope | None) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            piece: bytes = message.get("body", b"")
            if len(body) + len(piece) > self._limits.body:
                raise self._too_large()
            if not message.get("more_body", False):
                self.unread = 0
                return bytes(body + piece) if body else piece
            if piece:
                self._count(len(piece))
                body += piece
                if scope is not None:
                    scope.deadline = anyio.current_time() + self._limits.body_timeout

    def _count(self, size: int) -> None:
        self._buffered += size
        self._service.body_bytes += size
        if self._service.body_bytes > self._limits.bodies:
            raise PlaneUnavailable(
                f"the server already reads bodies of {self._limits.bodies} bytes, its maximum: retry later"
            )

    def _too_large(self) -> TooLarge:
        return TooLarge(
            f"expected a body of at most {self._limits.body} bytes, got a larger one: send less in one request"
        )

    async def skip(self) -> None:
        """Read and discard the rest: a connection that closes earlier loses the answer for a client that still sends."""
        with anyio.move_on_after(self._limits.linger):
            while (await self._receive()).get("more_body"):
                pass

    def release(self) -> None:
        """Stop counting the body's bytes: the request is over."""
        self._service.body_bytes -= self._buffered


# Fields ---------------------------------------------------------------------------------------------------------


def read_fields(body: bytes, where: str) -> Fields:
    """Decode the fields of a body. Raises WireError, also for a body of too many values."""
    if len(body) <= UNCOUNTED_BODY_BYTES:
        return decode(body, where)
    values = 0

    def counted(found: Any) -> Any:
        nonlocal values
        values += len(found)
        if values > MAX_VALUES:
            raise ValueError(f"more than {MAX_VALUES} values")
        return found

    hooks = {"list_hook": counted, "object_hook": counted}
    lengths = {"max_array_len": MAX_CONTAINER_LENGTH, "max_map_len": MAX_CONTAINER_LENGTH}
    try:
        fields = unpackb(body, raw=False, strict_map_key=False, **hooks, **lengths)
    except READ_ERRORS as exc:
        cause = f"{type(exc).__name__}: {exc}"[:200]
        raise WireError(f"expected a msgpack map as the body of {where}, got {len(body)} bytes: {cause}") from None
    if not isinstance(fields, dict):
        raise WireError(f"expected a msgpack map as the body of {where}, got a {type(fields).__name__}")
    return fields  # pyright: ignore[reportUnknownVariableType]


def read_query(text: bytes) -> dict[str, str]:
    """Decode the fields of a query; of a repeated field, the last. Raises WireError."""
    try:
        return dict(parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50))
    except ValueError:
        raise WireError("expected a query of at most 50 fields, percent-encoded UTF-8") from None


def whole(query: Mapping[str, str], name: str, default: int) -> int:
    """Read a whole number from a query. Raises WireError."""
    text = query.get(name)
    if text is None:
        return default
    if len(text) > 20 or not text.isascii() or not text.removeprefix("-").isdecimal():
        raise WireError(f"expected `{name}` to be a whole number, got {text[:40]!r}")
    return int(text)


# Routes -------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """The route of a request. label: its path without ids and namespaces."""

    name: str
    method: str
    role: str
    label: str


def _target(name: str) -> Target:
    route = ROUTES[name]
    return Target(name, route.method, route.role, f"/v1{route.path}")


_TARGETS = {f"/v1{route.path}": _target(name) for name, route in ROUTES.items() if ":id" not in route.path}
_WITH_ID: list[tuple[str, str, Target]] = []
for _name in sorted(ROUTES, key=lambda name: -len(ROUTES[name].path)):
    if ":id" in ROUTES[_name].path:
        _before, _, _after = f"/v1{ROUTES[_name].path}".partition(":id")
        _WITH_ID.append((_before, _after, _target(_name)))
_NAMESPACES = "/v1/namespaces/"


def find(path: str) -> tuple[Target | None, str | None, str]:
    """The route, the namespace and the invocation that a path names."""
    ns = None
    target = _TARGETS.get(path)
    if target is None and path.startswith(_NAMESPACES):
        ns, _, rest = path[len(_NAMESPACES) :].partition("/")
        path = f"/v1/{rest}"
        target = _TARGETS.get(path)
    if target is not None:
        return target, ns, ""
    for before, after, with_id in _WITH_ID:
        if path.startswith(before) and path.endswith(after):
            id = path[len(before) : len(path) - len(after)]
            if id and "/" not in id:
                return with_id, ns, id
    return None, ns, ""
