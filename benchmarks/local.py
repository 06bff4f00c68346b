"""How fast the local product is: each figure beside its raw limit, measured in turns, round by round, in the same run.

    python benchmarks/local.py [--json] [--rounds 5] [--only NAME ...] [--backend asyncio|trio] [--quick]

Rates on a busy machine move by a factor from one minute to the next; the ratios to what was measured in the same round
are what counts. Shown are medians of the rounds, and the spread of what the target is about.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's

import latency
import rates
import stillness
import streaming
import values
from figures import TARGETS
from program import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from figures import Bench

SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "submit": rates.submit,
    "cycle": rates.cycle,
    "drain": rates.drain,
    "call": latency.call,
    "herd": latency.herd,
    "gather": rates.gather,
    "frames": streaming.frames,
    "large-frames": streaming.large_frames,
    "large-results": latency.large_results,
    "idle": stillness.idle,
    "claim": stillness.claim,
    "kill": latency.kill,
    "wire": values.wire,
    "array": values.array,
    "import": values.import_time,
    "local-call": values.local_call,
}

if __name__ == "__main__":
    sys.exit(run(__doc__, SCENARIOS, TARGETS))
