"""The options of runners: how they are declared, parsed and described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from dreamlake.lakeshore.cli.runner_table import RUNNERS, runner_class
from dreamlake.lakeshore.runners.options import (
    Option,
    amount,
    choice,
    describe_options,
    flag,
    read_options,
    whole_amount,
    words,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Oven:
    """Options of each kind."""

    bread: Annotated[str, Option("NAME", "What to bake.")]
    max_heat: Annotated[float, Option("DEGREES", "How hot it may be.", amount)] = 250.0
    trays: Annotated[int | None, Option("NUMBER", "How many trays there are.", whole_amount, name="tray_count")] = None
    fan: Annotated[bool, Option("1", "Use the fan.", flag)] = False
    mode: Annotated[str, Option("MODE", "How to heat.", choice("top", "bottom", "both"))] = "both"
    extra: Annotated[tuple[str, ...], Option("WORD,...", "Further words.", words)] = ()


def test_options_are_parsed() -> None:
    assert read_options(Oven, "oven", {"bread": "rye"}) == Oven(bread="rye")
    given = {"bread": "rye", "max-heat": "1.5k", "tray_count": "2", "fan": "1", "mode": "top", "extra": "a,,b"}
    assert read_options(Oven, "oven", given) == Oven(
        bread="rye", max_heat=1536.0, trays=2, fan=True, mode="top", extra=("a", "b")
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "^the oven runner needs --runner-option bread=NAME: What to bake.$"),
        ({"bread": ""}, "^the oven runner needs --runner-option bread=NAME: What to bake.$"),
        (
            {"trays": "1"},
            "^the oven runner knows no option trays: it has bread, max-heat, tray_count, fan, mode, extra$",
        ),
        (
            {"bread": "rye", "max-heat": ""},
            "a number from 0 for the runner option max-heat, such as 10 or 2g, got ''",
        ),
        ({"bread": "rye", "max-heat": "nan"}, "expected a number from 0 for the runner option max-heat"),
        ({"bread": "rye", "fan": "yes"}, "^expected the runner option fan to be 1 or 0, got 'yes'$"),
        ({"bread": "rye", "mode": "all"}, "^expected the runner option mode to be top, bottom or both, got 'all'$"),
    ],
)
def test_options_that_cannot_be(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_options(Oven, "oven", given)


def test_options_are_described() -> None:
    assert describe_options(Oven) == [
        ("bread=NAME", "What to bake.  [needed]"),
        ("max-heat=DEGREES", "How hot it may be.  [default: 250]"),
        ("tray_count=NUMBER", "How many trays there are."),
        ("fan=1", "Use the fan."),
        ("mode=MODE", "How to heat.  [default: both]"),
        ("extra=WORD,...", "Further words."),
    ]


def test_every_runner_has_options() -> None:
    for name in RUNNERS:
        kind = runner_class(name)
        assert kind.name == name
        assert {"python=PATH", "grace=SECONDS"} <= {option for option, _ in describe_options(kind.options_class)}
