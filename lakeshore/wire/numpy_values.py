"""numpy arrays (ext 1) and numpy scalars (ext 6) on the wire.

Only memory is ever read here, nothing is evaluated: dtype names must look like one, and structured dtypes are built
field by field. numpy is not imported until bytes need it; packing gets it from `sys.modules`.
"""

from __future__ import annotations

import functools
import re
from typing import Any

from ..limits import MAX_COPIED_BYTES
from . import _msgpack
from .array_body import array_body, check_length, split_body
from .encode_errors import CannotPack
from .registry import Buffer, BuiltIn, instance_of
from .values import kind_of, type_name

__all__ = ["CODECS"]

_DTYPE_NAME = re.compile(r"[<>=|]?[A-Za-z]+\d*(\[\d*[A-Za-z]+\])?")
_KINDS = "biufcmMSUV"
"""The kinds of dtypes whose elements are plain memory."""
_RECORD = "record"
"""What travels for a recarray, or a scalar of one: {"record": dtype} in place of dtype."""


# --- dtypes ----------------------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """A dtype that cannot travel: the reason, and what to do instead."""

    def __init__(self, reason: str, fix: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fix = fix


def _check_dtype(dtype: Any) -> None:
    """Raise _Unfit unless the elements are plain memory, at any depth."""
    if dtype.subdtype is not None:
        _check_dtype(dtype.subdtype[0])
    elif dtype.fields is not None:
        for field in dtype.fields.values():
            _check_dtype(field[0])
    elif dtype.kind == "O":
        raise _Unfit("its elements are Python objects", "send value.tolist(), or an array of another dtype")
    elif dtype.kind == "T":
        raise _Unfit("StringDType keeps its text elsewhere", 'send value.astype("U") or value.tolist()')
    elif dtype.kind not in _KINDS or dtype.isbuiltin == 2:
        raise _Unfit(f"its dtype {dtype} is not numpy's own", "send value.astype(...) to one of numpy's own")


@functools.lru_cache(maxsize=256)
def _item_of(dtype: Any) -> object:
    """The dtype as it travels: its name, or for structured ones the list of its fields. Raises _Unfit."""
    _check_dtype(dtype)
    if dtype.names is None:
        return str(dtype)
    try:
        item = _descr_item(dtype.descr)
        if _dtype_of(item) == dtype:
            return item
    except (ValueError, TypeError):
        pass
    raise _Unfit(
        "the fields of its dtype overlap, are out of order or have titles that are not text",
        "send numpy.lib.recfunctions.repack_fields(value)",
    )


def _dtype_item(value: Any) -> object:
    try:
        return _item_of(value.dtype)
    except _Unfit as unfit:
        raise CannotPack(value, unfit.reason, unfit.fix) from None


def _descr_item(descr: list[Any]) -> list[Any]:
    items: list[Any] = []
    for name, form, *shape in descr:
        label = name if type(name) is str else list(name)
        if not all(type(part) is str for part in label):
            raise ValueError("titles that are not text")
        items.append([label, form if type(form) is str else _descr_item(form), *map(list, shape)])
    return items


def _dtype_of(item: object) -> Any:
    """The dtype that travelled as `item`. Raises ValueError or TypeError."""
    if type(item) is str:
        return _simple_dtype(item)
    fields: Any = item
    if kind_of(item) is not list:
        raise ValueError(f"a dtype is a name or a list of fields, not {type_name(item)}")
    return _structured_dtype(fields)


@functools.lru_cache(maxsize=256)
def _simple_dtype(name: str) -> Any:
    import numpy as np

    if not _DTYPE_NAME.fullmatch(name):
        raise ValueError(f"{name!r:.60} is not the name of a dtype")
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS or dtype.isbuiltin == 2:
        raise ValueError(f"elements of dtype {name!r} are not plain memory")
    return dtype


def _structured_dtype(fields: list[Any]) -> Any:
    import numpy as np

    names: list[str] = []
    formats: list[Any] = []
    offsets: list[int] = []
    titles: list[str | None] = []
    offset = 0
    for label, form, *shape in fields:
        dtype = _dtype_of(form)
        if shape:
            (dimensions,) = shape
            dtype = np.dtype((dtype, tuple(dimensions)))
        if label != "":  # numpy writes padding as a nameless field
            if type(label) is str:
                title = None
                name = label
            else:
                title, name = label
            names.append(name)
            formats.append(dtype)
            offsets.append(offset)
            titles.append(title)
        offset += dtype.itemsize
    spec: Any = {"names": names, "formats": formats, "offsets": offsets, "titles": titles, "itemsize": offset}
    return np.dtype(spec)


def _unwrap(item: Any) -> tuple[object, bool]:
    """The dtype item, and whether it was marked as a record."""
    if kind_of(item) is dict and len(item) == 1 and _RECORD in item:
        return item[_RECORD], True
    return item, False


# --- numpy -----------------------------------------------------------------------------------------------------------


def _encode_array(value: Any, np: Any) -> list[Buffer]:
    kind = kind_of(value)
    if kind is not np.ndarray and kind is not np.recarray:
        name = type_name(value)
        if isinstance(value, np.ma.MaskedArray):
            raise CannotPack(value, "its mask would be lost", "send (value.data, value.mask) or value.filled()")
        raise CannotPack(value, f"it would come back as numpy.ndarray, not {name}", "send numpy.asarray(value)")
    item = _dtype_item(value)
    if kind is np.recarray:
        item = {_RECORD: item}
    if value.dtype.names and not value.flags.c_contiguous:
        # numpy's own copies leave whatever was in memory in the gaps between fields.
        copy = np.zeros(value.shape, value.dtype)
        copy[...] = value
        value = copy
    if value.nbytes <= MAX_COPIED_BYTES:
        return array_body(item, value.shape, value.tobytes())
    flat = np.ascontiguousarray(value).reshape(-1).view(np.ndarray)
    return array_body(item, value.shape, flat.view(np.uint8).data)


def _decode_array(body: Buffer) -> Any:
    import numpy as np

    item, shape, data = split_body(body)
    item, is_record = _unwrap(item)
    dtype = _dtype_of(item)
    check_length(shape, dtype.itemsize, data)
    array = np.ndarray(shape, dtype)  # not np.empty: that makes U0 and S0 one character wide
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return array.view(np.recarray) if is_record else array


def _encode_scalar(value: Any, np: Any) -> list[Buffer]:
    dtype = value.dtype
    kind = kind_of(value)
    if dtype.type is not kind:
        raise CannotPack(
            value, f"it would come back as numpy.{dtype.type.__name__}", "send a scalar of numpy's own types"
        )
    if kind is np.str_:
        data = value.encode("utf-32-le", "surrogatepass")  # str(value) would cut trailing NULs off
        item: object = f"<U{len(data) // 4}"
    elif kind is np.bytes_:
        data = bytes(value)
        item = f"|S{len(data)}"
    else:
        item = _dtype_item(value)
        data = value.tobytes()
        if kind is np.record:
            item = {_RECORD: item}
        elif type(item) is str and _simple_dtype(item).type is not kind:
            item = kind.__name__  # longlong prints as int64 and is another type
    return [_msgpack.packb([item, data])]


def _decode_scalar(body: Buffer) -> Any:
    import numpy as np

    item, data = _msgpack.unpackb(body, strict_map_key=False)
    item, is_record = _unwrap(item)
    dtype = _dtype_of(item)
    if not isinstance(data, bytes):
        raise ValueError("the element is not bytes")
    check_length((), dtype.itemsize, data)
    if dtype.kind == "U":  # an array would cut trailing NULs off
        encoding = "utf-32-be" if dtype.byteorder == ">" else "utf-32-le"
        return np.str_(data.decode(encoding, "surrogatepass"))
    if dtype.kind == "S":
        return np.bytes_(data)
    if is_record:
        dtype = np.dtype((np.record, dtype))
    if not data:
        return np.ndarray((), dtype)[()]
    return np.ndarray((), dtype, bytearray(data))[()]


def _is_scalar(value: Any, np: Any) -> bool:
    return _is_generic(value, np) and not isinstance(value, np.void)


_is_generic = instance_of("generic")

CODECS = (
    BuiltIn(6, "numpy scalar", "numpy", _is_scalar, _encode_scalar, _decode_scalar, hashable=True),
    BuiltIn(6, "numpy scalar", "numpy", _is_generic, _encode_scalar, _decode_scalar),
    BuiltIn(1, "numpy.ndarray", "numpy", instance_of("ndarray"), _encode_array, _decode_array),
)
