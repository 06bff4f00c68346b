"""Invocations that move between planes: what would restore those of this file, and the restore of others into it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InvocationNotFound
from ...limits import MAX_FRAMES_PER_PAGE
from ..contract.operations import Restore, check_restore
from ..contract.records import TERMINAL
from .rows import INLINE_BODY, PIECE, Batch, insert_rows, read_blob, read_failure, write_blob, write_failure

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from .connection import Database

__all__ = ["Copying", "restore"]


class Copying:
    """The reads of a store whose invocations can be moved: `contract.Movable`."""

    _small: Database
    _ns: str

    async def copies(self, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
        return await self._small.call(lambda db: _copies(db, self._ns, after, queues, limit, max_bytes))

    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        return await self._small.call(lambda db: _frames(db, _seq(db, self._ns, id), since, limit, max_bytes))


# Reading ------------------------------------------------------------------------------------------------------------

# The + keeps the planner at the table itself, which is in submit order.
_COPIES = """
SELECT i.id, i.queue, i.state, i.body, i.key, i.priority, i.parent, i.root, i.config, i.attempt, i.failures, i.lost,
    iif(i.state = 'queued', NULL, i.worker), i.submitted_at, i.not_before, i.started_at, i.finished_at, o.result,
    iif(i.outcome IS NULL, i.last_error, o.error), i.closed, i.seq, i.body_ref, o.result_ref
FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome
WHERE +i.ns = ? AND i.seq > ? {queues} ORDER BY i.seq LIMIT ?
"""
_LENGTH = "SELECT coalesce(sum(length(bytes)), 0) FROM piece WHERE ref = ?"


def _seq(db: sqlite3.Connection, ns: str, id: str) -> int:
    row = db.execute("SELECT seq FROM invocation WHERE ns = ? AND id = ?", (ns, id)).fetchone()
    if row is None:
        raise InvocationNotFound(id)
    return int(row[0])


def _copies(
    db: sqlite3.Connection, ns: str, after: str | None, queues: Sequence[str], limit: int, max_bytes: int
) -> list[Restore]:
    begin = 0 if after is None else _seq(db, ns, after)
    only = f"AND i.queue IN ({', '.join('?' * len(queues))})" if queues else ""
    found = db.execute(_COPIES.format(queues=only), (ns, begin, *queues, limit))
    copies: list[Restore] = []
    size = 0
    for *columns, closed, seq, body_ref, result_ref in found:
        size += _size(db, columns[3], body_ref) + _size(db, columns[17], result_ref)
        if copies and size > max_bytes:
            break
        copy = _copy(db, columns, bool(closed), body_ref, result_ref)
        frames = _frames(db, seq, -1, MAX_FRAMES_PER_PAGE, max_bytes - size) if size < max_bytes else []
        size += sum(len(data) for _, data in frames)
        sql = "SELECT 1 FROM frame WHERE inv = ? AND seq > ? LIMIT 1"
        more = db.execute(sql, (seq, frames[-1][0] if frames else -1)).fetchone() is not None
        copies.append(copy._replace(frames=tuple(frames), more=more))
    found.close()
    return copies


def _size(db: sqlite3.Connection, inline: bytes | None, ref: int | None) -> int:
    return len(inline or b"") if ref is None else int(db.execute(_LENGTH, (ref,)).fetchone()[0])


def _copy(
    db: sqlite3.Connection, columns: list[Any], closed: bool, body_ref: int | None, result_ref: int | None
) -> Restore:
    copy = Restore(*columns)
    return copy._replace(
        body=copy.body if body_ref is None else read_blob(db, body_ref),
        result=copy.result if result_ref is None else read_blob(db, result_ref),
        error=read_failure(columns[18]),
        closed=closed or copy.state in TERMINAL,
    )


def _frames(db: sqlite3.Connection, inv: int, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
    frames: list[tuple[int, bytes]] = []
    size = 0
    sql = "SELECT seq, bytes FROM frame WHERE inv = ? AND seq > ? ORDER BY seq LIMIT ?"
    found = db.execute(sql, (inv, since, limit))
    for seq, data in found:
        size += len(data)
        if frames and size > max_bytes:
            break
        frames.append((seq, data))
    found.close()
    return frames


# Restoring ----------------------------------------------------------------------------------------------------------

_ENTER = """
INSERT INTO invocation (state, due, worker, closed, not_before, finished_at, outcome, last_error,
    ns, id, queue, priority, trusted, key, parent, root, attempt, failures, lost, submitted_at, started_at, config,
    body_ref, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""
_COMPLETE = """
UPDATE invocation SET state = ?, due = ?, worker = ?, closed = ?, not_before = ?, finished_at = ?, outcome = ?,
    last_error = ?
WHERE seq = ?
"""


def restore(batch: Batch, op: Restore) -> str:
    """Enter a row, or the next part of one: while parts are missing it is running under no claim."""
    check_restore(op)
    db, ns = batch.db, batch.ns
    row = db.execute("SELECT seq, state, worker FROM invocation WHERE ns = ? AND id = ?", (ns, op.id)).fetchone()
    if row is not None and (row[1] != "running" or row[2] is not None):
        return op.id
    if row is None and op.key is not None:
        sql = "SELECT id FROM invocation WHERE ns = ? AND queue = ? AND key = ?"
        held = db.execute(sql, (ns, op.queue, op.key)).fetchone()
        if held is not None:
            return str(held[0])
    stands = _stands(batch, op, row is not None)
    if row is None:
        seq = db.execute(_ENTER, (*stands, *_entered(batch, op))).lastrowid
    else:
        seq = row[0]
        if not op.more:
            db.execute(_COMPLETE, (*stands, seq))
    last = op.frames[-1][0] if op.frames and stands[3] else None
    insert_rows(
        db, "frame (inv, seq, attempt, final, bytes)", [(seq, at, 0, at == last, data) for at, data in op.frames]
    )
    batch.changes.outcomes = batch.changes.outcomes or bool(op.frames) or op.state in TERMINAL
    if not op.more and op.state == "queued" and stands[1]:
        batch.changes.job(op.queue)
    return op.id


def _entered(batch: Batch, op: Restore) -> tuple[Any, ...]:
    ref = write_blob(batch, op.body) if len(op.body) > INLINE_BODY else None
    row = (batch.ns, op.id, op.queue, op.priority, op.key, op.parent, op.root, op.attempt, op.failures, op.lost)
    return *row, op.submitted_at, op.started_at, op.config, ref, op.body if ref is None else b""


def _stands(batch: Batch, op: Restore, in_parts: bool) -> tuple[Any, ...]:
    """The first columns of the row."""
    if op.more:
        return "running", True, None, False, None, None, None, None
    if op.state == "queued":
        due = op.not_before is None or op.not_before <= batch.now
        return "queued", due, None, op.closed, op.not_before, None, None, write_failure(op.error)
    finished_at = batch.now if op.finished_at is None else op.finished_at
    n = None if in_parts else _number(batch, finished_at)
    ref = write_blob(batch, op.result) if op.result is not None and len(op.result) > PIECE else None
    result = op.result if ref is None else None
    values = (n, batch.ns, op.id, op.state, finished_at, write_failure(op.error), ref, result)
    sql = (
        "INSERT INTO outcome (n, ns, id, state, finished_at, error, result_ref, result) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
    )
    n = batch.db.execute(sql, values).lastrowid
    return op.state, True, op.worker, True, None, finished_at, n, None


def _number(batch: Batch, finished_at: float) -> int:
    """The number of an outcome that is no news here, below all that are: a purge takes outcomes by it, oldest first,
    and rows are restored in another order than the one in which they ended.

    A row restored in parts may have been seen running, and somebody may wait for its end: that is news.
    """
    first = (min(max(int(finished_at * 1000), 0), (1 << 41) - 1) << 20) - (1 << 62)
    sql = "SELECT max(n) FROM outcome WHERE n >= ? AND n < ?"
    (last,) = batch.db.execute(sql, (first, first + (1 << 20))).fetchone()
    return first if last is None else int(last) + 1
