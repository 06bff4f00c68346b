"""Clients that leave, many that come at once, and a server that ends: no invocation is lost, none runs twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import textwrap
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest
import raw_kit
from anyio.lowlevel import checkpoint
from helpers import wait_until
from raw_kit import (
    ACK,
    CHUNK,
    HEARTBEAT,
    PATIENCE,
    POLL,
    SOCKET,
    SUBMIT,
    TYPE,
    Wire,
    head,
    meanwhile,
    pack,
    server_process,
    serving_here,
    still_serves,
)

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.server.limits import Limits

if TYPE_CHECKING:
    from pathlib import Path

    from raw_kit import Api, Server

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning"),  # the client's, left early under trio
]
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue


# --- long polls whose clients leave ----------------------------------------------------------------------------------


async def test_a_client_that_leaves_a_long_poll_swallows_no_job(api: Api, queue: str) -> None:
    """A poll without `poll_id` and without a lease, left at one moment after the other; the job comes after that."""
    for step in range(60):
        with anyio.move_on_after(0.0004 * step):
            await api.poll(queue, "leaver", timeout_s=60)
        id = await api.submit(queue)
        (body,) = await api.poll(queue, "stayer", timeout_s=PATIENCE)
        assert body["invocation_id"] == id, step
        await api.do(ACK, {"invocation_id": id, "state": "succeeded", "worker_id": "stayer"})


@pytest.mark.parametrize("lease", [None, 600])
async def test_a_claim_that_is_under_way_when_its_client_leaves_goes_back_at_once(
    tmp_path: Path, queue: str, lease: float | None
) -> None:
    """The client leaves after every number of the loop's steps; unless the answer was out by then, the job is free."""
    async with serving_here(dls.Dispatch(tmp_path / "plane.db")) as api:
        transport: Any = api.client._transport
        attempts = given_back = 0
        for steps in range(0, 160, 2):
            id = await api.submit(queue)
            transport.latest = None
            async with anyio.create_task_group() as group:
                group.start_soon(api.poll, queue, "leaver")
                for _ in range(steps):
                    await checkpoint()
                group.cancel_scope.cancel()
            exchange = transport.latest
            if exchange is not None:
                with anyio.fail_after(PATIENCE):
                    await exchange.over.wait()
            if exchange is not None and exchange.delivered:
                await api.do(ACK, {"invocation_id": id, "worker_id": "leaver", "attempt": 1, "state": "killed"})
                continue
            (body,) = await api.poll(queue, "stayer", timeout_s=PATIENCE, lease_s=lease)
            assert body["invocation_id"] == id, steps
            given_back += body["attempt"] - 1
            attempts += 1
            fence = {"worker_id": "stayer", "attempt": body["attempt"]}
            await api.do(ACK, {"invocation_id": id, "state": "succeeded", **fence})
        assert attempts > 0


@SOCKET
async def test_a_connection_that_is_cut_in_a_long_poll_swallows_no_job(server: Server, queue: str) -> None:
    """By a close, by a reset, and by a half-close, before the job comes."""
    body = pack({"worker_id": "leaver", "queue": queue, "timeout_s": 60})
    request = head(TYPE, f"Content-Length: {len(body)}", path=POLL) + body
    async with server.api() as api:
        for step in range(45):
            with Wire(server.port) as wire:
                wire.send(request[: len(request) - (step == 0)])
                await anyio.sleep(0.0005 * (step % 15))
                if step % 3 == 1:
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                elif step % 3 == 2:
                    wire.socket.shutdown(socket.SHUT_WR)
            id = await api.submit(queue)
            (found,) = await api.poll(queue, "stayer", timeout_s=PATIENCE)
            assert found["invocation_id"] == id, step
            await api.do(ACK, {"invocation_id": id, "state": "succeeded", "worker_id": "stayer"})


@SOCKET
async def test_a_job_that_is_there_when_its_client_leaves_is_free_unless_it_was_answered(
    server: Server, queue: str
) -> None:
    """The poll and the end of its connection arrive together, mostly; what the server made of it is in its log."""
    left = 0
    async with server.api() as api:
        for step in range(30):
            id, request_id = await api.submit(queue), new_id()
            body = pack({"worker_id": "leaver", "queue": queue, "timeout_s": 60})
            with Wire(server.port) as wire:
                if step % 2:
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                headers = TYPE, f"Content-Length: {len(body)}", f"X-Request-Id: {request_id}"
                if step % 3:  # else the answer may be quicker than the end
                    os.kill(server.pid, signal.SIGSTOP)
                try:
                    wire.send(head(*headers, path=POLL) + body)
                    wire.socket.close()
                finally:
                    os.kill(server.pid, signal.SIGCONT)
            line = await wait_until(partial(logged, server, request_id), PATIENCE, "its line in the log")
            fence = {"worker_id": "leaver", "attempt": 1}
            if " 200 " not in line:
                left += 1
                (found,) = await api.poll(queue, "stayer", timeout_s=PATIENCE)
                assert found["invocation_id"] == id, step
                fence = {"worker_id": "stayer", "attempt": found["attempt"]}
            await api.do(ACK, {"invocation_id": id, "state": "succeeded", **fence})
    assert left >= 5


def logged(server: Server, request_id: str) -> str:
    return next((line for line in server.err.splitlines() if request_id in line), "")


async def test_a_job_for_a_poll_with_an_id_whose_client_left_waits_for_its_repeat(api: Api, queue: str) -> None:
    poll = {"poll_id": new_id(), "lease_s": 600, "timeout_s": 60}
    id = await api.submit(queue)
    with anyio.move_on_after(0.002):
        await api.poll(queue, "w", **poll)
    (body,) = await api.poll(queue, "w", **poll)
    assert (body["invocation_id"], body["attempt"]) == (id, 1)


async def test_R92_200_long_polls_that_are_cancelled_leave_the_server_usable(api: Api, queue: str) -> None:
    rng = random.Random(92)
    id = await api.submit("stream-" + queue)

    async def leave(number: int) -> None:
        with anyio.move_on_after(rng.uniform(0, 0.05)):
            match number % 4:
                case 0:
                    await api.poll(queue, f"w{number}", timeout_s=60)
                case 1:
                    await api.poll("kept-" + queue, f"w{number}", timeout_s=60, poll_id=new_id(), lease_s=60)
                case 2:
                    await api.outcome(id, 60)
                case _:
                    await api.frames(id)

    for batch in range(4):
        async with anyio.create_task_group() as group:
            for number in range(50):
                group.start_soon(leave, batch * 50 + number)
    job = await api.submit(queue)
    (body,) = await api.poll(queue, "stayer", timeout_s=PATIENCE)
    assert body["invocation_id"] == job
    await still_serves(api)


async def test_held_requests_beyond_the_limit_are_refused_and_all_others_go_on(tmp_path: Path, queue: str) -> None:
    limits = Limits(polls=3)
    async with serving_here(dls.Dispatch(tmp_path / "plane.db"), limits=limits) as api:
        async with meanwhile(*(api.poll(queue, f"w{n}", timeout_s=60) for n in range(3))) as polls:
            transport: Any = api.client._transport
            there = transport._app.endpoint.service.polls
            await wait_until(lambda: len(there) == 3, PATIENCE, "the polls")
            answer = await api.ask(POLL, {"worker_id": "more", "queue": "other", "timeout_s": 60})
            assert answer.error == (503, "PlaneUnavailable")
            id = await api.submit(queue)
            await wait_until(lambda: [one for one in polls if one.done.is_set()], PATIENCE, "the job's arrival")
            assert (await api.row(id))["state"] == "running"
        await wait_until(lambda: taken(api, queue), PATIENCE, "room for a poll again")


async def taken(api: Api, queue: str) -> bool:
    return (await api.ask(POLL, {"worker_id": "more", "queue": queue, "timeout_s": 0})).status == 200


async def test_namespaces_beyond_the_limit_are_refused_and_those_there_go_on(tmp_path: Path, queue: str) -> None:
    async with serving_here(dls.Dispatch(tmp_path / "plane.db"), limits=Limits(namespaces=2)) as api:
        for name in ("a", "b"):
            await api.within(name).submit(queue)
        for number in range(5):
            answer = await api.within(f"more-{number}").ask(SUBMIT, {"invocation_id": "x", "args_blob": b""})
            assert 400 <= answer.error[0] < 500
        assert len(await api.within("a").poll(queue)) == len(await api.within("b").poll(queue)) == 1
        await still_serves(api)


# --- many processes, and a server that comes back --------------------------------------------------------------------

POLLER = """
    import http.client, sys
    import msgpack

    port, queue, worker = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)

    def ask(path, fields):
        connection.request("POST", path, msgpack.packb(fields), {"content-type": "application/x-msgpack"})
        answer = connection.getresponse()
        body = answer.read()
        assert answer.status == 200, (answer.status, body)
        return msgpack.unpackb(body)

    done = []
    while True:
        commands = ask("/v1/daemon/poll", {"worker_id": worker, "queue": queue, "timeout_s": 20})["commands"]
        for command in commands:
            body = command["body"]
            if body["args_blob"] == b"stop":
                ask("/v1/daemon/ack", {"invocation_id": body["invocation_id"], "state": "succeeded"})
                print(*done)
                sys.exit()
            done.append(body["invocation_id"])
            ask("/v1/daemon/ack", {"invocation_id": body["invocation_id"], "state": "succeeded", "result_blob": b"r"})
"""


@SOCKET
async def test_ten_processes_that_poll_share_the_work_and_run_nothing_twice(server: Server, queue: str) -> None:
    script = textwrap.dedent(POLLER)
    pollers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(server.port), queue, f"w{n}"], stdout=subprocess.PIPE, text=True
        )
        for n in range(10)
    ]
    try:
        async with server.api() as api:
            ids = [await api.submit(queue) for _ in range(200)]
            for _ in pollers:
                await api.submit(queue, b"stop", run_config={"priority": -1})
            done = [
                id
                for poller in pollers
                for id in (await anyio.to_thread.run_sync(poller.communicate, None, 60))[0].split()
            ]
            assert sorted(done) == sorted(ids)
            assert {(await api.row(id))["attempt"] for id in ids} == {1}
    finally:
        for poller in pollers:
            poller.kill()
            poller.wait()
    assert [poller.returncode for poller in pollers] == [0] * 10


@SOCKET
@pytest.mark.parametrize("number", ["SIGTERM", "SIGKILL"])
async def test_a_server_that_is_started_again_has_everything_that_it_answered_for(
    tmp_path: Path, queue: str, number: str
) -> None:
    db = tmp_path / "plane.db"
    with server_process(db) as first:
        async with first.api() as api:
            queued = await api.submit(queue, b"queued", run_config={"priority": -1, "key": "k", "more": [1]})
            done = await api.running("done-" + queue)
            await api.do(ACK, {"invocation_id": done, "state": "succeeded", "result_blob": b"r"})
            held = await api.running("held-" + queue, lease_s=60)
            fence = {"invocation_id": held, "worker_id": "w", "attempt": 1}
            await api.do(CHUNK, {**fence, "seq": 0, "bytes": b"before"})
            rows = {id: await api.row(id) for id in (queued, done, held)}
            if number == "SIGKILL":
                first.stop(signal.SIGKILL)
            else:
                async with meanwhile(api.poll("none-" + queue, timeout_s=60), api.outcome(held, 60)) as (
                    polled,
                    waited,
                ):
                    with anyio.move_on_after(0.3):
                        await polled.done.wait()
                    for _ in range(
                        3
                    ):  # what was asked before these is there, also if this process stood still meanwhile
                        assert await api.row(queued) == rows[queued]
                    assert await anyio.to_thread.run_sync(first.stop) == 0
                    assert (await polled(), await waited()) == ([], {"state": "pending"}), "what is held is answered"
    with server_process(db) as second:
        async with second.api() as api:
            assert {id: await api.row(id) for id in rows} == rows
            assert (await api.outcome(done))["result_blob"] == b"r"
            assert (await api.do(CHUNK, {**fence, "seq": 0, "bytes": b"before"}))["duplicate"] is True
            await api.do(CHUNK, {**fence, "seq": 1, "bytes": b"after"})
            await api.do(ACK, {**fence, "state": "succeeded"})
            assert await api.frames(held) == b"beforeafter"
            assert await api.submit(queue, b"other", run_config={"key": "k"}) == queued
            body = await api.claim(queue)
            assert (body["args_blob"], body["run_config"]) == (
                b"queued", {"priority": -1, "key": "k", "more": [1], "queue": queue},
            )  # fmt: skip


@SOCKET
async def test_claims_are_not_taken_away_by_the_time_that_the_server_was_down(tmp_path: Path, queue: str) -> None:
    """A lease that ran out while nobody could renew it is judged only after the server has served for its length."""
    db = tmp_path / "plane.db"
    with server_process(db) as first:
        async with first.api() as api:
            id = await api.running(queue, lease_s=6.0)
        first.stop()
    with socket.socket() as waiting, contextlib.suppress(TimeoutError):
        waiting.bind(("127.0.0.1", 0))
        waiting.listen()
        waiting.settimeout(6.1)
        waiting.accept()
    with server_process(db) as second:
        async with second.api() as api:
            assert await api.poll(queue, "other", lease_s=60, timeout_s=1.2) == []
            beat = {"worker_id": "w", "claims": [[id, 1]], "lease_s": 60}
            assert await api.do(HEARTBEAT, beat) == {"lost": [], "cancel": []}
            await api.do(ACK, {"invocation_id": id, "worker_id": "w", "attempt": 1, "state": "succeeded"})
            assert (await api.row(id))["lost"] == 0


@SOCKET
async def test_a_server_that_was_killed_leaves_no_connection_hanging(tmp_path: Path, queue: str) -> None:
    with server_process(tmp_path / "plane.db") as served:
        async with served.api() as api:
            id = await api.submit(queue)
            failures: list[Exception] = []

            async def held(request: Any) -> None:
                try:
                    await request
                except httpx.TransportError as exc:
                    failures.append(exc)

            with anyio.fail_after(PATIENCE):
                async with anyio.create_task_group() as group:
                    for request in (api.poll("none", timeout_s=60), api.outcome(id, 60), api.frames(id)):
                        group.start_soon(held, request)
                    with anyio.move_on_after(0.3):
                        await anyio.sleep_forever()
                    served.close()
            assert len(failures) == 3
