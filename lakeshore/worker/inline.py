"""The executor that runs bodies in this process: async bodies as tasks, the others in threads of the worker's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from ..body.execute import BodyOutcome, BodySettings, ValueSink, execute

if TYPE_CHECKING:
    from ..planes.contract.operations import Claimed

__all__ = ["InlineExecutor"]

_HINT = (
    "; it was submitted as a plain value, for those who claim by hand: "
    "submit a function, or `dls.thunk(fn, ...)`, for a worker to run"
)
"""The end of the error of a payload that is no function call."""


class InlineExecutor:
    """Runs bodies in this process.

    Args:
        trusted: What bodies may do that were submitted on this machine to a local plane.
        untrusted: What all other bodies may do.
        concurrency: How many bodies run in threads at the same time. This limit is separate from anyio's for all threads.
    """

    paused_until = 0.0

    def __init__(self, trusted: BodySettings, untrusted: BodySettings, concurrency: int) -> None:
        self._trusted = trusted
        self._untrusted = untrusted
        self._threads = anyio.CapacityLimiter(concurrency)

    async def run(self, claimed: Claimed, channel: ValueSink) -> BodyOutcome:
        """Run the body. When cancelled, an async body has ended before this raises; a thread runs on without its claim."""
        settings = self._trusted if claimed.trusted else self._untrusted
        return await execute(
            claimed.body,
            settings,
            channel,
            id=claimed.id,
            attempt=claimed.attempt,
            threads=self._threads,
            payload=_HINT,
        )
