"""The reading end of a journal: against a plane whose frames the test writes itself."""

from __future__ import annotations

import gc
import logging
import tracemalloc
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from helpers import run_python, wait_until

from dreamlake.lakeshore import (
    Dispatch,
    InvocationFailed,
    InvocationKilled,
    InvocationNotFound,
    Queue,
    StreamRestarted,
    WireError,
)
from dreamlake.lakeshore.client.cursors import restart_frame
from dreamlake.lakeshore.planes.contract.operations import Fence, FinalFrame
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.wire import Frame, FrameKind, pack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dreamlake.lakeshore.client.streams import Values
    from dreamlake.lakeshore.planes.plane import Plane

pytestmark = pytest.mark.anyio

VALUE, CHUNK, BEGIN, END, ERROR = FrameKind


class Producer:
    """A claimed invocation, and its journal as the test wants it."""

    def __init__(self, plane: Plane) -> None:
        self.plane, self.id, self.next = plane, "", 0
        self.fence = Fence("")

    async def claim(self) -> None:
        """Submit if need be, and claim."""
        if not self.id:
            self.id = await self.plane.submit("q", b"")
        (claimed,) = await self.plane.claim(["q"], "producer")
        assert claimed.id == self.id
        self.fence, self.next = Fence(self.id, "producer", claimed.attempt), claimed.next_seq

    async def write(self, *frames: Frame | bytes, final: bool = False) -> None:
        raw = [one if isinstance(one, bytes) else one.to_bytes() for one in frames]
        await self.plane.append(self.fence, self.next, raw, final=final)
        self.next += len(raw)

    async def values(self, *values: Any) -> None:
        await self.write(*(Frame(VALUE, self.next + i, value) for i, value in enumerate(values)))

    async def finish(self, state: str = "succeeded", error: Failure | None = None, final: Frame | None = None) -> None:
        frame = None if final is None else FinalFrame(self.next, final.to_bytes())
        await self.plane.finish(self.fence, state, error=error, final=frame)

    async def succeed(self) -> None:
        await self.finish(final=Frame(END, self.next, None, {"state": "succeeded"}))


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with Dispatch(tmp_path / "plane.db") as plane:
        yield plane


@pytest.fixture
async def producer(plane: Plane) -> Producer:
    made = Producer(plane)
    await made.claim()
    return made


@pytest.fixture
def q(plane: Plane) -> Queue:
    return Queue("q", dispatch=plane)


async def collect(stream: AsyncIterator[Any], into: list[Any]) -> None:
    """Each value is there as soon as it came."""
    async for value in stream:
        into.append(value)  # noqa: PERF401


async def waiting(plane: Plane) -> bool:
    return (await plane._engines.get()).hub.waiting


# --- values ---------------------------------------------------------------------------------------------------------


async def test_values_come_live_and_end_with_the_journal(q: Queue, producer: Producer) -> None:
    seen: list[Any] = []
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(collect, q.stream(producer.id), seen)
            await producer.values("a", None)
            await wait_until(lambda: seen == ["a", None], description="the first values, while the journal is open")
            await producer.values((1, 2))
            await wait_until(lambda: len(seen) == 3, description="the third one")
            await producer.succeed()
    assert seen == ["a", None, (1, 2)]


async def test_R43_the_cursor_of_each_value_is_where_to_read_on(q: Queue, producer: Producer) -> None:
    await producer.values("a")
    await producer.write(Frame(9, 1, "of a kind to come"), Frame(VALUE, 2, "b"), Frame(VALUE, 3, "c"))
    await producer.succeed()
    stream = q.stream(producer.id)
    assert stream.seq == -1
    cursors = {value: stream.seq async for value in stream}
    assert cursors == {"a": 0, "b": 2, "c": 3}
    for value, seq in cursors.items():
        rest = [value async for value in q.stream(producer.id, since=seq)]
        assert rest == ["a", "b", "c"]["abc".index(value) + 1 :]


async def test_numbers_inside_frames_are_not_believed(q: Queue, producer: Producer) -> None:
    await producer.write(Frame(VALUE, 0, "a"), Frame(VALUE, 0, "b"), Frame(VALUE, 77, "c"))
    await producer.finish(final=Frame(END, -1))
    stream = q.stream(producer.id)
    assert [(value, stream.seq) async for value in stream] == [("a", 0), ("b", 1), ("c", 2)]
    assert [(one.kind, one.seq) async for one in q.stream_frames(producer.id)] == [(0, 0), (0, 1), (0, 2), (3, 3)]


async def test_frames_come_as_they_are(q: Queue, producer: Producer) -> None:
    await producer.write(Frame(BEGIN, 0, None, {"size": 1}), Frame(CHUNK, 1, b"x"), Frame(9, 2, "new", {"a": 1}))
    await producer.write(restart_frame(3, 2))
    frames = q.stream_frames(producer.id, timeout=0.0)
    assert [(one.kind, one.body) for one in [await anext(frames) for _ in range(4)]] == [
        (BEGIN, None), (CHUNK, b"x"), (9, "new"), (ERROR, None),
    ]  # fmt: skip
    with pytest.raises(TimeoutError, match=rf"^invocation '{producer.id}' gave nothing after 3 for 0\.0 s; "):
        await anext(frames)
    await producer.succeed()
    assert (await anext(frames)).terminal
    assert [one async for one in frames] == []
    assert frames.seq == 4


# --- chunks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("announced", [True, False], ids=["size announced", "size unknown"])
async def test_a_value_in_chunks_is_joined(q: Queue, producer: Producer, announced: bool) -> None:
    data = pack({"text": "x" * 100})
    meta = {"size": len(data)} if announced else None
    await producer.values("before")
    await producer.write(Frame(BEGIN, 1, None, meta))
    for at in range(0, len(data), 40):
        await producer.write(Frame(CHUNK, producer.next, data[at : at + 40]))
    last = producer.next - 1
    await producer.values("after")
    await producer.write(Frame(BEGIN, producer.next), Frame(CHUNK, producer.next + 1, pack("end")))
    await producer.succeed()
    stream = q.stream(producer.id)
    assert [(value, stream.seq) async for value in stream] == [
        ("before", 0), ({"text": "x" * 100}, last), ("after", last + 1), ("end", last + 3),
    ]  # fmt: skip


async def test_a_joined_value_is_read_again_from_the_cursor_before_it(q: Queue, producer: Producer) -> None:
    data = pack("y" * 10)
    await producer.values("a")
    await producer.write(Frame(BEGIN, 1, None, {"size": len(data)}), Frame(CHUNK, 2, data[:5]))
    stream = q.stream(producer.id, timeout=0.0)
    assert await anext(stream) == "a"
    with pytest.raises(TimeoutError, match=r"read on with since=0$"):
        await anext(stream)
    await producer.write(Frame(CHUNK, 3, data[5:]))
    assert await anext(stream) == "y" * 10
    assert await anext(q.stream(producer.id, since=0)) == "y" * 10


@pytest.mark.parametrize(
    ("frames", "sentence"),
    [
        ([Frame(CHUNK, 0, b"x")], "frame 0 .*: a CHUNK without a BEGIN: the cursor stands inside a value; since=0 passes"),
        ([Frame(BEGIN, 0, None, {"size": 3}), Frame(CHUNK, 1, "x")], "frame 1 .*: expected the bytes of a CHUNK, got a str"),
        (
            [Frame(BEGIN, 0, None, {"size": 1}), Frame(CHUNK, 1, b"xx")],
            "frame 1 .*: 1 bytes were announced for its value, and 2 came; since=1 passes it over$",
        ),
        (
            [Frame(BEGIN, 0, None, {"size": 9}), Frame(CHUNK, 1, b"xx"), Frame(VALUE, 2, "after")],
            "frame 1 .*: 9 bytes were announced for its value, and 2 came; since=1 passes it over$",
        ),
        ([Frame(BEGIN, 0, None, {"size": 2}), Frame(CHUNK, 1, b"\xc1\xc1")], "frame 1 .* cannot be read"),
        ([b"\xc1"], "frame 0 of invocation '.*' cannot be read: .*; since=0 passes it over$"),
        ([pack([0, 0, 0])], "frame 0 .* cannot be read: not a frame: expected an array"),
    ],
)  # fmt: skip
async def test_garbled_frames_are_named_and_can_be_passed_over(
    q: Queue, producer: Producer, frames: list[Frame | bytes], sentence: str
) -> None:
    await producer.write(*frames)
    if not (isinstance(frames[-1], Frame) and frames[-1].body == "after"):
        await producer.values("after")
    await producer.succeed()
    stream = q.stream(producer.id)
    for _ in range(2):  # asked again it says the same, and does not end as if all were well
        with pytest.raises(WireError, match=sentence) as caught:
            await anext(stream)
    since = int(str(caught.value).rpartition("since=")[2].split()[0])
    assert [value async for value in q.stream(producer.id, since=since)] == ["after"]


# --- ends and errors ------------------------------------------------------------------------------------------------


async def test_an_error_frame_raises_what_the_body_raised(q: Queue, producer: Producer) -> None:
    await producer.values("a")
    error = Failure("ValueError", "boom", "Traceback: there")
    await producer.finish("failed", error, Frame(ERROR, 1, None, error.as_dict()))
    stream = q.stream(producer.id)
    assert await anext(stream) == "a"
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            await anext(stream)
    assert str(caught.value) == f"invocation {producer.id!r} ended failed: ValueError: boom"
    assert isinstance(caught.value, InvocationFailed)
    assert (caught.value.state, caught.value.traceback) == ("failed", "Traceback: there")
    assert caught.value.__notes__ == ["remote traceback:\nTraceback: there"]


async def test_an_error_frame_of_an_old_worker_comes_before_the_row_ends(q: Queue, producer: Producer) -> None:
    await producer.write(Frame(ERROR, -1, None, {"type": "KeyError", "message": "'k'"}), final=True)
    with pytest.raises(KeyError) as caught:
        await anext(q.stream(producer.id))
    assert isinstance(caught.value, InvocationFailed)
    assert caught.value.state == "failed"


@pytest.mark.parametrize("meta", [None, {}, {"type": 3, "message": None}])
async def test_an_error_frame_that_says_little_is_an_error_all_the_same(
    q: Queue, producer: Producer, meta: dict[str, Any] | None
) -> None:
    await producer.write(Frame(ERROR, 0, None, meta), final=True)
    with pytest.raises(InvocationFailed, match=r"ended failed: (Error|3)"):
        await anext(q.stream(producer.id))


async def test_a_body_that_failed_with_a_restart_of_its_own_has_failed(q: Queue, producer: Producer) -> None:
    error = Failure("StreamRestarted", "the stream that it read was restarted")
    await producer.finish("failed", error, Frame(ERROR, 0, None, error.as_dict()))
    with pytest.raises(InvocationFailed, match="ended failed: StreamRestarted: the stream that it read"):
        await anext(q.stream(producer.id))


@pytest.mark.parametrize("frames", [True, False], ids=["frames", "values"])
async def test_a_stream_whose_end_nobody_wrote_never_looks_complete(q: Queue, producer: Producer, frames: bool) -> None:
    await producer.values("a")
    await producer.finish("timeout", Failure("TimeoutError", "too long"))
    stream: Any = q.stream_frames(producer.id) if frames else q.stream(producer.id)
    await anext(stream)
    for _ in range(2):
        with pytest.raises(InvocationFailed, match="ended timeout: TimeoutError: too long"):
            await anext(stream)


async def test_a_cancelled_invocation_raises_whether_or_not_it_had_started(q: Queue, producer: Producer) -> None:
    waiting = await q.submit(1)
    await q.cancel(waiting)
    with pytest.raises(InvocationKilled, match="ended killed: Cancelled: cancelled before it started"):
        await anext(q.stream(waiting))
    await producer.values("a")
    await q.cancel(producer.id)
    await producer.plane.release(producer.fence)
    stream = q.stream(producer.id)
    assert await anext(stream) == "a"
    with pytest.raises(InvocationKilled, match="cancelled while running"):
        await anext(stream)


async def test_a_final_value_ends_the_stream_of_a_row_that_runs_on(q: Queue, producer: Producer) -> None:
    await producer.write(Frame(VALUE, 0, "last"), final=True)
    assert [value async for value in q.stream(producer.id)] == ["last"]


async def test_R66_an_unknown_invocation_is_an_error(q: Queue) -> None:
    with pytest.raises(InvocationNotFound, match="no invocation 'nobody' on this plane"):
        await anext(q.stream("nobody"))
    with pytest.raises(InvocationNotFound):
        await anext(q.stream_frames("nobody"))


async def test_the_choice_on_restart_is_checked(q: Queue) -> None:
    with pytest.raises(ValueError, match=r'^expected on_restart="raise" or "continue", got \'ignore\'$'):
        q.stream("id", on_restart="ignore")  # type: ignore[arg-type]


# --- restarts -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def restarted(producer: Producer) -> Producer:
    """Yielded a and b, then half of a value; began again; yielded x."""
    await producer.values("a", "b")
    await producer.write(Frame(BEGIN, 2, None, {"size": 100}), Frame(CHUNK, 3, b"half"))
    await producer.plane.retry(producer.fence, error=Failure("OSError", "disk"))
    await producer.claim()
    await producer.write(restart_frame(4, 2))
    await producer.values("x")
    await producer.succeed()
    return producer


async def test_R37_a_restart_is_never_merged_silently(q: Queue, restarted: Producer) -> None:
    stream = q.stream(restarted.id)
    seen: list[Any] = []
    with pytest.raises(StreamRestarted) as caught:
        await collect(stream, seen)
    assert seen == ["a", "b"]
    assert (caught.value.id, caught.value.seq, caught.value.attempt) == (restarted.id, 4, 2)
    assert [value async for value in q.stream(restarted.id, since=caught.value.seq)] == ["x"]
    assert [value async for value in stream] == ["x"]  # the same iterator goes on as well
    with pytest.raises(StreamRestarted):  # and so does whoever had seen b
        await anext(q.stream(restarted.id, since=1))


async def test_R37_who_asked_for_it_goes_on_with_the_new_attempt(q: Queue, restarted: Producer) -> None:
    stream = q.stream(restarted.id, on_restart="continue")
    assert [(value, stream.seq) async for value in stream] == [("a", 0), ("b", 1), ("x", 5)]


async def test_R45_a_failed_attempt_that_is_tried_again_ends_neither_stream_nor_result(
    q: Queue, producer: Producer
) -> None:
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            results: list[Any] = []

            async def read() -> None:
                results.append([value async for value in q.stream(producer.id)])

            async def wait() -> None:
                results.append(await q.result(producer.id))

            group.start_soon(read)
            group.start_soon(wait)
            await wait_until(lambda: waiting(producer.plane), description="the two waits")
            await producer.plane.retry(producer.fence, error=Failure("ValueError", "once"))
            await producer.claim()
            assert producer.fence.attempt == 2
            await producer.values("x")
            await producer.plane.finish(
                producer.fence, "succeeded", result=pack("done"), final=FinalFrame(1, Frame(END, 1).to_bytes())
            )
    assert sorted(results, key=str) == [["x"], "done"]


# --- waiting --------------------------------------------------------------------------------------------------------


async def test_a_wait_that_is_over_names_the_cursor_and_can_go_on(q: Queue, producer: Producer) -> None:
    await producer.values("a")
    stream = q.stream(producer.id, timeout=0.05)
    assert await anext(stream) == "a"
    sentence = rf"^invocation '{producer.id}' gave nothing after 0 for 0\.05 s; it goes on, read on with since=0$"
    with pytest.raises(TimeoutError, match=sentence):
        await anext(stream)
    await producer.values("b")
    assert await anext(stream) == "b"


async def test_what_is_there_is_given_however_short_the_time(
    q: Queue, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look that takes longer than the time is not broken off for nothing."""
    page = Dispatch.page

    async def slow(self: Plane, *args: Any, **options: Any) -> Any:
        await anyio.sleep(0.1)
        return await page(self, *args, **options)

    await producer.values("a")
    monkeypatch.setattr(Dispatch, "page", slow)
    stream = q.stream(producer.id, timeout=0.01)
    assert await anext(stream) == "a"
    with pytest.raises(TimeoutError):
        await anext(stream)


async def test_R35_asking_again_and_again_takes_nothing_away(q: Queue, producer: Producer) -> None:
    await producer.succeed()
    producers = [Producer(q.dispatch) for _ in range(20)]
    for one in producers:
        await one.claim()
    got: dict[str, list[Any]] = {one.id: [] for one in producers}

    async def write(one: Producer) -> None:
        for i in range(50):
            await one.values(i)
        await one.succeed()

    async def poll(one: Producer) -> None:
        stream = q.stream(one.id, timeout=0.0)
        while True:
            try:
                got[one.id].append(await anext(stream))
            except TimeoutError:
                await checkpoint()
            except StopAsyncIteration:
                return
            with anyio.move_on_after(0):  # cancelled in the middle, too
                got[one.id].append(await anext(stream, None))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for one in producers:
                group.start_soon(write, one)
                group.start_soon(poll, one)
    for values in got.values():
        assert [value for value in values if value is not None] == list(range(50))


async def test_R40_ten_thousand_frames_in_order_for_each_of_two_readers(q: Queue, producer: Producer) -> None:
    got: list[list[int]] = [[], []]

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for mine in got:
                group.start_soon(collect, q.stream(producer.id), mine)
            for at in range(0, 10_000, 100):
                await producer.values(*range(at, at + 100))
            await producer.succeed()
    assert got == [list(range(10_000))] * 2


async def test_a_reader_holds_one_page_at_most(q: Queue, producer: Producer) -> None:
    for i in range(24):
        await producer.values(b"%d" % i * 2_000_000)
    await producer.succeed()
    tracemalloc.start()
    try:
        count = 0
        async for _ in q.stream(producer.id):
            count += 1
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert count == 24
    assert peak < 80_000_000  # all of them are 100 MB; a page is 16, on its way through a thread twice


async def test_two_tasks_may_share_an_iterator(q: Queue, producer: Producer) -> None:
    stream = q.stream(producer.id)
    got: list[Any] = []

    async def read() -> None:
        async for value in stream:
            got.append(value)
            await checkpoint()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(read)
            for i in range(30):
                await producer.values(i)
            await producer.succeed()
    assert sorted(got) == list(range(30))


# --- leaving --------------------------------------------------------------------------------------------------------


async def _break(stream: Values) -> None:
    async for value in stream:
        if value == 5:
            break


async def _collected_elsewhere(stream: Values) -> None:
    held = [stream]
    del stream
    async for value in held[0]:
        if value == 5:
            break

    async def other() -> None:
        held.clear()
        gc.collect()
        await checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(other)


async def _exception(stream: Values) -> None:
    async def body() -> None:
        async for value in stream:
            1 / (value - 5)

    with pytest.raises(ZeroDivisionError):
        await body()


async def _timeout_while_waiting(stream: Values) -> None:
    with anyio.move_on_after(0.05) as scope:
        async for _ in stream:
            pass
    assert scope.cancelled_caught


async def _timeout_in_the_body(stream: Values) -> None:
    with anyio.move_on_after(0.02) as scope:
        async for _ in stream:
            await anyio.sleep(0.01)
    assert scope.cancelled_caught


async def _another_task(stream: Values) -> None:
    assert await anext(stream) == 0
    got: list[Any] = []

    async def rest() -> None:
        async for value in stream:
            got.append(value)
            if value == 5:
                break

    async with anyio.create_task_group() as group:
        group.start_soon(rest)
    assert got == [1, 2, 3, 4, 5]


async def _aclose(stream: Values) -> None:
    assert await anext(stream) == 0
    await stream.aclose()
    assert [value async for value in stream] == []


async def _closed_while_waiting(stream: Values) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        for _ in range(20):
            await checkpoint()
        await stream.aclose()
        group.cancel_scope.cancel()


WAYS = [
    _break, _collected_elsewhere, _exception, _timeout_while_waiting, _timeout_in_the_body, _another_task, _aclose,
    _closed_while_waiting,
]  # fmt: skip


@pytest.mark.parametrize("leave", WAYS, ids=[way.__name__.strip("_") for way in WAYS])
async def test_R44_leaving_a_stream_leaves_nothing_behind(
    q: Queue, producer: Producer, leave: Any, caplog: pytest.LogCaptureFixture
) -> None:
    await producer.values(*range(10))
    with caplog.at_level(logging.WARNING), anyio.fail_after(60):
        await leave(q.stream(producer.id))
        gc.collect()
        for _ in range(5):
            await checkpoint()
    assert not await waiting(producer.plane)
    assert caplog.records == []
    assert (await q.get(producer.id)).cancel_requested is False
    await producer.succeed()
    assert [value async for value in q.stream(producer.id)] == list(range(10))


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("end", ["left in the middle of a read", "held to the end"])
def test_a_call_stream_that_its_program_leaves_open_is_cancelled_at_the_end(
    tmp_path: Path, backend: str, end: str
) -> None:
    """Nobody closed it, and no collector may come to it before the event loop has ended: the plane's end does it."""
    (tmp_path / "left_open.py").write_text(
        "import dreamlake.lakeshore as dls\n\n\n@dls.udf(queue='q')\nasync def numbers(n):\n    yield n\n"
    )
    script = """
        import sys
        sys.path.insert(0, sys.argv[1])
        import anyio, left_open
        from dreamlake.lakeshore import Dispatch
        kept = []
        async def leave_soon(scope):
            async with Dispatch(sys.argv[1] + "/plane.db") as plane:
                while not await plane.counts():
                    await anyio.sleep(0.01)
            await anyio.sleep(0.1)
            scope.cancel()
        async def main():
            stream = left_open.numbers.remote(3, _dispatch=Dispatch(sys.argv[1] + "/plane.db"))
            if sys.argv[3] == "held to the end":
                kept.append(stream)
            async with anyio.create_task_group() as group:
                with anyio.CancelScope() as scope:
                    group.start_soon(leave_soon, scope)
                    async for _ in stream:
                        pass
        anyio.run(main, backend=sys.argv[2])
    """
    run_python(script, str(tmp_path), backend, end)

    async def states() -> dict[tuple[str, str], int]:
        async with Dispatch(tmp_path / "plane.db") as plane:
            return await plane.counts()

    assert anyio.run(states) == {("q", "killed"): 1}
