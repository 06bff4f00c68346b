"""What a child per invocation costs: from submit to result, beside what its engine takes for `python3 -c pass`.

    python benchmarks/runners.py [--json] [--rounds 5] [--only NAME ...] [--quick]

Each round measures, in turns: the bare engine (a process, `docker run`, `podman run`, `sbatch --wait`), the
same with the imports of a child in place of `pass`, and a no-op through `lakeshore worker start` with that runner. Of the
runner's time the imports are taken off (NAME-imports: what they add to the bare engine), and the rest is compared with the
bare engine; a warm start of a process is compared with a cold one.

The engines are those of the tests, which start them; one that is not installed is left out, by name. There is no bare
Kubernetes to compare with: the tests' API server runs processes.

`sbatch --wait` looks at its job every two seconds, which is most of what the bare Slurm takes, and hides the imports there.
"""

from __future__ import annotations

import py_compile
import statistics
import sys
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's
sys.path.extend(str(Path(__file__).resolve().parents[1] / name) for name in ("tests", "tests/runners"))

import conformance_bodies as bodies
from conformance_kit import Site
from container_kit import DOCKER, GVISOR, PODMAN
from engine_kit import PROCESS, WARM
from figures import RUNNER_TARGETS
from program import run
from runner_engines import IMPORTS, bare_containers, bare_process, bare_slurm
from slurm_kit import SLURM

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_kit import Engine
    from figures import Bench
    from runner_engines import Bare

LIMIT = 120.0
"""Seconds that one call may take."""


@contextmanager
def calls(bench: Bench, engine: Engine, arguments: list[str]) -> Iterator[Callable[[], object]]:
    """A function that makes one call through a worker of that engine, which has begun to work."""
    site = Site(engine, arguments, bench.fresh().parent)
    queue = site.queue("q")

    def call() -> None:
        queue.result(queue.submit(dls.thunk(bodies.double, 1)), timeout=LIMIT)

    try:
        with site.worker("q"):
            call()
            yield call
    finally:
        site.close()


def took(fn: Callable[[], object]) -> float:
    """Milliseconds of one call."""
    begun = time.perf_counter()
    fn()
    return (time.perf_counter() - begun) * 1e3


def medians(count: int, *fns: Callable[[], object]) -> list[float]:
    """The median milliseconds of each, called in turns."""
    turns = [[took(fn) for fn in fns] for _ in range(count)]
    return [statistics.median(column) for column in zip(*turns, strict=True)]


def cold(name: str, engine: Engine, bare: Callable[[Path, list[str]], Bare], count: int, bench: Bench) -> None:
    """A child of the engine against the engine itself."""
    absent = engine.missing()
    if absent is not None:
        print(f"{name} is left out: it needs {absent}", file=sys.stderr)
        return
    with engine.up() as arguments, calls(bench, engine, arguments) as call:
        start = bare(bench.fresh().parent, arguments)
        steps: list[Callable[[], object]] = [partial(start, "pass"), partial(start, IMPORTS), call]
        for step in steps:
            step()
        for _ in bench.each_round():
            add(bench, name, *medians(bench.size(count, 1), *steps))


def add(bench: Bench, name: str, least: float, importing: float, whole: float) -> None:
    """One round of an engine."""
    imports = max(importing - least, 0.0)
    bench.add(f"{name}-bare", "ms", least)
    bench.add(f"{name}-imports", "ms", imports)
    bench.add(name, "ms", whole, (whole - imports) / least)


def process(bench: Bench) -> None:
    """Both starts of a process."""
    py_compile.compile(bodies.__file__)  # as any module is that was imported before
    with PROCESS.up() as arguments, calls(bench, PROCESS, arguments) as call, WARM.up() as more:
        start = bare_process(bench.fresh().parent, arguments)
        with calls(bench, WARM, more) as warm:
            for _ in bench.each_round():
                steps: list[Callable[[], object]] = [partial(start, "pass"), partial(start, IMPORTS), call, warm]
                least, importing, whole, forked = medians(bench.size(20, 5), *steps)
                add(bench, "process", least, importing, whole)
                bench.add("process-warm", "ms", forked, forked / whole)


SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "process": process,
    "docker": partial(cold, "docker", DOCKER, bare_containers, 7),
    "podman": partial(cold, "podman", PODMAN, bare_containers, 7),
    "gvisor": partial(cold, "gvisor", GVISOR, bare_containers, 5),
    "slurm": partial(cold, "slurm", SLURM, bare_slurm, 3),
}

if __name__ == "__main__":
    sys.exit(run(__doc__, SCENARIOS, RUNNER_TARGETS))
