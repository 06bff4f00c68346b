"""Blocking callers: where their call runs, and where it warns or refuses."""

from __future__ import annotations

import asyncio
import threading
import warnings
from contextvars import ContextVar
from functools import partial
from typing import Any

import anyio
import pytest
from helpers import wait_until, wait_until_sync

from dreamlake.lakeshore.concurrency import portal as _portal
from dreamlake.lakeshore.concurrency import run_sync as _run_sync
from dreamlake.lakeshore.concurrency.loops import loop_token
from dreamlake.lakeshore.concurrency.portal import portal
from dreamlake.lakeshore.concurrency.run_sync import run_sync, worker_runs_here
from dreamlake.lakeshore.errors import DispatchError, PlaneUnavailable

anyio_test = pytest.mark.anyio
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
colour: ContextVar[str] = ContextVar("colour", default="none")
HINT = "await q.result(...)"


async def double(number: int) -> int:
    await anyio.sleep(0.001)
    if number < 0:
        raise ValueError("negative")
    return number * 2


async def where() -> tuple[str, Any]:
    return threading.current_thread().name, loop_token()


# Plain threads


def test_a_plain_thread_runs_on_the_portal() -> None:
    assert run_sync(double, 4, hint=HINT) == 8
    with pytest.raises(ValueError, match=r"^negative$"):
        run_sync(double, -1, hint=HINT)
    assert run_sync(where, hint=HINT)[0] == "lakeshore-portal"


def test_context_variables_flow_in() -> None:
    async def see() -> str:
        return colour.get()

    token = colour.set("green")
    try:
        assert run_sync(see, hint=HINT) == "green"
    finally:
        colour.reset(token)
    assert run_sync(see, hint=HINT) == "none"


def test_64_threads_at_once() -> None:
    answers: dict[int, list[int]] = {}

    def work(number: int) -> None:
        answers[number] = [run_sync(double, number * 100 + at, hint=HINT) for at in range(20)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {number: [(number * 100 + at) * 2 for at in range(20)] for number in range(64)}
    assert not _portal.running_portal().waiting


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_an_exception_that_would_end_a_loop_is_raised_in_the_caller(error: type[BaseException]) -> None:
    async def leave() -> None:
        raise error("enough")

    before = portal()
    with pytest.raises(error, match="enough"):
        run_sync(leave, hint=HINT)
    assert portal() is before
    assert run_sync(double, 1, hint=HINT) == 2


def test_a_call_that_something_else_cancels_is_answered() -> None:
    async def cancelled() -> None:
        asyncio.get_running_loop().call_soon(task_of_this().cancel)
        await anyio.sleep_forever()

    def task_of_this() -> Any:
        return asyncio.current_task()

    with pytest.raises(PlaneUnavailable):
        run_sync(cancelled, hint=HINT)
    assert run_sync(double, 1, hint=HINT) == 2


def test_a_portal_that_ends_answers_all_its_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    mortal = _portal._Portal()
    monkeypatch.setattr(_portal, "_current", mortal)
    errors = list[str]()

    def call() -> None:
        with pytest.raises(PlaneUnavailable) as caught:
            run_sync(anyio.sleep_forever, hint=HINT)
        errors.append(str(caught.value))

    threads = [threading.Thread(target=call) for _ in range(5)]
    for thread in threads:
        thread.start()
    wait_until_sync(lambda: len(mortal.waiting) == 5)
    _portal.run_sync_soon(mortal.token, mortal.stop.set)
    for thread in threads:
        thread.join()
    with pytest.raises(PlaneUnavailable):
        mortal.call(double, (1,))
    sentence = "the event loop that this package keeps in the thread 'lakeshore-portal' ended before the answer came"
    assert errors == [sentence] * 5


# Worker threads of anyio


@anyio_test
async def test_a_worker_thread_goes_back_to_its_own_loop() -> None:
    colour.set("amber")

    async def see() -> tuple[str, Any, str]:
        return *(await where()), colour.get()

    seen = await anyio.to_thread.run_sync(lambda: run_sync(see, hint=HINT))
    assert seen == (threading.current_thread().name, loop_token(), "amber")

    calls = list[int]()

    def fails() -> None:
        async def own() -> None:
            calls.append(1)
            raise anyio.NoEventLoopError("its own")

        with pytest.raises(anyio.NoEventLoopError, match=r"^its own$"):
            run_sync(own, hint=HINT)

    await anyio.to_thread.run_sync(fails)
    assert calls == [1]


@anyio_test
async def test_cancelling_the_host_task_of_a_worker_thread_cancels_its_call() -> None:
    begun, ended = anyio.Event(), list[bool]()

    async def wait() -> None:
        try:
            begun.set()
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    async with anyio.create_task_group() as group:
        group.start_soon(anyio.to_thread.run_sync, lambda: run_sync(wait, hint=HINT))
        await begun.wait()
        group.cancel_scope.cancel()
    assert ended == [True]


@both_loops
def test_a_worker_thread_that_outlives_its_loop_gets_an_error(backend: str) -> None:
    began, release, errors = threading.Event(), threading.Event(), list[str]()

    def late() -> None:
        began.set()
        release.wait()
        with pytest.raises(PlaneUnavailable) as caught:
            run_sync(double, 1, hint=HINT)
        errors.append(str(caught.value))

    async def main() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(anyio.to_thread.run_sync, late, abandon_on_cancel=True))
            await wait_until(began.is_set)
            group.cancel_scope.cancel()

    anyio.run(main, backend=backend)
    release.set()
    wait_until_sync(lambda: errors, description="the answer to the late call")
    assert errors == ["the event loop that this worker thread serves has ended"]


# Threads whose event loop is running


@anyio_test
async def test_on_a_running_loop_it_works_and_warns_once_where_it_was_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_sync, "_warned", set())
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(3):
            assert run_sync(double, number, hint=HINT) == number * 2
    (warning,) = seen
    assert warning.category is RuntimeWarning
    assert str(warning.message) == (
        "a blocking call on a thread whose event loop is running stops that loop until the answer comes: "
        "use `await q.result(...)`"
    )
    assert warning.filename == __file__
    assert not _run_sync._blocked


@anyio_test
async def test_the_warning_as_an_error_stops_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_sync, "_warned", set())
    for _ in range(2):
        with pytest.raises(RuntimeWarning, match="a blocking call"):
            run_sync(double, 1, hint=HINT)


def test_a_callback_of_a_running_loop_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_sync, "_warned", set())

    async def main() -> str:
        answer = asyncio.get_running_loop().create_future()

        def callback() -> None:  # outside of any task
            with pytest.raises(RuntimeWarning) as caught:
                run_sync(double, 1, hint=HINT)
            answer.set_result(str(caught.value))

        asyncio.get_running_loop().call_soon(callback)
        return await answer

    assert asyncio.run(main()).endswith("use `await q.result(...)`")


@anyio_test
async def test_R87_on_the_loop_of_a_worker_it_raises_at_once() -> None:
    with worker_runs_here(), worker_runs_here():
        pass
    with worker_runs_here():
        with pytest.raises(DispatchError) as caught:
            run_sync(double, 1, hint=HINT)
        assert str(caught.value) == (
            "a blocking call on a worker's event loop stops the worker, and its answer may never come: use "
            "`await q.result(...)`, or make the function that calls it a plain `def`, which the worker runs in a thread"
        )
        in_thread = await anyio.to_thread.run_sync(lambda: run_sync(double, 2, hint=HINT))
        assert in_thread == 4
        other_loop = threading.Thread(target=lambda: answers.append(run_sync(double, 3, hint=HINT)))
        answers = list[int]()
        other_loop.start()
        await wait_until(lambda: answers == [6])
        other_loop.join()
    assert not _run_sync._workers


def test_R87_on_the_thread_of_the_portal_it_raises_at_once() -> None:
    async def blocking() -> None:
        run_sync(double, 1, hint=HINT)

    with pytest.raises(DispatchError) as caught:
        run_sync(blocking, hint=HINT)
    assert str(caught.value) == (
        "a blocking call on the thread of the loop that has to answer it: use `await q.result(...)` instead"
    )
