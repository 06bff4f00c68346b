"""Run children as jobs of a Slurm cluster: one for each invocation, in a folder on a file system that its nodes share.

A job is named `lakeshore-ID-ATTEMPT`. By that name a guard ends it when this process is gone, and a later attempt ends the
jobs of earlier ones. How a job has ended is known from Slurm, and what it left is in its folder.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from signal import SIGKILL
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import anyio
import anyio.to_thread

from ...concurrency.tasks import run_to_end
from ...daemon.workdir import ERROR, RESULT, last_output, read_error
from ...errors import DispatchError
from ...planes.contract.records import Failure
from ...worker.runner import Exit
from ..account import find_account, give_folder
from ..commands import Guard, child_command, run_command
from ..failure import child_failed, child_lost
from ..leftovers import remove_earlier_files
from ..options import Option, amount, read_options, words
from .control import FINAL_STATES, NOT_FOUND, PENDING_STATES, JobRecord, QueuePoller, SlurmPrograms, WatchedJob

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping
    from pathlib import Path

    from ...worker.runner import Launch, Process

__all__ = ["SlurmOptions", "SlurmRunner"]

T = TypeVar("T")

logger = logging.getLogger("dreamlake.lakeshore.worker")

GRACE = 5.0
POLL_INTERVAL = 2.0
PROGRAM_TIMEOUT = 30.0
CANCEL_INTERVAL = 10.0
"""Seconds after which a job that was cancelled and has not ended is cancelled again."""
CANCEL_TIMEOUT = 120.0
"""Seconds that Slurm has to end a job that nobody waits for any more; after that a warning reports that it may run on."""
FILE_TIMEOUT = 3.0
"""Seconds within which the file that a job has written last is seen here, through a slow file system."""
RETRY_INTERVAL = 0.5
"""Seconds between two calls of Slurm's programs while something is to end."""
FILE_INTERVAL = 0.1
"""Seconds between two checks of a folder for a file."""
_STOPPED = "stopped by SIGTERM"
"""The message of the error that the entry writes when Slurm ends it, whatever for."""
_OUTPUT_NOT_OPENED = -53
"""Slurm's code for a job whose output files could not be opened on its node."""

SBATCH_FLAGS = {
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
"""Options that are passed on to `sbatch`, and its names for them."""
_ARRAY = re.compile(r"-a|--ar")

_GUARD = 'for i in 0 1 2 10 30 60; do sleep "$i"; scancel --quiet "$@" && test "$i" -gt 1 && exit; done'
"""Cancels more than once, since the job may still be on its way to Slurm; and again when Slurm does not answer."""
_NOT_SUBMITTED = ("Unable to contact slurm controller", "cannot be run")
"""In an error of `sbatch`: there is no job."""
_LAST_FILE = {0: RESULT, 1: ERROR}
"""What the entry has written last when it ends with such a code."""
_LOST = {
    "NODE_FAIL": "its node failed",
    "BOOT_FAIL": "its node did not boot",
    "PREEMPTED": "it had to make room for another",
    "REVOKED": "another cluster has taken it",
    NOT_FOUND: "Slurm knows it no longer, and it left neither a result nor an error",
}


def _sbatch_option(name: str, value: str) -> Option:
    return Option(value, f"--{SBATCH_FLAGS[name]} of sbatch.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmOptions:
    """The options of the slurm runner."""

    notes: ClassVar[str] = (
        "The workdir has to be on a file system that the nodes share. A job may wait in Slurm's queue for as long as it "
        "takes."
    )

    partition: Annotated[str | None, _sbatch_option("partition", "NAME")] = None
    account: Annotated[str | None, _sbatch_option("account", "NAME")] = None
    qos: Annotated[str | None, _sbatch_option("qos", "NAME")] = None
    time: Annotated[str | None, _sbatch_option("time", "LIMIT")] = None
    cpus: Annotated[str | None, _sbatch_option("cpus", "NUMBER")] = None
    memory: Annotated[str | None, _sbatch_option("memory", "SIZE")] = None
    gres: Annotated[str | None, _sbatch_option("gres", "LIST")] = None
    gpus: Annotated[str | None, _sbatch_option("gpus", "NUMBER")] = None
    constraint: Annotated[str | None, _sbatch_option("constraint", "LIST")] = None
    nodelist: Annotated[str | None, _sbatch_option("nodelist", "LIST")] = None
    sbatch: Annotated[tuple[str, ...], Option("--FLAG,...", "Further arguments of sbatch.", words)] = ()
    python: Annotated[str, Option("PATH", "The Python on the nodes that runs children.")] = sys.executable
    conf: Annotated[str | None, Option("PATH", "The slurm.conf to use.")] = None
    poll: Annotated[float, Option("SECONDS", "Between two polls of the queue, which serve all jobs.", amount)] = (
        POLL_INTERVAL
    )
    grace: Annotated[
        float, Option("SECONDS", "From SIGTERM to scancel, after which Slurm waits for its KillWait.", amount)
    ] = GRACE
    start_timeout: Annotated[float, Option("SECONDS", "That one call of Slurm's programs may take.", amount)] = (
        PROGRAM_TIMEOUT
    )

    def __post_init__(self) -> None:
        if not 0 < self.poll or not 0 < self.start_timeout:
            raise ValueError(
                f"the slurm runner needs poll and start-timeout above 0 s, got {self.poll:g} and {self.start_timeout:g}"
            )
        wrong = [flag for flag in self.sbatch if not flag.startswith("-") or _ARRAY.match(flag)]
        if wrong:
            raise ValueError(
                f"expected the runner option sbatch to be flags such as --exclusive,--nice=100, without an array, since "
                f"each invocation is one job; got {wrong[0]!r}"
            )

    def sbatch_arguments(self) -> list[str]:
        """Return the arguments of `sbatch` that are the same for all jobs."""
        values: dict[str, str | None] = {flag: getattr(self, name) for name, flag in SBATCH_FLAGS.items()}
        return [*(f"--{flag}={value}" for flag, value in values.items() if value is not None), *self.sbatch]


class SlurmRunner:
    """Starts children as jobs, in exactly the environment `environ`."""

    name = "slurm"
    options_class = SlurmOptions

    def __init__(self, options: SlurmOptions | None = None, *, environ: Mapping[str, str]) -> None:
        self.options = SlurmOptions() if options is None else options
        self.environ = dict(environ)
        self.programs = SlurmPrograms(self.options.conf, self.options.start_timeout)
        self.poller = QueuePoller(self.programs, self.options.poll)

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> SlurmRunner:
        """Make the runner for `--runner-option`. Raises ValueError."""
        return cls(read_options(SlurmOptions, cls.name, options), environ=environ)

    async def start(self, launch: Launch) -> Process:
        """Submit a job, and wait until it runs. Cancelled, or failing, it ends the job.

        Raises:
            DispatchError: Slurm does not take the job, with what it reports.
        """
        job = _Job(self, launch)
        try:
            await job.begin()
        except BaseException:
            await run_to_end(job.undo)
            raise
        return job

    async def aclose(self) -> None:
        """Do nothing: the poller ends with the last job."""


class _Job:
    """One job, from its submission to its end."""

    def __init__(self, runner: SlurmRunner, launch: Launch) -> None:
        self._runner = runner
        self._launch = launch
        self._programs = runner.programs
        self._account = None if launch.as_user is None else find_account(launch.as_user)
        self._name = f"lakeshore-{launch.id}-{launch.attempt}"
        self._guard: Guard | None = None
        self._job: WatchedJob | None = None
        self._may_be_submitted = False
        self._exit: Exit | None = None

    @property
    def _folder(self) -> Path:
        return self._launch.folder.path

    # The begin

    async def begin(self) -> None:
        if self._launch.attempt > 1:
            await self._end_earlier()
        await run_to_end(self._submit)
        assert self._job is not None
        seen = await self._job.wait_for(lambda seen: seen.state not in PENDING_STATES)
        logger.debug("Slurm job %s is %s on %s", self._job.id, seen.state, seen.nodes)

    async def _submit(self) -> None:
        """Submit the job and watch it by its id, after the guard that ends it by its name has begun."""
        if self._account is not None and self._launch.as_user is not None:
            give_folder(self._folder, self._launch.as_user, self._account.uid, self._account.gid)
        self._guard = await anyio.to_thread.run_sync(Guard, self._guard_command(_GUARD), self._programs.environ)
        environ = {**self._runner.environ, **self._launch.environ}
        if self._account is not None:
            environ = {**self._runner.environ, **self._account.environ, **self._launch.environ}
        self._may_be_submitted = True
        try:
            id = await self._programs.submit(self._sbatch_arguments(), environ)
        except DispatchError as exc:
            self._may_be_submitted = not any(words in str(exc) for words in _NOT_SUBMITTED)
            raise
        self._job = self._runner.poller.watch(id, self._folder, own=self._account is None)

    def _guard_command(self, script: str) -> list[str]:
        user = os.geteuid() if self._account is None else self._account.uid
        return ["/bin/sh", "-c", script, "sh", f"--user={user}", f"--name={self._name}"]

    def _sbatch_arguments(self) -> list[str]:
        folder = str(self._folder)
        if "\\" in folder:  # then sbatch replaces no % in the names of files
            logs = folder.replace("\\", "\\\\")
        else:
            logs = folder.replace("%", "%%")
        user = () if self._account is None else (f"--uid={self._account.uid}", f"--gid={self._account.gid}")
        return [
            "--nodes=1",
            "--ntasks=1",
            *self._runner.options.sbatch_arguments(),
            *user,
            f"--job-name={self._name}",
            "--no-requeue",  # a job that begins again would yield again what was forwarded already
            f"--chdir={folder}",
            f"--output={logs}/stdout.log",
            f"--error={logs}/stderr.log",
            "--open-mode=truncate",
            f"--wrap=exec {shlex.join(child_command(self._launch, self._runner.options.python))}",
        ]

    async def _end_earlier(self) -> None:
        """End the jobs of earlier attempts before this one begins, since they write into the same folder."""
        pattern = re.compile(rf"lakeshore-{re.escape(self._launch.id)}-(\d+)")

        def is_earlier(name: str) -> bool:
            found = pattern.fullmatch(name)
            return found is not None and int(found[1]) < self._launch.attempt

        running = list[str]()
        with anyio.move_on_after(CANCEL_TIMEOUT):
            while running := await self._unfinished(is_earlier):
                await self._programs.cancel(*running)
                await anyio.sleep(RETRY_INTERVAL)
        if running:
            raise DispatchError(
                f"the jobs {', '.join(running)} of earlier attempts have not ended in {CANCEL_TIMEOUT:g} s: end them with "
                "scancel"
            )
        await anyio.to_thread.run_sync(remove_earlier_files, self._folder)

    async def _unfinished(self, wanted: Callable[[str], bool]) -> list[str]:
        """Return the ids of the jobs that have not ended and whose names are wanted."""
        found = await self._programs.list_jobs(own=self._account is None, ended=False)
        return [id for id, record in found.items() if wanted(record.name) and record.state not in FINAL_STATES]

    async def undo(self) -> None:
        """Leave nothing of a start that failed or was cancelled. Not to be cancelled."""
        if self._job is not None:
            await self.kill()
            return
        with anyio.move_on_after(CANCEL_INTERVAL) as scope:
            if self._may_be_submitted:
                await self._cancel_by_name()
        if scope.cancelled_caught:
            await self._give_up("Slurm does not report whether it has taken the job")
        await self._release()

    async def _cancel_by_name(self) -> None:
        """End a job of this name, which there may be although `sbatch` has failed or its answer did not come."""
        while True:
            try:
                running = await self._unfinished(self._name.__eq__)
                if not running:
                    return
                await self._programs.cancel(*running)
            except DispatchError as exc:
                logger.debug("%s", exc)
            await anyio.sleep(RETRY_INTERVAL)

    # The end

    async def wait(self) -> Exit:
        if self._exit is None:
            assert self._job is not None
            seen = await self._job.wait_for(lambda seen: seen.state in FINAL_STATES)
            if seen.state not in ("COMPLETED", NOT_FOUND):
                seen = await self._until_answered(partial(self._programs.show, self._job.id))
            ended = await anyio.to_thread.run_sync(self._exit_by_record, self._job.id, seen)
            if ended.error is None and ended.code in _LAST_FILE and self._launch.script is None:
                await self._wait_for_file(_LAST_FILE[ended.code])
            self._exit = ended
        await self._release()
        return self._exit

    async def kill(self) -> Exit:
        assert self._job is not None
        if self._exit is None:
            with anyio.move_on_after(self._runner.options.grace):
                if self._job.seen.state in PENDING_STATES:
                    await self._cancel(pending=True)
                await self._cancel(signal="TERM")
                return await self.wait()
            give_up_at = anyio.current_time() + CANCEL_TIMEOUT
            while anyio.current_time() < give_up_at:
                with anyio.move_on_after(CANCEL_INTERVAL):
                    await self._cancel()
                    return await self.wait()
            await self._give_up(f"Slurm has not ended the job for {CANCEL_TIMEOUT:g} s")
            self._exit = Exit(-SIGKILL)
        return await self.wait()

    async def _cancel(self, *, signal: str | None = None, pending: bool = False) -> None:
        assert self._job is not None
        await self._until_answered(partial(self._programs.cancel, self._job.id, signal=signal, pending=pending))
        self._runner.poller.poll_soon(self._job)

    async def _until_answered(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call again until Slurm answers."""
        while True:
            try:
                return await call()
            except DispatchError as exc:
                logger.debug("calling Slurm again after %s", exc)
            await anyio.sleep(RETRY_INTERVAL)

    async def _give_up(self, why: str) -> None:
        """Leave the job to a process that tries to end it for two minutes more."""
        logger.warning(
            "%s; the job %s may run on: look for it with `squeue --me`, and end it with `scancel`", why, self._name
        )
        with suppress(DispatchError):
            await run_command(
                self._guard_command(f"({_GUARD}) </dev/null >/dev/null 2>&1 &"),
                timeout=CANCEL_INTERVAL,
                environ=self._programs.environ,
            )

    async def _release(self) -> None:
        """Stop polling the job, and dismiss its guard."""
        if self._job is not None:
            self._runner.poller.discard(self._job)
        guard = self._guard
        self._guard = None
        if guard is not None:
            await anyio.to_thread.run_sync(guard.dismiss)

    async def _wait_for_file(self, name: str) -> None:
        with anyio.move_on_after(FILE_TIMEOUT):
            while name not in await anyio.to_thread.run_sync(self._names):  # noqa: ASYNC110 -- files send no events
                await anyio.sleep(FILE_INTERVAL)

    def _names(self) -> set[str]:
        try:
            return set(os.listdir(self._folder))  # unlike the test for one name, a listing does not come from a cache
        except OSError:
            return set(_LAST_FILE.values())

    def _exit_by_record(self, id: str, seen: JobRecord) -> Exit:
        """Return how the job has ended, by what Slurm reports and by what is in its folder. Reads the disk."""
        if seen.state == "COMPLETED":
            return Exit(0)
        job = f"Slurm job {id} on {seen.nodes}" if seen.nodes else f"Slurm job {id}"
        code = seen.code or -SIGKILL
        if seen.state in _LOST:
            if os.path.lexists(self._folder / RESULT):  # it had finished
                return Exit(0)
            error = read_error(self._folder) if seen.state == NOT_FOUND else None
            if error is not None and error.message != _STOPPED:
                return Exit(1)
            return Exit(code, error=child_lost(f"{job} was lost: {_LOST[seen.state]}"))
        if seen.state in ("TIMEOUT", "DEADLINE"):
            limit = f"time limit of {seen.limit}" if seen.state == "TIMEOUT" else "deadline"
            message = f"{job} was ended at its {limit}, which the runner option time or the partition sets"
            return Exit(code, "timeout", Failure("TimeoutError", message))
        if seen.state == "CANCELLED":
            message = f"{job} was cancelled in Slurm, not by its worker"
            return Exit(code, "killed", Failure("Cancelled", message))
        if seen.state == "OUT_OF_MEMORY":
            message = f"{job} used more memory than its limit, which the runner option memory sets"
        elif seen.code == _OUTPUT_NOT_OPENED:
            message = (
                f"{job} could not open its output in {self._folder}: the workdir has to be on a file system that the "
                "nodes share, under the same path"
            )
        elif seen.code == 0:
            message = f"{job} has ended as {seen.state} ({seen.reason})"
        else:
            return Exit(seen.code)
        return Exit(code, error=child_failed(message, last_output(self._folder)))
