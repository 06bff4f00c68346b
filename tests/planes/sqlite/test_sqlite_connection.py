"""The database file: who may read it, which files are refused, what a failed or cancelled opening leaves, and forks."""

from __future__ import annotations

import os
import signal
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio
import anyio.to_thread
import pytest
from helpers import run_python, wait_until
from sqlite_kit import fence_of, has_waiters, needs_proc, open_files, query

from dreamlake.lakeshore import Dispatch, DispatchError, PlaneUnavailable
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.sqlite import connection, doorbell, forks, inline_writer, read

pytestmark = pytest.mark.anyio


async def test_new_files_belong_to_their_owner_only(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
        modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in path.parent.iterdir()}
        inner = {p.name: stat.S_IMODE(p.stat().st_mode) for p in Path(f"{path}-presence").iterdir()}
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert modes["plane.db"] == modes["plane.db-wal"] == modes["plane.db-turn"] == 0o600
    assert modes["plane.db-presence"] == 0o700
    assert set(inner.values()) == {0o700}


async def test_an_existing_file_keeps_its_mode(path: Path) -> None:
    path.parent.mkdir(mode=0o755)
    path.touch(mode=0o640)
    os.chmod(path, 0o640)
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


async def test_which_files_stand_beside_the_database(tmp_path: Path) -> None:
    async with Dispatch(tmp_path / "a.db") as plane:
        await plane.submit("q", b"x")
        names = {p.name for p in tmp_path.iterdir()}
    assert names == {"a.db", "a.db-wal", "a.db-shm", "a.db-turn", "a.db-presence"}


async def test_the_file_is_marked(path: Path) -> None:
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


async def test_an_impossible_path_fails_at_once(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("fails", ["body", "commit"])
def test_a_transaction_that_fails_is_rolled_back(fails: str) -> None:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as db:
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
    """At moments that a timer rarely meets: while the schema is checked, and while the rows of dead holders are read."""
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


@pytest.mark.parametrize("moment", ["idle", "in use"])
async def test_a_closed_plane_opens_again(path: Path, moment: str) -> None:
    plane = Dispatch(path)
    await plane.submit("q", b"x", id="a")
    if moment == "in use":
        async with anyio.create_task_group() as group:

            async def close() -> None:
                await wait_until(lambda: has_waiters(plane, "id"), 10, "the wait")
                await plane.aclose()

            group.start_soon(close)
            with pytest.raises(PlaneUnavailable, match="was closed during a wait"):
                await plane.outcome("a")
    else:
        await plane.aclose()
    assert (await plane.current_outcomes(["a"]))[0].state == "pending"
    await plane.aclose()


async def test_a_forked_child_may_not_use_a_plane_that_was_open(path: Path) -> None:
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
    out, _ = run_python("import warnings; warnings.simplefilter('ignore')\n" + dedent(script), str(path))
    assert "was open when this process was forked, and SQLite does not allow its use here: open it only after" in out
    assert query(path, "SELECT count(*) FROM invocation") == [(1,)]


async def test_one_client_after_another_beside_a_worker_loses_nothing(path: Path) -> None:
    """A client that closes must not take itself for the last one, and delete the log of the others."""
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
