"""A plane: every verb on invocations, once for all stores. A store applies operations and reads; it never waits."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, overload

import anyio

from ..concurrency.per_loop import PerLoop
from ..errors import DispatchError, InvocationNotFound, PlaneUnavailable
from ..ids import check_id, check_queue, new_id
from ..limits import DEFAULT_LEASE, DEFAULT_MAX_LOST, MAX_BYTES_PER_PAGE, MAX_FRAMES_PER_PAGE, MAX_SEQ
from .await_many import AwaitMany, await_many
from .claimer import Claimer, LocalClaimer
from .contract.news import Cursor
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
    Reap,
    Reaped,
    Requeue,
    Requeued,
    Restore,
    Submit,
    whole_priority,
)
from .contract.records import TERMINAL, Failure, Outcome, Page, Row, RowFilter
from .engine import Engine, open_store
from .hub import Waiter
from .outage import Outage, Retries

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Sequence
    from typing import Self

    from .contract.news import Kind
    from .contract.store import Store

__all__ = ["Plane"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Plane:
    """Where invocations live: every verb on them, over any store.

    An async context manager; without it the first use opens the plane. One object may be used from several event loops of
    a process. Times are float seconds.

    Cancellation: every verb may be cancelled. An operation that has not begun is withdrawn, one under way completes, and
    what a cancelled caller has claimed is returned to its queue.

    Raises:
        PlaneUnavailable: By every verb, when the plane has been unavailable for `patience` seconds of retries with growing
            pauses.
    """

    default_patience: float = 30.0
    """The `patience` of a plane for which none was set."""
    local: bool = False
    """Whether all processes that can write to the plane are of this machine and user."""
    serving: bool = False
    """Whether workers elsewhere reach the plane through this process, and get time to reach it again after its start."""

    def __init__(self, make_store: Callable[[], Store], name: str, *, ns: str = "default") -> None:
        """
        Args:
            make_store: Called once for each event loop.
            name: The plane in the words of Python, as `Dispatch('path')`: its `repr` in the default namespace.
            ns: The namespace.
        """
        self._make_store = make_store
        self._name = name
        self.ns = ns
        self._patience: float | None = None
        self._engines: PerLoop[Engine] = PerLoop(self._open)
        self._outage = Outage(name)

    def within(self, ns: str) -> Plane:
        """The same storage as another namespace sees it; to be closed on its own."""
        raise DispatchError(f"{self!r} has no namespaces")

    def __repr__(self) -> str:
        return self._name if self.ns == "default" else f"{self._name[:-1]}, ns={self.ns!r})"

    @property
    def address(self) -> str:
        """What people call the plane: the path of its file, or its URL without secrets."""
        return repr(self)

    def child_environ(self) -> dict[str, str]:
        """The LAKESHORE_* variables that make this the default plane of another process of this machine.

        Tokens are not among them. Empty for a plane that no variables can name.
        """
        return {}

    @property
    def patience(self) -> float:
        """For how many seconds a verb is retried while the plane is unavailable. It can be set at any time."""
        return self.default_patience if self._patience is None else self._patience

    @patience.setter
    def patience(self, seconds: float) -> None:
        self._patience = seconds

    async def _open(self) -> Engine:
        store = self._make_store()
        await open_store(store)
        return Engine(store, repr(self))

    async def __aenter__(self) -> Self:
        await self._engines.get()
        return self

    async def __aexit__(self, *_: object) -> None:
        with anyio.CancelScope(shield=True):
            await self.aclose()

    async def aclose(self) -> None:
        """Close the engines of every event loop, each on its own loop, after what is under way has been answered."""
        await self._engines.aclose_all()

    # --- retries ---

    async def engine(self, retries: Retries | None = None) -> Engine:
        """This event loop's engine. Where it has to be opened first, that is retried as operations are.

        Args:
            retries: Those of the operation that needs the engine.
        """
        engine = self._engines.here()
        if engine is not None:
            return engine
        if retries is None:
            retries = Retries(self._outage, self.patience)
        while True:
            try:
                engine = await self._engines.get()
            except PlaneUnavailable as exc:
                await retries.pause(exc)
            else:
                if retries.failed and not self._outage.remote:
                    self._outage.record_answer()
                return engine

    async def _retry(self, attempt: Callable[[Engine, *Ts], Awaitable[T]], *args: *Ts) -> T:
        """Await `attempt(engine, *args)`, again and again while the plane is unavailable.

        Raises:
            PlaneUnavailable: After `patience` seconds, or when the plane was closed meanwhile: another attempt would open
                it again.
        """
        retries: Retries | None = None
        engine = self._engines.here()
        if engine is None:
            retries = Retries(self._outage, self.patience)
            engine = await self.engine(retries)
        while True:
            try:
                answer = await attempt(engine, *args)
            except PlaneUnavailable as exc:
                if engine.hub.closed:
                    raise
                if retries is None:
                    retries = Retries(self._outage, self.patience)
                await retries.pause(exc)
            else:
                self._outage.record_answer()
                return answer

    # --- operations ---

    @overload
    async def do(self, op: Submit | Restore) -> str: ...
    @overload
    async def do(self, op: Claim) -> list[Claimed]: ...
    @overload
    async def do(self, op: Beat) -> Beaten: ...
    @overload
    async def do(self, op: Finish) -> bool: ...
    @overload
    async def do(self, op: Requeue) -> Requeued: ...
    @overload
    async def do(self, op: Cancel) -> Cancelled: ...
    @overload
    async def do(self, op: Append) -> Appended: ...
    @overload
    async def do(self, op: Reap) -> Reaped: ...
    @overload
    async def do(self, op: Purge) -> int: ...
    async def do(self, op: Operation) -> Any:
        """Apply one operation of the contract. Returns its answer, raises its errors."""
        engine = self._engines.here()
        if engine is not None:  # the common case, in as few steps as possible
            try:
                return await engine.do(op)
            except PlaneUnavailable:
                engine.hub.check_open()
        return await self._retry(Engine.do, op)

    async def many(self, ops: Sequence[Operation]) -> list[Any]:
        """Apply operations in order, in as few batches as possible.

        Returns:
            For each operation its answer or exception.
        """
        if not ops:
            return []
        return await self._retry(Engine.many, ops)

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
        """Add an invocation.

        Args:
            queue: It is created when it is new.
            body: An envelope.
            id: By default a new one.
            key: When this queue has an invocation of the same key already, no other is added.
            priority: Higher goes first.
            parent: The id of the invocation that submits.

        Returns:
            The id of the invocation: with a `key` that is taken, of the first one submitted with it.

        Raises:
            ValueError: The id does not match `[0-9A-Za-z_-]{1,64}`, or the queue's name is not valid.
        """
        return await self.do(self.submission(queue, body, id=id, key=key, priority=priority, parent=parent))

    @staticmethod
    def submission(
        queue: str,
        body: bytes,
        *,
        id: str | None = None,
        key: str | None = None,
        priority: float = 0,
        parent: str | None = None,
    ) -> Submit:
        """The operation of `submit`, with its arguments checked."""
        id = new_id() if id is None else check_id(id)
        check_queue(queue)
        return Submit(id, queue, body, key, whole_priority(priority) if priority else 0, parent)

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
        """Take up to `limit` due invocations.

        Args:
            queues: At least one; the best invocations of all of them are taken.
            worker: The name of the claimer.
            limit: At least 1.
            lease: Seconds until the claim ends unless it is renewed; None: it never ends.
            max_lost: The number of lost leases that makes an invocation fail.
            timeout: Seconds to wait for the first invocation; None for no limit.
            poll_id: A repeat with the same worker and poll_id is given again what it was given and still holds.
            local: False where this process claims for another one.

        Returns:
            The claims, best first; [] after the timeout.
        """
        op = self._claim(queues, worker, limit, lease, max_lost)
        return await self.poll(op._replace(poll_id=poll_id, local=local), timeout)

    @staticmethod
    def _claim(queues: Sequence[str], worker: str, limit: int, lease: float | None, max_lost: int) -> Claim:
        """The operation of a claim, with its arguments checked."""
        for queue in queues:
            check_queue(queue)
        if lease is not None and not 0 < lease < math.inf:
            raise ValueError(f"expected a lease in seconds above 0, or None, got {lease!r}")
        return Claim(tuple(queues), worker, limit, lease, max_lost)

    async def poll(self, op: Claim, timeout: float | None) -> list[Claimed]:
        """Do what `claim` does, given its operation."""
        topics: list[tuple[Kind, str]] = [("queue", queue) for queue in op.queues]

        async def accept() -> list[Claimed] | None:
            return (await self.do(op)) or None

        return await self.wait(topics, accept, timeout) or []

    async def settled(self) -> None:
        """Return once the claims of cancelled callers on this loop are back in their queues."""
        engine = self._engines.opened()
        if engine is not None:
            await engine.settled()

    def claimer(self, queues: Sequence[str], worker: str, *, lease: float, max_lost: int) -> Claimer:
        """A Claimer for a worker. Its `stop_waiting` is to be called at the end, and whenever the worker has no slot."""
        return LocalClaimer(self, self._claim(queues, worker, 1, lease, max_lost))

    async def beat(self, worker: str, claims: Sequence[tuple[str, int]], lease: float) -> Beaten:
        """Renew the claims listed, as (id, attempt), for `lease` seconds.

        Returns:
            Which of them are lost, and which are to be cancelled.
        """
        return await self.do(Beat(worker, tuple(claims), lease))

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
        return await self.do(Finish(fence, state, result, error, final))

    async def release(self, fence: Fence) -> Requeued:
        """Return a claim to its queue; it counts in no budget. Raises ClaimLost, InvocationNotFound."""
        return await self.do(Requeue(fence))

    async def retry(self, fence: Fence, *, delay: float = 0.0, error: Failure | None = None) -> Requeued:
        """Queue a failed invocation again, due in `delay` seconds. Raises ClaimLost, InvocationNotFound."""
        if not 0 <= delay < math.inf:
            raise ValueError(f"expected a delay in seconds of at least 0, got {delay!r}")
        return await self.do(Requeue(fence, "retry", delay, error))

    async def append(self, fence: Fence, first_seq: int, frames: Sequence[bytes], *, final: bool = False) -> Appended:
        """Add frames to a claimed invocation's journal. Raises ClaimLost, InvocationNotFound, ValueError."""
        return await self.do(Append(fence, first_seq, tuple(frames), final))

    async def cancel(self, id: str, *, wait: bool = False) -> bool:
        """Kill a queued invocation, or ask the worker of a running one to cancel it.

        Args:
            id: Of the invocation.
            wait: Return only when it has ended. Its outcome then shows whether it was killed.

        Returns:
            False when it had ended before.

        Raises:
            InvocationNotFound: The plane has no invocation of this id.
        """
        answer = await self.do(Cancel(check_id(id)))
        if wait and answer.what == "asked":
            await self.outcome(id)
        return answer.what != "terminal"

    async def cancel_on_close(self) -> set[str]:
        """The ids that are cancelled when this event loop closes the plane; for calls that end with their caller."""
        return (await self.engine()).cancel_on_close

    async def purge(self, older_than: float) -> int:
        """Delete what ended more than `older_than` seconds ago. Returns the number of invocations."""
        total = 0
        while (count := await self.do(Purge(older_than))) > 0:
            total += count
        return total

    # --- reads ---

    async def current_outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        """How invocations stand now, in order; `pending` and `unknown` are such states too."""
        for id in ids:
            check_id(id)
        return await self._retry(Engine.outcomes, ids)

    async def page(
        self, id: str, since: int = -1, *, limit: int = MAX_FRAMES_PER_PAGE, max_bytes: int = MAX_BYTES_PER_PAGE
    ) -> Page:
        """The frames after `since` that are there now. Raises InvocationNotFound."""
        return await self._retry(Engine.page, *_checked_cursor(id, since, limit, max_bytes))

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        """The claims of `worker`, as (id, attempt), whose cancellation is asked for."""
        return await self._retry(Engine.cancels, worker)

    async def rows(self, filter: RowFilter) -> list[Row]:
        """Invocations as people see them, newest first."""
        return await self._retry(Engine.rows, filter)

    async def counts(self, queue: str | None = None, state: str | None = None) -> dict[tuple[str, str], int]:
        """How many invocations there are, by (queue, state)."""
        return await self._retry(Engine.counts, queue, state)

    async def ages(self) -> dict[str, float]:
        """For each queue in which something is due: the seconds since the oldest of it was submitted."""
        return await self._retry(Engine.ages)

    async def read_store(self, read: Callable[[Store], Awaitable[T]]) -> T:
        """Await `read(store)`, for what no verb reads."""
        return await self._retry(Engine.read_store, read)

    # --- waits ---

    async def wait(
        self, topics: Sequence[tuple[Kind, str]], accept: Callable[[], Awaitable[T | None]], timeout: float | None
    ) -> T | None:
        """Call `accept`, and again after each news of `topics`, until it returns something; None after the timeout.

        See `planes.hub.Hub.wait`.
        """
        return await (await self.engine()).hub.wait(topics, accept, timeout)

    async def outcome(self, id: str, *, timeout: float | None = None) -> Outcome:
        """Wait until an invocation has ended. Cancelling the wait leaves the invocation alone.

        Args:
            id: Of the invocation.
            timeout: Seconds; None for no limit.

        Raises:
            TimeoutError: It has not ended within `timeout` seconds.
            InvocationNotFound: The plane has no invocation of this id.
        """
        check_id(id)  # reads of several callers are one: a bad id would make all of them fail
        if timeout is None:
            return await self._wait_for_end(id)
        with anyio.move_on_after(timeout):
            return await self._wait_for_end(id)
        outcome = await self.read_end(id)  # so that it was read once, however short the timeout
        if outcome is None:
            state = await (await self.engine()).describe(id)
            raise TimeoutError(f"invocation {id!r} had not ended after {timeout} s; {state}, wait again with its id")
        return outcome

    async def call(self, op: Submit) -> Outcome:
        """Submit and wait for the end, without a read in between. Raises as `submit` and `outcome` do."""
        return await self._wait_for_end(op.id, op)

    async def _wait_for_end(self, id: str, submit: Submit | None = None) -> Outcome:
        engine = await self.engine()
        waiter = _EndWaiter(self, id, submit)
        outcome = await engine.hub.wait((("id", id),), waiter.accept, waiter=waiter)
        assert outcome is not None  # there is no timeout
        return outcome

    async def read_end(self, id: str) -> Outcome | None:
        """The outcome of an invocation that has ended, None of one that has not. Raises InvocationNotFound."""
        engine = self._engines.here()
        outcome: Outcome | None = None
        if engine is not None:
            try:
                outcome = await engine.outcome(id)
            except PlaneUnavailable:
                engine.hub.check_open()
        if outcome is None:
            outcome = await self._retry(Engine.outcome, id)
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
        """Wait for frames after `since`, or for the journal's end.

        Args:
            id: Of the invocation.
            since: The seq of the last frame that the reader has; -1 for none.
            limit: Frames, at most.
            max_bytes: Bytes of all frames, at most, unless the first alone is larger.
            timeout: Seconds; None for no limit.

        Raises:
            TimeoutError: There was no frame within `timeout` seconds.
            InvocationNotFound: The plane has no invocation of this id.
        """
        cursor = _checked_cursor(id, since, limit, max_bytes)
        page = await self._wait_for_page(cursor, timeout)
        if page is None and timeout is not None and timeout > 0:
            page = await self._read_new_page(cursor)  # so that it was read once, however short the timeout
        if page is None:
            raise TimeoutError(
                f"invocation {id!r} had no frame after {since} within {timeout} s; read on with since={since}"
            )
        return page

    async def _wait_for_page(self, cursor: Cursor, timeout: float | None) -> Page | None:
        async def accept() -> Page | None:
            return await self._read_new_page(cursor)

        return await self.wait([("journal", cursor.id)], accept, timeout)

    async def _read_new_page(self, cursor: Cursor) -> Page | None:
        """The page after `cursor`; None where it is empty and more may come."""
        page = await self._retry(Engine.page, *cursor)
        return page if page.frames or page.closed else None

    async def await_many(
        self, ids: Sequence[str], cursors: Sequence[Cursor], *, timeout: float, linger: float = 0.0
    ) -> AwaitMany:
        """Wait up to `timeout` seconds until one of `ids` has ended, or there are frames after one of `cursors`; then up to
        `linger` seconds for more. See `planes.await_many.await_many`."""
        return await await_many(await self.engine(), ids, cursors, timeout=timeout, linger=linger)

    async def next_cancels(
        self, worker: str, timeout: float, known: Collection[tuple[str, int]] = ()
    ) -> list[tuple[str, int]]:
        """Wait up to `timeout` seconds for a request to cancel something that `worker` runs.

        Args:
            worker: The name of the claimer.
            timeout: Seconds.
            known: Claims whose cancellation the worker knows of already.

        Returns:
            The claims to cancel, as (id, attempt); [] after the timeout.
        """

        async def accept() -> list[tuple[str, int]] | None:
            return [claim for claim in await self.cancels(worker) if claim not in known] or None

        return await self.wait([("claims", worker)], accept, timeout) or []


def _checked_cursor(id: str, since: int, limit: int, max_bytes: int) -> Cursor:
    return Cursor(check_id(id), max(-1, min(since, MAX_SEQ)), limit, max_bytes)


class _EndWaiter(Waiter):
    """The wait for an invocation's end; an object and not a closure, since a process may have ten thousand of them."""

    __slots__ = ("_accept_news", "_id", "_plane", "_submit")

    def __init__(self, plane: Plane, id: str, submit: Submit | None) -> None:
        super().__init__()
        self._plane = plane
        self._id = id
        self._submit = submit
        self._accept_news = False

    async def accept(self) -> Outcome | None:
        submit = self._submit
        if submit is not None:
            self._submit = None
            self._accept_news = True
            holding = await self._plane.do(submit)
            return None if holding == self._id else await self._plane.outcome(holding)
        if self._accept_news:
            return self.outcome or await self._plane.read_end(self._id)
        # An outcome that came before the first read may be of an earlier invocation of this id.
        self._accept_news = True
        outcome = await self._plane.read_end(self._id)
        self.outcome = None
        return outcome
