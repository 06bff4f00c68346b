"""Children whose engine has a client that runs as long as they do, as `docker start --attach` does.

What such engines share: what a container sees of this machine, how the client is started and awaited, and the errors for
an image in which a child ended before it had begun.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ..concurrency.tasks import run_to_end
from ..daemon.workdir import RESULT, STDERR, STDOUT, last_output, read_error
from ..errors import DispatchError
from ..worker.runner import Exit
from .failure import child_failed, child_lost
from .options import words
from .output import create_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..planes.contract.records import Failure
    from ..worker.runner import Launch
    from .commands import Guard

__all__ = [
    "NO_HOME",
    "AttachedChild",
    "ChildProgram",
    "EngineUnreachable",
    "Mount",
    "container_environ",
    "container_name",
    "launch_mounts",
    "read_mounts",
    "start_client",
]

logger = logging.getLogger("dreamlake.lakeshore.worker")

CLIENT_TIMEOUT = 60.0
"""Seconds that a client has to end once its container was killed."""
NO_HOME = "/dev/null/the-plane-is-a-file-that-this-container-does-not-have"
"""LAKESHORE_HOME where it is not mounted: what a body submits fails with this path, and is not lost with the container."""

_STOPPED = ("Cancelled", "stopped by SIGTERM")
"""Type and message of the error that a child reports after a SIGTERM."""

_NO_PROGRAM = re.compile(r"\bexec\b.*\b(failed|found|no such)|failed to exec|finding executable|failed to load ", re.I)
_NO_PACKAGE = re.compile(r"No module named '?dreamlake")
_NO_P = re.compile(r"nknown option: -P")


class EngineUnreachable(DispatchError):
    """The engine does not answer, or its answer cannot be understood."""


# --- what a container sees --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Mount:
    """A file or folder of this machine, and its path in the container."""

    source: str
    target: str
    read_only: bool


def read_mounts(name: str, value: str) -> tuple[Mount, ...]:
    """Parse an option `SRC[:DST][:ro],...`. Raises ValueError where SRC does not exist or DST is not absolute."""
    found = list[Mount]()
    for item in words(name, value):
        parts = item.split(":")
        read_only = parts[-1] == "ro"
        if len(parts) > 1 and parts[-1] in ("ro", "rw"):
            parts.pop()
        source = os.path.abspath(parts[0])
        target = parts[1] if len(parts) > 1 else source
        if len(parts) > 2 or not os.path.isabs(target):
            raise ValueError(
                f"expected the runner option {name} to be SRC[:DST][:ro] with an absolute DST, got {item!r}"
            )
        if not os.path.exists(source):
            raise ValueError(f"the runner option {name} names {source!r}, and there is no such file or folder here")
        found.append(Mount(source, os.path.normpath(target), read_only))
    return tuple(found)


def launch_mounts(launch: Launch, more: Sequence[Mount]) -> list[Mount]:
    """Return what is mounted for an invocation: `more`, its folder and the root of keys, under their paths here."""
    root = launch.environ.get("LAKESHORE_ROOT", "/")
    if root == "/":
        raise DispatchError(
            "the root of keys is /, which cannot be mounted in a container: start the worker with --root FOLDER"
        )
    own = [Mount(path, path, False) for path in (root, str(launch.folder.path))]
    targets = [mount.target for mount in more]
    return [*more, *(mount for mount in own if mount.target not in targets)]


def container_environ(environ: Mapping[str, str], shared: Sequence[Mount]) -> dict[str, str]:
    """Return the variables of a child in a container, where only the `shared` mounts can hold a plane in a file."""
    home = environ.get("LAKESHORE_HOME")
    if not home or any(Path(home).is_relative_to(mount.target) for mount in shared):
        return dict(environ)
    return {**environ, "LAKESHORE_HOME": NO_HOME}


def container_name(launch: Launch) -> str:
    """Return a container's name. It differs for folders of the same id, which belong to other planes."""
    tag = hashlib.sha256(os.fsencode(launch.folder.path)).hexdigest()[:8]
    return f"lakeshore-{launch.id}-{launch.attempt}-{tag}"


# --- the client -------------------------------------------------------------------------------------------------------


async def start_client(argv: Sequence[str], launch: Launch, *, output: bool = True) -> anyio.abc.Process:
    """Start the client that runs as long as the child does. It holds the lock of the folder.

    It leads a process group, which a later attempt that needs the folder kills.

    Args:
        argv: The client and its arguments.
        launch: What it runs.
        output: Whether its output goes into the folder.
    """
    with ExitStack() as files:
        stdout = stderr = subprocess.DEVNULL
        if output:
            stdout = files.enter_context(create_output(launch.folder.path / STDOUT)).fileno()
            stderr = files.enter_context(create_output(launch.folder.path / STDERR)).fileno()
        client = await anyio.open_process(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            cwd=launch.folder.path,  # podman writes a file of its own into it when memory ran out
            start_new_session=True,
            pass_fds=[launch.folder.lock],
        )
    launch.folder.name_group(client.pid)
    return client


@dataclass(frozen=True, slots=True)
class ChildProgram:
    """What a child runs, for messages to people."""

    runner: str
    """The name of the runner."""
    engine: str
    """The name of the engine's program."""
    place: str
    """What has the child's program in it, such as an image."""
    python: str
    """The child's program."""


class AttachedChild(ABC):
    """A child whose `client` runs as long as it does."""

    def __init__(
        self,
        launch: Launch,
        client: anyio.abc.Process,
        guard: Guard,
        program: ChildProgram,
        *,
        grace: float,
        start_timeout: float,
    ) -> None:
        """
        Args:
            launch: What the child was started for.
            client: The client that has been started.
            guard: What ends the child when this process is gone.
            program: What it runs, for messages.
            grace: Seconds between SIGTERM and SIGKILL.
            start_timeout: Seconds that it has to begin.
        """
        self._launch = launch
        self._client = client
        self._guard = guard
        self._program = program
        self._grace = grace
        self._start_timeout = start_timeout
        self._exit: Exit | None = None
        self._start_error: Failure | None = None
        self._began = False
        self._stopping = False

    async def _wait_for_client(self) -> None:
        """Wait for the client's end. Kill the child if it does not begin in time."""
        if not self._began:
            with anyio.move_on_after(self._start_timeout):
                await self._client.wait()
            if self._client.returncode is None and not await self._may_have_begun():
                message = f"{self._program.engine} has not begun it within {self._start_timeout:g} s"
                self._start_error = await self._start_failure(message)
                await run_to_end(self.kill)
            self._began = True
        await self._client.wait()

    async def kill(self) -> Exit:
        if self._exit is None:
            self._stopping = True
            try:
                await self._stop()
                await self._conclude()
            except EngineUnreachable as exc:
                logger.warning("the child of %s may still run in its container: %s", self._launch.id, exc)
            if self._client.returncode is None:
                self._client.kill()
                await self._client.wait()
            if self._exit is None:
                await self._set_exit(Exit(-signal.SIGKILL), gone=False)
        assert self._exit is not None
        return self._exit

    async def _stop(self) -> None:
        if self._client.returncode is None and await self._send_signal("TERM"):
            with anyio.move_on_after(self._grace):
                await self._client.wait()
        if self._client.returncode is None:
            await self._remove_container()
            with anyio.move_on_after(CLIENT_TIMEOUT):
                await self._client.wait()
        if self._client.returncode is None:
            self._client.kill()
            await self._client.wait()

    async def _may_have_begun(self) -> bool:
        try:
            return await self._has_begun()
        except EngineUnreachable:
            return True  # most likely it runs, and the client's end shows how that went

    @abstractmethod
    async def _has_begun(self) -> bool:
        """Return whether the child has begun. Raises EngineUnreachable."""

    @abstractmethod
    async def _send_signal(self, name: str) -> bool:
        """Send a signal to the child; return whether there is one that has begun."""

    @abstractmethod
    async def _remove_container(self) -> None:
        """End the container and remove it. Raises EngineUnreachable."""

    @abstractmethod
    async def _conclude(self) -> None:
        """After the client's end: remove what is left and `_set_exit`. Raises EngineUnreachable."""

    async def _set_exit(self, ended: Exit, *, gone: bool = True) -> None:
        """Keep how the child has ended. `gone`: nothing is left of it, so that the guard is not needed any more."""
        if gone or not self._hand_over_guard():
            await anyio.to_thread.run_sync(self._guard.dismiss)
        self._exit = ended if self._start_error is None else Exit(1, error=self._start_error)

    def _hand_over_guard(self) -> bool:
        """Hand the guard and what is left of the child to the runner; return whether the runner takes them."""
        return False

    # How the child has ended

    async def _exit_for(self, code: int, cause: str | None = None) -> Exit:
        """Return the Exit for an exit code, in which more than 128 means a signal. `cause`: what is known besides."""
        folder = self._launch.folder.path
        ended = Exit(code)
        if 128 < code < 128 + signal.NSIG:
            ended = Exit(128 - code)
        if code == 0 or self._stopping:
            return ended
        report = await anyio.to_thread.run_sync(read_error, folder)
        if report is not None and (report.type, report.message) == _STOPPED:
            return await self._exit_of_lost(
                "its container was stopped by something other than its worker, perhaps together with the engine"
            )
        if report is not None:
            return ended
        output = await anyio.to_thread.run_sync(last_output, folder)
        fault = cause or self._fault_of_image(output)
        return ended if fault is None else replace(ended, error=child_failed(fault, output))

    async def _start_failure(self, message: str) -> Failure:
        """Return the failure of a child that never ran. `message`: what the engine reports."""
        output = await anyio.to_thread.run_sync(last_output, self._launch.folder.path)
        fault = self._fault_of_image(message or output)
        parts = [f"the {self._program.runner} runner could not start a child", fault, message]
        return child_failed(": ".join(filter(None, parts)), output)

    async def _exit_of_lost(self, message: str) -> Exit:
        """Return the Exit of a child about which the engine knows nothing. One that left its result had finished."""
        result = self._launch.folder.path / RESULT
        if await anyio.to_thread.run_sync(result.exists):
            return Exit(0)
        return Exit(1, error=child_lost(f"{message}; no result was there, and the body may have begun"))

    def _fault_of_image(self, output: str) -> str | None:
        """Return what is wrong with an image in which a child wrote nothing but this output."""
        last = output.rpartition("\n")[2]
        place = self._program.place
        python = self._program.python
        if _NO_PROGRAM.search(last):
            if self._launch.script is not None:
                return f"{place} has no bash, which `script` needs"
            return f"{place} has no program {python!r}: name its Python with --runner-option python=PATH"
        if _NO_PACKAGE.search(last):
            return (
                f"{python!r} of {place} does not have this package: install dreamlake-lakeshore in it, or mount it and "
                "name the folder with --env PYTHONPATH=FOLDER"
            )
        if _NO_P.search(output):
            return f"{python!r} of {place} is older than Python 3.11, which dreamlake-lakeshore needs"
        return None
