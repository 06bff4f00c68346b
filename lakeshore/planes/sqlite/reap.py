"""Reap: put rows back whose claims have expired, and promote delayed rows whose delay is over."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from ..contract.failures import CANCELLED_RUNNING, worker_lost
from ..contract.operations import Reaped
from . import queries
from .claim import promote
from .rows import ClaimRow, end_without_worker

if TYPE_CHECKING:
    from ..contract.operations import Reap
    from .batch import Batch

__all__ = ["reap"]


def reap(batch: Batch, op: Reap) -> Reaped:
    """Apply what time and dead holders bring about."""
    due = promote(batch)
    since = -math.inf if op.since is None else op.since
    values = (batch.ns, json.dumps(op.dead), batch.now, json.dumps(op.alive), batch.now, since, batch.now)
    rows = [ClaimRow._make(row) for row in batch.db.execute(queries.EXPIRED, values).fetchall()]
    return Reaped([(row.id, row.queue, _expire(batch, row, counted=op.counted)) for row in rows], due)


def _expire(batch: Batch, row: ClaimRow, *, counted: bool) -> str:
    """End the claim of a row, and return the row's new state.

    counted: whether the loss costs the row's budget; one that its holder announced does not.
    """
    if row.cancel:
        end_without_worker(batch, row, "killed", CANCELLED_RUNNING)
        return "killed"
    lost = row.lost + 1
    if counted and row.max_lost is not None and lost >= row.max_lost:
        end_without_worker(batch, row, "failed", worker_lost(lost), lost)
        return "failed"
    if counted:
        batch.db.execute(queries.EXPIRE, (row.seq,))
    else:
        batch.db.execute(queries.REQUEUE, (True, None, False, None, row.seq))
    batch.wakeups.add_job(row.queue)
    return "queued"
