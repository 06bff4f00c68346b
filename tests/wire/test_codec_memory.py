"""How often data is copied, and that false headers allocate nothing. Peaks by tracemalloc, which numpy feeds."""

from __future__ import annotations

import gc
import struct
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
import pytest
from helpers import needs, run_python

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable

SIZE = 32 << 20


def peak(work: Callable[[], Any]) -> float:
    """The most memory that `work` held at a time beyond what was there before, as a multiple of SIZE."""
    work()  # what is loaded or cached once does not count
    gc.collect()
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1] / SIZE
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def array() -> np.ndarray[Any, Any]:
    return np.ones(SIZE, dtype=np.uint8)


def nested(array: Any) -> list[Any]:
    return [array, [array], {"x": {"y": array}}, (array,), ((1, [array]), "z"), (((((array,),),),),)]


@pytest.mark.parametrize("place", range(6))
def test_packing_an_array_is_one_copy_at_any_depth(array: np.ndarray[Any, Any], place: int) -> None:
    value = nested(array)[place]
    assert peak(lambda: wire.pack(value)) < 1.05


def test_packing_several_arrays_is_one_copy_of_each(array: np.ndarray[Any, Any]) -> None:
    value = {"a": array[: SIZE // 2], "b": ([array[SIZE // 2 :]], 1)}
    assert peak(lambda: wire.pack(value)) < 1.05


def test_packing_a_frame_or_an_envelope_is_one_copy(array: np.ndarray[Any, Any]) -> None:
    data = array.tobytes()
    assert peak(lambda: wire.Frame(0, 0, {"a": array}).to_bytes()) < 1.05
    assert peak(lambda: wire.Frame(1, 0, data).to_bytes()) < 1.05
    assert peak(lambda: wire.Envelope("1", {}, args=data).to_bytes()) < 1.05


def test_unpacking_a_top_level_array_is_one_copy(array: np.ndarray[Any, Any]) -> None:
    blob = wire.pack(array)
    assert peak(lambda: wire.unpack(blob)) < 1.05
    assert peak(lambda: wire.unpack(memoryview(blob))) < 1.05


@pytest.mark.parametrize(("place", "copies"), [(1, 2), (2, 2), (3, 3), (4, 3), (5, 7)])
def test_unpacking_elsewhere_is_two_copies_and_one_more_for_each_tuple(
    array: np.ndarray[Any, Any], place: int, copies: int
) -> None:
    blob = wire.pack(nested(array)[place])
    assert peak(lambda: wire.unpack(blob)) < copies + 0.05


def test_tensors_are_copied_no_more_often() -> None:
    torch = needs("torch")
    tensor = torch.ones(SIZE, dtype=torch.uint8)
    assert peak(lambda: wire.pack([(tensor,)])) < 1.05
    blob = wire.pack(tensor)
    assert peak(lambda: wire.unpack(blob)) < 0.05  # torch's own memory is not counted: nothing beside it


def test_a_thread_keeps_no_large_buffer(array: np.ndarray[Any, Any]) -> None:
    data = array.tobytes()
    tracemalloc.start()
    try:
        wire.pack({"x": data})
        with pytest.raises(TypeError):
            wire.pack([data, object()])
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] < SIZE / 10
    finally:
        tracemalloc.stop()


# --- false headers ---------------------------------------------------------------------------------------------------


def claims(header: bytes, count: int, padding: int) -> bytes:
    return header * count + bytes(padding)


LIES = [
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01",
    claims(b"\xdd" + struct.pack(">I", 1 << 20), 1000, 1 << 20),
    claims(b"\xdf" + struct.pack(">I", 1 << 19) + b"\x01", 1000, 1 << 20),
    claims(b"\xdc\xff\xff", 1000, 1 << 16),
    b"\x91" + bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb(["float64", [2**40], b"x" * 8])))),
    bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb(["<U500000000", [1], b"x" * 8])))),
    bytes(msgpack.packb(msgpack.ExtType(1, msgpack.packb([[["a", "V2000000000"]], [1], b"x" * 8])))),
    bytes(
        msgpack.packb(
            msgpack.ExtType(3, msgpack.packb(["RAW", msgpack.packb(["F", [1 << 15] * 2, None, None, {}, b""])]))
        )
    ),
]


@pytest.mark.parametrize("number", range(len(LIES)))
def test_R50_a_false_length_costs_neither_memory_nor_time(number: int) -> None:
    lie = LIES[number]
    for data in (lie, b"\x92\x01" + lie, b"\xc9" + struct.pack(">I", len(lie)) + b"\x05" + lie):

        def read(data: bytes = data) -> None:
            with pytest.raises(WireError):
                wire.unpack(data)

        begin = time.process_time()
        assert peak(read) * SIZE < 10 * len(data) + (1 << 20)
        assert time.process_time() - begin < 10


def test_R50_an_image_that_unfolds_to_gigabytes_stays_small() -> None:
    out, _ = run_python(
        """
        import resource, struct, warnings, zlib
        import msgpack
        from dreamlake.lakeshore import wire
        from dreamlake.lakeshore.errors import WireError

        def chunk(kind, data):
            return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

        head = struct.pack(">IIBBBBB", 40000, 40000, 8, 6, 0, 0, 0)
        file = b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(10 << 20)))
        blob = msgpack.packb(msgpack.ExtType(3, msgpack.packb(["PNG", file])))
        warnings.simplefilter("ignore")
        import PIL.Image
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            wire.unpack(blob)
        except WireError as error:
            assert "bomb" in str(error), error
        else:
            raise AssertionError
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
        """
    )
    assert int(out) < 50_000  # kilobytes
