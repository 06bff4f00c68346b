"""Iterators over the frames and values of an invocation, live: async, and blocking ones that wait by `run_sync`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

from ..concurrency.run_sync import run_sync
from ..wire import Frame
from .cursors import NO_ITEM, CallCursor, FrameCursor, ValueCursor

if TYPE_CHECKING:
    from ..planes.contract.operations import Submit
    from ..planes.plane import Plane
    from .cursors import OnRestart

__all__ = ["CallValues", "Frames", "SyncCallValues", "SyncFrames", "SyncValues", "Values"]


class Frames(FrameCursor, AsyncIterator[Frame]):
    """An async iterator over the frames of an invocation, of every kind; `seq` of each is the journal's.

    It ends after END or a final ERROR. Cancelling a read loses nothing, and does not touch the invocation.

    Raises:
        InvocationFailed: The invocation ended in another state than `succeeded`, without a frame that shows it.
        TimeoutError: No frame came within the timeout.
        InvocationNotFound: The plane does not know the id.
        WireError: A frame cannot be read.
    """

    async def __anext__(self) -> Frame:
        while (frame := self.take()) is NO_ITEM:
            if not await self.fetch_page():
                raise StopAsyncIteration
        assert isinstance(frame, Frame)
        return frame

    async def aclose(self) -> None:
        """End the iterator; the invocation goes on."""
        self.end()


class Values(ValueCursor, AsyncIterator[Any]):
    """An async iterator over the values that an invocation yields; `seq` is that of the last one, to read on with `since`.

    Cancelling a read loses nothing, and does not touch the invocation.

    Raises:
        InvocationFailed: The invocation ended in another state than `succeeded`.
        StreamRestarted: The body was started again after it had yielded. The next read returns values of the new attempt.
            Not with `on_restart="continue"`.
        TimeoutError: No frame came within the timeout.
        InvocationNotFound: The plane does not know the id.
        WireError: A frame cannot be read.
    """

    async def __anext__(self) -> Any:
        while (value := self.take()) is NO_ITEM:
            if not await self.fetch_page():
                raise StopAsyncIteration
        return value

    async def aclose(self) -> None:
        """End the iterator; the invocation goes on."""
        self.end()


class CallValues(CallCursor, Values):
    """The async iterator that a call of a queue-bound `async def` generator returns: its values, live.

    Closing it early cancels the invocation. `aclose()` does so at once (use `contextlib.aclosing` to be sure); after a
    `break` it happens when the iterator is collected, which is at once unless something else refers to it. Cancelling a
    read alone leaves the stream as it is.

    Raises what the iterator of `Queue.stream` raises, and at the first `anext` what a submit raises.
    """

    async def aclose(self) -> None:
        """End the iterator and cancel the invocation, best effort, within a second, also when being cancelled."""
        if self.close_early():
            await self.cancel()


# --- blocking -------------------------------------------------------------------------------------------------------


class SyncFrames(FrameCursor, Iterator[Frame]):
    """`Frames` for blocking callers: one crossing to the loop for each page, not for each frame."""

    def __init__(self, plane: Plane, id: str, since: int, timeout: float | None, hint: str) -> None:
        super().__init__(plane, id, since, timeout)
        self._hint = hint

    def __next__(self) -> Frame:
        while (frame := self.take()) is NO_ITEM:
            if not run_sync(self.fetch_page, hint=self._hint):
                raise StopIteration
        assert isinstance(frame, Frame)
        return frame


class SyncValues(ValueCursor, Iterator[Any]):
    """`Values` for blocking callers: one crossing to the loop for each page, not for each value."""

    def __init__(
        self, plane: Plane, id: str, since: int, timeout: float | None, on_restart: OnRestart, hint: str
    ) -> None:
        super().__init__(plane, id, since, timeout, on_restart)
        self._hint = hint

    def __next__(self) -> Any:
        while (value := self.take()) is NO_ITEM:
            if not run_sync(self.fetch_page, hint=self._hint):
                raise StopIteration
        return value

    def close(self) -> None:
        """End the iterator; the invocation goes on."""
        self.end()


class SyncCallValues(CallCursor, SyncValues):
    """The iterator that a call of a queue-bound `def` generator returns: its values, live.

    Closing it early cancels the invocation. `close()` does so at once; after a `break` it happens when the iterator is
    collected, which is at once unless something else refers to it.
    """

    def __init__(self, plane: Plane, op: Submit, hint: str) -> None:
        super().__init__(plane, op)
        self._hint = hint

    def close(self) -> None:
        """End the iterator and cancel the invocation, best effort, within a second."""
        if self.close_early():
            run_sync(self.cancel, hint=self._hint)
