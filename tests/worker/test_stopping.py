"""A body that is cancelled: what stops it, what that costs, and what it leaves behind."""

from __future__ import annotations

import time

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from worker_kit import goes_on, started

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.testing import running_worker

pytestmark = pytest.mark.anyio


@pytest.mark.timing("a cancel must reach a body within a second")
async def test_R84_cancel_reaches_an_async_body_and_waits_for_its_end(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.sleeper))
        await started("sleeper")
        began = time.monotonic()
        assert await queue.cancel(id, wait=True)
        assert time.monotonic() - began <= 1.0
        assert bodies.SEEN[1].startswith("sleeper stopped by Cancelled")
        assert bodies.SEEN[2:] == ["sleeper cleaned up"]
        row = await queue.get(id)
        assert (row.state, row.error and row.error.message) == ("killed", "cancelled while running")
        with pytest.raises(dls.InvocationKilled):
            await queue.result(id)
        assert not await queue.cancel(id)
        await goes_on(queue)


async def test_a_left_call_is_cancelled(queue: dls.Queue) -> None:
    async with running_worker(queue):
        async with anyio.create_task_group() as group:
            group.start_soon(queue.call, dls.thunk(bodies.sleeper))
            await started("sleeper")
            group.cancel_scope.cancel()
        await wait_until(lambda: bodies.SEEN[-1:] == ["sleeper cleaned up"], description="the end of the body")
        await goes_on(queue)


async def test_R38_cancelling_a_generator_runs_its_finally_and_leaves_the_worker(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.steps_until_cancelled, "steps"))
        stream = queue.stream(id)
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        assert await queue.cancel(id, wait=True)
        assert bodies.SEEN == ["steps cleaned up"]
        with pytest.raises(dls.InvocationKilled):
            [value async for value in stream]
        await goes_on(queue)


async def test_R38_a_generator_in_a_thread_stops_at_its_next_yield(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.endless, "endless"))
        stream = queue.stream(id)
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        assert await queue.cancel(id, wait=True)
        await wait_until(lambda: bodies.SEEN == ["endless cleaned up"], description="the end of the generator")
        with pytest.raises(dls.InvocationKilled):
            [value async for value in stream]
        await goes_on(queue)


async def test_R38_a_generator_in_a_thread_that_waits_stops_when_it_yields(queue: dls.Queue) -> None:
    """Its outcome does not wait for that, its slot does. What it yields afterwards is dropped."""
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.blocked_steps, "steps", 5))
        await wait_until(lambda: "steps after 0" in bodies.SEEN, description="the first value")
        assert await queue.cancel(id, wait=True)
        other = await queue.submit(dls.thunk(bodies.double, 1))
        assert "steps cleaned up" not in bodies.SEEN
        bodies.gate("steps").set()
        assert await queue.result(other, timeout=20) == 2
        assert bodies.SEEN == ["steps after 0", "steps cleaned up"]
        frames = [frame async for frame in queue.stream_frames(id)]
        assert [(frame.kind, frame.seq) for frame in frames] == [
            (dls.wire.FrameKind.VALUE, 0),
            (dls.wire.FrameKind.ERROR, 1),
        ]


@pytest.mark.parametrize("how", ["raises", "exits", "groups"])
async def test_R10_cancel_and_an_exception_end_killed_once(queue: dls.Queue, how: str) -> None:
    async with running_worker(queue, retries=3):
        id = await queue.submit(dls.thunk(bodies.stubborn, how))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        assert await queue.cancel(id, wait=True)
        row = await queue.get(id)
        assert (row.state, row.attempt, row.failures) == ("killed", 1, 0)
        await goes_on(queue)


async def test_a_body_that_succeeds_after_its_cancellation_was_asked_for_has_succeeded(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.stubborn, "goes on"))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        assert await queue.cancel(id, wait=True)
        assert await queue.result(id) == "done all the same"
        await goes_on(queue)


async def test_cancelling_a_body_with_tasks_of_its_own(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.in_task_group, 60))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        assert await queue.cancel(id, wait=True)
        assert (await queue.get(id)).state == "killed"
        await goes_on(queue)


@pytest.mark.timing("a cancel must be answered within a second")
async def test_cancelling_a_def_body_is_answered_at_once_and_keeps_its_slot(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=2):
        id = await queue.submit(dls.thunk(bodies.blocked, "stuck"))
        await started("stuck")
        began = time.monotonic()
        assert await queue.cancel(id, wait=True)
        assert time.monotonic() - began <= 1.0
        # One of the two slots is left, so two more such bodies run one after the other.
        pair = [await queue.submit(dls.thunk(bodies.blocked, name)) for name in ("one", "two")]
        await started("one")
        bodies.gate("one").set()
        await started("two")
        assert bodies.SEEN == ["stuck began", "one began", "one ended", "two began"]
        bodies.open_gates()
        assert [await queue.result(one, timeout=20) for one in pair] == ["one", "two"]
        await wait_until(lambda: "stuck ended" in bodies.SEEN, description="the end of the thread")
        assert (await queue.get(id)).state == "killed"  # its late result is dropped


async def test_cancelling_the_only_slot_does_not_end_the_worker(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=1):
        id = await queue.submit(dls.thunk(bodies.blocked, "stuck"))
        await started("stuck")
        assert await queue.cancel(id, wait=True)
        bodies.gate("stuck").set()
        await goes_on(queue)
