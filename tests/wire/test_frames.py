"""Frame, FrameDecoder and FrameReader."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np
import pytest
from helpers import each_row
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_cases import PLAIN, same

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.errors import EncodeError, WireError
from dreamlake.lakeshore.wire import Frame, FrameDecoder, FrameKind, FrameReader

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FRAMES = st.builds(
    Frame,
    st.sampled_from(list(FrameKind)) | st.integers(5, 2**40),
    st.integers(-1, 2**60),
    PLAIN | st.binary(max_size=50) | st.just(b"c" * 5000),
    st.none() | st.dictionaries(st.sampled_from(["type", "message", "t"]), PLAIN, max_size=3),
)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in places), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(edges)]


def same_frames(a: list[Frame], b: list[Frame]) -> bool:
    return len(a) == len(b) and all(same(vars(x), vars(y)) for x, y in zip(a, b, strict=True))


# --- one frame -------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(FRAMES)
def test_any_frame_comes_back(frame: Frame) -> None:
    assert same_frames([frame], [Frame.from_bytes(frame.to_bytes())])


def test_the_end_of_a_stream() -> None:
    assert [kind.name for kind in FrameKind if Frame(kind).terminal] == ["END", "ERROR"]
    assert not Frame(99).terminal
    assert Frame(3).terminal


def test_unknown_kinds_stay_ints() -> None:
    frame = Frame.from_bytes(Frame(9, 1, "x").to_bytes())
    assert type(frame.kind) is int
    assert frame == Frame(9, 1, "x")
    assert type(Frame.from_bytes(Frame(4, -1, meta={"type": "E"}).to_bytes()).kind) is FrameKind


def test_the_path_in_an_error_starts_at_the_body() -> None:
    with pytest.raises(EncodeError, match=r'^cannot pack a value of type set at \$\["x"\]\[1\]: '):
        Frame(FrameKind.VALUE, 0, {"x": [1, {2}]}).to_bytes()
    with pytest.raises(EncodeError, match=r"^cannot pack a value of type set at \$: "):
        Frame(FrameKind.VALUE, 0, {2}).to_bytes()


@each_row(
    "obj, part",
    [
        (7, "got a int"),
        ([0, 0, None], "got an array of 3"),
        ((0, 0, None, None), "got a tuple"),
        ({"kind": 0}, "got a dict"),
        (["0", 0, None, None], "got a str, a int and a NoneType"),
        ([0, None, None, None], "got a int, a NoneType and a NoneType"),
        ([True, 0, None, None], "got a bool, a int"),
        ([0, 1.0, None, None], "got a int, a float"),
        ([0, 0, None, [1]], "got a int, a int and an array of 1"),
    ],
)
def test_what_is_no_frame(obj: Any, part: str) -> None:
    for read in (Frame.from_obj, lambda obj: Frame.from_bytes(wire.pack(obj))):
        with pytest.raises(WireError) as caught:
            read(obj)
        assert str(caught.value).startswith("not a frame: expected an ")
        assert part in str(caught.value)


# --- the decoder -----------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(FRAMES, max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
def test_any_split_of_the_bytes_gives_the_same_frames(frames: list[Frame], places: list[int]) -> None:
    data = b"".join(frame.to_bytes() for frame in frames)
    decoder = FrameDecoder()
    assert same_frames(frames, [frame for chunk in cut(data, places) for frame in decoder.feed(chunk)])
    decoder.close()


def test_one_byte_at_a_time() -> None:
    array = np.arange(500)
    body = {"a": (array, [1])}
    frames = [Frame(FrameKind.VALUE, 0, body), Frame(FrameKind.CHUNK, 1, b"x" * 300), Frame(FrameKind.END, 2)]
    decoder = FrameDecoder()
    seen: list[tuple[int, Frame]] = []
    data = b"".join(frame.to_bytes() for frame in frames)
    for at in range(len(data)):
        seen += [(at, frame) for frame in decoder.feed(data[at : at + 1])]
    assert same_frames(frames, [frame for _, frame in seen])
    ends = np.cumsum([len(frame.to_bytes()) for frame in frames])
    assert [at + 1 for at, _ in seen] == ends.tolist()  # as soon as it is complete


def test_the_buffer_fed_may_be_used_again_at_once() -> None:
    buffer = bytearray(Frame(0, 0, "first").to_bytes())
    decoder = FrameDecoder()
    frames = decoder.feed(buffer)
    buffer[:] = b"\xc1" * len(buffer)
    assert list(frames) == [Frame(0, 0, "first")]


def test_frames_that_were_not_asked_for_come_with_the_next_call() -> None:
    decoder = FrameDecoder()
    data = b"".join(Frame(0, seq).to_bytes() for seq in range(4))
    assert next(decoder.feed(data)).seq == 0
    decoder.feed(b"")
    assert [frame.seq for frame in decoder.feed(Frame(0, 4).to_bytes())] == [1, 2, 3, 4]
    assert list(decoder.feed(b"")) == []


def test_frames_before_a_fault_are_delivered_and_the_fault_stays() -> None:
    decoder = FrameDecoder()
    frames = decoder.feed(Frame(0, 0).to_bytes() + Frame(0, 1).to_bytes() + b"\xc1" + Frame(0, 2).to_bytes())
    assert [next(frames).seq, next(frames).seq] == [0, 1]
    for again in (frames, decoder.feed(Frame(0, 3).to_bytes()), decoder.feed(b"")):
        with pytest.raises(WireError, match="it is not msgpack"):
            next(again)
        frames = decoder.feed(b"")
    with pytest.raises(WireError, match="it is not msgpack"):
        decoder.close()


def test_a_cut_inside_a_frame_is_an_error_at_the_end() -> None:
    frame = Frame(0, 0, "x" * 100).to_bytes()
    for size in range(1, len(frame)):
        decoder = FrameDecoder()
        assert list(decoder.feed(frame + frame[:size])) == [Frame(0, 0, "x" * 100)]
        with pytest.raises(WireError) as caught:
            decoder.close()
        assert str(caught.value) == (
            f"the input ended inside a frame, {size} bytes after its begin: the connection was cut; "
            "read on from the last seq that arrived"
        )
    FrameDecoder().close()


LIMIT = "a frame is larger than this reader's limit of 1000 bytes: give the reader a larger limit, or yield"


@pytest.mark.parametrize(
    "body", ["x" * 1100, b"x" * 5000, list(range(2000)), {str(i): i for i in range(500)}, ("x" * 999,)]
)
def test_R49_a_frame_over_the_limit_is_a_clear_error(body: Any) -> None:
    frame = Frame(0, 0, body).to_bytes()
    assert list(FrameDecoder(len(frame)).feed(frame)) == [Frame(0, 0, body)]
    small = Frame(0, 1, "ok").to_bytes()
    for step in (1, 7, len(frame)):
        decoder = FrameDecoder(1000)
        frames = (f for at in range(0, len(small + frame), step) for f in decoder.feed((small + frame)[at : at + step]))
        assert next(frames) == Frame(0, 1, "ok")
        with pytest.raises(WireError) as caught:
            next(frames)
        assert LIMIT in str(caught.value)


@pytest.mark.parametrize("lie", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x05"])
def test_R50_a_container_that_claims_too_much_is_an_error_at_once(lie: bytes) -> None:
    with pytest.raises(WireError, match="a frame is larger than this reader's limit of 268435456 bytes"):
        list(FrameDecoder().feed(b"\x94\x00\x00" + lie))


@pytest.mark.parametrize("lie", [b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xf0\x05"])
def test_R50_a_false_length_reads_no_more_than_the_limit(lie: bytes) -> None:
    decoder = FrameDecoder(1000)
    assert list(decoder.feed(b"\x94\x00\x00" + lie + bytes(900))) == []
    with pytest.raises(WireError, match="a frame is larger than this reader's limit of 1000 bytes"):
        list(decoder.feed(bytes(100)))
    cut = FrameDecoder()
    assert list(cut.feed(b"\x94\x00\x00" + lie + bytes(900))) == []
    with pytest.raises(WireError, match="the input ended inside a frame"):
        cut.close()


def test_R49_frames_over_100_MiB_pass() -> None:
    body = bytes(101 << 20)
    data = Frame(FrameKind.CHUNK, 0, body).to_bytes()
    decoder = FrameDecoder()
    frames = [frame for at in range(0, len(data), 1 << 22) for frame in decoder.feed(data[at : at + (1 << 22)])]
    assert len(frames) == 1
    assert frames[0].body == body


def test_many_small_frames_in_one_chunk_larger_than_the_limit() -> None:
    data = Frame(0, 0, "x" * 900).to_bytes() * 5000
    assert sum(1 for _ in FrameDecoder(1000).feed(data)) == 5000


def test_a_limit_is_a_number_of_bytes() -> None:
    with pytest.raises(ValueError, match=r"^the limit of a frame is a number of bytes from 1, not 0$"):
        FrameDecoder(0)


# --- the reader ------------------------------------------------------------------------------------------------------


class Source:
    """Chunks of bytes, each after the loop had a turn; None waits until `more` is set."""

    def __init__(self, *chunks: bytes | None) -> None:
        self.chunks = list(chunks)
        self.more = anyio.Event()

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if not self.chunks:
            raise StopAsyncIteration
        if self.chunks[0] is None:
            await self.more.wait()
            self.chunks.pop(0)
        await anyio.lowlevel.checkpoint()
        chunk = self.chunks.pop(0)
        assert chunk is not None
        return chunk


@pytest.mark.anyio
async def test_the_reader_reads_any_split() -> None:
    frames = [Frame(0, seq, (seq, "x" * seq)) for seq in range(50)] + [Frame(3, 50)]
    data = b"".join(frame.to_bytes() for frame in frames)
    for step in (1, 3, 100, 10_000):
        chunks = [data[at : at + step] for at in range(0, len(data), step)]
        assert [frame async for frame in FrameReader(Source(*chunks, b""))] == frames


@pytest.mark.anyio
async def test_the_reader_reads_an_async_generator() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        yield Frame(0, 0).to_bytes() + Frame(0, 1).to_bytes()[:2]
        await anyio.lowlevel.checkpoint()
        yield Frame(0, 1).to_bytes()[2:]

    assert [frame.seq async for frame in FrameReader(chunks())] == [0, 1]


@pytest.mark.anyio
async def test_the_reader_distinguishes_a_cut_from_an_end() -> None:
    assert [frame async for frame in FrameReader(Source())] == []
    reader = FrameReader(Source(Frame(0, 0).to_bytes(), Frame(0, 1).to_bytes()[:3]))
    assert await anext(reader) == Frame(0, 0)
    with pytest.raises(WireError, match="the input ended inside a frame, 3 bytes after its begin"):
        await anext(reader)


@pytest.mark.anyio
async def test_the_reader_has_the_limit_it_was_given() -> None:
    reader = FrameReader(Source(Frame(0, 0).to_bytes() + Frame(0, 1, "x" * 2000).to_bytes()), limit=1000)
    assert await anext(reader) == Frame(0, 0)
    with pytest.raises(WireError, match="this reader's limit of 1000 bytes"):
        await anext(reader)


@pytest.mark.anyio
async def test_a_cancelled_read_loses_nothing() -> None:
    data = Frame(0, 0).to_bytes() + Frame(0, 1).to_bytes()
    source = Source(data[:-2], None, data[-2:])
    reader = FrameReader(source)
    assert (await anext(reader)).seq == 0
    for _ in range(3):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await anext(reader)
        assert scope.cancelled_caught
    source.more.set()
    assert (await anext(reader)).seq == 1
    with pytest.raises(StopAsyncIteration):
        await anext(reader)


@pytest.mark.anyio
async def test_leaving_a_reader_early_leaves_nothing_behind() -> None:
    reader = FrameReader(Source(*[Frame(0, seq).to_bytes() for seq in range(9)]))
    async for frame in reader:
        if frame.seq == 3:
            break
    assert [frame.seq async for frame in reader] == [4, 5, 6, 7, 8]
