"""Functions and values for both sides: they need nothing that one version of the package lacks."""

from __future__ import annotations

import builtins
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

VALUES: list[Any] = [
    *(None, True, False, 0, -(2**63), 2**64 - 1, 1.5, float("inf"), "", "größer ☃", b"", b"\x00\xff"),
    *([], {}, (), [1, [2, (3,)]], (1, ("two", b"three", ())), {"deep": {"pair": (1.0, None)}, "list": [(), []]}),
]


def arrays() -> list[Any]:
    import numpy as np

    return [
        np.arange(6).reshape(2, 3),
        np.array(2.5, dtype="float32"),
        np.zeros((0, 3), dtype="bool"),
        np.array([1 + 2j], dtype="complex64"),
        np.asfortranarray(np.arange(6, dtype=">i2").reshape(2, 3)),
    ]


def same(left: Any, right: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if hasattr(left, "dtype"):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    return bool(left == right)


@dls.udf
def echo(*args: Any, **kwargs: Any) -> Any:
    return args, kwargs


@dls.udf
def kinds(*values: Any) -> list[str]:
    """What has arrived, seen from where it arrived."""
    return [type(value).__name__ for value in values]


@dls.udf
def doubled(array: Any) -> Any:
    return array * 2


@dls.udf
def fail(name: str, text: str) -> None:
    raise getattr(builtins, name)(text)


@dls.udf
def count(n: int) -> Iterator[int]:
    yield from range(n)


@dls.udf
async def count_async(n: int) -> AsyncIterator[tuple[int, str]]:
    for i in range(n):
        yield i, "tuple"


@dls.udf
def count_and_fail(n: int) -> Iterator[int]:
    yield from range(n)
    raise ValueError("boom")


@dls.udf
def keys() -> Iterator[str]:
    yield "a"
    yield "b"


@dls.udf
def note(file: str, line: str) -> str:
    """Leaves a line in a file: how often and in which order bodies ran."""
    with Path(file).open("a") as to:
        to.write(line + "\n")
    return line


@dls.udf
def prefix() -> str:
    return str(dls.run.prefix)


def plain() -> str:
    """Not marked by a decorator."""
    return "plain"


@dls.udf
def gate(started: str, opened: str) -> None:
    """Keeps its worker busy: makes one file and waits for the other."""
    Path(started).touch()
    deadline = time.monotonic() + 60.0
    while not Path(opened).exists() and time.monotonic() < deadline:
        time.sleep(0.01)


@dls.udf
def one_then_wait(opened: str) -> Iterator[str]:
    yield "first"
    deadline = time.monotonic() + 60.0
    while not Path(opened).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    yield "second"


@dls.udf
def flaky(failed: str) -> Iterator[int]:
    """Fails the first time, after two values."""
    yield from (0, 1)
    if not Path(failed).exists():
        Path(failed).touch()
        raise ValueError("boom")
    yield 2
