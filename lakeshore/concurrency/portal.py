"""The package's own event loop: asyncio in a daemon thread, one for each process, reached through anyio's portal."""

from __future__ import annotations

import atexit
import logging
import os
import threading
from concurrent.futures import Future
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import anyio
from anyio.from_thread import BlockingPortal
from anyio.lowlevel import EventLoopToken, current_token

from ..errors import PlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskGroup

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EXIT_BOUND = 3.0  # seconds that the end of the interpreter waits for this loop
GONE = "the event loop that this package keeps in the thread 'lakeshore-portal' ended before the answer came"
_TOO_LATE = "the interpreter is exiting and starts no event loop for this call any more; make it before the exit"

_log = logging.getLogger("dreamlake.lakeshore.loops")


def run_sync_soon(token: EventLoopToken, fn: Callable[[*Ts], object], *args: *Ts) -> bool:
    """Call `fn(*args)` on the loop of `token`, from any thread, without waiting; False when that loop has ended.

    What `fn` raises is logged.
    """
    try:
        token.backend_class.run_sync_soon(_logged, (fn, args), token.native_token)
    except RuntimeError:
        return False
    return True


def _logged(fn: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
    try:
        fn(*args)
    except Exception:  # on trio it would end the user's whole run
        _log.exception("a callback on an event loop failed")


class _Portal:
    """The portal, its thread, and the calls that blocking callers wait for."""

    portal: BlockingPortal
    token: EventLoopToken
    calls: TaskGroup
    stop: anyio.Event

    def __init__(self) -> None:
        self.waiting: set[Future[Any]] = set()
        started: Future[None] = Future()
        run = Context().run
        self.thread = threading.Thread(target=run, args=(self._run, started), name="lakeshore-portal", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as exc:  # since Python 3.12 an exiting interpreter starts no thread
            raise PlaneUnavailable(_TOO_LATE) from exc
        started.result()

    def _run(self, started: Future[None]) -> None:
        try:
            anyio.run(self._serve, started, backend="asyncio")
        except BaseException as exc:
            _log.exception("the portal's event loop ended with an error")
            settle(started, error=exc)
        for future in list(self.waiting):  # the loop took these calls and ended before it began them
            settle(future, error=PlaneUnavailable(GONE))

    async def _serve(self, started: Future[None]) -> None:
        async with BlockingPortal() as self.portal, anyio.create_task_group() as self.calls:
            self.token, self.stop = current_token(), anyio.Event()
            settle(started)
            await self.stop.wait()
            await self.portal.stop(cancel_remaining=True)
            self.calls.cancel_scope.cancel()

    def call(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
        """Run `fn` on this loop and wait for it in the calling thread; an exception there, Ctrl-C say, cancels it."""
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
        def left(future: Future[T]) -> None:
            if future.cancelled():
                run_sync_soon(self.token, scope.cancel)

        with anyio.CancelScope() as scope:
            future.add_done_callback(left)
            if future.cancelled():
                return
            try:
                settle(future, await fn(*args))
            except anyio.get_cancelled_exc_class():  # raised on, one that is not of this scope would cancel all calls
                settle(future, error=PlaneUnavailable(GONE))
            except BaseException as exc:  # SystemExit too is the caller's, not the portal's
                settle(future, error=exc)


def settle(future: Future[Any], value: object = None, error: BaseException | None = None) -> None:
    """Answer a future, unless it was cancelled or has its answer."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_result(value) if error is None else future.set_exception(error)


_current: _Portal | None = None
_starting = threading.Lock()
_exiting = False
_forked: list[_Portal] = []  # the parent's, in a forked child: freeing a loop here would disturb it there


def running_portal() -> _Portal:
    global _current
    with _starting:
        if _current is None or not _current.thread.is_alive():
            if _exiting:
                raise PlaneUnavailable(_TOO_LATE)
            _current = _Portal()
        return _current


def portal() -> BlockingPortal:
    """The process's portal, started on first use, closed at exit, new in a forked child."""
    return running_portal().portal


def on_portal() -> bool:
    """Whether this is the thread of the portal's loop."""
    return _current is not None and _current.thread.ident == threading.get_ident()


@atexit.register
def _at_exit() -> None:
    global _exiting
    _exiting = True
    if _current is not None:
        run_sync_soon(_current.token, _current.stop.set)
        _current.thread.join(EXIT_BOUND)


def _in_forked_child() -> None:
    global _current, _starting, _exiting
    if _current is not None:
        _forked.append(_current)
    _current, _starting, _exiting = None, threading.Lock(), False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
