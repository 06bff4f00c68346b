"""Run children as processes of this machine, spawned or forked: their user, limits and output."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar

import anyio
import anyio.to_thread

from ...concurrency.tasks import run_to_end
from ...daemon.workdir import GATE, STDERR, STDOUT
from ...errors import DispatchError
from ...worker.runner import start_or_undo
from ..account import Account, find_account, give_folder
from ..commands import child_command
from ..environment import child_environ
from ..options import Option, amount, flag, read_options, whole_amount
from ..output import create_output
from ..process_groups import ProcessGroup, SpawnedGroup, WarmInterpreter, kill_with_this_process

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ...worker.runner import Launch, Process

__all__ = ["ProcessOptions", "ProcessRunner"]

GRACE = 5.0
LIMITS = ("rlimit_as", "rlimit_core", "rlimit_cpu", "rlimit_fsize", "rlimit_nofile", "rlimit_nproc")
"""The options that are limits of a process, as setrlimit(2) describes them."""


def _limit(name: str, value: str, what: str) -> Option:
    return Option(value, f"Limit of {what}.", whole_amount, name=f"rlimit_{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """The options of the process runner."""

    notes: ClassVar[str] = ""

    python: Annotated[str, Option("PATH", "The Python that runs children.")] = sys.executable
    grace: Annotated[float, Option("SECONDS", "From SIGTERM to SIGKILL.", amount)] = GRACE
    warm: Annotated[bool, Option("1", "Fork children from an interpreter that has loaded what they need.", flag)] = (
        False
    )
    rlimit_as: Annotated[int | None, _limit("as", "BYTES", "the address space, such as 8g")] = None
    rlimit_core: Annotated[int | None, _limit("core", "BYTES", "a core dump")] = None
    rlimit_cpu: Annotated[int | None, _limit("cpu", "SECONDS", "the CPU time")] = None
    rlimit_fsize: Annotated[int | None, _limit("fsize", "BYTES", "the size of a file")] = None
    rlimit_nofile: Annotated[int | None, _limit("nofile", "NUMBER", "open files")] = None
    rlimit_nproc: Annotated[int | None, _limit("nproc", "NUMBER", "processes of the user")] = None

    def __post_init__(self) -> None:
        limits = self.limits()
        if limits and not hasattr(resource, "prlimit"):
            raise ValueError(f"limits of a process ({', '.join(limits)}) can be set on Linux only")
        if self.warm and not hasattr(os, "waitid"):
            raise ValueError("the runner option warm needs Linux, or Python 3.13 on macOS")

    def limits(self) -> dict[str, int]:
        """Return the limits that are set, by the names of their options."""
        found: dict[str, int | None] = {name: getattr(self, name) for name in LIMITS}
        return {name: limit for name, limit in found.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class _Descriptors:
    """The open files of a start: the child's output, the lock of its folder, both ends of its lifeline."""

    stdout: int
    stderr: int
    lock: int
    lifeline: int
    lifeline_here: int


class ProcessRunner:
    """Starts children as processes in the environment `environ`, by default `child_environ()`."""

    name = "process"
    options_class = ProcessOptions

    def __init__(self, options: ProcessOptions | None = None, *, environ: Mapping[str, str] | None = None) -> None:
        self.options = ProcessOptions() if options is None else options
        self.environ = child_environ() if environ is None else dict(environ)
        self._warm = WarmInterpreter(self.options.python, self.environ) if self.options.warm else None

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> ProcessRunner:
        """Make the runner for `--runner-option`. Raises ValueError."""
        return cls(read_options(ProcessOptions, cls.name, options), environ=environ)

    async def start(self, launch: Launch) -> Process:
        """Start a child.

        Raises:
            OSError: The program cannot be run.
            DispatchError: There is no such user, or a limit cannot be set.
        """
        return await start_or_undo(partial(self._start_in_thread, launch))

    async def aclose(self) -> None:
        """End the warm interpreter."""
        if self._warm is not None:
            await run_to_end(partial(anyio.to_thread.run_sync, self._warm.close))

    async def _start_in_thread(self, launch: Launch) -> ProcessGroup:
        return await anyio.to_thread.run_sync(self._start, launch)

    def _start(self, launch: Launch) -> ProcessGroup:
        folder = launch.folder.path
        account = None if launch.as_user is None else find_account(launch.as_user)
        environ = {**self.environ, **launch.environ}
        if account is not None:
            environ = {**self.environ, **account.environ, **launch.environ}
        started = list[ProcessGroup]()
        lifeline, lifeline_here = os.pipe()
        try:
            with create_output(folder / STDOUT) as stdout, create_output(folder / STDERR) as stderr:
                fds = _Descriptors(stdout.fileno(), stderr.fileno(), launch.folder.lock, lifeline, lifeline_here)
                if account is not None and launch.as_user is not None:
                    give_folder(folder, launch.as_user, account.uid, account.gid)
                elif self._warm is not None and launch.script is None:
                    self._through_gate(launch, fds, partial(self._fork, launch, environ, fds), started)
                if not started:
                    self._through_gate(launch, fds, partial(self._spawn, launch, environ, account, fds), started)
            return started[0]
        finally:
            os.close(lifeline)
            if not started:  # otherwise the group closes it when it has ended
                os.close(lifeline_here)

    def _through_gate(
        self,
        launch: Launch,
        fds: _Descriptors,
        begin: Callable[[int], ProcessGroup | None],
        started: list[ProcessGroup],
    ) -> None:
        """Start a child that does nothing before it has read a byte from its gate, and prepare it meanwhile.

        Nobody else has the gate: a child that was given up and comes too late finds it closed.

        Args:
            launch: What to start.
            fds: Its descriptors.
            begin: Starts the child that waits at the gate it is given; returns None where it cannot.
            started: The child is added to it.
        """
        gate, gate_here = os.pipe()
        try:
            try:
                begun = begin(gate)
            finally:
                os.close(gate)
            if begun is not None:
                started.append(begun)
                self._prepare(launch, begun, fds.lifeline)
                with suppress(BrokenPipeError):  # it has ended without having begun
                    os.write(gate_here, b"\n")
        finally:
            os.close(gate_here)

    def _prepare(self, launch: Launch, begun: ProcessGroup, lifeline: int) -> None:
        """Bind the child's life to that of this process, and set its limits, before it runs anything."""
        try:
            kill_with_this_process(lifeline, begun.pid)
            launch.folder.name_group(begun.pid)
            for name, limit in self.options.limits().items():
                resource.prlimit(begun.pid, getattr(resource, name.upper()), (limit, limit))
        except ProcessLookupError:
            pass  # a forked child that has ended already
        except BaseException as exc:
            begun.kill_now()
            if isinstance(exc, (ValueError, PermissionError)):
                raise DispatchError(f"the limits {self.options.limits()} cannot be set: {exc}") from exc
            raise

    def _fork(self, launch: Launch, environ: Mapping[str, str], fds: _Descriptors, gate: int) -> ProcessGroup | None:
        assert self._warm is not None
        inherited = (fds.stdout, fds.stderr, fds.lock, fds.lifeline, gate)
        return self._warm.fork(launch.folder.path, environ, inherited, self.options.grace, fds.lifeline_here)

    def _spawn(
        self, launch: Launch, environ: Mapping[str, str], account: Account | None, fds: _Descriptors, gate: int
    ) -> ProcessGroup:
        command = child_command(launch, self.options.python)
        if launch.script is None:
            environ = {**environ, GATE: str(gate)}
        else:
            command = ["bash", "-c", f'read -r _ <&{gate} && exec bash -c "$0" {gate}<&-', launch.script]
        process = subprocess.Popen(
            command,
            cwd=launch.folder.path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=fds.stdout,
            stderr=fds.stderr,
            pass_fds=(fds.lock, fds.lifeline, gate),
            process_group=0,
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None if account is None else account.groups,
        )
        return SpawnedGroup(process, self.options.grace, fds.lifeline_here)
