"""Watch for changes by other engines: through Redis, and by polling the database if Redis is down or misses news."""

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
from .journal import skip_time
from .redis_messages import KINDS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.news import Kind
    from ..contract.store import Interest
    from .connection import Database
    from .redis_news import RedisNews

__all__ = ["watch"]

logger = logging.getLogger("dreamlake.lakeshore.mongo")

POLL_INTERVAL = 0.15
"""Seconds between two polls of the database without Redis."""
REDIS_POLL_INTERVAL = 1.0
"""Seconds between two polls of the database while Redis delivers news."""
RETRY_PAUSE = 0.5
"""Seconds before the next attempt to reach Redis."""
RECEIVE_TIMEOUT = 5.0
"""Seconds of one wait for news from Redis."""
WAKE_ALL_INTERVAL = 15.0
"""Seconds after which every waiting caller reads for itself, in case a change was missed."""
VISIBILITY_DELAY = 5.0
"""Seconds until a write is visible after its time stamp, and a frame after its number was reserved."""
MAX_ENDS = 2000
"""The most ended invocations that one poll reads; if there are more, all waiting callers are woken."""
MAX_JOURNALS = 500
"""The most journals that one poll compares; if there are more, all their readers are woken."""


async def watch(db: Database, redis: RedisNews | None, interest: Interest, publish: Callable[[News], None]) -> None:
    """Publish changes by others until cancelled. Runs on the loop of the waiting callers; drivers run on their own."""
    for kind in KINDS:
        publish(News(kind))
    async with anyio.create_task_group() as group:
        if redis is not None:
            group.start_soon(_receive, redis, publish)
        await _poll(db, redis, interest, publish)


async def _receive(redis: RedisNews, publish: Callable[[News], None]) -> None:
    while True:
        received = await across("asyncio", redis.receive, RECEIVE_TIMEOUT)
        if received is None:
            await anyio.sleep(RETRY_PAUSE * random.uniform(0.5, 1.5))
            continue
        fresh, news = received
        for one in news:
            publish(one)
        if fresh:  # earlier news was missed
            for kind in KINDS:
                publish(News(kind))


async def _poll(db: Database, redis: RedisNews | None, interest: Interest, publish: Callable[[News], None]) -> None:
    changes = _Changes(db)
    last = time.monotonic()
    while True:
        pause = REDIS_POLL_INTERVAL
        if redis is None or redis.down:
            pause = POLL_INTERVAL
        await anyio.sleep(pause * random.uniform(0.8, 1.2))
        if time.monotonic() - last >= WAKE_ALL_INTERVAL:
            last = time.monotonic()
            for kind in KINDS:
                publish(News(kind))
            continue
        wanted: dict[Kind, Sequence[str]] = {kind: interest.names(kind) for kind in KINDS if interest.waits(kind)}
        try:
            for news in await across("asyncio", call_driver, db.name, changes.read, wanted):
                publish(news)
        except LakeshoreError as exc:  # the engine logs it when it asks for what is due
            logger.debug("polling the database failed: %s", exc)


class _Changes:
    """Reads what has changed since the last poll: a few small queries however many callers wait."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._ended: dict[str, float] = {}  # published, with their times
        self._since = db.clock.now()
        self._grown: dict[str, tuple[Any, float]] = {}  # by journal: its next number, and when that changed
        self._journals_read_at = self._since

    async def read(self, wanted: dict[Kind, Sequence[str]]) -> list[News]:
        """Read the news; runs on the loop of the driver."""
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
        since = min(self._since, now) - VISIBILITY_DELAY
        self._since = now
        recent = {"ns": self._db.ns, "finishedAt": {"$gte": date(since)}}
        found = self._db.invocations.find(recent, {"id": 1, "finishedAt": 1}).sort("finishedAt", 1).limit(MAX_ENDS)
        rows = {str(row.get("id")): seconds(row["finishedAt"]) or 0.0 async for row in found}
        known = self._ended
        self._ended = rows
        if len(rows) == MAX_ENDS:
            return [News("id"), News("journal")]
        news: list[News] = []
        for id, at in rows.items():
            if known.get(id) != at:
                news += [News("id", id), News("journal", id)]
        return news

    async def _journals(self, names: Sequence[str]) -> list[News]:
        if len(names) > MAX_JOURNALS:
            return [News("journal")]
        keys = [key_of(self._db.ns, id) for id in names]
        found = self._db.invocations.find({"_id": {"$in": keys}}, {"id": 1, "nextSeq": 1, "startedAt": 1})
        now = time.monotonic()
        before = self._grown
        self._grown = {}
        clock = self._db.clock.now()
        last_read = self._journals_read_at
        self._journals_read_at = clock
        news: list[News] = []
        async for row in found:
            id = str(row.get("id"))
            next_seq = row.get("nextSeq")
            changed = now
            last = before.get(id)
            if last is not None and last[0] == next_seq:
                changed = last[1]
            self._grown[id] = next_seq, changed
            skips_now = last_read - REDIS_POLL_INTERVAL < skip_time(row) <= clock
            if now - changed < VISIBILITY_DELAY or skips_now:
                news.append(News("journal", id))
        return news

    async def _cancels(self, names: Sequence[str]) -> list[News]:
        asked = {"ns": self._db.ns, "state": "running", "worker": {"$in": list(names)}, "cancelRequested": True}
        return [News("claims")] if await self._db.invocations.find_one(asked, {"_id": 1}) else []
