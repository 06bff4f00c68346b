"""What container engines have in common whose client stays as long as the child does: what a container sees of this
machine, the client that is followed, and what is wrong with an image in which a child ends before it has begun."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import signal
import subprocess
from abc import ABC, abstractmethod
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from ..concurrency.tasks import run_to_end
from ..daemon.workdir import RESULT, STDERR, STDOUT, last_output, read_error
from ..errors import DispatchError
from ..planes.contract.records import Failure
from ..worker.runner import Exit
from .options import words
from .process.runner import new_output

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..worker.runner import Launch
    from .commands import Guard

__all__ = [
    "ENTRY",
    "NO_PLANE",
    "Followed",
    "Mount",
    "Program",
    "Unreachable",
    "follow",
    "mounts_of",
    "name_of",
    "own_environ",
    "read_mounts",
]

logger = logging.getLogger("dreamlake.lakeshore.worker")

ENTRY = ("-P", "-m", "dreamlake.lakeshore.daemon.entry")
PATIENCE = 60.0
"""Seconds that a client has to end once its container was killed."""
NO_PLANE = "/dev/null/the-plane-is-a-file-that-this-container-does-not-have"
"""LAKESHORE_HOME where it is not mounted: what a body submits is refused by name, not lost with the container."""

STOPPED = ("Cancelled", "stopped by SIGTERM")
"""What a child says that was asked to end."""

_NO_PROGRAM = re.compile(r"\bexec\b.*\b(failed|found|no such)|failed to exec|finding executable|failed to load ", re.I)
_NO_PACKAGE = re.compile(r"No module named '?dreamlake")
_NO_P = re.compile(r"nknown option: -P")


class Unreachable(DispatchError):
    """The engine does not answer, or not with what it was asked."""


class Mount(NamedTuple):
    """A file or folder of this machine, and where it lies in the container."""

    source: str
    target: str
    read_only: bool


def read_mounts(text: str | None) -> list[Mount]:
    """The mounts of `SRC[:DST][:ro],...`. Raises ValueError where SRC is not here or DST not absolute."""
    found = list[Mount]()
    for one in words(text):
        parts = one.split(":")
        read_only = parts[-1] == "ro"
        if len(parts) > 1 and parts[-1] in ("ro", "rw"):
            parts.pop()
        source = os.path.abspath(parts[0])
        target = parts[1] if len(parts) > 1 else source
        if len(parts) > 2 or not os.path.isabs(target):
            raise ValueError(f"expected the runner option mount to be SRC[:DST][:ro] with an absolute DST, got {one!r}")
        if not os.path.exists(source):
            raise ValueError(f"the runner option mount names {source!r}, and there is no such file or folder here")
        found.append(Mount(source, os.path.normpath(target), read_only))
    return found


def mounts_of(launch: Launch, more: Sequence[Mount]) -> list[Mount]:
    """What is mounted for an invocation: its folder and the root of keys where they are here, and `more`."""
    root = launch.environ.get("LAKESHORE_ROOT", "/")
    if root == "/":
        raise DispatchError(
            "the root of keys is /, which cannot be mounted in a container: start the worker with --root FOLDER"
        )
    own = [Mount(path, path, False) for path in (root, str(launch.folder.path))]
    targets = [one.target for one in more]
    return [*more, *(one for one in own if one.target not in targets)]


def own_environ(environ: Mapping[str, str], mounts: Sequence[Mount]) -> dict[str, str]:
    """The variables of a child whose file systems are its own, but for `mounts`, in which a plane may be shared."""
    home = environ.get("LAKESHORE_HOME")
    if not home or any(Path(home).is_relative_to(one.target) for one in mounts):
        return dict(environ)
    return {**environ, "LAKESHORE_HOME": NO_PLANE}


def name_of(launch: Launch) -> str:
    """A container's name. Folders of the same id, those of other planes, make others."""
    tag = hashlib.sha256(os.fsencode(launch.folder.path)).hexdigest()[:8]
    return f"lakeshore-{launch.id}-{launch.attempt}-{tag}"


async def follow(argv: Sequence[str], launch: Launch, *, output: bool = True) -> anyio.abc.Process:
    """Start the client that stays as long as the child does. It holds the lock of the folder, into which the output goes.

    It is the leader of a process group, which a later attempt that needs the folder kills.
    """
    with ExitStack() as files:
        out, err = subprocess.DEVNULL, subprocess.DEVNULL
        if output:
            out, err = (
                files.enter_context(new_output(launch.folder.path / name)).fileno() for name in (STDOUT, STDERR)
            )
        client = await anyio.open_process(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            cwd=launch.folder.path,  # podman writes a file of its own into it when memory ran out
            start_new_session=True,
            pass_fds=[launch.folder.lock],
        )
    launch.folder.name_group(client.pid)
    return client


class Program(NamedTuple):
    """What a child is, for people: its runner, the engine's program, where its own program lies, and which that is."""

    runner: str
    engine: str
    place: str
    python: str


class Followed(ABC):
    """A child whose `client` runs as long as it does.

    guard: what ends it when this process is gone. grace: seconds between SIGTERM and SIGKILL. start_timeout: seconds that
    it has to begin.
    """

    def __init__(
        self,
        launch: Launch,
        client: anyio.abc.Process,
        guard: Guard,
        program: Program,
        grace: float,
        start_timeout: float,
    ) -> None:
        self._launch, self._client, self._guard, self._program = launch, client, guard, program
        self._grace, self._start_timeout = grace, start_timeout
        self._exit: Exit | None = None
        self._error: Failure | None = None
        self._began = self._stopping = False

    async def _client_ended(self) -> None:
        """Wait for the client's end; end it when the child has not begun in time."""
        if not self._began:
            with anyio.move_on_after(self._start_timeout):
                await self._client.wait()
            if self._client.returncode is None and not await self._surely_begun():
                said = f"{self._program.engine} has not begun it in {self._start_timeout:g} s"
                self._error = await self._not_started(said)
                await run_to_end(self.kill)
            self._began = True
        await self._client.wait()

    async def kill(self) -> Exit:
        if self._exit is None:
            self._stopping = True
            try:
                await self._stop()
                await self._settle()
            except Unreachable as exc:
                logger.warning("the child of %s may go on in its container: %s", self._launch.id, exc)
            if self._client.returncode is None:
                self._client.kill()
                await self._client.wait()
            if self._exit is None:
                await self._end(Exit(-signal.SIGKILL), gone=False)
        assert self._exit is not None
        return self._exit

    async def _stop(self) -> None:
        if self._client.returncode is None and await self._signal("TERM"):
            with anyio.move_on_after(self._grace):
                await self._client.wait()
        if self._client.returncode is None:
            await self._remove()
            with anyio.move_on_after(PATIENCE):
                await self._client.wait()
        if self._client.returncode is None:
            self._client.kill()
            await self._client.wait()

    async def _surely_begun(self) -> bool:
        try:
            return await self._has_begun()
        except Unreachable:
            return True  # it runs, more likely than not, and its client will say how that ends

    @abstractmethod
    async def _has_begun(self) -> bool:
        """Whether the child has begun. Raises Unreachable."""

    @abstractmethod
    async def _signal(self, name: str) -> bool:
        """Send a signal to the child; whether there is one that has begun."""

    @abstractmethod
    async def _remove(self) -> None:
        """End the container and remove it. Raises Unreachable."""

    @abstractmethod
    async def _settle(self) -> None:
        """The client has ended: `_end` with what came of the child, once nothing is left. Raises Unreachable."""

    async def _end(self, ended: Exit, *, gone: bool = True) -> None:
        """This is what came of it. gone: nothing is left of it."""
        if gone or not self._abandon():
            await anyio.to_thread.run_sync(self._guard.dismiss)
        self._exit = ended if self._error is None else Exit(1, error=self._error)

    def _abandon(self) -> bool:
        """Whether somebody else sees to what is left, and to the guard."""
        return False

    # What came of it

    async def _exit_of(self, code: int, how: str | None = None) -> Exit:
        """The end with exit code `code`, in which 128 and more mean a signal. how: what is known of it besides."""
        folder = self._launch.folder.path
        ended = Exit(code)
        if 128 < code < 128 + signal.NSIG:
            ended = Exit(128 - code)
        if code == 0 or self._stopping:
            return ended
        said = await anyio.to_thread.run_sync(read_error, folder)
        if said is not None and (said.type, said.message) == STOPPED:
            return await self._lost(
                "its container was stopped by somebody else than its worker: with the engine, perhaps"
            )
        if said is not None:
            return ended
        output = await anyio.to_thread.run_sync(last_output, folder)
        fault = how or self._fault(output)
        return ended if fault is None else replace(ended, error=self._failure(fault, output))

    async def _not_started(self, said: str) -> Failure:
        """The failure of a child that never ran, of which the engine says this and what is in the output."""
        output = await anyio.to_thread.run_sync(last_output, self._launch.folder.path)
        parts = [f"the {self._program.runner} runner could not start a child", self._fault(said or output), said]
        return self._failure(": ".join(filter(None, parts)), output)

    async def _lost(self, said: str) -> Exit:
        """The end of a child of which the engine can say nothing; one that has left its result had finished."""
        result = self._launch.folder.path / RESULT
        if await anyio.to_thread.run_sync(result.exists):
            return Exit(0)
        return Exit(1, error=Failure("WorkerLost", f"{said}; no result was there, and the body may have begun"))

    def _failure(self, message: str, output: str = "") -> Failure:
        return Failure("DaemonError", f"{message}; the end of its output:\n{output}" if output else message)

    def _fault(self, output: str) -> str | None:
        """What is wrong with an image in which a child ended with such words and nothing else."""
        last, place, python = output.rpartition("\n")[2], self._program.place, self._program.python
        if _NO_PROGRAM.search(last):
            if self._launch.script is not None:
                return f"{place} has no bash, which `script` needs"
            return f"{place} has no program {python!r}: name its Python with --runner-option python=PATH"
        if _NO_PACKAGE.search(last):
            return (
                f"{python!r} of {place} does not have this package: install dreamlake-lakeshore in it, or mount it and say "
                "where with --env PYTHONPATH=FOLDER"
            )
        if _NO_P.search(output):
            return f"{python!r} of {place} is older than Python 3.11, which dreamlake-lakeshore needs"
        return None
