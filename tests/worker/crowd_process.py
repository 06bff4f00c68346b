"""One of many processes on one new file: `crowd_process.py DB LOG NUMBER JOBS PROCESSES`.

It submits its share, and works until all is done.
"""

from __future__ import annotations

import logging
import os
import sys

import anyio
import worker_bodies

import dreamlake.lakeshore as dls


async def main(db: str, log: str, number: int, jobs: int, processes: int) -> None:
    async with dls.Dispatch(db) as plane:
        queue, stop = dls.Queue("q", dispatch=plane), anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: dls.run_worker(queue, concurrency=8, stop=stop))
            for n in range(jobs):
                body = worker_bodies.aline if n % 2 else worker_bodies.line
                await queue.submit(dls.thunk(body, log, f"{number} {n}"))
            while await queue.count("succeeded") < jobs * processes:  # noqa: ASYNC110 -- others finish them
                await anyio.sleep(0.2)
            stop.set()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    db, log, *numbers = sys.argv[1:]
    anyio.run(main, db, log, *map(int, numbers), backend=os.environ.get("BACKEND", "asyncio"))
