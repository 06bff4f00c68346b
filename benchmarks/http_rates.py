"""How many a second through a server: submits, round trips, and frames; and the first of the frames."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from http_children import processes, serve

if TYPE_CHECKING:
    from children import Child
    from figures import Bench

__all__ = ["cycle", "frames", "submit"]

WIDTH = 1_000
"""Operations in flight."""
SMALL = 100
"""Bytes of a frame's value."""


def submit(bench: Bench) -> None:
    """A thousand submits at once: to a file, through a server, and through it with a request for each."""
    width, times = bench.size(WIDTH, 100), bench.size(10, 2)
    for _ in bench.each_round():
        with processes(bench) as children:
            server = serve(bench, children)
            caller = children.start("caller").ready()
            rates: dict[str, float] = {}
            for name, where in (("submit-local", str(bench.fresh())), ("submit", server.url)):
                told = caller.ask("bursts", path=where, count=width, times=times, backend=bench.backend)
                rates[name] = width * times / told["seconds"]
            told = caller.ask("one_by_one", path=server.url, count=width, backend=bench.backend)
        alone = width / told["seconds"]
        bench.add("submit-local", "submits/s", rates["submit-local"])
        bench.add("submit", "submits/s", rates["submit"], rates["submit"] / rates["submit-local"])
        bench.add("submit-one-by-one", "submits/s", alone)
        bench.add("submit-coalesced", "submits/s", rates["submit"], rates["submit"] / alone)


def cycle(bench: Bench) -> None:
    """A thousand calls of a no-op in flight, from one process to a worker in another."""
    count, width = bench.size(20_000, 500), bench.size(WIDTH, 100)
    for _ in bench.each_round():
        rates: dict[str, float] = {}
        for name in ("cycle-local", "cycle"):
            with processes(bench) as children:
                where = serve(bench, children).url if name == "cycle" else str(bench.fresh())
                children.start("worker", path=where, queues=["jobs"], concurrency=width).ready()
                told = children.start("caller").ask("round_trips", path=where, count=count, width=width)
            rates[name] = count / told["seconds"]
        bench.add("cycle-local", "calls/s", rates["cycle-local"])
        bench.add("cycle", "calls/s", rates["cycle"], rates["cycle"] / rates["cycle-local"])


def frames(bench: Bench) -> None:
    """Frames of 100 bytes from a worker to a reader in another process, and how soon the first of them comes."""
    count = bench.size(50_000, 2_000)
    with processes(bench) as children:
        server = serve(bench, children)
        places = {"-local": str(bench.fresh()), "": server.url}
        for where in places.values():
            children.start("worker", path=where, queues=["jobs"], concurrency=8).ready()
        reader = children.start("caller").ready()
        for where in places.values():
            reader.ask("stream", path=where, function="frames", count=100, size=SMALL)
        for _ in bench.each_round():
            rates: dict[str, float] = {}
            for kind, where in places.items():
                told = reader.ask("stream", path=where, function="frames", count=count, size=SMALL)
                rates[kind] = count / told["seconds"]
            bench.add("frames-local", "frames/s", rates["-local"])
            bench.add("frames", "frames/s", rates[""], rates[""] / rates["-local"])
            trip = statistics.median(reader.ask("bare", path=server.url, count=bench.size(200, 40))["seconds"])
            bench.add("first-frame-local", "ms", _first(bench, reader, places["-local"]) * 1e3)
            first = _first(bench, reader, server.url)
            bench.add("first-frame", "ms", first * 1e3, first / trip)


def _first(bench: Bench, reader: Child, where: str) -> float:
    """Seconds from the submit to the first value."""
    took: list[float] = [
        reader.ask("stream", path=where, function="frames", count=500, size=SMALL)["first"]
        for _ in range(bench.size(50, 5))
    ]
    return statistics.median(took)
