"""`Queue` and its blocking form `SyncQueue`: submit, wait and read for callers, and claim by hand instead of a worker."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from ..concurrency.run_sync import run_sync
from ..errors import InvocationNotFound
from ..limits import DEFAULT_LEASE
from ..planes.contract.records import TERMINAL, Row, RowFilter
from .calls import call, submit_operation, submit_operations, value_of
from .default_plane import default_dispatch, plane_of
from .job import Job, JobLease, ack_job, claim_job, claim_or_timeout, end_work, nack_job, post_value, work_on_job
from .streams import Frames, SyncFrames, SyncValues, Values

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable, Iterable
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType
    from typing import TypeVar

    from ..planes.contract.records import Failure
    from ..planes.plane import Plane
    from .cursors import OnRestart

    T = TypeVar("T")

__all__ = ["Queue", "SyncQueue"]

STATES = frozenset({"queued", "running", *TERMINAL})


class Queue:
    """A queue of a plane, by its name. This is the async form; `SyncQueue` is the blocking one.

    Every wait can be cancelled. Every verb raises PlaneUnavailable when the plane has not answered for half a minute.
    """

    def __init__(self, name: str, *, dispatch: Plane | None = None) -> None:
        """Name a queue. Nothing is opened or sent.

        Args:
            name: The queue's name.
            dispatch: The plane; None: `default_dispatch()`, found when it is first needed.
        """
        if not isinstance(name, str) or not name:
            raise TypeError(f"expected the name of a queue, a str that is not empty, got {name!r:.100}")
        self.name = name
        self._dispatch = None if dispatch is None else plane_of(dispatch)

    def __repr__(self) -> str:
        where = "" if self._dispatch is None else f", dispatch={self._dispatch!r}"
        return f"{type(self).__name__}({self.name!r}{where})"

    @property
    def dispatch(self) -> Plane:
        """The plane that the queue is on."""
        if self._dispatch is None:
            self._dispatch = default_dispatch()
        return self._dispatch

    @property
    def aio(self) -> Queue:
        """The async form: this object."""
        return self

    @property
    def sync(self) -> SyncQueue:
        """The same queue for blocking callers."""
        return SyncQueue(self.name, dispatch=self._dispatch)

    # For callers

    async def submit(self, payload: Any, *, key: str | None = None, priority: float = 0) -> str:
        """Add an invocation. A cancelled submit may have happened.

        Args:
            payload: A Thunk, for workers to run. Any other value is packed as it is, for those who claim by hand.
            key: The idempotency key. Of several submits to this queue with one key the first wins, whatever its
                arguments, and all of them return its id.
            priority: Higher goes first, always: a steady flow of high priorities keeps lower ones waiting.

        Returns:
            The id of the invocation.

        Raises:
            EncodeError: The payload, or an argument, cannot be packed.
            TransportError: The callable cannot be sent to a worker.
        """
        return await self.dispatch.do(submit_operation(self.name, payload, key, priority))

    async def submit_many(self, payloads: Iterable[Any], *, priority: float = 0) -> builtins.list[str]:
        """Add many invocations at once, in order. When one cannot be packed, none is submitted.

        Args:
            payloads: As for `submit`.
            priority: Of all of them.

        Returns:
            Their ids, in order.
        """
        ops = submit_operations(self.name, payloads, priority)
        answers = await self.dispatch.many(ops)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        if errors:
            errors[0].add_note(f"{len(errors)} of {len(ops)} submits failed, the others are queued")
            raise errors[0]
        return answers

    async def result(self, id: str, *, timeout: float | None = None) -> Any:
        """Wait for an invocation's value. Cancelling the wait does not touch the invocation.

        Args:
            id: An invocation of any queue of this plane.
            timeout: Seconds to wait; None: as long as it takes.

        Raises:
            InvocationFailed: It ended in another state than `succeeded` (also InvocationKilled, InvocationTimedOut).
            TimeoutError: It did not end in time.
            InvocationNotFound: The plane does not know the id.
            WireError: The value cannot be read.
        """
        return value_of(await self.dispatch.outcome(id, timeout=timeout))

    async def call(self, payload: Any, *, key: str | None = None, priority: float = 0) -> Any:
        """Submit, and wait for the value as long as it takes. Takes what `submit` takes, raises what both raise.

        Cancelling the call cancels the invocation, best effort and within a second; not with a key.
        """
        return await call(self.dispatch, submit_operation(self.name, payload, key, priority))

    def stream(
        self, id: str, *, since: int = -1, timeout: float | None = None, on_restart: OnRestart = "raise"
    ) -> Values:
        """Return an async iterator over the values that an invocation yields, while it runs and later; see `Values`.

        Args:
            id: The invocation.
            since: The seq of the last value already seen (`stream.seq`).
            timeout: Seconds between two frames; None: no limit.
            on_restart: What happens where the body was started again: "raise" StreamRestarted, or "continue" with the
                values of the new attempt.
        """
        return Values(self.dispatch, id, since, timeout, on_restart)

    def stream_frames(self, id: str, *, since: int = -1, timeout: float | None = None) -> Frames:
        """Return an async iterator over the frames themselves, each with its seq; see `Frames`."""
        return Frames(self.dispatch, id, since, timeout)

    async def cancel(self, id: str, *, wait: bool = False) -> bool:
        """Kill a queued invocation, or ask the worker of a running one to stop it.

        Args:
            id: The invocation.
            wait: Return when it has ended. A body that succeeds nevertheless has succeeded.

        Returns:
            False when it had ended before.

        Raises:
            InvocationNotFound: The plane does not know the id.
        """
        return await self.dispatch.cancel(id, wait=wait)

    async def get(self, id: str) -> Row:
        """Return the state of an invocation, with its attempts, times and error. Raises InvocationNotFound."""
        rows = await self.dispatch.rows(RowFilter(id=id, limit=1))
        if not rows:
            raise InvocationNotFound(id)
        return rows[0]

    async def count(self, state: str | None = "queued") -> int:
        """Return how many invocations of this queue are in `state`; None: in any state."""
        return sum((await self.dispatch.counts(self.name, _checked_state(state))).values())

    async def list(self, *, state: str | None = None, key: str | None = None, limit: int = 100) -> builtins.list[Row]:
        """Return the newest invocations of this queue.

        Args:
            state: Only those in this state.
            key: Only those with this idempotency key.
            limit: At most so many.
        """
        return await self.dispatch.rows(RowFilter(queue=self.name, state=_checked_state(state), key=key, limit=limit))

    # For those who claim by hand

    async def claim(self, *, timeout: float | None = 0.0, lease: float | None = DEFAULT_LEASE) -> Job | None:
        """Take the next due job: the highest priority first, then in the order of submits.

        A job whose payload cannot be read is ended as failed. A cancelled claim returns what it took to the queue.

        Args:
            timeout: Seconds to wait for a job; None: as long as it takes.
            lease: Seconds after which the job goes to others unless it is acknowledged by then; None: never.

        Returns:
            The job, or None when none came.

        Raises:
            WireError: The payload of the job cannot be read.
        """
        return await claim_job(self.dispatch, self.name, timeout, lease)

    async def ack(self, job: Job, result: Any = None) -> None:
        """End a job as succeeded, with its value.

        Raises:
            EncodeError: The value cannot be packed. The job is still claimed.
            ClaimLost: The job is no longer claimed.
        """
        await ack_job(self.dispatch, job, result)

    async def nack(
        self,
        job: Job,
        *,
        error: BaseException | str | Failure | None = None,
        retry: bool = False,
        delay: float = 0.0,
    ) -> None:
        """End a job as failed, or queue it again.

        Args:
            job: The job.
            error: Why it failed.
            retry: Queue it again, and count one failure more.
            delay: Seconds until a retried job is due.

        Raises:
            ClaimLost: The job is no longer claimed.
        """
        await nack_job(self.dispatch, job, error, retry, delay)

    async def post(self, job: Job, value: Any, final: bool = False) -> int:
        """Write a value to the job's stream. A value whose post was cancelled is written with the next post at the latest.

        Args:
            job: The job.
            value: What readers of the stream get.
            final: It is the last value.

        Returns:
            The seq of the value.

        Raises:
            EncodeError: The value cannot be packed.
            ClaimLost: The job is no longer claimed.
            ValueError: A final value was posted before.
        """
        return await post_value(self.dispatch, job, value, final)

    def working(
        self, *, timeout: float | None = None, lease: float = DEFAULT_LEASE
    ) -> AbstractAsyncContextManager[Job]:
        """Claim a job, renew its lease during the body, and end it: `async with q.working() as job: job.result = ...`.

        An exception of the body ends the job as failed and is raised on. Cancellation returns the job to the queue. When
        the job's cancellation is asked for, or its claim is lost, the body is cancelled.

        Args:
            timeout: Seconds to wait for a job; None: as long as it takes.
            lease: Seconds for which the claim is renewed.

        Raises:
            TimeoutError: No job came in time.
            InvocationKilled: The cancellation of the job was asked for.
            ClaimLost: The claim was lost.
        """
        return work_on_job(self.dispatch, self.name, timeout, lease)


def _checked_state(state: str | None) -> str | None:
    if state is not None and state not in STATES:
        raise ValueError(f"expected a state, one of {', '.join(sorted(STATES))}, got {state!r:.100}")
    return state


class SyncQueue:
    """A queue for blocking callers. Each verb does what the verb of `Queue` does, and raises the same.

    On a thread whose event loop is running a verb blocks that loop, and warns once with the async spelling. It raises
    DispatchError where the wait could never end. Ctrl-C cancels the verb and returns at once.
    """

    def __init__(self, name: str, *, dispatch: Plane | None = None) -> None:
        self._aio = Queue(name, dispatch=dispatch)

    def __repr__(self) -> str:
        return f"Sync{self._aio!r}"

    @property
    def name(self) -> str:
        """The queue's name."""
        return self._aio.name

    @property
    def dispatch(self) -> Plane:
        """The plane that the queue is on."""
        return self._aio.dispatch

    @property
    def aio(self) -> Queue:
        """The same queue for async callers."""
        return self._aio

    @property
    def sync(self) -> SyncQueue:
        """The blocking form: this object."""
        return self

    def _hint(self, spelling: str) -> str:
        return spelling.replace("q.", f"dls.Queue({self.name!r}).", 1)

    def _run(self, fn: Callable[..., Awaitable[T]], *args: Any, spelling: str = "", **options: Any) -> T:
        hint = self._hint(spelling or f"await q.{fn.__name__}(...)")
        return run_sync(partial(fn, **options), *args, hint=hint)

    def submit(self, payload: Any, *, key: str | None = None, priority: float = 0) -> str:
        """Add an invocation; return its id."""
        return self._run(self._aio.submit, payload, key=key, priority=priority)

    def submit_many(self, payloads: Iterable[Any], *, priority: float = 0) -> builtins.list[str]:
        """Add many invocations at once, in order; return their ids."""
        return self._run(self._aio.submit_many, payloads, priority=priority)

    def result(self, id: str, *, timeout: float | None = None) -> Any:
        """Wait for an invocation's value; raise TimeoutError after `timeout` seconds (None: never)."""
        return self._run(self._aio.result, id, timeout=timeout)

    def call(self, payload: Any, *, key: str | None = None, priority: float = 0) -> Any:
        """Submit, and wait for the value. Ctrl-C cancels the invocation, unless it has a key."""
        return self._run(self._aio.call, payload, key=key, priority=priority)

    def stream(
        self, id: str, *, since: int = -1, timeout: float | None = None, on_restart: OnRestart = "raise"
    ) -> SyncValues:
        """Return an iterator over the values that an invocation yields, live; `seq` is where to read on with `since`."""
        hint = self._hint("async for value in q.stream(...)")
        return SyncValues(self.dispatch, id, since, timeout, on_restart, hint)

    def stream_frames(self, id: str, *, since: int = -1, timeout: float | None = None) -> SyncFrames:
        """Return an iterator over the frames themselves, each with its seq."""
        return SyncFrames(self.dispatch, id, since, timeout, self._hint("async for frame in q.stream_frames(...)"))

    def cancel(self, id: str, *, wait: bool = False) -> bool:
        """Kill a queued invocation, or ask the worker of a running one to stop it; False when it had ended before."""
        return self._run(self._aio.cancel, id, wait=wait)

    def get(self, id: str) -> Row:
        """Return the state of an invocation."""
        return self._run(self._aio.get, id)

    def count(self, state: str | None = "queued") -> int:
        """Return how many invocations of this queue are in `state`; None: in any state."""
        return self._run(self._aio.count, state)

    def list(self, *, state: str | None = None, key: str | None = None, limit: int = 100) -> builtins.list[Row]:
        """Return the newest invocations of this queue."""
        return self._run(self._aio.list, state=state, key=key, limit=limit)

    def claim(self, *, timeout: float | None = 0.0, lease: float | None = DEFAULT_LEASE) -> Job | None:
        """Take the next due job; None when none comes within `timeout` seconds."""
        return self._run(self._aio.claim, timeout=timeout, lease=lease)

    def ack(self, job: Job, result: Any = None) -> None:
        """End a job as succeeded, with its value."""
        self._run(self._aio.ack, job, result)

    def nack(
        self,
        job: Job,
        *,
        error: BaseException | str | Failure | None = None,
        retry: bool = False,
        delay: float = 0.0,
    ) -> None:
        """End a job as failed, or with `retry` queue it again, due in `delay` seconds."""
        self._run(self._aio.nack, job, error=error, retry=retry, delay=delay)

    def post(self, job: Job, value: Any, final: bool = False) -> int:
        """Write a value to the job's stream; return its seq."""
        return self._run(self._aio.post, job, value, final)

    def working(self, *, timeout: float | None = None, lease: float = DEFAULT_LEASE) -> SyncWorking:
        """Claim a job, renew its lease during the body, and end it: `with q.working() as job: job.result = ...`.

        An exception of the body ends the job as failed; one that is not an Exception (Ctrl-C) returns it to the queue.
        Both are raised on. The body is not interrupted when the job is cancelled or its claim is lost; at its end a lost
        claim raises ClaimLost.

        Args:
            timeout: Seconds to wait for a job, then TimeoutError; None: as long as it takes.
            lease: Seconds for which the claim is renewed.
        """
        run = partial(self._run, spelling="async with q.working() as job")
        return SyncWorking(run, self.dispatch, self.name, timeout, lease)


class SyncWorking:
    """What `SyncQueue.working` returns. A class, so that a warning names the line of its `with`."""

    def __init__(self, run: Callable[..., Any], plane: Plane, queue: str, timeout: float | None, lease: float) -> None:
        self._run = run
        self._plane = plane
        self._queue = queue
        self._timeout = timeout
        self._lease = lease

    def __enter__(self) -> Job:
        job: Job = self._run(claim_or_timeout, self._plane, self._queue, self._timeout, self._lease)
        self._job = job
        self._job_lease = JobLease(self._plane, job, self._lease)
        try:
            self._run(self._job_lease.prepare)
            self._job_lease.start()
        except BaseException as exc:
            self._end(exc)
            raise
        return job

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._end(exc)

    def _end(self, error: BaseException | None) -> None:
        self._job_lease.stop()
        self._run(end_work, self._plane, self._job, self._job_lease.event, error)
