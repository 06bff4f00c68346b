"""A server that knows the function protocol's own six routes and nothing of ours: what can be done there is done.

`seed_server` stands for such servers; it shares no code with the package.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import http_bodies as bodies
import httpx
import msgpack
import pytest
from helpers import wait_until, wait_until_sync
from http_kit import HERE, Process, read_into, requests_of

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Claim, Fence
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.http import older_server
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with Process(HERE / "seed_server.py", "--port", 0, "--namespaced") as process:
        wait_until_sync(lambda: process.out.endswith("\n"), 30, "the port of the seed server")
        yield f"http://127.0.0.1:{process.out.strip()}"
        assert process.alive, process.err


@pytest.fixture
def faults(url: str) -> Iterator[Callable[..., None]]:
    """Tells the server what is to go wrong; nothing does after the test."""

    def tell(**fields: Any) -> None:
        httpx.post(f"{url}/-/faults", content=msgpack.packb(fields)).raise_for_status()

    yield tell
    tell()


def seen(url: str) -> dict[str, int]:
    """The requests so far, by method and path."""
    return dict(msgpack.unpackb(httpx.get(f"{url}/-/seen").content))


def under_way(url: str) -> dict[str, int]:
    """Those of them that are held."""
    return dict(msgpack.unpackb(httpx.get(f"{url}/-/under-way").content))


@pytest.fixture
async def plane(url: str) -> AsyncIterator[dls.HttpDispatch]:
    async with dls.HttpDispatch(url) as plane:
        yield plane


@pytest.fixture
def queue(plane: dls.HttpDispatch) -> dls.Queue:
    return dls.Queue(f"queue-{new_id()}", dispatch=plane)


def working(queue: dls.Queue, **options: Any) -> Any:
    return running_worker(queue, **{"allow_modules": ["http_bodies"], **options})


async def test_jobs_go_round(queue: dls.Queue) -> None:
    async with working(queue, concurrency=4):
        assert await queue.call(dls.thunk(bodies.double, 21)) == 42
        ids = [await queue.submit(dls.thunk(bodies.adouble, n)) for n in range(30)]
        assert [await queue.result(id, timeout=20) for id in ids] == [2 * n for n in range(30)]
        with pytest.raises(ValueError, match="of a body"):
            await queue.call(dls.thunk(bodies.fail, "of a body"))


async def test_it_is_found_out_once_and_said_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dreamlake.lakeshore.planes")
    async with dls.HttpDispatch(url) as plane:
        before = seen(url)
        for n in range(5):
            await plane.submit(f"queue-{new_id()}", b"x", id=f"{new_id()}-{n}")
        after = seen(url)
    tried = "POST /v1/producer/submit-many"
    assert after[tried] - before.get(tried, 0) == 1
    assert after["POST /v1/producer/submit"] - before.get("POST /v1/producer/submit", 0) == 5
    said = [message for message in caplog.messages if "lacks the route" in message]
    assert said == ["the server lacks the route submit_many: single requests, no heartbeats from now on"]


async def test_many_waits_take_turns(queue: dls.Queue, plane: dls.HttpDispatch) -> None:
    """More waits than requests may be in flight; all come to their end."""
    ids = [await queue.submit(dls.thunk(bodies.double, n)) for n in range(40)]
    results: dict[str, Any] = {}

    async def wait(id: str) -> None:
        results[id] = await queue.result(id, timeout=30)

    async with anyio.create_task_group() as group:
        for id in ids:
            group.start_soon(wait, id)
        await anyio.sleep(0.2)
        async with working(queue, concurrency=4):
            await wait_until(lambda: len(results) == 40, 30, "all results")
    assert [results[id] for id in ids] == [2 * n for n in range(40)]
    assert requests_of(plane) > 80


@pytest.mark.parametrize("body", [bodies.count, bodies.acount])
async def test_streams(queue: dls.Queue, body: Any) -> None:
    async with working(queue):
        id = await queue.submit(dls.thunk(body, 50))
        assert [value async for value in queue.stream(id)] == list(range(50))
        assert [value async for value in queue.stream(id, since=39)] == list(range(40, 50))
        assert await queue.result(id) is None
        id = await queue.submit(dls.thunk(bodies.fail_after, 3))
        got: list[int] = []
        with pytest.raises(ValueError, match="no more"):
            await read_into(got, queue.stream(id))
        assert got == [0, 1, 2]


async def test_a_stream_is_live(queue: dls.Queue) -> None:
    async with working(queue):
        id = await queue.submit(dls.thunk(bodies.gated, "live", 4))
        async for value in queue.stream(id):
            bodies.gate(f"live {value}").set()


async def test_a_look_at_a_journal_that_has_ended_waits_for_its_end(
    queue: dls.Queue, plane: dls.HttpDispatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slowly it comes: only where more may be written a silence says that this was all."""
    async with working(queue):
        id = await queue.submit(dls.thunk(bodies.count, 3))
        await queue.result(id)
    monkeypatch.setattr(older_server, "READ_TIMEOUT", 0.0)
    page = await plane.page(id)
    assert ([seq for seq, _ in page.frames], page.closed) == ([0, 1, 2, 3], True)


@pytest.mark.parametrize("fault", ["drop_streams", "end_streams"])
async def test_a_stream_that_breaks_off_is_read_on(queue: dls.Queue, faults: Callable[..., None], fault: str) -> None:
    """Also where the body ends early as if it were complete, and in the middle of a frame."""
    async with working(queue):
        id = await queue.submit(dls.thunk(bodies.count, 100))
        await queue.result(id)
        faults(**{fault: [1, 10, 57, 200]})
        assert [value async for value in queue.stream(id)] == list(range(100))


async def test_lost_answers_are_asked_for_again(queue: dls.Queue, faults: Callable[..., None]) -> None:
    """Not those of polls: such a server has handed the job out, and no repeat gets it again."""
    async with working(queue):
        faults(lose_answers={"submit": 2, "await": 2, "ack": 2, "result-chunk": 2})
        assert await queue.call(dls.thunk(bodies.double, 4)) == 8
        id = await queue.submit(dls.thunk(bodies.acount, 30))
        assert [value async for value in queue.stream(id)] == list(range(30))


async def test_a_server_that_is_down_for_a_while(queue: dls.Queue, faults: Callable[..., None]) -> None:
    async with working(queue, concurrency=2):
        id = await queue.submit(dls.thunk(bodies.sleeper, 0.5))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        faults(unavailable_s=1.5)
        assert await queue.result(id, timeout=20) == "slept"
        assert await queue.call(dls.thunk(bodies.double, 4)) == 8


async def test_a_retry_becomes_a_failed_ack(queue: dls.Queue) -> None:
    """There is no other try: what the body raised is the outcome."""
    async with working(queue, retries=3):
        with pytest.raises(OSError, match="failure 1"):
            await queue.call(dls.thunk(bodies.fail_times, "once", 1))
    assert bodies.SEEN == ["once"]


async def test_a_worker_that_stops_ends_what_it_cannot_finish(queue: dls.Queue) -> None:
    async with working(queue, grace=0.1):
        id = await queue.submit(dls.thunk(bodies.sleeper))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
    with pytest.raises(dls.InvocationKilled, match="daemon shutdown grace expired"):
        await queue.result(id, timeout=10)


async def test_no_heartbeat_is_sent_and_no_claim_is_lost(queue: dls.Queue, url: str) -> None:
    before = seen(url).get("POST /v1/daemon/heartbeat", 0)
    async with working(queue, lease=0.5):
        assert await queue.call(dls.thunk(bodies.sleeper, 2.0)) == "slept"
    assert seen(url).get("POST /v1/daemon/heartbeat", 0) - before <= 1


async def test_a_claim_that_is_left_costs_no_job(queue: dls.Queue, plane: dls.HttpDispatch, url: str) -> None:
    """The poll of a caller who has left is broken off, since there is no route to release it."""
    for _ in range(5):
        with anyio.move_on_after(0.1):
            await plane.claim([queue.name], "w", timeout=None)
    await wait_until(lambda: "POST /v1/daemon/poll" not in under_way(url), description="the end of the polls there")
    id = await queue.submit(dls.thunk(bodies.double, 4))
    async with working(queue):
        assert await queue.result(id, timeout=20) == 8


async def test_what_it_does_not_know(queue: dls.Queue, plane: dls.HttpDispatch, faults: Callable[..., None]) -> None:
    for verb in (partial(queue.result, "no-such-id", timeout=10), partial(plane.next_page, "no-such-id", -1)):
        for unnamed in (False, True):
            faults(plain_unknown=unnamed)
            with pytest.raises(dls.InvocationNotFound, match="no-such-id"):
                await verb()
    assert [outcome.state for outcome in await plane.current_outcomes(["no-such-id"])] == ["unknown"]


async def test_what_it_cannot_do_is_said(queue: dls.Queue, plane: dls.HttpDispatch, url: str) -> None:
    id = await queue.submit(dls.thunk(bodies.double, 4))
    with pytest.raises(dls.DispatchError, match="the server has no route for cancel: it is of an older kind"):
        await queue.cancel(id)
    with pytest.raises(dls.DispatchError, match=f"the server at {url} cannot list invocations: .* of an older kind"):
        await plane.rows(RowFilter())
    with pytest.raises(dls.DispatchError, match=f"the server at {url} cannot count its queues: .* of an older kind"):
        await queue.count()
    with pytest.raises(dls.DispatchError, match="purge"):
        await plane.purge(1.0)


async def test_a_claim_has_the_attempt_that_such_servers_have(queue: dls.Queue, plane: dls.HttpDispatch) -> None:
    await queue.submit(dls.thunk(bodies.double, 4))
    (claimed,) = await plane.do(Claim((queue.name,), "w"))
    assert (claimed.attempt, claimed.failures, claimed.lost, claimed.next_seq, claimed.trusted) == (1, 0, 0, 0, False)
    assert claimed.queue == queue.name
    fence = Fence(claimed.id, "w", claimed.attempt)
    assert await plane.append(fence, 0, [b"\x94\x00\x00\x01\xc0"]) == (1, 0)
    assert await plane.append(fence, 0, [b"\x94\x00\x00\x01\xc0"]) == (0, 1)
    assert await plane.finish(fence, "succeeded")
    assert (await plane.page(claimed.id)).frames == [(0, b"\x94\x00\x00\x01\xc0")]


async def test_namespaces_and_tokens(url: str) -> None:
    async with dls.HttpDispatch(url, namespace="one") as one, dls.HttpDispatch(url, namespace="two") as two:
        id = await one.submit("q", b"x")
        assert [outcome.state for outcome in await one.current_outcomes([id])] == ["pending"]
        assert [outcome.state for outcome in await two.current_outcomes([id])] == ["unknown"]
    with Process(HERE / "seed_server.py", "--port", 0, "--token", "right") as process:
        wait_until_sync(lambda: process.out.endswith("\n"), 30, "the port of the seed server")
        there = f"http://127.0.0.1:{process.out.strip()}"
        async with dls.HttpDispatch(there, token="wrong") as plane:
            for verb in (partial(plane.submit, "q", b"x"), partial(plane.outcome, "some-id")):
                with pytest.raises(dls.NotAuthorized), anyio.fail_after(10):
                    await verb()
        async with dls.HttpDispatch(there, token="right") as plane:
            await plane.submit("q", b"x")


async def test_closing_leaves_nothing(url: str) -> None:
    plane = dls.HttpDispatch(url)
    id = await plane.submit(f"queue-{new_id()}", b"x")

    async def wait(verb: Callable[[], Any]) -> None:
        with pytest.raises(dls.PlaneUnavailable, match="closed"):
            await verb()

    async with anyio.create_task_group() as group:
        group.start_soon(wait, partial(plane.outcome, id))
        group.start_soon(wait, partial(plane.next_page, id, -1))
        group.start_soon(wait, partial(plane.claim, ["nobody-submits-here"], "w", timeout=None))
        await anyio.sleep(0.3)
        began = time.monotonic()
        await plane.aclose()
        assert time.monotonic() - began < 20  # less than any of them is held
