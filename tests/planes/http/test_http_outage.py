"""Servers that are killed, networks that are cut, answers that are lost: nothing is, nothing happens twice, no process ends.

Every body writes its name to a file when it runs; frames are numbers, in order.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import http_bodies as bodies
import pytest
from helpers import quiet, wait_until
from proxy import proxy_before

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.http import attempt
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from http_kit import Processes, Server

pytestmark = pytest.mark.anyio

MODULES = ("--allow-module", "http_bodies")
RESUMED = 30.0
"""Seconds after an outage within which everything moves again: the longest pause between two tries, and what a busy
machine takes for forty calls."""


class Load:
    """Producers and readers that go on and on, and what came of their calls; `stop` lets the last ones end."""

    def __init__(self, plane: dls.HttpDispatch, marks: Path) -> None:
        self.queue, self.marks = dls.Queue("q", dispatch=plane), marks
        self.called: list[str] = []
        self.streams = 0
        self.ended_at = 0.0
        self._stop = False

    def stop(self) -> None:
        self._stop = True

    async def call(self, producer: int) -> None:
        number = 0
        while not self._stop:
            name, number = f"{producer}.{number}", number + 1
            body = bodies.aline if number % 2 else bodies.line
            if number % 5:
                assert await self.queue.call(dls.thunk(body, str(self.marks), name)) == name
            else:  # in two steps, with a key
                id = await self.queue.submit(dls.thunk(body, str(self.marks), name), key=name)
                assert await self.queue.submit(dls.thunk(body, str(self.marks), name), key=name) == id
                assert await self.queue.result(id) == name
            self.called.append(name)
            self.ended_at = time.monotonic()
            await anyio.sleep(0.01)

    async def read(self, reader: int) -> None:
        number = 0
        while not self._stop:
            name, number, n = f"stream {reader}.{number}", number + 1, 200
            id = await self.queue.submit(dls.thunk(bodies.aframes, str(self.marks), name, n, 0.05))
            assert [value async for value in self.queue.stream(id)] == list(range(n))
            self.called.append(name)
            self.streams += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Four producers and two readers, until the end of the block; they get some seconds to come to their end."""
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(self.call, number)
            for number in range(2):
                group.start_soon(self.read, number)
            yield
            self.stop()
            group.cancel_scope.deadline = anyio.current_time() + 60
        assert not group.cancel_scope.cancelled_caught, "the last calls came to no end"

    async def moves(self, seconds: float) -> None:
        """Every producer comes on within `seconds`."""
        count, began = len(self.called), time.monotonic()
        await wait_until(lambda: len(self.called) >= count + 40, seconds, "more calls after the outage")
        assert self.ended_at > began

    async def check(self) -> None:
        """Each call ran once, and nothing is left."""
        assert len(self.called) >= 40
        assert self.streams >= 2
        assert sorted(self.marks.read_text().splitlines()) == sorted(self.called)
        counts = await self.queue.dispatch.counts("q")
        assert counts == {("q", "succeeded"): len(self.called)}
        rows = await self.queue.dispatch.rows(RowFilter(queue="q", limit=10_000))
        assert {(row.lost, row.failures) for row in rows} == {(0, 0)}


async def check_workers(*workers: Any) -> None:
    for worker in workers:
        assert worker.alive, worker.err
        assert "Traceback" not in worker.err, worker.err


@pytest.mark.slow
async def test_a_server_that_is_killed_under_load_and_started_again(tmp_path: Path, started: Processes) -> None:
    server = started.server(tmp_path / "plane.db")
    workers = [started.worker(server.url, *MODULES, "--concurrency", 8) for _ in range(2)]
    async with dls.HttpDispatch(server.url) as plane:
        load = Load(plane, tmp_path / "marks")
        async with load.running():
            await load.moves(RESUMED)
            for seconds in (0.0, 1.5):
                server.kill()
                await anyio.sleep(seconds)
                server = started.server(tmp_path / "plane.db", port=server.port)
                await load.moves(RESUMED)
        await load.check()
    await check_workers(server, *workers)


OUTAGE = float(os.environ.get("LAKESHORE_TEST_OUTAGE") or 8.0)
"""Seconds without a network. Longer ones differ little: pauses between tries grow no more after some seconds."""


@pytest.mark.slow
@pytest.mark.timeout(120 + OUTAGE)
@pytest.mark.parametrize(("anyio_backend", "how"), [("asyncio", "cut"), ("trio", "stalled")])
async def test_a_network_that_is_down_for_a_while(tmp_path: Path, started: Processes, how: str) -> None:
    """Shorter than the leases: after longer ones bodies run again, since nobody can know that their workers live."""
    server = started.server(tmp_path / "plane.db")
    with proxy_before(server.port) as proxy:
        options = (*MODULES, "--concurrency", 8, "--lease", 30 + OUTAGE)
        workers = [started.worker(proxy.url, *options) for _ in range(2)]
        async with dls.HttpDispatch(proxy.url) as plane:
            load = Load(plane, tmp_path / "marks")
            async with load.running():
                await load.moves(RESUMED)
                (proxy.refuse if how == "cut" else proxy.stall)()
                for seconds in (0.5, OUTAGE):  # what had been answered is taken first
                    await quiet(lambda: len(load.called), seconds, description="no call that ends")
                proxy.mend()
                await load.moves(RESUMED)
            await load.check()
        await check_workers(server, *workers)


async def test_connections_that_are_cut_again_and_again(tmp_path: Path, started: Processes) -> None:
    server = started.server(tmp_path / "plane.db")
    with proxy_before(server.port) as proxy:
        worker = started.worker(proxy.url, *MODULES, "--concurrency", 8)
        async with dls.HttpDispatch(proxy.url) as plane:
            load = Load(plane, tmp_path / "marks")
            async with load.running():
                for _ in range(10):
                    await anyio.sleep(0.15)
                    proxy.cut()
                await load.moves(RESUMED)
            await load.check()
        await check_workers(server, worker)


# Lost answers --------------------------------------------------------------------------------------------------------


def holds_claims(answer: bytes) -> bool:
    """Whether the answer to a poll, by its headers, holds more than none."""
    found = re.search(rb"content-length: (\d+)", answer)
    return found is not None and int(found[1]) > 60


@pytest.mark.parametrize("size", [0, 30, 200])
async def test_a_lost_answer_of_a_poll_loses_no_job_and_runs_none_twice(
    tmp_path: Path, started: Processes, size: int
) -> None:
    server = started.server(tmp_path / "plane.db")
    marks = tmp_path / "marks"
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(server.url) as direct, dls.HttpDispatch(proxy.url) as plane:
            queue = dls.Queue("q", dispatch=direct)
            proxy.cut_answers("POST /v1/daemon/poll", size, 5, holds_claims)
            async with running_worker(dls.Queue("q", dispatch=plane), concurrency=4, allow_modules=["http_bodies"]):
                ids = [await queue.submit(dls.thunk(bodies.aline, str(marks), f"job {n}")) for n in range(30)]
                assert [await queue.result(id, timeout=30) for id in ids] == [f"job {n}" for n in range(30)]
            assert proxy.answers_cut == 5
            assert sorted(marks.read_text().splitlines()) == sorted(f"job {n}" for n in range(30))
            rows = await direct.rows(RowFilter(queue="q"))
            assert {(row.attempt, row.lost, row.failures) for row in rows} == {(1, 0, 0)}


@pytest.mark.parametrize("size", [0, 200])
async def test_lost_answers_of_all_else_are_asked_for_again_without_double_effect(
    tmp_path: Path, started: Processes, size: int
) -> None:
    server = started.server(tmp_path / "plane.db")
    marks = tmp_path / "marks"
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(proxy.url) as plane:
            queue = dls.Queue("q", dispatch=plane)
            for route in ("submit-many", "await-many", "ack-many", "result-chunks", "heartbeat", "invocations"):
                proxy.cut_answers(f"/{route}", size, 3)
            async with running_worker(queue, concurrency=4, allow_modules=["http_bodies"], lease=3.0):
                stream = await queue.submit(dls.thunk(bodies.aframes, str(marks), "stream", 100, 0.1))
                for n in range(10):
                    assert await queue.call(dls.thunk(bodies.aline, str(marks), f"job {n}")) == f"job {n}"
                assert [value async for value in queue.stream(stream)] == list(range(100))
                slow = dls.thunk(bodies.slow_line, str(marks), "slow", 4.0)
                assert await queue.call(slow) == "slow"
            assert len(await queue.list(limit=100)) == 12
            frames = (await plane.page(stream)).frames
            assert [seq for seq, _ in frames] == list(range(101))
            rows = await plane.rows(RowFilter(queue="q"))
            assert {(row.state, row.attempt) for row in rows} == {("succeeded", 1)}
            assert proxy.answers_cut == 6 * 3
    assert sorted(marks.read_text().splitlines()) == sorted(
        [*(f"job {n}" for n in range(10)), "stream", "slow began", "slow ended"]
    )


async def test_a_lost_answer_of_a_release_and_of_a_retry(tmp_path: Path, started: Processes) -> None:
    """The repeat finds that the claim is gone, which is what it wanted: the row is given back once."""
    server = started.server(tmp_path / "plane.db")
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(proxy.url) as plane:
            id = await plane.submit("q", b"x")
            for verb, failures in ((plane.release, 0), (plane.retry, 1)):
                (claimed,) = await plane.claim(["q"], "w", timeout=20)
                route = "release" if verb == plane.release else "retry"
                proxy.cut_answers(f"/daemon/{route}")
                with pytest.raises(dls.ClaimLost):
                    await verb(Fence(id, "w", claimed.attempt))
                (row,) = await plane.rows(RowFilter(id=id))
                assert (row.state, row.failures, row.lost) == ("queued", failures, 0)
            assert proxy.answers_cut == 2


# Connections that are dead, and nobody says so -----------------------------------------------------------------------


async def test_connections_that_died_without_a_word_are_given_up(
    tmp_path: Path, started: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a router that has forgotten them. Here the seconds that this takes are made few."""
    monkeypatch.setattr(attempt, "ANSWER_TIMEOUT", 1.0)
    monkeypatch.setattr(attempt, "HELD_ANSWER_TIMEOUT", 1.0)
    monkeypatch.setattr("dreamlake.lakeshore.planes.remote_plane.POLL_TIMEOUT", 1.0)
    monkeypatch.setattr("dreamlake.lakeshore.planes.http.long_polls.POLL_TIMEOUT", 1.0)
    server = started.server(tmp_path / "plane.db")
    marks = tmp_path / "marks"
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(proxy.url) as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue, concurrency=4, allow_modules=["http_bodies"]):
                assert await queue.call(dls.thunk(bodies.aline, str(marks), "before")) == "before"
                proxy.forget()
                with anyio.fail_after(20):
                    assert await queue.call(dls.thunk(bodies.aline, str(marks), "after")) == "after"
    assert marks.read_text().splitlines() == ["before", "after"]


async def test_closing_does_not_wait_for_a_server_that_is_silent(server: Server) -> None:
    with proxy_before(server.port) as proxy:
        plane = dls.HttpDispatch(proxy.url)
        await plane.current_outcomes(["some-id"])
        ended: list[str] = []

        async def wait(verb: Any) -> None:
            with pytest.raises(dls.PlaneUnavailable, match="closed"):
                await verb()
            ended.append("told")

        async with anyio.create_task_group() as group:
            proxy.stall()
            group.start_soon(wait, partial(plane.outcome, "some-id"))
            group.start_soon(wait, partial(plane.claim, ["q-silent"], "w", timeout=None))
            for verb in (partial(plane.submit, "q-silent", b"x"), partial(plane.counts, "q-silent")):
                with anyio.move_on_after(0.2):
                    await verb()
            began = time.monotonic()
            await plane.aclose()
            assert time.monotonic() - began < 20  # what is held would be answered after 22 at the earliest
        assert ended == ["told", "told"]


# Leases --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # what matters is in the other processes
async def test_an_outage_longer_than_the_lease_robs_no_worker(tmp_path: Path, started: Processes) -> None:
    """A server judges no lease before it has served that long, and heartbeats come as soon as it is there."""
    lease = 4.0
    server = started.server(tmp_path / "plane.db")
    marks = tmp_path / "marks"
    workers = [started.worker(server.url, *MODULES, "--lease", lease) for _ in range(3)]
    async with dls.HttpDispatch(server.url) as plane:
        queue = dls.Queue("q", dispatch=plane)
        ids = [
            await queue.submit(dls.thunk(bodies.slow_line, str(marks), f"job {n}", 3 * lease + 1.0)) for n in range(2)
        ]
        await wait_until(lambda: marks.exists() and marks.read_text().count("began") == 2, 20, "both bodies")
        server.kill()
        await anyio.sleep(2 * lease)
        server = started.server(tmp_path / "plane.db", port=server.port)
        assert sorted([await queue.result(id, timeout=60) for id in ids]) == ["job 0", "job 1"]
        rows = await plane.rows(RowFilter(queue="q"))
        assert [(row.attempt, row.lost) for row in rows] == [(1, 0)] * 2
    assert sorted(marks.read_text().splitlines()) == ["job 0 began", "job 0 ended", "job 1 began", "job 1 ended"]
    await check_workers(*workers)


@pytest.mark.slow
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_worker_back_from_an_outage_goes_on_with_what_it_runs(tmp_path: Path, started: Processes) -> None:
    """With a free slot it would be given its own row again, which was taken from it meanwhile; it renews before it asks."""
    server = started.server(tmp_path / "plane.db")
    marks = tmp_path / "marks"
    with proxy_before(server.port) as proxy:
        worker = started.worker(proxy.url, *MODULES, "--lease", 3.0, "--concurrency", 8)
        async with dls.HttpDispatch(server.url) as direct:
            queue = dls.Queue("q", dispatch=direct)
            id = await queue.submit(dls.thunk(bodies.slow_line, str(marks), "job", 14.0))
            await wait_until(marks.exists, 20, "the body's start")
            proxy.refuse()

            async def taken() -> bool:
                return (await direct.rows(RowFilter(id=id)))[0].state == "queued"

            await wait_until(taken, 20, "the end of its lease")
            proxy.mend()
            assert await queue.result(id, timeout=60) == "job"
            (row,) = await direct.rows(RowFilter(id=id))
            assert (row.attempt, row.lost) == (1, 0)
    assert marks.read_text().splitlines() == ["job began", "job ended"]
    await check_workers(worker)


async def test_a_worker_out_of_reach_is_not_given_what_it_runs_itself(tmp_path: Path, started: Processes) -> None:
    """Its poll is still held when its lease runs out: the row stays for others, and for the worker's own next word."""
    server = started.server(tmp_path / "plane.db")
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(server.url) as direct, dls.HttpDispatch(proxy.url) as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue, concurrency=2, lease=4.0, allow_modules=["http_bodies"]):
                id = await queue.submit(dls.thunk(bodies.blocked, "job"))
                await wait_until(lambda: bodies.SEEN, 20, "the body's start")
                await anyio.sleep(0.5)  # the next poll is at the server
                proxy.stall()

                async def stood() -> tuple[str, int, int]:
                    (row,) = await direct.rows(RowFilter(id=id))
                    return row.state, row.attempt, row.lost

                async def lapsed() -> bool:
                    return await stood() != ("running", 1, 0)

                await wait_until(lapsed, 20, "the end of its lease")
                for _ in range(10):
                    assert await stood() == ("queued", 1, 1)
                    await anyio.sleep(0.05)
                proxy.mend()

                async def renewed() -> bool:
                    return await stood() == ("running", 1, 0)

                await wait_until(renewed, 20, "its renewal")
                bodies.gate("job").set()
                assert await queue.result(id, timeout=20) == "job"
                assert await stood() == ("succeeded", 1, 0)
    assert bodies.SEEN == ["job began"]


async def test_what_another_worker_took_meanwhile_is_that_one_s(tmp_path: Path, started: Processes) -> None:
    server = started.server(tmp_path / "plane.db")
    with proxy_before(server.port) as proxy:
        async with dls.HttpDispatch(server.url) as direct, dls.HttpDispatch(proxy.url) as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue, concurrency=2, lease=4.0, allow_modules=["http_bodies"]):
                id = await queue.submit(dls.thunk(bodies.sleeper))
                await wait_until(lambda: bodies.SEEN, 20, "the body's start")
                await anyio.sleep(0.5)
                proxy.stall()
                (claimed,) = await direct.claim(["q"], "another", timeout=20)
                assert (claimed.id, claimed.attempt) == (id, 2)
                proxy.mend()
                await wait_until(lambda: len(bodies.SEEN) == 2, 20, "the end of the body that lost it")
                assert await direct.finish(Fence(id, "another", 2), "succeeded")
                (row,) = await direct.rows(RowFilter(id=id))
                assert (row.state, row.attempt, row.lost) == ("succeeded", 2, 1)
