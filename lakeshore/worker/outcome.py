"""A claim while its body runs, and the delivery of its outcome to the plane."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import anyio

from ..body.execute import Backpressure, BodyOutcome, describe_exception, failed_permanently
from ..concurrency.backoff import Backoff
from ..errors import (
    ClaimLost,
    DispatchError,
    EncodeError,
    InvocationNotFound,
    LakeshoreError,
    NotAuthorized,
    PlaneUnavailable,
)
from ..planes.auth_grace import AuthGrace
from ..planes.contract.failures import CANCELLED_RUNNING
from ..planes.contract.operations import Fence, Finish, Requeue
from ..planes.contract.records import Failure
from ..planes.protocol.errors import TooLarge
from .executor import LOST
from .frame_writer import FrameWriter, final_frame
from .retry import retry_delay
from .shutdown import GRACE_EXPIRED
from .timeouts import timeout_failure

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from typing import Any

    from anyio.abc import TaskGroup

    from ..planes.contract.operations import Claimed
    from ..planes.plane import Plane
    from .executor import StopReason
    from .settings import WorkerSettings

__all__ = ["ActiveClaim"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

FIRST_DELIVERY_DELAY = 0.1
MAX_DELIVERY_DELAY = 10.0
"""Seconds between two attempts to deliver an outcome."""
MAX_DELIVERY_FAILURES = 10
"""How often a plane elsewhere may fail with an outcome, over a minute or so, before another outcome replaces it."""

_NOT_ENCODABLE = BodyOutcome(
    "failed", None, Failure("DispatchError", "the outcome of the body cannot be encoded"), True
)
"""Replaces an outcome that cannot be encoded."""


class ActiveClaim:
    """A claim that occupies a slot. For its executor it is the `BodyChannel`.

    Its outcome is decided once: by the end of the body, or by an interruption. A body in a thread cannot be stopped.
    Therefore its interruption decides at once, and the slot stays occupied until the thread ends. Any other body is
    cancelled, and the way it ends decides.
    """

    function = "?"
    in_thread = False
    kill_at_shutdown = False
    release_first: Sequence[Claimed] = ()
    """Claims to return to their queues before the body starts."""
    streams = False
    """The body is a generator that has begun."""
    task_spoiled = False
    """The task of the body has been cancelled, and can run no other body."""

    def __init__(self, plane: Plane, worker: str, claimed: Claimed, group: TaskGroup) -> None:
        self.claimed = claimed
        self.fence = Fence(claimed.id, worker, claimed.attempt)
        self.scope = anyio.CancelScope()
        self.started = time.monotonic()
        self.timeout_start: float | None = self.started
        self.stop_reason: StopReason | None = None
        self.decided = False
        self.delivered_early: anyio.Event | None = None
        """Set once the outcome is delivered, if that was decided before the body's end."""
        self.stuck = False
        """The outcome was decided early, and the body has not ended within the setting `grace`."""
        self._plane = plane
        self._group = group
        self._writer: FrameWriter | None = None
        # Those of the stream's writer, from `begin` on.
        self.add: Callable[[Any], Backpressure]
        self.add_packed: Callable[[bytes], Backpressure]
        self.room: Callable[[], Coroutine[Any, Any, None]]

    # --- for the body ---

    def begin(self) -> None:
        """Open the stream. From now on values go straight to its writer: each layer between costs a call a value."""
        writer = FrameWriter(self._plane, self.fence, self.claimed, self._group)
        self._writer = writer
        self.streams = True
        self.add = writer.add
        self.add_packed = writer.add_packed
        self.room = writer.room

    # --- for the worker ---

    @property
    def stoppable(self) -> bool:
        """Whether an interruption still makes a difference."""
        return self.stop_reason is None and not self.decided

    def interrupt(self, reason: StopReason) -> anyio.Event | None:
        """Stop the body.

        Returns:
            None, or for a body in a thread, which cannot be stopped, `delivered_early`: the caller delivers the outcome
            now, and then sets this event.
        """
        if not self.stoppable:
            return None
        self.stop_reason = reason
        if self.in_thread and self._writer is not None:
            self._writer.stop(f"its body was stopped ({reason})")
        if self.in_thread and reason != "shutdown":
            self.decided = True
            self.delivered_early = anyio.Event()
            return self.delivered_early
        self.scope.cancel()
        return None

    async def deliver(self, outcome: BodyOutcome | None, settings: WorkerSettings) -> str | None:
        """Deliver the outcome to the plane, for as long as that takes, and log it.

        Args:
            outcome: What the executor returned; None if the body was stopped.
            settings: The settings of the worker.

        Returns:
            The state of the invocation now; None if the claim was lost or nothing could be delivered.
        """
        retry: _DeliveryRetry | None = None
        while True:
            try:
                state = await self._deliver_once(outcome, settings)
            except (ClaimLost, InvocationNotFound) as exc:
                logger.warning("%s", exc)
                return None
            except Exception as exc:
                if retry is None:
                    retry = _DeliveryRetry(self.claimed.id, self._plane, settings.lease)
                if not retry.repeats(exc):
                    replacement = _replacement(outcome, exc)
                    if replacement is None:
                        logger.error(
                            "the outcome of %s cannot be delivered: %s",
                            self.claimed.id,
                            describe_exception(exc).message,
                        )
                        return None
                    outcome = replacement
            else:
                if logger.isEnabledFor(logging.INFO):
                    error = "" if outcome is None or outcome.error is None else f", {outcome.error.type}"
                    seconds = time.monotonic() - self.started
                    logger.info("%s %s %s %.3f s%s", self.claimed.id, self.function, state, seconds, error)
                return state
            await retry.pause()

    async def _deliver_once(self, outcome: BodyOutcome | None, settings: WorkerSettings) -> str:
        if self._writer is not None:
            await self._writer.drain()
            error = self._writer.error
            if error is not None and self.in_thread and self.stop_reason is not None:
                outcome = None  # values are missing, so the body has not succeeded, whatever it returned
            elif isinstance(error, (ClaimLost, InvocationNotFound)):
                raise error
            elif error is not None:
                outcome = failed_permanently(error)
        op = self._operation(outcome, settings)
        if isinstance(op, Requeue):
            return (await self._plane.do(op)).state
        await self._plane.do(op)
        return op.state

    def _operation(self, outcome: BodyOutcome | None, settings: WorkerSettings) -> Finish | Requeue:
        """Return the operation that ends this attempt: the end of the invocation, its retry, or its release."""
        if self.stop_reason == "timeout":
            return self._finish("timeout", None, timeout_failure(settings.timeout))
        if outcome is None or outcome.state != "succeeded":
            if self.stop_reason == "cancel":
                return self._finish("killed", None, CANCELLED_RUNNING)
            if self.stop_reason == "shutdown":
                if self.kill_at_shutdown:
                    return self._finish("killed", None, GRACE_EXPIRED)
                return Requeue(self.fence)
        if outcome is None:
            return Requeue(self.fence)
        if outcome.error is not None:
            delay = retry_delay(self.claimed, outcome, settings)
            if delay is not None:
                return Requeue(self.fence, "retry", delay, outcome.error)
        state = "failed" if outcome.state == LOST else outcome.state
        return self._finish(state, outcome.result, outcome.error)

    def _finish(self, state: str, result: bytes | None, error: Failure | None) -> Finish:
        final = None
        if self._writer is not None:
            final = final_frame(self._writer.flushed, error, state)
        elif error is not None:
            final = final_frame(self.claimed.next_seq, error, state)
        return Finish(self.fence, state, result, error, final)


class _DeliveryRetry:
    """Decides what happens after an outcome could not be delivered, and the pause before the next attempt."""

    def __init__(self, id: str, plane: Plane, lease: float) -> None:
        self._id = id
        self._local = plane.local
        self._failures = 0
        self._auth_grace = AuthGrace(lease)
        self._backoff = Backoff(FIRST_DELIVERY_DELAY, MAX_DELIVERY_DELAY)

    def repeats(self, exc: Exception) -> bool:
        """Return whether the same outcome should be delivered again after `exc`."""
        if isinstance(exc, PlaneUnavailable):
            self._auth_grace.reset()
            logger.warning("the outcome of %s is kept until the plane is back: %s", self._id, exc)
            return True
        self._failures += 1
        too_long = self._auth_grace.exceeded(exc)
        if not isinstance(exc, NotAuthorized):
            too_long = self._failures >= MAX_DELIVERY_FAILURES
        if too_long or self._local or isinstance(exc, TooLarge) or not isinstance(exc, DispatchError):
            return False
        logger.warning("the outcome of %s is kept, the plane fails with: %s", self._id, exc)
        return True

    async def pause(self) -> None:
        await self._backoff.pause()


def _replacement(outcome: BodyOutcome | None, exc: Exception) -> BodyOutcome | None:
    """Return what to deliver in place of an outcome that the plane does not take; None if nothing is left."""
    if outcome is _NOT_ENCODABLE:
        return None
    if isinstance(exc, EncodeError) or not isinstance(exc, LakeshoreError):
        return _NOT_ENCODABLE
    if outcome is None or outcome.result is None:
        return None
    return failed_permanently(
        DispatchError(
            f"the plane does not take a result of {len(outcome.result)} bytes: {exc}; "
            "return less, or write it to a file and return its key"
        )
    )
