"""What a handler has of a request: who asked, its fields, its turn; its body; and where its path leads."""

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
    from .polls import Name, Turn

__all__ = [
    "Body", "Call", "ErrorAnswer", "Left", "Receive", "Service", "Target", "find", "read_fields", "read_query", "told",
    "whole",
]  # fmt: skip

Fields = dict[str, Any]
Receive: TypeAlias = "Callable[[], Awaitable[MutableMapping[str, Any]]]"

PASSES = 4
"""Of the event loop, until the end of a connection that has come is known here: read, closed, told, heard."""
SIMPLE = 64 << 10
MOST_VALUES = 1_000_000
"""Values in a body of more than SIMPLE bytes: each may take a hundred times its own byte of memory."""
MOST_IN_ONE = 100_000


class Service:
    """What all requests of one server share. reading: the bytes of all bodies that came in several pieces."""

    def __init__(self, limits: Limits, metrics: Metrics, target_versions: Mapping[str, str]) -> None:
        self.limits, self.metrics, self.target_versions = limits, metrics, target_versions
        self.polls, self.renewals, self.reading = Polls(limits.polls), Renewals(), 0


class Call:
    """One request, as a handler sees it. id: of the invocation that the path names.

    gone: its client has left, as far as is known; only looked for while a turn is taken. unsent: what is to be done when
    the answer could not be sent. taken: what is to be done when the caller may not have the answer any more. allowed:
    raises when the caller may not ask.
    """

    __slots__ = (
        "_group", "_receive", "_turn", "allowed", "fields", "gone", "id", "ns", "plane", "query", "service", "taken",
        "unsent",
    )  # fmt: skip

    def __init__(self, service: Service, plane: Plane, ns: str, id: str) -> None:
        self.service, self.plane, self.ns, self.id = service, plane, ns, id
        self.fields: Fields = {}
        self.query: Mapping[str, str] = {}
        self.gone = False
        self.unsent: Callable[[], Awaitable[object]] | None = None
        self.taken: Callable[[], Awaitable[object]] | None = None
        self.allowed: Callable[[], object] | None = None
        self._group: TaskGroup | None = None
        self._receive: Receive | None = None
        self._turn: Turn | None = None

    def watched_by(self, group: TaskGroup, receive: Receive) -> None:
        """Where to watch for the client's leaving, should the request be held."""
        self._group, self._receive = group, receive

    @contextmanager
    def turn(self, name: Name | None = None) -> Generator[Turn]:
        """A turn among the held requests, ended when the client leaves. Raises PlaneUnavailable where all are taken."""
        with self.service.polls.turn(name) as turn:
            self._turn = turn
            if self._group is not None and self._receive is not None:
                self._group.start_soon(self._watch, self._receive)
            yield turn

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._turn is not None:
            self._turn.end()

    def check_again(self) -> None:
        """Ask anew who asks, where that was long ago: a token may be revoked while its request is held."""
        if self.allowed is not None and self._turn is not None and self._turn.waited:
            unsent, self.unsent = self.unsent, self.taken
            self.allowed()
            self.unsent = unsent

    async def still_there(self) -> bool:
        """Whether the client is there to hear what may be said once only; to be asked right before it is said.

        uvicorn drops what is sent to a client that has gone, without a word; its word of the going comes one pass of the
        event loop later than its own flag, which is looked at for that.
        """
        for _ in range(PASSES):
            await checkpoint()
        server = getattr(self._receive, "__self__", None)
        return not (self.gone or getattr(server, "disconnected", False))

    def seconds(self, name: str, default: float) -> float:
        """A field that says how long to hold the request."""
        return min(seconds(self.fields, name, default), self.service.limits.held)


class ErrorAnswer(Exception):
    """What to answer in place of what was asked for."""

    def __init__(self, status: int, kind: str, message: str, *headers: tuple[bytes, bytes]) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers
        self.fields: Fields = {"error": {"type": kind, "message": message}}


def told(exc: Exception) -> Exception:
    """What a client is told of `exc`: what is nested too deep to be shown in a sentence is its own fault."""
    return (
        WireError("expected no value nested so deep that it cannot be shown")
        if isinstance(exc, RecursionError)
        else exc
    )


class Left(Exception):
    """The client has gone: there is nobody to answer."""


class Body:
    """The body of one request, and how much of it is not read yet: bytes, infinite where they are not announced."""

    __slots__ = ("_limits", "_receive", "_service", "_taken", "unread")

    def __init__(self, service: Service, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        self._service, self._limits, self._receive, self._taken = service, service.limits, receive, 0
        announced = headers.get(b"content-length", b"0")
        self.unread = math.inf if b"transfer-encoding" in headers or not announced.isdigit() else int(announced)

    async def read(self) -> bytes:
        """All of it; the time for it runs anew with each piece. Raises TooLarge, ErrorAnswer, Left, PlaneUnavailable."""
        most, timeout = self._limits.body, self._limits.body_timeout
        if most < self.unread < math.inf:
            raise self._too_large()
        if getattr(getattr(self._receive, "__self__", None), "more_body", True) is False:
            return await self._pieces(None)  # uvicorn has all of it already: a deadline costs more than the reading
        with anyio.move_on_after(timeout) as scope:
            return await self._pieces(scope)
        said = f"expected the rest of the body within {timeout:g} s, got {self._taken} bytes of it"
        raise ErrorAnswer(408, "PlaneUnavailable", f"{said}: send it again")

    async def _pieces(self, scope: anyio.CancelScope | None) -> bytes:
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Left
            piece: bytes = message.get("body", b"")
            if len(body) + len(piece) > self._limits.body:
                raise self._too_large()
            if not message.get("more_body", False):
                self.unread = 0
                return bytes(body + piece) if body else piece
            if piece:
                self._take(len(piece))
                body += piece
                if scope is not None:
                    scope.deadline = anyio.current_time() + self._limits.body_timeout

    def _take(self, size: int) -> None:
        self._taken, self._service.reading = self._taken + size, self._service.reading + size
        if self._service.reading > self._limits.bodies:
            raise PlaneUnavailable(
                f"the server is reading {self._limits.bodies} bytes, the most that it may: try later"
            )

    def _too_large(self) -> TooLarge:
        return TooLarge(f"expected a body of at most {self._limits.body} bytes, got a larger one: send less at once")

    async def skip(self) -> None:
        """Read what is left for nobody: who closes before that takes the answer away from a client that still sends."""
        with anyio.move_on_after(self._limits.linger):
            while (await self._receive()).get("more_body"):
                pass

    def done(self) -> None:
        """Its bytes are needed no more."""
        self._service.reading -= self._taken


# What it says ---------------------------------------------------------------------------------------------------------


def read_fields(body: bytes, where: str) -> Fields:
    """The fields of a body. Raises WireError, also for one of more values than anybody has to say."""
    if len(body) <= SIMPLE:
        return decode(body, where)
    values = 0

    def counted(found: Any) -> Any:
        nonlocal values
        values += len(found)
        if values > MOST_VALUES:
            raise ValueError(f"more than {MOST_VALUES} values")
        return found

    hooks = {"list_hook": counted, "object_hook": counted}
    lengths = {"max_array_len": MOST_IN_ONE, "max_map_len": MOST_IN_ONE}
    try:
        fields = unpackb(body, raw=False, strict_map_key=False, **hooks, **lengths)
    except READ_ERRORS as exc:
        said = f"{type(exc).__name__}: {exc}"[:200]
        raise WireError(f"expected a msgpack map as the body of {where}, got {len(body)} bytes: {said}") from None
    if not isinstance(fields, dict):
        raise WireError(f"expected a msgpack map as the body of {where}, got a {type(fields).__name__}")
    return fields  # pyright: ignore[reportUnknownVariableType]


def read_query(text: bytes) -> dict[str, str]:
    """The fields of a query; of those that are there twice the last. Raises WireError."""
    try:
        return dict(parse_qsl(text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=50))
    except ValueError:
        raise WireError("expected a query of at most 50 fields, percent-encoded UTF-8") from None


def whole(query: Mapping[str, str], name: str, default: int) -> int:
    """A field of a query that is a whole number. Raises WireError."""
    text = query.get(name)
    if text is None:
        return default
    if len(text) > 20 or not text.isascii() or not text.removeprefix("-").isdecimal():
        raise WireError(f"expected `{name}` to be a whole number, got {text[:40]!r}")
    return int(text)


# Where a path leads -------------------------------------------------------------------------------------------------


class Target(NamedTuple):
    """A route, as requests are checked against it. label: its path without ids and namespaces."""

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
    target, ns = _TARGETS.get(path), None
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
