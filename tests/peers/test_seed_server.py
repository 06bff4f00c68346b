"""The stranger's server that our client falls back for speaks the protocol's six routes, and fails when told to."""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack
import pytest
from helpers import wait_until, wait_until_sync
from peer_kit import start_seed_server
from seed_server import SeedServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from peer_kit import Processes

FRAMES = [msgpack.packb([0, seq, f"item {seq}", None]) for seq in range(3)] + [msgpack.packb([3, 3, None, None])]


class Caller:
    """Posts msgpack to one server; every test has invocations of its own."""

    def __init__(self, url: str, **options: Any) -> None:
        self.client = httpx.Client(base_url=url, timeout=20.0, **options)
        self.made = 0

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.client.post(path, content=msgpack.packb(fields))

    def ask(self, path: str, **fields: Any) -> Any:
        answer = self.post(path, **fields)
        assert answer.status_code == 200, (answer.status_code, answer.content)
        return msgpack.unpackb(answer.content)

    def submit(self, id: str, **fields: Any) -> Any:
        return self.ask("/v1/producer/submit", **{"invocation_id": id, "args_blob": b"envelope", **fields})

    def faults(self, **fields: Any) -> None:
        self.ask("/-/faults", **fields)

    def frames(self, id: str, since: int = -1) -> bytes:
        return self.client.get(f"/v1/producer/invocations/{id}/result/stream?since={since}").content


@pytest.fixture(scope="module")
def url(started: Processes) -> str:
    return start_seed_server(started)


@pytest.fixture
def caller(url: str) -> Iterator[Caller]:
    caller = Caller(url)
    with caller.client:
        yield caller
        caller.faults()


def test_a_submit_is_claimed_acked_and_awaited(caller: Caller) -> None:
    answer = caller.submit("life", queue="life", run_config={"priority": 1.5, "key": None, "prefix": "scenes/7"})
    assert answer == {"invocation_id": "life", "queue": "life"}
    assert caller.ask("/v1/producer/await", invocation_id="life", timeout_s=0) == {"state": "pending"}
    (command,) = caller.ask("/v1/daemon/poll", worker_id="w", queue="life", timeout_s=0)["commands"]
    assert command["kind"] == "run"
    assert command["body"] == {
        "invocation_id": "life",
        "function": None,
        "args_blob": b"envelope",
        "run_config": {"priority": 1.5, "key": None, "prefix": "scenes/7", "queue": "life"},
        "prefix": "scenes/7",
    }
    assert caller.ask("/v1/daemon/poll", worker_id="w", queue="life", timeout_s=0) == {"commands": []}
    caller.ask("/v1/daemon/ack", invocation_id="life", state="succeeded", result_blob=b"value")
    outcome = caller.ask("/v1/producer/await", invocation_id="life")
    assert outcome == {"state": "succeeded", "result_blob": b"value", "error": None}


def test_a_poll_hands_out_one_command_of_its_one_queue(caller: Caller) -> None:
    for name, priority in (("first", 0), ("second", 0), ("urgent", 2.9)):
        caller.submit(name, queue="one", run_config={"priority": priority})
    caller.submit("elsewhere", queue="another")
    taken = []
    while commands := caller.ask(
        "/v1/daemon/poll", worker_id="w", queue="one", queues=["one", "another"], max_commands=9, lease_s=1, timeout_s=0
    )["commands"]:
        (command,) = commands
        taken.append(command["body"]["invocation_id"])
        assert "attempt" not in command["body"]
    assert taken == ["urgent", "first", "second"]


def test_a_key_names_one_invocation_of_its_queue(caller: Caller) -> None:
    assert caller.submit("k1", queue="keys", run_config={"key": "k"})["invocation_id"] == "k1"
    assert caller.submit("k2", queue="keys", run_config={"key": "k"})["invocation_id"] == "k1"
    assert caller.submit("k3", queue="other keys", run_config={"key": "k"})["invocation_id"] == "k3"


def test_a_held_poll_and_a_held_await_are_answered_by_what_they_wait_for(caller: Caller, url: str) -> None:
    got: dict[str, Any] = {}

    def waiting(name: str, path: str, **fields: Any) -> threading.Thread:
        def ask() -> None:
            with httpx.Client(base_url=url, timeout=20.0) as client:
                got[name] = msgpack.unpackb(client.post(path, content=msgpack.packb(fields)).content)

        thread = threading.Thread(target=ask)
        thread.start()
        return thread

    def seen(path: str) -> Any:
        return msgpack.unpackb(caller.client.get("/-/seen").content).get(f"POST {path}", 0)

    before = seen("/v1/daemon/poll")
    poll = waiting("poll", "/v1/daemon/poll", worker_id="w", queue="held", timeout_s=15)
    wait_until_sync(lambda: seen("/v1/daemon/poll") > before, description="the poll's arrival")
    caller.submit("held", queue="held")
    poll.join()
    assert got["poll"]["commands"][0]["body"]["invocation_id"] == "held"

    before = seen("/v1/producer/await")
    result = waiting("await", "/v1/producer/await", invocation_id="held", timeout_s=15)
    wait_until_sync(lambda: seen("/v1/producer/await") > before, description="the await's arrival")
    caller.ask("/v1/daemon/ack", invocation_id="held", state="failed", error={"type": "ValueError", "message": "no"})
    result.join()
    assert got["await"] == {"state": "failed", "result_blob": b"", "error": {"type": "ValueError", "message": "no"}}


def test_a_poll_whose_client_went_away_takes_nothing(caller: Caller, url: str) -> None:
    with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=url, timeout=0.3) as client:
        client.post("/v1/daemon/poll", content=msgpack.packb({"queue": "gone", "timeout_s": 60}))

    def under_way() -> dict[str, int]:
        return dict(msgpack.unpackb(caller.client.get("/-/under-way").content))

    wait_until_sync(lambda: under_way() == {}, description="the end of the poll")
    caller.submit("gone", queue="gone")
    assert len(caller.ask("/v1/daemon/poll", worker_id="w", queue="gone", timeout_s=5)["commands"]) == 1


def test_no_ack_is_fenced_and_the_last_one_wins(caller: Caller) -> None:
    caller.submit("twice", queue="acks")
    done: dict[str, Any] = {"invocation_id": "twice", "state": "succeeded"}
    caller.ask("/v1/daemon/ack", **done, worker_id="nobody", attempt=7, result_blob=b"1")
    caller.ask("/v1/daemon/ack", **done, result_blob=b"2")
    assert caller.ask("/v1/producer/await", invocation_id="twice")["result_blob"] == b"2"


def test_frames_are_replayed_followed_and_closed(caller: Caller, url: str) -> None:
    caller.submit("frames", queue="frames")
    chunk = functools.partial(caller.ask, "/v1/daemon/result-chunk", invocation_id="frames")
    assert chunk(seq=0, bytes=FRAMES[0]) == {"ok": True, "seq": 0}
    assert chunk(seq=1, bytes=FRAMES[1]) == {"ok": True, "seq": 1}
    assert chunk(seq=1, bytes=b"other") == {"ok": True, "seq": 1, "duplicate": True}
    with caller.client.stream("GET", "/v1/producer/invocations/frames/result/stream?since=-1") as stream:
        chunks = stream.iter_raw()
        assert next(chunks) == b"".join(FRAMES[:2])
        with httpx.Client(base_url=url) as other:
            fields = {"invocation_id": "frames", "seq": 2, "bytes": FRAMES[3], "final": True}
            other.post("/v1/daemon/result-chunk", content=msgpack.packb(fields))
        assert b"".join(chunks) == FRAMES[3]
    assert caller.frames("frames", since=0) == FRAMES[1] + FRAMES[3]


def test_a_stream_ends_with_its_invocation(caller: Caller) -> None:
    caller.submit("silent", queue="silent")
    caller.ask("/v1/daemon/ack", invocation_id="silent", state="killed")
    assert caller.frames("silent") == b""


@pytest.mark.parametrize(
    "path",
    [
        "/v1/producer/submit-many",
        "/v1/producer/await-many",
        "/v1/producer/cancel",
        "/v1/daemon/ack-many",
        "/v1/daemon/result-chunks",
        "/v1/daemon/heartbeat",
        "/v1/daemon/release",
        "/v1/daemon/retry",
        "/v1/admin/reap",
        "/v1/namespaces/default/producer/submit",
        "/nothing",
    ],
)
def test_other_routes_are_not_there(caller: Caller, path: str) -> None:
    answer = caller.post(path, items=[])
    assert answer.status_code == 404
    assert b"InvocationNotFound" not in answer.content
    assert caller.client.post(path, json={}).status_code == 404
    assert caller.client.get("/v1/producer/invocations/x").status_code == 404


def test_an_unknown_invocation_is_named_or_not(caller: Caller) -> None:
    answer = caller.post("/v1/producer/await", invocation_id="unknown")
    assert answer.status_code == 404
    assert msgpack.unpackb(answer.content)["error"]["type"] == "InvocationNotFound"
    caller.faults(plain_unknown=True)
    assert caller.post("/v1/producer/await", invocation_id="unknown").text == "Not Found"


def test_it_is_unavailable_for_a_while(caller: Caller) -> None:
    caller.faults(unavailable_s=60)
    assert caller.post("/v1/daemon/poll", queue="q", timeout_s=0).status_code == 503
    caller.faults()
    assert caller.post("/v1/daemon/poll", queue="q", timeout_s=0).status_code == 200


def test_an_answer_is_lost_but_what_was_asked_is_done(caller: Caller) -> None:
    caller.faults(lose_answers={"submit": 1})
    with pytest.raises(httpx.RemoteProtocolError):
        caller.submit("lost", queue="lost")
    assert caller.submit("lost", queue="lost")["invocation_id"] == "lost"
    assert len(caller.ask("/v1/daemon/poll", queue="lost", timeout_s=0)["commands"]) == 1


def test_streams_are_cut_with_and_without_a_proper_end(caller: Caller) -> None:
    caller.submit("cut", queue="cut")
    for seq, frame in enumerate(FRAMES):
        caller.ask("/v1/daemon/result-chunk", invocation_id="cut", seq=seq, bytes=frame, final=seq == 3)
    whole = b"".join(FRAMES)
    caller.faults(drop_streams=[5], end_streams=[7])
    with pytest.raises(httpx.RemoteProtocolError):
        caller.frames("cut")
    assert caller.frames("cut") == whole[:7]
    assert caller.frames("cut") == whole


def test_a_token_and_the_namespaces_are_there_when_asked_for(started: Processes) -> None:
    url = start_seed_server(started, "--namespaced", "--token", "secret")
    with httpx.Client(base_url=url) as stranger:
        assert stranger.post("/v1/producer/submit").status_code == 401
    caller = Caller(url, headers={"authorization": "Bearer secret"})
    with caller.client:
        caller.ask("/v1/namespaces/a/producer/submit", invocation_id="i", args_blob=b"")
        assert caller.ask("/v1/daemon/poll", timeout_s=0) == {"commands": []}
        assert len(caller.ask("/v1/namespaces/a/daemon/poll", timeout_s=0)["commands"]) == 1


async def test_in_process_it_runs_on_either_event_loop() -> None:
    app = SeedServer()
    answers: dict[str, Any] = {}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://seed") as client:

        async def ask(path: str, **fields: Any) -> None:
            answer = await client.post(path, content=msgpack.packb(fields))
            answers[path] = msgpack.unpackb(answer.content)

        async with anyio.create_task_group() as group:
            group.start_soon(lambda: ask("/v1/daemon/poll", queue="q", timeout_s=15))
            await wait_until(lambda: app.seen["POST /v1/daemon/poll"], description="the poll's arrival")
            await ask("/v1/producer/submit", invocation_id="i", args_blob=b"", queue="q")
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: ask("/v1/producer/await", invocation_id="i", timeout_s=15))
            await wait_until(lambda: app.seen["POST /v1/producer/await"], description="the await's arrival")
            await ask("/v1/daemon/ack", invocation_id="i", state="killed")
    assert len(answers["/v1/daemon/poll"]["commands"]) == 1
    assert answers["/v1/producer/await"]["state"] == "killed"
    assert app.seen.total() == 4
