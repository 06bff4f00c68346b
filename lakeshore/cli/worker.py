"""`lakeshore worker`: a process that runs invocations until a signal stops it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import click

from ..ids import check_queue
from ..settings import read_settings
from .options import INTERRUPTED, Where, age, log_to_stderr, plane_of, plane_options, seconds, watch_signals
from .output import say
from .runner import RUNNER_OPTIONS, ChildOptions, WorkerCommand, executor, make_runner

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client.queue import Queue
    from ..planes.plane import Plane
    from ..worker.runner import Runner

__all__ = ["worker"]

logger = logging.getLogger("dreamlake.lakeshore.worker")


class Options(NamedTuple):
    """The options of a worker, by the names of the parameters of `run_worker`."""

    concurrency: int
    retries: int
    timeout: float | None
    lease: float
    max_lost: int
    grace: float
    root: str | None
    allow_pickled: bool | None
    allow_modules: tuple[str, ...]
    runtime_policy: str


def _policy() -> str:
    return read_settings().runtime_policy


def _names(context: click.Context, option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    try:
        return tuple(map(check_queue, names))
    except ValueError as exc:
        raise click.BadParameter(str(exc)) from None


OPTIONS = (
    click.option(
        "--queue",
        "queues",
        multiple=True,
        metavar="NAME",
        callback=_names,
        help="A queue to serve; may be repeated.  [default: $LAKESHORE_QUEUE or default]",
    ),
    click.option(
        "--concurrency",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="The number of bodies that run at the same time.",
    ),
    click.option(
        "--retries", type=click.IntRange(0), default=0, show_default=True, help="Further attempts after a body raises."
    ),
    click.option("--timeout", type=seconds, help="The longest time that a body may run.  [default: no limit]"),
    click.option(
        "--lease",
        type=seconds,
        default=30.0,
        show_default=True,
        help="After this time without a heartbeat the worker loses its claims.",
    ),
    click.option(
        "--max-lost",
        type=click.IntRange(1),
        default=5,
        show_default=True,
        help="The number of workers that one invocation may lose before it fails.",
    ),
    click.option(
        "--grace",
        type=age,
        metavar="SECONDS",
        default=30.0,
        show_default=True,
        help="Seconds that running bodies get after a signal.",
    ),
    click.option(
        "--root",
        type=click.Path(file_okay=False),
        help="The folder below which the keys of dls.run are.  [default: $LAKESHORE_ROOT or the current folder]",
    ),
    click.option(
        "--allow-pickled/--no-allow-pickled",
        default=None,
        help="Whether to unpickle functions, which runs their code.  [default: those submitted on this machine]",
    ),
    click.option(
        "--allow-module",
        "allow_modules",
        multiple=True,
        metavar="NAME",
        help="A module whose functions may run although pickled ones are refused; may be repeated.",
    ),
    click.option(
        "--runtime-policy",
        type=click.Choice(["strict", "minor", "off"]),
        default=_policy,
        help="How closely the submitter's Python must match.  [default: $LAKESHORE_RUNTIME_POLICY or minor]",
    ),
)


def worker_options(command: Callable[[Where, tuple[str, ...], Options, ChildOptions], int]) -> Callable[..., int]:
    """Add the options of a worker and of a plane to a command."""

    def wrapped(where: Where, /, queues: tuple[str, ...], **options: Any) -> int:
        children = ChildOptions(**{name: options.pop(name) for name in ChildOptions._fields})
        return command(where, queues or (read_settings().queue,), Options(**options), children)

    functools.update_wrapper(wrapped, command)
    decorated = plane_options(wrapped)
    for option in reversed((*OPTIONS, *RUNNER_OPTIONS)):
        decorated = option(decorated)
    return decorated


@click.group()
def worker() -> None:
    """Run the invocations of queues."""


@worker.command(
    cls=WorkerCommand,
    epilog="After the first signal the worker claims nothing and gives running bodies the grace. Then, or at once after a "
    "second signal, bodies that still run return to their queue (children are killed, see --on-shutdown). Modules are "
    "imported from the current folder first. Times are seconds, or take a unit: 45s, 10m, 2h.",
)
@worker_options
def start(where: Where, queues: tuple[str, ...], options: Options, children: ChildOptions) -> int:
    """Run invocations until SIGTERM or Ctrl-C."""
    _, code = work(where, queues, options, children, once=False)
    return code


@worker.command(cls=WorkerCommand)
@worker_options
def once(where: Where, queues: tuple[str, ...], options: Options, children: ChildOptions) -> int:
    """Run at most one invocation that is ready now; exit 0 even if there was none."""
    jobs, code = work(where, queues, options, children, once=True)
    say(f"{jobs} invocation{'' if jobs == 1 else 's'} run")
    return code


def work(
    where: Where, queues: tuple[str, ...], options: Options, children: ChildOptions, *, once: bool
) -> tuple[int, int]:
    """Run invocations until a signal; return the number of bodies that ran, and the exit code."""
    runner = make_runner(children)
    if not os.path.isdir(_root(options)):
        raise click.UsageError(
            f"the root {_root(options)!r} is not a folder: create it, or name another with --root or LAKESHORE_ROOT"
        )
    if sys.path[:1] != [os.getcwd()]:
        sys.path.insert(0, os.getcwd())
    log_to_stderr()
    return anyio.run(_work, where, queues, options, children, runner, once)


async def _work(
    where: Where, names: tuple[str, ...], options: Options, children: ChildOptions, runner: Runner | None, once: bool
) -> tuple[int, int]:
    from ..client.default_plane import set_default_plane
    from ..client.queue import Queue

    stop = anyio.Event()
    working = anyio.CancelScope()
    jobs = 0
    failure = None

    def ask(name: str) -> None:
        logger.info("%s: claiming no more, running bodies may end", name)
        stop.set()

    def cut(name: str) -> None:
        logger.info("%s again: returning running bodies to their queue", name)
        working.cancel()

    async with plane_of(where, create=True) as plane, anyio.create_task_group() as group:
        set_default_plane(plane)
        await group.start(watch_signals, ask, cut)
        logger.info("%s", _start_line(names, plane, options, children))
        queues = [Queue(name, dispatch=plane) for name in names]
        with working:
            try:
                jobs = await _run(queues, plane, options, children, runner, once, stop)
            except Exception as exc:  # raised below, so that it is not wrapped in a group
                failure = exc
        group.cancel_scope.cancel()
    if failure is not None:
        raise failure
    return jobs, INTERRUPTED if working.cancelled_caught else 0


async def _run(
    queues: list[Queue],
    plane: Plane,
    options: Options,
    children: ChildOptions,
    runner: Runner | None,
    once: bool,
    stop: anyio.Event,
) -> int:
    from ..worker.loop import run_executor, run_worker
    from ..worker.settings import WorkerSettings

    if runner is None:
        return await run_worker(queues, once=once, stop=stop, **options._asdict())
    settings = WorkerSettings(*(getattr(options, field.name) for field in dataclasses.fields(WorkerSettings)))
    async with executor(runner, children, plane, _root(options), options) as make:
        return await run_executor(queues, make, settings, once=once, stop=stop)


def _root(options: Options) -> str:
    return os.path.abspath(options.root or read_settings().root or os.curdir)


def _start_line(queues: tuple[str, ...], plane: Plane, options: Options, children: ChildOptions) -> str:
    unsaid = "allowed where submitted on this machine" if plane.local else "refused"
    pickled = {True: "allowed", False: "refused", None: unsaid}
    where = "" if children.runner == "inline" else f", runner {children.runner} in {children.folder}"
    namespace = "" if plane.ns == "default" else f" in namespace {plane.ns}"
    return (
        f"worker {os.getpid()} of {'queue' if len(queues) == 1 else 'queues'} {', '.join(queues)}{namespace} on "
        f"{getattr(plane, 'path', None) or getattr(plane, 'url', None) or plane}, root {_root(options)}, "
        f"concurrency {options.concurrency}, pickled functions {pickled[options.allow_pickled]}{where}"
    )
