"""The errors that every plane gives for the same reason: a lost claim, a cancellation, a lost worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ClaimLost
from ...wire.frames import Frame, FrameKind
from .records import TERMINAL, Failure

if TYPE_CHECKING:
    from .operations import Fence


__all__ = ["CANCELLED_QUEUED", "CANCELLED_RUNNING", "claim_lost", "final_error", "worker_lost"]

CANCELLED_QUEUED = Failure("Cancelled", "cancelled before it started")


CANCELLED_RUNNING = Failure("Cancelled", "cancelled while running")


def worker_lost(times: int) -> Failure:
    """The error of a row whose holders died, or let their lease run out, as often as its claims allowed."""
    return Failure(
        "WorkerLost", f"its worker died or stopped renewing its lease {times} times; the body may be the cause"
    )


def final_error(seq: int, failure: Failure) -> bytes:
    """The ERROR frame that closes the journal of a row that ended without its worker."""
    return Frame(FrameKind.ERROR, seq, None, failure.as_dict()).to_bytes()


def claim_lost(fence: Fence, state: str, attempt: int) -> ClaimLost:
    """Why a fence does not hold for a row of this state and attempt."""
    if state in TERMINAL:
        return ClaimLost(fence.id, f"it ended {state}")
    if fence.attempt not in (None, attempt):
        return ClaimLost(fence.id, f"attempt {fence.attempt} is over, the row is at attempt {attempt}")
    if state == "queued":
        return ClaimLost(fence.id, "it is queued, and no claim holds it")
    return ClaimLost(fence.id, "it is held by another claim")
