"""Everything this package knows about event loops: the only module that names asyncio or trio.

A process has the loops of its user, asyncio or trio, and one of the package's own: the portal's, asyncio in a daemon
thread, for blocking callers and for drivers that only know asyncio. `across` and `run_sync` lead there; `spawn`,
`run_sync_soon` and `PerLoop` give a loop tasks, callbacks and resources that belong to no caller.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
import warnings
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, TypeVarTuple
from weakref import WeakSet

import anyio
from anyio.from_thread import run as run_on_host_loop
from anyio.lowlevel import EventLoopToken
from anyio.lowlevel import current_token as loop_token

from ..errors import DispatchError, LakeshoreError, PlaneUnavailable
from .portal import GONE, on_portal, portal, run_sync_soon, running_portal, settle

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Awaitable, Callable, Generator

__all__ = [
    "Home",
    "PerLoop",
    "across",
    "at_home",
    "call_soon",
    "loop_token",
    "on_daemon_thread",
    "on_portal",
    "on_readable",
    "portal",
    "run_sync",
    "run_sync_soon",
    "spawn",
    "worker_runs_here",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Home = Literal["asyncio", "portal"]  # where a driver lives: on any asyncio loop that calls it, or on the portal's only

FOREIGN_BOUND = 5.0  # seconds that `PerLoop.aclose_all` waits for other loops

_log = logging.getLogger("dreamlake.lakeshore.loops")


class _Call(Generic[T]):
    """A call that remembers whether it was begun: errors before that are the loop's, later ones its own."""

    def __init__(self, fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> None:
        self.fn, self.args, self.begun = fn, args, False

    async def __call__(self) -> T:
        self.begun = True
        return await self.fn(*self.args)


async def across(home: Home, fn: Callable[[*Ts], Awaitable[T]], *args: *Ts) -> T:
    """Await `fn(*args)` where its driver lives: on this loop if that will do, else on the portal's.

    Raises PlaneUnavailable when the portal's loop ends first. Cancellation reaches `fn`, whose end is awaited.
    """
    if at_home(home):
        return await fn(*args)
    target, call = portal(), _Call(fn, args)
    try:
        return await target.call_async(call)
    except CancelledError as exc:
        raise PlaneUnavailable(GONE) from exc
    except RuntimeError as exc:
        if call.begun:
            raise
        raise PlaneUnavailable(GONE) from exc


def _nothing() -> None: ...


_tasks: set[asyncio.Task[None]] = set()  # asyncio itself holds its tasks weakly


def spawn(fn: Callable[[], Awaitable[None]], ended: Callable[[], object] = _nothing) -> None:
    """Start a task that belongs to the running loop and to no caller; it sees no caller's context variables.

    `ended` is called once, whatever happened: also when the loop ends before the task's first step (its own `finally`
    never runs then), or takes no more tasks. It may run outside of any task: set events and flags there, nothing else.
    What `fn` raises is logged.
    """

    async def run() -> None:
        try:
            await fn()
        except Exception:
            _log.exception("a background task failed")

    def done(task: asyncio.Task[None]) -> None:
        _tasks.discard(task)
        ended()

    loop = asyncio._get_running_loop() or loop_token().native_token  # plain callbacks of a loop know no token
    if isinstance(loop, asyncio.AbstractEventLoop):
        task = loop.create_task(run(), context=Context())
        _tasks.add(task)
        task.add_done_callback(done)
    else:
        _spawn_on_trio(run, ended)


def call_soon(fn: Callable[[], object]) -> None:
    """Call `fn` in the next pass of the running asyncio loop; cheaper than a task of its own."""
    asyncio.get_running_loop().call_soon(fn)


def at_home(home: Home) -> bool:
    """Whether `across(home, ...)` stays on this loop, and this is asyncio's."""
    return on_portal() or (home == "asyncio" and isinstance(loop_token().native_token, asyncio.AbstractEventLoop))


def on_readable(sock: socket.socket, heard: Callable[[], object]) -> Callable[[], None] | None:
    """Call `heard` on this loop whenever `sock` can be read, until what this gives is called. None: not on this loop."""
    loop = loop_token().native_token
    if not isinstance(loop, asyncio.AbstractEventLoop):
        return None
    try:
        loop.add_reader(sock, heard)
    except NotImplementedError:
        return None

    def stop() -> None:
        if not loop.is_closed():
            loop.remove_reader(sock)

    return stop


def _spawn_on_trio(run: Callable[[], Awaitable[None]], ended: Callable[[], object]) -> None:
    import trio

    async def guarded() -> None:
        try:
            await run()
        finally:
            ended()

    try:
        trio.lowlevel.spawn_system_task(guarded, context=Context())
    except RuntimeError:
        ended()  # the run is ending


def on_daemon_thread(make: Callable[[], T]) -> T:
    """Call `make` in a daemon thread: the threads it creates are daemons too, and cannot keep the interpreter alive."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            settle(made, make())
        except BaseException as exc:
            settle(made, error=exc)

    threading.Thread(target=run, daemon=True).start()
    return made.result()


class Closable(Protocol):
    async def close(self) -> None: ...  # a second time when asyncio's own cancellation broke the first one off


C = TypeVar("C", bound=Closable)


class _Slot(Generic[C]):
    def __init__(self, token: EventLoopToken) -> None:
        self.token = token
        self.lock = anyio.Lock()
        self.value: C | None = None
        self.keeper: AsyncGenerator[None, None] | None = None

    async def open(self, opener: Callable[[], Awaitable[C]]) -> C:
        async with self.lock:  # many first users open once
            if self.value is None:
                self.keeper = self._keep(opener)
                await anext(self.keeper)
            assert self.value is not None
            return self.value

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self.lock:
                if self.keeper is not None:
                    await self.keeper.aclose()

    async def _keep(self, opener: Callable[[], Awaitable[C]]) -> AsyncGenerator[None, None]:
        """Suspended for the life of the loop: event loops close live async generators when they end (PEP 525)."""
        value = self.value = await opener()
        _open.add(self)
        try:
            yield
        finally:
            self.value = None
            _open.discard(self)
            with anyio.CancelScope(shield=True):  # trio closes generators in a cancelled scope
                try:
                    await value.close()
                except asyncio.CancelledError:  # a shield does not stop asyncio's own cancellation
                    await value.close()
                    raise


_open: set[_Slot[Any]] = set()  # held for the life of their loops, also when their PerLoop is forgotten
_owners: WeakSet[PerLoop[Any]] = WeakSet()
_inherited: list[object] = []  # the parent's, in a forked child: neither used nor freed here


class PerLoop(Generic[C]):
    """One resource for each event loop: opened on first use, closed by `aclose`, `aclose_all` or its loop's end."""

    def __init__(self, opener: Callable[[], Awaitable[C]]) -> None:
        self._opener = opener
        self._slots: dict[object, _Slot[C]] = {}  # by the loop
        _owners.add(self)

    def here(self) -> C | None:
        """This loop's resource if it is open and the loop is asyncio's; the quick way, `get` is the sure one."""
        slot = self._slots.get(asyncio._get_running_loop())
        return None if slot is None else slot.value

    def opened(self) -> C | None:
        """This loop's resource if it is open; only inside of a task."""
        slot = self._slots.get(loop_token().native_token)
        return None if slot is None else slot.value

    async def get(self) -> C:
        """This loop's resource, opened if need be; a cancelled or failed opening leaves nothing behind."""
        token = loop_token()
        slot = self._slots.get(token.native_token)
        if slot is None:
            self._forget_ended_loops()
            slot = self._slots[token.native_token] = _Slot(token)
        return slot.value if slot.value is not None else await slot.open(self._opener)

    def _forget_ended_loops(self) -> None:
        for slot in {*self._slots.values(), *_open}:
            if not run_sync_soon(slot.token, _nothing):
                _open.discard(slot)
                self._slots.pop(slot.token.native_token, None)

    async def aclose(self) -> None:
        """Close this loop's resource; cancellation waits for that. A later `get` opens another."""
        if (slot := self._slots.get(loop_token().native_token)) is not None:
            await slot.close()

    async def aclose_all(self) -> None:
        """Close the resource of every loop, each on its own loop; cancellation waits for that.

        Loops that have ended are skipped. Other loops are asked first and waited for last, 5 seconds in all.
        """
        here, closed = loop_token(), list[anyio.Event]()
        for slot in list(self._slots.values()):
            loop, event = slot.token.native_token, anyio.Event()
            closed_already = slot.value is None and not slot.lock.locked()  # locked: it is being opened
            if closed_already or loop is here.native_token:
                continue
            tell = partial(run_sync_soon, here, event.set)
            if run_sync_soon(slot.token, spawn, slot.close, tell) and loop not in _blocked:
                closed.append(event)
        with anyio.CancelScope(shield=True):
            try:
                await self.aclose()
            finally:
                with anyio.move_on_after(FOREIGN_BOUND):
                    for event in closed:
                        await event.wait()


def _in_forked_child() -> None:
    _inherited.extend(_open)
    _open.clear()
    for owner in _owners:
        _inherited.append(owner._slots)
        owner._slots = {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


_blocked: set[object] = set()  # loops whose thread waits in `run_sync`
_workers: list[object] = []  # loops on which workers run, once for each worker
_warned: set[str] = set()


@contextmanager
def worker_runs_here() -> Generator[None]:
    """Inside, a blocking call on the thread of this loop is an error instead of a warning."""
    loop = loop_token().native_token
    _workers.append(loop)
    try:
        yield
    finally:
        _workers.remove(loop)


def run_sync(fn: Callable[..., Awaitable[T]], *args: Any, hint: str) -> T:
    """Run `fn(*args)` from plain code and return what it returns; context variables flow in.

    In a worker thread of anyio it runs on the loop that the thread serves, else on the portal's. On a thread whose own
    event loop is running it blocks that loop, and warns once with `hint`, the async spelling.

    Raises DispatchError where the wait could never end, PlaneUnavailable when the loop that should answer has ended.
    KeyboardInterrupt cancels `fn` and does not wait for its end. Errors whose sentence says all, those of the package and
    TimeoutError, come without the way that they took through the loops.
    """
    try:
        return _run_sync(fn, args, hint)
    except (LakeshoreError, TimeoutError) as exc:
        raise exc.with_traceback(None)  # noqa: B904


def _run_sync(fn: Callable[..., Awaitable[T]], args: tuple[Any, ...], hint: str) -> T:
    if on_portal():
        raise DispatchError(f"a blocking call on the thread of the loop that has to answer it: use `{hint}` instead")
    loop = _loop_of_this_thread()
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
        with _interruptible():
            return running_portal().call(fn, args)
    finally:
        _blocked.discard(loop)


def _from_plain_thread(fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    call = _Call(fn, args)
    try:
        return run_on_host_loop(call.__call__)
    except (anyio.NoEventLoopError, anyio.RunFinishedError) as exc:
        if call.begun:
            raise
        if isinstance(exc, anyio.RunFinishedError):
            raise PlaneUnavailable("the event loop that this worker thread serves has ended") from exc
    return running_portal().call(fn, args)


def _loop_of_this_thread() -> object | None:
    for look in (loop_token, asyncio.get_running_loop):  # the second one knows it in plain callbacks too
        try:
            found = look()
        except RuntimeError:
            continue
        return found.native_token if isinstance(found, EventLoopToken) else found
    return None


def _warn_once(hint: str) -> None:
    if hint in _warned:
        return
    package, level, frame = __name__.rpartition(".concurrency.")[0] + ".", 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(package):
        level, frame = level + 1, frame.f_back
    sentence = "a blocking call on a thread whose event loop is running stops that loop until the answer comes"
    warnings.warn(f"{sentence}: use `{hint}`", RuntimeWarning, stacklevel=level)
    _warned.add(hint)


@contextmanager
def _interruptible() -> Generator[None]:
    """`asyncio.run` makes the first Ctrl-C a cancellation, which a blocked loop would never see."""
    handler = signal.getsignal(signal.SIGINT)
    theirs = getattr(getattr(handler, "func", None), "__module__", None) == "asyncio.runners"
    if not theirs or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
