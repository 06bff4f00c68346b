"""Workers over HTTP: bodies, streams, interruptions, shutdown and leases, through a real server."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import anyio
import http_bodies as bodies
import pytest
from helpers import run_python, wait_until
from http_kit import HERE, Processes, Server, read_into, server_process

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.server.tokens import create_token
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

MODULES = ("--allow-module", "http_bodies")


@pytest.fixture
async def plane(server: Server) -> AsyncIterator[dls.HttpDispatch]:
    async with dls.HttpDispatch(server.url) as plane:
        yield plane


@pytest.fixture
def queue(plane: dls.HttpDispatch) -> dls.Queue:
    return dls.Queue(f"queue-{new_id()}", dispatch=plane)


def working(queue: dls.Queue, **options: Any) -> Any:
    """A worker of this queue, in this loop, that may call the bodies by their names."""
    return running_worker(queue, **{"allow_modules": ["http_bodies"], **options})


async def began(text: Any = "began") -> None:
    await wait_until(lambda: text in bodies.SEEN, description="the start of the body")


# Bodies --------------------------------------------------------------------------------------------------------------


async def test_bodies_of_all_four_kinds(queue: dls.Queue) -> None:
    async with working(queue, concurrency=4):
        assert await queue.call(dls.thunk(bodies.double, 21)) == 42
        assert await queue.call(dls.thunk(bodies.adouble, "ab")) == "abab"
        for body in (bodies.count, bodies.acount):
            id = await queue.submit(dls.thunk(body, 300))
            assert [value async for value in queue.stream(id)] == list(range(300))
            assert await queue.result(id) is None
        assert await queue.call(dls.thunk(bodies.sized, 5 << 20)) == bytes(5 << 20)


async def test_what_a_body_raises_is_raised_at_the_other_end(queue: dls.Queue) -> None:
    async with working(queue):
        with pytest.raises(ValueError, match="of a body") as caught:
            await queue.call(dls.thunk(bodies.fail, "of a body"))
        assert isinstance(caught.value, dls.InvocationFailed)
        assert "in fail" in str(caught.value.traceback)
        id = await queue.submit(dls.thunk(bodies.fail_after, 3))
        got: list[int] = []
        with pytest.raises(ValueError, match="no more"):
            await read_into(got, queue.stream(id))
        assert got == [0, 1, 2]


async def test_a_stream_is_live(queue: dls.Queue) -> None:
    """Each value is there while the body still waits for the reader to have seen it."""
    async with working(queue):
        id = await queue.submit(dls.thunk(bodies.gated, "live", 5))
        got: list[int] = []
        async for value in queue.stream(id):
            got.append(value)
            bodies.gate(f"live {value}").set()
        assert got == [0, 1, 2, 3, 4]
        assert [value async for value in queue.stream(id, since=2)] == [3, 4]


async def test_a_worker_among_other_tasks_works_for_its_own_process(queue: dls.Queue) -> None:
    async with working(queue, concurrency=20):
        ids = [await queue.submit(dls.thunk(bodies.adouble, n)) for n in range(200)]
        results = [await queue.result(id) for id in ids]
    assert results == [2 * n for n in range(200)]


async def test_retries(queue: dls.Queue) -> None:
    async with working(queue, retries=1):
        assert await queue.call(dls.thunk(bodies.fail_times, "twice", 1)) == 2
        with pytest.raises(OSError, match="failure 2"):
            await queue.call(dls.thunk(bodies.fail_times, "thrice", 5))
    rows = await queue.list()
    assert sorted((row.state, row.attempt, row.failures) for row in rows) == [("failed", 2, 1), ("succeeded", 2, 1)]


@pytest.mark.timing("the second body must run within a timeout of 0.3 s")
async def test_a_timeout(queue: dls.Queue) -> None:
    async with working(queue, timeout=0.3):
        with pytest.raises(dls.InvocationTimedOut, match="the body ran longer than this worker's timeout of"):
            await queue.call(dls.thunk(bodies.sleeper))
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2


# Interruptions -------------------------------------------------------------------------------------------------------


@pytest.mark.timing("a cancel must reach a body within a second")
async def test_a_cancel_reaches_a_running_body_within_a_second(queue: dls.Queue) -> None:
    async with working(queue):
        for _ in range(3):
            bodies.SEEN.clear()
            id = await queue.submit(dls.thunk(bodies.sleeper))
            await began()
            asked = time.monotonic()
            assert await queue.cancel(id, wait=True)
            (stopped,) = [when for what, when in bodies.SEEN[1:] if what == "stopped"]
            with pytest.raises(dls.InvocationKilled, match="cancelled while running"):
                await queue.result(id)
            assert stopped - asked < 1.0
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_a_call_that_is_left_cancels_its_body(queue: dls.Queue) -> None:
    async with working(queue):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(queue.call, dls.thunk(bodies.sleeper))
                await began()
                scope.cancel()
        await wait_until(lambda: len(bodies.SEEN) == 2, description="the end of the body")
    assert [row.state for row in await queue.list()] == ["killed"]


async def test_a_worker_that_stops_gives_back_what_it_holds(queue: dls.Queue) -> None:
    async with working(queue, grace=0.1):
        id = await queue.submit(dls.thunk(bodies.sleeper))
        await began()
    row = await queue.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)
    async with working(queue):
        await queue.cancel(id)


async def test_a_worker_that_is_cancelled_while_it_waits_takes_nothing(queue: dls.Queue) -> None:
    for _ in range(5):
        with anyio.move_on_after(0.1):
            await dls.run_worker(queue)
    id = await queue.submit(dls.thunk(bodies.double, 4))
    async with working(queue):
        assert await queue.result(id, timeout=10) == 8
    assert (await queue.get(id)).attempt == 1


async def test_a_result_that_the_server_does_not_take_fails_its_invocation_alone(tmp_path: Path) -> None:
    """Frames of many are sent in smaller parts; one value that is too large cannot be."""
    with server_process(tmp_path / "plane.db", "--max-body", "100k") as server:
        async with dls.HttpDispatch(server.url) as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with working(queue, concurrency=2):
                with pytest.raises(
                    dls.InvocationFailed, match=r"the plane does not take a result of 2000\d\d bytes: ex"
                ):
                    await queue.call(dls.thunk(bodies.sized, 200_000))
                assert await queue.call(dls.thunk(bodies.sized, 50_000)) == bytes(50_000)
                id = await queue.submit(dls.thunk(bodies.blocks, 100, 10_000))
                assert [len(value) async for value in queue.stream(id)] == [10_000] * 100
                with pytest.raises(dls.InvocationFailed, match="expected a body of at most"):
                    await queue.call(dls.thunk(bodies.blocks, 1, 200_000))
                assert await queue.call(dls.thunk(bodies.double, 1)) == 2


# Leases --------------------------------------------------------------------------------------------------------------


@pytest.mark.timing("a body longer than the lease, which heartbeats of real time renew")
async def test_heartbeats_keep_long_bodies(queue: dls.Queue, plane: dls.HttpDispatch) -> None:
    async with working(queue, lease=0.9), working(queue, lease=0.9):
        assert await queue.call(dls.thunk(bodies.sleeper, 3.0)) == "slept"
        assert bodies.SEEN == ["began"]
        (row,) = await queue.list(limit=1)
        assert (row.attempt, row.lost) == (1, 0)


async def test_a_worker_that_is_killed_loses_its_job_to_another_after_the_lease(
    queue: dls.Queue, server: Server, started: Processes, tmp_path: Path
) -> None:
    marks, go = tmp_path / "marks", tmp_path / "go"
    first = started.worker(server.url, *MODULES, "--lease", 1.0, queue=queue.name)
    id = await queue.submit(dls.thunk(bodies.wait_for, str(marks), str(go)))
    await wait_until(marks.exists, 20, "the start of the body")
    first.kill()
    go.touch()
    async with working(queue):
        assert await queue.result(id, timeout=20) == "done"
    row = await queue.get(id)
    assert (row.attempt, row.lost, row.failures) == (2, 1, 0)
    assert marks.read_text().splitlines() == ["began", "began"]


async def test_a_worker_runs_no_invocation_twice_at_a_time(queue: dls.Queue, plane: dls.HttpDispatch) -> None:
    """Somebody gave its claim back, and with a free slot it is given the row again while the body's thread goes on."""
    async with working(queue, concurrency=2, lease=4.5):
        id = await queue.submit(dls.thunk(bodies.blocked, "first"))
        await began("first began")
        (row,) = await plane.rows(RowFilter(id=id))
        await plane.release(Fence(id, row.worker, 1))

        async def again() -> bool:
            return (await plane.rows(RowFilter(id=id)))[0].attempt == 2

        await wait_until(again, 20, "the second claim")
        await anyio.sleep(4.0)  # two heartbeats: the first claim is known to be lost, the second one kept
        assert bodies.SEEN == ["first began"]
        bodies.gate("first").set()
        assert await queue.result(id, timeout=20) == "first"
        assert bodies.SEEN == ["first began", "first began"]
        (row,) = await plane.rows(RowFilter(id=id))
        assert (row.state, row.attempt, row.lost) == ("succeeded", 2, 0)


async def test_a_frozen_worker_that_wakes_up_late_has_no_effect(
    queue: dls.Queue, server: Server, started: Processes, tmp_path: Path
) -> None:
    """It was stopped for longer than its lease, and another has the job by then."""
    from signal import SIGCONT, SIGSTOP

    marks, go = tmp_path / "marks", tmp_path / "go"
    first = started.worker(server.url, *MODULES, "--lease", 1.0, queue=queue.name)
    id = await queue.submit(dls.thunk(bodies.wait_for, str(marks), str(go)))
    await wait_until(marks.exists, 20, "the start of the body")
    first.signal(SIGSTOP)
    second = started.worker(server.url, *MODULES, "--lease", 30, queue=queue.name)
    await wait_until(lambda: marks.read_text().count("began") == 2, 20, "the second start of the body")
    first.signal(SIGCONT)
    await wait_until(lambda: "is lost" in first.err or "lost" in first.err, 20, "that the first worker is told")
    go.touch()
    assert await queue.result(id, timeout=20) == "done"
    assert (await queue.get(id)).attempt == 2
    assert second.alive
    assert first.alive


# Processes -----------------------------------------------------------------------------------------------------------


async def test_a_worker_process_ends_with_its_signal(
    queue: dls.Queue, server: Server, started: Processes, tmp_path: Path
) -> None:
    """What runs may end; an idle one ends at once."""
    marks, go = tmp_path / "marks", tmp_path / "go"
    busy = started.worker(server.url, *MODULES, queue=queue.name)
    id = await queue.submit(dls.thunk(bodies.wait_for, str(marks), str(go)))
    await wait_until(marks.exists, 20, "the start of the body")
    idle = started.worker(server.url, *MODULES, queue=queue.name)
    asked = time.monotonic()
    idle.signal()
    assert await anyio.to_thread.run_sync(idle.ends) == 0
    assert time.monotonic() - asked < 15  # its poll would be answered after 22 at the earliest
    busy.signal()
    busy.says("claiming no more")
    go.touch()
    assert await anyio.to_thread.run_sync(busy.ends) == 0
    assert await queue.result(id, timeout=10) == "done"
    for process in (busy, idle):
        assert "Traceback" not in process.err, process.err


async def test_a_worker_process_gives_back_what_does_not_end(
    queue: dls.Queue, server: Server, started: Processes, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    process = started.worker(server.url, *MODULES, "--grace", 0.2, queue=queue.name)
    id = await queue.submit(dls.thunk(bodies.slow_line, str(marks), "slow", 60.0))
    await wait_until(marks.exists, 20, "the start of the body")
    process.signal()
    assert await anyio.to_thread.run_sync(process.ends) == 0
    row = await queue.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)
    assert "Traceback" not in process.err, process.err


# Pickles -------------------------------------------------------------------------------------------------------------

REFUSED = r"was submitted as a pickle, which this worker refuses because loading one runs its code"


async def test_pickled_functions_are_refused_unless_allowed(
    queue: dls.Queue, server: Server, started: Processes
) -> None:
    here = 20

    def pickled(x: int) -> int:
        return x + here

    refused = started.worker(server.url, queue=queue.name)
    assert "pickled functions refused" in refused.err
    with pytest.raises(dls.InvocationFailed, match=REFUSED) as caught:
        await queue.call(dls.thunk(pickled, 1))
    assert caught.value.type == "TransportError"
    refused.signal()
    assert await anyio.to_thread.run_sync(refused.ends) == 0
    assert "failed" in refused.err
    allowed = started.worker(server.url, "--allow-pickled", queue=queue.name)
    assert "pickled functions allowed" in allowed.err
    assert await queue.call(dls.thunk(pickled, 1)) == 21


async def test_a_task_refuses_and_allows_them_too(queue: dls.Queue) -> None:
    async with running_worker(queue):
        with pytest.raises(dls.InvocationFailed, match=REFUSED):
            await queue.call(dls.thunk(lambda: 1))
    async with running_worker(queue, allow_pickled=True):
        assert await queue.call(dls.thunk(lambda: 1)) == 1


async def test_a_local_worker_on_the_server_s_file_refuses_what_came_over_http(
    server: Server, queue: dls.Queue
) -> None:
    async with dls.Dispatch(server.db) as local:
        here = dls.Queue(queue.name, dispatch=local)
        async with running_worker(here):
            with pytest.raises(dls.InvocationFailed, match=REFUSED):
                await queue.call(dls.thunk(lambda: 1))
            assert await here.call(dls.thunk(lambda: 2)) == 2, "what was submitted on this machine is trusted"
        async with running_worker(here, allow_pickled=True):
            assert await queue.call(dls.thunk(lambda: 3)) == 3


async def test_a_remote_worker_refuses_what_was_submitted_on_the_server_s_machine(
    server: Server, queue: dls.Queue
) -> None:
    """It cannot know who else can write there."""
    async with dls.Dispatch(server.db) as local, running_worker(queue):
        with pytest.raises(dls.InvocationFailed, match=REFUSED):
            await dls.Queue(queue.name, dispatch=local).call(dls.thunk(lambda: 1))


# The environment -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("namespace", ["default", "lab"])
def test_the_environment_leads_to_the_server(tmp_path: Path, started: Processes, namespace: str) -> None:
    """Queues, UDF calls, workers and commands use it, in the namespace of their token."""
    tokens = tmp_path / "tokens"
    secret = create_token(tokens, "w", "worker", namespace)
    with server_process(tmp_path / "plane.db", tokens=tokens) as server:
        there = {"LAKESHORE_URL": server.url, "LAKESHORE_CLIENT_TOKEN": secret, "LAKESHORE_HOME": str(tmp_path / "no")}
        worker = started.command("worker", "start", "--queue", "q", *MODULES, **there)
        worker.says("pickled functions refused")
        script = """
            import sys, anyio
            sys.path.insert(0, sys.argv[1])
            import dreamlake.lakeshore as dls
            import http_bodies

            async def main():
                queue = dls.Queue("q")
                id = await queue.submit(dls.thunk(http_bodies.double, 4))
                print(await queue.result(id, timeout=30), repr(queue.dispatch))

            anyio.run(main)
            print(http_bodies.udf_double(5))
            print(dls.SyncQueue("q").call(dls.thunk(http_bodies.double, 6)))
        """
        old = {name: os.environ.get(name) for name in there}
        os.environ.update(there)
        try:
            out, err = run_python(script, str(HERE))
        finally:
            for name, value in old.items():
                os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
        assert out == f"8 HttpDispatch('{server.url}')\n10\n12\n"
        assert secret not in out + err
        shown = started.command("queue", "list", **there)
        assert shown.ends() == 0, shown.err
        assert "q" in shown.out
        assert "3" in shown.out
        listed = started.command("inv", "list", **there)
        assert listed.ends() == 0, listed.err
        assert listed.out.count("succeeded") == 3
        assert worker.alive
        assert secret not in server.err + worker.err + worker.out + shown.out + listed.out
    assert not (tmp_path / "no").exists(), "nothing is kept on this machine"
