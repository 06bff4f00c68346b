"""What stops a child: a cancellation, a timeout, the end of its worker, and a later attempt."""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import child_bodies as bodies
import pytest
from anyio.lowlevel import checkpoint
from child_bodies import notes
from child_kit import WARM, children, folders, holders, process_runner, runs, started
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import ClaimLost, InvocationKilled, InvocationTimedOut
from dreamlake.lakeshore.planes.contract.operations import Fence, Finish

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path
    from subprocess import Popen

    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("each_start")]


async def row_of(queue: dls.Queue, id: str) -> Row:
    await queue.dispatch.outcome(id, timeout=60)
    return await queue.get(id)


async def began(path: Path, times: int = 1) -> int:
    """Return the process id of the body that began as the n-th one."""

    def pids() -> list[int]:
        found = [int(line.split()[1]) for line in notes(path) if line.startswith("began")]
        return found if len(found) >= times else []

    found: list[int] = await wait_until(pids, 60.0, "the begin of the body")
    return found[-1]


def said(row: Row) -> tuple[str, str | None, str | None]:
    return row.state, row.error and row.error.type, row.error and row.error.message


# --- cancelling and timing out ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("fn", [bodies.sleeps, bodies.asleeps, bodies.endless, bodies.aendless])
async def test_R84_cancel_stops_the_child_and_its_finally_runs(
    queue: dls.Queue, tmp_path: Path, fn: Callable[..., Any]
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(fn, str(path)))
        pid = await began(path)
        assert await queue.cancel(id, wait=True)
        assert notes(path)[1:] == ["cleaned up"]
        assert not runs(pid)
        assert said(await queue.get(id)) == ("killed", "Cancelled", "cancelled while running")
        with pytest.raises(InvocationKilled):
            await queue.result(id)
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2
    assert folders(tmp_path) == [id]


async def test_R83_a_child_that_ignores_sigterm_is_killed_and_only_then_is_its_end_said(
    queue: dls.Queue, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, process_runner(grace=0.2)):
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        pid = await began(path)
        claim = await queue.get(id)
        assert await queue.cancel(id, wait=True)
        assert not runs(pid)
        assert said(await queue.get(id)) == ("killed", "Cancelled", "cancelled while running")
        with pytest.raises(ClaimLost):
            await queue.dispatch.do(Finish(Fence(id, claim.worker, 7), "succeeded", b"\xc3"))


@pytest.mark.parametrize("fn", [bodies.stubborn, bodies.asleeps])
async def test_R83_a_timeout_ends_the_child(queue: dls.Queue, tmp_path: Path, fn: Callable[..., Any]) -> None:
    path = tmp_path / "notes"
    for timeout in (3.0, 10.0, 30.0):  # on a machine that stalls, the time may be over before the child begins
        async with children(queue, tmp_path, process_runner(grace=0.2), timeout=timeout, retries=2):
            id = await queue.submit(dls.thunk(fn, str(path)))
            row = await row_of(queue, id)
            message = f"the body ran longer than this worker's timeout of {timeout} s"
            assert said(row) == ("timeout", "TimeoutError", message)
            assert row.attempt == 1
            with pytest.raises(InvocationTimedOut):
                await queue.result(id)
            if notes(path):
                break
    assert not runs(await began(path))


async def test_a_body_that_succeeds_all_the_same_has_succeeded(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.finishes_anyway, str(path)))
        await began(path)
        await queue.cancel(id)
        assert await queue.result(id) == "finished anyway"
    assert folders(tmp_path) == []


async def test_a_left_stream_ends_the_child(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.endless, str(path)))
        got = [value async for value in _first(queue, id, 3)]
        assert got == [0, 1, 2]
        await queue.cancel(id, wait=True)
        assert notes(path)[1:] == ["cleaned up"]


async def _first(queue: dls.Queue, id: str, count: int) -> Any:
    async for value in queue.stream(id):
        yield value
        count -= 1
        if not count:
            return


# --- the end of the worker -------------------------------------------------------------------------------------------


async def test_a_worker_that_stops_lets_its_children_end(queue: dls.Queue, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with children(queue, tmp_path, grace=30.0) as stop:
        id = await queue.submit(dls.thunk(bodies.one_then_waits, str(gate)))
        later = await queue.submit(dls.thunk(bodies.double, 1))
        await anext(queue.stream(id))
        stop.set()
        gate.touch()
    assert (await queue.get(id)).state == "succeeded"
    assert (await queue.get(later)).state == "queued"


@pytest.mark.parametrize("on_shutdown", ["killed", "release"])
async def test_past_its_grace_a_worker_ends_its_children(queue: dls.Queue, tmp_path: Path, on_shutdown: str) -> None:
    path = tmp_path / "notes"
    rules = {"on_shutdown": on_shutdown}
    async with children(queue, tmp_path, process_runner(grace=0.2), grace=0.1, rules=rules) as stop:
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        pid = await began(path)
        stop.set()
    assert not runs(pid)
    row = await queue.get(id)
    killed = ("killed", "Cancelled", "daemon shutdown grace expired")
    assert said(row) == (killed if on_shutdown == "killed" else ("queued", None, None))
    assert (row.failures, row.lost) == (0, 0)
    assert folders(tmp_path) == ([id] if on_shutdown == "killed" else [])


async def test_a_cancelled_worker_ends_its_children(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    ids = [await queue.submit(dls.thunk(bodies.sleeps, str(path))) for _ in range(2)]
    with anyio.CancelScope() as scope:
        async with children(queue, tmp_path, concurrency=2):
            await began(path, 2)
            scope.cancel()
    assert notes(path).count("cleaned up") == 2
    for id in ids:
        assert said(await queue.get(id)) == ("killed", "Cancelled", "daemon shutdown grace expired")


def worker(tmp_path: Path, backend: str, **options: Any) -> AbstractContextManager[Popen[str]]:
    db, folder = str(tmp_path / "plane.db"), str(tmp_path)
    warm = "1" if WARM[0] else ""
    return started("child_worker.py", db, folder, json.dumps(options), BACKEND=backend, WARM=warm)


async def test_sigterm_and_the_grace(queue: dls.Queue, tmp_path: Path, anyio_backend_name: str) -> None:
    path = tmp_path / "notes"
    with worker(tmp_path, anyio_backend_name, grace=0.1) as process:
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        pid = await began(path)
        process.send_signal(signal.SIGTERM)
        assert said(await row_of(queue, id)) == ("killed", "Cancelled", "daemon shutdown grace expired")
        assert await anyio.to_thread.run_sync(process.communicate) == ("", "")
        assert process.returncode == 0
    assert not runs(pid)


async def test_kill_9_of_the_daemon_takes_its_children_along(
    queue: dls.Queue, tmp_path: Path, anyio_backend_name: str
) -> None:
    path = tmp_path / "notes"
    with worker(tmp_path, anyio_backend_name, concurrency=2) as process:
        ids = [await queue.submit(dls.thunk(bodies.orphan, str(path) + str(i))) for i in range(2)]
        pids = [await began(tmp_path / f"notes{i}") for i in range(2)]
        process.kill()
        await wait_until(lambda: not any(map(runs, pids)), description="the end of the children")
    async with children(queue, tmp_path, concurrency=2):
        for id in ids:
            assert await queue.result(id) == "the second attempt"
            assert (await queue.get(id)).lost == 1
    assert folders(tmp_path) == []


async def test_kill_9_of_the_daemon_and_its_child(queue: dls.Queue, tmp_path: Path, anyio_backend_name: str) -> None:
    path = tmp_path / "notes"
    with worker(tmp_path, anyio_backend_name) as process:
        id = await queue.submit(dls.thunk(bodies.orphan, str(path)))
        pid = await began(path)
        process.kill()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        await wait_until(lambda: not runs(pid))
    async with children(queue, tmp_path):
        assert await queue.result(id) == "the second attempt"


async def test_a_new_attempt_kills_what_an_earlier_one_left_running(
    queue: dls.Queue, tmp_path: Path, anyio_backend_name: str
) -> None:
    """The worker is stopped by SIGSTOP, not dead. Its child goes on and writes into the folder."""
    path = tmp_path / "notes"
    with worker(tmp_path, anyio_backend_name, lease=0.5) as process:
        id = await queue.submit(dls.thunk(bodies.orphan, str(path)))
        pid = await began(path)
        process.send_signal(signal.SIGSTOP)
        async with children(queue, tmp_path, lease=0.5):
            await wait_until(lambda: not runs(pid), 60.0, "the end of the orphan")
            process.send_signal(signal.SIGCONT)
            assert await queue.result(id) == "the second attempt"
            assert (await queue.get(id)).attempt == 2
        process.send_signal(signal.SIGTERM)
        _, err = await anyio.to_thread.run_sync(process.communicate)
        assert process.returncode == 0, err


# --- cancellation at every await -------------------------------------------------------------------------------------


async def test_a_worker_cancelled_at_any_moment_leaves_nothing_behind(queue: dls.Queue, tmp_path: Path) -> None:
    """The moments reach from before the folder exists to after the end of the child, with more of them at the beginning."""
    spans = list[str]()
    for i in range(14):
        delay = 0.0005 * 1.7**i
        id = await queue.submit(dls.thunk(bodies.double, i))
        with anyio.move_on_after(delay):
            async with children(queue, tmp_path):
                await anyio.sleep_forever()
        assert holders(tmp_path) == []
        row = await queue.get(id)
        spans.append(row.state)
        if row.state == "queued":
            await queue.cancel(id)
        else:
            assert row.state in ("killed", "succeeded")
        if row.state == "succeeded":
            assert id not in folders(tmp_path)
    assert "queued" in spans


async def test_a_start_is_cancelled_while_it_is_under_way(queue: dls.Queue, tmp_path: Path) -> None:
    """Each round cancels a few passes of the loop later than the one before."""
    states = set[str]()
    for turns in range(0, 120, 7):
        path = tmp_path / f"notes{turns}"
        id = await queue.submit(dls.thunk(bodies.sleeps, str(path)))
        async with children(queue, tmp_path, process_runner(grace=0.0)):
            await wait_until((tmp_path / "work" / id).exists)
            for _ in range(turns):
                await checkpoint()
            assert await queue.cancel(id, wait=True)
        assert holders(tmp_path) == []
        states.add((await queue.get(id)).state)
    assert states == {"killed"}


async def test_asyncios_own_cancellation_stops_the_child_too(
    queue: dls.Queue, tmp_path: Path, anyio_backend_name: str
) -> None:
    if anyio_backend_name != "asyncio":
        return
    import asyncio

    for delay in (0.001, 0.01, 0.03, 0.1, 0.6):
        path = tmp_path / f"notes{delay}"
        id = await queue.submit(dls.thunk(bodies.sleeps, str(path)))

        async def work() -> None:
            async with children(queue, tmp_path, process_runner(grace=2.0)):
                await anyio.sleep_forever()

        task = asyncio.create_task(work())
        await asyncio.sleep(delay)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert holders(tmp_path) == []
        row = await queue.get(id)
        assert row.state in ("queued", "killed")
        await queue.cancel(id)


async def test_heartbeats_go_on_while_a_child_is_being_ended(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, process_runner(grace=1.5), lease=1.0):
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        await began(path)
        start = time.monotonic()
        assert await queue.cancel(id, wait=True)
        assert time.monotonic() - start > 1.4
        row = await queue.get(id)
        assert (row.state, row.attempt, row.lost) == ("killed", 1, 0)
