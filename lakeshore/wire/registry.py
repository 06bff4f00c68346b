"""The codecs: which types travel as ext values, under which code, and how they are encoded and decoded.

Codes 1 to 6 are this package's, 16 to 31 the optional `STDLIB`'s, 32 to 127 anyone's; the rest is reserved.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .encode_errors import CannotPack, describe_error, unknown_type
from .values import type_name

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = [
    "TUPLE",
    "Buffer",
    "BuiltIn",
    "Codec",
    "decoders",
    "encode",
    "holders",
    "install",
    "instance_of",
    "register",
    "reserve",
]

Buffer: TypeAlias = bytes | bytearray | memoryview

TUPLE = 5
"""The code of tuples, which the codec itself encodes and decodes."""
FIRST_OPTIONAL_CODE = 16
FIRST_FREE_CODE = 32
LAST_CODE = 127


@dataclass(frozen=True)
class Codec:
    """How values of one more type travel, as ext values with a code of their own; `register` turns it on."""

    code: int
    """Its ext code; 32 to 127 are free for anyone."""
    name: str
    """For errors."""
    match: Callable[[Any], bool]
    """Whether the codec takes a value that no codec before it took."""
    encode: Callable[[Any], bytes]
    """The bytes of such a value; it may call `wire.pack` for the parts of the value."""
    decode: Callable[[bytes], Any]
    """The value of such bytes; it may call `wire.unpack`."""


@dataclass(frozen=True)
class BuiltIn:
    """A codec of this package. It works on buffers, to copy nothing, and on values of a module that may not be loaded.

    `match` and `encode` get that module, taken from `sys.modules`: packing never imports it.
    """

    code: int
    name: str
    module: str
    match: Callable[[Any, Any], bool]
    encode: Callable[[Any, Any], list[Buffer]]
    decode: Callable[[Buffer], Any]
    hashable: bool = False
    """What it decodes can be a dict key."""


def instance_of(class_name: str) -> Callable[[Any, Any], bool]:
    """A `match` of BuiltIn: the value is an instance of that class of the module.

    The module may lack the class: another thread may be half-way through importing it.
    """

    def match(value: Any, module: Any) -> bool:
        kind = getattr(module, class_name, None)
        return kind is not None and isinstance(value, kind)

    return match


_lock = threading.Lock()
_built_in: tuple[BuiltIn, ...] = ()
_reserved: tuple[Codec, ...] = ()
_registered: tuple[Codec, ...] = ()
holders: dict[int, str] = {TUPLE: "tuple"}
"""The names of the codecs in use, by code."""
decoders: dict[int, Callable[[Buffer], Any]] = {}
"""Their decoders, by code; the codec adds that of tuples."""


def install(*codecs: BuiltIn) -> None:
    """Add codecs of this package. They are asked in this order, before registered ones."""
    global _built_in
    _built_in += codecs
    for codec in codecs:
        holders[codec.code] = codec.name
        decoders[codec.code] = codec.decode


def reserve(*codecs: Codec) -> None:
    """Let these codecs be registered with codes that are reserved for `STDLIB`."""
    global _reserved
    _reserved += codecs


def register(*codecs: Codec) -> None:
    """Turn codecs on for this process, in packing and unpacking, all of them or none.

    The codecs are asked in the order of registration. Registering the very same codec again changes nothing.

    Raises:
        ValueError: A code is reserved, or another codec holds it; the message names that codec.
        TypeError: Something is no `Codec`.
    """
    global _registered
    with _lock:
        new: dict[int, Codec] = {}
        for codec in codecs:
            if not isinstance(codec, Codec):
                raise TypeError(f"wire.register takes wire.Codec objects, not {type_name(codec)}")
            if codec in _registered or new.get(codec.code) == codec:
                continue
            _check_code(codec, new)
            new[codec.code] = codec
        for codec in new.values():
            holders[codec.code] = codec.name
            decoders[codec.code] = _decoder_of(codec)
        _registered += tuple(new.values())


def _check_code(codec: Codec, new: dict[int, Codec]) -> None:
    code = codec.code
    request = f"the codec {codec.name!r} asks for ext code {code!r}"
    fix = f"choose one from {FIRST_FREE_CODE} to {LAST_CODE}"
    if type(code) is not int or not 0 <= code <= LAST_CODE:
        raise ValueError(f"{request}, which is no ext code: {fix}")
    holder = new[code].name if code in new else holders.get(code)
    if holder is not None:
        raise ValueError(f"{request}, which {holder!r} holds: {fix}")
    if code < FIRST_FREE_CODE and codec not in _reserved:
        owner = "wire.STDLIB" if code >= FIRST_OPTIONAL_CODE else "this package"
        raise ValueError(f"{request}, which is reserved for {owner}: {fix}")


def _decoder_of(codec: Codec) -> Callable[[Buffer], Any]:
    def decode(body: Buffer) -> Any:
        return codec.decode(bytes(body))

    return decode


def encode(value: object) -> tuple[int, list[Buffer], bool]:
    """Encode a value that is no tuple.

    Returns:
        Its ext code, the pieces of its body, and whether it could be a dict key that comes back as another key.

    Raises:
        CannotPack: No codec takes it, or its codec failed.
    """
    failure: CannotPack | None = None
    for built_in in _built_in:
        module = sys.modules.get(built_in.module)
        if module is None or not built_in.match(value, module):
            continue
        try:
            body = built_in.encode(value, module)
        except CannotPack as error:
            failure = error  # a registered codec may still take it
            break
        except MemoryError:
            raise
        except Exception as error:
            reason = f"its encoding failed ({describe_error(error)})"
            raise CannotPack(value, reason, "send it in another form") from error
        return built_in.code, body, not built_in.hashable and _can_be_key(value)
    for codec in _registered:
        blob = _encode_with(codec, value)
        if blob is not None:
            return codec.code, [blob], codec.code >= FIRST_FREE_CODE and _can_be_key(value)
    raise failure or unknown_type(value)


def _can_be_key(value: object) -> bool:
    return type(value).__hash__ is not None


def _encode_with(codec: Codec, value: object) -> bytes | None:
    """The body that a registered codec makes of a value; None if it does not take it."""
    fix = f"mend the codec {codec.name!r} (ext code {codec.code}) or register another"
    try:
        if not codec.match(value):
            return None
        body: object = codec.encode(value)
    except (CannotPack, MemoryError):
        raise
    except Exception as error:
        raise CannotPack(value, f"the codec {codec.name!r} failed on it ({describe_error(error)})", fix) from error
    if not isinstance(body, bytes | bytearray | memoryview):
        raise CannotPack(value, f"the codec {codec.name!r} made {type_name(body)} of it, not bytes", fix)
    return bytes(body)
