"""numpy arrays (ext 1) and scalars (ext 6)."""

from __future__ import annotations

from typing import Any

import matrix
import msgpack
import numpy as np
import pytest
from helpers import each_row
from hypothesis import given, settings
from wire_cases import DTYPES, arrays, numpy_scalars, pack_error, roundtrip, same, values

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import WireError
from dreamlake.lakeshore.wire.array_body import array_body


def array_blob(dtype: Any, shape: Any, data: Any, code: int = 1) -> bytes:
    return bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb([dtype, shape, data]))))


# --- arrays ----------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=matrix.examples(400))
@given(arrays())
def test_any_array_comes_back_with_its_bits(array: np.ndarray[Any, Any]) -> None:
    back = roundtrip(array)
    assert same(array, back)
    assert back.flags.writeable
    assert back.flags.owndata
    assert back.flags.c_contiguous


@settings(deadline=None, max_examples=matrix.examples(200))
@given(values())
def test_any_value_comes_back_exactly(value: Any) -> None:
    assert same(value, roundtrip(value))


@each_row("size", [0, 1, 255, 256, 4095, 4096, 4097, 65535, 65536, 70000, 1 << 20])
@each_row("wrap", [lambda a: a, lambda a: [a, a], lambda a: {"x": (a, [a]), "y": 1}])
def test_arrays_of_every_size_in_every_place(size: int, wrap: Any) -> None:
    array = np.arange(size, dtype=np.uint8)
    assert same(wrap(array), roundtrip(wrap(array)))


def test_R56_a_decoded_array_can_be_written_to() -> None:
    for array in (np.zeros(3), np.zeros(10_000), np.array(1.0), np.zeros(2, [("a", "i4")])):
        back = roundtrip([array])[0]
        back[...] = 1
        assert back.tobytes() == np.ones_like(array).tobytes()
    source = wire.pack(np.zeros(5000))
    wire.unpack(source)[:] = 7
    assert (wire.unpack(source) == 0).all()
    buffer = bytearray(source)
    wire.unpack(buffer)[:] = 7
    buffer.extend(b"nothing of the result holds the buffer")


@each_row("size", [1, 6000])
@each_row(
    "dtype",
    [
        np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (2,))], align=True),
        np.dtype([("p", [("x", "i1"), ("y", ">f4", (2, 3))]), ("q", "M8[ns]"), ("s", "U3")], align=True),
        np.dtype([(("a title", "a"), "i4"), (("another", "b"), [("c", "V3"), ("d", "?")])]),
        np.dtype([("a", "i4"), ("b", "f8"), ("c", "S2")])[["a", "c"]],
        np.dtype({"names": ["a"], "formats": ["i4"], "offsets": [4], "itemsize": 16}),
        np.dtype([("ключ", "u1"), ("with space", "c8"), ("z", "g")]),
        np.dtype([("a", "S0"), ("b", "i4")]),
        np.dtype([]),
    ],
    ids=str,
)
def test_R53_structured_dtypes_come_back_equal(dtype: np.dtype[Any], size: int) -> None:
    array = np.frombuffer(np.arange(size * dtype.itemsize, dtype="u1").tobytes(), "u1").copy()
    array = array.view(dtype) if dtype.itemsize else np.zeros(size, dtype)
    back = roundtrip((array,))[0]
    assert back.dtype == dtype
    assert back.dtype.descr == dtype.descr
    assert back.dtype.titles == dtype.titles if hasattr(dtype, "titles") else True
    assert back.tobytes() == array.tobytes()


def test_R53_record_arrays_and_records_stay_records() -> None:
    array = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i4"), ("b", "f8")])
    back = roundtrip(array)
    assert type(back) is np.recarray
    assert back.a.tolist() == [1, 3]
    assert same(array, back)
    record = roundtrip(array[1])
    assert type(record) is np.record
    assert record.b == 4.0
    assert record.dtype.descr == array.dtype.descr


def test_R53_dtypes_whose_fields_overlap_are_refused() -> None:
    for dtype in (
        {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 0]},
        {"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [4, 0]},
        {"names": ["a"], "formats": ["i4"], "titles": [("no", "text")]},
    ):
        assert pack_error({"r": np.zeros(2, np.dtype(dtype))}) == (  # type: ignore[call-overload]
            'cannot pack a value of type numpy.ndarray at $["r"]: the fields of its dtype overlap, are out of order or '
            "have titles that are not text; send numpy.lib.recfunctions.repack_fields(value)"
        )


@pytest.mark.filterwarnings("ignore:The .generic. unit for NumPy timedelta:DeprecationWarning")
def test_R55_dates_keep_unit_and_bits() -> None:
    for array in (
        np.array(["1901-12-13T20:45:51", "NaT", "2262-04-11"], "M8[s]"),
        np.array(["1677-09-22", "NaT"], "M8[ns]"),
        np.array([-1, "NaT", 3], "m8[W]"),
        np.array(["NaT"], "M8"),
        np.arange(3000).astype(">M8[D]"),
    ):
        assert same(array, roundtrip(array))
        assert same(array[0], roundtrip(array[0])) or array.dtype.byteorder == ">"


def test_R52_arrays_of_objects_are_refused() -> None:
    assert pack_error([np.array([{"a": 1}, None], dtype=object)]) == (
        "cannot pack a value of type numpy.ndarray at $[0]: its elements are Python objects; "
        "send value.tolist(), or an array of another dtype"
    )
    assert "its elements are Python objects" in pack_error(np.zeros(2, [("a", "i4"), ("o", [("x", "O")])]))
    assert "its elements are Python objects" in pack_error(np.zeros(2, [("a", "O", (2,))]))
    strings = np.array(["a", "bb"], dtype=np.dtypes.StringDType())
    assert 'StringDType keeps its text elsewhere; send value.astype("U") or value.tolist()' in pack_error(strings)


def test_dtypes_that_others_brought_along_are_refused() -> None:
    from numpy._core._rational_tests import rational  # numpy's own example of such a dtype

    array = np.array([rational(1, 2)])
    assert f"its dtype {array.dtype} is not numpy's own; send value.astype(...) to one of" in pack_error(array)


def test_arrays_of_4_GiB_are_refused() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 1 << 32

    with pytest.raises(ValueError, match="its 4294967296 bytes are more than the 4 GiB that fit"):
        array_body("uint8", [1 << 32], Huge())


def test_subclasses_of_arrays_are_refused(tmp_path: Any) -> None:
    class Mine(np.ndarray[Any, Any]):
        pass

    masked = np.ma.masked_array([1, 2], mask=[True, False])
    assert "its mask would be lost; send (value.data, value.mask) or value.filled()" in pack_error((masked,))
    assert "it would come back as numpy.ndarray" in pack_error(np.zeros(2).view(Mine))
    mapped = np.memmap(tmp_path / "m", dtype="u1", mode="w+", shape=(4,))
    assert "it would come back as numpy.ndarray, not numpy.memmap; send numpy.asarray(value)" in pack_error(mapped)
    assert same(np.asarray(mapped), roundtrip(np.asarray(mapped)))


def test_a_registered_codec_may_take_what_we_refuse() -> None:
    codec = wire.Codec(
        50,
        "objects",
        lambda value: isinstance(value, np.ndarray) and value.dtype == object,
        lambda value: wire.pack(value.tolist()),
        lambda body: np.array(wire.unpack(body), dtype=object),
    )
    wire.register(codec)
    assert roundtrip([np.array([1, None], dtype=object)])[0].tolist() == [1, None]
    assert "its mask would be lost" in pack_error(np.ma.masked_array([1]))


def test_a_dtype_with_thousands_of_fields() -> None:
    dtype = np.dtype([(f"a field with quite a long name {number}", "u1") for number in range(4000)])
    assert same(np.zeros(20, dtype), roundtrip(np.zeros(20, dtype)))


def test_zero_wide_elements() -> None:
    for dtype in ("U0", "S0", "V0"):
        array: np.ndarray[Any, Any] = np.ndarray((2, 3), dtype)
        back = roundtrip(array)
        assert (back.dtype, back.shape) == (array.dtype, (2, 3))


# --- scalars ---------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=matrix.examples(300))
@given(numpy_scalars())
def test_any_scalar_comes_back_with_its_type(scalar: np.generic[Any]) -> None:
    assert same(scalar, roundtrip(scalar))
    assert same((scalar, {"x": [scalar]}), roundtrip((scalar, {"x": [scalar]})))


@pytest.mark.filterwarnings("ignore:The .generic. unit for NumPy timedelta:DeprecationWarning")
def test_R51_what_numpy_returns_can_be_returned() -> None:
    array = np.arange(6.0).reshape(2, 3)
    for scalar in (array.mean(), array[0, 0], array.argmax(), array.any(), np.float32(1.5), np.int8(-1), np.True_):
        assert same(scalar, roundtrip(scalar))
    kinds = {np.dtype(name).type for name in DTYPES} | {
        np.longlong, np.ulonglong, np.intc, np.uintc, np.longdouble, np.clongdouble, np.half, np.long, np.ulong,
    }  # fmt: skip
    for kind in kinds - {np.void, np.datetime64}:
        assert type(roundtrip(kind(1))) is kind


def test_text_scalars_keep_trailing_nuls_and_surrogates() -> None:
    for scalar in (np.str_("a\0"), np.str_(""), np.str_("héł\U0001f680"), np.str_("\ud800"), np.bytes_(b"a\0\0")):
        back = roundtrip(scalar)
        assert type(back) is type(scalar)
        assert back == scalar
        assert len(back) == len(scalar)


def test_scalars_as_dict_keys() -> None:
    counts = dict(zip(np.array([3, 5]), [1, 2], strict=True))
    back = roundtrip(counts)
    assert back == counts
    assert [type(key) for key in back] == [np.int64, np.int64]


def test_subclasses_of_scalars_are_refused() -> None:
    class Metres(np.float64):
        pass

    assert "it would come back as numpy.float64; send a scalar of numpy's own types" in pack_error(Metres(1))


# --- hostile bodies --------------------------------------------------------------------------------------------------


@each_row(
    "dtype, shape, data",
    [
        ("uint8", [3], b"ab"),  # a false length
        ("uint8", [2**62], b"ab"),
        ("uint8", [2**40, 2**40], b""),
        ("uint8", [-1], b"ab"),
        ("uint8", [-1, -2], b"ab"),
        ("uint8", [True], b"a"),
        ("uint8", ["2"], b"ab"),
        ("uint8", 2, b"ab"),
        ("uint8", [0] * 100, b""),
        ("uint8", [2], "ab"),
        ("uint8", [2], None),
        ("<U1000000000", [1], b"ab"),
        ("<U500000000", [1], b"ab"),
        ("S99999999999999999999", [1], b"ab"),
        ("O", [1], b"\0" * 8),
        ("object", [1], b"\0" * 8),
        ("T", [1], b"\0" * 16),
        ("i4,f8", [1], b"\0" * 12),
        ("(2,)i4", [1], b"\0" * 8),
        ("a3", [1], b"abc"),
        ("no such thing", [1], b"a"),
        ("uint8 ", [1], b"a"),
        ("__import__('os')", [1], b"a"),
        ("", [0], b""),
        (None, [1], b"a"),
        (1, [1], b"a"),
        ({"names": ["a"], "formats": ["O"]}, [1], b"\0" * 8),
        ({"record": "O"}, [1], b"\0" * 8),
        ({"record": {"record": "u1"}}, [1], b"\0"),
        ([["a", "O"]], [1], b"\0" * 8),
        ([["a", [["b", "O"]]]], [1], b"\0" * 8),
        ([["a", "u1"], ["a", "u1"]], [1], b"\0" * 2),
        ([["a", "u1", [-1]]], [1], b""),
        ([["a", "u1", [2**62]]], [1], b""),
        ([["a", "u1", [2**40, 2**40]]], [0], b""),
        ([["a"]], [1], b""),
        ([["a", "u1", [1], 4]], [1], b"a"),
        ([[["t", "a", "b"], "u1"]], [1], b"a"),
        ([[1, "u1"]], [1], b"a"),
        ([1], [1], b"a"),
        ("datetime64[]", [1], b"\0" * 8),
        ("datetime64[xs]", [1], b"\0" * 8),
        ("datetime64[99999999999999999999s]", [1], b"\0" * 8),
    ],
)
@each_row("padding", [b"", b"x" * 5000])
def test_false_array_bodies_are_wire_errors(dtype: Any, shape: Any, data: Any, padding: bytes) -> None:
    if isinstance(data, bytes):
        data += padding
    for blob in (array_blob(dtype, shape, data), b"\x91" + array_blob(dtype, shape, data)):
        with pytest.raises(WireError, match=r"cannot unpack the ext value of code 1 \(numpy\.ndarray, \d+ bytes\): "):
            wire.unpack(blob)


@each_row(
    "body",
    [["uint8", [2]], ["uint8", [2], "x" * 9000], ["uint8", [2], b"ab", b"x" * 9000], {"x": b"x" * 9000}, "x" * 9000],
)
def test_bodies_of_another_shape_are_wire_errors(body: Any) -> None:
    with pytest.raises(WireError, match=r"code 1 \(numpy\.ndarray"):
        wire.unpack(bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb(body)))))


@each_row(
    "body",
    [
        [],
        ["int64"],
        ["int64", b"\0" * 7],
        ["int64", "\0" * 8],
        ["O", b"\0" * 8],
        ["<U2", b"\0" * 7],
        ["<U1", b"\xff\xff\xff\xff"],
        [[["a", "O"]], b"\0" * 8],
        [{"record": [["a", "O"]]}, b"\0" * 8],
        ["int64", b"\0" * 8, 1],
        "int64",
        {},
    ],
)
def test_false_scalar_bodies_are_wire_errors(body: Any) -> None:
    with pytest.raises(WireError, match=r"code 6 \(numpy scalar"):
        wire.unpack(bytes(msgpack.packb(msgpack.ExtType(6, msgpack.packb(body)))))
