"""What the statements of a transaction share: the batch, blobs, the row behind a fence, and how a row ends."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InvocationNotFound
from ..contract.failures import claim_lost, final_error
from ..contract.records import Failure

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable, Sequence

    from ..contract.operations import Fence

__all__ = [
    "HELD",
    "HELD_COLUMNS",
    "INLINE_BODY",
    "INSERT_FRAME",
    "PIECE",
    "Batch",
    "Changes",
    "Held",
    "drop_blobs",
    "end",
    "fenced",
    "holds",
    "insert_rows",
    "is_same_claim",
    "link_blob",
    "new_blob",
    "next_seq",
    "read_blob",
    "read_failure",
    "row_of",
    "write_blob",
    "write_failure",
    "write_final",
    "write_piece",
]

INLINE_BODY = 4096
"""Envelopes up to this many bytes stand in the invocation's own row."""
PIECE = 1 << 18
"""Bytes of a blob that one row, and one transaction on the large lane, holds."""


@dataclass
class Changes:
    """What a batch did, for the bells: how many rows of which queues became claimable, and what others have to read."""

    jobs: dict[str, int] = field(default_factory=dict[str, int])
    outcomes: bool = False
    cancels: bool = False

    def job(self, queue: str, count: int = 1) -> None:
        """Rows of `queue` can be claimed."""
        self.jobs[queue] = self.jobs.get(queue, 0) + count


@dataclass
class Batch:
    """What the statements of one transaction share.

    blobs: refs of bodies and results written ahead, by position. late: delayed rows may have come due.
    """

    db: sqlite3.Connection
    ns: str
    now: float
    holder: str
    changes: Changes
    blobs: dict[int, int]
    late: bool = True


# Blobs --------------------------------------------------------------------------------------------------------------


def new_blob(db: sqlite3.Connection, now: float) -> int:
    """A new blob that nothing refers to yet; its ref."""
    ref = db.execute("INSERT INTO blob (made_at) VALUES (?)", (now,)).lastrowid
    assert ref is not None
    return ref


def write_piece(db: sqlite3.Connection, ref: int, part: int, data: memoryview) -> None:
    """Write part number `part` of a blob."""
    db.execute("INSERT INTO piece (ref, part, bytes) VALUES (?, ?, ?)", (ref, part, data))


def write_blob(batch: Batch, data: bytes) -> int:
    """A whole blob in this transaction; its ref. The row written next refers to it."""
    ref = new_blob(batch.db, batch.now)
    view = memoryview(data)
    for part, start in enumerate(range(0, len(view), PIECE)):
        write_piece(batch.db, ref, part, view[start : start + PIECE])
    link_blob(batch, ref)
    return ref


def link_blob(batch: Batch, ref: int) -> None:
    """Say that a row refers to the blob, in the transaction that writes this row."""
    batch.db.execute("UPDATE blob SET linked = 1 WHERE ref = ?", (ref,))


def read_blob(db: sqlite3.Connection, ref: int) -> bytes:
    """The bytes of a blob."""
    return b"".join(row[0] for row in db.execute("SELECT bytes FROM piece WHERE ref = ? ORDER BY part", (ref,)))


def drop_blobs(db: sqlite3.Connection, refs: Iterable[int | None]) -> None:
    """Delete blobs and their pieces."""
    for ref in refs:
        if ref is not None:
            db.execute("DELETE FROM piece WHERE ref = ?", (ref,))
            db.execute("DELETE FROM blob WHERE ref = ?", (ref,))


# Fences -------------------------------------------------------------------------------------------------------------


class Held(NamedTuple):
    """An invocation's row as a fence is judged by it."""

    seq: int
    id: str
    queue: str
    state: str
    worker: str | None
    attempt: int
    lease: float | None
    reaped: int
    cancel: int
    acked: int
    closed: int
    failures: int
    lost: int
    max_lost: int | None


HELD_COLUMNS = ", ".join(Held._fields)
HELD = f"SELECT {HELD_COLUMNS} FROM invocation WHERE ns = ? AND id = ?"


def row_of(batch: Batch, id: str) -> Held:
    row = batch.db.execute(HELD, (batch.ns, id)).fetchone()
    if row is None:
        raise InvocationNotFound(id)
    return Held._make(row)


def is_same_claim(row: Held, fence: Fence) -> bool:
    if fence.attempt is None:
        return row.lease is None and row.worker is not None and fence.worker in (None, row.worker)
    return row.attempt == fence.attempt and row.worker == fence.worker


def holds(row: Held, fence: Fence) -> bool:
    return is_same_claim(row, fence) and (row.state == "running" or (row.state == "queued" and bool(row.reaped)))


def fenced(batch: Batch, fence: Fence) -> Held:
    row = row_of(batch, fence.id)
    if not holds(row, fence):
        raise claim_lost(fence, row.state, row.attempt)
    return row


INSERT_FRAME = "INSERT INTO frame (inv, seq, attempt, final, bytes) VALUES (?, ?, ?, ?, ?)"


def next_seq(db: sqlite3.Connection, seq: int) -> int:
    (highest,) = db.execute("SELECT max(seq) FROM frame WHERE inv = ?", (seq,)).fetchone()
    return 0 if highest is None else highest + 1


def write_failure(error: Failure | None) -> str | None:
    """A failure as its column holds it."""
    return None if error is None else json.dumps(error.as_dict())


def write_final(batch: Batch, row: Held, seq: int, data: bytes, attempt: int) -> None:
    if row.closed:
        return
    seq = max(seq, next_seq(batch.db, row.seq))
    batch.db.execute(INSERT_FRAME, (row.seq, seq, attempt, 1, data))
    batch.db.execute("UPDATE invocation SET closed = 1 WHERE seq = ?", (row.seq,))


def end(batch: Batch, row: Held, state: str, error: Failure, lost: int | None = None) -> None:
    """End a row without its worker: the state, the outcome, and the final ERROR frame for those who read along."""
    values = (batch.ns, row.id, state, batch.now, write_failure(error))
    sql = "INSERT INTO outcome (ns, id, state, finished_at, error) VALUES (?, ?, ?, ?, ?)"
    n = batch.db.execute(sql, values).lastrowid
    sql = "UPDATE invocation SET state = ?, outcome = ?, finished_at = ?, reaped = 0, acked = 0, lost = ? WHERE seq = ?"
    batch.db.execute(sql, (state, n, batch.now, row.lost if lost is None else lost, row.seq))
    seq = next_seq(batch.db, row.seq)
    write_final(batch, row, seq, final_error(seq, error), 0)  # of no attempt: a late append is no repeat of it
    batch.changes.outcomes = True


def read_failure(column: str | None) -> Failure | None:
    """A failure from its column; one that somebody else has written into it is shown as it stands."""
    if column is None:
        return None
    try:
        return Failure.from_dict(json.loads(column))
    except (ValueError, TypeError, AttributeError):
        return Failure("Error", str(column))


_CHUNKS = (50, 10, 1)


@lru_cache(maxsize=64)
def _insert(into: str, width: int, count: int) -> str:
    row = f"({', '.join('?' * width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * count)} ON CONFLICT DO NOTHING"


def insert_rows(db: sqlite3.Connection, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, those that are there already left out; many a statement, in a few sizes that the driver keeps."""
    at = 0
    for count in _CHUNKS:
        while len(rows) - at >= count:
            part = rows[at : at + count]
            db.execute(_insert(into, len(part[0]), count), [*chain.from_iterable(part)])
            at += count
