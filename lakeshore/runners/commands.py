"""Programs that runners call: those of an engine, and the guard that ends what would outlive this process."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import anyio

from ..errors import DispatchError
from ..limits import OUTPUT_TAIL_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["Answer", "Guard", "run_command"]

_GUARD = 'read -r done || exec "$@" >/dev/null 2>&1'
"""A line says that there is nothing left to end; the end of the pipe without one, that this process is gone."""


class Answer(NamedTuple):
    """How a program ended, and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> str:
        """The end of what it wrote to stderr, or to stdout if nothing."""
        return (self.err.strip() or self.out.strip())[-OUTPUT_TAIL_BYTES:]


async def run_command(
    argv: Sequence[str],
    *,
    timeout: float,
    environ: Mapping[str, str] | None = None,
    input: bytes | None = None,
) -> Answer:
    """Run a program to its end. Raises DispatchError when it is not there, or takes longer than `timeout` seconds, after
    which it is killed. Cancelled: it is killed too; what it had begun may be there all the same."""
    try:
        with anyio.fail_after(timeout):
            ended = await anyio.run_process(list(argv), input=input, check=False, env=environ, start_new_session=True)
    except TimeoutError:
        raise DispatchError(f"`{' '.join(argv[:2])}` has not answered in {timeout:g} s") from None
    except OSError as exc:
        raise DispatchError(f"`{argv[0]}` cannot be run: {exc}") from exc
    out, err = (data.decode("utf-8", "replace") for data in (ended.stdout, ended.stderr))
    return Answer(ended.returncode, out, err)


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
        """There is nothing left to end. Waits a moment for the process, which runs nothing."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            with suppress(BrokenPipeError):
                self._process.stdin.write(b"\n")
                self._process.stdin.flush()
            with suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()
