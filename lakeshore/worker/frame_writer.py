"""Writes yielded values to the journal: numbers their frames, appends them in batches, and makes the body wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from ..body.execute import Backpressure
from ..client.cursors import restart_frame
from ..concurrency.backoff import Backoff
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

CHUNK_BYTES = 4 << 20
"""Bytes of one piece of a value that is too large for one frame."""
FIRST_APPEND_DELAY = 0.1
MAX_APPEND_DELAY = 5.0
"""Seconds between two attempts to append frames."""
MAX_REJECTION_TIME = 30.0
"""Seconds for which the plane may reject this worker's credentials before its body ends."""


class FrameWriter:
    """Frames of one claim, on their way to the journal.

    `add` may be called from any thread and never blocks. Its result is what the body does next.

    One append is under way at a time: appends side by side could land out of order. Frames that come meanwhile make up the
    next one. A body waits for the first append of its attempt, so that readers see something at once even of a body that
    never awaits. Frames are numbered from the claim's `next_seq`; if earlier attempts left frames in the journal, the first
    frame announces the restart.
    """

    def __init__(self, plane: Plane, fence: Fence, claimed: Claimed, group: TaskGroup) -> None:
        self._plane = plane
        self._fence = fence
        self._claimed = claimed
        self._group = group
        self._token = loop_token()
        self._backoff = Backoff(FIRST_APPEND_DELAY, MAX_APPEND_DELAY, jitter=0.0)
        self._auth_grace = AuthGrace(MAX_REJECTION_TIME)
        self._lock = threading.Lock()  # for what follows, up to the next blank line
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._next_seq = claimed.next_seq
        self._flushing = False
        self.error: LakeshoreError | None = None
        """What ended the writer: the claim is lost, the plane refuses the frames, or `stop` was called."""

        self.flushed = claimed.next_seq
        """The number after the last frame that is known to be in the journal."""
        self._progress = anyio.Event()
        if claimed.next_seq > 0:
            self._push(restart_frame(claimed.next_seq, claimed.attempt))

    # --- for the body ---

    def add(self, value: Any) -> Backpressure:
        """Put a value at the end of the stream. Raises EncodeError, or `error`."""
        return self.add_packed(pack(value))

    def add_packed(self, data: bytes) -> Backpressure:
        """Put a value that is packed already at the end of the stream. Raises `error`."""
        with self._lock:
            if self.error is not None:
                raise self.error
            if len(data) <= MAX_VALUE_FRAME_BYTES:
                self._push(b"".join((b"\x94\x00", _pack_seq(self._next_seq), data, b"\xc0")))
            else:
                self._push_chunks(data)
            starts_flush = not self._flushing
            self._flushing = True
            must_wait = self._full or self.flushed == self._claimed.next_seq
        if starts_flush:
            run_sync_soon(self._token, self._start_flush)
        if must_wait:
            return Backpressure.WAIT
        return Backpressure.CHECKPOINT if starts_flush else Backpressure.NONE

    async def room(self) -> None:
        """Let the loop run once, then wait for the end of the first append, and while too much waits. Raises `error`."""
        await checkpoint()
        while self.error is None:
            progress = self._progress
            if self.flushed > self._claimed.next_seq and not self._full:
                return
            await progress.wait()
        raise self.error

    @property
    def _full(self) -> bool:
        return len(self._waiting) >= MAX_FRAMES_PER_PAGE or self._waiting_bytes >= MAX_BYTES_PER_PAGE

    def _push(self, frame: bytes) -> None:
        self._waiting.append(frame)
        self._waiting_bytes += len(frame)
        self._next_seq += 1

    def _push_chunks(self, data: bytes) -> None:
        self._push(Frame(FrameKind.BEGIN, self._next_seq, None, {"size": len(data)}).to_bytes())
        for start in range(0, len(data), CHUNK_BYTES):
            self._push(Frame(FrameKind.CHUNK, self._next_seq, data[start : start + CHUNK_BYTES]).to_bytes())

    # --- for the worker ---

    def stop(self, reason: str) -> None:
        """Take no more values: `add` and `room` raise ClaimLost."""
        self._fail(ClaimLost(self._claimed.id, reason))

    async def drain(self) -> None:
        """Wait, after the body's end, until every frame is in the journal or the writer has an `error`."""
        while self.error is None:
            progress = self._progress
            with self._lock:
                starts_flush = not self._flushing
                if starts_flush and not self._waiting:
                    return
                self._flushing = True
            if starts_flush:
                await self._flush()
            else:
                await progress.wait()

    # --- appending ---

    def _start_flush(self) -> None:
        try:
            self._group.start_soon(self._flush)
        except RuntimeError:
            self._fail(PlaneUnavailable("the worker ended while frames were on their way"))

    async def _flush(self) -> None:
        """Append frames until none waits. The caller has set `_flushing`; whatever happens, it is False afterwards."""
        try:
            while frames := self._take():
                self._notify()  # the body goes on while these frames are on their way
                try:
                    await self._plane.append(self._fence, self.flushed, frames)
                except BaseException as exc:
                    self._put_back(frames)
                    if not isinstance(exc, (PlaneUnavailable, NotAuthorized)) or self._auth_grace.exceeded(exc):
                        raise
                    logger.warning("frames of %s wait for the plane: %s", self._claimed.id, exc)
                    await self._backoff.pause()
                else:
                    self.flushed += len(frames)
                    if self._backoff.failures:
                        self._backoff.reset()
                        self._auth_grace.reset()
                    self._notify()
        except Exception as exc:  # any error ends this body only, not the worker
            if not isinstance(exc, LakeshoreError):
                exc = DispatchError(f"frames cannot be written: {type(exc).__name__}: {exc}")
            self._fail(exc)
        except BaseException:  # cancelled with the worker: `drain` appends the rest
            with self._lock:
                self._flushing = False
            self._notify()
            raise

    def _take(self) -> list[bytes]:
        """Take the frames of the next append, within the bounds. If there are none, no flush is under way any more."""
        frames: list[bytes] = []
        size = 0
        with self._lock:
            while self._waiting and self.error is None and len(frames) < MAX_FRAMES_PER_PAGE:
                if frames and size + len(self._waiting[0]) > MAX_BYTES_PER_PAGE:
                    break
                size += len(self._waiting[0])
                frames.append(self._waiting.popleft())
            self._waiting_bytes -= size
            self._flushing = bool(frames)
        return frames

    def _put_back(self, frames: list[bytes]) -> None:
        with self._lock:
            self._waiting.extendleft(reversed(frames))
            self._waiting_bytes += sum(map(len, frames))

    def _fail(self, error: LakeshoreError) -> None:
        with self._lock:
            if self.error is None:
                self.error = error
            self._flushing = False
            self._waiting.clear()
            self._waiting_bytes = 0
        self._notify()

    def _notify(self) -> None:
        """Wake everything that waits for progress."""
        self._progress.set()
        self._progress = anyio.Event()


def _pack_seq(seq: int) -> bytes:
    """Return a frame's number as `wire.pack` packs it, but quicker: it needs none of the checks of users' values."""
    if seq < 0x80:
        return seq.to_bytes(1, "big")
    if seq < 0x100:
        return b"\xcc" + seq.to_bytes(1, "big")
    if seq < 0x10000:
        return b"\xcd" + seq.to_bytes(2, "big")
    if seq < 0x100000000:
        return b"\xce" + seq.to_bytes(4, "big")
    return b"\xcf" + seq.to_bytes(8, "big")


def final_frame(seq: int, failure: Failure | None, state: str) -> FinalFrame:
    """Return the frame that closes a journal: END with the state, or ERROR with the failure."""
    if failure is None:
        frame = Frame(FrameKind.END, seq, None, {"state": state})
    else:
        frame = Frame(FrameKind.ERROR, seq, None, failure.as_dict())
    return FinalFrame(seq, frame.to_bytes())
