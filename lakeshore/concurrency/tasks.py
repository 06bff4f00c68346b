"""Tasks that belong to the event loop and to no caller."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, TypeVarTuple

import anyio

from ..errors import PlaneUnavailable
from .loops import logger, start_task

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["run_to_end", "spawn"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def _nothing() -> None: ...


def spawn(fn: Callable[[], Awaitable[None]], ended: Callable[[], object] = _nothing) -> None:
    """Start a task that belongs to the running loop and to no caller; it sees no caller's context variables.

    Args:
        fn: What the task runs. Its exceptions are logged.
        ended: Called once when the task is over, whatever happened: also when the loop ends before the task's first step
            (a `finally` in `fn` never runs then), or takes no more tasks. It may run outside of any task: it should set
            events and flags, nothing else.
    """

    async def run() -> None:
        try:
            await fn()
        except Exception:
            logger.exception("a background task failed")

    start_task(run, ended)


async def run_to_end(fn: Callable[[*Ts], Awaitable[T]], *args: *Ts, may_leave: bool = False) -> T:
    """Await `fn(*args)` in a task of the loop, which no cancellation of the caller interrupts: not asyncio's own
    `Task.cancel` either, which passes anyio's shields.

    Cancellation: a cancelled caller stays here until `fn` has ended. A cancelled scope of anyio then reaches it at its next
    await; a `Task.cancel` is raised here, in place of what `fn` returned or raised. With `may_leave` a cancelled caller
    leaves at once, and the task runs on without it.

    Args:
        fn: It sees no context variables of the caller.
        args: Positional arguments for `fn`.
        may_leave: A cancelled caller does not wait for the end.

    Returns:
        What `fn` returned.

    Raises:
        PlaneUnavailable: The loop ended before `fn` did.
        BaseException: What `fn` raised.
    """
    ended = anyio.Event()
    results: list[T] = []
    errors: list[BaseException] = []
    cancelled = anyio.get_cancelled_exc_class()

    async def run() -> None:
        try:
            results.append(await fn(*args))
        except cancelled:  # the loop is ending: nothing else can cancel this task
            raise
        except BaseException as exc:
            errors.append(exc)

    spawn(run, ended.set)
    if may_leave:
        await ended.wait()
    else:
        await _wait_through_cancellation(ended)
    try:
        if errors:
            raise errors[0]
    finally:
        errors = []  # or the exception and this frame would keep each other alive
    if not results:
        raise PlaneUnavailable("the event loop ended before this operation was done; it can be repeated")
    return results[0]


async def _wait_through_cancellation(ended: anyio.Event) -> None:
    """Wait for `ended` however often the task is cancelled meanwhile, then raise the first of those cancellations."""
    cancelled: list[BaseException] = []
    with anyio.CancelScope(shield=True):
        while not ended.is_set():
            try:
                await ended.wait()
            except anyio.get_cancelled_exc_class() as exc:
                cancelled.append(exc)
    try:
        if cancelled:
            raise cancelled[0]
    finally:
        cancelled = []  # or the exception and this frame would keep each other alive
