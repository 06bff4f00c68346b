"""What time does to rows: delays and leases that are over, and old rows that go. In pages; servers may do it at once."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from ..contract.failures import CANCELLED_RUNNING, worker_lost
from ..contract.operations import Purge, Reap, Reaped
from .changes import update_each
from .documents import Document, date
from .updates import ended, lapsed, let_go, names

if TYPE_CHECKING:
    from .claim import Claims
    from .connection import Database

__all__ = ["PAGE", "purge", "reap", "since_limit"]

PAGE = 500
"""Rows that one Reap or Purge changes at most; they are repeated."""
_JUDGED = (
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
    """The condition that a claim has had its lease's length since then to be renewed."""
    return {} if since is None else {"lease": {"$lte": db.clock.now() - since}}


async def reap(db: Database, claims: Claims, op: Reap) -> Reaped:
    """Promote delayed rows; let claims lapse, or end, whose lease is over: each row by one of those who see it."""
    over = {"ns": db.ns, "due": False, "wakeAt": {"$lte": date(db.clock.now())}}
    found = db.invocations.find(over, {"runConfig.queue": 1}).limit(PAGE)
    due = sorted({row["runConfig"]["queue"] async for row in found})
    if due:
        await claims.promote()
    if db.clock.merciful:
        return Reaped([], due)
    late: Document = {"ns": db.ns, "due": True, "wakeAt": {"$lte": date(db.clock.now())}}
    late |= since_limit(db, op.since)
    rows = await db.invocations.find(late, names(_JUDGED)).sort("wakeAt", 1).limit(PAGE).to_list()
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
    """What a row whose claim has expired becomes."""
    if row["cancelRequested"]:
        return "killed", ended("killed", CANCELLED_RUNNING.as_dict(), now)
    if not counted:
        return "queued", let_go(False, None, None)
    lost = row["lost"] + 1
    if lost >= row["maxLost"]:
        return "failed", ended("failed", worker_lost(lost).as_dict(), now, lost)
    return "queued", [{"$set": lapsed()}]


async def purge(db: Database, op: Purge) -> int:
    """Delete old rows: their frames and large bodies first, so that what breaks off half way is found again."""
    old: Document = {"ns": db.ns, "finishedAt": {"$lte": date(db.clock.now() - op.older_than)}}
    rows = await db.invocations.find(old, {"_id": 1}).sort("finishedAt", 1).limit(PAGE).to_list()
    if not rows:
        return 0
    keys = [row["_id"] for row in rows]
    await db.frames.delete_many({"invocation": {"$in": keys}})
    await db.bodies.drop_all(keys)
    return (await db.invocations.delete_many(old | {"_id": {"$in": keys}})).deleted_count
