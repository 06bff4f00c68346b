"""The bounds of one server: sizes, times and numbers, each with its default."""

from __future__ import annotations

from dataclasses import dataclass

from ..limits import MAX_HOLD_TIME, MAX_REQUEST_BYTES

__all__ = ["Limits"]


@dataclass(frozen=True)
class Limits:
    """The bounds of one server. Sizes are bytes, times float seconds."""

    body: int = MAX_REQUEST_BYTES
    """Bytes of one request's body. The answer to a larger one has status 413."""
    bodies: int = 512 << 20
    """Bytes of all bodies together that come in several pieces and are in memory. Beyond that the answer has status 503."""
    body_timeout: float = 30.0
    """Seconds without a further byte of a body. Then the answer has status 408."""
    linger: float = 5.0
    """Seconds for which the rest of a rejected body is read and discarded, so that its sender receives the answer."""
    held: float = MAX_HOLD_TIME
    """Seconds for which a request is held, even if it asks for more."""
    polls: int = 10_000
    """Requests held at the same time, including streams. The answer to one more has status 503."""
    namespaces: int = 64
    """Namespaces that are served besides the plane's own."""
    page: int = 4 << 20
    """Bytes of frames that a stream holds in memory for one reader; at least one frame."""
    readiness: float = 2.0
    """Seconds for the read with which `/readyz` tests the plane."""
