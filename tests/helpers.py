"""What the tests share: waiting for a condition, measuring, fresh interpreters, and optional modules."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
import textwrap
import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

_PAUSE = 0.005  # seconds between two looks


async def wait_until(predicate: Callable[[], Any], timeout: float = 30.0, description: str = "the condition") -> Any:
    """Look at `predicate` (plain or async) until it is true and return its value; fail after `timeout` seconds."""
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


async def in_one_of(times: int, trial: Callable[[], Awaitable[None]]) -> None:
    """Repeat `trial` until it holds, at most `times` times; what the last one raised is raised.

    For what is promised only to who is not stopped by the machine meanwhile: that a lease of a second is kept, or that
    something takes less than one. What is broken fails each time.
    """
    for _ in range(times - 1):
        try:
            return await trial()
        except Exception as exc:
            logging.getLogger("tests").info("once more, since: %r", exc)
    await trial()


def wait_until_sync(predicate: Callable[[], Any], timeout: float = 30.0, description: str = "the condition") -> Any:
    """The same from plain code."""
    deadline = time.monotonic() + timeout
    while True:
        if value := predicate():
            return value
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout:g} s in vain for: {description}")
        time.sleep(_PAUSE)


async def at_best(bound: float, measure: Callable[[], Awaitable[float]], tries: int = 5) -> None:
    """Whether `measure` can give at most `bound` seconds, for promises about what is possible.

    A machine that stands still for a moment makes one measurement longer, not all of them.
    """
    took: list[float] = []
    while len(took) < tries:
        took.append(await measure())
        if took[-1] <= bound:
            return
    pytest.fail(f"expected at most {bound:g} s at least once, measured {took}")


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
