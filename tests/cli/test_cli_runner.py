"""`lakeshore worker start --runner process`: workers whose bodies have a process of their own each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import cli_jobs as jobs
import pytest
import runner_jobs
from cli_kit import appears, cli, environment, worker

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import portal
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.wire import pack

if TYPE_CHECKING:
    from collections.abc import Mapping

PROCESS = ("--runner", "process")


def env(tmp_path: Path, **more: str) -> Mapping[str, str]:
    return environment(LAKESHORE_HOME=str(tmp_path / "home"), **more)


def submit_script(plane: dls.Dispatch, script: str) -> str:
    id = new_id()
    envelope = dls.thunk(runner_jobs.around).to_envelope(id=id).to_bytes()
    portal().call(plane.do, Submit(id, "q", envelope, config=pack({"run_config": {"script": script}})))
    return id


@pytest.mark.parametrize("more", [(), ("--runner-option", "warm=1")])
def test_bodies_run_in_processes_of_their_own(
    db: Path, q: dls.SyncQueue, tmp_path: Path, more: tuple[str, ...]
) -> None:
    with worker(db, *PROCESS, *more, env=env(tmp_path)) as process:
        seen = q.call(dls.thunk(runner_jobs.around, "PATH"))
        assert seen["environ"]["PATH"] == os.environ["PATH"]
        assert seen["pid"] != process.pid
        assert q.call(dls.thunk(runner_jobs.around))["pid"] != seen["pid"]
        assert Path(seen["folder"]).parent == tmp_path / "home" / "work"
        assert seen["root"] == str(Path(runner_jobs.__file__).parent)
        assert f", runner process in {tmp_path / 'home' / 'work'}\n" in process.err
        process.signal()
        assert process.ends().code == 0
    assert list((tmp_path / "home" / "work").iterdir()) == []


def test_the_environment_the_folder_and_what_stays_in_it(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    options = ("--env", "MINE", "--env", "SAID=so", "--workdir", tmp_path / "there", "--keep-workdirs", 1)
    names = ("MINE", "SAID", "OTHER", "LAKESHORE_CLIENT_TOKEN")
    variables = env(tmp_path, MINE="kept", OTHER="not kept", LAKESHORE_CLIENT_TOKEN="secret")
    with worker(db, *PROCESS, *options, env=variables):
        seen = q.call(dls.thunk(runner_jobs.around, *names))
        assert seen["environ"] == {"MINE": "kept", "SAID": "so"}
        ids = [q.submit(dls.thunk(jobs.boom, "no")) for _ in range(2)]
        for id in ids:
            with pytest.raises(dls.InvocationFailed):
                q.result(id)
        assert [path.name for path in (tmp_path / "there").iterdir()] == [ids[1]]


def test_scripts_are_for_those_who_allow_them(db: Path, plane: dls.Dispatch, q: dls.SyncQueue, tmp_path: Path) -> None:
    with worker(db, *PROCESS, env=env(tmp_path)):
        with pytest.raises(dls.InvocationFailed, match="refuses: start it with --allow-script if everybody"):
            q.result(submit_script(plane, "true"))
    with worker(db, *PROCESS, "--allow-script", env=env(tmp_path)):
        assert q.result(submit_script(plane, "true")) is None


@pytest.mark.parametrize(
    ("more", "state"), [((), "killed"), (("--on-shutdown", "release"), "queued")], ids=["killed", "release"]
)
def test_a_signal_and_the_grace(db: Path, q: dls.SyncQueue, tmp_path: Path, more: tuple[str, ...], state: str) -> None:
    started = tmp_path / "started"
    options = (*PROCESS, *more, "--grace", "0.1", "--runner-option", "grace=0.2")
    with worker(db, *options, env=env(tmp_path)) as process:
        id = q.submit(dls.thunk(runner_jobs.sleep_on, str(started)))
        appears(started)
        process.signal()
        assert process.ends().code == 0
    row = q.get(id)
    assert row.state == state
    assert (row.error and row.error.message) == ("daemon shutdown grace expired" if state == "killed" else None)


def test_what_a_child_submits_lands_on_the_plane_of_its_worker(tmp_path: Path) -> None:
    db = tmp_path / "home" / "lakeshore.db"
    plane = dls.Dispatch(db, ns="team")
    try:
        q = dls.SyncQueue("q", dispatch=plane)
        with worker(db, *PROCESS, "--namespace", "team", env=environment(LAKESHORE_HOME=str(tmp_path / "other"))):
            id, caller = q.call(dls.thunk(jobs.add_there, 1, 2))
        row = q.get(id)
        assert (row.queue, row.state, row.parent) == ("bodies", "queued", caller)
    finally:
        portal().call(plane.aclose)


def test_once(db: Path, q: dls.SyncQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAKESHORE_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(Path(runner_jobs.__file__).parent)
    id = q.submit(dls.thunk(runner_jobs.around))
    ran = cli("worker", "once", "--queue", "q", "--db", db, *PROCESS)
    assert (ran.code, ran.out) == (0, "1 invocation run\n")
    assert q.result(id)["pid"] != os.getpid()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--runner", "oven"), "'oven' is not one of 'inline', 'process'"),
        ((*PROCESS, "--runner-option", "warm"), "expected --runner-option NAME=VALUE, got 'warm'"),
        ((*PROCESS, "--runner-option", "image=x"), "the process runner knows no option image: it has python"),
        ((*PROCESS, "--env", "=x"), "expected NAME or NAME=VALUE for the environment of children, got '=x'"),
        (
            ("--workdir", "x", "--env", "A", "--runner-option", "grace=1", "--allow-script"),
            "--runner-option, --workdir, --env, --allow-script: bodies run in this process; add --runner process",
        ),
        (
            ("--keep-workdirs", "0", "--on-shutdown", "release", "--allow-as-user"),
            "--keep-workdirs, --on-shutdown, --a",
        ),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(db: Path, options: tuple[str, ...], message: str) -> None:
    ran = cli("worker", "start", "--db", db, *options)
    assert ran.code == 2
    assert message in " ".join(ran.err.split())
