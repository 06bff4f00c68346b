"""A database whose connections are cut again and again, that is killed, away, or silent: work goes on as before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from helpers import wait_until
from mongo_kit import IMPATIENT, fence, fresh_ns, own_mongo

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Claimed, FinalFrame
from dreamlake.lakeshore.planes.contract.records import RowFilter

if TYPE_CHECKING:
    from pathlib import Path

    from mongo_kit import Place

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),  # the driver knows no other
    pytest.mark.usefixtures("impatient_driver"),
]

LEASE = 600.0


class Cycles:
    """Workers of one plane that submit, claim, append and ack, one invocation after the other, and count what they did."""

    def __init__(self, plane: dls.MongoDispatch) -> None:
        self.plane, self.ended = plane, 0

    async def run(self, n: int, rounds: int) -> None:
        queue = f"q-{n}"
        for round in range(rounds):
            id = await self.plane.submit(queue, b"body", key=f"key {round}")
            claimed: list[Claimed] = []
            while not claimed:
                claimed = await self.plane.claim([queue], "w", lease=LEASE)
            assert [one.id for one in claimed] == [id]
            assert sum(await self.plane.append(fence(claimed[0]), 0, [b"a", b"b"])) == 2
            await self.plane.finish(fence(claimed[0]), "succeeded", result=id.encode(), final=FinalFrame(2, b"END"))
            self.ended += 1

    async def check(self, direct: dls.MongoDispatch, count: int) -> None:
        assert self.ended == count
        rows = await direct.rows(RowFilter(limit=1000))
        assert len(rows) == count
        # An attempt whose claim was never heard of went back, at no cost.
        assert {(row.state, row.lost, row.failures) for row in rows} == {("succeeded", 0, 0)}
        outcomes = await direct.current_outcomes([row.id for row in rows])
        assert [outcome.result for outcome in outcomes] == [row.id.encode() for row in rows]
        for row in rows:
            page = await direct.page(row.id)
            assert (page.frames, page.closed) == ([(0, b"a"), (1, b"b"), (2, b"END")], True)


async def test_connections_dropped_again_and_again(place: Place) -> None:
    """Many callers at once, while every connection is cut every few milliseconds."""
    ns = fresh_ns()
    with place.proxied("mongodb", IMPATIENT) as (through, proxy):
        async with place.plane(ns) as direct, through.plane(ns) as plane:
            cycles = Cycles(plane)
            async with anyio.create_task_group() as group:
                for n in range(5):
                    group.start_soon(cycles.run, n, 4)
                for _ in range(8):
                    await anyio.sleep(0.15)
                    proxy.cut()
            await cycles.check(direct, 20)


async def test_a_database_that_is_killed_and_comes_back(place: Place, tmp_path: Path) -> None:
    """What was answered is there, and what was not is asked again: as far as the database keeps what it has answered."""
    with own_mongo(tmp_path / "mongo", "--sync-on-commit") as service:
        place = place._replace(mongo=f"{service.url}/lakeshore")
        async with place.plane() as plane, place.plane() as direct:
            cycles = Cycles(plane)
            async with anyio.create_task_group() as group:
                for n in range(3):
                    group.start_soon(cycles.run, n, 8)
                for ended in (4, 12):
                    await wait_until(lambda ended=ended: cycles.ended >= ended, 30, "some that have ended")
                    service.kill()
                    await anyio.sleep(0.5)
                    await anyio.to_thread.run_sync(service.start)
            await cycles.check(direct, 24)


async def test_a_database_that_is_away_for_longer_than_the_patience(place: Place) -> None:
    """The named error, which says where the database is, and nothing of the driver's."""
    with place.without_redis().proxied("mongodb", "serverSelectionTimeoutMS=300") as (through, proxy):
        async with through.plane() as plane:
            id = await plane.submit("q", b"body")
            plane.patience = 0.5
            proxy.refuse()
            with anyio.fail_after(40):
                for verb in (plane.submit("q", b"body"), plane.current_outcomes([id]), plane.claim(["q"], "w")):
                    with pytest.raises(dls.PlaneUnavailable) as failure:
                        await verb
                    assert "127.0.0.1" in str(failure.value)
            proxy.mend()
            plane.patience = 30.0
            (claimed,) = await plane.claim(["q"], "w")
            assert claimed.id == id


async def test_a_database_that_is_silent(place: Place) -> None:
    """No answer, and no end of the connection: the caller gets its error, and the plane goes on when it is mended."""
    with place.without_redis().proxied() as (through, proxy):
        async with through.plane() as plane:
            id = await plane.submit("q", b"body")
            proxy.stall()
            with anyio.move_on_after(1.0) as scope:
                await plane.current_outcomes([id])
            assert scope.cancelled_caught  # cancellation reaches a read
            proxy.mend()
            with anyio.fail_after(60):
                (claimed,) = await plane.claim(["q"], "w")
            assert claimed.id == id
