"""What a generator in a child yields, and how that reaches its readers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, folders
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import InvocationFailed, StreamRestarted, WireError
from dreamlake.lakeshore.wire import Frame, FrameKind
from dreamlake.lakeshore.worker import frame_tail as tail
from dreamlake.lakeshore.worker.frame_tail import FrameTail

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

anyio_test = pytest.mark.anyio


@anyio_test
@pytest.mark.parametrize("fn", [bodies.count, bodies.acount])
async def test_items_come_in_order(queue: dls.Queue, tmp_path: Path, fn: Callable[..., Any]) -> None:
    async with children(queue, tmp_path):
        for n in (3000, 0):
            id = await queue.submit(dls.thunk(fn, n))
            assert [value async for value in queue.stream(id)] == list(range(n))
            assert await queue.result(id) is None
    assert folders(tmp_path) == []


@anyio_test
async def test_the_first_item_comes_while_the_child_runs(queue: dls.Queue, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.one_then_waits, str(gate)))
        stream = queue.stream(id)
        assert await anext(stream) == 1
        assert (await queue.get(id)).state == "running"
        gate.touch()
        assert [value async for value in stream] == [2]


@anyio_test
async def test_keys_make_a_manifest(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        assert await queue.result(await queue.submit(dls.thunk(bodies.keys, "a", "b"))) == ["a", "b"]


@anyio_test
async def test_what_was_yielded_before_the_end_is_there(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        id, got = await queue.submit(dls.thunk(bodies.two_then_dies)), list[int]()
        with pytest.raises(InvocationFailed, match="was killed by SIGKILL"):
            await _into(got, queue.stream(id))
        assert got == [1, 2]


@anyio_test
async def test_another_attempt_announces_itself(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, retries=1):
        id, got = await queue.submit(dls.thunk(bodies.two_then_dies)), list[int]()
        with pytest.raises(StreamRestarted) as restarted:
            await _into(got, queue.stream(id))
        assert (got, restarted.value.attempt) == ([1, 2], 2)
        with pytest.raises(InvocationFailed):
            await _into(got, queue.stream(id, since=restarted.value.seq))
        assert got == [1, 2, 1, 2]


@anyio_test
async def test_large_items(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.large_items, 6, 5 << 20))
        got = [value async for value in queue.stream(id)]
        assert [(len(value), value[:1]) for value in got] == [(5 << 20, bytes([i])) for i in range(6)]


@anyio_test
async def test_a_body_that_writes_nonsense_into_its_frames_is_stopped(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.spoils_its_frames, str(tmp_path / "notes")))
        with pytest.raises(InvocationFailed, match=r"frames\.msgpack holds something that is no frame"):
            await queue.result(id)
        await wait_until(lambda: "cleaned up" in notes(tmp_path / "notes"))


async def _into(got: list[int], stream: Any) -> None:
    async for value in stream:
        got.append(value)  # noqa: PERF401 -- a comprehension would lose it


# --- reading the file ------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "frames.msgpack"


def packed(value: Any, seq: int = 0, kind: int = FrameKind.VALUE) -> bytes:
    return Frame(kind, seq, value).to_bytes()


def read_all(reader: FrameTail) -> list[bytes]:
    while reader.read():
        pass
    found = list(reader.values)
    reader.values.clear()
    return found


def test_any_split_gives_the_same_values(file: Path) -> None:
    values = [1, "text", [1, {"a": (2, 3)}], None, b"x" * 5000]
    whole = b"".join(packed(value, 2**seq) for seq, value in enumerate(values))
    reader, found = FrameTail(file), list[bytes]()
    assert not reader.read()
    with open(file, "ab", buffering=0) as out:
        for at in range(0, len(whole), 7):
            out.write(whole[at : at + 7])
            found += read_all(reader)
    reader.check_end()
    reader.close()
    assert [dls.wire.unpack(value) for value in found] == values


def test_a_frame_larger_than_one_read(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tail, "READ_BYTES", 100)
    file.write_bytes(packed("a" * 10_000) + packed("b"))
    reader = FrameTail(file)
    assert [dls.wire.unpack(value) for value in read_all(reader)] == ["a" * 10_000, "b"]
    reader.close()


def test_final_frames_are_left_to_others(file: Path) -> None:
    file.write_bytes(packed(1) + packed(None, 1, FrameKind.END) + packed(None, 2, FrameKind.ERROR))
    reader = FrameTail(file)
    assert read_all(reader) == [b"\x01"]
    reader.close()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\xc1", "no frame, after byte 0"),
        (b"\x01", "no frame, after byte 0"),
        (b"\x93\x00\x00\xc0\xc0", "an array of 3, where a frame is one of 4"),
        (packed(b"x", 0, FrameKind.CHUNK), "a frame of kind 1, where one of a value should be"),
    ],
)
def test_what_is_no_frame_is_an_error(file: Path, data: bytes, message: str) -> None:
    file.write_bytes(data)
    reader = FrameTail(file)
    with pytest.raises(WireError, match=message):
        reader.read()
    reader.close()


def test_a_cut_frame_is_an_error_at_the_end_only(file: Path) -> None:
    file.write_bytes(packed(1) + packed("abc")[:-2])
    reader = FrameTail(file)
    assert read_all(reader) == [b"\x01"]
    with pytest.raises(WireError, match=r"frames\.msgpack ends inside a frame, 6 bytes after its begin"):
        reader.check_end()
    reader.close()
