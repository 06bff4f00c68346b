"""How a worker ends: it drains, then it stops what still runs and returns the claims.

1. Draining begins with the worker's `stop`, which the command line sets at the first signal. The worker claims nothing
   more; running bodies get the setting `grace`.
2. After that, or when the worker is cancelled, as the command line does at the second signal, bodies are stopped and their
   invocations go back to their queues. Everything that is still to be delivered has `SHUTDOWN_TIMEOUT`.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.lowlevel import checkpoint

from ..body.execute import describe_exception
from ..planes.contract.operations import Fence, Requeue
from ..planes.contract.records import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from ..planes.contract.operations import Claimed
    from ..planes.plane import Plane

__all__ = ["GRACE_EXPIRED", "SHUTDOWN_TIMEOUT", "Shutdown"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

SHUTDOWN_TIMEOUT = 5.0
"""Seconds that a worker which stops has, at most, to deliver outcomes and to return its claims."""
GRACE_EXPIRED = Failure("Cancelled", "daemon shutdown grace expired")
"""The error of an invocation that is killed, and not returned to its queue, by the shutdown of its worker."""
STOP_POLL_INTERVAL = 0.25
"""Seconds between two calls of a `stop` that is a function."""


class Shutdown:
    """The end of one worker.

    `claiming` is the cancel scope of the claim loop, which draining cancels. `begun` is True once bodies are stopped.
    """

    def __init__(self, plane: Plane, worker: str) -> None:
        self.claiming = anyio.CancelScope()
        self.begun = False
        self._plane = plane
        self._worker = worker
        self._unfinished: set[anyio.CancelScope] = set()

    async def drain_when(self, stop: anyio.Event | Callable[[], bool]) -> None:
        """Wait for `stop`, then end the claiming."""
        if isinstance(stop, anyio.Event):
            await stop.wait()
        else:
            while not stop():  # noqa: ASYNC110 -- a plain function cannot wake this task
                await anyio.sleep(STOP_POLL_INTERVAL)
        self.claiming.cancel()

    def begin(self) -> None:
        """Limit everything inside `finishing` to `SHUTDOWN_TIMEOUT` from now on."""
        self.begun = True
        for scope in self._unfinished:
            scope.deadline = anyio.current_time() + SHUTDOWN_TIMEOUT

    @contextmanager
    def finishing(self, what: str) -> Generator[None]:
        """Protect the code inside from the worker's cancellation. During a shutdown its time is limited.

        Args:
            what: What the code inside does, for the log line if it does not come to its end.
        """
        with anyio.CancelScope(shield=True) as scope:
            if self.begun:
                scope.deadline = anyio.current_time() + SHUTDOWN_TIMEOUT
            self._unfinished.add(scope)
            try:
                yield
            finally:
                self._unfinished.discard(scope)
        if scope.cancelled_caught:
            logger.warning(
                "worker %s left before it could %s: another worker will, after its lease", self._worker, what
            )

    async def release(self, claims: Iterable[Claimed]) -> None:
        """Return claims that were not started to their queues. On failure, they return at the end of their lease."""
        requeues = [Requeue(Fence(one.id, self._worker, one.attempt)) for one in claims]
        with self.finishing("return the claims that it had not started"):
            try:
                answers = await self._plane.many(requeues)
            except Exception as exc:
                answers = [exc]
            for answer in answers:
                if isinstance(answer, Exception):
                    logger.warning(
                        "a claim that was not started could not be returned to its queue: %s",
                        describe_exception(answer).message,
                    )

    async def cancelled_from_outside(self) -> bool:
        """Return whether the cancellation that this task has just received is not the body's own doing.

        On asyncio a body can cancel the task that it runs in. The cancellation of an anyio scope shows at once. asyncio's
        own cancellation of all tasks at the end of a loop reaches the worker, too, within a few passes of the loop.
        """
        if anyio.current_effective_deadline() == -math.inf:
            return True
        with anyio.CancelScope(shield=True):
            for _ in range(10):
                await checkpoint()
        return self.begun
