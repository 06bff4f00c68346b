"""What users of such systems have suffered from, seen from the plane: one test a row, by its number."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import anyio
import msgpack
import pytest
from helpers import wait_until

from dreamlake.lakeshore import ClaimLost, Dispatch, Queue, WireError
from dreamlake.lakeshore.planes.contract.operations import Claim, Claimed, Fence, FinalFrame
from dreamlake.lakeshore.planes.contract.records import RowFilter

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def fence_of(claimed: Claimed, worker: str) -> Fence:
    return Fence(claimed.id, worker, claimed.attempt)


async def reap(plane: Dispatch) -> None:
    """What the watcher does at its looks."""
    engine = await plane._engines.get()
    for _ in range(2):
        for op in await engine.read(engine.store.due):
            await plane.do(op)


async def states(plane: Dispatch) -> dict[str, str]:
    return {row.id: row.state for row in await plane.rows(RowFilter())}


async def test_R2_each_claim_comes_back_after_its_own_lease(tmp_path: Path) -> None:
    clock = Clock()
    async with Dispatch(tmp_path / "plane.db", clock=clock) as plane:
        for id, queue, lease in (("short", "a", 2.0), ("long", "b", 3600.0)):
            await plane.submit(queue, b"x", id=id)
            await plane.do(Claim((queue,), "w", lease=lease, local=False))
        clock.now += 2.5
        await reap(plane)
        assert await states(plane) == {"short": "queued", "long": "running"}


async def test_R20_R25_R26_a_lost_holder_blocks_nobody_and_disturbs_nobody(tmp_path: Path) -> None:
    clock = Clock()
    async with Dispatch(tmp_path / "plane.db", clock=clock) as plane:
        await plane.submit("q", b"x", id="first")
        await plane.submit("q", b"x", id="behind")
        (lost,) = await plane.do(Claim(("q",), "old", lease=10.0, local=False))
        clock.now += 11.0
        await reap(plane)
        (again,) = await plane.claim(["q"], "new")
        assert (again.id, again.attempt) == ("first", 2), "what was lost comes first again"
        for late in (plane.release, plane.retry):
            with pytest.raises(ClaimLost, match="attempt 1 is over, the row is at attempt 2"):
                await late(fence_of(lost, "old"))
        assert await states(plane) == {"first": "running", "behind": "queued"}
        await plane.finish(fence_of(again, "new"), "succeeded")
        assert [claimed.id for claimed in await plane.claim(["q"], "new")] == ["behind"]


async def test_R105_delays_and_leases_go_by_the_planes_clock_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A claimer whose own clock is ten minutes off gets nothing early, and loses nothing early."""
    clock = Clock()
    async with Dispatch(tmp_path / "plane.db", clock=clock) as plane:
        await plane.submit("q", b"x")
        (claimed,) = await plane.claim(["q"], "w")
        await plane.retry(fence_of(claimed, "w"), delay=60.0)
        monkeypatch.setattr("time.time", lambda: clock.now + 600.0)
        assert await plane.claim(["q"], "w") == []
        clock.now += 61.0
        monkeypatch.setattr("time.time", lambda: clock.now - 600.0)
        (claimed,) = await plane.claim(["q"], "w", lease=30.0)
        clock.now += 20.0
        await reap(plane)
        assert await states(plane) == {claimed.id: "running"}


async def test_R106_thousands_of_waiters_ask_no_more_than_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Dispatch(tmp_path / "plane.db") as plane, Dispatch(tmp_path / "plane.db") as worker:
        id = await plane.submit("q", b"x")
        engine = await plane._engines.get()
        store: Any = engine.store
        asked: list[str] = []
        for name in ("outcomes", "due"):
            read = getattr(store, name)

            async def counted(*args: Any, name: str = name, read: Any = read) -> Any:
                asked.append(name)
                return await read(*args)

            monkeypatch.setattr(store, name, counted)
        ended: list[str] = []

        async def wait() -> None:
            ended.append((await plane.outcome(id)).state)

        async with anyio.create_task_group() as group:
            for _ in range(2000):
                group.start_soon(wait)
            await wait_until(lambda: asked.count("due") >= 1, 30, "the first look of the watcher")
            await wait_until(lambda: len(engine.hub.names("id")) == 1, 30, "the waits")
            asked.clear()
            await wait_until(lambda: asked.count("due") >= 4, 20, "four looks of the watcher")
            assert asked.count("outcomes") <= 4, "waiters ask by themselves"
            (claimed,) = await worker.claim(["q"], "w")
            await worker.finish(fence_of(claimed, "w"), "succeeded")
        assert ended == ["succeeded"] * 2000


class Bomb:
    """Unpickled, it leaves a trace."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 6, 16, 40])
async def test_R109_a_hostile_worker_runs_no_code_in_its_clients(tmp_path: Path, code: int) -> None:
    trace = tmp_path / "trace"
    hostile = msgpack.packb(msgpack.ExtType(code, pickle.dumps(Bomb(str(trace)))))
    async with Dispatch(tmp_path / "plane.db") as plane:
        q = Queue("q", dispatch=plane)
        id = await q.submit(None)
        (claimed,) = await plane.claim(["q"], "w")
        fence = fence_of(claimed, "w")
        await plane.append(fence, 0, [b"\x94\x00\x00" + hostile + b"\xc0"])
        await plane.finish(fence, "succeeded", result=hostile, final=FinalFrame(1, b"\x94\x03\x01\xc0\xc0"))
        for read in (lambda: q.result(id), lambda: anext(q.stream(id))):
            try:
                value = await read()
            except WireError:
                continue
            assert isinstance(value, msgpack.ExtType)
    assert not trace.exists()
