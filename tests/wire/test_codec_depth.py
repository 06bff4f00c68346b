"""How deep values may nest, and that the stack holds."""

from __future__ import annotations

import threading
from typing import Any

import msgpack
import pytest
from helpers import each_row, run_python
from wire_cases import as_tuple, nested, pack_error, roundtrip, same

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError
from dreamlake.lakeshore.wire.codec import MAX_EXT_DEPTH


def test_sixteen_ext_values_nest_and_no_more() -> None:
    deepest = nested(MAX_EXT_DEPTH, 1, as_tuple)
    assert same(deepest, roundtrip(deepest))
    assert "it lies inside 16 other tuples or ext values; nest fewer of them" in pack_error((deepest,))
    blob = wire.pack(deepest)
    with pytest.raises(WireError, match="more than 16 tuples or ext values lie inside one another"):
        wire.unpack(b"\xc7" + bytes((len(blob) + 1, 5)) + b"\x91" + blob)


def test_unknown_ext_codes_have_no_depth() -> None:
    value = nested(MAX_EXT_DEPTH, msgpack.ExtType(77, b"x"), as_tuple)
    assert same(value, roundtrip(value))


@each_row("wrap", [lambda inner: [inner], lambda inner: {1: inner}, lambda inner: {(1,): [inner]}])
@each_row("leaf", [0, "x", [], {}, (), (1, [2])])
@each_row("around", [0, 1, 5])
def test_plain_containers_of_every_depth_come_back_or_are_refused(wrap: Any, leaf: Any, around: int) -> None:
    for levels in (*range(505, 518), *range(1018, 1030), 5000):
        value = nested(around, nested(levels, leaf, wrap), as_tuple)
        try:
            blob = wire.pack(value)
        except EncodeError:
            assert levels > 250
            continue
        assert wire.pack(wire.unpack(blob)) == blob


PRODUCT = """
    import threading
    from dreamlake.lakeshore import wire

    def work():
        value = 0
        for _ in range(16):
            for _ in range(511):
                value = [value]
            value = (value,)
        blob = wire.pack(value)
        assert wire.pack(wire.unpack(blob)) == blob
        print(len(blob))

    threading.stack_size(8 << 20)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
"""


def test_sixteen_times_511_levels_do_not_overrun_the_stack() -> None:
    out, _ = run_python(PRODUCT)
    assert int(out) > 16 * 511
    # The most that is let through, in a little more than half of such a stack.
    deeper = PRODUCT.replace("range(16)", "[1021] * 3 + [511] * 13").replace("range(511)", "range(levels)")
    deeper = deeper.replace("for _ in [1021]", "for levels in reversed([1021]").replace("* 13:", "* 13):")
    out, _ = run_python(deeper.replace("8 << 20", "5 << 20"))
    assert int(out) > 3 * 1021 + 13 * 511


def test_depth_is_counted_per_thread() -> None:
    deepest = nested(MAX_EXT_DEPTH, 1, as_tuple)
    bad: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(200):
                assert same(deepest, roundtrip(deepest))
        except BaseException as error:
            bad.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not bad
