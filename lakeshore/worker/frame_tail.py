"""Reading a file of frames while somebody else writes it: the packed values in it, as they are."""

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

__all__ = ["LARGEST", "FrameTail"]

LARGEST = 1_000_000_000
"""Bytes of the largest value that is read, be it a result: a plane in a file takes no more."""
BITE = 1 << 20
"""Bytes read at once; more of a frame that is larger."""


class FrameTail:
    """The frames of a file from its begin on.

    `values`: the packed values that were read and not yet taken; a reader that is cancelled leaves the rest there.
    """

    def __init__(self, path: Path) -> None:
        self.values = deque[bytes]()
        self._path = path
        self._file: int | None = None
        self._seen = self._closed = False
        self._offset = 0
        self._rest = b""
        self._lock = threading.Lock()  # asyncio's own cancellation may leave a read under way

    def read(self) -> bool:
        """Read on; whether there was anything new: the file itself, or more bytes in it.

        Raises WireError for what is no frame, or none of a value.
        """
        with self._lock:
            file = self._open()
            if file is None:
                return False
            new, self._seen = not self._seen, True
            more = os.pread(file, max(BITE, len(self._rest)), self._offset)
            self._offset += len(more)
            self._take(self._rest + more if more else b"")
            return new or bool(more)

    @property
    def left(self) -> int:
        """How many bytes of the file are still to be read."""
        with self._lock:
            file = self._open()
            return 0 if file is None else os.fstat(file).st_size - self._offset

    def _open(self) -> int | None:
        if self._file is None and not self._closed:
            self._file = open_file(self._path)
        return self._file

    def _take(self, data: bytes) -> None:
        if data:
            try:
                values, end = _values(data)
            except READ_ERRORS as exc:
                at = self._offset - len(data)
                raise WireError(f"{self._path.name} holds something that is no frame, after byte {at}: {exc}") from exc
            self.values.extend(values)
            self._rest = data[end:]
            if len(self._rest) > LARGEST:
                raise WireError(f"{self._path.name} holds a frame of more than {LARGEST} bytes, which no plane takes")

    def close(self) -> None:
        """After this nothing more is read."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
            self._file, self._closed = None, True

    def check_end(self) -> None:
        """Raises WireError when the file, read to its end, ends inside a frame."""
        if self._rest:
            raise WireError(f"{self._path.name} ends inside a frame, {len(self._rest)} bytes after its begin")


def _values(data: bytes) -> tuple[list[bytes], int]:
    """The packed bodies of the complete frames in `data`, and where these end."""
    unpacker = Unpacker(max_buffer_size=0, read_size=len(data), strict_map_key=False)
    unpacker.feed(data)
    values, end = list[bytes](), 0
    try:
        while True:
            size = unpacker.read_array_header()
            if size != 4:
                raise WireError(f"an array of {size}, where a frame is one of 4")
            kind = unpacker.unpack()
            unpacker.skip()
            begin = unpacker.tell()
            unpacker.skip()
            body = slice(begin, unpacker.tell())
            unpacker.skip()
            end = unpacker.tell()
            if kind == FrameKind.VALUE:
                values.append(data[body])
            elif kind not in (FrameKind.END, FrameKind.ERROR):  # how it ended, others say
                raise WireError(f"a frame of kind {kind!r:.40}, where one of a value should be")
    except OutOfData:
        return values, end
