"""The options of a worker that gives each body a process of its own, and what they come to."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from ..settings import read_settings
from .runner_table import RUNNERS

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from ..planes.plane import Plane
    from ..worker.executor import Executor
    from ..worker.runner import Runner

__all__ = ["RUNNER_OPTIONS", "Children", "WorkerCommand", "executor", "make_runner"]


class Children(NamedTuple):
    """What the options say about children; `runner` is `inline` where there are none."""

    runner: str
    runner_options: tuple[str, ...]
    workdir: str | None
    keep_workdirs: int | None
    environ: tuple[str, ...]
    on_shutdown: Literal["killed", "release"] | None
    allow_script: bool
    allow_as_user: bool

    @property
    def folder(self) -> Path:
        """Where the folders of invocations lie, absolute."""
        return Path(os.path.abspath(self.workdir or read_settings().home / "work"))


RUNNER_OPTIONS = (
    click.option(
        "--runner",
        type=click.Choice(["inline", *RUNNERS]),
        default="inline",
        show_default=True,
        is_eager=True,  # `--runner NAME --help` is about this one
        help="Where bodies run: in this process, or each in a child of its own; `--runner NAME --help` is about one.",
    ),
    click.option(
        "--runner-option",
        "runner_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the runner; may be repeated.  `--runner NAME --help` says which it has.",
    ),
    click.option(
        "--workdir",
        type=click.Path(file_okay=False),
        help="Where the folders of children lie.  [default: $LAKESHORE_HOME/work]",
    ),
    click.option(
        "--keep-workdirs",
        type=click.IntRange(0),
        metavar="N",
        help="How many folders of failed invocations stay, the newest.  [default: all]",
    ),
    click.option(
        "--env",
        "environ",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A variable that children get besides PATH, HOME and the like: this worker's own, or VALUE; may be repeated.",
    ),
    click.option(
        "--on-shutdown",
        type=click.Choice(["killed", "release"]),
        help="What becomes of invocations whose children are ended with the worker: they are killed, or go back to "
        "their queue.  [default: killed]",
    ),
    click.option("--allow-script", is_flag=True, help="Run shell commands that submitters ask for in place of a body."),
    click.option("--allow-as-user", is_flag=True, help="Run bodies as the user that submitters ask for."),
)


COMMON = "--queue --concurrency --db --url --token-file --timeout --runner --help".split()
"""The options that nearly everybody needs: they are to fit the first screen."""


class WorkerCommand(click.Command):
    """A command with the options of a worker: the common ones first, and what a runner takes only where it is named."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        params = {param.opts[0]: param for param in self.get_params(ctx)}
        children = [name for name, param in params.items() if param.name in Children._fields and name not in COMMON]
        more = [name for name in params if name not in (*COMMON, *children)]
        runner = str(ctx.params.get("runner"))
        if runner in RUNNERS:
            with formatter.section(f"What --runner-option may say to {runner}"):
                formatter.write_text(RUNNERS[runner].options)
        sections = {"Common options": COMMON, "More options": more, "Options of all runners but inline": children}
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl([found for name in names if (found := params[name].get_help_record(ctx))])


def make_runner(children: Children) -> Runner | None:
    """The runner that the options ask for; None: bodies run in this process. Raises UsageError."""
    if children.runner == "inline":
        given = Children("inline", (), None, None, (), None, False, False)
        flags = dict(zip(Children._fields, zip(children, given, strict=True), strict=True))
        names = {"runner_options": "runner_option", "environ": "env"}
        wrong = [names.get(name, name) for name, (said, absent) in flags.items() if said != absent]
        if wrong:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
            raise click.UsageError(f"{named}: bodies run in this process; add --runner process to give them their own")
        return None
    from ..runners.process.runner import child_environ

    found = RUNNERS[children.runner]
    kind: Any = getattr(import_module(f"..runners.{found.module}", __package__), found.kind)
    try:
        environ = child_environ(children.environ, elsewhere=getattr(kind, "elsewhere", False))
        runner: Runner = kind.from_options(_pairs(children.runner_options), environ)
        return runner
    except ValueError as exc:
        raise click.UsageError(str(exc)) from None


def _pairs(options: Sequence[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in options]
    wrong = [name for name, given, _ in pairs if not (name and given)]
    if wrong:
        raise ValueError(f"expected --runner-option NAME=VALUE, got {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


@asynccontextmanager
async def executor(
    runner: Runner, children: Children, plane: Plane, root: str, options: Any
) -> AsyncGenerator[Callable[[int], Executor]]:
    """What makes the executor of a worker: of `concurrency` children at a time. `options` are those of the worker."""
    from ..worker.child import ChildExecutor, ChildRules

    rules = ChildRules(
        children.folder,
        Path(root),
        allow_pickled=options.allow_pickled,
        local=plane.local,
        runtime_policy=options.runtime_policy,
        allow_modules=options.allow_modules,
        keep=children.keep_workdirs,
        on_shutdown=children.on_shutdown or "killed",
        allow_script=children.allow_script,
        allow_as_user=children.allow_as_user,
        environ=_plane_variables(plane),
    )
    try:
        yield partial(ChildExecutor, runner, rules)
    finally:
        await runner.aclose()


def _plane_variables(plane: Plane) -> dict[str, str]:
    """What has the default plane of a child be its worker's, so that what bodies submit lands there.

    A file of another name than that of a home cannot be told in variables; nor are tokens, unless `--env` says so.
    """
    url, path, namespace = (getattr(plane, name, None) for name in ("url", "path", "namespace"))
    if url is not None:
        return {"LAKESHORE_URL": str(url), "LAKESHORE_NAMESPACE": namespace or ""}
    if path is not None and path.name == "lakeshore.db":
        return {"LAKESHORE_URL": "", "LAKESHORE_HOME": str(path.parent), "LAKESHORE_NAMESPACE": plane.ns}
    return {}
