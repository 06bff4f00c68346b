"""How the waiters of one engine learn what others have committed: the engine's bell, and the events read when it rings."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ...concurrency.portal import across, at_home
from ..contract.news import Kind, News
from .batch import Wakeups
from .doorbell import CANCELS, ENDS, JOBS, queue_topic
from .read import EventCursor, NewEvents, event_cursor, new_events, skip_events

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Awaitable, Callable

    from ...concurrency.portal import Home
    from ..contract.store import Interest
    from .doorbell import Bell, Doorbells

__all__ = ["Watcher"]

T = TypeVar("T")

KINDS: tuple[Kind, ...] = ("queue", "id", "journal", "claims")


class Reader(Protocol):
    """What a watcher needs of its store."""

    home: Home

    def read_at_once(self, fn: Callable[[sqlite3.Connection], T]) -> T | None:
        """Call `fn`, which reads little, without a wait; None when that is not possible. On the home loop only."""
        ...

    def read_little(self, fn: Callable[[sqlite3.Connection], T]) -> Awaitable[T]:
        """Call `fn`, which reads little."""
        ...


class Watcher:
    """Listens for what the waiters of `interest` wait for, and passes it to `tell`. It runs on the waiters' loop."""

    def __init__(
        self,
        reader: Reader,
        ns: str,
        doorbells: Doorbells,
        bell: Bell,
        interest: Interest,
        tell: Callable[[News], None],
    ) -> None:
        self._reader = reader
        self._ns = ns
        self._doorbells = doorbells
        self._bell = bell
        self._interest = interest
        self._tell = tell
        self._on_home_loop = at_home(reader.home)
        self._queues: dict[str, str] = {}
        """The topics that the bell listens to, each with its queue, "" for the others."""
        self._cursor = EventCursor(0, None)

    async def run(self) -> None:
        """Run until cancelled."""
        bell = self._bell
        try:
            self._listen()
            self._interest.changed(self._listen)
            self._cursor = await across(self._reader.home, self._reader.read_little, event_cursor)
            for kind in KINDS:
                self._tell(News(kind))
            bell.on_ring = self._on_ring
            while True:
                await bell.wait()
                self._pass_on(await across(self._reader.home, self._reader.read_little, self._read_events()))
        finally:
            bell.on_ring = None
            self._interest.changed(lambda: None)
            bell.close()

    def _listen(self) -> None:
        """Listen to everything that is waited for by now."""
        wanted = {queue_topic(self._ns, queue): queue for queue in self._interest.names("queue")}
        if self._interest.waits("id") or self._interest.waits("journal"):
            wanted[ENDS] = ""
        if self._interest.waits("claims"):
            wanted[CANCELS] = ""
        for topic in wanted.keys() - self._queues.keys():
            self._bell.listen(topic)
            self._queues[topic] = wanted[topic]

    def _stop_listening(self) -> None:
        """Stop listening to queues that no caller here waits for any more, and pass the ring on to other engines.

        This is left until the bell rings for nothing: claimers come back sooner than a link is made again.
        """
        waiting = self._interest.names("queue")
        for topic, queue in list(self._queues.items()):
            if queue and queue not in waiting:
                self._bell.stop_listening(topic)
                del self._queues[topic]
                self._doorbells.ring(Wakeups({queue: 1}))

    def _on_ring(self, rung: set[str]) -> set[str]:
        """Pass on in the loop's own callback whatever needs no wait, so that this task need not run; return the rest."""
        if JOBS in rung:
            self._stop_listening()
            self._tell(News("queue"))
        if CANCELS in rung:
            self._tell(News("claims"))
        if ENDS not in rung:
            return set()
        events = self._reader.read_at_once(self._read_events()) if self._on_home_loop else None
        if events is None:
            return {ENDS}
        self._pass_on(events)
        return set()

    def _read_events(self) -> Callable[[sqlite3.Connection], NewEvents]:
        """The read of what has happened since the cursor, as far as anybody waits for it."""
        ids = self._interest.waits("id")
        journals = self._interest.waits("journal")
        if (journals and self._cursor.frame is None) or not (ids or journals):
            return skip_events
        return partial(new_events, ns=self._ns, since=self._cursor, with_journals=journals)

    def _pass_on(self, events: NewEvents) -> None:
        self._cursor = events.cursor
        if events.ended is None or events.grown is None:  # what has happened is not known: every waiter has to check
            self._tell(News("id"))
            self._tell(News("journal"))
            return
        for id, outcome in events.ended:
            self._tell(News("id", id, outcome))
            self._tell(News("journal", id))
        for id in events.grown:
            self._tell(News("journal", id))
