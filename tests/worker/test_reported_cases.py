"""Cases that users of similar systems have reported."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import random
import sys
import threading
import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import fresh_python, run_python, wait_until
from processes import HERE, workers

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Reap
from dreamlake.lakeshore.planes.sqlite.store import SqliteStore
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Clock:
    """A clock that moves only when a test moves it."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


class Unhalting:
    """A clock that moves by at most a hundredth of a second between two reads, as on a machine that never stalls."""

    def __init__(self) -> None:
        self._seen, self._now, self._lock = time.monotonic(), time.time(), threading.Lock()

    def __call__(self) -> float:
        with self._lock:
            before, self._seen = self._seen, time.monotonic()
            self._now += min(self._seen - before, 0.01)
            return self._now


async def test_R3_a_chain_of_retries_over_days_does_not_expire(tmp_path: Path) -> None:
    clock = Clock()
    async with dls.Dispatch(tmp_path / "plane.db", clock=clock) as plane:
        queue = dls.Queue("q", dispatch=plane)
        async with running_worker(queue, retries=40):
            id = await queue.submit(dls.thunk(bodies.fail_times, "f", 12))
            for attempt in range(1, 13):
                await wait_until(lambda n=attempt: waiting_again(queue, id, n), description=f"failure {attempt}")
                clock.now += 3 * 3600.0  # the delay between two attempts is over at once, and hours more
            assert await queue.result(id, timeout=20) == 13


async def waiting_again(queue: dls.Queue, id: str, failures: int) -> bool:
    row = await queue.get(id)
    return (row.state, row.failures) == ("queued", failures)


async def test_R4_one_key_is_one_run_however_short_the_body(queue: dls.Queue) -> None:
    """R102 too: while it waits, while it runs, and after it has ended."""
    ids: dict[str, set[str]] = {}

    async def submitter(keys: list[str]) -> None:
        for key in keys:
            ids.setdefault(key, set()).add(await queue.submit(dls.thunk(bodies.note, key), key=key))

    keys = [f"tick {n}" for n in range(25)]
    async with running_worker(queue, concurrency=4):
        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(submitter, keys)
        for (id,) in ids.values():
            await queue.result(id, timeout=20)
        assert {await queue.submit(dls.thunk(bodies.note, "again"), key=key) for key in keys} == set.union(
            *ids.values()
        )
        await wait_until(lambda: nothing_left(queue), description="the queue to be empty")
    assert Counter(bodies.SEEN) == Counter(keys)


async def nothing_left(queue: dls.Queue) -> bool:
    return not await queue.count("queued") and not await queue.count("running")


async def test_R6_reaping_all_the_time_takes_nothing_from_the_living(tmp_path: Path) -> None:
    """R8 and R23 too: several processes reap at the same time, and none of them takes a job from a living worker."""
    reaped: list[Any] = []
    clock = Unhalting()  # ten leases without a heartbeat would end any claim
    plane, one, two = (dls.Dispatch(tmp_path / "plane.db", clock=clock) for _ in range(3))
    queue = dls.Queue("q", dispatch=plane)

    async def reap(other: dls.Dispatch) -> None:
        engine = await other._engines.get()
        while True:
            reaped.extend([await other.do(op) for op in await engine.read(engine.store.due)])
            reaped.append(await other.do(Reap(alive=tuple(await holders(plane)))))

    async with plane, one, two, anyio.create_task_group() as group:
        group.start_soon(reap, one)
        group.start_soon(reap, two)
        async with running_worker(queue, concurrency=8, lease=0.05):
            ids = await queue.submit_many([dls.thunk(bodies.anote, n) for n in range(300)])
            for id in ids:
                await queue.result(id, timeout=60)
        group.cancel_scope.cancel()
    assert Counter(bodies.SEEN) == Counter(range(300))
    assert len(reaped) > 10
    assert not [row for answer in reaped for row in answer.rows]


async def holders(plane: dls.Dispatch) -> list[str]:
    engine = await plane._engines.get()
    return [engine.store._liveness.holder]  # type: ignore[attr-defined]


async def test_R12_a_delayed_row_starts_once_and_not_before_it_is_due(tmp_path: Path) -> None:
    """The delay is longer than the lease, and four workers wait for it."""
    clock = Clock()
    async with dls.Dispatch(tmp_path / "plane.db", clock=clock) as plane:
        queue = dls.Queue("q", dispatch=plane)
        async with (
            running_worker(queue, retries=1, lease=0.2),
            running_worker(queue, retries=1, lease=0.2),
            running_worker(queue, retries=1, lease=0.2),
            running_worker(queue, retries=1, lease=0.2),
        ):
            id = await queue.submit(dls.thunk(bodies.fail_times, "f", 1))
            await wait_until(lambda: waiting_again(queue, id, 1), description="the first failure")
            due = (await queue.get(id)).not_before or 0.0
            assert due > clock.now + 0.2
            clock.now = due - 0.01
            await anyio.sleep(1.0)  # time for a mistake to show
            assert bodies.SEEN == ["f"]
            clock.now = due
            assert await queue.result(id, timeout=20) == 2
        row = await queue.get(id)
    assert row.attempt == 2
    assert (row.started_at or 0.0) >= due
    assert bodies.SEEN == ["f", "f"]


async def test_R24_no_two_workers_have_one_name(queue: dls.Queue) -> None:
    async with running_worker(queue), running_worker(queue):
        ids = [await queue.submit(dls.thunk(bodies.meet, 2)) for _ in range(2)]
        for id in ids:
            await queue.result(id, timeout=20)
        names = {(await queue.get(id)).worker for id in ids}
    assert len(names) == 2
    assert all(name and f"-{os.getpid()}-" in name for name in names)


async def test_R35_reads_that_are_broken_off_lose_no_item(queue: dls.Queue) -> None:
    """Many streams at the same time, each read again and again with a short timeout or none."""
    got: dict[str, list[int]] = {}
    dice = random.Random(35)

    async def read(id: str) -> None:
        stream = queue.stream(id)
        while True:
            with anyio.move_on_after(dice.choice([0.0, 0.001, 0.05])):
                try:
                    got.setdefault(id, []).append(await anext(stream))
                except StopAsyncIteration:
                    return

    async with running_worker(queue, concurrency=10), anyio.create_task_group() as group:
        ids = await queue.submit_many([dls.thunk(bodies.acount if n % 2 else bodies.count, 50) for n in range(40)])
        for id in ids:
            group.start_soon(read, id)
    assert got == {id: list(range(50)) for id in ids}


async def test_R43_the_cursor_comes_with_each_value(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.acount, 20))
        stream, got = queue.stream(id), list[int]()
        for _ in range(20):
            got.append(await anext(stream))
            stream = queue.stream(id, since=stream.seq)
        assert got == list(range(20))
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_R44_a_stream_left_in_the_middle_leaves_nothing_behind(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.acount, 1000))
        for _ in range(3):
            async for value in queue.stream(id):
                if value == 5:
                    break
            gc.collect()
        assert [value async for value in queue.stream(id)] == list(range(1000))


async def test_R65_a_plane_that_fails_twice_during_a_wait_does_not_end_it(
    queue: dls.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, left = SqliteStore.outcomes, [2]

    async def outcomes(self: SqliteStore, ids: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise dls.PlaneUnavailable("503")
        return await original(self, ids)

    monkeypatch.setattr(SqliteStore, "outcomes", outcomes)
    id = await queue.submit(dls.thunk(bodies.sleeper, "s", 0.3))
    async with running_worker(queue):
        assert await queue.result(id, timeout=30) == "s"
    assert left == [0]


async def test_R67_a_worker_keeps_nothing_of_what_it_has_done(
    queue: dls.Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a caller keep anything of the results that it has waited for."""
    caplog.set_level(logging.WARNING, "dreamlake.lakeshore")  # records of lines that are logged would be kept
    caplog.set_level(logging.WARNING, "dreamlake.lakeshore.worker")
    kinds = (bodies.adouble, bodies.double, bodies.acount, bodies.count)

    async def some(n: int) -> int:
        for number in range(n):
            await queue.call(dls.thunk(kinds[number % 4], 3))
        gc.collect()
        return len(gc.get_objects())

    async with running_worker(queue, concurrency=2):
        counts = [await some(n) for n in (40, 200, 200, 200)]
    # Not one object for each invocation. Other objects of this process may come or go once.
    assert min(after - before for before, after in pairwise(counts)) < 200


async def test_R87_a_blocking_call_in_a_body_works_in_a_thread_and_is_an_error_on_the_loop(queue: dls.Queue) -> None:
    with bodies.current(queue=queue):
        async with running_worker(queue, concurrency=2):
            assert await queue.call(dls.thunk(bodies.blocking_child, 4)) == 8
            with pytest.raises(dls.InvocationFailed, match="a blocking call on a worker's event loop stops the worker"):
                await queue.call(dls.thunk(bodies.ablocking_child, 4))
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_R70_a_worker_that_has_the_old_code_says_so(
    plane: dls.Dispatch, queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend_name: str
) -> None:
    assert plane.path is not None
    name = f"edited_{anyio_backend_name}"
    source = tmp_path / f"{name}.py"
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    source.write_text("def version():\n    return 1\n")
    module = importlib.import_module(name)
    with workers(plane.path, tmp_path / "log", anyio_backend_name) as crew:
        crew.start()
        assert await queue.call(dls.thunk(module.version)) == 1
        source.write_text("def version():\n    return 'the second'\n")
        importlib.reload(module)
        with pytest.raises(dls.InvocationFailed) as caught:
            await queue.call(dls.thunk(module.version))
        assert caught.value.type == "TransportError"
        assert "the source of function 'version' is 'sha256:" in caught.value.message
        assert (await queue.get(caught.value.id)).attempt == 1


def test_a_worker_that_is_never_ended_does_not_hold_the_interpreter() -> None:
    """Nor does a plane that is never closed. What ran is back in its queue."""
    run_python(
        """
        import asyncio, pathlib, sys, tempfile
        sys.path.insert(0, sys.argv[1])
        import dreamlake.lakeshore as dls, worker_bodies

        async def main(path):
            queue = dls.Queue("q", dispatch=dls.Dispatch(path))
            await queue.submit(dls.thunk(worker_bodies.sleeper))
            tasks.append(asyncio.ensure_future(dls.run_worker(queue)))
            while not worker_bodies.SEEN:
                await asyncio.sleep(0.01)

        async def look(path):
            async with dls.Dispatch(path) as plane:
                return await plane.counts()

        tasks = []
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "plane.db"
            asyncio.run(main(path))
            assert asyncio.run(look(path)) == {("q", "queued"): 1}
        """,
        str(HERE),
    )


def test_ctrl_c_ends_a_program_with_a_worker_and_gives_back_what_ran(tmp_path: Path) -> None:
    import signal

    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import anyio, dreamlake.lakeshore as dls, worker_bodies

        async def main(path, log):
            async with dls.Dispatch(path) as plane:
                queue = dls.Queue("q", dispatch=plane)
                await queue.submit(dls.thunk(worker_bodies.wait_for_file, log, "/does/not/exist"))
                await dls.run_worker(queue)

        try:
            anyio.run(main, sys.argv[2], sys.argv[3])
        except KeyboardInterrupt:
            print("interrupted")
        """
    process = fresh_python(script, str(HERE), str(tmp_path / "plane.db"), str(tmp_path / "log"))
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "interrupted\n", "")

    async def look() -> Any:
        async with dls.Dispatch(tmp_path / "plane.db") as plane:
            return await plane.counts()

    assert anyio.run(look) == {("q", "queued"): 1}
