"""Both event loops, the tiers of the matrix, and checks that no test leaves anything behind."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import matrix
import pytest
from helpers import wait_until, wait_until_sync
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

END_TIMEOUT = 30.0
"""Seconds that threads and tasks have to end after their test."""
RERUNS = 4
"""How many more times a test marked `timing` is run before it counts as failed."""

# How long an example takes is the machine's business.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


# --- which tests run, and how often -----------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--matrix",
        choices=list(matrix.TIERS),
        default="default",
        help="how much of the test matrix to run: each behaviour once, or every combination",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "leaves_tasks: tasks that outlive the test are its very subject")
    config.addinivalue_line(
        "markers",
        "timing(reason): the test waits for real time, for the reason given. On a machine that stands still for a "
        f"moment it may fail: it is then run again, at most {RERUNS} times, and the end of the run names it",
    )
    matrix.choose(config.getoption("matrix"))


@pytest.hookimpl(tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """For `-n auto`: two for each core, since tests mostly wait; none where single files or tests are named."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS:
        return 0
    return 2 * len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2 * (os.cpu_count() or 1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("timing")
        if marker is None:
            continue
        if len(marker.args) != 1 or not isinstance(marker.args[0], str) or marker.kwargs:
            raise pytest.UsageError(f"{item.nodeid}: expected @pytest.mark.timing(reason), got {marker}")
        item.add_marker(pytest.mark.flaky(reruns=RERUNS))
    named = set(config.invocation_params.args)
    left_out = {item for item in matrix.left_out(items) if item.nodeid not in named}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run that is ended from outside would name none of them."""
    if report.failed and hasattr(report, "node"):  # of a process of xdist, and this is the one that gathers
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.node.gateway.id})", file=sys.__stderr__, flush=True)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Name the tests marked `timing` that were run again."""
    times: dict[str, int] = {}
    for report in terminalreporter.stats.get("rerun", ()):
        times[report.nodeid] = times.get(report.nodeid, 0) + 1
    terminalreporter.section(f"tests marked timing that were run again: {len(times)}")
    for name, count in sorted(times.items()):
        terminalreporter.write_line(f"{name}: {count + 1} runs")
    if not matrix.tier().everything:
        terminalreporter.write_line("This was the default tier; `--matrix full` runs every combination.")


@pytest.fixture(scope="module", params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> Any:
    return request.param


# --- what no test leaves behind ---------------------------------------------------------------------------------------


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
        await wait_until(lambda: not left(), END_TIMEOUT, f"the end of the tasks that the test left: {left()}")


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    """Around every test: each thread that was started in it and could keep the interpreter alive has ended."""
    before = set(threading.enumerate())
    yield

    def left() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread not in before and not thread.daemon]

    wait_until_sync(lambda: not left(), END_TIMEOUT, f"the end of the threads that the test left: {left()}")


@pytest.fixture(autouse=True)
def _no_state_changed(_no_thread_left: None) -> Iterator[None]:
    """Around every test: what belongs to the process is afterwards as it was. What is not is put back, so that only the
    test that changed it fails."""
    before = _state()
    yield
    after = _state()
    changed = sorted(name for name in {**before, **after} if before.get(name) != after.get(name))
    if changed:
        _restore(before)
        pytest.fail(
            "the test left the process changed: "
            + "; ".join(f"{name}: {before.get(name)!r:.300} became {after.get(name)!r:.300}" for name in changed)
        )


_LOGGERS = ("dreamlake", "uvicorn", "tests")
"""The loggers that the package and its tests set, with those below them; uvicorn sets `uvicorn.access` itself, for good."""
# Looked up where it is imported already: the measuring of coverage begins after this module.
_DEFAULT_PLANE, _REGISTRY = "dreamlake.lakeshore.client.default_plane", "dreamlake.lakeshore.wire.registry"
_SIGNALS = sorted(
    signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGALRM}
)  # the last is pytest-timeout's


def _loggers() -> Iterator[logging.Logger]:
    yield logging.root
    for name, logger in list(logging.root.manager.loggerDict.items()):
        ours = name.partition(".")[0] in _LOGGERS and name != "uvicorn.access"
        if ours and isinstance(logger, logging.Logger):
            yield logger


def _state() -> dict[str, Any]:
    """What a test could change for those after it, by name. A logger that nobody has set up is not in it."""
    state: dict[str, Any] = {
        "the default plane": sys.modules[_DEFAULT_PLANE]._default.get("plane")
        if _DEFAULT_PLANE in sys.modules
        else None,
        "the registered codecs": sys.modules[_REGISTRY]._registered if _REGISTRY in sys.modules else (),
    }
    state |= {f"the variable {name}": value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    state |= {f"the handler of signal {number:d}": signal.getsignal(number) for number in _SIGNALS}
    for logger in _loggers():
        handlers = [one for one in logger.handlers if not type(one).__module__.startswith("_pytest")]
        setting = (logger.level, handlers, logger.propagate, logger.disabled)
        if setting != (logging.NOTSET, [], True, False):
            state[f"the logger {logger.name}"] = setting
    return state


def _restore(before: dict[str, Any]) -> None:
    for name in set(os.environ) - {"PYTEST_CURRENT_TEST"}:
        if f"the variable {name}" not in before:
            del os.environ[name]
    os.environ.update(
        {
            name.removeprefix("the variable "): value
            for name, value in before.items()
            if name.startswith("the variable ")
        }
    )
    if _DEFAULT_PLANE in sys.modules:
        default = sys.modules[_DEFAULT_PLANE]._default
        default.clear()
        if before["the default plane"] is not None:
            default["plane"] = before["the default plane"]
    for number in _SIGNALS:
        handler = before[f"the handler of signal {number:d}"]
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)
    for logger in _loggers():
        setting = before.get(f"the logger {logger.name}", (logging.NOTSET, [], True, False))
        kept = [one for one in logger.handlers if type(one).__module__.startswith("_pytest")]
        logger.setLevel(setting[0])
        logger.handlers = kept + setting[1]
        logger.propagate = setting[2]
        logger.disabled = setting[3]
