"""Find out why a job does not run: what the wait says, what the rows say, and what sets it right.

    python examples/not_running.py

A job waits for as long as it takes until a worker serves its queue; it is not an error. A `timeout` on the wait tells how
the job stands. `lakeshore queue list` and `lakeshore inv show ID` tell the same in a terminal.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import anyio

import dreamlake.lakeshore as dls


async def greet(name: str) -> str:
    return f"hello {name}"


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        async with dls.Dispatch(Path(home) / "lakeshore.db") as plane, anyio.create_task_group() as group:
            queue = dls.Queue("gpu", dispatch=plane)
            id = await queue.submit(dls.thunk(greet, "lake"))
            try:
                await queue.result(id, timeout=0.5)
            except TimeoutError as exc:
                print("the wait:", exc)

            row = await queue.get(id)
            print("the row:", row.state, "in queue", repr(row.queue), "after", row.attempt, "attempts")

            # The usual reason: the worker serves another queue, or another file. This one serves the right one.
            group.start_soon(lambda: dls.run_worker(queue))
            print("the result:", await queue.result(id, timeout=30))
            group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
