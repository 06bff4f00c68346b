"""Faults that users of such systems report, over HTTP: each must be impossible here, too. See also `check_plane`."""

from __future__ import annotations

import gc
import logging
import pickle
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import http_bodies as bodies
import httpx
import msgpack
import pytest
from helpers import quiet, wait_until
from http_kit import Processes, Server, read_into, requests_of, served_fresh

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes import remote_plane as held
from dreamlake.lakeshore.planes.contract.operations import Fence, FinalFrame, Submit
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture
async def plane(server: Server) -> AsyncIterator[dls.HttpDispatch]:
    async with dls.HttpDispatch(server.url) as plane:
        yield plane


@pytest.fixture
def queue(plane: dls.HttpDispatch) -> dls.Queue:
    return dls.Queue(f"queue-{new_id()}", dispatch=plane)


def working(queue: dls.Queue, **options: Any) -> Any:
    return running_worker(queue, **{"allow_modules": ["http_bodies"], **options})


# Streams -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [bodies.ticking, bodies.aticking], ids=["thread", "task"])
async def test_R38_a_cancelled_generator_cleans_up_and_its_worker_goes_on(queue: dls.Queue, body: Any) -> None:
    async with working(queue):
        id = await queue.submit(dls.thunk(body, 100_000))
        assert await anext(queue.stream(id)) == 0
        assert await queue.cancel(id, wait=True)
        assert (await queue.get(id)).state == "killed"
        await wait_until(lambda: bodies.SEEN == ["cleaned up"], description="the body's finally")
        assert await queue.call(dls.thunk(bodies.double, 4)) == 8


async def test_R40_a_tight_loop_arrives_in_order_at_two_readers(queue: dls.Queue) -> None:
    got: list[list[int]] = [[], []]
    async with working(queue):
        id = await queue.submit(dls.thunk(bodies.count, 10_000))
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                for mine in got:
                    group.start_soon(read_into, mine, queue.stream(id))
    assert got == [list(range(10_000))] * 2


async def test_R44_a_stream_left_in_the_middle_leaves_nothing_behind(
    queue: dls.Queue, plane: dls.HttpDispatch, caplog: pytest.LogCaptureFixture
) -> None:
    id = await queue.submit(None)
    (claimed,) = await plane.claim([queue.name], "w")
    await plane.append(Fence(id, "w", claimed.attempt), 0, [b"\x94\x00\x00\x01\xc0"])
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            async for value in queue.stream(id):
                assert value == 1
                break
        gc.collect()
        engine = plane._engines.opened()
        assert engine is not None
        assert not engine.hub.waiting
        await quiet(lambda: requests_of(plane), 0.5, most=1, description="no circle of requests")
    assert caplog.records == []
    assert not (await queue.get(id)).cancel_requested


async def test_R45_a_failed_attempt_that_is_tried_again_ends_no_wait(queue: dls.Queue) -> None:
    async with working(queue, retries=2):
        name = new_id()
        id = await queue.submit(dls.thunk(bodies.fail_times, name, 1))
        assert await queue.result(id, timeout=30) == 2
        row = await queue.get(id)
        assert (row.state, row.attempt, row.failures) == ("succeeded", 2, 1)


# Workers and clocks --------------------------------------------------------------------------------------------------


async def test_R94_a_drain_finishes_what_runs_and_claims_nothing(
    queue: dls.Queue, server: Server, started: Processes, tmp_path: Path
) -> None:
    """With polls that take several at a time."""
    go, marks = tmp_path / "go", [tmp_path / f"marks{number}" for number in range(8)]
    ids = [await queue.submit(dls.thunk(bodies.wait_for, str(mark), str(go))) for mark in marks]
    worker = started.worker(server.url, "--allow-module", "http_bodies", "--concurrency", 3, queue=queue.name)
    await wait_until(lambda: sum(mark.exists() for mark in marks) == 3, 30, "three that run")
    worker.signal()
    worker.says("claiming no more")
    go.touch()
    assert await anyio.to_thread.run_sync(worker.ends) == 0
    rows = {row.id: row for row in await queue.list(limit=10)}
    stood = [(rows[id].state, rows[id].attempt, rows[id].lost) for id in ids]
    assert stood == [("succeeded", 1, 0)] * 3 + [("queued", 0, 0)] * 5
    assert [mark.exists() for mark in marks] == [True] * 3 + [False] * 5


@pytest.mark.timing("a body longer than two leases, which heartbeats of real time renew")
@pytest.mark.parametrize("wrong", [-600.0, 600.0])
async def test_R105_the_server_s_clock_alone_counts(
    queue: dls.Queue, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """A producer and a worker whose clock is wrong, and a body longer than two leases."""
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + wrong)
    async with working(queue, lease=1.0, retries=1):
        again = await queue.submit(dls.thunk(bodies.fail_times, new_id(), 1))
        id = await queue.submit(dls.thunk(bodies.sleeper, 2.2))
        assert await queue.result(id, timeout=30) == "slept"
        assert await queue.result(again, timeout=30) == 2
        row = await queue.get(id)
        assert (row.attempt, row.lost) == (1, 0)
    assert row.started_at is not None
    assert row.finished_at is not None
    assert abs(row.submitted_at - right()) < 120
    assert row.submitted_at <= row.started_at <= row.finished_at <= right() + 1


async def test_R106_thousands_of_waiters_and_many_idle_claimers_are_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """With polls that none ends by itself meanwhile, however slow this machine is."""
    monkeypatch.setattr(held, "POLL_TIMEOUT", 300.0)
    async with served_fresh() as plane:
        ids = [str(id) for id in await plane.many([Submit(new_id(), "waits", b"x") for _ in range(2000)])]
        claimed: list[float] = []

        async def claim(worker: str) -> None:
            assert len(await plane.claim(["idle"], worker, timeout=None)) == 1
            claimed.append(time.monotonic())

        async with anyio.create_task_group() as group:
            for id in ids:
                group.start_soon(plane.outcome, id)
            for number in range(200):
                group.start_soon(claim, f"w{number}")
            await wait_until(lambda: requests_of(plane) >= 200, 60, "the polls")
            before = await quiet(lambda: requests_of(plane), 2, most=2, timeout=60, description="hardly a request")
            for number in range(5):
                began = time.monotonic()
                await plane.submit("idle", b"x")
                await wait_until(lambda: len(claimed) == number + 1, 20, "a claim")  # noqa: B023
                assert claimed[-1] - began < 15.0
            assert requests_of(plane) - before < 20
            group.cancel_scope.cancel()


async def test_R106_polls_that_began_together_do_not_end_together() -> None:
    """Else those of a thousand workers would come back in step, every half minute."""
    asked_for: dict[str, set[float]] = {"poll": set(), "await-many": set()}

    class Transport(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            asked = msgpack.unpackb(await request.aread())
            asked_for[request.url.path.rpartition("/")[2]].add(asked["timeout_s"])
            answer = {"commands": [], "results": [], "pages": []}
            return httpx.Response(200, headers={"content-type": "application/x-msgpack"}, content=msgpack.packb(answer))

    async with dls.HttpDispatch("http://127.0.0.1", transport=Transport()) as plane:
        async with anyio.create_task_group() as group:
            for number in range(20):
                group.start_soon(partial(plane.claim, ["q"], f"w{number}", timeout=None))
            group.start_soon(plane.outcome, "some-id")
            await wait_until(lambda: len(asked_for["poll"]) >= 20, 20, "different times of polls")
            await wait_until(lambda: len(asked_for["await-many"]) >= 3, 20, "different times of waits")
            group.cancel_scope.cancel()
    for times in asked_for.values():
        assert all(held.POLL_TIMEOUT * 0.75 <= seconds <= held.POLL_TIMEOUT for seconds in times)


# Hostile workers -----------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 5, 6, 16, 40])
async def test_R109_a_hostile_worker_runs_no_code_in_its_clients(
    queue: dls.Queue, plane: dls.HttpDispatch, tmp_path: Path, code: int
) -> None:
    trace = tmp_path / "trace"
    hostile = msgpack.packb(msgpack.ExtType(code, pickle.dumps(Bomb(str(trace)))))
    id = await queue.submit(None)
    (claimed,) = await plane.claim([queue.name], "w")
    fence = Fence(id, "w", claimed.attempt)
    await plane.append(fence, 0, [b"\x94\x00\x00" + hostile + b"\xc0"])
    await plane.finish(fence, "succeeded", result=hostile, final=FinalFrame(1, b"\x94\x03\x01\xc0\xc0"))
    for read in (lambda: queue.result(id), lambda: anext(queue.stream(id))):
        try:
            value = await read()
        except dls.WireError:
            continue
        assert isinstance(value, msgpack.ExtType)
    assert not trace.exists()


@pytest.mark.parametrize(
    "error",
    [{"type": "os.system", "message": "true"}, {"type": "SystemExit", "message": "1"}, "x" * 5000],
    ids=["a function", "an exit", "a text"],
)
async def test_R109_what_a_worker_says_of_a_failure_is_text(
    queue: dls.Queue, plane: dls.HttpDispatch, server: Server, error: Any
) -> None:
    id = await queue.submit(None)
    (claimed,) = await plane.claim([queue.name], "w")
    ack = {"invocation_id": id, "worker_id": "w", "attempt": claimed.attempt, "state": "failed", "error": error}
    async with httpx.AsyncClient(trust_env=False) as client:
        headers = {"content-type": "application/x-msgpack"}
        answer = await client.post(f"{server.url}/v1/daemon/ack", content=msgpack.packb(ack), headers=headers)
    assert answer.status_code == 200
    with pytest.raises(dls.InvocationFailed) as caught:
        await queue.result(id)
    assert not isinstance(caught.value, (SystemExit, OSError))
    assert (await plane.rows(RowFilter(id=id)))[0].state == "failed"
