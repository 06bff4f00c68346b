"""Queue and Job: submitting, waiting and reading; claiming by hand."""

from __future__ import annotations

import asyncio
import stat
import threading
from contextlib import asynccontextmanager, suppress
from datetime import date
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from helpers import run_python, wait_until

from dreamlake.lakeshore import (
    ClaimLost,
    Dispatch,
    EncodeError,
    HttpDispatch,
    InvocationFailed,
    InvocationKilled,
    InvocationNotFound,
    InvocationTimedOut,
    Job,
    Queue,
    StreamRestarted,
    SyncQueue,
    WireError,
    default_dispatch,
    scope,
    thunk,
)
from dreamlake.lakeshore.client import default_plane
from dreamlake.lakeshore.concurrency.portal import portal
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.wire import Envelope, pack

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dreamlake.lakeshore.planes.plane import Plane

pytestmark = pytest.mark.anyio


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    async with Dispatch(tmp_path / "plane.db") as plane:
        yield plane


@pytest.fixture
def q(plane: Plane) -> Queue:
    return Queue("q", dispatch=plane)


async def taken(q: Queue) -> Job:
    """The next job, which must be there."""
    job = await q.claim()
    assert job is not None
    return job


@asynccontextmanager
async def answering(q: Queue) -> AsyncIterator[None]:
    """A worker that gives back what it was given."""

    async def work() -> None:
        while True:
            async with q.working() as job:
                job.result = job.payload

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        yield
        group.cancel_scope.cancel()


def double(x: int) -> int:
    return 2 * x


# --- submitting and waiting -----------------------------------------------------------------------------------------


async def test_a_value_comes_back(q: Queue) -> None:
    with anyio.fail_after(60):
        async with answering(q):
            assert await q.call({"a": (1, b"2")}) == {"a": (1, b"2")}
            id = await q.submit(None)
            assert await q.result(id) is None
            assert await q.result(id) is None  # as often as one likes
    assert len(id) == 26


async def test_a_thunk_goes_as_an_envelope_and_any_other_value_as_it_is(q: Queue) -> None:
    with scope("scenes/7"):
        id = await q.submit(thunk(double, 21), key="k", priority=2)
    await q.submit([1, "two"])
    job = await taken(q)
    envelope = Envelope.from_bytes(pack(job.payload))
    assert (envelope.id, envelope.prefix, envelope.key) == (id, "scenes/7", "k")
    assert envelope.arguments() == ([21], {})
    assert (await taken(q)).payload == [1, "two"]


async def test_of_several_submits_with_one_key_the_first_wins(q: Queue) -> None:
    first = await q.submit(1, key="k")
    assert await q.submit(2, key="k") == first
    assert await Queue("other", dispatch=q.dispatch).submit(2, key="k") != first
    assert (await taken(q)).payload == 1
    assert await q.claim() is None
    for key in ("", 3):
        with pytest.raises(TypeError, match=r"^expected a key, a str that is not empty, or None, got ('')|3$"):
            await q.submit(1, key=key)  # type: ignore[arg-type]


async def test_R102_two_hundred_submits_with_one_key_at_once_are_one_invocation(q: Queue) -> None:
    ids: list[str] = []

    async def submit(i: int) -> None:
        ids.append(await q.submit(i, key="k"))

    async with anyio.create_task_group() as group:
        for i in range(200):
            group.start_soon(submit, i)
    assert len(set(ids)) == 1
    assert await q.count() == 1


async def test_higher_priorities_go_first_then_submit_order(q: Queue) -> None:
    for payload, priority in [("a", 0), ("b", 5), ("c", 5.9), ("d", float("nan")), ("e", -1)]:
        await q.submit(payload, priority=priority)
    assert [(await taken(q)).payload for _ in range(5)] == ["b", "c", "a", "d", "e"]


async def test_many_are_submitted_at_once_or_not_at_all(q: Queue) -> None:
    ids = await q.submit_many(range(2500), priority=1)
    assert len(set(ids)) == await q.count() == 2500
    jobs = [await taken(q) for _ in range(3)]
    assert [(job.id, job.payload) for job in jobs] == list(zip(ids, range(3), strict=False))
    assert await q.submit_many([]) == []
    with pytest.raises(EncodeError):
        await q.submit_many([1, object()])
    assert await q.count() == 2497


async def test_a_function_in_place_of_a_thunk_is_refused_with_the_fix(q: Queue) -> None:
    sentence = r"^a queue takes a Thunk or plain data, not a function: .* q\.submit\(dls\.thunk\(f, x\)\)$"
    with pytest.raises(EncodeError, match=sentence):
        await q.submit(double)


@pytest.mark.parametrize("name", ["", None, 3, double])
def test_a_queue_has_a_name(name: Any) -> None:
    with pytest.raises(TypeError, match=r"^expected the name of a queue, a str that is not empty, got "):
        Queue(name)


def test_a_queue_is_on_a_plane() -> None:
    with pytest.raises(
        TypeError, match=r"^expected dispatch= to be a plane such as dls\.Dispatch\(path\), got 'x\.db'$"
    ):
        Queue("q", dispatch="x.db")  # type: ignore[arg-type]


async def test_an_empty_queue_is_true_and_both_forms_lead_to_each_other(q: Queue) -> None:
    assert q
    assert await q.count() == 0
    assert isinstance(q.sync, SyncQueue)
    assert q.sync
    assert (q.sync.name, q.sync.dispatch) == (q.name, q.dispatch)
    assert (q.sync.aio.name, q.sync.aio.dispatch) == (q.name, q.dispatch)
    assert q.aio is q
    sync = q.sync
    assert sync.sync is sync
    assert repr(q) == f"Queue('q', dispatch={q.dispatch!r})"
    assert repr(sync) == f"SyncQueue('q', dispatch={q.dispatch!r})"
    assert repr(Queue("gpu")) == "Queue('gpu')"


# --- results and errors ---------------------------------------------------------------------------------------------


async def test_R62_a_failure_is_the_builtin_that_was_raised(q: Queue) -> None:
    id = await q.submit(1)
    try:
        {}["missing"]
    except KeyError as exc:
        await q.nack(await taken(q), error=exc)
    with pytest.raises(KeyError) as caught:
        await q.result(id)
    failed = caught.value
    assert isinstance(failed, InvocationFailed)
    assert str(failed) == f"invocation {id!r} ended failed: KeyError: 'missing'"
    assert (failed.id, failed.state, failed.type, failed.message) == (id, "failed", "KeyError", "'missing'")
    assert failed.traceback is not None
    assert '{}["missing"]' in failed.traceback
    assert failed.__notes__ == [f"remote traceback:\n{failed.traceback.rstrip()}"]


class Unspeakable(Exception):
    def __init__(self, one: int, two: int) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        raise ZeroDivisionError


async def test_R61_an_exception_that_cannot_cross_is_a_failure_like_any_other(q: Queue) -> None:
    id = await q.submit(1)
    with pytest.raises(Unspeakable):
        async with q.working():
            raise Unspeakable(1, 2)
    with pytest.raises(InvocationFailed, match="Unspeakable: <the text of this Unspeakable could not be made"):
        await q.result(id)


async def test_each_end_has_its_error(q: Queue, plane: Plane) -> None:
    killed, late, silent = [await q.submit(i) for i in range(3)]
    assert await q.cancel(killed)
    with pytest.raises(InvocationKilled, match=r"ended killed: Cancelled: cancelled before it started$"):
        await q.result(killed)
    job = await taken(q)
    await plane.finish(job.fence, "timeout", error=Failure("TimeoutError", "longer than 1 s"))
    with pytest.raises(InvocationTimedOut, match=rf"'{late}' ended timeout: TimeoutError: longer") as caught:
        await q.result(late)
    assert not isinstance(caught.value, TimeoutError)
    job = await taken(q)
    await plane.finish(job.fence, "failed")
    with pytest.raises(InvocationFailed, match=rf"'{silent}' ended failed: Error: no error was reported$"):
        await q.result(silent)


async def test_R66_an_unknown_or_purged_invocation_is_an_error_never_none(q: Queue, plane: Plane) -> None:
    sentence = "no invocation '{}' on this plane; it was never submitted here or has been purged"
    with pytest.raises(InvocationNotFound, match=sentence.format("nobody")):
        await q.result("nobody")
    id = await q.submit(1)
    await q.ack(await taken(q), "value")
    await wait_until(lambda: plane.purge(0.0), description="the purge of what has ended")
    with pytest.raises(LookupError, match=sentence.format(id)):
        await q.result(id)
    with pytest.raises(InvocationNotFound):
        await q.cancel(id)
    with pytest.raises(InvocationNotFound):
        await q.get(id)


async def test_a_result_that_cannot_be_read_names_its_invocation(q: Queue, plane: Plane) -> None:
    garbled, empty = [await q.submit(i) for i in range(2)]
    await plane.finish((await taken(q)).fence, "succeeded", result=b"\xc1\xc1")
    with pytest.raises(WireError, match=rf"^the result of invocation '{garbled}' cannot be read: "):
        await q.result(garbled)
    await plane.finish((await taken(q)).fence, "succeeded", result=b"")
    assert await q.result(empty) is None


async def test_a_wait_that_is_over_leaves_the_invocation_alone(q: Queue) -> None:
    id = await q.submit(1)
    with pytest.raises(
        TimeoutError, match=rf"^invocation '{id}' had not ended after 0\.02 s; .*, wait again with its id$"
    ):
        await q.result(id, timeout=0.02)
    with anyio.move_on_after(0.02):
        await q.result(id)
    assert (await q.get(id)).state == "queued"
    await q.ack(await taken(q), "late")
    assert await q.result(id) == "late"


async def test_R88_sixty_four_waits_and_their_worker_in_one_loop_all_finish(q: Queue) -> None:
    got: dict[int, Any] = {}

    async def wait(i: int) -> None:
        got[i] = await q.result(await q.submit(i))

    with anyio.fail_after(60):
        async with answering(q), anyio.create_task_group() as group:
            for i in range(64):
                group.start_soon(wait, i)
    assert got == {i: i for i in range(64)}


# --- calls that are left --------------------------------------------------------------------------------------------


async def test_leaving_a_call_cancels_its_invocation(q: Queue) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(q.call, "payload")
        job = await q.claim(timeout=None)
        assert job is not None
        group.cancel_scope.cancel()
    assert (await q.get(job.id)).cancel_requested


async def test_leaving_a_call_with_a_key_leaves_the_invocation_alone(q: Queue) -> None:
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: q.call("payload", key="shared"))
        await wait_until(q.count, description="the submit")
        group.cancel_scope.cancel()
    (row,) = await q.list()
    assert (row.state, row.key) == ("queued", "shared")


async def test_a_call_left_at_any_moment_leaves_nothing_that_would_run(q: Queue) -> None:
    for steps in range(40):
        async with anyio.create_task_group() as group:
            group.start_soon(q.call, steps)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    assert [row.state for row in await q.list() if row.state != "killed"] == []


@pytest.mark.parametrize("size", [1, 2 << 20], ids=["small", "on the lane of the large"])
async def test_a_cancel_never_overtakes_its_submit(
    q: Queue, plane: Plane, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    begun, go_on = threading.Event(), threading.Event()  # the store may live on another loop
    await plane.counts()  # so that the engine is open
    store = (await plane._engines.get()).store
    apply = store.apply

    async def slowly(ops: Any) -> Any:
        if not begun.is_set():
            begun.set()
            await wait_until(go_on.is_set, description="the test to go on")
        return await apply(ops)

    monkeypatch.setattr(store, "apply", slowly)
    monkeypatch.setattr(store, "apply_at_once", lambda ops: None, raising=False)
    async with anyio.create_task_group() as group:
        group.start_soon(q.call, b"x" * size)
        await wait_until(begun.is_set, description="the submit under way")
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            for _ in range(50):
                await anyio.lowlevel.checkpoint()
        go_on.set()
    (row,) = await q.list()
    assert (row.state, row.attempt) == ("killed", 0)


@pytest.mark.timing("a cancel must reach a job claimed by hand within seconds of real time")
async def test_R84_a_cancel_that_waits_comes_back_at_the_end(q: Queue) -> None:
    id = await q.submit("payload")
    stopped = anyio.Event()

    async def body() -> None:
        async with q.working():
            try:
                await anyio.sleep_forever()
            finally:
                stopped.set()

    async def work() -> None:
        sentence = rf"^invocation '{id}' ended killed: Cancelled: cancelled while running$"
        with pytest.raises(InvocationKilled, match=sentence):
            await body()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            await wait_until(lambda: q.count("running"), description="the claim")
            started = anyio.current_time()
            assert await q.cancel(id, wait=True) is True
            assert anyio.current_time() - started <= 5.0
    assert stopped.is_set()
    assert (await q.get(id)).state == "killed"
    assert await q.cancel(id) is False


# --- looking --------------------------------------------------------------------------------------------------------


async def test_rows_are_counted_and_listed_by_queue_and_state(q: Queue) -> None:
    first, second, third = [await q.submit(i) for i in range(3)]
    await Queue("other", dispatch=q.dispatch).submit(1)
    await q.ack(await taken(q))
    await taken(q)
    assert [await q.count(state) for state in ("queued", "running", "succeeded", "failed", None)] == [1, 1, 1, 0, 3]
    assert [row.id for row in await q.list()] == [third, second, first]
    assert [row.id for row in await q.list(limit=1)] == [third]
    assert [row.id for row in await q.list(state="running")] == [second]
    row = await q.get(first)
    assert (row.id, row.queue, row.state, row.attempt) == (first, "q", "succeeded", 1)
    sentence = r"^expected a state, one of failed, killed, queued, running, succeeded, timeout, got 'done'$"
    with pytest.raises(ValueError, match=sentence):
        await q.count("done")
    with pytest.raises(ValueError, match=sentence):
        await q.list(state="done")


# --- claiming by hand -----------------------------------------------------------------------------------------------


async def test_a_job_is_claimed_once_and_acknowledged(q: Queue) -> None:
    id = await q.submit("payload")
    job = await taken(q)
    assert (job.id, job.payload, job.attempt, job.queue, job.failures) == (id, "payload", 1, "q", 0)
    assert await q.claim() is None
    await q.ack(job, {"answer": 42})
    assert await q.result(id) == {"answer": 42}
    assert [frame async for frame in q.stream_frames(id)] == []
    await q.ack(job, "again")  # a repeat changes nothing
    assert await q.result(id) == {"answer": 42}


async def test_a_claim_waits_for_a_job(q: Queue) -> None:
    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            jobs: list[Job | None] = []

            async def wait() -> None:
                jobs.append(await q.claim(timeout=None))

            group.start_soon(wait)
            await anyio.lowlevel.checkpoint()
            await q.submit("late")
    assert [job.payload for job in jobs if job] == ["late"]
    assert await q.claim(timeout=0.02) is None


async def test_a_job_that_was_lost_cannot_be_acknowledged_nor_written_to(q: Queue, plane: Plane) -> None:
    await q.submit("payload")
    job = await taken(q)
    await plane.release(job.fence)
    again = await taken(q)
    assert again.attempt == 2
    for verb in (lambda: q.ack(job), lambda: q.nack(job), lambda: q.nack(job, retry=True), lambda: q.post(job, 1)):
        with pytest.raises(ClaimLost, match=r"attempt 1 is over, the row is at attempt 2; drop this attempt's work$"):
            await verb()
    await q.ack(again, "kept")
    assert await q.result(job.id) == "kept"


async def test_nack_fails_the_job_or_asks_for_another_attempt(q: Queue) -> None:
    id = await q.submit("payload")
    await q.nack(await taken(q), error="not yet", retry=True)
    again = await taken(q)
    assert (again.attempt, again.failures) == (2, 1)
    await q.nack(again, retry=True, delay=3600)
    assert await q.claim() is None
    row = await q.get(id)
    assert (row.state, row.failures) == ("queued", 2)
    for error, sentence in [
        ("bad input", "Error: bad input$"),
        (Failure("Quota", "used up"), "Quota: used up$"),
        (None, "Error: the job was ended as failed, without a reason$"),
    ]:
        id = await q.submit("payload")
        await q.nack(await taken(q), error=error)
        with pytest.raises(InvocationFailed, match=sentence):
            await q.result(id)
        with pytest.raises(InvocationFailed, match=sentence):
            await anext(q.stream(id))


async def test_a_payload_that_cannot_be_read_fails_its_invocation(q: Queue, plane: Plane) -> None:
    id = await plane.submit("q", b"\xc1")
    sentence = rf"the payload of invocation '{id}' cannot be read: "
    with pytest.raises(WireError, match=f"^{sentence}"):
        await q.claim()
    with pytest.raises(InvocationFailed, match=f"WireError: {sentence}"):
        await q.result(id)
    with pytest.raises(InvocationFailed, match=f"WireError: {sentence}"):
        await anext(q.stream(id))


async def test_a_result_that_cannot_be_packed_leaves_the_job_held(q: Queue) -> None:
    await q.submit("payload")
    job = await taken(q)
    await q.post(job, "a")
    with pytest.raises(EncodeError):
        await q.ack(job, object())
    with pytest.raises(EncodeError):
        await q.post(job, object())
    await q.post(job, "b")
    await q.ack(job, "done")
    assert [value async for value in q.stream(job.id)] == ["a", "b"]


# --- posting --------------------------------------------------------------------------------------------------------


async def test_posted_values_are_a_stream_numbered_by_the_journal(q: Queue) -> None:
    id = await q.submit("payload")
    job = await taken(q)
    assert [await q.post(job, value) for value in ("a", None, (1,))] == [0, 1, 2]
    assert job.unsent == {}
    await q.ack(job, "result")
    frames = [frame async for frame in q.stream_frames(id)]
    assert [(frame.kind, frame.seq, frame.body, frame.meta) for frame in frames] == [
        (0, 0, "a", None), (0, 1, None, None), (0, 2, (1,), None), (3, 3, None, {"state": "succeeded"}),
    ]  # fmt: skip
    assert [value async for value in q.stream(id)] == ["a", None, (1,)]
    assert await q.result(id) == "result"


async def test_a_final_post_closes_the_stream_and_not_the_job(q: Queue) -> None:
    id = await q.submit("payload")
    job = await taken(q)
    assert await q.post(job, "a", final=True) == 0
    assert [value async for value in q.stream(id)] == ["a"]
    with pytest.raises(ValueError, match=rf"^the stream of job '{id}' was closed by a final post"):
        await q.post(job, "b")
    await q.ack(job, "result")
    assert [frame.kind async for frame in q.stream_frames(id)] == [0, 3]
    assert await q.result(id) == "result"


@pytest.mark.parametrize("posts", [True, False], ids=["posts", "posts nothing"])
async def test_R37_the_next_attempt_declares_what_it_finds_over(q: Queue, posts: bool) -> None:
    id = await q.submit("payload")
    job = await taken(q)
    await q.post(job, "a")
    await q.nack(job, retry=True)
    job = await taken(q)
    assert job.next_seq == 1
    if posts:
        assert await q.post(job, "x") == 2
    await q.ack(job)
    stream = q.stream(id)
    assert await anext(stream) == "a"
    with pytest.raises(StreamRestarted) as caught:
        await anext(stream)
    assert (caught.value.seq, caught.value.attempt) == (1, 2)
    assert [value async for value in stream] == (["x"] if posts else [])


async def test_a_post_that_was_cancelled_leaves_no_gap_and_nothing_out(q: Queue) -> None:
    id = await q.submit("payload")
    job = await taken(q)
    for steps in range(12):
        async with anyio.create_task_group() as group:
            group.start_soon(q.post, job, steps)
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
    await q.ack(job)
    values = [value async for value in q.stream(id)]
    assert values == sorted(values)
    assert [frame.seq async for frame in q.stream_frames(id)] == list(range(len(values) + 1))
    assert values[-1] == 11


async def test_posts_side_by_side_are_each_there_once(q: Queue) -> None:
    id = await q.submit("payload")
    job = await taken(q)
    async with anyio.create_task_group() as group:
        for i in range(50):
            group.start_soon(q.post, job, i)
    await q.ack(job)
    assert sorted([value async for value in q.stream(id)]) == list(range(50))


# --- working --------------------------------------------------------------------------------------------------------


async def test_working_acknowledges_what_its_body_sets(q: Queue) -> None:
    first, second = [await q.submit(i) for i in range(2)]
    async with q.working() as job:
        job.result = ("done", job.payload)
    async with q.working():
        pass
    assert await q.result(first) == ("done", 0)
    assert await q.result(second) is None


async def test_working_waits_for_a_job_as_long_as_it_is_told(q: Queue) -> None:
    with pytest.raises(TimeoutError, match=r"^queue 'q' had no job within 0\.02 s: wait longer, or use claim\(\)$"):
        async with q.working(timeout=0.02):
            pytest.fail("there is no job")


async def test_working_fails_the_job_of_a_body_that_raises(q: Queue) -> None:
    id = await q.submit(1)
    with pytest.raises(ZeroDivisionError):
        async with q.working() as job:
            job.result = 1 / 0
    with pytest.raises(
        ZeroDivisionError, match=rf"^invocation '{id}' ended failed: ZeroDivisionError: division by zero"
    ):
        await q.result(id)
    assert (await q.get(id)).attempt == 1


async def test_working_fails_the_job_whose_result_cannot_be_packed(q: Queue) -> None:
    id = await q.submit(1)
    with pytest.raises(EncodeError):
        async with q.working() as job:
            job.result = {"when": date(2026, 1, 1)}
    with pytest.raises(InvocationFailed, match=r'EncodeError: .*\$\["when"\]'):
        await q.result(id)


async def test_working_gives_the_job_back_when_it_is_cancelled(q: Queue) -> None:
    id = await q.submit(1)
    with anyio.CancelScope() as scope:
        async with q.working():
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    row = await q.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)


async def test_working_that_is_cancelled_at_its_end_leaves_no_job_behind(q: Queue) -> None:
    for steps in range(30):
        id = await q.submit(steps)
        done = anyio.Event()

        async def work(done: anyio.Event) -> None:
            async with q.working() as job:
                job.result = "done"
                await done.wait()

        async with anyio.create_task_group() as group:
            group.start_soon(work, done)
            await wait_until(lambda: _begun(q, id), description="the claim")  # noqa: B023
            done.set()
            for _ in range(steps):
                await anyio.lowlevel.checkpoint()
            group.cancel_scope.cancel()
        # A claim that was cancelled before its answer had come goes back a moment later.
        await wait_until(lambda: _not_running(q, id), 30.0, "the job to go back, or to be acknowledged")  # noqa: B023
        assert (await q.get(id)).state in ("queued", "succeeded")
        await q.cancel(id)


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio has no cancellation that a shield does not stop
@pytest.mark.parametrize("phase", ["body", "end"])
async def test_working_that_is_cancelled_again_and_again_gives_the_job_back_all_the_same(q: Queue, phase: str) -> None:
    for turns in range(12):
        ids = [await q.submit(number) for number in range(8)]
        go_on, held = asyncio.Event(), list[str]()

        async def work(go_on: asyncio.Event, held: list[str]) -> None:
            async with q.working() as job:
                job.result = "done"
                held.append(job.id)
                await go_on.wait()

        tasks = [asyncio.ensure_future(work(go_on, held)) for _ in ids]
        await wait_until(lambda: len(held) == len(ids), description="the claims")  # noqa: B023
        if phase == "end":
            go_on.set()
            await anyio.lowlevel.checkpoint()
        begun = 0
        while not all(task.done() for task in tasks):
            begun += 1  # one more in each turn, so that some leave while the plane is busy with what others said
            for task in tasks[:begun]:
                task.cancel()
            for _ in range(1 + turns // 4):
                await anyio.lowlevel.checkpoint()
        for id in ids:
            await wait_until(lambda: _not_running(q, id), 30.0, "the job to go back, or to be acknowledged")  # noqa: B023
            row = await q.get(id)
            assert row.state == "queued" or (phase == "end" and row.state == "succeeded")
            assert (row.failures, row.lost) == (0, 0)
            await q.cancel(id)


class Denies(Exception):
    """It does not even say of which class it is."""

    @property
    def __class__(self) -> Any:
        raise ZeroDivisionError


async def test_working_fails_the_job_of_a_body_that_raises_what_cannot_be_looked_at(q: Queue) -> None:
    id = await q.submit(1)
    raised = ""
    try:
        async with q.working():
            raise Denies
    except Exception as exc:  # not kept, for pytest could not show it
        raised = type(exc).__name__
    assert raised == "Denies"
    with pytest.raises(InvocationFailed) as caught:
        await q.result(id)
    assert caught.value.type == "Denies"


async def _not_running(q: Queue, id: str) -> bool:
    return (await q.get(id)).state != "running"


async def _begun(q: Queue, id: str) -> bool:
    return (await q.get(id)).attempt == 1


@pytest.mark.parametrize("raises", [False, True], ids=["done", "failed"])
async def test_working_ends_its_heartbeat(q: Queue, plane: Plane, raises: bool) -> None:
    async def engine() -> Any:
        return await plane._engines.get()

    async def beats() -> bool:
        hub = (await anyio.to_thread.run_sync(lambda: portal().call(engine))).hub
        return hub.waits("claims") is True

    async def body() -> None:
        async with q.working(lease=90.0):
            await wait_until(beats, description="a wait for cancellations")
            if raises:
                raise ZeroDivisionError

    await q.submit(1)
    with suppress(ZeroDivisionError):
        await body()
    await wait_until(lambda: _not(beats), description="its end")


async def _not(look: Any) -> bool:
    return not await look()


async def test_working_renews_its_lease(q: Queue, plane: Plane) -> None:
    id = await q.submit(1)
    async with q.working(lease=0.6) as job:
        begun = (await q.get(id)).lease_until
        assert begun is not None

        async def renewed() -> bool:
            until = (await q.get(id)).lease_until
            return until is not None and until > begun + 0.6

        await wait_until(renewed, 60, "a lease that has been renewed past its first end")
        job.result = "kept"
    assert await q.result(id) == "kept"
    assert (await q.get(id)).attempt == 1


async def test_working_stops_a_body_whose_job_was_lost(q: Queue, plane: Plane) -> None:
    id = await q.submit(1)
    taker: list[Job] = []

    async def body() -> None:
        async with q.working(lease=0.3) as job:
            await plane.release(job.fence)
            taker.append(await taken(q))
            await anyio.sleep_forever()

    with anyio.fail_after(60), pytest.raises(ClaimLost, match=r"while it was worked on; drop this attempt's work$"):
        await body()
    await q.ack(taker[0], "of the other")
    assert await q.result(id) == "of the other"


async def test_a_body_that_succeeds_although_it_is_to_be_cancelled_has_succeeded(q: Queue) -> None:
    id = await q.submit(1)
    async with q.working() as job:
        with anyio.CancelScope(shield=True):
            assert await q.cancel(id)
            await anyio.lowlevel.checkpoint()
            job.result = "all the same"
    assert await q.result(id) == "all the same"


# --- the plane of the process ---------------------------------------------------------------------------------------


@pytest.fixture
def fresh_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(default_plane, "_default", {})
    monkeypatch.setenv("LAKESHORE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("LAKESHORE_URL", raising=False)
    return tmp_path / "home"


def test_the_default_plane_is_a_file_in_the_home_folder(fresh_default: Path, anyio_backend_name: str) -> None:
    q = Queue("q")

    async def submit() -> str:
        async with q.dispatch:
            return await q.submit(1)

    async def look(id: str) -> str:
        async with Dispatch(fresh_default / "lakeshore.db") as plane:
            return (await Queue("q", dispatch=plane).get(id)).state

    assert not fresh_default.exists()
    id = anyio.run(submit, backend=anyio_backend_name)
    assert stat.S_IMODE(fresh_default.stat().st_mode) == 0o700
    assert stat.S_IMODE((fresh_default / "lakeshore.db").stat().st_mode) == 0o600
    assert anyio.run(look, id, backend=anyio_backend_name) == "queued"


def test_the_default_plane_is_found_once_from_any_thread(fresh_default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Plane] = []
    barrier = threading.Barrier(8)

    def find() -> None:
        barrier.wait()
        found.append(default_dispatch())

    threads = [threading.Thread(target=find) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    monkeypatch.setenv("LAKESHORE_HOME", "/elsewhere")
    assert {id(plane) for plane in [*found, default_dispatch(), Queue("q").dispatch]} == {id(found[0])}
    assert isinstance(found[0], Dispatch)


def test_a_server_in_the_environment_is_the_plane(fresh_default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKESHORE_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("LAKESHORE_CLIENT_TOKEN", "a-secret")
    plane = default_dispatch()
    assert isinstance(plane, HttpDispatch)
    assert (plane.url, plane.token, plane.namespace) == ("http://127.0.0.1:1", "a-secret", None)
    assert repr(plane) == "HttpDispatch('http://127.0.0.1:1')"


@pytest.mark.parametrize("url", [
        "http://user:secret@127.0.0.1:1", "http://:secret@127.0.0.1:1", "127.0.0.1:8750", "ftp://host", "http://", "x",
        "http://host:99999", "http://host:0", "http://host/a b", "http://h\u00f6st", "http://host?x=1", "http://host#x",
    ])  # fmt: skip
def test_a_url_in_the_environment_that_is_none_is_refused(
    fresh_default: Path, monkeypatch: pytest.MonkeyPatch, url: str
) -> None:
    monkeypatch.setenv("LAKESHORE_URL", url)
    with pytest.raises(ValueError, match=r"^expected the URL of a control plane, such as http://127") as caught:
        default_dispatch()
    assert "secret" not in str(caught.value)
    monkeypatch.setenv("LAKESHORE_URL", "")
    assert isinstance(default_dispatch(), Dispatch)


@pytest.mark.parametrize("token", ["", "two words", "line\r\nx-injected: 1", "t\u00f6ken"])
def test_a_token_that_would_be_no_header_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(
        ValueError, match=rf"^expected a token, printable ASCII without spaces, got {len(token)} "
    ) as caught:
        HttpDispatch("http://127.0.0.1:1", token=token)
    assert not token or token not in str(caught.value)


def test_a_forked_child_uses_the_same_objects(tmp_path: Path) -> None:
    """What was not open at the fork; what was open is refused, since SQLite's locks do not survive a fork."""
    out, _ = run_python(
        """
        import os, sys, warnings
        os.environ["LAKESHORE_HOME"] = sys.argv[1]
        import dreamlake.lakeshore as dls
        q = dls.SyncQueue("q")
        warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons dislike forks beside threads
        def forked():
            if (child := os.fork()) == 0:
                try:
                    q.submit("child")
                    os._exit(0)
                except dls.DispatchError as exc:
                    os._exit(1 if "was open when this process was forked" in str(exc) else 2)
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        first = forked()
        q.submit("parent")
        print(first, forked(), q.count())
        """,
        str(tmp_path),
    )
    assert out.split() == ["0", "1", "2"]
