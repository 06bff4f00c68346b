"""How fast the same is through a server: each figure beside the local plane's, measured in turns, round by round.

    python benchmarks/http.py [--json] [--rounds 5] [--only NAME ...] [--backend asyncio|trio] [--quick]

The server is `python -m dreamlake.lakeshore server start` on loopback, in a process of its own; caller and worker are two
more. What is compared with the local plane is the same code with another plane. Times are compared with a bare POST: one
httpx client with one connection that stays open posts a small msgpack body to the server's /healthz, which does nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's

import http_rates
import http_stillness
import http_waits
from figures import HTTP_TARGETS
from program import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from figures import Bench

SCENARIOS: dict[str, Callable[[Bench], None]] = {
    "submit": http_rates.submit,
    "cycle": http_rates.cycle,
    "call": http_waits.call,
    "results": http_waits.results,
    "frames": http_rates.frames,
    "idle": http_stillness.idle,
    "crowd": http_stillness.crowd,
}

if __name__ == "__main__":
    sys.exit(run(__doc__, SCENARIOS, HTTP_TARGETS))
