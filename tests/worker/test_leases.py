"""Claims that are lost or taken over, heartbeats, and planes that cannot be reached."""

from __future__ import annotations

import sqlite3
import threading
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency import per_loop
from dreamlake.lakeshore.planes.contract.operations import Append, Beat, Claim, Claimed, Fence, Finish, Reap, Requeue
from dreamlake.lakeshore.planes.lease_keeper import LeaseKeeper
from dreamlake.lakeshore.testing import running_worker
from dreamlake.lakeshore.worker import shutdown

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from dreamlake.lakeshore.planes.contract.operations import Operation

pytestmark = pytest.mark.anyio


@pytest.fixture
async def thief(plane: dls.Dispatch) -> AsyncIterator[dls.Dispatch]:
    """Another plane object over the same file."""
    assert plane.path is not None
    async with dls.Dispatch(plane.path) as other:
        yield other


async def steal(plane: dls.Dispatch, thief: dls.Dispatch, id: str) -> Claimed:
    """Take a running invocation from its worker as if the worker were dead, before its next heartbeat."""
    connection = sqlite3.connect(str(plane.path), timeout=20)
    (holder,) = connection.execute("SELECT holder FROM invocation WHERE id = ?", (id,)).fetchone()
    connection.close()
    reaped, (claimed,) = await thief.many([Reap(dead=(holder,)), Claim(("q",), "thief", 1, 30.0, 5)])
    assert [row[0] for row in reaped.rows] == [id]
    assert isinstance(claimed, Claimed)
    assert claimed.id == id
    return claimed


async def test_a_claim_that_was_given_back_and_taken_again_is_deaf_to_its_first_holder(plane: dls.Dispatch) -> None:
    queue = dls.Queue("q", dispatch=plane)
    id = await queue.submit(dls.thunk(bodies.double, 1))
    first = (await plane.claim(["q"], "first"))[0]
    await plane.release(Fence(id, "first", first.attempt))
    second = (await plane.claim(["q"], "second"))[0]
    assert second.attempt == first.attempt + 1
    stale = Fence(id, "first", first.attempt)
    frame = dls.wire.Frame(0, 0, "late").to_bytes()
    for op in (
        Finish(stale, "succeeded", dls.wire.pack("late")),
        Append(stale, 0, (frame,)),
        Requeue(stale),
        Requeue(stale, "retry"),
    ):
        with pytest.raises(dls.ClaimLost):
            await plane.do(op)
    assert await plane.do(Beat("first", ((id, first.attempt),), 30.0)) == ([(id, first.attempt)], [])
    row = await queue.get(id)
    assert (row.state, row.worker, row.failures) == ("running", "second", 0)
    assert (await plane.page(id)).frames == []
    assert await plane.finish(Fence(id, "second", second.attempt), "succeeded", result=dls.wire.pack("right"))
    assert await queue.result(id) == "right"


async def test_a_worker_that_lost_a_claim_stops_its_body_and_says_nothing(
    plane: dls.Dispatch, queue: dls.Queue, thief: dls.Dispatch
) -> None:
    async with running_worker(queue, lease=0.6):
        id = await queue.submit(dls.thunk(bodies.sleeper))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        theirs = await steal(plane, thief, id)
        await wait_until(lambda: bodies.SEEN[-1] == "sleeper cleaned up", description="the end of the body")
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2
        row = await queue.get(id)
        assert (row.state, row.worker, row.attempt) == ("running", "thief", 2)
        assert await thief.finish(Fence(id, "thief", theirs.attempt), "succeeded", result=dls.wire.pack(1))
    assert await queue.result(id) == 1


async def test_a_stream_whose_claim_is_lost_gets_no_more_frames_from_it(
    plane: dls.Dispatch, queue: dls.Queue, thief: dls.Dispatch
) -> None:
    async with running_worker(queue):  # the next heartbeat is ten seconds away, so the append is the first to fail
        id = await queue.submit(dls.thunk(bodies.steps_until_cancelled, "steps"))
        stream = queue.stream_frames(id)
        assert [(await anext(stream)).body for _ in range(3)] == [0, 1, 2]
        theirs = await steal(plane, thief, id)
        await wait_until(lambda: bodies.SEEN, description="the end of the body")
        assert bodies.SEEN == ["steps cleaned up"]
        page = await plane.page(id)
        assert len(page.frames) == theirs.next_seq
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2
        assert (await queue.get(id)).worker == "thief"


async def test_work_that_ends_after_its_claim_expired_counts_when_nobody_else_has_begun(
    plane: dls.Dispatch, queue: dls.Queue
) -> None:
    async with running_worker(queue, concurrency=1):
        id = await queue.submit(dls.thunk(bodies.blocked, "b"))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        connection = sqlite3.connect(str(plane.path), timeout=20)
        (holder,) = connection.execute("SELECT holder FROM invocation WHERE id = ?", (id,)).fetchone()
        connection.close()
        await plane.do(Reap(dead=(holder,)))
        assert (await queue.get(id)).state == "queued"
        bodies.open_gates()
        assert await queue.result(id, timeout=20) == "b"
    row = await queue.get(id)
    assert (row.attempt, row.lost) == (1, 0)


async def test_R11_a_body_longer_than_its_lease_is_started_once(queue: dls.Queue) -> None:
    async with running_worker(queue, lease=1.0, concurrency=1), running_worker(queue, lease=1.0, concurrency=2):
        ids = [await queue.submit(dls.thunk(body, "b", 3.2)) for body in (bodies.sleeper, bodies.slow_thread)]
        assert [await queue.result(id, timeout=30) for id in ids] == ["b", "b"]
        assert bodies.SEEN.count("b began") == 2
        assert [(await queue.get(id)).attempt for id in ids] == [1, 1]


async def test_a_body_that_blocks_its_own_loop_keeps_its_claim(queue: dls.Queue) -> None:
    """Heartbeats do not run on the loop of the bodies: the lease is renewed while that loop is blocked."""
    leases: list[float] = []
    bodies.gate("hog")

    def watch() -> None:
        connection = sqlite3.connect(str(queue.dispatch.path), timeout=20)  # type: ignore[attr-defined]
        while not done.is_set():
            row = connection.execute("SELECT lease_until FROM invocation WHERE state = 'running'").fetchone()
            leases.extend(row or ())
            if len(set(leases)) >= 4:
                bodies.open_gates()
            done.wait(0.05)
        connection.close()

    done = threading.Event()
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        async with running_worker(queue, lease=0.6):
            assert await queue.call(dls.thunk(bodies.block_loop_until, "hog")) == "blocked"
    finally:
        done.set()
        watcher.join()
    assert bodies.SEEN == ["hog began"]
    assert len(set(leases)) >= 4
    assert leases == sorted(leases)


# --- heartbeats -----------------------------------------------------------------------------------------------------


class Recorded(dls.Dispatch):
    """A plane that records its operations, and fails those named in `out`."""

    patience = 0.05

    def __init__(self, path: Any) -> None:
        super().__init__(path)
        self.ops: list[Operation] = []
        self.out: tuple[type[Any], ...] = ()
        self.error: Exception = dls.PlaneUnavailable("out of order")

    async def do(self, op: Operation) -> Any:
        self.ops.append(op)
        if isinstance(op, self.out):
            raise self.error
        return await super().do(op)

    def count(self, kind: type[Any]) -> int:
        return sum(isinstance(op, kind) for op in self.ops)


@pytest.fixture
async def recorded(tmp_path: Path) -> AsyncIterator[Recorded]:
    async with Recorded(tmp_path / "recorded.db") as plane:
        yield plane


async def test_one_beat_renews_all_claims_and_an_idle_worker_sends_none(recorded: Recorded) -> None:
    queue = dls.Queue("q", dispatch=recorded)
    began = time.monotonic()

    def all_in_one() -> int:
        return sum(isinstance(op, Beat) and len(op.claims) == 10 for op in recorded.ops)

    async with running_worker(queue, lease=0.6, concurrency=10):
        ids = [await queue.submit(dls.thunk(bodies.blocked, f"b{n}")) for n in range(10)]
        await wait_until(lambda: len(bodies.SEEN) == 10 and all_in_one() >= 4, description="four beats for all of them")
        assert recorded.count(Beat) <= (time.monotonic() - began) / 0.2 + 1  # every third of the lease
        bodies.open_gates()
        for id in ids:
            await queue.result(id, timeout=20)
        # One heartbeat may have been on its way when the last result came.
        await wait_until(quiet(lambda: recorded.count(Beat), 1.0), description="a second without a beat")


def quiet(count: Callable[[], int], seconds: float) -> Callable[[], bool]:
    """Return a function that tells whether `count()` has not changed for `seconds`."""
    seen: list[tuple[int, float]] = []

    def is_quiet() -> bool:
        now = count(), time.monotonic()
        if not seen or seen[-1][0] != now[0]:
            seen[:] = [now]
        return now[1] - seen[0][1] > seconds

    return is_quiet


async def test_a_heartbeat_that_fails_for_any_reason_is_not_the_last(recorded: Recorded) -> None:
    queue = dls.Queue("q", dispatch=recorded)
    recorded.out, recorded.error = (Beat,), RuntimeError("a bug")
    async with running_worker(queue, lease=0.8):
        id = await queue.submit(dls.thunk(bodies.sleeper))
        await wait_until(lambda: recorded.count(Beat) >= 2, description="heartbeats that fail")
        recorded.out = ()
        until = (await queue.get(id)).lease_until or 0.0
        await wait_until(lambda: renewed(queue, id, until), description="a heartbeat that succeeds")
        await queue.cancel(id, wait=True)


async def renewed(queue: dls.Queue, id: str, until: float) -> bool:
    return ((await queue.get(id)).lease_until or 0.0) > until


async def test_a_keeper_without_its_loop_keeps_nothing(recorded: Recorded, anyio_backend_name: str) -> None:
    """Other workers can take the claims of an event loop that has ended, although the process lives."""
    id = await dls.Queue("q", dispatch=recorded).submit(dls.thunk(bodies.double, 1))
    (claimed,) = await recorded.claim(["q"], "w", lease=60)

    async def leave() -> None:
        keeper = LeaseKeeper(recorded, "w", 0.3, lambda claim, what: None)
        keeper.add(id, claimed.attempt)
        keeper.start()
        keepers.append(keeper)
        await wait_until(lambda: recorded.count(Beat), description="a heartbeat")

    keepers: list[LeaseKeeper] = []
    thread = threading.Thread(target=anyio.run, args=(leave,), kwargs={"backend": anyio_backend_name})
    thread.start()
    await wait_until(lambda: not thread.is_alive(), description="the end of the loop")
    sent = recorded.count(Beat)
    until = time.monotonic() + 1.0
    await wait_until(lambda: time.monotonic() > until, description="three leases to pass")
    assert recorded.count(Beat) <= sent + 1
    keepers[0].stop()


async def test_a_worker_that_has_ended_leaves_the_plane_alone(tmp_path: Path) -> None:
    """Heartbeats run on another loop: none of them may open a plane again that is being closed."""
    before = set(per_loop._open)
    for number in range(30):
        async with dls.Dispatch(tmp_path / f"{number}.db") as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue):
                if number % 2:
                    await queue.call(dls.thunk(bodies.double, 1))
        assert set(per_loop._open) <= before, number


# --- outages --------------------------------------------------------------------------------------------------------


async def test_a_result_is_kept_while_the_plane_is_out_and_delivered_when_it_is_back(recorded: Recorded) -> None:
    queue = dls.Queue("q", dispatch=recorded)
    async with running_worker(queue, concurrency=2):
        ids = [await queue.submit(dls.thunk(bodies.blocked, "b")), await queue.submit(dls.thunk(bodies.acount, 10))]
        await queue.result(ids[1], timeout=20)
        ids[1] = await queue.submit(dls.thunk(bodies.blocked_steps, "steps", 3))
        await wait_until(lambda: "b began" in bodies.SEEN and "steps after 0" in bodies.SEEN, description="the bodies")
        recorded.out = (Claim, Finish, Append)
        bodies.open_gates()
        await wait_until(lambda: recorded.count(Finish) >= 4, description="attempts to deliver")
        assert (await queue.get(ids[0])).state == "running"
        recorded.out = ()
        assert await queue.result(ids[0], timeout=30) == "b"
        assert [value async for value in queue.stream(ids[1])] == [0, 1, 2]
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2  # it claims again
    assert bodies.SEEN.count("b began") == 1
    assert (await queue.get(ids[0])).attempt == 1


async def test_claims_pause_with_growing_delays_while_the_plane_is_out(recorded: Recorded) -> None:
    queue = dls.Queue("q", dispatch=recorded)
    recorded.out = (Claim,)
    async with running_worker(queue):
        await wait_until(lambda: recorded.count(Claim) >= 2, description="two attempts")
        assert recorded.count(Claim) < 10
        recorded.out = ()
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_R33_a_claim_loop_that_cannot_go_on_ends_the_worker(recorded: Recorded) -> None:
    """The worker must not go on without claiming."""
    recorded.out, recorded.error = (Claim,), dls.NotAuthorized("the token was revoked")
    with pytest.raises(dls.NotAuthorized, match="revoked"):
        await dls.run_worker(dls.Queue("q", dispatch=recorded))


async def test_once_says_that_the_plane_is_out(recorded: Recorded) -> None:
    recorded.out = (Claim,)
    with pytest.raises(dls.PlaneUnavailable, match="out of order"):
        await dls.run_worker(dls.Queue("q", dispatch=recorded), once=True)


async def test_a_worker_that_is_cancelled_during_an_outage_ends_all_the_same(
    recorded: Recorded, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutdown, "SHUTDOWN_TIMEOUT", 0.5)
    queue = dls.Queue("q", dispatch=recorded)
    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(dls.run_worker, queue)
            id = await queue.submit(dls.thunk(bodies.adouble, 1))
            recorded.out = (Finish, Requeue)
            await wait_until(lambda: recorded.count(Finish), description="an attempt to deliver")
            group.cancel_scope.cancel()
    assert f"left before it could deliver the outcome of {id}" in caplog.text


async def test_an_early_outcome_is_kept_during_an_outage_too(recorded: Recorded) -> None:
    """A body in a thread timed out. If the thread ends during the outage, neither outcome nor claim is dropped."""
    queue = dls.Queue("q", dispatch=recorded)
    async with running_worker(queue, timeout=0.2, lease=0.6, concurrency=2):
        for _ in range(5):  # on a machine that stalls, its time may be over before it begins
            recorded.out, sent = (Finish,), recorded.count(Finish)
            id = await queue.submit(dls.thunk(bodies.blocked, "b"))
            await wait_until(lambda sent=sent: recorded.count(Finish) > sent, description="an attempt to deliver")
            if bodies.SEEN:
                break
            recorded.out = ()
            with pytest.raises(dls.InvocationTimedOut):
                await queue.result(id, timeout=20)
        bodies.open_gates()
        await wait_until(lambda: "b ended" in bodies.SEEN, description="the end of the thread")
        until = (await queue.get(id)).lease_until or 0.0
        await wait_until(lambda: renewed(queue, id, until), description="a heartbeat for it")
        recorded.out = ()
        with pytest.raises(dls.InvocationTimedOut):
            await queue.result(id, timeout=20)
        assert (await queue.get(id)).attempt == 1


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_R13_a_file_that_is_locked_for_longer_than_anybody_waits_loses_nothing(
    plane: dls.Dispatch, queue: dls.Queue
) -> None:
    """The driver itself gives up after ten seconds; here the write lock is taken for eleven."""
    locker = sqlite3.connect(str(plane.path), isolation_level=None, timeout=20, check_same_thread=False)
    async with running_worker(queue, concurrency=2, lease=4):
        id = await queue.submit(dls.thunk(bodies.blocked, "b"))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        locker.execute("BEGIN IMMEDIATE")
        until = time.monotonic() + 11.0
        bodies.open_gates()
        await wait_until(lambda: time.monotonic() > until, 60, description="the driver to give up")
        locker.execute("COMMIT")
        locker.close()
        assert await queue.result(id, timeout=60) == "b"
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2
    row = await queue.get(id)
    assert (row.attempt, row.lost) == (1, 0)
    assert bodies.SEEN == ["b began", "b ended"]
