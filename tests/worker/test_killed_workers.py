"""SIGKILL at any moment: no invocation and no acknowledged frame is lost, and work goes on at once."""

from __future__ import annotations

import signal
import sqlite3
import time
from typing import TYPE_CHECKING

import pytest
import worker_bodies as bodies
from helpers import wait_until
from processes import Workers, workers
from reading import read_into

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
def crew(plane: dls.Dispatch, tmp_path: Path, anyio_backend_name: str) -> Iterator[Workers]:
    assert plane.path is not None
    with workers(plane.path, tmp_path / "log", anyio_backend_name) as crew:
        yield crew


async def killed(process: subprocess.Popen[str]) -> None:
    await wait_until(lambda: process.poll() is not None, 60, "the death of the worker")
    assert process.returncode == -signal.SIGKILL, process.communicate()


def running_rows(plane: dls.Dispatch) -> int:
    connection = sqlite3.connect(str(plane.path), timeout=20)
    try:
        (count,) = connection.execute("SELECT count(*) FROM invocation WHERE state = 'running'").fetchone()
        (check,) = connection.execute("PRAGMA integrity_check").fetchone()
        assert check == "ok"
        return int(count)
    finally:
        connection.close()


@pytest.mark.parametrize(
    "moment",
    [
        "before the claim",
        "before the commit of claim",
        "after the commit of claim",
        "between claim and start",
        "mid-body",
        "between result and ack",
        "before the commit of finish",
        "after the commit of finish",
    ],
)
async def test_R5_a_kill_loses_no_invocation(
    plane: dls.Dispatch, queue: dls.Queue, crew: Workers, tmp_path: Path, moment: str, anyio_backend_name: str
) -> None:
    """R1, R17, R19 and R34 too: what counts is that it is noticed at once, not after a lease or a timeout.

    How soon that is, the test of R9 measures.
    """
    assert plane.path is not None
    if moment == "before the claim":
        plane.path.with_name(f"{plane.path.name}-now").touch()
    body = bodies.awork if anyio_backend_name == "asyncio" else bodies.work
    first = crew.start(moment, lease=3600, timeout=3600)
    id = await queue.submit(dls.thunk(body, str(tmp_path / "marks"), "job"))
    await killed(first)
    crew.start(lease=3600, timeout=3600)
    assert await queue.result(id, timeout=60) == "job"
    row = await queue.get(id)
    free = {"before the claim", "before the commit of claim", "after the commit of finish"}
    assert (row.attempt, row.lost, row.failures) == ((1, 0, 0) if moment in free else (2, 1, 0))
    ran = {"mid-body": 2, "between result and ack": 2, "before the commit of finish": 2}
    marks = (tmp_path / "marks").read_text().splitlines()
    assert marks.count("job began") == ran.get(moment, 1)
    assert running_rows(plane) == 0


@pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])
@pytest.mark.parametrize(
    "moment", ["before the commit of append", "after the commit of append", "mid-body", "before the commit of finish"]
)
async def test_a_kill_loses_no_acknowledged_frame(
    plane: dls.Dispatch, queue: dls.Queue, crew: Workers, tmp_path: Path, moment: str, is_async: bool
) -> None:
    n = 500
    first = crew.start(moment)
    id = await queue.submit(dls.thunk(bodies.astream if is_async else bodies.stream, str(tmp_path / "marks"), n))
    await killed(first)
    acknowledged = max(int(line.split()[1]) for line in (tmp_path / "log").read_text().splitlines())
    assert acknowledged >= 1
    there = len((await plane.page(id)).frames)
    assert there >= acknowledged
    crew.start()
    stream = queue.stream(id)
    got: list[int] = []
    with pytest.raises(dls.StreamRestarted) as caught:
        await read_into(got, stream)
    assert got == list(range(there))  # the acknowledged frames are there, in order, without any of another attempt
    assert (caught.value.seq, caught.value.attempt) == (there, 2)
    assert [value async for value in stream] == list(range(n))
    frames = (await plane.page(id)).frames
    assert [seq for seq, _ in frames] == list(range(there + 1 + n + 1))
    assert (tmp_path / "marks").read_text().splitlines() == ["stream began"] * 2
    row = await queue.get(id)
    assert (row.state, row.attempt, row.lost) == ("succeeded", 2, 1)


@pytest.mark.timing("a dead worker of this machine must be noticed within seconds of real time")
@pytest.mark.parametrize("another", ["waits", "comes"])
async def test_R9_another_worker_takes_over_at_once(
    queue: dls.Queue, crew: Workers, tmp_path: Path, another: str
) -> None:
    """On the same machine the death of a worker is noticed within two seconds, whatever its lease."""
    crowd = [crew.start(lease=3600)]

    async def ready() -> float:
        """Return when a new worker began its first job. The worker that runs a body has no free slot."""
        crowd.append(crew.start(lease=3600))
        other = await queue.submit(dls.thunk(bodies.work, str(tmp_path / "ready"), "ready"))
        assert await queue.result(other, timeout=60) == "ready"
        return (await queue.get(other)).started_at or 0.0

    marks, go = tmp_path / "marks", tmp_path / "go"
    id = await queue.submit(dls.thunk(bodies.wait_for_file, str(marks), str(go)))
    await wait_until(marks.exists, 60, "the start of the body")
    holder = crowd[-1]
    if another == "waits":
        await ready()
    holder.kill()
    go.touch()
    since = time.time()
    if another == "comes":  # the start of an interpreter does not count
        since = await ready()
    assert await queue.result(id, timeout=60) == "done"
    row = await queue.get(id)
    assert row.attempt == 2
    assert crowd[-1].poll() is None
    assert (row.started_at or 0.0) - since <= 5.0


async def test_a_body_that_always_kills_its_worker_fails_in_the_end(
    queue: dls.Queue, crew: Workers, tmp_path: Path
) -> None:
    """The error names the reason, the invocation is not repeated for ever, and other invocations do not pay for it."""
    bad = await queue.submit(dls.thunk(bodies.kill_worker, str(tmp_path / "marks")), priority=1)
    good = [await queue.submit(dls.thunk(bodies.awork, str(tmp_path / "good"), f"g{n}")) for n in range(4)]
    for _ in range(3):
        await killed(crew.start(max_lost=3, concurrency=4))
    crew.start(max_lost=3, concurrency=4)
    with pytest.raises(dls.InvocationFailed) as caught:
        await queue.result(bad, timeout=30)
    assert (caught.value.state, caught.value.type) == ("failed", "WorkerLost")
    assert caught.value.message == ("its worker died or stopped renewing its lease 3 times; the body may be the cause")
    assert (tmp_path / "marks").read_text().splitlines() == ["began"] * 3
    assert [await queue.result(id, timeout=30) for id in good] == [f"g{n}" for n in range(4)]
    frames = [dls.wire.Frame.from_bytes(data) for _, data in (await queue.dispatch.page(bad)).frames]
    assert [(frame.kind, (frame.meta or {}).get("type")) for frame in frames] == [
        (dls.wire.FrameKind.ERROR, "WorkerLost")
    ]


@pytest.mark.parametrize("hog", ["keep_gil", "block_loop"])
async def test_a_body_that_stops_its_process_for_four_leases_runs_once(
    queue: dls.Queue, crew: Workers, tmp_path: Path, hog: str
) -> None:
    """A call in C that holds the interpreter's lock also stops heartbeats. The claim holds because the process lives."""
    marks, lease = tmp_path / "marks", 1.0
    for _ in range(2):
        crew.start(lease=lease)
    ready = [await queue.submit(dls.thunk(bodies.work, str(tmp_path / "ready"), "ready")) for _ in range(4)]
    for id in ready:
        await queue.result(id, timeout=60)
    body = bodies.keep_gil if hog == "keep_gil" else bodies.block_loop
    id = await queue.submit(dls.thunk(body, str(marks), 4.5 * lease))
    assert await queue.result(id, timeout=60) == ("kept" if hog == "keep_gil" else "blocked")
    assert marks.read_text().splitlines() == ["began", "ended"]
    row = await queue.get(id)
    assert (row.attempt, row.lost) == (1, 0)
    assert (row.finished_at or 0) - (row.started_at or 0) > 4 * lease
