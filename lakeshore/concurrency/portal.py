"""The package's own event loop: asyncio in a daemon thread, one for each process, reached through anyio's portal.

Blocking callers use it, and drivers that only know asyncio.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import CancelledError, Future
from contextvars import Context
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, TypeVarTuple

import anyio
from anyio.from_thread import BlockingPortal

from ..errors import PlaneUnavailable
from .loops import loop_token, on_asyncio, run_sync_soon

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup
    from anyio.lowlevel import EventLoopToken

__all__ = ["Home", "TrackedCall", "across", "at_home", "on_portal", "portal", "running_portal"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Home = Literal["asyncio", "portal"]
"""Where a driver may run: on any asyncio loop that calls it, or on the portal's only."""

EXIT_TIMEOUT = 3.0
"""Seconds that the end of the interpreter waits for the portal's loop."""
GONE = "the event loop that this package keeps in the thread 'lakeshore-portal' ended before the answer came"
_TOO_LATE = "the interpreter is exiting and starts no event loop for this call any more; make it before the exit"

logger = logging.getLogger("dreamlake.lakeshore.loops")


# Calls from other loops


class TrackedCall(Generic[T]):
    """A call that records whether it was begun: errors before that are the loop's, later ones are its own."""

    def __init__(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args
        self.begun = False

    async def __call__(self) -> T:
        self.begun = True
        return await self.fn(*self.args)


async def across(home: Home, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Await `fn(*args)` where its driver lives: on this loop if that will do, else on the portal's.

    Cancellation reaches `fn`, and the caller waits for its end.

    Raises:
        PlaneUnavailable: The portal's loop ended first.
    """
    if at_home(home):
        return await fn(*args)
    call = TrackedCall(fn, args)
    target = portal()
    try:
        return await target.call_async(call)
    except CancelledError as exc:
        raise PlaneUnavailable(GONE) from exc
    except RuntimeError as exc:
        if call.begun:
            raise
        raise PlaneUnavailable(GONE) from exc


def at_home(home: Home) -> bool:
    """Whether `across(home, ...)` stays on this loop, which is then asyncio's."""
    return on_portal() or (home == "asyncio" and on_asyncio())


# The portal


def portal() -> BlockingPortal:
    """The process's portal: started on first use, closed at exit, new in a forked child."""
    return running_portal().portal


def on_portal() -> bool:
    """Whether this is the thread of the portal's loop."""
    return _current is not None and _current.thread.ident == threading.get_ident()


def running_portal() -> _Portal:
    """The process's portal with its thread and its calls; started if there is none.

    Raises:
        PlaneUnavailable: The interpreter is exiting.
    """
    global _current
    with _starting:
        if _current is None or not _current.thread.is_alive():
            if _exiting:
                raise PlaneUnavailable(_TOO_LATE)
            _current = _Portal()
        return _current


class _Portal:
    """The portal, its thread, and the calls for which blocking callers wait."""

    portal: BlockingPortal
    token: EventLoopToken
    calls: TaskGroup
    stop: anyio.Event

    def __init__(self) -> None:
        self.waiting: set[Future[Any]] = set()
        started: Future[None] = Future()
        self.thread = threading.Thread(
            target=Context().run, args=(self._run, started), name="lakeshore-portal", daemon=True
        )
        try:
            self.thread.start()
        except RuntimeError as exc:  # since Python 3.12 an exiting interpreter starts no thread
            raise PlaneUnavailable(_TOO_LATE) from exc
        started.result()

    def _run(self, started: Future[None]) -> None:
        try:
            anyio.run(self._serve, started, backend="asyncio")
        except BaseException as exc:
            logger.exception("the portal's event loop ended with an error")
            _set_error(started, exc)
        for future in list(self.waiting):  # the loop took these calls and ended before it began them
            _set_error(future, PlaneUnavailable(GONE))

    async def _serve(self, started: Future[None]) -> None:
        async with BlockingPortal() as self.portal, anyio.create_task_group() as self.calls:
            self.token = loop_token()
            self.stop = anyio.Event()
            _set_result(started, None)
            await self.stop.wait()
            await self.portal.stop(cancel_remaining=True)
            self.calls.cancel_scope.cancel()

    def call(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        """Run `fn(*args)` on this loop and wait for it in the calling thread.

        An exception in the calling thread, such as KeyboardInterrupt, cancels it.
        """
        future: Future[T] = Future()
        self.waiting.add(future)
        try:
            if not run_sync_soon(self.token, self.calls.start_soon, self._answer, fn, args, future):
                raise PlaneUnavailable(GONE)
            return future.result()
        except BaseException:
            future.cancel()
            raise
        finally:
            self.waiting.discard(future)
            del future  # or an exception in it and this frame would keep each other alive

    async def _answer(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...], future: Future[T]) -> None:
        def cancel_if_left(future: Future[T]) -> None:
            if future.cancelled():
                run_sync_soon(self.token, scope.cancel)

        with anyio.CancelScope() as scope:
            future.add_done_callback(cancel_if_left)
            if future.cancelled():
                return
            try:
                _set_result(future, await fn(*args))
            except anyio.get_cancelled_exc_class():  # raised on, one that is not of this scope would cancel all calls
                _set_error(future, PlaneUnavailable(GONE))
            except BaseException as exc:  # SystemExit too belongs to the caller, not to the portal
                _set_error(future, exc)


def _set_result(future: Future[T], value: T) -> None:
    if _takes_an_answer(future):
        future.set_result(value)


def _set_error(future: Future[Any], error: BaseException) -> None:
    if _takes_an_answer(future):
        future.set_exception(error)


def _takes_an_answer(future: Future[Any]) -> bool:
    """Whether the future was neither cancelled nor answered. From now on it cannot be cancelled."""
    return not future.done() and future.set_running_or_notify_cancel()


# The ends of the process


_current: _Portal | None = None
_starting = threading.Lock()
_exiting = False
_forked: list[_Portal] = []
"""The parent's portal, in a forked child: to free its loop here would disturb it there."""


@atexit.register
def _at_exit() -> None:
    global _exiting
    _exiting = True
    if _current is not None:
        run_sync_soon(_current.token, _current.stop.set)
        _current.thread.join(EXIT_TIMEOUT)


def _in_forked_child() -> None:
    global _current, _starting, _exiting
    if _current is not None:
        _forked.append(_current)
    _current = None
    _starting = threading.Lock()
    _exiting = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
