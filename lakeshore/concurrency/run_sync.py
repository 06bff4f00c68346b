"""Blocking calls: run a coroutine function from plain code."""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
from anyio.from_thread import run as run_on_host_loop

from ..errors import DispatchError, LakeshoreError, PlaneUnavailable
from .loops import loop_of_this_thread, loop_token
from .portal import TrackedCall, on_portal, running_portal

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator

__all__ = ["is_blocked", "run_sync", "worker_runs_here"]

T = TypeVar("T")

_blocked: set[object] = set()
"""The loops whose thread waits in `run_sync`."""
_workers: list[object] = []
"""The loops on which workers run, once for each worker."""
_warned: set[str] = set()
"""The hints that were given in a warning."""


@contextmanager
def worker_runs_here() -> Generator[None]:
    """Inside, a blocking call on the thread of this loop is an error instead of a warning."""
    loop = loop_token().native_token
    _workers.append(loop)
    try:
        yield
    finally:
        _workers.remove(loop)


def is_blocked(loop: object) -> bool:
    """Whether the thread of this loop waits in `run_sync`, so that the loop cannot do anything."""
    return loop in _blocked


def run_sync(fn: Callable[..., Awaitable[T]], *args: Any, hint: str) -> T:
    """Run `fn(*args)` from plain code; it sees the caller's context variables.

    In a worker thread of anyio it runs on the loop that the thread serves, else on the portal's. On a thread whose own
    event loop is running it blocks that loop, and warns once.

    Args:
        fn: A coroutine function.
        args: Its positional arguments.
        hint: The async spelling of the call, for the warning and for errors.

    Returns:
        What `fn` returned.

    Raises:
        DispatchError: The wait could never end.
        PlaneUnavailable: The loop that should answer has ended.
        KeyboardInterrupt: `fn` is cancelled, and its end is not waited for.

    Errors of this package and TimeoutError come without their traceback: their sentence is enough.
    """
    try:
        return _run_sync(fn, args, hint)
    except (LakeshoreError, TimeoutError) as exc:
        raise exc.with_traceback(None)  # noqa: B904


def _run_sync(fn: Callable[..., Awaitable[T]], args: tuple[Any, ...], hint: str) -> T:
    if on_portal():
        raise DispatchError(f"a blocking call on the thread of the loop that has to answer it: use `{hint}` instead")
    loop = loop_of_this_thread()
    if loop is None:
        return _from_plain_thread(fn, args)
    if loop in _workers:
        raise DispatchError(
            f"a blocking call on a worker's event loop stops the worker, and its answer may never come: use `{hint}`, "
            "or make the function that calls it a plain `def`, which the worker runs in a thread"
        )
    _warn_once(hint)
    _blocked.add(loop)
    try:
        with _keyboard_interrupts():
            return running_portal().call(fn, args)
    finally:
        _blocked.discard(loop)


def _from_plain_thread(fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    call = TrackedCall(fn, args)
    try:
        return run_on_host_loop(call.__call__)
    except anyio.NoEventLoopError:  # no thread of anyio's
        if call.begun:
            raise
    except anyio.RunFinishedError as exc:
        if call.begun:
            raise
        raise PlaneUnavailable("the event loop that this worker thread serves has ended") from exc
    return running_portal().call(fn, args)


def _warn_once(hint: str) -> None:
    """Warn that the call blocks this thread's event loop, at the line of the user's code that makes the call."""
    if hint in _warned:
        return
    package = __name__.rpartition(".concurrency.")[0] + "."
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        level += 1
        frame = frame.f_back
    sentence = "a blocking call on a thread whose event loop is running stops that loop until the answer comes"
    warnings.warn(f"{sentence}: use `{hint}`", RuntimeWarning, stacklevel=level)
    _warned.add(hint)


@contextmanager
def _keyboard_interrupts() -> Generator[None]:
    """Inside, Ctrl-C raises KeyboardInterrupt.

    `asyncio.run` instead cancels its main task at the first Ctrl-C, which a blocked loop would never notice. Its handler
    is a partial of a method of its Runner. A handler that the user has set stays.
    """
    handler = signal.getsignal(signal.SIGINT)
    method = getattr(handler, "func", None)
    of_asyncio_run = getattr(method, "__module__", None) == "asyncio.runners"
    if not of_asyncio_run or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
