"""Requests that the server holds open, such as long polls, and what ends them.

A newer request of the same name ends a held one, and so does a release of its name, its client when it disconnects, and
the end of the server. What the handler awaits in `HeldRequest.wait_for` is then cancelled. Names are tuples. Nothing is
kept of a request that is answered, except the names of released polls: a poll may arrive later than its own release.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import anyio

from ..errors import PlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

__all__ = ["HeldRequest", "Name", "Polls", "Renewals"]

T = TypeVar("T")
Name: TypeAlias = tuple[str, ...]

RELEASED_NAME_LIFETIME = 60.0
"""Seconds for which a released name stays known."""
MAX_RELEASED_NAMES = 20_000
MAX_WORKERS = 20_000
"""Workers whose last renewal is kept."""


class HeldRequest:
    """One held request.

    older: the requests of the same name that this one has ended.
    finished: is set when the request no longer counts as held.
    ended: the handler must not wait any longer.
    dropped: and it must answer with nothing, because another request now gets the answer.
    waited: some time may have passed since the request came.
    """

    __slots__ = ("_scope", "dropped", "ended", "finished", "older", "waited")

    def __init__(self, older: Sequence[HeldRequest] = ()) -> None:
        self.older = older
        self.finished = anyio.Event()
        self.ended = False
        self.dropped = False
        self.waited = False
        self._scope: anyio.CancelScope | None = None

    def end(self, *, drop: bool = False) -> None:
        """Cancel what the request waits for, now and later."""
        self.ended = True
        self.dropped = self.dropped or drop
        if self._scope is not None:
            self._scope.cancel()

    async def wait_for(self, wait: Callable[[], Awaitable[T]]) -> T | None:
        """Await `wait` and return its result, or None once the request is ended."""
        if self.ended:
            return None
        self.waited = True
        try:
            with anyio.CancelScope() as self._scope:
                return await wait()
        finally:
            self._scope = None
        return None

    async def wait_for_older(self) -> bool:
        """Wait until the older requests of this name are finished; False if this one was ended first."""
        for older in self.older:
            await self.wait_for(older.finished.wait)
        return not self.ended


class _SharedWait:
    """Requests that wait for the same thing. One of them, the leader, waits for news; the others wait to become leader.

    So one new job wakes one request. A leader that ends, for whatever reason, makes the next request the leader.
    """

    def __init__(self) -> None:
        self.has_leader = False
        self._followers: dict[anyio.Event, None] = {}

    async def wait(self, lead: Callable[[], Awaitable[T]]) -> T:
        """Become the leader, then await `lead` and return its result."""
        if self.has_leader:
            leads = anyio.Event()
            self._followers[leads] = None
            try:
                await leads.wait()
            except BaseException:
                if leads.is_set():  # cancelled in the moment in which it became the leader
                    self._wake_next()
                else:
                    del self._followers[leads]
                raise
        self.has_leader = True
        try:
            return await lead()
        finally:
            self._wake_next()

    def _wake_next(self) -> None:
        self.has_leader = bool(self._followers)
        if self.has_leader:
            leads = next(iter(self._followers))
            del self._followers[leads]
            leads.set()


class Renewals:
    """When the claims of each worker were last renewed, as far as this server has seen.

    A held or delayed poll may be the last request of a worker that has lost its connection. An invocation that becomes
    free meanwhile may be one that this worker still runs, whose lease has expired. So a worker that holds claims gets no
    more of them once half a lease has passed without a renewal: it has to renew first.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[Name, float] = {}  # the oldest first

    def renewed(self, worker: Name) -> None:
        """Record that all claims of a worker were renewed now."""
        self._seen.pop(worker, None)
        self._seen[worker] = self._clock()
        if len(self._seen) > MAX_WORKERS:
            del self._seen[next(iter(self._seen))]

    def late(self, worker: Name, lease: float) -> bool:
        """Whether a worker that holds claims has not renewed them for half a lease.

        A worker that this server has not seen before counts as having renewed now.
        """
        if worker not in self._seen:
            self.renewed(worker)
        return self._clock() - self._seen[worker] > lease / 2


class Polls:
    """The held requests of one server, all on one event loop.

    max_held: how many requests may be held at the same time.
    """

    def __init__(self, max_held: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_held = max_held
        self._clock = clock
        self._held: set[HeldRequest] = set()
        self._named: dict[Name, list[HeldRequest]] = {}
        self._shared_waits: dict[object, _SharedWait] = {}
        self._released: dict[Name, float] = {}  # the time at which each is forgotten; the oldest first
        self.draining = False

    def __len__(self) -> int:
        return len(self._held)

    @contextmanager
    def hold(self, name: Name | None = None) -> Generator[HeldRequest]:
        """Count a request as held inside the block, and end the older ones of its name.

        Raises:
            PlaneUnavailable: the server already holds as many requests as it may.
        """
        if len(self._held) >= self._max_held:
            raise PlaneUnavailable(f"the server already holds {self._max_held} requests, its maximum: retry later")
        held = HeldRequest() if name is None else HeldRequest(self._drop(name))
        self._held.add(held)
        if name is not None:
            self._named.setdefault(name, []).append(held)
        if self.draining:
            held.end()
        try:
            yield held
        finally:
            self._held.discard(held)
            if name is not None:
                self._forget(name, held)
            held.finished.set()

    def _drop(self, name: Name) -> list[HeldRequest]:
        older = list(self._named.get(name, ()))
        for held in older:
            held.end(drop=True)
        return older

    def _forget(self, name: Name, held: HeldRequest) -> None:
        same_name = self._named[name]
        same_name.remove(held)
        if not same_name:
            del self._named[name]

    async def share_wait(self, key: object, wait: Callable[[], Awaitable[T]]) -> T:
        """Await `wait` as soon as no other request with this key does, and return its result."""
        shared = self._shared_waits.setdefault(key, _SharedWait())
        try:
            return await shared.wait(wait)
        finally:
            if not shared.has_leader and self._shared_waits.get(key) is shared:
                del self._shared_waits[key]

    async def release(self, name: Name) -> None:
        """End the requests of this name, wait until they are finished, and remember the name as released."""
        now = self._clock()
        self._released.pop(name, None)
        self._released[name] = now + RELEASED_NAME_LIFETIME
        while self._released:
            oldest = next(iter(self._released))
            if self._released[oldest] > now and len(self._released) <= MAX_RELEASED_NAMES:
                break
            del self._released[oldest]
        for held in self._drop(name):
            await held.finished.wait()

    def released(self, name: Name) -> bool:
        """Whether this name was released within RELEASED_NAME_LIFETIME."""
        until = self._released.get(name)
        return until is not None and until > self._clock()

    def drain(self) -> None:
        """End all held requests, and every later one as soon as it is held: the server is shutting down."""
        self.draining = True
        for held in list(self._held):
            held.end()

    async def idle(self) -> None:
        """Wait until no request is held."""
        while self._held:
            await next(iter(self._held)).finished.wait()
