"""What is particular to the plane in a SQLite file: the file itself, who else uses it, and large bodies."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from helpers import fresh_python, run_python, wait_until

from dreamlake.lakeshore import Dispatch, DispatchError, PlaneUnavailable
from dreamlake.lakeshore.planes.contract.operations import Claim, Claimed, Fence, Finish, Reap, Submit
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.sqlite import checkpoints, connection, doorbell, forks, inline_writer, read, write_lock
from dreamlake.lakeshore.planes.sqlite.blobs import PIECE_BYTES
from dreamlake.lakeshore.planes.sqlite.doorbell import queue_topic
from dreamlake.lakeshore.planes.sqlite.store import SqliteStore

pytestmark = pytest.mark.anyio

MB = 1 << 20


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "plane.db"


def fence_of(claimed: Claimed, worker: str) -> Fence:
    return Fence(claimed.id, worker, claimed.attempt)


def query(path: Path, sql: str) -> Any:
    db = sqlite3.connect(path)
    try:
        return db.execute(sql).fetchall()
    finally:
        db.close()


# The file -----------------------------------------------------------------------------------------------------------


async def test_what_is_created_is_for_its_owner_only(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
        inner = {p.name: stat.S_IMODE(p.stat().st_mode) for p in Path(f"{path}-presence").iterdir()}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert modes["plane.db"] == modes["plane.db-wal"] == modes["plane.db-turn"] == 0o600
    assert modes["plane.db-presence"] == 0o700
    assert set(inner.values()) == {0o700}


async def test_what_exists_keeps_its_mode(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o640)
    os.chmod(path, 0o640)
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


async def test_nothing_is_written_beside_the_plane(tmp_path: Path) -> None:
    async with Dispatch(tmp_path / "a.db") as plane:
        await plane.submit("q", b"x")
        names = {p.name for p in tmp_path.iterdir()}
    assert names == {"a.db", "a.db-wal", "a.db-shm", "a.db-turn", "a.db-presence"}


async def test_the_file_says_whose_it_is(path: Path) -> None:
    async with Dispatch(path):
        pass
    assert query(path, "PRAGMA application_id") == [(0x4C616B65,)]
    assert query(path, "PRAGMA user_version") == [(1,)]
    assert query(path, "PRAGMA journal_mode") == [("wal",)]


async def test_another_programs_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    query(path, "CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(DispatchError, match=r"is a SQLite file of another program .* give the path of a new file"):
        await Dispatch(path).submit("q", b"x")
    assert path.read_bytes() == before


async def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_bytes(b"these are my notes, and no database\n" * 100)
    before = path.read_bytes()
    with pytest.raises(
        DispatchError, match="is not a plane of this package: file is not a database; give another path"
    ):
        await Dispatch(path).submit("q", b"x")
    assert path.read_bytes() == before


async def test_a_newer_schema_is_refused(path: Path) -> None:
    async with Dispatch(path):
        pass
    query(path, "PRAGMA user_version = 7")
    with pytest.raises(DispatchError, match=r"has schema version 7, this package knows versions up to 1; upgrade"):
        await Dispatch(path).submit("q", b"x")


async def test_a_path_that_cannot_be_says_so_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DispatchError, match="cannot create the plane's file"), anyio.fail_after(20):
        await Dispatch(tmp_path / "file" / "plane.db").submit("q", b"x")


async def test_durable_planes_sync_every_commit(path: Path) -> None:
    async with Dispatch(path, durable=True) as durable, Dispatch(path) as fast:
        levels = []
        for plane in (durable, fast):
            engine = await plane._engines.get()
            small = engine.store._connection  # type: ignore[attr-defined]
            levels.append(await engine.read(small.call, lambda db: db.execute("PRAGMA synchronous").fetchone()[0]))
    assert levels == [2, 1]


async def test_namespaces_do_not_see_each_other(path: Path) -> None:
    async with Dispatch(path, ns="a") as a, Dispatch(path, ns="b") as b:
        await a.submit("q", b"of a", id="same", key="k")
        await b.submit("q", b"of b", id="same", key="k")
        (claimed,) = await b.claim(["q"], "w")
        assert claimed.body == b"of b"
        assert await a.counts() == {("q", "queued"): 1}
        assert await b.counts() == {("q", "running"): 1}
        assert (await a.current_outcomes(["same"]))[0].state == "pending"


async def test_rows_survive_the_process(path: Path) -> None:
    script = """
        import anyio, os, sys
        from dreamlake.lakeshore import Dispatch
        async def main():
            await Dispatch(sys.argv[1]).submit("q", b"kept", id="kept")
            os.kill(os.getpid(), 9)
        anyio.run(main)
    """
    run_python(script, str(path), code=-signal.SIGKILL)
    async with Dispatch(path) as plane:
        assert [row.id for row in await plane.rows(RowFilter())] == ["kept"]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.usefixtures("seldom")
async def test_a_long_path_rings_bells_too(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 60) / ("b" * 60)
    async with Dispatch(deep / "plane.db") as one, Dispatch(deep / "plane.db") as other:
        await _wake_speed(one, other)


async def test_a_locked_file_is_waited_for(path: Path) -> None:
    """Somebody with a shell of their own holds the write lock for a while: nobody fails, nothing is lost."""
    async with Dispatch(path) as plane:
        await plane.submit("q", b"first")
        intruder = sqlite3.connect(path, isolation_level=None)
        intruder.execute("BEGIN IMMEDIATE")
        async with anyio.create_task_group() as group:
            group.start_soon(plane.submit, "q", b"second")
            with anyio.move_on_after(0.3):
                await anyio.sleep_forever()
            assert (await plane.counts()) == {("q", "queued"): 1}, "reads go on meanwhile"
            intruder.execute("ROLLBACK")
        intruder.close()
        assert (await plane.counts()) == {("q", "queued"): 2}


async def test_the_loop_never_waits_for_somebody_elses_turn(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit is made on the event loop only when the turn to write is free; otherwise the loop goes on meanwhile."""
    import fcntl

    monkeypatch.setattr(write_lock, "WRITE_LOCK_TIMEOUT", 60.0)
    async with Dispatch(path) as plane, Dispatch(path) as other:
        await plane.submit("q", b"first")
        turn = os.open(f"{path}-turn", os.O_RDWR)
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(plane.submit, "q", b"second")
                began = time.monotonic()
                for _ in range(20):
                    await anyio.sleep(0.005)
                assert time.monotonic() - began < 30, "the event loop stood still, for as long as it is tried"
                assert await other.counts() == {("q", "queued"): 1}
                fcntl.flock(turn, fcntl.LOCK_UN)
        finally:
            os.close(turn)
        assert await plane.counts() == {("q", "queued"): 2}


async def test_durable_planes_do_not_commit_on_the_loop(path: Path) -> None:
    async with Dispatch(path, durable=True) as durable, Dispatch(path) as fast:
        inline = [(await plane._engines.get()).store._inline for plane in (durable, fast)]  # type: ignore[attr-defined]
    assert inline[0] is None
    assert inline[1] is not None


# The log written ahead ----------------------------------------------------------------------------------------------

PAGES = 300


@pytest.fixture
def small_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "CHECKPOINT_PAGES", PAGES)
    monkeypatch.setattr(checkpoints, "MAX_LOG_PAGES", 4 * PAGES)
    last = f"PRAGMA wal_autocheckpoint = {4 * PAGES}"
    pragmas = (*connection.PRAGMAS, last)
    monkeypatch.setattr(connection, "PRAGMAS", pragmas)
    monkeypatch.setattr(inline_writer, "PRAGMAS", pragmas)


def log_size(path: Path) -> int:
    return Path(f"{path}-wal").stat().st_size


@pytest.mark.usefixtures("small_log")
async def test_the_log_of_a_plane_that_nobody_waits_on_stays_bounded(path: Path) -> None:
    """Submits without a pause, and no watcher: the log is brought home, and begun anew, all the same."""
    async with Dispatch(path) as plane:
        for _ in range(3000):
            await plane.submit("q", b"x" * 1000)
        assert not await _waits(plane, "queue")
        assert log_size(path) < 24 * PAGES * 4120, "or about 12,000 pages"
    assert query(path, "SELECT count(*) FROM invocation") == [(3000,)]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


@pytest.mark.usefixtures("small_log")
async def test_planes_that_write_little_and_close_share_the_checkpoints(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them writes enough for one of its own, and the one that stays open writes nothing."""
    monkeypatch.setattr(
        checkpoints, "CHECKPOINT_PAGES", 100
    )  # chance decides who makes one: with these figures it is no risk
    async with Dispatch(path) as idle:
        await idle.counts()
        for _ in range(150):
            async with Dispatch(path) as plane:
                for _ in range(10):
                    await plane.submit("q", b"x" * 1000)
        assert log_size(path) < 16 * PAGES * 4120, "or about 6,000 pages"


@pytest.mark.usefixtures("small_log")
async def test_one_checkpoint_at_a_time_and_a_close_waits_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, under_way, most = 0, 0, 0
    checkpoint = connection.SqliteConnection.checkpoint

    async def counted(self: connection.SqliteConnection) -> int:
        nonlocal made, under_way, most
        under_way += 1
        most = max(most, under_way)
        with anyio.CancelScope(shield=True):
            pages = await checkpoint(self)
            await anyio.sleep(0.2)  # longer than the next one takes to become due
            under_way, made = under_way - 1, made + 1
            return pages

    monkeypatch.setattr(connection.SqliteConnection, "checkpoint", counted)
    async with Dispatch(path) as plane:

        async def started() -> bool:
            await plane.submit("q", b"x")
            return under_way > 0

        for _ in range(2):
            before = made
            await wait_until(started, 20, "a checkpoint")
            for _ in range(PAGES):
                await plane.submit("q", b"x")
            await wait_until(lambda before=before: made > before, 20, "its end")
        await wait_until(started, 20, "a checkpoint")
    assert under_way == 0, "the close did not wait"
    assert made >= 3
    assert most == 1


@pytest.mark.usefixtures("small_log")
async def test_a_failed_checkpoint_spoils_no_operation(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(self: connection.SqliteConnection) -> int:
        raise PlaneUnavailable("the disk is full")

    monkeypatch.setattr(connection.SqliteConnection, "checkpoint", fails)
    async with Dispatch(path) as plane:
        for _ in range(2 * PAGES):
            await plane.submit("q", b"x")
        assert await plane.counts() == {("q", "queued"): 2 * PAGES}
    assert "a checkpoint of the write-ahead log failed, and is made again later: the disk is full" in caplog.text


# Openings that end early --------------------------------------------------------------------------------------------


def open_files(path: Path) -> list[str]:
    """Of this process, those of the plane, its folder included."""
    found: list[str] = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        if target.startswith(str(path)):
            found.append(target)
    return found


needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts open files in /proc")


@needs_proc
@pytest.mark.parametrize("durable", [False, True])
async def test_a_cancelled_opening_leaves_nothing_open(path: Path, durable: bool) -> None:
    """At whatever moment: no file, and no mark by which a forked child would be refused the path."""
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
    for step in range(40):
        plane = Dispatch(path, durable=durable)
        with anyio.move_on_after(0.0002 * step):
            await plane.counts()
        with anyio.fail_after(10):
            await plane.aclose()
        assert open_files(path) == []
        assert path not in forks.open_paths
    assert list((Path(f"{path}-presence") / "holders").iterdir()) == []


@needs_proc
@pytest.mark.parametrize("where", ["prepare", "holders"])
async def test_an_opening_cancelled_during_a_call_leaves_nothing_open(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The moments that a timer rarely meets: in the schema's check, and in the look at what the dead have left."""
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
    (Path(f"{path}-presence") / "holders" / "a-dead-one").touch()
    reached, go_on = threading.Event(), threading.Event()
    module: Any = {"prepare": connection, "holders": read}[where]
    name = {"prepare": "_prepare", "holders": "holders"}[where]
    real = getattr(module, name)

    def held_up(*args: Any, **options: Any) -> Any:
        reached.set()
        assert go_on.wait(20)
        return real(*args, **options)

    monkeypatch.setattr(module, name, held_up)
    plane = Dispatch(path)
    async with anyio.create_task_group() as group:
        group.start_soon(plane.counts)
        await wait_until(reached.is_set, 10, "the call")
        group.cancel_scope.cancel()
        go_on.set()
    assert open_files(path) == []
    assert path not in forks.open_paths
    monkeypatch.setattr(module, name, real)
    async with plane:
        assert await plane.counts() == {("q", "queued"): 1}


@needs_proc
@pytest.mark.parametrize("part", ["connect", "write_lock", "inline_writer", "datagrams"])
async def test_a_failed_opening_leaves_nothing_open(path: Path, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")

    def fails(*args: object, **options: object) -> Any:
        raise sqlite3.OperationalError("out of memory") if part == "connect" else OSError("too many open files")

    if part == "connect":
        monkeypatch.setattr(sqlite3, "connect", fails)
    else:
        module: Any = {"write_lock": connection, "inline_writer": inline_writer, "datagrams": doorbell}[part]
        monkeypatch.setattr(module, "datagram_socket" if part == "datagrams" else "WriteLock", fails)
    plane = Dispatch(path)
    plane.patience = 0.0
    with pytest.raises(DispatchError, match="out of memory" if part == "connect" else "too many open files"):
        await plane.counts()
    await plane.aclose()
    assert open_files(path) == []
    assert path not in forks.open_paths
    assert list((Path(f"{path}-presence") / "holders").iterdir()) == []


@needs_proc
async def test_a_leave_that_fails_lets_go_of_its_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others can only find its claims when they see that nobody holds them."""
    async with Dispatch(path) as other:
        await other.submit("q", b"x")
        plane = Dispatch(path)
        assert len(await plane.claim(["q"], "w", lease=3600.0)) == 1
        store: Any = (await plane._engines.get()).store

        async def fails(ops: object) -> Any:
            raise PlaneUnavailable("the disk is full")

        monkeypatch.setattr(store, "apply", fails)
        await plane.aclose()
        with anyio.fail_after(20):
            (again,) = await other.claim(["q"], "heir", timeout=None)
        assert again.attempt == 2


# Waking -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that nobody asked for come so late that whoever is woken was woken by a bell."""
    monkeypatch.setattr(SqliteStore, "net", 60.0)


async def _wake_speed(one: Dispatch, other: Dispatch) -> None:
    """A claimer on `one` hears submits on `other` well before the `seldom` look; so does a waiter of its end."""
    times: list[float] = []
    for number in range(8):
        async with anyio.create_task_group() as group:

            async def work() -> None:
                (claimed,) = await one.claim(["q"], "w", timeout=20)
                await one.finish(fence_of(claimed, "w"), "succeeded", result=b"r")

            group.start_soon(work)
            await wait_until(lambda: _waits(one, "queue"), 10, "the claimer to wait")
            start = time.perf_counter()
            id = await other.submit("q", b"x")
            assert (await other.outcome(id, timeout=20)).result == b"r"
            times.append(time.perf_counter() - start)
        assert number == 0 or times
    assert sorted(times)[len(times) // 2] < 4.0, f"the bells were not heard: {times}"


async def _waits(plane: Dispatch, kind: Any) -> bool:
    return (await plane._engines.get()).hub.waits(kind)


@pytest.mark.usefixtures("seldom")
async def test_others_are_woken_by_a_bell(path: Path) -> None:
    async with Dispatch(path) as one, Dispatch(path) as other:
        await _wake_speed(one, other)


async def test_a_waiter_without_a_bell_finds_it_all_the_same(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "datagram_socket", lambda: None)
    async with Dispatch(path) as one, Dispatch(path) as other:
        async with anyio.create_task_group() as group:

            async def work() -> None:
                (claimed,) = await one.claim(["q"], "w", timeout=10)
                await one.append(fence_of(claimed, "w"), 0, [b"frame"])
                await one.finish(fence_of(claimed, "w"), "succeeded", result=b"r")

            group.start_soon(work)
            id = await other.submit("q", b"x")
            assert (await other.next_page(id, -1, timeout=10)).frames == [(0, b"frame")]
            assert (await other.outcome(id, timeout=10)).result == b"r"


async def test_sockets_of_the_dead_are_removed(path: Path) -> None:
    waiter = fresh_python(
        """
        import anyio, sys
        from dreamlake.lakeshore import Dispatch
        async def main():
            async with anyio.create_task_group() as group:
                plane = Dispatch(sys.argv[1])
                group.start_soon(lambda: plane.claim(["q"], "w", timeout=None))
                await anyio.sleep_forever()
        anyio.run(main)
        """,
        str(path),
    )
    presence = Path(f"{path}-presence")
    with waiter:
        try:
            await wait_until(lambda: list((presence / "jobs").glob("*/*")), 60, "its bell")
        finally:
            waiter.kill()
            waiter.communicate()
    assert len(list((presence / "jobs").glob("*/*"))) == 1
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
        assert list((presence / "jobs").glob("*/*")) == []
        assert list((presence / "bells").iterdir()) == []


@pytest.mark.usefixtures("seldom")
async def test_a_job_rings_those_who_wait_for_its_queue(path: Path) -> None:
    """Each queue has bells of its own: with others waiting beside, a claimer is woken all the same, well before a look."""
    async with Dispatch(path) as one, Dispatch(path) as two, Dispatch(path) as caller:
        times: list[float] = []
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: two.claim(["other"], "two", timeout=None))
            for _ in range(8):
                async with anyio.create_task_group() as round_:
                    round_.start_soon(lambda: one.claim(["q"], "one", timeout=20))
                    await wait_until(lambda: _waits(one, "queue"), 10, "the claimer to wait")
                    start = time.perf_counter()
                    await caller.submit("q", b"x")
                times.append(time.perf_counter() - start)
            group.cancel_scope.cancel()
    assert sorted(times)[4] < 4.0, f"the bells of another queue were rung: {times}"


async def test_a_bell_that_was_taken_away_is_hung_up_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorbell, "SOCKET_CHECK_INTERVAL", 0.2)
    async with Dispatch(path) as one, Dispatch(path) as other, anyio.create_task_group() as group:
        claimed: list[Any] = []

        async def work() -> None:
            claimed.extend(await one.claim(["q"], "w", timeout=None))

        group.start_soon(work)
        folder = Path(f"{path}-presence") / "bells"
        await wait_until(lambda: list(folder.iterdir()), 10, "the bell")
        for bell in folder.iterdir():
            bell.unlink()
        await wait_until(lambda: list(folder.iterdir()), 10, "another bell")
        await other.submit("q", b"x")
        await wait_until(lambda: claimed, 10, "the claim")


@pytest.mark.usefixtures("seldom")
async def test_litter_in_the_folder_is_no_hindrance(path: Path) -> None:
    async with Dispatch(path) as one, Dispatch(path) as other:
        assert await one.counts() == {}
        presence = Path(f"{path}-presence")
        place = presence / queue_topic("default", "q")
        place.mkdir(exist_ok=True)
        (place / "a-file").write_text("x")
        (place / "a-folder").mkdir()
        (place / "a-link").symlink_to("nowhere")
        (presence / "holders" / "a-folder").mkdir()
        await _wake_speed(one, other)


# The dead -----------------------------------------------------------------------------------------------------------

CLAIM_AND = """
    import anyio, os, sys, signal
    from dreamlake.lakeshore import Dispatch
    async def main():
        plane = Dispatch(sys.argv[1])
        (claimed,) = await plane.claim(["q"], "doomed", lease=3600.0, timeout=10)
        print(claimed.id, flush=True)
        {then}
    anyio.run(main)
"""


async def test_R1_R5_the_claims_of_a_killed_process_go_back_within_a_second_or_two(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(CLAIM_AND.format(then="os.kill(os.getpid(), signal.SIGKILL)"), str(path), code=-signal.SIGKILL)
        with anyio.fail_after(20):
            (again,) = await plane.claim(["q"], "heir", timeout=None)
        assert (again.id, again.attempt, again.lost) == ("a", 2, 1)
        holders = Path(f"{path}-presence") / "holders"
        assert len(list(holders.iterdir())) == 1, "the dead holder's file is gone, ours is there"


async def test_a_process_that_leaves_gives_its_claims_back_in_no_budget(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(CLAIM_AND.format(then="return"), str(path))
        (row,) = await plane.rows(RowFilter())
        assert (row.state, row.attempt, row.lost) == ("queued", 1, 0)
        assert len(list((Path(f"{path}-presence") / "holders").iterdir())) == 1


async def test_a_living_holder_keeps_its_claims_ten_leases_long(path: Path) -> None:
    """A lease that runs out while its holder's lock is held may be a body that keeps the GIL in C code."""
    now = [1000.0]
    async with Dispatch(path, clock=lambda: now[0]) as holder, Dispatch(path, clock=lambda: now[0]) as other:
        await other.submit("q", b"x")
        (claimed,) = await holder.claim(["q"], "w", lease=10.0)

        async def due() -> list[Any]:
            engine = await other._engines.get()
            await engine.read(engine.store.due)
            return await engine.read(engine.store.due)  # holders are judged at every second look

        now[0] += 99.0
        assert await due() == []
        assert await other.claim(["q"], "thief") == []
        now[0] += 2.0
        (reap,) = await due()
        await other.do(reap)
        (again,) = await other.claim(["q"], "heir")
        assert again.attempt == claimed.attempt + 1


async def test_a_forked_child_does_not_hold_its_parents_lock(path: Path) -> None:
    script = """
        import anyio, os, sys, time
        from dreamlake.lakeshore import Dispatch
        async def main():
            plane = Dispatch(sys.argv[1])
            (claimed,) = await plane.claim(["q"], "doomed", lease=3600.0, timeout=10)
            if os.fork() == 0:
                os.close(1), os.close(2)
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), 9)
        anyio.run(main)
    """
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(
            "import warnings; warnings.simplefilter('ignore')\n" + _dedent(script), str(path), code=-signal.SIGKILL
        )
        with anyio.fail_after(20):
            (again,) = await plane.claim(["q"], "heir", timeout=None)
        assert again.attempt == 2


async def test_a_forked_child_is_refused_the_plane_that_was_open(path: Path) -> None:
    script = """
        import anyio, os, sys
        from dreamlake.lakeshore import Dispatch, DispatchError
        plane = Dispatch(sys.argv[1])
        async def submit():
            await plane.submit("q", b"x")
        async def main():
            await submit()
            if (child := os.fork()) == 0:
                try:
                    import threading
                    thread = threading.Thread(target=lambda: anyio.run(attempt))
                    thread.start()
                    thread.join()
                finally:
                    os._exit(0)
            os.waitpid(child, 0)
        async def attempt():
            try:
                await submit()
            except DispatchError as exc:
                print(exc, flush=True)
        anyio.run(main)
    """
    out, _ = run_python("import warnings; warnings.simplefilter('ignore')\n" + _dedent(script), str(path))
    assert "was open when this process was forked, and SQLite does not allow its use here: open it only after" in out
    assert query(path, "SELECT count(*) FROM invocation") == [(1,)]


async def test_one_client_after_another_beside_a_worker_loses_nothing(path: Path) -> None:
    """A client that leaves must not take itself for the last one, and the log of the others with it."""
    client = """
        import anyio, sys
        from dreamlake.lakeshore import Dispatch
        async def main():
            async with Dispatch(sys.argv[1]) as plane:
                id = await plane.submit("q", b"x")
                print((await plane.outcome(id, timeout=20)).state)
        anyio.run(main)
    """
    async with Dispatch(path) as plane, anyio.create_task_group() as group:

        async def work() -> None:
            while True:
                for claimed in await plane.claim(["q"], "w", timeout=None):
                    await plane.finish(fence_of(claimed, "w"), "succeeded")
                async with Dispatch(path) as another:  # opened again in the same process, and closed
                    await another.counts()

        group.start_soon(work)
        for _ in range(3):
            assert await anyio.to_thread.run_sync(run_python, client, str(path)) == ("succeeded\n", "")
        group.cancel_scope.cancel()
    assert query(path, "SELECT count(*) FROM invocation WHERE state = 'succeeded'") == [(3,)]
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


async def test_a_holders_file_that_was_removed_proves_nothing(path: Path) -> None:
    async with Dispatch(path) as holder, Dispatch(path) as other:
        await holder.submit("q", b"x")
        await holder.claim(["q"], "w", lease=600.0)
        for file in (Path(f"{path}-presence") / "holders").iterdir():
            file.unlink()
        engine = await other._engines.get()
        await engine.read(engine.store.due)
        assert await engine.read(engine.store.due) == []


async def test_after_a_step_of_the_clock_holders_may_renew_first(path: Path) -> None:
    now = [1000.0]
    async with Dispatch(path, clock=lambda: now[0]) as plane:
        await plane.submit("q", b"x")
        await plane.do(Claim(("q",), "w", lease=10.0, local=False))
        engine = await plane._engines.get()
        store: Any = engine.store
        ticks = [0.0]
        store._clock_steps._steady = lambda: ticks[0]

        async def due() -> list[Any]:
            await engine.read(store.due)
            return list(await engine.read(store.due))

        assert await due() == []
        now[0] += 86_400.0
        ticks[0] += 0.25
        assert await due() == [], "the machine slept, and nobody could renew"
        ticks[0], now[0] = ticks[0] + 61.0, now[0] + 61.0
        assert len(await due()) == 1


async def test_a_stopped_process_does_not_hold_up_the_others_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    monkeypatch.setattr(write_lock, "WRITE_LOCK_TIMEOUT", 0.3)
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
        turn = os.open(f"{path}-turn", os.O_RDWR)
        fcntl.flock(turn, fcntl.LOCK_EX)
        try:
            with anyio.fail_after(10):
                await plane.submit("q", b"x")
        finally:
            os.close(turn)


async def test_bad_arguments_are_refused_before_they_spoil_a_batch(path: Path) -> None:
    async with Dispatch(path) as plane:
        id = await plane.submit("q", b"x")
        for bad in (b"x", None, float("nan"), "\ud800", "../x", ""):
            with pytest.raises(ValueError, match="expected an invocation id"):
                await plane.outcome(bad, timeout=5)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="expected an invocation id"):
                await plane.cancel(bad)  # type: ignore[arg-type]
        for bad in ("", "\ud800", None):
            with pytest.raises(ValueError, match="expected the name of a queue"):
                await plane.submit(bad, b"x")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="expected the name of a queue"):
                await plane.claim([bad], "w")  # type: ignore[list-item]
        for lease in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="expected a lease in seconds above 0"):
                await plane.claim(["q"], "w", lease=lease)
        assert (await plane.current_outcomes([id]))[0].state == "pending"


def _dedent(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)


async def test_the_dead_are_buried_only_after_their_claims_went_back(path: Path) -> None:
    """Whoever finds a dead holder and is killed before it reaps leaves the file for the next to find."""
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(CLAIM_AND.format(then="os.kill(os.getpid(), signal.SIGKILL)"), str(path), code=-signal.SIGKILL)
        engine = await plane._engines.get()
        holders = Path(f"{path}-presence") / "holders"
        await engine.read(engine.store.due)
        (reap,) = await engine.read(engine.store.due)
        assert isinstance(reap, Reap)
        assert set(reap.dead) <= {p.name for p in holders.iterdir()}
        await plane.do(reap)
        await wait_until(lambda: len(list(holders.iterdir())) == 1, 5, "the burial")


# Large bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 4096, 4097, MB, MB + 1, 5 * MB + 3])
async def test_bodies_and_results_of_any_size_come_back_whole(path: Path, size: int) -> None:
    body = os.urandom(size)
    async with Dispatch(path) as plane:
        await plane.submit("q", body, id="a")
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.body == body
        assert await plane.finish(fence_of(claimed, "w"), "succeeded", result=body[::-1]) is True
        assert await plane.finish(fence_of(claimed, "w"), "succeeded", result=body[::-1]) is False
        (outcome,) = await plane.current_outcomes(["a"])
        assert outcome.result == body[::-1]
        await plane.submit("q", body, id="a")  # a repeat writes nothing
        assert await plane.purge(-1.0) == 1
    assert query(path, "SELECT count(*) FROM piece") == query(path, "SELECT count(*) FROM blob") == [(0,)]


async def test_refused_large_operations_leave_no_pieces(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x" * (2 * MB), id="a", key="k")
        assert await plane.submit("q", b"y" * (2 * MB), id="b", key="k") == "a"
        (claimed,) = await plane.claim(["q"], "w")
        await plane.release(fence_of(claimed, "w"))
        answers = await plane.many([Finish(fence_of(claimed, "w"), "succeeded", b"z" * (2 * MB))])
        assert "is lost" in str(answers[0])
    assert query(path, "SELECT count(*) FROM blob") == [(1,)]
    assert query(path, "SELECT count(*) FROM piece") == [(2 * MB // PIECE_BYTES,)]


async def test_a_batch_may_hold_the_same_large_operation_twice(path: Path) -> None:
    """The blob that was written ahead for it belongs to the first; the second is a repeat."""
    body = os.urandom(2 * MB)
    async with Dispatch(path) as plane:
        submit = Submit("a", "q", body)
        assert await plane.many([submit, submit]) == ["a", "a"]
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.body == body
        finish = Finish(fence_of(claimed, "w"), "succeeded", body[::-1])
        assert await plane.many([finish, finish]) == [True, False]
        (outcome,) = await plane.current_outcomes(["a"])
        assert outcome.result == body[::-1]
    assert (
        query(path, "SELECT count(*) FROM blob WHERE linked = 1") == query(path, "SELECT count(*) FROM blob") == [(2,)]
    )


async def test_a_large_operation_beside_one_that_the_driver_refuses_keeps_its_body(path: Path) -> None:
    body = os.urandom(2 * MB)
    async with Dispatch(path) as plane:
        good, bad = Submit("good", "q", body), Submit("bad", "q", body, priority=2**70)
        answers = await plane.many([bad, good, good])
        assert isinstance(answers[0], DispatchError)
        assert answers[1:] == ["good", "good"]
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.body == body


async def test_large_operations_take_turns_with_small_ones(path: Path) -> None:
    """While 64 MB are written a small submit is answered many times over, not once at the end."""
    async with Dispatch(path) as plane:
        await plane.submit("small", b"x")
        done = anyio.Event()
        small = 0
        async with anyio.create_task_group() as group:

            async def large() -> None:
                await plane.submit("large", b"x" * (64 * MB))
                done.set()

            group.start_soon(large)
            while not done.is_set():
                await plane.submit("small", b"x")
                small += 1
        assert small >= 16


async def test_pieces_that_no_row_refers_to_go_with_a_purge(path: Path) -> None:
    now = [1_000_000.0]
    async with Dispatch(path, clock=lambda: now[0]) as plane:
        await plane.submit("q", b"x")
        query_write(path, "INSERT INTO blob (linked, made_at) VALUES (0, 1000.0)")
        query_write(path, "INSERT INTO piece SELECT ref, 0, x'00' FROM blob")
        await plane.purge(3600.0)
    assert query(path, "SELECT count(*) FROM piece") == [(0,)]


def query_write(path: Path, sql: str) -> None:
    db = sqlite3.connect(path)
    try:
        db.execute(sql)
        db.commit()
    finally:
        db.close()


# Faults -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["body", "commit"])
def test_a_transaction_that_fails_is_rolled_back(fails: str) -> None:
    db = sqlite3.connect(":memory:", isolation_level=None)
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("CREATE TABLE t (x INTEGER PRIMARY KEY, y REFERENCES t (x) DEFERRABLE INITIALLY DEFERRED)")

    def write() -> None:
        db.execute("INSERT INTO t VALUES (1, 2)")  # it refers to what is not there, which the commit finds out
        if fails == "body":
            raise KeyError("the operation failed")

    with pytest.raises((KeyError, sqlite3.IntegrityError)):
        connection.in_transaction(db, write)
    assert not db.in_transaction
    assert db.execute("SELECT count(*) FROM t").fetchone() == (0,)


async def test_one_operation_that_the_driver_refuses_spoils_only_itself(path: Path) -> None:
    """A value that no column takes: its neighbours in the batch stand."""
    async with Dispatch(path) as plane:
        good, bad = Submit("good", "q", b"x"), Submit("bad", "q", b"x", priority=2**70)
        answers = await plane.many([good, bad, Submit("fine", "q", b"x")])
        assert answers[0] == "good"
        assert isinstance(answers[1], Exception)
        assert answers[2] == "fine"
        assert await plane.counts() == {("q", "queued"): 2}


async def test_R90_cancelled_operations_leave_no_transaction_open(path: Path) -> None:
    handed_out: set[str] = set()  # a caller that leaves between the claim's answer and its ack keeps what it was given

    async with Dispatch(path) as plane, Dispatch(path) as other:
        for steps in range(30):
            async with anyio.create_task_group() as group:

                async def work(limit: int = steps) -> None:
                    with anyio.move_on_after(0.0005 * limit):
                        id = await plane.submit("q", b"x")
                        for claimed in await plane.claim(["q"], "w"):
                            handed_out.add(claimed.id)
                            await plane.finish(fence_of(claimed, "w"), "succeeded")
                        await plane.outcome(id)

                for _ in range(3):
                    group.start_soon(work)
            with anyio.fail_after(20):
                await other.submit("free", b"x")
        await wait_until(lambda: _only_these_run(other, handed_out), 10, "every claim nobody was given to go back")


async def _only_these_run(plane: Dispatch, handed_out: set[str]) -> bool:
    return {row.id for row in await plane.rows(RowFilter(state="running"))} <= handed_out


def test_a_crowd_on_a_loop_of_plain_asyncio(path: Path) -> None:
    """`asyncio.run` instead of `anyio.run`: in its plain callbacks anyio does not know which loop is running."""

    async def crowd() -> int:
        async with Dispatch(path) as plane:
            await plane.submit("q", b"x")
            async with asyncio.timeout(30):
                await asyncio.gather(*(plane.submit("q", b"x") for _ in range(300)))
            return (await plane.counts())["q", "queued"]

    assert asyncio.run(crowd()) == 301


@pytest.mark.parametrize("moment", ["idle", "in use"])
async def test_a_closed_plane_opens_again(path: Path, moment: str) -> None:
    plane = Dispatch(path)
    await plane.submit("q", b"x", id="a")
    if moment == "in use":
        async with anyio.create_task_group() as group:

            async def close() -> None:
                await wait_until(lambda: _waits(plane, "id"), 10, "the wait")
                await plane.aclose()

            group.start_soon(close)
            with pytest.raises(PlaneUnavailable, match="was closed during a wait"):
                await plane.outcome("a")
    else:
        await plane.aclose()
    assert (await plane.current_outcomes(["a"]))[0].state == "pending"
    await plane.aclose()


def test_two_threads_with_loops_of_their_own_share_one_object(path: Path) -> None:
    script = """
        import anyio, sys, threading
        from dreamlake.lakeshore import Dispatch
        plane = Dispatch(sys.argv[1])
        def run(name, backend):
            async def main():
                for number in range(50):
                    await plane.submit(name, b"x")
            anyio.run(main, backend=backend)
        threads = [threading.Thread(target=run, args=(f"q{i}", b)) for i, b in enumerate(["asyncio", "trio", "asyncio"])]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(sorted(anyio.run(plane.counts).values()))
    """
    out, err = run_python(script, str(path))
    assert (out, err) == ("[50, 50, 50]\n", "")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_R95_R96_many_processes_open_one_new_file(path: Path) -> None:
    script = """
        import anyio, sys
        from dreamlake.lakeshore import Dispatch
        from dreamlake.lakeshore.planes.contract.operations import Fence
        async def main():
            mine = []
            async with Dispatch(sys.argv[1]) as plane:
                for number in range(20):
                    await plane.submit("q", b"x")
                    for one in await plane.claim(["q"], sys.argv[2]):
                        await plane.finish(Fence(one.id, sys.argv[2], one.attempt), "succeeded")
                        mine.append(one.id)
            print(*mine)
        anyio.run(main)
    """
    code = _dedent(script)
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    crowd = [
        subprocess.Popen([*command, f"w{n}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(24)
    ]
    seen: list[str] = []
    for process in crowd:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
        seen += out.split()
    assert len(seen) == len(set(seen)) == 480
