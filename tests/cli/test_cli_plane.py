"""`lakeshore plane migrate`: what it prints, its exit codes, and what it leaves on both planes."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import anyio
import cli_jobs
import pytest
from cli_kit import HERE, Process, cli, environment, worker
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.planes.contract.records import RowFilter

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from cli_kit import Work


@pytest.fixture
def ids(q: dls.SyncQueue, work: Work) -> list[str]:
    """One that succeeded, one that failed, a stream, and one that is queued, under a key."""
    ids = [
        q.submit(dls.thunk(cli_jobs.add, 1, b=2)),
        q.submit(dls.thunk(cli_jobs.boom, "bad luck")),
        q.submit(dls.thunk(cli_jobs.count, 3)),
    ]
    work()
    return [*ids, q.submit(dls.thunk(cli_jobs.echo, "later"), key="k")]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "new" / "target.db"


def test_everything_is_moved_and_goes_on(db: Path, target: Path, ids: list[str]) -> None:
    ran = cli("plane", "migrate", "--from", db, "--to", target)
    assert (ran.code, ran.err) == (0, "")
    lines = ran.out.splitlines()
    assert [line.split() for line in lines[:4]] == [
        ["queue", "state", "source", "target"],
        ["q", "failed", "1", "1"],
        ["q", "queued", "1", "1"],
        ["q", "succeeded", "2", "2"],
    ]
    digests = re.findall(r"^(source|target)  (sha256:[0-9a-f]{64})$", ran.out, re.MULTILINE)
    assert [name for name, _ in digests] == ["source", "target"]
    assert digests[0][1] == digests[1][1]
    assert lines[-1] == "4 invocations written, 0 had been there"
    assert cli("inv", "result", ids[0], "--db", target).out == "3\n"
    failed = cli("inv", "result", ids[1], "--db", target)
    assert (failed.code, failed.err.splitlines()[-1]) == (
        1,
        cli("inv", "result", ids[1], "--db", db).err.splitlines()[-1],
    )
    assert cli("inv", "stream", ids[2], "--db", target).out == cli("inv", "stream", ids[2], "--db", db).out != ""

    async def submit_again() -> str:
        async with dls.Dispatch(target) as plane:
            return await plane.submit("q", b"", key="k")

    assert anyio.run(submit_again) == ids[3]


@pytest.mark.parametrize("wrong", [("--from-namespace", "nosuch"), ("--queue", "nosuch")])
def test_a_name_that_nothing_has_is_a_mistake(db: Path, target: Path, ids: list[str], wrong: tuple[str, str]) -> None:
    ran = cli("plane", "migrate", "--from", db, "--to", target, *wrong)
    assert ran.code == 1
    assert ran.out == ""
    assert " has no invocations" in ran.err
    assert ran.err.endswith(": check --queue and --from-namespace\n")
    assert "nosuch" in ran.err
    assert not target.exists()


def test_what_is_moved_is_untrusted(db: Path, target: Path, q: dls.SyncQueue) -> None:
    ids = [q.submit(dls.thunk(lambda: 7)) for _ in range(2)]
    assert cli("plane", "migrate", "--from", db, "--to", target).code == 0
    for options, id in (((), ids[0]), (("--allow-pickled",), ids[1])):
        ran = cli("worker", "once", "--queue", "q", "--db", target, *options)
        assert ran.code == 0, ran.err
        result = cli("inv", "result", id, "--db", target)
        if options:
            assert result.out == "7\n"
        else:
            assert result.code == 1
            assert "pickled" in result.err
    assert cli("inv", "show", ids[0], "--db", target, "--json").document["trusted"] is False
    assert cli("inv", "show", ids[0], "--db", db, "--json").document["trusted"] is True


def test_json_and_a_second_run(db: Path, target: Path, ids: list[str]) -> None:
    first = cli("plane", "migrate", "--from", db, "--to", target, "--json").document
    second = cli("plane", "migrate", "--from", db, "--to", target, "--json").document
    counts = [
        {"queue": "q", "state": state, "count": n} for state, n in (("failed", 1), ("queued", 1), ("succeeded", 2))
    ]
    for document, written, there in ((first, 4, 0), (second, 0, 4)):
        digest = document["source"]["digest"]
        assert document == {
            "dry_run": False, "written": written, "there": there, "alike": True, "difference": None,
            "source": {"counts": counts, "digest": digest}, "target": {"counts": counts, "digest": digest},
        }  # fmt: skip


def test_a_dry_run_makes_no_file(db: Path, target: Path, ids: list[str]) -> None:
    ran = cli("plane", "migrate", "--from", db, "--to", target, "--dry-run")
    assert (ran.code, ran.out, ran.err) == (0, "4 invocations would be written, 0 had been there\n", "")
    assert not target.parent.exists()
    cli("plane", "migrate", "--from", db, "--to", target)
    ran = cli("plane", "migrate", "--from", db, "--to", target, "--dry-run", "--json")
    assert ran.document == {"dry_run": True, "written": 0, "there": 4}


def test_namespaces_and_queues(db: Path, target: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    async def other() -> None:
        async with dls.Dispatch(db, ns="b") as plane:
            for queue in ("x", "y", "z"):
                await plane.submit(queue, b"", id=queue)

    anyio.run(other)
    ran = cli("plane", "migrate", "--from", db, "--from-namespace", "b", "--to", target, "--queue", "x", "--queue", "z")
    assert ran.out.endswith("2 invocations written, 0 had been there\n")
    counts = {
        row["name"]: row["queued"]
        for row in cli("queue", "list", "--db", target, "--namespace", "b", "--json").document
    }
    assert counts == {"x": 1, "z": 1}
    # One file may hold both sides; the namespace of the environment is the source's, and then the target's.
    monkeypatch.setenv("LAKESHORE_NAMESPACE", "b")
    ran = cli("plane", "migrate", "--from", db, "--to", db, "--to-namespace", "c")
    assert ran.out.endswith("3 invocations written, 0 had been there\n")
    ran = cli("plane", "migrate", "--from", db, "--to", target.parent / "third.db")
    assert [row["name"] for row in cli("queue", "list", "--db", target.parent / "third.db", "--json").document] == [
        "x",
        "y",
        "z",
    ]


def test_what_runs_is_in_the_way_and_no_file_is_made(db: Path, target: Path, q: dls.SyncQueue, ids: list[str]) -> None:
    job = q.claim()
    assert job is not None
    for extra in ((), ("--dry-run",)):
        ran = cli("plane", "migrate", "--from", db, "--to", target, *extra)
        assert (ran.code, ran.out) == (1, "")
        assert ran.err.startswith(f"lakeshore: 1 invocation of the source is running: {ids[3]!r} (held by ")
        assert "Stop the workers of the source" in ran.err
    assert not target.parent.exists()
    q.nack(job, retry=True)
    assert cli("plane", "migrate", "--from", db, "--to", target).code == 0


def test_a_source_that_changes_meanwhile_is_told(
    db: Path, target: Path, ids: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dreamlake.lakeshore.planes.migrate import Migration

    copy = Migration.copy

    async def and_cancel(self: Migration, *args: object, **kwargs: object) -> None:
        await copy(self, *args, **kwargs)  # type: ignore[arg-type]
        async with dls.Dispatch(db) as plane:
            await plane.cancel(ids[3])

    monkeypatch.setattr(Migration, "copy", and_cancel)
    ran = cli("plane", "migrate", "--from", db, "--to", target)
    assert ran.code == 1
    assert ran.err == (
        f"lakeshore: the two planes differ: invocation {ids[3]!r} has the state 'killed' on the source and 'queued' on the "
        "target; one of them was changed during the copy, or the target was not empty: migrate again to an empty target "
        "while nothing uses either plane\n"
    )
    cells = [line.split() for line in ran.out.splitlines()[1:4]]
    assert ["q", "killed", "1", "0"] in cells
    assert ["q", "queued", "0", "1"] in cells


def test_a_migration_that_was_killed_goes_on(db: Path, tmp_path: Path) -> None:
    async def fill() -> None:
        async with dls.Dispatch(db) as plane:
            for first in range(0, 20_000, 500):
                await plane.many([Submit(f"i{n}", "q", b"x" * 200) for n in range(first, first + 500)])

    anyio.run(fill)
    for attempt in range(10):
        target = tmp_path / f"{attempt}.db"
        with Process("plane", "migrate", "--from", db, "--to", target) as process:
            wait_until_sync(lambda target=target: _count(target) > 0, 60.0, "the first rows")
            process.signal(signal.SIGKILL)
            process.ends()
        if _count(target) < 20_000:  # or it was quicker
            break
    there = _count(target)
    assert there < 20_000
    ran = cli("plane", "migrate", "--from", db, "--to", target)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.endswith(f"{20_000 - there} invocations written, {there} had been there\n")


def _count(path: Path) -> int:
    async def count() -> int:
        async with dls.Dispatch(path) as plane:
            return sum((await plane.counts()).values())

    return anyio.run(count) if path.exists() else 0


def test_progress_is_shown_on_a_terminal(db: Path, target: Path, ids: list[str]) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "dreamlake.lakeshore", "plane", "migrate", "--from", str(db), "--to", str(target)]
    with os.fdopen(ours, "rb", buffering=0) as shown:
        process = subprocess.Popen(
            command, cwd=HERE, env=environment(TERM="xterm"), stdout=subprocess.PIPE, stderr=theirs, text=True
        )
        os.close(theirs)
        seen = b""
        try:
            while part := shown.read(4096):
                seen += part
        except OSError:
            pass  # how a terminal says that nobody is left on its other side
        out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert b"writing" in seen
    assert b"comparing" in seen
    assert out.endswith("4 invocations written, 0 had been there\n")


SERVER = "is a server: a migration works on the plane itself, so name the file or the database that the server serves"
NONE = "names no plane: give the path of a file, or an address mongodb://..."


@pytest.mark.parametrize(
    ("source", "target", "sentence"),
    [
        ("http://127.0.0.1:1", "x.db", f"--from {SERVER}"),
        ("{db}", "HTTPS://host", f"--to {SERVER}"),
        (":memory:", "x.db", f"--from {NONE}"),
        ("{db}", "", f"--to {NONE}"),
        ("{db}", "redis://host", "--to has the scheme 'redis': give the path of a file, or an address mongodb://..."),
        (
            "{db}",
            "{folder}/./plane.db",
            "--from and --to are one plane and namespace: name another file, database or namespace",
        ),
    ],
)
def test_what_is_no_plane(db: Path, ids: list[str], source: str, target: str, sentence: str) -> None:
    names: Callable[[str], str] = lambda text: text.format(db=db, folder=db.parent)  # noqa: E731
    ran = cli("plane", "migrate", "--from", names(source), "--to", names(target))
    assert ran.code == 2
    assert ran.err.splitlines()[-1] == f"Error: {sentence}"


def test_a_source_that_is_not_there(tmp_path: Path, target: Path) -> None:
    ran = cli("plane", "migrate", "--from", tmp_path / "none.db", "--to", target)
    sentence = f"no plane at {str(tmp_path / 'none.db')!r}: nothing was ever submitted there; check --from"
    assert (ran.code, ran.out, ran.err) == (5, "", f"lakeshore: {sentence}\n")
    ran = cli("plane", "migrate", "--from", tmp_path / "none.db", "--to", target, "--json")
    assert (ran.code, ran.document) == (5, {"error": {"type": "PlaneUnavailable", "message": sentence}})
    assert not target.parent.exists()


def test_a_target_that_others_use(db: Path, target: Path, ids: list[str]) -> None:
    async def theirs() -> None:
        async with dls.Dispatch(target) as plane:
            await plane.submit("q", b"", id="theirs")

    anyio.run(theirs)
    ran = cli("plane", "migrate", "--from", db, "--to", target)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == (
        "lakeshore: the target holds invocation 'theirs' of queue 'q', which the source does not have, or not in this "
        "place. A target has to be empty, or to hold only what an earlier run of this very migration wrote: give a new "
        "one\n"
    )


def test_a_worker_of_the_target_takes_over(
    db: Path, target: Path, q: dls.SyncQueue, work: Work, ids: list[str]
) -> None:
    assert cli("plane", "migrate", "--from", db, "--to", target).code == 0
    with worker(target, "--allow-module", "cli_jobs") as process:
        assert cli("inv", "result", ids[3], "--db", target).out == "'later'\n"
        process.signal()
        assert process.ends().code == 0

    async def rows() -> list[int]:
        async with dls.Dispatch(target) as plane:
            return [row.attempt for row in await plane.rows(RowFilter(id=ids[3]))]

    assert anyio.run(rows) == [1]
