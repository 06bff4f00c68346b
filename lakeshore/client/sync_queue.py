"""The blocking names: each runs the coroutine of the same name on the process's own loop, and waits."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..concurrency.run_sync import run_sync
from ..limits import DEFAULT_LEASE
from ..wire import Frame
from . import job as jobs
from .queue import Queue, call
from .streams import NOTHING, CallCursor, FrameCursor, ValueCursor

if TYPE_CHECKING:
    import builtins
    from collections.abc import Awaitable, Callable, Iterable
    from types import TracebackType
    from typing import TypeVar

    from ..planes.contract.operations import Submit
    from ..planes.contract.records import Failure, Row
    from ..planes.plane import Plane
    from .queue import Job
    from .streams import Restart

    T = TypeVar("T")

__all__ = ["SyncCallValues", "SyncFrames", "SyncQueue", "SyncValues", "sync_call", "sync_submit"]


def sync_call(plane: Plane, op: Submit, hint: str) -> Any:
    """Submit and wait for the value; Ctrl-C cancels the invocation, unless it has a key, and returns at once."""
    return run_sync(call, plane, op, hint=hint)


def sync_submit(plane: Plane, op: Submit, hint: str) -> str:
    """Submit; the id."""
    id: str = run_sync(plane.do, op, hint=hint)
    return id


class SyncFrames(FrameCursor, Iterator[Frame]):
    """`Frames` for blocking callers: one crossing to the loop for each page, not for each frame."""

    def __init__(self, plane: Plane, id: str, since: int, timeout: float | None, hint: str) -> None:
        super().__init__(plane, id, since, timeout)
        self._hint = hint

    def __next__(self) -> Frame:
        while (frame := self.take()) is NOTHING:
            if not run_sync(self.turn, hint=self._hint):
                raise StopIteration
        assert isinstance(frame, Frame)
        return frame


class SyncValues(ValueCursor, Iterator[Any]):
    """`Values` for blocking callers: one crossing to the loop for each page, not for each value."""

    def __init__(
        self, plane: Plane, id: str, since: int, timeout: float | None, on_restart: Restart, hint: str
    ) -> None:
        super().__init__(plane, id, since, timeout, on_restart)
        self._hint = hint

    def __next__(self) -> Any:
        while (value := self.take()) is NOTHING:
            if not run_sync(self.turn, hint=self._hint):
                raise StopIteration
        return value

    def close(self) -> None:
        """End the iterator; the invocation goes on."""
        self.end()


class SyncQueue:
    """A queue for blocking callers; each verb is that of `Queue`, which says what it does and raises.

    On a thread whose event loop is running it blocks that loop, and warns once with the async spelling; where the wait
    could never end it raises DispatchError. Ctrl-C cancels the verb and returns at once.
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
        """Add an invocation; its id."""
        return self._run(self._aio.submit, payload, key=key, priority=priority)

    def submit_many(self, payloads: Iterable[Any], *, priority: float = 0) -> builtins.list[str]:
        """Add many at once, in order; their ids."""
        return self._run(self._aio.submit_many, payloads, priority=priority)

    def result(self, id: str, *, timeout: float | None = None) -> Any:
        """Wait for an invocation's value; TimeoutError after `timeout` seconds (None: never)."""
        return self._run(self._aio.result, id, timeout=timeout)

    def call(self, payload: Any, *, key: str | None = None, priority: float = 0) -> Any:
        """Submit and wait for the value. Ctrl-C cancels the invocation, unless it has a key."""
        return self._run(self._aio.call, payload, key=key, priority=priority)

    def stream(
        self, id: str, *, since: int = -1, timeout: float | None = None, on_restart: Restart = "raise"
    ) -> SyncValues:
        """An iterator over the values that an invocation yields, live; its `seq` is the cursor to read on from."""
        hint = self._hint("async for value in q.stream(...)")
        return SyncValues(self.dispatch, id, since, timeout, on_restart, hint)

    def stream_frames(self, id: str, *, since: int = -1, timeout: float | None = None) -> SyncFrames:
        """An iterator over the frames themselves, each with its seq."""
        return SyncFrames(self.dispatch, id, since, timeout, self._hint("async for frame in q.stream_frames(...)"))

    def cancel(self, id: str, *, wait: bool = False) -> bool:
        """Kill a queued invocation, or ask a running one's worker to; False when it had ended before."""
        return self._run(self._aio.cancel, id, wait=wait)

    def get(self, id: str) -> Row:
        """How an invocation stands."""
        return self._run(self._aio.get, id)

    def count(self, state: str | None = "queued") -> int:
        """How many invocations of this queue are in `state`; None: all there are."""
        return self._run(self._aio.count, state)

    def list(self, *, state: str | None = None, key: str | None = None, limit: int = 100) -> builtins.list[Row]:
        """The newest invocations of this queue."""
        return self._run(self._aio.list, state=state, key=key, limit=limit)

    def claim(self, *, timeout: float | None = 0.0, lease: float | None = DEFAULT_LEASE) -> Job | None:
        """Take the next due job; None when there is none within `timeout` seconds."""
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
        """End a job as failed; with `retry` queue it again, due in `delay` seconds."""
        self._run(self._aio.nack, job, error=error, retry=retry, delay=delay)

    def post(self, job: Job, value: Any, final: bool = False) -> int:
        """Write a value to the job's stream; its seq."""
        return self._run(self._aio.post, job, value, final)

    def working(self, *, timeout: float | None = None, lease: float = DEFAULT_LEASE) -> SyncWorking:
        """`with q.working() as job: job.result = ...`: claim, renew the lease meanwhile, acknowledge at the end.

        Waits `timeout` seconds for a job (None: for ever), then raises TimeoutError. An exception of the body ends the
        job as failed, one that is no Exception (Ctrl-C) gives it back; both go on. The body is not interrupted when the
        job is cancelled or lost: it ends, and a lost job then raises ClaimLost.
        """
        run = partial(self._run, spelling="async with q.working() as job")
        return SyncWorking(run, self.dispatch, self.name, timeout, lease)


class SyncWorking:
    """What `SyncQueue.working` gives. A class, so that a warning names the line of its `with`."""

    def __init__(self, run: Callable[..., Any], plane: Plane, queue: str, timeout: float | None, lease: float) -> None:
        self._run, self._plane, self._queue, self._timeout, self._lease = run, plane, queue, timeout, lease

    def __enter__(self) -> Job:
        job: Job = self._run(jobs.claim_for_work, self._plane, self._queue, self._timeout, self._lease)
        self._job, self._held = job, jobs.Held(self._plane, job, self._lease)
        try:
            self._run(self._held.make)
            self._held.start()
        except BaseException as exc:
            self._leave(exc)
            raise
        return job

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._leave(exc)

    def _leave(self, error: BaseException | None) -> None:
        self._held.stop()
        self._run(jobs.settle, self._plane, self._job, self._held.told, error)


class SyncCallValues(CallCursor, SyncValues):
    """What calling a queue-bound `def` generator gives: an iterator over the values, live.

    Leaving it early cancels the invocation: `close()` at once, a `break` when the iterator is collected, which is at
    once unless it is held elsewhere.
    """

    def __init__(self, plane: Plane, op: Submit, hint: str) -> None:
        super().__init__(plane, op)
        self._hint = hint

    def close(self) -> None:
        """End the iterator and cancel the invocation, best effort, within a second."""
        if self.left():
            run_sync(self.cancel, hint=self._hint)
