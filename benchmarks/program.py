"""What the benchmarks' scripts have in common: the options, the run, and what is printed of it."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from figures import Bench, as_json, as_table

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from figures import Targets

__all__ = ["run"]


def run(
    description: str | None,
    scenarios: Mapping[str, Callable[[Bench], None]],
    targets: Targets,
    argv: Sequence[str] | None = None,
) -> int:
    """Measure what the options ask for and print it; the exit code: 1 where a scenario did not come to its end."""
    options = _options(description, targets, argv)
    signal.signal(signal.SIGTERM, _terminated)
    wanted = _wanted(targets, options.only)
    with tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder:
        settings = {"rounds": options.rounds, "backend": options.backend, "quick": options.quick}
        bench = Bench(Path(folder), **settings, targets=targets)
        failed = [scenario for scenario in wanted if not _measured(scenario, scenarios[scenario], bench)]
    figures = bench.figures(name for names in wanted.values() for name in names)
    print(as_json(figures) if options.json else as_table(figures))
    return 1 if failed else 0


def _measured(name: str, scenario: Callable[[Bench], None], bench: Bench) -> bool:
    """Whether a scenario came to its end; what its rounds gave until then is kept."""
    started = time.monotonic()
    try:
        scenario(bench)
    except Exception:
        traceback.print_exc()
        print(f"{name}: FAILED", file=sys.stderr, flush=True)
        return False
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return True


def _terminated(*_: object) -> None:
    sys.exit(143)  # as an exception: what was started is ended, the files are removed


def _options(description: str | None, targets: Targets, argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--rounds", type=_positive, default=5, help="how often everything is measured (5)")
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="NAME",
        choices=[*dict.fromkeys(name for scenario in targets for name in (scenario, *targets[scenario]))],
        help="these figures only: " + "; ".join(f"{name}: {', '.join(found)}" for name, found in targets.items()),
    )
    parser.add_argument("--backend", choices=("asyncio", "trio"), default="asyncio", help="targets are asyncio's")
    parser.add_argument("--quick", action="store_true", help="small numbers: whether it runs, not how fast")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _wanted(targets: Targets, only: Sequence[str] | None) -> dict[str, list[str]]:
    """The scenarios to run, and of each the figures to show."""
    wanted = {
        scenario: [name for name in names if only is None or scenario in only or name in only]
        for scenario, names in targets.items()
    }
    return {scenario: names for scenario, names in wanted.items() if names}
