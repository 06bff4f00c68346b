"""Invocation ids and queue names. New ids are ULIDs; callers may choose any short word that is safe as a file name."""

from __future__ import annotations

import os
import re
import time
from functools import cache
from typing import TYPE_CHECKING

from .errors import WireError

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["check_id", "check_queue", "new_id"]

_PATTERN = re.compile(r"[0-9A-Za-z_-]{1,64}")
_latest = (0, "")
"""The millisecond of the newest id and its ten characters; one tuple, so that threads never see half of it."""


def new_id() -> str:
    """A new ULID: 26 characters, the first ten of which encode the millisecond.

    Two ids of one millisecond are in no order; nothing relies on one. It is built from python-ulid's two encoders, for an
    object of its ULID class costs 3 us, nearly twice as much, and every submit makes an id.
    """
    global _latest
    base32 = _base32()
    now = time.time_ns() // 1_000_000
    millisecond, stamp = _latest
    if millisecond != now:
        stamp = base32.encode_timestamp(now.to_bytes(6, "big"))
        _latest = now, stamp
    randomness: str = base32.encode_randomness(os.urandom(10))
    return stamp + randomness


@cache
def _base32() -> ModuleType:
    from ulid import base32  # takes 30 ms, and programs that only run local functions need no ids

    return base32


def check_id(id: object) -> str:
    """Return the id if it has 1 to 64 letters, digits, `_` and `-`: ids become file names. Raises WireError if not."""
    if isinstance(id, str) and _PATTERN.fullmatch(id):
        return id
    text = repr(id) if isinstance(id, str) else f"a {type(id).__name__}"
    raise WireError(
        f"expected an invocation id of 1 to 64 letters, digits, '_' or '-', got {text[:100]}: "
        "use the id that submit returned, or one of that form"
    )


def check_queue(name: object) -> str:
    """Return the name of a queue if it is a str that is not empty and can be encoded as UTF-8. Raises WireError if not."""
    if isinstance(name, str) and name and (name.isascii() or name.isprintable() or _is_utf8(name)):
        return name
    raise WireError(
        f"expected the name of a queue, a str that is not empty and has no lone surrogate, got {name!r:.100}: "
        "use another name"
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
