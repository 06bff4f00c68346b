"""Requeue: give a claim back, at once (release) or with a failure and a delay (retry)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract.failures import CANCELLED_RUNNING
from ..contract.operations import Requeued
from . import queries
from .rows import end_without_worker, fenced_row, write_failure

if TYPE_CHECKING:
    from ..contract.operations import Requeue
    from .batch import Batch

__all__ = ["requeue"]


def requeue(batch: Batch, op: Requeue) -> Requeued:
    """Put the row back into its queue, or end it as killed if its cancellation is asked for."""
    row = fenced_row(batch, op.fence)
    if row.cancel:
        end_without_worker(batch, row, "killed", CANCELLED_RUNNING, row.lost - row.reaped)
        return Requeued("killed", row.queue)
    is_delayed = op.delay > 0
    not_before = batch.now + op.delay if is_delayed else None
    columns = (not is_delayed, not_before, op.reason == "retry", write_failure(op.error), row.seq)
    batch.db.execute(queries.REQUEUE, columns)
    if not is_delayed:
        batch.wakeups.add_job(row.queue)
    return Requeued("queued", row.queue, is_delayed)
