"""Resources of which each event loop has its own."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import anyio

from .loops import loop_token, run_sync_soon, running_asyncio_loop
from .run_sync import is_blocked
from .tasks import spawn

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from anyio.lowlevel import EventLoopToken

__all__ = ["PerLoop"]

CLOSE_ALL_TIMEOUT = 5.0
"""Seconds that `PerLoop.aclose_all` waits for other loops."""


class Closable(Protocol):
    """A resource that `PerLoop` keeps."""

    async def close(self) -> None:
        """Close it; called a second time when asyncio's own cancellation interrupted the first call."""
        ...


C = TypeVar("C", bound=Closable)


class PerLoop(Generic[C]):
    """One resource for each event loop: opened on first use, closed by `aclose`, `aclose_all` or its loop's end."""

    def __init__(self, opener: Callable[[], Awaitable[C]]) -> None:
        self._opener = opener
        self._slots: dict[object, _Slot[C]] = {}  # by the loop
        _owners.add(self)

    def here(self) -> C | None:
        """This loop's resource if it is open and the loop is asyncio's. The quick way; `get` is the sure one."""
        slot = self._slots.get(running_asyncio_loop())
        return None if slot is None else slot.value

    def opened(self) -> C | None:
        """This loop's resource if it is open; only inside of a task."""
        slot = self._slots.get(loop_token().native_token)
        return None if slot is None else slot.value

    async def get(self) -> C:
        """This loop's resource, opened if need be. An opening that fails or is cancelled leaves nothing behind."""
        token = loop_token()
        slot = self._slots.get(token.native_token)
        if slot is None:
            self._forget_ended_loops()
            slot = self._slots[token.native_token] = _Slot(token)
        if slot.value is not None:
            return slot.value
        return await slot.open(self._opener)

    def _forget_ended_loops(self) -> None:
        for slot in {*self._slots.values(), *_open}:
            if not run_sync_soon(slot.token, _nothing):
                _open.discard(slot)
                self._slots.pop(slot.token.native_token, None)

    async def aclose(self) -> None:
        """Close this loop's resource; cancellation waits for that. A later `get` opens another."""
        slot = self._slots.get(loop_token().native_token)
        if slot is not None:
            await slot.close()

    async def aclose_all(self) -> None:
        """Close the resource of every loop, each on its own loop; cancellation waits for that.

        Loops that have ended are skipped. The other loops start to close theirs first and are waited for last, all
        together for at most CLOSE_ALL_TIMEOUT seconds.
        """
        here = loop_token()
        others = list[anyio.Event]()
        for slot in list(self._slots.values()):
            loop = slot.token.native_token
            is_opening = slot.lock.locked()
            if loop is here.native_token or (slot.value is None and not is_opening):
                continue
            closed = anyio.Event()
            set_closed = partial(run_sync_soon, here, closed.set)
            if run_sync_soon(slot.token, spawn, slot.close, set_closed) and not is_blocked(loop):
                others.append(closed)
        with anyio.CancelScope(shield=True):
            try:
                await self.aclose()
            finally:
                with anyio.move_on_after(CLOSE_ALL_TIMEOUT):
                    for closed in others:
                        await closed.wait()


def _nothing() -> None: ...


class _Slot(Generic[C]):
    """The resource of one loop."""

    def __init__(self, token: EventLoopToken) -> None:
        self.token = token
        self.lock = anyio.Lock()
        self.value: C | None = None
        self.keeper: AsyncGenerator[None, None] | None = None

    async def open(self, opener: Callable[[], Awaitable[C]]) -> C:
        async with self.lock:  # many first users open once
            if self.value is None:
                self.keeper = self._keep(opener)
                await anext(self.keeper)
            assert self.value is not None
            return self.value

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with self.lock:
                if self.keeper is not None:
                    await self.keeper.aclose()

    async def _keep(self, opener: Callable[[], Awaitable[C]]) -> AsyncGenerator[None, None]:
        """Suspended for the life of the loop: event loops close live async generators when they end (PEP 525)."""
        value = self.value = await opener()
        _open.add(self)
        try:
            yield
        finally:
            self.value = None
            _open.discard(self)
            with anyio.CancelScope(shield=True):  # trio closes generators in a cancelled scope
                try:
                    await value.close()
                except anyio.get_cancelled_exc_class():  # a shield does not stop asyncio's own cancellation
                    await value.close()
                    raise


_open: set[_Slot[Any]] = set()
"""The slots with an open resource, held for the life of their loops, also when their PerLoop is forgotten."""
_owners: WeakSet[PerLoop[Any]] = WeakSet()
_inherited: list[object] = []
"""The parent's slots, in a forked child, which neither uses nor frees them."""


def _in_forked_child() -> None:
    _inherited.extend(_open)
    _open.clear()
    for owner in _owners:
        _inherited.append(owner._slots)
        owner._slots = {}


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
