"""The parts of msgpack that the wire uses, with types: the distribution ships none."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import msgpack

if TYPE_CHECKING:
    from collections.abc import Callable

_module: Any = msgpack

version: tuple[int, ...] = _module.version
packb: Callable[..., bytes] = _module.packb
unpackb: Callable[..., Any] = _module.unpackb
Packer: Any = _module.Packer
Unpacker: Any = _module.Unpacker
new_ext: Any = functools.partial(tuple.__new__, _module.ExtType)  # pyright: ignore[reportUnknownMemberType]
"""`new_ext((code, body))` makes an ExtType without its constructor, which is slow and accepts no codes below 0."""
ExtraData: type[Exception] = _module.ExtraData
FormatError: type[Exception] = _module.FormatError
StackError: type[Exception] = _module.StackError
OutOfData: type[Exception] = _module.OutOfData

READ_ERRORS: tuple[type[Exception], ...] = (
    ValueError,
    TypeError,
    OverflowError,
    RecursionError,
    _module.UnpackException,
)
"""What reading bytes may raise: msgpack's own errors, text that is not UTF-8, an unhashable map key, a size too large."""
