"""Restore: enter an invocation as it stood on another plane, whole or in parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contract.operations import check_restore
from ..contract.records import TERMINAL
from . import queries
from .batch import insert_rows
from .blobs import INLINE_BYTES, PIECE_BYTES, write_blob
from .rows import write_failure

if TYPE_CHECKING:
    from ..contract.operations import Restore
    from .batch import Batch

__all__ = ["restore"]

OLD_OUTCOMES = -(1 << 62)
"""Outcomes that are no news are numbered from here on: below all that were written here, which begin at 1."""
OUTCOMES_PER_MILLISECOND = 1 << 20
"""Numbers for the restored outcomes of one millisecond."""
LAST_MILLISECOND = (1 << 41) - 1
"""Since 1970: of the year 2039. Later ends are numbered as if they were of this one, so that all stay below 1."""


def restore(batch: Batch, op: Restore) -> str:
    """Enter a row, or its next part, and return the id that holds. While parts are missing it is running under no claim."""
    check_restore(op)
    db = batch.db
    row = db.execute(queries.RESTORED_ROW, (batch.ns, op.id)).fetchone()
    seq: int | None = None
    if row is None:
        if op.key is not None:
            existing = db.execute(queries.ID_OF_KEY, (batch.ns, op.queue, op.key)).fetchone()
            if existing is not None:
                return str(existing[0])
    else:
        seq, state, worker = row
        if state != "running" or worker is not None:  # it is no row of which parts are missing
            return op.id
    columns = _state_columns(batch, op, is_new=row is None)
    if row is None:
        seq = db.execute(queries.RESTORE, (*columns, *_identity_columns(batch, op))).lastrowid
    elif not op.more:
        db.execute(queries.COMPLETE_RESTORE, (*columns, seq))
    _, is_due, _, is_closed, *_ = columns
    last = op.frames[-1][0] if op.frames and is_closed else None
    frames = [(seq, number, 0, number == last, data) for number, data in op.frames]
    insert_rows(db, queries.FRAME_COLUMNS, frames)
    if op.frames or op.state in TERMINAL:
        batch.wakeups.outcomes = True
    if not op.more and op.state == "queued" and is_due:
        batch.wakeups.add_job(op.queue)
    return op.id


def _state_columns(batch: Batch, op: Restore, *, is_new: bool) -> tuple[Any, ...]:
    """The columns state, due, worker, closed, not_before, finished_at, outcome, last_error; writes the outcome."""
    if op.more:
        return "running", True, None, False, None, None, None, None
    if op.state == "queued":
        is_due = op.not_before is None or op.not_before <= batch.now
        return "queued", is_due, None, op.closed, op.not_before, None, None, write_failure(op.error)
    finished_at = batch.now if op.finished_at is None else op.finished_at
    # A row that was restored in parts may have been seen running, and callers may wait for its end: that is news.
    number = _number_of_old_outcome(batch, finished_at) if is_new else None
    result = op.result
    ref: int | None = None
    if result is not None and len(result) > PIECE_BYTES:
        ref = write_blob(batch, result)
        result = None
    outcome = (number, batch.ns, op.id, op.state, finished_at, write_failure(op.error), ref, result)
    number = batch.db.execute(queries.INSERT_OUTCOME, outcome).lastrowid
    return op.state, True, op.worker, True, None, finished_at, number, None


def _identity_columns(batch: Batch, op: Restore) -> tuple[Any, ...]:
    """The other columns of the row, in the order of `queries.RESTORE`."""
    body = op.body
    ref: int | None = None
    if len(body) > INLINE_BYTES:
        ref = write_blob(batch, body)
        body = b""
    return (
        batch.ns, op.id, op.queue, op.priority, op.key, op.parent, op.root, op.attempt, op.failures, op.lost,
        op.submitted_at, op.started_at, op.config, ref, body,
    )  # fmt: skip


def _number_of_old_outcome(batch: Batch, finished_at: float) -> int:
    """A number for an outcome that is no news here.

    A purge takes outcomes by number, oldest first, and rows are restored in another order than they ended in; so the
    number is made of the time at which the row ended.
    """
    millisecond = min(max(int(finished_at * 1000), 0), LAST_MILLISECOND)
    first = millisecond * OUTCOMES_PER_MILLISECOND + OLD_OUTCOMES
    (last,) = batch.db.execute(queries.HIGHEST_OUTCOME, (first, first + OUTCOMES_PER_MILLISECOND)).fetchone()
    return first if last is None else int(last) + 1
