"""What happens while a plane is unavailable: its callers retry, and the outage and its end are logged once."""

from __future__ import annotations

import logging
import math
import time
from typing import TYPE_CHECKING

import anyio

from ..concurrency.backoff import Backoff

if TYPE_CHECKING:
    from ..errors import PlaneUnavailable

__all__ = ["Outage", "Retries"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

FIRST_PAUSE = 0.05
"""Seconds before the first retry of an operation."""
LONGEST_PAUSE = 5.0
"""Seconds that no pause between two attempts exceeds, before its jitter."""


class Outage:
    """The failures of one plane, as all its callers have seen them, on any event loop."""

    LOG_AFTER = 5.0
    """Seconds after which an outage is logged."""
    LOG_AFTER_AT_START = 0.5
    """The same for a remote plane that has never answered, whose address may be wrong. Callers with a patience below
    LOG_AFTER soon get the error itself, and do not log it so early."""
    WAKE_AFTER = 0.5
    """Seconds without an answer after which an answer ends the pauses of all callers. After less of it they go on: some
    requests fail and others do not."""

    def __init__(self, plane: str, *, remote: bool = False) -> None:
        """
        Args:
            plane: The plane's name in log lines.
            remote: The plane can be opened without a request, so that only the answer to an operation ends an outage.
        """
        self.remote = remote
        self._plane = plane
        self._since = 0.0  # of time.monotonic; 0 while there is no outage
        self._logged = False
        self._has_answered = not remote
        self._pauses = Backoff(FIRST_PAUSE, LONGEST_PAUSE)  # of all callers, to be ended together

    def record_failure(self, exc: PlaneUnavailable, patience: float, started: float = math.inf) -> None:
        """Note that an attempt failed, and log the outage when it has lasted long enough.

        Args:
            exc: Why the attempt failed.
            patience: The seconds for which its caller retries.
            started: When that caller made its first attempt, of `time.monotonic`.
        """
        now = time.monotonic()
        self._since = self._since or now
        lasts = now - self._since >= self.LOG_AFTER
        if not self._has_answered and patience >= self.LOG_AFTER:
            lasts = lasts or now - started >= self.LOG_AFTER_AT_START
        if lasts and not self._logged:
            self._logged = True
            logger.warning(
                "%s does not answer; an operation is retried for %g s, a worker's until it succeeds: %s",
                self._plane,
                patience,
                exc,
            )

    async def pause(self, seconds: float) -> None:
        """Sleep before the next attempt; an answer to any caller ends the pause."""
        self._since = self._since or time.monotonic()
        await self._pauses.pause(seconds)

    def record_answer(self) -> None:
        """Note that the plane has answered: log the end of an outage that was logged, and end the pauses of its callers."""
        has_answered = self._has_answered
        self._has_answered = True
        if not self._since:
            return
        silent = time.monotonic() - self._since
        if self._logged:
            again = " again" if has_answered else ""
            logger.warning("%s answers%s, after %.0f s", self._plane, again, silent)
        self._since = 0.0
        self._logged = False
        if silent >= self.WAKE_AFTER:
            self._pauses.wake()


class Retries:
    """The attempts of one caller while its plane is unavailable. They are made in its task, which may be cancelled."""

    __slots__ = ("_backoff", "_deadline", "_outage", "_patience", "_started")

    def __init__(self, outage: Outage, patience: float) -> None:
        """
        Args:
            outage: Of the plane.
            patience: Seconds for which attempts are made after the first failure.
        """
        self._outage = outage
        self._patience = patience
        self._started = time.monotonic()
        self._deadline = 0.0
        self._backoff: Backoff | None = None

    @property
    def failed(self) -> bool:
        """Whether an attempt has failed."""
        return self._backoff is not None

    async def pause(self, exc: PlaneUnavailable) -> None:
        """Pause after an attempt that failed with `exc`. Raises `exc` when the patience has ended."""
        now = anyio.current_time()
        if self._backoff is None:
            self._backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
            self._deadline = now + self._patience
        if now >= self._deadline:
            raise exc
        self._outage.record_failure(exc, self._patience, self._started)
        await self._outage.pause(self._backoff.next_delay())
