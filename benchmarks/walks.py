"""How long the walks through the package's code are: the Python calls of one operation that is warm.

    python benchmarks/walks.py [--json] [--only NAME ...]

For each walk are counted: the calls of functions of the package (each resumption of a coroutine is a call too), how often
the next call is of another file, and the distinct files. All threads count. Shown is the shortest of several runs: what
runs beside it, as the watcher's pass, makes some of them longer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import socket
import sys
import tempfile
import threading
import time
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's

import anyio
import jobs
import uvicorn

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.server import create_app
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

WARM_UPS = 20
RUNS = 15
SETTLE_TIME = 0.05
"""Seconds between two runs, in which what one of them has left to do is done."""

PACKAGE = str(Path(dls.__file__).resolve().parent)


class Walk(NamedTuple):
    """The size of one walk, and the functions on the way as `file:function`."""

    name: str
    calls: int
    switches: int
    files: int
    path: list[str]


class Recorder:
    """Records the calls of the package's functions, in every thread that starts after it was installed."""

    def __init__(self) -> None:
        self._recording = False
        self._seen: list[tuple[str, str]] = []
        self._names: dict[str, str | None] = {}

    def install(self) -> None:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)

    def start(self) -> None:
        self._seen = []
        self._recording = True

    def stop(self, name: str) -> Walk:
        self._recording = False
        files = [file for file, _ in self._seen]
        switches = sum(one != other for one, other in pairwise(files))
        return Walk(
            name, len(files), switches, len(set(files)), [f"{file}:{function}" for file, function in self._seen]
        )

    def _profile(self, frame: Any, event: str, _arg: object) -> None:
        if event != "call" or not self._recording:
            return
        code = frame.f_code
        name = self._names.get(code.co_filename, "")
        if name == "":
            name = self._names[code.co_filename] = _name_in_package(code.co_filename)
        if name is not None:
            self._seen.append((name, code.co_name))


def _name_in_package(filename: str) -> str | None:
    path = str(Path(filename).resolve())
    return path[len(PACKAGE) + 1 :] if path.startswith(PACKAGE) else None


async def shortest(recorder: Recorder, name: str, operation: Callable[[], Awaitable[object]]) -> Walk:
    """The shortest walk of several runs of an operation."""
    for _ in range(WARM_UPS):
        await operation()
    walks = []
    for _ in range(RUNS):
        await asyncio.sleep(SETTLE_TIME)
        recorder.start()
        await operation()
        walks.append(recorder.stop(name))
    return min(walks, key=lambda walk: walk.calls)


def submit(recorder: Recorder, folder: Path) -> Walk:
    """`f.submit(1)` of a plain function, from plain code, to a file."""
    plane = dls.Dispatch(folder / "submit.db")
    function = dls.udf(jobs.plain_noop, queue="q")
    for _ in range(WARM_UPS):
        function.submit(1, _dispatch=plane)
    walks = []
    for _ in range(RUNS):
        time.sleep(SETTLE_TIME)
        recorder.start()
        function.submit(1, _dispatch=plane)
        walks.append(recorder.stop("submit"))
    asyncio.run(plane.aclose())
    return min(walks, key=lambda walk: walk.calls)


def call(recorder: Recorder, folder: Path) -> Walk:
    """`Queue.call` of an async function, with its worker on the same event loop."""

    async def main() -> Walk:
        async with dls.Dispatch(folder / "call.db") as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue):
                return await shortest(recorder, "call", lambda: queue.call(dls.thunk(jobs.noop, 1)))

    return asyncio.run(main())


@asynccontextmanager
async def served(plane: dls.Dispatch) -> AsyncGenerator[str]:
    """A server of `plane` on this event loop; its address."""
    server = uvicorn.Server(uvicorn.Config(create_app(plane), log_level="error", lifespan="on"))
    listener = socket.create_server(("127.0.0.1", 0))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def submit_http(recorder: Recorder, folder: Path) -> Walk:
    """`Queue.submit` through a server of a file: client and server on one event loop."""

    async def main() -> Walk:
        async with dls.Dispatch(folder / "http.db") as plane, served(plane) as url, dls.HttpDispatch(url) as http:
            queue = dls.Queue("q", dispatch=http)
            return await shortest(recorder, "submit-http", lambda: queue.submit(dls.thunk(jobs.noop, 1)))

    return asyncio.run(main())


def frame(recorder: Recorder, folder: Path) -> Walk:
    """One value that a generator's body yields, until it is with a reader on the same event loop."""

    async def main() -> Walk:
        async with dls.Dispatch(folder / "frame.db") as plane:
            queue = dls.Queue("q", dispatch=plane)
            async with running_worker(queue, grace=0.1):
                jobs.Signal.event = anyio.Event()
                id = await queue.submit(dls.thunk(jobs.on_signal))
                values = aiter(queue.stream(id))

                async def one() -> None:
                    jobs.Signal.event.set()
                    await anext(values)

                walk = await shortest(recorder, "frame", one)
                await plane.cancel(id)
                return walk

    return asyncio.run(main())


WALKS: dict[str, Callable[[Recorder, Path], Walk]] = {
    "submit": submit,
    "call": call,
    "submit-http": submit_http,
    "frame": frame,
}


def as_table(walks: list[Walk]) -> str:
    lines = [f"{'walk':<12} {'calls':>6} {'switches':>9} {'files':>6}"]
    lines += [f"{walk.name:<12} {walk.calls:>6} {walk.switches:>9} {walk.files:>6}" for walk in walks]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document, with every call on the way")
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", choices=[*WALKS], default=[*WALKS], help="these walks only"
    )
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    recorder = Recorder()
    recorder.install()
    with tempfile.TemporaryDirectory(prefix="walks-", ignore_cleanup_errors=True) as folder:
        walks = [WALKS[name](recorder, Path(folder)) for name in options.only]
    print(json.dumps({"walks": [walk._asdict() for walk in walks]}, indent=1) if options.json else as_table(walks))


if __name__ == "__main__":
    main()
