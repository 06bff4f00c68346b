"""Read by type checkers, never run: what a UDF of each body kind gives, on each entry point."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Generator, Iterator
from typing import Any, assert_type

import dreamlake.lakeshore as dls


@dls.udf
def stats(xs: list[float], scale: float = 1.0) -> dict[str, float]:
    return {"mean": scale * sum(xs)}


@dls.udf(queue="gpu")
def embed(text: str, *, width: int = 8) -> list[float]:
    return [float(len(text))] * width


@dls.udf(queue="gpu", transport="pickle")
async def fetch(url: str) -> bytes:
    return url.encode()


@dls.udf(queue="gpu")
def numbers(n: int) -> Iterator[int]:
    yield from range(n)


@dls.udf(queue="gpu")
def letters(n: int) -> Generator[str, None, int]:
    yield "a"
    return n


@dls.udf(queue="gpu")
async def ticks(n: int) -> AsyncIterator[float]:
    for i in range(n):
        yield float(i)


@dls.udf(queue="gpu")
async def marks(n: int) -> AsyncGenerator[str, None]:
    yield str(n)


def plain(a: int, b: str = "") -> tuple[int, str]:
    return a, b


bound = dls.udf(plain, queue="gpu", transport="ref")
again = dls.udf(embed, queue="cpu")

# def
assert_type(stats([1.0]), dict[str, float])
assert_type(stats.local([1.0], scale=2.0), dict[str, float])
assert_type(embed("x", width=3), list[float])
assert_type(embed.local("x"), list[float])
assert_type(embed.remote("x"), list[float])
assert_type(embed.remote("x", _key="k", _priority=3), list[float])
assert_type(embed.submit("x", width=3), str)
assert_type(embed.submit("x", _key="k"), str)
assert_type(embed.submit("x", _priority=2.5, width=3), str)
assert_type(bound(1), tuple[int, str])
assert_type(bound.submit(1, b="x"), str)
assert_type(again("x"), list[float])
assert_type(embed.queue, str | None)
assert_type(embed.is_async, bool)

# generators
assert_type(numbers(3), Iterator[int])
assert_type(numbers.local(3), Iterator[int])
assert_type(numbers.remote(3), Iterator[int])
assert_type(numbers.submit(3), str)
assert_type(letters(3), Generator[str, None, int])
assert_type(letters.submit(3), str)
for number in numbers(3):
    assert_type(number, int)


async def asynchronous() -> None:
    # async def
    waiting: Coroutine[Any, Any, bytes] = fetch("u")
    assert_type(await waiting, bytes)
    assert_type(await fetch("u"), bytes)
    assert_type(await fetch.local("u"), bytes)
    assert_type(await fetch.remote("u", _key="k"), bytes)
    assert_type(await fetch.submit("u"), str)
    assert_type(await fetch.submit("u", _priority=1), str)

    # async generators
    assert_type(ticks(3), AsyncIterator[float])
    assert_type(ticks.remote(3), AsyncIterator[float])
    assert_type(await ticks.submit(3), str)
    assert_type(await marks.submit(3), str)
    async for tick in ticks(3):
        assert_type(tick, float)
    async for mark in marks.local(3):
        assert_type(mark, str)


# methods


class Model:
    scale = 2

    @dls.udf
    def grow(self, by: int) -> int:
        return self.scale * by

    @dls.udf(queue="gpu")
    async def predict(self, x: float, *, rounds: int = 1) -> float:
        return x * rounds

    @dls.udf(queue="gpu")
    def steps(self, n: int) -> Iterator[int]:
        yield from range(n)

    @dls.udf
    @staticmethod
    def parse(text: str) -> int:
        return int(text)

    @dls.udf(queue="gpu")
    @classmethod
    def build(cls, scale: int) -> Model:
        return cls()


model = Model()
assert_type(model.grow(2), int)
assert_type(model.grow.local(by=2), int)
assert_type(model.steps(2), Iterator[int])
assert_type(model.steps.submit(2), str)
assert_type(Model.grow(model, 2), int)
assert_type(Model.parse("1"), int)
assert_type(model.build(1), Model)
assert_type(model.build.submit(1), str)


async def methods() -> None:
    assert_type(await model.predict(1.0, rounds=2), float)
    assert_type(await model.predict.submit(1.0), str)
    assert_type(await model.predict.remote(1.0, _key="k"), float)


# queues and thunks


async def queues(plane: dls.Dispatch) -> None:
    q = dls.Queue("gpu", dispatch=plane)
    thunk = dls.thunk(embed, "x", width=3)
    assert_type(thunk, dls.Thunk[list[float]])
    assert_type(dls.thunk(plain, 1), dls.Thunk[tuple[int, str]])
    assert_type(await q.submit(thunk, key="k", priority=1), str)
    assert_type(await q.submit_many([thunk, 1, "x"]), list[str])
    job = await q.claim()
    assert_type(job, dls.Job | None)
    async with q.working() as held:
        assert_type(held, dls.Job)
        held.result = 1
    assert_type(await q.cancel("id", wait=True), bool)
    assert_type(await q.count("queued"), int)
    assert_type(q.sync, dls.SyncQueue)
    assert_type(q.sync.aio, dls.Queue)
    assert_type(embed.submit("x", _dispatch=plane), str)
    async for frame in q.stream_frames("id", since=3):
        assert_type(frame, dls.wire.Frame)


def blocking(q: dls.SyncQueue) -> None:
    assert_type(q.submit(1), str)
    assert_type(q.submit_many([1]), list[str])
    assert_type([row.state for row in q.list(state="failed")], list[str])
    with q.working(timeout=1.0) as job:
        assert_type(job, dls.Job)
    for frame in q.stream_frames("id"):
        assert_type(frame, dls.wire.Frame)
