"""One bounded attempt at a request: connections, headers, and what an answer that is none means.

Two pools: one for what is answered at once, one for what the far side holds. Requests of the first are cancelled by
nothing but the client's end: httpx may lose a place in its pool when a request is cancelled while it connects
(encode/httpx 1461), so who leaves early leaves the request to run out by itself. The second has as many places as it takes.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import quote, urlencode, urlsplit

import anyio
import httpx

from ...errors import DispatchError, LakeshoreError, PlaneUnavailable, WireError
from ...ids import new_id
from ..protocol.errors import TooLarge, decode_error
from ..protocol.fields import decode, encode
from ..protocol.routes import CONTENT_TYPE, REQUEST_ID, ROUTES
from .pool import CONNECT_S, Answer, Broken, Connections, HttpxPool, Pool, proxied

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping

T = TypeVar("T")

__all__ = ["Client", "MissingRoute", "reading", "text_of"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

ANSWER_S, LEAST_ANSWER_S = 60.0, 5.0
"""Seconds without a byte after which an answer is given up, beyond those that it may be held; and for who has less
patience than that, but not less than a busy server may need."""
CONNECTIONS = 4
"""Connections for what is answered at once: more cost more than they bring."""
HELD_ANSWER_S = 15.0
"""The same for what is held: it is answered with nothing when its time is over, and cannot be late by much."""
_LATER = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses of what may go better later, whoever says it. So may any other 5xx that is none of the server's own errors."""
_OURS = frozenset({"DispatchError", "InvocationNotFound", "NotAuthorized", "Refused", "ValueError", "WireError"})
_UNKNOWN = frozenset({"await", "stream"})
"""Routes of which a 404 of any kind may mean that an invocation is unknown."""
GOODBYE_S = 3.0
"""Seconds that requests have to end by themselves when the client closes."""


class MissingRoute(DispatchError):
    """The far side has no such route: a server of the function protocol without our additions, or no such server at all."""

    def __init__(self, said: str, stranger: str | None) -> None:
        super().__init__(said)
        self.stranger = stranger
        """What to say of the answer where nothing else has answered as a control plane does."""

    def nothing(self) -> DispatchError:
        """The error of a route that every control plane has."""
        return DispatchError(self.stranger or f"{self}: is that the URL of a control plane? Each has this route")

    def lacking(self, url: str, what: str) -> DispatchError:
        """The error where nothing else does for it."""
        said = f"the server at {url} cannot {what}: {self}; it is of an older kind, or its URL is another"
        return DispatchError(said if self.stranger is None else f"{self.stranger}; one of an older kind cannot {what}")


class Client:
    """The requests of one event loop to one control plane."""

    def __init__(
        self,
        url: str,
        token: str | None,
        namespace: str | None,
        transport: httpx.AsyncBaseTransport | None,
        patience: Callable[[], float],
    ) -> None:
        self._url, self._parts, self._patience = url, urlsplit(url), patience
        below = "/v1" if namespace is None else f"/v1/namespaces/{quote(namespace, safe='')}"
        self._path = self._parts.path.rstrip("/") + below
        self._headers = {"content-type": CONTENT_TYPE, "accept": CONTENT_TYPE}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._transport = transport
        self._quick: Pool | None = None
        self._held: Pool | None = None
        self._streams: HttpxPool | None = None
        self._scopes: dict[anyio.CancelScope, tuple[bool, object]] = {}  # of the requests under way: held, tag
        self._idle: anyio.Event | None = None
        self._hurried = self.closed = False
        self._answered: set[str] = set()  # routes that have, and so exist
        self.requests = 0
        """How many requests were begun."""

    def open(self) -> None:
        self._quick, self._held = self._pool(CONNECTIONS), self._pool(None)

    def _pool(self, most: int | None) -> Pool:
        scheme, host = self._parts.scheme, self._parts.hostname or ""
        if scheme == "http" and self._transport is None and not proxied(host):
            return Connections(host, self._parts.port or 80, most)
        return self._httpx(most)

    def _httpx(self, most: int | None) -> HttpxPool:
        return HttpxPool(f"{self._parts.scheme}://{self._parts.netloc}", most, self._transport)

    def hurry(self) -> None:
        """From now on no request takes longer than GOODBYE_S."""
        self._hurried = True
        for scope in self._scopes:
            scope.deadline = anyio.current_time() + GOODBYE_S

    async def close(self) -> None:
        """Let what is under way end for a moment, cut the rest off, and close the connections."""
        self.closed = True
        with anyio.move_on_after(GOODBYE_S):
            while any(not held for held, _ in self._scopes.values()):
                await self._next_end()
        for scope in list(self._scopes):
            scope.cancel()
        while self._scopes:
            await self._next_end()
        for pool in (self._quick, self._held, self._streams):
            if pool is not None:
                await pool.aclose()

    async def _next_end(self) -> None:
        """Wait for the end of a request."""
        self._idle = self._idle or anyio.Event()
        await self._idle.wait()

    # Requests

    async def call(
        self,
        name: str,
        fields: Mapping[str, Any] | None = None,
        *,
        id: str = "",
        query: Mapping[str, str] | None = None,
        held: float = 0.0,
        tag: object = None,
        answer: float | None = None,
    ) -> dict[str, Any]:
        """One request of the route `name`, and its answer's fields.

        held: seconds that the far side may hold it; answer: seconds without a byte beyond those after which it is given
        up, by default as long as the plane's patience lets it; tag: what `cut` may know it by. Raises PlaneUnavailable
        when no answer came or a later one may be better, MissingRoute, and what the answer's error means. Not to be
        cancelled: call it through `run_to_end`.
        """
        route, request_id = ROUTES[name], new_id()
        where = f"{route.method} {route.path} at {self._url}, request {request_id}"
        if self.closed or self._quick is None or self._held is None:
            raise PlaneUnavailable(f"the plane was closed before {where}")
        if answer is None:
            answer = HELD_ANSWER_S if held > 0 else min(ANSWER_S, max(LEAST_ANSWER_S, self._patience()))
        target = self._path + route.path.replace(":id", quote(id, safe=""))
        if query:
            target += f"?{urlencode(query)}"
        body = b"" if fields is None else encode(fields)
        self.requests += 1
        try:
            with self._under_way(held > 0, tag):
                pool, headers = self._held if held > 0 else self._quick, self._headers | {REQUEST_ID: request_id}
                got = await pool.send(route.method, target, headers, body, held + answer)
                return self._read(name, got, where, id)
        except LakeshoreError:  # which may be an OSError too
            raise
        except OSError as exc:
            raise PlaneUnavailable(f"no answer to {where}: {_said(exc)}") from None  # whose causes say no more
        raise PlaneUnavailable(f"{where} was broken off: nobody waits for it any more, or the plane was closed")

    def cut(self, tag: object) -> None:
        """Break held requests off that have this tag: their callers are told that the plane is unavailable."""
        for scope, (held, its) in list(self._scopes.items()):
            if held and its is tag:
                scope.cancel()

    async def pause(self, seconds: float, tag: object) -> None:
        """Hold nothing for `seconds`, as long as a request might be held; it ends as such a request does."""
        with self._under_way(True, tag):
            await anyio.sleep(seconds)

    @contextmanager
    def _under_way(self, held: bool, tag: object) -> Generator[None]:
        scope = anyio.CancelScope(deadline=anyio.current_time() + GOODBYE_S if self._hurried else math.inf)
        self._scopes[scope] = held, tag
        try:
            with scope:
                yield
        finally:
            del self._scopes[scope]
            if self._idle is not None:
                self._idle.set()
                self._idle = None

    def _read(self, name: str, response: Answer, where: str, id: str) -> dict[str, Any]:
        status = response.status
        try:
            fields = decode(response.body, f"the answer to {where}")
        except WireError as exc:
            if status < 400:
                raise DispatchError(self._stranger(response, where)) from exc
            fields = {}
        error = fields.get("error")
        if status == 204:
            raise DispatchError(f"expected an answer with a body to {where}, got status 204, which has none")
        if 200 <= status < 300:
            self._answered.add(name)
            return fields
        if status < 400:
            raise DispatchError(
                f"{where} was redirected to {response.headers.get('location')!r:.200}, which is not followed: a token "
                "goes to no other address than the one it was given for; use the URL of the control plane itself"
            )
        if status in (404, 405) and _field(error, "type") != "InvocationNotFound":
            if name in self._answered and name not in _UNKNOWN and not isinstance(error, dict):
                raise PlaneUnavailable(f"a {status} that is not the server's own, which has the route: {where}")
            known = bool(self._answered) or isinstance(error, dict)
            raise MissingRoute(f"no route {where}", None if known else self._stranger(response, where))
        if status == 413:
            raise TooLarge(f"{_field(error, 'message') or 'the body is larger than the server takes'} ({where})")
        kind = _field(error, "type")
        if status in _LATER or (status >= 500 and kind not in _OURS):
            said = _field(error, "message") or f"status {status}"
            raise PlaneUnavailable(f"{said} ({where})")
        raise decode_error(error, status, where, id)

    def _stranger(self, response: Answer, where: str) -> str:
        """What to say of an answer that no control plane gives."""
        kind, text = response.headers.get("content-type", "no content type"), response.body[:60].decode("latin-1")
        return (
            f"expected a control plane at {self._url}, got an answer of status {response.status} ({kind}) that begins with "
            f"{text!r}: no control plane is there, check the URL ({where})"
        )

    async def stream(self, id: str, since: int) -> AsyncGenerator[bytes, None]:
        """The bytes of a journal after `since`, as they come; none first, once the far side has begun to answer.

        Raises as `call` does; its end may be a drop.
        """
        route, request_id = ROUTES["stream"], new_id()
        where = f"GET {route.path} at {self._url}, request {request_id}"
        if self.closed:
            raise PlaneUnavailable(f"the plane was closed before {where}")
        self._streams = self._streams or self._httpx(None)
        url = f"{self._parts.scheme}://{self._parts.netloc}{self._path}{route.path.replace(':id', quote(id, safe=''))}"
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        headers = self._headers | {REQUEST_ID: request_id}
        self.requests += 1
        try:
            asked = self._streams.client.stream(
                "GET", url, params={"since": since}, headers=headers, timeout=timeout, follow_redirects=False
            )
            async with asked as got:
                if got.status_code != 200:
                    self._read("stream", Answer(got.status_code, got.headers, await got.aread()), where, id)
                yield b""
                async for chunk in got.aiter_raw():
                    yield chunk
        except LakeshoreError:  # which may be a RuntimeError too
            raise
        except (httpx.TransportError, httpx.StreamError, RuntimeError, OSError) as exc:
            raise PlaneUnavailable(f"the stream of {where} broke off: {type(exc).__name__}: {exc}") from exc


_SHAPE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


@contextmanager
def reading(what: str) -> Generator[None]:
    """Inside, an answer is taken apart; that it is of another shape is an error of the far side."""
    try:
        yield
    except _SHAPE as exc:
        if isinstance(exc, LakeshoreError):
            raise
        raise DispatchError(f"expected an answer of the protocol to {what}, got another: {exc!r:.200}") from exc


def text_of(id: object) -> str:
    """The id in an answer. To be used within `reading`."""
    if not isinstance(id, str):
        raise TypeError(f"expected an invocation's id to be text, got a {type(id).__name__}")
    return id


def _said(exc: OSError) -> str:
    kind = "" if isinstance(exc, Broken) else f"{type(exc).__name__}: "
    return f"{kind}{exc}"


def _field(error: object, name: str) -> str:
    return str(cast("dict[str, Any]", error).get(name) or "") if isinstance(error, dict) else ""
