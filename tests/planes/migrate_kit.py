"""What the tests of migrations share: planes full of all kinds of rows, and what of them is to be the same afterwards."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import anyio
from helpers import fresh_python

from dreamlake.lakeshore.planes.contract.operations import (
    Claim,
    Claimed,
    Fence,
    FinalFrame,
    Finish,
    Operation,
    Requeue,
)
from dreamlake.lakeshore.planes.contract.records import TERMINAL, Failure, Row, RowFilter
from dreamlake.lakeshore.planes.migrate import Migration
from dreamlake.lakeshore.testing.sequences import QUEUES

if TYPE_CHECKING:
    from random import Random

    from dreamlake.lakeshore.planes.plane import Plane


async def moved(source: Plane, target: Plane, *queues: str) -> Migration:
    """A migration that has succeeded."""
    migration = Migration(source, target, queues)
    await migration.copy()
    here, there, difference = await migration.verify()
    assert difference is None
    assert (here.digest, here.counts) == (there.digest, there.counts)
    if not queues:
        assert dict(here.counts) == await source.counts() == await target.counts()
    return migration


def as_moved(row: Row, now: float) -> Row:
    """What is to become of a row."""
    not_before = row.not_before if row.state == "queued" and (row.not_before or 0.0) > now else None
    worker = row.worker if row.state in TERMINAL else None
    return row._replace(trusted=False, worker=worker, not_before=not_before, lease_until=None, cancel_requested=False)


async def bring_to_rest(plane: Plane, random: Random) -> None:
    for row in await plane.rows(RowFilter(state="running", limit=1000)):
        fence = Fence(row.id, row.worker, row.attempt)
        ops: list[Operation] = [
            Requeue(fence),
            Requeue(fence, "retry", 4.0),
            Finish(fence, "failed", b"", Failure("E", "")),
        ]
        await plane.do(random.choice(ops))


async def everything(plane: Plane, now: float) -> list[Any]:
    """All that can be read of a plane at rest, and then what its claims are given, in their order."""
    rows = await plane.rows(RowFilter(limit=1000, body=True))
    outcomes = await plane.current_outcomes([row.id for row in rows])
    pages = [await plane.page(row.id) for row in rows]
    pages = [page if page.state in TERMINAL else page._replace(error=None) for page in pages]
    claims: list[Claimed] = await plane.do(Claim(QUEUES, "w", 1000))
    return [[as_moved(row, now) for row in rows], outcomes, pages, [one._replace(trusted=False) for one in claims]]


async def fill(plane: Plane) -> None:
    """Rows of each kind: small and large, with short and with long journals, with gaps in them, queued and ended."""
    for n in range(30):
        await plane.submit("q", b"b" * (n * 100), id=f"i{n}", key=f"k{n}" if n % 3 == 0 else None, priority=n % 4)
    claims = await plane.claim(["q"], "w", limit=20)
    for n, claimed in enumerate(claims):
        fence = Fence(claimed.id, "w", claimed.attempt)
        if n % 2:
            await plane.append(fence, n % 3, [b"f" * 300] * n)
        if n % 5 == 0:
            await plane.retry(fence, error=Failure("E", "try"))
        else:
            await plane.finish(fence, "succeeded", result=b"r" * (n * 50), final=FinalFrame(99, b"END"))
    await plane.submit("q", b"B" * 2_000_000, id="large")


KILLED = """
    import os, random, signal, sys, threading, time
    import anyio
    from dreamlake.lakeshore import Dispatch, MongoDispatch
    from dreamlake.lakeshore.planes import migrate

    backend, source, target, seed = sys.argv[1:]
    chance = random.Random(seed)
    migrate.ROWS, migrate.BYTES, migrate.MAX_FRAMES_PER_PAGE = 3, 2000, 2
    left = chance.randint(1, 30)

    def kill():
        time.sleep(chance.choice((0.0, 0.0, 0.0005, 0.001, 0.003)))
        os.kill(os.getpid(), signal.SIGKILL)

    class Mortal(MongoDispatch if target.startswith("mongodb://") else Dispatch):
        async def many(self, ops):
            global left
            left -= 1
            if left == 0:
                if chance.random() < 0.3:
                    kill()
                threading.Thread(target=kill, daemon=True).start()
            return await super().many(ops)

    async def main():
        async with Dispatch(source) as here, Mortal(target) as there:
            await migrate.Migration(here, there).copy()

    anyio.run(main, backend=backend)
"""


async def migrate_and_be_killed(backend: str, source: str, target: str) -> None:
    """Migrate from a file, killed at some write again and again, until one is through."""
    kills = 0
    for seed in range(100):
        with fresh_python(KILLED, backend, source, target, str(seed)) as process:
            _, err = await anyio.to_thread.run_sync(lambda process=process: process.communicate(timeout=60))
        assert process.returncode in (0, -signal.SIGKILL), err
        if process.returncode == 0:
            break
        kills += 1
    assert kills > 1
