"""Heartbeats: they keep a worker's claims, and bring word of those that are lost or to be cancelled.

They run on the portal's loop, not on that of the bodies: a body that blocks its own loop is not taken for dead. One
Beat, every third of a lease, renews all claims at once; in between the keeper waits for cancellations.
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
    from collections.abc import Callable

    from anyio.abc import TaskGroup

    from .plane import Plane

__all__ = ["LeaseKeeper"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

CANCEL_WAIT = 2.0
"""Seconds that one wait for a cancellation lasts at most on a plane of this machine: in between the keeper sees whether it
has claims at all. Elsewhere each wait is a request."""


class LeaseKeeper:
    """Keeps the leases of one worker's claims. `told(claim, what)` is called on the loop that made the keeper."""

    def __init__(
        self,
        plane: Plane,
        worker: str,
        lease: float,
        told: Callable[[tuple[str, int], Literal["lost", "cancel"]], None],
    ) -> None:
        self._plane, self._worker, self._lease, self._told = plane, worker, lease, told
        self._home = loop_token()
        self._claims: set[tuple[str, int]] = set()
        self._cancelled: set[tuple[str, int]] = set()
        self._lock = threading.Lock()
        self._parked: anyio.Event | None = None
        self._portal = portal()
        self._scope: anyio.CancelScope | None = None
        self._ended = anyio.Event()
        self._refused, self._refusal = anyio.Event(), NotAuthorized("heartbeats are refused")

    def start(self, group: TaskGroup | None = None) -> None:
        """Begin, on the portal's loop. In `group`, which is of the loop that made the keeper, NotAuthorized is raised when
        the plane has refused heartbeats for a lease: all that was held has gone to others by then."""
        self._portal.start_task_soon(self._run)
        if group is not None:
            group.start_soon(self._watch_refusals)

    async def _watch_refusals(self) -> None:
        await self._refused.wait()
        raise self._refusal

    def stop(self) -> None:
        """Renew no more; from any thread."""
        try:
            self._portal.start_task_soon(self._cancel)
        except RuntimeError:
            pass  # the portal's loop has ended, and what ran there with it

    async def ended(self) -> None:
        """Wait, after `start` and `stop`, until the plane is left alone: it may be closed then."""
        await self._ended.wait()

    def add(self, id: str, attempt: int) -> None:
        """Keep a claim from now on."""
        with self._lock:
            self._claims.add((id, attempt))
            parked, self._parked = self._parked, None
        if parked is not None:
            self._portal.start_task_soon(_set, parked)

    def discard(self, id: str, attempt: int) -> None:
        """Keep a claim no more."""
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
        beaten, refusals = anyio.current_time(), AuthGrace(self._lease)
        while True:
            if await self._park():
                beaten = anyio.current_time()  # the claims that woke it are fresh
                refusals.end()  # and so is who gave them
            try:
                wait = min(
                    beaten + self._lease / 3 - anyio.current_time(), CANCEL_WAIT if self._plane.local else self._lease
                )
                if wait > 0:
                    self._tell(await self._plane.next_cancels(self._worker, wait, self._cancelled), "cancel")
                if (now := anyio.current_time()) >= beaten + self._lease / 3:
                    await self._beat()
                    beaten = now  # one that failed is made again soon, for the lease runs on
                refusals.end()
            except NotAuthorized as exc:
                if refusals.since == math.inf:
                    logger.warning("the plane refuses the heartbeats of worker %s: %s", self._worker, exc)
                if refusals.lasted(exc):
                    self._refusal = exc
                    run_sync_soon(self._home, self._refused.set)
                await anyio.sleep(min(1.0, self._lease / 10))
            except LakeshoreError as exc:
                refusals.end()
                logger.warning("the plane does not answer heartbeats of worker %s: %s", self._worker, exc)
                await anyio.sleep(min(1.0, self._lease / 10))
            except Exception:  # whatever it is, without heartbeats every claim would go
                logger.exception("a heartbeat of worker %s failed", self._worker)
                await anyio.sleep(min(1.0, self._lease / 10))

    async def _park(self) -> bool:
        """With no claim to keep, sleep until one comes."""
        with self._lock:
            if self._claims:
                return False
            parked = self._parked = anyio.Event()
        await parked.wait()
        return True

    async def _beat(self) -> None:
        with self._lock:
            claims = tuple(self._claims)
        if not run_sync_soon(self._home, _nothing):  # the loop of the bodies is gone: others may have what it held
            with self._lock:
                self._claims.clear()
            return
        if claims:
            lost, cancel = await self._plane.beat(self._worker, claims, self._lease)
            self._tell([claim for claim in cancel if claim not in self._cancelled], "cancel")
            self._tell(lost, "lost")

    def _tell(self, claims: list[tuple[str, int]], what: Literal["lost", "cancel"]) -> None:
        for claim in claims:
            with self._lock:
                if claim not in self._claims:
                    continue
                (self._cancelled.add if what == "cancel" else self._claims.discard)(claim)
            run_sync_soon(self._home, self._told, claim, what)


async def _set(event: anyio.Event) -> None:
    event.set()


def _nothing() -> None: ...
