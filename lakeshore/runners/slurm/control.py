"""Slurm's programs, and one look at the queue for all jobs of a runner.

Only `sbatch`, `squeue`, `scontrol` and `scancel` are called, so no accounting database is needed.
"""

from __future__ import annotations

import logging
import os
import re
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from ...concurrency.tasks import spawn
from ...daemon.workdir import ERROR, RESULT, STDOUT
from ...errors import DispatchError
from ..commands import run_command

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from pathlib import Path

__all__ = ["ENDED", "FORGOTTEN", "PENDING", "Control", "Record", "Watch", "Watcher"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

HINT = 0.1
"""Seconds between two looks into the folders of jobs, whose files tell of a begin or an end before the queue is asked."""
QUICK = 20
"""How many times sooner than `poll` the queue is asked again after something has changed."""

FORGOTTEN = "FORGOTTEN"
"""Our own word: Slurm knows no such job, which it says of one that has ended long enough ago."""
PENDING = frozenset("PENDING CONFIGURING REQUEUED REQUEUE_HOLD REQUEUE_FED RESV_DEL_HOLD SPECIAL_EXIT".split())
ENDED = frozenset(
    "COMPLETED FAILED TIMEOUT CANCELLED DEADLINE OUT_OF_MEMORY NODE_FAIL BOOT_FAIL PREEMPTED REVOKED".split()
) | {FORGOTTEN}
"""States that do not change. In those that are in neither of the two, something of the job may run."""
STUCK = frozenset(
    "PartitionNodeLimit PartitionTimeLimit PartitionDown PartitionInactive PartitionConfig BadConstraints JobHeldUser "
    "JobHeldAdmin AccountNotAllowed QOSNotAllowed InvalidAccount InvalidQOS DependencyNeverSatisfied "
    "ReqNodeNotAvail NodeDown".split()
)
"""Reasons to wait that do not pass by themselves."""

_OWN = ("SLURM_CONF", "SLURM_JWT")
_FOREIGN = ("SLURM_", "SBATCH_", "SQUEUE_", "SCANCEL_", "SCONTROL_")
_FIELDS = re.compile(r"(?:^| )(JobId|JobState|Reason|ExitCode|TimeLimit|NodeList)=(\S*)")


class Record(NamedTuple):
    """What Slurm says of a job. code: its exit code, negative for a signal; limit: of its time, as Slurm writes it."""

    state: str
    reason: str = ""
    nodes: str = ""
    name: str = ""
    code: int = 0
    limit: str = ""


class Control:
    """Calls the programs, each for at most `timeout` seconds. Raises DispatchError with what they say."""

    def __init__(self, conf: str | None, timeout: float) -> None:
        env = os.environ
        self.environ = {name: value for name, value in env.items() if name in _OWN or not name.startswith(_FOREIGN)}
        self.environ["LC_ALL"] = "C"
        if conf is not None:
            self.environ["SLURM_CONF"] = conf
        self._timeout = timeout

    async def submit(self, argv: Sequence[str], environ: Mapping[str, str]) -> str:
        """The id of a new job, which has exactly `environ` and what Slurm adds to it.

        That is read from the memory of this process: nothing of it is on a command line or in a file.
        """
        said = "".join(f"{name}={value}\0" for name, value in environ.items())
        with _in_memory(os.fsencode(said)) as place:
            out = await self._run("sbatch", "--parsable", f"--export-file={place}", *argv)
        id = out.strip().partition(";")[0]
        if not id.isdigit():
            raise DispatchError(f"expected `sbatch --parsable` to answer with the number of a job, got {out[:200]!r}")
        return id

    async def look(self, *, mine: bool, ended: bool) -> dict[str, Record]:
        """The jobs in the queue by their id, and with `ended` those that Slurm still remembers; `mine`: of this user."""
        whose = ["--me"] if mine else []
        states = ["--states=all"] if ended else []
        out = await self._run("squeue", "--noheader", "--format=%i|%T|%j|%N|%r", *whose, *states)
        found = dict[str, Record]()
        for line in out.splitlines():
            id, *rest = line.split("|", 4)
            if len(rest) == 4:
                state, name, nodes, reason = rest
                found[id] = Record(state, reason, nodes, name)
        return found

    async def show(self, id: str) -> Record:
        """All that Slurm knows of a job."""
        try:
            out = await self._run("scontrol", "--oneliner", "show", "job", id)
        except DispatchError as exc:
            if not _gone(exc):
                raise
            return Record(FORGOTTEN)
        found = dict[str, str](_FIELDS.findall(out))
        code, _, signal = found.get("ExitCode", "").partition(":")
        number = -int(signal) if signal.isdigit() and int(signal) else int(code) if code.isdigit() else 0
        state, reason, nodes, limit = (found.get(key, "") for key in ("JobState", "Reason", "NodeList", "TimeLimit"))
        return Record(state, reason, "" if nodes == "(null)" else nodes, "", number, limit)

    async def cancel(self, *ids: str, signal: str | None = None, pending: bool = False) -> None:
        """End jobs, or with `pending` only those that have not begun, or send a signal to all processes of those that
        run. Those that have ended are no error."""
        told = ["--state=PENDING"] if pending else [] if signal is None else [f"--signal={signal}", "--full"]
        try:
            await self._run("scancel", *told, *ids)
        except DispatchError as exc:
            if not _gone(exc):
                raise

    async def _run(self, *argv: str) -> str:
        ended = await run_command(argv, timeout=self._timeout, environ=self.environ)
        if ended.code:
            raise DispatchError(f"`{argv[0]}` says (exit code {ended.code}): {ended.said or 'nothing'}")
        return ended.out


@contextmanager
def _in_memory(data: bytes) -> Generator[str]:
    """A path under which the programs that are called find `data`, during the block."""
    with open(os.memfd_create("environ"), "wb", buffering=0) as memory:
        memory.write(data)
        yield f"/proc/{os.getpid()}/fd/{memory.fileno()}"


def _gone(exc: DispatchError) -> bool:
    """Whether the controller has answered that there is no such job, or that it has ended."""
    return any(words in str(exc).lower() for words in ("invalid job id", "already completing"))


class Watch:
    """A job that is looked at. `seen` is the last that was seen of it; it may be waited for."""

    def __init__(self, id: str, folder: Path, mine: bool) -> None:
        self.id, self.mine = id, mine
        self.seen = Record("PENDING")
        self.since = time.monotonic()
        self.due, self.pause = 0.0, 0.0
        self._hints = {folder / name: False for name in (STDOUT, RESULT, ERROR)}
        self._warned = set[str]()
        self._changed = anyio.Event()

    async def until(self, wanted: Callable[[Record], bool]) -> Record:
        """What was seen of it first that is wanted."""
        while not wanted(self.seen):
            await self._changed.wait()
        return self.seen

    def tell(self, seen: Record) -> bool:
        """Take what was seen; whether its state is another one than before."""
        before, self.seen = self.seen, seen
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
        if seen.state == "PENDING":
            self._warn(seen.reason)
        return before.state != seen.state

    def hinted(self) -> bool:
        """Whether its folder has a file that it had not before. Called in a thread."""
        found = False
        for path, there in self._hints.items():
            if not there and os.path.lexists(path):
                self._hints[path] = found = True
        return found

    def _warn(self, reason: str) -> None:
        first = re.split(r"[,(\s]", reason, maxsplit=1)[0]
        if (first in STUCK or "PerJob" in first) and first not in self._warned:
            self._warned.add(first)
            logger.warning(
                "Slurm job %s waits for %s, which may never pass: see `scontrol show job %s`; cancel the invocation, or "
                "start the worker with runner options that can be met",
                self.id,
                reason,
                self.id,
            )


class Watcher:
    """Looks at the queue for all jobs at once, at most every `poll` / 20 seconds and at least every `poll`, in a task
    that is there as long as there are jobs. A controller that does not answer is asked again: jobs go on without it."""

    def __init__(self, control: Control, poll: float) -> None:
        self._control, self._poll = control, poll
        self._watched: dict[str, Watch] = {}
        self._wake = anyio.Event()
        self._runs = False
        self._away = False

    def add(self, watch: Watch) -> None:
        """Look at a job from now on."""
        self._hasten(watch)
        self._watched[watch.id] = watch
        self._wake.set()
        if not self._runs:
            self._runs = True
            spawn(self._run, self._ended)

    def discard(self, watch: Watch) -> None:
        """Look at it no more."""
        self._watched.pop(watch.id, None)
        self._wake.set()

    def hasten(self, watch: Watch) -> None:
        """Something of it is about to change."""
        self._hasten(watch)
        self._wake.set()

    def _hasten(self, watch: Watch) -> None:
        watch.pause = self._poll / QUICK
        watch.due = time.monotonic() + watch.pause

    def _ended(self) -> None:
        self._runs = False

    async def _run(self) -> None:
        while self._watched:
            await self._rest()
            if self._watched:
                await self._look(list(self._watched.values()))
        self._runs = False  # at once: who adds a job now starts another task

    async def _rest(self) -> None:
        """Wait until a job is due, or the folder of one tells that something has happened."""
        while self._watched:
            watched = list(self._watched.values())
            if hinted := await anyio.to_thread.run_sync(_hinted, watched):
                for watch in hinted:
                    self._hasten(watch)
                return
            left = min((watch.due for watch in self._watched.values()), default=0.0) - time.monotonic()
            if left <= 0:
                return
            self._wake = anyio.Event()
            with anyio.move_on_after(min(left, HINT)):
                await self._wake.wait()

    async def _look(self, watched: Sequence[Watch]) -> None:
        begun = time.monotonic()
        try:
            seen = await self._control.look(mine=all(watch.mine for watch in watched), ended=True)
            for watch in watched:
                if watch.id not in seen and watch.since < begun:
                    seen[watch.id] = await self._control.show(watch.id)
        except DispatchError as exc:
            self._missed(watched, exc)
            return
        except Exception:  # whatever it is, without looks nobody would ever hear of an end
            logger.exception("a look at the Slurm queue failed")
            self._missed(watched, None)
            return
        if self._away:
            self._away = False
            logger.warning("Slurm answers again")
        now = time.monotonic()
        for watch in watched:
            if watch.id in seen and watch.tell(seen[watch.id]):
                watch.pause = self._poll / QUICK
            elif watch.due <= begun:
                watch.pause = min(watch.pause * 1.5, self._poll)
            watch.due = now + watch.pause

    def _missed(self, watched: Iterable[Watch], exc: Exception | None) -> None:
        if not self._away:
            self._away = True
            logger.warning("Slurm does not answer, its jobs go on and are looked for again and again: %s", exc)
        for watch in watched:
            watch.due = time.monotonic() + max(self._poll, 0.5)


def _hinted(watched: Sequence[Watch]) -> list[Watch]:
    return [watch for watch in watched if watch.hinted()]
