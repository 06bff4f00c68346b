"""Cancel: end a row that no worker has to stop first, or ask its worker to."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract.failures import CANCELLED_QUEUED, CANCELLED_RUNNING
from ..contract.operations import Cancelled
from ..contract.records import TERMINAL
from . import queries
from .rows import end_without_worker, row_of

if TYPE_CHECKING:
    from ..contract.operations import Cancel
    from .batch import Batch

__all__ = ["cancel"]


def cancel(batch: Batch, op: Cancel) -> Cancelled:
    """Kill a queued row, or one claimed without a lease; ask the worker of any other running row to end it."""
    row = row_of(batch, op.id)
    if row.state in TERMINAL:
        return Cancelled("terminal")
    if row.state == "queued":
        end_without_worker(batch, row, "killed", CANCELLED_QUEUED)
        return Cancelled("killed")
    if row.lease is None:  # such a worker sends no beats, so it could not be asked
        end_without_worker(batch, row, "killed", CANCELLED_RUNNING)
        return Cancelled("killed", row.worker)
    batch.db.execute(queries.ASK_TO_CANCEL, (row.seq,))
    batch.wakeups.cancels = True
    return Cancelled("asked", row.worker)
