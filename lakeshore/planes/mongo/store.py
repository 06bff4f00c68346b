"""The fleet plane: `MongoDispatch`, a `Plane` over MongoDB that any number of machines share, and the store below it."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

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
from . import append as frames
from . import changes, sweeps, watch
from . import read as reads
from . import restore as moves
from .claim import Claims
from .connection import Database, call_driver, check_mongo_url, check_redis_url, guarded, shown_url
from .submit import submit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

    from ..contract.records import Outcome, Page, Row, RowFilter
    from ..contract.store import Interest
    from .redis_news import Live

__all__ = ["MongoDispatch", "MongoStore"]

T = TypeVar("T")

SIDE_BY_SIDE = 16
"""Operations of one batch that are under way at once, of the kinds that are one update each."""
GOODBYE = 2.0
DRIFT = 60.0
"""Seconds after which the clock of the database is read by an engine in which nobody waits."""

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


class MongoStore:
    """One engine's access to the database, and to Redis where there is one. The drivers live on asyncio only."""

    home: Literal["asyncio", "portal"] = "asyncio"
    net = 0.5

    def __init__(self, plane: MongoDispatch) -> None:
        self._plane = plane
        self._db: Database
        self._live: Live | None = None
        self._since: float | None = None
        self._read = 0.0

    async def open(self) -> None:
        """Connect, make indexes that are missing, and read the database's clock."""
        plane = self._plane
        self._db = Database(plane.mongo_url, plane.ns, repr(plane))
        self._claims = Claims(self._db)
        await self._db.open()
        self._read = time.monotonic()
        if plane.redis_url is not None:
            from .redis_news import Live

            self._live = Live(plane.redis_url, self._db.uid, plane.ns, self._db.births)
        self._since = self._db.clock.now() if plane.serving else None

    async def close(self) -> None:
        """Give back what claims took whose answers were lost, and disconnect; also what an opening that failed has left."""
        live, self._live = self._live, None
        db: Database | None = getattr(self, "_db", None)
        with anyio.move_on_after(GOODBYE), suppress(LakeshoreError):
            if db is not None:
                await call_driver(db.name, self._claims.settle)
        if live is not None:
            await live.close()
        if db is not None:
            await db.close()

    # Operations

    def lane(self, op: Operation) -> str | None:
        """A lane for each kind, so that what can be one round trip is; a claim is one each, beside all others."""
        if type(op) is Claim:
            return None
        large = weight_of(op) > LARGE_BYTES
        return _LANES[type(op)] + "-large" if large else _LANES[type(op)]

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Each kind as it is sent best; then the news, which nobody waits for."""
        answers: list[Any] = []
        births = {} if self._live is None else self._births(ops)
        with guarded(self._db.name):
            if time.monotonic() - self._read > DRIFT:
                self._read = time.monotonic()
                await self._db.clock.read()
            for kind, run in groupby(ops, type):
                some: list[Any] = list(run)
                if kind in (Submit, Restore):
                    self._db.births.forget(op.id for op in some)
                if kind is Submit:
                    answers += await self._bulk(some, lambda ops: submit(self._db, ops))
                elif kind is Finish:
                    answers += await self._in_rounds(some, lambda ops: changes.finish(self._db, ops))
                elif kind is Append:
                    answers += await self._in_rounds(some, lambda ops: frames.append(self._db, ops))
                elif kind is Restore:
                    answers += await self._in_rounds(some, lambda ops: moves.restore(self._db, ops))
                else:
                    answers += await self._each(some)
        self._tell(ops, answers, births)
        return answers

    async def _bulk(self, ops: list[Any], send: Callable[[list[Any]], Awaitable[list[Any]]]) -> list[Any]:
        """Operations in one go; alone each where one of them is what no document can hold."""
        try:
            with guarded(self._db.name):
                return await send(ops)
        except ValueError as exc:
            if len(ops) == 1:
                return [exc]
        return [answer for op in ops for answer in await self._bulk([op], send)]

    async def _in_rounds(self, ops: list[Any], send: Callable[[list[Any]], Awaitable[list[Any]]]) -> list[Any]:
        """The same for operations on rows: those of one row one after the other."""
        answers: list[Any] = [None] * len(ops)
        for places in _rounds(ops):
            for place, answer in zip(places, await self._bulk([ops[place] for place in places], send), strict=True):
                answers[place] = answer
        return answers

    async def _each(self, ops: list[Any]) -> list[Any]:
        """Operations that are one update each: side by side, but those of one row one after the other."""
        answers: list[Any] = [None] * len(ops)
        limiter = anyio.Semaphore(SIDE_BY_SIDE)

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
                return await changes.beat(self._db, op)
            case Requeue():
                return await changes.requeue(self._db, self._claims, op)
            case Cancel():
                return await changes.cancel(self._db, op)
            case Reap():
                return await sweeps.reap(self._db, self._claims, op)
            case Purge():
                return await sweeps.purge(self._db, op)
            case _:
                raise TypeError(f"no operation of the contract: {op!r:.100}")

    def _births(self, ops: Sequence[Operation]) -> dict[str, str]:
        """Which invocations are about to end, of those that are known: told afterwards, it might be of a later one."""
        known = self._db.births.known
        return {op.fence.id: birth for op in ops if isinstance(op, Finish) and (birth := known(op.fence.id))}

    def _tell(self, ops: Sequence[Operation], answers: Sequence[Any], births: Mapping[str, str]) -> None:
        """What other engines are to know, through Redis."""
        live = self._live
        if live is None:
            return
        news: list[News] = []
        for op, answer in zip(ops, answers, strict=True):
            if isinstance(answer, Exception):
                continue
            if isinstance(op, Append):
                appended: Appended = answer
                if appended.duplicates == 0:  # what is repeated was added when it was new
                    live.add(op.fence.id, op.first_seq, op.frames)
            news += news_of(op, answer)
        live.tell(news, births)

    # Reads

    def _ask(self, read: Callable[..., Awaitable[T]], *args: Any) -> Awaitable[T]:
        return call_driver(self._db.name, read, *args)

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        return await self._ask(reads.outcomes, self._db, ids)

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self._ask(frames.page, self._db, self._live, id, since, limit, max_bytes)

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return await self._ask(reads.cancels, self._db, worker)

    async def rows(self, filter: RowFilter) -> list[Row]:
        return await self._ask(reads.rows, self._db, filter)

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        return await self._ask(reads.counts, self._db, queue, state)

    async def ages(self) -> dict[str, float]:
        return await self._ask(reads.ages, self._db)

    async def copies(self, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
        return await self._ask(moves.copies, self._db, after, queues, limit, max_bytes)

    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        return await self._ask(moves.journal, self._db, id, since, limit, max_bytes)

    # What time and others do

    async def due(self) -> list[Operation]:
        """Whether a delay or a lease is over; and claims whose answers were lost go back."""
        return await self._ask(
            self._due,
        )

    async def _due(self) -> list[Operation]:
        await self._db.clock.refresh()
        self._read = time.monotonic()
        if (queues := await self._claims.settle()) and self._live is not None:
            self._live.tell([News("queue", queue) for queue in queues])
        if await reads.is_due(self._db, sweeps.since_limit(self._db, self._since)):
            return [Reap(since=self._since)]
        return []

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        await watch.watch(self._db, self._live, interest, tell)


def _rounds(ops: Sequence[Any]) -> Iterator[list[int]]:
    """The places of operations, in order, in as few lists as can be in which no row, or worker, comes twice."""
    rounds: list[list[int]] = []
    seen: dict[str, int] = {}
    for place, op in enumerate(ops):
        whose = op.worker if isinstance(op, Beat) else op.fence.id if hasattr(op, "fence") else getattr(op, "id", "")
        at = seen.get(whose, 0)
        seen[whose] = at + 1
        if at == len(rounds):
            rounds.append([])
        rounds[at].append(place)
    yield from rounds


class MongoDispatch(Plane):
    """The plane in MongoDB: any number of machines, and of servers behind one address, share it.

    mongo_url: mongodb://HOST:27017/DATABASE; the database is `lakeshore` where none is named, and its options are the
    driver's. redis_url: redis://HOST:6379/0, for wake-ups and live streams across engines; without it, and while it does
    not answer, the database is looked at several times a second while somebody waits. It holds frames of live streams and
    passes small results on, and has to be as private as the database. ns: whose invocations are seen.

    An async context manager, and usable without: the first use opens it. One object may be used from several event
    loops. Raises ValueError for an address that is none, PlaneUnavailable when the database does not answer,
    NotAuthorized when it refuses who asks. What is written here is never trusted: workers refuse its pickles by default.
    """

    def __init__(self, mongo_url: str, redis_url: str | None = None, *, ns: str = "default") -> None:
        self.mongo_url = check_mongo_url(mongo_url)
        self.redis_url = None if redis_url is None else check_redis_url(redis_url)
        shown = [shown_url(url) for url in (self.mongo_url, self.redis_url) if url is not None]
        super().__init__(lambda: MongoStore(self), f"MongoDispatch({', '.join(map(repr, shown))})", ns=ns)

    def within(self, ns: str) -> MongoDispatch:
        """The same database as another namespace sees it; it is closed on its own."""
        other = MongoDispatch(self.mongo_url, self.redis_url, ns=ns)
        other.serving, other.patience = self.serving, self.patience
        return other
