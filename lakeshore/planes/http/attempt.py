"""One attempt at a request: route, headers and timeout, and what its response means: fields, or an error of ours.

An attempt is not repeated here: `planes.engine` retries what raised PlaneUnavailable.

There are two pools of connections. Requests that the server answers at once share a few connections; requests that it
holds (long polls) get as many as they need. A request of the first kind is never cancelled when its caller is: it runs to
its end in a task of its own, since httpx may lose a connection otherwise (see `httpx_pool`), and since what the server did
must not stay unknown. Requests of the second kind are cancelled with `cancel_held`.
"""

from __future__ import annotations

import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlencode, urlsplit

import anyio

from ...errors import DispatchError, LakeshoreError, PlaneUnavailable, WireError
from ...ids import new_id
from ..protocol.errors import TooLarge, decode_error
from ..protocol.fields import decode, encode
from ..protocol.routes import CONTENT_TYPE, REQUEST_ID, ROUTES
from .address import uses_proxy
from .pool import ConnectionPool, RequestFailed, Response

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Generator, Mapping

    import httpx

    from .pool import Pool

__all__ = ["HttpClient", "MissingRoute", "decoding", "invocation_id"]

MAX_CONNECTIONS = 4
"""Connections for requests that are answered at once: more cost more than they bring."""
ANSWER_TIMEOUT = 60.0
"""Seconds without a byte after which a request fails; less for a plane whose patience is shorter."""
MIN_ANSWER_TIMEOUT = 5.0
"""The least of it, for any patience: a busy server may need as long."""
HELD_ANSWER_TIMEOUT = 15.0
"""The same for a request that the server holds, beyond the time that it may hold it."""
CLOSE_TIMEOUT = 3.0
"""Seconds in which requests may still end by themselves when the client closes."""

_RETRYABLE = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses after which a retry makes sense, whoever sent them. So does any other 5xx without one of the types below."""
_FINAL_TYPES = frozenset({"DispatchError", "InvocationNotFound", "NotAuthorized", "Refused", "ValueError", "WireError"})
"""Types of errors that the control plane itself raised: a retry gets the same."""
_ROUTES_OF_ONE = frozenset({"await", "stream"})
"""Routes of one invocation: a 404 of any kind may mean that the invocation is unknown."""
_MALFORMED = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""What code raises that takes an answer of another shape apart."""


class MissingRoute(DispatchError):
    """The server has no such route: it speaks the function protocol without our additions, or is no control plane."""

    def __init__(self, message: str, wrong_address: str | None) -> None:
        super().__init__(message)
        self.wrong_address = wrong_address
        """The sentence for a URL without a control plane; None where the server has answered as one before."""

    def of_every_server(self) -> DispatchError:
        """The error where the route is one that every control plane has."""
        return DispatchError(self.wrong_address or f"{self}: is that the URL of a control plane? Each has this route")

    def without_fallback(self, url: str, what: str) -> DispatchError:
        """The error where no other route does the same."""
        if self.wrong_address is not None:
            return DispatchError(f"{self.wrong_address}; one of an older kind cannot {what}")
        return DispatchError(
            f"the server at {url} cannot {what}: {self}; it is of an older kind, or its URL is another"
        )


@dataclass(frozen=True, slots=True)
class _Running:
    """A request under way. held: the server may hold it. tag: the operation that it belongs to."""

    held: bool
    tag: object


class HttpClient:
    """The requests of one event loop to one control plane."""

    def __init__(
        self,
        url: str,
        token: str | None,
        namespace: str | None,
        transport: httpx.AsyncBaseTransport | None,
        patience: Callable[[], float],
    ) -> None:
        """
        Args:
            url: Where the server is.
            token: The bearer token.
            namespace: Whose invocations; None for those of the token.
            transport: What sends the requests in place of our own connections.
            patience: Returns the seconds for which the plane's callers wait for the server.
        """
        self._url = url
        self._parts = urlsplit(url)
        self._patience = patience
        below = "/v1" if namespace is None else f"/v1/namespaces/{quote(namespace, safe='')}"
        self._path = self._parts.path.rstrip("/") + below
        self._headers = {"content-type": CONTENT_TYPE, "accept": CONTENT_TYPE}
        if token is not None:
            self._headers["authorization"] = f"Bearer {token}"
        self._transport = transport
        self._quick_pool: Pool | None = None
        self._held_pool: Pool | None = None
        self._running: dict[anyio.CancelScope, _Running] = {}
        self._ended: anyio.Event | None = None
        self._closing = False
        self.closed = False
        self._known_routes: set[str] = set()
        """Routes that have answered, and so exist."""
        self.requests = 0
        """How many requests were begun."""

    def open(self) -> None:
        scheme = self._parts.scheme
        host = self._parts.hostname or ""
        if self._transport is None and not uses_proxy(scheme, host):
            tls = None
            if scheme == "https":
                from .httpx_pool import tls_context

                tls = tls_context()
            port = self._parts.port or (80 if tls is None else 443)
            self._quick_pool = ConnectionPool(host, port, MAX_CONNECTIONS, tls)
            self._held_pool = ConnectionPool(host, port, None, tls)
        else:
            from .httpx_pool import HttpxPool

            base = f"{scheme}://{self._parts.netloc}"
            self._quick_pool = HttpxPool(base, MAX_CONNECTIONS, self._transport)
            self._held_pool = HttpxPool(base, None, self._transport)

    def hurry(self) -> None:
        """From now on no request takes longer than CLOSE_TIMEOUT."""
        self._closing = True
        for scope in self._running:
            scope.deadline = anyio.current_time() + CLOSE_TIMEOUT

    async def close(self) -> None:
        """Wait a moment for the requests under way, cancel the others, and close the connections."""
        self.closed = True
        with anyio.move_on_after(CLOSE_TIMEOUT):
            while any(not request.held for request in self._running.values()):
                await self._next_end()
        for scope in list(self._running):
            scope.cancel()
        while self._running:
            await self._next_end()
        for pool in (self._quick_pool, self._held_pool):
            if pool is not None:
                await pool.aclose()

    async def _next_end(self) -> None:
        """Wait for the end of a request."""
        if self._ended is None:
            self._ended = anyio.Event()
        await self._ended.wait()

    # Requests

    async def call(
        self,
        name: str,
        fields: Mapping[str, Any] | None = None,
        *,
        id: str = "",
        query: Mapping[str, str] | None = None,
        hold: float = 0.0,
        tag: object = None,
        answer_timeout: float | None = None,
    ) -> dict[str, Any]:
        """Send one request and return the fields of its answer.

        Not to be cancelled: call it through `run_to_end`.

        Args:
            name: Of the route.
            fields: Of the request's body; None for no body.
            id: The invocation that the path names.
            query: The query of the URL.
            hold: Seconds for which the server may hold the request.
            tag: What `cancel_held` finds the request by.
            answer_timeout: Seconds without a byte, beyond `hold`, after which the request fails; the default depends on
                the plane's patience.

        Raises:
            PlaneUnavailable: No answer came, or a retry may get a better one.
            MissingRoute: The server has no such route.
            DispatchError: Or another error that the answer carries.
        """
        route = ROUTES[name]
        request_id = new_id()
        where = f"{route.method} {route.path} at {self._url}, request {request_id}"
        pool = self._held_pool if hold > 0 else self._quick_pool
        if self.closed or pool is None:
            raise PlaneUnavailable(f"the plane was closed before {where}")
        if answer_timeout is not None:
            timeout = hold + answer_timeout
        elif hold > 0:
            timeout = hold + HELD_ANSWER_TIMEOUT
        else:
            timeout = min(ANSWER_TIMEOUT, max(MIN_ANSWER_TIMEOUT, self._patience()))
        target = self._path + route.path
        if id:
            target = target.replace(":id", quote(id, safe=""))
        if query:
            target += f"?{urlencode(query)}"
        headers = self._headers | {REQUEST_ID: request_id}
        body = b"" if fields is None else encode(fields)
        self.requests += 1
        try:
            with self._under_way(hold > 0, tag):
                response = await pool.send(route.method, target, headers, body, timeout)
                return self._decode(name, response, where, id)
        except LakeshoreError:  # PlaneUnavailable is an OSError too
            raise
        except OSError as exc:
            raise PlaneUnavailable(f"no answer to {where}: {_reason(exc)}") from None  # its causes add nothing
        raise PlaneUnavailable(f"{where} was cancelled: its caller has left, or the plane was closed")

    def cancel_held(self, tag: object) -> None:
        """Cancel the held requests with this tag: their callers get PlaneUnavailable."""
        for scope, request in list(self._running.items()):
            if request.held and request.tag is tag:
                scope.cancel()

    async def pause(self, seconds: float, tag: object) -> None:
        """Sleep in place of a held request; it ends as such a request does."""
        with self._under_way(True, tag):
            await anyio.sleep(seconds)

    @contextmanager
    def _under_way(self, held: bool, tag: object) -> Generator[None]:
        scope = anyio.CancelScope(deadline=anyio.current_time() + CLOSE_TIMEOUT if self._closing else math.inf)
        self._running[scope] = _Running(held, tag)
        try:
            with scope:
                yield
        finally:
            del self._running[scope]
            if self._ended is not None:
                self._ended.set()
                self._ended = None

    async def stream(self, id: str, since: int) -> AsyncGenerator[bytes, None]:
        """The bytes of a journal after `since`, as they arrive; the first piece is empty and comes with the headers.

        The body may end before the journal does. Raises as `call` does.
        """
        route = ROUTES["stream"]
        request_id = new_id()
        where = f"GET {route.path} at {self._url}, request {request_id}"
        pool = self._held_pool
        if self.closed or pool is None:
            raise PlaneUnavailable(f"the plane was closed before {where}")
        target = f"{self._path}{route.path.replace(':id', quote(id, safe=''))}?since={since}"
        self.requests += 1
        try:
            async with pool.stream("GET", target, self._headers | {REQUEST_ID: request_id}) as response:
                if response.status != 200:
                    body = bytearray()
                    while (piece := await response.next_piece()) is not None:
                        body += piece
                    self._decode("stream", Response(response.status, response.headers, bytes(body)), where, id)
                yield b""
                while (piece := await response.next_piece()) is not None:
                    yield piece
        except LakeshoreError:
            raise
        except OSError as exc:
            raise PlaneUnavailable(f"the stream of {where} was cut off: {_reason(exc)}") from exc

    # Responses

    def _decode(self, name: str, response: Response, where: str, id: str) -> dict[str, Any]:
        """The fields of a response, or the exception that it means."""
        status = response.status
        try:
            fields = decode(response.body, f"the answer to {where}")
        except WireError as exc:
            if status < 400:
                raise DispatchError(self._wrong_address(response, where)) from exc
            fields = {}
        if status == 204:
            raise DispatchError(f"expected an answer with a body to {where}, got status 204, which has none")
        if 200 <= status < 300:
            self._known_routes.add(name)
            return fields
        if status < 400:
            raise DispatchError(
                f"{where} was redirected to {response.headers.get('location')!r:.200}, which is not followed: a token "
                "goes to no other address than the one it was given for; use the URL of the control plane itself"
            )
        error = fields.get("error")
        kind = _error_text(error, "type")
        if status in (404, 405) and kind != "InvocationNotFound":
            is_ours = isinstance(error, dict)
            if name in self._known_routes and name not in _ROUTES_OF_ONE and not is_ours:
                raise PlaneUnavailable(f"a {status} that is not the server's own, which has the route: {where}")
            is_known = is_ours or bool(self._known_routes)
            raise MissingRoute(f"no route {where}", None if is_known else self._wrong_address(response, where))
        if status == 413:
            raise TooLarge(f"{_error_text(error, 'message') or 'the body is larger than the server takes'} ({where})")
        if status in _RETRYABLE or (status >= 500 and kind not in _FINAL_TYPES):
            raise PlaneUnavailable(f"{_error_text(error, 'message') or f'status {status}'} ({where})")
        raise decode_error(error, status, where, id)

    def _wrong_address(self, response: Response, where: str) -> str:
        """The sentence for a response that no control plane sends."""
        kind = response.headers.get("content-type", "no content type")
        text = response.body[:60].decode("latin-1")
        return (
            f"expected a control plane at {self._url}, got an answer of status {response.status} ({kind}) that begins with "
            f"{text!r}: no control plane is there, check the URL ({where})"
        )


def _error_text(error: object, name: str) -> str:
    return str(cast("dict[str, Any]", error).get(name) or "") if isinstance(error, dict) else ""


def _reason(exc: OSError) -> str:
    return str(exc) if isinstance(exc, RequestFailed) else f"{type(exc).__name__}: {exc}"


@contextmanager
def decoding(what: str) -> Generator[None]:
    """Turns what goes wrong inside, where an answer is decoded, into a DispatchError: the server sent another shape."""
    try:
        yield
    except _MALFORMED as exc:
        if isinstance(exc, LakeshoreError):
            raise
        raise DispatchError(f"expected an answer of the protocol to {what}, got another: {exc!r:.200}") from exc


def invocation_id(value: object) -> str:
    """An id in an answer. To be used within `decoding`."""
    if not isinstance(value, str):
        raise TypeError(f"expected an invocation's id to be text, got a {type(value).__name__}")
    return value
