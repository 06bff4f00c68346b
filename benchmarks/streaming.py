"""Frames: how many a second, how soon the first, and how much memory large ones take."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from children import Children
from latency import raw_round_trip
from raw import RawPlane

from dreamlake.lakeshore.wire import Frame, FrameKind

if TYPE_CHECKING:
    from figures import Bench

__all__ = ["frames", "large_frames"]

SMALL = 100


def frames(bench: Bench) -> None:
    """Frames of 100 bytes from a worker to a reader in another process, out of both kinds of generators."""
    count, firsts = bench.size(50_000, 2_000), bench.size(50, 10)
    frame = Frame(FrameKind.VALUE, 1, bytes(SMALL)).to_bytes()
    with raw_round_trip(bench) as raw_trip, Children(bench.backend) as children:
        path = str(bench.fresh())
        children.start("worker", path=path, queues=["jobs"], concurrency=8).ready()
        reader = children.start("caller").ready()
        reader.ask("stream", path=path, function="frames", count=100, size=SMALL)
        for _ in bench.each_round():
            with RawPlane(bench.fresh()) as plane:
                bench.add("raw-frames-1", "frames/s", plane.frames(count // 20, 1, frame))
            with RawPlane(bench.fresh()) as plane:
                raw = plane.frames(count, 100, frame)
            bench.add("raw-frames-100", "frames/s", raw)
            for name, function in (("frames-async", "frames"), ("frames-def", "plain_frames")):
                told = reader.ask("stream", path=path, function=function, count=count, size=SMALL)
                rate = count / told["seconds"]
                bench.add(name, "frames/s", rate, rate / raw)
            trip = raw_trip(firsts * 4)
            first = statistics.median(
                reader.ask("stream", path=path, function="frames", count=500, size=SMALL)["first"]
                for _ in range(firsts)
            )
            bench.add("first-frame", "ms", first * 1e3, first / trip)


def large_frames(bench: Bench) -> None:
    """300 frames of 5 MB: the peak of the worker's and of the reader's memory over what they use idle."""
    count, size = bench.size(300, 30), 5_000_000
    for _ in bench.each_round():
        path = bench.fresh()
        with Children(bench.backend) as children:
            processes = {
                "worker": children.start("worker", path=str(path), queues=["jobs"], concurrency=1).ready(),
                "reader": children.start("caller").ready(),
            }
            reader = processes["reader"]
            reader.ask("stream", path=str(path), function="frames", count=500, size=SMALL)
            idle = {name: process.usage(reset=True).memory for name, process in processes.items()}
            reader.ask("stream", path=str(path), function="frames", count=count, size=size)
            for name, process in processes.items():
                bench.add(f"large-frames-{name}", "MB over idle", (process.usage().peak - idle[name]) / 1e6)
        bench.drop(path)
