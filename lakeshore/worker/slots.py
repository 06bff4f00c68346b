"""The tasks that bodies run in: as many as run at once, each used again and again.

A task for every invocation costs more than many an invocation does. What makes a task one's own, its context variables,
each run still has to itself.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
from anyio.lowlevel import checkpoint

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from anyio.abc import TaskGroup

__all__ = ["Slots", "run_in_context", "was_cancelled_from_outside"]

T = TypeVar("T")


class Slots(Generic[T]):
    """Runs `run(item)` for each item given, in tasks of `group`; one more is started when all are busy.

    `run` answers whether its task can be used again. Items that no task had begun when the group ended are in `waiting`.
    """

    def __init__(self, group: TaskGroup, run: Callable[[T], Awaitable[bool]]) -> None:
        self._group, self._run = group, run
        self._idle: list[anyio.Event] = []
        self.waiting: deque[T] = deque()

    def give(self, item: T) -> None:
        """Have `item` run, at once."""
        self.waiting.append(item)
        if self._idle:
            self._idle.pop().set()
        else:
            self._group.start_soon(self._slot)

    async def _slot(self) -> None:
        usable = True
        while usable:
            while self.waiting and usable:
                usable = await self._run(self.waiting.popleft())
            if usable:
                wake = anyio.Event()
                self._idle.append(wake)
                try:
                    await wake.wait()
                except anyio.get_cancelled_exc_class():
                    if self._left(wake):
                        raise
                    return

    def _left(self, wake: anyio.Event) -> bool:
        """An idle task was cancelled: whether with its group, or because its last body had cancelled it, which the task
        met only now. What it was given in this very moment another one runs."""
        ending = self._group.cancel_scope.cancel_called
        if wake in self._idle:
            self._idle.remove(wake)
        elif self.waiting and not ending:
            self._group.start_soon(self._slot)
        return ending


class run_in_context(Generic[T]):
    """Await a coroutine with each of its steps in `context`, as if it were a task of its own."""

    __slots__ = ("_context", "_coro")

    def __init__(self, context: contextvars.Context, coro: Coroutine[Any, Any, T]) -> None:
        self._context, self._coro = context, coro

    def __await__(self) -> Generator[Any, Any, T]:
        step, value = self._coro.send, None
        while True:
            try:
                asked = self._context.run(step, value)
            except StopIteration as end:
                result: T = end.value
                return result
            try:
                step, value = self._coro.send, (yield asked)
            except BaseException as exc:  # a cancellation, or the end of the outer coroutine, is the inner one's too
                step, value = self._coro.throw, exc


async def was_cancelled_from_outside(told: Callable[[], bool]) -> bool:
    """Whether what has just cancelled this task is not the task itself, as a body may do on asyncio.

    A scope tells at once. Who cancels all tasks in asyncio's own way has cancelled another, too, that tells by `told`, soon.
    """
    if anyio.current_effective_deadline() == -math.inf:
        return True
    with anyio.CancelScope(shield=True):
        for _ in range(10):
            await checkpoint()
    return told()
