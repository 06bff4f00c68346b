"""Event loops: crossing between them, and tasks and callbacks of their own."""

from __future__ import annotations

import random
import threading
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from helpers import wait_until

from dreamlake.lakeshore.concurrency import loops as _loops
from dreamlake.lakeshore.concurrency import portal as _portal
from dreamlake.lakeshore.errors import PlaneUnavailable

pytestmark = pytest.mark.anyio
GONE = "the event loop that this package keeps in the thread 'lakeshore-portal' ended before the answer came"
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
colour: ContextVar[str] = ContextVar("colour", default="none")


class Boom(BaseException): ...


async def thread_here() -> str:
    return threading.current_thread().name


# across


@pytest.mark.parametrize("home", ["asyncio", "portal"])
async def test_across_runs_where_the_driver_lives(home: _loops.Home, anyio_backend_name: str) -> None:
    here = threading.current_thread().name
    at_home = here if (home, anyio_backend_name) == ("asyncio", "asyncio") else "lakeshore-portal"
    assert await _loops.across(home, thread_here) == at_home


async def test_across_from_the_portal_stays_there() -> None:
    assert not _loops.on_portal()

    async def there() -> tuple[bool, str]:
        return _loops.on_portal(), await _loops.across("portal", thread_here)

    assert await _loops.across("portal", there) == (True, "lakeshore-portal")


async def test_across_passes_arguments_context_and_errors() -> None:
    async def there(one: int, two: int) -> tuple[int, str]:
        if one == two:
            raise RuntimeError("its own")
        return one - two, colour.get()

    colour.set("red")
    assert await _loops.across("portal", there, 5, 3) == (2, "red")
    with pytest.raises(RuntimeError, match=r"^its own$") as caught:
        await _loops.across("portal", there, 1, 1)
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
        group.start_soon(_loops.across, "portal", there)
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
            await _loops.across("portal", there)

    threads = threading.active_count()
    async with anyio.create_task_group() as group:
        for _ in range(1000):
            group.start_soon(caller)
    assert running == [0]
    assert counts["begun"] == counts["ended"] > 0
    assert threading.active_count() <= threads + 1  # the portal's, if it is new
    assert await _loops.across("portal", thread_here) == "lakeshore-portal"


async def test_a_portal_that_dies_is_unavailable_and_the_next_call_starts_another(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before, waiting = _loops.portal(), threading.Event()

    async def wait() -> None:
        waiting.set()
        await anyio.sleep_forever()

    async def die() -> None:
        raise Boom

    async def bystander() -> None:
        with pytest.raises(PlaneUnavailable) as caught:
            await _loops.across("portal", wait)
        assert str(caught.value) == GONE

    thread = _portal.running_portal().thread
    async with anyio.create_task_group() as group:
        group.start_soon(bystander)
        await wait_until(waiting.is_set)
        with pytest.raises(Boom):
            await _loops.across("portal", die)
    await wait_until(lambda: not thread.is_alive())
    assert "the portal's event loop ended with an error" in caplog.text
    assert await _loops.across("portal", thread_here) == "lakeshore-portal"
    assert _loops.portal() is not before


async def test_a_portal_that_is_closed_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = _portal._Portal()
    _portal.run_sync_soon(closed.token, closed.stop.set)
    await wait_until(lambda: not closed.thread.is_alive())
    monkeypatch.setattr(_loops, "portal", lambda: closed.portal)
    with pytest.raises(PlaneUnavailable) as caught:
        await _loops.across("portal", thread_here)
    assert str(caught.value) == GONE


# spawn and run_sync_soon


async def test_spawn_belongs_to_no_caller() -> None:
    seen: list[str] = []
    release, ended = anyio.Event(), anyio.Event()

    async def task() -> None:
        await release.wait()
        seen.append(colour.get())

    colour.set("blue")
    with anyio.CancelScope() as scope:
        _loops.spawn(task, ended.set)
        scope.cancel()
        with pytest.raises(anyio.get_cancelled_exc_class()):
            await checkpoint()
    release.set()
    await ended.wait()
    assert seen == ["none"]


async def test_spawn_logs_what_its_task_raises(caplog: pytest.LogCaptureFixture) -> None:
    async def task() -> None:
        raise ValueError("from the task")

    ended = anyio.Event()
    _loops.spawn(task, ended.set)
    await ended.wait()
    assert "a background task failed" in caplog.text
    assert "ValueError: from the task" in caplog.text


@both_loops
def test_spawn_ends_also_when_the_loop_ends_before_its_first_step(backend: str) -> None:
    ended: list[int] = []

    async def task() -> None:
        await anyio.sleep_forever()

    async def main() -> None:
        for number in range(3):
            _loops.spawn(task, lambda number=number: ended.append(number))

    anyio.run(main, backend=backend)
    assert sorted(ended) == [0, 1, 2]


@both_loops
def test_spawn_ends_also_when_the_loop_takes_no_more_tasks(backend: str) -> None:
    ended: list[str] = []

    async def task() -> None: ...

    async def resource() -> Any:
        try:
            yield
        finally:
            _loops.spawn(task, lambda: ended.append("ended"))
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)

    async def main() -> None:
        keep.append(resource())
        await anext(keep[0])

    keep: list[Any] = []
    anyio.run(main, backend=backend)
    assert ended == ["ended"]


async def test_run_sync_soon_from_a_thread_has_the_context_of_the_loop() -> None:
    token, made, told = _loops.loop_token(), list[anyio.Event](), anyio.Event()

    def callback() -> None:
        made.append(anyio.Event())  # needs to know which loop this is
        told.set()

    done = list[bool]()
    thread = threading.Thread(target=lambda: done.append(_loops.run_sync_soon(token, callback)))
    thread.start()
    await told.wait()
    thread.join()
    assert done == [True]
    assert len(made) == 1


async def test_run_sync_soon_logs_what_its_callback_raises(caplog: pytest.LogCaptureFixture) -> None:
    def callback() -> None:
        raise ValueError("from the callback")

    assert _loops.run_sync_soon(_loops.loop_token(), callback)
    await wait_until(lambda: "ValueError: from the callback" in caplog.text)


@both_loops
def test_run_sync_soon_says_when_the_loop_has_ended(backend: str) -> None:
    async def main() -> Any:
        return _loops.loop_token()

    assert _loops.run_sync_soon(anyio.run(main, backend=backend), print) is False


def test_on_daemon_thread_makes_daemons() -> None:
    thread = _loops.on_daemon_thread(lambda: threading.Thread(target=print))
    assert thread.daemon
    with pytest.raises(ZeroDivisionError):
        _loops.on_daemon_thread(lambda: 1 // 0)
