"""What the tests share: waiting for a condition, rows of a table, fresh interpreters, and optional modules."""

from __future__ import annotations

import contextlib
import functools
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
    from collections.abc import Callable, Iterable, Iterator

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


def each_row(names: str, rows: Iterable[Any], ids: Iterable[str] | Callable[[Any], str] | None = None) -> Any:
    """Run a test once for each row of a table, as one test that goes through all rows and reports each that failed.

    It is written like `pytest.mark.parametrize` and takes its place where an enumeration would make hundreds of tests;
    two of them go through all pairs of rows. All rows share the test's fixtures.

    names: the parameters, separated by commas. rows: a value for the one parameter, or a sequence of values for all.
    ids: what the report calls the rows, or what makes that of a single value; by default they are named by their values.
    """
    parameters = [name.strip() for name in names.split(",")]
    table = list[tuple[str, dict[str, Any]]]()
    given = None if ids is None or callable(ids) else list(ids)
    for number, row in enumerate(rows):
        values = row if len(parameters) > 1 else (row,)
        called = ", ".join(f"{name}={value!r:.80}" for name, value in zip(parameters, values, strict=True))
        if given is not None:
            called = given[number]
        table.append((called, dict(zip(parameters, values, strict=True))))
    assert table, "the table is empty"

    def over(test: Callable[..., Any]) -> Callable[..., Any]:
        body, inner = getattr(test, "_rows", (test, [("", dict[str, Any]())]))
        product = [(f"{a}, {b}".strip(", "), {**one, **two}) for a, one in table for b, two in inner]

        if inspect.iscoroutinefunction(body):

            @functools.wraps(body)
            async def run_all(**fixtures: Any) -> None:
                with _failures(len(product)) as failed:
                    for name, values in product:
                        try:
                            await body(**fixtures, **values)
                        except _FAILURES as exc:
                            failed.append((name, exc))
        else:

            @functools.wraps(body)
            def run_all(**fixtures: Any) -> None:
                with _failures(len(product)) as failed:
                    for name, values in product:
                        try:
                            body(**fixtures, **values)
                        except _FAILURES as exc:
                            failed.append((name, exc))

        signature = inspect.signature(body)
        others = [one for name, one in signature.parameters.items() if name not in product[0][1]]
        run_all.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        run_all._rows = (body, product)  # type: ignore[attr-defined]
        return run_all

    return over


_FAILURES = (Exception, pytest.fail.Exception)


@contextlib.contextmanager
def _failures(count: int) -> Iterator[list[tuple[str, BaseException]]]:
    """Collect the rows that failed, of `count`; raise one exception with all of theirs."""
    failed: list[tuple[str, BaseException]] = []
    yield failed
    if failed:
        for name, exc in failed:
            exc.add_note(f"in the row {name}")
        names = "\n".join(f"- {name}: {exc!r:.300}" for name, exc in failed)
        raise BaseExceptionGroup(f"{len(failed)} of {count} rows failed:\n{names}", [exc for _, exc in failed])


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
