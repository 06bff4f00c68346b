"""One connection of a client: its bounds, and the requests that are rejected before they reach the application.

uvicorn has no deadline for the headers of a request and no bound on their size, so a client with many slow connections
could exhaust a server. It also keeps every request that arrives behind an unanswered one. This module bounds all of that,
and counts connections.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..errors import PlaneUnavailable, WireError
from ..planes.protocol.errors import encode_error
from ..planes.protocol.fields import encode
from ..planes.protocol.routes import CONTENT_TYPE

__all__ = ["BOUNDS", "Bounds", "Connection"]


class Bounds(NamedTuple):
    """The bounds of connections."""

    connections: int = 16_384
    headers_s: float = 20.0
    """Seconds from the first byte of a request, or from the start of the connection, until its headers are complete."""
    headers_bytes: int = 64 << 10
    """Bytes that do not belong to a body: headers, trailers, the sizes of chunks."""
    ahead: int = 16
    """Requests that a client may send on one connection behind an unanswered one."""


BOUNDS = Bounds()


class Connection(HttpToolsProtocol):
    """One connection. An incomplete request can neither keep it open for long nor fill the memory."""

    def __init__(self, bounds: Bounds, **wanted: Any) -> None:
        super().__init__(**wanted)
        self._bounds = bounds
        self._deadline: Any = None
        self._in_headers = False
        self._bare = 0  # bytes since the last byte of a body, or since headers were complete
        self._running: Any = None  # the request that is being answered; `cycle` is the latest one
        self._crowded = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections:
            message = f"the server already has {self._bounds.connections} connections, its maximum: retry later"
            self._refuse(503, PlaneUnavailable(message))
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bare += len(data)
        super().data_received(data)
        if self._in_headers or self._answered():  # also while an unwanted body still arrives
            self._start_deadline()
        elif self._deadline is not None:
            self._stop_deadline()
        if self._bare > self._bounds.headers_bytes:
            self._refuse(431, WireError(f"expected headers of at most {self._bounds.headers_bytes} bytes, got more"))

    def on_message_begin(self) -> None:
        self._crowded = len(self.pipeline) >= self._bounds.ahead
        if self._crowded:
            raise ValueError("ends the parsing, also of bytes that have arrived: see send_400_response")
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        answered = self._answered()
        super().on_headers_complete()  # raises for a malformed path
        if answered:
            self._running = self.cycle
        self._in_headers = False
        self._bare = 0

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # super takes it out now
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # super resumes reading although requests are waiting

    def on_body(self, body: bytes) -> None:
        self._bare = 0
        super().on_body(body)

    def _leave(self) -> None:
        """Mark the request that is being answered as disconnected; uvicorn marks only the latest one."""
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def _answered(self) -> bool:
        cycle: Any = self.cycle  # None before the first request
        return cycle is None or bool(cycle.response_complete)

    def _start_deadline(self) -> None:
        if self._deadline is None:
            self._deadline = self.loop.call_later(self._bounds.headers_s, self._too_slow)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # the missing bytes may be unread because an answer blocks reading
            self._start_deadline()
        elif self._bare == 0 and not self._in_headers:
            self.transport.close()
        else:
            self._refuse(408, WireError(f"expected a request's headers within {self._bounds.headers_s:g} s"))

    def send_400_response(self, msg: str) -> None:
        message = "expected an HTTP/1.1 request, got something else"
        if self._crowded:
            most = self._bounds.ahead
            message = f"expected at most {most} requests behind one that is not answered, got more: wait for answers"
        self._refuse(400, WireError(message))

    def _refuse(self, status: int, exc: Exception) -> None:
        """Answer with an error of the protocol, and close the connection."""
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.abort()  # another answer cannot start in the middle of this one
            return
        self._leave()
        body = encode(encode_error(exc))
        head = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode("ascii") + body)
        self.transport.close()
