"""Beat: renew the claims that a worker lists, and report those that are lost or to be cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contract.operations import Beat, Beaten, Fence
from .documents import Document, holds, key_of
from .fences import FENCE_FIELDS, fence_filter, update_each
from .updates import projection, renew_update

if TYPE_CHECKING:
    from .connection import Database

__all__ = ["beat"]


async def beat(db: Database, op: Beat) -> Beaten:
    """Renew claims: one round trip unless some are lost or to be cancelled."""
    if not op.claims:
        return Beaten([], [])
    renew = renew_update(op.lease, db.clock.now())
    fences = [fence_filter(db, Fence(id, op.worker, attempt)) for id, attempt in op.claims]
    quiet: list[tuple[Document, Any]] = [(fence | {"cancelRequested": False}, renew) for fence in fences]
    if await update_each(db, quiet) == len(quiet):
        return Beaten([], [])
    await update_each(db, [(fence, renew) for fence in fences])
    found = db.invocations.find({"_id": {"$in": [fence["_id"] for fence in fences]}}, projection(FENCE_FIELDS))
    rows = {row["_id"]: row async for row in found}
    beaten = Beaten([], [])
    for id, attempt in op.claims:
        row = rows.get(key_of(db.ns, id))
        if row is None or not holds(row, Fence(id, op.worker, attempt)):
            beaten.lost.append((id, attempt))
        elif row["cancelRequested"]:
            beaten.cancel.append((id, attempt))
    return beaten
