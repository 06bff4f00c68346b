"""Requests that are held open, and how they end each other.

A held request has a turn. It is ended by a newer one of the same name, by a release, when its client has gone, and when
the server ends; what a handler waits for inside `Turn.hold` then breaks off. Names are tuples; nothing is kept of a turn
that is over, but the names of released polls for a minute: a poll may be overtaken by the release of it.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import anyio

from ..errors import PlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

__all__ = ["Name", "Polls", "Renewals", "Turn"]

T = TypeVar("T")
Name: TypeAlias = tuple[str, ...]

REMEMBERED_S = 60.0
MOST_REMEMBERED = 20_000
MOST_WORKERS = 20_000


class Turn:
    """One held request.

    ended: nothing more is to be waited for. dropped: and the answer is to be nothing, since it is another's by now.
    waited: some time may have passed since the request came.
    """

    __slots__ = ("_scope", "dropped", "ended", "older", "over", "waited")

    def __init__(self, older: Sequence[Turn] = ()) -> None:
        self.older, self.over = older, anyio.Event()
        self.ended = self.dropped = self.waited = False
        self._scope: anyio.CancelScope | None = None

    def end(self, *, drop: bool = False) -> None:
        """Break off what the request waits for, now and later."""
        self.ended, self.dropped = True, self.dropped or drop
        if self._scope is not None:
            self._scope.cancel()

    async def hold(self, wait: Callable[[], Awaitable[T]]) -> T | None:
        """What `wait` gives; None once the turn is ended."""
        if self.ended:
            return None
        self.waited = True
        try:
            with anyio.CancelScope() as self._scope:
                return await wait()
        finally:
            self._scope = None
        return None

    async def alone(self) -> bool:
        """Wait until the older ones of this name are over; False when this one has been ended before that."""
        for older in self.older:
            await self.hold(older.over.wait)
        return not self.ended


class _Line:
    """Requests that wait for the same. The first of them waits for news, the others to be the first: one job wakes one,
    and whoever leaves the first place, for whatever reason, wakes the next."""

    def __init__(self) -> None:
        self.led, self._behind = False, dict[anyio.Event, None]()

    async def wait(self, first: Callable[[], Awaitable[T]]) -> T:
        if self.led:
            turn = anyio.Event()
            self._behind[turn] = None
            try:
                await turn.wait()
            except BaseException:
                if self._behind.pop(turn, turn) is turn:  # it was handed the first place as it left
                    self._hand_on()
                raise
        self.led = True
        try:
            return await first()
        finally:
            self._hand_on()

    def _hand_on(self) -> None:
        self.led = bool(self._behind)
        if self.led:
            turn = next(iter(self._behind))
            del self._behind[turn]
            turn.set()


class Renewals:
    """When the claims of each worker were last renewed, as far as this server has seen.

    A poll that is held, or late, may be the last word of a worker that is out of reach: what becomes free in its time may
    be that worker's own, whose lease has run out, and which it still runs. So a worker that keeps claims is given no more
    once they have not been renewed for half a lease; its next word is to be their renewal.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Name, float] = {}  # the oldest first

    def renewed(self, worker: Name) -> None:
        """All claims of a worker are fresh."""
        self._seen.pop(worker, None)
        self._seen[worker] = self._clock()
        if len(self._seen) > MOST_WORKERS:
            del self._seen[next(iter(self._seen))]

    def late(self, worker: Name, lease: float) -> bool:
        """Whether the claims of a worker that keeps some have not been renewed for half a lease; seen for the first time,
        it has only now come to this server, and they are fresh."""
        if worker not in self._seen:
            self.renewed(worker)
        return self._clock() - self._seen[worker] > lease / 2


class Polls:
    """The held requests of one server, all on one event loop. most: how many there may be at the same time."""

    def __init__(self, most: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._turns: set[Turn] = set()
        self._named: dict[Name, list[Turn]] = {}
        self._lines: dict[object, _Line] = {}
        self._released: dict[Name, float] = {}  # until when each is remembered; the oldest first
        self.draining = False

    def __len__(self) -> int:
        return len(self._turns)

    @contextmanager
    def turn(self, name: Name | None = None) -> Generator[Turn]:
        """A turn for one request, which ends the older ones of its name. Raises PlaneUnavailable where all are taken."""
        if len(self._turns) >= self._most:
            raise PlaneUnavailable(f"the server holds {self._most} requests, the most that it may: ask again later")
        turn = Turn() if name is None else Turn(self._drop(name))
        self._turns.add(turn)
        if name is not None:
            self._named.setdefault(name, []).append(turn)
        if self.draining:
            turn.end()
        try:
            yield turn
        finally:
            self._turns.discard(turn)
            if name is not None:
                self._forget(name, turn)
            turn.over.set()

    def _drop(self, name: Name) -> list[Turn]:
        older = list(self._named.get(name, ()))
        for turn in older:
            turn.end(drop=True)
        return older

    def _forget(self, name: Name, turn: Turn) -> None:
        turns = self._named[name]
        turns.remove(turn)
        if not turns:
            del self._named[name]

    async def in_line(self, place: object, first: Callable[[], Awaitable[T]]) -> T:
        """What `first` gives, called when nobody else waits in this place, or has it handed on."""
        line = self._lines.setdefault(place, _Line())
        try:
            return await line.wait(first)
        finally:
            if not line.led and self._lines.get(place) is line:
                del self._lines[place]

    async def release(self, name: Name) -> None:
        """End what is held under this name, wait for its end, and let nothing be held under it for a minute."""
        now = self._clock()
        self._released.pop(name, None)
        self._released[name] = now + REMEMBERED_S
        while self._released:
            oldest = next(iter(self._released))
            if self._released[oldest] > now and len(self._released) <= MOST_REMEMBERED:
                break
            del self._released[oldest]
        for turn in self._drop(name):
            await turn.over.wait()

    def released(self, name: Name) -> bool:
        """Whether this name was released within the last minute."""
        until = self._released.get(name)
        return until is not None and until > self._clock()

    def drain(self) -> None:
        """End all that is held, and hold nothing from now on: the server ends."""
        self.draining = True
        for turn in list(self._turns):
            turn.end()

    async def idle(self) -> None:
        """Wait until nothing is held."""
        while self._turns:
            await next(iter(self._turns)).over.wait()
