"""What a claim says and what is asked of it: acks, heartbeats, releases, retries, cancels.

Each is one update whose condition is the fence: that it matched is the answer. Only where it did not is the row read, to
say why.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from pymongo import ReturnDocument, UpdateOne
from pymongo.errors import BulkWriteError

from ...errors import InvocationNotFound, PlaneUnavailable
from ..contract.failures import CANCELLED_RUNNING, claim_lost
from ..contract.operations import Beat, Beaten, Cancel, Cancelled, Fence, Finish, Requeue, Requeued
from ..contract.records import TERMINAL
from .bodies import FINAL, RESULT
from .documents import NAMES, SMALL, Document, error_bytes, error_document, holds, is_same_claim, key_of
from .updates import acked, cancelled, ended, let_go, names, renewed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract.records import Failure
    from .claim import Claims
    from .connection import Database

__all__ = ["FENCE", "beat", "cancel", "finish", "requeue", "speaking", "stow_error", "update_each"]

FENCE = ("state", "worker", "attempt", "lease", "held", "lapsed", "cancelRequested", "ackId")
"""The fields that a fence is judged by."""


def speaking(db: Database, fence: Fence) -> Document:
    """The condition that a fence holds."""
    who: Document = {"_id": key_of(db.ns, fence.id), "held": True}
    # No worker has a name of more bytes, and none fits into the command that asks for one without a bound.
    worker = None if fence.worker is None else fence.worker[: NAMES + 1]
    if fence.attempt is not None:
        return who | {"worker": worker, "attempt": fence.attempt}
    return who | {"lease": None} | ({} if worker is None else {"worker": worker})


async def update_each(db: Database, updates: Sequence[tuple[Document, Any]], ordered: bool = False) -> int:
    """Send updates of one row each in one round trip; how many found their row."""
    if not updates:
        return 0
    if len(updates) == 1:
        return (await db.invocations.update_one(*updates[0])).matched_count
    try:
        done = await db.invocations.bulk_write([UpdateOne(*update) for update in updates], ordered=ordered)
    except BulkWriteError as exc:
        raise PlaneUnavailable(f"{db.name} did not do all of a batch: {str(exc.details)[:300]}") from exc
    return done.matched_count


async def _row(db: Database, id: str) -> Document:
    row = await db.invocations.find_one({"_id": key_of(db.ns, id)}, names(FENCE))
    if row is None:
        raise InvocationNotFound(id)
    return row


async def stow_error(db: Database, error: Failure | None, id: str) -> Any:
    """What a row holds for an error: its fields, or where they cannot stand there, its JSON."""
    data = None if error is None else error_bytes(error)
    return error_document(error) if data is None else await db.bodies.stow(data, SMALL, key_of(db.ns, id))


# Finish -------------------------------------------------------------------------------------------------------------


async def finish(db: Database, ops: Sequence[Finish]) -> list[Any]:
    """Acks of different rows, in one round trip where all of them hold."""
    token, now = secrets.token_hex(8), db.clock.now()
    answers: list[Any] = [True] * len(ops)
    updates: dict[int, tuple[Document, Any]] = {}
    stowed: dict[int, list[Any]] = {}
    for at, op in enumerate(ops):
        if op.state not in TERMINAL:
            answers[at] = ValueError(f"a finish names one of {sorted(TERMINAL)}, not {op.state!r}")
            continue
        key = key_of(db.ns, op.fence.id)
        result = await db.bodies.stow(op.result or None, RESULT, key)
        final = None if op.final is None else await db.bodies.stow(op.final.bytes, FINAL, key)
        error = await stow_error(db, op.error, op.fence.id)
        stowed[at] = [result, final, error]
        frame = None if op.final is None else (op.final.seq, final)
        updates[at] = speaking(db, op.fence), acked(op.state, result, error, frame, f"{token} {at}", now)
    if await update_each(db, list(updates.values())) == len(updates):
        return answers
    keys = [key_of(db.ns, ops[at].fence.id) for at in updates]
    rows = {row["_id"]: row async for row in db.invocations.find({"_id": {"$in": keys}}, names(FENCE))}
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
        await db.bodies.drop(stowed[at])
    return answers


# Beat ---------------------------------------------------------------------------------------------------------------


async def beat(db: Database, op: Beat) -> Beaten:
    """Renew claims: one round trip as long as nobody wants anything of them."""
    if not op.claims:
        return Beaten([], [])
    renew = renewed(op.lease, db.clock.now())
    fences = [speaking(db, Fence(id, op.worker, attempt)) for id, attempt in op.claims]
    quiet: list[tuple[Document, Any]] = [(fence | {"cancelRequested": False}, renew) for fence in fences]
    if await update_each(db, quiet) == len(quiet):
        return Beaten([], [])
    await update_each(db, [(fence, renew) for fence in fences])
    found = db.invocations.find({"_id": {"$in": [fence["_id"] for fence in fences]}}, names(FENCE))
    rows = {row["_id"]: row async for row in found}
    beaten = Beaten([], [])
    for id, attempt in op.claims:
        row = rows.get(key_of(db.ns, id))
        if row is None or not holds(row, Fence(id, op.worker, attempt)):
            beaten.lost.append((id, attempt))
        elif row["cancelRequested"]:
            beaten.cancel.append((id, attempt))
    return beaten


# Requeue and Cancel -------------------------------------------------------------------------------------------------


async def requeue(db: Database, claims: Claims, op: Requeue) -> Requeued:
    """Give a claim back, or end it where its end is asked for."""
    error, until = await stow_error(db, op.error, op.fence.id), None
    if op.delay > 0:
        until = db.clock.now() + op.delay
    fence = speaking(db, op.fence)
    give = let_go(op.reason == "retry", error, until)
    for condition, update in (
        ({"cancelRequested": False}, give),
        ({"cancelRequested": True}, ended("killed", CANCELLED_RUNNING.as_dict(), db.clock.now())),
    ):
        row = await db.invocations.find_one_and_update(
            fence | condition,
            update,
            projection={"state": 1, "runConfig.queue": 1},
            return_document=ReturnDocument.AFTER,
        )
        if row is not None:
            break
    else:
        seen = await _row(db, op.fence.id)
        raise claim_lost(op.fence, seen["state"], seen["attempt"])
    delayed = row["state"] == "queued" and until is not None
    if delayed and until is not None:
        claims.delayed(until)
    return Requeued(row["state"], row["runConfig"]["queue"], delayed)


async def cancel(db: Database, op: Cancel) -> Cancelled:
    """One update, which decides by how the row stands; how it stood before is the answer."""
    this, update = {"_id": key_of(db.ns, op.id)}, cancelled(db.clock.now())
    row = await db.invocations.find_one_and_update(
        this, update, projection=names(FENCE), return_document=ReturnDocument.BEFORE
    )
    if row is None:
        raise InvocationNotFound(op.id)
    if row["state"] in TERMINAL:
        return Cancelled("terminal")
    if row["state"] == "queued":
        return Cancelled("killed")
    return Cancelled("killed" if row["lease"] is None else "asked", row["worker"])
