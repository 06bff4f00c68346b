"""A plane whose far side holds waits: nothing is looked for here before it is waited for there."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from ..concurrency.portal import across
from ..concurrency.tasks import spawn
from ..errors import InvocationNotFound, PlaneUnavailable
from ..ids import check_id, new_id
from ..limits import MAX_BYTES_PER_PAGE, MAX_FRAMES_PER_PAGE, MAX_SEQ, POLL_TIMEOUT
from .contract.news import Cursor, Kind
from .contract.operations import Beat, Beaten, Claim, Claimed, Operation, Submit
from .contract.records import TERMINAL, Outcome, Page
from .contract.store import Store
from .engine import Engine, Outage, opened
from .hub import Waiter
from .plane import Plane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .batcher import Batcher

__all__ = ["EARLY_ANSWER_PAUSE", "RemotePlane", "poll_timeout"]

EARLY_ANSWER_PAUSE = 0.05
"""After an answer of nothing that came far before its time."""


def poll_timeout() -> float:
    """Seconds for one poll: not the same for all, or those that began in step would all come back in step for ever."""
    return POLL_TIMEOUT * random.uniform(0.75, 1.0)


class RemoteStore(Store, Protocol):
    """A store whose far side holds what has a `wait`."""

    async def abandon(self, op: Operation) -> None:
        """The caller of an operation that is held has gone."""
        ...

    async def begin_close(self) -> None:
        """From now on no request takes long: the plane is being closed."""
        ...


class RemoteEngine(Engine):
    """The engine of a far side that holds operations, and may be silent."""

    def __init__(self, store: RemoteStore) -> None:
        super().__init__(store)
        self._far = store
        self._holding: dict[Batcher[Operation, Any], Operation] = {}

    async def hold(self, op: Operation) -> Any:
        """Apply one operation that the far side may hold; it is told when the caller leaves, or the plane is closed.

        Not so when the answer is lost: who asks again under the same name must not have let go meanwhile.
        """
        batcher = self._batcher()
        self._holding[batcher] = op
        try:
            answer = await batcher(op)
        except PlaneUnavailable:
            self._holding.pop(batcher, None)
            raise
        except BaseException:
            self._end_poll(batcher)
            raise
        self._holding.pop(batcher, None)
        return answer

    def abandon(self, op: Operation) -> None:
        """The caller of an operation whose answer was lost asks no more."""
        batcher = self._batcher()
        self._holding[batcher] = op
        self._end_poll(batcher)

    def _end_poll(self, batcher: Batcher[Operation, Any]) -> None:
        op = self._holding.pop(batcher, None)
        if op is None:
            return
        gone = anyio.Event()
        self._orphans.add(gone)

        async def abandon() -> None:
            await across(self._far.home, self._far.abandon, op)
            await batcher.idle()

        def ended() -> None:
            self._orphans.discard(gone)
            gone.set()

        spawn(abandon, ended)

    async def close(self) -> None:
        """As `Engine.close`, within a few seconds also where nothing answers."""
        await across(self._far.home, self._far.begin_close)
        self.hub.close()
        for batcher in list(self._holding):
            self._end_poll(batcher)
        await super().close()


class RemoteClaimer:
    """Claims of one worker, one after the other: each a poll that the far side holds. See `planes.engine.Claimer`."""

    def __init__(self, plane: RemotePlane, op: Claim) -> None:
        self._plane, self._op = plane, op

    async def try_claim(self, limit: int) -> list[Claimed]:
        return await self._plane.poll(self._op._replace(limit=limit), 0.0)

    async def claim(self, limit: int, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        return await self._plane.poll(self._op._replace(limit=limit), None, keep)

    def stop_waiting(self) -> None:
        """Nothing waits between two claims."""


class RemotePlane(Plane):
    """The waits of `Plane`, as polls that the far side answers when there is something.

    News that the store's `watch` brings is the thing itself, an outcome or a page; a hint without it, which comes after
    failures, makes the waiter look, and raise what it then finds.
    """

    _make_store: Callable[[], RemoteStore]

    def __init__(self, make_store: Callable[[], RemoteStore], name: str, *, ns: str = "default") -> None:
        super().__init__(make_store, name, ns=ns)
        self._outage = Outage(name, far=True)
        self._renewals: dict[str, Beat] = {}  # by worker: what each has to keep

    async def _open(self) -> RemoteEngine:
        return await opened(self._make_store(), RemoteEngine)

    def claimer(self, queues: Sequence[str], worker: str, *, lease: float, max_lost: int) -> Any:
        return RemoteClaimer(self, self._claim(queues, worker, 1, lease, max_lost))

    async def poll(self, op: Claim, timeout: float | None, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        """As `Plane.poll`; a lost answer is asked for again. keep: the worker's claims, which are renewed before it asks
        again: it may have been given nothing only because they were about to go, or have gone meanwhile."""
        until = None if timeout is None else anyio.current_time() + timeout
        while True:
            left = math.inf if until is None else max(0.0, until - anyio.current_time())
            asked = op._replace(poll_id=op.poll_id or new_id(), wait=min(left, poll_timeout()), busy=bool(keep))
            began = anyio.current_time()
            renewal = None if not keep or op.lease is None else Beat(op.worker, tuple(keep), op.lease)
            found: list[Claimed] = await self._held(asked, renewal)
            if found or (until is not None and anyio.current_time() >= until):
                return found
            if renewal is not None:
                await self.do(renewal)
            await _pause(began, asked.wait)

    async def _held(self, op: Claim, keep: Beat | None) -> Any:
        first: Any = None
        lost = False

        async def ask(engine: Any) -> Any:
            nonlocal first, lost
            again, first, lost = lost, engine, False
            try:
                renewal = (keep or self._renewals.get(op.worker)) if again else None
                if renewal is not None:  # after an outage, before it is given what is only waiting for this
                    await engine.do(renewal)
                return await (engine.hold(op) if op.wait > 0 else engine.do(op))
            except PlaneUnavailable:
                lost = True
                raise

        try:
            answer = await self._persist(ask)
        except BaseException:
            if lost:
                first.abandon(op)
            raise
        if not answer:  # the end of the plane ends its polls too
            self._check_open(first)
        return answer

    async def next_cancels(
        self, worker: str, timeout: float, known: Collection[tuple[str, int]] = ()
    ) -> list[tuple[str, int]]:
        """As `Plane.next_cancels`; while the plane is out of reach there is nothing to be told, for `timeout` seconds."""
        until = anyio.current_time() + timeout
        first: Any = await self._persist(_itself)
        while True:
            left = max(0.0, until - anyio.current_time())
            try:
                began = anyio.current_time()
                beaten = await first.hold(Beat(worker, (), 30.0, wait=left, known=tuple(known)))
                if not (found := [claim for claim in beaten.cancel if claim not in known]):
                    await _pause(began, left)
                return found
            except PlaneUnavailable:
                self._check_open(first)
                if left <= 0:
                    return []
            await anyio.sleep(min(left, random.uniform(0.25, 0.75)))

    async def beat(self, worker: str, claims: Sequence[tuple[str, int]], lease: float) -> Beaten:
        """As `Plane.beat`; asked again sooner than other verbs, since after an outage every second counts."""
        until, first = anyio.current_time() + self.patience, await self._persist(_itself)
        renewal = self._renewals[worker] = Beat(worker, tuple(claims), lease)
        while True:
            try:
                answer: Beaten = await first.do(renewal)
                if self._renewals.get(worker) is renewal:
                    del self._renewals[worker]
                return answer
            except PlaneUnavailable:
                self._check_open(first)
                if anyio.current_time() >= until:
                    raise
            await self.pause(min(1.0, lease / 10) * random.uniform(0.5, 1.5))

    async def pause(self, seconds: float) -> None:
        """Sleep before asking again what was not answered, and no longer than until something else is."""
        await self._outage.pause(seconds)

    async def _outcome(self, id: str, submit: Submit | None = None) -> Outcome:
        if submit is not None:
            id = await self.do(submit)
        engine = await self._persist(_itself)
        topics: list[tuple[Kind, str]] = [("id", id)]
        waiter = Waiter()
        engine.hub.subscribe(topics, waiter)
        try:
            while True:
                self._check_open(engine)
                await waiter.event.wait()
                outcome, waiter.outcome, waiter.event = waiter.outcome, None, anyio.Event()
                if outcome is None:
                    self._check_open(engine)  # or a look would open it again
                    outcome = await self._ended(id)
                elif outcome.state == "unknown":
                    raise InvocationNotFound(id)
                if outcome is not None and outcome.state in TERMINAL:
                    return outcome
        finally:
            engine.hub.unsubscribe(topics, waiter)

    async def next_page(
        self,
        id: str,
        since: int,
        *,
        limit: int = MAX_FRAMES_PER_PAGE,
        max_bytes: int = MAX_BYTES_PER_PAGE,
        timeout: float | None = None,
    ) -> Page:
        cursor = Cursor(check_id(id), max(-1, min(since, MAX_SEQ)), limit, max_bytes)
        with anyio.move_on_after(timeout):
            return await self._page_after(cursor)
        page = await self.page(id, since, limit=limit, max_bytes=max_bytes)  # not before it has looked
        if page.frames or page.closed:
            return page
        raise TimeoutError(
            f"invocation {id!r} had no frame after {since} within {timeout} s; read on with since={since}"
        )

    async def _page_after(self, cursor: Cursor) -> Page:
        engine = await self._persist(_itself)
        topics: list[tuple[Kind, str]] = [("journal", cursor.id)]
        waiter = Waiter(cursor=cursor)
        engine.hub.subscribe(topics, waiter)
        try:
            while True:
                self._check_open(engine)
                await waiter.event.wait()
                page, waiter.page, waiter.event = waiter.page, None, anyio.Event()
                if page is None:
                    self._check_open(engine)
                    page = await self.page(cursor.id, cursor.since, limit=cursor.limit, max_bytes=cursor.max_bytes)
                if page.frames or page.closed:
                    return page
        finally:
            engine.hub.unsubscribe(topics, waiter)


async def _pause(began: float, wait: float) -> None:
    """After an answer with nothing that came far too soon: a far side that holds nothing is not asked in a circle."""
    if anyio.current_time() - began < wait / 2:
        await anyio.sleep(min(wait, EARLY_ANSWER_PAUSE))


async def _itself(engine: Engine) -> Engine:
    return engine
