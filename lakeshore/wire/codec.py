"""`pack` and `unpack`: msgpack, with ext codes for what msgpack has no form for.

Packing is strict: only exact types pass, everything else goes to `_Level.default`, which turns it into an ext value or
refuses it. Three things here are not obvious from the code:

*One copy.* An array is not handed to msgpack, which would copy it three times. `_Level.splice` takes what the packer
has written so far, puts the ext header and the array's own memory behind it as further pieces, lets msgpack write a
nil in the value's place, and drops that byte again. The pieces are joined once, at the very end.

*Depth.* Each ext value inside another one needs a packer of its own, and msgpack recurses in C: its limit (511 levels,
1024 from version 1.2 on) holds for one packer only, so the product of both can overrun the stack, which kills the
process. Hence `MAX_EXT_DEPTH`, counted per thread over packing and unpacking, also where a codec calls `pack` or
`unpack` itself; and `_check_levels`, which from the fifth packer on keeps to 511 whatever the version.

*Whatever packs unpacks.* msgpack packs one level more than it reads. `_Level` therefore packs each value inside a list
of its own and drops that list's header.
"""

from __future__ import annotations

import struct
import threading
from typing import Any

from ..errors import WireError
from . import _msgpack, registry
from . import encode_errors as refusals
from ._msgpack import new_ext
from .encode_errors import Refused, kind_of
from .registry import TUPLE, Buffer, brief, decoders, holders

__all__ = ["MAX_EXT_DEPTH", "Bin", "comes_back", "dump", "ext_hook", "pack", "unpack", "wire_error"]

MAX_EXT_DEPTH = 16  # ext values nested in one another

_SMALL = 4096  # bodies up to this size are cheaper to copy than to splice
_KEPT = 1 << 20  # a packer whose buffer grew beyond this is replaced, or the thread would keep that memory
_LIMIT = (1 << 32) - 2  # bytes of one bin or ext value; msgpack cannot read an ext value of one byte more
_SCANNED_FROM, _SCANNED_TO = 2048, 16 << 20  # bytes; see _load
_DEEP = 4  # from so many ext values around a value on ...
_MAX_LEVELS = 512  # ... it may have so many levels of lists and dicts: the list of a tuple's items, and 511 in it


class Bin:
    """Marks large bytes inside a value that is about to be packed: spliced in like an array, not copied."""

    __slots__ = ("data",)

    def __init__(self, data: Buffer) -> None:
        self.data = data


# --- packing ---------------------------------------------------------------------------------------------------------


class _Thread:
    """What one thread packs with: its levels, how many are in use, and whether dict keys want a look afterwards."""

    __slots__ = ("depth", "levels", "look_at_keys")

    def __init__(self) -> None:
        self.depth = 0
        self.levels: list[_Level] = []
        self.look_at_keys = False

    def level(self, depth: int) -> _Level:
        levels = self.levels
        while len(levels) <= depth:
            levels.append(_Level(self, len(levels)))
        return levels[depth]


class _Local(threading.local):
    def __init__(self) -> None:
        self.thread = _Thread()


_local = _Local()


class _Level:
    """A packer for the values `depth` ext values deep, and the pieces that have already left it."""

    __slots__ = ("depth", "drop", "packer", "pieces", "spent", "thread", "wrapped")

    def __init__(self, thread: _Thread, depth: int) -> None:
        self.thread, self.depth = thread, depth
        self.wrapped: list[object] = [None]
        self.pieces: list[Buffer] = []
        self.drop = 1
        self.spent = False
        self.packer = self.new_packer()

    def new_packer(self) -> Any:
        return _msgpack.Packer(default=self.default, strict_types=True, autoreset=False, buf_size=_SMALL)

    def run(self, value: object) -> list[Buffer]:
        """The packed value as pieces that have only to be joined."""
        thread = self.thread
        try:
            thread.depth = self.depth + 1
            if self.depth >= _DEEP:
                _check_levels(value)
            self.wrapped[0] = value
            self.packer.pack(self.wrapped)
            self.take()
            return self.pieces
        except BaseException:
            self.spent = True
            raise
        finally:
            self.wrapped[0] = None
            self.pieces, self.drop = [], 1
            if self.spent:
                self.packer, self.spent = self.new_packer(), False
            thread.depth = self.depth  # last: from here on a finaliser that packs may use this level

    def take(self) -> None:
        """Move what the packer has written, but for its first `drop` bytes, to the pieces."""
        view = self.packer.getbuffer()
        self.spent |= len(view) > _KEPT
        self.pieces.append(bytes(view[self.drop :]))
        del view  # a packer with a view on it can neither be reset nor written to
        self.packer.reset()

    def splice(self, *pieces: Buffer) -> None:
        """Put `pieces` where msgpack is about to write a nil, which is dropped later."""
        self.take()
        self.pieces += pieces
        self.drop = 1

    def default(self, value: Any) -> Any:
        """What msgpack packs in place of a value it does not know: a small ext value, or nil where it was spliced."""
        kind = kind_of(value)
        if kind is Bin:
            self.splice_bin(value.data)
            return None
        if self.depth >= MAX_EXT_DEPTH:
            raise Refused(value, f"it lies inside {MAX_EXT_DEPTH} other tuples or ext values", "nest fewer of them")
        if kind is tuple:
            code, body = TUPLE, self.thread.level(self.depth + 1).run(list(value))
        else:
            code, body, doubtful = registry.encode(value)
            self.thread.look_at_keys |= doubtful
        size = sum(map(len, body))
        if size <= _SMALL:
            return new_ext((code, b"".join(body)))
        if size > _LIMIT:
            raise Refused(value, f"its {size} bytes are more than the 4 GiB of one value", "send it in parts")
        header = struct.pack(">BHB", 0xC8, size, code) if size < 1 << 16 else struct.pack(">BIB", 0xC9, size, code)
        self.splice(header, *body)
        return None

    def splice_bin(self, data: Buffer) -> None:
        if len(data) > _LIMIT:
            raise Refused(data, f"its {len(data)} bytes are more than the 4 GiB of one value", "send it in parts")
        self.splice(struct.pack(">BI", 0xC6, len(data)), data)


_NESTING = frozenset({list, dict})


def _check_levels(value: object) -> None:
    """Refuse lists and dicts that are nested too deep for a value that lies in several ext values already."""
    layer: dict[int, Any] = {0: [value]}  # by identity: what is shared is looked at once
    for _ in range(_MAX_LEVELS + 1):
        layer = {
            id(child): child
            for container in layer.values()
            for child in (container.values() if kind_of(container) is dict else container)
            if kind_of(child) in _NESTING
        }
        if not layer:
            return
    bad = next(iter(layer.values()))
    why = f"it lies {_MAX_LEVELS} lists and dicts deep inside more than {_DEEP} tuples or ext values"
    raise Refused(bad, why, "flatten it, or send its parts one by one")


def pack(value: object) -> bytes:
    """Pack a value into bytes that `unpack` turns into an equal value of the same type.

    Takes str, bytes, int from -2^63 to 2^64-1, float, bool, None, list, tuple, dict, numpy arrays and scalars, torch
    tensors, PIL images, and what registered codecs take; bytearray and memoryview come back as bytes, and a
    `msgpack.ExtType` goes out as it is. Dict keys may be str, bytes, int, float, bool, None, numpy scalars and tuples
    of these. Up to 16 tuples or arrays within one another, each with hundreds of lists between, pass in 8 MB of stack; in
    a thread with less, nesting that deep can crash the process.

    Raises EncodeError, naming the type, the path to the value and the fix: an unknown type, a subclass, an integer out
    of range, text with a lone surrogate, a value that contains itself or is nested too deep.
    """
    return dump(value, value)


def dump(value: object, root: object) -> bytes:
    """`pack`, for callers that wrap the user's value: the path in an error starts at `root`, which lies in `value`."""
    thread = _local.thread
    outer_look, thread.look_at_keys = thread.look_at_keys, False
    try:
        pieces = thread.level(thread.depth).run(value)
        if thread.look_at_keys:
            _check_keys(root)
    except Refused as error:
        raise refusals.explain(root, error) from error.__cause__
    except (ValueError, OverflowError, BufferError, RecursionError) as error:
        raise refusals.explain(root, error) from error
    finally:
        thread.look_at_keys = outer_look
    return b"".join(pieces)


def _check_keys(root: object) -> None:
    """Refuse dict keys that would come back unhashable, or unequal to what they were."""
    for found in refusals.dicts_in(root):
        for key in found:
            if not comes_back(key):
                fix = "use keys of str, int or tuples of these"
                raise Refused(key, "it would not come back as the same key", fix, as_key=True)


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

    Raises WireError for anything but exactly one packed value: cut short, with bytes behind it, malformed, or nested
    too deep; TypeError if `data` is not bytes, bytearray or memoryview.
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

    msgpack makes room for up to 10 000 items as soon as it reads an array's header, so a few kilobytes of headers that
    lie, one in another, cost gigabytes. Passing over the values without building them costs a few per cent and finds
    the lie; small inputs have no room for many headers, and in large ones they weigh little beside the rest.
    """
    size = len(data)
    if _SCANNED_FROM < size < _SCANNED_TO:
        scanner = _msgpack.Unpacker(read_size=size, max_buffer_size=size)
        scanner.feed(data)
        scanner.skip()
    return _msgpack.unpackb(data, ext_hook=ext_hook, strict_map_key=False)


def _flat(data: Any) -> Buffer:
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TypeError(f"wire.unpack takes bytes, bytearray or memoryview, not {refusals.type_name(data)}")
    view: memoryview = memoryview(data)  # pyright: ignore[reportUnknownArgumentType]
    return view.cast("B") if view.c_contiguous and view.ndim and view.nbytes else bytes(view)


# First byte of an ext value -> size of its body, or else the width of the field that says so.
_FIXED_SIZES = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}
_EXT_HEADERS = {0xC7: 1, 0xC8: 2, 0xC9: 4, **dict.fromkeys(_FIXED_SIZES, 0)}


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
    """What an ext value is decoded to. Raises WireError, also for whatever a codec raises."""
    decode = decoders.get(code)
    if decode is None:
        return new_ext((code, body))
    thread = _local.thread
    if thread.depth >= MAX_EXT_DEPTH:
        raise WireError(
            f"cannot unpack: more than {MAX_EXT_DEPTH} tuples or ext values lie inside one another; "
            "no sender of this package makes that, so check where the bytes come from"
        )
    thread.depth += 1
    try:
        return decode(body)
    except (WireError, MemoryError):
        raise
    except Exception as error:
        raise WireError(
            f"cannot unpack the ext value of code {code} ({holders[code]}, {len(body)} bytes): {brief(error)}; "
            "it was made by another codec, damaged on the way, or needs a module that is not installed here"
        ) from error
    finally:
        thread.depth -= 1


def _decode_tuple(body: Buffer) -> tuple[Any, ...]:
    items = _load(body)
    if kind_of(items) is not list:
        raise ValueError(f"the body of a tuple is an array, this one is a {refusals.type_name(items)}")
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
        why = brief(error)
    return WireError(f"cannot unpack: expected exactly one packed value, but {why}; make the bytes with wire.pack")
