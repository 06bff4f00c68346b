"""What a worker takes, in which order, on which terms; and how it ends."""

from __future__ import annotations

import logging
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Reap, Submit
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def all_ended(queue: dls.Queue, ids: list[str]) -> None:
    for id in ids:
        await queue.result(id, timeout=30)


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"concurrency": 0}, "a worker cannot work with concurrency=0 (at least 1)"),
        ({"retries": -1, "max_lost": 0}, "a worker cannot work with retries=-1 (at least 0), max_lost=0 (at least 1)"),
        ({"lease": 0.0}, "a worker cannot work with lease=0.0 (seconds above 0)"),
        ({"lease": float("inf")}, "a worker cannot work with lease=inf (seconds above 0)"),
        ({"timeout": -1.0}, "a worker cannot work with timeout=-1.0 (seconds above 0)"),
        ({"grace": float("nan")}, "a worker cannot work with grace=nan (at least 0)"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(queue: dls.Queue, options: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        await dls.run_worker(queue, **options)
    assert str(caught.value) == sentence


async def test_queues_of_two_planes_are_refused(queue: dls.Queue) -> None:
    other = dls.Queue("q", dispatch=dls.Dispatch())
    for queues in ([queue, other], []):
        with pytest.raises(ValueError, match="expected one queue or several of the same dispatch plane"):
            await dls.run_worker(queues)


async def test_an_unknown_runtime_policy_is_refused(queue: dls.Queue) -> None:
    with pytest.raises(dls.TransportError, match="expected the runtime policy 'strict', 'minor' or 'off', got 'some'"):
        await dls.run_worker(queue, runtime_policy="some")


async def test_the_root_of_keys_is_the_option_or_the_environment(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKESHORE_ROOT", str(tmp_path / "env"))
    await queue.submit(dls.thunk(bodies.write_and_return, "one"))
    await queue.submit(dls.thunk(bodies.write_and_return, "two"))
    assert await dls.run_worker(queue, once=True) == 1
    assert await dls.run_worker(queue, once=True, root=tmp_path / "option") == 1
    assert (tmp_path / "env" / "one").exists()
    assert (tmp_path / "option" / "two").exists()


# --- order ----------------------------------------------------------------------------------------------------------


async def test_R16_one_worker_keeps_the_order(queue: dls.Queue) -> None:
    ids = await queue.submit_many([dls.thunk(bodies.note, number) for number in range(50)])
    async with running_worker(queue):
        await all_ended(queue, ids)
    assert bodies.SEEN == list(range(50))


@pytest.mark.timing("a free worker must take the job within a second")
async def test_R16_an_idle_worker_takes_what_a_busy_one_has_no_slot_for(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=1):
        await queue.submit(dls.thunk(bodies.blocked, "long"))
        await wait_until(lambda: bodies.SEEN, description="the start of the long body")
        async with running_worker(queue, concurrency=1):
            began = time.monotonic()
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2
            assert time.monotonic() - began <= 1.0
            assert bodies.SEEN == ["long began"]
            bodies.open_gates()


async def test_R99_the_highest_priority_is_next(queue: dls.Queue) -> None:
    ids = await queue.submit_many([dls.thunk(bodies.blocked, "first")])
    async with running_worker(queue):
        await wait_until(lambda: bodies.SEEN, description="the first body")
        ids += await queue.submit_many([dls.thunk(bodies.note, "low")] * 1000)
        ids.append(await queue.submit(dls.thunk(bodies.note, "high"), priority=1))
        bodies.open_gates()
        await all_ended(queue, ids)
    assert bodies.SEEN[:4] == ["first began", "first ended", "high", "low"]


async def test_R99_several_queues_are_one_order(plane: dls.Dispatch) -> None:
    one, two, other = (dls.Queue(name, dispatch=plane) for name in ("one", "two", "other"))
    for number, (queue, priority) in enumerate([(one, 0), (two, 0), (two, 5), (one, 9), (other, 99), (one, 5)]):
        await queue.submit(dls.thunk(bodies.note, number), priority=priority)
    async with running_worker([two, one]):
        await wait_until(lambda: len(bodies.SEEN) == 5, description="five bodies")
    assert bodies.SEEN == [3, 2, 5, 0, 1]
    assert await other.count() == 1


# --- concurrency ----------------------------------------------------------------------------------------------------


async def test_a_hundred_def_bodies_run_at_once(queue: dls.Queue) -> None:
    """anyio's own bound for threads is forty."""
    ids = await queue.submit_many([dls.thunk(bodies.meet, 100)] * 100)
    async with running_worker(queue, concurrency=100):
        assert [await queue.result(id, timeout=60) for id in ids] == [True] * 100


async def test_no_more_bodies_run_than_there_are_slots(queue: dls.Queue) -> None:
    ids = await queue.submit_many([dls.thunk(bodies.acrowd)] * 20 + [dls.thunk(bodies.crowd)] * 20)
    async with running_worker(queue, concurrency=4):
        assert max([await queue.result(id, timeout=60) for id in ids]) <= 4
        four = await queue.submit_many([dls.thunk(bodies.meet, 4)] * 4)
        assert [await queue.result(id, timeout=60) for id in four] == [True] * 4


async def test_R88_sixty_four_waiters_and_a_worker_in_one_loop(queue: dls.Queue) -> None:
    got: list[int] = []

    async def wait(n: int) -> None:
        got.append(await queue.call(dls.thunk(bodies.double if n % 2 else bodies.adouble, n)))

    async with running_worker(queue, concurrency=4), anyio.create_task_group() as group:
        for n in range(64):
            group.start_soon(wait, n)
    assert sorted(got) == [2 * n for n in range(64)]


async def test_R89_bodies_see_the_context_and_leave_nothing_in_it(queue: dls.Queue, tmp_path: Path) -> None:
    token = bodies.TENANT.set("acme")
    try:
        async with running_worker(queue, root=tmp_path):
            for body in (bodies.context, bodies.acontext, bodies.gen_context, bodies.agen_context):
                call = dls.thunk(body)
                with dls.scope("runs"):
                    first, second = await queue.submit(call), await queue.submit(call)
                for id in (first, second):
                    if body in (bodies.context, bodies.acontext):
                        found = await queue.result(id, timeout=20)
                    else:
                        [found] = [value async for value in queue.stream(id)]
                    assert found == ["acme", "runs", id, 1]
            assert await queue.call(dls.thunk(bodies.leave_scope_open)) == "left/open"
            id = await queue.submit(dls.thunk(bodies.acontext))
            assert await queue.result(id, timeout=20) == ["acme", "", id, 1]
            bodies.forget()
    finally:
        bodies.TENANT.reset(token)
    assert bodies.TENANT.get() == "nobody"
    assert dls.run.prefix == ""


async def test_a_row_lost_twice_runs_alone(queue: dls.Queue) -> None:
    """It may be what kills its process: the others are not begun beside it, and cost nothing for it."""
    suspect = await queue.submit(dls.thunk(bodies.blocked, "suspect"), priority=5)

    async def reaped() -> bool:
        return bool((await queue.dispatch.do(Reap(alive=()))).rows)

    for _ in range(2):
        assert await queue.dispatch.claim(["q"], "dead", lease=0.01)
        await wait_until(reaped, description="the end of a lease")
    others = [await queue.submit(dls.thunk(bodies.note, n)) for n in range(6)]
    async with running_worker(queue, concurrency=4):
        await wait_until(lambda: bodies.SEEN, description="the first body")
        # What came along in the same claim went back, and stays where it is.
        await wait_until(lambda: all_queued(queue, others), description="the others to be given back")
        assert bodies.SEEN == ["suspect began"]
        bodies.open_gates()
        await all_ended(queue, [suspect, *others])
    assert bodies.SEEN[:2] == ["suspect began", "suspect ended"]
    assert sorted(bodies.SEEN[2:]) == list(range(6))
    assert [(row.failures, row.lost) for row in [await queue.get(id) for id in others]] == [(0, 0)] * 6


async def all_queued(queue: dls.Queue, ids: list[str]) -> bool:
    return all([(await queue.get(id)).state == "queued" for id in ids])


async def test_a_row_lost_twice_waits_for_those_that_run(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=2):
        first = await queue.submit(dls.thunk(bodies.blocked, "first"))
        await wait_until(lambda: bodies.SEEN, description="the first body")
        suspect = await lost_twice(queue, dls.thunk(bodies.note, "suspect"))
        await wait_until(lambda: seen_and_given_back(queue, suspect), description="the suspect to be given back")
        assert bodies.SEEN == ["first began"]
        bodies.open_gates()
        await all_ended(queue, [first, suspect])
    assert bodies.SEEN == ["first began", "first ended", "suspect"]


async def lost_twice(queue: dls.Queue, thunk: dls.Thunk[Any]) -> str:
    """Submit what is lost twice elsewhere before the worker of this queue sees it."""
    hidden = dls.Queue("hidden", dispatch=queue.dispatch)
    id = await hidden.submit(thunk)

    async def reaped() -> bool:
        return bool((await queue.dispatch.do(Reap(alive=()))).rows)

    for _ in range(2):
        assert await queue.dispatch.claim(["hidden"], "dead", lease=0.01)
        await wait_until(reaped, description="the end of a lease")
    await move(queue.dispatch, id, "q")
    return id


async def move(plane: Any, id: str, queue: str) -> None:
    """No verb does that: behind the plane's back."""
    import sqlite3

    connection = sqlite3.connect(plane.path, isolation_level=None, timeout=20)
    connection.execute("UPDATE invocation SET queue = ? WHERE id = ?", (queue, id))
    connection.close()


async def seen_and_given_back(queue: dls.Queue, id: str) -> bool:
    row = await queue.get(id)
    return row.attempt >= 3 and row.state == "queued"


# --- trust ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "trusted", "runs"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False), (False, False, False)],
)
async def test_pickles_run_where_they_are_allowed(
    queue: dls.Queue, allow: bool | None, trusted: bool, runs: bool
) -> None:
    """None: those that were submitted on this machine, not those that came through a server."""
    body = dls.thunk(lambda: "unpickled").to_envelope(id="pickled").to_bytes()
    await queue.dispatch.do(Submit("pickled", "q", body, trusted=trusted))
    async with running_worker(queue, allow_pickled=allow):
        if runs:
            assert await queue.result("pickled", timeout=20) == "unpickled"
        else:
            with pytest.raises(dls.InvocationFailed, match="submitted as a pickle, which this worker refuses"):
                await queue.result("pickled", timeout=20)


async def test_pickles_from_a_plane_that_others_write_to_are_refused(
    queue: dls.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(queue.dispatch), "local", False)
    async with running_worker(queue):
        with pytest.raises(dls.InvocationFailed, match="which this worker refuses"):
            await queue.call(dls.thunk(lambda: 1))
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_an_untrusted_reference_reaches_only_what_is_allowed(queue: dls.Queue) -> None:
    import json

    body = dls.thunk(json.dumps, [1]).to_envelope(id="a").to_bytes()
    other = dls.thunk(json.dumps, [1]).to_envelope(id="b").to_bytes()
    await queue.dispatch.do(Submit("a", "q", body, trusted=False))
    async with running_worker(queue):
        with pytest.raises(dls.InvocationFailed, match=r"--allow-module json"):
            await queue.result("a", timeout=20)
    await queue.dispatch.do(Submit("b", "q", other, trusted=False))
    async with running_worker(queue, allow_modules=["json"]):
        assert await queue.result("b", timeout=20) == "[1]"


async def test_the_registry_wins_over_import(queue: dls.Queue) -> None:
    async with running_worker(queue, registry={"double": lambda x: f"registered {x}"}, runtime_policy="off"):
        assert await queue.call(dls.thunk(bodies.double, 1)) == "registered 1"
        assert await queue.call(dls.thunk(bodies.adouble, 1)) == 2


# --- ending ---------------------------------------------------------------------------------------------------------


async def test_once_runs_one_that_is_there_or_none(queue: dls.Queue) -> None:
    assert await dls.run_worker(queue, once=True) == 0
    ids = [await queue.submit(dls.thunk(bodies.double, n)) for n in range(3)]
    assert await dls.run_worker(queue, once=True, concurrency=10) == 1
    assert [(await queue.get(id)).state for id in ids] == ["succeeded", "queued", "queued"]


async def test_once_counts_a_failed_attempt(queue: dls.Queue) -> None:
    id = await queue.submit(dls.thunk(bodies.fail, "no"))
    assert await dls.run_worker(queue, once=True, retries=1) == 1
    assert (await queue.get(id)).state == "queued"


async def test_a_stop_that_is_set_already_ends_it_at_once(queue: dls.Queue) -> None:
    stop = anyio.Event()
    stop.set()
    with anyio.fail_after(30):
        assert await dls.run_worker(queue, stop=stop) == 0
        assert await dls.run_worker(queue, stop=lambda: True) == 0


async def test_a_stop_from_a_thread(queue: dls.Queue) -> None:
    stop, jobs = threading.Event(), list[int]()

    async def work() -> None:
        jobs.append(await dls.run_worker(queue, stop=stop.is_set))

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            assert await queue.call(dls.thunk(bodies.double, 1)) == 2
            threading.Timer(0.1, stop.set).start()
    assert jobs == [1]


async def test_R94_a_drain_finishes_what_runs_and_claims_nothing(queue: dls.Queue) -> None:
    ids = [await queue.submit(dls.thunk(bodies.blocked, f"b{n}")) for n in range(3)]
    stop, jobs = anyio.Event(), list[int]()

    async def work() -> None:
        jobs.append(await dls.run_worker(queue, concurrency=3, grace=30, stop=stop))

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        await wait_until(lambda: len(bodies.SEEN) == 3, description="three bodies")
        ids += [await queue.submit(dls.thunk(bodies.note, n)) for n in range(5)]
        stop.set()
        for n in range(3):
            bodies.gate(f"b{n}").set()
    assert jobs == [3]
    states = [((row := await queue.get(id)).state, row.attempt) for id in ids]
    assert states == [("succeeded", 1)] * 3 + [("queued", 0)] * 5


async def test_heartbeats_go_on_while_it_drains(queue: dls.Queue) -> None:
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(partial(dls.run_worker, queue, lease=0.8, grace=60.0, stop=stop))
        id = await queue.submit(dls.thunk(bodies.blocked, "s"))
        await wait_until(lambda: bodies.SEEN, description="the start of the body")
        stop.set()
        until = (await queue.get(id)).lease_until or 0.0
        await wait_until(lambda: renewed(queue, id, until + 1.6), description="two leases more")
        bodies.open_gates()
    assert ((await queue.get(id)).state, bodies.SEEN.count("s began")) == ("succeeded", 1)


async def renewed(queue: dls.Queue, id: str, until: float) -> bool:
    return ((await queue.get(id)).lease_until or 0.0) > until


async def test_a_worker_cancelled_by_a_scope_gives_back_what_it_holds(queue: dls.Queue) -> None:
    ids = [await queue.submit(dls.thunk(bodies.sleeper, f"s{n}")) for n in range(2)]
    ids.append(await queue.submit(dls.thunk(bodies.blocked, "thread")))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(dls.run_worker, queue, concurrency=3))
            await wait_until(lambda: len(bodies.SEEN) == 3, description="three bodies")
            scope.cancel()
    assert sum(str(what).endswith("cleaned up") for what in bodies.SEEN) == 2
    rows = [await queue.get(id) for id in ids]
    assert [(row.state, row.attempt, row.failures, row.lost) for row in rows] == [("queued", 1, 0, 0)] * 3
    bodies.open_gates()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_cancelled_as_a_task_gives_back_what_it_holds(queue: dls.Queue) -> None:
    import asyncio

    ids = [await queue.submit(dls.thunk(bodies.sleeper, f"s{n}")) for n in range(3)]
    task = asyncio.create_task(dls.run_worker(queue, concurrency=3))
    await wait_until(lambda: len(bodies.SEEN) == 3, description="three bodies")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    rows = [await queue.get(id) for id in ids]
    assert [(row.state, row.attempt, row.failures, row.lost) for row in rows] == [("queued", 1, 0, 0)] * 3


async def test_a_finished_outcome_survives_the_cancellation_of_its_worker(queue: dls.Queue, monkeypatch: Any) -> None:
    """Values on their way to the journal, and the result behind them, get there."""
    from dreamlake.lakeshore.planes.contract.operations import Append
    from dreamlake.lakeshore.planes.plane import Plane

    do, entered = Plane.do, anyio.Event()

    async def slow(self: Plane, op: Any) -> Any:
        if isinstance(op, Append):
            entered.set()
            await anyio.sleep(0.2)
        return await do(self, op)

    monkeypatch.setattr(Plane, "do", slow)
    id = await queue.submit(dls.thunk(bodies.acount, 5000))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(dls.run_worker, queue)
            await entered.wait()
            await wait_until(lambda: delivering(id), description="the end of the body")
            scope.cancel()
    assert (await queue.get(id)).state == "succeeded"
    assert [value async for value in queue.stream(id)] == list(range(5000))


async def delivering(id: str) -> bool:
    import gc

    from dreamlake.lakeshore.worker.outcome import ActiveClaim

    found = [one for one in gc.get_objects() if type(one) is ActiveClaim]  # isinstance would ask objects of others too
    return any(one.decided and one.claimed.id == id for one in found)


async def test_two_workers_of_one_process_on_two_loops(queue: dls.Queue, anyio_backend_name: str) -> None:
    stop = threading.Event()
    other = threading.Thread(
        target=anyio.run,
        args=(partial(dls.run_worker, queue, stop=stop.is_set),),
        kwargs={"backend": anyio_backend_name},
    )
    other.start()
    try:
        async with running_worker(queue, concurrency=1):
            ids = await queue.submit_many([dls.thunk(bodies.anote, n) for n in range(200)])
            ids += await queue.submit_many([dls.thunk(bodies.meet, 2)] * 2)
            await all_ended(queue, ids)
            assert await queue.result(ids[-1]) is True
            long = await queue.submit(dls.thunk(bodies.sleeper))
            await wait_until(lambda: "sleeper began" in bodies.SEEN, description="the start of the body")
            assert await queue.cancel(long, wait=True)
    finally:
        stop.set()
        await wait_until(lambda: not other.is_alive(), description="the end of the other loop")
    assert sorted(one for one in bodies.SEEN if isinstance(one, int)) == list(range(200))


async def test_one_line_is_logged_for_each_invocation(queue: dls.Queue, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dreamlake.lakeshore.worker")
    async with running_worker(queue):
        good = await queue.submit(dls.thunk(bodies.double, 1))
        bad = await queue.submit(dls.thunk(bodies.fail, "no"))
        await wait_until(lambda: len(caplog.records) == 2, description="two lines")
    async with running_worker(queue, timeout=0.4):
        late = await queue.submit(dls.thunk(bodies.sleeper))
        await wait_until(lambda: len(caplog.records) == 3, description="three lines")
    words = [record.getMessage().split() for record in caplog.records]
    assert [line[:3] for line in words] == [
        [good, "double", "succeeded"],
        [bad, "fail", "failed"],
        [late, "sleeper", "timeout"],
    ]
    assert all(float(line[3]) >= 0 for line in words)
    assert [line[4:] for line in words] == [["s"], ["s,", "ValueError"], ["s"]]
