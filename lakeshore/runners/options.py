"""Declare, parse and describe the options of a runner: the `--runner-option NAME=VALUE` of `lakeshore worker start`.

Each runner has one frozen dataclass of options, whose fields are annotated with an `Option`. A field is all there is about
an option: its name, its type, its default, how its text is parsed, and its line in `--help`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "Option",
    "amount",
    "choice",
    "describe_options",
    "flag",
    "read_options",
    "text",
    "whole_amount",
    "words",
]

T = TypeVar("T")

_UNITS = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


def text(name: str, value: str) -> str:
    """Return the text as it is."""
    return value


def amount(name: str, value: str) -> float:
    """Parse a number from 0, which may end in k, m, g or t (powers of 1024). Raises ValueError."""
    unit = _UNITS.get(value[-1:].lower())
    try:
        number = float(value) if unit is None else float(value[:-1]) * unit
    except ValueError:
        number = math.nan
    if not 0 <= number < 1 << 62:
        raise ValueError(f"expected a number from 0 for the runner option {name}, such as 10 or 2g, got {value!r}")
    return number


def whole_amount(name: str, value: str) -> int:
    """Parse an `amount`, rounded down. Raises ValueError."""
    return int(amount(name, value))


def flag(name: str, value: str) -> bool:
    """Parse 1 or 0. Raises ValueError."""
    if value not in ("0", "1"):
        raise ValueError(f"expected the runner option {name} to be 1 or 0, got {value!r}")
    return value == "1"


def words(name: str, value: str) -> tuple[str, ...]:
    """Split a list of words at its commas."""
    return tuple(word for word in value.split(",") if word)


def choice(*allowed: str) -> Callable[[str, str], str]:
    """Return a parser that accepts the `allowed` words only."""

    def parse(name: str, value: str) -> str:
        if value not in allowed:
            one_of = ", ".join(allowed[:-1]) + f" or {allowed[-1]}"
            raise ValueError(f"expected the runner option {name} to be {one_of}, got {value!r}")
        return value

    return parse


@dataclass(frozen=True, slots=True)
class Option:
    """One option, in the annotation of a field of a dataclass. A field without a default is a needed option."""

    value: str
    """What stands after `NAME=` in `--help`."""
    description: str
    """What the option does, for `--help` and for the error where a needed option is missing."""
    parse: Callable[[str, str], object] = text
    """Makes the field's value of the option's name and text. Raises ValueError."""
    name: str = ""
    """The option's name; by default the field's, with dashes."""


def read_options(kind: type[T], runner: str, given: Mapping[str, str]) -> T:
    """Parse the options that were given to a runner. An empty text counts as not given.

    Args:
        kind: The runner's dataclass of options.
        runner: The runner's name, for errors.
        given: The texts by the names of options.

    Raises:
        ValueError: An option is unknown, is missing, or cannot be parsed.
    """
    known = _options_of(kind)
    unknown = [name for name in given if name not in known]
    if unknown:
        raise ValueError(f"the {runner} runner knows no option {', '.join(unknown)}: it has {', '.join(known)}")
    values = dict[str, object]()
    for name, (option, field) in known.items():
        if name in given and (given[name] or option.parse is not text):
            values[field.name] = option.parse(name, given[name])
        elif field.default is dataclasses.MISSING:
            raise ValueError(f"the {runner} runner needs --runner-option {name}={option.value}: {option.description}")
    return kind(**values)


def describe_options(kind: type[Any]) -> list[tuple[str, str]]:
    """Return a line of help for each option of a dataclass: `NAME=VALUE` and what it does."""
    lines = list[tuple[str, str]]()
    for name, (option, field) in _options_of(kind).items():
        description = option.description
        default = field.default
        if default is dataclasses.MISSING:
            description += "  [needed]"
        elif isinstance(default, (float, int)) and not isinstance(default, bool):
            description += f"  [default: {default:g}]"
        elif isinstance(default, str) and default:
            description += f"  [default: {default}]"
        lines.append((f"{name}={option.value}", description))
    return lines


def _options_of(kind: type[Any]) -> dict[str, tuple[Option, dataclasses.Field[Any]]]:
    """Return the options of a dataclass by their names, in the order of its fields."""
    found = dict[str, tuple[Option, dataclasses.Field[Any]]]()
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        (option,) = (extra for extra in get_args(hints[field.name]) if isinstance(extra, Option))
        found[option.name or field.name.replace("_", "-")] = (option, field)
    return found
