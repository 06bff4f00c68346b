"""The bearer token of a request to an API server: a fixed one, one in a file, or one that a program prints."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import DispatchError
from ..commands import run_command
from .json_fields import part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["CredentialProgram", "Credentials", "FixedToken", "TokenFile", "is_token"]

PROGRAM_TIMEOUT = 60.0
"""Seconds that a program may take to print a token; one that asks a cloud takes a few."""
EXPIRY_MARGIN = timedelta(seconds=10)
"""A token is not used any more so long before it expires."""
NOT_A_TOKEN = "expected one line of printable ASCII in {}, got something else or nothing"
_TOKEN = re.compile("[ -~]+")


def is_token(text: str) -> bool:
    """Return whether the text can stand in a header."""
    return _TOKEN.fullmatch(text) is not None


class Credentials(Protocol):
    """Where the token of each request comes from. Used by one event loop at a time."""

    async def token(self) -> str | None:
        """Return the token for the next request; None: it has none. Raises DispatchError where it cannot be read."""
        ...

    def reject(self, token: str) -> None:
        """The API server has rejected a request with this token: do not use a remembered one again."""
        ...


@dataclass(frozen=True, slots=True)
class FixedToken:
    """A token that does not change, or none."""

    text: str | None = field(default=None, repr=False)

    async def token(self) -> str | None:
        return self.text

    def reject(self, token: str) -> None:
        pass


@dataclass(frozen=True, slots=True)
class TokenFile:
    """A file with a token, which something replaces before it expires. It is read for each request."""

    path: Path

    async def token(self) -> str | None:
        try:
            text = self.path.read_text().strip()
        except UnicodeDecodeError:
            text = ""
        except (OSError, ValueError) as exc:
            raise DispatchError(str(exc)) from exc
        if not is_token(text):
            raise DispatchError(NOT_A_TOKEN.format(self.path))
        return text

    def reject(self, token: str) -> None:
        pass


class CredentialProgram:
    """A program that prints a token, as kubeconfigs of clouds name one (`exec`).

    It runs for the first request, and again when its token has expired or was rejected.
    """

    def __init__(self, argv: Sequence[str], environ: Mapping[str, str], api_version: str) -> None:
        """
        Args:
            argv: The program and its arguments.
            environ: Its whole environment.
            api_version: That of the ExecCredential which it is to print.
        """
        self.argv = list(argv)
        self._environ = dict(environ)
        self._api_version = api_version
        self._token: str | None = None
        self._expires: datetime | None = None

    async def token(self) -> str | None:
        if self._token is None or (self._expires is not None and datetime.now(UTC) >= self._expires - EXPIRY_MARGIN):
            self._token = None
            result = await run_command(self.argv, timeout=PROGRAM_TIMEOUT, environ=self._environ)
            if result.code != 0:
                raise DispatchError(f"`{self.argv[0]}` failed (exit code {result.code}): {result.message}")
            self._token, self._expires = self._parse(result.stdout)
        return self._token

    def reject(self, token: str) -> None:
        if token == self._token:
            self._token = None

    def _parse(self, output: str) -> tuple[str, datetime | None]:
        try:
            found: Any = json.loads(output)
        except (ValueError, RecursionError):
            found = None
        status = part(found, "status")
        token = status.get("token")
        if part(found).get("apiVersion") != self._api_version or not isinstance(token, str) or not is_token(token):
            raise DispatchError(
                f"expected `{self.argv[0]}` to print an ExecCredential of {self._api_version} with a token, got something "
                "else (a certificate in place of a token is not supported)"
            )
        expires = status.get("expirationTimestamp")
        if not expires:
            return token, None
        try:
            moment = datetime.fromisoformat(str(expires))
        except ValueError:
            raise DispatchError(
                f"expected `{self.argv[0]}` to print a time as expirationTimestamp, got {str(expires)[:80]!r}"
            ) from None
        return token, moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
