"""The writing end of a journal: numbers frames, gathers them while a flush is under way, and makes the body wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from ..body.execute import Backpressure
from ..client.streams import restart_frame
from ..concurrency.loops import loop_token, run_sync_soon
from ..errors import ClaimLost, DispatchError, LakeshoreError, NotAuthorized, PlaneUnavailable
from ..limits import MAX_BYTES_PER_PAGE, MAX_FRAMES_PER_PAGE, MAX_VALUE_FRAME_BYTES
from ..planes.auth_grace import AuthGrace
from ..planes.contract.operations import FinalFrame
from ..wire import Frame, FrameKind, pack

if TYPE_CHECKING:
    from anyio.abc import TaskGroup

    from ..planes.contract.operations import Claimed, Fence
    from ..planes.contract.records import Failure
    from ..planes.plane import Plane

__all__ = ["FrameWriter", "final_frame"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

CHUNK = 4 << 20
"""Bytes of one piece of a value that is too large for one frame."""
REFUSED = 30.0
"""Seconds for which the plane may refuse frames to this worker before that ends their body."""


def _number(seq: int) -> bytes:
    """A frame's number as `wire.pack` packs it: what is no user's value needs none of that one's care."""
    if seq < 0x80:
        return seq.to_bytes(1, "big")
    if seq < 0x100:
        return b"\xcc" + seq.to_bytes(1, "big")
    if seq < 0x10000:
        return b"\xcd" + seq.to_bytes(2, "big")
    return b"\xce" + seq.to_bytes(4, "big") if seq < 0x100000000 else b"\xcf" + seq.to_bytes(8, "big")


class FrameWriter:
    """Frames of one claim, on their way to the journal.

    `add` may be called from any thread and never blocks; its answer says what the body does next. One flush is under
    way at a time, and what comes meanwhile makes up the next: appends side by side would land out of order. The first
    frame of an attempt is waited for, so that a body which never awaits shows something at once. Frames are numbered
    from the claim's `next_seq`; when earlier attempts left frames there, the first one announces the restart.

    `flushed` is the number after the last frame that is known to be in the journal. `error` is what ended the writer: the
    claim is lost, the plane refuses the frames, or `stop` was called.
    """

    def __init__(self, plane: Plane, fence: Fence, claimed: Claimed, group: TaskGroup) -> None:
        self._plane, self._fence, self._claimed, self._group = plane, fence, claimed, group
        self._token = loop_token()
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque()
        self._bytes = 0
        self._next = self.flushed = claimed.next_seq
        self._flushing = False
        self._moved = anyio.Event()
        self.error: LakeshoreError | None = None
        if claimed.next_seq > 0:
            self._push(restart_frame(claimed.next_seq, claimed.attempt))

    # Frames come

    def add(self, value: Any) -> Backpressure:
        """Put one value behind the others. Raises EncodeError, or what ended the writer."""
        return self.add_packed(pack(value))

    def add_packed(self, data: bytes) -> Backpressure:
        """Put one value behind the others that is packed already. Raises what ended the writer."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if len(data) <= MAX_VALUE_FRAME_BYTES:
                self._push(b"".join((b"\x94\x00", _number(self._next), data, b"\xc0")))
            else:
                self._push_chunks(data)
            start, self._flushing = not self._flushing, True
            wait = self._full or self.flushed == self._claimed.next_seq
        if start:
            run_sync_soon(self._token, self._start)
        return Backpressure.WAIT if wait else Backpressure.CHECKPOINT if start else Backpressure.NONE

    @property
    def _full(self) -> bool:
        return len(self._waiting) >= MAX_FRAMES_PER_PAGE or self._bytes >= MAX_BYTES_PER_PAGE

    def _push(self, frame: bytes) -> None:
        self._waiting.append(frame)
        self._bytes += len(frame)
        self._next += 1

    def _push_chunks(self, data: bytes) -> None:
        self._push(Frame(FrameKind.BEGIN, self._next, None, {"size": len(data)}).to_bytes())
        for start in range(0, len(data), CHUNK):
            self._push(Frame(FrameKind.CHUNK, self._next, data[start : start + CHUNK]).to_bytes())

    async def room(self) -> None:
        """Let the loop run once; wait for the first frame's flush, and while no more frames may come.

        Raises what ended the writer.
        """
        await checkpoint()
        while self.error is None:
            moved = self._moved
            if not self._full and self.flushed > self._claimed.next_seq:
                return
            await moved.wait()
        raise self.error

    def stop(self, reason: str) -> None:
        """Take no more: `add` and `room` raise ClaimLost."""
        self._fail(ClaimLost(self._claimed.id, reason))

    # Frames go

    def _start(self) -> None:
        try:
            self._group.start_soon(self._flush)
        except RuntimeError:
            self._fail(PlaneUnavailable("the worker ended while frames were on their way"))

    async def _flush(self) -> None:
        """Append what waits until nothing does. `_flushing` was taken for it, and is given back whatever happens."""
        delay, refusals = 0.1, AuthGrace(REFUSED)
        try:
            while frames := self._take():
                self._move()  # the body goes on while these are on their way
                try:
                    await self._plane.append(self._fence, self.flushed, frames)
                except BaseException as exc:
                    self._put_back(frames)
                    if not isinstance(exc, (PlaneUnavailable, NotAuthorized)) or refusals.lasted(exc):
                        raise
                    logger.warning("frames of %s wait for the plane: %s", self._claimed.id, exc)
                    await anyio.sleep(delay)
                    delay = min(delay * 2, 5.0)
                else:
                    self.flushed += len(frames)
                    refusals.end()
                    self._move()
        except Exception as exc:  # whatever it is, it is this invocation's, not the worker's
            if not isinstance(exc, LakeshoreError):
                exc = DispatchError(f"frames cannot be written: {type(exc).__name__}: {exc}")
            self._fail(exc)
        except BaseException:  # cancelled with the worker: `drain` goes on
            with self._lock:
                self._flushing = False
            self._move()
            raise

    def _take(self) -> list[bytes]:
        """The frames of the next append, within the bounds; when there are none, no flush is under way any more."""
        frames: list[bytes] = []
        size = 0
        with self._lock:
            while self._waiting and self.error is None and len(frames) < MAX_FRAMES_PER_PAGE:
                if frames and size + len(self._waiting[0]) > MAX_BYTES_PER_PAGE:
                    break
                size += len(self._waiting[0])
                frames.append(self._waiting.popleft())
            self._bytes -= size
            self._flushing = bool(frames)
        return frames

    def _put_back(self, frames: list[bytes]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(frames))
            self._bytes += sum(map(len, frames))

    def _fail(self, error: LakeshoreError) -> None:
        with self._lock:
            self.error = self.error or error
            self._flushing = False
            self._waiting.clear()
            self._bytes = 0
        self._move()

    def _move(self) -> None:
        self._moved.set()
        self._moved = anyio.Event()

    async def drain(self) -> None:
        """Wait until every frame is in the journal, or the writer has an `error`. After the body's end."""
        while self.error is None:
            moved = self._moved
            with self._lock:
                mine = not self._flushing
                if mine and not self._waiting:
                    return
                self._flushing = True
            if mine:
                await self._flush()
            else:
                await moved.wait()


def final_frame(seq: int, failure: Failure | None, state: str) -> FinalFrame:
    """The frame that closes a journal: END with the state, or ERROR with the failure."""
    if failure is None:
        frame = Frame(FrameKind.END, seq, None, {"state": state})
    else:
        frame = Frame(FrameKind.ERROR, seq, None, failure.as_dict())
    return FinalFrame(seq, frame.to_bytes())
