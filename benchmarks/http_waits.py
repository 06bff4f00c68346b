"""What waiting for results costs through a server: one call alone, and a thousand waits at once."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from http_children import processes, serve

if TYPE_CHECKING:
    from children import Child
    from figures import Bench

__all__ = ["call", "results"]


def call(bench: Bench) -> None:
    """One no-op call after the other, against bare posts of the same process to the same server."""
    count = bench.size(300, 50)
    with processes(bench) as children:
        server, local = serve(bench, children), str(bench.fresh())
        for where in (local, server.url):
            children.start("worker", path=where, queues=["jobs"], concurrency=8).ready()
        caller = children.start("caller").ready()
        for _ in bench.each_round():
            trip = statistics.median(caller.ask("bare", path=server.url, count=count)["seconds"])
            bench.add("bare-post", "ms", trip * 1e3)
            took: list[float] = []
            for where in (local, server.url):
                caller.ask("calls", path=where, count=20)
                took.append(statistics.median(caller.ask("calls", path=where, count=count)["seconds"]))
            bench.add("call-local", "ms", took[0] * 1e3)
            bench.add("call", "ms", took[1] * 1e3, took[1] / trip)


def results(bench: Bench) -> None:
    """A thousand waits at once, begun before a worker starts, against as many long polls."""
    count = bench.size(1_000, 100)
    for _ in bench.each_round():
        took = {how: _waited(bench, how, count) for how in ("results", "single_awaits")}
        requests, cpu = took["results"]
        _, alone = took["single_awaits"]
        bench.add("results-requests", "requests", requests)
        bench.add("single-awaits-cpu", "s", alone)
        bench.add("results-cpu", "s", cpu, cpu / alone)


def _waited(bench: Bench, how: str, count: int) -> tuple[float, float]:
    """The requests and the seconds of CPU that the waiting process took."""
    with processes(bench) as children:
        url = serve(bench, children).url
        worker = children.start("worker", path=url, queues=["jobs"], concurrency=100, hold=True)
        waiter = children.start("caller")
        ids = waiter.ask("fill", path=url, function="noop", args=[1], count=count)["ids"]
        worker.ready()
        waiter.tell(how, path=url, ids=ids, backend=bench.backend)
        _settle(waiter)
        worker.ask("go")
        told = waiter.hear()
    return told["requests"], told["cpu"]


def _settle(child: Child) -> None:
    """Come back when the process does nothing any more: all that it waits for is waited for."""
    used, before = child.usage().cpu, -1.0
    while used - before > 0.01:
        time.sleep(0.5)
        used, before = child.usage().cpu, used
