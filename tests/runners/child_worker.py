"""A worker of children in a process of its own: `child_worker.py DB FOLDER OPTIONS`, OPTIONS being JSON.

SIGTERM stops it as the command line does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from child_kit import DEFAULT_SETTINGS, process_runner

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.worker.child import ChildExecutor, ChildRules
from dreamlake.lakeshore.worker.loop import run_executor
from dreamlake.lakeshore.worker.settings import WorkerSettings


async def main(path: str, folder: str, settings: dict[str, Any]) -> None:
    stop = anyio.Event()
    rules = ChildRules(Path(folder) / "work", Path(folder), local=True)
    runner = process_runner(grace=0.3, warm=bool(os.environ.get("WARM")))
    async with dls.Dispatch(path) as plane, anyio.create_task_group() as group:

        async def watch() -> None:
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                async for _ in signals:
                    stop.set()

        group.start_soon(watch)
        queue = dls.Queue("q", dispatch=plane)
        try:
            await run_executor(
                queue,
                partial(ChildExecutor, runner, rules),
                WorkerSettings(**{**DEFAULT_SETTINGS, **settings}),
                stop=stop,
            )
        finally:
            await runner.aclose()
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), backend=os.environ.get("BACKEND", "asyncio"))
