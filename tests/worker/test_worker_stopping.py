"""Cancelling, timing out, retrying: what stops a body, what it costs, and what it leaves behind."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from reading import read_into

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Reap
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.worker.outcome import ActiveClaim

if TYPE_CHECKING:
    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = pytest.mark.anyio


async def started(name: str) -> None:
    await wait_until(lambda: f"{name} began" in bodies.SEEN, description=f"the start of {name}")


async def goes_on(queue: dls.Queue) -> None:
    """Where bodies have little time, a machine that stands still may take it from the first of these."""
    for _ in range(4):
        with suppress(dls.InvocationTimedOut):
            assert await queue.call(dls.thunk(bodies.double, 21)) == 42
            return
    assert await queue.call(dls.thunk(bodies.double, 21)) == 42


async def ended(queue: dls.Queue, id: str) -> Row:
    await queue.dispatch.outcome(id, timeout=30)
    return await queue.get(id)


# --- cancelling -----------------------------------------------------------------------------------------------------


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
    """Its outcome does not wait for that; its slot does, and what it yields afterwards goes nowhere."""
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
        # One of two slots is left: two more bodies of a kind run one after the other.
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


# --- timing out -----------------------------------------------------------------------------------------------------


async def timed_out(queue: dls.Queue, id: str, timeout: float) -> None:
    with pytest.raises(dls.InvocationTimedOut) as caught:
        await queue.result(id, timeout=20)
    assert not isinstance(caught.value, TimeoutError)
    assert caught.value.message == f"the body ran longer than this worker's timeout of {timeout} s"
    assert (await queue.get(id)).attempt == 1


async def begun_and_timed_out(queue: dls.Queue, body: Any, timeout: float) -> str:
    """One of these whose time was over when it had begun: a machine that stands still may leave it none."""
    for _ in range(5):
        bodies.forget()
        id = await queue.submit(dls.thunk(body, "late"))
        await timed_out(queue, id, timeout)
        if "late began" in bodies.SEEN:
            return id
    pytest.fail(f"not one in five had begun after {timeout} s")


async def test_timeout_of_an_async_body(queue: dls.Queue) -> None:
    async with running_worker(queue, timeout=0.3, retries=3):
        await begun_and_timed_out(queue, bodies.sleeper, 0.3)
        assert bodies.SEEN[-1] == "late cleaned up"
        await goes_on(queue)


async def test_timeout_of_bodies_that_start_at_different_times(queue: dls.Queue) -> None:
    async with running_worker(queue, timeout=0.5, concurrency=10):
        ids = []
        for number in range(5):
            id = await queue.submit(dls.thunk(bodies.sleeper, f"s{number}"))
            await wait_until(lambda id=id: begun(queue, id), description="the claim")
            ids.append(id)
        for id in ids:
            await timed_out(queue, id, 0.5)
        rows = [await queue.get(id) for id in ids]
        took = [(row.finished_at or 0) - (row.started_at or 0) for row in rows]
        assert all(0.45 < seconds < 30 for seconds in took), took


async def begun(queue: dls.Queue, id: str) -> bool:
    return (await queue.get(id)).attempt == 1


async def test_timeout_of_a_generator(queue: dls.Queue) -> None:
    async with running_worker(queue, timeout=0.4):
        for body in (bodies.steps_until_cancelled, bodies.endless):
            got: list[Any] = []
            for _ in range(5):  # a machine that stands still may leave it no time to begin
                with pytest.raises(dls.InvocationTimedOut):
                    await read_into(got, queue.stream(await queue.submit(dls.thunk(body, body.__name__))))
                if got:
                    break
            await wait_until(lambda name=body.__name__: f"{name} cleaned up" in bodies.SEEN, description="the end")
        await goes_on(queue)


async def test_R82_a_def_body_times_out_at_once_and_its_slot_stays_taken(queue: dls.Queue) -> None:
    async with running_worker(queue, timeout=0.3, concurrency=2, grace=60):
        id = await begun_and_timed_out(queue, bodies.blocked, 0.3)
        assert "late ended" not in bodies.SEEN
        await goes_on(queue)  # in the other slot
        bodies.gate("late").set()
        await wait_until(lambda: "late ended" in bodies.SEEN, description="the end of the thread")
        assert (await queue.get(id)).state == "timeout"


async def test_R82_a_worker_whose_slots_are_all_stuck_raises(queue: dls.Queue) -> None:
    ids = [await queue.submit(dls.thunk(bodies.blocked, f"b{number}")) for number in range(8)]
    with pytest.raises(
        dls.DispatchError, match=r"every slot of worker .* is held by a body in a thread that was cancel"
    ):
        await dls.run_worker(queue, timeout=0.3, concurrency=2, grace=0.5)
    # One whose time was over before its thread had begun holds no slot.
    late = [id for id in ids if (await queue.get(id)).state != "queued"]
    assert len(bodies.SEEN) == 2 <= len(late) < 8
    for id in late:
        await timed_out(queue, id, 0.3)
    assert late == ids[: len(late)]
    bodies.open_gates()


async def test_R82_once_does_not_wait_for_ever_for_a_stuck_thread(queue: dls.Queue) -> None:
    ids: list[str] = []

    async def works() -> None:
        for _ in range(5):  # one whose time was over before its thread had begun holds no slot
            ids.append(await queue.submit(dls.thunk(bodies.blocked, "stuck")))
            await dls.run_worker(queue, timeout=0.2, concurrency=4, grace=0.3, once=True)

    with pytest.raises(dls.DispatchError, match="every slot"):
        await works()
    await timed_out(queue, ids[-1], 0.2)
    bodies.open_gates()


async def test_a_timeout_during_the_delivery_changes_nothing(queue: dls.Queue, monkeypatch: Any) -> None:
    """The outcome is decided; the clock of the worker must neither stop it nor spin meanwhile."""
    deliver, entered, go = ActiveClaim.deliver, anyio.Event(), anyio.Event()

    async def slow(self: ActiveClaim, *args: Any) -> Any:
        entered.set()
        await go.wait()
        return await deliver(self, *args)

    monkeypatch.setattr(ActiveClaim, "deliver", slow)
    async with running_worker(queue, timeout=4.0):
        id = await queue.submit(dls.thunk(bodies.adouble, 4))
        await entered.wait()
        cpu, began = time.process_time(), time.monotonic()
        await anyio.sleep(5.0)
        assert time.process_time() - cpu < 0.5 * (time.monotonic() - began)
        go.set()
        assert await queue.result(id, timeout=20) == 8


# --- retrying -------------------------------------------------------------------------------------------------------


async def test_retries_wait_longer_each_time_and_end_with_the_last_error(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=2):
        id = await queue.submit(dls.thunk(bodies.fail_times, "f", 9))
        with pytest.raises(OSError, match="failure 3"):
            await queue.result(id, timeout=20)
    row = await queue.get(id)
    assert (row.attempt, row.failures, row.lost) == (3, 2, 0)
    first, second = (later - before for before, later in pairwise(bodies.BEGAN))
    assert first >= 0.35
    assert second >= 0.7  # 0.5 and 1 s, give or take a quarter


async def test_R45_a_failure_before_the_success_is_not_seen(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=3):
        assert await queue.call(dls.thunk(bodies.fail_times, "f", 1)) == 2


@pytest.mark.parametrize("kind", ["exit", "interrupt"])
async def test_leaving_the_interpreter_is_retried_like_any_exception(queue: dls.Queue, kind: str) -> None:
    async with running_worker(queue, retries=1):
        row = await ended(queue, await queue.submit(dls.thunk(bodies.fail, kind)))
    assert (row.state, row.attempt, row.failures) == ("failed", 2, 1)


async def test_a_retry_that_waits_blocks_nobody(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=5):
        id = await queue.submit(dls.thunk(bodies.fail_times, "f", 5))
        await wait_until(lambda: bodies.SEEN, description="the first attempt")
        await goes_on(queue)
        assert await queue.cancel(id, wait=True)
        assert (await queue.get(id)).state == "killed"


async def test_R86_a_drain_costs_no_budget(queue: dls.Queue) -> None:
    """Neither that of the failures nor that of the losses, also when the body turns its cancellation into an error."""
    ids = [await queue.submit(dls.thunk(bodies.sleeper)), await queue.submit(dls.thunk(bodies.stubborn, "raises"))]
    for number in range(1, 4):
        stop = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda stop=stop: dls.run_worker(queue, concurrency=2, retries=1, grace=0.1, stop=stop))
            await wait_until(
                lambda n=number: [bodies.SEEN.count(name) for name in ("sleeper began", "began")] == [n, n],
                description="the start of both bodies",
            )
            stop.set()
        for id in ids:
            row = await queue.get(id)
            assert (row.state, row.attempt, row.failures, row.lost) == ("queued", number, 0, 0)


async def test_R86_failures_and_losses_are_counted_apart(queue: dls.Queue) -> None:
    """A row that was lost before has all its retries, and the other way round."""
    plane = queue.dispatch
    id = await queue.submit(dls.thunk(bodies.fail_times, "f", 2))

    async def reaped() -> bool:
        # This process lives, so its own claims would get ten leases: the reaper is told that nobody holds them.
        return bool((await plane.do(Reap(alive=()))).rows)

    for lost in (1, 2):
        assert await plane.claim(["q"], f"dead{lost}", lease=0.05)
        await wait_until(reaped, description="the end of a lease")
        row = await queue.get(id)
        assert (row.state, row.lost, row.failures) == ("queued", lost, 0)
    async with running_worker(queue, retries=2, max_lost=3):
        assert await queue.result(id, timeout=30) == 3
    row = await queue.get(id)
    assert (row.lost, row.failures, row.attempt) == (2, 2, 5)
