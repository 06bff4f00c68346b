"""What a server bears: sizes, times and numbers, each with its default."""

from __future__ import annotations

from dataclasses import dataclass

from ..limits import MAX_HOLD_TIME, MAX_REQUEST_BYTES

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The bounds of one server. Sizes are bytes, times float seconds."""

    body: int = MAX_REQUEST_BYTES
    """Of one request's body; a larger one is a 413."""
    bodies: int = 512 << 20
    """Of all bodies that come in several pieces and are being read or worked on at the same time; one more is a 503."""
    body_timeout: float = 30.0
    """Without a byte of a body that was announced; then a 408."""
    linger: float = 5.0
    """For which the rest of a body that is not wanted is read and dropped, so that its sender sees the answer."""
    held: float = MAX_HOLD_TIME
    """That a request is held, whatever it asks for."""
    polls: int = 10_000
    """Requests held at the same time, streams among them; one more is a 503."""
    namespaces: int = 64
    """Namespaces served beside the plane's own."""
    page: int = 4 << 20
    """Of the frames that a stream has in memory for one reader, one frame at least."""
    readiness: float = 2.0
    """For the read that `/readyz` waits for."""
