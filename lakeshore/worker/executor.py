"""What the worker loop needs from an executor, and what an executor may use of the claim whose body it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from ..body.execute import Backpressure, BodyOutcome, ValueSink

if TYPE_CHECKING:
    from ..planes.contract.operations import Claimed

__all__ = ["LOST", "BodyChannel", "Executor", "StopReason"]

LOST = "lost"
"""The state of an outcome whose body was lost together with its machine or container.

The body itself has not failed. Therefore such an attempt is counted as a failure but is repeated, whatever `retries` is,
until the invocation has been lost `max_lost` times.
"""

StopReason: TypeAlias = Literal["cancel", "timeout", "lost", "shutdown"]
"""Why a running body is stopped."""


class BodyChannel(ValueSink, Protocol):
    """The connection between an executor and the claim that it runs: values, the clock of the timeout, the stop reason."""

    kill_at_shutdown: bool
    """Set by the executor. If the body is stopped by a worker shutdown, True ends the invocation as `killed`; False
    returns it to its queue."""
    timeout_start: float | None
    """The time (`time.monotonic`) from which the worker's timeout counts. It begins as the time of the claim. An executor
    sets None while the body waits for its start."""

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the body is being stopped; None while nothing has asked for that."""
        ...

    def add_packed(self, data: bytes, /) -> Backpressure:
        """Take a value that is packed already; otherwise like `add`."""
        ...


class Executor(Protocol):
    """Runs bodies: in this process, or each in a child process."""

    paused_until: float
    """The worker claims nothing before this time (`time.monotonic`)."""

    async def run(self, claimed: Claimed, channel: BodyChannel) -> BodyOutcome:
        """Run the body of `claimed` and return its outcome.

        When cancelled, it stops the body first and raises after that.
        """
        ...
