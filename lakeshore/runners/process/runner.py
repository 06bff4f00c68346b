"""Children as plain processes of this machine, started or forked: their environment, user, limits and output."""

from __future__ import annotations

import io
import os
import pwd
import resource
import subprocess
import sys
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from ...concurrency.tasks import run_to_end
from ...daemon.workdir import ARGS, GATE, MODULES, STDERR, STDOUT
from ...errors import DispatchError
from ...worker.runner import start_or_undo
from ..options import amount, check_known, flag
from ..process_groups import Group, Spawned, WarmInterpreter, end_with_us

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path

    from ...worker.runner import Launch, Process

__all__ = ["Account", "ProcessRunner", "child_environ", "new_output"]

ENTRY = ("-P", "-m", "dreamlake.lakeshore.daemon.entry")
"""-P: the folder of the invocation is no place to import from."""
GRACE = 5.0

KEPT = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP "
    "PYTHONPATH PYTHONUTF8 PYTHONHASHSEED PYTHONWARNINGS PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE "
    "VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH DYLD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER LAKESHORE_HOME LAKESHORE_URL LAKESHORE_NAMESPACE LAKESHORE_QUEUE"
).split()
"""What a child has of this process's environment; tokens are not in it."""
KEPT_BEGINS = ("LC_", "XDG_", "NVIDIA_", "NCCL_")
KEPT_ELSEWHERE = ("LANG", "LANGUAGE", "TZ", *(name for name in KEPT if name.startswith("LAKESHORE_")))
"""The same of a child that has another file system."""

LIMITS = {
    name: getattr(resource, f"RLIMIT_{name[7:].upper()}")
    for name in ("rlimit_as", "rlimit_core", "rlimit_cpu", "rlimit_fsize", "rlimit_nofile", "rlimit_nproc")
    if hasattr(resource, f"RLIMIT_{name[7:].upper()}")
}


def child_environ(
    more: Iterable[str] = (), environ: Mapping[str, str] | None = None, *, elsewhere: bool = False
) -> dict[str, str]:
    """What children have of `environ` (this process's), and `more`: NAME to take another one along, NAME=VALUE to set it.

    Modules are found where this process finds them: in its current folder first. Children `elsewhere`, in a file system
    of their own, keep the paths and programs that they have there, and look into that folder if it is mounted. Raises
    ValueError.
    """
    env = dict(os.environ) if environ is None else environ
    kept, begins = (KEPT_ELSEWHERE, ("LC_",)) if elsewhere else (KEPT, KEPT_BEGINS)
    found = {name: value for name, value in env.items() if name in kept or name.startswith(begins)}
    for one in more:
        name, given, value = one.partition("=")
        if not name or "\0" in one:
            raise ValueError(f"expected NAME or NAME=VALUE for the environment of children, got {one!r}")
        if given:
            found[name] = value
        elif name in env:
            found[name] = env[name]
    if elsewhere:
        found[MODULES] = os.getcwd()
    else:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), found.get("PYTHONPATH")]))
    return found


class _Files(NamedTuple):
    """Descriptors of a start: the child's output, the lock of its folder, both ends of its line to this process."""

    out: int
    err: int
    lock: int
    reading: int
    writing: int


class ProcessRunner:
    """Starts children with `python` (this one) in the environment `environ`.

    grace: seconds between SIGTERM and SIGKILL. limits: names of LIMITS with what each may be, Linux only. warm: fork
    children from an interpreter that has loaded what they need, in place of starting one each.
    """

    name = "process"

    def __init__(
        self,
        *,
        environ: Mapping[str, str] | None = None,
        python: str = sys.executable,
        grace: float = GRACE,
        limits: Mapping[str, int] | None = None,
        warm: bool = False,
    ) -> None:
        self.environ = child_environ() if environ is None else dict(environ)
        self.python, self.grace, self.limits = python, grace, dict(limits or {})
        if self.limits and not hasattr(resource, "prlimit"):
            raise ValueError(f"limits of a process ({', '.join(self.limits)}) can be set on Linux only")
        if warm and not hasattr(os, "waitid"):
            raise ValueError("the runner option warm needs Linux, or Python 3.13 on macOS")
        self._warm = WarmInterpreter(python, self.environ) if warm else None

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> ProcessRunner:
        """The runner that `--runner-option` asks for: python, grace, warm (1 or 0), and the LIMITS, in bytes (1k, 2m,
        3g), seconds or a number. Raises ValueError for anything else."""
        check_known("process", options, ["python", "grace", "warm", *LIMITS])
        grace = amount("grace", options.get("grace", str(GRACE)))
        limits = {name: int(amount(name, value)) for name, value in options.items() if name in LIMITS}
        python = options.get("python") or sys.executable
        return cls(
            environ=environ, python=python, grace=grace, limits=limits, warm=flag("warm", options.get("warm", "0"))
        )

    async def start(self, launch: Launch) -> Process:
        """Start a child. Raises OSError, or DispatchError with what is wrong with its user or its limits."""
        return await start_or_undo(lambda: anyio.to_thread.run_sync(self._start, launch))

    async def aclose(self) -> None:
        """End the warm interpreter."""
        if self._warm is not None:
            await run_to_end(partial(anyio.to_thread.run_sync, self._warm.close))

    def _start(self, launch: Launch) -> Group:
        user = None if launch.as_user is None else Account(launch.as_user)
        environ = {**self.environ, **({} if user is None else user.environ), **launch.environ}
        folder, started = launch.folder.path, list[Group]()
        reading, writing = os.pipe()
        try:
            with new_output(folder / STDOUT) as out, new_output(folder / STDERR) as err:
                files = _Files(out.fileno(), err.fileno(), launch.folder.lock, reading, writing)
                if user is not None:
                    user.give(launch)
                elif self._warm is not None and launch.script is None:
                    self._through_gate(launch, files, partial(self._fork, launch, environ, files), started)
                if not started:
                    self._through_gate(launch, files, partial(self._spawn, launch, environ, user, files), started)
            return started[0]
        finally:
            os.close(reading)
            if not started:
                os.close(writing)

    def _through_gate(
        self, launch: Launch, files: _Files, begin: Callable[[int], Group | None], started: list[Group]
    ) -> None:
        """Have `begin` start a child, which does nothing before it has read a byte from the gate that it is given. Nobody
        else has that gate: a child that was given up, and comes too late, finds it closed."""
        gate, opening = os.pipe()
        try:
            try:
                begun = begin(gate)
            finally:
                os.close(gate)
            if begun is not None:
                started.append(begun)
                self._tie(launch, begun, files.reading)
                with suppress(BrokenPipeError):  # it has ended without having begun
                    os.write(opening, b"\n")
        finally:
            os.close(opening)

    def _tie(self, launch: Launch, started: Group, reading: int) -> None:
        """Do what the child waits for at its gate: then it runs nothing that could outlive this process, or its limits."""
        try:
            end_with_us(reading, started.pid)
            launch.folder.name_group(started.pid)
            for name, most in self.limits.items():
                resource.prlimit(started.pid, LIMITS[name], (most, most))
        except ProcessLookupError:
            pass  # a forked child that has ended already: nothing of it is left to be bound
        except BaseException as exc:
            started.end_at_once()
            if isinstance(exc, (ValueError, PermissionError)):
                raise DispatchError(f"the limits {self.limits} cannot be set: {exc}") from exc
            raise

    def _fork(self, launch: Launch, environ: Mapping[str, str], files: _Files, gate: int) -> Group | None:
        assert self._warm is not None
        fds = (files.out, files.err, files.lock, files.reading, gate)
        return self._warm.fork(launch.folder.path, environ, fds, self.grace, files.writing)

    def _spawn(
        self, launch: Launch, environ: Mapping[str, str], user: Account | None, files: _Files, gate: int
    ) -> Group:
        process = subprocess.Popen(
            [self.python, *ENTRY] if launch.script is None else ["bash", "-c", _at_gate(gate), launch.script],
            cwd=launch.folder.path,
            env=environ if launch.script is not None else {**environ, GATE: str(gate)},
            stdin=subprocess.DEVNULL,
            stdout=files.out,
            stderr=files.err,
            pass_fds=(files.lock, files.reading, gate),
            process_group=0,
            user=None if user is None else user.uid,
            group=None if user is None else user.gid,
            extra_groups=None if user is None else user.groups,
        )
        return Spawned(process, self.grace, files.writing)


def _at_gate(gate: int) -> str:
    """What has bash wait there and then go on with its first argument, in the same process."""
    return f'read -r _ <&{gate} && exec bash -c "$0" {gate}<&-'


def new_output(path: Path) -> io.FileIO:
    """A new file: what lay under the name could lead elsewhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    return io.FileIO(os.open(path, flags, 0o600), "a")


class Account:
    """Another account to run as, which only root can."""

    def __init__(self, name: str) -> None:
        try:
            found = pwd.getpwnam(name)
        except KeyError:
            raise DispatchError(f"`as_user` names {name!r}, and there is no such user here") from None
        if os.geteuid() != 0:
            raise DispatchError(
                f"`as_user` names {name!r}, and only a worker that runs as root can run as another user"
            )
        self.uid, self.gid = found.pw_uid, found.pw_gid
        self.groups = os.getgrouplist(name, found.pw_gid)
        self.environ = {"HOME": found.pw_dir, "USER": name, "LOGNAME": name, "SHELL": found.pw_shell}

    def give(self, launch: Launch) -> None:
        """Let the user into the folder: what is below the root of all folders stays closed to everybody else."""
        folder = launch.folder.path
        os.chmod(folder.parent, 0o711)
        os.chown(folder / ARGS, self.uid, self.gid)
        os.chown(folder, self.uid, self.gid)
