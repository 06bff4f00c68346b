"""Claim: take queued rows in order of priority, then of submit; and promote delayed rows whose delay is over."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from ..contract.operations import Claim, Claimed
from . import queries
from .blobs import read_blob

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from ..contract.operations import Operation
    from .batch import Batch

__all__ = ["claim", "finds_nothing", "promote"]


def finds_nothing(batch: Batch, ops: Sequence[Operation]) -> bool:
    """Whether `ops` are claims only, none of which would change anything. This reads: idle workers must not lock the file.

    It also notes in the batch whether delayed rows have become due.
    """
    if any(type(op) is not Claim for op in ops):
        return False
    ready = False
    late = False
    for op in cast("Sequence[Claim]", ops):
        values = (batch.ns, *op.queues, batch.ns, batch.now)
        found, delayed = batch.db.execute(queries.claimable(len(op.queues)), values).fetchone()
        if op.poll_id is not None and not found:
            (found,) = batch.db.execute(queries.HELD_BY_POLL, (batch.ns, op.worker, op.poll_id)).fetchone()
        ready = ready or bool(found)
        late = late or bool(delayed)
    batch.promote = late
    return not ready and not late


def claim(batch: Batch, op: Claim) -> list[Claimed]:
    """Take up to `op.limit` rows, best first; or renew and return what an earlier request of the same poll has taken."""
    db = batch.db
    until = None if op.lease is None else batch.now + op.lease
    rows: list[tuple[Any, ...]] = []
    if op.poll_id is not None:
        rows = db.execute(queries.CLAIM_AGAIN, (op.lease, until, batch.ns, op.worker, op.poll_id)).fetchall()
    if not rows and op.queues and op.limit > 0:
        if batch.promote:
            promote(batch)
        holder = batch.holder if op.local else None
        claim_columns = (op.worker, holder, op.poll_id, op.lease, until, op.max_lost, batch.now)
        sql = queries.claim(len(op.queues), without_frames=op.lease is None)
        rows = db.execute(sql, (*claim_columns, batch.ns, *op.queues, op.limit)).fetchall()
    if rows and len(rows) == op.limit:
        for queue in op.queues:  # there may be more than this claimer can take: wake another one
            batch.wakeups.add_job(queue)
    if len(rows) > 1:
        rows.sort(key=_claim_order)
    return [_claimed(db, *row) for row in rows]


def _claim_order(row: tuple[Any, ...]) -> tuple[int, int]:
    """By priority, highest first, then by submit order: RETURNING gives rows in any order."""
    seq, priority = row[:2]
    return -priority, seq


def _claimed(
    db: sqlite3.Connection, seq: int, priority: int, id: str, queue: str, body: bytes, ref: int | None, attempt: int,
    failures: int, lost: int, trusted: int, parent: str | None, root: str | None, config: bytes | None,
) -> Claimed:  # fmt: skip
    """What a claimer gets of a row with the columns `queries.CLAIMED_COLUMNS`."""
    if ref is not None:
        body = read_blob(db, ref)
    first_frame = 0
    if attempt > 1:  # its frames begin after those of earlier attempts, the same however often the claim is handed out
        last = db.execute(queries.LAST_FRAME_BEFORE, (seq, attempt)).fetchone()
        first_frame = 0 if last is None else last[0] + 1
    return Claimed(id, queue, body, attempt, failures, lost, first_frame, bool(trusted), parent, root, config)


def promote(batch: Batch) -> list[str]:
    """Make delayed rows due whose delay is over, and return the queues they are in."""
    found = batch.db.execute(queries.PROMOTE, (batch.ns, batch.now)).fetchall()
    for (queue,) in found:
        batch.wakeups.add_job(queue)
    return sorted({queue for (queue,) in found})
