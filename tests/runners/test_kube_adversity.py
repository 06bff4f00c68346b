"""What goes wrong between a runner and its cluster for a while, or for good: nothing is lost by it, and nothing is left."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import wait_until
from kube_runs import SLEEPS, begun, launch, make, running
from kube_server import NAMESPACE, TOKEN, Fault, Server, serving

from dreamlake.lakeshore.concurrency.tasks import run_to_end
from dreamlake.lakeshore.errors import DispatchError
from dreamlake.lakeshore.runners.kube import api as kube_api
from dreamlake.lakeshore.runners.kube import guard as kube_guard
from dreamlake.lakeshore.runners.kube import tracker as kube_tracker
from dreamlake.lakeshore.runners.kube.api import KubeApi
from dreamlake.lakeshore.runners.kube.config import Cluster, find_cluster
from dreamlake.lakeshore.runners.kube.guard import GuardSettings
from dreamlake.lakeshore.runners.kube.manifest import job_name
from dreamlake.lakeshore.runners.kube.runner import KubeRunner

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dreamlake.lakeshore.worker.runner import Launch

pytestmark = pytest.mark.anyio
WAITS = "echo began >began; until [ -e gate ]; do sleep 0.02; done; exit 6"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


async def _a_child_is_seen_to_end(runner: KubeRunner, tmp_path: Path) -> None:
    asked = launch(tmp_path, WAITS)
    with anyio.fail_after(30):
        child = await runner.start(asked)
        await begun(asked)
        (asked.folder.path / "gate").touch()
        assert (await child.wait()).code == 6
    asked.folder.remove()


def _still(server: Server) -> bool:
    return server.cluster.jobs == server.cluster.pods == {}


# --- watches ----------------------------------------------------------------------------------------------------------


async def test_a_watch_that_says_nothing_hides_no_end(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy may hold changes back for ever: all pods are listed again nevertheless."""
    monkeypatch.setattr(kube_api, "WATCH_OVERTIME", 0.3)
    server.silent = True
    async with running(server, tmp_path, poll="1") as runner:
        await _a_child_is_seen_to_end(runner, tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"type": "ERROR", "object": {"code": "x"}}',
        b'{"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}',
        b'{"type": "MODIFIED", "object": {"metadata": {"labels": 5}}}',
        b'{"type": "MODIFIED", "object": {"metadata": {"labels": {"dreamlake.lakeshore/job": ["x"]}}}}',
        b'{"type": 7, "object": 8}',
    ],
    ids=lambda line: line[:60].decode("latin-1"),
)
async def test_a_watch_that_talks_nonsense_hides_no_end(server: Server, tmp_path: Path, line: bytes) -> None:
    server.garbage = line
    async with running(server, tmp_path) as runner:
        await _a_child_is_seen_to_end(runner, tmp_path)
    assert {one.rpartition("/")[2] for one in server.requests if one.startswith("DELETE")} == {job_name("a", 1)}


async def test_versions_that_are_always_too_old_are_no_reason_to_hurry(server: Server, tmp_path: Path) -> None:
    server.faults.append(Fault("watch=1", 410, "Expired", "too old"))
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, WAITS)
        child = await runner.start(asked)
        before = len(server.requests)
        await anyio.sleep(1.5)
        assert len(server.requests) - before < 15
        (asked.folder.path / "gate").touch()
        with anyio.fail_after(30):
            assert (await child.wait()).code == 6
        asked.folder.remove()


async def test_a_watch_that_is_refused_is_told_of_once(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, WAITS)
        child = await runner.start(asked)
        server.faults.append(Fault("watch=1", 403, "Forbidden", "pods is forbidden: User cannot watch"))
        server.drop()
        await wait_until(lambda: sum("watch=1" in one for one in server.requests) >= 4, 30, "watches that are refused")
        (asked.folder.path / "gate").touch()
        with anyio.fail_after(30):
            assert (await child.wait()).code == 6  # lists tell of it
        asked.folder.remove()
    assert caplog.text.count("pods cannot be watched for now: ") == 1
    assert "the API server answers again" not in caplog.text


# --- credentials ------------------------------------------------------------------------------------------------------


async def test_a_token_that_is_being_renewed(server: Server, tmp_path: Path) -> None:
    """For a moment its file is not there, is empty, or holds a part of it that nobody takes."""
    token, config = tmp_path / "token", tmp_path / "renewed"
    token.write_text(TOKEN)
    server.kubeconfig(config, tokenFile=str(token))
    options = {"kubeconfig": str(config), "image": "base:1", "claim": "work"}
    runner = KubeRunner.from_options(options, {})
    for at, moment in enumerate((None, b"", b"half", b"two words", b"\xff\x00", b"t\n\nt")):
        asked = launch(tmp_path, WAITS)
        name = f"token-{at}"
        server.tokens = {name}
        if moment is None:
            token.unlink()
        else:
            token.write_bytes(moment)
        server.drop()
        found = list[int]()

        async def run(asked: Launch = asked, found: list[int] = found) -> None:
            child = await runner.start(asked)
            await begun(asked)
            found.append((await child.wait()).code)

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await anyio.sleep(0.4)
            token.write_text(f"{name}\n")
            await begun(asked)
            token.unlink()  # and once more while it runs
            server.drop()
            (asked.folder.path / "gate").touch()
            await anyio.sleep(0.4)
            token.write_text(name)
        assert found == [6]
        asked.folder.remove()
    await runner.aclose()
    assert _still(server)


async def test_a_token_of_a_program_that_is_renewed(server: Server, tmp_path: Path) -> None:
    """A child runs on while its worker's token expires, and the guard would find the program too."""
    program = tmp_path / "get-token"
    answer = '{"apiVersion": "client.authentication.k8s.io/v1", "status": {"token": "%s"}}'
    program.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    program.chmod(0o755)
    (tmp_path / "answer").write_text(answer % TOKEN)
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(program), "args": None}
    options = {
        "kubeconfig": str(server.kubeconfig(tmp_path / "clouds", exec=plugin)),
        "image": "base:1",
        "claim": "work",
    }
    runner = KubeRunner.from_options(options, {})
    asked = launch(tmp_path, WAITS)
    child = await runner.start(asked)
    await begun(asked)
    server.tokens = {"renewed"}
    (tmp_path / "answer").write_text(answer % "renewed")
    server.drop()
    (asked.folder.path / "gate").touch()
    with anyio.fail_after(30):
        assert (await child.wait()).code == 6
    asked.folder.remove()
    await runner.aclose()
    assert _still(server)


async def test_refusals_that_pass_and_those_that_stay(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API servers that start may reject any credentials and permissions for some seconds."""
    server.faults += [
        Fault("POST", 401, "Unauthorized", "Unauthorized", times=2),
        Fault("watch=1", 401, "Unauthorized", "Unauthorized", times=2),
        Fault("watch=1", 403, "Forbidden", "clusterrole not found", times=1),
        Fault("DELETE", 401, "Unauthorized", "Unauthorized", times=1),
    ]
    server.cluster.unschedulable = "no node"
    async with running(server, tmp_path) as runner:
        asked, found = launch(tmp_path, "exit 5"), list[int]()

        async def run() -> None:
            found.append((await (await runner.start(asked)).wait()).code)

        async with anyio.create_task_group() as group:
            group.start_soon(run)
            await wait_until(lambda: len(server.faults) == 1, 30, "all that is refused")
            server.cluster.unschedulable = None
        assert found == [5]
        asked.folder.remove()
        await wait_until(lambda: _still(server), 40, "the end of the Job")
    monkeypatch.setattr(kube_api, "UNAUTHORIZED_GRACE", 0.5)
    server.tokens = {"another"}
    runner, asked = make(server, tmp_path), launch(tmp_path)
    with pytest.raises(DispatchError, match=r"status 401 Unauthorized\); it does not accept the credentials of this w"):
        await runner.start(asked)
    server.tokens = {TOKEN}
    await runner.aclose()
    asked.folder.remove()


async def test_a_job_that_may_not_be_deleted_for_now_is_deleted_later(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube_tracker, "DELETE_RETRY_INTERVAL", 0.1)
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path, SLEEPS)
        child = await runner.start(asked)
        await begun(asked)
        server.faults.append(Fault("DELETE", 403, "Forbidden", "jobs is forbidden", times=4))
        await run_to_end(child.kill)
        await wait_until(lambda: _still(server), 30, "the end of the Job")
        asked.folder.remove()
    assert caplog.text.count(f"the Job {job_name('a', 1)} stays until it may be deleted: ") == 1


async def test_the_guard_gets_in_when_it_can(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its worker has died; it is refused at first, and then finds no kubeconfig. A pod that lost its Job goes too."""
    monkeypatch.setattr(kube_guard, "QUIET_TIME", 0.3)
    monkeypatch.setattr(kube_guard, "CREDENTIALS_INTERVAL", 0.1)
    monkeypatch.setattr(kube_api, "UNAUTHORIZED_GRACE", 0.1)
    async with running(server, tmp_path, grace="1") as runner:
        for lost in (False, True):
            asked = launch(tmp_path, SLEEPS)
            child = await runner.start(asked)
            await begun(asked)
            if lost:
                with server.cluster.changed:
                    del server.cluster.jobs[job_name("a", 1)]
            server.faults.append(Fault("jobs?", 401, "Unauthorized", "Unauthorized", times=4))
            orders = GuardSettings(str(tmp_path / "kept"), None, NAMESPACE, runner.worker, 1)
            with anyio.fail_after(30):
                async with anyio.create_task_group() as group:
                    group.start_soon(kube_guard.main, orders)
                    await anyio.sleep(0.3)
                    server.kubeconfig(tmp_path / "kept")
            assert _still(server)
            await child.wait()
            (tmp_path / "kept").unlink()
            asked.folder.remove()
        monkeypatch.setattr(kube_guard, "CREDENTIALS_TIMEOUT", 0.2)
        with pytest.raises(ValueError, match=r"the kubeconfig .*kept cannot be read"):
            await kube_guard.main(orders)


# --- Jobs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["killed", "by itself", "next attempt"])
async def test_a_pod_that_outlives_its_job_is_not_left(server: Server, tmp_path: Path, ends: str) -> None:
    """As after `kubectl delete job --cascade=orphan`."""
    async with running(server, tmp_path, grace="1") as runner:
        asked = launch(tmp_path, WAITS if ends == "by itself" else SLEEPS)
        child = await runner.start(asked)
        await begun(asked)
        with server.cluster.changed:
            del server.cluster.jobs[job_name("a", 1)]
        if ends == "killed":
            assert (await run_to_end(child.kill)).code == 3
        elif ends == "by itself":
            (asked.folder.path / "gate").touch()
            assert (await child.wait()).code == 6
        else:
            again = replace(asked, attempt=2, script="exit 4")
            assert (await (await runner.start(again)).wait()).code == 4
            assert (await child.wait()).code == 3
        assert server.cluster.pods == {}
        asked.folder.remove()


async def test_a_job_of_that_name_that_is_somebody_elses(server: Server, tmp_path: Path) -> None:
    name = job_name("a", 1)
    async with running(server, tmp_path) as runner:
        asked = launch(tmp_path)
        theirs: dict[str, Any] = {"metadata": {"name": name, "labels": {}, "deletionTimestamp": ""}, "spec": {}}
        server.cluster.jobs[name] = theirs
        with anyio.fail_after(20), pytest.raises(DispatchError) as caught:
            await runner.start(asked)
        assert str(caught.value) == (
            f"the cluster has a Job {name} already, which is not one of this invocation: "
            f"`kubectl delete job {name} -n {NAMESPACE}` makes room, if nobody needs it"
        )
        assert server.cluster.jobs == {name: theirs}
        asked.folder.remove()


async def test_children_of_workers_whose_workdir_is_not_seen_here(server: Server, tmp_path: Path) -> None:
    """Two pods on one node may have one claim at different places: what the other one holds cannot be known."""
    async with running(server, tmp_path) as theirs, running(server, tmp_path) as runner:
        held, asked = launch(tmp_path, SLEEPS, "held"), launch(tmp_path)
        child = await theirs.start(held)
        await begun(held)
        job = server.cluster.jobs[job_name("held", 1)]
        job["metadata"]["annotations"]["dreamlake.lakeshore/folder"] = "/nowhere/seen/from/here/held"
        await (await runner.start(asked)).wait()
        await wait_until(lambda: sum("place" in one for one in server.requests) >= 2, 30, "both to have looked")
        await anyio.sleep(0.3)
        assert job_name("held", 1) in server.cluster.jobs
        assert "deletionTimestamp" not in job["metadata"]
        await run_to_end(child.kill)
        held.folder.remove()
        asked.folder.remove()


async def test_an_api_server_that_is_slow_keeps_nobody_else_waiting(server: Server, tmp_path: Path) -> None:
    server.delay = 1.0
    most = took = 0.0
    async with running(server, tmp_path) as runner:

        async def tick() -> None:
            nonlocal most
            while True:
                began = anyio.current_time()
                await anyio.sleep(0.01)
                most = max(most, anyio.current_time() - began)

        async def run(id: str) -> None:
            asked = launch(tmp_path, "exit 2", id)
            assert (await (await runner.start(asked)).wait()).code == 2
            asked.folder.remove()

        async with anyio.create_task_group() as ticking:
            ticking.start_soon(tick)
            began = anyio.current_time()
            async with anyio.create_task_group() as group:
                for id in "abcd":
                    group.start_soon(run, id)
            took = anyio.current_time() - began
            ticking.cancel_scope.cancel()
        server.delay = 0.0
    assert took < 15  # one after the other they would take thrice that
    assert most < 0.9


# --- what is read -----------------------------------------------------------------------------------------------------


async def test_output_of_any_length_is_not_kept_in_memory() -> None:
    """The API server sends lines, and a line may be all that a child ever wrote."""
    length, block = 96 << 20, b"x" * (1 << 20)

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (length + 3))
            for _ in range(length // len(block)):
                await stream.send(block)
            await stream.send(b"end")

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        api = KubeApi(Cluster(f"http://127.0.0.1:{port}", "n", None), "n")
        tracemalloc.start()
        try:
            assert await api.log("pod", "child", 4096) == "x" * 4093 + "end"
            assert tracemalloc.get_traced_memory()[1] < length / 4
        finally:
            tracemalloc.stop()
            await api.aclose()
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("cluster", "user", "said"),
    [
        ({"server": "https://h:99999"}, {}, "^https://h:99999 cannot be reached: Port out of range"),
        (
            {"proxy-url": "socks5://p:1"},
            {},
            "^https://h cannot be reached through a proxy of the kind socks5: that needs soc",
        ),
        ({"proxy-url": "ftp://u:secret@p:1"}, {}, "^https://h cannot be reached through a proxy of the kind ftp: "),
        (
            {},
            {"token": "a\nsecret"},
            "^expected one line of printable ASCII in the token of the user u in .*config, got",
        ),
        (
            {},
            {"token": "t", "as": "root"},
            r"^the user u in .*config acts as root \(`as`\), which this runner does not do",
        ),
    ],
)
def test_what_no_request_can_be_made_with(
    tmp_path: Path, cluster: dict[str, str], user: dict[str, str], said: str
) -> None:
    path = tmp_path / "config"
    file = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "https://h", **cluster}}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(json.dumps(file))
    options = {"kubeconfig": str(path), "image": "base:1", "claim": "work"}
    with pytest.raises(ValueError, match=said) as caught:
        KubeRunner.from_options(options, {})
    assert "secret" not in str(caught.value)


async def test_tokens_with_white_space_around(tmp_path: Path) -> None:
    path = tmp_path / "config"
    file = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u"}}],
        "clusters": [{"name": "c", "cluster": {"server": "http://h"}}],
        "users": [{"name": "u", "user": {"token": " t\n"}}],
    }
    path.write_text(json.dumps(file))
    assert await find_cluster(str(path), None, {}).credentials.token() == "t"


async def test_a_server_that_does_not_answer_in_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube_api, "ANSWER_TIMEOUT", 0.2)

    async def hold(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, hold)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        api = KubeApi(Cluster(f"http://127.0.0.1:{port}", "n", None), "n")
        with pytest.raises(kube_api.ApiUnavailable) as caught:
            await api.job("x")
        assert str(caught.value) == (f"the API server http://127.0.0.1:{port} has not answered in time (ReadTimeout)")
        await api.aclose()
        group.cancel_scope.cancel()
