"""Children as jobs of a Slurm cluster: one for each invocation, in a folder on a file system that its nodes share.

A job is named `lakeshore-ID-ATTEMPT`. By that name a guard ends it when this process is gone, and a later attempt those of
earlier ones. How it ended, Slurm says; what it left lies in its folder.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from contextlib import suppress
from functools import partial
from signal import SIGKILL
from typing import TYPE_CHECKING, TypeVar

import anyio
import anyio.to_thread

from ...concurrency.tasks import run_to_end
from ...daemon.workdir import ARGS, ERROR, LOCK, RESULT, last_output, read_error, remove_leftovers
from ...errors import DispatchError
from ...planes.contract.records import Failure
from ...worker.runner import Exit
from ..commands import Guard, run_command
from ..options import amount, check_known, words
from ..process.runner import ENTRY, Account
from .control import ENDED, FORGOTTEN, PENDING, Control, Record, Watch, Watcher

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from pathlib import Path

    from ...worker.runner import Launch, Process

__all__ = ["SlurmRunner"]

T = TypeVar("T")

logger = logging.getLogger("dreamlake.lakeshore.worker")

GRACE, POLL, ANSWER = 5.0, 2.0, 30.0
AGAIN = 10.0
"""Seconds after which a job that is to end, and has not, is told so again."""
PATIENCE = 120.0
"""Seconds that Slurm has to end a job that nobody waits for any more; after that a warning says that it may run on."""
LATE = 3.0
"""Seconds within which the file that a job has written last is seen here, through a file system that is far away."""
PAUSE, HURRY = 0.5, 0.1
"""Seconds between two questions to Slurm where something is to end, and to a folder where something is to appear."""
STOPPED = "stopped by SIGTERM"
"""What the entry writes when Slurm ends it, whatever for."""
NOT_LAUNCHED = -53
"""Slurm's code for a job whose output files could not be opened on its node."""

FLAGS = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "time": "time",
    "cpus": "cpus-per-task",
    "memory": "mem",
    "gres": "gres",
    "gpus": "gpus",
    "constraint": "constraint",
    "nodelist": "nodelist",
}
"""Options that are handed to `sbatch`, and its words for them."""
OPTIONS = (*FLAGS, "sbatch", "python", "conf", "poll", "grace", "start-timeout")
_ARRAY = re.compile(r"-a|--ar")

_GUARD = 'for i in 0 1 2 10 30 60; do sleep "$i"; scancel --quiet "$@" && test "$i" -gt 1 && exit; done'
"""More than once, since the job may still be on its way to Slurm; and again when Slurm does not answer."""
_NOT_SENT = ("Unable to contact slurm controller", "cannot be run")
_LAST = {0: RESULT, 1: ERROR}
"""What the entry has written when it ends with such a code."""
_LOST = {
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "PREEMPTED": "it had to make room for another",
    "REVOKED": "another cluster has taken it",
    FORGOTTEN: "Slurm knows it no longer, and it left neither a result nor an error",
}


class SlurmRunner:
    """Starts children as jobs, with `python` on the nodes and exactly the environment `environ`.

    sbatch: further arguments for it. conf: the slurm.conf to use. poll: seconds between two looks at the queue, which
    serve all jobs. grace: seconds between SIGTERM and `scancel`, after which Slurm waits for its KillWait. answer: seconds
    that one call of Slurm's programs may take.
    """

    name = "slurm"

    def __init__(
        self,
        *,
        environ: Mapping[str, str],
        sbatch: Sequence[str] = (),
        python: str = sys.executable,
        conf: str | None = None,
        poll: float = POLL,
        grace: float = GRACE,
        answer: float = ANSWER,
    ) -> None:
        self.environ, self.sbatch, self.python, self.grace = dict(environ), tuple(sbatch), python, grace
        if not 0 < poll or not 0 < answer:
            raise ValueError(f"the slurm runner needs poll and start-timeout above 0 s, got {poll:g} and {answer:g}")
        if wrong := [one for one in self.sbatch if not one.startswith("-") or _ARRAY.match(one)]:
            raise ValueError(
                f"expected the runner option sbatch to be flags such as --exclusive,--nice=100, without an array, since "
                f"each invocation is one job; got {wrong[0]!r}"
            )
        self.control = Control(conf, answer)
        self.watcher = Watcher(self.control, poll)

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> SlurmRunner:
        """The runner that `--runner-option` asks for: OPTIONS. Raises ValueError for anything else."""
        check_known("slurm", options, OPTIONS)
        flags = [f"--{flag}={options[name]}" for name, flag in FLAGS.items() if name in options]
        poll, grace, answer = (
            amount(name, options.get(name, str(default)))
            for name, default in (("poll", POLL), ("grace", GRACE), ("start-timeout", ANSWER))
        )
        return cls(
            environ=environ,
            sbatch=[*flags, *words(options.get("sbatch"))],
            python=options.get("python") or sys.executable,
            conf=options.get("conf"),
            poll=poll,
            grace=grace,
            answer=answer,
        )

    async def start(self, launch: Launch) -> Process:
        """Submit a job, and wait until it runs. Raises DispatchError with what Slurm says."""
        job = _Job(self, launch)
        try:
            await job.begin()
        except BaseException:
            await run_to_end(job.undo)
            raise
        return job

    async def aclose(self) -> None:
        """There is nothing to give up: the watcher ends with the last job."""


class _Job:
    """One job, from its submission to its end."""

    def __init__(self, runner: SlurmRunner, launch: Launch) -> None:
        self._runner, self._launch = runner, launch
        self._control = runner.control
        self._account = None if launch.as_user is None else Account(launch.as_user)
        self._name = f"lakeshore-{launch.id}-{launch.attempt}"
        self._guard: Guard | None = None
        self._watch: Watch | None = None
        self._sent = False
        self._exit: Exit | None = None

    @property
    def _folder(self) -> Path:
        return self._launch.folder.path

    # The begin

    async def begin(self) -> None:
        if self._launch.attempt > 1:
            await self._end_earlier()
        await run_to_end(self._submit)
        assert self._watch is not None
        seen = await self._watch.until(lambda seen: seen.state not in PENDING)
        logger.debug("Slurm job %s is %s on %s", self._watch.id, seen.state, seen.nodes)

    async def _submit(self) -> None:
        """Submit it, and know it by its number; or see to it that it is not there."""
        if self._account is not None:
            self._account.give(self._launch)
        self._guard = await anyio.to_thread.run_sync(Guard, self._ending(_GUARD), self._control.environ)
        account = {} if self._account is None else self._account.environ
        environ = {**self._runner.environ, **account, **self._launch.environ}
        self._sent = True
        try:
            id = await self._control.submit(self._argv(), environ)
        except DispatchError as exc:
            self._sent = not any(words in str(exc) for words in _NOT_SENT)
            raise
        self._watch = Watch(id, self._folder, mine=self._account is None)
        self._runner.watcher.add(self._watch)

    def _ending(self, script: str) -> list[str]:
        user = os.geteuid() if self._account is None else self._account.uid
        return ["/bin/sh", "-c", script, "sh", f"--user={user}", f"--name={self._name}"]

    def _argv(self) -> list[str]:
        script, folder = self._launch.script, str(self._folder)
        command = ["bash", "-c", script] if script is not None else [self._runner.python, *ENTRY]
        plain = "\\" in folder  # then % means nothing to Slurm
        logs = folder.replace("\\", "\\\\") if plain else folder.replace("%", "%%")
        user = () if self._account is None else (f"--uid={self._account.uid}", f"--gid={self._account.gid}")
        return [
            "--nodes=1",
            "--ntasks=1",
            *self._runner.sbatch,
            *user,
            f"--job-name={self._name}",
            "--no-requeue",  # a job that begins again would write again what was forwarded already
            f"--chdir={folder}",
            f"--output={logs}/stdout.log",
            f"--error={logs}/stderr.log",
            "--open-mode=truncate",
            f"--wrap=exec {shlex.join(command)}",
        ]

    async def _end_earlier(self) -> None:
        """End what earlier attempts have left running, and only then begin: they write into the same folder."""
        named = re.compile(rf"lakeshore-{re.escape(self._launch.id)}-(\d+)")

        def earlier(name: str) -> bool:
            found = named.fullmatch(name)
            return found is not None and int(found[1]) < self._launch.attempt

        running = list[str]()
        with anyio.move_on_after(PATIENCE):
            while running := await self._queued(earlier):
                await self._control.cancel(*running)
                await anyio.sleep(PAUSE)
        if running:
            raise DispatchError(
                f"the jobs {', '.join(running)} of earlier attempts have not ended in {PATIENCE:g} s: end them with scancel"
            )
        await anyio.to_thread.run_sync(self._clear_folder)

    def _clear_folder(self) -> None:
        if left := set(os.listdir(self._folder)) - {ARGS, LOCK}:
            remove_leftovers(self._folder, *left)

    async def _queued(self, wanted: Callable[[str], bool]) -> list[str]:
        """The jobs in the queue by the names that are wanted."""
        found = await self._control.look(mine=self._account is None, ended=False)
        return [id for id, record in found.items() if wanted(record.name) and record.state not in ENDED]

    async def undo(self) -> None:
        """Leave nothing of a start that failed or was cancelled. Not to be cancelled."""
        if self._watch is not None:
            await self.kill()
            return
        with anyio.move_on_after(AGAIN) as scope:
            if self._sent:
                await self._end_unknown()
        if scope.cancelled_caught:
            await self._give_up("Slurm does not say whether it has taken")
        await self._leave()

    async def _end_unknown(self) -> None:
        """`sbatch` has failed, or its answer did not come: there may be a job of this name all the same."""
        while True:
            try:
                running = await self._queued(self._name.__eq__)
                if not running:
                    return
                await self._control.cancel(*running)
            except DispatchError as exc:
                logger.debug("%s", exc)
            await anyio.sleep(PAUSE)

    # The end

    async def wait(self) -> Exit:
        if self._exit is None:
            assert self._watch is not None
            seen = await self._watch.until(lambda seen: seen.state in ENDED)
            if seen.state not in ("COMPLETED", FORGOTTEN):
                seen = await self._patiently(partial(self._control.show, self._watch.id))
            ended = await anyio.to_thread.run_sync(self._read, self._watch.id, seen)
            if ended.error is None and ended.code in _LAST and self._launch.script is None:
                await self._arrival(_LAST[ended.code])
            self._exit = ended
        await self._leave()
        return self._exit

    async def kill(self) -> Exit:
        assert self._watch is not None
        if self._exit is None:
            with anyio.move_on_after(self._runner.grace):
                if self._watch.seen.state in PENDING:
                    await self._tell(pending=True)
                await self._tell(signal="TERM")
                return await self.wait()
            give_up = anyio.current_time() + PATIENCE
            while anyio.current_time() < give_up:
                with anyio.move_on_after(AGAIN):
                    await self._tell()
                    return await self.wait()
            await self._give_up(f"Slurm was told so for {PATIENCE:g} s, and has not ended")
            self._exit = Exit(-SIGKILL)
        return await self.wait()

    async def _tell(self, *, signal: str | None = None, pending: bool = False) -> None:
        assert self._watch is not None
        await self._patiently(partial(self._control.cancel, self._watch.id, signal=signal, pending=pending))
        self._runner.watcher.hasten(self._watch)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call again until Slurm answers."""
        while True:
            try:
                return await call()
            except DispatchError as exc:
                logger.debug("again, since %s", exc)
            await anyio.sleep(PAUSE)

    async def _give_up(self, why: str) -> None:
        """Leave the job to a process that goes on for two minutes."""
        logger.warning(
            "%s the job %s: it may run on; look for it with `squeue --me`, and end it with `scancel`", why, self._name
        )
        with suppress(DispatchError):
            await run_command(
                self._ending(f"({_GUARD}) </dev/null >/dev/null 2>&1 &"),
                timeout=AGAIN,
                environ=self._control.environ,
            )

    async def _leave(self) -> None:
        if self._watch is not None:
            self._runner.watcher.discard(self._watch)
        guard, self._guard = self._guard, None
        if guard is not None:
            await anyio.to_thread.run_sync(guard.dismiss)

    async def _arrival(self, name: str) -> None:
        with anyio.move_on_after(LATE):
            while name not in await anyio.to_thread.run_sync(self._names):  # noqa: ASYNC110 -- nobody tells of files
                await anyio.sleep(HURRY)

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self._folder))  # unlike a look for one name, it is never answered from memory
        except OSError:
            return set(_LAST.values())

    def _read(self, id: str, seen: Record) -> Exit:
        """What came of the job, by what Slurm says of it."""
        if seen.state == "COMPLETED":
            return Exit(0)
        job = f"Slurm job {id} on {seen.nodes}" if seen.nodes else f"Slurm job {id}"
        code = seen.code or -SIGKILL
        if seen.state in _LOST:
            if os.path.lexists(self._folder / RESULT):  # it had finished
                return Exit(0)
            error = read_error(self._folder) if seen.state == FORGOTTEN else None
            if error is not None and error.message != STOPPED:
                return Exit(1)
            return Exit(code, error=Failure("WorkerLost", f"{job} was lost: {_LOST[seen.state]}"))
        if seen.state in ("TIMEOUT", "DEADLINE"):
            most = f"time limit of {seen.limit}" if seen.state == "TIMEOUT" else "deadline"
            said = f"{job} was ended at its {most}; the runner option time, or the partition, says how long it may run"
            return Exit(code, "timeout", Failure("TimeoutError", said))
        if seen.state == "CANCELLED":
            said = f"{job} was cancelled in Slurm, not by its worker"
            return Exit(code, "killed", Failure("Cancelled", said))
        if seen.state == "OUT_OF_MEMORY":
            said = f"{job} took more memory than it may, which the runner option memory says"
        elif seen.code == NOT_LAUNCHED:
            said = (
                f"{job} could not open its output in {self._folder}: the workdir has to lie on a file system that the "
                "nodes share, under the same path"
            )
        elif seen.code == 0:
            said = f"{job} has ended as {seen.state} ({seen.reason})"
        else:
            return Exit(seen.code)
        output = last_output(self._folder)
        shown = f"{said}; the end of its output:\n{output}" if output else said
        return Exit(code, error=Failure("DaemonError", shown))
