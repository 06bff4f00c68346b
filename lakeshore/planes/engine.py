"""What a plane needs on one event loop: the store, a batcher for each of its lanes, and the hub."""

from __future__ import annotations

import logging
import random
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, TypeVarTuple, runtime_checkable
from weakref import WeakSet

import anyio

from ..concurrency.portal import across, at_home
from ..concurrency.tasks import spawn
from ..errors import ClaimLost, LakeshoreError, PlaneUnavailable
from .batcher import Batcher
from .contract.news import news_of
from .contract.operations import Cancel, Claim, Claimed, Fence, Finish, Operation, Requeue, weight_of
from .contract.records import Outcome, Page, Row, RowFilter
from .hub import Hub

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from .contract.store import Store

__all__ = ["Engine", "open_store"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_DESCRIBERS = 4
"""Callers that may read at the same time how an invocation stands, to put it into the error of their timeout."""
DESCRIBE_TIMEOUT = 1.0
"""Seconds after which such a caller gives up that read."""


@runtime_checkable
class AppliesAtOnce(Protocol):
    """A store that can apply a small batch without waiting, on its home loop."""

    def apply_at_once(self, ops: Sequence[Operation]) -> Sequence[Any] | None:
        """Do what `Store.apply` does, in one step of the event loop; None where that is not possible now."""
        ...


class Engine:
    """One plane on one event loop."""

    def __init__(self, store: Store, plane: str = "the plane") -> None:
        """
        Args:
            store: It is open; the engine closes it.
            plane: The plane's name in errors.
        """
        self.store = store
        self.hub = Hub(self._watch, plane)
        self.closed = False
        self._is_at_home = at_home(store.home)
        self._lanes: dict[str, Batcher[Operation, Any]] = {}
        self._alone: WeakSet[Batcher[Operation, Any]] = WeakSet()
        self._outcomes: Batcher[str, Outcome] = Batcher(self._read_outcomes)
        self._at_once = store if isinstance(store, AppliesAtOnce) and self._is_at_home else None
        self._orphans: set[anyio.Event] = set()
        self._describers = 0
        self.cancel_on_close: set[str] = set()
        """Invocations to cancel when this engine closes: calls whose callers left without cancelling them."""

    # --- operations ---

    def do(self, op: Operation) -> Awaitable[Any]:
        """Apply one operation, in a batch with those that come meanwhile."""
        name = self.store.lane(op)
        lane = None if name is None else self._lanes.get(name)
        return (lane or self._lane(name))(op)

    async def many(self, ops: Sequence[Operation]) -> list[Any]:
        """Apply `ops` in order.

        Returns:
            For each its answer or exception.
        """
        answers: list[Any] = []
        for lane, run in groupby(ops, self.store.lane):  # there is no order between lanes
            if lane is not None:
                answers += await self._lane(lane).many(list(run))
                continue
            for op in list(run):
                answers += await self._lane(None).many([op])
        return answers

    def _lane(self, name: str | None) -> Batcher[Operation, Any]:
        """The batcher of a lane; of lane None a new one for each operation."""
        if self.closed:
            raise PlaneUnavailable("the plane was closed")
        if name is None:
            alone = self._new_batcher()
            self._alone.add(alone)
            return alone
        lane = self._lanes.get(name)
        if lane is None:
            lane = self._lanes[name] = self._new_batcher()
        return lane

    def _new_batcher(self) -> Batcher[Operation, Any]:
        at_once = None if self._at_once is None else self._commit_at_once
        return Batcher(self._commit, size=weight_of, orphan=self._give_back, at_once=at_once)

    async def _commit(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers = await self._call_store(self.store.apply, ops)
        if self.hub.waiting:
            self._publish(ops, answers)
        return answers

    def _commit_at_once(self, ops: Sequence[Operation]) -> Sequence[Any] | None:
        answers = None if self._at_once is None else self._at_once.apply_at_once(ops)
        if answers is not None and self.hub.waiting:
            self._publish(ops, answers)
        return answers

    def _publish(self, ops: Sequence[Operation], answers: Sequence[Any]) -> None:
        """Wake the waiters of this event loop that `ops` concern."""
        # Most operations of a busy worker are Finish, and often nobody in its process waits for an end.
        skipped = None if self.hub.waits("id") or self.hub.waits("journal") else Finish
        for op, answer in zip(ops, answers, strict=True):
            if type(op) is not skipped and not isinstance(answer, Exception):
                for news in news_of(op, answer):
                    self.hub.publish(news)

    def _give_back(self, op: Operation, answer: Any) -> None:
        """Return what an operation has claimed to its queue, since its caller was cancelled meanwhile."""
        if not isinstance(op, Claim) or isinstance(answer, Exception) or not answer:
            return
        claims: list[Claimed] = answer
        back = [Requeue(Fence(claimed.id, op.worker, claimed.attempt)) for claimed in claims]

        async def requeue() -> None:
            for result in await self.many(back):
                if isinstance(result, Exception) and not isinstance(result, ClaimLost):
                    logger.warning("a claim of a cancelled caller could not be returned to its queue: %s", result)

        self.spawn_orphan(requeue)

    def spawn_orphan(self, fn: Callable[[], Awaitable[None]]) -> None:
        """Run `fn` for a caller that was cancelled, in a task that `settled` and `close` wait for."""
        done = anyio.Event()
        self._orphans.add(done)

        def ended() -> None:
            self._orphans.discard(done)
            done.set()

        spawn(fn, ended)

    # --- reads ---

    async def read(self, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
        """Await a read of the store, `fn(*args)`, on the store's home loop."""
        if self.closed:
            raise PlaneUnavailable("the plane was closed")
        return await self._call_store(fn, *args)

    def _call_store(self, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> Awaitable[T]:
        """Call a method of the store on its home loop."""
        if self._is_at_home:
            return fn(*args)
        return across(self.store.home, fn, *args)

    async def read_store(self, fn: Callable[[Store], Awaitable[T]]) -> T:
        return await self.read(fn, self.store)

    def outcome(self, id: str) -> Awaitable[Outcome]:
        """How an invocation stands; calls that come at the same time are one read."""
        return self._outcomes(id)

    async def _read_outcomes(self, ids: Sequence[str]) -> Sequence[Outcome]:
        return await self._call_store(self.store.outcomes, ids)

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        return await self.read(self.store.outcomes, ids)

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self.read(self.store.page, id, since, limit, max_bytes)

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return await self.read(self.store.cancels, worker)

    async def rows(self, filter: RowFilter) -> list[Row]:
        return await self.read(self.store.rows, filter)

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        return await self.read(self.store.counts, queue, state)

    async def ages(self) -> dict[str, float]:
        return await self.read(self.store.ages)

    async def describe(self, id: str) -> str:
        """How an invocation stands, as a part of a sentence, for the error of a timeout.

        Each call is a read of its own. Therefore there is none where many callers ask at once, and none that takes long.
        """
        if self._describers < MAX_DESCRIBERS:
            self._describers += 1
            try:
                with anyio.move_on_after(DESCRIBE_TIMEOUT):
                    for row in await self.rows(RowFilter(id=id, limit=1)):
                        return row.describe()
            except LakeshoreError as exc:
                logger.debug("the state of invocation %s could not be read: %s", id, exc)
            finally:
                self._describers -= 1
        return "it goes on"

    # --- watching ---

    async def _watch(self) -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(self._tick)
            await self.store.watch(self.hub, self.hub.publish)

    async def _tick(self) -> None:
        """Do what is due by the clock, at intervals of about `store.net` seconds."""
        while True:
            await anyio.sleep(self.store.net * random.uniform(0.8, 1.2))
            try:
                for op in await self.read(self.store.due):
                    await self.do(op)
            except LakeshoreError as exc:
                if self.closed:
                    return
                logger.warning("the operations that are due could not be read or applied: %s", exc)

    # --- the end ---

    async def settled(self) -> None:
        """Return once the claims of callers cancelled by now are back in their queues, or were never made."""
        for lane in [*self._lanes.values(), *self._alone]:
            await lane.settled()
        for orphan in list(self._orphans):
            await orphan.wait()

    async def close(self) -> None:
        """Wake the waiters, wait for what is under way and for the orphans, and close the store."""
        self.hub.close()
        await self.hub.ended()
        for lane in [*self._lanes.values(), *self._alone]:
            await lane.idle()
        for orphan in list(self._orphans):
            await orphan.wait()
        self.closed = True
        self._lanes.clear()
        await self._outcomes.idle()
        if self.cancel_on_close:
            await self._call_store(self.store.apply, [Cancel(id) for id in self.cancel_on_close])
            self.cancel_on_close.clear()
        await self._call_store(self.store.close)


async def open_store(store: Store) -> None:
    """Open a store for an engine. An opening that fails, or whose caller is cancelled, leaves nothing open."""
    try:
        await across(store.home, store.open)
    except BaseException:  # also where it was opened on the portal's loop just before its caller was cancelled
        with anyio.CancelScope(shield=True):
            await across(store.home, store.close)
        raise
