"""The claims of one worker, one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import anyio

from .contract.operations import Beat, Claim, Claimed
from .hub import Waiter

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .contract.news import Kind
    from .hub import Hub
    from .plane import Plane

__all__ = ["Claimer", "LocalClaimer"]


class Claimer(Protocol):
    """Claims for one worker again and again."""

    async def try_claim(self, limit: int) -> list[Claimed]:
        """Take up to `limit` invocations that are due now."""
        ...

    async def claim(self, limit: int, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        """Take up to `limit` due invocations, waiting for the first as long as it takes.

        Args:
            limit: At least 1.
            keep: The claims of the worker, as (id, attempt). After a long wait they are renewed first, or the worker might
                be given one of them again: its process, or the network, may have been suspended meanwhile.
        """
        ...

    def stop_waiting(self) -> None:
        """Take no more notice of news until the next claim: what is submitted meanwhile is left to other workers."""
        ...


class LocalClaimer:
    """A Claimer that stays subscribed to its queues between two claims.

    After a claim that found fewer invocations than it might have taken, the queues are empty but for what the news
    reports: the next claim waits for news first.
    """

    def __init__(self, plane: Plane, op: Claim) -> None:
        self._plane = plane
        self._op = op
        self._topics: list[tuple[Kind, str]] = [("queue", queue) for queue in op.queues]
        self._waiter = Waiter()
        self._hub: Hub | None = None
        self._emptied = False

    async def try_claim(self, limit: int) -> list[Claimed]:
        return await self._plane.do(self._op._replace(limit=limit))

    async def claim(self, limit: int, keep: Sequence[tuple[str, int]] = ()) -> list[Claimed]:
        op = self._op._replace(limit=limit)
        renewal = None if op.lease is None or not keep else Beat(op.worker, tuple(keep), op.lease)
        engine = await self._plane.engine()
        if engine.hub is not self._hub:
            self.stop_waiting()
            engine.hub.subscribe(self._topics, self._waiter)
            self._hub = engine.hub
        waiting_since = anyio.current_time()

        async def accept() -> list[Claimed] | None:
            nonlocal waiting_since
            self._emptied = False
            if renewal is not None and anyio.current_time() - waiting_since > renewal.lease / 2:
                await self._plane.do(renewal)
            found = await self._plane.do(op)
            self._emptied = len(found) < limit
            waiting_since = anyio.current_time()
            return found or None

        found = await engine.hub.wait((), accept, waiter=self._waiter, look_first=not self._emptied)
        return found or []

    def stop_waiting(self) -> None:
        self._emptied = False
        hub = self._hub
        self._hub = None
        if hub is not None:
            hub.unsubscribe(self._topics, self._waiter)
