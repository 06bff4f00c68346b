"""What a plane needs on one event loop: the store, a batcher for each lane, and the hub."""

from __future__ import annotations

import logging
import math
import random
import time
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable
from weakref import WeakSet

import anyio

from ..concurrency.loops import loop_token, run_sync_soon
from ..concurrency.portal import across, at_home
from ..concurrency.tasks import spawn
from ..errors import ClaimLost, LakeshoreError, PlaneUnavailable
from ..ids import check_id, check_queue, new_id
from .batcher import Batcher
from .contract.news import Kind, news_of
from .contract.operations import (
    Beat,
    Cancel,
    Claim,
    Claimed,
    Fence,
    Finish,
    Operation,
    Requeue,
    Submit,
    weight_of,
    whole_priority,
)
from .contract.records import Outcome, RowFilter
from .contract.store import Store
from .hub import Hub, Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

__all__ = ["Claimer", "Engine", "Outage", "claiming", "itself", "opened", "persist", "submitting"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

T = TypeVar("T")
S = TypeVar("S", bound=Store)
E = TypeVar("E")

MAX_DESCRIBERS, DESCRIBE_TIMEOUT = 4, 1.0
"""How many at a time may ask, after a wait in vain, how the invocation stands; and for how many seconds."""


@runtime_checkable
class AtOnce(Protocol):
    """A store that can apply a small batch without a wait, on its home loop."""

    def apply_at_once(self, ops: Sequence[Operation]) -> Sequence[Any] | None:
        """What `Store.apply` does, with nothing in between; None when it cannot be done so now."""
        ...


class Engine:
    """What a plane needs on one event loop: the store, a batcher a lane, and the hub."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.hub = Hub(self._watch)
        self.closed = False
        self._lanes: dict[str, Batcher[Operation, Any]] = {}
        self._alone: WeakSet[Batcher[Operation, Any]] = WeakSet()
        self._looks: Batcher[str, Outcome] = Batcher(self._outcomes)
        self._at_once = store if isinstance(store, AtOnce) and at_home(store.home) else None
        self._orphans: set[anyio.Event] = set()
        self._describers = 0
        self.cancel_on_close: set[str] = set()
        """Invocations to cancel when this engine closes: their callers, whose calls they are, have not said goodbye."""

    def do(self, op: Operation) -> Awaitable[Any]:
        """Apply one operation, in a batch with those that come meanwhile."""
        return self._lane(op)(op)

    async def many(self, ops: Sequence[Operation]) -> list[Any]:
        """Apply `ops` in order; for each its answer or exception."""
        answers: list[Any] = []
        for lane, run in groupby(ops, self.store.lane):  # lanes know no order among each other
            some = list(run)
            for together in [some] if lane is not None else [[op] for op in some]:
                answers += await self._lane(together[0]).many(together)
        return answers

    def _lane(self, op: Operation) -> Batcher[Operation, Any]:
        if self.closed:
            raise PlaneUnavailable("the plane was closed")
        name = self.store.lane(op)
        if name is None:
            alone = self._batcher()
            self._alone.add(alone)
            return alone
        if name not in self._lanes:
            self._lanes[name] = self._batcher()
        return self._lanes[name]

    def _batcher(self) -> Batcher[Operation, Any]:
        at_once = None if self._at_once is None else self._commit_at_once
        return Batcher(self._commit, size=weight_of, orphan=self._orphan, at_once=at_once)

    async def _commit(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers = await across(self.store.home, self.store.apply, ops)
        self._tell(ops, answers)
        return answers

    def _commit_at_once(self, ops: Sequence[Operation]) -> Sequence[Any] | None:
        answers = None if self._at_once is None else self._at_once.apply_at_once(ops)
        if answers is not None:
            self._tell(ops, answers)
        return answers

    def _tell(self, ops: Sequence[Operation], answers: Sequence[Any]) -> None:
        """Wake those of this process whom `ops` concern."""
        if self.hub.waiting:
            # What most batches of a busy worker hold, and what nobody in its process waits for.
            idle = None if self.hub.waits("id") or self.hub.waits("journal") else Finish
            for op, answer in zip(ops, answers, strict=True):
                if type(op) is not idle and not isinstance(answer, Exception):
                    for news in news_of(op, answer):
                        self.hub.publish(news)

    def _orphan(self, op: Operation, answer: Any) -> None:
        """The caller left while its operation was under way: what it claimed goes back."""
        if not isinstance(op, Claim) or isinstance(answer, Exception) or not answer:
            return
        claims: list[Claimed] = answer
        back = [Requeue(Fence(claimed.id, op.worker, claimed.attempt)) for claimed in claims]
        gone = anyio.Event()
        self._orphans.add(gone)

        async def requeue() -> None:
            for result in await self.many(back):
                if isinstance(result, Exception) and not isinstance(result, ClaimLost):
                    logger.warning("a claim whose caller left could not go back: %s", result)

        def ended() -> None:
            self._orphans.discard(gone)
            gone.set()

        spawn(requeue, ended)

    def outcome(self, id: str) -> Awaitable[Outcome]:
        """How an invocation stands; reads that come together are one."""
        return self._looks(id)

    async def _outcomes(self, ids: Sequence[str]) -> Sequence[Outcome]:
        return await across(self.store.home, self.store.outcomes, ids)

    async def describe(self, id: str) -> str:
        """How an invocation stands, in words. That is one read for each that asks: it is left where many do, or it lasts."""
        if self._describers < MAX_DESCRIBERS:
            self._describers += 1
            try:
                with anyio.move_on_after(DESCRIBE_TIMEOUT):
                    for row in await self.read(self.store.rows, RowFilter(id=id, limit=1)):
                        return row.describe()
            except LakeshoreError as exc:
                logger.debug("how invocation %s stands cannot be said: %s", id, exc)
            finally:
                self._describers -= 1
        return "it goes on"

    async def read(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Call a read of the store."""
        if self.closed:
            raise PlaneUnavailable("the plane was closed")
        return await across(self.store.home, fn, *args)

    async def _watch(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._tick)
            await self.store.watch(self.hub, self.hub.publish)

    async def _tick(self) -> None:
        while True:
            await anyio.sleep(self.store.net * random.uniform(0.8, 1.2))
            try:
                for op in await self.read(self.store.due):
                    await self.do(op)
            except LakeshoreError as exc:
                if self.closed:
                    return
                logger.warning("the plane could not be asked what is due: %s", exc)

    async def settled(self) -> None:
        """Return once the claims of callers who have left by now are back in their queues, or were never made."""
        for lane in [*self._lanes.values(), *self._alone]:
            await lane.settled()
        for orphan in list(self._orphans):
            await orphan.wait()

    async def close(self) -> None:
        """Wake the waiters, wait for what is under way and for orphans, and close the store."""
        self.hub.close()
        await self.hub.ended()
        for lane in [*self._lanes.values(), *self._alone]:
            await lane.idle()
        for orphan in list(self._orphans):
            await orphan.wait()
        self.closed = True
        await self._looks.idle()
        if self.cancel_on_close:
            await across(self.store.home, self.store.apply, [Cancel(id) for id in self.cancel_on_close])
            self.cancel_on_close.clear()
        await across(self.store.home, self.store.close)


class Outage:
    """A plane that does not answer: one line is said when that lasts, one when it is over; and who waits for its end."""

    LOG_AFTER = 5.0
    LOG_AFTER_AT_START = 0.5
    """Seconds after the question for a far plane that has not answered yet: its address may be wrong. Not for who has so
    little patience that the error itself comes soon."""
    WAKE_AFTER = 0.5
    """Seconds of silence whose end wakes those who pause: not so where some requests fail and others do not."""

    def __init__(self, plane: str, *, far: bool = False) -> None:
        self.far = far
        """It is reached by an operation only, not by being opened."""
        self._plane, self._since, self._logged, self._answered = plane, 0.0, False, not far
        self._pausing: set[Callable[[], object]] = set()  # on any event loop

    def record_failure(self, exc: PlaneUnavailable, patience: float, asked: float = math.inf) -> None:
        """It did not answer. `asked`: when it was asked for the first time, of `time.monotonic`."""
        now = time.monotonic()
        self._since = self._since or now
        lasts = now - self._since >= self.LOG_AFTER
        if not self._answered and patience >= self.LOG_AFTER:
            lasts = lasts or now - asked >= self.LOG_AFTER_AT_START
        if lasts and not self._logged:
            self._logged = True
            logger.warning(
                "%s does not answer; it is asked again for %g s, by a worker for as long as it takes: %s",
                self._plane,
                patience,
                exc,
            )

    async def pause(self, seconds: float) -> None:
        """Sleep before asking again, and no longer than until somebody else's request has been answered."""
        self._since, woken = self._since or time.monotonic(), anyio.Event()
        wake = partial(run_sync_soon, loop_token(), woken.set)
        self._pausing.add(wake)
        try:
            with anyio.move_on_after(seconds):
                await woken.wait()
        finally:
            self._pausing.discard(wake)

    def record_answer(self) -> None:
        again, self._answered = " again" if self._answered else "", True
        if not self._since:
            return
        silent = time.monotonic() - self._since
        if self._logged:
            logger.warning("%s answers%s, after %.0f s", self._plane, again, silent)
        self._since, self._logged = 0.0, False
        for wake in list(self._pausing) if silent >= self.WAKE_AFTER else ():
            wake()


async def persist(
    engine: Callable[[], Awaitable[Engine]],
    fn: Callable[[Engine], Awaitable[T]],
    patience: float,
    outage: Outage,
) -> T:
    """Call `fn` with the engine, again and again while the plane is out of reach: for `patience` seconds, and not after the
    plane was closed, which that would open again. In the caller's task, which may be cancelled."""
    delay, until, first, asked = 0.05, None, None, time.monotonic()
    while True:
        try:
            found = await fn(first := first or await engine())
        except PlaneUnavailable as exc:
            now = anyio.current_time()
            until = now + patience if until is None else until
            if now >= until or (first is not None and first.hub.closed):
                raise
            outage.record_failure(exc, patience, asked)
        else:
            if found is not first or not outage.far:
                outage.record_answer()
            return found
        await outage.pause(delay * random.uniform(0.5, 1.5))
        delay = min(delay * 2, 5.0)


async def opened(store: S, make: Callable[[S], E]) -> E:
    """The engine of a store, which is opened for it; an opening that failed, or whose caller has left, leaves nothing."""
    try:
        await across(store.home, store.open)
    except BaseException:  # also when it was done on the portal's loop just before its caller was cancelled
        with anyio.CancelScope(shield=True):
            await across(store.home, store.close)
        raise
    return make(store)


async def itself(engine: Engine) -> Engine:
    return engine


def submitting(
    queue: str,
    body: bytes,
    *,
    id: str | None = None,
    key: str | None = None,
    priority: float = 0,
    parent: str | None = None,
) -> Submit:
    """The operation of a submit, checked."""
    id = new_id() if id is None else check_id(id)
    check_queue(queue)
    return Submit(id, queue, body, key, whole_priority(priority) if priority else 0, parent)


def claiming(queues: Sequence[str], worker: str, limit: int, lease: float | None, max_lost: int) -> Claim:
    """The operation of a claim, checked."""
    for queue in queues:
        check_queue(queue)
    if lease is not None and not 0 < lease < math.inf:
        raise ValueError(f"expected a lease in seconds above 0, or None, got {lease!r}")
    return Claim(tuple(queues), worker, limit, lease, max_lost)


class Claimer:
    """Claims of one worker, one after the other: in between it stays among those whom news of their queues wakes."""

    def __init__(
        self, engine: Callable[[], Awaitable[Engine]], do: Callable[[Operation], Awaitable[Any]], op: Claim
    ) -> None:
        self._engine, self._do, self._op = engine, do, op
        self._topics: list[tuple[Kind, str]] = [("queue", queue) for queue in op.queues]
        self._waiter, self._emptied = Waiter(), False
        self._hub: Hub | None = None

    async def try_claim(self, limit: int) -> list[Claimed]:
        """Take up to `limit` invocations that are due now."""
        found: list[Claimed] = await self._do(self._op._replace(limit=limit))
        return found

    async def claim(self, limit: int, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        """Take up to `limit` due invocations, waiting for the first as long as it takes.

        keep: the worker's claims. After a long wait they are renewed first, or it might be given one of them again: this
        process, or the way to the plane, may have stood still. After a claim that found fewer than it might have taken
        nothing is there but what news tells of.
        """
        op, waiter = self._op._replace(limit=limit), self._waiter
        while True:
            engine = await self._engine()
            if engine.hub is not self._hub:
                self.stop_waiting()
                engine.hub.subscribe(self._topics, waiter)
                self._hub = engine.hub
            if engine.hub.closed:
                raise PlaneUnavailable("the plane was closed during a wait")
            if self._emptied:
                began = anyio.current_time()
                await waiter.event.wait()
                self._emptied = False
                if keep and op.lease is not None and anyio.current_time() - began > op.lease / 2:
                    await self._do(Beat(op.worker, tuple(keep), op.lease))
                continue
            if waiter.event.is_set():
                waiter.event = anyio.Event()
            found: list[Claimed] = await self._do(op)
            self._emptied = len(found) < limit
            if found:
                return found

    def stop_waiting(self) -> None:
        """Wait for nothing until the next claim: what comes meanwhile is for others."""
        self._emptied = False
        hub, self._hub = self._hub, None
        if hub is not None:
            hub.unsubscribe(self._topics, self._waiter)
