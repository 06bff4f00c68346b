"""How many a second: submits, cycles, drains, and waiting for ten thousand results."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from children import Child, Children
from raw import RawPlane
from roles import BODY

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from figures import Bench

__all__ = ["cycle", "drain", "gather", "submit"]

WIDTH = 100
"""Rows a transaction of the raw loops, and operations in flight of ours."""


def submit(bench: Bench) -> None:
    """A hundred tasks of one process submit, by the plane's verb and by the queue's; and one task submits a list."""
    count = bench.size(20_000, 1_000)
    with Children(bench.backend) as children:
        caller = children.start("caller").ready()
        for _ in bench.each_round():
            with RawPlane(bench.fresh()) as plane:
                bench.add("raw-submit-1", "rows/s", plane.submits(count // 10, 1, BODY))
            with RawPlane(bench.fresh()) as plane:
                raw = plane.submits(count, WIDTH, BODY)
            bench.add("raw-submit-100", "rows/s", raw)
            for how in ("plane", "queue"):
                told = caller.ask("submit", path=str(bench.fresh()), how=how, count=count, width=WIDTH)
                rate = count / told["seconds"]
                bench.add(f"{how}-submit", "submits/s", rate, rate / raw)
            many = bench.size(5_000, 1_000)
            told = caller.ask("submit_many", path=str(bench.fresh()), count=many)
            rate = many / told["seconds"]
            bench.add("submit-many", "submits/s", rate, rate / raw)


def raw_cycle(bench: Bench, count: int) -> float:
    """The raw limit of everything that goes through a worker."""
    with RawPlane(bench.fresh()) as plane:
        return plane.cycles(count, WIDTH, BODY)


def cycle(bench: Bench) -> None:
    """Submit, claim, finish and hear of it: two processes, plane verbs only, a hundred in flight."""
    count = bench.size(20_000, 1_000)
    for _ in bench.each_round():
        with RawPlane(bench.fresh()) as plane:
            plane.submits(count, WIDTH, BODY)
            bench.add("raw-claim-ack-1", "rows/s", plane.claims_and_acks(count // 10, 1))
            bench.add("raw-claim-ack-100", "rows/s", plane.claims_and_acks(count // 2, WIDTH))
            bench.add("raw-cycle-1", "cycles/s", plane.cycles(count // 10, 1, BODY))
        raw = raw_cycle(bench, count)
        bench.add("raw-cycle-100", "cycles/s", raw)
        with Children(bench.backend) as children:
            path = str(bench.fresh())
            children.start("verbs", path=path, width=WIDTH).ready()
            told = children.start("caller").ask("cycle", path=path, count=count, width=WIDTH)
        rate = count / told["seconds"]
        bench.add("cycle", "cycles/s", rate, rate / raw)


class Drained(NamedTuple):
    """When the worker began, when the last outcome was written, and the worker's CPU a job."""

    started: float
    ended: float
    cpu: float

    @property
    def seconds(self) -> float:
        return self.ended - self.started


def filled(bench: Bench, caller: Child, function: str, count: int) -> tuple[Path, list[str]]:
    """A file with `count` no-op invocations, and their ids."""
    path = bench.fresh()
    return path, caller.ask("fill", path=str(path), function=function, args=[1], count=count)["ids"]


def drained(children: Children, path: Path, count: int, then: Callable[[], None] = lambda: None) -> Drained:
    """One worker process finishes what is queued there. `then` is called when it has begun."""
    worker = children.start("worker", path=str(path), queues=["jobs"], concurrency=WIDTH, hold=True)
    told = worker.ask("go")
    then()
    with RawPlane(path) as plane:
        while plane.ended() < count:
            time.sleep(0.02)
        cpu = worker.usage().cpu - told["cpu"]
        ended = plane.db.execute("SELECT max(finished_at) FROM outcome").fetchone()[0]
        failed = plane.db.execute("SELECT count(*) FROM outcome WHERE state != 'succeeded'").fetchone()[0]
    assert failed == 0, f"{failed} of {count} invocations failed"
    children.end(worker)
    return Drained(told["started"], ended, cpu / count)


def drain(bench: Bench) -> None:
    """One worker process with a concurrency of a hundred finishes no-ops that were queued before."""
    counts = {"async": bench.size(10_000, 1_000), "def": bench.size(4_000, 500)}
    functions = {"async": "noop", "def": "plain_noop"}
    with Children(bench.backend) as children:
        caller = children.start("caller").ready()
        for _ in bench.each_round():
            raw = raw_cycle(bench, counts["async"])
            for kind, count in counts.items():
                path, _ = filled(bench, caller, functions[kind], count)
                done = drained(children, path, count)
                rate = count / done.seconds
                bench.add(f"drain-{kind}", "jobs/s", rate, rate / raw)
                bench.add(f"drain-{kind}-cpu", "us/job", done.cpu * 1e6)


def gather(bench: Bench) -> None:
    """A process waits for ten thousand results at once while a worker finishes them, against the drain alone."""
    count = bench.size(10_000, 1_000)
    last = None
    with Children(bench.backend) as children:
        filler, waiter = children.start("caller").ready(), children.start("caller").ready()
        for _ in bench.each_round():
            path, _ = filled(bench, filler, "noop", count)
            alone = drained(children, path, count).seconds
            path, ids = filled(bench, filler, "noop", count)
            before = waiter.usage(reset=True)
            tell = partial(waiter.tell, "gather", path=str(path), ids=ids, backend=bench.backend)
            worker = drained(children, path, count, tell)
            both = waiter.hear()["done"] - worker.started
            after = waiter.usage()
            bench.add("gather", "results/s", count / both, both / alone)
            bench.add("gather-peak", "MB", (after.peak - before.memory) / 1e6)
            if last is not None:
                bench.add("gather-growth", "MB a round", (after.memory - last) / 1e6)
            last = after.memory
