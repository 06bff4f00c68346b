"""`python3 -m dreamlake.lakeshore.daemon.entry`: the child that runs one invocation, in a process of its own.

What it is to do stands in the environment and in `args.msgpack`, see `workdir`. It leaves `result.msgpack` and exit 0,
or `error.json`, the traceback on stderr, and exit 1, whatever the body does short of killing it. Yielded values go to
`frames.msgpack` as they come.

Bodies run in the main thread, where signal handlers can be set. SIGTERM stops them: an async body is cancelled, in any
other SystemExit is raised, once; `finally` blocks run. A body that goes on all the same has the result it returns.
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

__all__ = ["main", "run", "wait_at"]

STOPPED = 128 + signal.SIGTERM
EXIT_BOUND = 5.0
"""Seconds that threads and exit handlers of the body have once its outcome is written."""


class Stop:
    """SIGTERM, and what it means for the body."""

    def __init__(self) -> None:
        self.asked = False

    def listen(self) -> None:
        """From now on SIGTERM raises SystemExit in this thread, the first one only."""
        signal.signal(signal.SIGTERM, self._raise)

    def ignore(self) -> None:
        """From now on SIGTERM changes nothing."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def _raise(self, *_: object) -> None:
        if not self.asked:
            self.asked = True
            raise SystemExit(STOPPED)

    def run_async(self, body: Callable[[], Awaitable[BodyOutcome]]) -> BodyOutcome:
        """Run an async body on an event loop of its own, on which SIGTERM cancels it."""
        import anyio

        async def watch(scope: anyio.CancelScope, *, task_status: anyio.abc.TaskStatus[None]) -> None:
            with anyio.open_signal_receiver(signal.SIGTERM) as signals:
                task_status.started()
                async for _ in signals:
                    self.asked = True
                    scope.cancel()

        async def main() -> BodyOutcome:
            done = _stopped()
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as group:
                    await group.start(watch, scope)
                    done = await body()
                    group.cancel_scope.cancel()
            return done

        return anyio.run(main)


class FrameFile:
    """The `ValueSink` of the body: values become frames at the end of a file."""

    function = "?"
    in_thread = False

    def __init__(self, folder: Path) -> None:
        self._path = folder / FRAMES
        self._file: Any = None
        self._seq = 0

    def begin(self) -> None:
        self._file = open(self._path, "xb", buffering=0, opener=_private)

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


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def wait_at(gate: int) -> None:
    """Wait until the daemon has done all that belongs to the start. If it ended in place of that, this process does, too."""
    said = os.read(gate, 1)
    os.close(gate)
    if not said:
        os._exit(STOPPED)


def run() -> int:
    """Run the invocation that the environment describes, and leave its outcome in its folder; the exit code."""
    folder, stop = folder_of(os.environ), Stop()
    try:
        stop.listen()
        try:
            done = _body(folder, stop)
        finally:
            stop.ignore()
    except BaseException as exc:  # Ctrl-C, or a SIGTERM at a place where no body was to be stopped
        done = failed(exc)
    if stop.asked and done.state != "succeeded":
        done = _stopped()
    return _leave(folder, done)


def _body(folder: Path, stop: Stop) -> BodyOutcome:
    try:
        remove_leftovers(folder, RESULT, ERROR, FRAMES)
        orders = ChildSettings.read(os.environ)
        settings = BodySettings(
            orders.root, orders.allow_pickled, orders.runtime_policy, allow_modules=orders.allow_modules
        )
        args = (folder / ARGS).read_bytes()
    except (OSError, ValueError) as exc:
        return failed_permanently(exc)
    emit = FrameFile(folder)
    try:
        return execute_blocking(
            args, settings, emit, id=orders.id, attempt=orders.attempt, prefix=orders.prefix, loop=stop.run_async
        )
    finally:
        emit.close()


def _stopped() -> BodyOutcome:
    return BodyOutcome("failed", None, Failure("Cancelled", "stopped by SIGTERM"))


def _leave(folder: Path, done: BodyOutcome) -> int:
    if done.error is None and done.result is not None:
        try:
            write_file(folder, RESULT, done.result)
            return 0
        except OSError as exc:  # no space, most likely: an error takes less
            done = failed_permanently(exc)
    error = done.error or Failure("DaemonError", "nothing came of the body")
    sys.stderr.write(error.traceback or f"{error.type}: {error.message}\n")
    try:
        write_error(folder, error.type, error.message, error.traceback, done.final)
    except OSError as exc:
        sys.stderr.write(f"{ERROR} could not be written: {exc}\n")
    return 1


def main() -> NoReturn:
    """Run and exit, in a few seconds even if the body left a thread that would keep the interpreter alive.

    Threads are waited for and exit handlers run, as ever, but nothing is taken apart after that: it would cost more than
    a small body, and a library that crashes at it would spoil a result that is there.
    """
    gate = os.environ.pop(GATE, "")
    if gate:
        wait_at(int(gate))
    if modules := os.environ.pop(MODULES, ""):
        sys.path.insert(0, modules)
    code = run()
    threading.Thread(target=_end, args=(code,), daemon=True).start()
    try:
        getattr(threading, "_shutdown", _nothing)()
        getattr(atexit, "_run_exitfuncs", _nothing)()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(code)


def _nothing() -> None: ...


def _end(code: int) -> None:
    time.sleep(EXIT_BOUND)
    os._exit(code)


if __name__ == "__main__":
    main()
