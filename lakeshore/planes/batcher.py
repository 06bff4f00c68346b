"""Group commit without a timer: what is asked for while one batch is under way makes up the next."""

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

LIMIT = 1000  # operations
CROWD = 3  # batches of one, or none, after a larger one: then callers come one by one again
MAX_BYTES = 16 * 1024 * 1024

_NEXT_PASS = object()

_log = logging.getLogger("dreamlake.lakeshore.planes")
_ENDED = "the event loop ended before the plane's answer came: the operation may have been done, and can be repeated"


class _Batch(Generic[Op, R]):
    __slots__ = ("begun", "bytes", "done", "left", "ops", "results", "trace")

    def __init__(self) -> None:
        self.ops: list[Op | None] = []  # None: withdrawn
        self.bytes = 0
        self.begun = False
        self.left: list[int] = []  # where callers went away while the batch was under way
        self.results: list[R | Exception] = []
        self.trace: TracebackType | None = None  # of an exception that all of them share
        self.done = anyio.Event()  # one for the whole batch

    def answer(self, answers: Sequence[R | Exception] | None) -> None:
        """One answer for each operation that was not withdrawn; None when there will never be one."""
        gone = PlaneUnavailable(_ENDED)
        rest = iter(answers if answers is not None else [gone] * len(self.ops))
        self.results = [gone if op is None else next(rest) for op in self.ops]
        self.done.set()


class Batcher(Generic[Op, R]):
    """Operations gather while the previous batch is under way; each batch is one call of `commit`, one at a time.

    `commit` gives one result or exception for each operation, in order; what it raises is everybody's. Operations keep
    the order in which they came. A batch holds at most `limit` operations and `max_bytes` bytes as `size` counts them;
    a larger operation goes alone. The number of callers is not bounded: each of them waits.

    Cancellation: `commit` runs in a task of the event loop's own, which no caller's cancellation reaches. A caller that
    leaves before its batch begins withdraws its operation; after that the answer goes to `orphan(op, answer)`. When the
    event loop ends, who still waits gets PlaneUnavailable. A batcher belongs to one event loop.

    `at_once`, where there is one, does what `commit` does without a wait, or gives None where it cannot; nobody can come
    between. What comes to a batcher at rest is done so, in the caller's own step; what follows in the same pass of the
    event loop gathers as ever, since it may be the first of many.
    """

    def __init__(
        self,
        commit: Callable[[list[Op]], Awaitable[Sequence[R | Exception]]],
        *,
        limit: int = LIMIT,
        max_bytes: int = MAX_BYTES,
        size: Callable[[Op], int] | None = None,
        orphan: Callable[[Op, R | Exception], object] | None = None,
        at_once: Callable[[list[Op]], Sequence[R | Exception] | None] | None = None,
    ) -> None:
        self._commit, self._limit, self._max_bytes, self._size = commit, limit, max_bytes, size
        self._orphan, self._at_once = orphan, at_once
        self._passing, self._crowd = False, 0
        self._waiting: deque[_Batch[Op, R]] = deque()
        self._now: _Batch[Op, R] | None = None  # under way
        self._drain: object | None = None  # the one that runs
        self._quiet: anyio.Event | None = None  # while somebody waits for its end

    async def __call__(self, op: Op) -> R:
        """The result of one operation; raises the exception that is its answer."""
        if self._at_once is not None and not self._crowd:
            await checkpoint_if_cancelled()
            if self._drain is None and not self._passing and (answers := self._at_once([op])) is not None:
                self._passing = True
                call_soon(self._passed)
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
        """Each operation's own result or exception, in order; they take as many batches as they need."""
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
            if self._quiet is None:
                self._quiet = anyio.Event()
            await self._quiet.wait()

    async def settled(self) -> None:
        """Return once what is waiting or under way now has its answer; what comes meanwhile is not waited for."""
        for batch in [*([] if self._now is None else [self._now]), *self._waiting]:
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
        else:  # answered in the very moment its caller was cancelled
            self._abandon(batch, at)

    def _abandon(self, batch: _Batch[Op, R], at: int) -> None:
        op = batch.ops[at]
        if op is None or self._orphan is None:
            return
        try:
            self._orphan(op, batch.results[at])
        except Exception:
            _log.exception("an answer whose caller had left could not be given back")

    def _start(self) -> None:
        if self._passing:
            self._drain = _NEXT_PASS
        else:
            self._spawn()

    def _passed(self) -> None:
        """The event loop has come round once since something was done at once: what came meanwhile is next."""
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
                self._note(len(ops))
                batch.answer(answers)
                self._rest()

    def _note(self, size: int) -> None:
        self._crowd = CROWD if size > 1 else max(self._crowd - 1, 0)

    def _rest(self) -> None:
        self._drain = None
        if self._quiet is not None:
            self._quiet.set()
            self._quiet = None

    def _spawn(self) -> None:
        this = self._drain = object()

        async def drain() -> None:
            while self._waiting:
                batch = self._waiting.popleft()
                batch.begun = True
                await self._run(batch)
            ended()

        def ended() -> None:
            """Also when the event loop cancelled the drain, perhaps before its first step, or never started it."""
            if self._drain is not this:
                return
            for batch in self._waiting:
                batch.begun = True
                batch.answer(None)
            self._waiting.clear()
            self._rest()

        spawn(drain, ended)

    async def _run(self, batch: _Batch[Op, R]) -> None:
        ops = [op for op in batch.ops if op is not None]
        self._note(len(ops))
        self._now = batch
        answers: Sequence[R | Exception] | None = None
        try:
            answers = await self._commit(ops) if ops else ()
            if len(answers) != len(ops):
                raise RuntimeError(
                    f"expected {len(ops)} answers for {len(ops)} operations, one each, got {len(answers)}"
                )
        except Exception as exc:
            answers, batch.trace = [exc] * len(ops), exc.__traceback__
        finally:
            self._now = None
            batch.answer(answers)
            for at in batch.left:
                self._abandon(batch, at)
