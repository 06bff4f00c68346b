"""Exact equality of values, and generators of values, shared by the tests of the wire."""

from __future__ import annotations

import math
import struct
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st
from PIL import Image

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError


def roundtrip(value: Any) -> Any:
    return wire.unpack(wire.pack(value))


def pack_error(value: Any) -> str:
    with pytest.raises(EncodeError) as caught:
        wire.pack(value)
    assert isinstance(caught.value, TypeError)
    return str(caught.value)


def nested(levels: int, leaf: Any = 0, wrap: Any = lambda inner: [inner]) -> Any:
    for _ in range(levels):
        leaf = wrap(leaf)
    return leaf


def as_tuple(inner: Any) -> tuple[Any]:
    return (inner,)


def same(a: Any, b: Any) -> bool:
    """Whether `b` is `a` again: the same types all the way down, the same bits of floats, keys in the same order."""
    if isinstance(a, Image.Image):
        return isinstance(b, Image.Image) and _picture(a) == _picture(b)
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and _same_elements(a, b)
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes()
    if isinstance(a, float):
        return struct.pack(">d", a) == struct.pack(">d", b) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a.items(), b.items(), strict=True))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def _same_elements(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> bool:
    if a.dtype.names and not a.flags.c_contiguous:  # its tobytes() has garbage between the fields
        return all(_same_elements(a[name], b[name]) for name in a.dtype.names)
    return a.tobytes() == b.tobytes()


def _picture(image: Image.Image) -> tuple[Any, ...]:
    shown = image.convert("RGBA").tobytes() if image.mode in ("P", "PA") else image.info.get("transparency")
    return image.mode, image.size, image.tobytes(), image.getpalette(), shown


def same_tensor(torch: Any, a: Any, b: Any) -> bool:
    """Bits, dtype and shape: NaNs compare equal to themselves, and float8 has no comparison of its own."""
    if type(b) is not torch.Tensor or a.dtype != b.dtype or a.shape != b.shape:
        return False
    plain = a.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    bits = [bytes(x.reshape(-1).view(torch.uint8).tolist()) if x.numel() else b"" for x in (plain, b)]
    return bits[0] == bits[1]


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    st.binary(max_size=20),
)
KEYS = st.recursive(
    SCALARS.filter(lambda value: value == value), lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=4
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=25,
)

DTYPES = [
    "bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "complex64", "complex128", ">i2", ">u4", ">f8", ">c16", "U1", "U7", ">U3", "S1", "S5", "V3", "datetime64[ns]",
    "datetime64[D]", "datetime64[25s]", ">M8[ms]", "timedelta64[us]", "m8[Y]",
]  # fmt: skip


@st.composite
def dtypes(draw: st.DrawFn, structured: bool = True) -> np.dtype[Any]:
    """A dtype without Python objects: simple, or a record with nesting, sub-arrays, titles and padding."""
    if not structured or draw(st.booleans()):
        return np.dtype(draw(st.sampled_from(DTYPES)))
    fields: list[Any] = []
    for number in range(draw(st.integers(1, 4))):
        name: Any = f"f{number}"
        if draw(st.booleans()):
            name = (f"title {number}", name)
        shape = draw(st.sampled_from([None, (2,), (1, 3)]))
        inner = draw(dtypes(structured=draw(st.integers(0, 3)) == 0))
        fields.append((name, inner) if shape is None else (name, inner, shape))
    return np.dtype(fields, align=draw(st.booleans()))


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    """An array of random bits in any layout: C, Fortran, strided, reversed, broadcast, read-only."""
    dtype = draw(dtypes())
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    size = math.prod(shape) * dtype.itemsize
    array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)) or b"", dtype="u1").copy()
    array = array.view(dtype).reshape(shape) if size else np.ndarray(shape, dtype)
    layout = draw(st.sampled_from(["C", "F", "reversed", "every other", "broadcast", "read-only"]))
    if layout == "F":
        array = np.asfortranarray(array)
    elif layout == "reversed" and array.ndim:
        array = array[::-1]
    elif layout == "every other" and array.ndim:
        array = array[..., ::2]
    elif layout == "broadcast":
        array = np.broadcast_to(array, (2, *array.shape))
    elif layout == "read-only":
        array.setflags(write=False)
    return array


EXT_TYPES = st.builds(msgpack.ExtType, st.sampled_from([0, 4, 7, 15, 31, 40, 127]), st.binary(max_size=20))


def values() -> st.SearchStrategy[Any]:
    """Anything that packs without a registered codec, torch and images aside."""
    leaves = st.one_of(SCALARS, arrays(), numpy_scalars(), EXT_TYPES)
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=4),
            st.lists(inner, max_size=4).map(tuple),
            st.dictionaries(KEYS, inner, max_size=4),
        ),
        max_leaves=12,
    )


@st.composite
def numpy_scalars(draw: st.DrawFn) -> np.generic[Any]:
    dtype = draw(dtypes())
    if dtype.kind == "U":  # random bits are no text
        return np.str_(draw(st.text(max_size=5)))
    bits = draw(st.binary(min_size=dtype.itemsize, max_size=dtype.itemsize))
    scalar = np.frombuffer(bits, dtype)[0]
    assert isinstance(scalar, np.generic)
    return scalar
