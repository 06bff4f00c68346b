"""The timeout of a body, which is one of the worker's settings."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import anyio

from ..planes.contract.records import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from .executor import StopReason
    from .outcome import ActiveClaim

__all__ = ["timeout_failure", "watch_timeouts"]


async def watch_timeouts(
    claims: Mapping[Any, ActiveClaim], timeout: float, stop: Callable[[ActiveClaim, StopReason], object]
) -> None:
    """Call `stop(claim, "timeout")` for each of `claims` whose body has run for `timeout` seconds. Runs until cancelled.

    The time counts from `ActiveClaim.timeout_start`: from the claim, or with child processes from the start of the child.
    """
    while True:
        now = time.monotonic()
        pause = timeout  # no body that starts during the pause can be late before its end
        for claim in list(claims.values()):
            if claim.timeout_start is None or not claim.stoppable:
                continue
            left = claim.timeout_start + timeout - now
            if left <= 0:
                stop(claim, "timeout")
            else:
                pause = min(pause, left)
        await anyio.sleep(pause)


def timeout_failure(timeout: float | None) -> Failure:
    """The error of an invocation whose body was stopped after `timeout` seconds."""
    return Failure("TimeoutError", f"the body ran longer than this worker's timeout of {timeout} s")
