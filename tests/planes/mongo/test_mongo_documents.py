"""What stands in the database: the documents, their indexes, and the plans of the queries that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import quiet, wait_until
from mongo_kit import fence, fresh_ns

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.limits import CLOCK_STEP_GRACE
from dreamlake.lakeshore.planes.contract.failures import worker_lost
from dreamlake.lakeshore.planes.contract.operations import Fence, FinalFrame, Finish, Submit
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter
from dreamlake.lakeshore.planes.mongo.clock import DatabaseClock
from dreamlake.lakeshore.planes.mongo.connection import Database, shown_url
from dreamlake.lakeshore.planes.mongo.documents import (
    CLAIM_SORT,
    INDEXES,
    date,
    error_bytes,
    error_document,
    failure_in,
    seconds,
    shown,
)

if TYPE_CHECKING:
    from mongo_kit import Place

on_asyncio = pytest.mark.parametrize("anyio_backend", ["asyncio"])
anyio_test = pytest.mark.anyio


async def database_of(plane: dls.MongoDispatch) -> Database:
    return (await plane._engines.get()).store._db  # type: ignore[attr-defined, no-any-return]


# Without a database --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        Failure("E", "m"),
        Failure("E", "m", "trace"),
        Failure("E", "", "trace", True),
        Failure("E", "half \ud800", None, False),
        Failure("E", "x" * 300_000),
        worker_lost(5),
    ],
    ids=["plain", "trace", "retry", "surrogate", "long", "lost"],
)
def test_an_error_comes_back_from_a_document(error: Failure) -> None:
    raw = error_bytes(error)
    assert failure_in(error_document(error) if raw is None else raw) == error


@pytest.mark.parametrize(
    "found", ["text", 7, [], b"\xff", {"message": 5}, "[" * 100_000], ids=lambda one: repr(one)[:9]
)
def test_an_error_that_somebody_else_wrote_is_shown(found: Any) -> None:
    failure = failure_in(found)
    assert failure is not None
    assert isinstance(failure.message, str)


@pytest.mark.parametrize("at", [0.0, 1.5, 1_800_000_000.25, -5.0])
def test_times_are_dates_to_the_millisecond(at: float) -> None:
    assert seconds(date(at)) == at


def test_a_lease_beyond_all_dates_is_the_last_one() -> None:
    assert seconds(date(1e18)) == 253_402_300_799.0
    assert date(None) is None


def test_each_index_has_a_reason_and_a_name_of_its_own() -> None:
    for indexes in INDEXES.values():
        assert len({index.name for index in indexes}) == len(indexes)
        assert all(len(index.why) > 10 for index in indexes)


@pytest.mark.parametrize(
    ("url", "left"),
    [
        ("mongodb://u:secret@h:1/x?authSource=admin", "mongodb://h:1/x"),
        ("mongodb://u:se@cret@h/x", "mongodb://h/x"),
        ("redis://:secret@h:6379/0", "redis://h:6379/0"),
        ("mongodb://a,b:2/x", "mongodb://a,b:2/x"),
        ("mongodb://u:se?cret@h/x", "mongodb://..."),
        ("mongodb://u:se\ncret@h/x", "mongodb://h/x"),
        ("mongodb://u:secret@h/x?appName=@me@", "mongodb://h/x"),
    ],
)
def test_an_address_is_shown_without_its_secrets(url: str, left: str) -> None:
    assert shown_url(url) == left


class Time:
    """A steady clock, and a database's."""

    def __init__(self) -> None:
        self.steady, self.database = 100.0, 5000.0

    async def ask(self) -> float:
        self.steady += 0.25  # the question, and the answer
        return self.database


@on_asyncio
@anyio_test
async def test_the_clock_is_never_ahead_of_the_database() -> None:
    time = Time()
    clock = DatabaseClock(time.ask, lambda: time.steady)
    await clock.read()
    assert clock.now() == 5000.0
    time.steady += 2.0
    assert clock.now() == 5002.0
    assert not clock.stepped


@on_asyncio
@anyio_test
async def test_after_a_step_of_the_clock_no_lease_is_judged_for_a_while() -> None:
    time = Time()
    clock = DatabaseClock(time.ask, lambda: time.steady)
    await clock.read()
    time.steady, time.database = time.steady + 10, time.database + 3600
    await clock.refresh()
    assert clock.now() == 8600.0
    assert clock.stepped
    time.steady += CLOCK_STEP_GRACE
    assert not clock.stepped


@on_asyncio
@anyio_test
async def test_stamps_of_one_process_are_in_order() -> None:
    time = Time()
    clock = DatabaseClock(time.ask, lambda: time.steady)
    await clock.read()
    stamps = [clock.stamp() for _ in range(3)]
    time.steady += 0.001
    stamps.append(clock.stamp())
    assert stamps == sorted(set(stamps))


# With one ------------------------------------------------------------------------------------------------------------


@on_asyncio
@anyio_test
async def test_a_document_has_the_names_of_the_protocol(place: Place) -> None:
    async with place.plane() as plane:
        await plane.do(Submit("parent", "q", b"body"))
        await plane.do(Submit("child", "q", b"body", "key", 7, "parent", True, b"config"))
        (claimed,) = await plane.claim(["q"], "w", lease=30.0)
        await plane.append(fence(claimed), 0, [b"frame"])
        db = await database_of(plane)
        row = await db.invocations.find_one({"id": "child"})
        assert row is not None
        assert row["runConfig"] == {"queue": "q", "config": b"config"}
        named = {name: row[name] for name in ("state", "priority", "key", "parentInvocationId", "rootInvocationId")}
        assert named == {
            "state": "running",
            "priority": 7,
            "key": "key",
            "parentInvocationId": "parent",
            "rootInvocationId": "parent",
        }
        assert (row["startedAt"] is None, row["finishedAt"], row["trusted"]) == (False, None, False)
        assert int(row["leaseUntil"]) - int(row["startedAt"]) == 30_000
        frame = await db.frames.find_one({"invocation": row["_id"]})
        assert frame is not None
        assert (frame["seq"], frame["attempt"], frame["bytes"], frame["final"]) == (0, 1, b"frame", False)
        assert db.invocations.write_concern.document == {"w": "majority", "j": True}


@on_asyncio
@anyio_test
async def test_the_final_frame_stands_in_the_invocation(place: Place) -> None:
    """Written by the update that ends it; of a row that the plane ends only the place of it is there."""
    async with place.plane() as plane:
        for id in ("acked", "killed"):
            await plane.do(Submit(id, "q", b"body"))
        (claimed,) = await plane.claim(["q"], "w")
        await plane.append(fence(claimed), 0, [b"a"])
        await plane.do(Finish(fence(claimed), "succeeded", b"r", None, FinalFrame(1, b"END")))
        await plane.cancel("killed")
        db = await database_of(plane)
        rows = {row["id"]: row async for row in db.invocations.find({})}
        assert rows["acked"]["final"] == {"seq": 1, "attempt": 1, "bytes": b"END"}
        assert rows["killed"]["final"] == {"seq": 0, "attempt": 0, "bytes": None}
        assert [frame["seq"] async for frame in db.frames.find({})] == [0]
        assert (await plane.page("acked")).frames == [(0, b"a"), (1, b"END")]
        assert len((await plane.page("killed")).frames) == 1


@on_asyncio
@anyio_test
async def test_a_row_is_read_back_as_it_was_written(place: Place) -> None:
    async with place.plane() as plane:
        await plane.do(Submit("id", "q", b"body", "key", -3, "p", False, b"c"))
        db = await database_of(plane)
        row = await db.invocations.find_one({"id": "id"})
        assert row is not None
        (seen,) = await plane.rows(RowFilter(id="id", body=True))
        assert shown(row, None, b"body") == seen
        assert (seen.key, seen.priority, seen.parent, seen.root, seen.body) == ("key", -3, "p", "p", b"body")
        assert abs(seen.submitted_at - db.clock.now()) < 60


@on_asyncio
@anyio_test
async def test_a_database_of_a_later_version_is_refused(place: Place) -> None:
    async with place.plane() as plane:
        db = await database_of(plane)
        await db.database["about"].update_one({"_id": "plane"}, {"$set": {"version": 2}})
    with pytest.raises(dls.DispatchError, match=r"is of version 2, and this package knows version 1: upgrade"):
        async with place.plane():
            pass


@on_asyncio
@anyio_test
async def test_a_claim_of_one_queue_is_an_index_scan_without_a_sort(place: Place) -> None:
    """The plan of the very findAndModify. Over several queues MongoDB merges their runs; the test server shows no plan
    for that which is MongoDB's."""
    async with place.plane() as plane:
        await plane.many([Submit(f"i{n}", "q", b"body") for n in range(5)])
        db = await database_of(plane)
        command = {
            "findAndModify": "invocations",
            "query": {"ns": "default", "state": "queued", "due": True, "runConfig.queue": "q"},
            "sort": dict(CLAIM_SORT),
            "update": {"$set": {"state": "running"}},
        }
        told = await db.database.command("explain", command, verbosity="queryPlanner")
        stages: list[str] = []
        plan = told["queryPlanner"]["winningPlan"]
        while plan:
            stages.append(plan["stage"])
            assert plan.get("indexName", "claim") == "claim"
            plan = plan.get("inputStage")
        assert stages == ["FETCH", "IXSCAN"]


@on_asyncio
@anyio_test
async def test_a_claim_whose_answer_was_lost_goes_back_before_the_next(place: Place) -> None:
    async with place.plane() as plane:
        ids = [await plane.submit("q", b"body") for _ in range(2)]
        claims = (await plane._engines.get()).store._claims  # type: ignore[attr-defined]
        taken = claims._claimed
        failing = [True]

        async def lost(row: Any) -> Any:
            if failing.pop() if failing else False:
                raise dls.PlaneUnavailable("the answer was lost")
            return await taken(row)

        claims._claimed = lost
        (claimed,) = await plane.claim(["q"], "w")
        assert (claimed.id, claimed.attempt, claimed.lost, claimed.failures) == (ids[0], 2, 0, 0)
        assert await plane.counts() == {("q", "running"): 1, ("q", "queued"): 1}
        assert await plane.finish(Fence(claimed.id, "w", 2), "succeeded")


@pytest.mark.timing("the test server makes no timestamps, so the order depends on each engine's reading of its clock")
@on_asyncio
@anyio_test
async def test_submit_order_is_one_over_all_engines(place: Place) -> None:
    ns = fresh_ns()
    async with place.plane(ns) as one, place.plane(ns) as other:
        ids = [await plane.submit("q", b"body") for _ in range(5) for plane in (one, other)]
        claimed = await other.claim(["q"], "w", limit=20)
        assert [each.id for each in claimed] == ids
        assert [row.id for row in await one.rows(RowFilter())] == ids[::-1]


@on_asyncio
@anyio_test
async def test_one_row_does_not_send_every_idle_claimer_to_the_database(place: Place) -> None:
    async with place.plane() as plane, anyio.create_task_group() as group:
        claims = (await plane._engines.get()).store._claims  # type: ignore[attr-defined]
        take, asked, found = claims._take, list[str](), list[str]()

        async def counted(op: Any, poll: str) -> Any:
            asked.append(op.worker)
            return await take(op, poll)

        async def claim(worker: str) -> None:
            found.extend(one.id for one in await plane.claim(["q"], worker, timeout=None))

        claims._take = counted
        for n in range(60):
            group.start_soon(claim, f"w{n}")
        await wait_until(lambda: len(asked) > 0, description="the first looks")
        await quiet(lambda: len(asked), 1.0, description="waiting, of which nothing may come")
        asked.clear()
        id = await plane.submit("q", b"body")
        await wait_until(lambda: found == [id], description="the claim")
        await anyio.sleep(0.2)
        assert len(asked) < 40
        group.cancel_scope.cancel()
