"""torch tensors (ext 2) on the wire: a dtype, a shape and the elements in C order, as they are in memory.

torch is not imported until bytes need it; packing gets it from `sys.modules`. numpy is not needed.
"""

from __future__ import annotations

import ctypes
from importlib import import_module
from typing import Any

from .array_body import array_body, check_length, split_body
from .encode_errors import CannotPack
from .registry import Buffer, BuiltIn, instance_of

__all__ = ["CODECS"]

_WHOLE_DTYPES = frozenset({"bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64"})


def _encode_tensor(value: Any, torch: Any) -> list[Buffer]:
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise CannotPack(value, "it would come back as a plain tensor", "send a plain torch.Tensor")
    if value.is_quantized:
        raise CannotPack(
            value, "it is quantized", "send value.dequantize(), or value.int_repr() with scale and zero point"
        )
    if value.layout is not torch.strided:
        name = str(value.layout).removeprefix("torch.")
        raise CannotPack(value, f"its layout is {name}", "send value.to_dense(), or its indices and values")
    if value.device.type == "meta":
        raise CannotPack(value, "it is on the meta device and has no data", "send its shape and dtype")
    name = str(value.dtype).removeprefix("torch.")
    if not _travels(value.dtype, name):
        raise CannotPack(value, f"elements of dtype {name} have no portable form", "convert it with value.to(dtype)")
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    if plain.numel() and not plain.data_ptr():
        raise CannotPack(value, "its elements are not stored anywhere", "send value.clone()")
    return array_body(name, plain.shape, _tensor_memory(plain) if plain.numel() else b"")


def _travels(dtype: Any, name: str) -> bool:
    return dtype.is_floating_point or dtype.is_complex or name in _WHOLE_DTYPES


def _tensor_memory(tensor: Any) -> memoryview:
    """The memory of a contiguous CPU tensor with elements, which the view keeps alive. Needs no numpy."""
    memory = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    memory.owner = tensor
    return memoryview(memory).cast("B")


def _decode_tensor(body: Buffer) -> Any:
    torch: Any = import_module("torch")  # Any: the checkers do not need torch to be there
    name, shape, data = split_body(body)
    dtype: Any = getattr(torch, name, None) if type(name) is str else None
    if not isinstance(dtype, torch.dtype) or not _travels(dtype, str(name)):
        raise ValueError(f"{name!r:.60} is not a dtype of this torch ({torch.__version__})")
    check_length(shape, dtype.itemsize, data)
    tensor = torch.empty(shape, dtype=dtype, device="cpu", requires_grad=False)
    if len(data):
        _tensor_memory(tensor)[:] = data
    return tensor


CODECS = (BuiltIn(2, "torch.Tensor", "torch", instance_of("Tensor"), _encode_tensor, _decode_tensor),)
