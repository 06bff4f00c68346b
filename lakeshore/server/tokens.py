"""Bearer tokens: the role and the namespace of each, stored as hashes in a file that `lakeshore token` edits.

The file holds one line of JSON for each token: its name, role, namespace and time of creation, a salt, and the SHA-256 of
the salt and the token. Its mode is 0600; a file that others than its owner may read or write is rejected.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..errors import LakeshoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence
    from pathlib import Path

try:
    import fcntl as _fcntl
except ImportError:  # Windows has neither these locks nor these modes: edits at the same time may conflict there
    fcntl: Any = None
else:
    fcntl = _fcntl

__all__ = ["ROLES", "Caller", "Token", "TokenError", "TokenFile", "create_token", "read_tokens", "revoke_token"]

ROLES = ("producer", "worker", "admin")
"""Each role includes the ones before it."""

PREFIX = "lks_"
FILE_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the file for changes; an unknown token causes a check at once."""

_NAME = re.compile(r"[0-9A-Za-z_.@-]{1,64}")
_log = logging.getLogger("dreamlake.lakeshore.server")


class TokenError(LakeshoreError, ValueError):
    """A file of tokens that cannot be used, or a token name that is taken. The text never contains any part of a token."""


class Caller(NamedTuple):
    """The client that a token identifies."""

    name: str
    role: str
    namespace: str

    def may(self, role: str) -> bool:
        """Whether the caller's role is this one or includes it."""
        return ROLES.index(self.role) >= ROLES.index(role)


@dataclass(frozen=True)
class Token:
    """One token as it is stored: its hash, which the repr hides, and not the token itself."""

    name: str
    role: str
    namespace: str
    created: str
    salt: bytes = field(repr=False)
    hash: bytes = field(repr=False)

    @property
    def caller(self) -> Caller:
        return Caller(self.name, self.role, self.namespace)


# A slow hash such as scrypt protects passwords that people choose. These tokens are 256 random bits, which nobody can guess
# by trial at any cost of a trial, and every request would pay for the slow hash. The salt hides that two tokens are equal.
def _hashed(salt: bytes, token: bytes) -> bytes:
    return sha256(salt + token).digest()


# --- reading --------------------------------------------------------------------------------------------------------


def read_tokens(path: Path) -> list[Token]:
    """Read the tokens in the file; a missing file has none. Raises TokenError."""
    try:
        with open(path, "rb") as file:
            _check_private(os.fstat(file.fileno()), path)
            lines = file.read().decode().splitlines()
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise TokenError(f"cannot read the tokens in {str(path)!r}: {exc.strerror}") from None
    except UnicodeDecodeError:
        raise TokenError(
            f"expected lines of JSON in the token file {str(path)!r}, got bytes that are no text; make tokens with "
            "`lakeshore token create`"
        ) from None
    return [_token(line, f"{str(path)!r}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]


def _check_private(stat: os.stat_result, path: Path) -> None:
    if fcntl is not None and stat.st_mode & 0o077:
        raise TokenError(
            f"the token file {str(path)!r} can be read or written by others (mode {stat.st_mode & 0o777:o}): "
            f"close it with `chmod 600 {path}`"
        )


def _token(line: str, where: str) -> Token:
    """Parse one line. An error never quotes the line, which may hold a token."""
    try:
        loaded = json.loads(line)
    except (ValueError, RecursionError):
        loaded = None
    if not isinstance(loaded, dict):
        raise TokenError(
            f"expected a token as a JSON object in {where}, got something else: the file of a server holds no plain "
            "tokens; make one with `lakeshore token create`"
        )
    fields = cast("dict[str, Any]", loaded)
    try:
        name, role, namespace = (_text(fields, name) for name in ("name", "role", "namespace"))
        salt, digest = (bytes.fromhex(_text(fields, name)) for name in ("salt", "sha256"))
        check_token(name, role, namespace)
        if len(digest) != 32:
            raise ValueError("expected `sha256` to be 64 hex digits")
    except ValueError as exc:
        raise TokenError(f"{where}: {exc}") from None
    return Token(name, role, namespace, str(fields.get("created") or ""), salt, digest)


def _text(fields: dict[str, Any], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"expected the field `{name}`, a text")
    return value


def check_token(name: str, role: str, namespace: str) -> None:
    """Check the parts of a token. Raises ValueError."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"expected a token's name of 1 to 64 letters, digits and `_ . @ -`, got {name!r:.80}")
    if role not in ROLES:
        raise ValueError(f"expected a role, one of {', '.join(ROLES)}, got {role!r:.80}")
    if not 0 < len(namespace) <= 200 or not namespace.isprintable() or "/" in namespace:
        raise ValueError(f"expected a namespace of 1 to 200 characters without `/`, got {namespace!r:.80}")


# --- checking -------------------------------------------------------------------------------------------------------


class TokenFile:
    """The tokens that a server accepts; the file is read again when it has changed.

    Once there has been a token, the process requires one until it ends, even if the last token is revoked or the file is
    deleted. If the file becomes unreadable, the tokens stay as they were, and the error is logged once.

    Raises:
        TokenError: the first read fails.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._signature = _signature(path)
        self._checked_at = clock()
        self._tokens: Sequence[Token] = read_tokens(path)
        self._required = bool(self._tokens)

    def __repr__(self) -> str:
        return f"TokenFile({str(self.path)!r}, {len(self._tokens)} tokens)"

    def __len__(self) -> int:
        return len(self._tokens)

    def __bool__(self) -> bool:
        return True

    @property
    def required(self) -> bool:
        """Whether a caller needs a token."""
        self._reload()
        return self._required

    def check(self, authorization: str | None) -> Caller | None:
        """The caller that an `Authorization: Bearer ...` header identifies; None without a token or for an unknown one."""
        self._reload()
        scheme, _, text = (authorization or "").partition(" ")
        token = text.strip().encode("utf-8", "replace")
        if scheme.lower() != "bearer" or not token:
            return None
        found = self._find(token)
        if found is None and self._reload(now=True):
            found = self._find(token)
        return found

    def _find(self, token: bytes) -> Caller | None:
        """Compare with every token, each in constant time, so that the duration reveals nothing about any of them."""
        found = None
        for one in self._tokens:
            if compare_digest(one.hash, _hashed(one.salt, token)):
                found = one.caller
        return found

    def _reload(self, *, now: bool = False) -> bool:
        """Read the file again if it has changed and a check is due; return whether it was read."""
        clock = self._clock()
        if not now and clock - self._checked_at < FILE_CHECK_INTERVAL:
            return False
        self._checked_at = clock
        signature = _signature(self.path)
        if signature == self._signature:
            return False
        self._signature = signature
        try:
            self._tokens = read_tokens(self.path)
        except TokenError as exc:
            _log.error("%s; the tokens stay as they were", exc)
            return False
        self._required = self._required or bool(self._tokens)
        _log.info("tokens read again: %d in %s", len(self._tokens), self.path)
        return True


def _signature(path: Path) -> tuple[int, ...] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


# --- editing --------------------------------------------------------------------------------------------------------


def create_token(path: Path, name: str, role: str, namespace: str) -> str:
    """Add a token to the file.

    Returns:
        The token itself, which is stored nowhere else.

    Raises:
        TokenError: the file cannot be used, or the name is taken.
        ValueError: the name, the role or the namespace is malformed.
    """
    check_token(name, role, namespace)
    with _editing(path) as tokens:
        if any(one.name == name for one in tokens):
            raise TokenError(
                f"a token named {name!r} is in {str(path)!r} already: revoke it first, or give another name"
            )
        token = PREFIX + secrets.token_urlsafe(32)
        salt = secrets.token_bytes(16)
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        tokens.append(Token(name, role, namespace, created, salt, _hashed(salt, token.encode())))
    return token


def revoke_token(path: Path, name: str) -> bool:
    """Remove a token from the file; False if none has this name. Raises TokenError."""
    if not any(one.name == name for one in read_tokens(path)):
        return False
    with _editing(path) as tokens:
        tokens[:] = [one for one in tokens if one.name != name]
    return True


@contextmanager
def _editing(path: Path) -> Generator[list[Token]]:
    """Yield the tokens as a list to change, then replace the file atomically with it. One editor at a time."""
    path = path.resolve()  # so that a symbolic link is kept
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _locked(path)
    except OSError as exc:
        raise TokenError(f"cannot open the token file {str(path)!r}: {exc.strerror}") from None
    try:
        tokens = read_tokens(path)
        yield tokens
        _write(path, tokens, os.fstat(file))
    except OSError as exc:
        raise TokenError(f"cannot write the token file {str(path)!r}: {exc.strerror}") from None
    finally:
        os.close(file)


def _locked(path: Path) -> int:
    """Open and lock the file, or create it. Retry if another editor replaced it before the lock was taken."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        if fcntl is None:
            return file
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file
        except FileNotFoundError:
            pass
        os.close(file)


def _write(path: Path, tokens: Sequence[Token], before: os.stat_result) -> None:
    draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.new")
    file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600)
    try:
        with os.fdopen(file, "w", encoding="utf-8") as out:
            ours = os.fstat(out.fileno())
            if (ours.st_uid, ours.st_gid) != (before.st_uid, before.st_gid):
                os.fchown(
                    out.fileno(), before.st_uid, before.st_gid
                )  # so that root can edit a file that the server's user reads
            out.writelines(f"{json.dumps(_line(one))}\n" for one in tokens)
            out.flush()
            os.fsync(out.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _line(token: Token) -> dict[str, str]:
    return {
        "name": token.name,
        "role": token.role,
        "namespace": token.namespace,
        "created": token.created,
        "salt": token.salt.hex(),
        "sha256": token.hash.hex(),
    }
