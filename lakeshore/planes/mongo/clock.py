"""The database's clock, estimated in this process between two reads of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bson import Timestamp

from ...limits import CLOCK_STEP, CLOCK_STEP_GRACE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["DatabaseClock"]

READ_INTERVAL = 5.0
"""Seconds after which the clock is read again, together with the next check for what is due."""


class DatabaseClock:
    """Seconds since the epoch by the database's clock: its last answer plus the monotonic time since.

    The answer was right at some moment before it arrived, and the time here counts from the arrival. So it is never ahead
    of the database: no lease expires here before it expires there.
    """

    def __init__(self, ask: Callable[[], Awaitable[float]], steady: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._steady = steady
        self._offset: float | None = None
        self._asked = 0.0
        self._grace_until = 0.0
        self._stamp = (0, 0)

    def now(self) -> float:
        """The current time. The clock must have been read before."""
        assert self._offset is not None
        return self._steady() + self._offset

    async def read(self) -> None:
        """Read the database's clock."""
        self.set(await self._ask())

    async def refresh(self) -> None:
        """Read the database's clock if the last answer is some seconds old."""
        if self._steady() - self._asked >= READ_INTERVAL:
            await self.read()

    def set(self, time: float) -> None:
        """Take `time`, which the database has just answered, as the current time."""
        ticks = self._steady()
        before = self._offset
        self._offset = time - ticks
        self._asked = ticks
        if before is not None and self._offset - before > CLOCK_STEP:
            self._grace_until = ticks + CLOCK_STEP_GRACE

    @property
    def stepped(self) -> bool:
        """True for a while after the clock jumped ahead: no lease may expire meanwhile."""
        return self._steady() < self._grace_until

    def stamp(self) -> Timestamp:
        """A timestamp later than all that this process has made, for servers that do not create them."""
        now = self.now()
        made = int(now), int(now % 1 * 4_000_000_000)
        if made <= self._stamp:
            made = self._stamp[0], self._stamp[1] + 1
        self._stamp = made
        return Timestamp(*made)
