"""The ext values of this package: numpy arrays (1), torch tensors (2), numpy scalars (6). Images (3) are next door.

An array is a dtype, a shape and its elements in C order. Only memory is ever read here, nothing is evaluated: dtype
names must look like one, and structured dtypes are built field by field.

numpy and torch are not imported until bytes need them; packing gets them from `sys.modules`.
"""

from __future__ import annotations

import ctypes
import functools
import math
import re
import struct
from importlib import import_module
from typing import Any

from . import _msgpack, images
from .encode_errors import Refused, kind_of, type_name
from .registry import Buffer, BuiltIn, install

_SMALL = 4096  # below this a copy costs less than care
_HEAD = 1 << 16  # bytes in which dtype and shape end, unless the dtype has thousands of fields
_DTYPE_NAME = re.compile(r"[<>=|]?[A-Za-z]+\d*(\[\d*[A-Za-z]+\])?")
_KINDS = "biufcmMSUV"
_RECORD = "record"  # {"record": dtype} instead of dtype: a recarray, or a scalar of one


# --- dtypes ----------------------------------------------------------------------------------------------------------


class _Unfit(Exception):
    """A dtype that cannot travel: why, and what to do."""


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
        raise Refused(value, *unfit.args) from None


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
            title, name = (None, label) if type(label) is str else label
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


# --- bodies: [dtype, shape, bytes] -----------------------------------------------------------------------------------


def _body(dtype: object, shape: Any, data: Buffer) -> list[Buffer]:
    """The pieces of a body. `data` must be flat."""
    head = b"\x93" + _msgpack.packb(dtype) + _msgpack.packb(list(shape))
    size = len(data)
    if size < 1 << 8:
        return [head + b"\xc4" + bytes((size,)), data]
    if size < 1 << 16:
        return [head + b"\xc5" + struct.pack(">H", size), data]
    if size < 1 << 32:
        return [head + b"\xc6" + struct.pack(">I", size), data]
    raise ValueError(f"its {size} bytes are more than the 4 GiB that fit")


def _split(body: Buffer) -> tuple[object, tuple[int, ...], Buffer]:
    """dtype item, shape and data of a body, the data not copied when there is much of it."""
    found = _split_large(body) if len(body) > _SMALL else None
    items: Any = found or _msgpack.unpackb(body)
    if kind_of(items) not in (list, tuple) or len(items) != 3:
        raise ValueError("the body is not [dtype, shape, bytes]")
    dtype, shape, data = items
    if kind_of(shape) is not list or not all(kind_of(size) is int and size >= 0 for size in shape):
        raise ValueError("the shape is not a list of sizes")
    if kind_of(data) not in (bytes, memoryview):
        raise ValueError("the elements are not bytes")
    return dtype, tuple(shape), data


def _split_large(body: Buffer) -> tuple[object, object, memoryview] | None:
    """`_split` without copying; None when the body does not look as expected."""
    view = memoryview(body)
    head = _msgpack.Unpacker(read_size=_HEAD, strict_map_key=False)
    head.feed(view[:_HEAD])
    try:
        if head.read_array_header() != 3:
            return None
        dtype, shape = head.unpack(), head.unpack()
    except _msgpack.READ_ERRORS:
        return None
    at: int = head.tell()
    width = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(view[at]) if at < len(view) else None
    if width is None:
        return None
    data = view[at + 1 + width :]
    return (dtype, shape, data) if int.from_bytes(view[at + 1 : at + 1 + width]) == len(data) else None


def _check_length(shape: tuple[int, ...], itemsize: int, data: Buffer) -> None:
    expected = math.prod(shape) * itemsize
    if expected != len(data):
        raise ValueError(f"shape and dtype ask for {expected} bytes, {len(data)} came")


# --- numpy -----------------------------------------------------------------------------------------------------------


def _encode_array(value: Any, np: Any) -> list[Buffer]:
    kind = kind_of(value)
    if kind is not np.ndarray and kind is not np.recarray:
        name = type_name(value)
        if isinstance(value, np.ma.MaskedArray):
            raise Refused(value, "its mask would be lost", "send (value.data, value.mask) or value.filled()")
        raise Refused(value, f"it would come back as numpy.ndarray, not {name}", "send numpy.asarray(value)")
    item = _dtype_item(value)
    if kind is np.recarray:
        item = {_RECORD: item}
    if value.dtype.names and not value.flags.c_contiguous:
        # numpy's own copies leave whatever was in memory in the gaps between fields.
        value, strided = np.zeros(value.shape, value.dtype), value
        value[...] = strided
    if value.nbytes <= _SMALL:
        return _body(item, value.shape, value.tobytes())
    flat = np.ascontiguousarray(value).reshape(-1).view(np.ndarray)
    return _body(item, value.shape, flat.view(np.uint8).data)


def _decode_array(body: Buffer) -> Any:
    import numpy as np

    item, shape, data = _split(body)
    item, is_record = _unwrap(item)
    dtype = _dtype_of(item)
    _check_length(shape, dtype.itemsize, data)
    array = np.ndarray(shape, dtype)  # not np.empty: that makes U0 and S0 one character wide
    if len(data):
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(data, np.uint8)
    return array.view(np.recarray) if is_record else array


def _encode_scalar(value: Any, np: Any) -> list[Buffer]:
    dtype = value.dtype
    kind = kind_of(value)
    if dtype.type is not kind:
        raise Refused(value, f"it would come back as numpy.{dtype.type.__name__}", "send a scalar of numpy's own types")
    if kind is np.str_:
        data = value.encode("utf-32-le", "surrogatepass")  # str(value) would cut trailing NULs off
        item: object = f"<U{len(data) // 4}"
    elif kind is np.bytes_:
        data = bytes(value)
        item = f"|S{len(data)}"
    else:
        item, data = _dtype_item(value), value.tobytes()
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
    _check_length((), dtype.itemsize, data)
    if dtype.kind == "U":  # an array would cut trailing NULs off
        return np.str_(data.decode("utf-32-be" if dtype.byteorder == ">" else "utf-32-le", "surrogatepass"))
    if dtype.kind == "S":
        return np.bytes_(data)
    if is_record:
        dtype = np.dtype((np.record, dtype))
    return np.ndarray((), dtype, bytearray(data))[()] if data else np.ndarray((), dtype)[()]


# --- torch -----------------------------------------------------------------------------------------------------------


def _encode_tensor(value: Any, torch: Any) -> list[Buffer]:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise Refused(value, "it would come back as a plain tensor", "send a plain torch.Tensor")
    if value.is_quantized:
        raise Refused(
            value, "it is quantized", "send value.dequantize(), or value.int_repr() with scale and zero point"
        )
    if value.layout is not torch.strided:
        name = str(value.layout).removeprefix("torch.")
        raise Refused(value, f"its layout is {name}", "send value.to_dense(), or its indices and values")
    if value.device.type == "meta":
        raise Refused(value, "it is on the meta device and has no data", "send its shape and dtype")
    name = str(value.dtype).removeprefix("torch.")
    if not _travels(value.dtype, name):
        raise Refused(value, f"elements of dtype {name} have no portable form", "convert it with value.to(dtype)")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel() and not plain.data_ptr():
        raise Refused(value, "its elements are not stored anywhere", "send value.clone()")
    return _body(name, plain.shape, _tensor_memory(plain) if plain.numel() else b"")


def _travels(dtype: Any, name: str) -> bool:
    whole = {"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"}
    return dtype.is_floating_point or dtype.is_complex or name in whole


def _tensor_memory(tensor: Any) -> memoryview:
    """The memory of a contiguous CPU tensor with elements, which the view keeps alive. Needs no numpy."""
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def _decode_tensor(body: Buffer) -> Any:
    torch: Any = import_module("torch")  # Any: the checkers do not need torch to be there
    name, shape, data = _split(body)
    dtype: Any = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype) or not _travels(dtype, str(name)):
        raise ValueError(f"{name!r:.60} is not a dtype of this torch ({torch.__version__})")
    _check_length(shape, dtype.itemsize, data)
    tensor = torch.empty(shape, dtype=dtype, device="cpu", requires_grad=False)
    if len(data):
        _tensor_memory(tensor)[:] = data
    return tensor


def _is(*names: str) -> Any:
    """A match on a class of the module, None-safe: another thread may be half-way through importing it."""
    (name,) = names

    def match(value: Any, module: Any) -> bool:
        kind = getattr(module, name, None)
        return kind is not None and isinstance(value, kind)

    return match


def _is_scalar(value: Any, np: Any) -> bool:
    return _is_generic(value, np) and not isinstance(value, np.void)


_is_generic = _is("generic")

install(
    BuiltIn(6, "numpy scalar", "numpy", _is_scalar, _encode_scalar, _decode_scalar, hashable=True),
    BuiltIn(6, "numpy scalar", "numpy", _is_generic, _encode_scalar, _decode_scalar),
    BuiltIn(1, "numpy.ndarray", "numpy", _is("ndarray"), _encode_array, _decode_array),
    BuiltIn(2, "torch.Tensor", "torch", _is("Tensor"), _encode_tensor, _decode_tensor),
    BuiltIn(3, "PIL.Image", "PIL.Image", _is("Image"), images.encode, images.decode),
)
