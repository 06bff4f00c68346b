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

__all__ = ["failure_of", "journal", "page", "skip_time"]

_PAGE = ("id", "state", "nextSeq", "closed", "final", "error", "submittedAt", "begins", "startedAt")


MISSING_FRAMES_TIMEOUT = 5.0
"""Seconds after the start of a claim for which readers wait for missing frames of the claim before it."""


class _Gathered:
    """The frames of one page, up to its bounds.

    complete: whether nothing was left out. gapless: the number from which on no frame may be missing; None: any may.
    """

    def __init__(self, since: int, limit: int, max_bytes: int, gapless: int | None) -> None:
        self.frames: Frames = []
        self.complete = True
        self.limit = limit
        self._next = max(since, -1) + 1
        self._max_bytes = max_bytes
        self._gapless = gapless
        self._size = 0

    def fits(self, seq: int, length: int) -> bool:
        """Whether a frame of this number and length may be added; after the first that may not, the page ends."""
        if seq != self._next and self._gapless is not None and seq > self._gapless:
            self.complete = False
        elif len(self.frames) == self.limit or (self.frames and self._size + length > self._max_bytes):
            self.complete = False
        self._next = seq + 1
        self._size += length
        return self.complete

    def add(self, seq: int, data: bytes) -> None:
        self.frames.append((seq, data))


async def page(db: Database, live: RedisNews | None, id: str, since: int, limit: int, max_bytes: int) -> Page:
    """Read the frames after `since`. The row is read first, so its state holds for all frames that are found."""
    key = key_of(db.ns, id)
    row = await db.invocations.find_one({"_id": key}, projection(_PAGE))
    if row is None:
        raise InvocationNotFound(id)
    state = row["state"]
    ended = state in TERMINAL
    closed = row["closed"] is not None
    if (
        closed and not ended and row["closed"]["seq"] >= 0
    ):  # an append closed it, and its frames may not be inserted yet
        closed = await db.frames.find_one({"invocation": key, "seq": row["closed"]["seq"]}, {"_id": 1}) is not None
    whole = ended or closed
    found = _Gathered(since, limit, max_bytes, None if whole else _gapless_from(db, row))
    error = await failure_of(db, row) if ended else None
    await _gather(db, live, row, found, since, error)
    return Page(found.frames, whole and found.complete, state, error)


def skip_time(row: Document) -> float:
    """The time at which readers skip missing frames of earlier claims; 0 if no claim has started."""
    if not isinstance(row.get("startedAt"), DatetimeMS):
        return 0.0
    started = seconds(row["startedAt"])
    if started is None:
        return 0.0
    return started + MISSING_FRAMES_TIMEOUT


def _gapless_from(db: Database, row: Document) -> int:
    """The number from which on every reserved frame is there or will come: earlier claims write nothing any more."""
    if 0.0 < skip_time(row) <= db.clock.now():
        return int(row["begins"])
    return 0


async def journal(db: Database, row: Document, since: int, limit: int, max_bytes: int) -> tuple[Frames, bool]:
    """The frames after `since`, with or without gaps, and whether more follow."""
    found = _Gathered(since, limit, max_bytes, None)
    await _gather(db, None, row, found, since, await failure_of(db, row))
    return found.frames, not found.complete


async def failure_of(db: Database, row: Document) -> Failure | None:
    """The error of a document, wherever it is stored."""
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
    """Take the frames of a page from Redis. Returns False, and takes none, unless Redis has all of them."""
    frames = await live.frames(row["id"], birth_of(row), since, min(upto, since + found.limit + 1))
    for seq, data in frames or ():
        if not found.fits(seq, len(data)):
            break
        found.add(seq, data)
    return frames is not None
