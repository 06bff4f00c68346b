"""Writers take turns, and the event loop never waits for one."""

from __future__ import annotations

import os
import sqlite3
import time
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest

from dreamlake.lakeshore import Dispatch
from dreamlake.lakeshore.planes.sqlite import write_lock

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_locked_file_delays_writers_only(path: Path) -> None:
    """A shell holds the write lock for a while: no operation fails, and nothing is lost."""
    async with Dispatch(path) as plane:
        await plane.submit("q", b"first")
        intruder = sqlite3.connect(path, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as group:
            group.start_soon(plane.submit, "q", b"second")
            with anyio.move_on_after(0.3):
                await anyio.sleep_forever()
            assert (await plane.counts()) == {("q", "queued"): 1}, "reads go on meanwhile"
            intruder.execute("ROLLBACK")
        intruder.close()
        assert (await plane.counts()) == {("q", "queued"): 2}


async def test_the_event_loop_never_waits_for_the_write_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit runs on the event loop only when the lock is free; otherwise the loop goes on meanwhile."""
    import fcntl

    monkeypatch.setattr(write_lock, "WRITE_LOCK_TIMEOUT", 60.0)
    async with Dispatch(path) as plane, Dispatch(path) as other:
        await plane.submit("q", b"first")
        turn = os.open(f"{path}-turn", os.O_RDWR)
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(plane.submit, "q", b"second")
                began = time.monotonic()
                for _ in range(20):
                    await anyio.sleep(0.005)
                assert time.monotonic() - began < 30, "the event loop stood still, for as long as it is tried"
                assert await other.counts() == {("q", "queued"): 1}
                fcntl.flock(turn, fcntl.LOCK_UN)
        finally:
            os.close(turn)
        assert await plane.counts() == {("q", "queued"): 2}


async def test_durable_planes_do_not_commit_on_the_event_loop(path: Path) -> None:
    async with Dispatch(path, durable=True) as durable, Dispatch(path) as fast:
        inline = [(await plane._engines.get()).store._inline for plane in (durable, fast)]  # type: ignore[attr-defined]
    assert inline[0] is None
    assert inline[1] is not None


async def test_a_stopped_process_blocks_no_writer_for_ever(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    monkeypatch.setattr(write_lock, "WRITE_LOCK_TIMEOUT", 0.3)
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
        turn = os.open(f"{path}-turn", os.O_RDWR)
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            with anyio.fail_after(10):
                await plane.submit("q", b"x")
        finally:
            os.close(turn)
