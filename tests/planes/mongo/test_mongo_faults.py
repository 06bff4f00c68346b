"""A connection to the database that is dropped at each call of an operation, before it and after it: nothing is lost,
nothing happens twice, and the answer after the retry is the right one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import pytest
from helpers import wait_until
from mongo_kit import IMPATIENT, Stored, fence, fresh_ns

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Claimed,
    FinalFrame,
    Finish,
    Submit,
)
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from mongo_kit import Place
    from wire_proxy import CallProxy, When

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),  # the driver knows no other
    pytest.mark.usefixtures("impatient_driver"),
]

LEASE = 600.0
MANY = 10  # operations that make one batch


class Trial:
    """One time that an operation meets a fault: a queue of its own, and the plane as it is without the fault."""

    def __init__(self, plane: dls.MongoDispatch, direct: dls.MongoDispatch, url: str) -> None:
        self.plane, self.direct, self.url, self.queue = plane, direct, url, f"q-{new_id()}"

    async def many(self, ops: list[Any]) -> list[Any]:
        """Operations of many callers at once: they make one batch, and each repeats its own until it has an answer."""
        said: list[Any] = [None] * len(ops)

        async def do(n: int) -> None:
            try:
                said[n] = await self.plane.do(ops[n])
            except dls.ClaimLost as exc:
                said[n] = exc

        async with anyio.create_task_group() as group:
            for n in range(len(ops)):
                group.start_soon(do, n)
        return said

    async def started(self) -> Claimed:
        """A claim of a new invocation, made beside the fault."""
        await self.direct.submit(self.queue, b"body")
        (claimed,) = await self.direct.claim([self.queue], "w", lease=LEASE)
        return claimed

    async def rows(self) -> dict[str, Any]:
        rows = await self.direct.rows(RowFilter(queue=self.queue, limit=1000, body=True))
        return {row.id: row for row in rows}


Verb: TypeAlias = "Callable[[Trial], AsyncIterator[Awaitable[None]]]"
"""Prepares a trial, yields what is to be done while the fault is there, then judges what has become of it."""


async def submit(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    said: list[Any] = []
    ids = [new_id(), new_id()]

    async def act() -> None:
        said.append(await trial.plane.do(Submit(ids[0], trial.queue, b"body", "key", 3, "parent", True, b"config")))
        said.append(await trial.plane.do(Submit(ids[1], trial.queue, b"other", "key")))

    yield act()
    assert said == [ids[0], ids[0]]
    rows = await trial.rows()
    assert list(rows) == [ids[0]]
    row = rows[ids[0]]
    assert (row.body, row.key, row.priority, row.parent, row.state) == (b"body", "key", 3, "parent", "queued")


async def submit_many(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    """With keys and without, and keys that several share: any of these may win, and all are told the same."""
    ops = [Submit(f"{trial.queue}-{n}", trial.queue, b"%d" % n, f"key {n % 4}" if n % 2 else None) for n in range(MANY)]
    said: list[Any] = []

    async def act() -> None:
        said.extend(await trial.many(ops))

    yield act()
    rows = await trial.rows()
    assert sorted(rows) == sorted(set(said))
    for op, id in zip(ops, said, strict=True):
        if op.key is None:
            assert (id, rows[id].body) == (op.id, op.body)
        else:
            assert rows[id].key == op.key
            assert (id, rows[id].body) in [(one.id, one.body) for one in ops if one.key == op.key]
    assert len({row.key for row in rows.values()} - {None}) == len({op.key for op in ops} - {None})


async def submit_large(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    """Of bodies that no document holds nothing is left over: of tries in vain, of keys that were taken, after a purge."""
    body, ids = b"large" * 2_000_000, [new_id(), new_id()]
    winner = await trial.direct.submit(trial.queue, b"body", key="taken")
    said: list[Any] = []

    async def act() -> None:
        said.append(await trial.plane.do(Submit(ids[0], trial.queue, body)))
        said.append(await trial.plane.do(Submit(ids[1], trial.queue, body, "taken")))

    yield act()
    assert said == [ids[0], winner]
    claims = await trial.direct.claim([trial.queue], "w", limit=3, lease=LEASE)
    assert [(one.id, one.body == body) for one in claims] == [(winner, False), (ids[0], True)]
    for one in claims:
        await trial.direct.finish(fence(one), "succeeded")
    with Stored(trial.url) as stored:
        await wait_until(lambda: trial.direct.purge(0.0), description="the purge")
        assert stored.chunks() == 0


async def claim(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    ids = [await trial.direct.submit(trial.queue, b"%d" % n) for n in range(3)]
    said: list[Claimed] = []

    async def act() -> None:
        said.extend(await trial.plane.claim([trial.queue], "w", limit=2, lease=LEASE))

    yield act()
    assert [(one.id, one.body) for one in said] == [(ids[0], b"0"), (ids[1], b"1")]
    rows = await trial.rows()
    assert [rows[id].state for id in ids] == ["running", "running", "queued"]
    assert {(row.lost, row.failures) for row in rows.values()} == {(0, 0)}
    beaten = await trial.direct.beat("w", [(one.id, one.attempt) for one in said], LEASE)
    assert beaten == Beaten([], [])


async def claim_of_a_poll(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    ids = [await trial.direct.submit(trial.queue, b"%d" % n) for n in range(2)]
    said: list[list[Claimed]] = []
    take = partial(trial.plane.claim, [trial.queue], "w", lease=LEASE, poll_id=trial.queue)

    async def act() -> None:
        said.append(await take())
        said.append(await take())

    yield act()
    assert [[one.id for one in claims] for claims in said] == [[ids[0]], [ids[0]]]
    rows = await trial.rows()
    assert [rows[id].state for id in ids] == ["running", "queued"]


async def ack(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    claimed = await trial.started()
    await trial.direct.append(fence(claimed), 0, [b"a"])
    said: list[bool] = []

    async def act() -> None:
        said.append(await trial.plane.finish(fence(claimed), "succeeded", result=b"r", final=FinalFrame(1, b"END")))

    yield act()
    assert len(said) == 1
    assert await trial.direct.finish(fence(claimed), "succeeded", result=b"other") is False
    (outcome,) = await trial.direct.current_outcomes([claimed.id])
    assert (outcome.state, outcome.result) == ("succeeded", b"r")
    page = await trial.direct.page(claimed.id)
    assert (page.frames, page.closed) == ([(0, b"a"), (1, b"END")], True)


async def ack_many(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    for n in range(MANY):
        await trial.direct.submit(trial.queue, b"%d" % n)
    claims = await trial.direct.claim([trial.queue], "w", limit=MANY, lease=LEASE)
    ops = [Finish(fence(one), "failed", None, Failure("E", one.id), FinalFrame(0, one.body)) for one in claims]
    ops[3] = ops[3]._replace(fence=ops[3].fence._replace(attempt=9))
    said: list[Any] = []

    async def act() -> None:
        said.extend(await trial.many(ops))

    yield act()
    assert isinstance(said.pop(3), dls.ClaimLost)
    assert set(said) <= {True, False}
    rows = await trial.rows()
    for n, one in enumerate(claims):
        row, page = rows[one.id], await trial.direct.page(one.id)
        if n == 3:
            assert (row.state, page.frames) == ("running", [])
        else:
            assert (row.state, row.error, page.frames) == ("failed", Failure("E", one.id), [(0, one.body)])


async def append(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    claimed = await trial.started()
    said: list[Appended] = []

    async def act() -> None:
        said.append(await trial.plane.append(fence(claimed), 0, [b"a", b"b", b"c"]))
        said.append(await trial.plane.append(fence(claimed), 2, [b"c", b"d"], final=True))

    yield act()
    assert [sum(one) for one in said] == [3, 2]
    page = await trial.direct.page(claimed.id)
    assert (page.frames, page.closed) == (list(enumerate([b"a", b"b", b"c", b"d"])), True)


async def append_many(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    """Of several streams in one batch, of which one is stale."""
    for _ in range(4):
        await trial.direct.submit(trial.queue, b"body")
    claims = await trial.direct.claim([trial.queue], "w", limit=4, lease=LEASE)
    stale = Append(fence(claims[3])._replace(attempt=9), 0, (b"late",))
    ops = [*(Append(fence(one), n, (b"%d" % n,)) for n in range(2) for one in claims[:3]), stale]
    said: list[Any] = []

    async def act() -> None:
        said.extend(await trial.many(ops))

    yield act()
    assert isinstance(said.pop(), dls.ClaimLost)
    assert {sum(one) for one in said} == {1}
    for one in claims[:3]:
        assert (await trial.direct.page(one.id)).frames == [(n, b"%d" % n) for n in range(2)]
    assert (await trial.direct.page(claims[3].id)).frames == []


async def heartbeat(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    held, lost, asked = [await trial.started() for _ in range(3)]
    await trial.direct.release(fence(lost))
    await trial.direct.cancel(asked.id)
    claims = tuple((one.id, one.attempt) for one in (held, lost, asked))
    said: list[Beaten] = []

    async def act() -> None:
        said.append(await trial.plane.do(Beat("w", claims, 2 * LEASE)))

    yield act()
    assert said == [Beaten([claims[1]], [claims[2]])]
    rows = await trial.rows()
    assert rows[held.id].lease_until > rows[held.id].started_at + 1.5 * LEASE


async def retry(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    """A repeat finds that the claim is gone, which is what it wanted: it counts once."""
    claimed = await trial.started()
    said: list[Any] = []

    async def act() -> None:
        try:
            said.append((await trial.plane.retry(fence(claimed), delay=100.0, error=Failure("E", "m"))).state)
        except dls.ClaimLost:
            said.append("lost")

    yield act()
    assert said in (["queued"], ["lost"])
    row = (await trial.rows())[claimed.id]
    assert (row.state, row.failures, row.lost) == ("queued", 1, 0)


async def cancel(trial: Trial) -> AsyncIterator[Awaitable[None]]:
    running = await trial.started()
    queued = await trial.direct.submit(trial.queue, b"body")
    said: list[Any] = []

    async def act() -> None:
        said.append((await trial.plane.do(Cancel(running.id))).what)
        said.append((await trial.plane.do(Cancel(queued))).what)

    yield act()
    assert said[0] == "asked"
    assert said[1] in ("killed", "terminal")  # a repeat finds it ended
    rows = await trial.rows()
    assert (rows[running.id].state, rows[running.id].cancel_requested) == ("running", True)
    assert (rows[queued].state, rows[queued].error) == ("killed", Failure("Cancelled", "cancelled before it started"))
    assert (await trial.direct.page(queued)).closed


VERBS = (
    submit,
    submit_many,
    submit_large,
    claim,
    claim_of_a_poll,
    ack,
    ack_many,
    append,
    append_many,
    heartbeat,
    retry,
    cancel,
)


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.__name__)
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_connection_dropped_at_each_call(place: Place, verb: Verb, when: When) -> None:
    """Once, and three times in a row, which is more than the driver makes good by itself."""
    ns = fresh_ns()
    with place.without_redis().proxied("mongodb", IMPATIENT) as (through, proxy):
        async with place.without_redis().plane(ns) as direct, through.plane(ns) as plane:
            for times in (1, 3) if when == "after" and verb is not submit_large else (1,):
                await _at_each_call(proxy, Trial(plane, direct, place.mongo), verb, when, times)


async def _at_each_call(proxy: CallProxy, first: Trial, verb: Verb, when: When, times: int) -> None:
    at = 0
    while True:
        trial = Trial(first.plane, first.direct, first.url)
        steps = verb(trial)
        act = await anext(steps)
        proxy.drop(at, when, times)
        with anyio.fail_after(30):
            await act
        dropped, calls = proxy.dropped, list(proxy.calls)
        proxy.reset()
        try:
            assert [step async for step in steps] == []
        except AssertionError as exc:
            exc.add_note(f"{times} connections were dropped {when} call {at} of {calls}")
            raise
        if not dropped:
            assert at > 0
            break
        at += 1
