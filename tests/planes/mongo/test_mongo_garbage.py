"""Documents that nobody of ours has written, and frames that never came: whose they are ends, and all others go on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from bson import Int64, ObjectId
from helpers import wait_until
from mongo_kit import Stored, fence
from mongo_streams import begun

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Finish
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.hub import Waiter
from dreamlake.lakeshore.planes.migrate import Migration
from dreamlake.lakeshore.planes.mongo.documents import date

if TYPE_CHECKING:
    from pathlib import Path

    from mongo_kit import Place


pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # nothing here differs by the loop


LOST = {"ref": ObjectId("0" * 24), "length": 5}
"""A reference to bytes that are not there."""


@pytest.mark.parametrize(
    "change",
    [
        {"envelope": "text"},
        {"envelope": 10**12},
        {"envelope": LOST},
        {"nextSeq": "x"},
        {"attempt": "x"},
        {"attempt": [1]},
        {"attempt": True},
        {"attempt": {"$gt": 0}},
        {"attempt": None},
        {"attempt": float("nan")},
        {"attempt": date(1e9)},
        {"failures": "x"},
        {"lost": True},
        {"nextSeq": 2.5},
        {"runConfig": {"queue": "q"}},
    ],
    ids=lambda change: str(change)[:40],
)
@asyncio_only
async def test_a_row_that_nobody_can_read_ends_and_its_queue_goes_on(place: Place, change: dict[str, Any]) -> None:
    async with place.plane() as plane:
        bad, good = await plane.submit("q", b"first"), await plane.submit("q", b"second")
        with Stored(place.mongo) as stored:
            stored.database["invocations"].update_one({"id": bad}, {"$set": change})
        (claimed,) = await plane.claim(["q"], "w")
        assert (claimed.id, claimed.body) == (good, b"second")
        outcome = await plane.outcome(bad, timeout=10)
        assert outcome.state == "failed"
        assert outcome.error is not None
        assert "its document, or what that refers to, cannot be read" in outcome.error.message


@asyncio_only
async def test_what_nobody_can_count_is_in_no_other_claimers_way(place: Place) -> None:
    """Many of them at once: each bad row ends, each good one is claimed once, and acked along with others."""
    async with place.plane() as plane, place.plane() as other:
        ids = [await plane.submit("q", b"") for _ in range(40)]
        with Stored(place.mongo) as stored:
            for n, id in enumerate(ids[::2]):
                change = [{"attempt": "x"}, {"attempt": {"$gt": 0}}, {"lost": "x"}, {"attempt": True}][n % 4]
                stored.database["invocations"].update_one({"id": id}, {"$set": change})
        taken: list[str] = []

        async def work(plane: dls.MongoDispatch, worker: str) -> None:
            while some := await plane.claim(["q"], worker, limit=3):
                taken.extend(claimed.id for claimed in some)
                done = await plane.many([Finish(fence(claimed, worker), "succeeded") for claimed in some])
                assert done == [True] * len(some)

        async with anyio.create_task_group() as group:
            for n in range(8):
                group.start_soon(work, (plane, other)[n % 2], f"w{n}")
        assert sorted(taken) == sorted(ids[1::2])
        assert {one.state for one in await plane.current_outcomes(ids[::2])} == {"failed"}


@asyncio_only
async def test_a_good_row_is_not_ended_for_what_was_refused(place: Place) -> None:
    async with place.plane() as plane:
        engine: Any = plane._engines.opened()
        due = {"ns": "default", "state": "queued", "due": True, "runConfig.queue": "q"}
        assert await engine.store._claims._end_uncountable(due) is False
        id = await plane.submit("q", b"")
        with Stored(place.mongo) as stored:
            for attempt in (0, 3, 3.0, Int64(5)):
                stored.database["invocations"].update_one({"id": id}, {"$set": {"attempt": attempt}})
                assert await engine.store._claims._end_uncountable(due) is False
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.attempt == 6


@asyncio_only
async def test_a_repeated_poll_is_given_what_strangers_have_touched(place: Place) -> None:
    async with place.plane() as plane:
        for _ in range(2):
            await plane.submit("q", b"")
        first = await plane.claim(["q"], "w", limit=2, poll_id="p")
        with Stored(place.mongo) as stored:
            stored.database["invocations"].update_one({"id": first[0].id}, {"$set": {"priority": "x"}})
            stored.database["invocations"].update_one({"id": first[1].id}, {"$unset": {"lease": 1, "submittedAt": 1}})
        again = await plane.claim(["q"], "w", limit=2, poll_id="p")
        assert {claimed.id for claimed in again} == {claimed.id for claimed in first}


@asyncio_only
async def test_a_row_without_its_time_spoils_nobody_elses_wait(place: Place) -> None:
    async with place.plane() as plane, place.plane() as other:
        bad, good = await plane.submit("q", b"first"), await plane.submit("q", b"second")
        with Stored(place.mongo) as stored:
            stored.database["invocations"].update_one({"id": bad}, {"$unset": {"submittedAt": 1}})
        assert [one.state for one in await other.current_outcomes([bad, good])] == ["pending", "pending"]
        for claimed in await plane.claim(["q"], "w", limit=2):
            await plane.finish(fence(claimed), "succeeded")
        with anyio.fail_after(30):
            assert (await other.outcome(good)).state == "succeeded"


@asyncio_only
async def test_frames_that_were_promised_and_never_came_hold_readers_up_no_longer_than_their_claim(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed between promising and inserting frames, and then the worker, who would repeat them."""
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.journal.MISSING_FRAMES_TIMEOUT", 1.5)
    async with place.plane() as plane:
        stream = await begun(plane)
        await stream.send(2)
        with Stored(place.mongo) as stored:
            promise = {"$set": {"nextSeq": Int64(5)}}
            assert stored.database["invocations"].update_one({"id": stream.claimed.id}, promise).matched_count == 1
        seen: list[int] = []

        async def read() -> None:
            while True:
                page = await plane.next_page(stream.claimed.id, max(seen, default=-1))
                seen.extend(seq for seq, _ in page.frames)

        async with anyio.create_task_group() as group:
            group.start_soon(read)
            await wait_until(lambda: seen == [0, 1], 20, "what is there")
            await plane.release(fence(stream.claimed))
            (again,) = await plane.claim(["q"], "w", lease=600.0)
            assert again.next_seq == 5
            await plane.append(fence(again), 5, [b"next"])
            # The last claim's own numbers are waited for, those of the one before it not for ever.
            await plane.append(fence(again), 8, [b"far"])
            await wait_until(lambda: seen == [0, 1, 5], 30, "the frames of the claim that runs")
            await plane.append(fence(again), 6, [b"6", b"7"])
            await wait_until(lambda: seen == [0, 1, 5, 6, 7, 8], 20, "the rest")
            group.cancel_scope.cancel()


@asyncio_only
async def test_a_server_that_stood_still_adds_no_frames_where_readers_have_gone_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had promised their numbers; whose they were has lost its claim since."""
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.journal.MISSING_FRAMES_TIMEOUT", 1.0)
    with place.proxied() as (slow, proxy):
        async with slow.plane() as still, place.plane() as plane:
            stream = await begun(plane)
            await still.current_outcomes([stream.claimed.id])
            refused: list[dls.ClaimLost] = []

            async def append() -> None:
                with pytest.raises(dls.ClaimLost) as caught:
                    await still.append(fence(stream.claimed), 0, [b"late"])
                refused.append(caught.value)

            with Stored(place.mongo) as stored:
                async with anyio.create_task_group() as group:
                    proxy.keep_back("")
                    group.start_soon(append)
                    row = {"id": stream.claimed.id, "nextSeq": 1}
                    await wait_until(lambda: stored.database["invocations"].count_documents(row), 20, "the promise")
                    await plane.release(fence(stream.claimed))
                    (again,) = await plane.claim(["q"], "w", lease=600.0)
                    await plane.append(fence(again), 1, [b"next"])
                    assert (await plane.next_page(stream.claimed.id, -1, timeout=20)).frames == [(1, b"next")]
                    proxy.hand_out()
            assert refused
            assert (await plane.page(stream.claimed.id)).frames == [(1, b"next")]


@asyncio_only
async def test_readers_are_woken_when_they_may_go_on_behind_what_never_came(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing happens then that there could be news of."""
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.journal.MISSING_FRAMES_TIMEOUT", 4.0)
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.watch.VISIBILITY_DELAY", 1.0)
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.watch.WAKE_ALL_INTERVAL", 600.0)
    async with place.plane() as plane, place.plane() as elsewhere:
        stream = await begun(plane)
        with Stored(place.mongo) as stored:
            promise = {"$set": {"nextSeq": Int64(3)}}
            assert stored.database["invocations"].update_one({"id": stream.claimed.id}, promise).matched_count == 1
        await plane.release(fence(stream.claimed))
        (again,) = await plane.claim(["q"], "w", lease=600.0)
        await plane.append(fence(again), 3, [b"next"])
        with anyio.fail_after(25):
            page = await elsewhere.next_page(stream.claimed.id, -1)
        assert page.frames == [(3, b"next")]


@pytest.mark.parametrize("change", [{"nextSeq": "x"}, {"id": None}, {"startedAt": "x"}, {"state": ["x"]}], ids=str)
@asyncio_only
async def test_a_row_of_strangers_that_is_waited_for_ends_nobody_elses_wait(
    place: Place, change: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    place = place.without_redis()
    async with place.plane() as plane, place.plane() as other:
        bad, good = await begun(plane), await begun(plane)
        with Stored(place.mongo) as stored:
            now = {"finishedAt": date(time.time())} if "id" in change else {}
            stored.database["invocations"].update_one({"id": bad.claimed.id}, {"$set": change | now})
        ended: list[str] = []

        async def wait(id: str) -> None:
            ended.append((await other.outcome(id)).state)

        async with anyio.create_task_group() as group:
            # As its readers do, without the looks that are their own fault.
            engine: Any = other._engines.opened()
            engine.hub.subscribe([("journal", bad.claimed.id)], Waiter())
            group.start_soon(wait, bad.claimed.id)
            group.start_soon(wait, good.claimed.id)
            await anyio.sleep(1.0)
            await plane.finish(fence(good.claimed), "succeeded")
            await wait_until(lambda: ended == ["succeeded"], 20, "the end of the good one")
            group.cancel_scope.cancel()
    assert not [record for record in caplog.records if "watching the plane failed" in record.getMessage()]


@pytest.mark.parametrize("change", [{"result": LOST}, {"error": LOST}, {"result": "text"}], ids=str)
@asyncio_only
async def test_an_outcome_that_is_lost_is_one_and_its_neighbours_are_answered(
    place: Place, change: dict[str, Any]
) -> None:
    async with place.plane() as plane:
        bad, good = await plane.submit("q", b""), await plane.submit("q", b"")
        for claimed in await plane.claim(["q"], "w", limit=2):
            await plane.finish(fence(claimed), "succeeded", result=b"result")
        with Stored(place.mongo) as stored:
            stored.database["invocations"].update_one({"id": bad}, {"$set": change})
        lost, there = await plane.current_outcomes([bad, good])
        assert (there.state, there.result) == ("succeeded", b"result")
        assert lost.state == "failed"
        assert lost.error is not None
        assert "it ended succeeded" in lost.error.message
        assert {row.id for row in await plane.rows(RowFilter(queue="q"))} == {bad, good}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"$set": {"envelope": LOST}}, r"document 'default/.*' of MongoDispatch\(.*, or what it refers to is lost"),
        ({"$set": {"attempt": "x"}}, "none that this package has written"),
        ({"$set": {"id": "../../x"}}, "expected an invocation id"),
        ({"$unset": {"state": 1}}, "KeyError: 'state'; mend or delete it"),
        ({"$set": {"state": "weird"}}, "the target does not take invocation '.*': a restore names the state"),
    ],
    ids=["lost", "attempt", "id", "no state", "state"],
)
@asyncio_only
async def test_a_migration_says_which_document_is_broken(
    place: Place, tmp_path: Path, change: dict[str, Any], sentence: str
) -> None:
    async with place.plane() as source, dls.Dispatch(tmp_path / "target.db") as target:
        id = await source.submit("q", b"body")
        with Stored(place.mongo) as stored:
            stored.database["invocations"].update_one({"id": id}, change)
        with pytest.raises(dls.DispatchError, match=sentence):
            await Migration(source, target).copy()
        assert await target.counts() == {}
