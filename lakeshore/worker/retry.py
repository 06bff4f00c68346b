"""Whether an attempt that failed is followed by another one, and after which delay."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..concurrency.backoff import Backoff
from .executor import LOST

if TYPE_CHECKING:
    from ..body.execute import BodyOutcome
    from ..planes.contract.operations import Claimed
    from .settings import WorkerSettings

__all__ = ["retry_delay"]

_BACKOFF = Backoff(0.5, 60.0, jitter=0.25)
"""Seconds before the first retry, and the most; each further failure doubles the delay."""


def retry_delay(claimed: Claimed, outcome: BodyOutcome, settings: WorkerSettings) -> float | None:
    """Return the seconds until the next attempt; None if `outcome`, which has an error, is the last one.

    A body that raised is repeated `settings.retries` times. A body that was lost with its machine or container is also
    repeated until `settings.max_lost`: it has not failed itself.
    """
    if outcome.final:
        return None
    allowed = claimed.failures < settings.retries
    if not allowed and outcome.state == LOST:
        allowed = claimed.failures + claimed.lost + 1 < settings.max_lost
    if not allowed:
        return None
    return _BACKOFF.delay_after(claimed.failures)
