"""What is read from the documents, and never waits: outcomes, rows, counts, and what time asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import WireError
from ..contract.records import TERMINAL, Failure, Outcome, Row, RowFilter
from .bodies import BytesLost, is_ref
from .documents import Document, date, key_of, seconds, shown
from .journal import failure_of
from .updates import projection

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .connection import Database

__all__ = ["ages", "cancels", "counts", "is_due", "outcomes", "rows"]

_BULKY = {"result": 0, "final": 0}
_FIELDS = {
    "queue": "runConfig.queue",
    "state": "state",
    "key": "key",
    "root": "rootInvocationId",
}


async def outcomes(db: Database, ids: Sequence[str]) -> list[Outcome]:
    """How each of `ids` stands, in order."""
    wanted = {"_id": {"$in": [key_of(db.ns, id) for id in dict.fromkeys(ids)]}}
    found: dict[str, Outcome] = {}
    async for row in db.invocations.find(wanted, projection(("id", "state", "result", "error", "submittedAt"))):
        id, state = row["_id"].rpartition("/")[2], row.get("state")
        if isinstance(state, str) and state in TERMINAL:
            try:
                found[id] = Outcome(id, state, await db.bodies.whole(row.get("result")), await failure_of(db, row))
            except (BytesLost, WireError) as exc:  # of this one, not of all who ask along with it
                found[id] = Outcome(id, "failed", None, Failure("WireError", f"it ended {state}, and {exc}"))
        else:
            db.incarnations.remember(row | {"id": id})  # who hears of an end wants to know whether it is this one's
            found[id] = Outcome(id, "pending")
    return [found.get(id) or Outcome(id, "unknown") for id in ids]


async def cancels(db: Database, worker: str) -> list[tuple[str, int]]:
    """The claims of `worker` whose cancellation is asked for."""
    asked = {"ns": db.ns, "state": "running", "worker": worker, "cancelRequested": True}
    return [(row["id"], row["attempt"]) async for row in db.invocations.find(asked, projection(("id", "attempt")))]


async def rows(db: Database, filter: RowFilter) -> list[Row]:
    """Rows, newest first."""
    wanted: Document = {"ns": db.ns} if filter.id is None else {"_id": key_of(db.ns, filter.id)}
    for name, field in _FIELDS.items():
        if (value := getattr(filter, name)) is not None:
            wanted[field] = value
    hidden = _BULKY if filter.body else _BULKY | {"envelope": 0}
    found = db.invocations.find(wanted, hidden).sort("submittedAt", -1).limit(max(filter.limit, 1))
    return [await _shown(db, row, filter) async for row in found][: filter.limit]


async def _shown(db: Database, row: Document, filter: RowFilter) -> Row:
    body = row.get("envelope")
    if is_ref(body) and filter.id is None:
        body = None
    try:
        return shown(row, await failure_of(db, row), await db.bodies.whole(body))
    except (BytesLost, WireError) as exc:  # a list is of the others too
        return shown(row, Failure("WireError", str(exc)), None)


async def counts(db: Database, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
    """Rows by (queue, state)."""
    wanted: Document = {"ns": db.ns}
    wanted |= {} if queue is None else {"runConfig.queue": queue}
    wanted |= {} if state is None else {"state": state}
    group = {"_id": {"queue": "$runConfig.queue", "state": "$state"}, "count": {"$sum": 1}}
    found = await db.invocations.aggregate([{"$match": wanted}, {"$group": group}])
    counted = {(one["_id"].get("queue"), one["_id"].get("state")): int(one["count"]) async for one in found}
    return {kind: count for kind, count in counted.items() if None not in kind}  # what has neither is no invocation


async def ages(db: Database) -> dict[str, float]:
    """Of each queue with something due, how long ago the oldest of it was submitted."""
    due = {"ns": db.ns, "state": "queued", "due": True}
    group = {"_id": "$runConfig.queue", "oldest": {"$min": "$createdAt"}}
    now = db.clock.now()
    found = await db.invocations.aggregate([{"$match": due}, {"$group": group}])
    return {one["_id"]: max(0.0, now - (seconds(one["oldest"]) or now)) async for one in found}


async def is_due(db: Database, since: Document) -> bool:
    """Whether a delay or a lease is over. since: what is asked of claims besides."""
    over = {"wakeAt": {"$lte": date(db.clock.now())}}
    if await db.invocations.find_one({"ns": db.ns, "due": False} | over, {"_id": 1}):
        return True
    late = {"ns": db.ns, "due": True} | over | since
    return not db.clock.stepped and await db.invocations.find_one(late, {"_id": 1}) is not None
