"""Readers of a journal without a way to wait: async and blocking iterators in `streams` are built on them.

Between two items a cursor holds its position and the page being read, nothing else: no task, no cancel scope, no place in
a queue of waiters. So a reader may be dropped at any time, and in any task, with nothing to clean up. `take` returns the
next item of the page, without waiting; `fetch_page` waits for the next page.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from ..concurrency.loops import loop_token, run_sync_soon
from ..concurrency.tasks import spawn
from ..errors import StreamRestarted, WireError
from ..planes.contract.records import TERMINAL, Failure, Outcome, Page
from ..wire import Frame, FrameKind, unpack
from .calls import cancel_remote, error_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.lowlevel import EventLoopToken

    from ..planes.contract.operations import Submit
    from ..planes.plane import Plane

__all__ = ["NO_ITEM", "CallCursor", "FrameCursor", "OnRestart", "ValueCursor", "restart_frame"]

OnRestart = Literal["raise", "continue"]

_RESTARTED = "StreamRestarted"


class _NoItem:
    pass


NO_ITEM: Final = _NoItem()
"""What `take` returns when the page has no further item; None is a value like any other."""


def restart_frame(seq: int, attempt: int) -> bytes:
    """The frame with which an attempt begins when its journal holds frames of an earlier attempt."""
    meta = {"type": _RESTARTED, "message": f"the body was started again, as attempt {attempt}", "attempt": attempt}
    return Frame(FrameKind.ERROR, seq, None, meta).to_bytes()


def _restart_attempt(frame: Frame) -> int | None:
    """The attempt that a restart frame announces; None for any other frame.

    The final frame of a body that failed with StreamRestarted has the same type, but no attempt.
    """
    meta = frame.meta
    if frame.kind != FrameKind.ERROR or meta is None or meta.get("type") != _RESTARTED:
        return None
    attempt = meta.get("attempt")
    return attempt if type(attempt) is int else None


class _JournalCursor:
    """A place in the journal of one invocation, and the page being read."""

    def __init__(self, plane: Plane, id: str, since: int, timeout: float | None) -> None:
        self.id = id
        self.seq = since
        """The seq of the last item delivered: a reader with `since=seq` gets what follows it."""
        self.ended = False
        """Nothing follows, or the reader was closed."""
        self._plane = plane
        self._timeout = timeout
        self._taken = since  # seq of the last frame taken; ahead of `seq` inside a value that is being joined
        self._page: Iterator[tuple[int, bytes]] = iter(())
        self._page_state: Page | None = None  # the page without its frames: the state of journal and row at that time

    def end(self) -> None:
        """Return no more items, also where a `fetch_page` is waiting now."""
        self.ended = True
        self._drop_page()

    def _drop_page(self) -> None:
        """Forget the page; the frames that were not taken are read again."""
        self._page = iter(())
        self._page_state = None

    async def fetch_page(self) -> bool:
        """Wait for the next page; False at the end of the stream. `take` must have returned NO_ITEM before."""
        if not self.ended and self._page_state is not None and self._page_state.closed:
            self._finish(self._page_state)
        if self.ended:
            return False
        since = self._taken
        try:
            page = await self._plane.next_page(self.id, since, timeout=self._timeout)
        except TimeoutError:
            raise TimeoutError(
                f"invocation {self.id!r} gave nothing after {self.seq} for {self._timeout} s; "
                f"it goes on, read on with since={self.seq}"
            ) from None
        if since == self._taken and not self.ended:  # no other task has read on meanwhile
            self._page = iter(page.frames)
            self._page_state = page._replace(frames=[])
        return True

    def _finish(self, state: Page) -> None:
        """End a journal that has no final frame. A stream never ends silently when its body did not succeed."""
        if state.state in TERMINAL and state.state != "succeeded":
            self._fail(state.error)
        self.ended = True

    def _fail(self, error: Failure | None) -> NoReturn:
        state = "failed"
        if self._page_state is not None and self._page_state.state in TERMINAL - {"succeeded"}:
            state = self._page_state.state
        self._drop_page()  # the next read raises the same
        raise error_of(Outcome(self.id, state, None, error))

    def _unreadable(self, seq: int, why: object) -> WireError:
        self._drop_page()
        return WireError(f"frame {seq} of invocation {self.id!r} cannot be read: {why}; since={seq} passes it over")


class FrameCursor(_JournalCursor):
    """Reads the frames as they are."""

    def take(self) -> Frame | _NoItem:
        """Return the next frame of the page, or NO_ITEM. Its `seq` is the journal's, not the one written inside."""
        for seq, raw in self._page:
            try:
                frame = Frame.from_bytes(raw)
            except WireError as exc:
                raise self._unreadable(seq, exc) from exc
            frame.seq = self.seq = self._taken = seq
            self.ended = frame.terminal and _restart_attempt(frame) is None
            return frame
        return NO_ITEM


class _Parts:
    """A value that came in CHUNKs, being joined. `size`: the bytes that its BEGIN announced, if it did."""

    def __init__(self, meta: dict[str, Any] | None) -> None:
        size = (meta or {}).get("size")
        self.size = size if type(size) is int else None
        self.length = 0
        self.parts: list[bytes] = []

    def add(self, part: object) -> str | None:
        """Add a part; return what is wrong with it, or None."""
        if type(part) is not bytes:
            return f"expected the bytes of a CHUNK, got a {type(part).__name__}"
        self.parts.append(part)
        self.length += len(part)
        if self.size is not None and self.length > self.size:
            return self.wrong_size()
        return None

    def wrong_size(self) -> str:
        return f"{self.size} bytes were announced for its value, and {self.length} came"


class ValueCursor(_JournalCursor):
    """Reads the values in the frames: joins chunks, raises errors, and raises StreamRestarted at a restart."""

    def __init__(self, plane: Plane, id: str, since: int, timeout: float | None, on_restart: OnRestart) -> None:
        super().__init__(plane, id, since, timeout)
        if on_restart not in ("raise", "continue"):
            raise ValueError(f'expected on_restart="raise" or "continue", got {on_restart!r}')
        self._continues = on_restart == "continue"
        self._parts: _Parts | None = None

    def _drop_page(self) -> None:
        super()._drop_page()
        self._parts = None
        self._taken = self.seq

    def take(self) -> Any:
        """Return the next value of the page, or NO_ITEM."""
        for seq, raw in self._page:
            try:
                obj: Any = unpack(raw)
                # Nearly all frames are VALUEs: they need no Frame to be made.
                if (
                    self._parts is None
                    and obj.__class__ is list
                    and len(obj) == 4
                    and type(obj[0]) is int
                    and not obj[0]
                ):
                    self._taken = self.seq = seq
                    return obj[2]
                frame = Frame.from_obj(obj)
            except WireError as exc:
                raise self._unreadable(seq, exc) from exc
            value = self._accept(seq, raw, frame)
            if value is not NO_ITEM:
                self.seq = self._taken
                return value
        return NO_ITEM

    def _accept(self, seq: int, raw: bytes, frame: Frame) -> Any:
        kind = frame.kind
        parts = self._parts
        if parts is not None and kind in (FrameKind.VALUE, FrameKind.BEGIN, FrameKind.END):
            if parts.size is not None:
                raise self._unreadable(seq - 1, parts.wrong_size())
            self._page = iter([(seq, raw), *self._page])  # the value ends here; this frame is taken after it
            return self._joined(parts)
        if kind == FrameKind.ERROR:
            self._take_error(seq, frame)
        self._taken = seq
        if kind == FrameKind.VALUE:
            return frame.body
        if kind == FrameKind.BEGIN:
            self._parts = _Parts(frame.meta)
        elif kind == FrameKind.CHUNK:
            fault = parts.add(frame.body) if parts else "a CHUNK without a BEGIN: the cursor stands inside a value"
            if fault:
                raise self._unreadable(seq, fault)
            if parts is not None and parts.length == parts.size:
                return self._joined(parts)
        elif kind == FrameKind.END:
            self.ended = True
        return NO_ITEM

    def _joined(self, parts: _Parts) -> Any:
        self._parts = None
        try:
            return unpack(b"".join(parts.parts))
        except WireError as exc:
            raise self._unreadable(self._taken, exc) from exc

    def _take_error(self, seq: int, frame: Frame) -> None:
        attempt = _restart_attempt(frame)
        if attempt is None:
            row_error = self._page_state.error if self._page_state is not None else None
            self._fail(Failure.from_dict(frame.meta) if frame.meta else row_error)
        self._parts = None
        if not self._continues:
            self.seq = seq
            self._drop_page()
            raise StreamRestarted(self.id, seq, attempt)


class CallCursor(ValueCursor):
    """Reads the values of a call: submits at the first `fetch_page`, and cancels when it is closed before its end.

    A call with a key is not cancelled: others may share such an invocation.
    """

    _token: EventLoopToken | None

    def __init__(self, plane: Plane, op: Submit) -> None:
        self._op = op
        self._token = None  # of the loop that submitted
        self._cancel_on_close: set[str] = set()  # the plane cancels these when the loop, or the program, ends
        self._submitted = False
        self._owned = False  # closing this reader cancels the invocation
        ValueCursor.__init__(self, plane, op.id, -1, None, "raise")

    async def fetch_page(self) -> bool:
        if not self.ended:
            self._owned = self._op.key is None
        if not self._submitted and not self.ended:
            self._token = loop_token()
            if self._owned:
                self._cancel_on_close = await self._plane.cancel_on_close()
                self._cancel_on_close.add(self._op.id)
            self.id = await self._plane.do(self._op)
            self._submitted = True
        return await super().fetch_page()

    def _disown(self) -> None:
        self._owned = False
        self._cancel_on_close.discard(self._op.id)

    def _fail(self, error: Failure | None) -> NoReturn:
        self._disown()
        super()._fail(error)

    def _take_error(self, seq: int, frame: Frame) -> None:
        self._disown()  # the invocation ended, or its caller learns from which seq to read on
        super()._take_error(seq, frame)

    def close_early(self) -> bool:
        """End; return whether the invocation is to be cancelled, which is True once at most."""
        cancels = self._owned and not self.ended
        self._owned = False
        if not cancels:
            self._disown()
        self.end()
        return cancels

    async def cancel(self) -> None:
        """Cancel the invocation, best effort, within a second."""
        await _cancel_and_forget(self._plane, self._op, self._cancel_on_close)

    def __del__(self) -> None:
        if self._token is not None and self.close_early() and not sys.is_finalizing():
            run_sync_soon(self._token, spawn, partial(_cancel_and_forget, self._plane, self._op, self._cancel_on_close))


async def _cancel_and_forget(plane: Plane, op: Submit, cancel_on_close: set[str]) -> None:
    await cancel_remote(plane, op)
    cancel_on_close.discard(op.id)
