"""Submit: enter an invocation, unless its id, or its key in the queue, is there already."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import queries
from .batch import insert_rows
from .blobs import INLINE_BYTES, link_blob, write_blob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract.operations import Submit
    from .batch import Batch

__all__ = ["submit_many"]


def submit_many(batch: Batch, ops: Sequence[Submit]) -> list[str]:
    """Enter invocations with a few statements for all, if none of them can depend on one before it in this batch."""
    if len(ops) == 1:
        return [_submit(batch, ops[0])]
    for op in ops:
        if op.key is not None or op.parent is not None or len(op.body) > INLINE_BYTES:
            return [_submit(batch, op) for op in ops]
    ns = batch.ns
    now = batch.now
    rows = [(ns, op.id, op.queue, op.priority, op.trusted, now, op.config, op.body) for op in ops]
    insert_rows(batch.db, queries.SUBMIT_COLUMNS, rows)
    for op in ops:
        batch.wakeups.add_job(op.queue)
    return [op.id for op in ops]  # whether it is new or was there: without a key each id stands for itself


def _submit(batch: Batch, op: Submit) -> str:
    """Enter one invocation, and return the id that holds: its own, or that of an earlier submit with its key."""
    db = batch.db
    is_large = len(op.body) > INLINE_BYTES
    if op.key is not None or is_large:  # only then is there anything that must not be written for a repeat
        existing = _existing_id(batch, op)
        if existing is not None:
            return existing
    root: str | None = None
    if op.parent is not None:
        parent = db.execute(queries.ROOT_OF, (batch.ns, op.parent)).fetchone()
        root = op.parent
        if parent is not None and parent[0]:
            root = parent[0]
    body = op.body
    ref: int | None = None
    if is_large:
        ref = batch.blob_written_ahead(op)
        if ref is None:
            ref = write_blob(batch, body)
        else:
            link_blob(batch, ref)
        body = b""
    row = (
        batch.ns,
        op.id,
        op.queue,
        op.key,
        op.priority,
        op.parent,
        root,
        op.trusted,
        batch.now,
        op.config,
        ref,
        body,
    )
    if db.execute(queries.SUBMIT, row).rowcount:
        batch.wakeups.add_job(op.queue)
    return op.id


def _existing_id(batch: Batch, op: Submit) -> str | None:
    """The id of the invocation that this submit repeats, if any: found by its id, else by its key."""
    row = batch.db.execute(queries.ID_IF_THERE, (batch.ns, op.id)).fetchone()
    if row is None and op.key is not None:
        row = batch.db.execute(queries.ID_OF_KEY, (batch.ns, op.queue, op.key)).fetchone()
    return row[0] if row is not None else None
