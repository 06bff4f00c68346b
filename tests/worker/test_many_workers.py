"""Many processes on one file, and many workers that are cancelled at any moment."""

from __future__ import annotations

import asyncio
import gc
import random
import sqlite3
import threading
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from anyio.lowlevel import checkpoint
from helpers import wait_until, wait_until_sync
from processes import workers

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Beat
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from pathlib import Path


def rows_by_state(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(str(path), timeout=20)
    try:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return dict(connection.execute("SELECT state, count(*) FROM invocation GROUP BY state").fetchall())
    finally:
        connection.close()


@pytest.mark.slow
def test_R95_twenty_four_processes_open_one_new_file_and_run_each_job_once(tmp_path: Path) -> None:
    """R96 too: all of them at the same time, and none gets the error that the database is locked."""
    processes, jobs = 24, 100
    with workers(tmp_path / "new.db", tmp_path / "log", "asyncio") as crew:
        numbers = [str(jobs), str(processes)]
        args = [str(tmp_path / "new.db"), str(tmp_path / "lines")]
        all_of_them = [crew.run("crowd_process.py", *args, str(number), *numbers) for number in range(processes)]
        for process in all_of_them:
            out, err = process.communicate(timeout=250)
            assert (process.returncode, out, err) == (0, "", "")
    lines = Counter((tmp_path / "lines").read_text().splitlines())
    assert lines == Counter(f"{number} {n}" for number in range(processes) for n in range(jobs))
    assert rows_by_state(tmp_path / "new.db") == {"succeeded": processes * jobs}


WORKERS, ROUNDS = 12, 60


async def fill(plane: dls.Dispatch, jobs: int) -> dls.Queue:
    queue = dls.Queue("q", dispatch=plane)
    await queue.submit_many([dls.thunk(bodies.anote if n % 3 else bodies.note, n) for n in range(jobs)])
    return queue


@pytest.mark.anyio
async def test_workers_cancelled_at_a_random_await_leave_no_row_running(plane: dls.Dispatch) -> None:
    """Sixty rounds of twelve tasks, each cancelled by its scope after some steps of the loop."""
    path, jobs = plane.path, 0
    assert path is not None
    for number in range(ROUNDS):
        dice = random.Random(number)
        queue = await fill(plane, 20)
        jobs += 20

        async def work(steps: int, queue: dls.Queue = queue) -> None:
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    group.start_soon(partial(dls.run_worker, queue, concurrency=3))
                    for _ in range(steps):
                        await checkpoint()
                    scope.cancel()

        async with anyio.create_task_group() as group:
            for _ in range(WORKERS):
                group.start_soon(work, dice.randrange(60))
        # A claim that was under way when its worker was cancelled is returned a moment later, before the answer to this
        # operation.
        await plane.do(Beat("nobody", (), 1.0))
        await wait_until(lambda: not rows_running(path), description=f"no row to be running after round {number}")
        states = rows_by_state(path)
        assert set(states) <= {"queued", "succeeded"}
        assert sum(states.values()) == jobs
    async with running_worker(queue, concurrency=8):
        await wait_until(lambda: drained(queue), 120, "the rest to be done")
    assert rows_by_state(path) == {"succeeded": jobs}


async def drained(queue: dls.Queue) -> bool:
    return await queue.count("succeeded") == await queue.count(None)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")  # asyncio cancels tasks before their first step
def test_workers_left_behind_by_a_loop_that_ends_leave_no_row_running(tmp_path: Path) -> None:
    """`asyncio.run` returns with twelve workers alive, sixty times; it cancels whatever it finds, in any order."""
    path = tmp_path / "plane.db"

    async def main(seed: int) -> None:
        plane = dls.Dispatch(path)
        planes.append(plane)
        queue, dice = await fill(plane, 20), random.Random(seed)
        tasks = [asyncio.ensure_future(dls.run_worker(queue, concurrency=3)) for _ in range(WORKERS)]
        for _ in range(dice.randrange(80)):
            await asyncio.sleep(0)
        left.extend(tasks)  # or the garbage collector would end them

    left: list[asyncio.Future[int]] = []
    planes: list[dls.Dispatch] = []
    for number in range(ROUNDS):
        asyncio.run(main(number))
        gc.collect()  # here, where warnings about coroutines that never began are ignored
        states = rows_by_state(path)
        assert set(states) <= {"queued", "succeeded"}, (number, states)
        assert sum(states.values()) == 20 * (number + 1)
        assert all(task.done() for task in left)

    async def finish() -> None:
        for plane in planes:
            await plane.aclose()  # what they have open on the portal's loop, for heartbeats
        async with dls.Dispatch(path) as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue, concurrency=8):
                await wait_until(lambda: drained(queue), 120, "the rest to be done")

    asyncio.run(finish())
    assert rows_by_state(path) == {"succeeded": 20 * ROUNDS}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_loop_that_ends_with_bodies_running_gives_them_back(tmp_path: Path) -> None:
    """They count neither as failed nor as lost."""
    path = tmp_path / "plane.db"

    async def main() -> None:
        queue = dls.Queue("q", dispatch=dls.Dispatch(path))
        for body in (bodies.sleeper, bodies.steps_until_cancelled):
            await queue.submit(dls.thunk(body, body.__name__))
        left.append(asyncio.ensure_future(dls.run_worker(queue, concurrency=10)))
        await wait_until(lambda: len(rows_running(path)) == 2 * number and bodies.SEEN, description="the bodies")

    left: list[asyncio.Future[int]] = []
    for number in range(1, 4):
        bodies.forget()
        asyncio.run(main())
        gc.collect()  # here, where warnings about coroutines that never began are ignored
        connection = sqlite3.connect(str(path), timeout=20)
        rows = connection.execute("SELECT state, failures, lost FROM invocation").fetchall()
        connection.close()
        assert rows == [("queued", 0, 0)] * 2 * number


def rows_running(path: Path) -> list[Any]:
    connection = sqlite3.connect(str(path), timeout=20)
    try:
        return connection.execute("SELECT id FROM invocation WHERE state = 'running'").fetchall()
    finally:
        connection.close()


def test_workers_in_threads_with_loops_of_their_own_share_one_plane(tmp_path: Path) -> None:
    """Workers on asyncio and on trio share one plane object; each job runs once."""
    plane, stop = dls.Dispatch(tmp_path / "plane.db"), threading.Event()
    queue = dls.Queue("q", dispatch=plane)
    threads = [
        threading.Thread(
            target=anyio.run,
            args=(partial(dls.run_worker, queue, concurrency=4, stop=stop.is_set),),
            kwargs={"backend": backend},
        )
        for backend in ("asyncio", "trio", "asyncio", "trio")
    ]
    for thread in threads:
        thread.start()
    try:
        ids = [queue.sync.submit(dls.thunk(bodies.anote if n % 2 else bodies.note, n)) for n in range(200)]
        for id in ids:
            queue.sync.result(id, timeout=30)
    finally:
        stop.set()
        wait_until_sync(lambda: not any(thread.is_alive() for thread in threads), description="the workers to stop")
    assert sorted(bodies.SEEN) == list(range(200))

    async def close() -> None:
        await plane.aclose()

    anyio.run(close)
    assert rows_by_state(tmp_path / "plane.db") == {"succeeded": 200}
