"""What the MongoDB plane asks of its services: round trips to MongoDB and to Redis for each operation, and the plan of each
query. Counted, not timed: the numbers are those of the code, on any machine and any server.

    python benchmarks/mongo.py [--json] [--rounds 5] [--only NAME ...] [--backend asyncio|trio] [--quick]

The services are those of the tests: LAKESHORE_TEST_MONGODB_URL and LAKESHORE_TEST_REDIS_URL name them, or they are started
from LAKESHORE_TEST_SECANTUS and the PATH. A command that the driver starts is a round trip to MongoDB, a pipeline that it
sends is one to Redis. `-1` is one operation after the other, `-100` a hundred callers at once,
in trips for each operation. A wait for what has not ended is one look; how it ended comes with the news of it.

The plans are told on stderr, those of updates and deletes as those of their filters. Compatible servers plan differently
and explain a findAndModify without its sort, so the indexes that are there are also held against MongoDB's own rules: it
reads a whole collection only where no index begins with a field that the query bounds (`without-index`), and sorts in
memory where none goes on in the order asked for. `collection-scans` is what this server says.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's
sys.path.append(
    str(Path(__file__).resolve().parents[1] / "tests" / "planes" / "mongo")
)  # where the services are started

import anyio
import mongo_plans
import pymongo
import pymongo.monitoring
import redis.asyncio.connection
from program import run

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Claim, Claimed, Fence, FinalFrame, Reap, Submit
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Sequence
    from typing import TypeAlias

    from figures import Bench, Targets

    Call: TypeAlias = Callable[[], Coroutine[Any, Any, Any]]

TARGETS: Targets = {
    "submit": {"submit-1": "<= 1", "submit-100": "<= 0.1", "submit-redis-1": "<= 1", "submit-redis-100": "<= 0.1"},
    "claim": {"claim-1": "<= 1", "claim-100": "<= 1", "claim-redis-1": "<= 0", "claim-redis-100": "<= 0"},
    "ack": {"ack-1": "<= 1", "ack-100": "<= 1", "ack-redis-1": "<= 1", "ack-redis-100": "<= 1"},
    "frames": {"frames-1": "<= 2", "frames-100": "<= 0.1", "frames-redis-1": "<= 1", "frames-redis-100": "<= 0.1"},
    "beat": {"beat-1": "<= 1", "beat-redis-1": "<= 0"},
    "await": {"await-ended-1": "<= 1", "await-ended-100": "<= 0.1", "await-1": "<= 1", "await-100": "<= 0.1"},
    "plans": {"queries": "", "without-index": "<= 0", "claims-sorted-in-memory": "<= 0", "collection-scans": ""},
}
"""By scenario, the figures it gives and their targets, in round trips for each operation."""

MANY = 100
LEASE = 600.0


class Listener(pymongo.monitoring.CommandListener):
    """Every command that the driver starts in this process."""

    def __init__(self) -> None:
        self.commands: list[tuple[str, str, dict[str, Any]]] = []
        """As (database, name, command)."""

    def started(self, event: pymongo.monitoring.CommandStartedEvent) -> None:
        self.commands.append((event.database_name, event.command_name, dict(event.command)))

    def succeeded(self, event: pymongo.monitoring.CommandSucceededEvent) -> None: ...

    def failed(self, event: pymongo.monitoring.CommandFailedEvent) -> None: ...


class Sends:
    """What the other driver sends in this process: a pipeline goes in one piece."""

    def __init__(self) -> None:
        self.count = 0
        whole = redis.asyncio.connection.AbstractConnection
        send = whole.send_packed_command

        async def counted(connection: Any, *args: Any, **kwargs: Any) -> None:
            self.count += 1
            await send(connection, *args, **kwargs)

        whole.send_packed_command = counted  # type: ignore[method-assign, assignment]


LISTENER, SENDS = Listener(), Sends()


class Setting:
    """A plane in a namespace of its own, and what its operations have cost."""

    def __init__(self, plane: dls.MongoDispatch, places: tuple[str, str]) -> None:
        self.plane, self.places = plane, places

    async def cost(self, work: Callable[[], Awaitable[Any]], operations: int) -> tuple[float, float]:
        """Round trips to MongoDB and to Redis for each of the operations that `work` does."""
        await anyio.sleep(0.02)  # what was before has come to its end
        LISTENER.commands.clear()
        SENDS.count = 0
        await work()
        database = len(LISTENER.commands) / operations
        await anyio.sleep(0.02)  # nobody waits for Redis
        return database, SENDS.count / operations

    async def one_by_one(self, calls: Sequence[Call]) -> tuple[float, float]:
        async def work() -> None:
            for call in calls:
                await call()

        return await self.cost(work, len(calls))

    async def at_once(self, calls: Sequence[Call]) -> tuple[float, float]:
        async def work() -> None:
            async with anyio.create_task_group() as group:
                for call in calls:
                    group.start_soon(call)

        return await self.cost(work, len(calls))

    async def started(self, count: int) -> list[Claimed]:
        """New invocations that are running."""
        queue = new_id()
        await self.plane.many([Submit(new_id(), queue, b"body") for _ in range(count)])
        claims: list[Claimed] = await self.plane.claim([queue], "w", limit=count, lease=LEASE)
        assert len(claims) == count
        return claims


def in_settings(bench: Bench, scenario: Callable[[Bench, Setting], Awaitable[None]]) -> None:
    """Run a scenario once for each round."""

    async def each(*places: str) -> None:
        async with dls.MongoDispatch(*places, ns=new_id()) as plane:
            setting = Setting(plane, (places[0], places[1]))
            (claimed,) = await setting.started(1)  # connections are there
            await plane.append(_fence(claimed), 0, [b"frame"])
            await plane.finish(_fence(claimed), "succeeded")
            await scenario(bench, setting)

    services: Any = importlib.import_module("mongo_services")
    with services.mongo_url() as server, services.redis_url() as redis_url:
        database = f"lakeshore-bench-{new_id()}"
        try:
            for _ in bench.each_round():
                anyio.run(each, services.in_database(server, database), redis_url, backend=bench.backend)
        finally:
            with pymongo.MongoClient[Any](server) as client:
                client.drop_database(database)


def _fence(claimed: Claimed) -> Fence:
    return Fence(claimed.id, "w", claimed.attempt)


def _add(bench: Bench, name: str, at: int, cost: tuple[float, float]) -> None:
    for kind, trips in zip((name, f"{name}-redis"), cost, strict=True):
        bench.add(f"{kind}-{at}", "trips", trips)


# The operations ------------------------------------------------------------------------------------------------------


async def submit(bench: Bench, setting: Setting) -> None:
    def calls(count: int) -> list[Call]:
        return [partial(setting.plane.submit, "q", b"body", key=f"{new_id()}" if n % 2 else None) for n in range(count)]

    _add(bench, "submit", 1, await setting.one_by_one(calls(10)))
    _add(bench, "submit", MANY, await setting.at_once(calls(MANY)))


async def claim(bench: Bench, setting: Setting) -> None:
    plane, queue = setting.plane, new_id()
    await plane.many([Submit(new_id(), queue, b"body") for _ in range(MANY + 10)])
    call = partial(plane.claim, [queue], "w", lease=LEASE)
    _add(bench, "claim", 1, await setting.one_by_one([call] * 10))
    _add(bench, "claim", MANY, await setting.at_once([call] * MANY))
    assert await plane.counts(queue) == {(queue, "running"): MANY + 10}


async def ack(bench: Bench, setting: Setting) -> None:
    for count, how in ((10, setting.one_by_one), (MANY, setting.at_once)):
        claims = await setting.started(count)
        calls = [
            partial(setting.plane.finish, _fence(one), "succeeded", result=b"r", final=FinalFrame(0, b"END"))
            for one in claims
        ]
        _add(bench, "ack", 1 if count == 10 else MANY, await how(calls))


async def frames(bench: Bench, setting: Setting) -> None:
    """A batch of three frames; then a frame each of a hundred streams."""
    (claimed,) = await setting.started(1)
    batches = [partial(setting.plane.append, _fence(claimed), 3 * n, [b"frame"] * 3) for n in range(10)]
    _add(bench, "frames", 1, await setting.one_by_one(batches))
    claims = await setting.started(MANY)
    calls = [partial(setting.plane.append, _fence(one), 0, [b"frame"]) for one in claims]
    _add(bench, "frames", MANY, await setting.at_once(calls))


async def beat(bench: Bench, setting: Setting) -> None:
    """One heartbeat for all the claims of a worker."""
    claims = [(one.id, one.attempt) for one in await setting.started(10)]
    _add(bench, "beat", 1, await setting.one_by_one([partial(setting.plane.beat, "w", claims, LEASE)] * 5))


async def awaits(bench: Bench, setting: Setting) -> None:
    """Of what ends while it is waited for, where reads by id are the wait's; then of what has ended."""
    plane = setting.plane
    (never, *claims) = await setting.started(1 + 1 + MANY)
    async with dls.MongoDispatch(*setting.places, ns=plane.ns) as waiting, anyio.create_task_group() as others:
        others.start_soon(waiting.outcome, never.id)  # a process that waits already watches
        await anyio.sleep(0.3)
        for some in (claims[:1], claims[1:]):

            async def work(some: list[Claimed] = some) -> None:
                async with anyio.create_task_group() as group:
                    for one in some:
                        group.start_soon(waiting.outcome, one.id)
                    await anyio.sleep(0.1)
                    for one in some:
                        group.start_soon(partial(plane.finish, _fence(one), "succeeded", result=b"r"))

            await setting.cost(work, len(some))
            looks = [command for _, name, command in LISTENER.commands if name == "find" and "_id" in command["filter"]]
            bench.add(f"await-{len(some)}", "trips", len(looks) / len(some))
        others.cancel_scope.cancel()
    ended = [partial(plane.outcome, one.id) for one in claims[1:]]
    bench.add("await-ended-1", "trips", (await setting.one_by_one(ended[:10]))[0])
    bench.add(f"await-ended-{MANY}", "trips", (await setting.at_once(ended))[0])


# The plans -----------------------------------------------------------------------------------------------------------


async def plans(bench: Bench, setting: Setting) -> None:
    """Every query that the plane asks, explained by the server with the documents there that it was asked about."""
    LISTENER.commands.clear()
    await _everything(setting.plane)
    asked = mongo_plans.queries((database, command) for database, _, command in LISTENER.commands)
    with pymongo.MongoClient[Any](setting.places[0]) as client:
        judged = [mongo_plans.judge(client[database], query) for database, query in asked]
    for one in sorted(judged):
        print(one.told(), file=sys.stderr)
    bench.add("queries", "queries", len(judged))
    bench.add("without-index", "queries", sum(one.by is None for one in judged))
    bench.add("claims-sorted-in-memory", "queries", sum("priority" in one.order and not one.ordered for one in judged))
    bench.add("collection-scans", "queries", sum("COLLSCAN" in one.stages for one in judged))


async def _everything(plane: dls.MongoDispatch) -> None:
    """Each operation and each read, in each of its forms."""
    queue, ids = new_id(), [new_id() for _ in range(12)]
    for n, id in enumerate(ids):
        await plane.submit(queue, b"body", id=id, key=f"key {n}" if n % 2 else None, priority=n % 3, parent=ids[0])
    await plane.submit(queue, b"body", key="key 1")
    free = await plane.claim([queue, "other"], "v", limit=2, lease=None, poll_id="free")
    await plane.claim([queue, "other"], "v", limit=2, lease=None, poll_id="free")
    claims = await plane.claim([queue], "w", limit=5, lease=LEASE, poll_id="poll")
    await plane.do(Claim((queue,), "w", 0, LEASE, 5, "poll"))
    (short,) = await plane.claim([queue, "other"], "u", lease=0.01)
    await plane.claim(["nothing"], "w")
    await plane.append(_fence(claims[0]), 0, [b"a", b"b"])
    await plane.append(_fence(claims[0]), 1, [b"b", b"c"])
    await plane.beat("w", [(one.id, one.attempt) for one in claims], LEASE)
    await plane.cancel(claims[1].id)
    await plane.cancel(ids[-1])
    await plane.cancels("w")
    await plane.finish(_fence(claims[0]), "succeeded", result=b"r", final=FinalFrame(3, b"END"))
    await plane.finish(_fence(claims[0]), "succeeded", result=b"r")
    await plane.finish(Fence(free[0].id, "v"), "failed", error=Failure("E", "m"))
    await plane.release(_fence(claims[2]))
    await plane.retry(_fence(claims[3]), delay=0.01)
    await anyio.sleep(0.05)
    await plane.do(Reap())
    await plane.current_outcomes(ids)
    await plane.page(claims[0].id)
    await plane.page(claims[0].id, 1)
    for fields in (
        {"id": short.id, "body": True},
        {"queue": queue},
        {"queue": queue, "state": "queued"},
        {"state": "running"},
        {"queue": queue, "key": "key 1"},
        {"key": "key 1"},
        {"root": ids[0]},
        {},
    ):
        await plane.rows(RowFilter(**fields))
    for of in ((None, None), (queue, None), (None, "queued"), (queue, "queued")):
        await plane.counts(*of)
    await plane.ages()
    await plane.purge(0.0)
    with anyio.move_on_after(2.5):  # what a wait asks for now and then
        await plane.outcome(claims[4].id)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    name: partial(in_settings, scenario=scenario)
    for name, scenario in {
        "submit": submit,
        "claim": claim,
        "ack": ack,
        "frames": frames,
        "beat": beat,
        "await": awaits,
        "plans": plans,
    }.items()
}

if __name__ == "__main__":
    pymongo.monitoring.register(LISTENER)
    sys.exit(run(__doc__, SCENARIOS, TARGETS))
