"""A commit wakes the engines that wait for what it wrote."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from helpers import fresh_python, wait_until
from sqlite_kit import check_waking, fence_of, has_waiters

from dreamlake.lakeshore import Dispatch
from dreamlake.lakeshore.planes.sqlite import doorbell
from dreamlake.lakeshore.planes.sqlite.doorbell import queue_topic

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("no_polling")
async def test_engines_with_a_long_path_are_woken(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 60) / ("b" * 60)
    async with Dispatch(deep / "plane.db") as one, Dispatch(deep / "plane.db") as other:
        await check_waking(one, other)


@pytest.mark.usefixtures("no_polling")
async def test_other_engines_are_woken(path: Path) -> None:
    async with Dispatch(path) as one, Dispatch(path) as other:
        await check_waking(one, other)


async def test_without_datagrams_waiters_find_it_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "datagram_socket", lambda: None)
    async with Dispatch(path) as one, Dispatch(path) as other:
        async with anyio.create_task_group() as group:

            async def work() -> None:
                (claimed,) = await one.claim(["q"], "w", timeout=10)
                await one.append(fence_of(claimed, "w"), 0, [b"frame"])
                await one.finish(fence_of(claimed, "w"), "succeeded", result=b"r")

            group.start_soon(work)
            id = await other.submit("q", b"x")
            assert (await other.next_page(id, -1, timeout=10)).frames == [(0, b"frame")]
            assert (await other.outcome(id, timeout=10)).result == b"r"


async def test_sockets_of_dead_processes_are_removed(path: Path) -> None:
    waiter = fresh_python(
        """
        import anyio, sys
        from dreamlake.lakeshore import Dispatch
        async def main():
            async with anyio.create_task_group() as group:
                plane = Dispatch(sys.argv[1])
                group.start_soon(lambda: plane.claim(["q"], "w", timeout=None))
                await anyio.sleep_forever()
        anyio.run(main)
        """,
        str(path),
    )
    presence = Path(f"{path}-presence")
    with waiter:
        try:
            await wait_until(lambda: list((presence / "jobs").glob("*/*")), 60, "its socket")
        finally:
            waiter.kill()
            waiter.communicate()
    assert len(list((presence / "jobs").glob("*/*"))) == 1
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
        assert list((presence / "jobs").glob("*/*")) == []
        assert list((presence / "bells").iterdir()) == []


@pytest.mark.usefixtures("no_polling")
async def test_a_job_wakes_an_engine_that_waits_for_its_queue(path: Path) -> None:
    """Also while another engine waits for another queue: each queue has its own listeners."""
    async with Dispatch(path) as one, Dispatch(path) as two, Dispatch(path) as caller:
        times: list[float] = []
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: two.claim(["other"], "two", timeout=None))
            for _ in range(8):
                async with anyio.create_task_group() as round_:
                    round_.start_soon(lambda: one.claim(["q"], "one", timeout=20))
                    await wait_until(lambda: has_waiters(one, "queue"), 10, "the claimer to wait")
                    start = time.perf_counter()
                    await caller.submit("q", b"x")
                times.append(time.perf_counter() - start)
            group.cancel_scope.cancel()
    assert sorted(times)[4] < 4.0, f"another engine was woken: {times}"


async def test_a_socket_that_was_removed_is_made_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "SOCKET_CHECK_INTERVAL", 0.2)
    async with Dispatch(path) as one, Dispatch(path) as other, anyio.create_task_group() as group:
        claimed: list[Any] = []

        async def work() -> None:
            claimed.extend(await one.claim(["q"], "w", timeout=None))

        group.start_soon(work)
        folder = Path(f"{path}-presence") / "bells"
        await wait_until(lambda: list(folder.iterdir()), 10, "the socket")
        for bell in folder.iterdir():
            bell.unlink()
        await wait_until(lambda: list(folder.iterdir()), 10, "another socket")
        await other.submit("q", b"x")
        await wait_until(lambda: claimed, 10, "the claim")


@pytest.mark.usefixtures("no_polling")
async def test_foreign_files_in_the_folder_do_no_harm(path: Path) -> None:
    async with Dispatch(path) as one, Dispatch(path) as other:
        assert await one.counts() == {}
        presence = Path(f"{path}-presence")
        place = presence / queue_topic("default", "q")
        place.mkdir(exist_ok=True)
        (place / "a-file").write_text("x")
        (place / "a-folder").mkdir()
        (place / "a-link").symlink_to("nowhere")
        (presence / "holders" / "a-folder").mkdir()
        await check_waking(one, other)
