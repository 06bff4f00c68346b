"""One claim while it runs: who may still decide its outcome, and how that gets to the plane."""

from __future__ import annotations

import logging
import random
import time
from typing import TYPE_CHECKING

import anyio

from ..body.execute import Done, Pace, describe, refused
from ..errors import (
    ClaimLost,
    DispatchError,
    EncodeError,
    InvocationNotFound,
    LakeshoreError,
    NotAuthorized,
    PlaneUnavailable,
)
from ..planes.auth_grace import Refusals
from ..planes.contract.failures import CANCELLED_RUNNING
from ..planes.contract.operations import Fence, Finish, Requeue
from ..planes.contract.records import Failure
from ..planes.protocol.errors import TooLarge
from .executor import LOST
from .frame_writer import FrameWriter, final_frame

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from anyio.abc import TaskGroup

    from ..planes.contract.operations import Claimed
    from ..planes.plane import Plane
    from .executor import StopReason
    from .settings import WorkerSettings

__all__ = ["ActiveClaim"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

_UNSAID = Done("failed", None, Failure("DispatchError", "what came of the body cannot be put into words"), True)
"""Said in place of an outcome that cannot be written down."""

GRACE_EXPIRED = Failure("Cancelled", "daemon shutdown grace expired")
"""The error of an invocation whose child was ended with its worker."""

FAILURES = 10
"""How often a far side may fail with an outcome, over a minute or so, before something is said in its place."""


class ActiveClaim:
    """A claim that occupies a slot, and the `Emit` of its body.

    Its outcome is decided once: by the body's end, or by an interruption. A body in a thread cannot be stopped, so an
    interruption decides at once, and the slot stays taken until the thread ends; any other body is cancelled first, and
    decides by how it ends.
    """

    function = "?"
    in_thread = False
    release_first: Sequence[Claimed] = ()
    """Claims to give back before the body starts."""
    spoiled = False
    """The body has cancelled its own task."""
    kill_at_shutdown = False

    def __init__(self, plane: Plane, worker: str, claimed: Claimed, group: TaskGroup) -> None:
        self.claimed, self.fence = claimed, Fence(claimed.id, worker, claimed.attempt)
        self.scope = anyio.CancelScope()
        self.started = time.monotonic()
        self.timeout_start: float | None = self.started
        self.stop_reason: StopReason | None = None
        self.decided = False
        self.early: anyio.Event | None = None
        """Where the outcome was decided before the body's end: set when it is delivered."""
        self.stuck = False
        """It was, and the body has not ended in the time that it got for that."""
        self._plane, self._group = plane, group
        self._writer: FrameWriter | None = None

    # What the body sees

    def begin(self) -> None:
        self._writer = FrameWriter(self._plane, self.fence, self.claimed, self._group)

    def add(self, value: Any) -> Pace:
        assert self._writer is not None
        return self._writer.add(value)

    def add_packed(self, data: bytes) -> Pace:
        assert self._writer is not None
        return self._writer.add_packed(data)

    async def room(self) -> None:
        assert self._writer is not None
        await self._writer.room()

    # What the worker does with it

    @property
    def stoppable(self) -> bool:
        """Whether an interruption still makes a difference."""
        return self.stop_reason is None and not self.decided

    def interrupt(self, reason: StopReason) -> anyio.Event | None:
        """Stop the body for `reason`. Where it cannot be stopped, the event to set after delivering without it."""
        if not self.stoppable:
            return None
        self.stop_reason = reason
        if self.in_thread and self._writer is not None:
            self._writer.stop(f"its body was stopped ({reason})")
        if self.in_thread and reason != "shutdown":
            self.decided, self.early = True, anyio.Event()
            return self.early
        self.scope.cancel()
        return None

    def repeatable(self, done: Done) -> bool:
        """Whether it does no harm to say this outcome twice: then saying it needs no shield, which would cost more."""
        return done.state == "succeeded" and self._writer is None

    async def deliver(self, done: Done | None, terms: WorkerSettings) -> str | None:
        """Say to the plane what came of it, for as long as that takes; the state that it has now, None when lost.

        done: what the body gave, None when it was stopped.
        """
        delay, failures, refusals = 0.1, 0, Refusals(terms.lease)
        while True:
            try:
                return await self._deliver(done, terms)
            except (ClaimLost, InvocationNotFound) as exc:
                logger.warning("%s", exc)
                return None
            except PlaneUnavailable as exc:
                refusals.end()
                logger.warning("the outcome of %s is kept until the plane is back: %s", self.claimed.id, exc)
            except Exception as exc:
                failures += 1
                lasted = refusals.lasted(exc)
                if self._may_pass(exc) and not (lasted if isinstance(exc, NotAuthorized) else failures >= FAILURES):
                    logger.warning("the outcome of %s is kept, the plane fails with: %s", self.claimed.id, exc)
                    await anyio.sleep(delay * random.uniform(0.5, 1.5))
                    delay = min(delay * 2, 10.0)
                    continue
                instead = _instead(done, exc)
                if instead is None:
                    logger.error("the outcome of %s cannot be delivered: %s", self.claimed.id, describe(exc).message)
                    return None
                done = instead
            await anyio.sleep(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, 10.0)

    def _may_pass(self, exc: Exception) -> bool:
        """Whether a far side may have failed for a reason that is not in what it was told."""
        return not self._plane.local and isinstance(exc, DispatchError) and not isinstance(exc, TooLarge)

    async def _deliver(self, done: Done | None, terms: WorkerSettings) -> str:
        if self._writer is not None:
            await self._writer.drain()
            error = self._writer.error
            if error is not None and self.in_thread and self.stop_reason is not None:
                done = None  # what it had still to write is gone, so it has not succeeded whatever it says
            elif isinstance(error, (ClaimLost, InvocationNotFound)):
                raise error
            elif error is not None:
                done = refused(error)
        op = self._operation(done, terms)
        answer = await self._plane.do(op)
        return op.state if isinstance(op, Finish) else str(answer.state)

    def _operation(self, done: Done | None, terms: WorkerSettings) -> Finish | Requeue:
        stopped = done is None or done.state != "succeeded"
        if self.stop_reason == "timeout":
            error = Failure("TimeoutError", f"the body ran longer than this worker's timeout of {terms.timeout} s")
            return self._finish("timeout", None, error)
        if self.stop_reason == "cancel" and stopped:
            return self._finish("killed", None, CANCELLED_RUNNING)
        if self.stop_reason == "shutdown" and stopped and self.kill_at_shutdown:
            return self._finish("killed", None, GRACE_EXPIRED)
        if done is None or (self.stop_reason == "shutdown" and stopped):
            return Requeue(self.fence)
        again = self.claimed.failures < terms.retries
        if done.state == LOST:
            again = again or self.claimed.failures + self.claimed.lost + 1 < terms.max_lost
            done = done._replace(state="failed")
        if done.error is not None and not done.final and again:
            return Requeue(self.fence, "retry", _backoff(self.claimed.failures), done.error)
        return self._finish(done.state, done.result, done.error)

    def _finish(self, state: str, result: bytes | None, error: Failure | None) -> Finish:
        final = None
        if self._writer is not None or error is not None:
            seq = self.claimed.next_seq if self._writer is None else self._writer.flushed
            final = final_frame(seq, error, state)
        return Finish(self.fence, state, result, error, final)


def _instead(done: Done | None, exc: Exception) -> Done | None:
    """What to say where `done` could not be said; None where nothing is left that would be worth saying."""
    if done is _UNSAID:
        return None
    if isinstance(exc, EncodeError) or not isinstance(exc, LakeshoreError):
        return _UNSAID
    if done is None or done.result is None:
        return None
    return refused(
        DispatchError(
            f"the plane does not take a result of {len(done.result)} bytes: {exc}; "
            "return less, or write it to a file and return its key"
        )
    )


def _backoff(failures: int) -> float:
    """Seconds before the next attempt: from half a second on, doubled by each failure up to a minute, with jitter."""
    return min(0.5 * 2.0 ** min(failures, 10), 60.0) * random.uniform(0.75, 1.25)
