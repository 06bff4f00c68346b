"""The database's clock, as this process knows it without asking each time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bson import Timestamp

from ...limits import CLOCK_STEP, CLOCK_STEP_GRACE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["DatabaseClock"]

FRESH = 5.0
"""Seconds after which the database is asked again, along with the next thing that time asks for."""


class DatabaseClock:
    """Seconds since the epoch by the database's clock: its last answer, and what a monotonic clock says has passed since.

    The answer was true at some moment between the question and its arrival. The time given here begins at the arrival,
    so it is never ahead of the database: no lease is over here before it is over there.
    """

    def __init__(self, ask: Callable[[], Awaitable[float]], steady: Callable[[], float] = time.monotonic) -> None:
        self._ask, self._steady = ask, steady
        self._offset: float | None = None
        self._asked = 0.0
        self._mercy = 0.0
        self._stamp = (0, 0)

    def now(self) -> float:
        """The time. The clock must have been read before."""
        assert self._offset is not None
        return self._steady() + self._offset

    async def read(self) -> None:
        """Ask the database."""
        said = await self._ask()
        self.heard(said)

    async def refresh(self) -> None:
        """Ask the database, if its last answer is some seconds old."""
        if self._steady() - self._asked >= FRESH:
            await self.read()

    def heard(self, said: float) -> None:
        """The database has just said what time it is."""
        ticks = self._steady()
        offset, self._offset = self._offset, said - ticks
        self._asked = ticks
        if offset is not None and self._offset - offset > CLOCK_STEP:
            self._mercy = ticks + CLOCK_STEP_GRACE

    @property
    def merciful(self) -> bool:
        """Whether no lease is to be judged now, since the clock made a step a moment ago."""
        return self._steady() < self._mercy

    def stamp(self) -> Timestamp:
        """A timestamp later than any that this process has made, for servers that make none themselves."""
        now = self.now()
        made = int(now), int(now % 1 * 4_000_000_000)
        if made <= self._stamp:
            made = self._stamp[0], self._stamp[1] + 1
        self._stamp = made
        return Timestamp(*made)
