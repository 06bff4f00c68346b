"""`lakeshore server`: serve the plane in a file, or one in MongoDB, to other machines."""

from __future__ import annotations

import logging
import os
import re
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import click

from ..settings import read_settings
from .options import INTERRUPTED, age, log_to_stderr, need_mongo, need_server, watch_signals
from .token import token_path

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from pathlib import Path

    from ..planes.plane import Plane
    from ..server.tokens import TokenFile
    from ..settings import Settings

__all__ = ["server"]

logger = logging.getLogger("dreamlake.lakeshore.server")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def size(text: object) -> int:
    """Parse a number of bytes, for click: 65536, 64k, 128M, 1G."""
    found = re.fullmatch(r"(\d{1,15})([kmg]?)(?:i?b)?", str(text).strip().lower(), re.ASCII)
    value = int(found[1]) * _UNITS[found[2]] if found else 0
    if value <= 0:
        raise click.BadParameter(f"expected bytes above 0, or a number with a unit such as 64k, 128M, 1G, got {text!r}")
    return value


def pinned(text: str) -> tuple[str, str]:
    """Parse a namespace and a version: NS=V."""
    namespace, equals, version = text.partition("=")
    if not (namespace and equals and version):
        raise click.BadParameter(f"expected a namespace and a version, NS=V, got {text!r}")
    return namespace, version


class Options(NamedTuple):
    """The options of a server."""

    host: str
    port: int
    db: str | None
    namespace: str | None
    token_file: str | None
    insecure: bool
    allowed_hosts: tuple[str, ...]
    target_versions: tuple[tuple[str, str], ...]
    max_body: int | None
    durable: bool
    grace: float
    mongo: str | None
    redis: str | None


@click.group()
def server() -> None:
    """Serve a plane to other machines."""


@server.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=8750, show_default=True, help="The port; 0 takes a free one."
)
@click.option("--db", metavar="PATH", help="The plane's file.  [default: $LAKESHORE_HOME/lakeshore.db]")
@click.option(
    "--mongo",
    metavar="URL",
    help="A database in place of a file: mongodb://HOST:27017/DATABASE, which servers may share. Put an address with a "
    "password into the environment, so that the list of processes does not show it.  [default: $LAKESHORE_MONGO_URL, "
    "if there is no --db]",
)
@click.option(
    "--redis",
    metavar="URL",
    help="With a database: redis://HOST:6379/0, which wakes waiting clients quickly.  [default: $LAKESHORE_REDIS_URL]",
)
@click.option(
    "--namespace",
    metavar="NAME",
    help="The namespace of requests that name none.  [default: $LAKESHORE_NAMESPACE, else default]",
)
@click.option(
    "--token-file",
    metavar="PATH",
    help="The file of tokens that `lakeshore token` writes.  [default: $LAKESHORE_HOME/tokens]",
)
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without any token.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    metavar="NAME",
    help="A host name by which clients reach the server; may be repeated. The server rejects requests for other hosts.",
)
@click.option(
    "--target-nymph-version",
    "target_versions",
    type=pinned,
    multiple=True,
    metavar="NS=V",
    help="The version that the server reports to the daemons of a namespace; may be repeated.",
)
@click.option("--max-body", type=size, metavar="SIZE", help="The largest request body.  [default: 128M]")
@click.option("--durable", is_flag=True, help="Lose nothing in a power cut: each commit waits for the disk.")
@click.option(
    "--grace",
    type=age,
    metavar="SECONDS",
    default=10.0,
    show_default=True,
    help="Seconds that running requests get after a signal.",
)
def start(**options: Any) -> int:
    """Serve until SIGTERM or Ctrl-C.

    After the first signal the server accepts no connections, answers long polls, and gives running requests the grace.
    A second signal ends it at once. Without a token every client may do everything, so the server then listens on this
    machine only; `lakeshore token create` creates one, which a running server accepts within a second.
    """
    need_server()
    return _start(Options(**options))


def _start(options: Options) -> int:
    from ..server.serve import addresses, listen, loopback_only
    from ..server.tokens import TokenFile

    settings = read_settings()
    log_to_stderr(**{"uvicorn.error": logging.WARNING})
    path = token_path(options.token_file)
    tokens = TokenFile(path)
    where = addresses(options.host, options.port)
    if not (loopback_only(where) or tokens.required or options.insecure):
        raise click.UsageError(_closed(options.host, path))
    plane = _plane(options, settings)
    # Without tokens, a page in a browser must not reach this server through a host name of its own (DNS rebinding).
    hosts = (options.host, *options.allowed_hosts) if options.allowed_hosts or not tokens.required else ()
    uvloop = {"use_uvloop": sys.platform != "win32"}
    with ExitStack() as stack:
        sockets = [stack.enter_context(sock) for sock in listen(where)]
        return anyio.run(_serve, plane, tokens, sockets, hosts, options, backend="asyncio", backend_options=uvloop)


def _plane(options: Options, settings: Settings) -> Plane:
    """The plane to serve: in a database if an option or the environment names one, else in a file."""
    ns = options.namespace or settings.namespace or "default"
    file = options.db or options.durable  # scripts pass empty options for unset variables: treat them as absent
    mongo = options.mongo or (None if file else settings.mongo)
    if not mongo:
        if options.redis:
            raise click.UsageError("--redis is for servers over MongoDB: name the database with --mongo")
        from ..planes.sqlite.store import Dispatch

        return Dispatch(options.db or settings.home / "lakeshore.db", ns=ns, durable=options.durable)
    if file:
        other = "--db names a file" if options.db else "--durable is for a file"
        raise click.UsageError(f"{other}, and --mongo names a database, which is always durable: give one of the two")
    need_mongo()
    return _fleet(mongo, options, settings, ns)


def _fleet(mongo: str, options: Options, settings: Settings, ns: str) -> Plane:
    """The plane in a database. An error names the option or variable that holds the bad address."""
    from ..planes.mongo.store import MongoDispatch

    place = "--mongo" if options.mongo else "LAKESHORE_MONGO_URL"
    try:
        plane = MongoDispatch(mongo, ns=ns)
        if redis := options.redis or settings.redis:
            place = "--redis" if options.redis else "LAKESHORE_REDIS_URL"
            plane = MongoDispatch(mongo, redis, ns=ns)
    except ValueError as exc:
        raise click.UsageError(f"{place}: {exc}") from None
    return plane


def _closed(host: str, path: Path) -> str:
    return (
        f"other machines can reach a server on {host}, and there is no token in {str(path)!r}, so anyone could run code "
        f"through it: create a token with `lakeshore token create --name NAME --role worker --token-file {path}`, use "
        "--host 127.0.0.1, or give --insecure"
    )


async def _serve(
    plane: Plane, tokens: TokenFile, sockets: list[socket.socket], hosts: tuple[str, ...], options: Options
) -> int:
    from ..server import create_app
    from ..server.limits import Limits
    from ..server.serve import serve, url_of

    stop, cut = anyio.Event(), anyio.Event()
    failure = None

    def ask(name: str) -> None:
        logger.info("%s: accepting no more connections, running requests may end", name)
        stop.set()

    def end(name: str) -> None:
        logger.info("%s again: ending at once", name)
        cut.set()

    versions: Mapping[str, str] = dict(options.target_versions)
    limits = Limits() if options.max_body is None else Limits(body=options.max_body)
    # Before the plane is opened, so that it knows that it has claimers on other machines.
    app = create_app(plane, tokens=tokens, allowed_hosts=hosts, limits=limits, target_versions=versions)
    async with plane, anyio.create_task_group() as group:
        await group.start(watch_signals, ask, end)
        line = _start_line(plane, tokens, url_of(sockets[0]))
        try:
            await serve(
                app,
                sockets,
                stop=stop,
                cut=cut,
                grace=options.grace,
                drain=app.drain,
                ready=lambda: logger.info("%s", line),
            )
        except Exception as exc:  # raised below, so that it is not wrapped in a group
            failure = exc
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return INTERRUPTED if cut.is_set() else 0


def _start_line(plane: Plane, tokens: TokenFile, url: str) -> str:
    if tokens.required:
        who = f"tokens required, {len(tokens)} in {tokens.path}"
    else:
        who = f"open to every client, no tokens in {tokens.path}"
    return f"server {os.getpid()} on {url}, plane {plane.address}, namespace {plane.ns}, {who}"
