"""What the tests share: waiting for a condition, rows of a table, fresh interpreters, and optional modules."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_PAUSE = 0.005  # seconds between two tries


async def wait_until(predicate: Callable[[], Any], timeout: float = 30.0, description: str = "the condition") -> Any:
    """Call `predicate` (plain or async) until it is true and return its value; fail after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        value = predicate()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:g} s in vain for: {description}")
        await anyio.sleep(_PAUSE)


async def quiet(
    count: Callable[[], int], seconds: float, most: int = 0, timeout: float = 30.0, description: str = "quiet"
) -> int:
    """Wait, `timeout` seconds and a few stretches more, for a stretch of `seconds` in which `count` grows by at most
    `most`; what it was when that began."""

    async def still() -> tuple[int] | None:
        before = count()
        await anyio.sleep(seconds)
        return (before,) if count() - before <= most else None

    (before,) = await wait_until(still, timeout + 3 * seconds, f"{seconds:g} s of {description}")
    return int(before)


def wait_until_sync(predicate: Callable[[], Any], timeout: float = 30.0, description: str = "the condition") -> Any:
    """The same from plain code."""
    deadline = time.monotonic() + timeout
    while True:
        if value := predicate():
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:g} s in vain for: {description}")
        time.sleep(_PAUSE)


class EachRow:
    """Check every row of a table in one test, and fail at the end with all that failed.

    with each_row() as row:
        for name, value in TABLE:
            with row(name):
                assert ...
    """

    def __init__(self) -> None:
        self.count = 0
        self.failures: list[tuple[str, BaseException]] = []

    @contextlib.contextmanager
    def __call__(self, name: object) -> Iterator[None]:
        """One row, called `name` in the report. Ending the test (Ctrl-C, cancellation, a skip) still ends it."""
        self.count += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as exc:
            self.failures.append((name if isinstance(name, str) else repr(name), exc))


@contextlib.contextmanager
def each_row() -> Iterator[EachRow]:
    """Give what each row of a table is checked in. Raises when the block ends: one exception with those of all rows that
    failed; AssertionError where there was no row."""
    rows = EachRow()
    yield rows
    assert rows.count, "the table is empty"
    if rows.failures:
        for name, exc in rows.failures:
            exc.add_note(f"in the row {name:.500}")
        names = "\n".join(f"- {name:.200}: {exc!r:.300}" for name, exc in rows.failures)
        raise BaseExceptionGroup(
            f"{len(rows.failures)} of {rows.count} rows failed:\n{names}", [exc for _, exc in rows.failures]
        )


def needs(module: str) -> Any:
    """The named module; without it the test is skipped, or fails where LAKESHORE_TEST_NO_SKIPS=1 forbids skipping."""
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        reason = f"needs {module}: {exc}"
    if os.environ.get("LAKESHORE_TEST_NO_SKIPS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def fresh_python(script: str, *args: str) -> subprocess.Popen[str]:
    """A new interpreter running `script` with warnings as errors; both outputs are pipes."""
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_python(script: str, *args: str, code: int = 0, timeout: float = 60.0) -> tuple[str, str]:
    """What a new interpreter wrote to stdout and stderr; fails if it does not end by itself with `code` in time."""
    process = fresh_python(script, *args)
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        pytest.fail(f"the interpreter did not end within {timeout:g} s\nstdout: {out}\nstderr: {err}")
    assert process.returncode == code, f"exit code {process.returncode}\nstdout: {out}\nstderr: {err}"
    return out, err
