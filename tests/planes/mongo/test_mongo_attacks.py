"""What is meant to break the plane: names beyond all bounds, odd addresses, and servers that do half of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import wait_until
from mongo_kit import Stored, fence, own_mongo, own_redis
from mongo_streams import admin, begun, streaming, told

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.news import News
from dreamlake.lakeshore.planes.contract.operations import Fence, FinalFrame, Finish, Submit
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.planes.mongo.bodies import MAX_INLINE_ENVELOPE, MAX_INLINE_FINAL_FRAME, MAX_INLINE_RESULT
from dreamlake.lakeshore.planes.mongo.documents import NAMES, SMALL, date, seconds

if TYPE_CHECKING:
    from pathlib import Path

    from mongo_kit import Place

    from dreamlake.lakeshore.planes.mongo.redis_news import RedisNews

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])  # nothing here differs by the loop

LIVE = "dreamlake.lakeshore.planes.mongo.redis_news"


def live_of(plane: dls.MongoDispatch) -> RedisNews:
    engine: Any = plane._engines.here()
    found: RedisNews = engine.store._redis
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
        await plane.do(Submit("id", queue, b"b" * MAX_INLINE_ENVELOPE, key, config=b"c" * SMALL))
        (claimed,) = await plane.claim([queue], worker, lease=600, poll_id="p" * 10)
        await plane.retry(fence(claimed, worker), error=failure)
        (claimed,) = await plane.claim([queue], worker, lease=600, poll_id="p" * 10)
        assert (len(claimed.body), len(claimed.config or b"")) == (MAX_INLINE_ENVELOPE, SMALL)
        final = FinalFrame(0, b"f" * MAX_INLINE_FINAL_FRAME)
        assert await plane.finish(
            fence(claimed, worker), "failed", result=b"r" * MAX_INLINE_RESULT, error=failure, final=final
        )
        outcome = await plane.outcome("id")
        assert (len(outcome.result or b""), outcome.error) == (MAX_INLINE_RESULT, failure)
        assert (await plane.page("id")).frames == [(0, b"f" * MAX_INLINE_FINAL_FRAME)]
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
        assert (await plane.current_outcomes([id]))[0].state == "pending"


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
            assert [one.id for one in await plane.current_outcomes(there) if one.state == "unknown"] == []


# A Redis that does half of it ----------------------------------------------------------------------------------------


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_a_redis_that_takes_no_writes_is_said_once(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It still takes messages: that these pass does not make it answer again, until a frame does."""
    monkeypatch.setattr(f"{LIVE}.PAUSE_AFTER_FAILURE", 0.02)
    with own_redis(tmp_path / "redis") as redis:
        async with streaming(place, redis.url) as stream:
            live, client = live_of(stream.writer), admin(redis)

            async def at_rest() -> None:
                def sent() -> bool:
                    return live._sending is None and time.monotonic() > live._paused_until

                await wait_until(sent, 10, "it to be sent")

            client.execute_command("REPLICAOF", "127.0.0.1", "1")
            for _ in range(4):
                await stream.send()
                await at_rest()
                await stream.writer.submit("other", b"")
                await at_rest()
            await stream.arrives()
            assert live.down
            (said,) = told(caplog)
            assert "rejects a command" in said
            client.execute_command("REPLICAOF", "NO", "ONE")
            client.close()
            await stream.send()
            await wait_until(lambda: not live.down, 10, "it to answer again")


@asyncio_only
async def test_redis_is_not_blamed_for_a_database_that_does_not_answer(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an invocation that was never seen here its frames are left out, and the news goes out all the same."""
    monkeypatch.setattr(f"{LIVE}.ANSWER_TIMEOUT", 1.5)
    with place.proxied() as (slow, proxy):
        async with slow.plane() as plane, place.plane() as elsewhere:
            hearing = live_of(elsewhere)
            assert await hearing.receive(1.0) == (True, [])
            proxy.stall()
            live_of(plane).add("never-seen", 0, [b"frame"])
            live_of(plane).publish([News("queue", "q")])
            assert await hearing.receive(20.0) == (False, [News("queue", "q")])
            assert not live_of(plane).down
            proxy.mend()


@asyncio_only
async def test_who_only_reads_comes_back_to_a_redis_that_was_silent(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its subscription outlives the silence, and it sends nothing by which it would see that there is an answer."""
    monkeypatch.setattr(f"{LIVE}.ANSWER_TIMEOUT", 0.3)
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.watch.RECEIVE_TIMEOUT", 0.3)
    with own_redis(tmp_path / "redis") as redis:
        place = place._replace(redis=redis.url)
        async with place.plane() as writer, place.plane() as reader:
            stream = await begun(writer)
            async with anyio.create_task_group() as group:
                group.start_soon(stream.read, reader)
                await stream.send(3)
                await stream.arrives()
                live = live_of(reader)
                heard = live._subscription
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
