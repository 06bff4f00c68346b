"""What others change: heard through Redis, and looked for in the database where it is not there, or as a net."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING, Any

import anyio

from ...concurrency.portal import across
from ...errors import LakeshoreError
from ..contract.news import News
from .connection import call_driver
from .documents import Document, date, key_of, seconds
from .journal import settles
from .redis_messages import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.news import Kind
    from ..contract.store import Interest
    from .connection import Database
    from .redis_news import RedisNews

__all__ = ["watch"]

logger = logging.getLogger("dreamlake.lakeshore.mongo")

QUICK = 0.15
"""Seconds between two looks at the database while nothing else tells."""
SLOW = 1.0
"""Seconds between two looks as a net below Redis."""
RETRY = 0.5
HEAR = 5.0
ALL = 15.0
"""Seconds after which everybody who waits looks for himself."""
OVERLAP = 5.0
"""Seconds that a write may take from its time stamp to where it is seen, and a frame from its promise."""
MOST = 2000
MOST_JOURNALS = 500


async def watch(db: Database, live: RedisNews | None, interest: Interest, tell: Callable[[News], None]) -> None:
    """Tell what others change, until cancelled. On the waiters' loop; the drivers are asked on theirs."""
    for kind in KINDS:
        tell(News(kind))
    async with anyio.create_task_group() as group:
        if live is not None:
            group.start_soon(_listen, live, tell)
        await _look(db, live, interest, tell)


async def _listen(live: RedisNews, tell: Callable[[News], None]) -> None:
    while True:
        heard = await across("asyncio", live.hear, HEAR)
        if heard is None:
            await anyio.sleep(RETRY * random.uniform(0.5, 1.5))
            continue
        fresh, news = heard
        for one in news:
            tell(one)
        if fresh:  # what was told before nobody here has heard
            for kind in KINDS:
                tell(News(kind))


async def _look(db: Database, live: RedisNews | None, interest: Interest, tell: Callable[[News], None]) -> None:
    look, last = _Look(db), time.monotonic()
    while True:
        pause = QUICK if live is None or live.down else SLOW
        await anyio.sleep(pause * random.uniform(0.8, 1.2))
        if time.monotonic() - last >= ALL:
            last = time.monotonic()
            for kind in KINDS:
                tell(News(kind))
            continue
        wanted: dict[Kind, Sequence[str]] = {kind: interest.names(kind) for kind in KINDS if interest.waits(kind)}
        try:
            for news in await across("asyncio", call_driver, db.name, look.changes, wanted):
                tell(news)
        except LakeshoreError as exc:  # the engine, which asks what is due, says so
            logger.debug("the database could not be looked at: %s", exc)


class _Look:
    """What has changed since the last look, of what is waited for: a few small reads, however many wait."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._ended: dict[str, float] = {}  # told, with their times
        self._since = db.clock.now()
        self._grown: dict[str, tuple[Any, float]] = {}  # by journal: how far it was, and when that changed
        self._looked = self._since  # when at journals

    async def changes(self, wanted: dict[Kind, Sequence[str]]) -> list[News]:
        """On the loop of the driver."""
        news: list[News] = []
        if names := wanted.get("queue"):
            news += await self._queues(names)
        if wanted.get("id") or wanted.get("journal"):
            news += await self._ends()
        if names := wanted.get("journal"):
            news += await self._journals(names)
        if names := wanted.get("claims"):
            news += await self._cancels(names)
        return news

    async def _queues(self, names: Sequence[str]) -> list[News]:
        due: Document = {"ns": self._db.ns, "state": "queued", "due": True, "runConfig.queue": {"$in": list(names)}}
        return [News("queue")] if await self._db.invocations.find_one(due, {"_id": 1}) else []

    async def _ends(self) -> list[News]:
        now = self._db.clock.now()
        since, self._since = min(self._since, now) - OVERLAP, now
        recent = {"ns": self._db.ns, "finishedAt": {"$gte": date(since)}}
        found = self._db.invocations.find(recent, {"id": 1, "finishedAt": 1}).sort("finishedAt", 1).limit(MOST)
        rows = {str(row.get("id")): seconds(row["finishedAt"]) or 0.0 async for row in found}
        known, self._ended = self._ended, rows
        if len(rows) == MOST:
            return [News("id"), News("journal")]
        new = [id for id, at in rows.items() if known.get(id) != at]
        return [news for id in new for news in (News("id", id), News("journal", id))]

    async def _journals(self, names: Sequence[str]) -> list[News]:
        if len(names) > MOST_JOURNALS:
            return [News("journal")]
        keys = [key_of(self._db.ns, id) for id in names]
        found = self._db.invocations.find({"_id": {"$in": keys}}, {"id": 1, "nextSeq": 1, "startedAt": 1})
        now, before, self._grown = time.monotonic(), self._grown, {}
        clock = self._db.clock.now()
        looked, self._looked = self._looked, clock
        news: list[News] = []
        async for row in found:
            id, far, changed = str(row.get("id")), row.get("nextSeq"), now
            if (last := before.get(id)) is not None and last[0] == far:
                changed = last[1]
            self._grown[id] = far, changed
            if now - changed < OVERLAP or looked - SLOW < settles(row) <= clock:
                news.append(News("journal", id))
        return news

    async def _cancels(self, names: Sequence[str]) -> list[News]:
        asked = {"ns": self._db.ns, "state": "running", "worker": {"$in": list(names)}, "cancelRequested": True}
        return [News("claims")] if await self._db.invocations.find_one(asked, {"_id": 1}) else []
