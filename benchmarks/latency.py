"""How long one thing takes: a call alone, beside idle workers, beside large results, and the loss of a worker."""

from __future__ import annotations

import os
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from children import Child, Children
from figures import percentile
from raw import round_trips
from roles import BODY

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from pathlib import Path

    from figures import Bench

__all__ = ["call", "herd", "kill", "large_results", "raw_round_trip"]

IDLE_WORKERS = 24


@contextmanager
def raw_round_trip(bench: Bench) -> Generator[Callable[[int], float]]:
    """A function that makes so many raw round trips and gives their median, in seconds."""
    with Children(bench.backend) as children:
        path = bench.fresh()
        children.start("raw_answerer", path=str(path)).ready()
        yield lambda count: statistics.median(round_trips(path, count, BODY))


def call(bench: Bench) -> None:
    """One no-op call after the other from one process to another: `await q.call`, and the blocking one."""
    count = bench.size(300, 50)
    with raw_round_trip(bench) as raw_trip, Children(bench.backend) as children:
        path = str(bench.fresh())
        children.start("worker", path=path, queues=["jobs"], concurrency=8).ready()
        callers = {kind: children.start(role).ready() for kind, role in (("async", "caller"), ("sync", "sync_caller"))}
        for _ in bench.each_round():
            raw = raw_trip(count)
            bench.add("raw-round-trip", "ms", raw * 1e3)
            for kind, caller in callers.items():
                caller.ask("calls", path=path, count=20)
                took = statistics.median(caller.ask("calls", path=path, count=count)["seconds"])
                bench.add(f"call-{kind}", "ms", took * 1e3, took / raw)


def herd(bench: Bench) -> None:
    """The same call beside 24 idle workers more, against the call beside one; and what their CPU has to do with it."""
    count = bench.size(200, 30)
    with Children(bench.backend) as children:
        caller = children.start("caller").ready()
        quiet, crowded = str(bench.fresh()), str(bench.fresh())
        one = children.start("worker", path=quiet, queues=["jobs"], concurrency=8).ready()
        crowd = [
            children.start("worker", path=crowded, queues=["jobs"], concurrency=8) for _ in range(1 + IDLE_WORKERS)
        ]
        for worker in crowd:
            worker.ready()
        for path in (quiet, crowded):
            caller.ask("calls", path=path, count=50)
        for _ in bench.each_round():
            alone, cpu_alone = _calls_and_cpu(caller, quiet, count, [one])
            beside, cpu_beside = _calls_and_cpu(caller, crowded, count, crowd)
            bench.add("call-beside-24-idle", "ms", beside * 1e3, beside / alone)
            bench.add("idle-cpu-per-call", "ms", (cpu_beside - cpu_alone) * 1e3)


def _calls_and_cpu(caller: Child, path: str, count: int, workers: list[Child]) -> tuple[float, float]:
    """The median seconds of a call, and the CPU that all workers together used for one."""
    before = sum(worker.usage().cpu for worker in workers)
    took = statistics.median(caller.ask("calls", path=path, count=count)["seconds"])
    return took, (sum(worker.usage().cpu for worker in workers) - before) / count


def large_results(bench: Bench) -> None:
    """Small calls while three results of 100 MB are made and written, by another worker process or by the same."""
    settings = {"count": bench.size(200, 50), "results": 3, "size": bench.size(100_000_000, 10_000_000)}
    layouts = {"call-beside-results": [["jobs"], ["large"]], "call-beside-results-one-worker": [["jobs", "large"]]}
    for _ in bench.each_round():
        for name, layout in layouts.items():
            path = bench.fresh()
            with Children(bench.backend) as children:
                for queues in layout:
                    children.start("worker", path=str(path), queues=queues, concurrency=8).ready()
                took = children.start("caller").ask("calls_beside_results", path=str(path), **settings)
            slow, quiet = percentile(took["beside"], 99), statistics.median(took["quiet"])
            bench.add(name, "ms", slow * 1e3, slow / quiet)
            bench.drop(path)


def kill(bench: Bench) -> None:
    """From SIGKILL in the middle of a body to its next start, by another worker of this machine."""
    with Children(bench.backend) as children:
        path = bench.fresh()
        caller = children.start("caller").ready()
        workers = [children.start("worker", path=str(path), queues=["jobs"], concurrency=1) for _ in range(2)]
        for _ in bench.each_round():
            log = path.parent / f"starts-{time.monotonic_ns()}"
            for worker in workers:
                worker.ready()
            caller.ask("fill", path=str(path), function="mark", args=[str(log)], count=1)
            holder = int(_wait_for_line(log, 1).split()[0])
            victim = next(worker for worker in workers if worker.pid == holder)
            workers.remove(victim)
            killed = time.time()
            children.end(victim)
            bench.add("kill-to-restart", "s", float(_wait_for_line(log, 2).split()[1]) - killed)
            workers.append(children.start("worker", path=str(path), queues=["jobs"], concurrency=1))


def _wait_for_line(log: Path, number: int) -> str:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        lines = log.read_text().splitlines(keepends=True) if os.path.exists(log) else []
        if len(lines) >= number and lines[number - 1].endswith("\n"):
            return lines[number - 1]
        time.sleep(0.002)
    raise RuntimeError(f"start number {number} of the body was not seen within 60 s")
