"""`--help` of a worker: the common options fit the first screen, and a runner's come where it is named."""

from __future__ import annotations

import pytest
from cli_kit import cli

from dreamlake.lakeshore.cli.runner import RUNNER_OPTIONS
from dreamlake.lakeshore.cli.runner_table import RUNNERS, runner_class
from dreamlake.lakeshore.cli.worker import worker
from dreamlake.lakeshore.runners.options import describe_options

SCREEN = 24


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def flat(text: str) -> str:
    """Without what wrapping adds: a line may end after a hyphen."""
    return "".join(text.split())


def test_the_first_screen_has_what_nearly_everybody_needs() -> None:
    lines = cli("worker", "start", "--help").out.splitlines()
    first = "\n".join(lines[:SCREEN])
    for option in ("--queue", "--concurrency", "--db", "--url", "--token-file", "--timeout", "--runner", "--help"):
        assert f"\n  {option} " in first
    assert flat("`--runner NAME --help` is about one") in flat(first)
    assert lines.index("Common options:") < lines.index("More options:") >= SCREEN - 1


@pytest.mark.parametrize("command", ["start", "once"])
def test_every_option_is_in_it_once(command: str) -> None:
    said = cli("worker", command, "--help").out
    params = worker.commands[command].params
    assert len(params) > len(RUNNER_OPTIONS)
    for param in params:
        assert said.count(f"\n  {param.opts[0]} ") == 1, param.opts


@pytest.mark.parametrize("command", ["start", "once"])
@pytest.mark.parametrize("runner", sorted(RUNNERS))
def test_what_a_runner_takes_is_said_where_it_is_named(command: str, runner: str) -> None:
    section = f"Options of the {runner} runner (--runner-option NAME=VALUE):"
    said = flat(cli("worker", command, "--runner", runner, "--help").out)
    kind = runner_class(runner)
    described = describe_options(kind.options_class)
    assert flat(section) in said
    for name, description in described:
        assert flat(f"{name} {description}") in said
    assert flat(f"{kind.options_class.notes} Common options:") in said
    assert flat(section) not in flat(cli("worker", command, "--help").out)
