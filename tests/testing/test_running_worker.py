"""`testing.running_worker`: a worker for the length of a block."""

from __future__ import annotations

import inspect

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.testing.running import WorkerOptions

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def fresh_bodies() -> None:
    """What an earlier test's bodies have recorded is not this one's."""
    bodies.forget()


async def test_it_works_and_stops(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=3):
        assert await queue.call(dls.thunk(bodies.double, 2)) == 4
    id = await queue.submit(dls.thunk(bodies.double, 2))
    with pytest.raises(TimeoutError):
        await queue.result(id, timeout=0.3)


async def test_it_finishes_what_runs(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.sleeper, "s", 0.3))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
    assert (await queue.get(id)).state == "succeeded"


async def test_it_gives_back_what_does_not_end_in_time(queue: dls.Queue) -> None:
    async with running_worker(queue, grace=0.1):
        id = await queue.submit(dls.thunk(bodies.sleeper))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
    row = await queue.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)


async def test_what_the_block_raises_comes_out_as_it_is(queue: dls.Queue) -> None:
    error = ExceptionGroup("mine", [ValueError("a")])
    id = await queue.submit(dls.thunk(bodies.sleeper))

    async def block() -> None:
        async with running_worker(queue, grace=60):
            await wait_until(lambda: bodies.SEEN, description="the start of the body")
            raise error

    with pytest.raises(ExceptionGroup) as caught:
        await block()
    assert caught.value is error
    assert (await queue.get(id)).state == "queued"


async def test_cancelling_the_block_ends_the_worker(queue: dls.Queue) -> None:
    with anyio.fail_after(30), anyio.CancelScope() as scope:
        async with running_worker(queue, grace=60):
            id = await queue.submit(dls.thunk(bodies.sleeper))
            await wait_until(lambda: bodies.SEEN, description="the start of the body")
            scope.cancel()
            await anyio.sleep(60)
    assert (await queue.get(id)).state == "queued"


async def test_a_worker_that_fails_ends_the_block(queue: dls.Queue) -> None:
    with pytest.raises(ValueError, match=r"a worker cannot work with concurrency=0 \(at least 1\)"):
        async with running_worker(queue, concurrency=0):
            await anyio.sleep(60)


def test_its_options_are_those_of_run_worker() -> None:
    theirs = inspect.signature(dls.run_worker).parameters
    assert set(WorkerOptions.__annotations__) == set(theirs) - {"queues", "once", "stop"}
