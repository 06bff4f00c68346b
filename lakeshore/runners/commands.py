"""Run the programs that runners need: those of an engine, the child's own, and the guard of what must not outlive us."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from ..errors import DispatchError
from ..limits import OUTPUT_TAIL_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..worker.runner import Launch

__all__ = ["CommandResult", "Guard", "child_command", "run_command"]

_ENTRY = ("-P", "-m", "dreamlake.lakeshore.daemon.entry")
"""-P: the child does not import modules from the folder of its invocation."""
_GUARD = 'read -r done || exec "$@" >/dev/null 2>&1'
"""A line means that there is nothing left to end; the end of the pipe without a line, that this process is gone."""


def child_command(launch: Launch, python: str) -> list[str]:
    """Return the command of a child: the entry of this package, or the script that was asked for in its place."""
    if launch.script is not None:
        return ["bash", "-c", launch.script]
    return [python, *_ENTRY]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code of a program, and what it wrote."""

    code: int
    stdout: str
    stderr: str

    @property
    def message(self) -> str:
        """The end of what it wrote to stderr, or to stdout if nothing."""
        return (self.stderr.strip() or self.stdout.strip())[-OUTPUT_TAIL_BYTES:]


async def run_command(
    argv: Sequence[str],
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    input: bytes | None = None,
) -> CommandResult:
    """Run a program to its end. Cancelled, it kills the program; what the program had begun may be there all the same.

    Args:
        argv: The program and its arguments.
        timeout: Seconds after which the program is killed.
        environ: Its environment; by default that of this process.
        input: What it reads from stdin.

    Raises:
        DispatchError: The program is not there, or took too long.
    """
    try:
        with anyio.fail_after(timeout):
            ended = await anyio.run_process(list(argv), input=input, check=False, env=environ, start_new_session=True)
    except TimeoutError:
        raise DispatchError(f"`{' '.join(argv[:2])}` has not ended within {timeout:g} s") from None
    except OSError as exc:
        raise DispatchError(f"`{argv[0]}` cannot be run: {exc}") from exc
    stdout = ended.stdout.decode("utf-8", "replace")
    stderr = ended.stderr.decode("utf-8", "replace")
    return CommandResult(ended.returncode, stdout, stderr)


class Guard:
    """A small process that runs `argv` when this process ends, in whatever way, before `dismiss`."""

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """End the process, since there is nothing left for it to end. Waits for it, which takes a moment."""
        pipe = self._process.stdin
        if pipe is not None and not pipe.closed:
            with suppress(BrokenPipeError):
                pipe.write(b"\n")
                pipe.flush()
            with suppress(BrokenPipeError):
                pipe.close()
        self._process.wait()
