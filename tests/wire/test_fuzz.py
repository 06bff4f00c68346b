"""Any bytes either decode or raise WireError: R50 and R110 for every reader of the wire."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import matrix
import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image
from wire_cases import PLAIN, values

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Callable


def read_frames(data: bytes) -> None:
    decoder = wire.FrameDecoder()
    for at in range(0, len(data), 5):
        list(decoder.feed(data[at : at + 5]))
    decoder.close()


def read_arguments(data: bytes) -> None:
    wire.Envelope("1", {}, data, data).arguments()


READERS: list[Callable[[bytes], Any]] = [
    wire.unpack, wire.Envelope.from_bytes, wire.Frame.from_bytes, read_frames, read_arguments,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _everything_registered() -> None:
    wire.register(*wire.STDLIB)


def check(data: bytes) -> None:
    """Nothing but a WireError leaves a reader, and what decodes as data packs again."""
    for read in READERS:
        try:
            read(data)
        except WireError:
            continue


FUZZ = settings(deadline=None, max_examples=matrix.examples(300), suppress_health_check=[HealthCheck.too_slow])


@FUZZ
@given(st.binary(max_size=200))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc9\xff\xff\xff\xff\x01")
@example(b"\x91" * 5000)
@example(b"\x81" * 5000)
@example(b"\xd6\xff\xff\xff\xff\xff")
@example(b"\xc7\x03\xff\x00\x00\x00")
@example(b"\xc7\x0c\xff" + b"\xff" * 12)
def test_R50_any_bytes(data: bytes) -> None:
    check(data)


# Bodies that look almost right: the names, shapes and files that the decoders expect, in the wrong places.
WORDS = st.sampled_from(
    ["int64", "<U5", "|V0", "O", "record", "float32", "bfloat16", "PNG", "RAW", "L", "P", "RGB", "PurePosixPath", "UTC"]
)
LEAVES = st.one_of(WORDS, st.integers(-2, 70), st.integers(-(2**63), 2**64 - 1), st.binary(max_size=40), PLAIN)
BODIES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=2), max_leaves=10
)


@FUZZ
@given(st.sampled_from([1, 2, 3, 5, 6, *range(16, 27)]), st.lists(BODIES, max_size=10) | BODIES)
def test_R110_any_body_of_any_ext_value(code: int, body: Any) -> None:
    try:
        packed = wire.pack(body)
    except TypeError:
        return
    check(msgpack.packb([msgpack.ExtType(code, packed)]))


@FUZZ
@given(values(), st.data())
def test_any_damage(value: Any, data: st.DataObject) -> None:
    blob = bytearray(wire.pack(value))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(blob) - 1))
        blob[place] = data.draw(st.integers(0, 255))
    check(bytes(blob))


@FUZZ
@given(values(), st.data())
def test_any_cut_is_an_error(value: Any, data: st.DataObject) -> None:
    blob = wire.pack(value)
    with pytest.raises(WireError):
        wire.unpack(blob[: data.draw(st.integers(0, len(blob) - 1))])
    with pytest.raises(WireError):
        wire.unpack(blob + data.draw(st.binary(min_size=1, max_size=3)))


def test_long_runs_of_damage() -> None:
    """The same with more rounds than hypothesis makes, over one value of everything."""
    image = Image.frombytes("RGB", (4, 3), bytes(range(36)))
    value = [
        {"a": np.arange(5.0), (1, 2): np.float32(1)},
        np.zeros(2, [("a", "i4"), (("t", "b"), "U2", (2,))]),
        (image, image.convert("HSV"), image.convert("F"), image.quantize(4)),
        {2**70, 1j, frozenset({1})},
    ]
    blob = wire.pack(value)
    rng = random.Random(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow complains about damaged files aloud
        for _ in range(1500):
            damaged = bytearray(blob)
            for _ in range(rng.randint(1, 5)):
                damaged[rng.randrange(len(damaged))] = rng.choice((rng.randrange(256), 0, 255, 0xDD, 0xC1))
            check(bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))]))
