"""Jobs of a real Slurm: what they are started with, how they wait, and how they end."""

from __future__ import annotations

import logging
import os
import stat
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import child_bodies as bodies
import pytest
import slurm_kit
from child_bodies import notes
from child_kit import children, environ, folders
from conformance_bodies import second_time
from conformance_kit import skip_without
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.daemon.workdir import ChildSettings, Folder
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners.slurm import runner as slurm
from dreamlake.lakeshore.runners.slurm.control import NOT_FOUND, JobRecord, SlurmPrograms, WatchedJob
from dreamlake.lakeshore.runners.slurm.runner import SlurmRunner
from dreamlake.lakeshore.wire import pack
from dreamlake.lakeshore.worker.runner import Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from slurm_kit import Cluster

    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = pytest.mark.anyio

LIMIT = 90.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    skip_without(slurm_kit.missing())
    with slurm_kit.running() as cluster:
        yield cluster


@pytest.fixture
def make(cluster: Cluster) -> Iterator[Callable[..., SlurmRunner]]:
    """Makes a runner of options; no job is there after the test."""

    def made(env: dict[str, str] | None = None, **options: str) -> SlurmRunner:
        said = {"conf": str(cluster.conf), "poll": "1", "grace": "2"}
        said |= {name.replace("_", "-"): value for name, value in options.items()}
        return SlurmRunner.from_options(said, {**environ(), **(env or {})})

    yield made
    left = cluster.jobs()
    cluster.end_jobs()
    assert left == {}


@pytest.fixture
def passable(tmp_path: Path, cluster: Cluster) -> Iterator[None]:
    """Other users may pass through to what they are to have."""
    closed = dict[Path, int]()
    for folder in {tmp_path, *tmp_path.parents, *cluster.folder.parents}:
        mode = stat.S_IMODE(folder.stat().st_mode)
        if not mode & 0o001:
            closed[folder] = mode
            folder.chmod(mode | 0o011)
    yield
    for folder, mode in closed.items():
        folder.chmod(mode)


async def ended(queue: dls.Queue, id: str) -> Row:
    await queue.dispatch.outcome(id, timeout=LIMIT)
    return await queue.get(id)


async def failure(queue: dls.Queue, id: str) -> tuple[str, str, str]:
    row = await ended(queue, id)
    assert row.error is not None, row
    return row.state, row.error.type, row.error.message


async def submit_with(queue: dls.Queue, **run_config: Any) -> str:
    id = new_id()
    envelope = dls.thunk(bodies.nothing).to_envelope(id=id).to_bytes()
    await queue.dispatch.do(Submit(id, "q", envelope, config=pack({"run_config": run_config})))
    return id


async def job_of(cluster: Cluster, id: str, *states: str, attempt: int = 1) -> str:
    """The number of the job of an invocation, once it is in one of the states."""

    def found() -> str:
        number, state = cluster.jobs().get(f"lakeshore-{id}-{attempt}", ("", ""))
        return number if state in states else ""

    return str(await wait_until(found, LIMIT, f"the job of {id} to be {states}"))


async def began(path: Path) -> None:
    await wait_until(lambda: notes(path), LIMIT, "the begin of the body")


def waiting(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


# --- what it is started with -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"speed": "1"}, "the slurm runner knows no option speed: it has partition, account, "),
        ({"grace": "soon"}, "expected a number from 0 for the runner option grace, such as 10 or 2g, got 'soon'"),
        ({"poll": "0"}, "the slurm runner needs poll and start-timeout above 0 s, got 0 and 30"),
        ({"sbatch": "--exclusive,--array=1-3"}, "each invocation is one job; got '--array=1-3'"),
        ({"sbatch": "-a1-3"}, "each invocation is one job; got '-a1-3'"),
        ({"sbatch": "script.sh"}, "expected the runner option sbatch to be flags such as --exclusive,--nice=100"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError) as caught:
        SlurmRunner.from_options(options, {})
    assert said in str(caught.value)


def test_a_job_is_no_job_of_the_job_that_the_worker_runs_in(monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = {"SLURM_JOB_ID", "SBATCH_PARTITION", "SQUEUE_FORMAT", "SCANCEL_INTERACTIVE"}
    for name in foreign:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/its-own.conf")
    theirs = SlurmPrograms(None, 1.0).environ
    assert not foreign & set(theirs)
    assert (theirs["SLURM_CONF"], theirs["LC_ALL"]) == ("/etc/its-own.conf", "C")
    assert SlurmPrograms("/other.conf", 1.0).environ["SLURM_CONF"] == "/other.conf"


async def test_its_environment_is_told_whole_and_on_no_command_line(
    queue: dls.Queue,
    tmp_path: Path,
    make: Callable[..., SlurmRunner],
    monkeypatch: pytest.MonkeyPatch,
    cluster: Cluster,
) -> None:
    secret = "s3cret with 'quotes', \"more\", $HOME and\na second line \N{SNOWMAN}"
    lines = list[str]()
    popen = subprocess.Popen.__init__

    def noted(self: Any, args: Any, *more: Any, **options: Any) -> None:
        lines.append(repr(args))
        popen(self, args, *more, **options)

    monkeypatch.setattr(subprocess.Popen, "__init__", noted)
    runner = make({"TOKEN": secret, "EMPTY": ""})
    runner.programs.environ["SLURM_TOKEN"] = "the worker's own"
    async with children(queue, tmp_path, runner):
        id = await queue.submit(dls.thunk(bodies.around))
        seen = await queue.result(id)
    assert (seen["environ"]["TOKEN"], seen["environ"]["EMPTY"]) == (secret, "")
    assert "SLURM_TOKEN" not in seen["environ"]
    assert (seen["folder"], seen["id"], seen["attempt"]) == (str(tmp_path / "work" / id), id, 1)
    assert any("sbatch" in line for line in lines)
    assert not any("s3cret" in line for line in lines)
    shown = cluster.run("scontrol", "show", "job", seen["environ"]["SLURM_JOB_ID"])
    assert f" JobName=lakeshore-{id}-1\n" in shown
    assert "s3cret" not in shown


async def test_options_for_slurm(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    odd = tmp_path / "a % and \\ a blank"
    options = {"partition": "small", "time": "7", "cpus": "2", "memory": "123M", "sbatch": "--comment=noted,--nice=3"}
    async with children(queue, tmp_path, make(**options), rules={"workdir": odd}):
        seen = await queue.result(await queue.submit(dls.thunk(bodies.around)))
    said = cluster.run("scontrol", "--oneliner", "show", "job", seen["environ"]["SLURM_JOB_ID"])
    for word in (
        "Partition=small",
        "TimeLimit=00:07:00",
        "NumCPUs=2",
        "MinMemoryNode=123M",
        "Comment=noted",
        "Requeue=0",
    ):
        assert f" {word} " in f"{said} "
    assert seen["folder"].startswith(str(odd))


@pytest.mark.usefixtures("passable")
async def test_scripts_and_other_users(queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner]) -> None:
    rules = {"allow_script": True, "allow_as_user": True}
    async with children(queue, tmp_path, make(), rules=rules):
        assert await queue.result(await submit_with(queue, script="test -s args.msgpack && echo 'a \"b\"'")) is None
        said = await failure(queue, await submit_with(queue, script="echo no luck >&2; exit 5"))
        assert said[2].startswith(
            "the child ended with exit code 5 and wrote no error.json; the end of its output:\nno luck"
        )
        if os.geteuid() == 0:
            id = await submit_with(queue, as_user="nobody", script="id -un > who; echo $USER >> who; exit 3")
            assert (await failure(queue, id))[2].startswith("the child ended with exit code 3 ")
            assert notes(tmp_path / "work" / id / "who") == ["nobody", "nobody"]
        said = await failure(queue, await submit_with(queue, as_user="no-such-user"))
        assert said[2].endswith(
            "could not start a child: `as_user` names 'no-such-user', and there is no such user here"
        )


# --- a start that fails ----------------------------------------------------------------------------------------------


async def test_what_slurm_refuses_is_told(queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner]) -> None:
    for options, said in (
        (
            {"partition": "nowhere"},
            "`sbatch` failed (exit code 1): sbatch: error: invalid partition specified: nowhere",
        ),
        ({"time": "soon"}, "sbatch: error: Invalid --time specification"),
        ({"constraint": "gold"}, "sbatch: error: Batch job submission failed: Invalid feature specification"),
    ):
        begin = time.monotonic()
        async with children(queue, tmp_path, make(**options)):
            state, type, message = await failure(queue, await queue.submit(dls.thunk(bodies.nothing)))
        assert (state, type) == ("failed", "DaemonError")
        assert message.startswith("the slurm runner could not start a child: ")
        assert said in message
        assert time.monotonic() - begin < LIMIT


async def test_without_its_programs(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = make()
    monkeypatch.setitem(runner.programs.environ, "PATH", "/nonexistent")
    async with children(queue, tmp_path, runner):
        message = (await failure(queue, await queue.submit(dls.thunk(bodies.nothing))))[2]
    assert "could not start a child: `sbatch` cannot be run: [Errno 2] No such file or directory: 'sbatch'" in message


def replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, script: str) -> None:
    """Another program under that name, whose script finds the real one as $REAL."""
    folder = tmp_path / "programs"
    folder.mkdir(exist_ok=True)
    path = folder / program
    real = next(Path(one, program) for one in os.get_exec_path() if Path(one, program).exists() and one != str(folder))
    path.write_text(f"#!/bin/sh\nREAL={real}\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", os.pathsep.join([str(folder), *os.get_exec_path()]))


@pytest.mark.parametrize(
    ("script", "patience", "said"),
    [
        ('"$REAL" "$@" >/dev/null; exec sleep 100', "2", "`sbatch --parsable` has not ended within 2 s"),
        (
            '"$REAL" "$@" >/dev/null; echo hello',
            "90",
            "expected `sbatch --parsable` to print the number of a job, got",
        ),
        ('"$REAL" "$@" >/dev/null; echo timed out >&2; exit 1', "90", "`sbatch` failed (exit code 1): timed out"),
    ],
    ids=["silent", "odd", "failed"],
)
async def test_an_answer_that_does_not_come_leaves_no_job(
    queue: dls.Queue,
    tmp_path: Path,
    make: Callable[..., SlurmRunner],
    monkeypatch: pytest.MonkeyPatch,
    cluster: Cluster,
    script: str,
    patience: str,
    said: str,
) -> None:
    replaced(tmp_path, monkeypatch, "sbatch", script)
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make(start_timeout=patience, sbatch="--hold")):
        message = (await failure(queue, await queue.submit(dls.thunk(bodies.sleeps, str(path)))))[2]
        assert said in message
        assert cluster.jobs() == {}
    assert notes(path) == []


# --- waiting ---------------------------------------------------------------------------------------------------------


async def test_a_job_that_waits_is_no_failure_and_its_wait_does_not_count(
    queue: dls.Queue,
    tmp_path: Path,
    make: Callable[..., SlurmRunner],
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with children(queue, tmp_path, make(sbatch="--hold"), timeout=10.0, lease=1.0):
        id = await queue.submit(dls.thunk(bodies.double, 4))
        job = await job_of(cluster, id, "PENDING")
        await wait_until(lambda: waiting(caplog, "which may never pass"), LIMIT, "the warning")
        await anyio.sleep(10.5)
        assert cluster.run("scontrol", "release", job) == ""
        assert await queue.result(id) == 8
        assert (await queue.get(id)).attempt == 1
    (warning,) = waiting(caplog, "which may never pass")
    assert warning.startswith(
        f"Slurm job {job} waits for JobHeldUser, which may never pass: see `scontrol show job {job}`"
    )


async def test_reasons_to_wait_that_may_never_pass(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = WatchedJob("5", tmp_path, own=True)
    passing = ["Resources", "Priority", "BeginTime", "QOSMaxJobsPerUserLimit", "None", ""]
    stuck = ["BadConstraints", "PartitionTimeLimit", "QOSMaxCpuPerJobLimit", "ReqNodeNotAvail, UnavailableNodes:n1"]
    for reason in [*passing, *stuck, *stuck]:
        watch.update(JobRecord("PENDING", reason))
    assert [record.args[1] for record in caplog.records if isinstance(record.args, tuple)] == stuck


async def test_a_job_that_waits_is_cancelled_at_once(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    async with children(queue, tmp_path, make(sbatch="--hold", grace="1000")):
        id = await queue.submit(dls.thunk(bodies.double, 4))
        job = await job_of(cluster, id, "PENDING")
        assert await queue.cancel(id, wait=True)
        assert await failure(queue, id) == ("killed", "Cancelled", "cancelled while running")
        assert cluster.jobs() == {}
    assert "JobState=CANCELLED" in cluster.run("scontrol", "show", "job", job)
    assert folders(tmp_path) == []


async def test_a_job_that_waits_goes_back_to_its_queue_with_its_worker(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    async with children(queue, tmp_path, make(sbatch="--hold"), grace=0.1) as stop:
        id = await queue.submit(dls.thunk(bodies.double, 4))
        await job_of(cluster, id, "PENDING")
        stop.set()
    row = await queue.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)
    assert cluster.jobs() == {}


async def test_a_worker_cancelled_at_any_moment_leaves_no_job(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    for i in range(10):
        await queue.submit(dls.thunk(bodies.double, i))
        with anyio.move_on_after(0.01 * 1.6**i):
            async with children(queue, tmp_path, make(grace="0")):
                await anyio.sleep_forever()
        assert cluster.jobs() == {}


# --- how it ends -----------------------------------------------------------------------------------------------------


@contextmanager
def node_down(cluster: Cluster) -> Iterator[None]:
    cluster.node("down")
    try:
        yield
    finally:
        cluster.node("up")


async def test_a_node_that_fails_loses_no_work(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make()):
        id = await queue.submit(dls.thunk(second_time, path.name))
        await began(path)
        with node_down(cluster):
            await wait_until(lambda: "NODE_FAIL" in cluster.history(), LIMIT, "the job to be lost")
        assert await queue.result(id) == 2
        row = await queue.get(id)
        assert (row.attempt, row.failures) == (2, 1)


async def test_nodes_that_fail_again_and_again(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make(), max_lost=1):
        id = await queue.submit(dls.thunk(bodies.sleeps, str(path)))
        await began(path)
        job = await job_of(cluster, id, "RUNNING")
        with node_down(cluster):
            state, type, message = await failure(queue, id)
        assert (state, type) == ("failed", "WorkerLost")
        assert message.startswith(f"Slurm job {job} on ")
        assert message.endswith(" was lost: its node failed")


@pytest.mark.slow
async def test_its_time_limit(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster, anyio_backend_name: str
) -> None:
    """Slurm polls at limits every half minute."""
    if anyio_backend_name == "trio":
        return
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make(time="1"), retries=2):
        id = await queue.submit(dls.thunk(bodies.sleeps, str(path)))
        await began(path)
        job = await job_of(cluster, id, "RUNNING")
        cluster.run("scontrol", "update", f"JobId={job}", "EndTime=now")
        state, type, message = await failure(queue, id)
        assert (state, type) == ("timeout", "TimeoutError")
        assert message.startswith(f"Slurm job {job} on ")
        assert " was ended at its time limit of 00:01:00, which the runner option time or the partition sets" in message
        assert (await queue.get(id)).attempt == 1
        assert notes(path)[1:] == ["cleaned up"]


async def test_somebody_else_cancels_it(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make(), retries=2):
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        await began(path)
        job = await job_of(cluster, id, "RUNNING")
        cluster.run("scancel", job)
        state, type, message = await failure(queue, id)
        assert (state, type) == ("killed", "Cancelled")
        assert message.startswith(f"Slurm job {job} on ")
        assert message.endswith(" was cancelled in Slurm, not by its worker")


async def test_its_memory(queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner]) -> None:
    async with children(queue, tmp_path, make(memory="150")):
        state, type, message = await failure(queue, await queue.submit(dls.thunk(bodies.hoards, 400 << 20)))
        assert (state, type) == ("failed", "DaemonError")
        assert "exceeded memory limit" in message


async def test_a_workdir_that_its_node_does_not_have(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    async with children(queue, tmp_path, make(sbatch="--hold")):
        id = await queue.submit(dls.thunk(bodies.nothing))
        job = await job_of(cluster, id, "PENDING")
        (tmp_path / "work" / id / "stdout.log").mkdir()
        cluster.run("scontrol", "release", job)
        message = (await failure(queue, id))[2]
        assert message.startswith(f"Slurm job {job} on ")
        assert (
            f" could not open its output in {tmp_path / 'work' / id}: the workdir has to be on a file system that the "
            "nodes share, under the same path" in message
        )


async def test_a_result_that_is_seen_late_counts(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with children(queue, tmp_path, make()):
        assert await queue.call(dls.thunk(bodies.result_arrives_late, 1.0)) == 7
        monkeypatch.setattr(slurm, "FILE_TIMEOUT", 0.2)
        message = (await failure(queue, await queue.submit(dls.thunk(bodies.exits_hard, 0))))[2]
        assert message.startswith(
            "the child ended with exit code 0 and wrote no result.msgpack; the end of its output:\n"
        )


async def test_a_child_that_cannot_be_stopped_is_ended_by_slurm(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make(grace="0.2")):
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        await began(path)
        assert await queue.cancel(id, wait=True)
        before = len(notes(path))
        assert cluster.jobs() == {}
        assert await failure(queue, id) == ("killed", "Cancelled", "cancelled while running")
        await anyio.sleep(0.2)
        assert len(notes(path)) == before


async def test_a_body_that_finishes_all_the_same(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner]
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, make(grace="60")):
        id = await queue.submit(dls.thunk(bodies.finishes_anyway, str(path)))
        await began(path)
        await queue.cancel(id)
        assert await queue.result(id) == "finished anyway"


@pytest.mark.parametrize(
    ("record", "left", "code", "state", "said"),
    [
        (JobRecord("COMPLETED"), None, 0, "failed", None),
        (JobRecord("FAILED", code=3), None, 3, "failed", None),
        (JobRecord(NOT_FOUND), "result.msgpack", 0, "failed", None),
        (JobRecord(NOT_FOUND), "error.json", 1, "failed", None),
        (JobRecord("NODE_FAIL", nodes="n1"), "result.msgpack", 0, "failed", None),
        (
            JobRecord(NOT_FOUND),
            None,
            -9,
            "failed",
            "WorkerLost: Slurm job 5 was lost: Slurm knows it no longer, and it left neither a result nor an error",
        ),
        (
            JobRecord("PREEMPTED", nodes="n1", code=-15),
            None,
            -15,
            "failed",
            "WorkerLost: Slurm job 5 on n1 was lost: it had to make room for another",
        ),
        (
            JobRecord("DEADLINE"),
            None,
            -9,
            "timeout",
            "TimeoutError: Slurm job 5 was ended at its deadline, which the runner option time or the partition sets",
        ),
        (
            JobRecord("OUT_OF_MEMORY", code=-125),
            "stderr.log",
            -125,
            "failed",
            (
                "DaemonError: Slurm job 5 used more memory than its limit, which the runner option memory sets; the end of "
                "its output:\nlast words"
            ),
        ),
        (
            JobRecord("FAILED", "BadConstraints"),
            None,
            -9,
            "failed",
            "DaemonError: Slurm job 5 has ended as FAILED (BadConstraints)",
        ),
    ],
    ids=lambda value: value.state if isinstance(value, JobRecord) else None,
)
def test_what_slurm_says_of_an_end(
    tmp_path: Path, record: JobRecord, left: str | None, code: int, state: str, said: str | None
) -> None:
    launch = made_launch(tmp_path, "a", 1)
    if left is not None:
        words = '{"type": "E", "message": "m"}' if left == "error.json" else "last words"
        (launch.folder.path / left).write_text(words)
    found = slurm._Job(SlurmRunner(environ={}), launch)._exit_by_record("5", record)
    error = None if found.error is None else f"{found.error.type}: {found.error.message}"
    assert (found.code, found.state, error) == (code, state, said)
    launch.folder.remove()


def made_launch(tmp_path: Path, id: str, attempt: int) -> Launch:
    folder = Folder.take(tmp_path / "work", id, dls.thunk(bodies.double, 4).to_envelope().to_bytes())
    assert folder is not None
    orders = ChildSettings(folder.path, tmp_path, id, attempt=attempt)
    return Launch(id, attempt, folder, orders.environ(), None, None)


# --- earlier attempts, and Slurm itself ------------------------------------------------------------------------------


async def test_a_later_attempt_ends_the_jobs_of_earlier_ones_first(
    tmp_path: Path, make: Callable[..., SlurmRunner], cluster: Cluster
) -> None:
    names = ["lakeshore-a-1", "lakeshore-a-2", "lakeshore-a-3", "lakeshore-a-7", "lakeshore-b-1", "lakeshore-a-b-1"]
    for name in names:
        cluster.run("sbatch", f"--job-name={name}", "--output=/dev/null", "--mem=50", "--wrap", "exec sleep 1000")
    launch = made_launch(tmp_path, "a", 3)
    (launch.folder.path / "stderr.log").write_text("of an earlier one")
    (launch.folder.path / "result.msgpack").write_text("of an earlier one")
    job = await make().start(launch)
    assert not {"lakeshore-a-1", "lakeshore-a-2"} & set(cluster.jobs())
    assert (await job.wait()).code == 0
    assert (launch.folder.path / "result.msgpack").read_bytes() == pack(8)
    assert (launch.folder.path / "stderr.log").read_text() == ""
    assert set(names[2:]) <= set(cluster.jobs())
    cluster.end_jobs()
    launch.folder.remove()


async def test_earlier_jobs_that_do_not_end(
    tmp_path: Path, make: Callable[..., SlurmRunner], monkeypatch: pytest.MonkeyPatch, cluster: Cluster
) -> None:
    monkeypatch.setattr(slurm, "CANCEL_TIMEOUT", 0.3)
    replaced(tmp_path, monkeypatch, "scancel", "exit 0")
    cluster.run("sbatch", "--job-name=lakeshore-a-1", "--output=/dev/null", "--wrap", "exec sleep 1000")
    launch = made_launch(tmp_path, "a", 2)
    with pytest.raises(dls.DispatchError, match=r"the jobs \d+ of earlier attempts have not ended in 0\.3 s: end them"):
        await make().start(launch)
    monkeypatch.undo()
    cluster.end_jobs()
    launch.folder.remove()


async def test_a_job_that_slurm_does_not_end_is_left_with_a_warning(
    tmp_path: Path,
    make: Callable[..., SlurmRunner],
    monkeypatch: pytest.MonkeyPatch,
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(slurm, "CANCEL_TIMEOUT", 0.3)
    monkeypatch.setattr(slurm, "CANCEL_INTERVAL", 0.2)
    runner, launch = make(grace="0", sbatch="--hold"), made_launch(tmp_path, "a", 1)
    replaced(tmp_path, monkeypatch, "scancel", "exit 0")
    monkeypatch.setitem(runner.programs.environ, "PATH", os.environ["PATH"])
    with anyio.move_on_after(1.0):
        await runner.start(launch)
    (warning,) = waiting(caplog, "may run on")
    assert warning.startswith("Slurm has not ended the job for 0.3 s; the job lakeshore-a-1 may run on: look for it")
    monkeypatch.undo()
    cluster.end_jobs()
    launch.folder.remove()


async def test_one_poll_serves_all_jobs(
    queue: dls.Queue, tmp_path: Path, make: Callable[..., SlurmRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    polls = list[float]()
    list_jobs = SlurmPrograms.list_jobs

    async def counted(self: SlurmPrograms, **options: Any) -> Any:
        polls.append(time.monotonic())
        return await list_jobs(self, **options)

    monkeypatch.setattr(SlurmPrograms, "list_jobs", counted)
    met = tmp_path / "met"
    met.mkdir()
    async with children(queue, tmp_path, make(memory="100"), concurrency=5):
        ids = [await queue.submit(dls.thunk(bodies.meets, str(met), 6)) for _ in range(5)]
        await wait_until(lambda: len(list(met.iterdir())) == 5, LIMIT, "five jobs at once")

        async def rare() -> bool:
            since, before = time.monotonic(), len(polls)
            await wait_until(lambda: len(polls) >= before + 4, LIMIT, "four more polls")
            return time.monotonic() - since > 2.0

        await wait_until(rare, LIMIT, "one poll a second, as poll says, and not one for each job that has started")
        (met / "6").touch()
        for id in ids:
            assert await queue.result(id) > 0


@pytest.mark.slow
async def test_a_controller_that_is_away(
    queue: dls.Queue,
    tmp_path: Path,
    make: Callable[..., SlurmRunner],
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
    anyio_backend_name: str,
) -> None:
    """A job runs on without it, and is found when it is back; a start fails soon, with what is wrong."""
    if anyio_backend_name == "asyncio":
        return  # Slurm's programs take ten seconds to find out
    caplog.set_level(logging.WARNING)
    gate = tmp_path / "gate"
    async with children(queue, tmp_path, make(), concurrency=2):
        id = await queue.submit(dls.thunk(bodies.one_then_waits, str(gate)))
        items = queue.stream(id)
        assert await anext(items) == 1
        cluster.stop("slurmctld")
        try:
            begin = time.monotonic()
            refused = await queue.submit(dls.thunk(bodies.nothing))
            gate.touch()
            assert await anext(items) == 2  # the child is as near as ever
            message = (await failure(queue, refused))[2]
            assert "Batch job submission failed: Unable to contact slurm controller (connect failure)" in message
            assert time.monotonic() - begin < LIMIT
            await wait_until(lambda: waiting(caplog, "Slurm does not answer"), LIMIT, "the warning")
            assert (await queue.get(id)).state == "running"
        finally:
            cluster.start("slurmctld")
        row = await ended(queue, id)
        assert (row.state, row.attempt) == ("succeeded", 1)
    assert len(waiting(caplog, "Slurm does not answer; its jobs run on, and the queue is polled again: ")) == 1
    assert len(waiting(caplog, "Slurm answers again")) == 1
