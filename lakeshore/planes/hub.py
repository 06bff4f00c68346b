"""Who waits for what in this process: topics, waiters, and the one watcher that serves them all."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import anyio

from ..concurrency.tasks import spawn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from .contract.news import Cursor, Kind, News
    from .contract.records import Outcome, Page

__all__ = ["Hub", "Waiter"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

T = TypeVar("T")

LINGER = 3.0
"""Seconds that the watcher stays, at least, after the last waiter has left: callers come in a row."""


class Waiter:
    """One wait, entered under one or more topics. What the news brought along: `outcome`, or the `page` after `cursor`."""

    __slots__ = ("cursor", "event", "outcome", "page")

    def __init__(self, cursor: Cursor | None = None) -> None:
        self.event = anyio.Event()
        self.cursor = cursor
        self.outcome: Outcome | None = None
        self.page: Page | None = None

    def receive(self, news: News) -> None:
        """Wake up, and keep what `news` brings."""
        _, _, outcome, page = news
        if outcome is not None:
            self.outcome = outcome
        elif page is not None and page[0] == self.cursor:
            self.page = page[1]
        self.event.set()


class Hub:
    """Wakes waiters by topic. `watch` runs while anybody waits: it learns what others did, and tells it here.

    A waiter enters its topics before it looks, so that no news falls between the look and the wait. News is a hint: a
    waiter woken in vain looks and waits again.
    """

    def __init__(self, watch: Callable[[], Awaitable[None]]) -> None:
        self._watch = watch
        self._waiters: dict[Kind, dict[str, list[Waiter]]] = {"queue": {}, "id": {}, "journal": {}, "claims": {}}
        self._changed: Callable[[], None] = lambda: None
        self._each = False
        self._entered = 0
        self.closed = self._again = False
        self._gone: anyio.Event | None = None  # while the watcher runs
        self._scope: anyio.CancelScope | None = None

    @property
    def waiting(self) -> bool:
        """Whether anybody waits for anything."""
        return any(self._waiters.values())

    # Interest

    def waits(self, kind: Kind) -> bool:
        return bool(self._waiters[kind])

    def names(self, kind: Kind) -> Sequence[str]:
        return list(self._waiters[kind])

    def cursors(self) -> Sequence[Cursor]:
        waiters = (waiter for waiting in self._waiters["journal"].values() for waiter in waiting)
        return [waiter.cursor for waiter in waiters if waiter.cursor is not None]

    def changed(self, notify: Callable[[], None], *, each: bool = False) -> None:
        self._changed, self._each = notify, each

    # Waiting

    def subscribe(self, topics: Iterable[tuple[Kind, str]], waiter: Waiter) -> None:
        """Wake `waiter` by news of any of `topics`, from now on."""
        self._entered += 1
        for kind, name in topics:
            named = self._waiters[kind]
            new = self._each or (name not in named and (kind == "queue" or not named))
            named.setdefault(name, []).append(waiter)
            if new:
                self._changed()
        if self._gone is None and not self.closed:
            self._start()

    def unsubscribe(self, topics: Iterable[tuple[Kind, str]], waiter: Waiter) -> None:
        """The end of `enter`."""
        for kind, name in topics:
            named = self._waiters[kind]
            waiting = named[name]
            waiting.remove(waiter)
            if not waiting:
                del named[name]
                if kind == "queue" or not named:
                    self._changed()

    async def until(
        self,
        topics: Sequence[tuple[Kind, str]],
        look: Callable[[], Awaitable[T | None]],
        *,
        timeout: float | None = None,
    ) -> T | None:
        """Look, and look again after each news of `topics`, until a look gives something; None after `timeout` seconds."""
        if timeout is not None and timeout <= 0:
            return await look()
        waiter = Waiter()
        self.subscribe(topics, waiter)
        try:
            with anyio.move_on_after(timeout):
                while (found := await look()) is None:
                    await waiter.event.wait()
                    waiter.event = anyio.Event()
                return found
            return None
        finally:
            self.unsubscribe(topics, waiter)

    def publish(self, news: News) -> None:
        """Wake those whom `news` concerns."""
        named, name = self._waiters[news.kind], news.name
        if name is None:
            for waiting in named.values():
                for waiter in waiting:
                    waiter.receive(news)
        elif (found := named.get(name)) is not None:
            for waiter in found:
                waiter.receive(news)

    # The watcher

    def _start(self) -> None:
        self._gone = anyio.Event()
        spawn(self._live, self._ended)

    async def _live(self) -> None:
        self._again = False
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep_watching)
                entered = -1
                while entered != self._entered or self.waiting:
                    entered = self._entered
                    await anyio.sleep(LINGER)
                group.cancel_scope.cancel()
        self._again = not self.closed  # not so when the event loop ended this task: then nothing may start

    async def _keep_watching(self) -> None:
        delay = 0.1
        while True:
            try:
                await self._watch()
            except Exception as exc:
                logger.warning("watching the plane failed, again in %.1f s: %s", delay, exc)
            await anyio.sleep(delay)
            delay = min(delay * 2, 10.0)

    def _ended(self) -> None:
        gone, self._gone, self._scope = self._gone, None, None
        if self._again and self.waiting:  # somebody entered while the watcher was on its way out
            self._start()
        if gone is not None:
            gone.set()

    def close(self) -> None:
        """End the watcher; waiters are woken and find the plane closed by their look."""
        self.closed = True
        if self._scope is not None:
            self._scope.cancel()
        for named in self._waiters.values():
            for waiting in named.values():
                for waiter in waiting:
                    waiter.event.set()

    async def ended(self) -> None:
        """Wait until the watcher has gone."""
        while self._gone is not None:
            await self._gone.wait()
