"""Which types travel as ext values, under which code, and who encodes and decodes them.

Codes 1 to 6 are this package's, 16 to 31 the optional `STDLIB`'s, 32 to 127 anyone's; the rest is reserved.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from . import encode_errors as refusals
from .encode_errors import Refused

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TUPLE", "Buffer", "BuiltIn", "Codec", "brief", "decoders", "encode", "holders", "install", "register"]

Buffer: TypeAlias = bytes | bytearray | memoryview

TUPLE = 5
_FIRST_FREE, _LAST = 32, 127
_FIRST_OPTIONAL = 16


@dataclass(frozen=True)
class Codec:
    """How values of one more type travel, as ext values with a code of their own; `register` turns it on.

    `match(value)` says whether the codec takes a value that nothing else took, `encode(value)` gives its bytes and
    `decode(bytes)` the value again. `encode` may call `wire.pack` for the parts of a value, `decode` `wire.unpack`.
    Codes 32 to 127 are free for anyone.
    """

    code: int
    name: str
    match: Callable[[Any], bool]
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


@dataclass(frozen=True)
class BuiltIn:
    """A codec of this package. It works on buffers, to copy nothing, and on values of a module that may not be loaded.

    `match` and `encode` get that module, taken from `sys.modules`: packing never imports it. `hashable` says that what
    it decodes can be a dict key.
    """

    code: int
    name: str
    module: str
    match: Callable[[Any, Any], bool]
    encode: Callable[[Any, Any], list[Buffer]]
    decode: Callable[[Buffer], Any]
    hashable: bool = False


_lock = threading.Lock()
_built_in: tuple[BuiltIn, ...] = ()
_registered: tuple[Codec, ...] = ()
holders: dict[int, str] = {TUPLE: "tuple"}
decoders: dict[int, Callable[[Buffer], Any]] = {}  # the tuple's is added by the codec


def install(*codecs: BuiltIn) -> None:
    """Add codecs of this package. Called once by the modules that define them."""
    global _built_in
    _built_in += codecs
    for codec in codecs:
        holders[codec.code] = codec.name
        decoders[codec.code] = codec.decode


def register(*codecs: Codec) -> None:
    """Turn codecs on for this process, in packing and unpacking, all of them or none.

    The codecs are asked in the order of registration. Registering the very same codec again changes nothing.

    Raises ValueError for a code that another codec holds or that is reserved, naming the holder; TypeError for
    something that is no `Codec`.
    """
    global _registered
    with _lock:
        new: dict[int, Codec] = {}
        for codec in codecs:
            if not isinstance(codec, Codec):
                raise TypeError(f"wire.register takes wire.Codec objects, not {refusals.type_name(codec)}")
            if codec in _registered or new.get(codec.code) == codec:
                continue
            _check_code(codec, new)
            new[codec.code] = codec
        for codec in new.values():
            holders[codec.code] = codec.name
            decoders[codec.code] = _user_decoder(codec)
        _registered += tuple(new.values())


def _check_code(codec: Codec, new: dict[int, Codec]) -> None:
    code = codec.code
    asks = f"the codec {codec.name!r} asks for ext code {code!r}"
    fix = f"choose one from {_FIRST_FREE} to {_LAST}"
    if type(code) is not int or not 0 <= code <= _LAST:
        raise ValueError(f"{asks}, which is no ext code: {fix}")
    holder = new[code].name if code in new else holders.get(code)
    if holder is not None:
        raise ValueError(f"{asks}, which {holder!r} holds: {fix}")
    if code < _FIRST_FREE and codec not in _stdlib():
        whom = "wire.STDLIB" if code >= _FIRST_OPTIONAL else "this package"
        raise ValueError(f"{asks}, which is reserved for {whom}: {fix}")


def _stdlib() -> tuple[Codec, ...]:
    from .stdlib_values import STDLIB

    return STDLIB


def _user_decoder(codec: Codec) -> Callable[[Buffer], Any]:
    return lambda body: codec.decode(bytes(body))


def encode(value: object) -> tuple[int, list[Buffer], bool]:
    """The ext code and body of a value that is no tuple, and whether it makes a doubtful dict key. Raises Refused."""
    refusal: Refused | None = None
    for built_in in _built_in:
        module = sys.modules.get(built_in.module)
        if module is None or not built_in.match(value, module):
            continue
        try:
            body = built_in.encode(value, module)
        except Refused as error:
            refusal = error  # a registered codec may still take it
            break
        except MemoryError:
            raise
        except Exception as error:
            raise Refused(value, f"its encoding failed ({brief(error)})", "send it in another form") from error
        return built_in.code, body, not built_in.hashable and _can_be_key(value)
    for codec in _registered:
        blob = _encode_with(codec, value)
        if blob is not None:
            return codec.code, [blob], codec.code >= _FIRST_FREE and _can_be_key(value)
    raise refusal or refusals.unknown_type(value, _has_stdlib_codec)


def _can_be_key(value: object) -> bool:
    return type(value).__hash__ is not None


def _encode_with(codec: Codec, value: object) -> bytes | None:
    """The body that a registered codec gives for a value, None if it does not take it."""
    fix = f"mend the codec {codec.name!r} (ext code {codec.code}) or register another"
    try:
        if not codec.match(value):
            return None
        body: object = codec.encode(value)
    except (Refused, MemoryError):
        raise
    except Exception as error:
        raise Refused(value, f"the codec {codec.name!r} failed on it ({brief(error)})", fix) from error
    if not isinstance(body, bytes | bytearray | memoryview):
        raise Refused(value, f"the codec {codec.name!r} made {refusals.type_name(body)} of it, not bytes", fix)
    return bytes(body)


def brief(error: BaseException) -> str:
    """An error as part of a sentence."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _has_stdlib_codec(value: object) -> bool:
    return any(codec.match(value) for codec in _stdlib())
