"""register: codecs of users, their codes, their faults."""

from __future__ import annotations

import dataclasses
import gc
import threading
from typing import Any

import pytest
from wire_cases import nested, pack_error, roundtrip, same

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError
from dreamlake.lakeshore.wire import registry


@dataclasses.dataclass
class Point:
    x: int


def point_codec(code: int = 40, name: str = "point") -> wire.Codec:
    return wire.Codec(
        code,
        name,
        lambda value: type(value) is Point,
        lambda value: wire.pack((value.x,)),
        lambda body: Point(*wire.unpack(body)),
    )


def test_a_registered_codec_takes_its_values_anywhere() -> None:
    wire.register(point_codec())
    for value in (Point(1), [Point(1)], (Point(1), {"p": Point(2**40)}), Point([Point(3), (4,)])):  # type: ignore[arg-type]
        assert roundtrip(value) == value
    assert wire.pack(Point(7)) == b"\xd6(\xd5\x05\x91\x07"


def test_codecs_are_asked_in_the_order_of_registration() -> None:
    always = wire.Codec(41, "second", lambda value: isinstance(value, Point), lambda value: b"2", lambda body: "second")
    wire.register(point_codec(), always)
    assert roundtrip(Point(1)) == Point(1)
    assert roundtrip(type("Sub", (Point,), {})(1)) == "second"


@pytest.mark.parametrize(
    ("code", "part"),
    [
        (5, "the codec 'mine' asks for ext code 5, which 'tuple' holds: choose one from 32 to 127"),
        (1, "which 'numpy.ndarray' holds"),
        (2, "which 'torch.Tensor' holds"),
        (3, "which 'PIL.Image' holds"),
        (6, "which 'numpy scalar' holds"),
        (0, "the codec 'mine' asks for ext code 0, which is reserved for this package: choose one from 32 to 127"),
        (4, "reserved for this package"),
        (15, "reserved for this package"),
        (16, "the codec 'mine' asks for ext code 16, which is reserved for wire.STDLIB: choose one from 32 to 127"),
        (31, "reserved for wire.STDLIB"),
        (40, "which 'point' holds"),
        (128, "the codec 'mine' asks for ext code 128, which is no ext code: choose one from 32 to 127"),
        (-1, "which is no ext code"),
        (True, "which is no ext code"),
    ],
)
def test_taken_and_reserved_codes_are_refused(code: int, part: str) -> None:
    wire.register(point_codec())
    with pytest.raises(ValueError) as caught:
        wire.register(point_codec(code, "mine"))
    assert part in str(caught.value)


def test_registering_is_all_or_nothing_and_the_same_twice_is_nothing() -> None:
    point = point_codec()
    with pytest.raises(ValueError):
        wire.register(point, point_codec(5, "mine"))
    with pytest.raises(ValueError, match="'point' holds"):
        wire.register(point, point_codec(40, "mine"))
    pack_error(Point(1))
    wire.register(point, point)
    wire.register(point)
    wire.register()
    assert roundtrip(Point(1)) == Point(1)
    with pytest.raises(TypeError, match=r"^wire\.register takes wire\.Codec objects, not str$"):
        wire.register("codec")  # type: ignore[arg-type]


def test_a_codec_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        point_codec().code = 41  # type: ignore[misc]


def failing(error: Exception) -> Any:
    def fail(_: Any) -> Any:
        raise error

    return fail


def is_point(value: Any) -> bool:
    return type(value) is Point


def test_a_codec_that_raises_becomes_our_error_with_the_cause() -> None:
    wire.register(wire.Codec(40, "weak", is_point, failing(KeyError("x")), failing(OSError("disk"))))
    with pytest.raises(EncodeError) as caught:
        wire.pack([Point(1)])
    assert str(caught.value) == (
        f"cannot pack a value of type {__name__}.Point at $[0]: the codec 'weak' failed on it (KeyError: 'x'); "
        "mend the codec 'weak' (ext code 40) or register another"
    )
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(WireError) as read:
        wire.unpack(b"\x91\xd4\x28\x01")
    assert "cannot unpack the ext value of code 40 (weak, 1 bytes): OSError: disk" in str(read.value)
    assert isinstance(read.value.__cause__, OSError)


def test_a_codec_that_does_not_give_bytes() -> None:
    wire.register(wire.Codec(40, "weak", is_point, lambda value: "text", lambda body: body))  # type: ignore[arg-type,return-value]
    assert "the codec 'weak' made str of it, not bytes" in pack_error(Point(1))


def test_a_match_that_raises() -> None:
    wire.register(wire.Codec(40, "weak", failing(ZeroDivisionError("oops")), bytes, bytes))
    assert "the codec 'weak' failed on it (ZeroDivisionError: oops)" in pack_error({"k": [Point(1)]})


def test_a_memory_error_in_a_codec_is_raised_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    wire.register(wire.Codec(40, "big", is_point, failing(MemoryError()), failing(MemoryError())))
    with pytest.raises(MemoryError):
        wire.pack([Point(1)])
    with pytest.raises(MemoryError):
        wire.unpack(b"\x91\xd4\x28\x01")

    def exhausted(value: Any, module: Any) -> Any:
        raise MemoryError

    ours = registry.BuiltIn(1, "big", "sys", lambda value, module: is_point(value), exhausted, len)
    monkeypatch.setattr(registry, "_built_in", (ours,))
    with pytest.raises(MemoryError):
        wire.pack([Point(1)])


def test_what_a_codec_packs_counts_in_depth() -> None:
    wire.register(point_codec())
    assert roundtrip(nested(7, Point(1), Point)) == nested(7, Point(1), Point)  # a point and its tuple: two each
    assert "it lies inside 16 other tuples or ext values" in pack_error(nested(20, 1, Point))


def test_keys_that_would_not_come_back_are_refused() -> None:
    @dataclasses.dataclass(frozen=True)
    class Key:
        x: int

    # The originals are hashable, what is decoded is not: such a dict could be packed and never be read.
    wire.register(wire.Codec(40, "key", lambda value: type(value) is Key, lambda value: b"", lambda body: []))
    assert roundtrip([Key(1)]) == [[]]
    assert pack_error([{"a": 1, Key(1): 2}]) == (
        f"cannot pack a value of type {__name__}.test_keys_that_would_not_come_back_are_refused.<locals>.Key "
        "as a dict key at $[0]: it would not come back as the same key; use keys of str, int or tuples of these"
    )
    assert "as a dict key at $[0][1]" in pack_error([(0, {(1, Key(1)): 2})])


def test_keys_of_a_sound_codec_come_back() -> None:
    wire.register(
        wire.Codec(
            40,
            "range",
            lambda value: type(value) is range,
            lambda v: wire.pack(v.stop),
            lambda b: range(wire.unpack(b)),
        )
    )
    assert roundtrip({range(3): 1, (range(4), 2): 2}) == {range(3): 1, (range(4), 2): 2}


def test_a_finaliser_that_packs_in_the_middle_of_packing() -> None:
    class Nosy:
        def __init__(self) -> None:
            self.ring = self  # only the collector frees it

        def __del__(self) -> None:
            seen.append(wire.unpack(wire.pack(big)))

    seen: list[Any] = []
    big = [tuple("ab" for _ in range(3000)), (1, 2)]

    def collect(value: object) -> bool:
        Nosy()
        gc.collect()
        return type(value) is Point

    wire.register(wire.Codec(40, "point", collect, lambda value: wire.pack(value.x), lambda b: Point(wire.unpack(b))))
    value = [big, Point(big), (Point(1), big)]  # type: ignore[arg-type]
    assert roundtrip(value) == value
    assert len(seen) == 2
    assert all(same(big, item) for item in seen)


def test_threads_pack_side_by_side() -> None:
    value = {"rows": [(i, [i, (i, "x" * 200)]) for i in range(300)], "big": tuple("ab" for _ in range(5000))}
    blob = wire.pack(value)
    wrong: list[str] = []

    def work() -> None:
        for _ in range(20):
            same_bytes, same_value = wire.pack(value) == blob, wire.unpack(blob) == value
            wrong.extend(["different"] * (not same_bytes or not same_value))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
