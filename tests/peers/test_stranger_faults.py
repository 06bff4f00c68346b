"""Our client against a stranger's server that fails: what it knows is used well, what it lacks is said in a sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack
import pytest
from peer_kit import start_seed_server

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from peer_kit import Processes


class Stranger:
    """The server, and what tests tell it and ask it besides."""

    def __init__(self, url: str) -> None:
        self.url = url

    def faults(self, **fields: Any) -> None:
        assert httpx.post(f"{self.url}/-/faults", content=msgpack.packb(fields)).status_code == 200

    def seen(self, path: str) -> int:
        seen: dict[str, int] = msgpack.unpackb(httpx.get(f"{self.url}/-/seen").content)
        return sum(count for name, count in seen.items() if name.endswith(path))


@pytest.fixture(scope="module")
def stranger(started: Processes) -> Stranger:
    return Stranger(start_seed_server(started))


@pytest.fixture
async def q(stranger: Stranger) -> AsyncIterator[dls.Queue]:
    """A queue that no other test knows."""
    stranger.faults()
    async with dls.HttpDispatch(stranger.url) as plane:
        yield dls.Queue(f"q-{new_id()}", dispatch=plane)


async def finished(q: dls.Queue, values: list[str], result: Any = None) -> str:
    """The id of an invocation that has posted these values and succeeded."""
    id = await q.submit("payload")
    job = await q.claim()
    assert job is not None
    for value in values:
        await q.post(job, value)
    await q.ack(job, result)
    return id


async def test_a_submit_whose_answer_is_lost_is_repeated_and_happens_once(q: dls.Queue, stranger: Stranger) -> None:
    await q.submit("first, after which the client knows what the server lacks")
    assert await q.claim() is not None
    stranger.faults(lose_answers={"submit": 2})
    id = await q.submit("payload")
    job = await q.claim()
    assert job is not None
    assert (job.id, await q.claim()) == (id, None)


async def test_an_ack_and_a_frame_whose_answers_are_lost_are_repeated(q: dls.Queue, stranger: Stranger) -> None:
    stranger.faults(lose_answers={"ack": 1, "result-chunk": 2})
    id = await finished(q, ["a", "b"], 42)
    assert await q.result(id) == 42
    assert [value async for value in q.stream(id)] == ["a", "b"]


async def test_a_wait_goes_on_through_an_outage(q: dls.Queue, stranger: Stranger) -> None:
    id = await q.submit("payload")
    job = await q.claim()
    assert job is not None
    results: list[Any] = []

    async def wait() -> None:
        results.append(await q.result(id))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        stranger.faults(unavailable_s=1.0)
        await q.ack(job, "after the outage")
    assert results == ["after the outage"]


@pytest.mark.parametrize("how", ["drop_streams", "end_streams"])
async def test_a_stream_that_breaks_off_is_read_on_from_where_it_was(
    q: dls.Queue, stranger: Stranger, how: str
) -> None:
    """Anywhere: before the first frame, between two, in the middle of one."""
    values = [f"value {i}" for i in range(6)]
    id = await finished(q, values)
    stranger.faults(**{how: [1, 12, 13, 24, 1]})
    assert [value async for value in q.stream(id)] == values


async def test_a_stream_whose_every_connection_breaks_off_comes_to_its_end(q: dls.Queue, stranger: Stranger) -> None:
    """What came before the break is kept: a proxy may give each connection no more than this."""
    values = [f"value {i}" for i in range(20)]
    id = await finished(q, values)
    stranger.faults(drop_streams=[40] * 500)
    assert [value async for value in q.stream(id)] == values


async def test_an_unknown_invocation_is_one_however_the_server_says_it(q: dls.Queue, stranger: Stranger) -> None:
    for plain in (False, True):
        stranger.faults(plain_unknown=plain)
        unknown = new_id()
        with pytest.raises(dls.InvocationNotFound, match=unknown):
            await q.result(unknown)
        with pytest.raises(dls.InvocationNotFound, match=unknown):
            await anext(q.stream(unknown))


async def test_what_the_server_lacks_is_said_in_a_sentence(q: dls.Queue, stranger: Stranger) -> None:
    id = await q.submit("payload")
    with pytest.raises(dls.DispatchError, match="cancel: it is of an older kind"):
        await q.cancel(id)
    with pytest.raises(dls.DispatchError, match="cannot count its queues"):
        await q.count()
    with pytest.raises(dls.DispatchError, match="cannot list invocations"):
        await q.list()


async def test_a_route_that_is_not_there_is_asked_for_once(q: dls.Queue, stranger: Stranger) -> None:
    before = stranger.seen("/submit-many")
    for _ in range(5):
        await q.submit("payload")
    assert stranger.seen("/submit-many") == before + 1
