"""`lakeshore server` and `lakeshore token`, and every other command with a server in place of a file."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import socket
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import cli_jobs
import httpx
import pytest
from cli_kit import LIMIT, Process, cli, environment
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.protocol.fields import decode, encode
from dreamlake.lakeshore.planes.protocol.routes import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MSGPACK = {"content-type": CONTENT_TYPE}
get, post = (partial(ask, timeout=LIMIT) for ask in (httpx.get, httpx.post))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for everything that no option names, here and in the processes that are started."""
    for name in [name for name in os.environ if name.startswith("LAKESHORE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("LAKESHORE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


class Server(Process):
    """A server on a free port, which accepts."""

    def __init__(self, db: Path, *options: object, home: Path, cwd: Path | None = None) -> None:
        more = {} if cwd is None else {"cwd": cwd}
        env = environment(LAKESHORE_HOME=str(home))
        super().__init__("server", "start", "--port", 0, "--db", db, *options, env=env, **more)
        self.says(", namespace ")
        found = re.search(r" on (http://\S+:(\d+)), ", self.err)
        assert found is not None, self.err
        self.url, self.port = found[1], int(found[2])


@pytest.fixture
def server(db: Path, home: Path) -> Iterator[Server]:
    with Server(db, home=home) as server:
        yield server


def token(home: Path, role: str, *options: object, name: str | None = None) -> str:
    """A new token of this role."""
    ran = cli("token", "create", "--name", name or f"the-{role}", "--role", role, *options)
    assert ran.code == 0, ran.err
    return ran.out.strip()


@contextmanager
def under_way(server: Server, path: str, body: bytes, length: int | None = None) -> Iterator[socket.socket]:
    """A request that the server has begun to read; of a body of `length` bytes, maybe more than there are."""
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {CONTENT_TYPE}\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=LIMIT) as sock:
        sock.sendall(f"{head}content-length: {length or len(body)}\r\n\r\n".encode() + body)
        # What lay in that connection was there before this one was.
        assert get(f"{server.url}/healthz").status_code == 200
        yield sock


def rest(sock: socket.socket) -> bytes:
    got = b""
    while piece := sock.recv(1 << 16):
        got += piece
    return got


# --- what it says, and how it ends ----------------------------------------------------------------------------------


def test_it_says_where_it_is_and_who_may_come(db: Path, home: Path) -> None:
    with Server(db, home=home) as server:
        assert server.err.endswith(
            f"INFO server {server.pid} on http://127.0.0.1:{server.port}, plane {db}, namespace default, open to "
            f"every client, no tokens in {home / 'tokens'}\n"
        )
        assert get(f"{server.url}/healthz").status_code == 200
    for number in range(2):
        token(home, "worker", name=f"t{number}")
    with Server(db, "--namespace", "team", home=home) as server:
        assert server.err.endswith(f", namespace team, tokens required, 2 in {home / 'tokens'}\n")
    assert "lks_" not in server.err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_answers_what_is_held_and_ends_it(server: Server, number: signal.Signals) -> None:
    poll = encode({"worker_id": "w", "queue": "empty", "timeout_s": 250})
    with under_way(server, "/v1/daemon/poll", poll) as held:
        server.signal(number)
        head, _, body = rest(held).partition(b"\r\n\r\n")
        ran = server.ends()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert decode(body, "the answer") == {"commands": []}
    assert ran.code == 0, ran.err
    assert f"INFO {number.name}: accepting no more connections, running requests may end\n" in ran.err
    assert "Traceback" not in ran.err
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", server.port)):
        pass


def test_a_stream_ends_cleanly(server: Server, db: Path) -> None:
    async def submit() -> str:
        async with dls.Dispatch(db) as plane:
            return await plane.submit("q", b"body")

    id = anyio.run(submit)
    with httpx.stream("GET", f"{server.url}/v1/producer/invocations/{id}/result/stream", timeout=LIMIT) as answer:
        assert answer.status_code == 200
        server.signal()
        assert answer.read() == b""  # whole: a body that breaks off is an error
    assert server.ends().code == 0


def test_what_was_answered_while_it_ended_is_there(server: Server, db: Path) -> None:
    answered: list[str] = []
    refused: list[str] = []

    def submit(number: int) -> None:
        with httpx.Client(base_url=server.url, headers=MSGPACK, timeout=LIMIT) as client:
            for turn in range(100_000):
                id = f"{number}-{turn}"
                body = encode({"invocation_id": id, "queue": "q", "args_blob": b"body"})
                try:
                    status = client.post("/v1/producer/submit", content=body).status_code
                except httpx.TransportError:
                    return
                (answered if status == 200 else refused).append(id)

    submitters = [threading.Thread(target=submit, args=(number,)) for number in range(4)]
    for submitter in submitters:
        submitter.start()
    wait_until_sync(lambda: len(answered) > 50, LIMIT, "the first submits")
    server.signal()
    ran = server.ends()
    for submitter in submitters:
        submitter.join()
    assert ran.code == 0, ran.err
    assert not refused
    assert "WARNING" not in ran.err
    assert "ERROR" not in ran.err
    there = {row["id"] for row in cli("inv", "list", "--db", db, "--json", "--limit", 1_000_000).document}
    assert set(answered) <= there
    assert len(there) <= len(answered) + len(submitters)  # an answer may have been lost on its way


def test_many_held_requests_are_answered_at_once(server: Server) -> None:
    with ExitStack() as stack:
        polls = [encode({"worker_id": f"w{number}", "queue": "q", "timeout_s": 250}) for number in range(20)]
        held = [stack.enter_context(under_way(server, "/v1/daemon/poll", poll)) for poll in polls]
        server.signal()
        for sock in held:
            assert decode(rest(sock).partition(b"\r\n\r\n")[2], "the answer") == {"commands": []}
        assert server.ends().code == 0


def test_after_the_grace_what_is_left_is_cut(db: Path, home: Path) -> None:
    with Server(db, "--grace", 0.2, home=home) as server:
        with under_way(server, "/v1/producer/submit", b"half a body", 100):
            server.signal()
            ran = server.ends()
    assert ran.code == 0, ran.err
    assert "WARNING 1 connection is cut off\n" in ran.err
    assert "Traceback" not in ran.err


def test_a_second_signal_ends_it_at_once(db: Path, home: Path) -> None:
    with Server(db, "--grace", "1h", home=home) as server:
        with under_way(server, "/v1/producer/submit", b"half a body", 100):
            server.signal()
            server.says("SIGTERM: accepting no more connections")
            server.signal(signal.SIGINT)
            ran = server.ends()
    assert ran.code == 130
    assert "SIGINT again: ending at once\n" in ran.err


def test_what_was_submitted_is_there_after_a_restart(db: Path, home: Path) -> None:
    with Server(db, "--durable", home=home) as server:
        q = dls.SyncQueue("q", dispatch=dls.HttpDispatch(server.url))
        id = q.submit(dls.thunk(cli_jobs.echo, 1))
        server.signal(signal.SIGKILL)
        server.ends()
    with Server(db, home=home) as server:
        row = dls.SyncQueue("q", dispatch=dls.HttpDispatch(server.url)).get(id)
    assert (row.state, row.trusted) == ("queued", False)


# --- whom it lets in ------------------------------------------------------------------------------------------------


def test_R111_beyond_this_machine_it_wants_a_token(db: Path, home: Path) -> None:
    ran = cli("server", "start", "--host", "0.0.0.0", "--port", 0, "--db", db)
    assert ran.code == 2
    assert ran.err.endswith(
        f"Error: other machines can reach a server on 0.0.0.0, and there is no token in {str(home / 'tokens')!r}, "
        "so anyone could run code through it: create a token with `lakeshore token create --name NAME --role worker "
        f"--token-file {home / 'tokens'}`, use --host 127.0.0.1, or give --insecure\n"
    )
    assert not db.exists()
    token(home, "worker")
    with Server(db, "--host", "0.0.0.0", home=home) as server:
        assert "tokens required, 1 in " in server.err


def test_insecure_is_said_aloud(db: Path, home: Path) -> None:
    with Server(db, "--host", "0.0.0.0", "--insecure", home=home) as server:
        assert "open to every client" in server.err
        assert get(f"http://127.0.0.1:{server.port}/v1/producer/queues").status_code == 200


def test_a_token_that_is_made_while_it_runs_closes_it(server: Server, home: Path) -> None:
    queues = f"{server.url}/v1/producer/queues"
    assert get(queues).status_code == 200
    made = token(home, "producer")
    wait_until_sync(lambda: get(queues).status_code == 401, LIMIT, "the server to ask for a token")
    allowed = {"authorization": f"Bearer {made}"}
    assert get(queues, headers=allowed).status_code == 200
    assert cli("token", "revoke", "the-producer").code == 0
    wait_until_sync(lambda: get(queues, headers=allowed).status_code == 401, LIMIT, "the token's end")
    assert made not in server.err


@pytest.mark.parametrize(
    ("options", "host", "status"),
    [
        ((), "localhost", 200),
        ((), "attacker.example", 403),
        (("--allowed-host", "plane.example"), "plane.example", 200),
        (("--allowed-host", "plane.example"), "attacker.example", 403),
    ],
)
def test_R112_an_open_server_answers_to_its_own_names_only(
    db: Path, home: Path, options: tuple[str, ...], host: str, status: int
) -> None:
    with Server(db, *options, home=home) as server:
        answer = get(f"{server.url}/v1/producer/queues", headers={"host": f"{host}:{server.port}"})
    assert answer.status_code == status


def test_with_tokens_a_server_goes_by_any_name_unless_some_are_given(db: Path, home: Path) -> None:
    headers = {"authorization": f"Bearer {token(home, 'producer')}", "host": "any.example"}
    for options, status in (((), 200), (("--allowed-host", "plane.example"), 403)):
        with Server(db, *options, home=home) as server:
            assert get(f"{server.url}/v1/producer/queues", headers=headers).status_code == status


def test_its_other_options_reach_it(db: Path, home: Path) -> None:
    with Server(db, "--target-nymph-version", "default=0.1.4", "--max-body", "1k", home=home) as server:
        body = encode({"worker_id": "w", "timeout_s": 0})
        answer = post(f"{server.url}/v1/daemon/poll", content=body, headers=MSGPACK)
        assert decode(answer.content, "x") == {"commands": [], "target_nymph_version": "0.1.4"}
        answer = post(f"{server.url}/v1/daemon/poll", content=bytes(1025), headers=MSGPACK)
        assert answer.status_code == 413


# --- what it refuses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--port", "65536"), "65536 is not in the range 0<=x<=65535"),
        (("--max-body", "0"), "expected bytes above 0, or a number with a unit such as 64k, 128M, 1G, got '0'"),
        (("--max-body", "lots"), "expected bytes above 0, or a number with a unit such as 64k, 128M, 1G, got 'lots'"),
        (("--target-nymph-version", "0.1.4"), "expected a namespace and a version, NS=V, got '0.1.4'"),
        (("--grace", "soon"), "expected seconds, or a number with a unit such as 45s, 10m, 2h, 7d, got 'soon'"),
    ],
)
def test_options_that_make_no_sense_are_usage_errors(db: Path, home: Path, options: tuple[str, ...], said: str) -> None:
    ran = cli("server", "start", "--db", db, *options)
    assert ran.code == 2
    assert said in ran.err
    assert not db.exists()


@pytest.mark.parametrize(
    ("text", "bytes"), [("1", 1), ("64k", 65536), ("64KiB", 65536), ("2M", 2 << 20), ("1g", 1 << 30), ("3 mb", None)]
)
def test_sizes(text: str, bytes: int | None) -> None:
    from click import BadParameter

    from dreamlake.lakeshore.cli.server import size

    if bytes is None:
        with pytest.raises(BadParameter):
            size(text)
    else:
        assert size(text) == bytes


def test_a_port_that_is_taken_and_a_host_that_is_none(server: Server, db: Path, home: Path) -> None:
    with Process("server", "start", "--db", db, "--port", server.port) as other:
        ran = other.ends()
    assert ran.code == 1
    assert ran.err == (
        f"lakeshore: cannot listen on 127.0.0.1:{server.port}: Address already in use; a server may be running there "
        "already: give another --port, or 0 for one that is free\n"
    )
    ran = cli("server", "start", "--db", db, "--host", "")
    assert ran.code == 1
    assert ran.err.startswith("lakeshore: cannot listen on '': ")


def test_tokens_that_others_can_read_are_not_served_with(db: Path, home: Path) -> None:
    token(home, "worker")
    (home / "tokens").chmod(0o644)
    with Process("server", "start", "--db", db, "--port", 0, env=environment(LAKESHORE_HOME=str(home))) as process:
        ran = process.ends()
    assert ran.code == 1
    assert ran.err == (
        f"lakeshore: the token file {str(home / 'tokens')!r} can be read or written by others (mode 644): "
        f"close it with `chmod 600 {home / 'tokens'}`\n"
    )


def test_a_file_that_is_no_plane_is_left_alone(tmp_path: Path, home: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary, " * 100)
    with Process("server", "start", "--db", file, "--port", 0, env=environment(LAKESHORE_HOME=str(home))) as process:
        ran = process.ends()
    assert ran.code == 1
    assert re.fullmatch(r"lakeshore: '.*notes\.txt' is not a plane of this package: .*; give another path\n", ran.err)
    assert file.read_text() == "dear diary, " * 100


@pytest.mark.parametrize("command", [("server", "start"), ("token", "list"), ("token", "revoke", "x")], ids=" ".join)
def test_without_its_packages_the_server_says_what_to_install(
    home: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> Any:
        return None if name in ("uvicorn", "httptools") else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    ran = cli(*command)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.endswith(
        "Error: the server needs packages that are not installed (uvicorn, httptools): "
        'pip install "dreamlake-lakeshore[server]"\n'
    )


# --- tokens ---------------------------------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_never_its_hash(home: Path) -> None:
    ran = cli("token", "create", "--name", "me", "--role", "worker", "--namespace", "team")
    assert ran.code == 0
    assert re.fullmatch(r"lks_[0-9A-Za-z_-]{43}\n", ran.out)
    assert ran.err == "the token 'me', worker in namespace 'team'; it is not shown again\n"
    (line,) = (home / "tokens").read_text().splitlines()
    created = json.loads(line)["created"]
    for listed in (cli("token", "list"), cli("token", "list", "--json")):
        assert listed.code == 0
        assert ran.out.strip() not in listed.out + line
        assert json.loads(line)["sha256"] not in listed.out
    assert listed.document == [{"name": "me", "role": "worker", "namespace": "team", "created": created}]
    assert [row.split() for row in cli("token", "list").out.splitlines()] == [
        ["name", "role", "namespace", "created"],
        ["me", "worker", "team", created],
    ]


def test_tokens_of_a_file_that_is_named(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "elsewhere" / "tokens"
    monkeypatch.setenv("LAKESHORE_NAMESPACE", "team")
    token(home, "admin", "--token-file", file)
    assert not home.exists()
    (listed,) = cli("token", "list", "--json", "--token-file", file).document
    assert (listed["name"], listed["namespace"]) == ("the-admin", "team")
    assert cli("token", "revoke", "the-admin", "--token-file", file).out == "the-admin is revoked\n"
    assert cli("token", "list", "--json", "--token-file", file).document == []


def test_a_name_that_is_not_there_is_named_with_those_that_are(home: Path) -> None:
    for there in ("none", "'the-worker'", "'the-admin', 'the-worker'"):
        ran = cli("token", "revoke", "other")
        assert ran.code == 1
        assert set(ran.err.partition("; tokens there: ")[2].strip().split(", ")) == set(there.split(", "))
        assert ran.err.startswith(f"lakeshore: no token is named 'other' in {str(home / 'tokens')!r}; ")
        if there != "'the-admin', 'the-worker'":
            token(home, "worker" if there == "none" else "admin")


def test_a_name_that_is_taken_and_one_that_is_none(home: Path) -> None:
    token(home, "worker", name="me")
    ran = cli("token", "create", "--name", "me", "--role", "worker")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith(f"lakeshore: a token named 'me' is in {str(home / 'tokens')!r} already: revoke it first")
    for options, said in (
        (("--name", "a b", "--role", "worker"), "expected a token's name of 1 to 64 letters, digits and `_ . @ -`"),
        (("--name", "a", "--role", "worker", "--namespace", "a/b"), "expected a namespace of 1 to 200 characters"),
        (("--name", "a", "--role", "root"), "'root' is not one of 'producer', 'worker', 'admin'"),
    ):
        ran = cli("token", "create", *options)
        assert (ran.code, ran.out) == (2, "")
        assert said in ran.err


def test_a_broken_file_is_one_document_too(home: Path) -> None:
    home.mkdir()
    (home / "tokens").write_text("lks_plain\n")
    (home / "tokens").chmod(0o600)
    ran = cli("token", "list", "--json")
    assert ran.code == 1
    assert ran.document["error"]["type"] == "TokenError"
    assert "lks_plain" not in ran.out + ran.err


# --- a server in place of a file ------------------------------------------------------------------------------------


@contextmanager
def remote_worker(server: Server, *options: object, **env: str) -> Iterator[Process]:
    args = ("worker", "start", "--queue", "q", "--url", server.url, *options)
    with Process(*args, env=environment(**env)) as process:
        process.says("pickled functions")
        yield process


def test_a_worker_of_a_server(server: Server) -> None:
    q = dls.SyncQueue("q", dispatch=dls.HttpDispatch(server.url))
    with remote_worker(server) as process:
        first = process.err.splitlines()[0]
        assert f" INFO worker {process.pid} of queue q on {server.url}, root " in first
        assert first.endswith(", pickled functions refused")
        assert q.call(dls.thunk(cli_jobs.echo, 7)) == 7
        id = q.submit(dls.thunk(lambda: 1))
        with pytest.raises(dls.InvocationFailed, match=r"which this worker refuses .* start it with --allow-pickled"):
            q.result(id, timeout=LIMIT)
        process.signal()
        assert process.ends().code == 0
    with remote_worker(server, "--allow-pickled") as process:
        assert process.err.splitlines()[0].endswith(", pickled functions allowed")
        assert q.call(dls.thunk(lambda: 1)) == 1


def test_a_worker_beside_the_server_refuses_what_came_through_it(server: Server, db: Path) -> None:
    q = dls.SyncQueue("q", dispatch=dls.HttpDispatch(server.url))
    with Process("worker", "start", "--queue", "q", "--db", db) as process:
        process.says("pickled functions allowed where submitted on this machine")
        with pytest.raises(dls.InvocationFailed, match=r"which this worker refuses .* start it with --allow-pickled"):
            q.call(dls.thunk(lambda: 1))
        assert q.call(dls.thunk(cli_jobs.echo, 7)) == 7


def test_every_command_works_on_a_server(server: Server, tmp_path: Path) -> None:
    at = ("--url", server.url)
    q = dls.SyncQueue("q", dispatch=dls.HttpDispatch(server.url))
    with remote_worker(server):
        done = q.submit(dls.thunk(cli_jobs.add, 1, b=2))
        assert q.result(done, timeout=LIMIT) == 3
        streamed = q.submit(dls.thunk(cli_jobs.count, 2))
        assert cli("inv", "stream", streamed, *at).out == "0\t{'n': 0}\n1\t{'n': 1}\n"
    waiting = q.submit(dls.thunk(cli_jobs.add, 1))
    assert cli("inv", "result", done, *at).out == "3\n"
    assert "call             cli_jobs.add(1, b=2)\n" in cli("inv", "show", done, *at).out
    assert [row["id"] for row in cli("inv", "list", *at, "--json").document] == [waiting, streamed, done]
    (listed,) = cli("queue", "list", *at, "--json").document
    assert (listed["name"], listed["queued"], listed["succeeded"]) == ("q", 1, 2)
    assert cli("queue", "show", "q", *at, "--json").document["queued"] == 1
    assert cli("inv", "cancel", waiting, *at).out == f"{waiting} ended killed\n"
    assert cli("purge", "--older-than", "0s", *at).out == "3 invocations purged\n"
    ran = cli("inv", "show", done, *at)
    assert (ran.code, ran.err) == (1, f"lakeshore: {dls.InvocationNotFound(done)}\n")


def test_a_claim_without_a_lease_is_released(server: Server) -> None:
    at = ("--url", server.url)
    q = dls.SyncQueue("q", dispatch=dls.HttpDispatch(server.url))
    id = q.submit(dls.thunk(cli_jobs.add, 1))
    ran = cli("inv", "release", id, *at)
    assert (ran.code, ran.err) == (
        1,
        f"lakeshore: invocation {id!r} is queued: nothing holds it, so there is nothing to release\n",
    )
    body = encode({"worker_id": "old", "queue": "q", "timeout_s": 0})
    answer = post(f"{server.url}/v1/daemon/poll", content=body, headers=MSGPACK)
    assert [command["body"]["invocation_id"] for command in decode(answer.content, "x")["commands"]] == [id]
    assert cli("inv", "release", id, *at).out == f"{id} is queued again\n"
    ack = encode({"invocation_id": id, "state": "succeeded", "worker_id": "old", "result_blob": b""})
    assert post(f"{server.url}/v1/daemon/ack", content=ack, headers=MSGPACK).status_code == 409


def test_where_the_token_comes_from(
    server: Server, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, at = token(home, "producer"), ("--url", server.url)
    file = tmp_path / "client-token"
    file.write_text(f"{made}\n")
    file.chmod(0o600)
    wait_until_sync(
        lambda: get(f"{server.url}/v1/producer/queues").status_code == 401, LIMIT, "the server to ask for a token"
    )
    for command, code in ((("queue", "list"), 4), (("queue", "list", "--token-file", file), 0)):
        ran = cli(*command, *at)
        assert ran.code == code
    assert ran.err == ""
    file.chmod(0o644)
    ran = cli("queue", "list", *at, "--token-file", file)
    assert (ran.code, ran.err) == (
        0,
        f"lakeshore: other users can read the token in {str(file)!r}: run `chmod 600 {file}`\n",
    )
    monkeypatch.setenv("LAKESHORE_CLIENT_TOKEN", made)
    assert cli("queue", "list", *at).code == 0
    monkeypatch.setenv("LAKESHORE_CLIENT_TOKEN", "lks_wrong")
    ran = cli("queue", "list", *at, "--json")
    assert ran.code == 4
    assert ran.document["error"]["type"] == "NotAuthorized"
    assert cli("queue", "list", *at, "--token-file", file).code == 0  # flags win
    with remote_worker(server, "--token-file", file) as process:
        ran = process.ends()
        assert ran.code == 4  # a producer may not claim
        assert "expected a token of the role worker, got one of the role producer" in process.err
        assert made not in process.err
    assert made not in server.err


def test_a_token_of_one_namespace_is_of_that_namespace(db: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = token(home, "worker", "--namespace", "team")
    monkeypatch.setenv("LAKESHORE_CLIENT_TOKEN", made)
    dls.SyncQueue("ours", dispatch=dls.Dispatch(db, ns="team")).submit(1)
    dls.SyncQueue("theirs", dispatch=dls.Dispatch(db)).submit(1)
    with Server(db, home=home) as server:
        at = ("--url", server.url)
        for options in ((), ("--namespace", "team")):
            (listed,) = cli("queue", "list", *at, *options, "--json").document
            assert listed["name"] == "ours"
        ran = cli("queue", "list", *at, "--namespace", "default")
        assert ran.code == 4
        assert "expected the namespace of the token, 'team', got 'default'" in ran.err
        monkeypatch.setenv("LAKESHORE_NAMESPACE", "default")
        assert cli("queue", "list", *at).code == 4


def test_a_server_that_does_not_answer(home: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    ran = cli("queue", "list", "--url", f"http://127.0.0.1:{port}")
    assert (ran.code, ran.out) == (5, "")
    assert ran.err.startswith("lakeshore: ")
    assert ran.err.count("\n") == 1


def test_a_file_or_a_server_never_both(db: Path, home: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = cli("queue", "list", "--db", db, "--url", server.url)
    assert ran.code == 2
    assert ran.err.endswith("Error: --db names a file and --url a server: give one of the two\n")
    ran = cli("queue", "list", "--db", db, "--token-file", db)
    assert ran.code == 2
    assert ran.err.endswith("Error: --token-file is for a server: name it with --url or LAKESHORE_URL\n")
    monkeypatch.setenv("LAKESHORE_URL", "http://127.0.0.1:1")
    dls.SyncQueue("q", dispatch=dls.Dispatch(db)).submit(1)
    assert cli("queue", "list", "--db", db, "--json").document[0]["name"] == "q"
    assert cli("queue", "list", "--url", server.url, "--json").document[0]["name"] == "q"
    ran = cli("queue", "list", "--url", "http://user:secret@127.0.0.1:1")
    assert ran.code == 2
    assert "without a user or a query in it, got 'http://127.0.0.1': give a token with token=" in ran.err
    assert "secret" not in ran.err


@pytest.mark.parametrize("text", ["", "two words\n", '{"name": "me", "sha256": "00"}\n', "\xd8", "t\xf6ken"])
def test_a_token_file_that_holds_no_one_token(home: Path, tmp_path: Path, text: str) -> None:
    file = tmp_path / "client-token"
    file.write_bytes(text.encode("latin-1"))
    ran = cli("queue", "list", "--url", "http://127.0.0.1:1", "--token-file", file)
    assert ran.code == 2
    assert ran.err.endswith(
        f"Error: expected one plain token in {str(file)!r}, as `lakeshore token create` prints it, got something else; "
        "the file of hashes that the server reads does not work here\n"
    )
    ran = cli("queue", "list", "--url", "http://127.0.0.1:1", "--token-file", tmp_path / "none")
    assert ran.code == 2
    assert ran.err.endswith(f"Error: cannot read the token in {str(tmp_path / 'none')!r}: No such file or directory\n")
