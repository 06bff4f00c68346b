"""Requests and responses over a small pool of connections to one server: h11 over anyio's streams, plain or TLS.

h11 parses HTTP/1.1, and this module moves the bytes. A connection carries one request at a time. It is used again only
after a response that ended where its headers said, with nothing behind it: bytes that no request asked for would become
the answer to somebody else's next request. httpx serves proxies and transports of the caller, see `httpx_pool`: its
general machinery costs four times as much for a small request.
"""

from __future__ import annotations

import re
import select
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import anyio
import h11
from anyio.abc import SocketAttribute
from anyio.streams.tls import TLSAttribute

from ..protocol.routes import REQUEST_ID

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
    from contextlib import AbstractAsyncContextManager

    from anyio.abc import ByteStream

__all__ = [
    "CONNECT_TIMEOUT",
    "ConnectionPool",
    "Pool",
    "RequestFailed",
    "Response",
    "StreamedResponse",
    "check_request_id",
]

CONNECT_TIMEOUT = 5.0
"""Seconds for a new connection, its TLS handshake included."""
PIECE_BYTES = 256 << 10
"""Bytes of a body that are sent or received at a time. The timeout of a request starts again with each piece."""
DECRYPT_SECONDS = 0.005
"""How long bytes that have arrived on a TLS connection may take through its decryption, before the next look at it."""
MAX_HEADER_BYTES = 64 << 10
"""Bytes of a response's status line and headers, of one chunk's header, and of all trailers."""
MAX_RESPONSE_BYTES = 4 << 30
"""Bytes of a response's body: far more than any server sends, and a bound for one that never ends."""
MAX_INTERIM_RESPONSES = 16
"""Responses of status 1xx before the response itself."""

_LENIENT_LINE = re.compile(rb"(?<!\r)\n|\n[ \t]")
"""A line that ends in a bare LF, or that continues the line before it. h11 accepts both. Other parsers read such a head
differently, so a proxy may see another response in it than we do: RFC 9112, sections 2.2 and 5.2."""
_OUR_REQUEST_ID = re.compile("[0-9A-Z]{26}")


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response. headers: by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class StreamedResponse:
    """A response whose body is still arriving. next_piece: waits for more of the body, and returns None after its end."""

    status: int
    headers: Mapping[str, str]
    next_piece: Callable[[], Awaitable[bytes | None]]


class Pool(Protocol):
    """Where requests are sent. Both methods raise OSError for whatever keeps a response from arriving."""

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Response:
        """Send one request and receive its response; the request may reach the server twice.

        Args:
            method: GET or POST.
            target: Path and query.
            headers: All but host and content-length.
            body: The request's body.
            timeout: Seconds without a byte in either direction after which the request fails with TimeoutError.
        """
        ...

    def stream(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[StreamedResponse]:
        """Send one request without a body on a connection of its own; the response's body may pause for any time."""
        ...

    async def aclose(self) -> None: ...


class RequestFailed(OSError):
    """There is no connection, or the server closed it before the end of the response, or sent what is no HTTP/1.1."""


class StaleConnection(RequestFailed):
    """The server closed the connection before it sent a byte of a response, as it may do between two requests."""


class _Connection:
    """One connection, used by one request at a time."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._encrypted = stream.extra(TLSAttribute.ssl_object, None) is not None
        self._socket = stream.extra(SocketAttribute.raw_socket)
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEADER_BYTES)
        self._head = bytearray()  # the bytes received up to and including the response's headers
        self._timeout = 0.0
        self._scope = anyio.CancelScope()

    async def has_unread(self) -> bool:
        """Whether there is something to read before a request was sent: a response to nothing, or the connection's end."""
        if not self._encrypted:
            return _is_readable(self._socket.fileno())
        # Of TLS also what is in the buffers of the stream counts; what is not data, such as session tickets, does not.
        while True:
            arrived = _is_readable(self._socket.fileno())
            with anyio.move_on_after(DECRYPT_SECONDS if arrived else 0):
                try:
                    await self.stream.receive(1)
                except (anyio.EndOfStream, anyio.BrokenResourceError, OSError):
                    pass
                return True
            if not arrived:
                return False

    async def exchange(self, request: h11.Request, body: bytes, timeout: float) -> Response:
        """Send a request and receive its whole response. Raises RequestFailed, TimeoutError."""
        self._timeout = timeout
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + timeout)
        with self._scope:
            response = await self.begin(request, body)
            pieces: list[bytes] = []
            received = 0
            while (piece := await self.next_piece()) is not None:
                received += len(piece)
                if received > MAX_RESPONSE_BYTES:
                    raise RequestFailed(f"expected an answer of at most {MAX_RESPONSE_BYTES} bytes, got more")
                pieces.append(piece)
            return Response(response.status_code, _headers(response), b"".join(pieces))
        raise TimeoutError(f"no byte of an answer within {timeout:g} s")

    async def begin(self, request: h11.Request, body: bytes) -> h11.Response:
        """Send a request and receive the status and headers of its response."""
        self._head.clear()
        send_error: Exception | None = None
        try:
            await self._send(request, body)
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            send_error = exc  # the server may have sent a response that tells why, before it closed the connection
        try:
            return await self._receive_head()
        except StaleConnection as exc:
            raise exc from send_error

    async def _send(self, request: h11.Request, body: bytes) -> None:
        head = self._http.send(request) or b""
        if len(body) <= PIECE_BYTES:
            data = self._http.send(h11.Data(data=body)) or b""
            self._http.send(h11.EndOfMessage())
            await self.stream.send(head + data)
            return
        await self.stream.send(head)
        view = memoryview(body)
        for start in range(0, len(body), PIECE_BYTES):
            piece = bytes(view[start : start + PIECE_BYTES])
            await self.stream.send(self._http.send(h11.Data(data=piece)) or b"")
            self._restart_timeout()
        self._http.send(h11.EndOfMessage())

    def _restart_timeout(self) -> None:
        if self._timeout:
            self._scope.deadline = anyio.current_time() + self._timeout

    async def _receive_head(self) -> h11.Response:
        for _ in range(MAX_INTERIM_RESPONSES + 1):
            event = await self._next_event()
            unread, _ = self._http.trailing_data
            head = self._head[: len(self._head) - len(unread)]
            del self._head[: len(head)]
            if _LENIENT_LINE.search(head):
                raise RequestFailed(
                    "expected an HTTP/1.1 answer, got one with a header over several lines, or a bare LF"
                )
            if isinstance(event, h11.Response):
                self._check_framing(event)
                return event
            if not isinstance(event, h11.InformationalResponse):
                break
        raise RequestFailed(f"expected an answer after at most {MAX_INTERIM_RESPONSES} interim ones, got more")

    @staticmethod
    def _check_framing(response: h11.Response) -> None:
        """Raises RequestFailed for two statements of the body's length, of which another parser might believe the other."""
        names = {name for name, _ in response.headers}
        if b"transfer-encoding" in names and b"content-length" in names:
            raise RequestFailed("expected an HTTP/1.1 answer, got one with both Transfer-Encoding and Content-Length")

    async def next_piece(self) -> bytes | None:
        """The next piece of the response's body; None after the last."""
        event = await self._next_event()
        return event.data if isinstance(event, h11.Data) else None

    async def _next_event(self) -> object:
        ended = False
        while True:
            try:
                event = self._http.next_event()
            except h11.RemoteProtocolError as exc:
                if ended:
                    raise RequestFailed("the connection was closed in the middle of an answer") from exc
                raise RequestFailed(f"expected an HTTP/1.1 answer, got something else: {exc!s:.200}") from exc
            if event is not h11.NEED_DATA:
                return event
            data = await self._receive()
            ended = not data
            self._http.receive_data(data)

    async def _receive(self) -> bytes:
        """The next bytes, none at the end of the connection."""
        waiting = self._http.their_state is h11.SEND_RESPONSE
        try:
            data = await self.stream.receive(MAX_HEADER_BYTES if waiting else PIECE_BYTES)
        except anyio.EndOfStream:
            data = b""
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
            if waiting and not self._head:
                raise StaleConnection("the connection was closed before an answer came") from exc
            raise RequestFailed("the connection was closed in the middle of an answer") from exc
        if waiting:
            if not data and not self._head:
                raise StaleConnection("the connection was closed before an answer came")
            self._head += data
        self._restart_timeout()
        return data

    def reset(self) -> bool:
        """Prepare for the next request; False where the connection cannot carry another one."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        if self._http.trailing_data[0]:
            return False
        self._http.start_next_cycle()
        return True


class ConnectionPool:
    """Connections to one server, kept open between requests."""

    def __init__(self, host: str, port: int, limit: int | None, tls: ssl.SSLContext | None) -> None:
        """
        Args:
            host: Name or address of the server.
            port: Its port.
            limit: Most requests at a time; the others wait for their turn. None: no limit.
            tls: How to encrypt and whom to trust; None for plain HTTP.
        """
        self._host = host
        self._port = port
        self._tls = tls
        self._slots = None if limit is None else anyio.Semaphore(limit)
        self._idle: list[_Connection] = []
        self._streaming: set[_Connection] = set()
        self._closed = False
        name = f"[{host}]" if ":" in host else host
        default_port = 80 if tls is None else 443
        self._host_header = name if port == default_port else f"{name}:{port}"

    def _request(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> h11.Request:
        lines = [("host", self._host_header), *headers.items(), ("content-length", str(len(body)))]
        return h11.Request(method=method, target=target, headers=lines)

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes, timeout: float) -> Response:
        request = self._request(method, target, headers, body)
        if self._slots is None:
            return await self._send(request, headers, body, timeout)
        async with self._slots:
            return await self._send(request, headers, body, timeout)

    async def _send(self, request: h11.Request, headers: Mapping[str, str], body: bytes, timeout: float) -> Response:
        while True:
            is_new = not self._idle
            connection = await self._connect() if is_new else self._idle.pop()
            reusable = False
            try:
                if await connection.has_unread():
                    if is_new:
                        raise RequestFailed("expected a server that waits for a request, got bytes before it was sent")
                    continue
                response = await connection.exchange(request, body, timeout)
                check_request_id(headers, response.headers)
                reusable = connection.reset()
                return response
            except StaleConnection:
                if is_new:
                    raise
            finally:
                if reusable and not self._closed:
                    self._idle.append(connection)
                else:
                    await anyio.aclose_forcefully(connection.stream)

    @asynccontextmanager
    async def stream(
        self, method: str, target: str, headers: Mapping[str, str]
    ) -> AsyncGenerator[StreamedResponse, None]:
        connection = await self._connect()
        self._streaming.add(connection)
        try:
            response = await connection.begin(self._request(method, target, headers, b""), b"")
            yield StreamedResponse(response.status_code, _headers(response), connection.next_piece)
        finally:
            self._streaming.discard(connection)
            await anyio.aclose_forcefully(connection.stream)

    async def _connect(self) -> _Connection:
        if self._closed:
            raise RequestFailed("the plane was closed")
        try:
            with anyio.move_on_after(CONNECT_TIMEOUT):
                if self._tls is None:
                    return _Connection(await anyio.connect_tcp(self._host, self._port))
                return _Connection(await anyio.connect_tcp(self._host, self._port, ssl_context=self._tls))
        except OSError as exc:  # anyio gives the reason as its cause
            raise RequestFailed(f"no connection: {exc.__cause__ or exc}") from exc
        except (anyio.EndOfStream, anyio.BrokenResourceError) as exc:
            raise RequestFailed("no connection: the server closed it during the TLS handshake") from exc
        raise RequestFailed(f"no connection within {CONNECT_TIMEOUT:g} s")

    async def aclose(self) -> None:
        self._closed = True
        for connection in [*self._idle, *self._streaming]:
            await anyio.aclose_forcefully(connection.stream)
        self._idle.clear()


def _headers(response: h11.Response) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}


def _is_readable(fd: int) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([fd], [], [], 0)[0])
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(0))


def check_request_id(sent: Mapping[str, str], received: Mapping[str, str]) -> None:
    """Raises RequestFailed for a response with the id of another request; the ids of proxies do not look like ours."""
    expected = sent.get(REQUEST_ID)
    got = received.get(REQUEST_ID)
    if expected is not None and got is not None and got != expected and _OUR_REQUEST_ID.fullmatch(got):
        raise RequestFailed(f"expected the answer to request {expected}, got that to request {got}")
