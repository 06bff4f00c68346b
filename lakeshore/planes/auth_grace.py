"""For how long a plane may reject a worker's credentials before the worker gives up."""

from __future__ import annotations

import math

import anyio

from ..errors import NotAuthorized

__all__ = ["AuthGrace"]


class AuthGrace:
    """For how long a plane has been rejecting our credentials, without a break.

    A short rejection may be spurious: the server is starting anew, or its tokens are being written. Therefore a worker gives
    nothing up before the rejections have lasted for `lease` seconds; then its claims have gone to others anyway.
    """

    def __init__(self, lease: float) -> None:
        self.lease = lease
        self.since = math.inf
        """When the first of these rejections came, by the event loop's clock; infinity while there is none."""

    def exceeded(self, exc: Exception) -> bool:
        """Record what a request has raised. Returns whether rejections have lasted for the length of a lease."""
        now = anyio.current_time()
        self.since = min(self.since, now) if isinstance(exc, NotAuthorized) else math.inf
        return now >= self.since + self.lease

    def reset(self) -> None:
        """Record that a request was not rejected."""
        self.since = math.inf
