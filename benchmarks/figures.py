"""Figures: what is measured, what it should be, and how the rounds of a run become one number."""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = [
    "HTTP_TARGETS",
    "RUNNER_TARGETS",
    "TARGETS",
    "Bench",
    "Figure",
    "Targets",
    "as_json",
    "as_table",
    "percentile",
]

Targets: TypeAlias = "Mapping[str, Mapping[str, str]]"

TARGETS: Targets = {
    "submit": {
        "raw-submit-1": "",
        "raw-submit-100": "",
        "plane-submit": ">= 0.5",
        "queue-submit": ">= 0.4",
        "submit-many": ">= 0.6",
    },
    "cycle": {
        "raw-claim-ack-1": "",
        "raw-claim-ack-100": "",
        "raw-cycle-1": "",
        "raw-cycle-100": "",
        "cycle": ">= 0.45",
    },
    "drain": {"drain-async": ">= 0.45", "drain-async-cpu": "", "drain-def": ">= 0.15", "drain-def-cpu": ""},
    "call": {"raw-round-trip": "", "call-async": "<= 5", "call-sync": "<= 6"},
    "herd": {"call-beside-24-idle": "<= 2", "idle-cpu-per-call": ""},
    "gather": {"gather": "<= 1.3", "gather-peak": "", "gather-growth": "<= 5"},
    "frames": {
        "raw-frames-1": "",
        "raw-frames-100": "",
        "frames-async": ">= 0.7",
        "frames-def": ">= 0.6",
        "first-frame": "<= 10",
    },
    "large-frames": {"large-frames-worker": "<= 150", "large-frames-reader": "<= 150"},
    "large-results": {"call-beside-results": "<= 10", "call-beside-results-one-worker": ""},
    "idle": {"idle-worker": "< 0.4", "idle-waiter": "< 0.4", "idle-10000-waits": "< 0.4"},
    "claim": {
        "claim-1-queued": "<= 2",
        "claim-1-finished": "<= 2",
        "claim-1-delayed": "<= 2",
        "claim-32-queued": "<= 1.5",
        "claim-32-finished": "<= 1.5",
        "claim-32-delayed": "<= 1.5",
    },
    "kill": {"kill-to-restart": "<= 1"},
    "wire": {"pack-1kb": "<= 1.2", "unpack-1kb": "<= 1.2"},
    "array": {
        "pack-array-100mb": "<= 1.1",
        "unpack-array-100mb": "<= 1.1",
        "unpack-array-in-list": "<= 2.1",
        "unpack-array-in-tuple": "<= 3.1",
    },
    "import": {"import": "<= 30"},
    "local-call": {"local-call": "<= 3"},
}
"""By scenario, the figures it gives and their targets: of the ratio where there is one, else of the value."""

HTTP_TARGETS: Targets = {
    "submit": {"submit-local": "", "submit": ">= 0.25", "submit-one-by-one": "", "submit-coalesced": ">= 40"},
    "cycle": {"cycle-local": "", "cycle": ">= 0.25"},
    "call": {"bare-post": "", "call-local": "", "call": "<= 8"},
    "results": {"results-requests": "<= 60", "single-awaits-cpu": "", "results-cpu": "<= 0.1"},
    "frames": {"frames-local": "", "frames": ">= 0.3", "first-frame-local": "", "first-frame": "<= 8"},
    "idle": {
        "idle-worker": "< 0.5",
        "idle-worker-requests": "<= 3",
        "idle-waiter": "< 0.5",
        "idle-waiter-requests": "<= 3",
    },
    "crowd": {"crowd-server": "< 5", "crowd-memory": "", "crowd-submit": "<= 20"},
}
"""The same of what goes through a server."""

RUNNER_TARGETS: Targets = {
    "process": {"process-bare": "", "process-imports": "", "process": "<= 1.5", "process-warm": "<= 0.2"},
    **{
        engine: {f"{engine}-bare": "", f"{engine}-imports": "", engine: "<= 1.5"}
        for engine in ("docker", "podman", "gvisor", "slurm")
    },
}
"""The same of bodies that run in children."""


class Figure(NamedTuple):
    """One row of the table: medians over the rounds. `rounds`: the ratio, or without one the value, of each round."""

    name: str
    value: float
    unit: str
    ratio: float | None
    target: str | None
    met: bool | None
    rounds: list[float]


class Bench:
    """One run: its size, its folder, and what the rounds gave."""

    def __init__(self, folder: Path, *, rounds: int, backend: str, quick: bool, targets: Targets = TARGETS) -> None:
        self.rounds, self.backend, self.quick, self.targets = rounds, backend, quick, targets
        self._folder, self._folders = folder, 0
        self._units: dict[str, str] = {}
        self._values: defaultdict[str, list[float]] = defaultdict(list)
        self._ratios: defaultdict[str, list[float]] = defaultdict(list)

    def size(self, full: int, quick: int) -> int:
        """How many: a full run's number, or a quick one's."""
        return quick if self.quick else full

    def each_round(self) -> Iterator[int]:
        yield from range(self.rounds)

    def fresh(self) -> Path:
        """The path of a plane's file, in a new folder."""
        self._folders += 1
        folder = self._folder / str(self._folders)
        folder.mkdir()
        return folder / "plane.db"

    @staticmethod
    def drop(path: Path) -> None:
        """Remove the plane's file, where it is too large to stay to the end."""
        for file in path.parent.glob(f"{path.name}*"):
            if file.is_file():
                file.unlink()

    def add(self, name: str, unit: str, value: float, ratio: float | None = None) -> None:
        """What a round gave."""
        self._units[name] = unit
        self._values[name].append(value)
        if ratio is not None:
            self._ratios[name].append(ratio)

    def figures(self, names: Iterable[str]) -> list[Figure]:
        """The figures of `names` that were measured, in that order."""
        return [self._figure(name) for name in names if name in self._units]

    def _figure(self, name: str) -> Figure:
        value = statistics.median(self._values[name])
        rounds = self._ratios.get(name) or self._values[name]
        ratio = statistics.median(rounds) if name in self._ratios else None
        # Only asyncio has targets: trio crosses to the driver's loop with every batch.
        target = self._target_of(name) if self.backend == "asyncio" else None
        met = None if target is None else _holds(statistics.median(rounds), target)
        return Figure(name, value, self._units[name], ratio, target, met, rounds)

    def _target_of(self, name: str) -> str | None:
        return next(figures[name] for figures in self.targets.values() if name in figures) or None


def _holds(measured: float, target: str) -> bool:
    sign, bound = target.split()
    if sign == ">=":
        return measured >= float(bound)
    return measured <= float(bound) if sign == "<=" else measured < float(bound)


def percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` of them lie."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def as_json(figures: Iterable[Figure]) -> str:
    return json.dumps({"figures": [figure._asdict() for figure in figures]}, indent=1)


def as_table(figures: Iterable[Figure]) -> str:
    rows = [("figure", "value", "unit", "ratio", "min - max", "target", "")]
    for name, value, unit, ratio, target, met, rounds in figures:
        shown = "" if ratio is None else f"{ratio:.3g}"
        spread = f"{min(rounds):.3g} - {max(rounds):.3g}"
        verdict = "" if met is None else "met" if met else "MISSED"
        rows.append((name, f"{value:,.4g}", unit, shown, spread, target or "", verdict))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
