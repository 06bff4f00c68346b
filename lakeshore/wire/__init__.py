"""The bytes of every hop: the value codec, the Envelope of an invocation and the frames of its journal.

    from dreamlake.lakeshore import wire

    blob = wire.pack({"x": np.zeros(4), "pair": (1, 2)})
    wire.unpack(blob)

Importing it loads msgpack and no other distribution; numpy, torch and PIL are loaded only by bytes that need them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import images, numpy_values, torch_values
from .codec import pack as pack
from .codec import unpack as unpack
from .envelope import WIRE_VERSION as WIRE_VERSION
from .envelope import Envelope as Envelope
from .frames import Frame as Frame
from .frames import FrameDecoder as FrameDecoder
from .frames import FrameKind as FrameKind
from .frames import FrameReader as FrameReader
from .registry import Codec as Codec
from .registry import install
from .registry import register as register

if TYPE_CHECKING:
    from .stdlib_values import STDLIB as STDLIB

__all__ = [
    "STDLIB",
    "WIRE_VERSION",
    "Codec",
    "Envelope",
    "Frame",
    "FrameDecoder",
    "FrameKind",
    "FrameReader",
    "pack",
    "register",
    "unpack",
]

install(*numpy_values.CODECS, *torch_values.CODECS, *images.CODECS)  # the frequent ones first


def __getattr__(name: str) -> Any:
    if name != "STDLIB":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .stdlib_values import STDLIB

    globals()["STDLIB"] = STDLIB
    return STDLIB
