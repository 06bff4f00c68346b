"""Reads a file of frames while a child still writes it: the values in it, packed as they are."""

from __future__ import annotations

import os
import threading
from collections import deque
from typing import TYPE_CHECKING

from ..daemon.workdir import open_file
from ..errors import WireError
from ..wire import FrameKind
from ..wire._msgpack import READ_ERRORS, OutOfData, Unpacker

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["MAX_VALUE_BYTES", "FrameTail"]

MAX_VALUE_BYTES = 1_000_000_000
"""Bytes of the largest value, yielded or returned, that is read. A plane in a file takes no more."""
READ_BYTES = 1 << 20
"""Bytes that one read takes; more if a frame is larger."""


class FrameTail:
    """The frames of a file, from its beginning on."""

    def __init__(self, path: Path) -> None:
        self.values: deque[bytes] = deque()
        """The packed values that were read. To forward one is to take it out; a cancelled reader leaves the rest here."""
        self._path = path
        self._file: int | None = None
        self._found = False
        self._closed = False
        self._offset = 0
        self._rest = b""  # the beginning of a frame whose end was not there yet
        self._lock = threading.Lock()  # asyncio's own cancellation may leave a thread that is still reading

    def read(self) -> bool:
        """Read on. Return whether there was anything new: the file itself, or more bytes in it.

        Raises:
            WireError: The bytes are not frames, or a frame is not one of a value.
        """
        with self._lock:
            file = self._open()
            if file is None:
                return False
            is_new = not self._found
            self._found = True
            more = os.pread(file, max(READ_BYTES, len(self._rest)), self._offset)
            if more:
                self._offset += len(more)
                self._parse(self._rest + more)
            return is_new or bool(more)

    @property
    def left(self) -> int:
        """The number of bytes in the file that were not read yet."""
        with self._lock:
            file = self._open()
            return 0 if file is None else os.fstat(file).st_size - self._offset

    def close(self) -> None:
        """Close the file. After this nothing more is read."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file = None
            self._closed = True

    def check_end(self) -> None:
        """Raise WireError if the file, which was read to its end, ends inside a frame."""
        if self._rest:
            raise WireError(f"{self._path.name} ends inside a frame, {len(self._rest)} bytes after its begin")

    def _open(self) -> int | None:
        if self._file is None and not self._closed:
            self._file = open_file(self._path)
        return self._file

    def _parse(self, data: bytes) -> None:
        try:
            values, end = _complete_values(data)
        except READ_ERRORS as exc:
            start = self._offset - len(data)
            raise WireError(f"{self._path.name} holds something that is no frame, after byte {start}: {exc}") from exc
        self.values.extend(values)
        self._rest = data[end:]
        if len(self._rest) > MAX_VALUE_BYTES:
            raise WireError(
                f"{self._path.name} holds a frame of more than {MAX_VALUE_BYTES} bytes, which no plane takes"
            )


def _complete_values(data: bytes) -> tuple[list[bytes], int]:
    """Return the packed values of the complete frames in `data`, and the position after the last of these frames."""
    unpacker = Unpacker(max_buffer_size=0, read_size=len(data), strict_map_key=False)
    unpacker.feed(data)
    values: list[bytes] = []
    end = 0
    try:
        while True:
            size = unpacker.read_array_header()
            if size != 4:
                raise WireError(f"an array of {size}, where a frame is one of 4")
            kind = unpacker.unpack()
            unpacker.skip()  # the number
            start = unpacker.tell()
            unpacker.skip()  # the value
            value = slice(start, unpacker.tell())
            unpacker.skip()  # the meta fields
            end = unpacker.tell()
            if kind == FrameKind.VALUE:
                values.append(data[value])
            elif kind not in (FrameKind.END, FrameKind.ERROR):  # the outcome is read elsewhere
                raise WireError(f"a frame of kind {kind!r:.40}, where one of a value should be")
    except OutOfData:
        return values, end
