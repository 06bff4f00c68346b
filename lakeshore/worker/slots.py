"""Tasks that run bodies one after another, and a context of its own for each body.

To start a task for every invocation costs more than many invocations do. Therefore tasks are used again.
"""

from __future__ import annotations

import types
from collections import deque
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

if TYPE_CHECKING:
    import contextvars
    from collections.abc import Awaitable, Callable, Coroutine, Generator

    from anyio.abc import TaskGroup

__all__ = ["Slots", "run_in_context"]

T = TypeVar("T")


class Slots(Generic[T]):
    """Runs items in tasks of a task group. A new task is started only when every other one is busy.

    Args:
        group: The task group of the tasks.
        run: Runs one item. It returns False if its task cannot be used again.
    """

    def __init__(self, group: TaskGroup, run: Callable[[T], Awaitable[bool]]) -> None:
        self._group = group
        self._run = run
        self._idle: list[anyio.Event] = []
        self.waiting: deque[T] = deque()
        """Items that no task has started. After the end of the group they will never be started."""

    def start(self, item: T) -> None:
        """Run `item` as soon as the event loop comes to it."""
        self.waiting.append(item)
        if self._idle:
            self._idle.pop().set()
        else:
            self._group.start_soon(self._slot)

    async def _slot(self) -> None:
        while True:
            while self.waiting:
                if not await self._run(self.waiting.popleft()):
                    return
            wake = anyio.Event()
            self._idle.append(wake)
            try:
                await wake.wait()
            except anyio.get_cancelled_exc_class():
                if self._group.cancel_scope.cancel_called:
                    self._remove_idle(wake)
                    raise
                # The last body had cancelled its own task, which meets that cancellation only now.
                if not self._remove_idle(wake) and self.waiting:
                    self._group.start_soon(self._slot)  # for the item that this task has just been woken for
                return

    def _remove_idle(self, wake: anyio.Event) -> bool:
        """Take a task off the idle ones. Return False if it has been woken meanwhile."""
        if wake not in self._idle:
            return False
        self._idle.remove(wake)
        return True


@types.coroutine
def run_in_context(context: contextvars.Context, coro: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
    """Await `coro` with each of its steps in `context`, as if it had a task of its own."""
    step: Callable[[Any], Any] = coro.send
    value: Any = None
    while True:
        try:
            awaited = context.run(step, value)
        except StopIteration as end:
            result: T = end.value
            return result
        try:
            value = yield awaited
            step = coro.send
        except BaseException as exc:  # a cancellation, or the end of the outer coroutine: `coro` gets it, too
            value = exc
            step = coro.throw
