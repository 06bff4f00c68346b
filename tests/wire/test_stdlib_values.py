"""The optional codecs of wire.STDLIB."""

from __future__ import annotations

import pathlib
import struct
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import msgpack
import numpy as np
import pytest
from helpers import each_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from wire_cases import roundtrip

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError

VALUES = [
    datetime(2024, 2, 29, 12, 30, 1, 999999),
    datetime(1, 1, 1, tzinfo=UTC),
    datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(hours=-3, minutes=-30), "NST")),
    datetime(2024, 1, 1, tzinfo=timezone(timedelta(seconds=1, microseconds=5))),
    date(9999, 12, 31),
    time(23, 59, 59, 1, fold=1),
    time(1, tzinfo=UTC),
    timedelta(days=-1, microseconds=1),
    timedelta.max,
    UUID(int=0),
    uuid4(),
    Decimal("1.50"),
    Decimal("-0E-999999"),
    Decimal("NaN123"),
    Decimal("-sNaN"),
    Decimal("Infinity"),
    {1, "a", (1, 2), b"x", None},
    set(),
    frozenset({frozenset(), frozenset({1})}),
    {np.int64(3), date(2024, 1, 1), UUID(int=1)},
    1j,
    complex(-0.0, float("inf")),
    2**64,
    -(2**63) - 1,
    10**1000,
    pathlib.PurePosixPath("a/b"),
    pathlib.PureWindowsPath("C:\\a\\b"),
    pathlib.Path("/x/é"),
    pathlib.PurePosixPath("not-utf8-\udcff"),
]
NAMES = [f"{type(value).__name__}-{number}" for number, value in enumerate(VALUES)]  # the same in every process


@pytest.fixture
def stdlib() -> None:
    wire.register(*wire.STDLIB)


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Decimal):
        return a.as_tuple() == b.as_tuple()
    if isinstance(a, complex):
        return struct.pack("dd", a.real, a.imag) == struct.pack("dd", b.real, b.imag)
    if isinstance(a, datetime | time):
        return a == b and a.fold == b.fold and same_zone(a.tzinfo, b.tzinfo)
    if isinstance(a, set | frozenset):
        return bool(a == b) and {(type(x), x) for x in a} == {(type(x), x) for x in b}
    return bool(a == b)


def same_zone(a: tzinfo | None, b: tzinfo | None) -> bool:
    return type(a) is type(b) and a == b and (a is None or a.tzname(None) == b.tzname(None))  # type: ignore[union-attr]


@pytest.mark.usefixtures("stdlib")
@each_row("value", VALUES, ids=NAMES)
def test_R59_registered_each_comes_back(value: Any) -> None:
    assert same(value, roundtrip(value))
    assert same(value, roundtrip([({"k": value},)])[0][0]["k"])


@each_row("value", VALUES, ids=NAMES)
def test_R59_unregistered_each_is_refused_and_the_set_is_named(value: Any) -> None:
    with pytest.raises(EncodeError) as caught:
        wire.pack([value])
    assert "at $[0]: " in str(caught.value)
    assert (
        "turn its ready-made codec on, on both sides, with wire.register(*wire.STDLIB), or send it in another form"
    ) in str(caught.value)


KEYS = st.one_of(st.integers(), st.dates(), st.uuids(), st.text(max_size=5), st.decimals(allow_nan=False))
ANY = st.recursive(
    st.one_of(
        st.integers(),
        st.datetimes(timezones=st.timezones() | st.just(UTC) | st.none()),
        st.dates(),
        st.times(),
        st.timedeltas(),
        st.uuids(),
        st.decimals(),
        st.complex_numbers(),
        st.sets(KEYS),
        st.frozensets(KEYS),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3).map(tuple), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=5,
)


def same_deep(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same_deep, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_deep(a[key], b[key]) for key in a)
    return same(a, b)


@pytest.mark.usefixtures("stdlib")
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(ANY)
def test_any_of_them_comes_back(value: Any) -> None:
    assert same_deep(value, roundtrip(value))


@pytest.mark.usefixtures("stdlib")
def test_equal_sets_pack_to_equal_bytes() -> None:
    forth, back = (set[str]() for _ in range(2))
    for number in range(200):
        forth.add(f"word {number}")
        back.add(f"word {199 - number}")
    assert wire.pack(forth) == wire.pack(back)


@pytest.mark.usefixtures("stdlib")
def test_the_error_for_other_values_gives_the_reason() -> None:
    class Odd(tzinfo):
        def utcoffset(self, moment: datetime | None) -> timedelta:
            return timedelta(hours=1)

    with pytest.raises(EncodeError) as caught:
        wire.pack({"when": datetime(2024, 1, 1, tzinfo=Odd())})
    assert str(caught.value) == (
        'cannot pack a value of type datetime.datetime at $["when"]: its time zone is a '
        f"{__name__}.test_the_error_for_other_values_gives_the_reason.<locals>.Odd, which has no portable form; "
        "use zoneinfo.ZoneInfo(...) or datetime.timezone, for example value.astimezone(datetime.timezone.utc)"
    )

    class Stamp(datetime):
        pass

    with pytest.raises(EncodeError, match=r"Stamp at \$: msgpack has no form for it"):
        wire.pack(Stamp(2024, 1, 1))
    with pytest.raises(
        EncodeError, match="its member of type object would not come back as the same member; send list"
    ):
        wire.pack({object()})


def test_a_set_of_what_decodes_unhashable_is_refused() -> None:
    wire.register(
        *wire.STDLIB,
        wire.Codec(60, "odd", lambda value: type(value) is range, lambda value: b"", lambda body: []),
    )
    with pytest.raises(EncodeError, match="its member of type tuple would not come back as the same member"):
        wire.pack({(1, range(3))})


@pytest.mark.usefixtures("stdlib")
def test_a_path_of_another_system_comes_as_a_pure_one() -> None:
    other = "WindowsPath" if isinstance(pathlib.Path(), pathlib.PosixPath) else "PosixPath"
    path = wire.unpack(bytes(msgpack.packb(msgpack.ExtType(26, msgpack.packb([other, b"a/b"])))))
    assert type(path).__name__ == "Pure" + other
    assert path.parts == ("a", "b")


@pytest.mark.usefixtures("stdlib")
def test_registering_the_set_again_changes_nothing() -> None:
    wire.register(*wire.STDLIB)
    assert roundtrip(2**70) == 2**70
    assert sorted(codec.code for codec in wire.STDLIB) == list(range(16, 27))


@pytest.mark.usefixtures("stdlib")
@each_row(
    "code, body",
    [
        (16, [2024, 13, 1, 0, 0, 0, 0, 0, None]),
        (16, [2024, 1, 1]),
        (16, [2024, 1, 1, 0, 0, 0, 0, 0, "No/Zone"]),
        (16, [2024, 1, 1, 0, 0, 0, 0, 0, "../../etc/passwd"]),
        (16, [2024, 1, 1, 0, 0, 0, 0, 0, [10**18, None]]),
        (16, "x"),
        (17, [1, 2, 3, 4]),
        (18, [25, 0, 0, 0, 0, None]),
        (19, [10**10, 0, 0]),
        (22, [[1]]),
        (22, {"a": 1}),
        (23, 5),
        (26, ["PurePosixPath"]),
        (26, ["Popen", b"x"]),
        (26, ["PurePosixPath", b"\xff"]),
    ],
)
def test_false_bodies_are_wire_errors(code: int, body: Any) -> None:
    with pytest.raises(WireError, match=f"cannot unpack the ext value of code {code} "):
        wire.unpack(bytes(msgpack.packb(msgpack.ExtType(code, msgpack.packb(body)))))


@pytest.mark.usefixtures("stdlib")
@pytest.mark.parametrize(("code", "body"), [(20, b"short"), (21, b"1x"), (21, b"\xff"), (24, b"short")])
def test_false_raw_bodies_are_wire_errors(code: int, body: bytes) -> None:
    with pytest.raises(WireError, match=f"cannot unpack the ext value of code {code} "):
        wire.unpack(bytes(msgpack.packb(msgpack.ExtType(code, body))))
