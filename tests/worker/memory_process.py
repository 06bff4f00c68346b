"""The peak memory of large frames: `memory_process.py worker|reader DB [ID]` prints kilobytes at rest and at the most."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import worker_bodies

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from dreamlake.lakeshore.planes.plane import Plane


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1])
    raise LookupError(name)


def say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


async def work(plane: Plane) -> None:
    queue = dls.Queue("q", dispatch=plane)
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: dls.run_worker(queue, stop=stop))
        await queue.call(dls.thunk(worker_bodies.double, 1))
        say(memory("VmRSS"))
        sys.stdin.readline()
        while not await queue.count("succeeded") == 2:  # noqa: ASYNC110
            await anyio.sleep(0.1)
        stop.set()


async def read(plane: Plane, id: str) -> None:
    await plane.current_outcomes([id])
    say(memory("VmRSS"))
    count = 0
    async for value in dls.Queue("q", dispatch=plane).stream(id):
        assert len(value) == 5_000_000
        count += 1
    assert count == 300


async def main(role: str, db: str, *ids: str) -> None:
    async with dls.Dispatch(db) as plane:
        await (work(plane) if role == "worker" else read(plane, *ids))
    say(memory("VmHWM"))


if __name__ == "__main__":
    anyio.run(main, *sys.argv[1:])
