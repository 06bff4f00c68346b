"""Jobs of a cluster: how they end, what goes wrong in clusters, and what is left behind, which is nothing."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from child_kit import holders
from helpers import wait_until
from kube_runs import SLEEPS, begun, launch, make, running
from kube_server import Fault, Server, serving

from dreamlake.lakeshore.concurrency.tasks import run_to_end
from dreamlake.lakeshore.errors import DispatchError
from dreamlake.lakeshore.runners.kube import (
    api as kube_api,
)
from dreamlake.lakeshore.runners.kube import (
    guard as kube_guard,
)
from dreamlake.lakeshore.runners.kube import (
    pods as kube_pods,
)
from dreamlake.lakeshore.runners.kube import (
    runner as kube,
)
from dreamlake.lakeshore.runners.kube import (
    tracker as kube_tracker,
)
from dreamlake.lakeshore.runners.kube.guard import GuardSettings
from dreamlake.lakeshore.runners.kube.manifest import JOB, WORKER, job_name
from dreamlake.lakeshore.testing.leaving import WAYS, Caller, Way
from dreamlake.lakeshore.worker.runner import Exit, Launch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dreamlake.lakeshore.runners.kube.runner import KubeJob, KubeRunner

pytestmark = pytest.mark.anyio
STUBBORN = "trap '' TERM; echo began >began; while :; do sleep 0.02; done"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


async def _start(runner: KubeRunner, asked: Launch) -> tuple[KubeJob, str]:
    """A child that has begun, and the name of its pod."""
    child = await runner.start(asked)
    await begun(asked)
    return child, child._job.pod_name


def _said(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    return text in caplog.text


def _error(ended: Exit) -> tuple[str, str, str]:
    assert ended.error is not None
    return ended.state, ended.error.type, ended.error.message


async def _fails(runner: KubeRunner, asked: Launch, seconds: float = 50.0) -> str:
    """Return the message of a start that fails soon."""
    began = time.monotonic()
    with pytest.raises(DispatchError) as caught:
        await runner.start(asked)
    assert time.monotonic() - began < seconds
    asked.folder.remove()
    return str(caught.value)


# --- how children end -------------------------------------------------------------------------------------------------


async def test_exit_codes_signals_and_output(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path) as runner:
        for script, ended in (
            ("exit 0", Exit(0)),
            ("echo out; echo err >&2; exit 7", Exit(7, output="out\nerr")),
            ("kill -SEGV $$", Exit(-11)),
            ("kill -KILL $$", Exit(-9)),
            ("echo said; echo {} >error.json; exit 1", Exit(1)),
            ("exit 200", Exit(200)),
            (
                "yes 1234567890123456789 | head -n 2000; exit 2",
                Exit(2, output=("1234567890123456789\n" * 205)[-4096:-1]),
            ),
        ):
            asked = launch(tmp_path, script)
            child = await runner.start(asked)
            assert await child.wait() == ended
            assert await child.wait() == ended
            assert await child.kill() == ended
            asked.folder.remove()
        assert server.cluster.jobs == server.cluster.pods == {}


async def test_what_a_child_is_told_arrives_as_it_was(server: Server, tmp_path: Path) -> None:
    odd = "$(PATH) $$(PATH) $HOME $ $$"
    script = """printf %s "$ODD" >odd; printf '%s' '$(IMAGE) $$' >script; printf %s "$PATH:$IMAGE" >image; pwd >where"""
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, script, environ={"ODD": odd})
        assert (await (await runner.start(asked)).wait()).code == 0
        found = asked.folder.path
        assert [(found / name).read_text() for name in ("odd", "script")] == [odd, "$(IMAGE) $$"]
        assert (found / "image").read_text().endswith(":base")
        assert (found / "where").read_text().strip() == str(found)
        asked.folder.remove()


async def test_exit_0_without_a_result(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "FILE_TIMEOUT", 0.2)
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho nothing to do\n")
    python.chmod(0o755)
    async with running(server, tmp_path, python=str(python)) as runner:
        asked = launch(tmp_path, None)
        assert await (await runner.start(asked)).wait() == Exit(0, output="nothing to do")
        asked.folder.remove()


async def test_a_result_that_the_file_system_shows_late(server: Server, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    async with running(server, tmp_path, python=str(python)) as runner, anyio.create_task_group() as group:
        asked = launch(tmp_path, None)

        async def write() -> None:
            await wait_until(lambda: any("terminated" in str(pod) for _, _, pod in server.cluster.history))
            await anyio.sleep(0.2)
            (asked.folder.path / "result.msgpack").touch()

        group.start_soon(write)
        assert await (await runner.start(asked)).wait() == Exit(0)
        assert (asked.folder.path / "result.msgpack").exists()
        asked.folder.remove()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as a worker that runs children as others does")
async def test_another_user(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, "id -u; id -g; touch mine; exit 4", as_user="65534:65533")
        ended = await (await runner.start(asked)).wait()
        assert ended == Exit(4, output="65534\n65533")
        assert (asked.folder.path / "mine").stat().st_uid == 65534
        asked.folder.remove()


# --- what keeps them from running -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("ErrImagePull", "the image base:1 cannot be pulled: ErrImagePull: so it is"),
        ("ImagePullBackOff", "the image base:1 cannot be pulled: ImagePullBackOff: so it is"),
        ("InvalidImageName", "the image base:1 cannot be pulled: InvalidImageName: so it is"),
        ("CreateContainerConfigError", "the container cannot be created: CreateContainerConfigError: so it is"),
    ],
)
async def test_containers_that_cannot_be_made(server: Server, tmp_path: Path, reason: str, said: str) -> None:
    server.cluster.waiting = reason, "so it is"
    async with running(server, tmp_path) as runner:
        assert await _fails(runner, launch(tmp_path)) == said
        assert server.cluster.jobs == server.cluster.pods == {}
        server.cluster.waiting = None
        asked = launch(tmp_path, None)
        runner.options = dataclasses.replace(runner.options, python="/no/such/python")
        said = await _fails(runner, asked)
        assert said.startswith("the container cannot be started: StartError: exec: ")
        assert "/no/such/python" in said


async def test_a_pod_without_a_place_waits(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server.cluster.unschedulable = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    async with running(server, tmp_path) as runner:
        asked, ended = launch(tmp_path, "exit 5"), list[int]()

        async def run() -> None:
            ended.append((await (await runner.start(asked)).wait()).code)

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            told = f"{asked.id} waits for its pod, for as long as that takes: {server.cluster.unschedulable}"
            await wait_until(lambda: told in caplog.text)
            await anyio.sleep(0.2)
            assert ended == []
            server.cluster.unschedulable = None
        assert ended == [5]
        assert caplog.text.count("waits for its pod") == 1
        asked.folder.remove()


async def test_a_pod_of_which_nothing_is_said(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a volume cannot be mounted: only a warning of the cluster has the reason."""
    monkeypatch.setattr(kube_tracker, "NOT_RUNNING_INTERVAL", 0.1)
    monkeypatch.setattr(kube_tracker, "NO_POD_INTERVAL", 0.05)
    server.cluster.waiting = "ContainerCreating", ""
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path)
        async with anyio.create_task_group() as group:
            group.start_soon(runner.start, asked)
            await wait_until(lambda: server.cluster.pods)
            server.cluster.warn("Pod", next(iter(server.cluster.pods)), "FailedMount", "no such share")
            await wait_until(
                lambda: "waits for its pod, for as long as that takes: FailedMount: no such share" in caplog.text
            )
            group.cancel_scope.cancel()
        assert server.cluster.jobs == server.cluster.pods == {}
        asked.folder.remove()


async def test_claims_that_are_not_there_or_elsewhere(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path, claim="other") as runner:
        said = await _fails(runner, launch(tmp_path))
        assert said == 'its pod cannot be scheduled: persistentvolumeclaim "other" not found'
    server.cluster.claims["other"] = tmp_path.parent
    sub = {"mount": str(tmp_path), "sub_path": tmp_path.name}
    async with running(server, tmp_path, claim="other", **sub) as runner:
        asked = launch(tmp_path)
        assert (await (await runner.start(asked)).wait()).code == 0
        asked.folder.remove()
    async with running(server, tmp_path, mount="/nowhere") as runner:
        assert await _fails(runner, launch(tmp_path)) == (
            f"the claim work is mounted at /nowhere (the runner option mount), and the workdir {tmp_path / 'work'} "
            "is not in that folder: children could not see it"
        )


async def test_what_the_cluster_refuses(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (kube_api, kube_tracker):  # for so long it may be the refusal of a server that starts
        monkeypatch.setattr(module, "UNAUTHORIZED_GRACE", 1.0)
    quota = 'jobs.batch "x" is forbidden: exceeded quota: compute, requested: count/jobs.batch=1, used: 10, limited: 10'
    async with running(server, tmp_path) as runner:
        server.faults.append(Fault("POST", 403, "Forbidden", quota, times=1))
        said = await _fails(runner, launch(tmp_path))
        assert said == f"the API server {server.url} answered: {quota} (status 403 Forbidden)"
        server.cluster.no_pods = 'pods "x" is forbidden: exceeded quota: pods'
        said = await _fails(runner, launch(tmp_path))
        assert said == 'the cluster creates no pod for it: pods "x" is forbidden: exceeded quota: pods'
        assert server.cluster.jobs == {}
        server.cluster.no_pods = None
        server.faults.append(Fault("watch=1", 403, "Forbidden", "pods is forbidden: User cannot watch"))
        server.drop()
        said = await _fails(runner, launch(tmp_path, SLEEPS))
        assert said.startswith("its pod cannot be watched: the API server ")
        assert "pods is forbidden: User cannot watch (status 403 Forbidden)" in said
        server.faults.clear()
    async with running(server, tmp_path, namespace="elsewhere") as runner:
        said = await _fails(runner, launch(tmp_path))
        assert 'answered: namespaces "elsewhere" not found (status 404 NotFound)' in said
    server.tokens = {"another"}
    runner = make(server, tmp_path)
    said = await _fails(runner, launch(tmp_path))
    await runner.aclose()
    assert said == (
        f"the API server {server.url} answered: Unauthorized (status 401 Unauthorized); it does not accept the credentials "
        "of this worker"
    )


async def test_a_job_that_is_deleted_before_it_has_a_pod(server: Server, tmp_path: Path) -> None:
    server.cluster.no_pods = "later"
    server.faults.append(Fault("/events", 403, "Forbidden", "events is forbidden"))
    async with running(server, tmp_path) as runner, anyio.create_task_group() as group:

        async def fails() -> None:
            assert await _fails(runner, launch(tmp_path)) == (
                "its Job was deleted before it had a pod, and not by this worker"
            )

        group.start_soon(fails)
        await wait_until(lambda: server.cluster.jobs)
        server.cluster.delete_job(next(iter(server.cluster.jobs)))


@pytest.mark.parametrize(
    ("as_user", "said"),
    [
        ("root", "`as_user` names 'root', and the kube runner takes numbers only, UID or UID:GID: each image gives"),
        ("1:2", "`as_user` names '1:2', and only a worker that runs as root can give another user its folder"),
    ],
)
async def test_users_that_cannot_be(
    server: Server, tmp_path: Path, as_user: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, as_user=as_user)
        with pytest.raises(DispatchError, match=said):
            await runner.start(asked)
        asked.folder.remove()
    assert server.cluster.manifests == []


# --- what ends them ---------------------------------------------------------------------------------------------------


async def test_pods_that_are_taken_away(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_tracker, "LOST_NODE_AFTER", 0.1)
    cluster = server.cluster

    def lose(pod: str) -> None:
        cluster.lost_node = True
        cluster.disrupt(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def fail(pod: str) -> None:
        with cluster.changed:
            cluster.pods[pod]["status"] = {
                "phase": "Failed",
                "reason": "UnexpectedAdmissionError",
                "message": "no device",
            }
            cluster.touch("MODIFIED", cluster.pods[pod])

    preempt = partial(cluster.disrupt, reason="PreemptionByScheduler", message="preempting to accommodate a higher one")
    taken = "its pod was taken from its node "
    async with running(server, tmp_path, poll="1", grace="1") as runner:
        for does, said in (
            (cluster.evict, f"{taken}(Evicted: The node was low on resource: memory.)"),
            (preempt, f"{taken}(PreemptionByScheduler: preempting to accommodate a higher one)"),
            (cluster.delete_pod, "its pod was deleted, and not by this worker"),
            (cluster.vanish, "its pod was deleted, and not by this worker"),
            (fail, f"{taken}(UnexpectedAdmissionError: no device)"),
            (lose, f"{taken}(DeletionByTaintManager: Taint manager: deleting due to NoExecute taint)"),
        ):
            asked = launch(tmp_path, STUBBORN if does == cluster.evict else SLEEPS)
            child, pod = await _start(runner, asked)
            does(pod)
            assert _error(await child.wait()) == ("failed", "WorkerLost", f"{said}; the body had not finished")
            assert holders(asked.folder.path) == []
            asked.folder.remove()
            cluster.lost_node = False
        await wait_until(lambda: cluster.jobs == cluster.pods == {})


async def test_a_body_that_finishes_when_its_pod_is_taken_away_has_finished(server: Server, tmp_path: Path) -> None:
    script = "trap 'echo >result.msgpack; exit 0' TERM; echo began >began; while :; do sleep 0.02; done"
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, script)
        child, pod = await _start(runner, asked)
        server.cluster.disrupt(pod, "EvictionByEvictionAPI", "drained")
        assert await child.wait() == Exit(0)
        asked.folder.remove()
        asked = launch(tmp_path, f"echo >result.msgpack; {SLEEPS}")
        child, pod = await _start(runner, asked)
        server.cluster.vanish(pod)  # nobody has seen its end, and there is a result
        assert await child.wait() == Exit(0)
        asked.folder.remove()


async def test_a_job_that_is_deleted_in_the_cluster(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, SLEEPS)
        child, _ = await _start(runner, asked)
        name = job_name(asked.id, 1)
        server.cluster.delete_job(name)
        said = f"the Job {name} was deleted in the cluster, and not by its worker"
        assert _error(await child.wait()) == ("killed", "Cancelled", said)
        asked.folder.remove()


async def test_no_memory(server: Server, tmp_path: Path) -> None:
    killed = "the child was killed for lack of memory (OOMKilled): "
    for options, said in (
        ({}, "its node had no more"),
        ({"memory": "64m"}, "it may use 67108864 bytes, the runner option memory"),
    ):
        async with running(server, tmp_path, **options) as runner:
            asked = launch(tmp_path, SLEEPS)
            child, pod = await _start(runner, asked)
            server.cluster.kill(pod, "OOMKilled")
            ended = await child.wait()
            assert ended.code == -9
            assert _error(ended) == ("failed", "DaemonError", killed + said)
            asked.folder.remove()


async def test_a_deadline(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path, deadline="1", grace="1") as runner:
        server.cluster.unschedulable = "no node"
        asked = launch(tmp_path, STUBBORN)
        async with anyio.create_task_group() as group:

            async def placed() -> None:
                await anyio.sleep(1.2)  # waiting for a node is not counted
                server.cluster.unschedulable = None

            group.start_soon(placed)
            child = await runner.start(asked)
        said = "the body ran longer than 1 s, the runner option deadline"
        assert _error(await child.wait()) == ("timeout", "TimeoutError", said)
        asked.folder.remove()


async def test_a_deadline_of_the_job_itself(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, SLEEPS)
        child, pod = await _start(runner, asked)
        server.cluster._fail(job_name("a", 1), "DeadlineExceeded", "Job was active longer than specified deadline")
        server.cluster.delete_pod(pod)
        said = "the body ran longer than its deadline"
        assert _error(await child.wait()) == ("timeout", "TimeoutError", said)
        asked.folder.remove()


async def test_kill(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_tracker, "FORCE_AFTER", 0.3)
    async with running(server, tmp_path, grace="1") as runner:
        for script, lost, code in ((SLEEPS, False, 3), (STUBBORN, False, -9), (STUBBORN, True, -9)):
            asked = launch(tmp_path, script)
            child, pod = await _start(runner, asked)
            server.cluster.lost_node = lost
            assert await run_to_end(child.kill) == Exit(code)
            assert server.cluster.jobs == server.cluster.pods == {}
            if lost:
                assert any(f"DELETE /api/v1/namespaces/lab/pods/{pod}" in asked for asked in server.requests)
            asked.folder.remove()
            server.cluster.lost_node = False


# --- an API server that is away ---------------------------------------------------------------------------------------


async def test_children_outlive_what_becomes_of_the_watch(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken off, too old, not there for a while: nobody is killed, and ends that were missed are seen."""
    waits = "echo began >began; until [ -e gate ]; do sleep 0.02; done; exit 6"
    async with running(server, tmp_path) as runner:
        for does in (server.drop, server.cluster.compact, None):
            asked = launch(tmp_path, waits)
            child, _ = await _start(runner, asked)
            if does is not None:
                does()
                (asked.folder.path / "gate").touch()
                assert (await child.wait()).code == 6
            else:
                server.faults.append(Fault("", 0))
                server.drop()
                (asked.folder.path / "gate").touch()
                told = "children run on, but their pods cannot be watched for now: "
                async with anyio.create_task_group() as group:

                    async def end(child: KubeJob = child) -> None:
                        await child.wait()
                        pytest.fail("nothing can be heard of it")

                    group.start_soon(end)
                    await wait_until(partial(_said, caplog, told))
                    await anyio.sleep(1.0)
                    group.cancel_scope.cancel()
                assert caplog.text.count(told) == 1
                server.faults.clear()
                assert (await child.wait()).code == 6
                assert "the API server answers again" in caplog.text
            asked.folder.remove()


async def test_requests_are_made_again(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path) as runner:
        for status in (500, 429, 503, 0):
            server.faults.append(Fault("POST", status, times=1))
            server.faults.append(Fault("DELETE", status, times=1))
            asked = launch(tmp_path, "exit 8")
            assert (await (await runner.start(asked)).wait()).code == 8
            asked.folder.remove()
        await wait_until(lambda: server.cluster.jobs == {})


async def test_the_answer_of_a_create_may_be_lost(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path) as runner:
        server.faults.append(Fault("POST", 0, after=True, times=2))
        asked = launch(tmp_path, "exit 9")
        assert (await (await runner.start(asked)).wait()).code == 9
        assert len(server.cluster.manifests) == 1
        asked.folder.remove()


async def test_an_api_server_that_stays_away(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kube_tracker, kube):
        monkeypatch.setattr(module, "API_TIMEOUT", 0.2)
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, SLEEPS)
        child, _ = await _start(runner, asked)
        server.faults.append(Fault("", 0))
        server.drop()
        other = launch(tmp_path, id="b")
        with pytest.raises(DispatchError, match=f"the API server {server.url} has not answered: RemoteProtocolError"):
            await runner.start(other)
        assert (await run_to_end(child.kill)).code == -9
        assert f"the Job {job_name('a', 1)} has to end, and cannot be deleted now" in caplog.text
        server.faults.clear()
        await wait_until(lambda: server.cluster.jobs == server.cluster.pods == {})
        asked.folder.remove()
        other.folder.remove()


async def test_what_the_watch_has_missed(server: Server, tmp_path: Path) -> None:
    """A list shows which pods are gone; a worker that may not get the Job relies on that."""
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, SLEEPS)
        child, pod = await _start(runner, asked)
        server.faults += [Fault("watch=1", 503), Fault("GET /apis/batch/v1/namespaces/lab/jobs/", 403, times=1)]
        server.drop()
        server.cluster.vanish(pod)
        server.cluster.compact()
        said = "its pod was deleted, and not by this worker; the body had not finished"
        assert _error(await child.wait()) == ("failed", "WorkerLost", said)
        server.faults.clear()
        asked.folder.remove()


async def test_output_that_cannot_be_had(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "LOG_TIMEOUT", 0.1)
    async with running(server, tmp_path) as runner:
        for fault in (Fault("/log", 503, times=3), Fault("/log", 403, times=1)):
            server.faults = [fault]
            asked = launch(tmp_path, "echo said; exit 3")
            assert await (await runner.start(asked)).wait() == Exit(3)
            asked.folder.remove()
    assert caplog.text.count("the output of a cannot be read: the API server ") == 1


async def test_what_is_left_at_the_end_is_the_guards(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = list[Any]()
    monkeypatch.setattr(kube, "_unfinished", left)
    runner, asked = make(server, tmp_path), launch(tmp_path, SLEEPS)
    await _start(runner, asked)
    server.faults.append(Fault("", 0))
    await runner.aclose()
    assert "Jobs of this worker may be left in the cluster: the API server " in caplog.text
    (guard,) = left  # which acts when this process ends
    guard.dismiss()
    asked.folder.remove()


# --- nothing is left behind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
async def test_left_at_every_place(server: Server, tmp_path: Path, anyio_backend_name: str, way: Way) -> None:
    if way == "native" and anyio_backend_name != "asyncio":
        return
    async with running(server, tmp_path) as runner:

        async def run(asked: Launch) -> int:
            child = await runner.start(asked)
            try:
                return (await child.wait()).code
            except BaseException:
                await run_to_end(child.kill)
                raise

        left = 0
        for at in count(1):
            asked = launch(tmp_path, "sleep 0.05")
            caller = Caller(way, at, later=at % 3)
            await caller.make(run(asked), None)
            assert caller.returned in ([], [0])
            await wait_until(lambda: server.cluster.jobs == server.cluster.pods == {})
            left += not caller.returned
            asked.folder.remove()
            if caller.through:
                break
        assert left > 3


async def test_a_job_that_begins_after_it_was_given_up(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(server, tmp_path) as runner:
        server.faults.append(Fault("POST", 0))
        asked = launch(tmp_path, SLEEPS)
        async with anyio.create_task_group() as group:
            group.start_soon(runner.start, asked)
            await wait_until(lambda: any(one.startswith("POST") for one in server.requests))
            group.cancel_scope.cancel()
        server.faults.clear()
        labels = {WORKER: runner.worker, JOB: job_name("a", 1)}
        other = launch(tmp_path, id="b")
        child = await runner.start(other)  # whose Job is like the one that comes late
        late = server.cluster.manifests[-1]
        late["metadata"].update(name=job_name("a", 1), labels=labels)
        late["spec"]["template"]["metadata"]["labels"] = labels
        server.cluster.create(late)
        await wait_until(lambda: f"the Job {job_name('a', 1)} has begun after it was given up" in caplog.text)
        await wait_until(lambda: job_name("a", 1) not in server.cluster.jobs)
        await child.wait()
        for one in (asked, other):
            one.folder.remove()


async def test_a_new_attempt_ends_the_one_before(server: Server, tmp_path: Path) -> None:
    async with running(server, tmp_path, grace="1") as dead, running(server, tmp_path) as runner:
        before = launch(tmp_path, f"echo old >result.msgpack; {STUBBORN}")
        child, _ = await _start(dead, before)
        before.folder.close()  # as the death of its worker would
        asked = replace(before, attempt=2, script="[ ! -e result.msgpack ] || exit 1; exit 2")
        assert (await (await runner.start(asked)).wait()).code == 2
        assert _error(await child.wait())[:2] == ("killed", "Cancelled")
        # the same one twice, as when a plane was begun anew
        again = launch(tmp_path, STUBBORN)
        child, _ = await _start(dead, again)
        for _ in range(2):  # after that of another worker, and after one of its own
            assert (await (await runner.start(replace(again, script="exit 3"))).wait()).code == 3
        assert _error(await child.wait())[:2] == ("killed", "Cancelled")
        again.folder.remove()


async def test_jobs_of_workers_that_are_gone(server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(server, tmp_path) as theirs, running(server, tmp_path) as runner:
        held, free, lost = (launch(tmp_path, SLEEPS, id) for id in ("held", "free", "lost"))
        children = [(await _start(theirs, one))[0] for one in (held, free, lost)]
        free.folder.close()
        lost.folder.remove()
        asked = launch(tmp_path)
        await (await runner.start(asked)).wait()
        await wait_until(lambda: list(server.cluster.jobs) == [job_name("held", 1)])
        for id in ("free", "lost"):
            said = f"the Job {job_name(id, 1)} was left by a worker that is gone, and is deleted"
            await wait_until(partial(_said, caplog, said))
        assert (await run_to_end(children[0].kill)).code == 3
        for child in children[1:]:
            assert _error(await child.wait())[:2] == ("killed", "Cancelled")
        held.folder.remove()
        asked.folder.remove()


async def test_the_guard_waits_for_an_api_server_that_is_away(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_guard, "QUIET_TIME", 0.3)
    monkeypatch.setattr(kube_guard, "FORCE_AFTER", 0.1)
    async with running(server, tmp_path, grace="1") as runner:
        asked = launch(tmp_path, STUBBORN)
        child, _ = await _start(runner, asked)
        server.faults += [Fault("jobs?", 0, times=2), Fault("DELETE", 503, times=1)]
        server.cluster.lost_node = True
        await kube_guard.main(GuardSettings(str(tmp_path / "kubeconfig"), None, "lab", runner.worker, 1))
        assert server.cluster.jobs == server.cluster.pods == {}
        await child.wait()
        asked.folder.remove()


def test_one_event_loop_after_the_other(server: Server, tmp_path: Path) -> None:
    runner = make(server, tmp_path)

    async def run() -> int:
        asked = launch(tmp_path, "exit 4")
        try:
            return (await (await runner.start(asked)).wait()).code
        finally:
            asked.folder.remove()

    assert [anyio.run(run, backend=backend) for backend in ("asyncio", "trio", "asyncio")] == [4, 4, 4]
    anyio.run(runner.aclose)
    assert server.cluster.jobs == {}


async def test_errors_of_the_watch_do_not_end_it(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = kube_pods.TrackedJob.update
    wrong = [LookupError("a fault of our own")]

    def see(self: kube_pods.TrackedJob, pod: Any, *, gone: bool = False) -> None:
        if wrong:
            raise wrong.pop()
        seen(self, pod, gone=gone)

    monkeypatch.setattr(kube_pods.TrackedJob, "update", see)
    with caplog.at_level(logging.ERROR):
        async with running(server, tmp_path) as runner:
            asked = launch(tmp_path, "exit 2")
            assert (await (await runner.start(asked)).wait()).code == 2
            asked.folder.remove()
    assert "the watch of pods failed, and begins again" in caplog.text
