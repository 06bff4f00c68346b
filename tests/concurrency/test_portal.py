"""Calls from other loops to the portal's."""

from __future__ import annotations

import random
import threading
from contextvars import ContextVar

import anyio
import pytest
from helpers import wait_until

from dreamlake.lakeshore.concurrency import portal as _portal
from dreamlake.lakeshore.concurrency.loops import run_sync_soon
from dreamlake.lakeshore.concurrency.portal import Home, across, on_portal, portal
from dreamlake.lakeshore.errors import PlaneUnavailable

pytestmark = pytest.mark.anyio
GONE = "the event loop that this package keeps in the thread 'lakeshore-portal' ended before the answer came"
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
colour: ContextVar[str] = ContextVar("colour", default="none")


class Boom(BaseException): ...


async def thread_here() -> str:
    return threading.current_thread().name


@pytest.mark.parametrize("home", ["asyncio", "portal"])
async def test_across_runs_where_the_driver_lives(home: Home, anyio_backend_name: str) -> None:
    here = threading.current_thread().name
    at_home = here if (home, anyio_backend_name) == ("asyncio", "asyncio") else "lakeshore-portal"
    assert await across(home, thread_here) == at_home


async def test_across_from_the_portal_stays_there() -> None:
    assert not on_portal()

    async def there() -> tuple[bool, str]:
        return on_portal(), await across("portal", thread_here)

    assert await across("portal", there) == (True, "lakeshore-portal")


async def test_across_passes_arguments_context_and_errors() -> None:
    async def there(one: int, two: int) -> tuple[int, str]:
        if one == two:
            raise RuntimeError("its own")
        return one - two, colour.get()

    colour.set("red")
    assert await across("portal", there, 5, 3) == (2, "red")
    with pytest.raises(RuntimeError, match=r"^its own$") as caught:
        await across("portal", there, 1, 1)
    assert not isinstance(caught.value, PlaneUnavailable)


async def test_across_cancels_the_far_side_and_waits_for_its_end() -> None:
    begun, ended = threading.Event(), threading.Event()

    async def there() -> None:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.02)
                ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(across, "portal", there)
        await wait_until(begun.is_set)
        group.cancel_scope.cancel()
    assert ended.is_set()


async def test_a_storm_of_cancelled_crossings_leaves_nothing_running() -> None:
    dice, running, counts = random.Random(1), [0], {"begun": 0, "ended": 0}

    async def there() -> None:
        counts["begun"] += 1
        running[0] += 1
        try:
            for _ in range(dice.randrange(4)):
                await anyio.sleep(0.001)
        finally:
            running[0] -= 1
            counts["ended"] += 1

    async def caller() -> None:
        with anyio.move_on_after(dice.random() * 0.01):
            await across("portal", there)

    threads = threading.active_count()
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(caller)
    assert running == [0]
    assert counts["begun"] == counts["ended"] > 0
    assert threading.active_count() <= threads + 1  # the portal's, if it is new
    assert await across("portal", thread_here) == "lakeshore-portal"


async def test_a_portal_that_dies_is_unavailable_and_the_next_call_starts_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, waiting = portal(), threading.Event()

    async def wait() -> None:
        waiting.set()
        await anyio.sleep_forever()

    async def die() -> None:
        raise Boom

    async def bystander() -> None:
        with pytest.raises(PlaneUnavailable) as caught:
            await across("portal", wait)
        assert str(caught.value) == GONE

    thread = _portal.running_portal().thread
    async with anyio.create_task_group() as group:
        group.start_soon(bystander)
        await wait_until(waiting.is_set)
        with pytest.raises(Boom):
            await across("portal", die)
    await wait_until(lambda: not thread.is_alive())
    assert "the portal's event loop ended with an error" in caplog.text
    assert await across("portal", thread_here) == "lakeshore-portal"
    assert portal() is not before


async def test_a_portal_that_is_closed_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = _portal._Portal()
    run_sync_soon(closed.token, closed.stop.set)
    await wait_until(lambda: not closed.thread.is_alive())
    monkeypatch.setattr(_portal, "portal", lambda: closed.portal)
    with pytest.raises(PlaneUnavailable) as caught:
        await across("portal", thread_here)
    assert str(caught.value) == GONE
