"""The executor of this process: async bodies as tasks, the others in threads of the worker's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

from ..body.execute import Done, Emit, Site, invoke

if TYPE_CHECKING:
    from ..planes.contract.operations import Claimed

__all__ = ["InlineExecutor"]

_PLAIN = (
    "; it was submitted as a plain value, for those who claim by hand: "
    "submit a function, or `dls.thunk(fn, ...)`, for a worker to run"
)


class InlineExecutor:
    """Runs bodies here: `concurrency` of them in threads at once, a bound of its own in place of anyio's for all."""

    paused_until = 0.0

    def __init__(self, trusted: Site, untrusted: Site, concurrency: int) -> None:
        self._trusted, self._untrusted = trusted, untrusted
        self._threads = anyio.CapacityLimiter(concurrency)

    async def run(self, claimed: Claimed, channel: Emit) -> Done:
        """Run the body. Cancelled, an async body has ended when this raises; a thread goes on without its claim."""
        site = self._trusted if claimed.trusted else self._untrusted
        return await invoke(
            claimed.body, site, channel, id=claimed.id, attempt=claimed.attempt, threads=self._threads, payload=_PLAIN
        )
