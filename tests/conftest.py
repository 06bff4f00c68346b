"""Both event loops, and a check that no test leaves threads or tasks behind."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import wait_until, wait_until_sync
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

_PATIENCE = 30.0  # seconds that threads and tasks have to end after their test

# How long an example takes is the machine's business.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_tasks: tasks that outlive the test are its very subject")


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> None:
    if not collector.istestfunction(obj, name):
        return
    hypothesis = getattr(obj, "hypothesis", None)
    if inspect.iscoroutinefunction(hypothesis.inner_test if hypothesis else obj):
        pytest.mark.usefixtures("_no_task_left")(obj)


def _tasks(backend: str) -> dict[Any, str]:
    """The tasks of this loop and their names, without the one by which the test runner itself is waiting."""
    if backend == "trio":
        return {task.id: str(task.name) for task in anyio.get_running_tasks()}
    return {
        task: f"{task.get_name()} {getattr(task.get_coro(), '__qualname__', '')}"
        for task in asyncio.all_tasks()
        if not getattr(task.get_coro(), "__qualname__", "").endswith("_call_in_runner_task")
    }


@pytest.fixture
async def _no_task_left(anyio_backend_name: str, request: pytest.FixtureRequest) -> AsyncIterator[None]:
    """Around every async test: each task that was started in it, or by one of its fixtures, has ended."""
    before = _tasks(anyio_backend_name).keys()
    yield

    def left() -> list[str]:
        return [name for task, name in _tasks(anyio_backend_name).items() if task not in before]

    if not request.node.get_closest_marker("leaves_tasks"):
        await wait_until(lambda: not left(), _PATIENCE, f"the end of the tasks that the test left: {left()}")


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Around every test: each thread that was started in it and could keep the interpreter alive has ended."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]

    wait_until_sync(lambda: not left(), _PATIENCE, f"the end of the threads that the test left: {left()}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run that is ended from outside tells none of them."""
    if report.failed and hasattr(report, "node"):  # of a worker, and this is who gathers
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.node.gateway.id})", file=sys.__stderr__, flush=True)
