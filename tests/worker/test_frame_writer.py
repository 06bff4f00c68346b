"""What generators yield, from the body to its readers: order, speed, memory, and the end."""

from __future__ import annotations

import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until
from reading import read_into

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.body.execute import BodyOutcome
from dreamlake.lakeshore.planes.contract.operations import Append, Fence, Reap
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.worker import frame_writer as frames_module
from dreamlake.lakeshore.worker import outcome as claims_module
from dreamlake.lakeshore.worker.frame_writer import FrameWriter
from dreamlake.lakeshore.worker.outcome import ActiveClaim
from dreamlake.lakeshore.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dreamlake.lakeshore.planes.contract.operations import Operation

pytestmark = pytest.mark.anyio

VALUE, CHUNK, BEGIN, END, ERROR = (dls.wire.FrameKind(kind) for kind in range(5))
GENERATORS = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


async def kinds(queue: dls.Queue, id: str) -> list[tuple[int, int]]:
    return [(frame.seq, frame.kind) for frame in await frames_of(queue, id)]


async def frames_of(queue: dls.Queue, id: str) -> list[dls.wire.Frame]:
    """Return everything that is in the journal now."""
    page = await queue.dispatch.page(id, limit=1_000_000, max_bytes=1 << 40)
    frames = [dls.wire.Frame.from_bytes(data) for _, data in page.frames]
    assert [frame.seq for frame in frames] == [seq for seq, _ in page.frames]
    return frames


@GENERATORS
async def test_R40_a_tight_loop_arrives_in_order_at_two_readers(queue: dls.Queue, is_async: bool) -> None:
    got: list[list[int]] = [[], []]

    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.acount if is_async else bodies.count, 10_000))
        async with anyio.create_task_group() as group:
            for mine in got:
                group.start_soon(read_into, mine, queue.stream(id))
    assert got == [list(range(10_000))] * 2
    assert await kinds(queue, id) == [*((seq, VALUE) for seq in range(10_000)), (10_000, END)]
    assert (await frames_of(queue, id))[-1].meta == {"state": "succeeded"}


async def test_the_journal_of_a_plain_function_holds_its_error_or_nothing(queue: dls.Queue) -> None:
    async with running_worker(queue):
        good = await queue.submit(dls.thunk(bodies.double, 1))
        bad = await queue.submit(dls.thunk(bodies.fail, "no"))
        assert [value async for value in queue.stream(good)] == []
        with pytest.raises(ValueError, match="no"):
            [value async for value in queue.stream(bad)]
    assert await kinds(queue, good) == []
    assert await kinds(queue, bad) == [(0, ERROR)]


async def test_a_generator_without_values_closes_its_journal(queue: dls.Queue) -> None:
    async with running_worker(queue):
        for body in (bodies.count, bodies.acount):
            id = await queue.submit(dls.thunk(body, 0))
            assert [value async for value in queue.stream(id)] == []
            assert await kinds(queue, id) == [(0, END)]


@GENERATORS
async def test_a_stream_of_a_body_that_raised_ends_with_its_error(queue: dls.Queue, is_async: bool) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.afail_after if is_async else bodies.fail_after, 3, "no more"))
        got: list[int] = []
        with pytest.raises(ValueError, match="no more"):
            await read_into(got, queue.stream(id))
    assert got == [0, 1, 2]
    last = (await frames_of(queue, id))[-1]
    assert (last.seq, last.kind, last.body) == (3, ERROR, None)
    assert last.meta is not None
    assert (last.meta["type"], last.meta["message"]) == ("ValueError", "no more")
    assert "fail_after" in last.meta["traceback"]


async def test_the_first_frame_comes_at_once_although_the_body_never_awaits(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.never_awaits, 0.8))
        plane = queue.dispatch

        async def first_seen() -> float:
            # The body blocks this loop, so only the plane knows whether the frame was written before the body went on.
            rows = await plane.rows(RowFilter(id=id))
            return rows[0].started_at or 0.0

        stream = queue.stream_frames(id)
        assert (await anext(stream)).body == "first"
        assert await first_seen()
        assert [frame.kind async for frame in stream] == [VALUE, END]


class Slow(dls.Dispatch):
    """A plane with slow appends that records the size of each."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.appends: list[int] = []
        self.sizes: list[int] = []
        self.open, self.under_way, self.most = anyio.Event(), 0, 0

    async def do(self, op: Operation) -> Any:
        if not isinstance(op, Append):
            return await super().do(op)
        self.appends.append(len(op.frames))
        self.sizes.append(sum(map(len, op.frames)))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            if len(self.appends) > 1:
                await self.open.wait()
            return await super().do(op)
        finally:
            self.under_way -= 1


@pytest.fixture
async def slow(tmp_path: Any) -> Any:
    async with Slow(tmp_path / "slow.db") as plane:
        yield plane


@GENERATORS
async def test_R42_frames_gather_to_a_bound_and_then_the_body_waits(
    slow: Slow, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = list[FrameWriter]()

    class Noted(FrameWriter):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            writers.append(self)

    monkeypatch.setattr(claims_module, "FrameWriter", Noted)
    queue = dls.Queue("q", dispatch=slow)
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.acount if is_async else bodies.count, 20_000))
        await wait_until(lambda: len(slow.appends) == 2, description="the second append")
        await wait_until(lambda: len(writers[0]._waiting) == frames_module.MAX_FRAMES_PER_PAGE, description="the bound")
        slow.open.set()
        assert [value async for value in queue.stream(id)] == list(range(20_000))
    assert slow.appends[0] == 1
    assert max(slow.appends) == frames_module.MAX_FRAMES_PER_PAGE
    assert sum(slow.appends) == 20_000
    assert slow.most == 1  # never two appends of one stream at the same time
    assert await kinds(queue, id) == [*((seq, VALUE) for seq in range(20_000)), (20_000, END)]


async def test_R42_a_body_that_yields_faster_than_the_plane_takes_keeps_its_memory(slow: Slow) -> None:
    """Two batches of at most 16 MiB each exist: one being gathered, one being appended. Nothing else grows."""
    queue, size = dls.Queue("q", dispatch=slow), 1 << 20
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.aendless, size))
        await wait_until(lambda: len(slow.appends) == 2, description="the second append")
        await wait_until(lambda: len(bodies.SEEN) >= 17, description="what fits into one append")
        await wait_until(full_stop(bodies.SEEN), description="the body to wait")
        assert len(bodies.SEEN) <= 2 * 17 + 2
        tracemalloc.start()
        try:
            slow.open.set()
            await wait_until(lambda: len(bodies.SEEN) > 200, 60, description="two hundred values")
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 120 << 20
        assert await queue.cancel(id, wait=True)


def full_stop(seen: list[Any]) -> Any:
    """Return a function that tells whether nothing was added in the last tenth of a second."""
    state = {"n": -1, "since": 0.0}

    def stopped() -> bool:
        if len(seen) != state["n"]:
            state.update(n=len(seen), since=time.monotonic())
        return time.monotonic() - state["since"] > 0.1

    return stopped


async def test_a_reader_that_is_slow_or_absent_does_not_hold_up_the_body(queue: dls.Queue) -> None:
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.acount, 5000))
        stream = queue.stream(id)
        assert await anext(stream) == 0
        assert await queue.result(id, timeout=20) is None
        assert [value async for value in stream] == list(range(1, 5000))


@GENERATORS
async def test_values_larger_than_a_frame_are_cut_and_joined(
    queue: dls.Queue, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames_module, "MAX_VALUE_FRAME_BYTES", 1000)
    monkeypatch.setattr(frames_module, "CHUNK_BYTES", 400)
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.asizes if is_async else bodies.sizes, [10, 1001, 2000, 10]))
        assert [len(value) async for value in queue.stream(id)] == [10, 1001, 2000, 10]
    chunks = {1001: 3, 2000: 6}
    expected = [VALUE, BEGIN, *[CHUNK] * chunks[1001], BEGIN, *[CHUNK] * chunks[2000], VALUE, END]
    assert await kinds(queue, id) == list(enumerate(expected))


async def test_a_large_value_goes_in_appends_of_a_bounded_size(slow: Slow, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_module, "MAX_VALUE_FRAME_BYTES", 1000)
    monkeypatch.setattr(frames_module, "CHUNK_BYTES", 400)
    monkeypatch.setattr(frames_module, "MAX_BYTES_PER_PAGE", 2000)
    slow.open.set()
    queue = dls.Queue("q", dispatch=slow)
    async with running_worker(queue):
        id = await queue.submit(dls.thunk(bodies.asizes, [10, 10_000]))
        assert [len(value) async for value in queue.stream(id)] == [10, 10_000]
    assert sum(slow.appends) == 1 + 1 + 26  # bytes of 10 000 take three more when packed
    assert max(slow.sizes) <= 2000


async def test_a_generator_that_ends_in_the_moment_it_is_stopped_has_not_succeeded(queue: dls.Queue) -> None:
    """Its last values were dropped when it was stopped, so its success does not count."""
    id = await queue.submit(dls.thunk(bodies.count, 1))
    (claimed,) = await queue.dispatch.claim(["q"], "w")
    async with anyio.create_task_group() as group:
        running = ActiveClaim(queue.dispatch, "w", claimed, group)
        running.in_thread = True
        running.begin()
        running.add(0)
        assert running.interrupt("shutdown") is None
        settings = WorkerSettings(concurrency=1, retries=0, timeout=None, lease=30, max_lost=5, grace=1)
        assert await running.deliver(BodyOutcome("succeeded", dls.wire.pack(None)), settings) == "queued"
    assert (await queue.get(id)).state == "queued"
    assert await frames_of(queue, id) == []


@pytest.mark.parametrize("kind", ["killed", "lost"])
async def test_a_stream_whose_producer_is_gone_never_looks_complete(queue: dls.Queue, kind: str) -> None:
    """An invocation cancelled before its start, or lost too often after its first values, ends its stream with an error."""
    plane = queue.dispatch
    id = await queue.submit(dls.thunk(bodies.acount, 3))
    seen: list[int] = []
    if kind == "killed":
        await queue.cancel(id)
    else:
        claimed = (await plane.claim(["q"], "w", lease=0.05, max_lost=1))[0]
        frames = [dls.wire.Frame(VALUE, seq, seq).to_bytes() for seq in range(2)]
        await plane.append(Fence(id, "w", claimed.attempt), 0, frames)
        await wait_until(lambda: ended_by_reaping(queue, id), description="the reaper")
    with pytest.raises(dls.InvocationFailed) as caught:
        await read_into(seen, queue.stream(id))
    assert (caught.value.type, seen) == (("Cancelled", []) if kind == "killed" else ("WorkerLost", [0, 1]))
    assert (await frames_of(queue, id))[-1].kind == ERROR


async def ended_by_reaping(queue: dls.Queue, id: str) -> bool:
    await queue.dispatch.do(Reap())
    return (await queue.get(id)).state == "failed"


async def test_a_stream_that_is_cancelled_while_it_runs_never_looks_complete(queue: dls.Queue) -> None:
    async with running_worker(queue):
        for body in (bodies.steps_until_cancelled, bodies.endless):
            stream = queue.stream(await queue.submit(dls.thunk(body, body.__name__)))
            assert await anext(stream) == 0
            await queue.cancel(stream.id, wait=True)
            with pytest.raises(dls.InvocationKilled):
                [value async for value in stream]
            with pytest.raises(dls.InvocationKilled):  # nor for a reader that comes late
                [value async for value in queue.stream(stream.id)]


async def test_R37_a_retry_after_values_announces_itself(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=1):
        id = await queue.submit(dls.thunk(bodies.other_values_each_time))
        stream = queue.stream(id)
        assert [await anext(stream), await anext(stream)] == ["a", "b"]
        with pytest.raises(dls.StreamRestarted) as caught:
            await anext(stream)
        assert (caught.value.attempt, caught.value.seq) == (2, 2)
        assert [value async for value in queue.stream(id, since=caught.value.seq)] == ["x"]
        assert [value async for value in queue.stream(id, on_restart="continue")] == ["a", "b", "x"]
    assert await kinds(queue, id) == [(0, VALUE), (1, VALUE), (2, ERROR), (3, VALUE), (4, END)]


async def test_R37_a_retry_of_a_stream_without_values_has_nothing_to_announce(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=1):
        id = await queue.submit(dls.thunk(bodies.fails_before_its_first_value))
        assert [value async for value in queue.stream(id)] == ["x"]
    assert await kinds(queue, id) == [(0, VALUE), (1, END)]


async def test_a_released_stream_goes_on_after_an_announcement(queue: dls.Queue) -> None:
    """A drain in the middle of a stream: what was written stays, and the next attempt announces the restart."""
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: dls.run_worker(queue, grace=0.1, stop=stop))
        stream = queue.stream(await queue.submit(dls.thunk(bodies.slow_then_quick, 3)))
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        stop.set()
    row = await queue.get(stream.id)
    assert (row.state, row.attempt, row.failures, row.lost) == ("queued", 1, 0, 0)
    async with running_worker(queue):
        with pytest.raises(dls.StreamRestarted):
            await anext(stream)
        assert [value async for value in stream] == ["again", "and done"]
    assert await kinds(queue, stream.id) == [
        *((n, VALUE) for n in range(3)),
        (3, ERROR),
        (4, VALUE),
        (5, VALUE),
        (6, END),
    ]


class Losing(dls.Dispatch):
    """A plane that performs certain appends but loses their answers."""

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.count, self.answers = 0, list[Any]()

    async def do(self, op: Operation) -> Any:
        answer = await super().do(op)
        if isinstance(op, Append):
            self.count += 1
            self.answers.append(answer)
            if self.count in (1, 3):
                raise dls.PlaneUnavailable("the answer was lost on its way")
        return answer


async def test_R36_an_append_whose_answer_is_lost_is_sent_again_with_the_same_numbers(tmp_path: Any) -> None:
    async with Losing(tmp_path / "losing.db") as plane:
        queue = dls.Queue("q", dispatch=plane)
        async with running_worker(queue):
            id = await queue.submit(dls.thunk(bodies.spaced, 6))
            assert [value async for value in queue.stream(id)] == list(range(6))
        assert await kinds(queue, id) == [*((seq, VALUE) for seq in range(6)), (6, END)]
        assert any(answer.duplicates for answer in plane.answers)


class Refusing(dls.Dispatch):
    """A plane that always refuses results and frames above a size."""

    LIMIT = 10_000

    async def do(self, op: Operation) -> Any:
        size = sum(map(len, op.frames)) if isinstance(op, Append) else len(getattr(op, "result", None) or b"")
        if size > self.LIMIT:
            raise dls.DispatchError(f"{size} bytes are more than the {self.LIMIT} that this server takes")
        return await super().do(op)


async def test_R68_an_oversized_result_fails_once_and_says_what_to_do(tmp_path: Any) -> None:
    async with Refusing(tmp_path / "refusing.db") as plane:
        queue = dls.Queue("q", dispatch=plane)
        async with running_worker(queue, retries=5):
            id = await queue.submit(dls.thunk(bodies.sized, 10_001))
            with pytest.raises(dls.InvocationFailed) as caught:
                await queue.result(id, timeout=20)
            assert caught.value.message == (
                "the plane does not take a result of 10004 bytes: 10004 bytes are more than the 10000 that this server "
                "takes; return less, or write it to a file and return its key"
            )
            assert (await queue.get(id)).attempt == 1
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2


@GENERATORS
async def test_R68_an_oversized_value_of_a_stream_fails_once(tmp_path: Any, is_async: bool) -> None:
    """Also if the refusal comes after the end of the body."""
    async with Refusing(tmp_path / "refusing.db") as plane:
        queue = dls.Queue("q", dispatch=plane)
        async with running_worker(queue, retries=5):
            for sizes in ([10, 20_000], [10, 20_000, 10, 10, 10], [20_000]):
                id = await queue.submit(dls.thunk(bodies.asizes if is_async else bodies.sizes, sizes))
                with pytest.raises(dls.InvocationFailed, match="more than the 10000 that this server takes"):
                    await queue.result(id, timeout=20)
                assert (await queue.get(id)).attempt == 1
                assert [frame.kind for frame in await frames_of(queue, id)][-1:] == [ERROR]
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_the_result_of_a_generator_is_the_manifest_of_its_keys(queue: dls.Queue) -> None:
    cases: Sequence[tuple[list[Any], Any]] = [
        (["a", ["b", "c"]], ["a", "b", "c"]),
        ([{"x": "a"}, {"y": "b"}], {"x": "a", "y": "b"}),
        (["a", 1], None),
        ([], None),
    ]
    async with running_worker(queue):
        for items, manifest in cases:
            for body in (bodies.items, bodies.aitems):
                assert await queue.call(dls.thunk(body, items)) == manifest
