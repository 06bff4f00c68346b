"""What each operation does to the tables: one function an operation, run inside one transaction on the driver's thread.

Every function decides before its first write, so that an operation that raises has changed nothing and its neighbours in
the batch stand. The conditions are those of `testing.reference.transitions`; `testing.check_plane` compares the two.
"""

from __future__ import annotations

import json
import math
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...errors import ClaimLost, InvocationNotFound
from ..contract.failures import CANCELLED_QUEUED, CANCELLED_RUNNING, claim_lost, worker_lost
from ..contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claim,
    Fence,
    Finish,
    Operation,
    Purge,
    Reap,
    Reaped,
    Requeue,
    Requeued,
    Restore,
    Submit,
)
from ..contract.records import TERMINAL
from .claim import claim, promote
from .restore import restore
from .rows import (
    HELD,
    HELD_COLUMNS,
    INLINE_BODY,
    Batch,
    Held,
    drop_blobs,
    end,
    fenced,
    holds,
    insert_rows,
    is_same_claim,
    link_blob,
    next_seq,
    row_of,
    write_blob,
    write_failure,
    write_final,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["apply"]

PURGE_ROWS = 500
"""Rows that one Purge deletes at most; the plane repeats it."""


def apply(batch: Batch, ops: Sequence[Operation]) -> list[Any]:
    """Apply `ops` in order; for each its answer, or the exception of our own that it raised. Others leave the function."""
    answers: list[Any] = []
    for kind, run in groupby(ops, type):
        if kind is Submit or kind is Finish:
            group: list[Any] = list(run)
            answers += (_submits if kind is Submit else _finishes)(batch, group, len(answers))
        else:
            handler = _HANDLERS[kind]
            for op in run:
                try:
                    answers.append(handler(batch, op))
                except (ClaimLost, InvocationNotFound, ValueError) as exc:
                    answers.append(exc)
    return answers


# Submit -------------------------------------------------------------------------------------------------------------

_SUBMIT = """
INSERT INTO invocation (ns, id, queue, key, priority, parent, root, trusted, submitted_at, config, body_ref, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_ROOT = "SELECT root FROM invocation WHERE ns = ? AND id = ?"


def _submits(batch: Batch, ops: list[Submit], first: int) -> list[Any]:
    """A few statements for all where nothing can depend on what came before it in this very batch."""
    if len(ops) > 1 and all(op.key is op.parent is None and len(op.body) <= INLINE_BODY for op in ops):
        ns, now = batch.ns, batch.now
        rows = [(ns, op.id, op.queue, op.priority, op.trusted, now, op.config, op.body) for op in ops]
        insert_rows(batch.db, "invocation (ns, id, queue, priority, trusted, submitted_at, config, body)", rows)
        for op in ops:
            batch.changes.job(op.queue)
        return [op.id for op in ops]  # written now or before: without a key the id is its own
    return [_submit(batch, op, batch.blobs.get(at)) for at, op in enumerate(ops, first)]


def _submit(batch: Batch, op: Submit, ref: int | None) -> str:
    holding = _holding_id(batch, op) if op.key is not None or len(op.body) > INLINE_BODY else None
    if holding is not None:
        drop_blobs(batch.db, (ref,))
        return holding
    root = None
    if op.parent is not None:
        found = batch.db.execute(_ROOT, (batch.ns, op.parent)).fetchone()
        root = (found and found[0]) or op.parent
    if ref is not None:
        link_blob(batch, ref)
    elif len(op.body) > INLINE_BODY:
        ref = write_blob(batch, op.body)
    if batch.db.execute(_SUBMIT, _submit_row(batch, op, root, ref)).rowcount:
        batch.changes.job(op.queue)
    return op.id


def _submit_row(batch: Batch, op: Submit, root: str | None, ref: int | None) -> tuple[Any, ...]:
    id, queue, body, key, priority, parent, trusted, config = op
    if ref is not None:
        body = b""
    return batch.ns, id, queue, key, priority, parent, root, trusted, batch.now, config, ref, body


def _holding_id(batch: Batch, op: Submit) -> str | None:
    """The id that holds for a submit which may be a repeat: its own, else that of its key."""
    sql = "SELECT id FROM invocation WHERE ns = ? AND id = ?"
    row = batch.db.execute(sql, (batch.ns, op.id)).fetchone()
    if row is None and op.key is not None:
        sql = "SELECT id FROM invocation WHERE ns = ? AND queue = ? AND key = ?"
        row = batch.db.execute(sql, (batch.ns, op.queue, op.key)).fetchone()
    return row[0] if row else None


_REVIVE = """
UPDATE invocation SET state = 'running', due = 1, lost = lost - reaped, reaped = 0,
    lease = iif(lease IS NULL, NULL, ?), lease_until = iif(lease IS NULL, NULL, ?)
WHERE seq = ?
"""


def _beat(batch: Batch, op: Beat) -> Beaten:
    lost: list[tuple[str, int]] = []
    cancel: list[tuple[str, int]] = []
    until = batch.now + op.lease
    for id, attempt in op.claims:
        row = batch.db.execute(HELD, (batch.ns, id)).fetchone()
        held = row and Held._make(row)
        if not held or not holds(held, Fence(id, op.worker, attempt)):
            lost.append((id, attempt))
            continue
        batch.db.execute(_REVIVE, (op.lease, until, held.seq))
        if held.cancel:
            cancel.append((id, attempt))
    return Beaten(lost, cancel)


# Finish -------------------------------------------------------------------------------------------------------------

_FINISH = """
UPDATE invocation SET state = ?, outcome = ?, finished_at = ?, acked = 1, lost = lost - reaped, reaped = 0
WHERE ns = ? AND id = ? AND attempt = ? AND worker = ? AND (state = 'running' OR (state = 'queued' AND reaped = 1))
"""


def _finishes(batch: Batch, ops: list[Finish], first: int) -> list[Any]:
    db, ns, now = batch.db, batch.ns, batch.now
    last = db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outcome'").fetchone()
    n = last[0] if last else 0
    answers: list[Any] = []
    rows: list[tuple[Any, ...]] = []
    for at, op in enumerate(ops, first):
        (id, worker, attempt), state, result, error, final = op
        if state not in TERMINAL:
            answers.append(ValueError(f"a finish names one of {sorted(TERMINAL)}, not {state!r}"))
            continue
        if attempt is not None and db.execute(_FINISH, (state, n + 1, now, ns, id, attempt, worker)).rowcount:
            answers.append(True)
        else:
            answers.append(_finish_slowly(batch, op, n + 1))
        if answers[-1] is not True:
            continue
        n += 1
        ref = batch.blobs.get(at)
        if ref is not None:
            link_blob(batch, ref)
            result = None
        rows.append((n, ns, id, state, now, write_failure(error), ref, result))
        if final is not None:
            row = row_of(batch, id)
            write_final(batch, row, final.seq, final.bytes, row.attempt)
    insert_rows(db, "outcome (n, ns, id, state, finished_at, error, result_ref, result)", rows)
    batch.changes.outcomes = batch.changes.outcomes or bool(rows)
    return answers


def _finish_slowly(batch: Batch, op: Finish, n: int) -> bool | Exception:
    """A finish whose fence names no attempt, or does not hold: the answer of a repeat, or what is wrong."""
    try:
        row = row_of(batch, op.fence.id)
    except InvocationNotFound as exc:
        return exc
    if row.state in TERMINAL and row.acked and is_same_claim(row, op.fence):
        return False
    if op.fence.attempt is not None or not holds(row, op.fence):
        return claim_lost(op.fence, row.state, row.attempt)
    values = (op.state, n, batch.now, batch.ns, row.id, row.attempt, row.worker)
    return bool(batch.db.execute(_FINISH, values).rowcount)


# Requeue, Cancel, Reap ----------------------------------------------------------------------------------------------

_REQUEUE = """
UPDATE invocation SET state = 'queued', worker = NULL, holder = NULL, poll = NULL, lease = NULL, lease_until = NULL,
    cancel = 0, lost = lost - reaped, reaped = 0, due = ?, not_before = ?, failures = failures + ?,
    last_error = coalesce(?, last_error)
WHERE seq = ?
"""


def _requeue(batch: Batch, op: Requeue) -> Requeued:
    row = fenced(batch, op.fence)
    if row.cancel:
        end(batch, row, "killed", CANCELLED_RUNNING, row.lost - row.reaped)
        return Requeued("killed", row.queue)
    delayed = op.delay > 0
    not_before = batch.now + op.delay if delayed else None
    values = (not delayed, not_before, op.reason == "retry", write_failure(op.error), row.seq)
    batch.db.execute(_REQUEUE, values)
    if not delayed:
        batch.changes.job(row.queue)
    return Requeued("queued", row.queue, delayed)


def _cancel(batch: Batch, op: Cancel) -> Cancelled:
    row = row_of(batch, op.id)
    if row.state in TERMINAL:
        return Cancelled("terminal")
    if row.state == "queued":
        end(batch, row, "killed", CANCELLED_QUEUED)
        return Cancelled("killed")
    if row.lease is None:
        end(batch, row, "killed", CANCELLED_RUNNING)
        return Cancelled("killed", row.worker)
    batch.db.execute("UPDATE invocation SET cancel = 1 WHERE seq = ?", (row.seq,))
    batch.changes.cancels = True
    return Cancelled("asked", row.worker)


_EXPIRED = f"""
SELECT {HELD_COLUMNS} FROM invocation WHERE ns = ? AND state = 'running' AND (
    holder IN (SELECT value FROM json_each(?))
    OR (lease_until <= ? AND (holder IS NULL OR holder NOT IN (SELECT value FROM json_each(?))))
    OR lease_until + 9 * lease <= ?
) AND (holder IS NOT NULL OR ? + lease <= ?) ORDER BY seq
"""
_LOSE = "UPDATE invocation SET state = 'queued', due = 1, reaped = 1, lost = lost + 1, not_before = NULL WHERE seq = ?"


def _reap(batch: Batch, op: Reap) -> Reaped:
    due = promote(batch)
    since = -math.inf if op.since is None else op.since
    values = (batch.ns, json.dumps(op.dead), batch.now, json.dumps(op.alive), batch.now, since, batch.now)
    rows = [Held._make(row) for row in batch.db.execute(_EXPIRED, values).fetchall()]
    return Reaped([(row.id, row.queue, _expire(batch, row, op.counted)) for row in rows], due)


def _expire(batch: Batch, row: Held, count: bool) -> str:
    if row.cancel:
        end(batch, row, "killed", CANCELLED_RUNNING)
        return "killed"
    if count and row.max_lost is not None and row.lost + 1 >= row.max_lost:
        end(batch, row, "failed", worker_lost(row.lost + 1), row.lost + 1)
        return "failed"
    if count:
        batch.db.execute(_LOSE, (row.seq,))
    else:
        batch.db.execute(_REQUEUE, (True, None, 0, None, row.seq))
    batch.changes.job(row.queue)
    return "queued"


# Append -------------------------------------------------------------------------------------------------------------


def _append(batch: Batch, op: Append) -> Appended:
    db = batch.db
    if op.first_seq < 0 or not op.frames:
        raise ValueError(f"an append takes frames from seq 0 on, not {len(op.frames)} from seq {op.first_seq}")
    row = row_of(batch, op.fence.id)
    attempt = row.attempt if op.fence.attempt is None else op.fence.attempt
    there: dict[int, int] = {}
    if op.first_seq < next_seq(db, row.seq):
        sql = "SELECT seq, attempt FROM frame WHERE inv = ? AND seq >= ? AND seq < ?"
        there = dict(db.execute(sql, (row.seq, op.first_seq, op.first_seq + len(op.frames))))
    new = [(seq, data) for seq, data in enumerate(op.frames, op.first_seq) if there.get(seq) != attempt]
    if not new:
        return Appended(0, len(op.frames))
    if not holds(row, op.fence):
        raise claim_lost(op.fence, row.state, row.attempt)
    if row.closed:
        raise ClaimLost(op.fence.id, "its journal is closed")
    taken = [seq for seq, _ in new if seq in there]
    if taken:
        raise ClaimLost(op.fence.id, f"frame {taken[0]} is there from attempt {there[taken[0]]}")
    last = op.first_seq + len(op.frames) - 1
    rows = [(row.seq, seq, row.attempt, op.final and seq == last, data) for seq, data in new]
    insert_rows(db, "frame (inv, seq, attempt, final, bytes)", rows)
    if op.final:
        db.execute("UPDATE invocation SET closed = 1 WHERE seq = ?", (row.seq,))
    if row.reaped:
        db.execute(_REVIVE, (row.lease, batch.now + (row.lease or 0.0), row.seq))
    batch.changes.outcomes = True
    return Appended(len(new), len(op.frames) - len(new))


# Purge --------------------------------------------------------------------------------------------------------------


_OLDEST = """
SELECT i.seq, o.n, i.body_ref, o.result_ref
FROM (SELECT * FROM outcome WHERE ns = ? ORDER BY n LIMIT ?) o JOIN invocation i ON i.ns = o.ns AND i.id = o.id
WHERE o.finished_at < ?
"""


def _purge(batch: Batch, op: Purge) -> int:
    db = batch.db
    rows = db.execute(_OLDEST, (batch.ns, PURGE_ROWS, batch.now - op.older_than)).fetchall()
    for seq, n, body_ref, result_ref in rows:
        db.execute("DELETE FROM frame WHERE inv = ?", (seq,))
        db.execute("DELETE FROM outcome WHERE n = ?", (n,))
        db.execute("DELETE FROM invocation WHERE seq = ?", (seq,))
        drop_blobs(db, (body_ref, result_ref))
    stray = "SELECT ref FROM blob WHERE linked = 0 AND made_at < ? LIMIT ?"
    drop_blobs(db, [ref for (ref,) in db.execute(stray, (batch.now - 86_400.0, PURGE_ROWS)).fetchall()])
    return len(rows)


_HANDLERS: dict[type[Any], Callable[[Batch, Any], Any]] = {
    Claim: claim,
    Beat: _beat,
    Requeue: _requeue,
    Cancel: _cancel,
    Append: _append,
    Reap: _reap,
    Purge: _purge,
    Restore: restore,
}
