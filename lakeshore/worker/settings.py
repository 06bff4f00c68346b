"""The settings of one worker, and the check that they make sense."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["WorkerSettings"]

_MINIMUM = {"concurrency": 1, "retries": 0, "max_lost": 1, "grace": 0}


@dataclass(frozen=True)
class WorkerSettings:
    """The settings of one worker.

    Args:
        concurrency: number of bodies that run at the same time.
        retries: further attempts after a body raised.
        timeout: seconds that a body may run; None for no limit.
        lease: seconds after which a worker that no longer sends heartbeats loses its claims.
        max_lost: number of losses after which an invocation fails.
        grace: seconds that running bodies get at a shutdown, and threads after their outcome is decided.
    """

    concurrency: int
    retries: int
    timeout: float | None
    lease: float
    max_lost: int
    grace: float

    def check(self) -> None:
        """Raise ValueError with every setting that is out of its range."""
        wrong: list[str] = []
        for name, minimum in _MINIMUM.items():
            value = getattr(self, name)
            if not value >= minimum:
                wrong.append(f"{name}={value} (at least {minimum})")
        for name in ("lease", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                wrong.append(f"{name}={value} (seconds above 0)")
        if wrong:
            raise ValueError(f"a worker cannot work with {', '.join(wrong)}")
