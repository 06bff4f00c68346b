"""The statements of a claim: which rows are due, who takes them, and whether there is anything to take."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ..contract.operations import Claim, Claimed, Operation
from .rows import Batch, read_blob

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

__all__ = ["claim", "look", "promote", "something_to_claim"]

_CLAIM = """
UPDATE invocation SET state = 'running', attempt = attempt + 1, reaped = 0, worker = ?, holder = ?, poll = ?, lease = ?,
    lease_until = ?, max_lost = ?, started_at = ?
WHERE seq IN (
    SELECT seq FROM invocation WHERE ns = ? AND queue IN ({queues}) AND state = 'queued' AND due = 1 {extra}
    ORDER BY priority DESC, seq LIMIT ?
) RETURNING seq, priority, id, queue, body, body_ref, attempt, failures, lost, trusted, parent, root, config
"""
_AGAIN = """
UPDATE invocation SET lease = iif(lease IS NULL, NULL, ?), lease_until = iif(lease IS NULL, NULL, ?)
WHERE ns = ? AND worker = ? AND poll = ? AND state = 'running'
RETURNING seq, priority, id, queue, body, body_ref, attempt, failures, lost, trusted, parent, root, config
"""
_NO_FRAMES = "AND (attempt = 0 OR NOT EXISTS (SELECT 1 FROM frame WHERE inv = invocation.seq))"
_PROMOTE = """
UPDATE invocation SET due = 1 WHERE ns = ? AND state = 'queued' AND due = 0 AND not_before <= ? RETURNING queue
"""


def promote(batch: Batch) -> list[str]:
    """Make delayed rows due whose time has come; the queues they are in."""
    found = batch.db.execute(_PROMOTE, (batch.ns, batch.now)).fetchall()
    for (queue,) in found:
        batch.changes.job(queue)
    return sorted({row[0] for row in found})


_READY = "EXISTS (SELECT 1 FROM invocation WHERE ns = ? AND queue IN ({queues}) AND state = 'queued' AND due = 1)"
_DELAYED = "EXISTS (SELECT 1 FROM invocation WHERE ns = ? AND state = 'queued' AND due = 0 AND not_before <= ?)"
_HELD = "EXISTS (SELECT 1 FROM invocation WHERE ns = ? AND worker = ? AND poll = ? AND state = 'running')"


def something_to_claim(db: sqlite3.Connection, ns: str, op: Claim, now: float) -> bool:
    """Whether a claim would change anything: asked without the write lock, so that idle workers never take it."""
    return any(_look_once(db, ns, op, now))


def look(db: sqlite3.Connection, ns: str, ops: Sequence[Operation], now: float) -> tuple[bool, bool]:
    """Whether `ops`, where all of them are claims, find rows, and whether delayed ones have come due.

    Where there is neither, nobody's turn to write is needed. Other operations are taken to find both.
    """
    ready = late = False
    for op in ops:
        if not isinstance(op, Claim):
            return True, True
        found = _look_once(db, ns, op, now)
        ready, late = ready or found[0], late or found[1]
    return ready, late


def _look_once(db: sqlite3.Connection, ns: str, op: Claim, now: float) -> tuple[bool, bool]:
    ready, late = db.execute(_look(len(op.queues)), (ns, *op.queues, ns, now)).fetchone()
    if op.poll_id is not None and not ready:
        (ready,) = db.execute(f"SELECT {_HELD}", (ns, op.worker, op.poll_id)).fetchone()
    return bool(ready), bool(late)


@lru_cache(maxsize=64)
def _look(queues: int) -> str:
    return f"SELECT {_READY.format(queues=_marks(queues))}, {_DELAYED}"


@lru_cache(maxsize=64)
def _take(queues: int, without_frames: bool) -> str:
    return _CLAIM.format(queues=_marks(queues), extra=_NO_FRAMES if without_frames else "")


def _marks(count: int) -> str:
    return ", ".join("?" * count)


def claim(batch: Batch, op: Claim) -> list[Claimed]:
    db, now = batch.db, batch.now
    until = None if op.lease is None else now + op.lease
    rows: list[tuple[Any, ...]] = []
    if op.poll_id is not None:
        rows = db.execute(_AGAIN, (op.lease, until, batch.ns, op.worker, op.poll_id)).fetchall()
    if not rows and op.queues and op.limit > 0:
        if batch.late:
            promote(batch)
        holder = batch.holder if op.local else None
        values = (op.worker, holder, op.poll_id, op.lease, until, op.max_lost, now, batch.ns, *op.queues, op.limit)
        rows = db.execute(_take(len(op.queues), op.lease is None), values).fetchall()
    if rows and len(rows) == op.limit:
        for queue in op.queues:  # more may be there than this claimer can take: pass the wake on
            batch.changes.job(queue)
    if len(rows) > 1:
        rows.sort(key=_claim_order)
    return [_claimed(db, *row) for row in rows]


def _claim_order(row: tuple[Any, ...]) -> tuple[int, int]:
    return -row[1], row[0]


def _claimed(
    db: sqlite3.Connection, seq: int, priority: int, id: str, queue: str, body: bytes, ref: int | None, attempt: int,
    failures: int, lost: int, trusted: int, parent: str | None, root: str | None, config: bytes | None,
) -> Claimed:  # fmt: skip
    if ref is not None:
        body = read_blob(db, ref)
    first = _begins(db, seq, attempt) if attempt > 1 else 0
    return Claimed(id, queue, body, attempt, failures, lost, first, bool(trusted), parent, root, config)


def _begins(db: sqlite3.Connection, seq: int, attempt: int) -> int:
    """Where this attempt's frames begin, the same whenever its claim is handed out: after those of the earlier ones."""
    sql = "SELECT seq FROM frame WHERE inv = ? AND attempt < ? ORDER BY seq DESC LIMIT 1"
    row = db.execute(sql, (seq, attempt)).fetchone()
    return row[0] + 1 if row else 0
