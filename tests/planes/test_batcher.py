"""The batcher: nobody lost, nothing twice, nothing stuck, whoever leaves and whenever the loop ends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from helpers import wait_until

from dreamlake.lakeshore.errors import PlaneUnavailable
from dreamlake.lakeshore.planes.batcher import Batcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

pytestmark = pytest.mark.anyio
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])
ENDED = "the event loop ended before the plane's answer came: the operation may have been applied, and can be repeated"


class Store:
    """Answers each number with its double, keeps every batch, and can be held at the gate."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate: anyio.Event | None = None
        self.under_way = 0

    async def commit(self, ops: list[int]) -> Sequence[int | Exception]:
        self.under_way += 1
        assert self.under_way == 1, "two commits at once"
        try:
            self.batches.append(ops)
            await checkpoint()
            if self.gate is not None:
                await self.gate.wait()
            return [ValueError(f"{op} is negative") if op < 0 else op * 2 for op in ops]
        finally:
            self.under_way -= 1


async def gathered(calls: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
    results: list[Any] = [None] * len(calls)

    async def run(at: int) -> None:
        results[at] = await calls[at]()

    async with anyio.create_task_group() as group:
        for at in range(len(calls)):
            group.start_soon(run, at)
    return results


async def held(store: Store, batch: Batcher[int, int], group: Any) -> anyio.Event:
    """Start a batch of the number 0 and keep it under way until the event is set."""
    store.gate = anyio.Event()
    group.start_soon(batch, 0)
    await wait_until(lambda: store.under_way)
    return store.gate


async def test_alone_an_operation_is_a_batch_of_one() -> None:
    store = Store()
    batch = Batcher(store.commit)
    assert [await batch(1), await batch(2)] == [2, 4]
    assert store.batches == [[1], [2]]


async def test_what_comes_while_a_batch_is_under_way_is_the_next_in_order() -> None:
    store = Store()
    batch = Batcher(store.commit)
    async with anyio.create_task_group() as group:
        gate = await held(store, batch, group)
        answers = list[Any]()

        async def call(op: int) -> None:
            answers.append(await batch(op))

        for op in range(1, 6):
            group.start_soon(call, op)
            await checkpoint()
        await wait_until(lambda: len(batch._waiting[0].ops) == 5)
        gate.set()
    assert store.batches == [[0], [1, 2, 3, 4, 5]]
    assert sorted(answers) == [2, 4, 6, 8, 10]


async def test_each_operation_fails_alone() -> None:
    store = Store()
    batch = Batcher(store.commit)
    assert await batch(3) == 6
    with pytest.raises(ValueError, match=r"^-1 is negative$"):
        await batch(-1)
    good, bad = await batch.many([4, -2])
    assert (good, str(bad)) == (8, "-2 is negative")


async def test_what_the_commit_raises_is_everybodys_and_keeps_its_traceback() -> None:
    calls = 0

    async def commit(ops: list[int]) -> list[int | Exception]:
        nonlocal calls
        calls += 1
        raise OSError("the disk is gone")

    batch = Batcher(commit)
    depths = list[int]()

    async def caller() -> None:
        with pytest.raises(OSError, match=r"^the disk is gone$") as caught:
            await batch(1)
        assert [entry.name for entry in caught.traceback][-1] == "commit"
        depths.append(len(caught.traceback))

    await gathered([caller] * 50)
    assert calls == 1
    assert len(set(depths)) == 1  # no caller's traceback holds its neighbours'
    assert [str(answer) for answer in await batch.many([1, 2])] == ["the disk is gone"] * 2


async def test_a_wrong_number_of_answers_leaves_nobody_waiting() -> None:
    async def commit(ops: list[int]) -> list[int | Exception]:
        return [1]

    batch = Batcher(commit)
    for answer in await batch.many([1, 2, 3]):
        assert str(answer) == "expected 3 answers for 3 operations, one each, got 1"


async def test_many_takes_as_many_batches_as_it_needs() -> None:
    store = Store()
    batch = Batcher(store.commit, limit=10)
    assert await batch.many([]) == []
    assert store.batches == []
    lists = await gathered([lambda: batch.many(range(35)), lambda: batch.many(range(35, 50))])
    assert lists == [[op * 2 for op in range(35)], [op * 2 for op in range(35, 50)]]
    assert [len(ops) for ops in store.batches] == [10] * 5
    first, second = list(range(35)), list(range(35, 50))
    assert [op for ops in store.batches for op in ops] in (first + second, second + first)  # trio starts either first


async def test_a_batch_is_bounded_by_bytes_and_a_larger_operation_goes_alone() -> None:
    store = Store()
    batch = Batcher(store.commit, max_bytes=100, size=lambda op: op)
    await batch.many([40, 60, 1, 0, 100, 0, 500, 0, 0, 99, 1])
    assert store.batches == [[40, 60], [1, 0], [100, 0], [500], [0, 0, 99, 1]]


async def test_a_size_that_cannot_be_told_asks_for_nothing() -> None:
    store = Store()
    batch: Batcher[Any, Any] = Batcher(store.commit, size=len)
    with pytest.raises(TypeError):
        await batch.many(["x", 1])
    await batch.idle()
    assert store.batches == []


# Leaving


async def test_a_caller_that_leaves_before_its_batch_withdraws() -> None:
    store, orphans = Store(), list[Any]()
    batch = Batcher(store.commit, orphan=lambda *orphan: orphans.append(orphan))
    async with anyio.create_task_group() as group:
        gate = await held(store, batch, group)
        group.start_soon(batch, 5)
        with anyio.move_on_after(0.01):
            await batch.many([1, 2])
        gate.set()
    assert store.batches == [[0], [5]]
    assert orphans == []


async def test_all_withdrawn_is_no_commit() -> None:
    store = Store()
    batch = Batcher(store.commit)
    async with anyio.create_task_group() as group:
        gate = await held(store, batch, group)
        with anyio.move_on_after(0.01):
            await batch(1)
        gate.set()
    await batch.idle()
    assert store.batches == [[0]]


async def test_the_answer_of_a_caller_that_left_later_goes_to_the_orphan_hook() -> None:
    store, orphans = Store(), list[Any]()
    batch = Batcher(store.commit, orphan=lambda *orphan: orphans.append(orphan))
    async with anyio.create_task_group() as group:
        store.gate = anyio.Event()
        with anyio.CancelScope() as scope:
            group.start_soon(batch, 7)

            async def leave() -> None:
                await wait_until(lambda: store.under_way)
                scope.cancel()

            group.start_soon(leave)
            await batch.many([1, -1])
        assert orphans == []
        store.gate.set()
    await batch.idle()
    assert [(op, str(answer)) for op, answer in orphans] == [(1, "2"), (-1, "-1 is negative")]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_answered_in_the_moment_of_leaving_is_an_orphan_too() -> None:
    """asyncio cancels a task also when what it waited for is there already; trio never does."""
    orphans, got = list[Any](), list[int]()

    async def commit(ops: list[int]) -> list[int | Exception]:
        await checkpoint()
        asyncio.get_running_loop().call_soon(task.cancel)  # runs after the answers are given, before the caller does
        return list(ops)

    async def caller() -> None:
        got.append(await batch(1))

    batch = Batcher(commit, orphan=lambda *orphan: orphans.append((*orphan, batch._drain is None)))
    task = asyncio.create_task(caller())
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (got, orphans) == ([], [(1, 1, True)])


async def test_many_that_leaves_between_its_batches() -> None:
    store, orphans = Store(), list[Any]()
    batch = Batcher(store.commit, limit=2, orphan=lambda *orphan: orphans.append(orphan))
    with anyio.CancelScope() as scope:
        store_commit = store.commit

        async def commit(ops: list[int]) -> Sequence[int | Exception]:
            if ops == [3, 4]:
                scope.cancel()
                for _ in range(5):
                    await checkpoint()
            return await store_commit(ops)

        batch._commit = commit
        await batch.many([1, 2, 3, 4, 5, 6])
    await batch.idle()
    assert store.batches == [[1, 2], [3, 4]]  # the third was withdrawn
    assert orphans == [(1, 2), (2, 4), (3, 6), (4, 8)]


async def test_an_orphan_hook_that_fails_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    store, orphans = Store(), list[int]()

    def orphan(op: int, answer: int | Exception) -> None:
        orphans.append(op)
        raise ZeroDivisionError

    batch = Batcher(store.commit, orphan=orphan)
    answers = list[Any]()

    async def stay() -> None:
        answers.append(await batch(9))

    async with anyio.create_task_group() as group:
        store.gate = anyio.Event()
        scope = anyio.CancelScope()

        async def leave() -> None:
            with scope:
                await batch.many([1, 2])

        group.start_soon(leave)
        group.start_soon(stay)
        await wait_until(lambda: store.under_way)
        scope.cancel()
        await checkpoint()
        store.gate.set()
    await batch.idle()
    assert (answers, orphans) == ([18], [1, 2])
    assert caplog.text.count("the answer to a cancelled caller could not be handled") == 2
    assert await batch(3) == 6


# The end


async def test_idle_waits_for_what_is_under_way_and_what_waits() -> None:
    store = Store()
    batch = Batcher(store.commit, limit=1)
    await batch.idle()
    async with anyio.create_task_group() as group:
        gate = await held(store, batch, group)
        group.start_soon(batch, 1)
        idle = list[bool]()

        async def wait() -> None:
            await batch.idle()
            idle.append(store.batches == [[0], [1]] and not store.under_way)

        group.start_soon(wait)
        group.start_soon(wait)
        for _ in range(5):
            await checkpoint()
        assert idle == []
        gate.set()
    assert idle == [True, True]


@both_loops
def test_a_loop_that_ends_in_a_commit_leaves_nobody_without_an_answer(backend: str) -> None:
    """Callers that left are orphans; who uses the batcher while the loop closes its generators is answered as well."""
    answers, orphans, kept, scopes = list[str](), list[Any](), list[Any](), list[anyio.CancelScope]()

    async def commit(ops: list[int]) -> list[int | Exception]:
        if 8 in ops:
            return [op * 2 for op in ops]
        scopes[0].cancel()
        await anyio.sleep_forever()
        raise AssertionError

    async def closer(batch: Batcher[int, int]) -> Any:
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):
                answers.extend(str(answer) for answer in await batch.many([8, 9]))
                await batch.idle()

    async def main() -> None:
        batch = Batcher(commit, orphan=lambda op, answer: orphans.append((op, str(answer))))
        kept.append(closer(batch))
        await anext(kept[0])
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await batch.many([1, 2])

    anyio.run(main, backend=backend)
    assert answers == (["16", "18"] if backend == "asyncio" else [ENDED] * 2)  # trio then takes no more tasks
    assert orphans == [(1, ENDED), (2, ENDED)]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
@pytest.mark.parametrize("steps", [0, 1, 3])
async def test_a_drain_that_asyncio_cancels_answers_everybody_and_the_next_starts_afresh(steps: int) -> None:
    store = Store()
    batch = Batcher(store.commit, limit=1)
    store.gate = anyio.Event()
    before = asyncio.all_tasks()
    callers = [asyncio.create_task(batch(op)) for op in (1, 2, 3)]
    await asyncio.sleep(0)  # the callers enter
    for _ in range(steps):
        await asyncio.sleep(0)
    (drain,) = asyncio.all_tasks() - before - set(callers)
    drain.cancel()
    for answer in await asyncio.gather(*callers, return_exceptions=True):
        assert isinstance(answer, PlaneUnavailable)
        assert str(answer) == ENDED
    await batch.idle()
    store.gate.set()
    assert await batch(4) == 8
    assert store.batches == ([[4]] if steps == 0 else [[1], [4]])
