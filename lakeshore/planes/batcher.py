"""Group commit without a timer: the operations that come while one batch is under way are the next batch."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint_if_cancelled

from ..concurrency.loops import call_soon
from ..concurrency.tasks import spawn
from ..errors import PlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from types import TracebackType

Op = TypeVar("Op")
R = TypeVar("R")

MAX_BATCH_OPERATIONS = 1000
MAX_BATCH_BYTES = 16 << 20
CALM_BATCHES = 3
"""After a batch of several operations, how many batches of at most one must follow before an operation is done at once
again: until then more of them are to be expected."""

_NEXT_PASS = object()
"""Stands for a drain that begins in the next pass of the event loop."""

logger = logging.getLogger("dreamlake.lakeshore.planes")

_LOOP_ENDED = (
    "the event loop ended before the plane's answer came: the operation may have been applied, and can be repeated"
)


class _Batch(Generic[Op, R]):
    __slots__ = ("begun", "bytes", "done", "left", "ops", "results", "trace")

    def __init__(self) -> None:
        self.ops: list[Op | None] = []  # None: withdrawn
        self.bytes = 0
        self.begun = False
        self.left: list[int] = []  # positions whose callers were cancelled while the batch was under way
        self.results: list[R | Exception] = []
        self.trace: TracebackType | None = None  # of an exception that is the answer to all of them
        self.done = anyio.Event()  # one for the whole batch

    def answer(self, answers: Sequence[R | Exception] | None) -> None:
        """Set the answers, one for each operation that was not withdrawn; None where the event loop ended first."""
        gone = PlaneUnavailable(_LOOP_ENDED)
        rest = iter(answers if answers is not None else [gone] * len(self.ops))
        self.results = [gone if op is None else next(rest) for op in self.ops]
        self.done.set()


class Batcher(Generic[Op, R]):
    """Gathers operations while a batch is under way. Each batch is one call of `commit`; there is one at a time.

    Operations keep the order in which they came. The number of callers is not bounded: each of them waits. A batcher belongs
    to one event loop; when that ends, the callers that still wait get PlaneUnavailable.

    Cancellation: `commit` runs in a task of the event loop, which no caller's cancellation reaches. A caller that is
    cancelled before its batch begins withdraws its operation; after that the answer goes to `orphan`.
    """

    def __init__(
        self,
        commit: Callable[[list[Op]], Awaitable[Sequence[R | Exception]]],
        *,
        limit: int = MAX_BATCH_OPERATIONS,
        max_bytes: int = MAX_BATCH_BYTES,
        size: Callable[[Op], int] | None = None,
        orphan: Callable[[Op, R | Exception], object] | None = None,
        at_once: Callable[[list[Op]], Sequence[R | Exception] | None] | None = None,
    ) -> None:
        """
        Args:
            commit: Applies a batch. Returns one result or exception for each operation, in order; an exception that it
                raises is the answer to all of them.
            limit: The number of operations in a batch, at most.
            max_bytes: The bytes of a batch, at most; a larger operation goes alone.
            size: The bytes of an operation; by default 0.
            orphan: Called with an operation and its answer when the caller was cancelled meanwhile.
            at_once: Does what `commit` does, in one step of the event loop, or returns None where it cannot. An operation
                that finds the batcher idle is done so, in its caller's own step. What follows in the same pass of the
                event loop gathers, since it may be the first of many.
        """
        self._commit = commit
        self._limit = limit
        self._max_bytes = max_bytes
        self._size = size
        self._orphan = orphan
        self._at_once = at_once
        self._passing = False  # something was done at once in this pass of the event loop
        self._expected = 0  # batches for which operations are not done at once
        self._waiting: deque[_Batch[Op, R]] = deque()
        self._current: _Batch[Op, R] | None = None  # under way
        self._drain: object | None = None  # the task that runs
        self._idle: anyio.Event | None = None  # while somebody waits for it

    async def __call__(self, op: Op) -> R:
        """Apply one operation. Returns its result, or raises the exception that is its answer."""
        if self._at_once is not None and not self._expected:
            await checkpoint_if_cancelled()
            if self._drain is None and not self._passing and (answers := self._at_once([op])) is not None:
                self._passing = True
                call_soon(self._begin_next_batch)
                if isinstance(answers[0], Exception):
                    raise answers[0]
                return answers[0]
        batch = self._enter(op, 0 if self._size is None else self._size(op))
        at = len(batch.ops) - 1
        if self._drain is None:
            self._start()
        try:
            await batch.done.wait()
        except BaseException:
            self._leave(batch, at)
            raise
        result = batch.results[at]
        if isinstance(result, Exception):
            # One exception raised in many tasks would gather the traceback of each.
            raise result if batch.trace is None else result.with_traceback(batch.trace)
        return result

    async def many(self, ops: Sequence[Op]) -> list[R | Exception]:
        """Apply operations in as many batches as they need. Returns the result or exception of each, in order."""
        sizes = [0 if self._size is None else self._size(op) for op in ops]  # all before the first one enters
        mine: list[tuple[_Batch[Op, R], int]] = []
        for op, size in zip(ops, sizes, strict=True):
            batch = self._enter(op, size)
            mine.append((batch, len(batch.ops) - 1))
        if self._drain is None and mine:
            self._start()
        try:
            for batch in dict.fromkeys(batch for batch, _ in mine):
                await batch.done.wait()
        except BaseException:
            for batch, at in mine:
                self._leave(batch, at)
            raise
        return [batch.results[at] for batch, at in mine]

    async def idle(self) -> None:
        """Return once no batch waits or is under way."""
        while self._drain is not None:
            if self._idle is None:
                self._idle = anyio.Event()
            await self._idle.wait()

    async def settled(self) -> None:
        """Return once the operations that wait or are under way now have their answers; later ones are not waited for."""
        for batch in [*([] if self._current is None else [self._current]), *self._waiting]:
            await batch.done.wait()

    def _enter(self, op: Op, size: int) -> _Batch[Op, R]:
        batch: _Batch[Op, R] | None = self._waiting[-1] if self._waiting else None
        if batch is None or len(batch.ops) >= self._limit or batch.bytes + size > self._max_bytes:
            fresh: _Batch[Op, R] = _Batch()
            self._waiting.append(fresh)
            batch = fresh
        batch.ops.append(op)
        batch.bytes += size
        return batch

    def _leave(self, batch: _Batch[Op, R], at: int) -> None:
        if not batch.begun:
            batch.ops[at] = None
        elif not batch.done.is_set():
            batch.left.append(at)
        else:  # answered in the moment in which its caller was cancelled
            self._abandon(batch, at)

    def _abandon(self, batch: _Batch[Op, R], at: int) -> None:
        op = batch.ops[at]
        if op is None or self._orphan is None:
            return
        try:
            self._orphan(op, batch.results[at])
        except Exception:
            logger.exception("the answer to a cancelled caller could not be handled")

    def _start(self) -> None:
        if self._passing:
            self._drain = _NEXT_PASS
        else:
            self._spawn()

    def _begin_next_batch(self) -> None:
        """Begin the next batch, one pass of the event loop after something was done at once."""
        self._passing = False
        if self._drain is not _NEXT_PASS:
            return
        ops = [op for op in self._waiting[0].ops if op is not None]
        answers: Sequence[R | Exception] | None = None
        try:
            if len(self._waiting) == 1 and self._at_once is not None:
                answers = self._at_once(ops) if ops else ()
        finally:
            if answers is None:
                self._spawn()
            else:
                batch = self._waiting.popleft()
                batch.begun = True
                self._record_size(len(ops))
                batch.answer(answers)
                self._become_idle()

    def _record_size(self, size: int) -> None:
        self._expected = CALM_BATCHES if size > 1 else max(self._expected - 1, 0)

    def _become_idle(self) -> None:
        self._drain = None
        if self._idle is not None:
            self._idle.set()
            self._idle = None

    def _spawn(self) -> None:
        this = self._drain = object()

        async def drain() -> None:
            while self._waiting:
                batch = self._waiting.popleft()
                batch.begun = True
                await self._run(batch)
            ended()

        def ended() -> None:
            """Runs also when the event loop cancelled the drain, perhaps before its first step, or never started it."""
            if self._drain is not this:
                return
            for batch in self._waiting:
                batch.begun = True
                batch.answer(None)
            self._waiting.clear()
            self._become_idle()

        spawn(drain, ended)

    async def _run(self, batch: _Batch[Op, R]) -> None:
        ops = [op for op in batch.ops if op is not None]
        self._record_size(len(ops))
        self._current = batch
        answers: Sequence[R | Exception] | None = None
        try:
            answers = await self._commit(ops) if ops else ()
            if len(answers) != len(ops):
                raise RuntimeError(
                    f"expected {len(ops)} answers for {len(ops)} operations, one each, got {len(answers)}"
                )
        except Exception as exc:
            answers = [exc] * len(ops)
            batch.trace = exc.__traceback__
        finally:
            self._current = None
            batch.answer(answers)
            for at in batch.left:
                self._abandon(batch, at)
