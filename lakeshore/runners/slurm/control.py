"""Call Slurm's programs, and poll its queue for all jobs of a runner at once.

Only `sbatch`, `squeue`, `scontrol` and `scancel` are called, so no accounting database is needed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ...concurrency.backoff import Backoff
from ...concurrency.tasks import spawn
from ...daemon.workdir import ERROR, RESULT, STDOUT
from ...errors import DispatchError
from ..commands import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["FINAL_STATES", "NOT_FOUND", "PENDING_STATES", "JobRecord", "QueuePoller", "SlurmPrograms", "WatchedJob"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

FOLDER_POLL_INTERVAL = 0.1
"""Seconds between two checks of the folders of jobs, where new files show a begin or an end before the queue does."""
FAST_POLLS = 20
"""The queue is polled again after the poll interval divided by this when something has changed."""
MIN_RETRY_INTERVAL = 0.5
"""Seconds, at least, until the queue is polled again after Slurm has not answered."""

NOT_FOUND = "NOT_FOUND"
"""Our own state for a job that Slurm does not know, as it does not after a job has been over for long enough."""
PENDING_STATES = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT".split())
FINAL_STATES = frozenset(
    "COMPLETED FAILED TIMEOUT CANCELLED DEADLINE OUT_OF_MEMORY NODE_FAIL BOOT_FAIL PREEMPTED REVOKED".split()
) | {NOT_FOUND}
"""States that do not change. In a state that is neither pending nor final, something of the job may run."""
BLOCKING_REASONS = frozenset(
    "PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive PartitionConfig BadConstraints JobHeldUser "
    "JobHeldAdmin AccountNotAllowed QOSNotAllowed InvalidAccount InvalidQOS DependencyNeverSatisfied "
    "ReqNodeNotAvail NodeDown".split()
)
"""Reasons to wait that do not pass by themselves."""

_KEPT_VARIABLES = ("SLURM_CONF", "SLURM_JWT")
_REMOVED_PREFIXES = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
"""Variables of the job that the worker itself may run in, which would change what the programs do."""
_FIELDS = re.compile(r"(?:^| )(JobId|JobState|Reason|ExitCode|TimeLimit|NodeList)=(\S*)")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What Slurm reports about a job."""

    state: str
    reason: str = ""
    """Why it is in that state."""
    nodes: str = ""
    name: str = ""
    code: int = 0
    """Its exit code, negative for a signal."""
    limit: str = ""
    """The limit of its time, as Slurm writes it."""


class SlurmPrograms:
    """Slurm's programs. Calls raise DispatchError with what a program reports."""

    def __init__(self, conf: str | None, timeout: float) -> None:
        """
        Args:
            conf: The slurm.conf to use; by default that of this machine.
            timeout: Seconds that each call may take.
        """
        self.environ = {
            name: value
            for name, value in os.environ.items()
            if name in _KEPT_VARIABLES or not name.startswith(_REMOVED_PREFIXES)
        }
        self.environ["LC_ALL"] = "C"
        if conf is not None:
            self.environ["SLURM_CONF"] = conf
        self._timeout = timeout

    async def submit(self, argv: Sequence[str], environ: Mapping[str, str]) -> str:
        """Submit a job, and return its id.

        The job has exactly the variables `environ` and those that Slurm adds. The program reads them from the memory of
        this process: none is on a command line or in a file.
        """
        lines = "".join(f"{name}={value}\0" for name, value in environ.items())
        with _memory_file(os.fsencode(lines)) as path:
            output = await self._run("sbatch", "--parsable", f"--export-file={path}", *argv)
        id = output.strip().partition(";")[0]
        if not id.isdigit():
            raise DispatchError(f"expected `sbatch --parsable` to print the number of a job, got {output[:200]!r}")
        return id

    async def list_jobs(self, *, own: bool, ended: bool) -> dict[str, JobRecord]:
        """Return the jobs in the queue by their ids.

        Args:
            own: Only those of this user.
            ended: Also those that have ended and that Slurm still remembers.
        """
        flags = ["--me"] if own else []
        if ended:
            flags.append("--states=all")
        output = await self._run("squeue", "--noheader", "--format=%i|%T|%j|%N|%r", *flags)
        found = dict[str, JobRecord]()
        for line in output.splitlines():
            id, *fields = line.split("|", 4)
            if len(fields) == 4:
                state, name, nodes, reason = fields
                found[id] = JobRecord(state, reason, nodes, name)
        return found

    async def show(self, id: str) -> JobRecord:
        """Return all that Slurm knows of a job."""
        try:
            output = await self._run("scontrol", "--oneliner", "show", "job", id)
        except DispatchError as exc:
            if not _is_over(exc):
                raise
            return JobRecord(NOT_FOUND)
        found = dict[str, str](_FIELDS.findall(output))
        nodes = found.get("NodeList", "")
        return JobRecord(
            state=found.get("JobState", ""),
            reason=found.get("Reason", ""),
            nodes="" if nodes == "(null)" else nodes,
            code=_exit_code(found.get("ExitCode", "")),
            limit=found.get("TimeLimit", ""),
        )

    async def cancel(self, *ids: str, signal: str | None = None, pending: bool = False) -> None:
        """End jobs. Those that have ended already are no error.

        Args:
            ids: The jobs.
            signal: Only send this signal, to all processes of the jobs that run.
            pending: Only end the jobs that have not begun.
        """
        flags = list[str]()
        if pending:
            flags = ["--state=PENDING"]
        elif signal is not None:
            flags = [f"--signal={signal}", "--full"]
        try:
            await self._run("scancel", *flags, *ids)
        except DispatchError as exc:
            if not _is_over(exc):
                raise

    async def _run(self, *argv: str) -> str:
        result = await run_command(argv, timeout=self._timeout, environ=self.environ)
        if result.code:
            raise DispatchError(f"`{argv[0]}` failed (exit code {result.code}): {result.message or 'no output'}")
        return result.stdout


@contextmanager
def _memory_file(data: bytes) -> Generator[str]:
    """Give a path under which other programs find `data` in the memory of this process, during the block."""
    with open(os.memfd_create("environ"), "wb", buffering=0) as memory:
        memory.write(data)
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


def _exit_code(text: str) -> int:
    """Parse `CODE:SIGNAL`; a signal makes the code negative."""
    code, _, signal = text.partition(":")
    if signal.isdigit() and int(signal):
        return -int(signal)
    return int(code) if code.isdigit() else 0


def _is_over(exc: DispatchError) -> bool:
    """Return whether the controller has answered that there is no such job, or that it has ended."""
    return any(words in str(exc).lower() for words in ("invalid job id", "already completing"))


class WatchedJob:
    """A job that is polled. `seen` is its last record; a caller may wait for one."""

    def __init__(self, id: str, folder: Path, *, own: bool, poll: float = 2.0) -> None:
        """
        Args:
            id: The job's id.
            folder: The folder of its invocation.
            own: Whether it runs as the user of this process.
            poll: Seconds between two polls while nothing changes.
        """
        self.id = id
        self.own = own
        self.seen = JobRecord("PENDING")
        self.added_at = time.monotonic()
        self.due_at = 0.0
        """When it is to be polled next, of `time.monotonic`."""
        self._polls = Backoff(poll / FAST_POLLS, poll, factor=1.5, jitter=0.0)
        self._files = {folder / name: False for name in (STDOUT, RESULT, ERROR)}
        self._warned = set[str]()
        self._changed = anyio.Event()

    async def wait_for(self, wanted: Callable[[JobRecord], bool]) -> JobRecord:
        """Wait until the last record is a wanted one, and return it."""
        while not wanted(self.seen):
            await self._changed.wait()
        return self.seen

    def poll_soon(self) -> None:
        """Poll it often from now on: it has changed, or is about to."""
        self._polls.reset()
        self.due_at = time.monotonic() + self._polls.next_delay()

    def polled(self, *, due: bool) -> None:
        """Poll it again later. After each poll that was `due` the pause grows."""
        delay = self._polls.next_delay() if due else self._polls.delay_after(max(self._polls.failures - 1, 0))
        self.due_at = time.monotonic() + delay

    def update(self, seen: JobRecord) -> bool:
        """Take a record; return whether its state differs from the one before."""
        before = self.seen
        self.seen = seen
        self._changed.set()
        self._changed = anyio.Event()
        if seen.state == "PENDING":
            self._warn_if_blocked(seen.reason)
        return before.state != seen.state

    def has_new_file(self) -> bool:
        """Return whether its folder has a file that was not there before. Reads the disk: for a thread."""
        found = False
        for path, known in self._files.items():
            if not known and os.path.lexists(path):
                self._files[path] = True
                found = True
        return found

    def _warn_if_blocked(self, reason: str) -> None:
        first = re.split(r"[,(\s]", reason, maxsplit=1)[0]
        if (first in BLOCKING_REASONS or "PerJob" in first) and first not in self._warned:
            self._warned.add(first)
            logger.warning(
                "Slurm job %s waits for %s, which may never pass: see `scontrol show job %s`; cancel the invocation, or "
                "start the worker with runner options that can be met",
                self.id,
                reason,
                self.id,
            )


class QueuePoller:
    """Polls the queue once for all jobs that are due, in a task that runs as long as there are jobs.

    It polls at most every `poll` / FAST_POLLS seconds and at least every `poll`. When the controller does not answer it
    polls again: jobs run on without it.
    """

    def __init__(self, programs: SlurmPrograms, poll: float) -> None:
        self._programs = programs
        self._poll_interval = poll
        self._jobs: dict[str, WatchedJob] = {}
        self._wake = anyio.Event()
        self._running = False
        self._unreachable = False

    def watch(self, id: str, folder: Path, *, own: bool) -> WatchedJob:
        """Poll a job from now on."""
        job = WatchedJob(id, folder, own=own, poll=self._poll_interval)
        job.poll_soon()
        self._jobs[id] = job
        self._wake.set()
        if not self._running:
            self._running = True
            spawn(self._run, self._ended)
        return job

    def discard(self, job: WatchedJob) -> None:
        """Stop polling a job."""
        self._jobs.pop(job.id, None)
        self._wake.set()

    def poll_soon(self, job: WatchedJob) -> None:
        """Poll a job that is about to change."""
        job.poll_soon()
        self._wake.set()

    def _ended(self) -> None:
        self._running = False

    async def _run(self) -> None:
        while self._jobs:
            await self._wait_until_due()
            if self._jobs:
                await self._poll(list(self._jobs.values()))
        self._running = False  # at once, so that a job that is added now starts another task

    async def _wait_until_due(self) -> None:
        """Wait until a job is due, or its folder has a new file."""
        while self._jobs:
            changed = await anyio.to_thread.run_sync(_with_new_files, list(self._jobs.values()))
            if changed:
                for job in changed:
                    job.poll_soon()
                return
            left = min((job.due_at for job in self._jobs.values()), default=0.0) - time.monotonic()
            if left <= 0:
                return
            self._wake = anyio.Event()
            with anyio.move_on_after(min(left, FOLDER_POLL_INTERVAL)):
                await self._wake.wait()

    async def _poll(self, jobs: Sequence[WatchedJob]) -> None:
        begun = time.monotonic()
        try:
            seen = await self._programs.list_jobs(own=all(job.own for job in jobs), ended=True)
            for job in jobs:
                if job.id not in seen and job.added_at < begun:
                    seen[job.id] = await self._programs.show(job.id)
        except DispatchError as exc:
            self._failed(jobs, exc)
            return
        except Exception as exc:  # without polls no job would ever end, so go on after any error
            logger.exception("a poll of the Slurm queue failed")
            self._failed(jobs, exc)
            return
        if self._unreachable:
            self._unreachable = False
            logger.warning("Slurm answers again")
        for job in jobs:
            if job.id in seen and job.update(seen[job.id]):
                job.poll_soon()
            else:
                job.polled(due=job.due_at <= begun)

    def _failed(self, jobs: Iterable[WatchedJob], exc: Exception) -> None:
        if not self._unreachable:
            self._unreachable = True
            logger.warning("Slurm does not answer; its jobs run on, and the queue is polled again: %s", exc)
        for job in jobs:
            job.due_at = time.monotonic() + max(self._poll_interval, MIN_RETRY_INTERVAL)


def _with_new_files(jobs: Sequence[WatchedJob]) -> list[WatchedJob]:
    return [job for job in jobs if job.has_new_file()]
