"""In which order a worker claims invocations, how many run at the same time, and what each body sees."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from worker_kit import all_ended

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Reap
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


# --- order -----------------------------------------------------------------------------------------------------------


async def test_R16_one_worker_keeps_the_order(queue: dls.Queue) -> None:
    ids = await queue.submit_many([dls.thunk(bodies.note, number) for number in range(50)])
    async with running_worker(queue):
        await all_ended(queue, ids)
    assert bodies.SEEN == list(range(50))


@pytest.mark.timing("a free worker must take the job within a second")
async def test_R16_an_idle_worker_takes_what_a_busy_one_has_no_slot_for(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=1):
        await queue.submit(dls.thunk(bodies.blocked, "long"))
        await wait_until(lambda: bodies.SEEN, description="the start of the long body")
        async with running_worker(queue, concurrency=1):
            began = time.monotonic()
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2
            assert time.monotonic() - began <= 1.0
            assert bodies.SEEN == ["long began"]
            bodies.open_gates()


async def test_R99_the_highest_priority_is_next(queue: dls.Queue) -> None:
    ids = await queue.submit_many([dls.thunk(bodies.blocked, "first")])
    async with running_worker(queue):
        await wait_until(lambda: bodies.SEEN, description="the first body")
        ids += await queue.submit_many([dls.thunk(bodies.note, "low")] * 1000)
        ids.append(await queue.submit(dls.thunk(bodies.note, "high"), priority=1))
        bodies.open_gates()
        await all_ended(queue, ids)
    assert bodies.SEEN[:4] == ["first began", "first ended", "high", "low"]


async def test_R99_several_queues_are_one_order(plane: dls.Dispatch) -> None:
    one, two, other = (dls.Queue(name, dispatch=plane) for name in ("one", "two", "other"))
    for number, (queue, priority) in enumerate([(one, 0), (two, 0), (two, 5), (one, 9), (other, 99), (one, 5)]):
        await queue.submit(dls.thunk(bodies.note, number), priority=priority)
    async with running_worker([two, one]):
        await wait_until(lambda: len(bodies.SEEN) == 5, description="five bodies")
    assert bodies.SEEN == [3, 2, 5, 0, 1]
    assert await other.count() == 1


# --- concurrency -----------------------------------------------------------------------------------------------------


async def test_a_hundred_def_bodies_run_at_once(queue: dls.Queue) -> None:
    """anyio's own limit is forty threads."""
    ids = await queue.submit_many([dls.thunk(bodies.meet, 100)] * 100)
    async with running_worker(queue, concurrency=100):
        assert [await queue.result(id, timeout=60) for id in ids] == [True] * 100


async def test_no_more_bodies_run_than_there_are_slots(queue: dls.Queue) -> None:
    ids = await queue.submit_many([dls.thunk(bodies.acrowd)] * 20 + [dls.thunk(bodies.crowd)] * 20)
    async with running_worker(queue, concurrency=4):
        assert max([await queue.result(id, timeout=60) for id in ids]) <= 4
        four = await queue.submit_many([dls.thunk(bodies.meet, 4)] * 4)
        assert [await queue.result(id, timeout=60) for id in four] == [True] * 4


async def test_R88_sixty_four_waiters_and_a_worker_in_one_loop(queue: dls.Queue) -> None:
    got: list[int] = []

    async def wait(n: int) -> None:
        got.append(await queue.call(dls.thunk(bodies.double if n % 2 else bodies.adouble, n)))

    async with running_worker(queue, concurrency=4), anyio.create_task_group() as group:
        for n in range(64):
            group.start_soon(wait, n)
    assert sorted(got) == [2 * n for n in range(64)]


async def test_R89_bodies_see_the_context_and_leave_nothing_in_it(queue: dls.Queue, tmp_path: Path) -> None:
    token = bodies.TENANT.set("acme")
    try:
        async with running_worker(queue, root=tmp_path):
            for body in (bodies.context, bodies.acontext, bodies.gen_context, bodies.agen_context):
                call = dls.thunk(body)
                with dls.scope("runs"):
                    first, second = await queue.submit(call), await queue.submit(call)
                for id in (first, second):
                    if body in (bodies.context, bodies.acontext):
                        found = await queue.result(id, timeout=20)
                    else:
                        [found] = [value async for value in queue.stream(id)]
                    assert found == ["acme", "runs", id, 1]
            assert await queue.call(dls.thunk(bodies.leave_scope_open)) == "left/open"
            id = await queue.submit(dls.thunk(bodies.acontext))
            assert await queue.result(id, timeout=20) == ["acme", "", id, 1]
            bodies.forget()
    finally:
        bodies.TENANT.reset(token)
    assert bodies.TENANT.get() == "nobody"
    assert dls.run.prefix == ""


async def test_a_row_lost_twice_runs_alone(queue: dls.Queue) -> None:
    """It may be what kills its process: no other body starts beside it, and the others lose no attempt."""
    suspect = await queue.submit(dls.thunk(bodies.blocked, "suspect"), priority=5)

    async def reaped() -> bool:
        return bool((await queue.dispatch.do(Reap(alive=()))).rows)

    for _ in range(2):
        assert await queue.dispatch.claim(["q"], "dead", lease=0.01)
        await wait_until(reaped, description="the end of a lease")
    others = [await queue.submit(dls.thunk(bodies.note, n)) for n in range(6)]
    async with running_worker(queue, concurrency=4):
        await wait_until(lambda: bodies.SEEN, description="the first body")
        # What was claimed together with it went back to the queue, and stays there.
        await wait_until(lambda: all_queued(queue, others), description="the others to be given back")
        assert bodies.SEEN == ["suspect began"]
        bodies.open_gates()
        await all_ended(queue, [suspect, *others])
    assert bodies.SEEN[:2] == ["suspect began", "suspect ended"]
    assert sorted(bodies.SEEN[2:]) == list(range(6))
    assert [(row.failures, row.lost) for row in [await queue.get(id) for id in others]] == [(0, 0)] * 6


async def all_queued(queue: dls.Queue, ids: list[str]) -> bool:
    return all([(await queue.get(id)).state == "queued" for id in ids])


async def test_a_row_lost_twice_waits_for_those_that_run(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=2):
        first = await queue.submit(dls.thunk(bodies.blocked, "first"))
        await wait_until(lambda: bodies.SEEN, description="the first body")
        suspect = await lost_twice(queue, dls.thunk(bodies.note, "suspect"))
        await wait_until(lambda: seen_and_given_back(queue, suspect), description="the suspect to be given back")
        assert bodies.SEEN == ["first began"]
        bodies.open_gates()
        await all_ended(queue, [first, suspect])
    assert bodies.SEEN == ["first began", "first ended", "suspect"]


async def lost_twice(queue: dls.Queue, thunk: dls.Thunk[Any]) -> str:
    """Submit an invocation that is lost twice in another queue before the worker of this queue sees it."""
    hidden = dls.Queue("hidden", dispatch=queue.dispatch)
    id = await hidden.submit(thunk)

    async def reaped() -> bool:
        return bool((await queue.dispatch.do(Reap(alive=()))).rows)

    for _ in range(2):
        assert await queue.dispatch.claim(["hidden"], "dead", lease=0.01)
        await wait_until(reaped, description="the end of a lease")
    await move(queue.dispatch, id, "q")
    return id


async def move(plane: Any, id: str, queue: str) -> None:
    """Change the row in the file, since the plane has no method for that."""
    import sqlite3

    connection = sqlite3.connect(plane.path, isolation_level=None, timeout=20)
    connection.execute("UPDATE invocation SET queue = ? WHERE id = ?", (queue, id))
    connection.close()


async def seen_and_given_back(queue: dls.Queue, id: str) -> bool:
    row = await queue.get(id)
    return row.attempt >= 3 and row.state == "queued"
