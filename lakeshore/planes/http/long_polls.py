"""All waits of a process as one or two long polls, or a few more where there are tens of thousands.

A poll names what is waited for: invocations, and journals with their cursors. A wait that comes while a poll is held
does not cut it off, which would cost its connection: a newer poll with the same watch token makes the server answer the
older one at once. Two tokens: most waits stand in the *old* poll, and those that have come since in the *young* one, so
that a new wait among ten thousand does not send them all again; when the young outnumber the old they are all sent as
old. A poll holds a bounded number: where one old poll is full, there is a further one.
"""

from __future__ import annotations

import logging
import random
from collections import defaultdict
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from ...errors import InvocationNotFound, PlaneUnavailable
from ...ids import new_id
from ...limits import MAX_ITEMS_PER_REQUEST, POLL_TIMEOUT
from ..contract.news import Cursor, News
from ..contract.records import Outcome
from ..protocol.errors import decode_error
from ..protocol.messages import decode_outcome, decode_page, encode_cursor
from ..remote_plane import EARLY_ANSWER_PAUSE, poll_timeout
from .attempt import MissingRoute, decoding, invocation_id

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping

    from ..contract.store import Interest

__all__ = ["Watch", "decode_news"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

FEW = 64
"""Waits that the young poll may hold in any case."""
MANY, LINGER_S = 16, 0.005
"""From how many waits on the server may wait for more ends before it answers, and for how many seconds."""
MOST_DELAY = 5.0

YOUNG = 0
"""The poll of those that came last; the old ones are 1, 2 and so on."""

Key: TypeAlias = "str | Cursor"


class Watch:
    """The polls of one hub. ask: sends one await-many and gives its answer's fields; patience: seconds of failures after
    which those who wait are woken to look for themselves, and to raise what they then find; pause: sleeps after one."""

    def __init__(
        self,
        ask: Callable[[dict[str, Any], float], Awaitable[Mapping[str, Any]]],
        interest: Interest,
        tell: Callable[[News], None],
        patience: Callable[[], float],
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        self._ask, self._interest, self._tell, self._patience, self._pause = ask, interest, tell, patience, pause
        self._names: defaultdict[int, str] = defaultdict(new_id)  # of the polls, as the server knows them
        self._keys: defaultdict[int, set[Key]] = defaultdict(set)
        self._newest: dict[int, object] = {}
        self._flying: defaultdict[int, int] = defaultdict(int)
        self._changed = anyio.Event()
        self._failing_since: float | None = None

    async def run(self) -> None:
        """Tell what happens to all that is waited for, until cancelled."""
        self._interest.changed(self._notify, each=True)
        try:
            async with anyio.create_task_group() as group:
                while True:
                    self._changed = anyio.Event()
                    for poll, keys in self._uncovered():
                        self._keys[poll], self._newest[poll] = keys, (this := object())
                        self._flying[poll] += 1
                        group.start_soon(self._poll, poll, keys, this)
                    await self._changed.wait()
                    await checkpoint()
        finally:
            self._interest.changed(_nothing)

    def _notify(self) -> None:
        self._changed.set()

    def _uncovered(self) -> Iterable[tuple[int, set[Key]]]:
        """Which polls to send now, with which keys, so that all that is waited for stands in one."""
        wanted: set[Key] = {*self._interest.names("id"), *self._interest.cursors()}
        missing = wanted.difference(*self._keys.values())
        while missing:
            poll, keys = self._place(wanted, missing)
            if self._flying[poll] >= 2:  # the newer of two makes the older come back, and then we are here again
                return
            yield poll, keys
            missing -= keys

    def _place(self, wanted: set[Key], missing: set[Key]) -> tuple[int, set[Key]]:
        """A poll for what is missing, or some of it, and what else is to stand in it."""
        old = {poll: keys & wanted for poll, keys in self._keys.items() if poll != YOUNG}
        poll = next(poll for poll in count(1) if len(old.get(poll, ())) <= MAX_ITEMS_PER_REQUEST - FEW)
        here, young = old.get(poll, set[Key]()), (self._keys[YOUNG] & wanted).difference(*old.values()) | missing
        if any(old.values()) and len(young) <= max(FEW, len(here)):
            return YOUNG, young
        more = young - missing if here else ()
        return poll, here | set(islice(chain(missing, more), MAX_ITEMS_PER_REQUEST - len(here)))

    async def _poll(self, poll: int, keys: set[Key], this: object) -> None:
        began = anyio.current_time()
        try:
            heard = await self._answer(poll, keys, this)
            for news in heard:
                self._tell(news)
            early = anyio.current_time() - began < POLL_TIMEOUT / 2
            if early and self._newest[poll] is this and not any(map(_says_something, heard)):
                await anyio.sleep(EARLY_ANSWER_PAUSE)  # else a server that holds nothing is asked as fast as it answers
        finally:
            self._flying[poll] -= 1
            if self._newest[poll] is this:
                self._keys[poll] = set()
            self._changed.set()  # after the telling: who was told is woken first, and waits for it no more

    async def _answer(self, poll: int, keys: set[Key], this: object) -> list[News]:
        """The answer, however often it takes; nothing when a newer poll has this one's keys."""
        cursors = [key for key in keys if isinstance(key, Cursor)]
        held = poll_timeout()
        fields: dict[str, Any] = {
            "items": [{"invocation_id": key} for key in keys if isinstance(key, str)],
            "streams": [encode_cursor(cursor) for cursor in cursors],
            "watch": self._names[poll],
            "timeout_s": held,
            "linger_s": LINGER_S if len(keys) >= MANY and not cursors else 0.0,
        }
        delay = 0.05
        while self._newest[poll] is this:
            try:
                answer = await self._ask(fields, held)
                with decoding("await_many"):
                    heard = [*decode_news(answer, keys)]
            except MissingRoute:
                raise
            except Exception as exc:  # whatever it is, those who wait are not to wait for ever
                self._failed(exc, keys)
            else:
                self._failing_since = None
                return heard
            await self._pause(delay * random.uniform(0.5, 1.5))
            delay = min(delay * 2, MOST_DELAY)
        return []

    def _failed(self, exc: Exception, keys: set[Key]) -> None:
        now = anyio.current_time()
        if self._failing_since is None:
            self._failing_since = now
            logger.warning("waits go on as soon as the plane answers: %s", exc)
        if not isinstance(exc, PlaneUnavailable) or now - self._failing_since > self._patience():
            for key in keys:
                self._tell(News("id", key) if isinstance(key, str) else News("journal", key.id))


def decode_news(fields: Mapping[str, Any], keys: Iterable[Key]) -> Iterable[News]:
    """What the answer to an await-many says, about the keys that were asked for. To be used within `decoding`."""
    cursors = {(key.id, key.since): key for key in keys if isinstance(key, Cursor)}
    asked = set(keys)
    for id, item in fields.get("results") or ():
        if id not in asked:
            continue
        if isinstance(item.get("error"), dict) and "state" not in item:
            known = isinstance(decode_error(item["error"], 400, "await-many", id), InvocationNotFound)
            yield News("id", id, Outcome(id, "unknown") if known else None)
        else:
            yield News("id", id, decode_outcome(id, item))
    for id, since, item in fields.get("pages") or ():
        cursor = cursors.get((id, since))
        if cursor is None or "frames" not in item:
            yield News("journal", invocation_id(id))
        else:
            yield News("journal", id, None, (cursor, decode_page(item)))


def _says_something(news: News) -> bool:
    """Whether anybody stops waiting for it."""
    if news.page is not None:
        return bool(news.page[1].frames or news.page[1].closed)
    return news.outcome is not None and news.outcome.state != "pending"


def _nothing() -> None: ...
