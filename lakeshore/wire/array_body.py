"""The body of an array or tensor: `[dtype, shape, elements in C order]`. Large elements are never copied here."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from ..limits import MAX_COPIED_BYTES
from . import _msgpack
from .values import kind_of

if TYPE_CHECKING:
    from .registry import Buffer

__all__ = ["array_body", "check_length", "split_body"]

MAX_HEAD_BYTES = 1 << 16
"""Bytes in which dtype and shape end, unless the dtype has thousands of fields."""


def array_body(dtype: object, shape: Any, data: Buffer) -> list[Buffer]:
    """The pieces of a body.

    Args:
        dtype: The dtype as it travels.
        shape: The sizes of the dimensions.
        data: The elements; a flat buffer.
    """
    head = b"\x93" + _msgpack.packb(dtype) + _msgpack.packb(list(shape))
    size = len(data)
    if size < 1 << 8:
        return [head + b"\xc4" + bytes((size,)), data]
    if size < 1 << 16:
        return [head + b"\xc5" + struct.pack(">H", size), data]
    if size < 1 << 32:
        return [head + b"\xc6" + struct.pack(">I", size), data]
    raise ValueError(f"its {size} bytes are more than the 4 GiB that fit")


def split_body(body: Buffer) -> tuple[object, tuple[int, ...], Buffer]:
    """Dtype as it travelled, shape and elements of a body. Raises ValueError, and what msgpack raises."""
    items: Any = _split_large(body) if len(body) > MAX_COPIED_BYTES else None
    if items is None:
        items = _msgpack.unpackb(body)
    if kind_of(items) not in (list, tuple) or len(items) != 3:
        raise ValueError("the body is not [dtype, shape, bytes]")
    dtype, shape, data = items
    if kind_of(shape) is not list or not all(kind_of(size) is int and size >= 0 for size in shape):
        raise ValueError("the shape is not a list of sizes")
    if kind_of(data) not in (bytes, memoryview):
        raise ValueError("the elements are not bytes")
    return dtype, tuple(shape), data


def _split_large(body: Buffer) -> tuple[object, object, memoryview] | None:
    """The three parts with a view on the elements; None when the body does not look as expected."""
    view = memoryview(body)
    head = _msgpack.Unpacker(read_size=MAX_HEAD_BYTES, strict_map_key=False)
    head.feed(view[:MAX_HEAD_BYTES])
    try:
        if head.read_array_header() != 3:
            return None
        dtype = head.unpack()
        shape = head.unpack()
    except _msgpack.READ_ERRORS:
        return None
    at: int = head.tell()
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(view[at]) if at < len(view) else None
    if width is None:
        return None
    data = view[at + 1 + width :]
    if int.from_bytes(view[at + 1 : at + 1 + width]) != len(data):
        return None
    return dtype, shape, data


def check_length(shape: tuple[int, ...], itemsize: int, data: Buffer) -> None:
    """Raise ValueError unless `data` has the bytes that shape and item size ask for."""
    expected = math.prod(shape) * itemsize
    if expected != len(data):
        raise ValueError(f"shape and dtype ask for {expected} bytes, {len(data)} came")
