"""Workers of children for the tests, and what is left of processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from dreamlake.lakeshore.body.execute import leaf_exceptions
from dreamlake.lakeshore.runners.environment import child_environ
from dreamlake.lakeshore.runners.process.runner import ProcessOptions, ProcessRunner
from dreamlake.lakeshore.worker.child import ChildExecutor, ChildRules
from dreamlake.lakeshore.worker.loop import run_executor
from dreamlake.lakeshore.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    import dreamlake.lakeshore as dls
    from dreamlake.lakeshore.worker.runner import Runner

HERE = Path(__file__).resolve().parent
DEFAULT_SETTINGS: dict[str, Any] = {
    "concurrency": 1,
    "retries": 0,
    "timeout": None,
    "lease": 30.0,
    "max_lost": 5,
    "grace": 5.0,
}


def environ(**more: str) -> dict[str, str]:
    """That of a child, with the modules of these tests importable, and coverage measured where it is here."""
    found = child_environ([name for name in os.environ if name.startswith("COV")])
    found["PYTHONPATH"] = os.pathsep.join([str(HERE), found["PYTHONPATH"]])
    return {**found, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "error", **more}


WARM = [False]
"""Whether children are forked from a warm interpreter."""


def process_runner(variables: Mapping[str, str] | None = None, **options: Any) -> ProcessRunner:
    """A runner with the environment `variables`, by default `environ()`, and with the options given by their names."""
    return ProcessRunner(
        ProcessOptions(**{"warm": WARM[0], **options}), environ=environ() if variables is None else variables
    )


@asynccontextmanager
async def children(
    queue: dls.Queue,
    folder: Path,
    runner: Runner | None = None,
    *,
    rules: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[anyio.Event]:
    """A worker of children during the block; gives the event that stops it."""
    runner = process_runner() if runner is None else runner
    stop, failure = anyio.Event(), list[BaseException]()
    said = {"workdir": folder / "work", "root": folder, "local": queue.dispatch.local, **(rules or {})}
    executor = partial(ChildExecutor, runner, ChildRules(**said))
    worker_settings = WorkerSettings(**{**DEFAULT_SETTINGS, **settings})
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_executor, queue, executor, worker_settings, stop=stop))
            try:
                yield stop
            except Exception as exc:
                failure.append(exc)
                group.cancel_scope.cancel()
            stop.set()
    except BaseExceptionGroup as raised:
        failure = failure or [next(leaf_exceptions(raised))]
    finally:
        await runner.aclose()
    if failure:
        raise failure[0]


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def holders(folder: Path) -> list[int]:
    """The processes that work in a folder or below."""
    found = list[int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if Path(os.readlink(entry / "cwd")).is_relative_to(folder) and runs(int(entry.name)):
                    found.append(int(entry.name))
    return found


def folders(folder: Path) -> list[str]:
    """The names of the folders of invocations that are left."""
    work = folder / "work"
    return sorted(path.name for path in work.iterdir()) if work.exists() else []


@contextmanager
def started(script: str, *args: str, **more: str) -> Iterator[subprocess.Popen[str]]:
    """A script of this folder as a process, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-W", "error", str(HERE / script), *args],
        env={**environ(), **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.communicate()
