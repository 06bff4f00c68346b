"""The reading end of a journal: its frames as they are, the values in them, and streams that own their invocation.

Between two items a reader holds a cursor and the page being read, nothing else: no task, no scope, no place in a
queue of waiters. So it may be left in any way, and in any task, with nothing to clean up. A *cursor* class below is
the whole reader but for how it waits: `take` gives the next item of the page held, `turn` gets the next page. The
async iterators here and the blocking ones in `sync` are two ways to call these two.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

import anyio

from ..concurrency.loops import loop_token, run_sync_soon
from ..concurrency.tasks import spawn
from ..errors import InvocationNotFound, LakeshoreError, StreamRestarted, WireError, invocation_failed
from ..planes.contract.operations import Cancel
from ..planes.contract.records import TERMINAL, Failure, Outcome, Page
from ..wire import Frame, FrameKind, unpack

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.lowlevel import EventLoopToken

    from ..planes.contract.operations import Submit
    from ..planes.plane import Plane

__all__ = [
    "NOTHING",
    "CallCursor",
    "CallValues",
    "FrameCursor",
    "Frames",
    "Restart",
    "ValueCursor",
    "Values",
    "failure_of",
    "leave",
    "restart_frame",
]

logger = logging.getLogger("dreamlake.lakeshore.streams")

Restart = Literal["raise", "continue"]

RESTARTED = "StreamRestarted"
LEAVE_BOUND = 1.0
"""Seconds that leaving a call takes at most."""


class _Nothing:
    pass


NOTHING: Final = _Nothing()
"""What `take` gives when the page held has no further item: None is a value like any other."""


def failure_of(outcome: Outcome) -> Exception:
    """The error for an outcome that is not `succeeded`."""
    error = outcome.error or Failure("Error", "no error was reported")
    return invocation_failed(outcome.id, outcome.state, error.type, error.message, error.traceback)


def restart_frame(seq: int, attempt: int) -> bytes:
    """The frame with which an attempt begins that finds another one's frames in its journal."""
    meta = {"type": RESTARTED, "message": f"the body was started again, as attempt {attempt}", "attempt": attempt}
    return Frame(FrameKind.ERROR, seq, None, meta).to_bytes()


async def leave(plane: Plane, op: Submit) -> None:
    """Cancel the invocation of a call that its caller leaves, however far its submit has come.

    Best effort, for a second at most, and not cut short by the cancellation that made the caller leave.
    """
    with anyio.move_on_after(LEAVE_BOUND, shield=True):
        try:
            await plane.cancel(op.id)
        except InvocationNotFound:
            # The submit was withdrawn, or is still under way, maybe on another lane. Submitted again it has come to its
            # end before the cancel begins; where it was withdrawn, that leaves one killed row.
            await plane.many([op, Cancel(op.id)])
        except LakeshoreError as exc:
            logger.debug("invocation %s was left and could not be cancelled: %s", op.id, exc)


class Cursor:
    """A place in the journal of one invocation, and the page being read."""

    def __init__(self, plane: Plane, id: str, since: int, timeout: float | None) -> None:
        self.id = id
        self.seq = since
        """The seq of the last item delivered: a reader with `since=seq` gets what follows it."""
        self.ended = False
        """Nothing follows, or the reader was closed."""
        self._plane, self._timeout = plane, timeout
        self._at = since  # of the last frame taken; ahead of `seq` inside a value that is being joined
        self._page: Iterator[tuple[int, bytes]] = iter(())
        self._stood: Page | None = None  # how journal and row stood at the page held, without its frames

    def end(self) -> None:
        """Give nothing any more, also where a call of `turn` is waiting now."""
        self.ended = True
        self._drop()

    def _drop(self) -> None:
        """Forget the page: what was not taken of it is read again."""
        self._page, self._stood = iter(()), None

    async def turn(self) -> bool:
        """Hold the next page, waiting for it; False at the end of the stream, which `take` must have come to."""
        if not self.ended and self._stood is not None and self._stood.closed:
            self._finish(self._stood)
        if self.ended:
            return False
        since = self._at
        try:
            page = await self._plane.next_page(self.id, since, timeout=self._timeout)
        except TimeoutError:
            raise TimeoutError(
                f"invocation {self.id!r} gave nothing after {self.seq} for {self._timeout} s; "
                f"it goes on, read on with since={self.seq}"
            ) from None
        if since == self._at and not self.ended:  # no other task has read on meanwhile
            self._page, self._stood = iter(page.frames), page._replace(frames=[])
        return True

    def _finish(self, stood: Page) -> None:
        """The journal is read to its end, and no frame said so: a stream never ends silently where its body did not."""
        if stood.state in TERMINAL and stood.state != "succeeded":
            self._fail(stood.error)
        self.ended = True

    def _fail(self, error: Failure | None) -> NoReturn:
        state = self._stood.state if self._stood is not None else ""
        self._drop()  # asked again, it is the same
        state = state if state in TERMINAL and state != "succeeded" else "failed"
        raise failure_of(Outcome(self.id, state, None, error))

    def _unreadable(self, seq: int, why: object) -> WireError:
        self._drop()
        return WireError(f"frame {seq} of invocation {self.id!r} cannot be read: {why}; since={seq} passes it over")


class FrameCursor(Cursor):
    """Frames, as they are."""

    def take(self) -> Frame | _Nothing:
        """The next frame of the page held, with the journal's number: what it carries inside is its writer's word."""
        for seq, raw in self._page:
            try:
                frame = Frame.from_bytes(raw)
            except WireError as exc:
                raise self._unreadable(seq, exc) from exc
            frame.seq = self.seq = self._at = seq
            self.ended = frame.terminal and _restart(frame) is None
            return frame
        return NOTHING


class _Parts:
    """A value that came in CHUNKs, being joined. `size`: what its BEGIN announced, if it did."""

    def __init__(self, meta: dict[str, Any] | None) -> None:
        size = (meta or {}).get("size")
        self.size = size if type(size) is int else None
        self.held = 0
        self.parts: list[bytes] = []

    def add(self, part: object) -> str | None:
        """Take a part; what is wrong with it, if anything is."""
        if type(part) is not bytes:
            return f"expected the bytes of a CHUNK, got a {type(part).__name__}"
        self.parts.append(part)
        self.held += len(part)
        return None if self.size is None or self.held <= self.size else self.short()

    def short(self) -> str:
        return f"{self.size} bytes were announced for its value, and {self.held} came"


class ValueCursor(Cursor):
    """The values in the frames: chunks are joined, errors raised, restarts announced."""

    def __init__(self, plane: Plane, id: str, since: int, timeout: float | None, on_restart: Restart) -> None:
        super().__init__(plane, id, since, timeout)
        if on_restart not in ("raise", "continue"):
            raise ValueError(f'expected on_restart="raise" or "continue", got {on_restart!r}')
        self._continues = on_restart == "continue"
        self._parts: _Parts | None = None

    def _drop(self) -> None:
        super()._drop()
        self._parts, self._at = None, self.seq

    def take(self) -> Any:
        """The next value of the page held, or NOTHING."""
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
                    self._at = self.seq = seq
                    return obj[2]
                frame = Frame.from_obj(obj)
            except WireError as exc:
                raise self._unreadable(seq, exc) from exc
            value = self._accept(seq, raw, frame)
            if value is not NOTHING:
                self.seq = self._at
                return value
        return NOTHING

    def _accept(self, seq: int, raw: bytes, frame: Frame) -> Any:
        kind, parts = frame.kind, self._parts
        if parts is not None and kind in (FrameKind.VALUE, FrameKind.BEGIN, FrameKind.END):
            if parts.size is not None:
                raise self._unreadable(seq - 1, parts.short())
            self._page = iter([(seq, raw), *self._page])  # the value ends here; this frame comes after it
            return self._joined(parts)
        if kind == FrameKind.ERROR:
            self._error(seq, frame)
        self._at = seq
        if kind == FrameKind.VALUE:
            return frame.body
        if kind == FrameKind.BEGIN:
            self._parts = _Parts(frame.meta)
        elif kind == FrameKind.CHUNK:
            fault = parts.add(frame.body) if parts else "a CHUNK without a BEGIN: the cursor stands inside a value"
            if fault:
                raise self._unreadable(seq, fault)
            if parts is not None and parts.held == parts.size:
                return self._joined(parts)
        elif kind == FrameKind.END:
            self.ended = True
        return NOTHING

    def _joined(self, parts: _Parts) -> Any:
        self._parts = None
        try:
            return unpack(b"".join(parts.parts))
        except WireError as exc:
            raise self._unreadable(self._at, exc) from exc

    def _error(self, seq: int, frame: Frame) -> None:
        attempt = _restart(frame)
        if attempt is None:
            self._fail(Failure.from_dict(frame.meta) if frame.meta else self._stood and self._stood.error)
        self._parts = None
        if not self._continues:
            self.seq = seq
            self._drop()
            raise StreamRestarted(self.id, seq, attempt)


def _restart(frame: Frame) -> int | None:
    """The attempt that this frame announces. A body that failed with StreamRestarted names no attempt."""
    meta = frame.meta
    if frame.kind != FrameKind.ERROR or meta is None or meta.get("type") != RESTARTED:
        return None
    attempt = meta.get("attempt")
    return attempt if type(attempt) is int else None


class Frames(FrameCursor, AsyncIterator[Frame]):
    """The frames of an invocation, live, of every kind; `seq` of each, and of the iterator, is the journal's.

    Ends after END or a final ERROR. Raises InvocationFailed when the invocation ended otherwise than `succeeded` and no
    frame says so; TimeoutError after `timeout` seconds without a frame; InvocationNotFound; WireError for a frame that
    cannot be read. Cancelling a read loses nothing, and leaves the invocation alone.
    """

    async def __anext__(self) -> Frame:
        while isinstance(frame := self.take(), _Nothing):
            if not await self.turn():
                raise StopAsyncIteration
        return frame

    async def aclose(self) -> None:
        """End the iterator; the invocation goes on."""
        self.end()


class Values(ValueCursor, AsyncIterator[Any]):
    """The values that an invocation yields, live; `seq` is that of the last one delivered, to read on with `since`.

    Raises InvocationFailed when the invocation ends otherwise than `succeeded`; StreamRestarted where its body was
    started again after it had yielded (the iterator may be asked on, and gives the new attempt), unless made with
    `on_restart="continue"`; TimeoutError after `timeout` seconds without a frame; InvocationNotFound; WireError for a
    frame that cannot be read. Cancelling a read loses nothing, and leaves the invocation alone.
    """

    async def __anext__(self) -> Any:
        while (value := self.take()) is NOTHING:
            if not await self.turn():
                raise StopAsyncIteration
        return value

    async def aclose(self) -> None:
        """End the iterator; the invocation goes on."""
        self.end()


class CallCursor(ValueCursor):
    """The stream of a call: submits when it is first asked for a value, and cancels when it is left before its end.

    Not so with a key: others may share such an invocation.
    """

    def __init__(self, plane: Plane, op: Submit) -> None:
        self._op, self._token = op, None
        self._owed: set[str] = set()
        self._submitted = self._mine = False
        ValueCursor.__init__(self, plane, op.id, -1, None, "raise")

    _token: EventLoopToken | None

    async def turn(self) -> bool:
        if not self.ended:
            self._mine = self._op.key is None
        if not self._submitted and not self.ended:
            self._token = loop_token()
            if self._mine:  # for when the loop, or the program, ends in the middle of it
                self._owed = await self._plane.cancel_on_close()
                self._owed.add(self._op.id)
            self.id = await self._plane.do(self._op)
            self._submitted = True
        return await super().turn()

    def _settle(self) -> None:
        self._mine = False
        self._owed.discard(self._op.id)

    def _fail(self, error: Failure | None) -> NoReturn:
        self._settle()
        super()._fail(error)

    def _error(self, seq: int, frame: Frame) -> None:
        self._settle()  # it ended, or its caller learns how to read on
        super()._error(seq, frame)

    def left(self) -> bool:
        """End; whether the invocation is to be cancelled. Only the first call says so."""
        mine, self._mine = self._mine and not self.ended, False
        if not mine:
            self._settle()
        self.end()
        return mine

    async def cancel(self) -> None:
        await _leave_and_settle(self._plane, self._op, self._owed)

    def __del__(self) -> None:
        if self._token is not None and self.left() and not sys.is_finalizing():
            run_sync_soon(self._token, spawn, partial(_leave_and_settle, self._plane, self._op, self._owed))


async def _leave_and_settle(plane: Plane, op: Submit, owed: set[str]) -> None:
    await leave(plane, op)
    owed.discard(op.id)


class CallValues(CallCursor, Values):
    """What calling a queue-bound `async def` generator gives: an async iterator over the values, live.

    Leaving it early cancels the invocation: `aclose()` at once (`contextlib.aclosing` is the sure way), a `break` when
    the iterator is collected, which is at once unless it is held elsewhere. Raises what the iterator of `Queue.stream`
    raises, and what a submit raises, at the first `anext`. Cancelling a read alone leaves the stream as it is.
    """

    async def aclose(self) -> None:
        """End the iterator and cancel the invocation, best effort, within a second, also when being cancelled."""
        if self.left():
            await self.cancel()
