"""What the server does for nobody: pages of other origins, strangers to its tokens, those who read its logs."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import raw_kit
from helpers import each_row
from raw_kit import (
    ACK,
    ACK_MANY,
    AWAIT,
    CANCEL,
    CHUNK,
    CHUNKS,
    HEARTBEAT,
    INVOCATIONS,
    POLL,
    PURGE,
    QUEUES,
    REAP,
    RELEASE,
    RETRY,
    SOCKET,
    SUBMIT,
    SUBMIT_MANY,
    pack,
    server_process,
    serving_here,
    stream_of,
)

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.server.tokens import TokenFile, create_token

if TYPE_CHECKING:
    from pathlib import Path

    from raw_kit import Api

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue


# --- R112: requests from pages in browsers ---------------------------------------------------------------------------

ORIGINS = [
    "https://evil.example",
    "null",
    "http://127.0.0.1:8750",
    "http://localhost",
    "https://127.0.0.1.evil.example",
    "",
]
HOSTS = [
    "evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example:8750", "evil.example@127.0.0.1",
    "127.0.0.1@evil.example", "localhost,evil.example", "[::1].evil.example", "0.0.0.0", "127.0.0.2", "",
]  # fmt: skip
FORMS = [
    "application/x-www-form-urlencoded",
    "multipart/form-data",
    "text/plain",
    "text/plain;application/x-msgpack",
    "",
]


@pytest.fixture
async def victim(api: Api, queue: str) -> str:
    """An invocation that runs."""
    return await api.running(queue, lease_s=600)


def effects(id: str, queue: str) -> dict[str, dict[str, Any]]:
    """Requests that change something."""
    fence = {"invocation_id": id, "worker_id": "w", "attempt": 1}
    return {
        SUBMIT: {"invocation_id": new_id(), "queue": queue, "args_blob": b"evil"},
        SUBMIT_MANY: {"items": [{"invocation_id": new_id(), "queue": queue, "args_blob": b"evil"}]},
        CANCEL: {"invocation_id": id},
        ACK: {**fence, "state": "succeeded"},
        ACK_MANY: {"items": [{**fence, "state": "succeeded"}]},
        CHUNK: {**fence, "seq": 0, "bytes": b"evil"},
        CHUNKS: {"items": [{**fence, "seq": 0, "bytes": b"evil"}]},
        RELEASE: {"worker_id": "w", "claims": [[id, 1]]},
        RETRY: {"worker_id": "w", "claims": [[id, 1]]},
        HEARTBEAT: {"worker_id": "w", "claims": [[id, 1]], "lease_s": 1e6},
        POLL: {"worker_id": "w", "queue": queue, "timeout_s": 0},
        REAP: {"dead": [], "alive": []},
        PURGE: {"older_than_s": 0},
    }


async def unchanged(api: Api, id: str, queue: str, row: dict[str, Any]) -> None:
    assert await api.row(id) == row
    assert (await api.get(QUEUES, queue=queue))["queues"] == [[queue, "running", 1]]


@each_row("origin", ORIGINS)
async def test_R112_a_request_with_an_origin_is_refused_and_changes_nothing(
    api: Api, queue: str, victim: str, origin: str
) -> None:
    row = await api.row(victim)
    for path, fields in effects(victim, queue).items():
        answer = await api.ask(path, fields, headers={"origin": origin})
        assert answer.error == (403, "Refused"), path
        assert "access-control-allow-origin" not in answer.headers
    for path in (INVOCATIONS, f"{INVOCATIONS}/{victim}", QUEUES, stream_of(victim)):
        answer = await api.send("GET", path, headers={"origin": origin})
        assert answer.error == (403, "Refused"), path
    await unchanged(api, victim, queue, row)


@each_row("host", HOSTS)
async def test_R112_a_request_to_a_foreign_host_is_refused_and_changes_nothing(
    api: Api, queue: str, victim: str, host: str
) -> None:
    """DNS rebinding: the page's own name leads to this machine, and then no origin is foreign."""
    row = await api.row(victim)
    for path, fields in effects(victim, queue).items():
        answer = await api.ask(path, fields, headers={"host": host})
        assert answer.status in (400, 403), (path, answer)
        assert answer.status == 400 or answer.error == (403, "Refused")
    for path in (INVOCATIONS, f"{INVOCATIONS}/{victim}", QUEUES, stream_of(victim)):
        assert (await api.send("GET", path, headers={"host": host})).status in (400, 403), path
    await unchanged(api, victim, queue, row)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:1", "[::1]:8750", "127.0.0.1:65535"])
async def test_the_names_of_this_machine_are_taken(api: Api, queue: str, host: str) -> None:
    answer = await api.ask(
        SUBMIT, {"invocation_id": new_id(), "queue": queue, "args_blob": b"x"}, headers={"host": host}
    )
    assert answer.status == 200, answer


@pytest.mark.parametrize("kind", FORMS)
async def test_R112_a_form_is_refused_and_changes_nothing(api: Api, queue: str, victim: str, kind: str) -> None:
    """What a page may send without asking first."""
    row = await api.row(victim)
    for path, fields in effects(victim, queue).items():
        answer = await api.ask(path, fields, headers={"content-type": kind})
        assert answer.error[0] == 415, path
    await unchanged(api, victim, queue, row)


async def test_R112_nothing_is_allowed_to_a_page_that_asks_first(api: Api) -> None:
    headers = {
        "origin": "https://evil.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "content-type",
    }
    for path in [*effects("a", "q"), QUEUES]:
        answer = await api.send("OPTIONS", path, b"", headers)
        assert answer.status >= 400
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_R112_no_request_that_only_reads_changes_anything(api: Api, queue: str, victim: str) -> None:
    row = await api.row(victim)
    for path, fields in effects(victim, queue).items():
        for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):
            assert (await api.client.request(method, path, content=pack(fields))).status_code == 405, (method, path)
    await unchanged(api, victim, queue, row)


async def test_names_that_the_server_was_told_are_taken_and_others_are_not(tmp_path: Path) -> None:
    async with serving_here(dls.Dispatch(tmp_path / "plane.db"), allowed_hosts=("plane.example",)) as api:
        for host, status in (("plane.example", 200), ("PLANE.example:80", 200), ("xplane.example", 403), ("evil", 403)):
            assert (await api.send("GET", QUEUES, headers={"host": host})).status == status, host


@SOCKET
async def test_R111_a_server_without_tokens_does_not_listen_beyond_this_machine(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::"):
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "dreamlake.lakeshore", "server", "start", "--host", host, "--port", "0"),
                *("--db", str(tmp_path / "plane.db"), "--token-file", str(tmp_path / "none")),
            ],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ran.returncode == 2, ran
        assert "--insecure" in ran.stderr
        assert "token create" in ran.stderr


async def test_R117_there_are_no_pages(api: Api) -> None:
    for path in ("/", "/index.html", "/docs", "/redoc", "/openapi.json", "/static/x", "/admin", "/favicon.ico"):
        answer = await api.send("GET", path, headers={"accept": "text/html"})
        assert answer.error == (404, "NoSuchRoute")


async def test_R118_no_address_in_a_message_is_ever_followed(api: Api, queue: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as bait:
        url = f"http://127.0.0.1:{bait.getsockname()[1]}/secret"
        extra: dict[str, Any] = {
            "result_ref": url,
            "url": url,
            "callback": url,
            "webhook": url,
            "accept_result_ref": True,
        }
        id = await api.submit(queue, run_config={"image": url, **extra}, code_context={"remote": url, **extra}, **extra)
        await api.claim(queue, **extra)
        await api.do(CHUNK, {"invocation_id": id, "seq": 0, "bytes": url.encode(), **extra})
        await api.do(ACK, {"invocation_id": id, "state": "succeeded", "error": {"type": url, "message": url}, **extra})
        await api.do(AWAIT, {"invocation_id": id, "timeout_s": 1, **extra})
        bait.settimeout(0.3)
        with pytest.raises(TimeoutError):
            bait.accept()


# --- secrets ---------------------------------------------------------------------------------------------------------

OURS_IS_NOT = ("httpx", "httpcore", "hypothesis", "faker")  # the tests' own client logs what it is asked for


async def test_no_token_key_or_value_is_in_any_log_error_or_repr(
    tmp_path: Path, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tokens"
    token = create_token(path, "name", "admin", "default")
    other = create_token(path, "other", "producer", "elsewhere")
    secrets = {name: f"SENTINEL-{name}-{new_id()}" for name in ("key", "args", "result", "frame", "wrong", "bearer")}
    answers: list[raw_kit.Answer] = []
    plane, tokens = dls.Dispatch(tmp_path / "plane.db"), TokenFile(path)
    with caplog.at_level(logging.DEBUG):
        async with serving_here(plane, tokens=tokens) as bare:
            api, frame = bare.with_token(token), secrets["frame"].encode()
            id = await api.submit(queue, secrets["args"].encode(), run_config={"key": secrets["key"]})
            again = await api.submit(queue, secrets["args"].encode(), run_config={"key": secrets["key"]})
            assert again == id
            await api.get(INVOCATIONS, queue=queue, key=secrets["key"])
            await api.claim(queue, lease_s=60)
            fence = {"invocation_id": id, "worker_id": "w", "attempt": 1}
            await api.do(CHUNK, {**fence, "seq": 0, "bytes": frame})
            await api.do(ACK, {**fence, "state": "succeeded", "result_blob": secrets["result"].encode()})
            await api.outcome(id, 1)
            await api.frames(id)
            wrong = secrets["wrong"]
            answers += [
                await bare.with_token(secrets["bearer"]).ask(SUBMIT, {"args_blob": wrong}),
                await bare.ask(SUBMIT, {"args_blob": wrong.encode()}),
                await bare.with_token(other).within("default").ask(SUBMIT, {"args_blob": wrong.encode()}),
                await api.ask(SUBMIT, {"invocation_id": id, "args_blob": wrong}),
                await api.ask(SUBMIT, {"invocation_id": 5, "args_blob": wrong.encode(), "run_config": {"key": wrong}}),
                await api.ask(SUBMIT, {"invocation_id": id, "args_blob": b"", "run_config": {"key": [wrong]}}),
                await api.ask(SUBMIT, {"invocation_id": id, "args_blob": b"", "run_config": {"key": wrong.encode()}}),
                await api.ask(ACK, {**fence, "attempt": 2, "state": "failed", "result_blob": wrong.encode()}),
                await api.ask(ACK, {**fence, "state": "failed", "result_blob": wrong}),
                await api.ask(CHUNK, {**fence, "attempt": 2, "seq": 9, "bytes": wrong.encode()}),
                await api.ask(CHUNK, {**fence, "seq": 1, "bytes": wrong.encode()}),
                await api.ask(CHUNK, {**fence, "seq": 1, "frames": [wrong]}),
                await api.send("POST", SUBMIT, b"\xc1" + wrong.encode()),
                await api.send("POST", SUBMIT, wrong.encode(), {"content-type": "text/plain"}),
                await api.send("GET", f"{INVOCATIONS}?limit=x&key={wrong}"),
                await api.send("GET", f"/v1/none?key={wrong}"),
                await api.ask("/v1/none", {"args_blob": wrong}),
            ]
            metrics = await api.send("GET", "/metrics")
        reprs = f"{plane!r} {plane} {tokens!r} {tokens} {tokens.__dict__ if hasattr(tokens, '__dict__') else ''}"
    assert [answer.status for answer in answers if answer.status < 400] == []
    said = {
        "log": "\n".join(
            f"{record.name}: {record.getMessage()} {record.exc_text or ''}"
            for record in caplog.records
            if not record.name.startswith(OURS_IS_NOT)
        ),
        "errors": "\n".join(f"{answer.body!r} {answer.headers!r}" for answer in answers),
        "metrics": repr(metrics.body),
        "reprs": reprs,
    }
    assert "/v1/producer/submit" in said["log"] or "submit" in said["log"], "there is an access log"
    for place, text in said.items():
        for secret in (*secrets.values(), token, other):
            assert secret not in text, (place, secret, text[max(0, text.find(secret) - 300) :][:700])


@SOCKET
async def test_no_token_key_or_value_is_in_what_a_server_process_writes(tmp_path: Path, queue: str) -> None:
    path = tmp_path / "tokens"
    token = create_token(path, "name", "admin", "default")
    value, key, wrong = (f"SENTINEL-{name}-{new_id()}" for name in ("value", "key", "wrong"))
    with server_process(tmp_path / "plane.db", tokens=path) as served:
        async with served.api(token) as api:
            id = await api.submit(queue, value.encode(), run_config={"key": key})
            await api.get(INVOCATIONS, queue=queue, key=key)
            await api.claim(queue)
            await api.do(CHUNK, {"invocation_id": id, "seq": 0, "bytes": value.encode()})
            await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": value.encode()})
            await api.frames(id, later=value)
            assert (await api.with_token(wrong).ask(SUBMIT, {"args_blob": value})).status == 401
            assert (await api.ask(SUBMIT, {"args_blob": value})).status == 400
        assert served.stop() == 0
        for secret in (token, value, key, wrong):
            assert secret not in served.err
        assert "POST" in served.err, "there is an access log"
        assert queue not in served.err, "nor queues"
        assert id not in served.err, "nor ids"


@SOCKET
async def test_nobody_can_write_lines_of_their_own_into_the_log(tmp_path: Path) -> None:
    with server_process(tmp_path / "plane.db") as served:
        async with served.api() as api:
            for path in ("/v1/x%0aFORGED", "/v1/namespaces/a%0aFORGED/producer/queues", f"{INVOCATIONS}/a%0d%0aFORGED"):
                assert (await api.send("GET", path)).status in (400, 404)
                assert (await api.send("POST", path, pack({"queue": "a\nFORGED"}))).status in (400, 404, 405)
            await api.send("GET", QUEUES, headers={"x-request-id": "a%0aFORGED", "user-agent": "FORGED"})
            await api.submit("a\nFORGED")
            await api.ask(POLL, {"worker_id": "w\nFORGED", "queue": "a\nFORGED", "timeout_s": 0})
            assert (await api.client.request("FORGED", QUEUES)).status_code in (400, 405)
        assert served.stop() == 0
        assert not [line for line in served.err.splitlines() if line.lstrip().startswith("FORGED")]
