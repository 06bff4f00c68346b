"""What a server, its workers and its waiters cost when nothing happens, and how soon one of many hears of a submit."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

from http_children import processes, serve

from dreamlake.lakeshore.limits import POLL_TIMEOUT

if TYPE_CHECKING:
    from figures import Bench

__all__ = ["crowd", "idle"]


def idle(bench: Bench) -> None:
    """The CPU of a worker without work and of a process with one wait, and the requests that each sends."""
    window = bench.size(2 * int(POLL_TIMEOUT), 2)
    with processes(bench) as children:
        servers = {name: serve(bench, children) for name in ("idle-worker", "idle-waiter")}
        urls = {name: server.url for name, server in servers.items()}
        idlers = {
            "idle-worker": children.start("worker", path=urls["idle-worker"], queues=["jobs"], concurrency=8),
            "idle-waiter": children.start("waiter", path=urls["idle-waiter"], count=1),
        }
        for child in idlers.values():
            child.ready()
        time.sleep(bench.size(5, 1))
        for _ in bench.each_round():
            before = {
                name: (child.usage().cpu, servers[name].requests(), time.perf_counter())
                for name, child in idlers.items()
            }
            time.sleep(window)
            for name, child in idlers.items():
                cpu, requests, since = before[name]
                seconds = time.perf_counter() - since
                bench.add(name, "% of a core", 100 * (child.usage().cpu - cpu) / seconds)
                bench.add(f"{name}-requests", "a minute", 60 * (servers[name].requests() - requests) / seconds)


def crowd(bench: Bench) -> None:
    """Five hundred workers that poll one server: what it uses, and how soon a submit is claimed by one of them."""
    processes_, each = bench.size(5, 2), bench.size(100, 25)
    with processes(bench) as children:
        server = serve(bench, children)
        submitter = children.start("caller").ready()
        submitter.ask("bare", path=server.url, count=200)
        before = server.child.usage().memory
        crowds = [children.start("crowd", path=server.url, count=each) for _ in range(processes_)]
        for one in crowds:
            one.ready()
        time.sleep(bench.size(10, 1))
        memory = (server.child.usage().memory - before) / (processes_ * each)
        for _ in bench.each_round():
            cpu, since = server.child.usage().cpu, time.perf_counter()
            time.sleep(bench.size(int(POLL_TIMEOUT), 1))
            used = server.child.usage().cpu - cpu
            bench.add("crowd-server", "% of a core", 100 * used / (time.perf_counter() - since))
            bench.add("crowd-memory", "kB a worker", memory / 1e3)
            trip = statistics.median(submitter.ask("bare", path=server.url, count=bench.size(200, 40))["seconds"])
            began = submitter.ask("spaced", path=server.url, count=bench.size(50, 10), pause=0.05)["began"]
            claimed = {id: when for one in crowds for id, when in one.ask("claimed")["claimed"].items()}
            took = statistics.median(claimed[id] - when for id, when in began.items())
            bench.add("crowd-submit", "ms", took * 1e3, took / trip)
