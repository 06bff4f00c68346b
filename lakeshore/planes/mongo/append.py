"""Journals: frames are appended under a fence in two round trips, for many invocations at a time, and read in pages.

First the row promises the numbers, by one update whose condition is the fence; then the frames are inserted. A claim that
comes in between begins after all that was promised, so a late frame never takes a number of the next attempt. What breaks
off between the two is repeated by its writer, who finds its numbers promised and its frames missing. If the writer is gone,
too, nobody ever fills them: readers go on behind them once another claim has begun.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from bson import Int64
from bson.datetime_ms import DatetimeMS

from ...errors import ClaimLost, InvocationNotFound, PlaneUnavailable
from ..contract.failures import claim_lost
from ..contract.operations import Append, Appended
from ..contract.records import TERMINAL, Page
from .bodies import FRAME, is_ref
from .changes import FENCE, speaking, update_each
from .connection import DUPLICATE, Database, foreign
from .documents import Document, birth_of, failure_in, final_frame, holds, key_of, seconds
from .submit import as_exception, insert_errors
from .updates import names, revived

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pymongo.asynchronous.cursor import AsyncCursor

    from ..contract.records import Failure
    from .redis_news import Live

__all__ = ["append", "failure_of", "journal", "page", "settles"]

Frames: TypeAlias = list[tuple[int, bytes]]

_PAGE = ("id", "state", "nextSeq", "closed", "final", "error", "submittedAt", "begins", "startedAt")
_JOURNAL = (*FENCE, "nextSeq", "closed", "final", "error")
_TRIES = 5
SETTLES = 5.0
"""Seconds after the begin of a claim for which frames of the one before it may still be on their way."""


def _last(op: Append) -> int:
    return op.first_seq + len(op.frames) - 1


def _closing(op: Append, attempt: int) -> Document:
    return {"closed": {"seq": Int64(_last(op)), "attempt": attempt}} if op.final else {}


async def append(db: Database, ops: Sequence[Append]) -> list[Any]:
    """Append to different journals: two round trips where each goes on where its journal ends."""
    answers: list[Any] = [None] * len(ops)
    token = secrets.token_hex(8)
    plain: dict[int, tuple[Document, Any]] = {}
    for at, op in enumerate(ops):
        if op.first_seq < 0 or not op.frames:
            answers[at] = ValueError(
                f"an append takes frames from seq 0 on, not {len(op.frames)} from seq {op.first_seq}"
            )
        elif op.fence.attempt is not None and op.fence.worker is not None:
            ready = speaking(db, op.fence) | {"state": "running", "closed": None, "nextSeq": op.first_seq}
            promise = {"nextSeq": Int64(_last(op) + 1), "appendId": token} | _closing(op, op.fence.attempt)
            plain[at] = ready, {"$set": promise}
    promised, asked = set(plain), time.monotonic()
    if await update_each(db, list(plain.values())) < len(plain):
        keys = [ready["_id"] for ready, _ in plain.values()]
        mine = db.invocations.find({"_id": {"$in": keys}, "appendId": token}, {"_id": 1}) if len(plain) > 1 else None
        held = set[str]() if mine is None else {row["_id"] async for row in mine}
        promised = {at for at, (ready, _) in plain.items() if ready["_id"] in held}
    if time.monotonic() - asked > SETTLES / 2:  # readers may be about to go on behind these numbers: ask again
        promised.clear()
    parts: list[Document] = []
    of: list[int] = []
    for at in sorted(promised):
        some = await _documents(db, ops[at], range(len(ops[at].frames)), ops[at].fence.attempt or 0)
        parts += some
        of += [at] * len(some)
    refused = await insert_errors(db, db.frames, parts) if parts else {}
    again = {of[place] for place in refused}
    for at, op in enumerate(ops):
        if answers[at] is None and at in promised and at not in again:
            answers[at] = Appended(len(op.frames), 0)
        elif answers[at] is None:
            try:
                answers[at] = await _append_slowly(db, op)
            except (ClaimLost, InvocationNotFound) as exc:
                answers[at] = exc
    return answers


async def _documents(db: Database, op: Append, places: Sequence[int], attempt: int) -> list[Document]:
    key = key_of(db.ns, op.fence.id)
    return [
        {
            "invocation": key,
            "seq": Int64(op.first_seq + place),
            "attempt": attempt,
            "final": op.final and place == len(op.frames) - 1,
            "bytes": await db.bodies.stow(op.frames[place], FRAME, key),
        }
        for place in places
    ]


async def _append_slowly(db: Database, op: Append) -> Appended:
    """An append that is a repeat, fills a gap, is refused, or whose claim had lapsed: judged in the contract's order."""
    key, count = key_of(db.ns, op.fence.id), len(op.frames)
    written = 0
    for _ in range(_TRIES):
        row = await db.invocations.find_one({"_id": key}, names(_JOURNAL))
        if row is None:
            raise InvocationNotFound(op.fence.id)
        attempt: int = row["attempt"] if op.fence.attempt is None else op.fence.attempt
        there = await _there(db, row, op)
        missing = [place for place in range(count) if there.get(op.first_seq + place) != attempt]
        if not missing:
            return Appended(written, count - written)
        if not holds(row, op.fence):
            raise claim_lost(op.fence, row["state"], row["attempt"])
        closing = _closing(op, attempt)
        if row["closed"] is not None and row["closed"] != closing.get("closed"):  # its own promise may be half kept
            raise ClaimLost(op.fence.id, "its journal is closed")
        for seq in (op.first_seq + place for place in missing):
            if seq in there:
                raise ClaimLost(op.fence.id, f"frame {seq} is there from attempt {there[seq]}")
        change: Document = dict(closing)
        if row["lapsed"]:
            change |= revived(row["lease"], db.clock.now())
        change["nextSeq"] = {"$max": ["$nextSeq", Int64(_last(op) + 1)]}
        seen = speaking(db, op.fence) | {"attempt": row["attempt"], "lapsed": row["lapsed"], "closed": row["closed"]}
        if not await update_each(db, [(seen, [{"$set": change}])]):
            continue
        documents = await _documents(db, op, missing, row["attempt"])
        refused = await insert_errors(db, db.frames, documents)
        written += len(documents) - len(refused)
        for error in refused.values():
            if error.get("code") != DUPLICATE:
                raise foreign(as_exception(error), db.name)
        if not refused:
            return Appended(written, count - written)
        await db.bodies.drop(documents[place]["bytes"] for place in refused)
    raise PlaneUnavailable(f"the journal of {op.fence.id!r} changed under each of {_TRIES} appends")


async def _there(db: Database, row: Document, op: Append) -> dict[int, int]:
    """The numbers of the append that the journal has, each with the attempt that wrote it."""
    first, last = op.first_seq, _last(op)
    there: dict[int, int] = {}
    if first < row["nextSeq"]:
        run = {"invocation": row["_id"], "seq": {"$gte": first, "$lte": last}}
        async for frame in db.frames.find(run, {"seq": 1, "attempt": 1}):
            there[int(frame["seq"])] = frame["attempt"]
    if (final := row["final"]) is not None and first <= final["seq"] <= last:
        there[int(final["seq"])] = final["attempt"]
    return there


# Pages --------------------------------------------------------------------------------------------------------------


class _Gathered:
    """Frames of one page, up to its bounds. complete: nothing was left out. gapless: the number from which on none may be
    missing; None: any may."""

    def __init__(self, since: int, limit: int, max_bytes: int, gapless: int | None) -> None:
        self.frames: Frames = []
        self.complete = True
        self._next, self.limit, self._max_bytes, self._gapless = max(since, -1) + 1, limit, max_bytes, gapless
        self._size = 0

    def fits(self, seq: int, length: int) -> bool:
        """Whether a frame of this number and length may be added; after one that may not there are no more."""
        if seq != self._next and self._gapless is not None and seq > self._gapless:
            self.complete = False
        elif len(self.frames) == self.limit or (self.frames and self._size + length > self._max_bytes):
            self.complete = False
        self._next, self._size = seq + 1, self._size + length
        return self.complete

    def add(self, seq: int, data: bytes) -> None:
        self.frames.append((seq, data))


async def page(db: Database, live: Live | None, id: str, since: int, limit: int, max_bytes: int) -> Page:
    """Frames after `since`. The row is read before its frames: what it says then holds for the frames found."""
    key = key_of(db.ns, id)
    row = await db.invocations.find_one({"_id": key}, names(_PAGE))
    if row is None:
        raise InvocationNotFound(id)
    state, ended = row["state"], row["state"] in TERMINAL
    closed = row["closed"] is not None
    if closed and not ended and row["closed"]["seq"] >= 0:  # by an append, whose frames may still be on their way
        closed = await db.frames.find_one({"invocation": key, "seq": row["closed"]["seq"]}, {"_id": 1}) is not None
    whole = ended or closed
    found = _Gathered(since, limit, max_bytes, None if whole else _written_from(db, row))
    error = await failure_of(db, row) if ended else None
    await _gather(db, live, row, found, since, error)
    return Page(found.frames, whole and found.complete, state, error)


def settles(row: Document) -> float:
    """When readers go on behind what the claims before the last one have not written; 0 where there is no claim."""
    began = seconds(row["startedAt"]) if isinstance(row.get("startedAt"), DatetimeMS) else None
    return 0.0 if began is None else began + SETTLES


def _written_from(db: Database, row: Document) -> int:
    """The number from which on every frame that was promised is there, or will be: what claims before the last one have not
    written by now, they never do."""
    return int(row["begins"]) if 0.0 < settles(row) <= db.clock.now() else 0


async def journal(db: Database, row: Document, since: int, limit: int, max_bytes: int) -> tuple[Frames, bool]:
    """Frames after `since` of an invocation's document, gaps or not; whether more follow."""
    found = _Gathered(since, limit, max_bytes, None)
    await _gather(db, None, row, found, since, await failure_of(db, row))
    return found.frames, not found.complete


async def failure_of(db: Database, row: Document) -> Failure | None:
    """The error in a document, wherever it stands."""
    error = row.get("error")
    return failure_in(await db.bodies.whole(error) if is_ref(error) else error)


async def _gather(
    db: Database, live: Live | None, row: Document, found: _Gathered, since: int, error: Failure | None
) -> None:
    final = row["final"]
    upto = int(row["nextSeq"] if final is None else final["seq"]) - 1
    if upto > since and not (live is not None and await _from_live(live, found, row, since, upto)):
        await _from_database(db, found, row["_id"], since)
    if final is not None and final["seq"] > since and found.complete:
        data = await db.bodies.whole(final["bytes"])
        last = final_frame(row, data, error)
        if last is not None and found.fits(last[0], len(last[1])):
            found.add(*last)


async def _from_database(db: Database, found: _Gathered, key: str, since: int) -> None:
    run = {"invocation": key, "seq": {"$gt": since}}
    cursor: AsyncCursor[Document] = db.frames.find(run, {"seq": 1, "bytes": 1}).sort("seq", 1)
    if found.limit < 1000:
        cursor = cursor.limit(found.limit + 1)
    async with cursor:
        async for frame in cursor:
            data = frame["bytes"]
            if not found.fits(int(frame["seq"]), data["length"] if is_ref(data) else len(data)):
                return
            found.add(int(frame["seq"]), await db.bodies.whole(data) or b"")


async def _from_live(live: Live, found: _Gathered, row: Document, since: int, upto: int) -> bool:
    """Whether Redis has all of the frames of a page, without a gap; then they are in it."""
    frames = await live.frames(row["id"], birth_of(row), since, min(upto, since + found.limit + 1))
    for seq, data in frames or ():
        if not found.fits(seq, len(data)):
            break
        found.add(seq, data)
    return frames is not None
