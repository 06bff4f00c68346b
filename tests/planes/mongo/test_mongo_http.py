"""Servers that share a database: what goes in at one comes out at the other, and one may die and come back."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

# What mongo_kit has put on the path:
import http_bodies as bodies
import pytest
from helpers import wait_until
from http_kit import Processes
from mongo_kit import TIMED, MongoServer, own_redis

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.testing import check_plane

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from mongo_kit import Place

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])

MODULES = ("--allow-module", "http_bodies")
RESUMED = 30.0
"""Seconds after a restart within which everybody moves again, on a slow machine too."""


class Servers:
    """Servers over one database, and the processes that speak to them; all end with the test."""

    def __init__(self, place: Place, folder: Path) -> None:
        self.place, self.folder = place, folder
        self.others = Processes()
        self._all: list[MongoServer] = []

    def start(self, *options: object, port: int = 0) -> MongoServer:
        server = MongoServer(self.place, *options, port=port, tokens=self.folder / "no-tokens")
        self._all.append(server)
        return server

    def end(self) -> None:
        self.others.end()
        for server in self._all:
            server.end()


@pytest.fixture
def servers(place: Place, tmp_path: Path) -> Iterator[Servers]:
    made = Servers(place, tmp_path)
    try:
        yield made
    finally:
        made.end()


class Load:
    """Producers and readers at each server, and what came of their calls."""

    def __init__(self, planes: list[dls.HttpDispatch], marks: Path) -> None:
        self.queues = [dls.Queue("q", dispatch=plane) for plane in planes]
        self.marks = marks
        self.called: list[str] = []
        self.by: Counter[int] = Counter()
        self.streams = 0
        self._stop = False

    async def call(self, producer: int) -> None:
        """Submits at one server, waits at the other."""
        here, there = self.queues[producer % 2], self.queues[(producer + 1) % 2]
        number = 0
        while not self._stop:
            name, number = f"{producer}.{number}", number + 1
            thunk = dls.thunk(bodies.aline, str(self.marks), name)
            key = name if number % 3 == 0 else None
            id = await here.submit(thunk, key=key)
            if key is not None:
                assert await there.submit(thunk, key=key) == id
            assert await there.result(id) == name
            self.called.append(name)
            self.by[producer] += 1
            await anyio.sleep(0.01)

    async def read(self, reader: int) -> None:
        here, there = self.queues[reader % 2], self.queues[(reader + 1) % 2]
        number = 0
        while not self._stop:
            name, number, n = f"stream {reader}.{number}", number + 1, 60
            id = await here.submit(dls.thunk(bodies.aframes, str(self.marks), name, n, 0.05))
            assert [value async for value in there.stream(id)] == list(range(n))
            self.called.append(name)
            self.streams += 1

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as group:
            for number in range(4):
                group.start_soon(self.call, number)
            for number in range(2):
                group.start_soon(self.read, number)
            yield
            self._stop = True
            group.cancel_scope.deadline = anyio.current_time() + 60
        assert not group.cancel_scope.cancelled_caught, "the last calls came to no end"

    async def moves(self) -> None:
        """Each producer comes on."""
        before = Counter(self.by)
        await wait_until(
            lambda: all(self.by[n] >= before[n] + 3 for n in range(4)), RESUMED, f"more calls of each, {self.by}"
        )


@pytest.mark.slow
@asyncio_only  # what matters is in the other processes
async def test_one_of_two_servers_is_killed_under_load(servers: Servers, tmp_path: Path) -> None:
    """No invocation is lost, none runs or is acked twice, and streams have no gaps."""
    pair = [servers.start() for _ in range(2)]
    workers = [servers.others.worker(server.url, *MODULES, "--concurrency", 4) for server in pair]
    marks = tmp_path / "marks"
    async with dls.HttpDispatch(pair[0].url) as one, dls.HttpDispatch(pair[1].url) as two:
        load = Load([one, two], marks)
        async with load.running():
            await load.moves()
            for seconds in (0.0, 1.0):
                pair[0].kill()
                await anyio.sleep(seconds)
                pair[0] = servers.start(port=pair[0].port)
                await load.moves()
        assert load.streams >= 2
        assert sorted(marks.read_text().splitlines()) == sorted(load.called)
        assert await two.counts("q") == {("q", "succeeded"): len(load.called)}
        rows = await two.rows(RowFilter(queue="q", limit=10_000))
        assert {(row.lost, row.failures) for row in rows} == {(0, 0)}
    for process in (*pair, *workers):
        assert process.alive, process.err
        assert "Traceback" not in process.err, process.err


@pytest.mark.slow
@pytest.mark.timeout(400)
@asyncio_only
async def test_the_plane_passes_through_two_servers(servers: Servers) -> None:
    """Fresh planes in turns at either, each a namespace of its own; without the checks that take thousands of calls."""
    pair, turns = [servers.start() for _ in range(2)], count()

    def fresh() -> dls.HttpDispatch:
        return dls.HttpDispatch(pair[next(turns) % 2].url, namespace=new_id())

    await check_plane(fresh, only=TIMED, sequences=1, length=20, crowd=20, patience=90)
    for server in pair:
        assert server.alive, server.err
        assert "Traceback" not in server.err, server.err


@asyncio_only
async def test_two_acks_at_two_servers_are_one(servers: Servers) -> None:
    """Of claims through two servers each row is one's alone, and the fence holds everywhere."""
    pair = [servers.start() for _ in range(2)]
    async with dls.HttpDispatch(pair[0].url) as one, dls.HttpDispatch(pair[1].url) as two:
        ids = [await (one, two)[n % 2].submit("q", b"%d" % n) for n in range(20)]
        found: list[tuple[str, Fence]] = []

        async def claim(plane: dls.HttpDispatch, worker: str) -> None:
            while claims := await plane.claim(["q"], worker, limit=3):
                found.extend((claimed.id, Fence(claimed.id, worker, claimed.attempt)) for claimed in claims)

        async with anyio.create_task_group() as group:
            for n in range(4):
                group.start_soon(claim, (one, two)[n % 2], f"w{n}")
        assert sorted(id for id, _ in found) == sorted(ids)
        said: list[bool] = []

        async def ack(plane: dls.HttpDispatch, fence: Fence) -> None:
            said.append(await plane.finish(fence, "succeeded", result=fence.id.encode()))

        async with anyio.create_task_group() as group:
            for _, fence in found:
                for plane in (one, two):
                    group.start_soon(ack, plane, fence)
        assert Counter(said) == {True: 20, False: 20} or said == [True] * 40  # over HTTP a repeat is told no other
        outcomes = await one.current_outcomes(ids)
        assert [outcome.result for outcome in outcomes] == [id.encode() for id in ids]


async def _wake_ups(producer: dls.HttpDispatch, worker: dls.HttpDispatch, queue: str, times: int) -> list[float]:
    """Seconds from a submit's begin to the end of the long poll that was waiting for it."""
    took: list[float] = []
    for _ in range(times):
        ended: list[float] = []

        async def claim(ended: list[float] = ended) -> None:
            (claimed,) = await worker.claim([queue], "w", timeout=30)
            ended.append(time.monotonic())
            await worker.finish(Fence(claimed.id, "w", claimed.attempt), "succeeded")

        async with anyio.create_task_group() as group:
            group.start_soon(claim)
            await anyio.sleep(0.1)
            assert ended == []
            began = time.monotonic()
            await producer.submit(queue, b"body")
        took.append(ended[0] - began)
    return took


@pytest.mark.timing("times of two ways are compared")
@asyncio_only
async def test_a_submit_at_one_server_wakes_a_long_poll_at_the_other(servers: Servers) -> None:
    """As soon as at the same server: times of the same run are compared, in turns."""
    pair = [servers.start() for _ in range(2)]
    async with dls.HttpDispatch(pair[0].url) as one, dls.HttpDispatch(pair[1].url) as two:
        await _wake_ups(one, two, "warm", 2)
        same: list[float] = []
        other: list[float] = []
        for _ in range(5):
            same += await _wake_ups(one, one, "same", 3)
            other += await _wake_ups(one, two, "other", 3)
        assert statistics.median(other) / statistics.median(same) < 3, (same, other)


@asyncio_only
async def test_a_stream_written_at_one_server_is_live_at_the_other(servers: Servers) -> None:
    pair = [servers.start() for _ in range(2)]
    servers.others.worker(pair[0].url, *MODULES)
    async with dls.HttpDispatch(pair[0].url) as one, dls.HttpDispatch(pair[1].url) as two:
        id = await dls.Queue("q", dispatch=one).submit(dls.thunk(bodies.acount, 500))
        assert [value async for value in dls.Queue("q", dispatch=two).stream(id)] == list(range(500))
        assert [value async for value in dls.Queue("q", dispatch=two).stream(id, since=489)] == list(range(490, 500))


@asyncio_only
async def test_what_comes_through_a_server_is_untrusted(servers: Servers, place: Place) -> None:
    server = servers.start()
    async with dls.HttpDispatch(server.url) as through, place.plane() as direct:
        ids = [await through.submit("q", b"body"), await direct.submit("q", b"body")]
        rows = [(await direct.rows(RowFilter(id=id)))[0] for id in ids]
        assert [row.trusted for row in rows] == [False, False]  # of a fleet's database nobody is this machine's user


@asyncio_only
async def test_namespaces_of_servers_are_those_of_the_plane(servers: Servers, place: Place) -> None:
    server = servers.start("--namespace", "mine")
    async with dls.HttpDispatch(server.url) as through, dls.HttpDispatch(server.url, namespace="theirs") as other:
        id = await through.submit("q", b"mine")
        assert await other.submit("q", b"theirs", id=id) == id
        async with place.plane("mine") as mine, place.plane("theirs") as theirs, place.plane() as third:
            (claimed,) = await mine.claim(["q"], "w")
            assert claimed.body == b"mine"
            assert [row.state for row in await theirs.rows(RowFilter(id=id))] == ["queued"]
            assert await third.rows(RowFilter(id=id)) == []


# The command line ----------------------------------------------------------------------------------------------------


@asyncio_only
@pytest.mark.parametrize("by_environment", [True, False])
async def test_the_start_line_says_where_and_hides_secrets(place: Place, tmp_path: Path, by_environment: bool) -> None:
    secret = "hunter2-not-for-any-log"
    with own_redis(tmp_path / "redis", "--requirepass", secret) as redis:
        place = place._replace(redis=f"redis://:{secret}@127.0.0.1:{redis.port}/0")
        server = MongoServer(place, tokens=tmp_path / "no-tokens", by_environment=by_environment)
        try:
            if by_environment:  # where everybody on the machine may look
                command = Path(f"/proc/{server.pid}/cmdline").read_bytes()
                assert secret.encode() not in command
            async with dls.HttpDispatch(server.url) as plane:
                await plane.submit("q", b"body")
            assert "MongoDispatch(" in server.err
            server.signal()
            assert server.ends() == 0
        finally:
            server.end()
    assert secret not in server.err + server.out


@asyncio_only
@pytest.mark.parametrize("option", ["--db", "--durable"])
async def test_an_option_for_a_file_is_not_overruled_by_the_environment(
    place: Place, tmp_path: Path, option: str
) -> None:
    option_for = {"--db": ["--db", tmp_path / "some.db"], "--durable": ["--durable"]}[option]
    server = MongoServer(place, *option_for, tokens=tmp_path / "no-tokens", by_environment=True)
    try:
        assert "MongoDispatch" not in server.err
        assert ".db" in server.err
    finally:
        server.end()


@pytest.mark.parametrize(
    ("variables", "options", "named"),
    [
        ({"MONGO": "mongodb://me:hunter2@/"}, [], "LAKESHORE_MONGO_URL: expected an address such as mongodb://HOST"),
        (
            {"MONGO": "mongodb://127.0.0.1/x", "REDIS": "redis://:hunter2@h:x/"},
            [],
            "LAKESHORE_REDIS_URL: expected an address such as redis://HOST",
        ),
        (
            {"REDIS": "redis://:hunter2@h:x/"},
            ["--mongo", "mongodb://127.0.0.1/x"],
            "LAKESHORE_REDIS_URL: expected an address such as redis://HOST",
        ),
        (
            {"MONGO": "mongodb://me:hunter2@127.0.0.1/x"},
            ["--redis", "redis://h:x/"],
            "--redis: expected an address such as redis://HOST",
        ),
    ],
    ids=["database", "redis", "redis beside an option", "option beside the database"],
)
def test_an_address_that_is_none_is_named_by_where_it_stands(
    tmp_path: Path, variables: dict[str, str], options: list[str], named: str
) -> None:
    started = Processes()
    try:
        urls = {f"LAKESHORE_{kind}_URL": url for kind, url in variables.items()}
        process = started.command("server", "start", *options, **urls, LAKESHORE_HOME=str(tmp_path))
        assert process.ends() == 2
        assert f"Error: {named}" in process.err
        assert "hunter2" not in process.err
    finally:
        started.end()


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--redis", "redis://127.0.0.1/"], 2, "--redis"),
        (["--mongo", "mongodb://127.0.0.1/x", "--db", "some.db"], 2, "--mongo"),
        (["--mongo", "http://127.0.0.1/"], 2, "mongodb://"),
        (["--mongo", "mongodb://127.0.0.1/x", "--durable"], 2, "--durable"),
    ],
)
def test_options_that_do_not_go_together(tmp_path: Path, options: list[str], code: int, sentence: str) -> None:
    started = Processes()
    try:
        tokens = ["--token-file", str(tmp_path / "no-tokens"), "--port", "0"]
        process = started.command("server", "start", *options, *tokens)
        assert process.ends() == code, process.err
        assert sentence in process.err
        assert "Traceback" not in process.err
    finally:
        started.end()
