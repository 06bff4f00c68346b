"""Everything this package knows about event loops: the only module that names asyncio or trio.

A process has the loops of its user, asyncio or trio, and at most one of the package's own: the portal's (see `portal`).
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVarTuple

from anyio.lowlevel import EventLoopToken
from anyio.lowlevel import current_token as loop_token

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable, Coroutine

__all__ = [
    "call_soon",
    "loop_of_this_thread",
    "loop_token",
    "on_asyncio",
    "on_readable",
    "run_sync_soon",
    "running_asyncio_loop",
    "start_task",
]

Ts = TypeVarTuple("Ts")

logger = logging.getLogger("dreamlake.lakeshore.loops")

_tasks: set[asyncio.Task[None]] = set()
"""The tasks that `start_task` started: asyncio itself holds its tasks weakly."""

running_asyncio_loop: Callable[[], object | None] = asyncio._get_running_loop
"""The asyncio loop that runs in this thread, or None. A C function: the quickest way to find out."""


def on_asyncio() -> bool:
    """Whether the current task is one of an asyncio loop."""
    return isinstance(loop_token().native_token, asyncio.AbstractEventLoop)


def loop_of_this_thread() -> object | None:
    """The event loop that runs in this thread, or None. Works in tasks and, on asyncio, in plain callbacks too."""
    try:
        return loop_token().native_token
    except RuntimeError:
        return running_asyncio_loop()


def call_soon(fn: Callable[[], object]) -> None:
    """Call `fn` in the next pass of the running asyncio loop; cheaper than a task of its own."""
    asyncio.get_running_loop().call_soon(fn)


def run_sync_soon(token: EventLoopToken, fn: Callable[[*Ts], object], *args: *Ts) -> bool:
    """Call `fn(*args)` on the loop of `token`, from any thread, without waiting. Exceptions of `fn` are logged.

    Returns:
        False when that loop has ended.
    """
    try:
        token.backend_class.run_sync_soon(_call_and_log, (fn, args), token.native_token)
    except RuntimeError:
        return False
    return True


def _call_and_log(fn: Callable[[*Ts], object], args: tuple[*Ts]) -> None:
    try:
        fn(*args)
    except Exception:  # on trio it would end the user's whole run
        logger.exception("a callback on an event loop failed")


def start_task(run: Callable[[], Coroutine[Any, Any, None]], ended: Callable[[], object]) -> None:
    """Start `run()` as a task of the running loop, in an empty context. `tasks.spawn` describes `ended`."""
    loop = asyncio._get_running_loop() or loop_token().native_token  # in plain callbacks there is no token
    if not isinstance(loop, asyncio.AbstractEventLoop):
        _start_trio_task(run, ended)
        return

    def done(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        ended()

    task = loop.create_task(run(), context=Context())
    _tasks.add(task)
    task.add_done_callback(done)


def _start_trio_task(run: Callable[[], Awaitable[None]], ended: Callable[[], object]) -> None:
    import trio

    async def main() -> None:
        try:
            await run()
        finally:
            ended()

    try:
        trio.lowlevel.spawn_system_task(main, context=Context())
    except RuntimeError:  # the run is ending
        ended()


def on_readable(sock: socket.socket, callback: Callable[[], object]) -> Callable[[], None] | None:
    """Call `callback` on this loop whenever `sock` can be read.

    Returns:
        A function that stops this; None when this loop cannot watch sockets: only asyncio's selector loops can.
    """
    loop = loop_token().native_token
    if not isinstance(loop, asyncio.AbstractEventLoop):
        return None
    try:
        loop.add_reader(sock, callback)
    except NotImplementedError:
        return None

    def stop() -> None:
        if not loop.is_closed():
            loop.remove_reader(sock)

    return stop
