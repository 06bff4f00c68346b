"""`lakeshore`: the groups of commands, and how the process ends.

Exit codes: 0 done, 1 failed, 2 usage, 4 not authorised, 5 the plane is out of reach, 130 interrupted.
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
from .output import clean, frames_of, say
from .plane import plane
from .server import server
from .shared import INTERRUPTED, Where, age_with_unit, on_plane, plane_options
from .show import inv, queue
from .token import token
from .worker import worker

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..planes.plane import Plane

__all__ = ["main", "run"]

FAILED, NOT_AUTHORIZED, UNREACHABLE = 1, 4, 5

LINGER = 5.0
"""Seconds that the interpreter has to end once the command has."""


@click.group()
@click.version_option(package_name="dreamlake-lakeshore", prog_name="lakeshore")
def cli() -> None:
    """Run Python functions through durable queues: start workers and servers, and look at what they do."""


for group in (worker, server, token, queue, inv, plane):
    cli.add_command(group)


@cli.command()
@click.option(
    "--older-than", type=age_with_unit, required=True, metavar="AGE", help="A number and one of s, m, h, d, w: 7d."
)
@plane_options
def purge(where: Where, older_than: float) -> None:
    """Delete invocations that ended longer ago than AGE, with their results and streams."""

    async def act(plane: Plane) -> int:
        return await plane.purge(older_than)

    count = on_plane(where, act)
    say(f"{count} invocation{'' if count == 1 else 's'} purged")


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run one command line, default `sys.argv`, and end the process."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a result may hold what the terminal's encoding does not
    try:
        code = run(args)
    except Exception:  # a fault of ours: it is shown whole, and the process ends like any other
        traceback.print_exc()
        code = FAILED
    end_process(code)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command line; the exit code. What went wrong is one sentence on stderr."""
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
    """Exit, also when a thread that nobody can stop still runs: then soon, and with a code that is not 0."""
    until = time.monotonic() + 1.0
    while bodies := [thread for thread in threading.enumerate() if thread.name.startswith("AnyIO worker")]:
        if time.monotonic() > until:
            _cut(code, f"{len(bodies)} of the bodies run on in threads, which cannot be stopped")
        time.sleep(0.01)
    # Threads that bodies left behind are joined by the interpreter, for as long as they take.
    watchdog = threading.Timer(LINGER, _cut, (code, f"threads that were started here still run after {LINGER:g} s"))
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
            pass  # nobody reads it any more
    os._exit(code or FAILED)
