"""What is meant to break the plane: names beyond all bounds, documents of strangers, and servers that do half of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from bson import Int64, ObjectId
from helpers import wait_until
from mongo_kit import Stored, fence, own_mongo, own_redis
from mongo_streams import admin, begun, streaming, told

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract import Failure, Fence, FinalFrame, Finish, News, RowFilter, Submit
from dreamlake.lakeshore.planes.hub import Waiter
from dreamlake.lakeshore.planes.migrate import Migration
from dreamlake.lakeshore.planes.mongo.bodies import ENVELOPE, FINAL, RESULT
from dreamlake.lakeshore.planes.mongo.documents import NAMES, SMALL, date, seconds

if TYPE_CHECKING:
    from pathlib import Path

    from mongo_kit import Place

    from dreamlake.lakeshore.planes.mongo.live import Live

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # nothing here differs by the loop

LIVE = "dreamlake.lakeshore.planes.mongo.live"


def live_of(plane: dls.MongoDispatch) -> Live:
    engine: Any = plane._engines.here()
    found: Live = engine.store._live
    return found


# Names ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worker", "sentence"),
    [
        ("half \ud800", "expected the worker to be text, got half of a character in 'half"),
        ("w" * (NAMES + 1), "shorten"),
    ],
    ids=["half a character", "long"],
)
async def test_a_name_that_cannot_be_stored_ends_no_other_claim(place: Place, worker: str, sentence: str) -> None:
    """Nothing was taken under it, so nothing is looked for under it."""
    async with place.plane() as plane:
        id = await plane.submit("q", b"body")
        with pytest.raises(dls.WireError, match=sentence):
            await plane.claim(["q"], worker)
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.id == id
        await plane.settled()
        assert await plane.claim(["q"], "w") == []


@asyncio_only
async def test_the_largest_of_everything_is_one_document(place: Place) -> None:
    """Whatever was submitted can be claimed, and retried, and ended."""
    failure = Failure("T", "m" * (SMALL - 1))
    async with place.plane() as plane:
        queue, key, worker = "q" * 1000, "k" * (NAMES - 1000), "w" * (NAMES - 10)
        await plane.do(Submit("id", queue, b"b" * ENVELOPE, key, config=b"c" * SMALL))
        (claimed,) = await plane.claim([queue], worker, lease=600, poll_id="p" * 10)
        await plane.retry(fence(claimed, worker), error=failure)
        (claimed,) = await plane.claim([queue], worker, lease=600, poll_id="p" * 10)
        assert (len(claimed.body), len(claimed.config or b"")) == (ENVELOPE, SMALL)
        final = FinalFrame(0, b"f" * FINAL)
        assert await plane.finish(fence(claimed, worker), "failed", result=b"r" * RESULT, error=failure, final=final)
        outcome = await plane.outcome("id")
        assert (len(outcome.result or b""), outcome.error) == (RESULT, failure)
        assert (await plane.page("id")).frames == [(0, b"f" * FINAL)]
    with Stored(place.mongo) as stored:
        assert stored.chunks() == 0


@asyncio_only
async def test_names_beyond_that_are_refused_alone(place: Place) -> None:
    async with place.plane() as plane:
        long = "k" * (NAMES + 1)
        answers = await plane.many([Submit("a", "q", b""), Submit("b", "q", b"", long), Submit("c", "q", b"", "key")])
        assert [answers[0], answers[2]] == ["a", "c"]
        with pytest.raises(dls.WireError, match=f"expected a queue and a key and a parent of at most {NAMES} bytes"):
            raise answers[1]
        claims = await plane.claim(["q"], "w", limit=2)
        acks = [Finish(fence(claims[0]), "succeeded"), Finish(Fence("c", "w" * (17 << 20), 1), "succeeded")]
        first, second = await plane.many(acks)
        assert first is True
        assert isinstance(second, dls.ClaimLost), second


# Times and addresses -------------------------------------------------------------------------------------------------


def test_a_time_before_all_dates_is_the_first_one() -> None:
    assert seconds(date(-1e300)) == seconds(date(float("-inf"))) == -62_135_596_800.0


@asyncio_only
async def test_a_purge_of_what_is_older_than_all_dates(place: Place) -> None:
    async with place.plane() as plane:
        assert await plane.purge(1e300) == 0


@asyncio_only
async def test_what_is_odd_about_an_address_of_names_is_said_by_the_first_use() -> None:
    plane = dls.MongoDispatch("mongodb+srv://user:hunter2@127.0.0.1:1/x")
    with pytest.raises(dls.DispatchError, match=r"cannot be used: InvalidURI: .* port number; check its add") as caught:
        await plane.counts()
    assert "hunter2" not in str(caught.value)
    await plane.aclose()


@pytest.mark.parametrize("url", ["mongodb://[::1/x", "mongodb://u:hunter2@[zz]:1/x"])
def test_an_address_with_odd_brackets_is_none(url: str) -> None:
    with pytest.raises(ValueError, match="expected an address such as mongodb://HOST") as caught:
        dls.MongoDispatch(url)
    assert "hunter2" not in str(caught.value)


@asyncio_only
async def test_reads_are_of_the_primary_whatever_the_address_says(place: Place) -> None:
    """An operation is judged by what was written just before it."""
    asks = "&" if "?" in place.mongo else "?"
    place = place._replace(mongo=f"{place.mongo}{asks}readPreference=secondary")
    async with place.plane() as plane:
        id = await plane.submit("q", b"")
        assert (await plane.look([id]))[0].state == "pending"


# A database that is killed -------------------------------------------------------------------------------------------


@asyncio_only
async def test_what_was_answered_is_there_after_a_kill(place: Place, tmp_path: Path, impatient_driver: None) -> None:
    """On a server that stands alone, and syncs only what it is told to."""
    answered: list[str] = []

    async def submit(plane: dls.MongoDispatch) -> None:
        for number in range(100_000):
            id = f"id-{number}"
            await plane.submit("q", b"", id=id)
            answered.append(id)

    with own_mongo(tmp_path / "mongo") as service:
        place = place.without_redis()._replace(mongo=f"{service.url}/lakeshore")
        async with place.plane() as plane, anyio.create_task_group() as group:
            group.start_soon(submit, plane)
            await wait_until(lambda: len(answered) > 200, 60, "many that are answered")
            service.kill()
            group.cancel_scope.cancel()
        there = list(answered)
        service.start()
        async with place.plane() as plane:
            assert [one.id for one in await plane.look(there) if one.state == "unknown"] == []


# Documents of strangers ----------------------------------------------------------------------------------------------


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
        assert {one.state for one in await plane.look(ids[::2])} == {"failed"}


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
        assert [one.state for one in await other.look([bad, good])] == ["pending", "pending"]
        for claimed in await plane.claim(["q"], "w", limit=2):
            await plane.finish(fence(claimed), "succeeded")
        with anyio.fail_after(30):
            assert (await other.outcome(good)).state == "succeeded"


@asyncio_only
async def test_frames_that_were_promised_and_never_came_hold_readers_up_no_longer_than_their_claim(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is killed between promising and inserting frames, and then the worker, who would repeat them."""
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.frames.SETTLES", 1.5)
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
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.frames.SETTLES", 1.0)
    with place.proxied() as (slow, proxy):
        async with slow.plane() as still, place.plane() as plane:
            stream = await begun(plane)
            await still.look([stream.claimed.id])
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
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.frames.SETTLES", 4.0)
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.watch.OVERLAP", 1.0)
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.watch.ALL", 600.0)
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
            engine.hub.enter([("journal", bad.claimed.id)], Waiter())
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
        lost, there = await plane.look([bad, good])
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


# A Redis that does half of it ----------------------------------------------------------------------------------------


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_a_redis_that_takes_no_writes_is_said_once(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still takes messages: that these pass does not make it answer again, until a frame does."""
    monkeypatch.setattr(f"{LIVE}.AGAIN", 0.02)
    with own_redis(tmp_path / "redis") as redis:
        async with streaming(place, redis.url) as stream:
            live, client = live_of(stream.writer), admin(redis)

            async def at_rest() -> None:
                await wait_until(lambda: live._sending is None and time.monotonic() > live._until, 10, "it to be sent")

            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            for _ in range(4):
                await stream.send()
                await at_rest()
                await stream.writer.submit("other", b"")
                await at_rest()
            await stream.arrives()
            assert live.down
            (said,) = told(caplog)
            assert "refuses what it is told" in said
            client.execute_command("REPLICAOF", "NO", "ONE")
            client.close()
            await stream.send()
            await wait_until(lambda: not live.down, 10, "it to answer again")


@asyncio_only
async def test_redis_is_not_blamed_for_a_database_that_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an invocation that was never seen here its frames are left out, and the news goes out all the same."""
    monkeypatch.setattr(f"{LIVE}.PATIENCE", 1.5)
    with place.proxied() as (slow, proxy):
        async with slow.plane() as plane, place.plane() as elsewhere:
            hearing = live_of(elsewhere)
            assert await hearing.hear(1.0) == (True, [])
            proxy.stall()
            live_of(plane).add("never-seen", 0, [b"frame"])
            live_of(plane).tell([News("queue", "q")])
            assert await hearing.hear(20.0) == (False, [News("queue", "q")])
            assert not live_of(plane).down
            proxy.mend()


@asyncio_only
async def test_who_only_reads_comes_back_to_a_redis_that_was_silent(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its subscription outlives the silence, and it sends nothing by which it would see that there is an answer."""
    monkeypatch.setattr(f"{LIVE}.PATIENCE", 0.3)
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.watch.HEAR", 0.3)
    with own_redis(tmp_path / "redis") as redis:
        place = place._replace(redis=redis.url)
        async with place.plane() as writer, place.plane() as reader:
            stream = await begun(writer)
            async with anyio.create_task_group() as group:
                group.start_soon(stream.read, reader)
                await stream.send(3)
                await stream.arrives()
                live = live_of(reader)
                heard = live._heard
                redis.pause()
                try:
                    await stream.send(3)
                    await stream.arrives()
                    await wait_until(lambda: live.down, 10, "the reader to miss it")
                finally:
                    redis.go_on()
                await wait_until(lambda: not live.down, 10, "the reader to come back")
                assert heard is not None
                await stream.send(3)
                await stream.arrives()
                await stream.end()
        stream.check()


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_what_others_keep_under_the_name_of_a_stream_is_no_failure_of_redis(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_redis(tmp_path / "redis") as redis:
        async with streaming(place, redis.url) as stream:
            await stream.send()
            client = admin(redis)
            await wait_until(lambda: client.keys(f"lakeshore:*:frames:{stream.claimed.id}:*"), 10, "its stream")
            for key in client.keys(f"lakeshore:*:frames:{stream.claimed.id}:*"):
                client.delete(key)
                client.set(key, "what others keep")
            client.close()
            await stream.send(5)
            await stream.arrives()
            assert await stream.page() == 6
            assert not live_of(stream.writer).down
        assert told(caplog) == []
