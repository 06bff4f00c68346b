"""One connection of a client: what it may take, and what is refused on it before the application hears of it.

uvicorn itself has no deadline for the headers of a request and no bound on their size, which one client with many slow
connections would use up a server by; and it keeps whatever comes behind a request that is not answered. Here all of
that is bounded, and connections are counted.
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
    """What connections may take."""

    connections: int = 16_384
    headers_s: float = 20.0
    """Seconds from the first byte of a request, or from the connection's beginning, until its headers are complete."""
    headers_bytes: int = 64 << 10
    """Bytes without any of a body: headers, trailers, the sizes of chunks."""
    ahead: int = 16
    """Requests that a client may send on one connection behind one that is not answered."""


BOUNDS = Bounds()


class Connection(HttpToolsProtocol):
    """One connection, which cannot be held open by half a request, nor fill the memory with one."""

    def __init__(self, bounds: Bounds, **wanted: Any) -> None:
        super().__init__(**wanted)
        self._bounds = bounds
        self._deadline: Any = None
        self._in_headers = False
        self._bare = 0  # bytes since there was one of a body, or since headers were complete
        self._running: Any = None  # what is being answered; `cycle` is what came last
        self._crowded = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self._bounds.connections:
            full = f"the server has {self._bounds.connections} connections, and takes no more: try again later"
            self._refuse(503, PlaneUnavailable(full))
        else:
            self._start_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._bare += len(data)
        super().data_received(data)
        if self._in_headers or self._answered():  # also while a body comes for which nobody waits any more
            self._start_deadline()
        elif self._deadline is not None:
            self._stop_deadline()
        if self._bare > self._bounds.headers_bytes:
            self._refuse(431, WireError(f"expected headers of at most {self._bounds.headers_bytes} bytes, got more"))

    def on_message_begin(self) -> None:
        self._crowded = len(self.pipeline) >= self._bounds.ahead
        if self._crowded:
            raise ValueError("ends the parsing, also of what has come already: see send_400_response")
        self._in_headers = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        answered = self._answered()
        super().on_headers_complete()  # raises for a path that is none
        if answered:
            self._running = self.cycle
        self._in_headers, self._bare = False, 0

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]  # which is taken out now
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # super reads on although more than enough is there

    def on_body(self, body: bytes) -> None:
        self._bare = 0
        super().on_body(body)

    def _leave(self) -> None:
        """Let the request that is being answered know that nobody hears it; uvicorn tells only the one that came last."""
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
        if self.flow.read_paused:  # what is missing may lie unread behind an answer of ours
            self._start_deadline()
        elif self._bare == 0 and not self._in_headers:
            self.transport.close()
        else:
            self._refuse(408, WireError(f"expected a request's headers within {self._bounds.headers_s:g} s"))

    def send_400_response(self, msg: str) -> None:
        said = "expected an HTTP/1.1 request, got something else"
        if self._crowded:
            most = self._bounds.ahead
            said = f"expected at most {most} requests behind one that is not answered, got more: wait for answers"
        self._refuse(400, WireError(said))

    def _refuse(self, status: int, exc: Exception) -> None:
        """Answer in the protocol's own form, and close."""
        if self.transport.is_closing():
            return
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.abort()  # in the middle of an answer there is no place for another
            return
        self._leave()
        body = encode(encode_error(exc))
        head = f"content-type: {CONTENT_TYPE}\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head.encode("ascii") + body)
        self.transport.close()
