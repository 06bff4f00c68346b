"""Finish: a worker delivers the outcome of its claim. The fence is the condition of the update."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ...errors import InvocationNotFound
from ..contract.failures import claim_lost
from ..contract.records import TERMINAL
from .bodies import MAX_INLINE_FINAL_FRAME, MAX_INLINE_RESULT
from .documents import Document, is_same_claim, key_of
from .fences import FENCE_FIELDS, fence_filter, store_error, update_each
from .updates import finish_update, projection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract.operations import Finish
    from .connection import Database

__all__ = ["finish"]


async def finish(db: Database, ops: Sequence[Finish]) -> list[Any]:
    """Finish different rows: one round trip if all fences hold; otherwise a read tells why each one did not."""
    token = secrets.token_hex(8)
    now = db.clock.now()
    answers: list[Any] = [True] * len(ops)
    updates: dict[int, tuple[Document, Any]] = {}
    stored: dict[int, list[Any]] = {}
    for at, op in enumerate(ops):
        if op.state not in TERMINAL:
            answers[at] = ValueError(f"a finish names one of {sorted(TERMINAL)}, not {op.state!r}")
            continue
        key = key_of(db.ns, op.fence.id)
        result = await db.bodies.store(op.result or None, MAX_INLINE_RESULT, key)
        final = None if op.final is None else await db.bodies.store(op.final.bytes, MAX_INLINE_FINAL_FRAME, key)
        error = await store_error(db, op.error, op.fence.id)
        stored[at] = [result, final, error]
        frame = None if op.final is None else (op.final.seq, final)
        updates[at] = fence_filter(db, op.fence), finish_update(op.state, result, error, frame, f"{token} {at}", now)
    if await update_each(db, list(updates.values())) == len(updates):
        return answers
    keys = [key_of(db.ns, ops[at].fence.id) for at in updates]
    rows = {row["_id"]: row async for row in db.invocations.find({"_id": {"$in": keys}}, projection(FENCE_FIELDS))}
    for at in updates:
        fence = ops[at].fence
        row = rows.get(key_of(db.ns, fence.id))
        if row is None:
            answers[at] = InvocationNotFound(fence.id)
        elif row["ackId"] == f"{token} {at}":
            continue
        elif row["ackId"] is not None and is_same_claim(row, fence):
            answers[at] = False
        else:
            answers[at] = claim_lost(fence, row["state"], row["attempt"])
        await db.bodies.drop(stored[at])
    return answers
