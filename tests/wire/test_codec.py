"""pack and unpack of plain values: what comes back, what is refused and how, what gets imported."""

from __future__ import annotations

import collections
import dataclasses
import enum
from typing import Any

import matrix
import msgpack
import pytest
from helpers import each_row, run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_cases import KEYS, PLAIN, as_tuple, nested, pack_error, roundtrip, same

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError
from dreamlake.lakeshore.wire import codec
from dreamlake.lakeshore.wire.encode_errors import encode_error

# --- plain values ----------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=matrix.examples(300))
@given(PLAIN)
def test_plain_values_come_back_exactly(value: Any) -> None:
    assert same(value, roundtrip(value))


@settings(deadline=None)
@given(PLAIN)
def test_every_buffer_reads_the_same(value: Any) -> None:
    blob = wire.pack(value)
    for data in (bytearray(blob), memoryview(blob), memoryview(b"x" + blob)[1:], memoryview(blob + b"x")[:-1]):
        assert same(value, wire.unpack(data))


@settings(deadline=None)
@given(PLAIN.filter(lambda value: not isinstance(value, tuple)))
def test_what_holds_no_tuple_is_plain_msgpack(value: Any) -> None:
    def never(found: object) -> object:
        raise LookupError(found)

    try:
        plain = msgpack.packb(value, default=never, strict_types=True)
    except LookupError:
        return
    assert wire.pack(value) == plain


def test_R47_keys_of_every_kind_pack_and_unpack() -> None:
    for key in ("a", b"a", 1, -1, 1.5, True, None, (1, 2), (), ((None, b"x"), (1.5,))):
        value = {key: "x", "other": {key: 1}}
        assert same(value, roundtrip(value))


@settings(deadline=None)
@given(st.dictionaries(KEYS, st.integers(0, 9), max_size=8))
def test_R47_any_mixture_of_keys(value: dict[Any, int]) -> None:
    assert same(value, roundtrip(value))


def test_R48_tuples_and_lists_stay_what_they_are() -> None:
    value = [(1, [2, (3,)]), (), ([],), {"rows": [(1, 2)]}]
    assert same(value, roundtrip(value))


def test_bytearray_and_memoryview_come_back_as_bytes() -> None:
    value = [bytearray(b"ab"), memoryview(b"cd"), memoryview(b"abcdef")[2:4]]
    assert roundtrip(value) == [b"ab", b"cd", b"cd"]


def test_large_bodies_are_spliced_in_where_they_belong() -> None:
    big = tuple("ab" for _ in range(3000))
    value = [1, big, 2, (big, (big,), "end"), {"x": big, "y": [big]}, 3]
    blob = wire.pack(value)
    assert same(value, wire.unpack(blob))
    assert msgpack.unpackb(blob, strict_map_key=False)[1] == msgpack.ExtType(5, wire.pack(list(big)))


def test_timestamp_and_ext_types_pass_through() -> None:
    for value in (msgpack.Timestamp(1, 2), msgpack.ExtType(99, b"xyz"), msgpack.ExtType(0, b"")):
        assert same(value, roundtrip(value))
        assert same([(value,)], roundtrip([(value,)]))


def test_an_ext_code_that_msgpack_reserves_passes_through_too() -> None:
    blob = b"\xd4\xfe\x01"  # code -2: its meaning is still to be defined
    assert wire.unpack(blob) == (-2, b"\x01")
    assert wire.pack([wire.unpack(blob)]) == b"\x91" + blob


# --- errors --------------------------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Point:
    x: int


class Text(str):
    __slots__ = ()


Pair = collections.namedtuple("Pair", "a b")


def test_an_error_is_a_whole_sentence() -> None:
    assert pack_error([{"x": Text("a")}]) == (
        f'cannot pack a value of type {__name__}.Text at $[0]["x"]: it is a subclass of str and would come back as '
        "str; send str(value), or register a codec for it with wire.register(wire.Codec(...))"
    )


@each_row(
    "value, part",
    [
        (Pair(1, 2), f"{__name__}.Pair at $: it is a subclass of tuple"),
        (collections.OrderedDict(a=1), "collections.OrderedDict at $: it is a subclass of dict"),
        (Level.LOW, "an enum member would come back as something else; send value.value or value.name"),
        (Colour.RED, f"{__name__}.Colour at $: an enum member"),
        (Point(1), f"{__name__}.Point at $: msgpack has no form for it; send dataclasses.asdict(value)"),
        (iter([]), "list_iterator at $: it is an iterator, which can be read only once; send list(value)"),
        (range(3), "a value of type range at $: msgpack has no form for it; make it one of str, bytes"),
        (len, "functions do not travel as data"),
        (1j, "a value of type complex at $: msgpack has no form for it; turn its ready-made codec on, on both sides"),
        (2**64, "a value of type int at $: it is outside -2^63 to 2^64-1; turn its ready-made codec on"),
        (memoryview(bytearray(6))[::2], "a value of type memoryview at $: its memory is not contiguous"),
        ("\ud800", "a value of type str at $: it holds a lone surrogate, which UTF-8 has no form for; send bytes"),
    ],
)
def test_R59_what_would_change_is_refused_with_the_fix(value: Any, part: str) -> None:
    assert part in pack_error(value)


@each_row(
    "value, path",
    [
        ({"a": {"b": (1, [object()])}}, 'at $["a"]["b"][1][0]: '),
        ([1, {2: 2**70}], "at $[1][2]: "),
        ([{(1, "x"): object()}], "at $[0][(1, 'x')]: "),
        ([{b"k": object()}], "at $[0][b'k']: "),
        ({"k" * 100: object()}, f'at $["{"k" * 56}...]: '),
        (nested(20, object()), "at $[0][0][0][0][0][0]...[0][0][0][0][0][0]: "),
        ({"a": "\udfff"}, 'at $["a"]: '),
        ({"a": {"\udfff": 1}}, 'a value of type str as a dict key at $["a"]: '),
        ([{frozenset(): 1}], "a value of type frozenset as a dict key at $[0]: "),
        ([{Text("a"): 1}], f"a value of type {__name__}.Text as a dict key at $[0]: "),
        ([{(1, frozenset()): 1}], "a value of type frozenset at $[0][1]: "),
    ],
)
def test_the_path_leads_to_the_bad_leaf(value: Any, path: str) -> None:
    assert path in pack_error(value)


def test_the_path_is_found_in_shared_and_large_values() -> None:
    shared = [1, 2, 3]
    value = [[shared] * 1000, {"x": shared, "bad": {"deep": [shared, Colour.RED]}}]
    assert '$[1]["bad"]["deep"][1]: ' in pack_error(value)


def test_values_that_contain_themselves() -> None:
    ring: list[Any] = [1]
    ring.append({"again": ring})
    assert pack_error(ring) == (
        'cannot pack a value of type list at $[1]["again"]: the value contains itself; send a tree without cycles'
    )
    knot: dict[str, Any] = {}
    knot["k"] = (knot,)
    assert "it lies inside 16 other tuples or ext values" in pack_error(knot)


def test_packing_works_after_every_failure() -> None:
    big = tuple(range(5000))
    for bad in (object(), [big, object()], (1, (2, object())), nested(3000), "\ud800", nested(40, 0, as_tuple)):
        pack_error(bad)
        assert same([1, big, (2, (big,))], roundtrip([1, big, (2, (big,))]))


def test_unpack_takes_bytes_only() -> None:
    for data in ("abc", 1, None, [1]):
        with pytest.raises(TypeError, match=r"^wire\.unpack takes bytes, bytearray or memoryview, not "):
            wire.unpack(data)  # type: ignore[arg-type]


@each_row(
    "blob, part",
    [
        (b"", "but it is empty; make the bytes with wire.pack"),
        (b"\x92\x01", "but it ends in the middle of a value after 2 bytes"),
        (b"\x01\x01", "but 1 of its 2 bytes lie behind the end of the value"),
        (b"\xa1\xff", "but it holds text that is not UTF-8"),
        (b"\xc1", "but it is not msgpack"),
        (b"\x91" * 2000 + b"\x01", "but its containers are nested too deep"),
        (b"\x81\x90\x01", "unhashable type: 'list'"),
        (b"\xc7\x05\x05\x91", "but it ends in the middle of a value after 4 bytes"),
        (b"\xd4\x05\x90\x01", "but 1 of its 4 bytes lie behind the end of the value"),
        (b"\xd4\x05\x01", "the ext value of code 5 (tuple, 1 bytes): ValueError: the body of a tuple is an array"),
        (b"\xd5\x05\x91\xc1", "the ext value of code 5 (tuple, 2 bytes)"),
    ],
)
def test_bytes_that_are_no_packed_value(blob: bytes, part: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.unpack(blob)
    assert isinstance(caught.value, ValueError)
    assert part in str(caught.value)


def test_a_value_of_more_than_4_GiB_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a limit of 9000 bytes in place of 4 GiB."""
    monkeypatch.setattr(codec, "MAX_BODY_BYTES", 9000)
    big = tuple(range(200, 5200))
    assert pack_error([{"x": big}]) == (
        'cannot pack a value of type tuple at $[0]["x"]: its 14947 bytes are more than the 4 GiB of one value; '
        "send it in parts"
    )
    with pytest.raises(EncodeError, match="its 9001 bytes are more than the 4 GiB of one value; send it in parts"):
        wire.Frame(wire.FrameKind.CHUNK, 0, bytes(9001)).to_bytes()
    error = encode_error(["x"], ValueError("unicode string is too large"))
    assert str(error) == (
        "cannot pack a value of type list: unicode string is too large; send it in parts of less than 4 GiB"
    )


# --- imports ---------------------------------------------------------------------------------------------------------


def test_wire_loads_msgpack_and_packing_loads_nothing_more() -> None:
    run_python(
        """
        import sys
        from dreamlake.lakeshore import wire

        assert "msgpack" in sys.modules
        value = {"x": [(1, {"y": (2,)})], (1, 2): (None, b"", 1.5, True)}
        assert wire.unpack(wire.pack(value)) == value
        frame = wire.Frame(wire.FrameKind.VALUE, 0, value)
        assert wire.Frame.from_bytes(frame.to_bytes()) == frame
        try:
            wire.pack([{1, 2}])
        except TypeError as error:
            assert "wire.STDLIB" in str(error)
        else:
            raise AssertionError
        heavy = {"numpy", "torch", "PIL", "httpx", "cloudpickle", "aiosqlite", "anyio"} & set(sys.modules)
        assert not heavy, heavy
        """
    )


def test_the_error_for_bytes_that_need_a_missing_module_names_it() -> None:
    run_python(
        """
        import sys
        sys.modules["numpy"] = None  # as if it were not installed
        from dreamlake.lakeshore import wire
        from dreamlake.lakeshore.errors import WireError

        assert wire.pack((1, 2)) == bytes.fromhex("c70305920102")
        try:
            wire.unpack(bytes.fromhex("c70d0193a575696e74389102c4020000"))
        except WireError as error:
            assert "code 1 (numpy.ndarray" in str(error) and "not installed here" in str(error), error
        else:
            raise AssertionError
        """
    )


def test_R110_nothing_in_the_wire_can_unpickle() -> None:
    """No module of the wire names anything that unpickles or evaluates."""
    import ast
    from pathlib import Path

    forbidden = {"pickle", "cloudpickle", "marshal", "eval", "exec", "load_module", "literal_eval", "allow_pickle"}
    files = sorted(Path(wire.__file__ or "").parent.glob("*.py"))
    assert len(files) >= 8
    for file in files:
        names = {
            getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None) or alias
            for node in ast.walk(ast.parse(file.read_text()))
            for alias in ([part.name for part in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else [""])
        }
        assert not names & forbidden, file.name
