"""How an invocation ended rides on the message that says so: what is believed of it, and what is looked up all the same."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import wait_until
from hypothesis import given
from hypothesis import strategies as st
from mongo_kit import fence, own_redis
from mongo_streams import admin, subscribers

from dreamlake.lakeshore.planes.contract.news import News
from dreamlake.lakeshore.planes.contract.records import TERMINAL, Failure, Outcome
from dreamlake.lakeshore.planes.mongo import incarnation
from dreamlake.lakeshore.planes.mongo.incarnation import Incarnations
from dreamlake.lakeshore.planes.mongo.redis_messages import MAX_NAMES, MAX_OUTCOME_BYTES, PublishedNews, pack, unpack
from dreamlake.lakeshore.planes.mongo.redis_news import MAX_NEWS
from dreamlake.lakeshore.wire._msgpack import packb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from mongo_kit import Place
    from mongo_services import Service

    import dreamlake.lakeshore as dls

    Repeat = Callable[[], Awaitable[None]]

asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])

texts = st.text(max_size=20)
failures = st.builds(Failure, texts.filter(bool), texts, st.none() | texts)
outcomes = st.builds(
    Outcome, st.just("id"), st.sampled_from(sorted(TERMINAL)), st.binary(max_size=50), st.none() | failures
)
names = st.sampled_from(["id", "ends", "queue", "journal", "claims"])
leaves = st.none() | st.integers(-(2**63), 2**64 - 1) | st.binary() | st.text() | st.booleans()


# The message ---------------------------------------------------------------------------------------------------------


@given(outcomes, st.none() | texts)
def test_an_outcome_arrives_as_it_was_read_from_the_database(outcome: Outcome, birth: str | None) -> None:
    message = pack([PublishedNews(News("id", "id", outcome), birth)])
    assert message is not None
    (told,) = unpack(message)
    if birth is None:  # nobody could tell which invocation it is of
        assert told == PublishedNews(News("id", "id"))
    else:
        assert told == PublishedNews(News("id", "id", outcome._replace(result=outcome.result or None)), birth)


@pytest.mark.parametrize(
    "outcome",
    [
        Outcome("id", "succeeded", bytes(MAX_OUTCOME_BYTES)),
        Outcome("id", "failed", None, Failure("E", "x" * MAX_OUTCOME_BYTES)),
        Outcome("id", "failed", None, Failure("E", "x", "t" * MAX_OUTCOME_BYTES)),
        Outcome("id", "failed", None, Failure("E", "\ud800")),
    ],
    ids=["result", "message", "traceback", "half a character"],
)
def test_what_is_large_or_odd_is_a_hint(outcome: Outcome) -> None:
    assert unpack(pack([PublishedNews(News("id", "id", outcome), "birth")])) == [PublishedNews(News("id", "id"))]


def test_of_many_ends_some_are_hints() -> None:
    some = [
        PublishedNews(News("id", f"i{n}", Outcome(f"i{n}", "succeeded", b"r")), "birth") for n in range(MAX_NAMES + 3)
    ]
    told = unpack(pack(some))
    assert sum(one.news.outcome is not None for one in told) == MAX_NAMES
    assert {one.news.name for one in told} == {one.news.name for one in some}


@given(st.recursive(leaves, lambda some: st.lists(some) | st.dictionaries(st.text() | names, some)))
def test_whatever_is_published_is_news_or_ignored(message: Any) -> None:
    for told in unpack(packb(message, unicode_errors="surrogatepass")):
        assert told.news.outcome is None or told.news.outcome.state in TERMINAL


@given(st.binary())
def test_any_bytes_are_news_or_ignored(message: bytes) -> None:
    assert all(isinstance(told, PublishedNews) for told in unpack(message))


@pytest.mark.parametrize(
    "error",
    [b"[" * 100_000, "[" * 100_000, "1" * 5000, {"type": {}, "retry": 1}],
    ids=["bytes", "text", "digits", "fields"],
)
def test_an_error_that_nobody_can_read_is_shown_as_it_stands(error: Any) -> None:
    (told,) = unpack(packb({"ends": {"id": packb(["birth", "failed", None, error])}}))
    assert told.news.outcome is not None
    assert told.news.outcome.error is not None
    assert told.news.outcome.error.type in ("Error", "{}")


def test_more_than_anybody_of_ours_says_at_once_is_not_taken_apart() -> None:
    many = {f"i{n}": packb(["birth", "succeeded", None, None]) for n in range(MAX_NAMES + 1)}
    told = unpack(packb({"id": [*many], "queue": [*many][:-1], "ends": many}))
    assert told.count(PublishedNews(News("id"))) == 2
    assert sum(one.news.kind == "queue" for one in told) == MAX_NAMES
    assert sum(one.news.outcome is not None for one in told) == MAX_NAMES
    assert len(told) == 2 * MAX_NAMES + 2


# Incarnations --------------------------------------------------------------------------------------------------------------


def row(id: str, at: int) -> dict[str, Any]:
    from bson import Timestamp

    return {"id": id, "submittedAt": Timestamp(at, 1)}


async def unread(_: Any) -> list[dict[str, Any]]:
    raise AssertionError("nothing is to be read")


def test_the_later_of_two_invocations_is_known_whatever_answer_comes_first() -> None:
    incarnations = Incarnations(unread)
    incarnations.remember(row("a", 9))
    incarnations.remember(row("a", 5))
    assert incarnations.known("a") == "9.1"
    incarnations.remember(row("a", 10))
    assert incarnations.known("a") == "10.1"


def test_who_is_submitted_again_is_not_known() -> None:
    incarnations = Incarnations(unread)
    for id in ("a", "b"):
        incarnations.remember(row(id, 9))
    incarnations.forget(["a", "never seen"])
    assert [incarnations.known(id) for id in ("a", "b")] == [None, "9.1"]


def test_the_oldest_incarnations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incarnation, "MAX_IDS", 3)
    incarnations = Incarnations(unread)
    for n in range(5):
        incarnations.remember(row(f"i{n}", n))
    assert [incarnations.known(f"i{n}") for n in range(5)] == [None, None, "2.1", "3.1", "4.1"]


# Over a real Redis ---------------------------------------------------------------------------------------------------


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Service]:
    with own_redis(tmp_path / "redis") as service:
        yield service


@pytest.mark.anyio
@asyncio_only
@pytest.mark.parametrize("size", [0, 10, MAX_OUTCOME_BYTES, 100_000])
async def test_a_result_of_any_size_reaches_who_waits_elsewhere(place: Place, redis: Service, size: int) -> None:
    place = place._replace(redis=redis.url)
    async with place.plane() as plane, place.plane() as elsewhere, anyio.create_task_group() as group:
        await plane.submit("q", b"body", id="same")
        (claimed,) = await plane.claim(["q"], "w", lease=600.0)
        got: list[Outcome] = []

        async def wait() -> None:
            got.append(await elsewhere.outcome("same"))

        group.start_soon(wait)
        await wait_until(lambda: subscribers(redis) > 0, 20, "a listener")
        await plane.finish(fence(claimed), "succeeded", result=bytes(size))
        await wait_until(lambda: got, 20, "the end")
        assert got == [Outcome("same", "succeeded", bytes(size) or None)]


def incarnations_of(plane: dls.MongoDispatch) -> Incarnations:
    engine: Any = plane._engines.opened()
    found: Incarnations = engine.store._db.incarnations
    return found


@asynccontextmanager
async def a_message_of_before(place: Place, redis: Service, elsewhere: dls.MongoDispatch) -> AsyncIterator[Repeat]:
    """What was said of an invocation for which `elsewhere` had waited, to be said again; it was purged since."""
    client = admin(redis, decode_responses=False)
    said = client.pubsub()
    said.psubscribe("lakeshore:*")
    messages: list[tuple[bytes, bytes]] = []

    def hear() -> bool:
        while (message := said.get_message()) is not None:
            if message["type"] == "pmessage" and any(told.news.outcome for told in unpack(message["data"])):
                messages.append((message["channel"], message["data"]))
        return bool(messages)

    async def repeat() -> None:
        await wait_until(lambda: subscribers(redis) > 1, 20, "a listener besides this one")
        for channel, message in messages:
            assert client.publish(channel, message) >= 2
        await anyio.sleep(0.5)  # it is heard within that, and is to change nothing

    try:
        async with place.plane() as plane:
            await plane.submit("q", b"body", id="same")
            (claimed,) = await plane.claim(["q"], "w", lease=600.0)
            async with anyio.create_task_group() as group:
                group.start_soon(elsewhere.outcome, "same")
                await wait_until(lambda: incarnations_of(elsewhere).known("same"), 20, "its look")
                await plane.finish(fence(claimed), "succeeded", result=b"first")
            await wait_until(hear, 20, "the message of it")
            assert await wait_until(lambda: plane.purge(0.0)) == 1
        yield repeat
    finally:
        said.close()
        client.close()


@pytest.mark.anyio
@asyncio_only
async def test_a_late_message_of_an_earlier_invocation_is_not_believed(place: Place, redis: Service) -> None:
    """The id was used again after a purge; what is said of the first is no outcome of the second."""
    place = place._replace(redis=redis.url)
    async with place.plane() as plane, place.plane() as elsewhere:
        async with a_message_of_before(place, redis, elsewhere) as repeat:
            await plane.submit("q", b"body", id="same")
            first = incarnations_of(elsewhere).known("same")
            got: list[bytes | None] = []

            async def wait() -> None:
                got.append(await wait_alone(elsewhere))

            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await wait_until(lambda: incarnations_of(elsewhere).known("same") != first, 20, "its look")
                await repeat()
                assert got == []
                (claimed,) = await plane.claim(["q"], "w", lease=600.0)
                await plane.finish(fence(claimed), "succeeded", result=b"second")
            assert got == [b"second"]


async def wait_alone(plane: dls.MongoDispatch) -> bytes | None:
    return (await plane.outcome("same")).result


async def wait_among_many(plane: dls.MongoDispatch) -> bytes | None:
    (outcome,) = (await plane.await_many(["same"], [], timeout=60)).outcomes
    return outcome.result


@pytest.mark.anyio
@pytest.mark.parametrize("wait", [wait_alone, wait_among_many])
async def test_what_is_heard_during_a_look_is_looked_up(
    place: Place, redis: Service, wait: Callable[[dls.MongoDispatch], Awaitable[bytes | None]]
) -> None:
    """It may be said of an earlier invocation, which is the last that was known until that look."""
    place = place._replace(redis=redis.url)
    with place.proxied() as (slow, proxy):
        async with place.plane() as plane, slow.plane() as elsewhere:
            async with a_message_of_before(place, redis, elsewhere) as repeat:
                await plane.submit("q", b"body", id="same")
                got: list[bytes | None] = []

                async def wait_there() -> None:
                    got.append(await wait(elsewhere))

                async with anyio.create_task_group() as group:
                    proxy.stall()
                    group.start_soon(wait_there)
                    await repeat()
                    proxy.mend()
                    await anyio.sleep(0.5)
                    assert got == []
                    (claimed,) = await plane.claim(["q"], "w", lease=600.0)
                    await plane.finish(fence(claimed), "succeeded", result=b"second")
                assert got == [b"second"]


@pytest.mark.anyio
@asyncio_only
async def test_news_without_end_is_handed_on_meanwhile(place: Place, redis: Service) -> None:
    async with place._replace(redis=redis.url).plane() as plane:
        engine: Any = plane._engines.opened()
        live = engine.store._redis
        assert await live.receive(1.0) == (True, [])
        with admin(redis, decode_responses=False) as client, client.pipeline(transaction=False) as pipe:
            for n in range(3 * MAX_NEWS):
                pipe.publish(live._prefix, pack([PublishedNews(News("queue", f"q{n}"))]))
            pipe.execute()
        some: list[News] = []
        while len(some) < 3 * MAX_NEWS:
            fresh, news = await live.receive(10.0)
            assert not fresh
            assert 0 < len(news) <= MAX_NEWS
            some += news
        assert some == [News("queue", f"q{n}") for n in range(3 * MAX_NEWS)]


@pytest.mark.anyio
@asyncio_only
async def test_who_submits_an_id_again_believes_nothing_of_the_first(place: Place, redis: Service) -> None:
    place = place._replace(redis=redis.url)
    async with place.plane() as plane, place.plane() as elsewhere:
        async with a_message_of_before(place, redis, elsewhere) as repeat:
            got: list[bytes | None] = []

            async def call() -> None:
                got.append((await elsewhere.call(elsewhere.submission("q", b"body", id="same"))).result)

            async with anyio.create_task_group() as group:
                group.start_soon(call)
                (claimed,) = await plane.claim(["q"], "w", lease=600.0, timeout=20)
                await repeat()
                assert got == []
                await plane.finish(fence(claimed), "succeeded", result=b"second")
            assert got == [b"second"]
