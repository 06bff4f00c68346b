"""`lakeshore token`: create, list and revoke the tokens of a server; its file stores only their hashes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..errors import DispatchError
from ..settings import read_settings
from .options import need_server, reading
from .output import document, say, table

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["token", "token_path"]

ROLES = ("producer", "worker", "admin")

FILE = click.option(
    "--token-file", metavar="PATH", help="The file of the server's tokens.  [default: $LAKESHORE_HOME/tokens]"
)


def token_path(token_file: str | None) -> Path:
    """The file of a server's tokens."""
    return Path(token_file).expanduser() if token_file else read_settings().home / "tokens"


@click.group()
def token() -> None:
    """Create, list and revoke the tokens of a server."""


@token.command()
@click.option("--name", required=True, help="The name of the token, here and in logs.")
@click.option(
    "--role",
    type=click.Choice(ROLES),
    required=True,
    help="producer: submit, wait, read, cancel; worker: also claim; admin: also purge, and read metrics.",
)
@click.option(
    "--namespace", metavar="NAME", help="The namespace of the token.  [default: $LAKESHORE_NAMESPACE, else default]"
)
@FILE
def create(name: str, role: str, namespace: str | None, token_file: str | None) -> None:
    """Create a token and print it once. A running server accepts it within a second.

    Give it to a client in LAKESHORE_CLIENT_TOKEN, or in a file that the client names with --token-file.
    """
    need_server()
    from ..server.tokens import check_token, create_token

    namespace = namespace or read_settings().namespace or "default"
    _checked(lambda: check_token(name, role, namespace))
    made = create_token(token_path(token_file), name, role, namespace)
    click.echo(f"the token {name!r}, {role} in namespace {namespace!r}; it is not shown again", err=True)
    say(made)


def _checked(check: Callable[[], None]) -> None:
    try:
        check()
    except ValueError as exc:
        raise click.UsageError(str(exc)) from None


@token.command("list")
@FILE
@reading
def list_tokens(token_file: str | None, as_json: bool) -> None:
    """List the tokens of a server: names, roles, namespaces, and when they were created."""
    need_server()
    from ..server.tokens import read_tokens

    columns = ["name", "role", "namespace", "created"]
    rows = [[getattr(one, column) for column in columns] for one in read_tokens(token_path(token_file))]
    if as_json:
        document([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        table(columns, rows)


@token.command()
@click.argument("name", metavar="NAME")
@FILE
def revoke(name: str, token_file: str | None) -> None:
    """Revoke a token. A running server rejects it within a second."""
    need_server()
    from ..server.tokens import read_tokens, revoke_token

    path = token_path(token_file)
    if not revoke_token(path, name):
        there = ", ".join(repr(one.name) for one in read_tokens(path)) or "none"
        raise DispatchError(f"no token is named {name!r} in {str(path)!r}; tokens there: {there}")
    say(f"{name} is revoked")
