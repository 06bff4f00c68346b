"""Append: add frames to a journal; the fence of a frame is checked here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import ClaimLost
from ..contract.failures import claim_lost
from ..contract.operations import Appended
from . import queries
from .batch import insert_rows
from .rows import holds, next_frame, row_of

if TYPE_CHECKING:
    from ..contract.operations import Append
    from .batch import Batch

__all__ = ["append"]


def append(batch: Batch, op: Append) -> Appended:
    """Write the frames that are not there yet.

    It is checked in the order of the contract: unknown id, already there from this attempt, stale fence, closed journal.
    """
    db = batch.db
    if op.first_seq < 0 or not op.frames:
        raise ValueError(f"an append takes frames from seq 0 on, not {len(op.frames)} from seq {op.first_seq}")
    row = row_of(batch, op.fence.id)
    attempt = row.attempt if op.fence.attempt is None else op.fence.attempt
    end = op.first_seq + len(op.frames)
    attempt_of_frame: dict[int, int] = {}
    if op.first_seq < next_frame(db, row.seq):
        attempt_of_frame = dict(db.execute(queries.FRAMES_THERE, (row.seq, op.first_seq, end)))
    new = [(seq, data) for seq, data in enumerate(op.frames, op.first_seq) if attempt_of_frame.get(seq) != attempt]
    if not new:
        return Appended(0, len(op.frames))
    if not holds(row, op.fence):
        raise claim_lost(op.fence, row.state, row.attempt)
    if row.closed:
        raise ClaimLost(op.fence.id, "its journal is closed")
    for seq, _ in new:
        if seq in attempt_of_frame:
            raise ClaimLost(op.fence.id, f"frame {seq} is there from attempt {attempt_of_frame[seq]}")
    rows = [(row.seq, seq, row.attempt, op.final and seq == end - 1, data) for seq, data in new]
    insert_rows(db, queries.FRAME_COLUMNS, rows)
    if op.final:
        db.execute(queries.CLOSE_JOURNAL, (row.seq,))
    if row.reaped:  # the claim had expired: a worker that appends is alive
        db.execute(queries.RENEW, (row.lease, batch.now + (row.lease or 0.0), row.seq))
    batch.wakeups.outcomes = True
    return Appended(len(new), len(op.frames) - len(new))
