"""Growing pauses between attempts."""

from __future__ import annotations

import threading

import anyio
import pytest
from helpers import wait_until

from dreamlake.lakeshore.concurrency.backoff import Backoff

pytestmark = pytest.mark.anyio


def test_delays_grow_by_the_factor_up_to_the_cap() -> None:
    backoff = Backoff(0.5, 3.0, jitter=0)
    assert [backoff.next_delay() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert backoff.failures == 5
    slow = Backoff(1.0, 2.0, factor=1.5, jitter=0)
    assert [slow.next_delay() for _ in range(3)] == [1.0, 1.5, 2.0]


def test_reset_starts_with_the_first_delay_again() -> None:
    backoff = Backoff(0.5, 3.0, jitter=0)
    backoff.next_delay()
    backoff.next_delay()
    backoff.reset()
    assert backoff.failures == 0
    assert backoff.next_delay() == 0.5


def test_jitter_makes_a_delay_longer_or_shorter_by_its_share() -> None:
    backoff = Backoff(1.0, 1.0, jitter=0.25)
    delays = [backoff.next_delay() for _ in range(200)]
    assert all(0.75 <= delay <= 1.25 for delay in delays)
    assert min(delays) < 0.9 < 1.1 < max(delays)


def test_a_delay_after_some_failures_takes_no_pause() -> None:
    backoff = Backoff(0.5, 60.0, jitter=0)
    assert [backoff.delay_after(failures) for failures in (0, 1, 7, 2**40)] == [0.5, 1.0, 60.0, 60.0]
    assert backoff.failures == 0


async def test_pause_sleeps_for_the_next_delay() -> None:
    backoff = Backoff(0.02, 1.0, jitter=0)
    begin = anyio.current_time()
    await backoff.pause()
    await backoff.pause()
    assert anyio.current_time() - begin >= 0.05  # 0.02 and 0.04, less what a timer may be early
    assert backoff.failures == 2
    await backoff.pause(0.0)
    assert backoff.failures == 2


async def test_wake_ends_every_pause_from_any_thread() -> None:
    backoff = Backoff(600.0, 600.0)
    pausing = 0

    async def pause() -> None:
        nonlocal pausing
        pausing += 1
        await backoff.pause()

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(pause)
            group.start_soon(pause)
            await wait_until(lambda: pausing == 2)
            thread = threading.Thread(target=backoff.wake)
            thread.start()
            thread.join()
    assert not backoff._wake_ups


async def test_wake_does_not_shorten_a_later_pause() -> None:
    backoff = Backoff(600.0, 600.0)
    backoff.wake()
    with anyio.move_on_after(0.02) as scope:
        await backoff.pause()
    assert scope.cancelled_caught
    assert not backoff._wake_ups
