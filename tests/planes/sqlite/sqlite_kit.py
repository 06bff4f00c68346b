"""What the tests of the plane in a SQLite file share."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from helpers import wait_until

from dreamlake.lakeshore.planes.contract.operations import Claimed, Fence

if TYPE_CHECKING:
    from pathlib import Path

    from dreamlake.lakeshore import Dispatch

__all__ = [
    "CLAIM_AND",
    "MB",
    "check_waking",
    "fence_of",
    "has_waiters",
    "needs_proc",
    "open_files",
    "query",
    "query_write",
]


MB = 1 << 20


def fence_of(claimed: Claimed, worker: str) -> Fence:
    return Fence(claimed.id, worker, claimed.attempt)


def query(path: Path, sql: str) -> Any:
    db = sqlite3.connect(path)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


def query_write(path: Path, sql: str) -> None:
    db = sqlite3.connect(path)
    try:
        db.execute(sql)
        db.commit()
    finally:
        db.close()


def open_files(path: Path) -> list[str]:
    """The files of the plane, those of its folder included, that this process has open."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")


async def has_waiters(plane: Dispatch, kind: Any) -> bool:
    return (await plane._engines.get()).hub.waits(kind)


async def check_waking(one: Dispatch, other: Dispatch) -> None:
    """A submit on `other` wakes a claimer on `one`, whose ack wakes the caller, well before the watcher reads."""
    times: list[float] = []
    for number in range(8):
        async with anyio.create_task_group() as group:

            async def work() -> None:
                (claimed,) = await one.claim(["q"], "w", timeout=20)
                await one.finish(fence_of(claimed, "w"), "succeeded", result=b"r")

            group.start_soon(work)
            await wait_until(lambda: has_waiters(one, "queue"), 10, "the claimer to wait")
            start = time.perf_counter()
            id = await other.submit("q", b"x")
            assert (await other.outcome(id, timeout=20)).result == b"r"
            times.append(time.perf_counter() - start)
        assert number == 0 or times
    assert sorted(times)[len(times) // 2] < 4.0, f"nobody was woken: {times}"


CLAIM_AND = """
    import anyio, os, sys, signal
    from dreamlake.lakeshore import Dispatch
    async def main():
        plane = Dispatch(sys.argv[1])
        (claimed,) = await plane.claim(["q"], "doomed", lease=3600.0, timeout=10)
        print(claimed.id, flush=True)
        {then}
    anyio.run(main)
"""
