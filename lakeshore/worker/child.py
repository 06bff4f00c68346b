"""The executor that runs each body in a child process, by the contract of `daemon.workdir`.

It does what is the same for every engine: the folder, the environment, the forwarding of yielded values. To start, await
and end a process is the part of a `Runner`.
"""

from __future__ import annotations

import errno
import logging
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from ..body.execute import Backpressure, BodyOutcome, failed_permanently, leaf_exceptions
from ..concurrency.backoff import Backoff
from ..concurrency.tasks import run_to_end
from ..daemon.workdir import ERROR, FRAMES, STDERR, STDOUT, ChildSettings, Folder, last_output, prune
from ..errors import DispatchError, TransportError, WireError
from ..ids import check_id
from ..wire import Envelope
from .child_outcome import daemon_failure, read_outcome
from .frame_tail import FrameTail
from .run_config import RunConfig
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

FIRST_POLL_INTERVAL = 0.01
MAX_POLL_INTERVAL = 0.1
"""Seconds between two reads of what a child yields. They grow while nothing new is there."""
MAX_REMAINING_BYTES = 64 << 20
"""Bytes of yielded values that are forwarded after the child was stopped."""
MAX_START_PAUSE = 30.0
"""Seconds for which nothing is claimed, at most, while children cannot be started."""
FOLDER_TIMEOUT = 20.0
"""Seconds that the process of an earlier attempt has, once it was killed, to release the folder."""
MAX_NAMED_ENVELOPE = 1 << 20
"""Bytes up to which an envelope is read for the function's name, which is only for log lines."""


@dataclass(frozen=True)
class ChildRules:
    """What children may do, and what becomes of their folders."""

    workdir: Path
    """Where the folders are made."""
    root: Path
    """The absolute folder of the `dls.run` keys."""
    allow_pickled: bool | None = None
    """Whether functions may be unpickled. None allows it for invocations submitted on this machine to a local plane."""
    local: bool = False
    """Whether the plane is local."""
    runtime_policy: str = "minor"
    """Which interpreter may run unpickled functions: `strict`, `minor` or `off`."""
    allow_modules: tuple[str, ...] = ()
    """Modules besides the user's own that references may name."""
    keep: int | None = None
    """How many folders of failed invocations are kept, the newest ones; None for all."""
    on_shutdown: Literal["killed", "release"] = "killed"
    """Whether an invocation whose child is ended with its worker becomes `killed` or goes back to its queue."""
    allow_script: bool = False
    """Whether submitters may run shell commands."""
    allow_as_user: bool = False
    """Whether submitters may choose the account of the child."""
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables for children besides those of the contract."""


class ChildExecutor:
    """Runs each body in a child of a runner. Up to `concurrency` of them never wait for one another."""

    def __init__(self, runner: Runner, rules: ChildRules, concurrency: int) -> None:
        self.runner = runner
        self.rules = rules
        self.paused_until = 0.0
        self._start_backoff = Backoff(1.0, MAX_START_PAUSE, jitter=0.25)
        # For files, which may be on a slow remote disk. Each child needs at most two threads at a time.
        self._threads = anyio.CapacityLimiter(2 * concurrency + 2)

    async def run(self, claimed: Claimed, channel: BodyChannel) -> BodyOutcome:
        """Run the body in a child.

        When cancelled, the child has ended before this raises. If it had succeeded nevertheless, its outcome is returned.
        """
        attempt = _ChildAttempt(self, claimed, channel)
        try:
            return await attempt.run()
        finally:
            await run_to_end(attempt.clean_up)

    def start_succeeded(self) -> None:
        self._start_backoff.reset()

    def start_failed(self, exc: Exception) -> None:
        """Pause the claims: an engine that is down would otherwise make every invocation of the queue fail."""
        now = time.monotonic()
        if now < self.paused_until:
            return
        pause = self._start_backoff.next_delay()
        self.paused_until = now + pause
        logger.error(
            "the %s runner cannot start children, nothing is claimed for %.1f s: %s", self.runner.name, pause, exc
        )

    async def in_thread(self, fn: Callable[[], T]) -> T:
        return await anyio.to_thread.run_sync(fn, limiter=self._threads)


class _ChildAttempt:
    """One claim, from its folder to its outcome."""

    def __init__(self, executor: ChildExecutor, claimed: Claimed, channel: BodyChannel) -> None:
        self._executor = executor
        self._rules = executor.rules
        self._claimed = claimed
        self._channel = channel
        self._folder: Folder | None = None
        self._process: Process | None = None
        self._frames: FrameTail | None = None
        self._is_script = False
        self._streaming = False
        self._keep_folder = False

    async def run(self) -> BodyOutcome:
        self._channel.timeout_start = None  # an engine may let a child wait for days before it starts
        try:
            check_id(self._claimed.id)
            self._channel.function = _function_name(self._claimed.body)
            launch = await self._prepare()
        except (TransportError, WireError, ValueError) as exc:
            return failed_permanently(exc)
        except (OSError, DispatchError) as exc:
            self._executor.start_failed(exc)
            return daemon_failure(f"its folder could not be prepared: {exc}")
        await checkpoint_if_cancelled()  # if nothing has started by now, the invocation goes back to its queue
        try:
            self._process = await self._executor.runner.start(launch)
        except (OSError, ValueError, DispatchError) as exc:
            return await self._start_failure(launch, exc)
        self._executor.start_succeeded()
        self._channel.timeout_start = time.monotonic()
        self._channel.kill_at_shutdown = self._rules.on_shutdown == "killed"
        return await self._wait_for_outcome(launch.folder, self._process)

    # --- the start ---

    async def _prepare(self) -> Launch:
        claimed = self._claimed
        rules = self._rules
        config = RunConfig.read(claimed.config)
        config.check_allowed(claimed.id, script=rules.allow_script, as_user=rules.allow_as_user)
        self._is_script = config.script is not None
        allow_pickled = rules.allow_pickled
        if allow_pickled is None:
            allow_pickled = rules.local and claimed.trusted
        folder = await self._take_folder()
        settings = ChildSettings(
            folder=folder.path,
            root=rules.root,
            id=claimed.id,
            parent=claimed.parent,
            root_id=claimed.root,
            prefix=config.prefix,
            runtime_policy=rules.runtime_policy,
            allow_pickled=allow_pickled,
            allow_modules=rules.allow_modules,
            attempt=claimed.attempt,
        )
        environ = {**rules.environ, **settings.environ()}
        return Launch(claimed.id, claimed.attempt, folder, environ, config.script, config.as_user)

    async def _take_folder(self) -> Folder:
        workdir = self._rules.workdir
        take_folder = partial(Folder.take, workdir, self._claimed.id, self._claimed.body)

        async def take() -> None:
            self._folder = await self._executor.in_thread(take_folder)

        with anyio.move_on_after(FOLDER_TIMEOUT):
            while self._folder is None:
                await run_to_end(take)
                if self._folder is None:
                    await anyio.sleep(FIRST_POLL_INTERVAL)
        if self._folder is None:
            raise DispatchError(
                f"{workdir / self._claimed.id} is held by the process of an earlier attempt, which has not ended in "
                f"{FOLDER_TIMEOUT:g} s: end it, or give each machine a workdir of its own"
            )
        return self._folder

    async def _start_failure(self, launch: Launch, exc: Exception) -> BodyOutcome:
        self._keep_folder = True
        chosen_by_submitter = launch.script is not None or launch.as_user is not None
        if not chosen_by_submitter and not _is_unfit_environment(exc):
            self._executor.start_failed(exc)
        output = await self._executor.in_thread(partial(last_output, launch.folder.path))
        return daemon_failure(f"the {self._executor.runner.name} runner could not start a child: {exc}", output)

    # --- while the child runs, and its end ---

    async def _wait_for_outcome(self, folder: Folder, process: Process) -> BodyOutcome:
        try:
            ended = await self._wait_and_forward(folder, process)
        except BaseException as exc:
            outcome = await run_to_end(partial(self._kill, folder, process))
            if outcome.state == "succeeded" and isinstance(exc, anyio.get_cancelled_exc_class()):
                return outcome  # the body has ended as usual, although it was asked to stop
            reason = self._channel.stop_reason
            self._keep_folder = reason in ("cancel", "timeout") or (self._channel.kill_at_shutdown and reason != "lost")
            raise
        outcome = await self._read_outcome(folder, ended)
        self._keep_folder = outcome.state != "succeeded"
        return outcome

    async def _wait_and_forward(self, folder: Folder, process: Process) -> Exit:
        """Wait for the end of the child, and forward what it yields meanwhile."""
        self._frames = FrameTail(folder.path / FRAMES)
        ended: list[Exit] = []
        try:
            async with anyio.create_task_group() as group:
                group.start_soon(self._forward_continuously, self._frames)
                ended.append(await process.wait())
                group.cancel_scope.cancel()
        except BaseExceptionGroup as raised:
            raise next(leaf_exceptions(raised)) from None
        while await self._forward(self._frames):
            pass
        return ended[0]

    async def _forward_continuously(self, frames: FrameTail) -> None:
        backoff = Backoff(FIRST_POLL_INTERVAL, MAX_POLL_INTERVAL, factor=1.5, jitter=0.0)
        while True:
            if await self._forward(frames):
                backoff.reset()
            await anyio.sleep(backoff.next_delay())

    async def _forward(self, frames: FrameTail, *, wait_for_room: bool = True) -> bool:
        """Forward the values that are there now. Return whether there were any.

        Without `wait_for_room` everything is handed over at once: a worker that stops delivers all that it has been given.
        """
        if not frames.values and not await self._executor.in_thread(frames.read):
            return False
        if not self._streaming:
            self._streaming = True
            self._channel.begin()
        while frames.values:
            pressure = self._channel.add_packed(frames.values.popleft())
            if pressure is Backpressure.WAIT and wait_for_room:
                await self._channel.room()
        return True

    async def _kill(self, folder: Folder, process: Process) -> BodyOutcome:
        """End the child, and return its outcome, which may be a success nevertheless."""
        ended = await process.kill()
        if ended.code == 0 and self._frames is not None:
            if self._frames.left > MAX_REMAINING_BYTES:
                return daemon_failure(
                    "the body finished when it was asked to stop, but too many of its values were not yet forwarded"
                )
            while await self._forward(self._frames, wait_for_room=False):
                pass
        return await self._read_outcome(folder, ended)

    async def _read_outcome(self, folder: Folder, ended: Exit) -> BodyOutcome:
        read = partial(read_outcome, folder.path, ended, self._frames, is_script=self._is_script)
        return await self._executor.in_thread(read)

    # --- afterwards ---

    async def clean_up(self) -> None:
        """Delete the folder, or release it if it is that of a failure. Must not be cancelled."""
        if self._frames is not None:
            self._frames.close()
        if self._folder is not None:
            await self._executor.in_thread(partial(self._clean_folder, self._folder))

    def _clean_folder(self, folder: Folder) -> None:
        try:
            if not self._keep_folder and not self._failed_before_stop(folder):
                folder.remove()
                return
            folder.release()
            if self._rules.keep is not None:
                prune(self._rules.workdir, self._rules.keep)
            if self._rules.keep != 0:
                logger.info(
                    "the files of %s, with %s and %s, are kept in %s", self._claimed.id, STDOUT, STDERR, folder.path
                )
        except OSError as exc:
            logger.warning("the folder %s could not be deleted: %s", folder.path, exc)

    def _failed_before_stop(self, folder: Folder) -> bool:
        """Return whether a child that was stopped during its start had already begun and failed."""
        stopped = self._process is None and self._channel.stop_reason in ("cancel", "timeout")
        return stopped and (folder.path / ERROR).exists()


def _is_unfit_environment(exc: Exception) -> bool:
    """Return whether a start failed because the submitter's fields do not fit into an environment."""
    return isinstance(exc, ValueError) or (isinstance(exc, OSError) and exc.errno == errno.E2BIG)


def _function_name(body: bytes) -> str:
    """Return the function's name for log lines. Whether the envelope is valid is decided in the child."""
    if len(body) <= MAX_NAMED_ENVELOPE:
        with suppress(Exception):
            name = Envelope.from_bytes(body).fn.get("qualname")
            if isinstance(name, str) and name:
                return name
    return "?"
