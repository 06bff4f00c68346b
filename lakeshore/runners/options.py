"""What `--runner-option NAME=VALUE` may say to a runner, read in one way for all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["amount", "check_known", "flag", "words"]

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def check_known(runner: str, options: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise ValueError for options that `runner` does not have."""
    names = list(known)
    wrong = [name for name in options if name not in names]
    if wrong:
        raise ValueError(f"the {runner} runner knows no option {', '.join(wrong)}: it has {', '.join(names)}")


def amount(name: str, text: str) -> float:
    """A number from 0, which may end in k, m, g or t (powers of 1024). Raises ValueError."""
    number, unit = (text[:-1], text[-1:].lower()) if text[-1:].lower() in _UNITS else (text, "")
    try:
        value = float(number) * _UNITS[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 << 62:
        raise ValueError(f"expected a number from 0 for the runner option {name}, such as 10 or 2g, got {text!r}")
    return value


def flag(name: str, text: str) -> bool:
    """Yes for 1, no for 0. Raises ValueError."""
    if text not in ("0", "1"):
        raise ValueError(f"expected the runner option {name} to be 1 or 0, got {text!r}")
    return text == "1"


def words(text: str | None) -> list[str]:
    """What stands between commas: `a,b` is two."""
    return [word for word in (text or "").split(",") if word]
