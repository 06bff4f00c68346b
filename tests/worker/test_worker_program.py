"""The worker as a program: how it ends at a signal, and how much memory it needs."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
import worker_bodies as bodies
from helpers import wait_until
from processes import Workers, workers

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def crew(plane: dls.Dispatch, tmp_path: Path, anyio_backend_name: str) -> Iterator[Workers]:
    assert plane.path is not None
    with workers(plane.path, tmp_path / "log", anyio_backend_name) as crew:
        yield crew


@pytest.fixture
def daemon(plane: dls.Dispatch, crew: Workers) -> Callable[..., subprocess.Popen[str]]:
    """Starts `python -m dreamlake.lakeshore.daemon` on queue q."""

    def start(*options: str) -> subprocess.Popen[str]:
        return crew.module("dreamlake.lakeshore.daemon", "--db", str(plane.path), "--queue", "q", *options)

    return start


async def lines(path: Path, count: int) -> list[str]:
    def there() -> list[str]:
        return path.read_text().splitlines() if path.exists() else []

    await wait_until(lambda: len(there()) >= count, 30, f"{count} lines in {path.name}")
    return there()


async def exit_code(process: subprocess.Popen[str], timeout: float = 60.0) -> int:
    await wait_until(lambda: process.poll() is not None, timeout, "the end of the worker")
    assert process.returncode is not None
    return process.returncode


async def test_R94_a_signal_lets_what_runs_end_and_claims_nothing(
    queue: dls.Queue, daemon: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    marks, go = tmp_path / "marks", tmp_path / "go"
    process = daemon("--concurrency", "3", "--grace", "10")
    ids = [await queue.submit(dls.thunk(bodies.wait_for_file, str(marks), str(go))) for _ in range(3)]
    await lines(marks, 3)
    ids += [await queue.submit(dls.thunk(bodies.work, str(marks), f"late{n}")) for n in range(5)]
    process.send_signal(signal.SIGTERM)
    await said(process, "claiming no more")
    assert (await queue.count("running"), await queue.count()) == (3, 5)
    go.touch()
    assert await exit_code(process) == 0
    states = [((row := await queue.get(id)).state, row.attempt) for id in ids]
    assert states == [("succeeded", 1)] * 3 + [("queued", 0)] * 5
    assert await lines(marks, 3) == ["began"] * 3


async def test_R86_a_body_that_outlives_the_grace_goes_back_at_no_cost(
    queue: dls.Queue, daemon: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = daemon("--concurrency", "2", "--grace", "0.3", "--retries", "1")
    ids = [
        await queue.submit(dls.thunk(body, str(tmp_path / "marks"), str(tmp_path / "go")))
        for body in (bodies.wait_for_file, bodies.wait_for_file_in_a_thread)
    ]
    await lines(tmp_path / "marks", 2)
    process.send_signal(signal.SIGTERM)
    await exit_code(process)
    rows = [await queue.get(id) for id in ids]
    assert [(row.state, row.attempt, row.failures, row.lost) for row in rows] == [("queued", 1, 0, 0)] * 2


async def test_a_second_signal_ends_it_at_once(
    queue: dls.Queue, daemon: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = daemon("--grace", "600")
    id = await queue.submit(dls.thunk(bodies.wait_for_file, str(tmp_path / "marks"), str(tmp_path / "go")))
    await lines(tmp_path / "marks", 1)
    process.send_signal(signal.SIGTERM)
    await said(process, "claiming no more")
    process.send_signal(signal.SIGTERM)
    assert await exit_code(process) != 0
    row = await queue.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)


async def said(process: subprocess.Popen[str], words: str) -> None:
    assert process.stderr is not None
    with anyio.fail_after(60):
        while words not in (line := await anyio.to_thread.run_sync(process.stderr.readline)):
            assert line, "it ended before it said so"


async def test_R82_stuck_threads_end_the_process_for_its_supervisor(
    queue: dls.Queue, daemon: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = daemon("--concurrency", "2", "--timeout", "1", "--grace", "0.5")
    ids = [
        await queue.submit(dls.thunk(bodies.wait_for_file_in_a_thread, str(tmp_path / "marks"), str(tmp_path / "go")))
        for _ in range(8)
    ]
    assert await exit_code(process) not in (0, None)
    assert await lines(tmp_path / "marks", 2) == ["began"] * 2
    # A body whose time was over before its thread began holds no slot.
    states = [(await queue.get(id)).state for id in ids]
    late = states.count("timeout")
    assert states == ["timeout"] * late + ["queued"] * (8 - late)
    assert 2 <= late < 8
    _, err = process.communicate()
    assert "every slot of worker" in err


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_three_hundred_frames_of_five_megabytes_need_little_memory(
    queue: dls.Queue, crew: Workers, plane: dls.Dispatch
) -> None:
    worker = crew.run("memory_process.py", "worker", str(plane.path))
    rest = [await number_from(worker)]
    id = await queue.submit(dls.thunk(bodies.asizes, [5_000_000] * 300))
    reader = crew.run("memory_process.py", "reader", str(plane.path), id)
    rest.append(await number_from(reader))
    assert worker.stdin is not None
    worker.stdin.write("go\n")
    worker.stdin.flush()
    for process, before in zip((worker, reader), rest, strict=True):
        assert await exit_code(process, 100) == 0, process.communicate()
        most = await number_from(process)
        assert most - before <= 150_000, (before, most)


async def number_from(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(await anyio.to_thread.run_sync(process.stdout.readline))
