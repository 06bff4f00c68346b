"""What we submit is run by old workers, through our server and through a stranger's."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING

import peer_bodies as bodies
import pytest
from helpers import wait_until
from peer_bodies import VALUES, arrays, same

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.wire import FrameKind

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from peer_kit import Peer


@pytest.fixture
async def q(peer: Peer, their_queue: str) -> AsyncIterator[dls.Queue]:
    """Our queue, with a worker of the peer's."""
    async with dls.HttpDispatch(peer.url) as plane:
        yield dls.Queue(their_queue, dispatch=plane)


async def test_values_arrive_and_come_back_as_they_were(q: dls.Queue) -> None:
    assert same(await q.call(dls.thunk(bodies.echo, *VALUES, named=VALUES)), (tuple(VALUES), {"named": VALUES}))
    assert await q.call(dls.thunk(bodies.kinds, *VALUES)) == [type(value).__name__ for value in VALUES]


async def test_arrays_arrive_and_come_back_as_they_were(q: dls.Queue) -> None:
    assert same(await q.call(dls.thunk(bodies.echo, *arrays())), (tuple(arrays()), {}))
    assert (await q.call(dls.thunk(bodies.doubled, arrays()[0]))).tolist() == [[0, 2, 4], [6, 8, 10]]


async def test_many_calls_at_once_each_get_their_own_value(q: dls.Queue) -> None:
    ids = await q.submit_many(dls.thunk(bodies.echo, i) for i in range(30))
    assert [await q.result(id) for id in ids] == [((i,), {}) for i in range(30)]


def test_blocking_calls_work_likewise(peer: Peer, their_queue: str) -> None:
    q = dls.SyncQueue(their_queue, dispatch=dls.HttpDispatch(peer.url))
    assert q.call(dls.thunk(bodies.echo, 1)) == ((1,), {})
    assert list(q.stream(q.submit(dls.thunk(bodies.count, 3)))) == [0, 1, 2]


@pytest.mark.parametrize(
    ("type", "text", "message"),
    [
        ("ValueError", "boom", "boom"),
        ("ValueError", "a: b\nc", "a: b\nc"),
        ("ValueError", "", ""),
        ("KeyError", "k", "'k'"),
        ("BufferError", "not one that callers catch by name", "not one that callers catch by name"),
    ],
)
async def test_a_failure_has_the_type_and_message_that_their_worker_joined(
    q: dls.Queue, type: str, text: str, message: str
) -> None:
    """They send the type WorkerError, and the real one as the beginning of the message."""
    id = await q.submit(dls.thunk(bodies.fail, type, text))
    with pytest.raises(dls.InvocationFailed) as caught:
        await q.result(id)
    error = caught.value
    assert (error.id, error.state, error.type, error.message) == (id, "failed", type, message)
    assert isinstance(error, getattr(builtins, type)) == (type != "BufferError")


async def test_values_are_streamed_and_read_again_from_any_place(q: dls.Queue) -> None:
    id = await q.submit(dls.thunk(bodies.count, 5))
    assert [value async for value in q.stream(id)] == [0, 1, 2, 3, 4]
    assert [value async for value in q.stream(id)] == [0, 1, 2, 3, 4]
    assert [value async for value in q.stream(id, since=2)] == [3, 4]
    assert await q.result(id) is None
    tuples = await q.submit(dls.thunk(bodies.count_async, 2))
    assert [value async for value in q.stream(tuples)] == [(0, "tuple"), (1, "tuple")]


async def test_a_value_is_there_before_the_next_one_is_made(q: dls.Queue, tmp_path: Path) -> None:
    id = await q.submit(dls.thunk(bodies.one_then_wait, str(tmp_path / "opened")))
    stream = q.stream(id, timeout=30.0)
    assert await anext(stream) == "first"
    (tmp_path / "opened").touch()
    assert [value async for value in stream] == ["second"]


async def test_a_stream_ends_with_the_error_of_its_body(q: dls.Queue) -> None:
    """The final frame of an old worker carries the number -1 inside; it comes after the others all the same."""
    id = await q.submit(dls.thunk(bodies.count_and_fail, 3))
    stream = q.stream(id)
    assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="boom") as caught:
        await anext(stream)
    assert isinstance(caught.value, dls.InvocationFailed)
    assert (caught.value.type, caught.value.message) == ("ValueError", "boom")
    frames = [frame async for frame in q.stream_frames(id)]
    assert [frame.seq for frame in frames] == [0, 1, 2, 3]
    assert frames[-1].kind == FrameKind.ERROR
    with pytest.raises(ValueError, match="boom"):
        await q.result(id)


async def test_the_stream_of_a_plain_function_is_empty_or_its_error(q: dls.Queue) -> None:
    assert [value async for value in q.stream(await q.submit(dls.thunk(bodies.echo)))] == []
    with pytest.raises(ValueError, match="boom"):
        await anext(q.stream(await q.submit(dls.thunk(bodies.fail, "ValueError", "boom"))))


async def test_the_keys_that_a_generator_yields_are_its_result(q: dls.Queue) -> None:
    assert await q.call(dls.thunk(bodies.keys)) == ["a", "b"]


async def test_a_body_sees_the_scope_of_its_caller(q: dls.Queue) -> None:
    with dls.scope("scenes/0007"):
        id = await q.submit(dls.thunk(bodies.prefix))
    assert await q.result(id) == "scenes/0007"


async def test_of_two_submits_with_one_key_one_is_run(q: dls.Queue, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    keys = [("a", f"{tmp_path}"), ("b", f"{tmp_path}"), ("c", f"{tmp_path}-other")]
    ids = [await q.submit(dls.thunk(bodies.note, str(lines), line), key=key) for line, key in keys]
    assert ids[0] == ids[1] != ids[2]
    assert [await q.result(id) for id in ids] == ["a", "a", "c"]
    assert lines.read_text() == "a\nc\n"


async def test_the_highest_priority_goes_first_and_of_equals_the_oldest(q: dls.Queue, tmp_path: Path) -> None:
    started, opened, lines = (tmp_path / name for name in ("started", "opened", "lines"))
    await q.submit(dls.thunk(bodies.gate, str(started), str(opened)))
    await wait_until(started.exists, 60, "the body that keeps the worker busy")
    order = [("low", -1), ("first", 0), ("second", 0.9), ("high", 2.9), ("higher", 3)]
    ids = [await q.submit(dls.thunk(bodies.note, str(lines), name), priority=number) for name, number in order]
    opened.touch()
    for id in ids:
        await q.result(id)
    assert lines.read_text().split() == ["higher", "high", "first", "second", "low"]


async def test_their_worker_refuses_a_pickled_function_unless_told_otherwise(q: dls.Queue, peer: Peer) -> None:
    with pytest.raises(dls.InvocationFailed, match=r"(?s)pickled.*--allow-pickled") as caught:
        await q.call(dls.thunk(lambda: 42))
    assert caught.value.type == "TransportError"
    trusting = peer.work(f"trusting-{peer.version}", "--allow-pickled")
    assert await dls.Queue(f"trusting-{peer.version}", dispatch=q.dispatch).call(dls.thunk(lambda: 42)) == 42
    assert trusting.alive
