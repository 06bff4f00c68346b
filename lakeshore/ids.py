"""Invocation ids: ULIDs when we make them, any short file-name-safe word when others do."""

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
_latest = (0, "")  # a millisecond and its ten characters; one tuple, so that threads never see half of it


def new_id() -> str:
    """A new ULID: 26 characters, the first ten of which tell the millisecond.

    Built from python-ulid's two encoders: an object of its ULID class costs 3 us, nearly twice as much, and every
    submit makes one id. Nothing relies on the order of two ids of one millisecond: the order of submits is the plane's.
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
    from ulid import base32  # 30 ms, which those who only run local functions need not pay

    return base32


def check_id(id: object) -> str:
    """The id, when it is one: 1 to 64 letters, digits, `_` and `-`, for ids become file names; else WireError."""
    if isinstance(id, str) and _PATTERN.fullmatch(id):
        return id
    text = repr(id) if isinstance(id, str) else f"a {type(id).__name__}"
    raise WireError(
        f"expected an invocation id of 1 to 64 letters, digits, '_' or '-', got {text[:100]}: "
        "use the id that submit gave, or one of that form"
    )


def check_queue(name: object) -> str:
    """The name of a queue, when it is one: a str that is not empty and can be written as UTF-8. Else WireError."""
    if isinstance(name, str) and name and (name.isascii() or name.isprintable() or _is_utf8(name)):
        return name
    raise WireError(
        f"expected the name of a queue, a str that is not empty and no half of a character, got {name!r:.100}"
    )


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
