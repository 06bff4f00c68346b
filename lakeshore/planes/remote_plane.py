"""A plane behind a server that holds polls: callers wait there, and read nothing here before they wait."""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Protocol

import anyio

from ..concurrency.portal import across
from ..errors import InvocationNotFound, PlaneUnavailable
from ..ids import new_id
from ..limits import POLL_TIMEOUT
from .contract.operations import Beat, Beaten, Claim, Claimed, Operation, Submit
from .contract.records import TERMINAL, Outcome, Page
from .contract.store import Store
from .engine import Engine, open_store
from .hub import Waiter
from .outage import Outage
from .plane import Plane

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from .batcher import Batcher
    from .claimer import Claimer
    from .contract.news import Cursor

__all__ = ["EARLY_ANSWER_PAUSE", "RemotePlane", "poll_timeout"]

EARLY_ANSWER_PAUSE = 0.05
"""Seconds before the next poll, when a poll was answered with nothing long before its timeout."""
CANCELS_RETRY_PAUSE = 0.5
"""Seconds, about, before a poll for cancellations that got no answer is repeated."""


def poll_timeout() -> float:
    """Seconds for one poll. They vary, so that clients that began at the same time do not poll in step for ever."""
    return POLL_TIMEOUT * random.uniform(0.75, 1.0)


class RemoteStore(Store, Protocol):
    """A store whose server holds operations that have a `wait`."""

    async def abandon(self, op: Operation) -> None:
        """Report that the caller of an operation that the server may hold waits no more."""
        ...

    async def begin_close(self) -> None:
        """Let no request take long from now on, since the plane is being closed."""
        ...


class RemoteEngine(Engine):
    """The engine of a store whose server holds operations, and may be unreachable."""

    def __init__(self, store: RemoteStore, plane: str) -> None:
        super().__init__(store, plane)
        self._remote_store = store
        self._held: dict[Batcher[Operation, Any], Operation] = {}

    async def hold(self, op: Operation) -> Any:
        """Apply one operation that the server may hold.

        The server is told when the caller is cancelled or the plane is closed. When the answer was lost it is not: the
        caller repeats the operation under the same poll id, which a late report would end.
        """
        batcher = self._new_batcher()
        self._held[batcher] = op
        try:
            answer = await batcher(op)
        except PlaneUnavailable:
            self._held.pop(batcher, None)
            raise
        except BaseException:
            self._end_poll(batcher)
            raise
        self._held.pop(batcher, None)
        return answer

    def abandon(self, op: Operation) -> None:
        """Report that an operation whose answer was lost is not repeated."""
        batcher = self._new_batcher()
        self._held[batcher] = op
        self._end_poll(batcher)

    def _end_poll(self, batcher: Batcher[Operation, Any]) -> None:
        op = self._held.pop(batcher, None)
        if op is None:
            return

        async def report() -> None:
            await across(self._remote_store.home, self._remote_store.abandon, op)
            await batcher.idle()

        self.spawn_orphan(report)

    async def close(self) -> None:
        """Do what `Engine.close` does, within a few seconds also where the server does not answer."""
        await across(self._remote_store.home, self._remote_store.begin_close)
        self.hub.close()
        for batcher in list(self._held):
            self._end_poll(batcher)
        await super().close()


class RemoteClaimer:
    """A Claimer whose claims are polls that the server holds."""

    def __init__(self, plane: RemotePlane, op: Claim) -> None:
        self._plane = plane
        self._op = op

    async def try_claim(self, limit: int) -> list[Claimed]:
        return await self._plane.poll(self._op._replace(limit=limit), 0.0)

    async def claim(self, limit: int, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        return await self._plane.poll(self._op._replace(limit=limit), None, keep)

    def stop_waiting(self) -> None:
        """Do nothing: no poll is held between two claims."""


class _ClaimPoll:
    """The attempts of one poll for claims, which are repeated under one poll id while their answers are lost."""

    def __init__(self, plane: RemotePlane, op: Claim, renewal: Beat | None) -> None:
        self._plane = plane
        self._op = op
        self._renewal = renewal
        self.engine: RemoteEngine | None = None
        self.answer_lost = False

    async def attempt(self, engine: Engine) -> list[Claimed]:
        assert isinstance(engine, RemoteEngine)
        repeated = self.answer_lost
        self.engine = engine
        self.answer_lost = False
        try:
            # After an outage the claims are renewed before the worker gets any that only waits for its own lease to end.
            renewal = (self._renewal or self._plane.renewals.get(self._op.worker)) if repeated else None
            if renewal is not None:
                await engine.do(renewal)
            claims: list[Claimed] = await (engine.hold(self._op) if self._op.wait > 0 else engine.do(self._op))
        except PlaneUnavailable:
            self.answer_lost = True
            raise
        return claims


class RemotePlane(Plane):
    """A `Plane` whose waits are polls that the server answers when there is something.

    News of the store's `watch` brings an outcome or a page itself. News without either comes after failures: the waiter
    then reads, and raises what the read raises.
    """

    _make_store: Callable[[], RemoteStore]

    def __init__(self, make_store: Callable[[], RemoteStore], name: str, *, ns: str = "default") -> None:
        super().__init__(make_store, name, ns=ns)
        self._outage = Outage(name, remote=True)
        self.renewals: dict[str, Beat] = {}
        """By worker, the heartbeat that has got no answer yet."""

    async def _open(self) -> RemoteEngine:
        store = self._make_store()
        await open_store(store)
        return RemoteEngine(store, repr(self))

    async def _remote_engine(self) -> RemoteEngine:
        engine = await self.engine()
        assert isinstance(engine, RemoteEngine)
        return engine

    def claimer(self, queues: Sequence[str], worker: str, *, lease: float, max_lost: int) -> Claimer:
        return RemoteClaimer(self, self._claim(queues, worker, 1, lease, max_lost))

    async def poll(self, op: Claim, timeout: float | None, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        """Do what `Plane.poll` does; a poll whose answer was lost is repeated.

        Args:
            op: The claim.
            timeout: Seconds; None for no limit.
            keep: The claims of the worker, as (id, attempt). They are renewed before the next poll when one gave nothing:
                that may be because they were about to expire, or had expired.
        """
        deadline = math.inf if timeout is None else anyio.current_time() + timeout
        renewal = None if not keep or op.lease is None else Beat(op.worker, tuple(keep), op.lease)
        while True:
            started = anyio.current_time()
            wait = min(max(0.0, deadline - started), poll_timeout())
            found = await self._poll_once(
                op._replace(poll_id=op.poll_id or new_id(), wait=wait, busy=bool(keep)), renewal
            )
            if found or anyio.current_time() >= deadline:
                return found
            if renewal is not None:
                await self.do(renewal)
            await _pause_after_early_answer(started, wait)

    async def _poll_once(self, op: Claim, renewal: Beat | None) -> list[Claimed]:
        poll = _ClaimPoll(self, op, renewal)
        try:
            claims = await self._retry(poll.attempt)
        except BaseException:
            if poll.answer_lost and poll.engine is not None:
                poll.engine.abandon(op)
            raise
        if not claims and poll.engine is not None:
            poll.engine.hub.check_open()  # closing the plane ends its polls with nothing
        return claims

    async def next_cancels(
        self, worker: str, timeout: float, known: Collection[tuple[str, int]] = ()
    ) -> list[tuple[str, int]]:
        """Do what `Plane.next_cancels` does; while the plane is unavailable this waits for `timeout` seconds."""
        deadline = anyio.current_time() + timeout
        engine = await self._remote_engine()
        while True:
            started = anyio.current_time()
            left = max(0.0, deadline - started)
            try:
                beaten: Beaten = await engine.hold(Beat(worker, (), 30.0, wait=left, known=tuple(known)))
            except PlaneUnavailable:
                engine.hub.check_open()
                if left <= 0:
                    return []
            else:
                found = [claim for claim in beaten.cancel if claim not in known]
                if not found:
                    await _pause_after_early_answer(started, left)
                return found
            await anyio.sleep(min(left, CANCELS_RETRY_PAUSE * random.uniform(0.5, 1.5)))

    async def beat(self, worker: str, claims: Sequence[tuple[str, int]], lease: float) -> Beaten:
        """Do what `Plane.beat` does, with shorter pauses between attempts: after an outage every second counts."""
        deadline = anyio.current_time() + self.patience
        engine = await self._remote_engine()
        renewal = Beat(worker, tuple(claims), lease)
        self.renewals[worker] = renewal
        while True:
            try:
                beaten: Beaten = await engine.do(renewal)
            except PlaneUnavailable:
                engine.hub.check_open()
                if anyio.current_time() >= deadline:
                    raise
            else:
                if self.renewals.get(worker) is renewal:
                    del self.renewals[worker]
                return beaten
            await self.pause(min(1.0, lease / 10) * random.uniform(0.5, 1.5))

    async def pause(self, seconds: float) -> None:
        """Sleep before another attempt; the answer to any other request ends the pause."""
        await self._outage.pause(seconds)

    async def _wait_for_end(self, id: str, submit: Submit | None = None) -> Outcome:
        if submit is not None:
            id = await self.do(submit)
        engine = await self.engine()
        waiter = Waiter()

        async def accept() -> Outcome | None:
            outcome = waiter.outcome
            waiter.outcome = None
            if outcome is None:
                return await self.read_end(id)
            if outcome.state == "unknown":
                raise InvocationNotFound(id)
            return outcome if outcome.state in TERMINAL else None

        outcome = await engine.hub.wait([("id", id)], accept, waiter=waiter, look_first=False)
        assert outcome is not None  # there is no timeout
        return outcome

    async def _wait_for_page(self, cursor: Cursor, timeout: float | None) -> Page | None:
        if timeout is not None and timeout <= 0:
            return await self._read_new_page(cursor)
        waiter = Waiter(cursor)

        async def accept() -> Page | None:
            page = waiter.page
            waiter.page = None
            if page is None:
                return await self._read_new_page(cursor)
            return page if page.frames or page.closed else None

        with anyio.move_on_after(timeout):
            engine = await self.engine()
            return await engine.hub.wait([("journal", cursor.id)], accept, waiter=waiter, look_first=False)
        return None


async def _pause_after_early_answer(started: float, wait: float) -> None:
    """Pause after a poll with a timeout of `wait` seconds gave nothing: a server that holds no polls is not to be asked as
    fast as it answers."""
    if anyio.current_time() - started < wait / 2:
        await anyio.sleep(min(wait, EARLY_ANSWER_PAUSE))
