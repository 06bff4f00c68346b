"""`lakeshore plane`: copy invocations from one plane to another."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import click

from ..errors import DispatchError, PlaneUnavailable
from ..settings import read_settings
from .options import reading
from .output import clean, document, say, table

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from ..planes.migrate import Tally
    from ..planes.plane import Plane

__all__ = ["plane"]


@click.group()
def plane() -> None:
    """Copy whole planes."""


class Came(NamedTuple):
    """The result of a migration; a dry run has no tallies."""

    written: int
    there: int
    source: Tally | None = None
    target: Tally | None = None
    difference: str | None = None


@plane.command()
@click.option(
    "--from", "source", required=True, metavar="PLANE", help="A plane's file, a mongodb:// address, or env:NAME."
)
@click.option("--to", "target", required=True, metavar="PLANE", help="The plane to write to, in the same forms.")
@click.option(
    "--from-namespace", metavar="NAME", help="The namespace to read.  [default: $LAKESHORE_NAMESPACE, else default]"
)
@click.option("--to-namespace", metavar="NAME", help="The namespace to write.  [default: that of the source]")
@click.option(
    "--queue", "queues", multiple=True, metavar="NAME", help="Only invocations of this queue; may be repeated."
)
@click.option("--dry-run", is_flag=True, help="Write nothing: report how many would be written, and what prevents it.")
@reading
def migrate(
    source: str,
    target: str,
    from_namespace: str | None,
    to_namespace: str | None,
    queues: tuple[str, ...],
    dry_run: bool,
    as_json: bool,
) -> int:
    """Copy queued and ended invocations, with results, streams and keys, from one plane to another.

    First stop the workers of both planes, and let producers submit to the new one: the command refuses to copy while an
    invocation runs, and it does not copy what is submitted to the source later. It only reads the source. The target
    must be empty, or hold only what an earlier run of this command wrote: after an interruption, start it again.

    At the end it reads both planes once more and compares them row by row; the exit code is 0 only if they are equal.
    The copies are untrusted: workers run their pickled functions only with --allow-pickled.

    env:NAME takes the address from the environment variable NAME, so that the list of processes shows no password.
    """
    source, target = _spelled_out("--from", source), _spelled_out("--to", target)
    ns = from_namespace or read_settings().namespace or "default"
    planes = _planes((source, ns), (target, to_namespace or ns), dry_run)

    async def act() -> Came:
        return await _migrate(*planes, queues, dry_run, named=bool(queues or from_namespace))

    came = anyio.run(act)
    if as_json:
        document(_document(came, dry_run))
    else:
        _show(came, dry_run)
    if came.difference is None:
        return 0
    click.echo(
        f"lakeshore: the two planes differ: {clean(came.difference)}; one of them was changed during the copy, or "
        "the target was not empty: migrate again to an empty target while nothing uses either plane",
        err=True,
    )
    return 1


async def _migrate(
    source: Plane, target: Plane | None, queues: tuple[str, ...], dry: bool, *, named: bool = False
) -> Came:
    from ..planes.migrate import Migration, check_at_rest, settle

    async with source:
        await settle(source)
        await check_at_rest(source, queues)  # before the target's file is created
        counts = await source.counts()
        total = sum(count for (queue, _), count in counts.items() if not queues or queue in queues)
        if named and not total:
            where = f" in {', '.join(queues)}" if queues else ""
            raise DispatchError(
                f"{source!r} has no invocations{where} in the namespace {source.ns!r}: check --queue and --from-namespace"
            )
        async with target if target is not None else nullcontext():
            migration = Migration(source, target, queues)
            with _counting("writing", total) as tell:
                await migration.copy(tell, dry=dry)
            if dry or target is None:
                return Came(migration.written, migration.there)
            with _counting("comparing", total) as tell:
                return Came(migration.written, migration.there, *await migration.verify(tell))


@contextmanager
def _counting(what: str, total: int) -> Generator[Callable[[int], object]]:
    """On a terminal, show on stderr how many of `total` are done."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


# What the options name ----------------------------------------------------------------------------------------------


def _planes(source: tuple[str, str], target: tuple[str, str], dry: bool) -> tuple[Plane, Plane | None]:
    """Both planes; None for the target of a dry run whose file does not exist."""
    here, there = _plane("--from", *source), _plane("--to", *target)
    if _place(*source) == _place(*target):
        raise click.UsageError("--from and --to are one plane and namespace: name another file, database or namespace")
    path = _path(source[0])
    if path is not None and not path.exists():
        raise PlaneUnavailable(f"no plane at {str(path)!r}: nothing was ever submitted there; check --from")
    path = _path(target[0])
    return here, None if dry and path is not None and not path.exists() else there


def _plane(option: str, where: str, ns: str) -> Plane:
    scheme = _scheme(where)
    if scheme in ("http", "https"):
        raise click.UsageError(
            f"{option} is a server: a migration works on the plane itself, so name the file or the database that the "
            "server serves"
        )
    if where == ":memory:" or not where:
        raise click.UsageError(f"{option} names no plane: give the path of a file, or an address mongodb://...")
    if not scheme:
        from ..planes.sqlite.store import Dispatch

        return Dispatch(where, ns=ns)
    if scheme not in _MONGO:
        raise click.UsageError(
            f"{option} has the scheme {scheme!r}: give the path of a file, or an address mongodb://..."
        )
    if importlib.util.find_spec("pymongo") is None:
        raise click.UsageError(
            "a plane in MongoDB needs packages that are not installed (pymongo): "
            'pip install "dreamlake-lakeshore[mongo]"'
        )
    from ..planes.mongo.store import MongoDispatch

    try:
        return MongoDispatch(where, ns=ns)
    except ValueError as exc:
        raise click.UsageError(f"{option}: {exc}") from None


_MONGO = ("mongodb", "mongodb+srv")


def _spelled_out(option: str, where: str) -> str:
    """The file or address that an option names; `env:NAME` is replaced by the value of the variable."""
    if not where.startswith("env:"):
        return where
    name = where.removeprefix("env:")
    found = os.environ.get(name)
    if not found:
        raise click.UsageError(f"{option} {where} names an environment variable that is not set: set {name}")
    if not _scheme(found):  # a value without a scheme may hold a password: it is not used as a file name, and not shown
        raise click.UsageError(f"{option} {where}: expected an address mongodb://... in {name}, got something else")
    return found


def _scheme(where: str) -> str:
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]*)://", where)
    return found[1].lower() if found else ""


def _path(where: str) -> Path | None:
    return None if _scheme(where) else Path(where).expanduser()


def _place(where: str, ns: str) -> tuple[str, str]:
    path = _path(where)
    return where if path is None else str(path.resolve()), ns


# What is shown ------------------------------------------------------------------------------------------------------


def _show(came: Came, dry: bool) -> None:
    if came.source is not None and came.target is not None:
        kinds = sorted(came.source.counts.keys() | came.target.counts.keys())
        cells = [[*kind, came.source.counts[kind], came.target.counts[kind]] for kind in kinds]
        table(["queue", "state", "source", "target"], cells)
        say(f"\nsource  {came.source.digest}\ntarget  {came.target.digest}\n")
    would = " would be" if dry else ""
    say(f"{_many(came.written)}{would} written, {came.there} had been there")


def _many(count: int) -> str:
    return f"{count} invocation{'' if count == 1 else 's'}"


def _document(came: Came, dry: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"dry_run": dry, "written": came.written, "there": came.there}
    for name, tally in (("source", came.source), ("target", came.target)):
        if tally is not None:
            counts = [
                {"queue": queue, "state": state, "count": n} for (queue, state), n in sorted(tally.counts.items())
            ]
            fields[name] = {"counts": counts, "digest": tally.digest}
    if came.source is not None:
        fields |= {"alike": came.difference is None, "difference": came.difference}
    return fields
