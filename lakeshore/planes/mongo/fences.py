"""Fences as conditions of updates: if the update matches its row, the fence holds.

Only if it does not match is the row read, to find the reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo import UpdateOne
from pymongo.errors import BulkWriteError

from ...errors import PlaneUnavailable
from .documents import NAMES, SMALL, Document, error_bytes, error_document, key_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..contract.operations import Fence
    from ..contract.records import Failure
    from .connection import Database

__all__ = ["FENCE_FIELDS", "fence_filter", "store_error", "update_each"]

FENCE_FIELDS = (
    "state",
    "worker",
    "attempt",
    "lease",
    "held",
    "lapsed",
    "cancelRequested",
    "ackId",
)
"""The fields that decide whether a fence holds."""


def fence_filter(db: Database, fence: Fence) -> Document:
    """Select the row if the fence holds."""
    row: Document = {"_id": key_of(db.ns, fence.id), "held": True}
    # No worker has a longer name, and MongoDB bounds the size of a command.
    worker = None if fence.worker is None else fence.worker[: NAMES + 1]
    if fence.attempt is not None:
        return row | {"worker": worker, "attempt": fence.attempt}
    row["lease"] = None
    if worker is not None:
        row["worker"] = worker
    return row


async def update_each(db: Database, updates: Sequence[tuple[Document, Any]], ordered: bool = False) -> int:
    """Send updates of one row each in one round trip; return the number that matched a row."""
    if not updates:
        return 0
    if len(updates) == 1:
        return (await db.invocations.update_one(*updates[0])).matched_count
    try:
        done = await db.invocations.bulk_write([UpdateOne(*update) for update in updates], ordered=ordered)
    except BulkWriteError as exc:
        raise PlaneUnavailable(f"{db.name} applied only a part of a batch: {str(exc.details)[:300]}") from exc
    return done.matched_count


async def store_error(db: Database, error: Failure | None, id: str) -> Any:
    """The value of a row's `error`: its fields, or its JSON if MongoDB cannot store the fields."""
    data = None if error is None else error_bytes(error)
    return error_document(error) if data is None else await db.bodies.store(data, SMALL, key_of(db.ns, id))


# Finish -------------------------------------------------------------------------------------------------------------


# Beat ---------------------------------------------------------------------------------------------------------------


# Requeue and Cancel -------------------------------------------------------------------------------------------------
