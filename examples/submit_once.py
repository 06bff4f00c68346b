"""Submit a job at most once: a key names it, and every submit with that key returns the id of the first one.

    python examples/submit_once.py

A key is unique in its queue for as long as the invocation is stored, also after it has ended. So a program that crashed
may submit everything again: what has run is not run twice, and its result is there at once.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

import dreamlake.lakeshore as dls


async def report(day: str) -> str:
    return f"the report of {day}"


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        async with dls.Dispatch(Path(home) / "lakeshore.db") as plane, anyio.create_task_group() as group:
            queue = dls.Queue("reports", dispatch=plane)
            group.start_soon(lambda: dls.run_worker(queue, concurrency=2))

            first = await queue.submit(dls.thunk(report, "monday"), key="report monday")
            again = await queue.submit(dls.thunk(report, "monday"), key="report monday")
            other = await queue.submit(dls.thunk(report, "tuesday"), key="report tuesday")
            print("the same invocation:", first == again, "another one:", first != other)
            print(await queue.result(again), "and", await queue.result(other))
            print("invocations in the queue:", len(await queue.list()))
            group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
