"""Growing pauses between attempts."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import anyio

from .loops import loop_token, run_sync_soon

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Backoff"]

MAX_STEPS = 100
"""The pause does not grow after so many failures: a power of more would leave the range of a float."""


class Backoff:
    """The pauses of a loop that tries again: each is `factor` times as long as the one before, up to a cap.

    A loop calls `pause` after each failure and `reset` after a success. A loop that waits in its own way takes its seconds
    from `next_delay`. One Backoff counts the failures of one loop; several tasks may pause with it at the same time.
    """

    __slots__ = ("_wake_ups", "cap", "factor", "failures", "first", "jitter")

    def __init__(self, first: float, cap: float, *, factor: float = 2.0, jitter: float = 0.5) -> None:
        """
        Args:
            first: Seconds of the first pause.
            cap: Seconds that no pause exceeds, before its jitter.
            factor: By how much a pause is longer than the one before.
            jitter: The share of a pause by which it is made longer or shorter at random, from 0 to 1, so that clients that
                failed together do not try again together.
        """
        self.first = first
        self.cap = cap
        self.factor = factor
        self.jitter = jitter
        self.failures = 0
        """How many pauses have been taken since the start or the last `reset`."""
        self._wake_ups: set[Callable[[], object]] = set()

    def reset(self) -> None:
        """Start with the first pause again: an attempt has succeeded."""
        self.failures = 0

    def next_delay(self) -> float:
        """The seconds of the next pause, which counts as taken."""
        delay = self.delay_after(self.failures)
        self.failures += 1
        return delay

    def delay_after(self, failures: int) -> float:
        """The seconds of the pause that follows on `failures` earlier ones; takes none."""
        delay = min(self.first * self.factor ** min(failures, MAX_STEPS), self.cap)
        if self.jitter:
            delay *= random.uniform(1 - self.jitter, 1 + self.jitter)
        return delay

    async def pause(self, seconds: float | None = None) -> None:
        """Sleep before the next attempt, until `wake` at the latest. Cancellation ends the sleep.

        Args:
            seconds: How long; by default the `next_delay`. Given where its caller has logged it.
        """
        if seconds is None:
            seconds = self.next_delay()
        woken = anyio.Event()
        wake_up = partial(run_sync_soon, loop_token(), woken.set)
        self._wake_ups.add(wake_up)
        try:
            with anyio.move_on_after(seconds):
                await woken.wait()
        finally:
            self._wake_ups.discard(wake_up)

    def wake(self) -> None:
        """End the pauses of now, since there is a reason to try at once; from any thread. Later pauses are not shortened."""
        for wake_up in list(self._wake_ups):
            wake_up()
