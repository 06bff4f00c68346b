"""The row that a fence is checked against, failures as columns hold them, and the end of a row without its worker."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, NamedTuple

from ...errors import InvocationNotFound
from ..contract.failures import claim_lost, final_error
from ..contract.records import Failure
from . import queries

if TYPE_CHECKING:
    import sqlite3

    from ..contract.operations import Fence
    from .batch import Batch

__all__ = [
    "ClaimRow",
    "end_without_worker",
    "fenced_row",
    "holds",
    "is_same_claim",
    "next_frame",
    "read_failure",
    "row_of",
    "write_failure",
    "write_final_frame",
]


class ClaimRow(NamedTuple):  # made of each row that is read, and a tuple is made fastest
    """An invocation as far as fences and the end of claims are concerned: the columns `queries.CLAIM_ROW_COLUMNS`."""

    seq: int
    id: str
    queue: str
    state: str
    worker: str | None
    attempt: int
    lease: float | None
    reaped: int
    """1 while the row is queued again only because its claim expired, which may still finish it."""
    cancel: int
    """1 while its worker is asked to cancel it."""
    acked: int
    """1 if the claim itself ended the row."""
    closed: int
    """1 once no frame may follow in its journal."""
    failures: int
    lost: int
    max_lost: int | None


def row_of(batch: Batch, id: str) -> ClaimRow:
    """Read the row of an invocation. Raises InvocationNotFound."""
    row = batch.db.execute(queries.CLAIM_ROW, (batch.ns, id)).fetchone()
    if row is None:
        raise InvocationNotFound(id)
    return ClaimRow._make(row)


def is_same_claim(row: ClaimRow, fence: Fence) -> bool:
    """Whether the fence names the last claim of the row, over or not."""
    if fence.attempt is None:
        return row.lease is None and row.worker is not None and fence.worker in (None, row.worker)
    return row.attempt == fence.attempt and row.worker == fence.worker


def holds(row: ClaimRow, fence: Fence) -> bool:
    """Whether the fence's claim holds: it runs, or it has expired and no other claim was made."""
    return is_same_claim(row, fence) and (row.state == "running" or (row.state == "queued" and bool(row.reaped)))


def fenced_row(batch: Batch, fence: Fence) -> ClaimRow:
    """Read the row of a claim that holds. Raises InvocationNotFound or ClaimLost."""
    row = row_of(batch, fence.id)
    if not holds(row, fence):
        raise claim_lost(fence, row.state, row.attempt)
    return row


def next_frame(db: sqlite3.Connection, seq: int) -> int:
    """The number after the highest one in the journal of row `seq`."""
    (highest,) = db.execute(queries.HIGHEST_FRAME, (seq,)).fetchone()
    return 0 if highest is None else highest + 1


def write_final_frame(batch: Batch, row: ClaimRow, number: int, data: bytes, attempt: int) -> None:
    """Close a journal that is open with its last frame, whose number is `number` or, if that is taken, the next one."""
    if row.closed:
        return
    number = max(number, next_frame(batch.db, row.seq))
    batch.db.execute(queries.INSERT_FRAME, (row.seq, number, attempt, 1, data))
    batch.db.execute(queries.CLOSE_JOURNAL, (row.seq,))


def end_without_worker(batch: Batch, row: ClaimRow, state: str, error: Failure, lost: int | None = None) -> None:
    """Make a row terminal: write its state, its outcome, and the ERROR frame for the readers of its journal.

    lost: the number of lost claims that the row has from now on; None leaves it.
    """
    outcome = (None, batch.ns, row.id, state, batch.now, write_failure(error), None, None)
    number = batch.db.execute(queries.INSERT_OUTCOME, outcome).lastrowid
    lost = row.lost if lost is None else lost
    batch.db.execute(queries.END, (state, number, batch.now, lost, row.seq))
    frame = next_frame(batch.db, row.seq)
    # The frame is of attempt 0, which no claim has: a late append of the last attempt must not be taken for a repeat of it.
    write_final_frame(batch, row, frame, final_error(frame, error), 0)
    batch.wakeups.outcomes = True


def write_failure(error: Failure | None) -> str | None:
    """A failure as its column holds it."""
    return None if error is None else json.dumps(error.as_dict())


def read_failure(column: str | None) -> Failure | None:
    """The failure that a column holds. Text that is no failure of ours is shown as it is."""
    if column is None:
        return None
    try:
        return Failure.from_dict(json.loads(column))
    except (ValueError, TypeError, AttributeError):
        return Failure("Error", str(column))
