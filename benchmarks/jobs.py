"""The bodies that the benchmarks submit: a module of its own, so that workers import them by reference."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


async def noop(x: int) -> int:
    return x


def plain_noop(x: int) -> int:
    return x


async def frames(count: int, size: int) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield bytes(size)


def plain_frames(count: int, size: int) -> Iterator[bytes]:
    for _ in range(count):
        yield bytes(size)


class Signal:
    """Lets the body `on_signal` yield, where it runs in the process that sets it."""

    event: anyio.Event


async def on_signal() -> AsyncIterator[int]:
    """Yield a value whenever `Signal.event` is set."""
    while True:
        await Signal.event.wait()
        Signal.event = anyio.Event()
        yield 1


async def large(size: int) -> bytes:
    return bytes(size)


async def mark(path: str) -> None:
    """Write down when the body started and in which process; the first start never comes to its end."""
    log = Path(path)
    first = not log.exists()
    with log.open("a") as file:
        file.write(f"{os.getpid()} {time.time()}\n")
    if first:
        await anyio.sleep_forever()
