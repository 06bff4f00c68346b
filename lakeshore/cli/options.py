"""Options that several commands share, and how a command opens its plane, logs, and stops on signals."""

from __future__ import annotations

import functools
import importlib.util
import logging
import math
import os
import re
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import anyio
import click

from ..errors import InvocationFailed, LakeshoreError, PlaneUnavailable
from .output import clean, document

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from anyio.abc import TaskStatus

    from ..planes.plane import Plane

__all__ = [
    "INTERRUPTED",
    "Where",
    "age",
    "age_with_unit",
    "error_document",
    "json_flag",
    "log_to_stderr",
    "need_mongo",
    "need_server",
    "on_plane",
    "plane_of",
    "plane_options",
    "reading",
    "seconds",
    "watch_signals",
]

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 3.0
"""Seconds for which a command, other than a worker, tries to reach its plane."""

INTERRUPTED = 130
"""The exit code after a second signal."""

_NUMBER = r"(\d+\.?\d*|\.\d+)"
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def age(text: object) -> float:
    """Parse a duration of 0 or more seconds, for click: 0, 90, 1.5, 45s, 10m, 2h, 7d, 4w."""
    found = re.fullmatch(rf"{_NUMBER}([smhdw]?)", str(text).strip(), re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else math.inf
    if not math.isfinite(value):
        raise click.BadParameter(f"expected seconds, or a number with a unit such as 45s, 10m, 2h, 7d, got {text!r}")
    return value


def age_with_unit(text: str) -> float:
    """Parse a duration that must have a unit: a bare number could be meant as days, and purging deletes."""
    if re.fullmatch(rf"{_NUMBER}[smhdw]", text.strip(), re.ASCII) is None:
        raise click.BadParameter(
            f"expected a number with a unit, one of s, m, h, d and w (seconds, minutes, hours, days, weeks), "
            f"got {text!r}: write 7d for seven days"
        )
    return age(text)


def seconds(text: object) -> float:
    """Parse a duration above 0 seconds."""
    value = age(text)
    if value <= 0:
        raise click.BadParameter(f"expected more than 0 seconds, got {text!r}")
    return value


@dataclass(frozen=True)
class Where:
    """The plane options of a command; None where the environment decides."""

    db: str | None
    namespace: str | None
    url: str | None = None
    token_file: str | None = None


def plane_options(command: Callable[Concatenate[Where, P], T]) -> Callable[..., T]:
    """Add the options that name a plane to a command, and pass them to it as a `Where`."""

    @click.option("--db", metavar="PATH", help="The plane's file.  [default: $LAKESHORE_HOME/lakeshore.db]")
    @click.option("--url", metavar="URL", help="The address of a server.  [default: $LAKESHORE_URL]")
    @click.option(
        "--token-file",
        metavar="PATH",
        help="A file that holds the token for the server.  [default: the token in $LAKESHORE_CLIENT_TOKEN]",
    )
    @click.option(
        "--namespace",
        metavar="NAME",
        help="The namespace.  [default: $LAKESHORE_NAMESPACE, else that of the token, else default]",
    )
    @functools.wraps(command)
    def wrapped(
        *args: Any, db: str | None, url: str | None, token_file: str | None, namespace: str | None, **kwargs: Any
    ) -> T:
        # Scripts pass empty options for unset variables: treat them as absent.
        return command(Where(db or None, namespace or None, url or None, token_file or None), *args, **kwargs)

    return wrapped


def plane_of(where: Where, *, create: bool = False) -> Plane:
    """The plane that the options and the environment name; `--db` overrides LAKESHORE_URL.

    create: whether a missing file is created, as workers do. Raises PlaneUnavailable for a missing file otherwise, and
    UsageError for options that contradict each other.
    """
    from ..client.default_plane import default_dispatch
    from ..planes.sqlite.store import Dispatch

    if where.db is not None and where.url is not None:
        raise click.UsageError("--db names a file and --url a server: give one of the two")
    try:
        plane = default_dispatch() if where == Where(None, None) else _named(where)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from None
    if isinstance(plane, Dispatch):
        if where.token_file is not None:
            raise click.UsageError("--token-file is for a server: name it with --url or LAKESHORE_URL")
        if plane.path is None:
            raise click.UsageError("only its own process can see a plane in memory: give --db the path of a file")
        if not create and not plane.path.exists():
            raise PlaneUnavailable(
                f"no plane at {str(plane.path)!r}: nothing was ever submitted there; check --db or LAKESHORE_HOME"
            )
    return plane


def _named(where: Where) -> Plane:
    from ..settings import read_settings

    settings = read_settings()
    url = where.url or (settings.url if where.db is None else None)
    namespace = where.namespace or settings.namespace
    if url is None:
        from ..planes.sqlite.store import Dispatch

        return Dispatch(where.db or settings.home / "lakeshore.db", ns=namespace or "default")
    from ..planes.http.store import HttpDispatch

    token = settings.client_token if where.token_file is None else read_token(Path(where.token_file).expanduser())
    return HttpDispatch(url, token=token, namespace=namespace)


def read_token(path: Path) -> str:
    """Read the one plain token in a client's file. No error shows the content of the file."""
    shared = 0
    words: list[str] = []
    try:
        with open(path, encoding="utf-8") as file:
            shared = sys.platform != "win32" and os.fstat(file.fileno()).st_mode & 0o077
            words = file.read(4096).split()
    except OSError as exc:
        raise click.UsageError(f"cannot read the token in {str(path)!r}: {exc.strerror}") from None
    except UnicodeDecodeError:
        pass  # not a token
    if len(words) != 1 or not words[0].isascii():
        raise click.UsageError(
            f"expected one plain token in {str(path)!r}, as `lakeshore token create` prints it, got something else; "
            "the file of hashes that the server reads does not work here"
        )
    if shared:
        click.echo(f"lakeshore: other users can read the token in {str(path)!r}: run `chmod 600 {path}`", err=True)
    return words[0]


def on_plane(where: Where, act: Callable[[Plane], Awaitable[T]]) -> T:
    """Open the plane, call `act` with it, and close it; on asyncio."""
    plane = plane_of(where)
    plane.patience = PATIENCE

    async def acting() -> T:
        async with plane:
            return await act(plane)

    return anyio.run(acting)


json_flag = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def reading(command: Callable[P, T]) -> Callable[P, T]:
    """Add `--json` to a command; with it an error is also printed as a JSON document."""

    @json_flag
    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except (LakeshoreError, TimeoutError) as exc:
            if kwargs.get("as_json"):
                document(error_document(exc))
            raise

    return wrapped


def error_document(exc: Exception) -> dict[str, Any]:
    """An error for JSON: of an invocation with its id and state, any other by its class and message."""
    if isinstance(exc, InvocationFailed):
        error = {"type": exc.type, "message": exc.message, "traceback": exc.traceback}
        return {"id": exc.id, "state": exc.state, "error": error}
    return {"error": {"type": type(exc).__name__, "message": str(exc)}}


def need_server() -> None:
    """Raise UsageError if packages of the extra `[server]` are missing, before any of them is imported."""
    needed = [
        "starlette",
        "uvicorn",
        "httptools",
        "prometheus_client",
        *(["uvloop"] if sys.platform != "win32" else []),
    ]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"the server needs packages that are not installed ({', '.join(missing)}): "
            'pip install "dreamlake-lakeshore[server]"'
        )


def need_mongo() -> None:
    """Raise UsageError if packages of the extra `[mongo]` are missing, before any of them is imported."""
    missing = [name for name in ("pymongo", "redis") if importlib.util.find_spec(name) is None]
    if missing:
        raise click.UsageError(
            f"a plane in MongoDB needs packages that are not installed ({', '.join(missing)}): "
            'pip install "dreamlake-lakeshore[mongo]"'
        )


async def watch_signals(
    first: Callable[[str], object],
    again: Callable[[str], object],
    *,
    task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED,
) -> None:
    """Call `first` with the name of the first SIGTERM or SIGINT and `again` with that of the second, then return."""
    if sys.platform == "win32":  # Windows has no signal receiver: Ctrl-C cancels everything at once
        task_status.started()
        return
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        count = 0
        async for number in signals:
            name = signal.Signals(number).name
            count += 1
            if count == 2:
                again(name)
                return
            first(name)


class _Formatter(logging.Formatter):
    """Escapes control characters, so that names from other machines cannot break the log into lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return clean(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return clean(super().formatException(ei))


def log_to_stderr(**others: int) -> None:
    """Log the package's messages to stderr, and those of the loggers in `others` from a level on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(message)s"))
    for name, level in {"dreamlake.lakeshore": logging.INFO, **others}.items():
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(level)
        logger.propagate = False
