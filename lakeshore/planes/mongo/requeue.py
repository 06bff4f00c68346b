"""Requeue: give a claim back to its queue, for a retry or a release."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pymongo import ReturnDocument

from ...errors import InvocationNotFound
from ..contract.failures import CANCELLED_RUNNING, claim_lost
from ..contract.operations import Requeue, Requeued
from .documents import Document, key_of
from .fences import FENCE_FIELDS, fence_filter, store_error
from .updates import end_update, projection, requeue_update

if TYPE_CHECKING:
    from .claim import Claims
    from .connection import Database

__all__ = ["requeue"]


async def _row(db: Database, id: str) -> Document:
    row = await db.invocations.find_one({"_id": key_of(db.ns, id)}, projection(FENCE_FIELDS))
    if row is None:
        raise InvocationNotFound(id)
    return row


async def requeue(db: Database, claims: Claims, op: Requeue) -> Requeued:
    """Queue the row again; if its cancellation was requested, kill it instead."""
    error = await store_error(db, op.error, op.fence.id)
    until = db.clock.now() + op.delay if op.delay > 0 else None
    fence = fence_filter(db, op.fence)
    give = requeue_update(op.reason == "retry", error, until)
    for condition, update in (
        ({"cancelRequested": False}, give),
        ({"cancelRequested": True}, end_update("killed", CANCELLED_RUNNING.as_dict(), db.clock.now())),
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
        claims.add_delay(until)
    return Requeued(row["state"], row["runConfig"]["queue"], delayed)
