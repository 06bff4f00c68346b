"""Claim: take due rows in order of priority and submit time, one findAndModify for each.

A claim whose answer was lost, by a cancellation or a broken connection, is given back later by its poll id.
"""

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

LOST_ANSWER_TIMEOUT = 30.0
"""Seconds for which claims whose answers were lost are given back: the database may still be working on them."""
MAX_KNOWN_DELAYS = 10_000
"""The most delays that an engine remembers; later ones are found by polling."""
MAX_CONCURRENT_CLAIMS = 8
"""Claims of one set of queues that run at the same time."""
MAX_GATES = 1000
"""The most sets of queues that are remembered before unused ones are dropped."""
MAX_REJECTIONS = 5
"""Rejected claims in a row, not counting those whose cause has been removed meanwhile."""
MAX_EXACT_FLOAT = 2.0**53
"""From here on a float does not represent every whole number."""
_PROJECTION = {"result": 0, "error": 0, "final": 0}


class _Gate:
    """Limits the concurrent claims of one set of queues: one new row must not cause a query of every idle claimer.

    emptied: the start number of the last claim that found nothing. Claims that arrived before it need no query.
    """

    def __init__(self) -> None:
        self.room = anyio.Semaphore(MAX_CONCURRENT_CLAIMS)
        self.emptied = -1


class Claims:
    """The claims of one engine, and the delays that it knows of."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._lost: dict[str, tuple[str, tuple[str, ...], float]] = {}  # by poll id: worker, queues, time limit
        self._delays: list[float] = []
        self._gates: dict[tuple[tuple[str, ...], bool], _Gate] = {}
        self._turns = count()

    def add_delay(self, until: float) -> None:
        """Note that a row becomes due at `until`, by the database's clock."""
        if len(self._delays) < MAX_KNOWN_DELAYS:
            heapq.heappush(self._delays, until)

    async def claim(self, op: Claim) -> list[Claimed]:
        """Take rows. After an interruption they are given back before the next claim, or returned to the repeated poll."""
        check_names(worker=op.worker, poll=op.poll_id)
        if self._lost:
            await self.give_back_lost()
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
            if len(self._gates) >= MAX_GATES:
                self._gates = {
                    key: gate for key, gate in self._gates.items() if gate.room.value < MAX_CONCURRENT_CLAIMS
                }
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
                self._lost[poll] = op.worker, op.queues, time.monotonic() + LOST_ANSWER_TIMEOUT
            raise

    async def _take(self, op: Claim, poll: str) -> list[Document]:
        db = self._db
        rows: list[Document] = []
        promoted = False
        if self._delays and self._delays[0] <= db.clock.now():
            await self.promote()
        queues = list(dict.fromkeys(op.queues))
        # Only equalities on the fields of the claim index, and its sort order: see INDEXES in `documents`.
        due: Document = {"ns": db.ns, "state": "queued", "due": True}
        due["runConfig.queue"] = queues[0] if len(queues) == 1 else {"$in": queues}
        if op.lease is None:
            due["nextSeq"] = 0  # a worker without leases numbers its frames from 0
        rejections = 0
        while len(rows) < op.limit:
            try:
                row = await db.invocations.find_one_and_update(
                    due,
                    claim_update(op.worker, poll, op.lease, op.max_lost, db.clock.now()),
                    sort=CLAIM_SORT,
                    projection=_PROJECTION,
                    return_document=ReturnDocument.AFTER,
                )
            except OperationFailure as exc:
                # Only a rejection: after any other failure a row may have been taken.
                if type(foreign(exc, db.name)) is not DispatchError:
                    raise
                if await self._end_uncountable(due):
                    rejections = 0
                else:
                    rejections += 1
                if rejections == MAX_REJECTIONS:
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
        """Fail the first due row if its attempt is not a number, which makes every claim of the queue fail.

        Returns whether such a row was there and is gone.
        """
        fields = {"attempt": 1, "state": 1}
        row = await self._db.invocations.find_one(due, fields, sort=CLAIM_SORT)
        if row is None:
            return False
        try:
            _count(row, "attempt")
        except ValueError as exc:
            if await self._fail(row, str(exc)):
                return True
            # It could not be failed: unless somebody has changed it, the next claim would find it again.
            return await self._db.invocations.find_one(due, fields, sort=CLAIM_SORT) != row
        return False

    async def _again(self, op: Claim) -> list[Claimed]:
        """The claims that this poll took and still holds, with their leases renewed."""
        assert op.poll_id is not None
        db = self._db
        mine = {"ns": db.ns, "state": "running", "worker": op.worker, "pollId": _poll(op.poll_id)}
        rows = await db.invocations.find(mine, _PROJECTION).to_list()
        if any(row.get("lease") is not None for row in rows):
            ids = [row["_id"] for row in rows]
            renew = {"$set": lease_fields(op.lease, db.clock.now())}
            await db.invocations.update_many(mine | {"_id": {"$in": ids}, "lease": {"$ne": None}}, renew)
        rows.sort(key=_claim_order)
        return await self._readable(rows)

    async def _readable(self, rows: list[Document]) -> list[Claimed]:
        """Decode claimed rows. A row that cannot be decoded is failed, or every claim of its queue would stop at it."""
        found: list[Claimed] = []
        for row in rows:
            try:
                found.append(await self._claimed(row))
            except (BytesLost, KeyError, TypeError, ValueError, AttributeError) as exc:
                await self._fail(row, f"{type(exc).__name__}: {exc!s:.200}")
        return found

    async def _fail(self, row: Document, reason: str) -> bool:
        """Fail a row that cannot be decoded, unless it has changed meanwhile. Returns whether it was failed."""
        message = f"its document, or what that refers to, cannot be read: {reason}"
        update = unreadable_update(Failure("WireError", message).as_dict(), self._db.clock.now())
        unchanged: Document = {}
        for name in ("_id", "state", "worker", "pollId", "attempt"):
            if name in row:
                unchanged[name] = {"$eq": row[name]}
        result = await self._db.invocations.update_one(unchanged, update)
        if result.matched_count == 0:
            return False
        logger.warning("invocation %r failed: %s", row["_id"], message)
        return True

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
        """Make rows due whose delay is over. Returns their number."""
        db = self._db
        now = db.clock.now()
        while self._delays and self._delays[0] <= now:
            heapq.heappop(self._delays)
        over = {"ns": db.ns, "due": False, "wakeAt": {"$lte": date(now)}}
        update = {"$set": {"due": True, "notBefore": None, "wakeAt": None}}
        return (await db.invocations.update_many(over, update)).modified_count

    async def give_back_lost(self) -> set[str]:
        """Give back rows of claims whose answers were lost. Returns the queues in which rows may be due again."""
        if not self._lost:
            return set()
        db = self._db
        lost = dict(self._lost)
        workers = list({worker for worker, _, _ in lost.values()})
        taken = {"ns": db.ns, "state": "running", "worker": {"$in": workers}, "pollId": {"$in": list(lost)}}
        given = await db.invocations.update_many(taken, requeue_update(False, None, None))
        now = time.monotonic()
        for poll, (_, _, until) in lost.items():
            if until <= now:
                self._lost.pop(poll, None)
        if not given.modified_count:
            return set()
        return {queue for _, queues, _ in lost.values() for queue in queues}


def _claim_order(row: Document) -> tuple[float, Timestamp]:
    """The sort key of CLAIM_SORT for rows that are already read."""
    priority = row.get("priority")
    if not isinstance(priority, int | float):
        priority = 0
    submitted = row.get("submittedAt")
    if not isinstance(submitted, Timestamp):
        submitted = Timestamp(0, 0)
    return -priority, submitted


def _count(row: Document, name: str) -> int:
    """Read a counter. Anything but a whole number would fail the whole batch of the update that adds to it."""
    value = row.get(name)
    # The shells of some databases write every number as a float.
    if (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value < MAX_EXACT_FLOAT
        and value % 1 == 0
    ):
        return int(value)
    raise ValueError(f"expected a whole number from 0 on as its {name}, got {value!r:.100}")


def _poll(poll_id: str) -> str:
    return f"poll {poll_id}"
