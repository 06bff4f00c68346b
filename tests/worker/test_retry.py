"""Which attempts are repeated, and after which delay."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from worker_kit import ended, goes_on

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.body.execute import BodyOutcome
from dreamlake.lakeshore.planes.contract.operations import Claimed, Reap
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.worker.retry import retry_delay
from dreamlake.lakeshore.worker.settings import WorkerSettings

pytestmark = pytest.mark.anyio


async def test_retries_wait_longer_each_time_and_end_with_the_last_error(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=2):
        id = await queue.submit(dls.thunk(bodies.fail_times, "f", 9))
        with pytest.raises(OSError, match="failure 3"):
            await queue.result(id, timeout=20)
    row = await queue.get(id)
    assert (row.attempt, row.failures, row.lost) == (3, 2, 0)
    first, second = (later - before for before, later in pairwise(bodies.BEGAN))
    assert first >= 0.35
    assert second >= 0.7  # 0.5 s and 1 s, each up to a quarter shorter or longer


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
    """Neither failures nor losses are counted, also when the body turns its cancellation into an error."""
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
    """An invocation that was lost before still has all its retries, and one that failed can still be lost as often."""
    plane = queue.dispatch
    id = await queue.submit(dls.thunk(bodies.fail_times, "f", 2))

    async def reaped() -> bool:
        # This process lives, so its claims would get ten leases. `alive=()` makes the reaper believe that it is dead.
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


@pytest.mark.parametrize(
    ("state", "failures", "lost", "final", "bounds"),
    [
        ("failed", 0, 0, False, (0.375, 0.625)),
        ("failed", 1, 0, False, (0.75, 1.25)),
        ("failed", 1, 4, False, (0.75, 1.25)),  # losses use up no retries
        ("failed", 2, 0, False, None),
        ("failed", 0, 0, True, None),
        ("lost", 2, 0, False, (1.5, 2.5)),  # lost with its machine: `max_lost` counts, too
        ("lost", 2, 2, False, None),
    ],
)
def test_the_delay_before_a_retry(
    state: str, failures: int, lost: int, final: bool, bounds: tuple[float, float] | None
) -> None:
    settings = WorkerSettings(concurrency=1, retries=2, timeout=None, lease=30.0, max_lost=5, grace=1.0)
    claimed = Claimed("a", "q", b"", 1, failures, lost, 0, True, None, None, None)
    delay = retry_delay(claimed, BodyOutcome(state, None, Failure("E", "m"), final), settings)
    if bounds is None:
        assert delay is None
    else:
        assert delay is not None
        assert bounds[0] <= delay <= bounds[1]


def test_the_delay_before_a_retry_has_a_limit() -> None:
    settings = WorkerSettings(concurrency=1, retries=10_000, timeout=None, lease=30.0, max_lost=5, grace=1.0)
    claimed = Claimed("a", "q", b"", 1, 5000, 0, 0, True, None, None, None)
    delay = retry_delay(claimed, BodyOutcome("failed", None, Failure("E", "m")), settings)
    assert delay is not None
    assert 45.0 <= delay <= 75.0
