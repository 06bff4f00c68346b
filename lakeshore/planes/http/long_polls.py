"""All waits of a process as one or two long polls, or a few more where there are tens of thousands of waits.

A poll lists what is waited for: invocations, and journals with their cursors. A wait that begins while a poll is held does
not cancel that poll, which would cost its connection. It sends a newer poll with the same watch token, and the server
answers the older one at once.

There are two tokens: most waits are in the *main* poll, and those that have begun since in the *recent* one, so that a new
wait among ten thousand does not send them all again. When the recent ones outnumber the others, all of them become one
main poll. A poll holds a bounded number of waits: where a main poll is full, there is a further one.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from itertools import chain, count, islice
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from ...concurrency.backoff import Backoff
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
    from ..protocol.fields import Fields

__all__ = ["LongPolls", "decode_news"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

MIN_RECENT_WAITS = 64
"""Waits that fit into the recent poll however few the others are."""
LINGER_WAITS = 16
"""From how many waits on the server may linger: wait for more ends before it answers."""
LINGER_SECONDS = 0.005
FIRST_RETRY_DELAY = 0.05
MAX_RETRY_DELAY = 5.0

RECENT = 0
"""The number of the recent poll; the main ones are 1, 2 and so on."""

Key: TypeAlias = "str | Cursor"
"""What one wait is for: the end of an invocation, or what a journal has after a cursor."""


class LongPolls:
    """The polls for the waits of one hub."""

    def __init__(
        self,
        send: Callable[[Fields, float], Awaitable[Mapping[str, Any]]],
        interest: Interest,
        publish: Callable[[News], None],
        patience: Callable[[], float],
        pause: Callable[[float], Awaitable[None]],
    ) -> None:
        """
        Args:
            send: Sends one await-many, which the server may hold for the given seconds, and returns the answer's fields.
            interest: What is waited for.
            publish: Takes what the answers tell.
            patience: Returns the seconds of failures after which waiting callers are woken: each then reads for itself,
                and raises the error that it gets.
            pause: Sleeps after a failure.
        """
        self._send = send
        self._interest = interest
        self._publish = publish
        self._patience = patience
        self._pause = pause
        self._tokens: defaultdict[int, str] = defaultdict(new_id)  # by which the server knows the polls
        self._keys: defaultdict[int, set[Key]] = defaultdict(set)  # what the newest request of each poll lists
        self._newest: dict[int, object] = {}
        self._in_flight: defaultdict[int, int] = defaultdict(int)
        self._changed = anyio.Event()
        self._failing_since: float | None = None

    async def run(self) -> None:
        """Publish what happens to all that is waited for, until cancelled."""
        self._interest.changed(self._notify, each=True)
        try:
            async with anyio.create_task_group() as group:
                while True:
                    self._changed = anyio.Event()
                    for poll, keys in self._polls_to_send():
                        this = object()
                        self._keys[poll] = keys
                        self._newest[poll] = this
                        self._in_flight[poll] += 1
                        group.start_soon(self._poll, poll, keys, this)
                    await self._changed.wait()
                    await checkpoint()
        finally:
            self._interest.changed(_nothing)

    def _notify(self) -> None:
        self._changed.set()

    def _polls_to_send(self) -> Iterable[tuple[int, set[Key]]]:
        """The polls to send now, each with its keys, so that every wait is in one."""
        wanted: set[Key] = {*self._interest.names("id"), *self._interest.cursors()}
        missing = wanted.difference(*self._keys.values())
        while missing:
            poll, keys = self._place(wanted, missing)
            if self._in_flight[poll] >= 2:  # the newer makes the server answer the older, and then this runs again
                return
            yield poll, keys
            missing -= keys

    def _place(self, wanted: set[Key], missing: set[Key]) -> tuple[int, set[Key]]:
        """A poll for what is missing, or for some of it, and what else is to be in it."""
        main = {poll: keys & wanted for poll, keys in self._keys.items() if poll != RECENT}
        limit = MAX_ITEMS_PER_REQUEST - MIN_RECENT_WAITS
        poll = next(poll for poll in count(1) if len(main.get(poll, ())) <= limit)
        here = main.get(poll, set[Key]())
        recent = (self._keys[RECENT] & wanted).difference(*main.values()) | missing
        if any(main.values()) and len(recent) <= max(MIN_RECENT_WAITS, len(here)):
            return RECENT, recent
        others = recent - missing if here else ()
        return poll, here | set(islice(chain(missing, others), MAX_ITEMS_PER_REQUEST - len(here)))

    async def _poll(self, poll: int, keys: set[Key], this: object) -> None:
        began = anyio.current_time()
        try:
            answer = await self._answer(poll, keys, this)
            for news in answer:
                self._publish(news)
            is_early = anyio.current_time() - began < POLL_TIMEOUT / 2
            if is_early and self._newest[poll] is this and not any(map(_ends_a_wait, answer)):
                # A server that does not hold polls would otherwise get the next one as fast as it answers.
                await anyio.sleep(EARLY_ANSWER_PAUSE)
        finally:
            self._in_flight[poll] -= 1
            if self._newest[poll] is this:
                self._keys[poll] = set()
            # Only now: waits that ended with the answer are no longer in `interest` when the next poll is made.
            self._changed.set()

    async def _answer(self, poll: int, keys: set[Key], this: object) -> list[News]:
        """The answer, after as many attempts as it takes; nothing when a newer poll lists these keys."""
        cursors = [key for key in keys if isinstance(key, Cursor)]
        hold = poll_timeout()
        may_linger = len(keys) >= LINGER_WAITS and not cursors
        fields: Fields = {
            "items": [{"invocation_id": key} for key in keys if isinstance(key, str)],
            "streams": [encode_cursor(cursor) for cursor in cursors],
            "watch": self._tokens[poll],
            "timeout_s": hold,
            "linger_s": LINGER_SECONDS if may_linger else 0.0,
        }
        backoff = Backoff(FIRST_RETRY_DELAY, MAX_RETRY_DELAY)
        while self._newest[poll] is this:
            try:
                answer = await self._send(fields, hold)
                with decoding("await_many"):
                    news = [*decode_news(answer, keys)]
            except MissingRoute:
                raise
            except Exception as exc:  # whatever it is, nobody may wait for ever
                self._record_failure(exc, keys)
            else:
                self._failing_since = None
                return news
            await self._pause(backoff.next_delay())
        return []

    def _record_failure(self, exc: Exception, keys: set[Key]) -> None:
        now = anyio.current_time()
        if self._failing_since is None:
            self._failing_since = now
            logger.warning("waits go on as soon as the plane answers: %s", exc)
        if not isinstance(exc, PlaneUnavailable) or now - self._failing_since > self._patience():
            for key in keys:
                self._publish(News("id", key) if isinstance(key, str) else News("journal", key.id))


def decode_news(fields: Mapping[str, Any], keys: Iterable[Key]) -> Iterable[News]:
    """What the answer to an await-many tells about the keys that it was asked for. To be used within `decoding`."""
    cursors = {(key.id, key.since): key for key in keys if isinstance(key, Cursor)}
    asked = set(keys)
    for id, item in fields.get("results") or ():
        if id not in asked:
            continue
        if isinstance(item.get("error"), dict) and "state" not in item:
            is_unknown = isinstance(decode_error(item["error"], 400, "await-many", id), InvocationNotFound)
            yield News("id", id, Outcome(id, "unknown") if is_unknown else None)
        else:
            yield News("id", id, decode_outcome(id, item))
    for id, since, item in fields.get("pages") or ():
        cursor = cursors.get((id, since))
        if cursor is None or "frames" not in item:
            yield News("journal", invocation_id(id))
        else:
            yield News("journal", id, None, (cursor, decode_page(item)))


def _ends_a_wait(news: News) -> bool:
    if news.page is not None:
        page = news.page[1]
        return bool(page.frames or page.closed)
    return news.outcome is not None and news.outcome.state != "pending"


def _nothing() -> None: ...
