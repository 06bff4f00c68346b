"""Finish: make rows terminal, if the claim named by the fence holds; the fence of an ack is checked here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InvocationNotFound
from ..contract.failures import claim_lost
from ..contract.records import TERMINAL
from . import queries
from .batch import insert_rows
from .blobs import link_blob
from .rows import holds, is_same_claim, row_of, write_failure, write_final_frame

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract.operations import Finish
    from .batch import Batch

__all__ = ["finish_many"]


def finish_many(batch: Batch, ops: Sequence[Finish]) -> list[bool | Exception]:
    """End rows in order; the outcomes of all are inserted together. For each True, False for a repeat, or its error."""
    db = batch.db
    last = db.execute(queries.LAST_OUTCOME).fetchone()
    number = last[0] if last else 0
    answers: list[bool | Exception] = []
    outcomes: list[tuple[Any, ...]] = []
    for op in ops:
        answer = _end(batch, op, number + 1)
        answers.append(answer)
        if answer is not True:
            continue
        number += 1
        id = op.fence.id
        result = op.result
        ref = batch.blob_written_ahead(op)
        if ref is not None:
            link_blob(batch, ref)
            result = None
        outcomes.append((number, batch.ns, id, op.state, batch.now, write_failure(op.error), ref, result))
        if op.final is not None:
            row = row_of(batch, id)
            write_final_frame(batch, row, op.final.seq, op.final.bytes, row.attempt)
    if outcomes:
        insert_rows(db, queries.OUTCOME_COLUMNS, outcomes)
        batch.wakeups.outcomes = True
    return answers


def _end(batch: Batch, op: Finish, number: int) -> bool | Exception:
    """End one row with the outcome of this number, if the claim holds: mostly a single UPDATE finds out."""
    id, worker, attempt = op.fence
    if op.state not in TERMINAL:
        return ValueError(f"a finish names one of {sorted(TERMINAL)}, not {op.state!r}")
    if attempt is not None:
        columns = (op.state, number, batch.now, batch.ns, id, attempt, worker)
        if batch.db.execute(queries.FINISH, columns).rowcount:
            return True
    try:
        row = row_of(batch, id)
    except InvocationNotFound as exc:
        return exc
    if row.state in TERMINAL and row.acked and is_same_claim(row, op.fence):
        return False  # the same finish was answered before
    if attempt is not None or not holds(row, op.fence):
        return claim_lost(op.fence, row.state, row.attempt)
    columns = (op.state, number, batch.now, batch.ns, id, row.attempt, row.worker)
    return bool(batch.db.execute(queries.FINISH, columns).rowcount)
