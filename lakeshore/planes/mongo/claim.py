"""Claims: a findAndModify for each row, and what becomes of one whose answer was lost."""

from __future__ import annotations

import heapq
import logging
import secrets
import time
from itertools import count
from typing import TYPE_CHECKING

import anyio
from bson import Timestamp
from pymongo import ReturnDocument
from pymongo.errors import OperationFailure

from ...errors import DispatchError
from ...ids import check_id
from ..contract.operations import Claim, Claimed
from ..contract.records import Failure
from .bodies import BytesLost
from .connection import foreign
from .documents import CLAIM_SORT, Document, check_names, date
from .updates import claim_update, lease_fields, requeue_update, unreadable_update

if TYPE_CHECKING:
    from .connection import Database

__all__ = ["Claims"]

logger = logging.getLogger("dreamlake.lakeshore.mongo")

UNSURE = 30.0
"""Seconds for which a claim whose answer was lost is looked for: the database may still be at it."""
MOST_DELAYS = 10_000
AT_ONCE = 8
MOST_GATES = 1000
REFUSED = 5
"""Refusals, one after the other, that are not for what somebody else has just taken out of the way."""
COUNTABLE = 2.0**53
"""The first whole number after which a float knows not all of them."""
_ROW = {"result": 0, "error": 0, "final": 0}


class _Gate:
    """The claims of one set of queues: a few at a time, or one row would call on the database as often as there are idle
    claimers. `emptied`: when the last of those began that found nothing; who had come before that need not look."""

    def __init__(self) -> None:
        self.room, self.emptied = anyio.Semaphore(AT_ONCE), -1


class Claims:
    """What one engine claims, and what it knows of delays that will be over."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._unsure: dict[str, tuple[str, tuple[str, ...], float]] = {}  # by poll: worker, queues, until when
        self._delays: list[float] = []
        self._gates: dict[tuple[tuple[str, ...], bool], _Gate] = {}
        self._turns = count()

    def delayed(self, until: float) -> None:
        """A row became one that waits."""
        if len(self._delays) < MOST_DELAYS:
            heapq.heappush(self._delays, until)

    async def claim(self, op: Claim) -> list[Claimed]:
        """Take rows. When that ends half way, what was taken goes back before the next claim, or is the repeated poll's."""
        check_names(worker=op.worker, poll=op.poll_id)
        if self._unsure:
            await self.settle()
        if op.poll_id is not None and (again := await self._again(op)):
            return again
        if not op.queues or op.limit < 1:
            return []
        gate = self._gate(op)
        entered = next(self._turns)
        async with gate.room:
            if gate.emptied > entered:
                return []
            began = next(self._turns)
            found = await self._take_all(op)
            if not found:
                gate.emptied = max(gate.emptied, began)
            return found

    def _gate(self, op: Claim) -> _Gate:
        key = op.queues, op.lease is None
        if key not in self._gates:
            if len(self._gates) >= MOST_GATES:
                self._gates = {key: gate for key, gate in self._gates.items() if gate.room.value < AT_ONCE}
            self._gates[key] = _Gate()
        return self._gates[key]

    async def _take_all(self, op: Claim) -> list[Claimed]:
        poll = f"claim {secrets.token_hex(8)}" if op.poll_id is None else _poll(op.poll_id)
        try:
            while rows := await self._take(op, poll):
                if found := await self._readable(rows):
                    return found
            return []
        except BaseException:
            if op.poll_id is None:
                self._unsure[poll] = op.worker, op.queues, time.monotonic() + UNSURE
            raise

    async def _take(self, op: Claim, poll: str) -> list[Document]:
        db, rows, promoted = self._db, list[Document](), False
        if self._delays and self._delays[0] <= db.clock.now():
            await self.promote()
        queues = list(dict.fromkeys(op.queues))
        # All of it equalities on the claim index, and its sort; see there.
        due: Document = {"ns": db.ns, "state": "queued", "due": True}
        due["runConfig.queue"] = queues[0] if len(queues) == 1 else {"$in": queues}
        if op.lease is None:
            due["nextSeq"] = 0  # such claimers number frames from 0
        refused = 0
        while len(rows) < op.limit:
            try:
                row = await db.invocations.find_one_and_update(
                    due,
                    claim_update(op.worker, poll, op.lease, op.max_lost, db.clock.now()),
                    sort=CLAIM_SORT,
                    projection=_ROW,
                    return_document=ReturnDocument.AFTER,
                )
            except OperationFailure as exc:
                # Only what is refused: after any other failure a row may have been taken all the same.
                if type(foreign(exc, db.name)) is not DispatchError:
                    raise
                refused = 0 if await self._end_uncountable(due) else refused + 1
                if refused == REFUSED:
                    raise
                continue
            if row is not None:
                rows.append(row)
            elif promoted or not await self.promote():
                break
            else:
                promoted = True
        return rows

    async def _end_uncountable(self, due: Document) -> bool:
        """Whether the first due row was in the way, with an attempt to which nothing can be added, and is no more."""
        fields = {"attempt": 1, "state": 1}
        row = await self._db.invocations.find_one(due, fields, sort=CLAIM_SORT)
        if row is None:
            return False
        try:
            _count(row, "attempt")
        except ValueError as exc:
            # Where it could not be ended, though nobody has changed it, the next look would find it again, and so for ever.
            return (
                await self._end(row, str(exc))
                or await self._db.invocations.find_one(due, fields, sort=CLAIM_SORT) != row
            )
        return False

    async def _again(self, op: Claim) -> list[Claimed]:
        """What the poll has taken and still holds, renewed."""
        assert op.poll_id is not None
        db = self._db
        mine = {"ns": db.ns, "state": "running", "worker": op.worker, "pollId": _poll(op.poll_id)}
        rows = await db.invocations.find(mine, _ROW).to_list()
        if any(row.get("lease") is not None for row in rows):
            ids = [row["_id"] for row in rows]
            renew = {"$set": lease_fields(op.lease, db.clock.now())}
            await db.invocations.update_many(mine | {"_id": {"$in": ids}, "lease": {"$ne": None}}, renew)
        rows.sort(key=_turn)
        return await self._readable(rows)

    async def _readable(self, rows: list[Document]) -> list[Claimed]:
        """What was claimed. A row whose document nobody can read ends, or every claim of its queue would end at it."""
        found: list[Claimed] = []
        for row in rows:
            try:
                found.append(await self._claimed(row))
            except (BytesLost, KeyError, TypeError, ValueError, AttributeError) as exc:
                await self._end(row, f"{type(exc).__name__}: {exc!s:.200}")
        return found

    async def _end(self, row: Document, why: str) -> bool:
        """End a row, if it is still the one that was read; whether it was."""
        said = f"its document, or what that refers to, cannot be read: {why}"
        over = unreadable_update(Failure("WireError", said).as_dict(), self._db.clock.now())
        same: Document = {
            name: {"$eq": row[name]} for name in ("_id", "state", "worker", "pollId", "attempt") if name in row
        }
        ended = (await self._db.invocations.update_one(same, over)).matched_count > 0
        if ended:
            logger.warning("invocation %r failed: %s", row["_id"], said)
        return ended

    async def _claimed(self, row: Document) -> Claimed:
        self._db.incarnations.remember(row)
        body = await self._db.bodies.whole(row["envelope"])
        config = await self._db.bodies.whole(row["runConfig"]["config"])
        return Claimed(
            id=check_id(row["id"]),
            queue=row["runConfig"]["queue"],
            body=body or b"",
            attempt=_count(row, "attempt"),
            failures=_count(row, "failures"),
            lost=_count(row, "lost"),
            next_seq=_count(row, "begins"),
            trusted=bool(row["trusted"]),
            parent=row["parentInvocationId"],
            root=row["rootInvocationId"],
            config=config,
        )

    async def promote(self) -> int:
        """Make rows due whose delay is over; how many."""
        db, now = self._db, self._db.clock.now()
        while self._delays and self._delays[0] <= now:
            heapq.heappop(self._delays)
        over = {"ns": db.ns, "due": False, "wakeAt": {"$lte": date(now)}}
        update = {"$set": {"due": True, "notBefore": None, "wakeAt": None}}
        return (await db.invocations.update_many(over, update)).modified_count

    async def settle(self) -> set[str]:
        """Give back what claims have taken whose answers were lost; the queues in which there may be something now."""
        if not self._unsure:
            return set()
        db, unsure = self._db, dict(self._unsure)
        workers = list({worker for worker, _, _ in unsure.values()})
        taken = {"ns": db.ns, "state": "running", "worker": {"$in": workers}, "pollId": {"$in": list(unsure)}}
        given = await db.invocations.update_many(taken, requeue_update(False, None, None))
        now = time.monotonic()
        for poll, (_, _, until) in unsure.items():
            if until <= now:
                self._unsure.pop(poll, None)
        return {queue for _, queues, _ in unsure.values() for queue in queues} if given.modified_count else set()


def _turn(row: Document) -> tuple[float, Timestamp]:
    """CLAIM_SORT, of rows that are here."""
    priority, at = row.get("priority"), row.get("submittedAt")
    return (
        -priority if isinstance(priority, int | float) else 0,
        at if isinstance(at, Timestamp) else Timestamp(0, 0),
    )


def _count(row: Document, name: str) -> int:
    """A field that is added to, here or by the claim's end: what is none spoils the batch of the update that tries."""
    value = row.get(name)
    # Some shells write every number as a float.
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < COUNTABLE and value % 1 == 0:
        return int(value)
    raise ValueError(f"expected a whole number from 0 on as its {name}, got {value!r:.100}")


def _poll(poll_id: str) -> str:
    return f"poll {poll_id}"
