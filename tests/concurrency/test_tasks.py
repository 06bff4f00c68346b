"""Tasks that belong to no caller."""

from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from helpers import wait_until

from dreamlake.lakeshore.concurrency.tasks import run_to_end, spawn
from dreamlake.lakeshore.errors import PlaneUnavailable

pytestmark = pytest.mark.anyio
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
colour: ContextVar[str] = ContextVar("colour", default="none")


# spawn


async def test_spawn_belongs_to_no_caller() -> None:
    seen: list[str] = []
    release, ended = anyio.Event(), anyio.Event()

    async def task() -> None:
        await release.wait()
        seen.append(colour.get())

    colour.set("blue")
    with anyio.CancelScope() as scope:
        spawn(task, ended.set)
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
    spawn(task, ended.set)
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
            spawn(task, lambda number=number: ended.append(number))

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
            spawn(task, lambda: ended.append("ended"))
            with anyio.CancelScope(shield=True):
                await anyio.sleep(0.01)

    async def main() -> None:
        keep.append(resource())
        await anext(keep[0])

    keep: list[Any] = []
    anyio.run(main, backend=backend)
    assert ended == ["ended"]


# run_to_end


class Work:
    """A coroutine function that waits for `release`, and records its end."""

    def __init__(self) -> None:
        self.release = anyio.Event()
        self.begun = False
        self.ended = False

    async def __call__(self, value: int = 1) -> int:
        self.begun = True
        await self.release.wait()
        self.ended = True
        if value < 0:
            raise ValueError(value)
        return value * 2


@pytest.mark.parametrize("may_leave", [False, True])
async def test_run_to_end_returns_and_raises_what_the_function_does(may_leave: bool) -> None:
    work = Work()
    work.release.set()
    assert await run_to_end(work, 4, may_leave=may_leave) == 8
    with pytest.raises(ValueError, match=r"^-1$"):
        await run_to_end(work, -1, may_leave=may_leave)


async def test_run_to_end_passes_on_what_is_no_exception() -> None:
    async def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as caught:
        await run_to_end(leave)
    assert caught.value.code == 3


async def test_run_to_end_sees_no_context_of_its_caller() -> None:
    async def see() -> str:
        return colour.get()

    colour.set("blue")
    assert await run_to_end(see) == "none"


async def test_a_cancelled_caller_of_run_to_end_waits_for_the_end() -> None:
    work, results = Work(), list[int]()

    async def caller() -> None:
        results.append(await run_to_end(work))
        await checkpoint()
        results.append(-1)

    async with anyio.create_task_group() as group:
        group.start_soon(caller)
        await wait_until(lambda: work.begun)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            await anyio.sleep(0.02)
            assert not work.ended
            work.release.set()
    assert work.ended
    assert results == [2]


async def test_a_caller_of_run_to_end_that_may_leave_is_cancelled_at_once_and_the_work_goes_on() -> None:
    work = Work()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(run_to_end, work, may_leave=True))
        await wait_until(lambda: work.begun)
        group.cancel_scope.cancel()
    assert not work.ended
    work.release.set()
    await wait_until(lambda: work.ended)


def test_asyncios_own_cancellation_of_run_to_end_is_raised_after_the_end() -> None:
    async def main() -> None:
        work = Work()
        caller = asyncio.ensure_future(run_to_end(work))
        await wait_until(lambda: work.begun)
        for _ in range(3):
            caller.cancel()
            await asyncio.sleep(0.01)
        assert not caller.done()
        work.release.set()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert work.ended

    asyncio.run(main())


@pytest.mark.parametrize("may_leave", [False, True])
def test_run_to_end_raises_when_the_loop_takes_no_more_tasks(may_leave: bool) -> None:
    errors: list[str] = []

    async def resource() -> Any:
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                try:
                    await run_to_end(Work(), may_leave=may_leave)
                except PlaneUnavailable as exc:
                    errors.append(str(exc))

    async def main() -> None:
        keep.append(resource())
        await anext(keep[0])

    keep: list[Any] = []
    anyio.run(main, backend="trio")  # when trio closes its generators it starts no tasks any more
    assert errors == ["the event loop ended before this operation was done; it can be repeated"]
