"""Cancel: kill a queued row, or request the cancellation of a running one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pymongo import ReturnDocument

from ...errors import InvocationNotFound
from ..contract.operations import Cancel, Cancelled
from ..contract.records import TERMINAL
from .documents import key_of
from .fences import FENCE_FIELDS
from .updates import cancel_update, projection

if TYPE_CHECKING:
    from .connection import Database

__all__ = ["cancel"]


async def cancel(db: Database, op: Cancel) -> Cancelled:
    """Cancel in one update whose effect depends on the state of the row; the answer is the state before it."""
    row = await db.invocations.find_one_and_update(
        {"_id": key_of(db.ns, op.id)},
        cancel_update(db.clock.now()),
        projection=projection(FENCE_FIELDS),
        return_document=ReturnDocument.BEFORE,
    )
    if row is None:
        raise InvocationNotFound(op.id)
    if row["state"] in TERMINAL:
        return Cancelled("terminal")
    if row["state"] == "queued":
        return Cancelled("killed")
    if row["lease"] is None:
        return Cancelled("killed", row["worker"])
    return Cancelled("asked", row["worker"])
