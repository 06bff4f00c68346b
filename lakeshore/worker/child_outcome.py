"""The outcome of a child process: from the engine's account of its end, and from the files in its folder."""

from __future__ import annotations

import os
from contextlib import suppress
from signal import Signals
from typing import TYPE_CHECKING

from ..body.execute import BodyOutcome, failed_permanently
from ..daemon.workdir import RESULT, last_output, read_error, read_file, with_output
from ..errors import WireError
from ..planes.contract.records import Failure
from ..wire import pack
from .executor import LOST
from .frame_tail import MAX_VALUE_BYTES, FrameTail

if TYPE_CHECKING:
    from pathlib import Path

    from .runner import Exit

__all__ = ["daemon_failure", "read_outcome"]

_FORK_SERVER_DIED = Failure(
    "WorkerLost",
    "the interpreter that its child was forked from has died, and the child was ended; the body may have begun",
)


def daemon_failure(message: str, output: str = "") -> BodyOutcome:
    """Return a failure that the worker itself has found, with the end of the child's output."""
    return BodyOutcome("failed", None, Failure("DaemonError", with_output(message, output)))


def read_outcome(folder: Path, ended: Exit, frames: FrameTail | None, *, is_script: bool) -> BodyOutcome:
    """Return the outcome of a child that has ended. Reads files: to be called in a thread.

    Args:
        folder: The child's folder.
        ended: How the child ended.
        frames: What the child yielded; None if nothing of that was read.
        is_script: The child was a shell command, which may succeed without a result.
    """
    if ended.error is not None:
        state = LOST if ended.error.type == "WorkerLost" else ended.state
        return BodyOutcome(state, None, ended.error, final=state in ("timeout", "killed"))
    if ended.state == LOST and not os.path.lexists(folder / RESULT):
        return BodyOutcome(LOST, None, _FORK_SERVER_DIED)
    if ended.code == 0 or ended.state == LOST:
        return _read_result(folder, ended, frames, is_script)
    report = read_error(folder)
    if report is not None:
        return BodyOutcome("failed", None, Failure(report.type, report.message, report.traceback), report.final)
    if ended.code > 0:
        how = f"ended with exit code {ended.code}"
    else:
        how = f"was killed by {_signal_name(-ended.code)}"
    return daemon_failure(f"the child {how} and wrote no error.json", ended.output or last_output(folder))


def _read_result(folder: Path, ended: Exit, frames: FrameTail | None, is_script: bool) -> BodyOutcome:
    with suppress(OSError):
        size = os.lstat(folder / RESULT).st_size
        if size > MAX_VALUE_BYTES:
            return daemon_failure(f"{RESULT} has {size} bytes, and no plane takes more than {MAX_VALUE_BYTES}")
    result = read_file(folder / RESULT) or None  # a machine that has crashed leaves empty files
    if frames is not None:
        try:
            frames.check_end()
        except WireError as exc:
            return failed_permanently(exc)
    if result is None and is_script:
        result = pack(None)
    if result is None:
        output = ended.output or last_output(folder)
        return daemon_failure(f"the child ended with exit code 0 and wrote no {RESULT}", output)
    return BodyOutcome("succeeded", result)


def _signal_name(number: int) -> str:
    try:
        return Signals(number).name
    except ValueError:
        return f"signal {number}"
