"""Redis only makes things quick: when it is gone, forgetful, wrong or somebody else's too, nothing is lost and nobody is
misled."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import wait_until
from mongo_kit import fence, fresh_ns, own_redis
from mongo_services import Service, in_database
from mongo_streams import admin, streaming, subscribers, told

from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Claimed, FinalFrame

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from mongo_kit import Place
    from wire_proxy import When

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Service]:
    with own_redis(tmp_path / "redis") as service:
        yield service


# Killed --------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("patient")
async def test_a_redis_that_is_killed_and_comes_back(
    place: Place, redis: Service, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams go on without it, gapless; when it is back it is used again; each plane says so once."""
    async with streaming(place, redis.url) as stream:
        await stream.send(20)
        await stream.arrives()
        await wait_until(lambda: subscribers(redis) > 0, description="somebody who listens to Redis")
        assert told(caplog) == []
        redis.kill()
        await stream.send(20)
        await stream.arrives()
        await anyio.sleep(1.5)
        await stream.send(5)
        await stream.arrives()
        lost = await wait_until(lambda: told(caplog), description="what is said of Redis")
        assert 1 <= len(lost) <= 2, lost  # the one who writes and the one who reads
        assert len(set(lost)) == 1
        redis.start()
        await stream.send(5)
        await wait_until(lambda: subscribers(redis) > 0, 30, "a reader who has returned to Redis")
        await stream.arrives()
        await stream.send(20)
        await stream.arrives()
        again = told(caplog)[len(lost) :]
        assert len(again) <= 2, again  # that it is back
        redis.kill()
        await stream.send(5)
        await stream.arrives()
        redis.start()
    assert len(set(told(caplog))) <= 3


@pytest.mark.usefixtures("patient")
async def test_claimers_are_woken_without_redis_and_quickly_with_it(place: Place, redis: Service) -> None:
    """A plane that waits in another engine than the one that submits is woken by Redis, or else by the net."""
    ns = fresh_ns()
    near = place._replace(redis=redis.url)
    async with near.plane(ns) as producer, near.plane(ns) as worker:

        async def trial() -> float:
            """Seconds from the submit's answer to the claim's."""
            took: list[float] = []

            async def claim() -> None:
                (claimed,) = await worker.claim(["q"], "w", lease=600.0, timeout=60)
                took.append(time.monotonic())
                await worker.finish(fence(claimed), "succeeded")

            async with anyio.create_task_group() as group:
                group.start_soon(claim)
                await anyio.sleep(0.3)
                assert took == []
                await producer.submit("q", b"body")
                began = time.monotonic()
            return took[0] - began

        await trial()  # everything is connected
        quick = statistics.median([await trial() for _ in range(5)])
        redis.kill()
        await trial()
        slow = await trial()
        redis.start()
        await trial()

        async def is_quick() -> bool:
            return statistics.median([await trial() for _ in range(3)]) < max(4 * quick, slow / 4)

        await wait_until(is_quick, 60, f"wake-ups as quick as before ({quick:.3f} s; without Redis {slow:.3f} s)")


@pytest.mark.usefixtures("patient")
async def test_waiters_for_outcomes_and_cancels_are_woken_without_redis(place: Place, redis: Service) -> None:
    ns = fresh_ns()
    near = place._replace(redis=redis.url)
    async with near.plane(ns) as one, near.plane(ns) as other:
        id = await one.submit("q", b"body")
        (claimed,) = await other.claim(["q"], "w", lease=600.0)
        heard: list[Any] = []

        async def wait_outcome() -> None:
            heard.append((await one.outcome(id)).state)

        async def wait_cancel() -> None:
            heard.append(await other.next_cancels("w", 60))

        async with anyio.create_task_group() as group:
            group.start_soon(wait_outcome)
            group.start_soon(wait_cancel)
            await anyio.sleep(0.3)
            redis.kill()
            await one.cancel(id)
            await wait_until(lambda: heard == [[(id, 1)]], 20, "the cancel")
            await other.finish(fence(claimed), "killed")
        assert heard[1:] == ["killed"]


@asyncio_only
async def test_a_redis_that_does_not_answer_holds_nobody_up(place: Place, redis: Service) -> None:
    """It is stopped, not dead: connections stay and nothing comes. What the database has done is done."""
    async with streaming(place, redis.url) as stream:
        await stream.send(10)
        await stream.arrives()
        redis.pause()
        try:
            with anyio.fail_after(30):
                await stream.send(5)
                await stream.writer.submit("q", b"body")
                assert len(await stream.writer.claim(["q"], "w")) == 1
            await stream.arrives(30)
        finally:
            redis.go_on()
        await stream.send(5)
        await stream.arrives()


# Forgetful -----------------------------------------------------------------------------------------------------------


@asyncio_only
@pytest.mark.parametrize("how", ["flushed", "trimmed", "emptied"])
@pytest.mark.usefixtures("patient")
async def test_entries_that_redis_no_longer_has_come_from_the_database(place: Place, redis: Service, how: str) -> None:
    """It forgets at a limit, after a crash, or because somebody wants it to."""
    client = admin(redis)

    def entries() -> int:
        return sum(client.xlen(key) for key in client.scan_iter(_type="stream"))

    def forget() -> None:
        if how == "flushed":
            client.flushall()
            return
        for key in client.scan_iter(_type="stream"):
            client.xtrim(key, maxlen=0 if how == "emptied" else 1)

    async with streaming(place, redis.url) as stream:
        for _ in range(4):
            there = entries()
            await stream.send(3)
            await wait_until(lambda there=there: entries() == there + 3, description="the frames in Redis")
            assert await stream.page() == stream.sent
            forget()
            assert await stream.page() == stream.sent
            await stream.arrives()
    client.close()


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_an_id_that_is_used_again_has_no_frames_of_before(place: Place, redis: Service) -> None:
    """Redis keeps entries for a while; the invocation that they were of was purged."""
    place = place._replace(redis=redis.url)
    async with place.plane() as plane, place.plane() as reader:
        for round in range(2):
            await plane.submit("q", b"body", id="same")
            (claimed,) = await plane.claim(["q"], "w", lease=600.0)
            frames = [b"%d.%d" % (round, n) for n in range(3)]
            got: list[bytes] = []

            async def read(got: list[bytes] = got) -> None:
                closed = False
                while not closed:
                    page = await reader.next_page("same", len(got) - 1)
                    got.extend(frame for _, frame in page.frames)
                    closed = page.closed

            async with anyio.create_task_group() as group:
                group.start_soon(read)
                await anyio.sleep(0.2)
                for n, frame in enumerate(frames):
                    await plane.append(fence(claimed), n, [frame])
                await plane.finish(fence(claimed), "succeeded", final=FinalFrame(3, b"END"))
            assert got == [*frames, b"END"]
            assert await wait_until(lambda: plane.purge(0.0)) == 1


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_an_id_that_is_used_again_while_redis_is_away(place: Place, redis: Service) -> None:
    """The purge could not tell it; what it still has when it is back is not of this invocation."""
    async with place._replace(redis=redis.url).plane() as plane:
        for round in range(2):
            if round:
                redis.start()
            await plane.submit("q", b"body", id="same")
            (claimed,) = await plane.claim(["q"], "w", lease=600.0)
            frames = [b"%d.%d" % (round, n) for n in range(3)]

            async def sent(claimed: Claimed = claimed, frames: list[bytes] = frames) -> bool:
                """Once Redis takes what it is sent."""
                await plane.append(fence(claimed), 0, frames)
                return subscribers(redis) > 0

            async with anyio.create_task_group() as group:
                group.start_soon(plane.next_cancels, "nobody", 600)  # listens
                await wait_until(sent, 20, "Redis is used")
                group.cancel_scope.cancel()
            await plane.append(fence(claimed), 3, [b"%d.3" % round])
            await anyio.sleep(0.2)
            assert [frame for _, frame in (await plane.page("same")).frames] == [*frames, b"%d.3" % round]
            if not round:
                redis.kill()
            await plane.finish(fence(claimed), "succeeded")
            assert await wait_until(lambda: plane.purge(0.0)) == 1


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_databases_and_namespaces_that_share_a_redis_keep_apart(
    place: Place, redis: Service, mongo_url: str
) -> None:
    """The same id lives in each of them, with frames of its own."""
    second = f"lakeshore-test-{new_id()}"
    places = [place._replace(redis=redis.url), place._replace(mongo=in_database(mongo_url, second), redis=redis.url)]
    got: dict[tuple[int, str], list[bytes]] = {}

    async def live(number: int, ns: str) -> None:
        mine = b"%d %s" % (number, ns.encode())
        async with places[number].plane(ns) as writer, places[number].plane(ns) as reader:
            await writer.submit("q", mine, id="same")
            (claimed,) = await writer.claim(["q"], "w", lease=600.0)
            assert claimed.body == mine
            frames: list[bytes] = []

            async def write() -> None:
                for n in range(20):
                    await writer.append(fence(claimed), n, [mine])
                    await anyio.sleep(0.01)
                await writer.finish(fence(claimed), "succeeded", result=mine)

            async with anyio.create_task_group() as group:
                group.start_soon(write)
                closed = False
                while not closed:
                    page = await reader.next_page("same", len(frames) - 1)
                    frames += [frame for _, frame in page.frames]
                    closed = page.closed
            assert frames == [mine] * 20
            assert (await reader.outcome("same")).result == mine
            got[number, ns] = frames

    try:
        async with anyio.create_task_group() as group:
            for number in range(2):
                for ns in ("one", "two"):
                    group.start_soon(live, number, ns)
        assert len(got) == 4
    finally:
        from pymongo import MongoClient

        with MongoClient[Any](mongo_url) as client:
            client.drop_database(second)


@asyncio_only
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.usefixtures("patient")
async def test_a_connection_to_redis_dropped_at_each_call(place: Place, redis: Service, when: When) -> None:
    """Of what is sent to it, and of what is asked of it: nobody notices but for the time that it takes."""
    place, dropped = place._replace(redis=redis.url), 0
    with place.proxied("redis") as (through, proxy):
        for at in range(6):
            async with streaming(through, through.redis) as stream:
                proxy.drop(at, when)
                for _ in range(3):
                    await stream.send(2)
                    await stream.arrives()
            dropped += proxy.dropped
            proxy.reset()
    assert dropped > 3


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_what_redis_holds_is_bounded(place: Place, redis: Service) -> None:
    """A stream has a length beyond which it forgets, and goes when nobody has written for a while."""
    client = admin(redis)
    async with streaming(place, redis.url) as stream:
        await stream.send(5)
        await wait_until(lambda: list(client.scan_iter()), description="the stream in Redis")
        keys = list(client.scan_iter())
        assert all(client.ttl(key) > 0 for key in keys), {key: client.ttl(key) for key in keys}
    client.close()
