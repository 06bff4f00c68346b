"""The waits of one event loop: who waits for which topic, and the one task that watches the store for all of them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeVar

import anyio

from ..concurrency.backoff import Backoff
from ..concurrency.tasks import spawn
from ..errors import PlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

    from .contract.news import Cursor, Kind, News
    from .contract.records import Outcome, Page

__all__ = ["Hub", "Waiter"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

T = TypeVar("T")

WATCHER_IDLE_TIME = 3.0
"""Seconds that the watcher runs on, at least, after the last wait has ended: waits often follow each other."""
FIRST_WATCH_PAUSE = 0.1
LONGEST_WATCH_PAUSE = 10.0
"""Seconds before a watch that failed is started again: the first and the longest."""


class Waiter:
    """One wait, subscribed under one or more topics, and what the news has brought: an `outcome`, or the `page` after
    `cursor`."""

    __slots__ = ("cursor", "event", "outcome", "page")

    def __init__(self, cursor: Cursor | None = None) -> None:
        self.event = anyio.Event()
        self.cursor = cursor
        self.outcome: Outcome | None = None
        self.page: Page | None = None

    def receive(self, news: News) -> None:
        """Keep what `news` brings, and wake up."""
        if news.outcome is not None:
            self.outcome = news.outcome
        elif news.page is not None and news.page[0] == self.cursor:
            self.page = news.page[1]
        self.event.set()


class Hub:
    """Wakes waiters by topic, which is a kind and a name. It is the `Interest` that a store's `watch` is given.

    `watch` runs in a task of the event loop while there are waiters. It reports what other processes change through
    `publish`, as the engine does for its own operations. News is a hint: a waiter that was woken reads the state, and waits
    again where there is nothing for it.
    """

    def __init__(self, watch: Callable[[], Awaitable[None]], plane: str = "the plane") -> None:
        """
        Args:
            watch: Watches the store until it is cancelled; started again when it fails.
            plane: The plane's name in errors.
        """
        self._watch = watch
        self._plane = plane
        self._waiters: dict[Kind, dict[str, list[Waiter]]] = {"queue": {}, "id": {}, "journal": {}, "claims": {}}
        self.waiting = 0
        """How many topics are waited for, each as often as it has waiters."""
        self._on_change: Callable[[], None] = _nothing
        self._on_each_name = False
        self._subscriptions = 0  # ever made
        self.closed = False
        self._restart = False
        self._watcher_ended: anyio.Event | None = None  # while the watcher runs
        self._scope: anyio.CancelScope | None = None

    # --- the interest of a store's watch ---

    def waits(self, kind: Kind) -> bool:
        return bool(self._waiters[kind])

    def names(self, kind: Kind) -> Sequence[str]:
        return list(self._waiters[kind])

    def cursors(self) -> Sequence[Cursor]:
        waiters = (waiter for waiting in self._waiters["journal"].values() for waiter in waiting)
        return [waiter.cursor for waiter in waiters if waiter.cursor is not None]

    def changed(self, notify: Callable[[], None], *, each: bool = False) -> None:
        self._on_change = notify
        self._on_each_name = each

    # --- waiting ---

    async def wait(
        self,
        topics: Sequence[tuple[Kind, str]],
        accept: Callable[[], Awaitable[T | None]],
        timeout: float | None = None,
        *,
        waiter: Waiter | None = None,
        look_first: bool = True,
    ) -> T | None:
        """Call `accept`, and again after each news of `topics`, until it returns something: the waiting loop of all verbs.

        The waiter subscribes before the first look, so that no news is lost between the look and the wait.

        Args:
            topics: What to wait for; empty where `waiter` is subscribed already, and stays so.
            accept: Returns what is waited for, or None to wait on.
            timeout: Seconds; None for no limit. With 0 or less `accept` is called once.
            waiter: Receives the news, for an `accept` that uses what the news brings.
            look_first: Whether `accept` is called before the first news.

        Returns:
            What `accept` returned; None after the timeout.

        Raises:
            PlaneUnavailable: The plane was closed.
        """
        waiter = waiter or Waiter()
        if timeout is not None:
            if timeout <= 0:
                self.check_open()
                return await accept() if look_first else None
            with anyio.move_on_after(timeout):
                return await self.wait(topics, accept, waiter=waiter, look_first=look_first)
            return None
        self.subscribe(topics, waiter)
        try:
            while True:
                if not look_first and not self.closed:
                    await waiter.event.wait()
                if self.closed:
                    self.check_open()
                look_first = False
                if waiter.event.is_set():
                    waiter.event = anyio.Event()
                found = await accept()
                if found is not None:
                    return found
        finally:
            self.unsubscribe(topics, waiter)

    def check_open(self) -> None:
        """Raise PlaneUnavailable when the plane was closed: reading from it would open it again."""
        if self.closed:
            raise PlaneUnavailable(f"{self._plane} was closed during a wait")

    def subscribe(self, topics: Iterable[tuple[Kind, str]], waiter: Waiter) -> None:
        """Wake `waiter` by news of any of `topics` from now on."""
        self._subscriptions += 1
        for kind, name in topics:
            named = self._waiters[kind]
            is_new = self._on_each_name or (name not in named and (kind == "queue" or not named))
            named.setdefault(name, []).append(waiter)
            self.waiting += 1
            if is_new:
                self._on_change()
        if self._watcher_ended is None and not self.closed:
            self._start()

    def unsubscribe(self, topics: Iterable[tuple[Kind, str]], waiter: Waiter) -> None:
        """Undo `subscribe`."""
        for kind, name in topics:
            named = self._waiters[kind]
            waiting = named[name]
            waiting.remove(waiter)
            self.waiting -= 1
            if not waiting:
                del named[name]
                if kind == "queue" or not named:
                    self._on_change()

    def publish(self, news: News) -> None:
        """Wake the waiters that `news` concerns."""
        named = self._waiters[news.kind]
        if news.name is None:
            for waiting in named.values():
                for waiter in waiting:
                    waiter.receive(news)
        elif (found := named.get(news.name)) is not None:
            for waiter in found:
                waiter.receive(news)

    # --- the watcher ---

    def _start(self) -> None:
        self._watcher_ended = anyio.Event()
        spawn(self._run_watcher, self._on_watcher_end)

    async def _run_watcher(self) -> None:
        """Watch until nobody has waited for a while."""
        self._restart = False
        with anyio.CancelScope() as self._scope:
            async with anyio.create_task_group() as group:
                group.start_soon(self._keep_watching)
                seen = -1
                while seen != self._subscriptions or self.waiting:
                    seen = self._subscriptions
                    await anyio.sleep(WATCHER_IDLE_TIME)
                group.cancel_scope.cancel()
        self._restart = not self.closed  # stays False where the event loop ended this task: no task may start then

    async def _keep_watching(self) -> None:
        backoff = Backoff(FIRST_WATCH_PAUSE, LONGEST_WATCH_PAUSE, jitter=0.0)
        while True:
            try:
                await self._watch()
            except Exception as exc:
                delay = backoff.delay_after(backoff.failures)
                logger.warning("watching the plane failed, retrying in %.1f s: %s", delay, exc)
            await backoff.pause()

    def _on_watcher_end(self) -> None:
        ended = self._watcher_ended
        self._watcher_ended = None
        self._scope = None
        if self._restart and self.waiting:  # a wait began while the watcher was ending
            self._start()
        if ended is not None:
            ended.set()

    def close(self) -> None:
        """End the watcher and wake all waiters, which then raise PlaneUnavailable."""
        self.closed = True
        if self._scope is not None:
            self._scope.cancel()
        for named in self._waiters.values():
            for waiting in named.values():
                for waiter in waiting:
                    waiter.event.set()

    async def ended(self) -> None:
        """Wait until the watcher has ended."""
        while self._watcher_ended is not None:
            await self._watcher_ended.wait()


def _nothing() -> None: ...
