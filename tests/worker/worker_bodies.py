"""Functions that workers run, in this process and in others. What they note is read by tests of the same process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
from anyio.lowlevel import checkpoint

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SEEN: list[Any] = []
BEGAN: list[float] = []
"""When those began whose distances count, by the clock of `time.monotonic`."""
TENANT: contextvars.ContextVar[str] = contextvars.ContextVar("TENANT", default="nobody")
_gates: dict[str, threading.Event] = {}


def gate(name: str) -> threading.Event:
    """An event by name, for bodies in threads to wait for."""
    return _gates.setdefault(name, threading.Event())


def open_gates() -> None:
    for event in list(_gates.values()):
        event.set()


def forget() -> None:
    SEEN.clear()
    BEGAN.clear()
    _parties.clear()
    _gates.clear()


# --- plain ----------------------------------------------------------------------------------------------------------


def double(x: Any) -> Any:
    return x * 2


async def adouble(x: Any) -> Any:
    return x * 2


def count(n: int) -> Iterator[int]:
    yield from range(n)


async def acount(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


def note(what: Any) -> None:
    SEEN.append(what)


async def anote(what: Any) -> None:
    SEEN.append(what)


def sized(n: int) -> bytes:
    return bytes(n)


def append_line(path: str, text: str) -> None:
    """One line, in one write: what other processes append at the same time stands before or after it."""
    out = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(out, f"{text}\n".encode())
    finally:
        os.close(out)


@dls.udf(queue="q")
def udf_double(x: int) -> int:
    return x * 2


@dls.udf(queue="q")
async def udf_acount(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


class Shelf:
    @dls.udf(queue="q")
    @staticmethod
    def static(x: int) -> int:
        return x + 1

    @dls.udf(queue="q")
    @classmethod
    def named(cls, x: int) -> str:
        return f"{cls.__name__} {x}"


# --- raising --------------------------------------------------------------------------------------------------------


class TwoArguments(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")
        self.one, self.two = one, two


class WithLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class OddArgs(Exception):
    @property
    def args(self) -> NoReturn:  # type: ignore[override]
        raise RuntimeError("no args for you")

    def __str__(self) -> str:
        return "odd"


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")


class UnprintableHard(Exception):
    def __str__(self) -> str:
        sys.exit("no text, no worker")


def _raise(kind: str) -> NoReturn:
    match kind:
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "generator exit":
            raise GeneratorExit("not mine")
        case "two":
            raise TwoArguments("this", "that")
        case "lock":
            raise WithLock("locked")
        case "args":
            raise OddArgs
        case "unprintable":
            raise Unprintable
        case "unprintable hard":
            raise UnprintableHard
        case "surrogate":
            raise ValueError("half a pair: \ud800")
        case "group":
            raise ExceptionGroup("several", [ValueError("one"), KeyError("two")])
        case "cancelled":
            raise asyncio.CancelledError("by itself")
        case "cause":
            error = ValueError("outer words")
            error.add_note("a note on it")
            raise error from KeyError("inner cause")
        case _:
            raise ValueError(kind)


def fail(kind: str) -> NoReturn:
    SEEN.append(kind)
    _raise(kind)


async def afail(kind: str) -> NoReturn:
    SEEN.append(kind)
    await checkpoint()
    _raise(kind)


def fail_after(n: int, kind: str) -> Iterator[int]:
    yield from range(n)
    _raise(kind)


async def afail_after(n: int, kind: str) -> AsyncIterator[int]:
    for i in range(n):
        yield i
    _raise(kind)


def fail_times(name: str, n: int) -> int:
    """Raises the first `n` times that it runs, then gives the number of runs."""
    BEGAN.append(time.monotonic())
    SEEN.append(name)
    if SEEN.count(name) <= n:
        raise OSError(f"failure {SEEN.count(name)}")
    return SEEN.count(name)


def unpackable(kind: str) -> Any:
    return {"lock": threading.Lock(), "nested": {"a": [1, object()]}}[kind]


def yields_unpackable() -> Iterator[Any]:
    yield 1
    yield object()


async def ayields_unpackable() -> AsyncIterator[Any]:
    yield 1
    try:
        yield object()
    finally:
        SEEN.append("closed")


async def cancels_itself() -> str:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    return "cancelled, and returned all the same"


async def cancels_itself_and_waits() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(60)


# --- waiting --------------------------------------------------------------------------------------------------------


async def sleeper(name: str = "sleeper", seconds: float = 60.0) -> str:
    SEEN.append(f"{name} began")
    try:
        await anyio.sleep(seconds)
    except BaseException as exc:
        SEEN.append(f"{name} stopped by {type(exc).__name__}")
        raise
    finally:
        SEEN.append(f"{name} cleaned up")
    return name


async def stubborn(how: str) -> str:
    """Does not end the way a cancelled body should."""
    SEEN.append("began")
    try:
        await anyio.sleep(60)
    except BaseException:
        if how == "raises":
            raise RuntimeError("instead of ending") from None
        if how == "exits":
            sys.exit(4)
        if how == "groups":
            raise BaseExceptionGroup("mixed", [RuntimeError("one"), KeyboardInterrupt()]) from None
    return "done all the same"


async def in_task_group(seconds: float) -> None:
    """Cancelled, several tasks end at once."""
    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(anyio.sleep, seconds)
        SEEN.append("began")


def blocked(name: str) -> str:
    """A body in a thread, until its gate opens."""
    opened = gate(name)  # it is there to be opened once the body is seen
    SEEN.append(f"{name} began")
    opened.wait(60)
    SEEN.append(f"{name} ended")
    return name


def blocked_steps(name: str, n: int) -> Iterator[int]:
    """The same after each value."""
    opened = gate(name)
    try:
        for i in range(n):
            yield i
            SEEN.append(f"{name} after {i}")
            opened.wait(60)
    finally:
        SEEN.append(f"{name} cleaned up")


async def steps_until_cancelled(name: str) -> AsyncIterator[int]:
    try:
        for i in range(1_000_000):
            yield i
            await anyio.sleep(0.01)
    finally:
        SEEN.append(f"{name} cleaned up")


def endless(name: str) -> Iterator[int]:
    i = 0
    try:
        while True:
            yield i
            i += 1
    finally:
        SEEN.append(f"{name} cleaned up")


async def aendless(size: int = 100) -> AsyncIterator[bytes]:
    data = bytes(size)
    while True:
        SEEN.append(None)
        yield data


async def never_awaits(seconds: float) -> AsyncIterator[str]:
    yield "first"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    yield "second"


def keep_gil(path: str, seconds: float) -> str:
    """One call in C that keeps the interpreter's lock, as a large regular expression or JSON document does."""
    append_line(path, "began")
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    append_line(path, "ended")
    return "kept"


async def block_loop_until(name: str) -> str:
    """Blocks the loop of the bodies until its gate opens."""
    opened = gate(name)
    SEEN.append(f"{name} began")
    opened.wait(60)
    return "blocked"


async def block_loop(path: str, seconds: float) -> str:
    append_line(path, "began")
    time.sleep(seconds)
    append_line(path, "ended")
    return "blocked"


# --- context --------------------------------------------------------------------------------------------------------


def _context() -> list[Any]:
    return [TENANT.get(), dls.run.prefix, dls.run.invocation_id, dls.run.attempt]


def context() -> list[Any]:
    found = _context()
    TENANT.set("left by a body")
    return found


async def acontext() -> list[Any]:
    return context()


def gen_context() -> Iterator[list[Any]]:
    yield context()


async def agen_context() -> AsyncIterator[list[Any]]:
    yield context()


async def leave_scope_open() -> str:
    scope = dls.scope("left/open")
    scope.__enter__()
    SEEN.append(scope)  # or it would be closed by the collector
    return dls.run.prefix


async def write_and_return(key: str) -> str:
    dls.run.write(key).write_text("x")
    return key


async def children(n: int) -> list[str]:
    """Submits more of the work it is part of, and waits for none of it."""
    queue = dls.Queue("q", dispatch=CURRENT["plane"])
    return [await queue.submit(dls.thunk(double, i)) for i in range(n)]


CURRENT: dict[str, Any] = {}


@contextlib.contextmanager
def current(**values: Any) -> Iterator[None]:
    CURRENT.update(values)
    try:
        yield
    finally:
        CURRENT.clear()


# --- streams --------------------------------------------------------------------------------------------------------


def sizes(many: list[int]) -> Iterator[bytes]:
    for n in many:
        yield bytes(n)


async def asizes(many: list[int]) -> AsyncIterator[bytes]:
    for n in many:
        yield bytes(n)


def items(many: list[Any]) -> Iterator[Any]:
    yield from many


async def aitems(many: list[Any]) -> AsyncIterator[Any]:
    for item in many:
        yield item


async def other_values_each_time() -> AsyncIterator[str]:
    SEEN.append("began")
    if len(SEEN) == 1:
        yield "a"
        yield "b"
        raise OSError("died")
    yield "x"


async def fails_before_its_first_value() -> AsyncIterator[str]:
    SEEN.append("began")
    if len(SEEN) == 1:
        raise OSError("died")
    yield "x"


async def slow_then_quick(n: int) -> AsyncIterator[Any]:
    SEEN.append("began")
    if len(SEEN) == 1:
        for i in range(n):
            yield i
        await anyio.sleep(60)
    yield "again"
    yield "and done"


async def spaced(n: int) -> AsyncIterator[int]:
    """Values in flushes of their own."""
    for i in range(n):
        yield i
        await anyio.sleep(0.02)


# --- company --------------------------------------------------------------------------------------------------------

_meeting = threading.Lock()
_parties: dict[int, threading.Barrier] = {}
_crowd = [0]


def meet(n: int) -> bool:
    """True once `n` of these run at the same time."""
    with _meeting:
        party = _parties.setdefault(n, threading.Barrier(n))
    try:
        party.wait(60)
    except threading.BrokenBarrierError:
        return False
    return True


def crowd() -> int:
    """How many run now, with this one."""
    with _meeting:
        _crowd[0] += 1
        now = _crowd[0]
    time.sleep(0.01)
    with _meeting:
        _crowd[0] -= 1
    return now


async def acrowd() -> int:
    with _meeting:
        _crowd[0] += 1
        now = _crowd[0]
    await anyio.sleep(0.01)
    with _meeting:
        _crowd[0] -= 1
    return now


def slow_thread(name: str, seconds: float) -> str:
    SEEN.append(f"{name} began")
    time.sleep(seconds)
    return name


# --- in processes that are killed -----------------------------------------------------------------------------------


def moment() -> None:
    """Replaced where a process is to die in the middle of a body."""


def work(path: str, name: str) -> str:
    append_line(path, f"{name} began")
    moment()
    append_line(path, f"{name} ended")
    return name


async def awork(path: str, name: str) -> str:
    return work(path, name)


async def astream(path: str, n: int) -> AsyncIterator[int]:
    append_line(path, "stream began")
    for i in range(n):
        yield i
        if i % 50 == 49:
            await anyio.sleep(0.001)
    moment()


def stream(path: str, n: int) -> Iterator[int]:
    append_line(path, "stream began")
    for i in range(n):
        yield i
        if i % 50 == 49:
            time.sleep(0.001)
    moment()


def kill_worker(path: str) -> str:
    append_line(path, "began")
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


async def wait_for_file(marks: str, go: str) -> str:
    append_line(marks, "began")
    while not os.path.exists(go):  # noqa: ASYNC110 -- another process makes it
        await anyio.sleep(0.01)
    return "done"


def line(path: str, text: str) -> None:
    append_line(path, text)


async def aline(path: str, text: str) -> None:
    append_line(path, text)


def wait_for_file_in_a_thread(marks: str, go: str) -> str:
    append_line(marks, "began")
    for _ in range(6000):
        if os.path.exists(go):
            break
        time.sleep(0.01)
    return "done"


# --- blocking calls inside ------------------------------------------------------------------------------------------


def blocking_child(x: int) -> Any:
    return CURRENT["queue"].sync.call(dls.thunk(double, x))


async def ablocking_child(x: int) -> Any:
    return blocking_child(x)
