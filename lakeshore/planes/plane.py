"""One plane: every verb, once. A store applies operations and reads; all that waits, gathers or retries is here."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from ..concurrency.per_loop import PerLoop
from ..errors import DispatchError, InvocationNotFound, PlaneUnavailable
from ..ids import check_id
from ..limits import DEFAULT_LEASE, DEFAULT_MAX_LOST, MAX_BYTES_PER_PAGE, MAX_FRAMES_PER_PAGE, MAX_SEQ
from .await_many import AwaitMany, await_many
from .contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claim,
    Claimed,
    Fence,
    FinalFrame,
    Finish,
    Operation,
    Purge,
    Requeue,
    Requeued,
    Submit,
)
from .contract.records import TERMINAL, Failure, Outcome, Page, Row, RowFilter
from .engine import Claimer, Engine, Outage, claiming, itself, opened, persist, submitting
from .hub import Waiter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from typing import Self

    from .contract.news import Cursor, Kind
    from .contract.store import Store

__all__ = ["Plane"]

T = TypeVar("T")


class Plane:
    """Where invocations live: every verb on them, over any store.

    An async context manager; without it the first use opens the plane. One object may be used from several event loops
    of a process. Every verb may be cancelled: an operation that has not begun is withdrawn, one under way completes, and
    a claim whose caller has left is given back. All verbs raise PlaneUnavailable after the plane has been out of reach
    for `patience` seconds of retries with jittered backoff. Times are float seconds.
    """

    patience: float = 30.0
    local: bool = False
    """Whether all who can write to the plane are of this machine and user."""
    serving: bool = False
    """Whether claimers elsewhere reach the plane through this process, and have to be given time after its start."""

    def __init__(self, make_store: Callable[[], Store], name: str, *, ns: str = "default") -> None:
        self._make_store, self._name, self.ns = make_store, name, ns
        self._engines: PerLoop[Engine] = PerLoop(self._open)
        self._outage = Outage(name)

    def within(self, ns: str) -> Plane:
        """The same storage as another namespace sees it; to be closed on its own."""
        raise DispatchError(f"{self!r} knows no namespaces")

    def __repr__(self) -> str:
        return self._name if self.ns == "default" else f"{self._name[:-1]}, ns={self.ns!r})"

    async def _open(self) -> Engine:
        return await opened(self._make_store(), Engine)

    async def __aenter__(self) -> Self:
        await self._engines.get()
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    async def aclose(self) -> None:
        """End the engines of every event loop, each on its own, after what is under way has been answered."""
        await self._engines.aclose_all()

    def _persist(self, fn: Callable[[Engine], Awaitable[T]]) -> Awaitable[T]:
        """Call `fn`, again and again while the plane is out of reach."""
        return persist(self._engines.get, fn, self.patience, self._outage)

    # Operations

    async def do(self, op: Operation) -> Any:
        """Apply one operation of the contract; its answer. Raises what the contract says."""
        engine = self._engines.here()
        if engine is not None:
            try:
                return await engine.do(op)
            except PlaneUnavailable:
                self._check_open(engine)
        return await self._persist(lambda engine: engine.do(op))

    async def many(self, ops: Sequence[Operation]) -> list[Any]:
        """Apply operations in order, in as few batches as can be; for each its answer or exception."""
        if not ops:
            return []
        return await self._persist(lambda engine: engine.many(ops))

    async def submit(
        self,
        queue: str,
        body: bytes,
        *,
        id: str | None = None,
        key: str | None = None,
        priority: float = 0,
        parent: str | None = None,
    ) -> str:
        """Add an invocation; the id that holds: with a `key` that is taken in this queue, the id of its first submit.

        Raises ValueError for an id that does not match `[0-9A-Za-z_-]{1,64}`.
        """
        return str(await self.do(self.submission(queue, body, id=id, key=key, priority=priority, parent=parent)))

    submission = staticmethod(submitting)

    async def claim(
        self,
        queues: Sequence[str],
        worker: str,
        *,
        limit: int = 1,
        lease: float | None = DEFAULT_LEASE,
        max_lost: int = DEFAULT_MAX_LOST,
        timeout: float | None = 0.0,
        poll_id: str | None = None,
        local: bool = True,
    ) -> list[Claimed]:
        """Take up to `limit` due invocations; waits up to `timeout` seconds (None: for ever) for the first, then [].

        poll_id: a repeat of (worker, poll_id) is given again what it was given and still holds. local: this process is
        the claimer, not somebody for whom it asks.
        """
        op = self._claim(queues, worker, limit, lease, max_lost)
        return await self.poll(op._replace(poll_id=poll_id, local=local), timeout)

    async def poll(self, op: Claim, timeout: float | None) -> list[Claimed]:
        """The same by its operation."""
        topics: list[tuple[Kind, str]] = [("queue", queue) for queue in op.queues]

        async def look() -> list[Claimed] | None:
            return (await self.do(op)) or None

        if timeout is not None and timeout <= 0:
            return (await look()) or []
        return await self.until(topics, look, timeout) or []

    async def settled(self) -> None:
        """Return once the claims of cancelled callers on this loop are back in their queues."""
        engine = self._engines.opened()
        if engine is not None:
            await engine.settled()

    def claimer(self, queues: Sequence[str], worker: str, *, lease: float, max_lost: int) -> Claimer:
        """What claims for a worker again and again. It is to `rest` while nothing more can be taken, and at the end."""
        op = self._claim(queues, worker, 1, lease, max_lost)
        return Claimer(partial(self._persist, itself), self.do, op)

    _claim = staticmethod(claiming)

    async def beat(self, worker: str, claims: Sequence[tuple[str, int]], lease: float) -> Beaten:
        """Renew the claims listed for `lease` seconds; which of them are lost, and which are to be cancelled."""
        answer: Beaten = await self.do(Beat(worker, tuple(claims), lease))
        return answer

    async def finish(
        self,
        fence: Fence,
        state: str,
        *,
        result: bytes | None = None,
        error: Failure | None = None,
        final: FinalFrame | None = None,
    ) -> bool:
        """End a claimed invocation. False: this claim had ended it before. Raises ClaimLost, InvocationNotFound."""
        return bool(await self.do(Finish(fence, state, result, error, final)))

    async def release(self, fence: Fence) -> Requeued:
        """Give a claim back; it counts in no budget. Raises ClaimLost, InvocationNotFound."""
        answer: Requeued = await self.do(Requeue(fence))
        return answer

    async def retry(self, fence: Fence, *, delay: float = 0.0, error: Failure | None = None) -> Requeued:
        """Queue a failed invocation again, due in `delay` seconds. Raises ClaimLost, InvocationNotFound."""
        if not 0 <= delay < math.inf:
            raise ValueError(f"expected a delay in seconds of at least 0, got {delay!r}")
        answer: Requeued = await self.do(Requeue(fence, "retry", delay, error))
        return answer

    async def append(self, fence: Fence, first_seq: int, frames: Sequence[bytes], *, final: bool = False) -> Appended:
        """Add frames to a claimed invocation's journal. Raises ClaimLost, InvocationNotFound, ValueError."""
        answer: Appended = await self.do(Append(fence, first_seq, tuple(frames), final))
        return answer

    async def cancel(self, id: str, *, wait: bool = False) -> bool:
        """Kill a queued invocation, or ask a running one's worker to; False when it had ended before.

        wait: come back only when it has ended; whether it was killed is then its outcome's to say. Raises
        InvocationNotFound.
        """
        answer: Cancelled = await self.do(Cancel(check_id(id)))
        if wait and answer.what == "asked":
            await self.outcome(id)
        return answer.what != "terminal"

    async def cancel_on_close(self) -> set[str]:
        """The ids to cancel when this event loop is done with the plane: of calls that end with their caller."""
        return (await self._persist(itself)).cancel_on_close

    async def purge(self, older_than: float) -> int:
        """Delete what ended more than `older_than` seconds ago; how many invocations that were."""
        total = 0
        while (count := int(await self.do(Purge(older_than)))) > 0:
            total += count
        return total

    # Reads

    async def current_outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        """How invocations stand now, in order; `pending` and `unknown` are such states too."""
        for id in ids:
            check_id(id)
        return await self._persist(lambda engine: engine.read(engine.store.outcomes, ids))

    async def page(
        self, id: str, since: int = -1, *, limit: int = MAX_FRAMES_PER_PAGE, max_bytes: int = MAX_BYTES_PER_PAGE
    ) -> Page:
        """The frames after `since` that are there now. Raises InvocationNotFound."""
        check_id(id)
        since = max(-1, min(since, MAX_SEQ))
        return await self._persist(lambda engine: engine.read(engine.store.page, id, since, limit, max_bytes))

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        """The claims of `worker`, as (id, attempt), whose cancellation is asked for."""
        return await self._persist(lambda engine: engine.read(engine.store.cancels, worker))

    async def rows(self, filter: RowFilter) -> list[Row]:
        """Invocations as people see them, newest first."""
        return await self._persist(lambda engine: engine.read(engine.store.rows, filter))

    async def counts(self, queue: str | None = None, state: str | None = None) -> dict[tuple[str, str], int]:
        """How many invocations there are, by (queue, state)."""
        return await self._persist(lambda engine: engine.read(engine.store.counts, queue, state))

    async def ages(self) -> dict[str, float]:
        """For each queue in which something is due: the seconds since the oldest of it was submitted."""
        return await self._persist(lambda engine: engine.read(engine.store.ages))

    async def read_store(self, read: Callable[[Store], Awaitable[T]]) -> T:
        """Read from the store what no verb is for."""
        return await self._persist(lambda engine: engine.read(lambda: read(engine.store)))

    # Waits

    async def until(
        self, topics: Sequence[tuple[Kind, str]], look: Callable[[], Awaitable[T | None]], timeout: float | None
    ) -> T | None:
        """Look, and look again after each news of `topics`, until there is something; None after `timeout` seconds."""
        engine = await self._persist(itself)

        async def open_look() -> T | None:
            self._check_open(engine)
            return await look()

        return await engine.hub.until(topics, open_look, timeout=timeout)

    def _check_open(self, engine: Engine) -> None:
        if engine.hub.closed:
            raise PlaneUnavailable(f"{self!r} was closed during a wait")

    async def outcome(self, id: str, *, timeout: float | None = None) -> Outcome:
        """Wait until an invocation has ended; how it did. Cancelling the wait leaves the invocation alone.

        Raises TimeoutError after `timeout` seconds (None: never), InvocationNotFound.
        """
        check_id(id)  # a lookup goes along with others, which a bad one would spoil
        if timeout is None:
            return await self._outcome(id)
        with anyio.move_on_after(timeout):
            return await self._outcome(id)
        outcome = await self._ended(id)  # not before it has looked, however short the time was
        if outcome is None:
            stands = await (await self._persist(itself)).describe(id)
            raise TimeoutError(f"invocation {id!r} had not ended after {timeout} s; {stands}, wait again with its id")
        return outcome

    async def call(self, op: Submit) -> Outcome:
        """Submit and wait for the end, without a look in between. Raises as `submit` and `outcome` do."""
        return await self._outcome(op.id, op)

    async def _outcome(self, id: str, submit: Submit | None = None) -> Outcome:
        """One frame and no closure deep: a process may have ten thousand of these."""
        here = self._engines.here()
        engine = await self._persist(itself) if here is None else here
        topics: tuple[tuple[Kind, str]] = (("id", id),)
        waiter = Waiter()
        engine.hub.subscribe(topics, waiter)
        try:
            if submit is not None:
                holding = await self.do(submit)
                if holding != id:
                    return await self._outcome(holding)
            elif (outcome := await self._ended(id)) is not None:
                return outcome
            else:
                waiter.outcome = None  # what was heard before may be of an earlier invocation of this id; look again
            while True:
                self._check_open(engine)
                await waiter.event.wait()
                if waiter.outcome is not None:
                    return waiter.outcome
                waiter.event = anyio.Event()
                self._check_open(engine)
                if (outcome := await self._ended(id)) is not None:
                    return outcome
        finally:
            engine.hub.unsubscribe(topics, waiter)

    async def _ended(self, id: str) -> Outcome | None:
        engine, outcome = self._engines.here(), None
        if engine is not None:
            try:
                outcome = await engine.outcome(id)
            except PlaneUnavailable:
                self._check_open(engine)
        if outcome is None:
            outcome = await self._persist(lambda engine: engine.outcome(id))
        if outcome.state == "unknown":
            raise InvocationNotFound(id)
        return outcome if outcome.state in TERMINAL else None

    async def next_page(
        self,
        id: str,
        since: int,
        *,
        limit: int = MAX_FRAMES_PER_PAGE,
        max_bytes: int = MAX_BYTES_PER_PAGE,
        timeout: float | None = None,
    ) -> Page:
        """The frames after `since`, waiting for the first, or for the journal's end.

        Raises TimeoutError after `timeout` seconds (None: never) without one, InvocationNotFound.
        """

        async def look() -> Page | None:
            page = await self.page(id, since, limit=limit, max_bytes=max_bytes)
            return page if page.frames or page.closed else None

        page = await self.until([("journal", id)], look, timeout)
        if page is None and timeout is not None and timeout > 0:
            page = await look()  # not before it has looked, however short the time was
        if page is None:
            raise TimeoutError(
                f"invocation {id!r} had no frame after {since} within {timeout} s; read on with since={since}"
            )
        return page

    async def await_many(
        self, ids: Sequence[str], cursors: Sequence[Cursor], *, timeout: float, linger: float = 0.0
    ) -> AwaitMany:
        """Wait up to `timeout` seconds for the first end among `ids` or the first frames after one of `cursors`, then up
        to `linger` seconds for more; all that is there. An unknown id has an outcome that says so."""
        return await await_many(await self._persist(itself), ids, cursors, timeout=timeout, linger=linger)

    async def next_cancels(
        self, worker: str, timeout: float, known: Collection[tuple[str, int]] = ()
    ) -> list[tuple[str, int]]:
        """Wait up to `timeout` seconds for a cancellation asked of `worker`: its claims, as (id, attempt), maybe none.

        known: claims that are not news.
        """

        async def look() -> list[tuple[str, int]] | None:
            return [claim for claim in await self.cancels(worker) if claim not in known] or None

        return await self.until([("claims", worker)], look, timeout) or []
