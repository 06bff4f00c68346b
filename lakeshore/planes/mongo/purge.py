"""Purge: delete old rows with their frames and large bodies, a page at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .documents import Document, date
from .reap import MAX_ROWS

if TYPE_CHECKING:
    from ..contract.operations import Purge
    from .connection import Database

__all__ = ["purge"]


async def purge(db: Database, op: Purge) -> int:
    """Delete old rows. Frames and bodies go first, so that an interrupted purge finds the rows again."""
    old: Document = {"ns": db.ns, "finishedAt": {"$lte": date(db.clock.now() - op.older_than)}}
    rows = await db.invocations.find(old, {"_id": 1}).sort("finishedAt", 1).limit(MAX_ROWS).to_list()
    if not rows:
        return 0
    keys = [row["_id"] for row in rows]
    await db.frames.delete_many({"invocation": {"$in": keys}})
    await db.bodies.drop_all(keys)
    return (await db.invocations.delete_many(old | {"_id": {"$in": keys}})).deleted_count
