"""Migrations between planes: nothing is lost, nothing is doubled, whatever was in them and however often they are killed."""

from __future__ import annotations

import re
import signal
from typing import TYPE_CHECKING, Any

import anyio
import matrix
import pytest
from helpers import fresh_python, wait_until
from hypothesis import given, settings
from hypothesis import strategies as st
from migrate_kit import bring_to_rest, everything, fill, migrate_and_be_killed, moved
from plane_kit import FakeClock, model_planes

from dreamlake.lakeshore.errors import DispatchError
from dreamlake.lakeshore.planes import migrate
from dreamlake.lakeshore.planes.contract.operations import Claimed, Fence, Finish, Requeue, Restore, Submit, weight_of
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter
from dreamlake.lakeshore.planes.http.store import HttpDispatch
from dreamlake.lakeshore.planes.migrate import Migration, check_at_rest, settle
from dreamlake.lakeshore.planes.sqlite.store import Dispatch
from dreamlake.lakeshore.testing.sequences import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Sequence as SequenceOf
    from pathlib import Path
    from random import Random

    from dreamlake.lakeshore.planes.plane import Plane

pytestmark = pytest.mark.anyio

EMPTY = "A target has to be empty, or to hold only what an earlier run of this very migration wrote: give a new one"


@pytest.fixture
def little_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and bytes are read and written at once, so that small planes take many steps."""
    monkeypatch.setattr(migrate, "ROWS", 3)
    monkeypatch.setattr(migrate, "BYTES", 2000)
    monkeypatch.setattr(migrate, "MAX_FRAMES_PER_PAGE", 2)


# Whatever was in them ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@pytest.mark.parametrize("stores", ["sqlite-sqlite", "model-sqlite", "sqlite-model"])
@given(random=st.randoms(use_true_random=False), length=st.integers(1, 60))
@settings(max_examples=matrix.examples(25), deadline=None)
def test_any_plane_is_moved_whole(backend: str, stores: str, random: Random, length: int) -> None:
    clock = FakeClock()
    make: dict[str, Callable[[], Plane]] = {
        "sqlite": lambda: Dispatch(clock=clock.now), "model": model_planes(clock)
    }  # fmt: skip
    first, second = stores.split("-")

    async def run() -> None:
        async with make[first]() as source, make[second]() as target, make[first]() as back:
            await Sequence(source, random, clock, None).run(length)
            await bring_to_rest(source, random)
            migration = await moved(source, target)
            assert migration.there == 0
            assert (await moved(source, target)).written == 0
            await moved(target, back)
            expected = await everything(source, clock.now())
            assert await everything(target, clock.now()) == expected
            assert await everything(back, clock.now()) == expected

    anyio.run(run, backend=backend)


async def test_times_budgets_and_delays_are_kept(tmp_path: Path) -> None:
    clock = FakeClock()
    async with Dispatch(tmp_path / "a.db", clock=clock.now) as source, Dispatch(clock=clock.now, ns="other") as target:
        await source.do(Submit("i", "q", b"body", "k", 5, "parent", True, b"config"))
        (claimed,) = await source.claim(["q"], "w")
        clock.advance(10)
        await source.retry(Fence("i", "w", claimed.attempt), delay=60.0, error=Failure("E", "once"))
        clock.advance(20)
        await moved(source, target)
        (row,) = await target.rows(RowFilter(body=True))
        assert (row.submitted_at, row.started_at, row.not_before) == (1_000_000.0, 1_000_000.0, 1_000_070.0)
        assert (row.failures, row.attempt, row.error, row.trusted) == (1, 1, Failure("E", "once"), False)
        assert await target.claim(["q"], "w") == []
        clock.advance(40)
        (claimed,) = await target.claim(["q"], "w")
        assert (claimed.attempt, claimed.config, claimed.root, claimed.trusted) == (2, b"config", "parent", False)
        # The key goes on belonging to the invocation.
        assert await target.submit("q", b"", key="k") == "i"


async def test_a_worker_of_the_source_has_no_say_on_the_target() -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="i")
        (claimed,) = await source.claim(["q"], "w")
        fence = Fence("i", "w", claimed.attempt)
        await source.append(fence, 0, [b"a"])
        await source.finish(fence, "succeeded", result=b"r")
        await moved(source, target)
        assert await source.finish(fence, "succeeded", result=b"r") is False
        for op in (Finish(fence, "failed"), Requeue(fence)):
            with pytest.raises(DispatchError, match="the claim on invocation 'i' is lost: it ended succeeded"):
                await target.do(op)


async def test_what_a_dead_worker_held_goes_back_before(tmp_path: Path) -> None:
    claim = """
        import os, signal, sys
        import anyio
        from dreamlake.lakeshore import Dispatch

        async def main():
            plane = Dispatch(sys.argv[1])
            await plane.submit("q", b"", id="i")
            await plane.claim(["q"], "w", lease=600.0)
            os.kill(os.getpid(), signal.SIGKILL)

        anyio.run(main)
    """
    with fresh_python(claim, str(tmp_path / "a.db")) as process:
        assert process.wait(60) == -signal.SIGKILL
    async with Dispatch(tmp_path / "a.db") as source, Dispatch() as target:
        await settle(source)
        await check_at_rest(source, ())
        await moved(source, target)
        (row,) = await target.rows(RowFilter())
        assert (row.state, row.lost, row.attempt) == ("queued", 1, 1)


async def test_queues_are_moved_alone_and_later_the_others() -> None:
    async with Dispatch() as source, Dispatch() as target:
        for n in range(6):
            await source.submit("qpr"[n % 3], b"", id=f"i{n}")
        await source.claim(["r"], "w")
        assert (await moved(source, target, "q", "p")).written == 4
        assert (await moved(source, target, "p")).written == 0
        with pytest.raises(DispatchError, match="1 invocation of the source is running: 'i2' "):
            await moved(source, target, "r")
        assert await target.counts() == {("q", "queued"): 2, ("p", "queued"): 2}


# In steps, and what that costs ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("little_at_once")
async def test_memory_is_bounded_by_the_largest_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Dispatch(tmp_path / "a.db") as source, Dispatch(tmp_path / "b.db") as target:
        await fill(source)
        writes: list[list[Restore]] = []
        many = target.many

        async def recorded(ops: SequenceOf[Any]) -> list[Any]:
            writes.append([*ops])
            return await many(ops)

        monkeypatch.setattr(target, "many", recorded)
        await moved(source, target)
        for ops in writes:
            assert len(ops) == 1 or sum(map(weight_of, ops)) <= 2000
            for op in ops:
                assert len(op.frames) == 1 or sum(len(data) for _, data in op.frames) <= 2000
        parts = [op for ops in writes for op in ops if op.more]
        assert len(parts) > 10


async def test_a_migration_that_is_killed_again_and_again_goes_on(tmp_path: Path, anyio_backend_name: str) -> None:
    a, b = tmp_path / "a.db", tmp_path / "b.db"
    async with Dispatch(a) as source:
        await fill(source)
    await migrate_and_be_killed(anyio_backend_name, str(a), str(b))
    async with Dispatch(a) as source, Dispatch(b) as target:
        assert (await moved(source, target)).written == 0
        assert await everything(source, 0.0) == await everything(target, 0.0)


@pytest.mark.usefixtures("little_at_once")
async def test_a_cancelled_migration_goes_on(tmp_path: Path) -> None:
    async with Dispatch(tmp_path / "a.db") as source, Dispatch(tmp_path / "b.db") as target:
        await fill(source)
        for stop in (1, 7, 20):
            with anyio.CancelScope() as scope:

                def tell(done: int, stop: int = stop, scope: anyio.CancelScope = scope) -> None:
                    if done == stop:
                        scope.cancel()

                await Migration(source, target).copy(tell)
            assert scope.cancelled_caught
        await moved(source, target)


# What is in the way -----------------------------------------------------------------------------------------------------


async def test_what_runs_is_not_moved() -> None:
    async with Dispatch() as source, Dispatch() as target:
        for n in range(7):
            await source.submit("q", b"", id=f"i{n}")
        await source.claim(["q"], "w", limit=7)
        with pytest.raises(DispatchError) as failure:
            await Migration(source, target).copy()
        named = ", ".join(f"'i{n}' (held by 'w')" for n in (6, 5, 4, 3, 2))
        assert str(failure.value) == (
            f"7 invocations of the source are running: {named} and 2 more. Stop the workers of the source, which finish or "
            "give back what they run, then migrate; `lakeshore inv release ID` takes one from a claim without a lease, "
            "and what a dead worker held goes back when its lease is over"
        )
        assert await target.counts() == {}


async def test_what_begins_to_run_meanwhile_is_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="i")

        async def check(*_: object) -> None:
            await source.claim(["q"], "w")

        monkeypatch.setattr(migrate, "check_at_rest", check)
        with pytest.raises(
            DispatchError, match="invocation 'i' of the source has begun to run meanwhile: Stop the work"
        ):
            await Migration(source, target).copy()
        assert await target.counts() == {}


CHANGES: dict[str, tuple[Callable[[Plane], Any], str]] = {
    "submitted": (lambda plane: plane.submit("q", b"", id="new"),
                  "the source has invocation 'new' where the target has nothing"),
    "ended": (lambda plane: plane.cancel("i1"),
              "invocation 'i1' has the state 'killed' on the source and 'queued' on the target"),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
async def test_what_changes_meanwhile_is_seen_at_the_end(change: str) -> None:
    async with Dispatch() as source, Dispatch() as target:
        for n in range(3):
            await source.submit("q", b"", id=f"i{n}")
        migration = Migration(source, target)
        await migration.copy()
        act, sentence = CHANGES[change]
        await act(source)
        here, there, difference = await migration.verify()
        assert difference == sentence
        assert here.digest != there.digest


@pytest.mark.parametrize(
    ("sides", "sentence"),
    [
        (
            ("claim", "none"),
            "'i1' has the state 'queued' on the source and 'running' on the target; nothing is written over",
        ),
        (
            ("none", "cancel"),
            "'i1' has the state 'killed' on the source and 'queued' on the target; nothing is written over",
        ),
    ],
    ids=["claimed-there", "ended-here"],
)
async def test_what_has_become_of_a_row_is_never_written_over(sides: tuple[str, str], sentence: str) -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="i1")
        await moved(source, target)
        if sides[0] == "claim":
            await target.claim(["q"], "w")
        if sides[1] == "cancel":
            await source.cancel("i1")
        before = await target.rows(RowFilter(body=True))
        with pytest.raises(DispatchError) as failure:
            await Migration(source, target).copy()
        assert str(failure.value) == f"invocation {sentence}. {EMPTY}"
        assert await target.rows(RowFilter(body=True)) == before


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"body": b"other"}, "has another body on the target than on the source"),
        ({"config": b"other"}, "has another config on the target than on the source"),
        ({"frames": ((0, b"x"),)}, "has another journal on the target than on the source"),
        ({"priority": 3}, "has the priority 0 on the source and 3 on the target"),
        ({"result": b"other"}, "has another result on the target than on the source"),
    ],
)
async def test_a_row_with_one_other_byte_stops_the_migration(fields: dict[str, Any], what: str) -> None:
    row = Restore(
        "i", "q", "succeeded", b"body", None, 0, None, None, None, 1, 0, 0, "w", 1.0, None, 1.0, 2.0, None, None
    )
    async with Dispatch() as source, Dispatch() as target:
        await source.do(row)
        await target.do(row._replace(**fields))
        with pytest.raises(DispatchError) as failure:
            await Migration(source, target).copy()
        assert str(failure.value) == f"invocation 'i' {what}; nothing is written over. {EMPTY}"


async def test_a_part_with_other_frames_is_seen_at_the_end() -> None:
    row = Restore(
        "i", "q", "succeeded", b"body", None, 0, None, None, None, 1, 0, 0, "w", 1.0, None, 1.0, 2.0, None, None
    )
    async with Dispatch() as source, Dispatch() as target:
        await source.do(row._replace(frames=((0, b"a"), (1, b"b"))))
        await target.do(row._replace(frames=((0, b"other"),), more=True))
        migration = Migration(source, target)
        await migration.copy()
        _, _, difference = await migration.verify()
        assert difference == "invocation 'i' has another journal on the target than on the source"


async def test_a_target_that_others_use_is_left_alone() -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="mine", key="k")
        await target.submit("q", b"", id="theirs")
        foreign = (
            "the target holds invocation 'theirs' of queue 'q', which the source does not have, or not in this place. "
            + EMPTY
        )
        with pytest.raises(DispatchError) as failure:
            await Migration(source, target).copy()
        assert str(failure.value) == foreign
        # So too when it comes after all that the source has.
        async with Dispatch() as second:
            await moved(source, second)
            await second.submit("q", b"", id="theirs")
            with pytest.raises(DispatchError) as failure:
                await Migration(source, second).copy()
            assert str(failure.value) == foreign


async def test_an_id_of_another_queue_of_the_target_is_seen_at_the_end() -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="i")
        await target.submit("p", b"", id="i")
        migration = Migration(source, target, ["q"])
        await migration.copy()
        _, _, difference = await migration.verify()
        assert difference == "the source has invocation 'i' where the target has nothing"
        assert await target.counts() == {("p", "queued"): 1}


async def test_a_key_that_somebody_takes_meanwhile_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="mine", key="k")
        many = target.many

        async def late(ops: SequenceOf[Any]) -> list[Any]:
            await target.submit("q", b"", id="theirs", key="k")
            return await many(ops)

        monkeypatch.setattr(target, "many", late)
        with pytest.raises(DispatchError) as failure:
            await Migration(source, target).copy()
        assert str(failure.value) == (
            "the target has given key 'k' of queue 'q', which is that of invocation 'mine', to 'theirs'. " + EMPTY
        )


@pytest.mark.usefixtures("little_at_once")
async def test_a_source_that_is_purged_meanwhile_is_told() -> None:
    clock = FakeClock()
    async with Dispatch(clock=clock.now) as source, Dispatch() as target:
        for n in range(9):
            await source.submit("q", b"", id=f"i{n}")
            await source.cancel(f"i{n}")
        clock.advance(10)
        # Between two reads.
        copies, read = migrate._copies, 0

        async def purged(plane: Plane, *args: Any) -> list[Restore]:
            nonlocal read
            read += plane is source
            if read == 2:
                await source.purge(5.0)
            return await copies(plane, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(migrate, "_copies", purged)
            with pytest.raises(
                DispatchError, match=r"Dispatch\(':memory:'\) was purged while it was read: no invocation 'i2'"
            ):
                await Migration(source, target).copy()


async def test_a_server_is_no_source() -> None:
    async with HttpDispatch("http://127.0.0.1:9") as server, Dispatch() as plane:
        sentence = (
            "invocations of HttpDispatch('http://127.0.0.1:9') cannot be moved: name the file or the database that it "
            "serves"
        )
        await plane.submit("q", b"", id="i")
        with pytest.raises(DispatchError, match=re.escape(sentence)):
            await Migration(plane, server).copy()
        restore = Restore(
            "i", "q", "queued", b"", None, 0, None, None, None, 0, 0, 0, None, 1.0, None, None, None, None, None
        )
        with pytest.raises(
            DispatchError, match=r"the server at http://127\.0\.0\.1:9 restores nothing: name the plane that"
        ):
            await server.do(restore)


async def test_a_dry_run_writes_nothing() -> None:
    async with Dispatch() as source, Dispatch() as target:
        for n in range(3):
            await source.submit("q", b"", id=f"i{n}")
        migration = Migration(source, None)
        await migration.copy(dry=True)
        assert (migration.written, migration.there) == (3, 0)
        await moved(source, target)
        await source.submit("q", b"", id="i3")
        migration = Migration(source, target)
        await migration.copy(dry=True)
        assert (migration.written, migration.there) == (1, 3)
        assert await target.counts() == {("q", "queued"): 3}


async def test_the_source_is_only_read(tmp_path: Path) -> None:
    async with Dispatch(tmp_path / "a.db") as source:
        await fill(source)
        before = [await source.rows(RowFilter(limit=1000)), await source.counts()]
        async with Dispatch(tmp_path / "b.db") as target:
            await moved(source, target)
        assert [await source.rows(RowFilter(limit=1000)), await source.counts()] == before


async def test_a_waiting_claim_on_the_target_is_woken() -> None:
    async with Dispatch() as source, Dispatch() as target:
        await source.submit("q", b"", id="i")
        claims: list[Claimed] = []

        async def claim() -> None:
            claims.extend(await target.claim(["q"], "w", timeout=30.0))

        async with anyio.create_task_group() as group:
            group.start_soon(claim)
            await anyio.wait_all_tasks_blocked()
            await Migration(source, target).copy()
            await wait_until(lambda: claims, 20.0, "the claim")
        assert [one.id for one in claims] == ["i"]
