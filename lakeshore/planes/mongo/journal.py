"""Journals: pages of frames, from the database or, if it has them, from Redis."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bson.datetime_ms import DatetimeMS

from ...errors import InvocationNotFound
from ..contract.records import TERMINAL, Page
from .bodies import is_ref
from .documents import Document, birth_of, failure_in, final_frame, key_of, seconds
from .updates import projection

if TYPE_CHECKING:
    from pymongo.asynchronous.cursor import AsyncCursor

    from ..contract.records import Failure
    from .append import Frames
    from .connection import Database
    from .redis_news import RedisNews

__all__ = ["failure_of", "journal", "page", "settles"]

_PAGE = ("id", "state", "nextSeq", "closed", "final", "error", "submittedAt", "begins", "startedAt")


SETTLES = 5.0
"""Seconds after the begin of a claim for which frames of the one before it may still be on their way."""


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


async def page(db: Database, live: RedisNews | None, id: str, since: int, limit: int, max_bytes: int) -> Page:
    """Frames after `since`. The row is read before its frames: what it says then holds for the frames found."""
    key = key_of(db.ns, id)
    row = await db.invocations.find_one({"_id": key}, projection(_PAGE))
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
    db: Database, live: RedisNews | None, row: Document, found: _Gathered, since: int, error: Failure | None
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


async def _from_live(live: RedisNews, found: _Gathered, row: Document, since: int, upto: int) -> bool:
    """Whether Redis has all of the frames of a page, without a gap; then they are in it."""
    frames = await live.frames(row["id"], birth_of(row), since, min(upto, since + found.limit + 1))
    for seq, data in frames or ():
        if not found.fits(seq, len(data)):
            break
        found.add(seq, data)
    return frames is not None
