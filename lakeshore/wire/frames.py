"""Frames: what a streaming invocation writes to its journal, and how they are read from any split of their bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from ..errors import WireError
from ..limits import MAX_FRAME_BYTES
from . import _msgpack
from .codec import dump, ext_hook, spliced, unpack, wire_error
from .values import kind_of

if TYPE_CHECKING:
    from .registry import Buffer

__all__ = ["Frame", "FrameDecoder", "FrameKind", "FrameReader"]

FEED_BYTES = 1 << 20
"""Bytes handed to msgpack at once: bounds what its buffer holds beside the frame being read."""


class FrameKind(IntEnum):
    """The kind of a frame. Readers keep kinds they do not know as plain ints."""

    VALUE = 0
    CHUNK = 1
    BEGIN = 2
    END = 3
    ERROR = 4


_KNOWN = frozenset(map(int, FrameKind))


@dataclass
class Frame:
    """One entry of a journal: `body` is a value of the codec (raw bytes for CHUNK), `meta` a dict or None."""

    kind: int
    seq: int = 0
    body: Any = None
    meta: dict[str, Any] | None = None

    @property
    def terminal(self) -> bool:
        """Whether this frame ends its stream: END and ERROR do."""
        return self.kind in (FrameKind.END, FrameKind.ERROR)

    def to_bytes(self) -> bytes:
        """The packed frame. Raises EncodeError for a body that cannot be packed; `$` in its path is the body."""
        body = self.body
        if type(body) is bytes:
            body = spliced(body)
        return dump([int(self.kind), self.seq, body, self.meta], self.body)

    @classmethod
    def from_bytes(cls, data: Buffer) -> Frame:
        """Read exactly one frame. Raises WireError."""
        return cls.from_obj(unpack(data))

    @classmethod
    def from_obj(cls, obj: Any) -> Frame:
        """The frame of an unpacked `[kind, seq, body, meta]`. Raises WireError for anything else."""
        if kind_of(obj) is not list or len(obj) != 4:
            raise WireError(f"not a frame: expected an array [kind, seq, body, meta], got {_shape(obj)}")
        kind, seq, body, meta = obj
        if kind_of(kind) is not int or kind_of(seq) is not int or not (meta is None or kind_of(meta) is dict):
            raise WireError(
                "not a frame: expected an integer kind, an integer seq and a map or nil as meta, "
                f"got {_shape(kind)}, {_shape(seq)} and {_shape(meta)}"
            )
        return cls(FrameKind(kind) if kind in _KNOWN else kind, seq, body, meta)


def _shape(obj: Any) -> str:
    return f"an array of {len(obj)}" if kind_of(obj) is list else f"a {kind_of(obj).__name__}"


class FrameDecoder:
    """Reads frames from bytes that come in pieces cut anywhere. No I/O.

    `feed` takes the next piece, `close` checks that the last one ended a frame. After an error the decoder raises the same
    error again.
    """

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        """
        Args:
            limit: Bytes of one frame; a larger one is an error.
        """
        if limit < 1:
            raise ValueError(f"the limit of a frame is a number of bytes from 1, not {limit}")
        self._limit = limit
        self._unpacker = _msgpack.Unpacker(
            ext_hook=ext_hook,
            strict_map_key=False,
            read_size=1 << 16,
            max_buffer_size=limit + 2 * FEED_BYTES,  # never full: `_check_size` raises first, with a better message
            max_str_len=limit,
            max_bin_len=limit,
            max_ext_len=limit,
            max_array_len=limit,
            max_map_len=limit,
        )
        self._waiting: deque[memoryview] = deque()
        self._fed = 0  # bytes given to msgpack so far
        self._begin = 0  # where among them the frame being read begins
        self._broken: str | None = None

    def feed(self, chunk: Buffer) -> Iterator[Frame]:
        """Take a chunk.

        Returns:
            The frames that are complete now, each decoded when the iteration reaches it. Those that it does not reach
            come with the next call.

        Raises:
            WireError: In the iteration, after the frames before the fault: a frame is too large, or it is no frame.
        """
        whole = memoryview(chunk if type(chunk) is bytes else bytes(chunk))  # a lazy reader must own its bytes
        self._waiting.extend(whole[at : at + FEED_BYTES] for at in range(0, len(whole), FEED_BYTES))
        return self._frames()

    def close(self) -> None:
        """End the input. Raises WireError if it was cut inside a frame."""
        if self._broken is not None:
            raise WireError(self._broken)
        rest = self._fed - self._begin + sum(map(len, self._waiting))
        if rest:
            raise WireError(
                f"the input ended inside a frame, {rest} bytes after its begin: the connection was cut; "
                "read on from the last seq that arrived"
            )

    def _frames(self) -> Iterator[Frame]:
        while True:
            if self._broken is not None:
                raise WireError(self._broken)
            try:
                frame = self._next()
            except WireError as error:
                self._broken = str(error)
                raise
            if frame is None:
                return
            yield frame

    def _next(self) -> Frame | None:
        """The next frame, None if more bytes are needed."""
        unpacker = self._unpacker
        while True:
            try:
                obj: Any = unpacker.unpack()
            except _msgpack.OutOfData:
                self._check_size(self._fed)
                if not self._waiting:
                    return None
                piece = self._waiting.popleft()
                unpacker.feed(piece)
                self._fed += len(piece)
            except WireError:
                raise
            except _msgpack.READ_ERRORS as error:
                if "exceeds max" in str(error):
                    raise self._too_large() from error
                raise wire_error(error, self._fed - self._begin) from error
            else:
                end: int = unpacker.tell()
                self._check_size(end)
                self._begin = end
                return Frame.from_obj(obj)

    def _check_size(self, end: int) -> None:
        if end - self._begin > self._limit:
            raise self._too_large()

    def _too_large(self) -> WireError:
        return WireError(
            f"a frame is larger than this reader's limit of {self._limit} bytes: "
            "give the reader a larger limit, or yield the value in smaller parts"
        )


class FrameReader(AsyncIterator[Frame]):
    """The frames of an asynchronous source of bytes, in order.

    Ends with the source. Cancellation: a cancelled read loses nothing, and the next one goes on.

    Raises WireError, from each read, when the source ends inside a frame, for a frame of more than `limit` bytes and for
    what is no frame.
    """

    def __init__(self, source: AsyncIterable[bytes], limit: int = MAX_FRAME_BYTES) -> None:
        self._chunks = aiter(source)
        self._decoder = FrameDecoder(limit)
        self._ready: Iterator[Frame] = iter(())

    async def __anext__(self) -> Frame:
        while True:
            for frame in self._ready:
                return frame
            chunk = await anext(self._chunks, None)
            if chunk is None:
                self._decoder.close()
                raise StopAsyncIteration
            self._ready = self._decoder.feed(chunk)
