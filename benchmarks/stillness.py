"""What costs nothing when nothing happens: idle workers and waiters, and claims beside rows that are not theirs."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from children import Children
from raw import HOLDER, NS, QUEUE, WORKER, RawPlane
from roles import BODY

from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Claim
from dreamlake.lakeshore.planes.sqlite.apply import commit
from dreamlake.lakeshore.planes.sqlite.batch import Batch
from dreamlake.lakeshore.planes.sqlite.claim import finds_nothing

if TYPE_CHECKING:
    from figures import Bench

__all__ = ["claim", "idle"]

SETTLE = 5.0
"""Seconds until a process that was started is idle."""


def idle(bench: Bench) -> None:
    """The CPU of a worker without work, of a process with one wait, and of one with ten thousand."""
    many, window = bench.size(10_000, 500), bench.size(8, 2)
    with Children(bench.backend) as children:
        paths = [str(bench.fresh()) for _ in range(3)]
        processes = {
            "idle-worker": children.start("worker", path=paths[0], queues=["jobs"], concurrency=8),
            "idle-waiter": children.start("waiter", path=paths[1], count=1),
            "idle-10000-waits": children.start("waiter", path=paths[2], count=many),
        }
        for process in processes.values():
            process.ready()
        time.sleep(SETTLE)
        for _ in bench.each_round():
            before = {name: (process.usage().cpu, time.perf_counter()) for name, process in processes.items()}
            time.sleep(window)
            for name, process in processes.items():
                cpu, since = before[name]
                used = process.usage().cpu - cpu
                bench.add(name, "% of a core", 100 * used / (time.perf_counter() - since))


def claim(bench: Bench) -> None:
    """A claim's transaction beside a million rows that are queued or finished, or a hundred thousand delayed ones.

    The plane's own statements on a connection of this process: the way to its thread, the same for all, would hide them.
    """
    million, delayed = bench.size(1_000_000, 100_000), bench.size(100_000, 10_000)
    crowds = {
        "queued": (million, "due = 1"),
        "finished": (million, "state = 'succeeded'"),
        "delayed": (delayed, "due = 0"),
    }
    alone = _crowded(bench, 0, "due = 1")
    files = {name: _crowded(bench, rows, change) for name, (rows, change) in crowds.items()}
    for _ in bench.each_round():
        for limit, times in ((1, 300), (32, 20)):
            least = _claims(alone, limit, times)
            for name, plane in files.items():
                took = _claims(plane, limit, times)
                bench.add(f"claim-{limit}-{name}", "us/row", took * 1e6, took / least)
    for plane in (alone, *files.values()):
        plane.db.close()


def _crowded(bench: Bench, rows: int, change: str) -> RawPlane:
    """A file with `rows` rows changed as said, and a thousand behind them that can be claimed."""
    plane = RawPlane(bench.fresh())
    plane.each(((new_id(), BODY) for _ in range(rows)), 100_000, plane.submit)
    plane.db.execute(f"UPDATE invocation SET {change}, not_before = submitted_at + 1e6, attempt = 0")
    plane.each(((new_id(), BODY) for _ in range(1_000)), 1_000, plane.submit)
    plane.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return plane


def _claims(plane: RawPlane, limit: int, times: int) -> float:
    """The median seconds of a transaction that claims `limit` rows, for one of them; the rows are queued again."""
    db, op = plane.db, Claim((QUEUE,), WORKER, limit)
    took: list[float] = []
    for _ in range(times):
        started = time.perf_counter()
        batch = Batch(db, NS, time.time(), HOLDER)
        assert not finds_nothing(batch, [op])
        (claimed,) = commit(batch, [op])
        took.append((time.perf_counter() - started) / limit)
        assert len(claimed) == limit
    db.execute("UPDATE invocation SET state = 'queued', worker = NULL, attempt = 0 WHERE state = 'running'")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    return statistics.median(took)
