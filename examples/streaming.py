"""A stream that outlives its reader: one process reads it and is killed, another one goes on where that stopped.

    python examples/streaming.py

Four processes: this one, the worker, and two readers. What the body yields is in the plane's file before a reader has
it; each value has a number, and `since=number` reads what comes after it.
"""

# ruff: noqa: TC003 -- an example reads better without a block for type checkers
from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator

import anyio

import dreamlake.lakeshore as dls

STEPS = 24


@dls.udf
async def estimate_pi(steps: int) -> AsyncIterator[dict[str, float]]:
    """Better and better: the sum 4 - 4/3 + 4/5 - ..., looked at after each thousand of its terms."""
    total = 0.0
    for step in range(steps):
        for k in range(step * 1000, (step + 1) * 1000):
            total += (4.0 if k % 2 == 0 else -4.0) / (2 * k + 1)
        yield {"terms": (step + 1) * 1000, "pi": total}
        await anyio.sleep(0.1)


def read(id: str, since: int) -> None:
    """What a reader process does: print each value as it comes."""
    stream = dls.SyncQueue("estimates").stream(id, since=since, timeout=60)
    for value in stream:
        print(f"{stream.seq} pi is about {value['pi']:.6f}, after {value['terms']} terms", flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        os.environ["LAKESHORE_HOME"] = home
        print(f"the plane is {dls.default_dispatch()}")
        command = [sys.executable, "-m", "dreamlake.lakeshore", "worker", "start", "--queue", "estimates"]
        worker = subprocess.Popen(command)
        try:
            id = dls.SyncQueue("estimates").submit(dls.thunk(estimate_pi, STEPS))
            print(f"submitted {id}")
            first = follow(id, since=-1, kill_after=8)
            print(f"the first reader was killed after value {first[-1]}; the body goes on")
            second = follow(id, since=first[-1])
            print(f"the second reader read the values {second[0]} to {second[-1]}")
            print("nothing is missing, nothing came twice:", [*first, *second] == list(range(STEPS)))
        finally:
            worker.terminate()
            worker.wait(timeout=60)


def follow(id: str, since: int, kill_after: int = 0) -> list[int]:
    """Run a reader, print what it prints, kill it after so many values; the numbers that it got."""
    reader = subprocess.Popen([sys.executable, __file__, id, str(since)], stdout=subprocess.PIPE, text=True)
    seen: list[int] = []
    with reader:
        assert reader.stdout is not None
        for line in reader.stdout:
            print(f"  reader {reader.pid}: {line}", end="")
            seen.append(int(line.split()[0]))
            if len(seen) == kill_after:
                reader.kill()
                break
    return seen


if __name__ == "__main__":
    if len(sys.argv) == 3:
        read(sys.argv[1], int(sys.argv[2]))
    else:
        main()
