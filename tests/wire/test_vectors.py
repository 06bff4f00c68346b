"""Byte compatibility: every recorded case of a peer's codec, one row of this table each."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from helpers import each_row, needs
from PIL import Image
from wire_cases import roundtrip, same, same_tensor

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError

VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text())["vectors"]
BY_NAME = {entry["name"]: entry for entry in VECTORS}

# What a peer cannot pack, cannot read or changes, and what happens here.
COMES_BACK = {
    "dict_int_keys", "dict_int_keys_nested", "dict_float_key", "dict_bool_key", "dict_tuple_key", "dict_mixed_keys",
    "np_float64_scalar", "np_int64_scalar", "np_bool_scalar", "np_float32_scalar", "np_datetime64_scalar",
    "nd_structured", "nd_recarray", "nd_subarray_dtype", "nd_longdouble",
    "t_bfloat16", "t_float8", "t_neg_view",
    "img_JPEG_loaded", "img_WEBP_loaded", "img_F", "img_I", "img_YCbCr", "img_HSV", "img_empty_0x0", "img_PA", "img_La",
    "img_RGBa", "img_I16B", "img_P_transparency",
}  # fmt: skip
REFUSED = {
    "int_below_min": "it is outside -2^63 to 2^64-1; turn its ready-made codec on",
    "set": "turn its ready-made codec on, on both sides, with wire.register(*wire.STDLIB)",
    "frozenset": "wire.register(*wire.STDLIB)",
    "decimal": "wire.register(*wire.STDLIB)",
    "datetime": "wire.register(*wire.STDLIB)",
    "date": "wire.register(*wire.STDLIB)",
    "path": "wire.register(*wire.STDLIB)",
    "int_enum": "send value.value or value.name",
    "ordered_dict": "it is a subclass of dict and would come back as dict; send dict(value)",
    "counter": "send dict(value)",
    "namedtuple": "it is a subclass of tuple and would come back as tuple; send tuple(value)",
    "deque": "or register a codec for it with wire.register(wire.Codec(...))",
    "list_subclass": "send list(value)",
    "ellipsis": "wire.register(wire.Codec(...))",
    "function": "functions do not travel as data; send a name or the result of calling it",
    "object": "wire.register(wire.Codec(...))",
    "generator": "send list(value)",
    "lone_surrogate_key": "as a dict key at $: it holds a lone surrogate",
    "nd_matrix": "it would come back as numpy.ndarray, not numpy.matrix; send numpy.asarray(value)",
    "nd_string_dtype": 'send value.astype("U") or value.tolist()',
    "self_referential_list": "the value contains itself",
    "tuple_depth_300": "it lies inside 16 other tuples or ext values",
    "t_sparse": "its layout is sparse_coo; send value.to_dense()",
    "t_quantized": "it is quantized; send value.dequantize()",
}
BYTES_ONLY = {"memoryview"}  # comes back as bytes
ELSEWHERE = {"envelope_raw", "frame_raw", "foreign"}


def evaluate(entry: dict[str, Any]) -> Any:
    names = {"np": np, "Image": Image, "BytesIO": BytesIO, "msgpack": msgpack, "wire": wire}
    if "torch" in entry["python"]:
        names["torch"] = needs("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy.matrix and quantized tensors are on their way out
        return eval(entry["python"], names | {"inf": math.inf, "nan": math.nan})


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, wire.Envelope | wire.Frame):
        return type(a) is type(b) and all(
            equal(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(a)
        )
    if type(a).__module__.startswith("torch"):
        return same_tensor(needs("torch"), a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return same(a, b)


def names(*, category: set[str] | None = None, without: set[str] = frozenset()) -> list[str]:  # type: ignore[assignment]
    return [
        entry["name"]
        for entry in VECTORS
        if entry["name"] not in without and (category is None or entry["category"] in category)
    ]


OTHERWISE = COMES_BACK | REFUSED.keys() | BYTES_ONLY | {"env_version_2"}
EXACT = [name for name in names(without=OTHERWISE) if BY_NAME[name]["category"] not in ELSEWHERE]


def test_every_recorded_case_has_a_row() -> None:
    assert len(VECTORS) == 262
    assert all(BY_NAME[name]["status"] == "exact" for name in EXACT)
    assert len(EXACT) + len(OTHERWISE) + len(names(category=ELSEWHERE)) == 262


TORCH = {entry["name"] for entry in VECTORS if "torch" in entry["python"]}


@each_row("name", [name for name in EXACT if name not in TORCH])
def test_exact(name: str) -> None:
    is_exact(name)


@each_row("name", [name for name in EXACT if name in TORCH])
def test_exact_of_torch(name: str) -> None:
    is_exact(name)


def is_exact(name: str) -> None:
    entry = BY_NAME[name]
    value, blob = evaluate(entry), bytes.fromhex(entry["hex"])
    if entry["category"] in ("envelope", "frame"):
        if entry["check"] == "exact":
            assert value.to_bytes() == blob
        assert equal(value, type(value).from_bytes(blob))
        return
    if entry["check"] == "exact":
        assert wire.pack(value) == blob
    assert equal(value, wire.unpack(blob))
    assert equal(value, roundtrip(value))


@each_row("name", sorted(COMES_BACK - TORCH))
def test_what_a_peer_cannot_carry_comes_back_here(name: str) -> None:
    comes_back(name)


@each_row("name", sorted(COMES_BACK & TORCH))
def test_what_a_peer_cannot_carry_of_torch_comes_back_here(name: str) -> None:
    comes_back(name)


def comes_back(name: str) -> None:
    value = evaluate(BY_NAME[name])
    assert equal(value, roundtrip(value))


@each_row("name", sorted(name for name in COMES_BACK if name.startswith("dict_")))
def test_what_a_peer_packs_keeps_its_bytes(name: str) -> None:
    value, blob = evaluate(BY_NAME[name]), bytes.fromhex(BY_NAME[name]["hex"])
    assert wire.pack(value) == blob
    assert equal(value, wire.unpack(blob))


@each_row("name", sorted(REFUSED.keys() - TORCH))
def test_the_error_gives_the_reason(name: str) -> None:
    is_refused(name)


@each_row("name", sorted(REFUSED.keys() & TORCH))
def test_the_error_of_torch_gives_the_reason(name: str) -> None:
    is_refused(name)


def is_refused(name: str) -> None:
    value = evaluate(BY_NAME[name])
    with pytest.raises(EncodeError) as caught:
        wire.pack(value)
    assert REFUSED[name] in str(caught.value)


def test_memoryview_goes_out_as_bytes() -> None:
    entry = BY_NAME["memoryview"]
    assert wire.pack(evaluate(entry)) == bytes.fromhex(entry["hex"])
    assert roundtrip(evaluate(entry)) == b"ab"


@each_row("name", ["nd_structured", "nd_recarray", "nd_string_dtype", "nd_subarray_dtype"])
def test_arrays_that_no_reader_can_trust_are_refused(name: str) -> None:
    with pytest.raises(WireError, match=r"cannot unpack the ext value of code 1 \(numpy\.ndarray, \d+ bytes\)"):
        wire.unpack(bytes.fromhex(BY_NAME[name]["hex"]))


@each_row("name", names(category={"foreign"}))
def test_foreign(name: str) -> None:
    entry = BY_NAME[name]
    if entry["python"] == "error":
        with pytest.raises(WireError):
            wire.unpack(bytes.fromhex(entry["hex"]))
    else:
        assert same(evaluate(entry), wire.unpack(bytes.fromhex(entry["hex"])))


@each_row("name", names(category={"envelope_raw"}))
def test_envelope_raw(name: str) -> None:
    entry = BY_NAME[name]
    blob = bytes.fromhex(entry["hex"])
    if entry["status"] == "rejected":
        with pytest.raises(WireError, match=r"^not an Envelope: .*submit with Envelope\.to_bytes"):
            wire.Envelope.from_bytes(blob)
        return
    envelope = wire.Envelope.from_bytes(blob)
    for field, expected in entry["fields"].items():
        given = getattr(envelope, field)
        assert (given.hex() if isinstance(given, bytes) else given) == expected
    assert wire.Envelope.from_bytes(envelope.to_bytes()) == envelope


def test_envelope_of_a_newer_version() -> None:
    entry = BY_NAME["env_version_2"]
    assert evaluate(entry).to_bytes() == bytes.fromhex(entry["hex"])
    with pytest.raises(WireError) as caught:
        wire.Envelope.from_bytes(bytes.fromhex(entry["hex"]))
    assert str(caught.value) == (
        "the Envelope is of version 2, and this side reads versions up to 1: upgrade dreamlake-lakeshore here"
    )


FRAMES: dict[str, Any] = {
    "frameraw_kind_9": [wire.Frame(9)],  # kept for a newer peer's sake
    "frameraw_int_dict_key_body": [wire.Frame(wire.FrameKind.VALUE, 0, {1: 2})],
    "framestream_six": [wire.Frame(kind, seq, seq) for seq, kind in enumerate((0, 0, 2, 1, 1, 3))],
    "frameraw_3_elements": "not a frame: expected an array [kind, seq, body, meta], got an array of 3",
    "frameraw_map": "not a frame: expected an array [kind, seq, body, meta], got a dict",
    "frameraw_seq_str": "got a int, a str and a NoneType",
}


@each_row("name", names(category={"frame_raw"}))
def test_frame_raw(name: str) -> None:
    blob = bytes.fromhex(BY_NAME[name]["hex"])
    expected = FRAMES[name]
    if isinstance(expected, list):
        assert list(wire.FrameDecoder().feed(blob)) == expected
        return
    with pytest.raises(WireError) as caught:
        list(wire.FrameDecoder().feed(blob))
    assert expected in str(caught.value)
