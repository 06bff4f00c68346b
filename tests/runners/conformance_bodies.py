"""Bodies for the children of any engine. What they note, and what they wait for, are files below the worker's root: each
is named by a word, since the root may lie elsewhere for them than it does for the test."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


def _place(name: str) -> Path:
    return dls.run.root / name


def _note(name: str, text: str) -> None:
    with open(_place(name), "ab", buffering=0) as out:
        out.write(f"{text}\n".encode())


def _wait_for(name: str) -> None:
    while not _place(name).exists():
        time.sleep(0.01)


def double(x: Any) -> Any:
    return x * 2


async def surroundings() -> dict[str, Any]:
    """What the body sees of its place."""
    await anyio.lowlevel.checkpoint()
    return {
        "folder": os.path.basename(os.getcwd()),
        "files": sorted(os.listdir()),
        "id": dls.run.invocation_id,
        "attempt": dls.run.attempt,
        "environ": {name: value for name, value in os.environ.items() if name.startswith(("DREAMLAKE_", "LAKESHORE_"))},
    }


def boom(text: str) -> None:
    print("said before")  # noqa: T201 - what a body prints must not be taken for its failure
    raise LookupError(text)


def exits(code: int) -> None:
    sys.exit(code)


def segfault() -> None:
    import ctypes

    ctypes.string_at(0)


def big(n: int) -> bytes:
    return b"\x5a" * n


def one_then_waits(gate: str) -> Iterator[int]:
    yield 1
    _wait_for(gate)
    yield 2


def finishes(begun: str, gate: str) -> str:
    _note(begun, "began")
    _wait_for(gate)
    return "finished"


def sleeps(begun: str) -> None:
    try:  # first: whoever reads the note may ask it to stop before the next line
        _note(begun, "began")
        time.sleep(600)
    finally:
        _note(begun, "cleaned up")


async def aendless(begun: str) -> AsyncIterator[int]:
    i = 0
    try:
        while True:
            yield i
            i += 1
            await anyio.sleep(0.005)
    finally:
        _note(begun, "cleaned up")


def stubborn(begun: str) -> None:
    """Cannot be asked to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _note(begun, "began")
    while True:
        time.sleep(0.02)
        _note(begun, "goes on")


def meets(name: str, count: int) -> int:
    """Ends once `count` of them run at the same time."""
    _note(name, "here")
    while len(_place(name).read_text().splitlines()) < count:
        time.sleep(0.01)
    return count


def second_time(begun: str) -> int:
    """Which attempt this is; the first one goes on for ever and ignores requests to end."""
    _note(begun, "began")
    attempt = dls.run.attempt or 0
    if attempt > 1:
        return attempt
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        time.sleep(0.01)
        _note("goes-on", str(time.time()))
