"""Thousands of callers of one batcher, four in ten of them cancelled at some moment."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from dreamlake.lakeshore.planes.batcher import Batcher

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_a_storm_of_cancelled_callers_loses_nothing(seed: int, anyio_backend_name: str) -> None:
    dice = random.Random(seed)
    done: list[int] = []
    given_back: dict[int, Any] = {}
    got: dict[int, Any] = {}
    left: set[int] = set()

    async def commit(ops: list[int]) -> Sequence[int | Exception]:
        done.extend(ops)
        for _ in range(dice.randrange(4)):
            await checkpoint()
        if dice.random() < 0.05:
            raise OSError("the whole batch")
        return [ValueError(str(op)) if op % 10 == 0 else -op for op in ops]

    def orphan(op: int, answer: int | Exception) -> None:
        assert op not in given_back
        given_back[op] = answer

    batch = Batcher(commit, limit=50, orphan=orphan)

    async def call(op: int) -> None:
        try:
            for _ in range(dice.randrange(8)):
                await checkpoint()
            if op % 3:
                got[op] = await batch(op)
            else:
                got[op], got[-op] = await batch.many([op, -op])
        except (OSError, ValueError) as exc:
            got[op] = exc
        except anyio.get_cancelled_exc_class():
            left.add(op)
            raise

    async def cancelled_by_scope(op: int) -> None:
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:

                async def cancel() -> None:
                    for _ in range(dice.randrange(12)):
                        await checkpoint()
                    scope.cancel()

                group.start_soon(cancel)
                await call(op)

    async def cancelled_by_asyncio(op: int) -> None:
        task = asyncio.create_task(call(op))
        for _ in range(dice.randrange(12)):
            await checkpoint()
        task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            left.add(op)  # perhaps before it began

    with anyio.fail_after(250):
        async with anyio.create_task_group() as group:
            for op in range(1, 4001):
                kind = dice.random()
                if kind < 0.2 and anyio_backend_name == "asyncio":
                    group.start_soon(cancelled_by_asyncio, op)
                else:
                    group.start_soon(cancelled_by_scope if kind < 0.4 else call, op)
        await batch.idle()
    assert len(done) == len(set(done)), "an operation was done twice"
    assert len(left) > 400
    for op, answer in [*got.items(), *given_back.items()]:
        assert op in done
        assert answer == -op or str(answer) in (str(op), "the whole batch")
    for op in done:  # every answer went to its caller or to the hook, never to both
        assert (op in got) != (op in given_back)
    assert {abs(op) for op in given_back} <= left
    assert {abs(op) for op in got} | left == set(range(1, 4001))
    (answer,) = await batch.many([5])
    assert answer == -5 or str(answer) == "the whole batch"
