"""Bodies for the worker processes of these tests; the folder of this file is their current folder."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import Iterator

_PATIENCE = 90.0  # seconds after which a body that waits for a file gives up


@dls.udf(queue="bodies")
async def add(a: int, b: int = 1) -> int:
    return a + b


async def add_there(a: int, b: int) -> tuple[str, str | None]:
    """Submit a child to the plane of this process: its id and parent."""
    return await add.submit(a, b), dls.run.invocation_id


def echo(value: Any) -> Any:
    return value


def boom(message: str) -> None:
    raise ValueError(message)


def count(n: int) -> Iterator[dict[str, int]]:
    for i in range(n):
        yield {"n": i}


def count_and_fail(n: int) -> Iterator[int]:
    yield from range(n)
    raise ValueError("no more")


def count_again(n: int) -> Iterator[int]:
    """All of it only at the second try."""
    yield from range(n if dls.run.attempt > 1 else n - 1)
    if dls.run.attempt == 1:
        raise ValueError("once more")


def give(value: Any) -> Iterator[Any]:
    yield value


def where() -> tuple[str, str, int]:
    """The root of the keys, the first place of modules, and the process."""
    return str(dls.run.root), sys.path[0], os.getpid()


def wait_for(begun: str, ended: str) -> str:
    """Say that it has begun, and end when told to, by files."""
    Path(begun).touch()
    until = time.monotonic() + _PATIENCE
    while not Path(ended).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{ended} did not come")
        time.sleep(0.01)
    return "ended when it was told to"


async def wait_forever(begun: str) -> None:
    Path(begun).touch()
    await anyio.sleep_forever()


def hang(begun: str) -> None:
    """A body that nobody can stop."""
    Path(begun).touch()
    threading.Event().wait()


def leave_thread() -> str:
    threading.Thread(target=threading.Event().wait).start()
    return "left"


_pools: list[ThreadPoolExecutor] = []


def leave_pool() -> int:
    """Idle threads of a pool are no daemons either, but they end when the interpreter does."""
    _pools.append(ThreadPoolExecutor(2))
    return _pools[-1].submit(int, "7").result()
