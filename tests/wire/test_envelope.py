"""The Envelope."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from helpers import each_row
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_cases import PLAIN, same

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError

REF = {"kind": "ref", "module": "m", "qualname": "f", "src_hash": None}


def raw(**changes: Any) -> bytes:
    fields: dict[str, Any] = {"v": 1, "id": "01X", "fn": REF, "args": b"\x90", "kwargs": b"\x80"} | changes
    return wire.pack({name: value for name, value in fields.items() if value != "absent"})


def read_error(data: bytes) -> str:
    with pytest.raises(WireError) as caught:
        wire.Envelope.from_bytes(data)
    return str(caught.value)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
ENVELOPES = st.builds(
    wire.Envelope,
    id=TEXT,
    fn=st.dictionaries(TEXT, PLAIN, max_size=3),
    args=st.binary(max_size=20) | st.just(b"x" * 5000),
    kwargs=st.binary(max_size=20) | st.just(b"y" * 100_000),
    prefix=TEXT,
    key=st.none() | TEXT,
    cfg=st.none() | st.dictionaries(TEXT, PLAIN, max_size=3),
    parent=st.none() | TEXT,
    extra=st.dictionaries(TEXT.map(lambda name: "x-" + name), PLAIN, max_size=3),
)


@settings(deadline=None)
@given(ENVELOPES)
def test_any_envelope_comes_back(envelope: wire.Envelope) -> None:
    back = wire.Envelope.from_bytes(envelope.to_bytes())
    assert same(vars(envelope), vars(back))
    assert back.to_bytes() == envelope.to_bytes()


def test_the_fields_stand_in_their_order() -> None:
    blob = wire.Envelope("1", REF, cfg={"code": {}}, extra={"z": 1, "a": 2}).to_bytes()
    assert list(wire.unpack(blob)) == [*"v id fn args kwargs prefix key cfg parent".split(), "z", "a"]


def test_large_arguments_are_part_of_the_same_bytes() -> None:
    args = wire.pack([np.zeros(10_000)])
    envelope = wire.Envelope("1", REF, args=args, kwargs=wire.pack({"x": "y" * 9000}))
    assert wire.unpack(envelope.to_bytes())["args"] == args
    back, kwargs = wire.Envelope.from_bytes(envelope.to_bytes()).arguments()
    assert back[0].shape == (10_000,)
    assert kwargs == {"x": "y" * 9000}


def test_absent_and_nil_fields_take_their_defaults() -> None:
    minimal = wire.Envelope("01X", REF)
    assert wire.Envelope.from_bytes(raw(args="absent", kwargs="absent")) == minimal
    assert wire.Envelope.from_bytes(raw(args=None, kwargs=None, prefix=None, key=None, parent=None)) == minimal
    assert wire.Envelope.from_bytes(raw(cfg=None)).cfg is None  # the value of the sender is passed on unchanged


def test_unknown_fields_of_a_newer_sender_survive() -> None:
    cfg = {"code": {"url": "s3://a", "sha": b"x"}, "future": [(1, 2)]}
    envelope = wire.Envelope.from_bytes(raw(cfg=cfg, trace={"id": (1, 2)}))
    assert envelope.extra == {"trace": {"id": (1, 2)}}
    assert envelope.cfg == cfg
    again = wire.unpack(envelope.to_bytes())
    assert again["trace"] == {"id": (1, 2)}
    assert again["cfg"] == cfg


def test_extra_cannot_shadow_a_field() -> None:
    with pytest.raises(ValueError, match=r"^Envelope\.extra holds 'id', which is a field of its own: set the field$"):
        wire.Envelope("1", REF, extra={"id": "2"}).to_bytes()


def test_the_error_names_the_field_that_cannot_be_packed() -> None:
    with pytest.raises(EncodeError, match=r'a value of type object at \$\["cfg"\]\["x"\]\[0\]: '):
        wire.Envelope("1", REF, cfg={"x": [object()]}).to_bytes()


@each_row(
    "data, part",
    [
        (raw(v="absent"), "its version 'v' should be an integer from 1, but is None; submit with Envelope.to_bytes()"),
        (raw(v=True), "but is True"),
        (raw(v=1.0), "but is 1.0"),
        (raw(v=-3), "but is -3"),
        (raw(v="x" * 1000), f"but is '{'x' * 39}; submit"),
        (raw(id="absent"), "the field 'id' is missing"),
        (raw(fn="absent"), "the field 'fn' is missing"),
        (raw(id=7), "the field 'id' should be str, but is a int"),
        (raw(id=None), "the field 'id' should be str, but is nil"),
        (raw(fn="f"), "the field 'fn' should be dict, but is a str"),
        (raw(args=[1]), "the field 'args' should be bytes, but is a list"),
        (raw(kwargs="x"), "the field 'kwargs' should be bytes, but is a str"),
        (raw(prefix=b"x"), "the field 'prefix' should be str, but is a bytes"),
        (raw(key=1), "the field 'key' should be str, but is a int"),
        (raw(cfg=[]), "the field 'cfg' should be dict, but is a list"),
        (raw(parent=b""), "the field 'parent' should be str, but is a bytes"),
        (wire.pack([1, 2]), "expected a map, got a list"),
        (wire.pack(None), "expected a map, got nil"),
    ],
)
def test_the_error_for_a_wrong_envelope_names_the_fault(data: bytes, part: str) -> None:
    message = read_error(data)
    assert message.startswith("not an Envelope: ")
    assert part in message


def test_bytes_that_are_not_even_packed() -> None:
    assert "expected exactly one packed value, but it is empty" in read_error(b"")
    assert "bytes lie behind the end" in read_error(raw() + b"\0")
    assert "this side reads versions up to 1: upgrade dreamlake-lakeshore here" in read_error(raw(v=2**40))


def test_arguments_are_read_only_when_asked_for() -> None:
    envelope = wire.Envelope.from_bytes(raw(args=b"\xc1", kwargs=b"\xc1"))
    with pytest.raises(WireError, match="it is not msgpack"):
        envelope.arguments()
    assert wire.Envelope("1", REF).arguments() == ([], {})
    assert wire.Envelope("1", REF, wire.pack([1, (2,)]), wire.pack({"a": None})).arguments() == ([1, (2,)], {"a": None})


@pytest.mark.parametrize(
    ("args", "kwargs", "part"),
    [
        ((1,), {}, "args of invocation '1' should be a packed list, but are a tuple"),
        (None, {}, "args of invocation '1' should be a packed list, but are nil"),
        ([], [], "kwargs of invocation '1' should be a packed map with str keys, but are a list"),
        ([], {1: 2}, "kwargs of invocation '1' should be a packed map with str keys, but are a map with other keys"),
    ],
)
def test_arguments_of_another_shape_are_refused(args: Any, kwargs: Any, part: str) -> None:
    with pytest.raises(WireError) as caught:
        wire.Envelope("1", REF, wire.pack(args), wire.pack(kwargs)).arguments()
    assert str(caught.value) == part
