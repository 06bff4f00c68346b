"""The options of `lakeshore worker start` for runners, which give each body a child of its own."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import click

from ..settings import read_settings
from .runner_table import RUNNERS, runner_class

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Sequence

    from ..planes.plane import Plane
    from ..worker.executor import Executor
    from ..worker.runner import Runner

__all__ = ["RUNNER_OPTIONS", "ChildOptions", "WorkerCommand", "executor", "make_runner"]


class ChildOptions(NamedTuple):
    """The values of RUNNER_OPTIONS; `runner` is `inline` where bodies run in the worker's process."""

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
        """The absolute path of the folder that holds the folders of invocations."""
        return Path(os.path.abspath(self.workdir or read_settings().home / "work"))


NO_CHILDREN = ChildOptions("inline", (), None, None, (), None, False, False)

RUNNER_OPTIONS = (
    click.option(
        "--runner",
        type=click.Choice(["inline", *RUNNERS]),
        default="inline",
        show_default=True,
        is_eager=True,  # `--runner NAME --help` describes this one
        help="Where bodies run: in this process, or each in a child of its own; `--runner NAME --help` is about one.",
    ),
    click.option(
        "--runner-option",
        "runner_options",
        multiple=True,
        metavar="NAME=VALUE",
        help="An option of the runner; may be repeated.  `--runner NAME --help` lists them.",
    ),
    click.option(
        "--workdir",
        type=click.Path(file_okay=False),
        help="The folder that holds the folders of children.  [default: $LAKESHORE_HOME/work]",
    ),
    click.option(
        "--keep-workdirs",
        type=click.IntRange(0),
        metavar="N",
        help="Keep only the N newest folders of failed invocations.  [default: all]",
    ),
    click.option(
        "--env",
        "environ",
        multiple=True,
        metavar="NAME[=VALUE]",
        help="A further variable for children, besides PATH, HOME and the like, with this worker's value or VALUE; may be "
        "repeated.",
    ),
    click.option(
        "--on-shutdown",
        type=click.Choice(["killed", "release"]),
        help="What happens to invocations whose children end with the worker: they become killed, or return to their "
        "queue.  [default: killed]",
    ),
    click.option("--allow-script", is_flag=True, help="Run shell commands that callers submit in place of a body."),
    click.option("--allow-as-user", is_flag=True, help="Run bodies as the user that the caller names."),
)


COMMON = "--queue --concurrency --db --url --token-file --timeout --runner --help".split()
"""The options that most people need. They have to fit on the first screen of the help."""


class WorkerCommand(click.Command):
    """A command whose help lists the common options first, and the options of a runner only where it is named."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options in sections."""
        params = {param.opts[0]: param for param in self.get_params(ctx)}
        children = [name for name, param in params.items() if param.name in ChildOptions._fields and name not in COMMON]
        more = [name for name in params if name not in (*COMMON, *children)]
        runner = str(ctx.params.get("runner"))
        if runner in RUNNERS:
            from ..runners.options import describe_options

            options_class = runner_class(runner).options_class
            with formatter.section(f"Options of the {runner} runner (--runner-option NAME=VALUE)"):
                formatter.write_dl(describe_options(options_class))
                if options_class.notes:
                    formatter.write_paragraph()
                    formatter.write_text(options_class.notes)
        sections = {"Common options": COMMON, "More options": more, "Options of all runners but inline": children}
        for title, names in sections.items():
            with formatter.section(title):
                formatter.write_dl([found for name in names if (found := params[name].get_help_record(ctx))])


def make_runner(children: ChildOptions) -> Runner | None:
    """Make the runner that the options name; None where bodies run in this process. Raises UsageError."""
    if children.runner == "inline":
        flags = {"runner_options": "--runner-option", "environ": "--env"}
        given = [name for name in ChildOptions._fields if getattr(children, name) != getattr(NO_CHILDREN, name)]
        if given:
            named = ", ".join(flags.get(name, f"--{name.replace('_', '-')}") for name in given)
            raise click.UsageError(f"{named}: bodies run in this process; add --runner process to give them their own")
        return None
    from ..runners.environment import child_environ

    kind = runner_class(children.runner)
    try:
        environ = child_environ(children.environ, elsewhere=getattr(kind, "elsewhere", False))
        runner: Runner = kind.from_options(_pairs(children.runner_options), environ)
    except ValueError as exc:
        raise click.UsageError(str(exc)) from None
    return runner


def _pairs(options: Sequence[str]) -> dict[str, str]:
    found = dict[str, str]()
    for item in options:
        name, _, value = item.partition("=")
        if not name or "=" not in item:
            raise ValueError(f"expected --runner-option NAME=VALUE, got {item!r}")
        found[name] = value
    return found


@asynccontextmanager
async def executor(
    runner: Runner, children: ChildOptions, plane: Plane, root: str, options: Any
) -> AsyncGenerator[Callable[[int], Executor]]:
    """Give a function that makes the worker's executor for a number of concurrent children.

    The runner is closed after the block. `options` are those of the worker.
    """
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
        environ=plane.child_environ(),
    )
    try:
        yield partial(ChildExecutor, runner, rules)
    finally:
        await runner.aclose()
