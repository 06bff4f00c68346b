"""`pack` and `unpack`: msgpack, with ext codes for what msgpack has no form for.

Packing is strict: only exact types pass. Everything else goes to `_DepthPacker.default`, which makes an ext value of it
or raises CannotPack. Three things here are not obvious from the code:

*One copy.* An array is not handed to msgpack, which would copy it three times. `_DepthPacker.splice` takes what msgpack
has written so far, puts the ext header and the array's own memory behind it as further pieces, lets msgpack write a
nil in the value's place, and drops that byte again. The pieces are joined once, at the very end.

*Depth.* Each ext value inside another one needs a msgpack packer of its own, and msgpack recurses in C: its limit (511
levels, 1024 from version 1.2 on) holds for one packer only, so the product of both can overrun the stack, which kills
the process. Hence `MAX_EXT_DEPTH`, counted per thread over packing and unpacking, also where a codec calls `pack` or
`unpack` itself; and `_check_levels`, which from the fifth packer on keeps to 511 levels whatever the version.

*Whatever packs unpacks.* msgpack packs one level more than it reads. `_DepthPacker` therefore packs each value inside a
list of its own and drops that list's header.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from ..errors import WireError
from ..limits import MAX_COPIED_BYTES
from . import _msgpack, registry
from ._msgpack import new_ext
from .encode_errors import CannotPack, describe_error, encode_error
from .registry import TUPLE, Buffer, decoders, holders
from .values import dicts_in, kind_of, type_name

__all__ = ["MAX_EXT_DEPTH", "Bin", "comes_back", "dump", "ext_hook", "pack", "unpack", "wire_error"]

MAX_EXT_DEPTH = 16
"""Ext values nested in one another."""
MAX_BODY_BYTES = (1 << 32) - 2
"""Of one bin or ext value; msgpack cannot read an ext value of one byte more."""
MAX_KEPT_BUFFER = 1 << 20
"""A msgpack packer whose buffer grew beyond this is replaced: its thread would keep that memory."""
MIN_SCANNED_BYTES = 2048
MAX_SCANNED_BYTES = 16 << 20
"""Between these, bytes are checked before they are unpacked; see `_load`."""
UNCHECKED_EXT_DEPTH = 4
MAX_LEVELS = 512
"""A value inside so many ext values or more may have so many levels of lists and dicts: a tuple's list and 511 in it."""


class Bin:
    """Marks large bytes inside a value that is about to be packed: spliced in like an array, not copied."""

    __slots__ = ("data",)

    def __init__(self, data: Buffer) -> None:
        self.data = data


def spliced(data: bytes) -> bytes | Bin:
    """`data`, marked to be spliced in when it is large."""
    return Bin(data) if len(data) > MAX_COPIED_BYTES else data


# --- packing ---------------------------------------------------------------------------------------------------------


class _ThreadState:
    """What one thread packs with."""

    __slots__ = ("depth", "has_doubtful_keys", "packers")

    def __init__(self) -> None:
        self.depth = 0
        """How many ext values the thread is inside of; packing at a depth uses the packer of that depth."""
        self.packers: list[_DepthPacker] = []
        self.has_doubtful_keys = False
        """A value was packed that may come back as another dict key, so that the keys must be checked."""

    def packer_at(self, depth: int) -> _DepthPacker:
        packers = self.packers
        while len(packers) <= depth:
            packers.append(_DepthPacker(self, len(packers)))
        return packers[depth]


class _Local(threading.local):
    def __init__(self) -> None:
        self.state = _ThreadState()


_local = _Local()


class _DepthPacker:
    """Packs the values that lie `depth` ext values deep."""

    __slots__ = ("depth", "must_renew", "packer", "pieces", "skip", "state", "wrapped")

    def __init__(self, state: _ThreadState, depth: int) -> None:
        self.state = state
        self.depth = depth
        self.wrapped: list[object] = [None]
        """The list in which each value is packed."""
        self.pieces: list[Buffer] = []
        """The output so far, but for what is still in msgpack's buffer."""
        self.skip = 1
        """Bytes at the start of msgpack's buffer that are not output: that list's header, or a nil."""
        self.must_renew = False
        """msgpack's packer is broken or its buffer too large: another one takes its place."""
        self.packer = self.new_packer()

    def new_packer(self) -> Any:
        return _msgpack.Packer(default=self.default, strict_types=True, autoreset=False, buf_size=MAX_COPIED_BYTES)

    def pack(self, value: object) -> list[Buffer]:
        """The packed value as pieces that have only to be joined."""
        state = self.state
        try:
            state.depth = self.depth + 1
            if self.depth >= UNCHECKED_EXT_DEPTH:
                _check_levels(value)
            self.wrapped[0] = value
            self.packer.pack(self.wrapped)
            self.take_written()
            return self.pieces
        except BaseException:
            self.must_renew = True
            raise
        finally:
            self.wrapped[0] = None
            self.pieces = []
            self.skip = 1
            if self.must_renew:
                self.packer = self.new_packer()
                self.must_renew = False
            state.depth = self.depth  # last: from here on a finaliser that packs may use this packer

    def take_written(self) -> None:
        """Move what msgpack has written to the pieces."""
        view = self.packer.getbuffer()
        if len(view) > MAX_KEPT_BUFFER:
            self.must_renew = True
        self.pieces.append(bytes(view[self.skip :]))
        del view  # a packer with a view on it can neither be reset nor written to
        self.packer.reset()

    def splice(self, *pieces: Buffer) -> None:
        """Put `pieces` where msgpack is about to write a nil, which is dropped later."""
        self.take_written()
        self.pieces += pieces
        self.skip = 1

    def default(self, value: Any) -> Any:
        """What msgpack packs in place of a value it does not know: a small ext value, or nil where it was spliced."""
        kind = kind_of(value)
        if kind is Bin:
            self.splice_bin(value.data)
            return None
        if self.depth >= MAX_EXT_DEPTH:
            reason = f"it lies inside {MAX_EXT_DEPTH} other tuples or ext values"
            raise CannotPack(value, reason, "nest fewer of them")
        if kind is tuple:
            code = TUPLE
            body = self.state.packer_at(self.depth + 1).pack(list(value))
        else:
            code, body, is_doubtful_key = registry.encode(value)
            if is_doubtful_key:
                self.state.has_doubtful_keys = True
        size = sum(map(len, body))
        if size <= MAX_COPIED_BYTES:
            return new_ext((code, b"".join(body)))
        if size > MAX_BODY_BYTES:
            raise _too_large(value, size)
        if size < 1 << 16:
            header = struct.pack(">BHB", 0xC8, size, code)
        else:
            header = struct.pack(">BIB", 0xC9, size, code)
        self.splice(header, *body)
        return None

    def splice_bin(self, data: Buffer) -> None:
        if len(data) > MAX_BODY_BYTES:
            raise _too_large(data, len(data))
        self.splice(struct.pack(">BI", 0xC6, len(data)), data)


def _too_large(value: object, size: int) -> CannotPack:
    return CannotPack(value, f"its {size} bytes are more than the 4 GiB of one value", "send it in parts")


_NESTING = frozenset({list, dict})


def _check_levels(value: object) -> None:
    """Raise CannotPack for lists and dicts nested too deep for a value that lies in several ext values already."""
    layer: dict[int, Any] = {0: [value]}  # by identity: what is shared is visited once
    for _ in range(MAX_LEVELS + 1):
        layer = {
            id(child): child
            for container in layer.values()
            for child in (container.values() if kind_of(container) is dict else container)
            if kind_of(child) in _NESTING
        }
        if not layer:
            return
    bad = next(iter(layer.values()))
    reason = f"it lies {MAX_LEVELS} lists and dicts deep inside more than {UNCHECKED_EXT_DEPTH} tuples or ext values"
    raise CannotPack(bad, reason, "flatten it, or send its parts one by one")


def pack(value: object) -> bytes:
    """Pack a value into bytes that `unpack` turns into an equal value of the same type.

    Takes str, bytes, int from -2^63 to 2^64-1, float, bool, None, list, tuple, dict, numpy arrays and scalars, torch
    tensors, PIL images, and what registered codecs take; bytearray and memoryview come back as bytes, and a
    `msgpack.ExtType` goes out as it is. Dict keys may be str, bytes, int, float, bool, None, numpy scalars and tuples
    of these. Up to 16 tuples or arrays within one another, each with hundreds of lists between, pass in 8 MB of stack; in
    a thread with less, nesting that deep can crash the process.

    Raises:
        EncodeError: An unknown type, a subclass, an integer out of range, text with a lone surrogate, a value that
            contains itself or is nested too deep. The message names the type, the path to the value and the fix.
    """
    return dump(value, value)


def dump(value: object, root: object) -> bytes:
    """`pack`, for callers that wrap the user's value: the path in an error starts at `root`, which lies in `value`."""
    state = _local.state
    outer_has_doubtful_keys = state.has_doubtful_keys
    state.has_doubtful_keys = False
    try:
        pieces = state.packer_at(state.depth).pack(value)
        if state.has_doubtful_keys:
            _check_keys(root)
    except CannotPack as error:
        raise encode_error(root, error) from error.__cause__
    except (ValueError, OverflowError, BufferError, RecursionError) as error:
        raise encode_error(root, error) from error
    finally:
        state.has_doubtful_keys = outer_has_doubtful_keys
    return b"".join(pieces)


def _check_keys(root: object) -> None:
    """Raise CannotPack for dict keys that would come back unhashable, or unequal to what they were."""
    for found in dicts_in(root):
        for key in found:
            if not comes_back(key):
                fix = "use keys of str, int or tuples of these"
                raise CannotPack(key, "it would not come back as the same key", fix, as_key=True)


_PLAIN = frozenset({str, bytes, int, float, bool, type(None)})


def comes_back(key: Any) -> bool:
    """Whether a hashable value comes back as one that finds the same place in a dict or set."""
    kind = kind_of(key)
    if kind in _PLAIN:
        return True
    if kind is tuple:
        return all(map(comes_back, key))
    try:
        copy = unpack(pack(key))
        return hash(copy) == hash(key) and bool(copy == key)
    except Exception:
        return False


# --- unpacking -------------------------------------------------------------------------------------------------------


def unpack(data: Buffer) -> Any:
    """The value that `pack` made `data` from.

    Arrays and tensors come back writable and on the CPU; an ext code that no codec holds comes back as
    `msgpack.ExtType`, which packs to the same bytes again. Nothing is ever unpickled.

    Raises:
        WireError: It is not exactly one packed value: cut short, with bytes behind it, malformed, or nested too deep.
        TypeError: `data` is not bytes, bytearray or memoryview.
    """
    if type(data) is not bytes:
        data = _flat(data)
    try:
        if data and data[0] in _EXT_HEADERS:
            found = _whole_ext(data)
            if found is not None:
                return ext_hook(*found)
        return _load(data)
    except WireError:
        raise
    except _msgpack.READ_ERRORS as error:
        raise wire_error(error, len(data)) from error


def _load(data: Buffer) -> Any:
    """The value in `data`; raises what msgpack raises.

    msgpack allocates up to 10 000 items as soon as it reads an array's header, so a few kilobytes of false headers, one
    inside another, cost gigabytes. A pass over the values that builds nothing costs a few per cent and finds them. Small
    inputs have no room for many headers; in large ones such an allocation is little beside the rest.
    """
    size = len(data)
    if MIN_SCANNED_BYTES < size < MAX_SCANNED_BYTES:
        scanner = _msgpack.Unpacker(read_size=size, max_buffer_size=size)
        scanner.feed(data)
        scanner.skip()
    return _msgpack.unpackb(data, ext_hook=ext_hook, strict_map_key=False)


def _flat(data: Any) -> Buffer:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"wire.unpack takes bytes, bytearray or memoryview, not {type_name(data)}")
    view: memoryview = memoryview(data)  # pyright: ignore[reportUnknownArgumentType]
    if view.c_contiguous and view.ndim and view.nbytes:
        return view.cast("B")
    return bytes(view)


_FIXED_SIZES = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
"""The first byte of an ext value of a fixed size -> that size."""
_EXT_HEADERS = {0xC7: 1, 0xC8: 2, 0xC9: 4, **dict.fromkeys(_FIXED_SIZES, 0)}
"""The first byte of an ext value -> the width of the field with its size; 0 when it has none."""


def _whole_ext(data: Buffer) -> tuple[int, memoryview] | None:
    """Code and body of `data` if it is one ext value from end to end that a codec will decode, else None.

    msgpack would copy the body before it hands it over; for a big array that copy is most of the work.
    """
    width = _EXT_HEADERS[data[0]]
    if len(data) < 2 + width:
        return None
    size = int.from_bytes(data[1 : 1 + width]) if width else _FIXED_SIZES[data[0]]
    code = data[1 + width]
    if len(data) != 2 + width + size or code not in decoders:
        return None
    return code, memoryview(data)[2 + width :]


def ext_hook(code: int, body: Buffer) -> Any:
    """The value that an ext value is decoded to. Raises WireError, also for whatever a codec raises."""
    decode = decoders.get(code)
    if decode is None:
        return new_ext((code, body))
    state = _local.state
    if state.depth >= MAX_EXT_DEPTH:
        raise WireError(
            f"cannot unpack: more than {MAX_EXT_DEPTH} tuples or ext values lie inside one another; "
            "no sender of this package makes that, so check where the bytes come from"
        )
    state.depth += 1
    try:
        return decode(body)
    except (WireError, MemoryError):
        raise
    except Exception as error:
        raise WireError(
            f"cannot unpack the ext value of code {code} ({holders[code]}, {len(body)} bytes): {describe_error(error)}; "
            "it was made by another codec, damaged on the way, or needs a module that is not installed here"
        ) from error
    finally:
        state.depth -= 1


def _decode_tuple(body: Buffer) -> tuple[Any, ...]:
    items = _load(body)
    if kind_of(items) is not list:
        raise ValueError(f"the body of a tuple is an array, this one is a {type_name(items)}")
    return tuple(items)


decoders[TUPLE] = _decode_tuple


def wire_error(error: Exception, size: int) -> WireError:
    """The WireError for what msgpack raised over `size` bytes."""
    if isinstance(error, _msgpack.ExtraData):
        extra: Any = error
        why = f"{len(extra.extra)} of its {size} bytes lie behind the end of the value"
    elif isinstance(error, _msgpack.OutOfData) or "incomplete" in str(error):
        why = f"it ends in the middle of a value after {size} bytes" if size else "it is empty"
    elif isinstance(error, _msgpack.StackError | RecursionError):
        why = "its containers are nested too deep"
    elif isinstance(error, UnicodeDecodeError):
        why = "it holds text that is not UTF-8"
    elif isinstance(error, _msgpack.FormatError):
        why = "it is not msgpack"
    else:
        why = describe_error(error)
    return WireError(f"cannot unpack: expected exactly one packed value, but {why}; make the bytes with wire.pack")
