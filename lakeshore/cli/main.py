"""`lakeshore`: the command groups, the exit codes, and the end of the process.

Exit codes: 0 done, 1 failed, 2 usage, 4 not authorised, 5 plane unreachable, 130 interrupted.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, NoReturn

import click

from ..errors import InvocationFailed, LakeshoreError, NotAuthorized, PlaneUnavailable
from .inv import inv
from .options import INTERRUPTED, Where, age_with_unit, on_plane, plane_options
from .output import clean, frames_of, say
from .plane import plane
from .queue import queue
from .server import server
from .token import token
from .worker import worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planes.plane import Plane

__all__ = ["main", "run"]

FAILED = 1
NOT_AUTHORIZED = 4
UNREACHABLE = 5

EXIT_TIMEOUT = 5.0
"""Seconds that the interpreter has to end after the command has ended."""


@click.group()
@click.version_option(package_name="dreamlake-lakeshore", prog_name="lakeshore")
def cli() -> None:
    """Run Python functions through durable queues: start workers and servers, inspect queues and invocations."""


for group in (worker, server, token, queue, inv, plane):
    cli.add_command(group)


@cli.command()
@click.option(
    "--older-than",
    type=age_with_unit,
    required=True,
    metavar="AGE",
    help="A number with a unit, one of s, m, h, d, w: 7d.",
)
@plane_options
def purge(where: Where, older_than: float) -> None:
    """Delete invocations that ended more than AGE ago, with their results and streams."""

    async def act(plane: Plane) -> int:
        return await plane.purge(older_than)

    count = on_plane(where, act)
    say(f"{count} invocation{'' if count == 1 else 's'} purged")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command line, by default `sys.argv`, and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # a result may hold characters that the terminal's encoding lacks
    try:
        code = run(args)
    except Exception:  # a bug in this package: show its traceback, and end the process as usual
        traceback.print_exc()
        code = FAILED
    end_process(code)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line and return its exit code. An error is one sentence on stderr."""
    try:
        code = cli.main(None if args is None else list(args), prog_name="lakeshore", standalone_mode=False)
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except click.Abort:
        return INTERRUPTED
    except (LakeshoreError, TimeoutError) as exc:
        if isinstance(exc, InvocationFailed) and frames_of(exc.traceback):
            click.echo(clean(frames_of(exc.traceback)), err=True)
        click.echo(f"lakeshore: {clean(exc)}", err=True)
        if isinstance(exc, NotAuthorized):
            return NOT_AUTHORIZED
        return UNREACHABLE if isinstance(exc, PlaneUnavailable) else FAILED
    return code if isinstance(code, int) else 0


def end_process(code: int) -> NoReturn:
    """Exit. If a thread that cannot be stopped still runs, exit soon and with a code other than 0."""
    until = time.monotonic() + 1.0
    while bodies := [thread for thread in threading.enumerate() if thread.name.startswith("AnyIO worker")]:
        if time.monotonic() > until:
            _cut(code, f"{len(bodies)} bodies still run in threads, which cannot be stopped")
        time.sleep(0.01)
    # The interpreter joins threads that bodies started, for as long as they take.
    watchdog = threading.Timer(
        EXIT_TIMEOUT, _cut, (code, f"threads that were started here still run after {EXIT_TIMEOUT:g} s")
    )
    watchdog.daemon = True
    watchdog.start()
    sys.exit(code)


def _cut(code: int, why: str) -> NoReturn:
    click.echo(f"lakeshore: {why}; the process ends without them", err=True)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass  # the reader of the pipe is gone
    os._exit(code or FAILED)
