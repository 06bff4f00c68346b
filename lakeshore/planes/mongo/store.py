"""The fleet plane: `MongoDispatch`, a plane over MongoDB that any number of machines share, and its store."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

import anyio

from ...errors import LakeshoreError
from ...limits import LARGE_BYTES
from ..contract.news import News, news_of
from ..contract.operations import (
    Append,
    Appended,
    Beat,
    Cancel,
    Claim,
    Finish,
    Operation,
    Purge,
    Reap,
    Requeue,
    Restore,
    Submit,
    weight_of,
)
from ..plane import Plane
from . import read, watch
from .append import append
from .beat import beat
from .cancel import cancel
from .claim import Claims
from .connection import Database, call_driver, check_mongo_url, check_redis_url, guarded, shown_url
from .finish import finish
from .journal import page
from .purge import purge
from .reap import reap, since_limit
from .requeue import requeue
from .restore import copies, journal_of, restore
from .submit import submit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from ..contract.records import Outcome, Page, Row, RowFilter
    from ..contract.store import Interest
    from .redis_news import RedisNews

__all__ = ["MongoDispatch", "MongoStore"]

T = TypeVar("T")
BulkOperation: TypeAlias = "Callable[[Database, list[Any]], Awaitable[list[Any]]]"

MAX_CONCURRENT_UPDATES = 16
"""Single-row updates of one batch that run at the same time."""
CLOSE_TIMEOUT = 2.0
"""Seconds that closing may take to give back claims whose answers were lost."""
CLOCK_READ_INTERVAL = 60.0
"""Seconds after which an engine without waiting callers reads the database's clock again."""

_LANES: dict[type[Any], str] = {
    Submit: "submit",
    Finish: "finish",
    Append: "append",
    Beat: "beat",
    Requeue: "requeue",
    Cancel: "cancel",
    Reap: "sweep",
    Purge: "sweep",
    Restore: "restore",
}


_BULK: dict[type[Any], BulkOperation] = {Finish: finish, Append: append, Restore: restore}
"""Operations on existing rows of which many are one round trip."""


class MongoStore:
    """One engine's access to the database and, if there is one, to Redis. Both drivers need asyncio."""

    home: Literal["asyncio", "portal"] = "asyncio"
    net = 0.5

    def __init__(self, plane: MongoDispatch) -> None:
        self._plane = plane
        self._db: Database
        self._redis: RedisNews | None = None
        self._since: float | None = None
        self._clock_read_at = 0.0

    async def open(self) -> None:
        """Connect, create missing indexes, and read the database's clock."""
        plane = self._plane
        self._db = Database(plane.mongo_url, plane.ns, repr(plane))
        self._claims = Claims(self._db)
        await self._db.open()
        self._clock_read_at = time.monotonic()
        if plane.redis_url is not None:
            from .redis_news import RedisNews

            self._redis = RedisNews(plane.redis_url, self._db.uid, plane.ns, self._db.incarnations)
        self._since = self._db.clock.now() if plane.serving else None

    async def close(self) -> None:
        """Give back claims whose answers were lost, and disconnect; also after an opening that failed."""
        redis, self._redis = self._redis, None
        db: Database | None = getattr(self, "_db", None)
        with anyio.move_on_after(CLOSE_TIMEOUT), suppress(LakeshoreError):
            if db is not None:
                await call_driver(db.name, self._claims.give_back_lost)
        if redis is not None:
            await redis.close()
        if db is not None:
            await db.close()

    # Operations

    def lane(self, op: Operation) -> str | None:
        """One lane for each kind of operation, so that many are one round trip; each claim runs alone."""
        if type(op) is Claim:
            return None
        lane = _LANES[type(op)]
        if weight_of(op) > LARGE_BYTES:
            return f"{lane}-large"
        return lane

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Apply operations, each kind in as few round trips as it allows; then publish the news without waiting."""
        answers: list[Any] = []
        incarnations: Mapping[str, str] = {}
        if self._redis is not None:
            incarnations = self._known_incarnations(ops)
        with guarded(self._db.name):
            if time.monotonic() - self._clock_read_at > CLOCK_READ_INTERVAL:
                self._clock_read_at = time.monotonic()
                await self._db.clock.read()
            for kind, run in groupby(ops, type):
                some: list[Any] = list(run)
                if kind in (Submit, Restore):
                    self._db.incarnations.forget(op.id for op in some)
                if kind is Submit:
                    answers += await self._bulk(some, submit)
                elif kind in _BULK:
                    answers += await self._in_rounds(some, _BULK[kind])
                else:
                    answers += await self._each(some)
        self._publish(ops, answers, incarnations)
        return answers

    async def _bulk(self, ops: list[Any], send: BulkOperation) -> list[Any]:
        """Apply operations together; one by one if a document cannot hold one of them."""
        try:
            with guarded(self._db.name):
                return await send(self._db, ops)
        except ValueError as exc:
            if len(ops) == 1:
                return [exc]
        return [answer for op in ops for answer in await self._bulk([op], send)]

    async def _in_rounds(self, ops: list[Any], send: BulkOperation) -> list[Any]:
        """Apply operations on rows together; several operations on one row one after the other."""
        answers: list[Any] = [None] * len(ops)
        for places in _rounds(ops):
            for place, answer in zip(places, await self._bulk([ops[place] for place in places], send), strict=True):
                answers[place] = answer
        return answers

    async def _each(self, ops: list[Any]) -> list[Any]:
        """Apply operations that are one update each: concurrently, but those of one row one after the other."""
        answers: list[Any] = [None] * len(ops)
        limiter = anyio.Semaphore(MAX_CONCURRENT_UPDATES)

        async def answer(place: int) -> None:
            async with limiter:
                answers[place] = await self._alone(ops[place])

        for places in _rounds(ops):
            if len(places) == 1:
                answers[places[0]] = await self._alone(ops[places[0]])
                continue
            async with anyio.create_task_group() as group:
                for place in places:
                    group.start_soon(answer, place)
        return answers

    async def _alone(self, op: Operation) -> Any:
        try:
            with guarded(self._db.name):
                return await self._one(op)
        except (LakeshoreError, ValueError) as exc:
            return exc

    async def _one(self, op: Operation) -> Any:
        match op:
            case Claim():
                return await self._claims.claim(op)
            case Beat():
                return await beat(self._db, op)
            case Requeue():
                return await requeue(self._db, self._claims, op)
            case Cancel():
                return await cancel(self._db, op)
            case Reap():
                return await reap(self._db, self._claims, op)
            case Purge():
                return await purge(self._db, op)
            case _:
                raise TypeError(f"expected an operation of the contract, got {op!r:.100}")

    def _known_incarnations(self, ops: Sequence[Operation]) -> dict[str, str]:
        """The incarnations of the invocations that are about to end: afterwards the id might be used again."""
        known: dict[str, str] = {}
        for op in ops:
            if isinstance(op, Finish):
                incarnation = self._db.incarnations.known(op.fence.id)
                if incarnation:
                    known[op.fence.id] = incarnation
        return known

    def _publish(self, ops: Sequence[Operation], answers: Sequence[Any], incarnations: Mapping[str, str]) -> None:
        """Publish through Redis what other engines need to know."""
        redis = self._redis
        if redis is None:
            return
        news: list[News] = []
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(answer, Exception):
                continue
            if isinstance(op, Append):
                appended: Appended = answer
                if appended.duplicates == 0:  # duplicates were published when they were new
                    redis.add(op.fence.id, op.first_seq, op.frames)
            news += news_of(op, answer)
        redis.publish(news, incarnations)

    # Reads

    def _call(self, read: Callable[..., Awaitable[T]], *args: Any) -> Awaitable[T]:
        return call_driver(self._db.name, read, *args)

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        return await self._call(read.outcomes, self._db, ids)

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self._call(page, self._db, self._redis, id, since, limit, max_bytes)

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return await self._call(read.cancels, self._db, worker)

    async def rows(self, filter: RowFilter) -> list[Row]:
        return await self._call(read.rows, self._db, filter)

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        return await self._call(read.counts, self._db, queue, state)

    async def ages(self) -> dict[str, float]:
        return await self._call(read.ages, self._db)

    async def copies(self, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
        return await self._call(copies, self._db, after, queues, limit, max_bytes)

    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        return await self._call(journal_of, self._db, id, since, limit, max_bytes)

    # Time, and changes by others

    async def due(self) -> list[Operation]:
        """A Reap if a delay or a lease is over. Also gives back claims whose answers were lost."""
        return await self._call(self._due)

    async def _due(self) -> list[Operation]:
        await self._db.clock.refresh()
        self._clock_read_at = time.monotonic()
        if (queues := await self._claims.give_back_lost()) and self._redis is not None:
            self._redis.publish([News("queue", queue) for queue in queues])
        if await read.is_due(self._db, since_limit(self._db, self._since)):
            return [Reap(since=self._since)]
        return []

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        await watch.watch(self._db, self._redis, interest, tell)


def _rounds(ops: Sequence[Any]) -> Iterator[list[int]]:
    """The positions of operations, in order, in as few lists as possible so that no row or worker is twice in a list."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for place, op in enumerate(ops):
        if isinstance(op, Beat):
            subject = op.worker
        elif hasattr(op, "fence"):
            subject = op.fence.id
        else:
            subject = getattr(op, "id", "")
        number = seen.get(subject, 0)
        seen[subject] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(place)
    yield from rounds


class MongoDispatch(Plane):
    """A plane in MongoDB that any number of machines and servers share.

    mongo_url: `mongodb://HOST:27017/DATABASE`; the default database is `lakeshore`. Options of the address go to the driver.
    redis_url: `redis://HOST:6379/0`, for fast wake-ups and live streams between engines. Without it, and while it does not
        answer, engines with waiting callers poll the database several times a second. Redis holds frames of live streams
        and small results, so it must be as private as the database.
    ns: the namespace whose invocations are visible.

    An async context manager; without one, the first use opens it. One object may be used from several event loops.
    Workers refuse pickled functions of this plane by default.

    Raises ValueError for a malformed address, PlaneUnavailable if the database does not answer, and NotAuthorized if it
    rejects the credentials.
    """

    def __init__(self, mongo_url: str, redis_url: str | None = None, *, ns: str = "default") -> None:
        self.mongo_url = check_mongo_url(mongo_url)
        self.redis_url = None if redis_url is None else check_redis_url(redis_url)
        shown = [shown_url(url) for url in (self.mongo_url, self.redis_url) if url is not None]
        super().__init__(lambda: MongoStore(self), f"MongoDispatch({', '.join(map(repr, shown))})", ns=ns)

    def within(self, ns: str) -> MongoDispatch:
        """The same database with another namespace; close it separately."""
        other = MongoDispatch(self.mongo_url, self.redis_url, ns=ns)
        other.serving = self.serving
        other.patience = self.patience
        return other
