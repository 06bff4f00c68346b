"""What multiplies the tests, and how much of it each tier runs. `pytest --matrix default` or `--matrix full` chooses.

The default tier is for every save: each behaviour once, without an engine, a service or a package that a machine may
lack. The full tier is for the gate: every combination. A test that the default tier leaves out is deselected, not
skipped: the number of them stands at the end of the run.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

__all__ = ["TIERS", "Tier", "left_out", "tier"]

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Tier:
    """How much of the matrix a run takes.

    name: as `--matrix` takes it.
    sequences: how many generated sequences `check_plane` compares with the model.
    examples: the part of hypothesis' examples that a test runs.
    everything: whether each combination runs, and each test that needs something special.
    """

    name: str
    sequences: int
    examples: float
    everything: bool


TIERS = {
    "default": Tier("default", sequences=30, examples=0.3, everything=False),
    "full": Tier("full", sequences=150, examples=1.0, everything=True),
}
_chosen = TIERS["full"]


def tier() -> Tier:
    """The tier of this run."""
    return _chosen


def choose(name: str) -> None:
    """Set the tier, before any test is collected."""
    global _chosen
    _chosen = TIERS[name]


def examples(full: int) -> int:
    """How many examples hypothesis tries in this tier, where the full one has `full`."""
    return max(1, round(full * _chosen.examples))


@dataclass(frozen=True, slots=True)
class Axis:
    """A parameter by whose values the same tests run several times.

    parameter: its name, of a fixture or of `parametrize`.
    kept: the values that the default tier runs. A test that has none of them runs with those it has.
    whole_in: the folders whose tests run with every value all the same.
    """

    parameter: str
    kept: frozenset[str]
    whole_in: tuple[str, ...] = ()


# What these rooms do differs by the event loop; what is built on them uses it through them.
_BOTH_LOOPS = ("concurrency", "planes", "client", "worker")

AXES = (
    Axis("anyio_backend", frozenset({"asyncio"}), _BOTH_LOOPS),
    Axis("backend", frozenset({"asyncio"}), _BOTH_LOOPS),
    # The protocol's server: in this process on either loop, or a process behind a socket. The SQLite store's: memory, file.
    Axis("place", frozenset({"asyncio", "file"})),
    # The plane under an application.
    Axis("plane", frozenset({"file"})),
    # A child process is started anew, or forked from one that has imported everything.
    Axis("each_start", frozenset({"warm"})),
)


@dataclass(frozen=True, slots=True)
class Needs:
    """Tests that need what not every machine has.

    tests: a pattern of their ids, from the folder `tests` on.
    fixtures: only those that use one of these fixtures; all of them when empty.
    what: what they need.
    """

    tests: str
    what: str
    fixtures: frozenset[str] = frozenset()


NEEDS = (
    Needs("peers/*", "older versions of this package, each in an environment of its own"),
    Needs("planes/mongo/*", "a MongoDB server", frozenset({"mongo_url"})),
    Needs("planes/mongo/*", "a Redis", frozenset({"redis_url"})),
    Needs("runners/test_container_runner.py*", "docker and podman", frozenset({"docker", "podman", "site"})),
    Needs("runners/test_gvisor_runner.py*", "runsc", frozenset({"arguments", "engine"})),
    Needs("runners/test_slurm_runner.py*", "slurm", frozenset({"cluster"})),
    Needs("test_typing.py::test_R79*", "mypy and pyright"),
    Needs("wire/test_torch_values.py*", "torch"),
    Needs("wire/*_of_torch*", "torch"),
    Needs("wire/test_codec_memory.py::test_tensors_*", "torch"),
)


def left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests among `items` that this tier does not run."""
    if _chosen.everything:
        return set()
    return {item for item in items if item.get_closest_marker("slow") or _needs(item)} | _repeated(items)


def _needs(item: pytest.Item) -> bool:
    name = f"{item.path.relative_to(HERE).as_posix()}::{item.name}" if item.path.is_relative_to(HERE) else ""
    fixtures = set(getattr(item, "fixturenames", ()))
    return any(fnmatch(name, need.tests) and (not need.fixtures or need.fixtures & fixtures) for need in NEEDS)


def _repeated(items: list[pytest.Item]) -> set[pytest.Item]:
    """The tests that differ from one that runs only by the value of an axis."""
    found = set[pytest.Item]()
    for axis in AXES:
        on_axis = [item for item in items if axis.parameter in _parameters(item) and not _in(item, axis.whole_in)]
        kept = {_apart_from(item, axis) for item in on_axis if _value(item, axis) in axis.kept}
        found |= {item for item in on_axis if _value(item, axis) not in axis.kept and _apart_from(item, axis) in kept}
    return found


def _parameters(item: pytest.Item) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _value(item: pytest.Item, axis: Axis) -> str:
    return str(_parameters(item)[axis.parameter])


def _apart_from(item: pytest.Item, axis: Axis) -> tuple[Any, ...]:
    """The test and its other parameters, each by its identity: not all of them can be compared."""
    others = sorted((name, id(value)) for name, value in _parameters(item).items() if name != axis.parameter)
    return (item.nodeid.partition("[")[0], *others)


def _in(item: pytest.Item, folders: tuple[str, ...]) -> bool:
    return item.path.is_relative_to(HERE) and item.path.relative_to(HERE).parts[0] in folders
