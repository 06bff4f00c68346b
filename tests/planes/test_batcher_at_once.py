"""What a batcher does without a wait: the first in its caller's own step, what follows with the next pass of the loop."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from dreamlake.lakeshore.planes.batcher import CALM_BATCHES, Batcher

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]  # trio has no such store


class Store:
    """Doubles numbers, refuses those below 0, and writes down how each batch came."""

    def __init__(self, able: bool = True) -> None:
        self.able = able
        self.log: list[tuple[str, list[int]]] = []

    def at_once(self, ops: list[int]) -> list[Any] | None:
        if not self.able:
            return None
        self.log.append(("at once", list(ops)))
        return self._answers(ops)

    async def commit(self, ops: list[int]) -> list[Any]:
        self.log.append(("commit", list(ops)))
        await anyio.lowlevel.checkpoint()
        return self._answers(ops)

    @staticmethod
    def _answers(ops: list[int]) -> list[Any]:
        return [2 * op if op >= 0 else ValueError(f"no {op}") for op in ops]

    def batcher(self) -> Batcher[int, Any]:
        return Batcher(self.commit, at_once=self.at_once)


async def test_one_caller_after_the_other_is_answered_in_its_own_step() -> None:
    store = Store()
    batch = store.batcher()
    for op in (1, 2, 3):
        assert await batch(op) == 2 * op
        await anyio.lowlevel.checkpoint()
    assert store.log == [("at once", [1]), ("at once", [2]), ("at once", [3])]


async def test_what_follows_in_the_same_pass_gathers_and_lets_others_run() -> None:
    store, ran = Store(), list[str]()
    batch = store.batcher()

    async def other() -> None:
        ran.append("other")

    async with anyio.create_task_group() as group:
        group.start_soon(other)
        assert await batch(1) == 2
        assert ran == []
        assert await batch(2) == 4
        assert ran == ["other"], "a caller who asks again and again must let others run"
    async with anyio.create_task_group() as group:
        for op in range(10, 20):
            group.start_soon(batch, op)
    assert [ops for _, ops in store.log] == [[1], [2], [10], list(range(11, 20))]
    await batch.idle()


async def test_after_a_crowd_callers_are_gathered_for_a_while() -> None:
    store = Store()
    batch = store.batcher()
    assert await batch.many([1, 2]) == [2, 4]
    for op in range(CALM_BATCHES):
        assert await batch(op) == 2 * op
    assert [how for how, _ in store.log] == ["commit"] * (1 + CALM_BATCHES)
    assert await batch(9) == 18
    assert store.log[-1] == ("at once", [9])


async def test_what_cannot_be_done_at_once_is_committed() -> None:
    store = Store(able=False)
    assert await store.batcher()(3) == 6
    assert store.log == [("commit", [3])]


async def test_what_becomes_impossible_between_two_passes_is_committed() -> None:
    store = Store()
    batch = store.batcher()
    assert await batch(1) == 2
    store.able = False
    assert await batch(2) == 4
    assert store.log == [("at once", [1]), ("commit", [2])]


async def test_an_answer_that_is_an_exception_is_raised() -> None:
    batch = Store().batcher()
    for op in (-1, -2):  # at once, and with the next pass
        with pytest.raises(ValueError, match=rf"^no {op}$"):
            await batch(op)


async def test_a_caller_that_is_cancelled_already_has_nothing_done() -> None:
    store = Store()
    batch = store.batcher()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await batch(1)
    assert scope.cancelled_caught
    assert store.log == []


async def test_a_caller_that_leaves_before_the_next_pass_withdraws() -> None:
    store = Store()
    batch = store.batcher()
    assert await batch(1) == 2
    async with anyio.create_task_group() as group:
        group.start_soon(batch, 2)
        group.cancel_scope.cancel()
    await batch.idle()
    assert all(2 not in ops for _, ops in store.log)
