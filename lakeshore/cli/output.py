"""Output of the commands: tables for people, one JSON document for programs, control characters escaped.

The wire carries more types than JSON. A value without a JSON form becomes an object whose key `$type` names its type:

    bytes                   {"$type": "bytes", "base64": "..."}
    inf, -inf, nan          {"$type": "float", "repr": "nan"}
    dict with other keys    {"$type": "dict", "items": [[key, value], ...]}; so does one that has a key "$type" itself
    numpy.ndarray           {"$type": "ndarray", "dtype": "<f8", "shape": [2, 3], "base64": "..."}, in C order
    an unknown ext value    {"$type": "ext", "code": 42, "base64": "..."}
    anything else           {"$type": "torch.Tensor", "repr": "..."}

Tuples become arrays, numpy scalars numbers.
"""

from __future__ import annotations

import json
import math
import sys
import time
from base64 import b64encode
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import click

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["clean", "document", "frames_of", "jsonable", "moment", "say", "since", "table", "value_text", "waiting"]

TYPE = "$type"

WRAPPED = ("function", "error")
"""The columns that a narrow terminal wraps; the others, above all ids, stay on one line."""


def clean(text: object) -> str:
    """Escape what is not printable in text from another machine; line ends and tabs stay."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        one if one.isprintable() or one in "\n\t" else one.encode("unicode_escape").decode("ascii") for one in shown
    )


def frames_of(traceback: str | None) -> str:
    """A remote traceback if it has frames, else an empty string: type and message say as much."""
    return traceback.rstrip() if traceback and "\n  File " in traceback else ""


def say(text: str, *, nl: bool = True) -> None:
    """Print to stdout, and flush."""
    click.echo(text, nl=nl)


def since(then: float, now: float) -> str:
    """The time between two moments in one unit, such as 5m."""
    passed = max(0.0, now - then)
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if passed >= size:
            return f"{passed // size:.0f}{unit}"
    return f"{passed:.0f}s"


def moment(seconds: float | None) -> str:
    """Format a time of the plane's clock as local time with its zone, to the second."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(seconds))


def document(value: Any) -> None:
    """Print one JSON document."""
    say(json.dumps(value, indent=2, allow_nan=False))


def jsonable(value: Any) -> Any:
    """Convert a value of the wire to one that JSON can hold; see the module's docstring."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {TYPE: "float", "repr": repr(float(value))}
    if type(value) in (list, tuple):  # not isinstance: an unknown ext value is a named tuple
        return [jsonable(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, dict):
        return _dict(value)
    if isinstance(value, bytes):
        return {TYPE: "bytes", "base64": _base64(value)}
    return _foreign(value)


def _dict(value: Any) -> dict[str, Any]:
    if TYPE not in value and all(isinstance(key, str) for key in value):
        return {key: jsonable(item) for key, item in value.items()}
    return {TYPE: "dict", "items": [[jsonable(key), jsonable(item)] for key, item in value.items()]}


def _foreign(value: Any) -> Any:
    """What is of no type that Python itself brings; its module is loaded already, or the value would not be here."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        # A structured type is a list of fields, whose description JSON takes as it is.
        dtype = value.dtype.descr if value.dtype.names else value.dtype.str
        return {TYPE: "ndarray", "dtype": jsonable(dtype), "shape": [*value.shape], "base64": _base64(value.tobytes())}
    if numpy is not None and isinstance(value, (numpy.bool_, numpy.integer, numpy.floating)):
        return jsonable(value.item() if value.dtype.itemsize <= 8 else float(value))
    kind = cast("type[object]", type(value))
    if kind.__name__ == "ExtType":
        return {TYPE: "ext", "code": value.code, "base64": _base64(value.data)}
    return {TYPE: f"{kind.__module__}.{kind.__qualname__}", "repr": repr(value)}


def _base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")


def value_text(value: Any, *, one_line: bool = False) -> str:
    """A value as Python writes it; text from afar is harmless in it, since `repr` escapes what is not printable."""
    if one_line:
        return " ".join(line.strip() for line in repr(value).splitlines())
    from pprint import pformat

    return pformat(value, width=100, sort_dicts=False)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows under their columns' names: a table on a terminal, aligned plain text elsewhere."""
    cells = [[clean(cell).replace("\n", " ").replace("\t", " ") for cell in row] for row in rows]
    right = [all(row[at].replace(".", "").isdigit() for row in cells) for at in range(len(columns))]
    if sys.stdout.isatty():
        _rich_table(columns, cells, right)
        return
    lines = [[*columns], *cells]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    for line in lines:
        padded = [
            cell.rjust(width) if is_right else cell.ljust(width)
            for cell, width, is_right in zip(line, widths, right, strict=True)
        ]
        say("  ".join(padded).rstrip())


def _rich_table(columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[bool]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, header_style="bold", pad_edge=False)
    for at, column in enumerate(columns):
        wrapped = column in WRAPPED
        shown.add_column(column, justify="right" if right[at] else "left", no_wrap=not wrapped, overflow="fold")
    for row in cells:
        shown.add_row(*map(Text, row))  # Text: brackets in the name of a queue are not markup
    Console().print(shown)


@contextmanager
def waiting(what: str) -> Generator[None]:
    """On a terminal, show a status on stderr during the block, so that stdout holds only the answer."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True).status(Text(what)):
        yield
