"""Reap: end delays and expired leases, a page of rows at a time. Several servers may do it at once."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ..contract.failures import CANCELLED_RUNNING, worker_lost
from ..contract.operations import Reap, Reaped
from .documents import Document, date
from .fences import update_each
from .updates import end_update, expire_fields, projection, requeue_update

if TYPE_CHECKING:
    from .claim import Claims
    from .connection import Database

__all__ = ["MAX_ROWS", "reap", "since_limit"]

MAX_ROWS = 500
"""The most rows that one Reap or Purge changes; the next one changes more."""
_READ_FIELDS = (
    "id",
    "runConfig.queue",
    "state",
    "attempt",
    "leaseUntil",
    "lost",
    "maxLost",
    "cancelRequested",
    "submittedAt",
)


def since_limit(db: Database, since: float | None) -> Document:
    """Select claims that could have been renewed since that time: their lease is no longer than the time since."""
    if since is None:
        return {}
    return {"lease": {"$lte": db.clock.now() - since}}


async def reap(db: Database, claims: Claims, op: Reap) -> Reaped:
    """Make delayed rows due, and expire claims. If several servers see the same row, one of them changes it."""
    over = {"ns": db.ns, "due": False, "wakeAt": {"$lte": date(db.clock.now())}}
    found = db.invocations.find(over, {"runConfig.queue": 1}).limit(MAX_ROWS)
    due = sorted({row["runConfig"]["queue"] async for row in found})
    if due:
        await claims.promote()
    if db.clock.stepped:
        return Reaped([], due)
    late: Document = {"ns": db.ns, "due": True, "wakeAt": {"$lte": date(db.clock.now())}}
    late |= since_limit(db, op.since)
    rows = await db.invocations.find(late, projection(_READ_FIELDS)).sort("wakeAt", 1).limit(MAX_ROWS).to_list()
    if not rows:
        return Reaped([], due)
    rows.sort(key=lambda row: row["submittedAt"])
    mark = secrets.token_hex(8)
    states: dict[str, str] = {}
    updates: list[tuple[Document, Any]] = []
    for row in rows:
        states[row["_id"]], update = _expired(row, op.counted, db.clock.now())
        seen = {name: row[name] for name in ("_id", "state", "attempt", "leaseUntil", "cancelRequested")}
        updates.append((seen, [*update, {"$set": {"reapId": mark}}]))
    if await update_each(db, updates) < len(updates):
        mine = db.invocations.find({"_id": {"$in": list(states)}, "reapId": mark}, {"_id": 1})
        changed = {row["_id"] async for row in mine}
        rows = [row for row in rows if row["_id"] in changed]
    return Reaped([(row["id"], row["runConfig"]["queue"], states[row["_id"]]) for row in rows], due)


def _expired(row: Document, counted: bool, now: float) -> tuple[str, list[Document]]:
    """The new state of a row whose claim has expired, and the update that sets it."""
    if row["cancelRequested"]:
        return "killed", end_update("killed", CANCELLED_RUNNING.as_dict(), now)
    if not counted:
        return "queued", requeue_update(False, None, None)
    lost = row["lost"] + 1
    if lost >= row["maxLost"]:
        return "failed", end_update("failed", worker_lost(lost).as_dict(), now, lost)
    return "queued", [{"$set": expire_fields()}]
