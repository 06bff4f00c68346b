"""`python3 -m dreamlake.lakeshore.daemon.entry`: the child that runs one invocation in a process of its own.

The environment and `args.msgpack` say what to run, see `workdir`. The child leaves `result.msgpack` and exits with 0; or it
leaves `error.json`, writes the traceback to stderr and exits with 1. Only what kills the process prevents that. Yielded
values are written to `frames.msgpack` at once.

Bodies run in the main thread, where they can set signal handlers. SIGTERM stops a body: an async body is cancelled, in any
other SystemExit is raised, once. Its `finally` blocks run. If the body returns a result nevertheless, the result counts.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn

from ..body.execute import Backpressure, BodyOutcome, BodySettings, execute_blocking, failed, failed_permanently
from ..planes.contract.records import Failure
from ..wire import Frame, FrameKind
from .workdir import (
    ARGS,
    ERROR,
    FRAMES,
    GATE,
    MODULES,
    RESULT,
    ChildSettings,
    folder_of,
    remove_leftovers,
    write_error,
    write_file,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

__all__ = ["main", "run", "wait_at_gate"]

STOPPED = 128 + signal.SIGTERM
"""The exit code of a process that SIGTERM ended, as shells report it."""
EXIT_TIMEOUT = 5.0
"""Seconds that threads and exit handlers of the body have once its outcome is written."""

_STOPPED_BY_SIGNAL = BodyOutcome("failed", None, Failure("Cancelled", "stopped by SIGTERM"))


class StopSignal:
    """Stops the body when SIGTERM arrives."""

    def __init__(self) -> None:
        self.received = False

    def enable(self) -> None:
        """From now on the first SIGTERM raises SystemExit in this thread."""
        signal.signal(signal.SIGTERM, self._raise)

    def disable(self) -> None:
        """From now on SIGTERM is ignored."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _raise(self, *_: object) -> None:
        if not self.received:
            self.received = True
            raise SystemExit(STOPPED)

    def run_async(self, body: Callable[[], Awaitable[BodyOutcome]]) -> BodyOutcome:
        """Run an async body on an event loop of its own, where SIGTERM cancels it."""
        import anyio

        async def watch(scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]) -> None:
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                task_status.started()
                async for _ in signals:
                    self.received = True
                    scope.cancel()

        async def main() -> BodyOutcome:
            outcome = _STOPPED_BY_SIGNAL
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    await group.start(watch, scope)
                    outcome = await body()
                    group.cancel_scope.cancel()
            return outcome

        return anyio.run(main)


class FrameFile:
    """The `ValueSink` of the body: each value becomes a frame at the end of a file."""

    function = "?"
    in_thread = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / FRAMES
        self._file: Any = None
        self._seq = 0

    def begin(self) -> None:
        self._file = open(self._path, "xb", buffering=0, opener=_open_private)

    def add(self, value: Any) -> Backpressure:
        view = memoryview(Frame(FrameKind.VALUE, self._seq, value).to_bytes())
        self._seq += 1
        while view:
            view = view[self._file.write(view) :]
        return Backpressure.CHECKPOINT

    async def room(self) -> None:
        from anyio.lowlevel import checkpoint

        await checkpoint()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def wait_at_gate(gate: int) -> None:
    """Wait until the daemon has done everything that belongs to the start. If the daemon has ended instead, exit."""
    byte = os.read(gate, 1)
    os.close(gate)
    if not byte:
        os._exit(STOPPED)


def run() -> int:
    """Run the invocation that the environment describes, leave its outcome in the folder, and return the exit code."""
    folder = folder_of(os.environ)
    stop = StopSignal()
    try:
        stop.enable()
        try:
            outcome = _run_body(folder, stop)
        finally:
            stop.disable()
    except BaseException as exc:  # Ctrl-C, or a SIGTERM outside of the body
        outcome = failed(exc)
    if stop.received and outcome.state != "succeeded":
        outcome = _STOPPED_BY_SIGNAL
    return _write_outcome(folder, outcome)


def _run_body(folder: Path, stop: StopSignal) -> BodyOutcome:
    try:
        remove_leftovers(folder, RESULT, ERROR, FRAMES)
        child = ChildSettings.read(os.environ)
        args = (folder / ARGS).read_bytes()
    except (OSError, ValueError) as exc:
        return failed_permanently(exc)
    settings = BodySettings(child.root, child.allow_pickled, child.runtime_policy, allow_modules=child.allow_modules)
    frames = FrameFile(folder)
    try:
        return execute_blocking(
            args, settings, frames, id=child.id, attempt=child.attempt, prefix=child.prefix, loop=stop.run_async
        )
    finally:
        frames.close()


def _write_outcome(folder: Path, outcome: BodyOutcome) -> int:
    """Write the result or the error of the body. Return the exit code."""
    if outcome.error is None and outcome.result is not None:
        try:
            write_file(folder, RESULT, outcome.result)
            return 0
        except OSError as exc:  # most likely the disk is full: an error takes less space
            outcome = failed_permanently(exc)
    error = outcome.error or Failure("DaemonError", "the body has neither a result nor an error")
    sys.stderr.write(error.traceback or f"{error.type}: {error.message}\n")
    try:
        write_error(folder, error.type, error.message, error.traceback, outcome.final)
    except OSError as exc:
        sys.stderr.write(f"{ERROR} could not be written: {exc}\n")
    return 1


def main() -> NoReturn:
    """Run the invocation and exit, `EXIT_TIMEOUT` later at most, even if the body left a thread that does not end."""
    gate = os.environ.pop(GATE, "")
    if gate:
        wait_at_gate(int(gate))
    modules = os.environ.pop(MODULES, "")
    if modules:
        sys.path.insert(0, modules)
    code = run()
    threading.Thread(target=_exit_after_timeout, args=(code,), daemon=True).start()
    # Threads are joined and exit handlers run, as at any exit of an interpreter. What an interpreter does after that is
    # left out: to free every module takes longer than a small body, and a library that crashes there would turn a result
    # that is already written into a failure. There is no public way to stop between the two. `sys.exit` goes on to free
    # the modules; an exit handler of ours that calls `os._exit` would run before the handlers that were registered earlier,
    # such as those of tempfile and of coverage, and skip them. Where these functions are missing, only they are skipped.
    try:
        getattr(threading, "_shutdown", _do_nothing)()
        getattr(atexit, "_run_exitfuncs", _do_nothing)()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _do_nothing() -> None: ...


def _exit_after_timeout(code: int) -> None:
    time.sleep(EXIT_TIMEOUT)
    os._exit(code)


if __name__ == "__main__":
    main()
