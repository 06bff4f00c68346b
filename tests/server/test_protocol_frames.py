"""What the function protocol says of the frame journal: appends, their repeats and fences, and the stream that reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack
import pytest
import raw_kit
from helpers import each_row
from raw_kit import (
    ACK,
    CANCEL,
    CHUNK,
    CHUNKS,
    NO_MSGPACK,
    PATIENCE,
    RELEASE,
    meanwhile,
    stream_of,
)

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from raw_kit import Api

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:Async generator 'http:ResourceWarning"),  # the client's, left early under trio
]
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue

OURS: dict[str, Any] = {"worker_id": "w", "attempt": 1}


async def append(api: Api, id: str, seq: int, frame: bytes, final: bool = False, **fence: Any) -> dict[str, Any]:
    """An append as the document shows it, with a fence where one is given."""
    return await api.do(CHUNK, {"invocation_id": id, "seq": seq, "bytes": frame, "final": final, **fence})


async def end(api: Api, id: str, state: str = "succeeded", **more: Any) -> None:
    await api.do(ACK, {"invocation_id": id, "state": state, **more})


# --- append ----------------------------------------------------------------------------------------------------------


async def test_an_append_is_answered_with_its_seq_and_is_no_duplicate(api: Api, queue: str) -> None:
    id = await api.running(queue)
    for seq in range(3):
        answer = await append(api, id, seq, b"f")
        assert (answer["ok"], answer["seq"]) == (True, seq)
        assert "duplicate" not in answer


async def test_an_append_that_is_posted_again_is_a_duplicate_and_the_first_bytes_stay(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await append(api, id, 0, b"first")
    for frame in (b"first", b"second"):
        answer = await append(api, id, 0, frame)
        assert (answer["ok"], answer["seq"], answer["duplicate"]) == (True, 0, True)
    await end(api, id)
    assert await api.frames(id) == b"first"


async def test_a_duplicate_is_not_told_to_live_readers_again(api: Api, queue: str) -> None:
    id = await api.running(queue)
    async with api.reading(id) as reader:
        await append(api, id, 0, b"a")
        await reader.take(b"a")
        await append(api, id, 0, b"a")
        await append(api, id, 1, b"b")
        await reader.take(b"b")
        await end(api, id)
        assert await reader.end() == b""


async def test_fields_of_an_append_that_are_not_known_are_ignored_and_final_may_be_left_out(
    api: Api, queue: str
) -> None:
    id = await api.running(queue)
    answer = await api.do(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"f", "later": [1]})
    assert answer["ok"] is True
    await append(api, id, 1, b"g")


async def test_many_frames_go_in_one_request(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    frames = [b"%d;" % n for n in range(500)]
    fields = {"invocation_id": id, "seq": 0, "frames": frames, "final": False, **OURS}
    answer = await api.do(CHUNK, fields)
    assert (answer["written"], answer["duplicates"]) == (500, 0)
    answer = await api.do(CHUNK, {**fields, "seq": 490, "frames": [b"x"] * 20})
    assert (answer["written"], answer["duplicates"]) == (10, 10)
    assert "duplicate" not in answer
    await end(api, id, **OURS)
    assert await api.frames(id) == b"".join(frames) + b"x" * 10


async def test_result_chunks_answer_each_item_in_its_place_and_one_bad_one_fails_alone(api: Api, queue: str) -> None:
    one, two = [await api.running(queue, lease_s=60) for _ in range(2)]
    items: list[dict[str, Any]] = [
        {"invocation_id": one, **OURS, "seq": 0, "frames": [b"a", b"b"], "final": False},
        {"invocation_id": two, **OURS, "attempt": 9, "seq": 0, "frames": [b"stale"]},
        {"invocation_id": new_id(), **OURS, "seq": 0, "frames": [b"lost"]},
        {"invocation_id": two, **OURS, "seq": 0, "bytes": "text"},
        {"invocation_id": two, **OURS, "seq": 0, "bytes": b"c"},
        {"invocation_id": one, **OURS, "seq": 0, "bytes": b"again"},
    ]
    results = (await api.do(CHUNKS, {"items": items}))["results"]
    assert [result.get("error", {}).get("type") for result in results] == [
        None, "ClaimLost", "InvocationNotFound", "WireError", None, None,
    ]  # fmt: skip
    assert [result.get("written") for result in results] == [2, None, None, None, 1, 0]
    assert results[5]["duplicate"] is True
    for id in (one, two):
        await end(api, id, **OURS)
    assert (await api.frames(one), await api.frames(two)) == (b"ab", b"c")


# --- whose frames they are -------------------------------------------------------------------------------------------

FENCES = [
    # what the append says of itself, whether it holds for a claim with a lease, and for one without
    (OURS, True, True),
    ({"worker_id": "other", "attempt": 1}, False, False),
    ({"worker_id": "w", "attempt": 2}, False, False),
    ({"worker_id": "w"}, False, True),
    ({"worker_id": "other"}, False, False),
    ({}, False, True),
]


@each_row("lease", [60, None])
@each_row("fence, leased, unleased", FENCES)
async def test_a_frame_is_taken_from_the_claim_that_holds_and_from_no_other(
    api: Api, queue: str, fence: dict[str, Any], leased: bool, unleased: bool, lease: float | None
) -> None:
    """A stale fence is a 409; without one a frame is taken only while a claim without a lease holds the row."""
    id = await api.running(queue, lease_s=lease)
    answer = await api.ask(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"f", **fence})
    if leased if lease else unleased:
        assert answer.status == 200, answer
    else:
        assert answer.error == (409, "ClaimLost")
    await end(api, id, **OURS)
    assert await api.frames(id) == (b"f" if answer.status == 200 else b"")


@pytest.mark.parametrize("fence", [OURS, {"worker_id": "w"}, {}])
async def test_a_frame_of_a_row_that_nobody_holds_is_refused(api: Api, queue: str, fence: dict[str, Any]) -> None:
    id = await api.submit(queue)
    answer = await api.ask(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"f", **fence})
    assert answer.error == (409, "ClaimLost")


@pytest.mark.parametrize("fence", [OURS, {"worker_id": "w"}, {}])
async def test_a_frame_after_the_end_is_refused_and_one_that_is_there_is_still_a_duplicate(
    api: Api, queue: str, fence: dict[str, Any]
) -> None:
    id = await api.running(queue)
    await append(api, id, 0, b"f", **fence)
    await end(api, id, **OURS)
    answer = await api.ask(CHUNK, {"invocation_id": id, "seq": 1, "bytes": b"late", **fence})
    assert answer.error == (409, "ClaimLost")
    assert (await append(api, id, 0, b"f", **fence))["duplicate"] is True
    assert await api.frames(id) == b"f"


async def test_a_frame_after_the_final_one_is_refused(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    await append(api, id, 0, b"end", final=True, **OURS)
    answer = await api.ask(CHUNK, {"invocation_id": id, "seq": 1, "bytes": b"more", **OURS})
    assert answer.error == (409, "ClaimLost")
    assert (await append(api, id, 0, b"end", final=True, **OURS))["duplicate"] is True
    assert await api.frames(id) == b"end"


async def test_a_frame_at_a_number_that_another_attempt_wrote_is_no_duplicate_but_stale(api: Api, queue: str) -> None:
    """R37: the second attempt's frames are never taken for the first one's, nor the other way round."""
    id = await api.running(queue, lease_s=60)
    await append(api, id, 0, b"one", **OURS)
    await api.do(RELEASE, {"worker_id": "w", "claims": [[id, 1]]})
    body = await api.claim(queue, "w", lease_s=60)
    assert (body["attempt"], body["next_seq"]) == (2, 1)
    second: dict[str, Any] = {"worker_id": "w", "attempt": 2}
    answer = await api.ask(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"two", **second})
    assert answer.error == (409, "ClaimLost")
    await append(api, id, 1, b"two", **second)
    late = await api.ask(CHUNK, {"invocation_id": id, "seq": 1, "bytes": b"late", **OURS})
    assert late.error == (409, "ClaimLost")
    assert (await append(api, id, 0, b"one", **OURS))["duplicate"] is True, "its own is there all the same"
    await end(api, id, **second)
    assert await api.frames(id) == b"onetwo"


async def test_a_frame_of_an_unknown_invocation_is_a_404_of_that_name(api: Api) -> None:
    answer = await api.ask(CHUNK, {"invocation_id": new_id(), "seq": 0, "bytes": b"f"})
    assert answer.error == (404, "InvocationNotFound")


@each_row(
    "change, named",
    [
        ({"invocation_id": None}, "`invocation_id`"), ({"invocation_id": "../x"}, "'../x'"), ({"seq": None}, "`seq`"),
        ({"seq": -1}, "`seq`"), ({"seq": 1.0}, "`seq`"), ({"seq": 2**63}, "`seq`"), ({"bytes": None}, "`bytes`"),
        ({"bytes": "text"}, "`bytes`"), ({"final": 1}, "`final`"), ({"frames": [1]}, "`frames`"),
        ({"worker_id": 5}, "`worker_id`"), ({"attempt": "1"}, "`attempt`"),
    ],
)  # fmt: skip
async def test_an_append_with_a_field_that_is_missing_or_wrong_is_a_400_that_names_it(
    api: Api, queue: str, change: dict[str, Any], named: str
) -> None:
    id = await api.running(queue)
    answer = await api.ask(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"f", **change})
    assert answer.error == (400, "WireError")
    assert named in answer.message
    await end(api, id)
    assert await api.frames(id) == b""


# --- the stream ------------------------------------------------------------------------------------------------------


async def journal(api: Api, queue: str, *frames: bytes) -> str:
    """An invocation that runs and has these frames."""
    id = await api.running(queue)
    for seq, frame in enumerate(frames):
        await append(api, id, seq, frame)
    return id


async def test_a_stream_is_the_frames_verbatim_with_nothing_between_them(api: Api, queue: str) -> None:
    frames = [wire.Frame(wire.FrameKind.VALUE, seq, (seq, "é")).to_bytes() for seq in range(5)]
    frames.append(wire.Frame(wire.FrameKind.END, 5, None, {"state": "succeeded"}).to_bytes())
    id = await journal(api, queue, *frames[:-1])
    await append(api, id, 5, frames[-1], final=True)
    answer = await api.send("GET", stream_of(id))
    assert (answer.status, answer.type) == (200, "application/x-msgpack-stream")
    assert answer.body == b"".join(frames)
    unpacker = msgpack.Unpacker()
    unpacker.feed(answer.body)
    assert [frame[:2] for frame in unpacker] == [[0, 0], [0, 1], [0, 2], [0, 3], [0, 4], [3, 5]]


async def test_frames_that_are_no_msgpack_are_passed_on_all_the_same(api: Api, queue: str) -> None:
    frames = [NO_MSGPACK, b"", b"\xc1", b"\xdd\xff\xff\xff\xff", bytes(range(256)) * 2000, b"\x91" * 5000]
    id = await journal(api, queue, *frames)
    async with api.reading(id) as reader:
        await reader.take(b"".join(frames))
        await append(api, id, len(frames), NO_MSGPACK, final=True)
        assert await reader.end() == NO_MSGPACK


@pytest.mark.parametrize(("since", "rest"), [(-1, b"abcd"), (0, b"bcd"), (2, b"d"), (3, b""), (99, b"")])
async def test_since_is_the_last_seq_that_the_reader_has(api: Api, queue: str, since: int, rest: bytes) -> None:
    id = await journal(api, queue, b"a", b"b", b"c", b"d")
    await end(api, id)
    assert await api.frames(id, since=since) == rest


async def test_without_since_a_stream_begins_at_its_first_frame(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"a", b"b")
    await end(api, id)
    assert await api.frames(id) == b"ab"


@pytest.mark.parametrize("since", ["", "x", "1.5", "0x1", "9" * 30, "١"])
async def test_a_since_that_is_no_whole_number_is_a_400_that_says_so(api: Api, queue: str, since: str) -> None:
    id = await api.submit(queue)
    answer = await api.send("GET", stream_of(id), params={"since": since})
    assert answer.error == (400, "WireError")
    assert "`since`" in answer.message


async def test_a_stream_replays_then_follows_and_ends_on_the_final_frame(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"a", b"b")
    async with api.reading(id) as reader:
        await reader.take(b"ab")
        for seq, frame in enumerate([b"c", b"d", b"e"], 2):
            await append(api, id, seq, frame)
            await reader.take(frame)
        await append(api, id, 5, b"end", final=True)
        assert await reader.end() == b"end"
    assert (await api.row(id))["state"] == "running", "the journal is closed before the invocation ends"


async def test_a_resumed_stream_follows_too(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"a", b"b", b"c")
    async with api.reading(id, since=1) as reader:
        await reader.take(b"c")
        await append(api, id, 3, b"d")
        await reader.take(b"d")


async def test_a_stream_may_begin_before_the_invocation_does(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    async with api.reading(id) as reader:
        await api.claim(queue)
        await append(api, id, 0, b"a")
        await reader.take(b"a")
        await end(api, id)
        assert await reader.end() == b""


@pytest.mark.parametrize("state", ["succeeded", "failed", "killed", "timeout"])
async def test_a_stream_ends_when_the_invocation_reaches_a_terminal_state(api: Api, queue: str, state: str) -> None:
    """Also without a final frame, and also when all of it happened before."""
    id = await journal(api, queue, b"a")
    async with api.reading(id) as reader:
        await reader.take(b"a")
        await end(api, id, state)
        assert await reader.end() == b""
    assert await api.frames(id) == b"a"


async def test_the_stream_of_a_cancelled_invocation_ends_on_an_error_frame(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"a")
    async with api.reading(id) as reader:
        await reader.take(b"a")
        await api.do(CANCEL, {"invocation_id": id})
        kind, seq, body, meta = msgpack.unpackb(await reader.end())
    assert (kind, seq, body) == (4, 1, None)
    assert meta == {"type": "Cancelled", "message": "cancelled while running"}


async def test_the_stream_of_what_was_cancelled_before_it_started_is_an_error_frame(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    async with api.reading(id) as reader:
        await api.do(CANCEL, {"invocation_id": id})
        assert msgpack.unpackb(await reader.end())[3]["type"] == "Cancelled"


async def test_a_final_frame_ends_the_stream_whatever_it_is(api: Api, queue: str) -> None:
    """That it is final is said beside it; inside it may carry any number, as old workers' frames do, or be nothing."""
    error = msgpack.packb([4, -1, None, {"type": "ValueError", "message": "boom"}])
    for frame in (error, NO_MSGPACK, b""):
        id = await journal(api, queue, b"a")
        await append(api, id, 1, frame, final=True)
        assert await api.frames(id) == b"a" + frame


async def test_an_end_frame_that_is_not_said_to_be_final_does_not_end_the_stream(api: Api, queue: str) -> None:
    """Nothing reads inside a frame."""
    frame = wire.Frame(wire.FrameKind.END, 0, None, {"state": "succeeded"}).to_bytes()
    id = await journal(api, queue, frame)
    async with api.reading(id) as reader:
        await reader.take(frame)
        await append(api, id, 1, b"more")
        await reader.take(b"more")
        await end(api, id)
        assert await reader.end() == b""


async def test_a_reader_waits_for_a_frame_that_is_missing_and_gets_them_in_order(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"0")
    await append(api, id, 2, b"2")
    await append(api, id, 3, b"3")
    async with api.reading(id) as reader:
        await reader.take(b"0")
        await append(api, id, 1, b"1")
        await reader.take(b"123")


async def test_at_the_end_what_is_there_is_delivered_although_a_frame_is_missing(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"0")
    await append(api, id, 2, b"2")
    async with api.reading(id) as reader:
        await reader.take(b"0")
        await end(api, id)
        assert await reader.end() == b"2"


async def test_several_readers_get_all_frames_each(api: Api, queue: str) -> None:
    frames = [b"%d;" % n for n in range(50)]
    whole = b"".join(frames)
    id = await api.running(queue)

    async def write() -> None:
        for seq, frame in enumerate(frames):
            await append(api, id, seq, frame)
        await end(api, id)

    async with meanwhile(*(api.frames(id, since=since) for since in (-1, -1, -1, 9))) as readers:
        await write()
        assert [await reader() for reader in readers] == [whole] * 3 + [b"".join(frames[10:])]


async def test_R42_a_reader_that_does_not_read_holds_nobody_up(api: Api, queue: str) -> None:
    """Neither the writer nor another reader; later it gets all of it."""
    frame = bytes(200_000)
    id = await api.running(queue)
    async with api.reading(id) as slow, api.reading(id) as quick:
        with anyio.fail_after(PATIENCE * 2):
            for seq in range(100):
                await append(api, id, seq, frame)
                await quick.take(frame)
            await end(api, id)
            assert await quick.end() == b""
            assert await slow.end() == frame * 100


async def test_a_reader_that_leaves_leaves_the_invocation_alone(api: Api, queue: str) -> None:
    id = await journal(api, queue, b"a")
    for _ in range(3):
        async with api.reading(id) as reader:
            await reader.take(b"a")
    await append(api, id, 1, b"b")
    await end(api, id)
    assert await api.frames(id) == b"ab"


async def test_a_large_journal_streams_whole(api: Api, queue: str) -> None:
    """More frames than a page has, and more bytes."""
    id = await api.running(queue)
    frames = [b"%05d" % n for n in range(4500)]
    await api.do(CHUNK, {"invocation_id": id, "seq": 0, "frames": frames, "final": False})
    big = bytes(6 << 20)
    for seq in range(3):
        await append(api, id, 4500 + seq, big)
    await end(api, id)
    assert await api.frames(id, since=0) == b"".join(frames[1:]) + big * 3


async def test_a_stream_of_an_unknown_invocation_is_a_404_of_that_name(api: Api) -> None:
    answer = await api.send("GET", stream_of(new_id()))
    assert answer.error == (404, "InvocationNotFound")


async def test_a_stream_that_has_nothing_yet_has_begun_all_the_same(api: Api, queue: str) -> None:
    """Its headers come at once, so that a client knows that it is connected."""
    id = await api.submit(queue)
    async with api.reading(id):
        pass


async def test_R36_frames_sent_again_after_lost_answers_are_there_once(api: Api, queue: str) -> None:
    """The client leaves in the middle of appends and sends them again: contiguous, none twice, none missing."""
    id = await api.running(queue, lease_s=60)
    frames = [b"%d;" % n for n in range(30)]
    for seq, frame in enumerate(frames):
        with anyio.move_on_after(0.0005 * (seq % 5)):
            await append(api, id, seq, frame, **OURS)
        try:
            await append(api, id, seq, frame, **OURS)
        except httpx.TransportError:
            await append(api, id, seq, frame, **OURS)
    await end(api, id, **OURS)
    assert await api.frames(id) == b"".join(frames)
