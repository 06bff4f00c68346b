"""How a worker ends: once, stopped, drained, cancelled."""

from __future__ import annotations

import logging
import threading
from functools import partial
from typing import Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from worker_kit import all_ended

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.testing import running_worker

pytestmark = pytest.mark.anyio


async def test_once_runs_one_that_is_there_or_none(queue: dls.Queue) -> None:
    assert await dls.run_worker(queue, once=True) == 0
    ids = [await queue.submit(dls.thunk(bodies.double, n)) for n in range(3)]
    assert await dls.run_worker(queue, once=True, concurrency=10) == 1
    assert [(await queue.get(id)).state for id in ids] == ["succeeded", "queued", "queued"]


async def test_once_counts_a_failed_attempt(queue: dls.Queue) -> None:
    id = await queue.submit(dls.thunk(bodies.fail, "no"))
    assert await dls.run_worker(queue, once=True, retries=1) == 1
    assert (await queue.get(id)).state == "queued"


async def test_a_stop_that_is_set_already_ends_it_at_once(queue: dls.Queue) -> None:
    stop = anyio.Event()
    stop.set()
    with anyio.fail_after(30):
        assert await dls.run_worker(queue, stop=stop) == 0
        assert await dls.run_worker(queue, stop=lambda: True) == 0


async def test_a_stop_from_a_thread(queue: dls.Queue) -> None:
    stop, jobs = threading.Event(), list[int]()

    async def work() -> None:
        jobs.append(await dls.run_worker(queue, stop=stop.is_set))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2
            threading.Timer(0.1, stop.set).start()
    assert jobs == [1]


async def test_R94_a_drain_finishes_what_runs_and_claims_nothing(queue: dls.Queue) -> None:
    ids = [await queue.submit(dls.thunk(bodies.blocked, f"b{n}")) for n in range(3)]
    stop, jobs = anyio.Event(), list[int]()

    async def work() -> None:
        jobs.append(await dls.run_worker(queue, concurrency=3, grace=30, stop=stop))

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await wait_until(lambda: len(bodies.SEEN) == 3, description="three bodies")
        ids += [await queue.submit(dls.thunk(bodies.note, n)) for n in range(5)]
        stop.set()
        for n in range(3):
            bodies.gate(f"b{n}").set()
    assert jobs == [3]
    states = [((row := await queue.get(id)).state, row.attempt) for id in ids]
    assert states == [("succeeded", 1)] * 3 + [("queued", 0)] * 5


async def test_heartbeats_go_on_while_it_drains(queue: dls.Queue) -> None:
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(dls.run_worker, queue, lease=0.8, grace=60.0, stop=stop))
        id = await queue.submit(dls.thunk(bodies.blocked, "s"))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        stop.set()
        until = (await queue.get(id)).lease_until or 0.0
        await wait_until(lambda: renewed(queue, id, until + 1.6), description="two leases more")
        bodies.open_gates()
    assert ((await queue.get(id)).state, bodies.SEEN.count("s began")) == ("succeeded", 1)


async def renewed(queue: dls.Queue, id: str, until: float) -> bool:
    return ((await queue.get(id)).lease_until or 0.0) > until


async def test_a_worker_cancelled_by_a_scope_gives_back_what_it_holds(queue: dls.Queue) -> None:
    ids = [await queue.submit(dls.thunk(bodies.sleeper, f"s{n}")) for n in range(2)]
    ids.append(await queue.submit(dls.thunk(bodies.blocked, "thread")))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(dls.run_worker, queue, concurrency=3))
            await wait_until(lambda: len(bodies.SEEN) == 3, description="three bodies")
            scope.cancel()
    assert sum(str(what).endswith("cleaned up") for what in bodies.SEEN) == 2
    rows = [await queue.get(id) for id in ids]
    assert [(row.state, row.attempt, row.failures, row.lost) for row in rows] == [("queued", 1, 0, 0)] * 3
    bodies.open_gates()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_cancelled_as_a_task_gives_back_what_it_holds(queue: dls.Queue) -> None:
    import asyncio

    ids = [await queue.submit(dls.thunk(bodies.sleeper, f"s{n}")) for n in range(3)]
    task = asyncio.create_task(dls.run_worker(queue, concurrency=3))
    await wait_until(lambda: len(bodies.SEEN) == 3, description="three bodies")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rows = [await queue.get(id) for id in ids]
    assert [(row.state, row.attempt, row.failures, row.lost) for row in rows] == [("queued", 1, 0, 0)] * 3


async def test_a_finished_outcome_survives_the_cancellation_of_its_worker(queue: dls.Queue, monkeypatch: Any) -> None:
    """Values on their way to the journal get there, and so does the result after them."""
    from dreamlake.lakeshore.planes.contract.operations import Append
    from dreamlake.lakeshore.planes.plane import Plane

    do, entered = Plane.do, anyio.Event()

    async def slow(self: Plane, op: Any) -> Any:
        if isinstance(op, Append):
            entered.set()
            await anyio.sleep(0.2)
        return await do(self, op)

    monkeypatch.setattr(Plane, "do", slow)
    id = await queue.submit(dls.thunk(bodies.acount, 5000))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(dls.run_worker, queue)
            await entered.wait()
            await wait_until(lambda: delivering(id), description="the end of the body")
            scope.cancel()
    assert (await queue.get(id)).state == "succeeded"
    assert [value async for value in queue.stream(id)] == list(range(5000))


async def delivering(id: str) -> bool:
    import gc

    from dreamlake.lakeshore.worker.outcome import ActiveClaim

    found = [
        one for one in gc.get_objects() if type(one) is ActiveClaim
    ]  # isinstance would run code of unrelated objects
    return any(one.decided and one.claimed.id == id for one in found)


async def test_two_workers_of_one_process_on_two_loops(queue: dls.Queue, anyio_backend_name: str) -> None:
    stop = threading.Event()
    other = threading.Thread(
        target=anyio.run,
        args=(partial(dls.run_worker, queue, stop=stop.is_set),),
        kwargs={"backend": anyio_backend_name},
    )
    other.start()
    try:
        async with running_worker(queue, concurrency=1):
            ids = await queue.submit_many([dls.thunk(bodies.anote, n) for n in range(200)])
            ids += await queue.submit_many([dls.thunk(bodies.meet, 2)] * 2)
            await all_ended(queue, ids)
            assert await queue.result(ids[-1]) is True
            long = await queue.submit(dls.thunk(bodies.sleeper))
            await wait_until(lambda: "sleeper began" in bodies.SEEN, description="the start of the body")
            assert await queue.cancel(long, wait=True)
    finally:
        stop.set()
        await wait_until(lambda: not other.is_alive(), description="the end of the other loop")
    assert sorted(one for one in bodies.SEEN if isinstance(one, int)) == list(range(200))


async def test_one_line_is_logged_for_each_invocation(queue: dls.Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dreamlake.lakeshore.worker")
    async with running_worker(queue):
        good = await queue.submit(dls.thunk(bodies.double, 1))
        bad = await queue.submit(dls.thunk(bodies.fail, "no"))
        await wait_until(lambda: len(caplog.records) == 2, description="two lines")
    async with running_worker(queue, timeout=0.4):
        late = await queue.submit(dls.thunk(bodies.sleeper))
        await wait_until(lambda: len(caplog.records) == 3, description="three lines")
    words = [record.getMessage().split() for record in caplog.records]
    assert [line[:3] for line in words] == [
        [good, "double", "succeeded"],
        [bad, "fail", "failed"],
        [late, "sleeper", "timeout"],
    ]
    assert all(float(line[3]) >= 0 for line in words)
    assert [line[4:] for line in words] == [["s"], ["s,", "ValueError"], ["s"]]
