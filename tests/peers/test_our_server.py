"""What our server alone promises old peers: claims without a lease, acks without a worker, quick 404s, namespaces."""

from __future__ import annotations

import json
import subprocess
import textwrap
from typing import TYPE_CHECKING, Any

import httpx
import msgpack
import peer_bodies as bodies
import pytest
from helpers import wait_until, wait_until_sync
from install_peers import VERSIONS
from peer_kit import Peer, ours, start_server

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Reap
from dreamlake.lakeshore.server.tokens import create_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from peer_kit import Processes


@pytest.fixture(scope="module")
def url(_installed: None, started: Processes) -> str:
    """In place of both servers: ours."""
    return start_server(started, started.folder / "server.db").url


@pytest.fixture
async def plane(peer: Peer) -> AsyncIterator[dls.HttpDispatch]:
    async with dls.HttpDispatch(peer.url) as plane:
        yield plane


@pytest.fixture
def q(plane: dls.HttpDispatch) -> dls.Queue:
    """A queue that no other test knows."""
    return dls.Queue(f"q-{new_id()}", dispatch=plane)


# --- claims and acks ------------------------------------------------------------------------------------------------


async def test_a_claim_of_an_old_daemon_never_expires_and_its_ack_names_no_worker(peer: Peer, q: dls.Queue) -> None:
    id = await q.submit({"plain": "payload"})
    ((claimed, attempt, payload),) = peer.run(
        """
        job = dls.SyncQueue(argv[0], dispatch=plane).claim()
        say([job.id, job.attempt, job.payload])
        """,
        q.name,
    )
    assert (claimed, attempt, payload) == (id, 1, {"plain": "payload"})
    row = await q.get(id)
    assert (row.state, row.attempt, row.lease_until) == ("running", 1, None)
    assert row.started_at is not None
    assert id not in {row[0] for row in (await q.dispatch.do(Reap())).rows}
    assert await q.claim() is None
    peer.run("plane.ack(argv[0], 'its client sends no worker', result=b'\\x2a')", id)
    assert await q.result(id) == 42
    row = await q.get(id)
    assert (row.state, row.finished_at is not None) == ("succeeded", True)


async def test_an_ack_without_a_worker_does_not_end_a_claim_that_has_a_lease(peer: Peer, q: dls.Queue) -> None:
    id = await q.submit("payload")
    job = await q.claim(lease=30.0)
    assert job is not None
    (raised,) = peer.run("say(raised(plane.ack, argv[0], 'w', result=b''))", id)
    assert raised[0] == "DispatchError"
    assert "-> 409" in raised[1]
    await q.ack(job, "ours")
    assert await q.result(id) == "ours"


async def test_a_nack_of_an_old_worker_ends_the_invocation(peer: Peer, q: dls.Queue) -> None:
    """It asks for a retry, but a server of its kind knows none."""
    id = await q.submit("payload")
    peer.run("q = dls.SyncQueue(argv[0], dispatch=plane); q.nack(q.claim(), error='ValueError: boom')", q.name)
    with pytest.raises(ValueError, match="boom") as caught:
        await q.result(id)
    assert isinstance(caught.value, dls.InvocationFailed)
    assert (caught.value.type, caught.value.message, caught.value.state) == ("ValueError", "boom", "failed")


async def test_an_old_daemon_sees_the_attempt_of_a_job_that_we_gave_back(peer: Peer, q: dls.Queue) -> None:
    id = await q.submit("payload")
    job = await q.claim()
    assert job is not None
    await q.nack(job, error="later", retry=True)
    (claimed,) = peer.run("job = dls.SyncQueue(argv[0], dispatch=plane).claim(); say([job.id, job.attempt])", q.name)
    assert claimed == [id, 2]


async def test_a_job_with_frames_of_an_earlier_attempt_is_not_for_an_old_daemon(peer: Peer, q: dls.Queue) -> None:
    """It would number its frames from 0, and they would be taken for duplicates."""
    id = await q.submit("payload")
    job = await q.claim()
    assert job is not None
    await q.post(job, "first attempt")
    await q.nack(job, error="later", retry=True)
    assert peer.run("say(dls.SyncQueue(argv[0], dispatch=plane).claim())", q.name) == [None]
    again = await q.claim()
    assert again is not None
    assert (again.id, again.attempt) == (id, 2)


async def test_frames_that_all_carry_the_number_0_are_each_delivered_once(peer: Peer, q: dls.Queue) -> None:
    id = await q.submit("payload")
    (seqs,) = peer.run(
        """
        q = dls.SyncQueue(argv[0], dispatch=plane)
        job = q.claim()
        say([q.post(job.id, value) for value in "abc"] + [q.post(job.id, None, final=True)])
        q.ack(job)
        """,
        q.name,
    )
    assert seqs == [0, 1, 2, 3]
    assert [value async for value in q.stream(id)] == ["a", "b", "c"]
    assert [value async for value in q.stream(id, since=1)] == ["c"]


async def test_a_cancel_ends_what_an_old_worker_runs_and_its_late_ack_is_refused(
    peer: Peer, q: dls.Queue, tmp_path: Path
) -> None:
    """It sends no heartbeats, so nothing can tell it: the row is killed at once. A refused ack ends its process."""
    worker, started, opened = peer.work(q.name), tmp_path / "started", tmp_path / "opened"
    id = await q.submit(dls.thunk(bodies.gate, str(started), str(opened)))
    await wait_until(started.exists, 60, "the body's start")
    assert await q.cancel(id)
    with pytest.raises(dls.InvocationKilled, match="cancelled while running"):
        await q.result(id, timeout=60.0)
    opened.touch()
    await wait_until(lambda: not worker.alive, 60.0, "the end of the worker")
    assert "/v1/daemon/ack -> 409" in worker.err.read_text()
    assert (await q.get(id)).state == "killed"


async def test_an_old_producer_learns_that_its_invocation_was_killed(peer: Peer, q: dls.Queue) -> None:
    (id,) = peer.run("say(dls.SyncQueue(argv[0], dispatch=plane).submit(dls.thunk(bodies.keys)))", q.name)
    assert await q.cancel(id)
    result, stream = peer.run(
        """
        q = dls.SyncQueue("any", dispatch=plane)
        say(raised(q.result, argv[0]))
        say(raised(lambda: list(q.stream(argv[0]))))
        """,
        id,
    )
    assert result[0] == stream[0] == "DispatchError"
    assert "killed" in result[1]
    assert stream[1].endswith("Cancelled: cancelled before it started")


async def test_an_old_reader_stops_with_a_named_error_where_a_body_was_started_again(
    peer: Peer, q: dls.Queue, tmp_path: Path
) -> None:
    worker = peer.started.start(*ours("worker", "start", "--queue", q.name, "--url", peer.url, "--retries", 1))
    id = await q.submit(dls.thunk(bodies.flaky, str(tmp_path / "failed")))
    await q.result(id, timeout=60.0)
    worker.end()
    values, error, rest = peer.run(
        """
        q, got = dls.SyncQueue("any", dispatch=plane), []
        error = raised(lambda: [got.append(value) for value in q.stream(argv[0])])
        say(got)
        say(error)
        say(list(q.stream(argv[0], since=2)))
        """,
        id,
    )
    assert values == [0, 1]
    assert error[0] == "DispatchError"
    assert "StreamRestarted" in error[1]
    assert rest == [0, 1, 2]


async def test_large_values_pass_both_ways(peer: Peer, plane: dls.HttpDispatch, their_queue: str) -> None:
    large = b"\x00\xff" * (2 << 20)
    q = dls.Queue(their_queue, dispatch=plane)
    assert await q.call(dls.thunk(bodies.echo, large)) == ((large,), {})
    (equal,) = peer.run(
        """
        large = b"\\x00\\xff" * (2 << 20)
        say(dls.SyncQueue(argv[0], dispatch=plane).call(dls.thunk(bodies.echo, large)) == ((large,), {}))
        """,
        their_queue,
    )
    assert equal


async def test_old_and_new_workers_share_a_queue_and_each_job_is_run_once(
    started: Processes, url: str, tmp_path: Path
) -> None:
    peers, name, file = [Peer(version, started, url) for version in VERSIONS], f"q-{new_id()}", str(tmp_path / "lines")
    workers = [peer.work(name) for peer in peers]
    workers.append(started.start(*ours("worker", "start", "--queue", name, "--url", url, "--concurrency", 2)))
    async with dls.HttpDispatch(url) as plane:
        q = dls.Queue(name, dispatch=plane)
        ids = await q.submit_many(dls.thunk(bodies.note, file, f"new-{i}") for i in range(20))
        for peer in peers:
            (more,) = peer.run(
                """
                q, lines = dls.SyncQueue(argv[0], dispatch=plane), [f"{argv[2]}-{i}" for i in range(20)]
                say([q.submit(dls.thunk(bodies.note, argv[1], line)) for line in lines])
                """,
                *(name, file, peer.version),
            )
            ids += more
        for id in ids:
            await q.result(id, timeout=60.0)
    wanted = [f"{version}-{i}" for version in ("new", *VERSIONS) for i in range(20)]
    assert sorted((tmp_path / "lines").read_text().split()) == sorted(wanted)
    assert all(worker.alive for worker in workers)
    for worker in workers:
        worker.end()


@pytest.mark.usefixtures("_installed")
async def test_a_claim_of_an_old_daemon_outlives_the_server(started: Processes, tmp_path: Path) -> None:
    server = start_server(started, tmp_path / "server.db")
    peer = Peer(VERSIONS[-1], started, server.url)
    async with dls.HttpDispatch(server.url) as plane:
        q = dls.Queue("q", dispatch=plane)
        id = await q.submit("payload")
        assert peer.run("say(dls.SyncQueue('q', dispatch=plane).claim().id)") == [id]
        server.running.process.kill()
        server.running.end()
        again = start_server(started, tmp_path / "server.db", port=int(server.url.rpartition(":")[2]))
        assert (await q.get(id)).state == "running"
        assert await q.claim() is None
        peer.run("plane.ack(argv[0], 'w', result=b'\\x2a')", id)
        assert await q.result(id) == 42
    again.running.end()


# --- routes ---------------------------------------------------------------------------------------------------------


def test_the_side_routes_of_a_checkout_are_a_quick_404(peer: Peer, tmp_path: Path) -> None:
    """A UDF that is submitted from a clean checkout first asks where its code could be put."""
    (tmp_path / "checked_in.py").write_text(
        "import dreamlake.lakeshore as dls\n\n@dls.udf(queue='side')\ndef answer(x):\n    return x\n"
    )
    for args in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=name", "-c", "user.email=name@example.org", "commit", "--quiet", "--message=all"],
        ["remote", "add", "origin", "https://example.org/repository.git"],
    ):
        subprocess.run(["git", *args], cwd=tmp_path, check=True)
    script = """
        import httpx, json, time
        send = httpx.Client.send

        def noted(self, request, **kwargs):
            began = time.monotonic()
            response = send(self, request, **kwargs)
            print(json.dumps([request.method, request.url.path, response.status_code, time.monotonic() - began]))
            return response

        httpx.Client.send = noted
        import checked_in
        checked_in.answer.submit(1)
        """
    process = peer.started.start(
        *(peer.python, "-c", textwrap.dedent(script)),
        cwd=tmp_path,
        LAKESHORE_URL=peer.url,
        PYTHONPATH=str(tmp_path),
    )
    assert process.process.wait(60.0) == 0, process.err.read_text()
    requests = [json.loads(line) for line in process.out.read_text().splitlines()]
    (lookup, presign, submit) = requests
    assert lookup[:3] == ["GET", "/v1/namespaces/default/code-repos/lookup", 404]
    assert presign[:3] == ["POST", "/v1/namespaces/default/storages/code-staging/presign", 404]
    assert submit[2] == 200
    assert max(lookup[3], presign[3]) < 15.0


async def test_what_a_newer_producer_adds_to_its_run_config_is_kept_and_handed_out(peer: Peer, q: dls.Queue) -> None:
    if peer.version == "0.3.7":
        more, wanted = "", {}
    else:
        more = ", run_config=dls.RunConfig(image='img', env={'A': '1'}, timeout_s=5)"
        wanted = {"image": "img", "env": {"A": "1"}, "timeout_s": 5}
    (id,) = peer.run(f"say(plane.submit(argv[0], b'envelope', id=argv[1], priority=2.9{more}))", q.name, new_id())
    fields = {"worker_id": "w", "queue": q.name, "timeout_s": 0}
    (command,) = poll(peer.url, fields)["commands"]
    body = command["body"]
    assert (body["invocation_id"], body["args_blob"]) == (id, b"envelope")
    assert body["run_config"].items() >= {"queue": q.name, "priority": 2.9, "key": None, **wanted}.items()


def poll(url: str, fields: dict[str, Any]) -> Any:
    content, headers = msgpack.packb(fields), {"content-type": "application/x-msgpack"}
    answer = httpx.post(f"{url}/v1/daemon/poll", content=content, headers=headers)
    assert answer.status_code == 200, answer.content
    return msgpack.unpackb(answer.content)


# --- namespaces and tokens ------------------------------------------------------------------------------------------


class Guarded:
    """A server that wants tokens, and one for each role in the namespace blue."""

    def __init__(self, started: Processes, folder: Path) -> None:
        self.started, self.file = started, folder / "tokens"
        self.tokens = {role: self.make(f"blue-{role}", role, "blue") for role in ("producer", "worker", "admin")}
        self.url = start_server(started, folder / "guarded.db", "--token-file", self.file).url

    def make(self, name: str, role: str, namespace: str) -> str:
        return create_token(self.file, name, role, namespace)


@pytest.fixture(scope="module")
def guarded(_installed: None, started: Processes, tmp_path_factory: pytest.TempPathFactory) -> Guarded:
    return Guarded(started, tmp_path_factory.mktemp("guarded"))


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_token_puts_old_peers_into_its_namespace(guarded: Guarded, version: str) -> None:
    """0.3.7 names no namespace in its paths and 0.5.0 only as a producer: the token's counts."""
    producer = Peer(version, guarded.started, guarded.url, guarded.tokens["producer"])
    worker = Peer(version, guarded.started, guarded.url, guarded.tokens["worker"])
    worker.work("q", "--namespace", "blue")
    script = "say(dls.SyncQueue('q', dispatch=plane).call(dls.thunk(bodies.kinds, 1, 'a')))"
    assert producer.run(script, namespace="blue") == [["int", "str"]]
    async with dls.HttpDispatch(guarded.url, token=guarded.tokens["producer"]) as plane:
        assert await dls.Queue("q", dispatch=plane).call(dls.thunk(bodies.kinds, ())) == ["tuple"]
    async with dls.HttpDispatch(guarded.url, token=guarded.make(f"red-{new_id()}", "producer", "red")) as red:
        assert await dls.Queue("q", dispatch=red).count(None) == 0


@pytest.mark.parametrize("version", VERSIONS)
def test_another_namespace_than_the_token_s_is_a_403(guarded: Guarded, version: str) -> None:
    peer = Peer(version, guarded.started, guarded.url, guarded.tokens["producer"])
    script = "say(raised(dls.SyncQueue('nobody', dispatch=plane).submit, dls.thunk(bodies.keys)))"
    (raised,) = peer.run(script, namespace="red")
    if version == "0.3.7":  # which has no namespace in its path
        assert raised is None
    else:
        assert "/v1/namespaces/red/producer/submit -> 403" in raised[1]


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrong_token_is_a_401_and_a_role_too_low_a_403(guarded: Guarded, version: str) -> None:
    script = "say(raised(dls.SyncQueue('nobody', dispatch=plane).{}))"
    peer = Peer(version, guarded.started, guarded.url, "wrong")
    for token, call, status in (
        (None, "submit, 1", 401),
        ("wrong", "submit, 1", 401),
        ("wrong", "claim", 401),
        (guarded.tokens["producer"], "claim", 403),
    ):
        (raised,) = peer.run(script.format(call), token=token, namespace="blue")
        assert raised[0] == "DispatchError"
        assert f"-> {status}" in raised[1]
    refused = peer.work("q")
    wait_until_sync(lambda: not refused.alive, 60.0, "the end of a worker that is refused")
    assert "401" in refused.err.read_text()


async def test_without_tokens_the_namespaces_of_a_path_are_apart(peer: Peer, plane: dls.HttpDispatch) -> None:
    """Where no token is asked for, a namespace in the path is taken as it is; without one it is the server's own."""
    green = dls.HttpDispatch(peer.url, namespace="green ü")
    script = "say(dls.SyncQueue('apart', dispatch=plane).submit(dls.thunk(bodies.keys), key=argv[0]))"
    key = new_id()
    (id,) = peer.run(script, key, namespace="green ü")
    async with green:
        here, there = (dls.Queue("apart", dispatch=one) for one in (plane, green))
        found = [[row.id for row in await one.list(key=key)] for one in (here, there)]
    assert found == ([[id], []] if peer.version == "0.3.7" else [[], [id]])
