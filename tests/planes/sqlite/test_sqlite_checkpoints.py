"""The write-ahead log stays bounded."""

from __future__ import annotations

from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from helpers import wait_until
from sqlite_kit import has_waiters, query

from dreamlake.lakeshore import Dispatch, PlaneUnavailable
from dreamlake.lakeshore.planes.sqlite import checkpoints, connection, inline_writer

pytestmark = pytest.mark.anyio


PAGES = 300


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINT_PAGES", PAGES)
    monkeypatch.setattr(checkpoints, "MAX_LOG_PAGES", 4 * PAGES)
    last = f"PRAGMA wal_autocheckpoint = {4 * PAGES}"
    pragmas = (*connection.PRAGMAS, last)
    monkeypatch.setattr(connection, "PRAGMAS", pragmas)
    monkeypatch.setattr(inline_writer, "PRAGMAS", pragmas)


def log_size(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


@pytest.mark.usefixtures("small_log")
async def test_the_log_of_a_plane_without_waiters_stays_bounded(path: Path) -> None:
    """Submits without a pause, and no watcher: checkpoints are made, and the log starts anew, all the same."""
    async with Dispatch(path) as plane:
        for _ in range(3000):
            await plane.submit("q", b"x" * 1000)
        assert not await has_waiters(plane, "queue")
        assert log_size(path) < 24 * PAGES * 4120, "or about 12,000 pages"
    assert query(path, "SELECT count(*) FROM invocation") == [(3000,)]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.usefixtures("small_log")
async def test_short_lived_planes_share_the_checkpoints(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them writes enough for a checkpoint of its own, and the plane that stays open writes nothing."""
    monkeypatch.setattr(
        checkpoints, "CHECKPOINT_PAGES", 100
    )  # which of them makes one is random; with these numbers one always does
    async with Dispatch(path) as idle:
        await idle.counts()
        for _ in range(150):
            async with Dispatch(path) as plane:
                for _ in range(10):
                    await plane.submit("q", b"x" * 1000)
        assert log_size(path) < 16 * PAGES * 4120, "or about 6,000 pages"


@pytest.mark.usefixtures("small_log")
async def test_one_checkpoint_at_a_time_and_a_close_waits_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, under_way, most = 0, 0, 0
    checkpoint = connection.SqliteConnection.checkpoint

    async def counted(self: connection.SqliteConnection) -> int:
        nonlocal made, under_way, most
        under_way += 1
        most = max(most, under_way)
        with anyio.CancelScope(shield=True):
            pages = await checkpoint(self)
            await anyio.sleep(0.2)  # longer than the next one takes to become due
            under_way, made = under_way - 1, made + 1
            return pages

    monkeypatch.setattr(connection.SqliteConnection, "checkpoint", counted)
    async with Dispatch(path) as plane:

        async def started() -> bool:
            await plane.submit("q", b"x")
            return under_way > 0

        for _ in range(2):
            before = made
            await wait_until(started, 20, "a checkpoint")
            for _ in range(PAGES):
                await plane.submit("q", b"x")
            await wait_until(lambda before=before: made > before, 20, "its end")
        await wait_until(started, 20, "a checkpoint")
    assert under_way == 0, "the close did not wait"
    assert made >= 3
    assert most == 1


@pytest.mark.usefixtures("small_log")
async def test_a_failed_checkpoint_fails_no_operation(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: connection.SqliteConnection) -> int:
        raise PlaneUnavailable("the disk is full")

    monkeypatch.setattr(connection.SqliteConnection, "checkpoint", fails)
    async with Dispatch(path) as plane:
        for _ in range(2 * PAGES):
            await plane.submit("q", b"x")
        assert await plane.counts() == {("q", "queued"): 2 * PAGES}
    assert "a checkpoint of the write-ahead log failed, and is made again later: the disk is full" in caplog.text
