"""The executor that gives each invocation a process of its own, by the workdir contract.

What is the same for every engine is done here: the folder, the environment, forwarding what the child yields while it
runs, and reading how it ended. Starting, awaiting and ending a process is a `Runner`'s.
"""

from __future__ import annotations

import errno
import logging
import os
import random
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from ..body.execute import Backpressure, BodyOutcome, describe_exception, failed_permanently, leaf_exceptions
from ..concurrency.tasks import run_to_end
from ..daemon.workdir import (
    ERROR,
    FRAMES,
    RESULT,
    STDERR,
    STDOUT,
    ChildSettings,
    Folder,
    last_output,
    prune,
    read_error,
    read_file,
)
from ..errors import DispatchError, TransportError, WireError
from ..ids import check_id
from ..planes.contract.records import Failure
from ..wire import Envelope, pack, unpack
from .executor import LOST
from .frame_tail import LARGEST, FrameTail
from .runner import Exit, Launch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ..planes.contract.operations import Claimed
    from .executor import BodyChannel
    from .runner import Process, Runner

__all__ = ["ChildExecutor", "ChildRules"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

T = TypeVar("T")

LOOK, LONGEST_LOOK = 0.01, 0.1
"""Seconds between two looks at what a child yields: at first and after each find, and the most they grow to."""
MOST_LEFT = 64 << 20
"""Bytes of what a child yielded that are forwarded after it was to be ended."""
MOST_REST = 30.0
"""Seconds for which nothing is claimed, at most, after one after another could not be started."""
PATIENCE = 20.0
"""Seconds that an earlier attempt has to leave the folder, once it was killed."""
_GONE = Failure(
    "WorkerLost",
    "the interpreter that its child was forked from has died, and the child was ended; the body may have begun",
)
_NAMED = 1 << 20
"""Bytes up to which an envelope is read for the name in it, for people."""


@dataclass(frozen=True)
class ChildRules:
    """What children may do, and what becomes of their folders.

    workdir: where the folders lie. root: the absolute folder of keys. allow_pickled: None: only functions submitted on
    this machine to a local plane (`local`). keep: how many folders of failed invocations stay, the newest; None: all.
    on_shutdown: whether an invocation whose child was ended with its worker is `killed`, or goes back to its queue.
    environ: variables for children besides those of the contract.
    """

    workdir: Path
    root: Path
    allow_pickled: bool | None = None
    local: bool = False
    runtime_policy: str = "minor"
    allow_modules: tuple[str, ...] = ()
    keep: int | None = None
    on_shutdown: Literal["killed", "release"] = "killed"
    allow_script: bool = False
    allow_as_user: bool = False
    environ: Mapping[str, str] = field(default_factory=dict[str, str])


class ChildExecutor:
    """Runs each body in a child of `runner`. `concurrency` of them at a time never wait for one another."""

    def __init__(self, runner: Runner, rules: ChildRules, concurrency: int) -> None:
        self.runner, self.rules = runner, rules
        self.threads = anyio.CapacityLimiter(2 * concurrency + 2)  # for files, which may lie far away
        self.paused_until, self.refusals = 0.0, 0

    def refused(self, exc: Exception) -> None:
        """No child could be started. The invocation says so and fails, but others are to wait for better times: an engine
        that is down would have the whole queue fail."""
        now = time.monotonic()
        if now < self.paused_until:
            return
        pause = min(2.0**self.refusals, MOST_REST) * random.uniform(0.75, 1.25)
        self.refusals, self.paused_until = min(self.refusals + 1, 10), now + pause
        logger.error(
            "the %s runner cannot start children, nothing is claimed for %.1f s: %s", self.runner.name, pause, exc
        )

    async def run(self, claimed: Claimed, channel: BodyChannel) -> BodyOutcome:
        """Run the body. Cancelled: its child has ended when this raises, or gives the result that it had all the same."""
        attempt = _ChildAttempt(self, claimed, channel)
        try:
            return await attempt.run()
        finally:
            await run_to_end(attempt.leave)

    async def in_thread(self, fn: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(fn, limiter=self.threads)


def _is_its_own_fault(exc: Exception) -> bool:
    """Whether a start failed by what the submitter asked for: fields that no environment takes."""
    return isinstance(exc, ValueError) or (isinstance(exc, OSError) and exc.errno == errno.E2BIG)


class _ChildAttempt:
    """One claim, from its folder to its outcome."""

    def __init__(self, child: ChildExecutor, claimed: Claimed, emit: BodyChannel) -> None:
        self._child, self._claimed, self._emit = child, claimed, emit
        self._rules = child.rules
        self._folder: Folder | None = None
        self._process: Process | None = None
        self._tail: FrameTail | None = None
        self._begun = False
        self._script: str | None = None
        self._kept = False

    async def run(self) -> BodyOutcome:
        self._emit.timeout_start = None  # an engine may keep a child waiting for days
        try:
            check_id(self._claimed.id)
            self._emit.function = _name(self._claimed.body)
            launch = await self._prepare()
        except (TransportError, WireError, ValueError) as exc:
            return failed_permanently(exc)
        except (OSError, DispatchError) as exc:
            self._child.refused(exc)
            return _failed(f"its folder could not be prepared: {exc}")
        await checkpoint_if_cancelled()  # what has not started by now goes back to its queue
        try:
            self._process = await self._child.runner.start(launch)
        except (OSError, ValueError, DispatchError) as exc:
            self._kept = True
            if launch.script is None and launch.as_user is None and not _is_its_own_fault(exc):
                self._child.refused(exc)
            output = await self._child.in_thread(partial(last_output, launch.folder.path))
            return _failed(f"the {self._child.runner.name} runner could not start a child: {exc}", output)
        self._child.refusals = 0
        self._emit.timeout_start = time.monotonic()
        self._emit.kill_at_shutdown = self._rules.on_shutdown == "killed"
        return await self._outcome(launch.folder, self._process)

    async def leave(self) -> None:
        """Leave nothing behind but the folder of a failure. Not to be cancelled."""
        if self._tail is not None:
            self._tail.close()
        if self._folder is not None:
            await self._child.in_thread(partial(self._put_away, self._folder))

    def _put_away(self, folder: Folder) -> None:
        try:
            stopped = self._process is None and self._emit.stop_reason in ("cancel", "timeout")
            if not self._kept and not (
                stopped and (folder.path / ERROR).exists()
            ):  # it had begun before that was known
                folder.remove()
                return
            folder.leave()
            if self._rules.keep is not None:
                prune(self._rules.workdir, self._rules.keep)
            if self._rules.keep != 0:
                logger.info("what %s wrote, with %s and %s, stays in %s", self._claimed.id, STDOUT, STDERR, folder.path)
        except OSError as exc:
            logger.warning("the folder %s stays: %s", folder.path, exc)

    # The begin

    async def _prepare(self) -> Launch:
        said = _run_config(self._claimed.config)
        prefix, script, as_user = (_text(said, name) for name in ("prefix", "script", "as_user"))
        if script is not None and not self._rules.allow_script:
            raise TransportError(_refusal(self._claimed.id, "script", "a shell command of the submitter's"))
        if as_user is not None and not self._rules.allow_as_user:
            raise TransportError(_refusal(self._claimed.id, "as_user", "its body as the user that the submitter names"))
        self._script = script
        folder = await self._take()
        return Launch(
            self._claimed.id,
            self._claimed.attempt,
            folder,
            {**self._rules.environ, **self._orders(folder, prefix or "").environ()},
            script,
            as_user,
        )

    def _orders(self, folder: Folder, prefix: str) -> ChildSettings:
        claimed, rules = self._claimed, self._rules
        allow = rules.allow_pickled if rules.allow_pickled is not None else rules.local and claimed.trusted
        return ChildSettings(
            folder.path,
            rules.root,
            claimed.id,
            claimed.parent,
            claimed.root,
            prefix,
            rules.runtime_policy,
            allow,
            rules.allow_modules,
            claimed.attempt,
        )

    async def _take(self) -> Folder:
        workdir, id = self._rules.workdir, self._claimed.id

        async def take() -> None:
            self._folder = await self._child.in_thread(partial(Folder.take, workdir, id, self._claimed.body))

        with anyio.move_on_after(PATIENCE):
            while self._folder is None:
                await run_to_end(take)
                if self._folder is None:
                    await anyio.sleep(LOOK)
        if self._folder is None:
            raise DispatchError(
                f"{workdir / id} is held by the process of an earlier attempt, which has not ended in {PATIENCE:g} s: "
                "end it, or give each machine a workdir of its own"
            )
        return self._folder

    # While it runs, and its end

    async def _outcome(self, folder: Folder, process: Process) -> BodyOutcome:
        try:
            ended = await self._follow(folder, process)
        except BaseException as exc:
            done = await run_to_end(partial(self._stop, folder, process))
            if done.state == "succeeded" and isinstance(exc, anyio.get_cancelled_exc_class()):
                return done  # the body has not let itself be stopped
            reason = self._emit.stop_reason
            self._kept = reason in ("cancel", "timeout") or (self._emit.kill_at_shutdown and reason != "lost")
            raise
        done = await self._child.in_thread(partial(self._read, folder, ended))
        self._kept = done.state != "succeeded"
        return done

    async def _stop(self, folder: Folder, process: Process) -> BodyOutcome:
        """End the child, and see whether its body has finished all the same."""
        ended = await process.kill()
        if ended.code == 0 and self._tail is not None:
            if self._tail.left > MOST_LEFT:
                return _failed(
                    "the body finished when it was to be stopped, with too much of what it yielded not forwarded"
                )
            while await self._forward(self._tail, patiently=False):
                pass
        return await self._child.in_thread(partial(self._read, folder, ended))

    async def _follow(self, folder: Folder, process: Process) -> Exit:
        """Wait for the child's end and forward what it yields."""
        self._tail = FrameTail(folder.path / FRAMES)
        found = list[Exit]()
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._forward_on, self._tail)
                found.append(await process.wait())
                group.cancel_scope.cancel()
        except BaseExceptionGroup as raised:
            raise next(leaf_exceptions(raised)) from None
        while await self._forward(self._tail):
            pass
        return found[0]

    async def _forward_on(self, tail: FrameTail) -> None:
        pause = LOOK
        while True:
            pause = LOOK if await self._forward(tail) else min(pause * 1.5, LONGEST_LOOK)
            await anyio.sleep(pause)

    async def _forward(self, tail: FrameTail, *, patiently: bool = True) -> bool:
        """Forward what is there now; whether there was anything. Without patience nothing is waited for: a worker on
        its way out makes no room, and delivers all that was given to it."""
        if not tail.values and not await self._child.in_thread(tail.read):
            return False
        if not self._begun:
            self._begun = True
            self._emit.begin()
        while tail.values:
            if self._emit.add_packed(tail.values.popleft()) is Backpressure.WAIT and patiently:
                await self._emit.room()
        return True

    def _read(self, folder: Folder, ended: Exit) -> BodyOutcome:
        """What came of the child."""
        if ended.error is not None:
            state = LOST if ended.error.type == "WorkerLost" else ended.state
            return BodyOutcome(state, None, ended.error, state in ("timeout", "killed"))
        if ended.state == LOST and not os.path.lexists(folder.path / RESULT):
            return BodyOutcome(LOST, None, _GONE)
        if ended.code == 0 or ended.state == LOST:
            with suppress(OSError):
                if (size := os.lstat(folder.path / RESULT).st_size) > LARGEST:
                    return _failed(f"{RESULT} has {size} bytes, and no plane takes more than {LARGEST}")
            result = read_file(folder.path / RESULT) or None  # a machine that has crashed leaves empty files
            if self._tail is not None:
                try:
                    self._tail.check_end()
                except WireError as exc:
                    return failed_permanently(exc)
            if result is None and self._script is not None:
                result = pack(None)
            if result is not None:
                return BodyOutcome("succeeded", result)
            return _failed(f"the child ended with exit code 0 and wrote no {RESULT}", _output(folder, ended))
        said = read_error(folder.path)
        if said is not None:
            return BodyOutcome("failed", None, Failure(said.type, said.message, said.traceback), said.final)
        how = f"ended with exit code {ended.code}" if ended.code > 0 else f"was killed by {_signal(-ended.code)}"
        return _failed(f"the child {how} and wrote no error.json", _output(folder, ended))


def _failed(message: str, output: str = "") -> BodyOutcome:
    """A failure in the daemon's own words."""
    shown = f"{message}; the end of its output:\n{output}" if output else message
    return BodyOutcome("failed", None, Failure("DaemonError", shown))


def _output(folder: Folder, ended: Exit) -> str:
    return ended.output or last_output(folder.path)


def _signal(number: int) -> str:
    with suppress(ValueError):
        return Signals(number).name
    return f"signal {number}"


def _refusal(id: str, name: str, what: str) -> str:
    return (
        f"invocation {id!r} asks with `{name}` for {what}, which this worker refuses: start it with "
        f"--allow-{name.replace('_', '-')} if everybody who can submit may do that there"
    )


def _name(body: bytes) -> str:
    """The function's name, for people; the child judges the envelope."""
    if len(body) <= _NAMED:
        with suppress(Exception):
            name = Envelope.from_bytes(body).fn.get("qualname")
            return name if isinstance(name, str) and name else "?"
    return "?"


def _run_config(config: bytes | None) -> Mapping[str, Any]:
    """The routing fields of the submit, where they can be read."""
    if config is not None:
        try:
            found: Any = unpack(config)
        except WireError as exc:
            logger.debug("a run_config cannot be read: %s", describe_exception(exc).message)
        else:
            said = cast("dict[str, Any]", found).get("run_config") if isinstance(found, dict) else None
            if isinstance(said, dict):
                return cast("dict[str, Any]", said)
    return {}


def _text(said: Mapping[str, Any], name: str) -> str | None:
    value = said.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise ValueError(f"expected `{name}` of the run_config to be text, got {type(value).__name__}")
    if "\0" in value:
        raise ValueError(f"expected `{name}` of the run_config to be text without NUL, got {value[:80]!r}")
    return value
