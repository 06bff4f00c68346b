"""One wait for many things: whichever of several invocations ends first, whichever of several journals grows."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

import anyio

from ..errors import InvocationNotFound, PlaneUnavailable
from ..limits import LARGE_BYTES
from .contract.records import TERMINAL, Outcome, Page
from .hub import Waiter

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from .contract.news import Cursor, Kind, News
    from .engine import Engine

__all__ = ["AwaitMany", "await_many"]

SLICE = 200
"""Invocations that are looked up at a time: their results may be large."""
MAX_BYTES = 16 << 20
"""How many bytes of results and frames one answer gathers; a larger one comes alone."""


SMALL_FIRST = 0.75
"""How often those go first."""


class AwaitMany(NamedTuple):
    """What there is, of what was asked for. more: something was left out, for the answer's size."""

    outcomes: list[Outcome]
    pages: list[tuple[Cursor, Page]]
    more: bool


async def await_many(
    engine: Engine, ids: Sequence[str], cursors: Sequence[Cursor], *, timeout: float, linger: float = 0.0
) -> AwaitMany:
    """Wait up to `timeout` seconds until one of `ids` has ended, or there is something after one of `cursors`.

    Then wait up to `linger` seconds for more. An id that is unknown has an outcome that says so, at once. With a
    `timeout` of 0 the pages come as they are, empty ones too. Cancellation leaves everything alone.
    """
    wait = _Wait(engine, ids, cursors)
    topics: list[tuple[Kind, str]] = [("id", id) for id in wait.ids]
    topics.extend(("journal", id) for id in dict.fromkeys(cursor.id for cursor in cursors))
    if timeout <= 0:
        await wait.look(None, empty=True)
        return wait.found()
    engine.hub.subscribe(topics, wait)
    try:
        await wait.look(None)
        wait.doubt()
        with anyio.move_on_after(timeout):
            while not wait.any:
                await wait.news()
        if linger > 0 and wait.any:
            with anyio.move_on_after(linger):
                while wait.left:
                    await wait.news()
        return wait.found()
    finally:
        engine.hub.unsubscribe(topics, wait)


class _Wait(Waiter):
    """A waiter under many topics: it keeps what the news brought, and what it only hinted at."""

    def __init__(self, engine: Engine, ids: Sequence[str], cursors: Sequence[Cursor]) -> None:
        super().__init__()
        self.hints: set[tuple[Kind, str] | None] = set()
        self.told: list[Outcome] = []
        self.ids = dict.fromkeys(ids)
        self._engine, self._cursors = engine, list(dict.fromkeys(cursors))
        self._outcomes: dict[str, Outcome] = {}
        self._pages: dict[Cursor, Page] = {}
        self._size, self._more = 0, False

    def receive(self, news: News) -> None:
        if news.outcome is not None:
            self.told.append(news.outcome)
        else:
            self.hints.add(None if news.name is None else (news.kind, news.name))
        self.event.set()

    def doubt(self) -> None:
        """Take what was told until the first look for hints: it may be of earlier invocations of these ids."""
        told, self.told = self.told, []
        self.hints.update(("id", outcome.id) for outcome in told)

    @property
    def any(self) -> bool:
        return bool(self._outcomes or self._pages or self._more)

    @property
    def left(self) -> bool:
        """Whether there is still something to wait for, and room for it."""
        return not self._more and len(self._outcomes) + len(self._pages) < len(self.ids) + len(self._cursors)

    def found(self) -> AwaitMany:
        """Small outcomes and large ones not in one answer: who waits for a small one does not wait for the others' bytes.

        Mostly the small ones go first, for they are soon gone; not always, or many of them would keep the large for ever.
        """
        outcomes, more = list(self._outcomes.values()), self._more
        small = [outcome for outcome in outcomes if _size(outcome) <= LARGE_BYTES]
        if (small or self._pages) and len(small) < len(outcomes):
            first = random.random() < SMALL_FIRST
            outcomes, more = small if first else [one for one in outcomes if _size(one) > LARGE_BYTES], True
            if not first:
                return AwaitMany(outcomes, [], more)
        return AwaitMany(outcomes, list(self._pages.items()), more)

    async def news(self) -> None:
        """Wait for news, and take it in. Raises PlaneUnavailable when the plane is closed meanwhile."""
        await self.event.wait()
        self.event = anyio.Event()
        if self._engine.hub.closed:
            raise PlaneUnavailable("the plane was closed during a wait")
        told, self.told = self.told, []
        hints, self.hints = self.hints, set()
        for outcome in told:
            if outcome.id in self.ids:
                self._keep(outcome)
        if hints:
            await self.look(None if None in hints else {hint for hint in hints if hint is not None})

    async def look(self, hints: Collection[tuple[Kind, str]] | None, *, empty: bool = False) -> None:
        """Read what stands now, of everything or of what was hinted at."""
        store = self._engine.store
        wanted = [id for id in self.ids if id not in self._outcomes and (hints is None or ("id", id) in hints)]
        for start in range(0, len(wanted), SLICE):
            for outcome in await self._engine.read(store.outcomes, wanted[start : start + SLICE]):
                if outcome.state in TERMINAL or outcome.state == "unknown":
                    self._keep(outcome)
        for cursor in self._cursors:
            if cursor in self._pages or (hints is not None and ("journal", cursor.id) not in hints):
                continue
            if self._full:
                self._more = True
                return
            try:
                page = await self._engine.read(store.page, *cursor)
            except InvocationNotFound:
                self._outcomes[cursor.id] = Outcome(cursor.id, "unknown")
                continue
            if page.frames or page.closed or empty:
                self._pages[cursor] = page
                self._size += sum(len(data) for _, data in page.frames)

    @property
    def _full(self) -> bool:
        return self._size >= MAX_BYTES

    def _keep(self, outcome: Outcome) -> None:
        size = _size(outcome)
        if self._outcomes and self._size + size > MAX_BYTES:
            self._more = True
            return
        self._outcomes[outcome.id] = outcome
        self._size += size


def _size(outcome: Outcome) -> int:
    return len(outcome.result or b"")
