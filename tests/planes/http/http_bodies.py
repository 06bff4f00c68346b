"""Functions that workers run in these tests, in this process and in others."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SEEN: list[Any] = []
_gates: dict[str, threading.Event] = {}


def gate(name: str) -> threading.Event:
    """An event by name, for bodies in threads to wait for."""
    return _gates.setdefault(name, threading.Event())


def open_gates() -> None:
    for event in list(_gates.values()):
        event.set()


def forget() -> None:
    SEEN.clear()
    _gates.clear()


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


def double(x: Any) -> Any:
    return x * 2


async def adouble(x: Any) -> Any:
    return x * 2


def count(n: int) -> Iterator[int]:
    yield from range(n)


async def acount(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


def ticking(n: int) -> Iterator[int]:
    try:
        for i in range(n):
            yield i
            time.sleep(0.01)
    finally:
        SEEN.append("cleaned up")


async def aticking(n: int) -> AsyncIterator[int]:
    try:
        for i in range(n):
            yield i
            await anyio.sleep(0.01)
    finally:
        SEEN.append("cleaned up")


def fail(message: str) -> None:
    SEEN.append(message)
    raise ValueError(message)


def fail_after(n: int) -> Iterator[int]:
    yield from range(n)
    raise ValueError("no more")


def fail_times(name: str, n: int) -> int:
    """Raises the first `n` times that it runs, then gives the number of runs."""
    SEEN.append(name)
    if SEEN.count(name) <= n:
        raise OSError(f"failure {SEEN.count(name)}")
    return SEEN.count(name)


def sized(n: int) -> bytes:
    return bytes(n)


async def sleeper(seconds: float = 60.0) -> str:
    SEEN.append("began")
    try:
        await anyio.sleep(seconds)
    except BaseException:
        SEEN.append(("stopped", time.monotonic()))
        raise
    return "slept"


def blocked(name: str) -> str:
    """A body in a thread, until its gate opens."""
    SEEN.append(f"{name} began")
    gate(name).wait(60)
    return name


def gated(name: str, n: int) -> Iterator[int]:
    """Values of which each but the first waits for its gate."""
    for i in range(n):
        yield i
        gate(f"{name} {i}").wait(60)


def line(path: str, text: str) -> str:
    append_line(path, text)
    return text


async def aline(path: str, text: str) -> str:
    append_line(path, text)
    return text


async def aframes(path: str, name: str, n: int, pause: float) -> AsyncIterator[int]:
    """Numbers, ten at a time."""
    append_line(path, name)
    for i in range(n):
        yield i
        if i % 10 == 9:
            await anyio.sleep(pause)


async def slow_line(path: str, text: str, seconds: float) -> str:
    """A line at the beginning and one at the end."""
    append_line(path, f"{text} began")
    await anyio.sleep(seconds)
    append_line(path, f"{text} ended")
    return text


def wait_for(begun: str, go: str) -> str:
    """Say that it has begun, and end when told to, by files."""
    append_line(begun, "began")
    until = time.monotonic() + 60
    while not Path(go).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{go} did not come")
        time.sleep(0.01)
    return "done"


def blocks(count: int, size: int) -> Iterator[bytes]:
    for _ in range(count):
        yield bytes(size)
