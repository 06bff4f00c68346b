"""`lakeshore worker`, as processes: what they say, what their options do, and how they end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import cli_jobs
import pytest
from cli_kit import HERE, LIMIT, Process, appears, cli, environment, worker
from helpers import wait_until_sync

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from pathlib import Path

LINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ INFO (\S+) (\S+) (\S+) \d+\.\d{3} s(?:, \w+)?$", re.MULTILINE)


# --- what it says ---------------------------------------------------------------------------------------------------


def test_it_says_what_it_serves_and_a_line_for_each_invocation(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    with worker(db, "--queue", "other", "--concurrency", 3, "--root", tmp_path) as process:
        added = q.submit(dls.thunk(cli_jobs.add, 2))
        failed = dls.SyncQueue("other", dispatch=q.dispatch).submit(dls.thunk(cli_jobs.boom, "bad\nluck"))
        counted = q.submit(dls.thunk(cli_jobs.count, 3))
        assert q.result(added, timeout=LIMIT) == 3
        with pytest.raises(ValueError, match="bad\nluck"):
            q.result(failed, timeout=LIMIT)
        q.result(counted, timeout=LIMIT)
        process.signal()
        ran = process.ends()
    assert ran.code == 0, ran.err
    assert ran.out == ""
    first, *rest = ran.err.splitlines()
    assert first.endswith(
        f"INFO worker {process.pid} of queues q, other on {db}, root {tmp_path}, concurrency 3, "
        "pickled functions allowed where submitted on this machine"
    )
    assert sorted(LINE.findall("\n".join(rest))) == sorted(
        [(added, "add", "succeeded"), (failed, "boom", "failed"), (counted, "count", "succeeded")]
    )
    assert len(rest) == 4
    assert "SIGTERM: claiming no more" in rest[-1]


@pytest.mark.parametrize(
    ("option", "said"), [("--allow-pickled", "pickled functions allowed\n"), ("--no-allow-pickled", "refused\n")]
)
def test_it_says_whether_pickles_are_allowed(db: Path, option: str, said: str) -> None:
    with worker(db, option) as process:
        assert process.err.endswith(said)


def test_the_daemon_module_is_worker_start(db: Path, q: dls.SyncQueue) -> None:
    id = q.submit(dls.thunk(cli_jobs.add, 5))
    with Process("--queue", "q", "--db", db, module="dreamlake.lakeshore.daemon") as process:
        assert q.result(id, timeout=LIMIT) == 6
        process.signal()
        assert process.ends().code == 0


# --- where it looks -------------------------------------------------------------------------------------------------


def test_the_current_folder_is_the_first_place_of_modules_and_the_root(db: Path, q: dls.SyncQueue) -> None:
    id = q.submit(dls.thunk(cli_jobs.where))
    # Like the installed script, which does not look in the current folder of itself.
    script = "import sys; del sys.path[0]; from dreamlake.lakeshore.cli.main import main; main()"
    command = [sys.executable, "-c", script, "worker", "once", "--queue", "q", "--db", str(db)]
    subprocess.run(command, cwd=HERE, check=True, timeout=LIMIT, env=environment())
    root, place, pid = q.result(id, timeout=LIMIT)
    assert (root, place) == (str(HERE), str(HERE))
    assert pid != os.getpid()


def test_R73_a_function_of_the_script_that_was_started_runs(db: Path, tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(
        "import os, sys, dreamlake.lakeshore as dls\n"
        "def double(x): return 2 * x, os.getpid()\n"
        "if __name__ == '__main__':\n"
        "    q = dls.SyncQueue('q', dispatch=dls.Dispatch(sys.argv[1]))\n"
        "    value, pid = q.call(dls.thunk(double, 21))\n"
        "    print(value, pid != os.getpid())\n"
    )
    with worker(db, cwd=tmp_path):
        command = [sys.executable, str(script), str(db)]
        said = subprocess.run(command, check=True, timeout=LIMIT, capture_output=True, text=True, env=environment())
    assert said.stdout == "42 True\n"


def test_R78_a_module_that_the_worker_does_not_find_is_named_with_its_folder_and_path(
    db: Path, q: dls.SyncQueue, tmp_path: Path
) -> None:
    with worker(db, cwd=tmp_path):
        id = q.submit(dls.thunk(cli_jobs.echo, 1))
        with pytest.raises(dls.InvocationFailed) as caught:
            q.result(id, timeout=LIMIT)
    sentence = str(caught.value)
    assert "No module named 'cli_jobs'" in sentence
    assert f"the worker runs in {str(tmp_path)!r} with sys.path [{str(tmp_path)!r}, " in sentence
    assert "start the worker in the project's folder" in sentence


def test_the_environment_says_what_flags_do_not(tmp_path: Path) -> None:
    home, root = tmp_path / "home", tmp_path / "root"
    env = environment(LAKESHORE_HOME=str(home), LAKESHORE_QUEUE="mine", LAKESHORE_ROOT=str(root))
    refused = Process("worker", "once", env=env).ends()
    assert refused.code == 2
    assert f"the root {str(root)!r} is not a folder: create it, or name another with --root or LAKESHORE" in refused.err
    root.mkdir()
    plane = dls.Dispatch(home / "lakeshore.db")
    mine, other = (dls.SyncQueue(name, dispatch=plane) for name in ("mine", "other"))
    ids = [queue.submit(dls.thunk(cli_jobs.where)) for queue in (mine, other)]
    assert Process("worker", "once", env=env).ends().out == "1 invocation run\n"
    assert mine.result(ids[0], timeout=1)[0] == str(root)
    assert other.count() == 1
    flags = ("--queue", "other", "--root", tmp_path)
    assert Process("worker", "once", *flags, env=env).ends().out == "1 invocation run\n"
    assert other.result(ids[1], timeout=1)[0] == str(tmp_path)
    # An empty variable is an unset one.
    default = dls.SyncQueue("default", dispatch=plane)
    default.submit(dls.thunk(cli_jobs.where))
    assert Process("worker", "once", env=env | {"LAKESHORE_QUEUE": ""}).ends().out == "1 invocation run\n"


def test_a_namespace_is_a_plane_of_its_own(db: Path, q: dls.SyncQueue) -> None:
    team = dls.SyncQueue("q", dispatch=dls.Dispatch(db, ns="team"))
    ids = [queue.submit(dls.thunk(cli_jobs.echo, 1)) for queue in (q, team)]
    with worker(db, "--namespace", "team") as process:
        assert team.result(ids[1], timeout=LIMIT) == 1
        assert f" of queue q in namespace team on {db}, " in process.err
    assert q.count() == 1
    assert cli("inv", "list", "--db", db, "--namespace", "team", "--json").document[0]["id"] == ids[1]


# --- what its options do --------------------------------------------------------------------------------------------


def test_what_a_body_submits_goes_to_the_plane_of_its_worker(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    with worker(db, env=environment(LAKESHORE_HOME=str(tmp_path / "elsewhere"))):
        child, parent = q.call(dls.thunk(cli_jobs.add_there, 20, 22))
    bodies = dls.SyncQueue("bodies", dispatch=dls.Dispatch(db))
    row = bodies.get(child)
    assert (row.queue, row.state, row.parent) == ("bodies", "queued", parent)


def test_retries_and_lease(db: Path, q: dls.SyncQueue) -> None:
    with worker(db, "--retries", 1, "--lease", "10m"):
        id = q.submit(dls.thunk(cli_jobs.boom, "again"))
        with pytest.raises(ValueError, match="again"):
            q.result(id, timeout=LIMIT)
    row = q.get(id)
    assert (row.attempt, row.failures) == (2, 1)
    assert row.lease_until is not None
    assert row.started_at is not None
    assert row.lease_until - row.started_at == pytest.approx(600)


def test_concurrency(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    with worker(db, "--concurrency", 2):  # each begins when the other has begun
        ids = [q.submit(dls.thunk(cli_jobs.wait_for, str(a), str(b))) for a, b in ((one, two), (two, one))]
        assert [q.result(id, timeout=LIMIT) for id in ids] == ["ended when it was told to"] * 2


def test_timeout(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    with worker(db, "--timeout", 0.2):
        id = q.submit(dls.thunk(cli_jobs.wait_forever, str(tmp_path / "begun")))
        with pytest.raises(dls.InvocationTimedOut, match=r"longer than this worker's timeout of 0\.2 s"):
            q.result(id, timeout=LIMIT)


def test_max_lost(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    id = q.submit(dls.thunk(cli_jobs.wait_forever, str(begun)))
    with worker(db, "--max-lost", 1) as process:
        appears(begun)
        process.signal(signal.SIGKILL)
        with pytest.raises(dls.InvocationFailed, match="WorkerLost"):
            q.result(id, timeout=LIMIT)


def test_pickles_are_refused_and_with_them_refs_to_what_is_not_the_users(db: Path, q: dls.SyncQueue) -> None:
    pickled = q.submit(dls.thunk(lambda: 1))
    library = q.submit(dls.thunk(os.path.basename, "a/b"))
    mine = q.submit(dls.thunk(cli_jobs.echo, 2))
    with worker(db, "--no-allow-pickled"):
        assert q.result(mine, timeout=LIMIT) == 2
    with pytest.raises(dls.InvocationFailed, match=r"which this worker refuses .* start it with --allow-pickled"):
        q.result(pickled, timeout=1)
    with pytest.raises(dls.InvocationFailed, match="start the worker with --allow-module posixpath"):
        q.result(library, timeout=1)
    with worker(db, "--no-allow-pickled", "--allow-module", "posixpath"):
        assert q.call(dls.thunk(os.path.basename, "a/b")) == "b"


def test_runtime_policy(db: Path, q: dls.SyncQueue) -> None:
    env = environment(LAKESHORE_RUNTIME_POLICY="sloppy")
    ran = Process("worker", "once", "--db", db, env=env).ends()
    assert ran.code == 2
    assert "'sloppy' is not one of 'strict', 'minor', 'off'" in ran.err
    ran = Process("worker", "once", "--db", db, "--queue", "q", "--runtime-policy", "off", env=env).ends()
    assert (ran.code, ran.out) == (0, "0 invocations run\n")


# --- once -----------------------------------------------------------------------------------------------------------


def test_once_runs_at_most_one_and_says_how_many(db: Path, q: dls.SyncQueue) -> None:
    ids = [q.submit(dls.thunk(cli_jobs.echo, n)) for n in range(2)]
    for expected in ("1 invocation run\n", "1 invocation run\n", "0 invocations run\n"):
        with Process("worker", "once", "--queue", "q", "--db", db) as process:
            ran = process.ends()
        assert (ran.code, ran.out) == (0, expected)
    assert [q.result(id, timeout=1) for id in ids] == [0, 1]


# --- how it ends ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_running_body_end_and_claims_nothing_more(
    db: Path, q: dls.SyncQueue, tmp_path: Path, number: signal.Signals
) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with worker(db) as process:
        running = q.submit(dls.thunk(cli_jobs.wait_for, str(begun), str(ended)))
        appears(begun)
        waiting = q.submit(dls.thunk(cli_jobs.echo, 1))
        process.signal(number)
        process.says(f"{number.name}: claiming no more, running bodies may end")
        ended.touch()
        ran = process.ends()
    assert ran.code == 0, ran.err
    assert q.result(running, timeout=1) == "ended when it was told to"
    assert q.get(waiting).state == "queued"
    assert q.get(waiting).attempt == 0


def test_R86_after_the_grace_a_body_is_cancelled_and_goes_back_free_of_charge(
    db: Path, q: dls.SyncQueue, tmp_path: Path
) -> None:
    begun = tmp_path / "begun"
    with worker(db, "--grace", 0.1) as process:
        id = q.submit(dls.thunk(cli_jobs.wait_forever, str(begun)))
        appears(begun)
        process.signal()
        assert process.ends().code == 0
    row = q.get(id)
    assert (row.state, row.attempt, row.failures, row.lost, row.error) == ("queued", 1, 0, 0, None)


def test_a_second_signal_ends_it_at_once(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with worker(db, "--grace", "1h") as process:
        id = q.submit(dls.thunk(cli_jobs.wait_forever, str(begun)))
        appears(begun)
        process.signal()
        process.says("SIGTERM: claiming no more")
        process.signal(signal.SIGINT)
        ran = process.ends()
    assert ran.code == 130
    assert "SIGINT again: returning running bodies to their queue" in ran.err
    row = q.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)


def test_a_thread_that_does_not_end_cannot_hold_the_process(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with worker(db, "--grace", 0.1) as process:
        id = q.submit(dls.thunk(cli_jobs.hang, str(begun)))
        appears(begun)
        process.signal()
        ran = process.ends()
    assert ran.code == 1
    assert "1 bodies still run in threads, which cannot be stopped; the process ends without them" in ran.err
    row = q.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)


def test_when_every_slot_is_such_a_thread_the_worker_gives_up(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    with worker(db, "--timeout", 0.2, "--grace", 0.2) as process:
        # More than one: its time may be over before its thread has begun, and then it holds no slot.
        ids = [q.submit(dls.thunk(cli_jobs.hang, str(tmp_path / "begun"))) for _ in range(9)]
        with pytest.raises(dls.InvocationTimedOut):
            q.result(ids[0], timeout=LIMIT)
        ran = process.ends()
    assert ran.code == 1
    assert re.search(r"^lakeshore: every slot of worker .* cannot be stopped: start the worker again", ran.err, re.M)
    assert "Traceback" not in ran.err


def test_a_thread_that_a_body_left_behind_cannot_hold_the_process(db: Path, q: dls.SyncQueue) -> None:
    with worker(db) as process:
        assert q.call(dls.thunk(cli_jobs.leave_thread)) == "left"
        process.signal()
        ran = process.ends()
    assert ran.code == 1
    assert "threads that were started here still run after 5 s; the process ends without them" in ran.err


def test_idle_threads_of_a_pool_do_not_hinder_a_clean_end(db: Path, q: dls.SyncQueue) -> None:
    with worker(db) as process:
        assert q.call(dls.thunk(cli_jobs.leave_pool)) == 7
        process.signal()
        assert process.ends().code == 0


def test_R33_a_fault_of_the_worker_itself_ends_the_process_although_a_body_hangs(db: Path) -> None:
    script = """
import sys, threading
from anyio import to_thread
from dreamlake.lakeshore.cli.main import main
from dreamlake.lakeshore.worker import loop

async def broken(*args, **options):
    import anyio
    async with anyio.create_task_group() as group:
        hangs = threading.Event()
        hang = lambda: (hangs.set(), threading.Event().wait())
        group.start_soon(lambda: to_thread.run_sync(hang, abandon_on_cancel=True))
        while not hangs.is_set():
            await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    raise RuntimeError("the loop is broken")

loop.run_worker = broken
main(["worker", "start", "--db", sys.argv[1]])
"""
    ran = subprocess.run([sys.executable, "-c", script, str(db)], capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 1
    assert "RuntimeError: the loop is broken" in ran.stderr
    assert ran.stderr.endswith("cannot be stopped; the process ends without them\n")


def test_R5_what_a_killed_worker_ran_is_run_by_the_next(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    id = q.submit(dls.thunk(cli_jobs.wait_for, str(begun), str(ended)))
    with worker(db) as process:
        appears(begun)
        process.signal(signal.SIGKILL)
        assert process.ends().code == -signal.SIGKILL
    ended.touch()
    with worker(db):
        assert q.result(id, timeout=LIMIT) == "ended when it was told to"
    assert (q.get(id).attempt, q.get(id).lost) == (2, 1)


def test_R24_a_draining_worker_leaves_new_work_to_the_other(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    begun, ended = tmp_path / "begun", tmp_path / "ended"
    with worker(db) as old:
        held = q.submit(dls.thunk(cli_jobs.wait_for, str(begun), str(ended)))
        appears(begun)
        old.signal()
        old.says("claiming no more")
        with worker(db) as new:
            assert q.call(dls.thunk(cli_jobs.where))[2] == new.pid
            ended.touch()
            assert old.ends().code == 0
    assert q.result(held, timeout=1) == "ended when it was told to"


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--concurrency", "0"),
        ("--retries", "-1"),
        ("--timeout", "0"),
        ("--timeout", "nan"),
        ("--lease", "inf"),
        ("--lease", "5 parsecs"),
        ("--max-lost", "0"),
        ("--grace", "-1"),
        ("--runtime-policy", "sloppy"),
        ("--root", "/no/such/folder"),
        ("--db", ":memory:"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(db: Path, option: str, value: str) -> None:
    with Process("worker", "start", "--db", db, option, value) as process:
        ran = process.ends()
    assert ran.code == 2
    assert "Traceback" not in ran.err
    assert not db.exists()


def test_a_plane_that_cannot_be_made_ends_it_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    db = tmp_path / "file" / "plane.db"
    with Process("worker", "start", "--db", db) as process:
        ran = process.ends()
    assert ran.code == 1
    assert ran.err.startswith(f"lakeshore: cannot create the plane's file {str(db)!r}: ")
    assert ran.err.count("\n") == 1


def test_a_file_that_is_no_plane_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary, " * 100)
    with Process("worker", "start", "--db", file) as process:
        ran = process.ends()
    assert ran.code == 1
    assert re.fullmatch(r"lakeshore: '.*notes\.txt' is not a plane of this package: .*; give another path\n", ran.err)
    assert file.read_text() == "dear diary, " * 100


def test_a_worker_creates_the_plane(tmp_path: Path) -> None:
    db = tmp_path / "new" / "plane.db"
    with worker(db):
        wait_until_sync(db.exists, LIMIT, "the plane's file")
    assert cli("queue", "list", "--db", db, "--json").document == []
