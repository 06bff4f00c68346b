"""torch tensors (ext 2)."""

from __future__ import annotations

from typing import Any

import matrix
import msgpack
import pytest
from helpers import needs
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_cases import roundtrip, same_tensor

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError


@pytest.fixture(scope="module")
def torch() -> Any:
    return needs("torch")


NAMES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "float16", "float32", "float64",
    "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "complex32",
    "complex64", "complex128",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_R57_every_dtype_keeps_its_bits(torch: Any, name: str) -> None:
    dtype = getattr(torch, name)
    for shape in ((), (0, 2), (3,), (2, 3), (100, 100)):
        size = torch.Size(shape).numel() * dtype.itemsize
        bits = (torch.arange(size) % (2 if name == "bool" else 256)).to(torch.uint8)
        tensor = bits.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        back = roundtrip([tensor])[0]
        assert same_tensor(torch, tensor, back)
        assert back.device.type == "cpu"
        assert not back.requires_grad


@settings(deadline=None, max_examples=matrix.examples(80))
@given(st.data())
def test_any_layout(torch: Any, data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    dtype = getattr(torch, data.draw(st.sampled_from(NAMES[:9])))
    tensor = torch.arange(torch.Size(shape).numel()).to(dtype).reshape(shape)
    if data.draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if data.draw(st.booleans()) and tensor.dim():
        tensor = tensor[::2]
    if data.draw(st.booleans()):
        tensor = tensor.expand(2, *tensor.shape)
    assert same_tensor(torch, tensor, roundtrip({"t": (tensor,)})["t"][0])


def test_R57_what_torch_hands_out(torch: Any) -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    for tensor in (
        torch.tensor([1.5, -2.0], requires_grad=True),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(3, requires_grad=True) * 2,
        z.conj(),
        z.conj().imag,
        torch.tensor([float("nan"), float("inf"), -0.0]),
        torch.ones(5000)[1:],
    ):
        assert same_tensor(torch, tensor, roundtrip(tensor))


def test_a_decoded_tensor_can_be_written_to_and_resized(torch: Any) -> None:
    blob = wire.pack(torch.zeros(2000))
    back = wire.unpack(blob)
    back += 1
    back.resize_(3000)
    assert wire.unpack(blob).sum() == 0


def test_a_default_device_does_not_change_where_tensors_land(torch: Any) -> None:
    blob = wire.pack(torch.ones(2))
    torch.set_default_device("meta")
    try:
        assert wire.unpack(blob).tolist() == [1, 1]
    finally:
        torch.set_default_device(None)


def test_what_has_no_bits_to_send_is_refused_with_the_fix(torch: Any) -> None:
    class Mine(torch.Tensor):  # type: ignore[misc]
        pass

    cases = [
        (torch.eye(2).to_sparse(), "its layout is sparse_coo; send value.to_dense(), or its indices and values"),
        (torch.empty(2, device="meta"), "it is on the meta device and has no data; send its shape and dtype"),
        (torch._efficientzerotensor((2,)), "its elements are not stored anywhere; send value.clone()"),
        (
            torch.empty(2, dtype=torch.uint4),
            "elements of dtype uint4 have no portable form; convert it with value.to(d",
        ),
        (torch.ones(2).as_subclass(Mine), "it would come back as a plain tensor; send a plain torch.Tensor"),
    ]
    for tensor, part in cases:
        with pytest.raises(EncodeError) as caught:
            wire.pack([tensor])
        assert f"at $[0]: {part}" in str(caught.value)


def test_a_tensor_is_no_dict_key(torch: Any) -> None:
    with pytest.raises(EncodeError, match=r"a value of type torch\.Tensor as a dict key at \$: it would not come back"):
        wire.pack({torch.ones(2): 1})


@pytest.mark.parametrize(
    "body",
    [
        ["float32", [3], b"\0" * 8],
        ["float32", [2**62], b"\0" * 8],
        ["float32", [-1], b"\0" * 4],
        ["qint8", [1], b"\0"],
        ["Tensor", [1], b"\0"],
        ["load", [1], b"\0"],
        ["nn", [1], b"\0"],
        ["", [1], b"\0"],
        [None, [1], b"\0"],
        ["float32", [1]],
        ["float32", [2**40, 2**40, 0], b""],
        "float32",
    ],
)
def test_false_bodies_are_wire_errors(torch: Any, body: Any) -> None:
    with pytest.raises(WireError, match=r"code 2 \(torch\.Tensor"):
        wire.unpack(bytes(msgpack.packb(msgpack.ExtType(2, msgpack.packb(body)))))
