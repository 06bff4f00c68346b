"""Heartbeats: they renew the leases of a worker's claims, and report the claims that are lost or to be cancelled.

They run on the portal's event loop and not on that of the bodies, so that a body that blocks its own loop does not cost the
worker its claims. One Beat renews all claims at once, every third of a lease; in between the keeper waits for cancellations.
"""

from __future__ import annotations

import logging
import math
import threading
from typing import TYPE_CHECKING, Literal

import anyio

from ..concurrency.loops import loop_token, run_sync_soon
from ..concurrency.portal import portal
from ..errors import LakeshoreError, NotAuthorized
from .auth_grace import AuthGrace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from anyio.abc import TaskGroup

    from .plane import Plane

__all__ = ["LeaseKeeper"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

LOCAL_CANCEL_WAIT = 2.0
"""Seconds of one wait for cancellations on a plane of this machine. Between two waits the keeper checks whether there are
claims to keep. Elsewhere each wait is a request, and lasts until the next heartbeat."""
MAX_RETRY_PAUSE = 1.0
"""Seconds before a heartbeat that failed is repeated; a tenth of the lease where that is less."""


class LeaseKeeper:
    """Renews the leases of one worker's claims."""

    def __init__(
        self,
        plane: Plane,
        worker: str,
        lease: float,
        on_event: Callable[[tuple[str, int], Literal["lost", "cancel"]], None],
    ) -> None:
        """
        Args:
            plane: Where the claims were made.
            worker: The name under which they were made.
            lease: Seconds for which each heartbeat renews them.
            on_event: Called with a claim, as (id, attempt), that is lost or to be cancelled; on the event loop on which the
                keeper was made.
        """
        self._plane = plane
        self._worker = worker
        self._lease = lease
        self._on_event = on_event
        self._home = loop_token()
        self._claims: set[tuple[str, int]] = set()
        self._cancelled: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._claim_added: anyio.Event | None = None  # while the keeper has no claims
        self._portal = portal()
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._rejected = anyio.Event()
        self._rejection = NotAuthorized("heartbeats are refused")

    def start(self, group: TaskGroup | None = None) -> None:
        """Begin, on the portal's loop.

        Args:
            group: A task group of the loop on which the keeper was made. NotAuthorized is raised in it when the plane has
                rejected heartbeats for the length of a lease: the claims have gone to others by then.
        """
        self._portal.start_task_soon(self._run)
        if group is not None:
            group.start_soon(self._raise_rejection)

    async def _raise_rejection(self) -> None:
        await self._rejected.wait()
        raise self._rejection

    def stop(self) -> None:
        """Renew no more; may be called from any thread."""
        try:
            self._portal.start_task_soon(self._cancel)
        except RuntimeError:
            pass  # the portal's loop has ended, and the heartbeats with it

    async def ended(self) -> None:
        """Wait, after `start` and `stop`, until the keeper no longer uses the plane, which may then be closed."""
        await self._ended.wait()

    def add(self, id: str, attempt: int) -> None:
        """Renew a claim from now on."""
        with self._lock:
            self._claims.add((id, attempt))
            claim_added = self._claim_added
            self._claim_added = None
        if claim_added is not None:
            self._portal.start_task_soon(_set, claim_added)

    def discard(self, id: str, attempt: int) -> None:
        """Renew a claim no more."""
        with self._lock:
            self._claims.discard((id, attempt))
            self._cancelled.discard((id, attempt))

    async def _run(self) -> None:
        try:
            with anyio.CancelScope() as self._scope:
                await self._keep()
        finally:
            run_sync_soon(self._home, self._ended.set)

    async def _cancel(self) -> None:
        if self._scope is not None:
            self._scope.cancel()

    async def _keep(self) -> None:
        renewed_at = anyio.current_time()
        grace = AuthGrace(self._lease)
        interval = self._lease / 3
        retry_pause = min(MAX_RETRY_PAUSE, self._lease / 10)
        while True:
            if await self._wait_for_claim():
                renewed_at = anyio.current_time()  # the claims are new
                grace.reset()  # and the plane that gave them accepts our credentials
            try:
                left = renewed_at + interval - anyio.current_time()
                wait = min(left, LOCAL_CANCEL_WAIT) if self._plane.local else min(left, self._lease)
                if wait > 0:
                    self._report(await self._plane.next_cancels(self._worker, wait, self._cancelled), "cancel")
                now = anyio.current_time()
                if now >= renewed_at + interval:
                    await self._beat()
                    renewed_at = now  # not after a failure, so that it is repeated soon
                grace.reset()
                continue
            except NotAuthorized as exc:
                if grace.since == math.inf:
                    logger.warning("the plane refuses the heartbeats of worker %s: %s", self._worker, exc)
                if grace.exceeded(exc):
                    self._rejection = exc
                    run_sync_soon(self._home, self._rejected.set)
            except LakeshoreError as exc:
                grace.reset()
                logger.warning("the plane does not answer heartbeats of worker %s: %s", self._worker, exc)
            except Exception:  # without heartbeats every claim would be lost, so that none may end the keeper
                logger.exception("a heartbeat of worker %s failed", self._worker)
            await anyio.sleep(retry_pause)

    async def _wait_for_claim(self) -> bool:
        """Wait until there is a claim to keep. Returns False where there was one already."""
        with self._lock:
            if self._claims:
                return False
            claim_added = self._claim_added = anyio.Event()
        await claim_added.wait()
        return True

    async def _beat(self) -> None:
        with self._lock:
            claims = tuple(self._claims)
        if not run_sync_soon(self._home, _nothing):  # the bodies' event loop has ended: others may have its claims
            with self._lock:
                self._claims.clear()
            return
        if claims:
            beaten = await self._plane.beat(self._worker, claims, self._lease)
            self._report([claim for claim in beaten.cancel if claim not in self._cancelled], "cancel")
            self._report(beaten.lost, "lost")

    def _report(self, claims: Collection[tuple[str, int]], event: Literal["lost", "cancel"]) -> None:
        for claim in claims:
            with self._lock:
                if claim not in self._claims:
                    continue
                if event == "cancel":
                    self._cancelled.add(claim)
                else:
                    self._claims.discard(claim)
            run_sync_soon(self._home, self._on_event, claim, event)


async def _set(event: anyio.Event) -> None:
    event.set()


def _nothing() -> None: ...
