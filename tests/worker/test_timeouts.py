"""The timeout of a body."""

from __future__ import annotations

import time
from typing import Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from reading import read_into
from worker_kit import goes_on

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.worker.outcome import ActiveClaim

pytestmark = pytest.mark.anyio


async def timed_out(queue: dls.Queue, id: str, timeout: float) -> None:
    with pytest.raises(dls.InvocationTimedOut) as caught:
        await queue.result(id, timeout=20)
    assert not isinstance(caught.value, TimeoutError)
    assert caught.value.message == f"the body ran longer than this worker's timeout of {timeout} s"
    assert (await queue.get(id)).attempt == 1


async def begun_and_timed_out(queue: dls.Queue, body: Any, timeout: float) -> str:
    """Run the body until one has begun before its timeout. On a machine that stalls, the time may be over before."""
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
            for _ in range(5):  # on a machine that stalls, its time may be over before it begins
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
    # A body whose time was over before its thread began holds no slot.
    late = [id for id in ids if (await queue.get(id)).state != "queued"]
    assert len(bodies.SEEN) == 2 <= len(late) < 8
    for id in late:
        await timed_out(queue, id, 0.3)
    assert late == ids[: len(late)]
    bodies.open_gates()


async def test_R82_once_does_not_wait_for_ever_for_a_stuck_thread(queue: dls.Queue) -> None:
    ids: list[str] = []

    async def works() -> None:
        for _ in range(5):  # a body whose time was over before its thread began holds no slot
            ids.append(await queue.submit(dls.thunk(bodies.blocked, "stuck")))
            await dls.run_worker(queue, timeout=0.2, concurrency=4, grace=0.3, once=True)

    with pytest.raises(dls.DispatchError, match="every slot"):
        await works()
    await timed_out(queue, ids[-1], 0.2)
    bodies.open_gates()


async def test_a_timeout_during_the_delivery_changes_nothing(queue: dls.Queue, monkeypatch: Any) -> None:
    """The outcome is decided: the timeout must not interrupt its delivery, and must not use the CPU meanwhile."""
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
