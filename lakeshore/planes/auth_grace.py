"""What a worker makes of a plane that refuses who asks: a moment of that is no reason to give anything up."""

from __future__ import annotations

import math

import anyio

from ..errors import NotAuthorized

__all__ = ["AuthGrace"]


class AuthGrace:
    """For how long a plane has refused who asks. For a moment it may do so without meaning it, as while it starts anew or
    its tokens are written again: nothing is given up before that has lasted for `lease` seconds without a break."""

    def __init__(self, lease: float) -> None:
        self.lease, self.since = lease, math.inf

    def lasted(self, exc: Exception) -> bool:
        """Take note of what was answered; whether refusals have lasted for a lease."""
        now = anyio.current_time()
        self.since = min(self.since, now) if isinstance(exc, NotAuthorized) else math.inf
        return now >= self.since + self.lease

    def end(self) -> None:
        """It has not refused."""
        self.since = math.inf
