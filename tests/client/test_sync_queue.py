"""SyncQueue: the blocking names, from plain threads, worker threads and running loops."""

from __future__ import annotations

import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from helpers import fresh_python, wait_until_sync

from dreamlake.lakeshore import (
    ClaimLost,
    Dispatch,
    DispatchError,
    InvocationFailed,
    InvocationNotFound,
    Queue,
    StreamRestarted,
    SyncQueue,
    scope,
    thunk,
)
from dreamlake.lakeshore.concurrency import run_sync as _run_sync
from dreamlake.lakeshore.concurrency.portal import portal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dreamlake.lakeshore.planes.plane import Plane


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    plane = Dispatch(tmp_path / "plane.db")
    yield plane
    portal().call(plane.aclose)


@pytest.fixture
def q(plane: Plane) -> SyncQueue:
    return SyncQueue("q", dispatch=plane)


@contextmanager
def answering(q: SyncQueue) -> Iterator[None]:
    """A worker in a thread of its own that gives back what it was given."""
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            job = q.claim(timeout=0.1)
            if job is not None:
                q.ack(job, job.payload)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def double(x: int) -> int:
    return 2 * x


# --- the verbs ------------------------------------------------------------------------------------------------------


def test_every_verb_works_from_a_plain_thread(q: SyncQueue) -> None:
    first = q.submit("a", key="k", priority=3)
    assert q.submit("b", key="k") == first
    more = q.submit_many(["c", "d"])
    assert (q.count(), q.get(first).priority) == (3, 3)
    assert [row.id for row in q.list(state="queued", limit=2)] == more[::-1]
    job = q.claim()
    assert job is not None
    assert [q.post(job, "x"), q.post(job, "y", final=True)] == [0, 1]
    q.ack(job, {"a": (1,)})
    assert q.result(first, timeout=30.0) == {"a": (1,)}
    assert list(q.stream(first)) == ["x", "y"]
    assert [(frame.seq, frame.body) for frame in q.stream_frames(first, since=0)] == [(1, "y"), (2, None)]
    again = q.claim()
    assert again is not None
    q.nack(again, error="no", retry=True)
    assert q.cancel(more[0], wait=True) is True
    last = q.claim()
    assert last is not None
    q.nack(last, error=ValueError("boom"))
    with pytest.raises(ValueError, match=rf"^invocation '{more[1]}' ended failed: ValueError: boom") as caught:
        q.result(more[1])
    assert isinstance(caught.value, InvocationFailed)
    assert q.claim() is None
    assert q.claim(timeout=0.02) is None
    with answering(q):
        assert q.call(("a", 1)) == ("a", 1)


def test_waits_end_with_their_timeout(q: SyncQueue) -> None:
    id = q.submit(1)
    with pytest.raises(TimeoutError, match=rf"^invocation '{id}' had not ended after 0\.02 s"):
        q.result(id, timeout=0.02)
    stream = q.stream(id, timeout=0.02)
    with pytest.raises(TimeoutError, match=rf"^invocation '{id}' gave nothing after -1 for 0\.02 s; .* since=-1$"):
        next(stream)
    with pytest.raises(InvocationNotFound):
        q.result("nobody")


def test_the_ambient_scope_travels(q: SyncQueue) -> None:
    with scope("scenes/7"):
        q.submit(thunk(double, 2))
    job = q.claim()
    assert job is not None
    assert job.payload["prefix"] == "scenes/7"


def test_it_may_be_used_from_many_threads_at_once(q: SyncQueue) -> None:
    with answering(q), ThreadPoolExecutor(16) as pool:
        assert list(pool.map(q.call, range(64))) == list(range(64))


# --- streams --------------------------------------------------------------------------------------------------------


def test_a_stream_crosses_to_the_loop_once_for_a_page(q: SyncQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    id = q.submit(1)
    job = q.claim()
    assert job is not None
    for i in range(300):
        q.post(job, i)
    q.ack(job)
    crossings: list[str] = []

    def counted(fn: Any, *args: Any, hint: str) -> Any:
        crossings.append(hint)
        return _run_sync.run_sync(fn, *args, hint=hint)

    monkeypatch.setattr("dreamlake.lakeshore.client.streams.run_sync", counted)
    stream = q.stream(id)
    assert [(value, stream.seq) for value in stream] == [(i, i) for i in range(300)]
    assert crossings == ["async for value in dls.Queue('q').stream(...)"] * 2  # the page, and that nothing follows


def test_a_stream_that_is_left_leaves_the_invocation_alone(q: SyncQueue) -> None:
    id = q.submit(1)
    job = q.claim()
    assert job is not None
    for value in "abc":
        q.post(job, value)
    stream = q.stream(id)
    for value in stream:
        if value == "b":
            break
    assert next(stream) == "c"
    stream.close()
    assert list(stream) == []
    assert q.get(id).cancel_requested is False


def test_a_restart_is_announced(q: SyncQueue) -> None:
    id = q.submit(1)
    job = q.claim()
    assert job is not None
    q.post(job, "a")
    q.nack(job, retry=True)
    job = q.claim()
    assert job is not None
    q.post(job, "x")
    q.ack(job)
    stream = q.stream(id)
    assert next(stream) == "a"
    with pytest.raises(StreamRestarted, match="was restarted as attempt 2"):
        next(stream)
    assert list(stream) == ["x"]
    assert list(q.stream(id, on_restart="continue")) == ["a", "x"]


# --- working --------------------------------------------------------------------------------------------------------


def test_working_acknowledges_fails_and_gives_back(q: SyncQueue) -> None:
    done, failed, given = [q.submit(i) for i in range(3)]
    with q.working() as job:
        job.result = "done"
    with pytest.raises(ZeroDivisionError), q.working() as job:
        job.result = 1 / 0
    with pytest.raises(KeyboardInterrupt), q.working():
        raise KeyboardInterrupt
    assert q.result(done) == "done"
    with pytest.raises(ZeroDivisionError, match="ended failed"):
        q.result(failed)
    assert (q.get(given).state, q.get(given).failures) == ("queued", 0)
    with q.working():
        pass
    with pytest.raises(TimeoutError, match=r"^queue 'q' had no job within 0\.02 s"), q.working(timeout=0.02):
        pytest.fail("there is no job")


def test_working_renews_its_lease_while_its_thread_is_busy(q: SyncQueue) -> None:
    id = q.submit(1)
    with q.working(lease=0.6) as job:
        begun = q.get(id).lease_until
        assert begun is not None
        wait_until_sync(lambda: (q.get(id).lease_until or 0) > begun + 0.6, 60, "a lease past its first end")
        job.result = "kept"
    assert q.result(id) == "kept"
    assert q.get(id).attempt == 1


def test_working_says_at_the_end_that_the_job_was_lost(q: SyncQueue, plane: Plane) -> None:
    q.submit(1)

    def body() -> None:
        with q.working() as job:
            portal().call(plane.release, job.fence)
            assert q.claim() is not None

    with pytest.raises(ClaimLost, match=r"attempt 1 is over, the row is at attempt 2; drop this attempt's work$"):
        body()


# --- loops ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_sync, "_warned", set())


@pytest.mark.usefixtures("unwarned")
def test_on_a_running_loop_it_works_and_warns_once_with_the_async_spelling(
    q: SyncQueue, anyio_backend_name: str
) -> None:
    async def cell() -> list[Any]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            id = q.submit("payload")
            q.submit("payload")
            with q.working() as job:
                job.result = "done"
            assert q.result(id) == "done"
            assert list(q.stream(id)) == []
        return caught

    caught = anyio.run(cell, backend=anyio_backend_name)
    assert {one.filename for one in caught} == {__file__}
    assert {one.category for one in caught} == {RuntimeWarning}
    assert [str(one.message).partition("until the answer comes: ")[2] for one in caught] == [
        "use `await dls.Queue('q').submit(...)`",
        "use `async with dls.Queue('q').working() as job`",
        "use `await dls.Queue('q').result(...)`",
        "use `async for value in dls.Queue('q').stream(...)`",
    ]


def test_R87_on_the_loop_of_a_worker_it_is_an_error_at_once(q: SyncQueue, anyio_backend_name: str) -> None:
    async def body() -> None:
        with _run_sync.worker_runs_here():
            sentence = r"worker's event loop .* use `await dls\.Queue\('q'\)\.result\(\.\.\.\)`"
            with pytest.raises(DispatchError, match=sentence):
                q.result("id")
            with pytest.raises(DispatchError, match=r"use `async for value in dls\.Queue\('q'\)\.stream"):
                next(q.stream("id"))

    anyio.run(body, backend=anyio_backend_name)


def test_R88_threads_of_a_loop_wait_beside_the_worker_in_it(plane: Plane, anyio_backend_name: str) -> None:
    q = Queue("q", dispatch=plane)
    got: list[Any] = []

    async def work() -> None:
        while True:
            async with q.working() as job:
                job.result = job.payload

    async def wait(i: int) -> None:
        got.append(await anyio.to_thread.run_sync(q.sync.call, i))

    async def main() -> None:
        with anyio.fail_after(60):
            async with anyio.create_task_group() as group:
                group.start_soon(work)
                async with anyio.create_task_group() as waits:
                    for i in range(64):
                        waits.start_soon(wait, i)
                group.cancel_scope.cancel()

    anyio.run(main, backend=anyio_backend_name)
    assert sorted(got) == list(range(64))


# --- Ctrl-C ---------------------------------------------------------------------------------------------------------

WAITING = """
    import signal, sys
    import dreamlake.lakeshore as dls
    signal.signal(signal.SIGINT, signal.default_int_handler)
    q = dls.SyncQueue("q", dispatch=dls.Dispatch(sys.argv[1]))
    try:
        {wait}
    except KeyboardInterrupt:
        print("interrupted")
"""


@pytest.mark.parametrize(
    ("wait", "state"),
    [
        ("q.call('payload')", "killed"),
        ("q.call('payload', key='shared')", "queued"),
        ("q.result(q.submit('payload'))", "queued"),
        ("next(q.stream(q.submit('payload')))", "queued"),
        ("dls.udf(abs, queue='q').remote(-1, _dispatch=q.dispatch)", "killed"),
    ],
)
def test_ctrl_c_ends_a_wait_at_once_and_cancels_a_call(q: SyncQueue, tmp_path: Path, wait: str, state: str) -> None:
    process = fresh_python(WAITING.format(wait=wait), str(tmp_path / "plane.db"))
    wait_until_sync(lambda: q.count(None) == 1, 30, "the submit")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert (out, err, process.returncode) == ("interrupted\n", "", 0)
    assert [row.state for row in q.list()] == [state]
