"""One wait for many things: the first end among several invocations, or the first frames of several journals."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

from ..errors import InvocationNotFound
from ..limits import LARGE_BYTES
from .contract.records import TERMINAL, Outcome, Page
from .hub import Waiter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .contract.news import Cursor, Kind, News
    from .engine import Engine

__all__ = ["AwaitMany", "await_many"]

IDS_PER_READ = 200
"""Invocations that one read asks for: their results may be large."""
MAX_ANSWER_BYTES = 16 << 20
"""Bytes of results and frames in one answer; something larger comes alone."""
SMALL_FIRST_SHARE = 0.75
"""The share of answers in which small outcomes are preferred to large ones."""


class AwaitMany(NamedTuple):
    """What there is of what was asked for. more: something was left out, since the answer would be too large."""

    outcomes: list[Outcome]
    pages: list[tuple[Cursor, Page]]
    more: bool


async def await_many(
    engine: Engine, ids: Sequence[str], cursors: Sequence[Cursor], *, timeout: float, linger: float = 0.0
) -> AwaitMany:
    """Wait until one of `ids` has ended, or there is something after one of `cursors`; then a little for more.

    Cancellation leaves the invocations alone.

    Args:
        engine: Of this event loop.
        ids: Invocations. One that is unknown has an outcome that says so, at once.
        cursors: Places in journals.
        timeout: Seconds. With 0 or less the pages come as they are, empty ones too.
        linger: Seconds to wait for more, once there is something.

    Raises:
        PlaneUnavailable: The plane was closed meanwhile, or a read failed.
    """
    wait = _Wait(engine, ids, cursors)
    topics: list[tuple[Kind, str]] = [("id", id) for id in wait.ids]
    topics.extend(("journal", id) for id in dict.fromkeys(cursor.id for cursor in cursors))
    if timeout <= 0:
        await wait.read(None, with_empty_pages=True)
        return wait.found()
    engine.hub.subscribe(topics, wait)
    try:
        await wait.read(None)
        wait.distrust_news()
        if not wait.has_any:
            await engine.hub.wait((), wait.accept_any, timeout, waiter=wait, look_first=False)
        if linger > 0 and wait.has_any and not wait.is_full:
            await engine.hub.wait((), wait.accept_all, linger, waiter=wait, look_first=False)
        return wait.found()
    finally:
        engine.hub.unsubscribe(topics, wait)


class _Wait(Waiter):
    """A waiter under many topics. It keeps the outcomes that the news brought, and the topics that news only named."""

    def __init__(self, engine: Engine, ids: Sequence[str], cursors: Sequence[Cursor]) -> None:
        super().__init__()
        self.ids = dict.fromkeys(ids)
        self._engine = engine
        self._cursors = list(dict.fromkeys(cursors))
        self._news_outcomes: list[Outcome] = []
        self._hints: set[tuple[Kind, str] | None] = set()
        self._outcomes: dict[str, Outcome] = {}
        self._pages: dict[Cursor, Page] = {}
        self._bytes = 0
        self._more = False

    def receive(self, news: News) -> None:
        if news.outcome is not None:
            self._news_outcomes.append(news.outcome)
        else:
            self._hints.add(None if news.name is None else (news.kind, news.name))
        self.event.set()

    def distrust_news(self) -> None:
        """Take the outcomes of the news so far for hints: they may be of earlier invocations of these ids."""
        self._hints.update(("id", outcome.id) for outcome in self._news_outcomes)
        self._news_outcomes = []

    @property
    def has_any(self) -> bool:
        return bool(self._outcomes or self._pages or self._more)

    @property
    def is_full(self) -> bool:
        """Whether there is nothing more to wait for, or no room for it."""
        return self._more or len(self._outcomes) + len(self._pages) >= len(self.ids) + len(self._cursors)

    async def accept_any(self) -> bool | None:
        await self._take_news()
        return self.has_any or None

    async def accept_all(self) -> bool | None:
        await self._take_news()
        return self.is_full or None

    async def _take_news(self) -> None:
        outcomes = self._news_outcomes
        hints = self._hints
        self._news_outcomes = []
        self._hints = set()
        for outcome in outcomes:
            if outcome.id in self.ids:
                self._keep(outcome)
        if hints:
            await self.read(None if None in hints else {hint for hint in hints if hint is not None})

    async def read(self, topics: Collection[tuple[Kind, str]] | None, *, with_empty_pages: bool = False) -> None:
        """Read how things stand, of `topics` or (None) of everything."""
        store = self._engine.store
        wanted = [id for id in self.ids if id not in self._outcomes and (topics is None or ("id", id) in topics)]
        for start in range(0, len(wanted), IDS_PER_READ):
            for outcome in await self._engine.read(store.outcomes, wanted[start : start + IDS_PER_READ]):
                if outcome.state in TERMINAL or outcome.state == "unknown":
                    self._keep(outcome)
        for cursor in self._cursors:
            if cursor in self._pages or (topics is not None and ("journal", cursor.id) not in topics):
                continue
            if self._bytes >= MAX_ANSWER_BYTES:
                self._more = True
                return
            try:
                page = await self._engine.page(*cursor)
            except InvocationNotFound:
                self._outcomes[cursor.id] = Outcome(cursor.id, "unknown")
                continue
            if page.frames or page.closed or with_empty_pages:
                self._pages[cursor] = page
                self._bytes += sum(len(data) for _, data in page.frames)

    def _keep(self, outcome: Outcome) -> None:
        size = _size(outcome)
        if self._outcomes and self._bytes + size > MAX_ANSWER_BYTES:
            self._more = True
            return
        self._outcomes[outcome.id] = outcome
        self._bytes += size

    def found(self) -> AwaitMany:
        """What there is, but small and large outcomes not in one answer: no small one waits for a large one's transfer.

        Mostly the small ones go first, since they are soon transferred; not always, or a steady flow of them would delay
        the large ones for ever.
        """
        outcomes = list(self._outcomes.values())
        pages = list(self._pages.items())
        small = [outcome for outcome in outcomes if _size(outcome) <= LARGE_BYTES]
        large = [outcome for outcome in outcomes if _size(outcome) > LARGE_BYTES]
        if not large or not (small or pages):
            return AwaitMany(outcomes, pages, self._more)
        if random.random() < SMALL_FIRST_SHARE:
            return AwaitMany(small, pages, True)
        return AwaitMany(large, [], True)


def _size(outcome: Outcome) -> int:
    return len(outcome.result or b"")
