"""Named checks: the journals, how frames come into them, and how they are read."""

from __future__ import annotations

from ..errors import ClaimLost, InvocationNotFound
from ..planes.contract.operations import Append, Appended, Cancel, Claim, Fence, FinalFrame, Finish, Reap, Requeue
from ..planes.contract.records import Failure, Page
from .lab import Lab, fence_of, rule
from .rows import NOWHERE


def numbered(*frames: bytes, first: int = 0) -> list[tuple[int, bytes]]:
    """Frames as a page gives them."""
    return list(enumerate(frames, first))


@rule
async def frames_are_kept_under_their_numbers(lab: Lab) -> None:
    """Frames appended by the claim are in the journal, byte for byte, under the numbers they were given."""
    claimed = await lab.start()
    await lab.journal(claimed.id, [], False)
    lab.same("the answer", await lab.plane.do(Append(fence_of(claimed), 0, (b"a", b"", b"\xff\x00"))), Appended(3, 0))
    lab.same("the answer", await lab.plane.do(Append(fence_of(claimed), 3, (b"d",))), Appended(1, 0))
    page = await lab.journal(claimed.id, numbered(b"a", b"", b"\xff\x00", b"d"), False)
    lab.same("state and error of the page", (page.state, page.error), ("running", None))
    lab.same("a page after frame 1", (await lab.plane.page(claimed.id, 1)).frames, [(2, b"\xff\x00"), (3, b"d")])
    lab.same("a page after the last", (await lab.plane.page(claimed.id, 3)).frames, [])
    lab.same("a page from before the first", len((await lab.plane.page(claimed.id, -7)).frames), 4)


@rule
async def a_frame_that_is_there_is_a_duplicate(lab: Lab) -> None:
    """A frame that is there from the same attempt is a duplicate, whoever holds the row since; its first bytes stay."""
    claimed = await lab.start(lease=lab.short)
    fence = fence_of(claimed)
    await lab.plane.do(Append(fence, 0, (b"a", b"b")))
    lab.same("a repeat", await lab.plane.do(Append(fence, 0, (b"a", b"b"))), Appended(0, 2))
    lab.same("other bytes", await lab.plane.do(Append(fence, 0, (b"x",))), Appended(0, 1))
    lab.same("partly new", await lab.plane.do(Append(fence, 1, (b"x", b"c"))), Appended(1, 1))
    await lab.journal(claimed.id, numbered(b"a", b"b", b"c"), False)
    await lab.pass_time(lab.short)
    await lab.plane.do(Reap())
    lab.same("a repeat after the lease", await lab.plane.do(Append(fence, 2, (b"c",))), Appended(0, 1))
    await lab.stands(claimed.id, state="queued", lost=1)
    await lab.plane.do(Requeue(fence))
    lab.same("a repeat after a release", await lab.plane.do(Append(fence, 2, (b"c",))), Appended(0, 1))
    await lab.refuses(Append(fence, 2, (b"c", b"new")), ClaimLost)
    again = await lab.claim("v")
    lab.same("a repeat after the next claim", await lab.plane.do(Append(fence, 0, (b"a",))), Appended(0, 1))
    await lab.plane.do(Finish(fence_of(again, "v"), "succeeded"))
    lab.same("a repeat after the end", await lab.plane.do(Append(fence, 0, (b"a", b"b"))), Appended(0, 2))
    await lab.journal(claimed.id, numbered(b"a", b"b", b"c"), True)


@rule
async def a_stale_attempt_writes_no_frame(lab: Lab) -> None:
    """Frames are fenced like acks: a former attempt's are refused, and none of them is written."""
    claimed = await lab.lapse()
    again = await lab.claim("v")
    for first_seq, frames in [(0, (b"late",)), (0, (b"late", b"later")), (7, (b"late",))]:
        await lab.refuses(Append(fence_of(claimed), first_seq, frames), ClaimLost)
    lab.same("the new attempt's frame", await lab.plane.do(Append(fence_of(again, "v"), 0, (b"new",))), Appended(1, 0))
    await lab.refuses(Append(fence_of(claimed), 0, (b"late",)), ClaimLost)
    await lab.refuses(Append(Fence(claimed.id, "w", again.attempt), 1, (b"late",)), ClaimLost)
    await lab.journal(claimed.id, numbered(b"new"), False)


@rule
async def the_next_attempt_numbers_on(lab: Lab) -> None:
    """The next claim begins where the journal's highest number ends; a number of another attempt is never taken twice."""
    claimed = await lab.start()
    lab.same("next_seq of the first claim", claimed.next_seq, 0)
    await lab.plane.do(Append(fence_of(claimed), 0, (b"a", b"b")))
    await lab.plane.do(Append(fence_of(claimed), 4, (b"far",)))
    await lab.plane.do(Requeue(fence_of(claimed), "retry"))
    again = await lab.claim("v")
    lab.same("next_seq of the next claim", again.next_seq, 5)
    await lab.refuses(Append(fence_of(again, "v"), 1, (b"x",)), ClaimLost)
    await lab.refuses(Append(fence_of(again, "v"), 3, (b"x", b"y")), ClaimLost)
    lab.same("the answer", await lab.plane.do(Append(fence_of(again, "v"), 5, (b"c",))), Appended(1, 0))
    await lab.plane.do(Finish(fence_of(again, "v"), "succeeded"))
    await lab.journal(claimed.id, [(0, b"a"), (1, b"b"), (4, b"far"), (5, b"c")], True)


@rule
async def a_reader_waits_at_a_gap_until_the_end(lab: Lab) -> None:
    """A page is contiguous from its cursor on while the row runs; once the journal is closed or the row ended, all comes."""
    claimed, ended = await lab.start(), await lab.start()
    for one in (claimed, ended):
        await lab.plane.do(Append(fence_of(one), 0, (b"a",)))
        await lab.plane.do(Append(fence_of(one), 2, (b"c",)))
        await lab.plane.do(Append(fence_of(one), 5, (b"f",)))
        await lab.journal(one.id, numbered(b"a"), False)
        lab.same("a page inside the gap", (await lab.plane.page(one.id, 0)).frames, [])
        lab.same("a page just before frame 2", (await lab.plane.page(one.id, 1)).frames, [(2, b"c")])
    lab.same("the missing frame", await lab.plane.do(Append(fence_of(claimed), 1, (b"b",))), Appended(1, 0))
    await lab.journal(claimed.id, numbered(b"a", b"b", b"c"), False)
    await lab.plane.do(Append(fence_of(claimed), 8, (b"i",), True))
    await lab.journal(claimed.id, [*numbered(b"a", b"b", b"c"), (5, b"f"), (8, b"i")], True)
    await lab.plane.do(Finish(fence_of(ended), "failed", None, Failure("E", "")))
    page = await lab.journal(ended.id, [(0, b"a"), (2, b"c"), (5, b"f")], True)
    lab.same("state and error of the page", (page.state, page.error), ("failed", Failure("E", "")))


@rule
async def a_final_frame_closes_the_journal(lab: Lab) -> None:
    """After a final frame no new one is taken, and the ack's own final frame is dropped; duplicates are answered."""
    claimed = await lab.start()
    fence = fence_of(claimed)
    lab.same("the answer", await lab.plane.do(Append(fence, 0, (b"a", b"end"), True)), Appended(2, 0))
    page = await lab.journal(claimed.id, numbered(b"a", b"end"), True)
    lab.same("the state of the page", page.state, "running")
    lab.same("a repeat", await lab.plane.do(Append(fence, 0, (b"a", b"end"), True)), Appended(0, 2))
    await lab.refuses(Append(fence, 2, (b"more",)), ClaimLost)
    await lab.refuses(Append(fence, 1, (b"end", b"more")), ClaimLost)
    lab.same("the ack", await lab.plane.do(Finish(fence, "succeeded", None, None, FinalFrame(2, b"END"))), True)
    await lab.journal(claimed.id, numbered(b"a", b"end"), True)
    for reason in ("release", "cancel"):
        claimed = await lab.start()
        await lab.plane.do(Append(fence_of(claimed), 0, (b"end",), True))
        await lab.plane.do(Cancel(claimed.id))
        await lab.plane.do(Requeue(fence_of(claimed)))
        page = await lab.journal(claimed.id, numbered(b"end"), True)
        lab.same(f"the state after a {reason}", page.state, "killed")


@rule
async def an_ack_writes_its_final_frame(lab: Lab) -> None:
    """An ack writes its final frame at its number or the next free one; one that is refused or repeated writes none."""
    for frames, seq, at in [((), 0, 0), ((b"a", b"b"), 2, 2), ((b"a", b"b"), 0, 2), ((b"a",), 0, 1), ((b"a",), 6, 6)]:
        claimed = await lab.start()
        fence = fence_of(claimed)
        if frames:
            await lab.plane.do(Append(fence, 0, frames))
        await lab.refuses(Finish(fence._replace(attempt=9), "failed", final=FinalFrame(seq, b"bad")), ClaimLost)
        lab.same("the answer", await lab.plane.do(Finish(fence, "succeeded", final=FinalFrame(seq, b"END"))), True)
        await lab.plane.do(Finish(fence, "succeeded", final=FinalFrame(seq + 1, b"again")))
        await lab.journal(claimed.id, [*numbered(*frames), (at, b"END")], True)
        await lab.refuses(Append(fence, at + 1, (b"late",)), ClaimLost)


@rule
async def appends_are_judged_in_order(lab: Lab) -> None:
    """An append needs frames, from 0 on; then come an unknown id, duplicates, a stale fence, and a closed journal."""
    claimed = await lab.start()
    await lab.refuses(Append(fence_of(claimed), -1, (b"a",)), ValueError)
    await lab.refuses(Append(fence_of(claimed), 0, ()), ValueError)
    await lab.refuses(Append(Fence(NOWHERE, "w", 1), 0, (b"a",)), InvocationNotFound)
    queued = await lab.submit()
    await lab.refuses(Append(Fence(queued, "w", 1), 0, (b"a",)), ClaimLost)
    await lab.refuses(Append(Fence(queued), 0, (b"a",)), ClaimLost)
    await lab.plane.do(Finish(fence_of(claimed), "succeeded"))
    await lab.refuses(Append(fence_of(claimed), 0, (b"a",)), ClaimLost)
    await lab.journal(claimed.id, [], True)
    try:
        await lab.plane.page(NOWHERE)
    except InvocationNotFound:
        return
    raise AssertionError(f"{lab.sentence} a page of an unknown id: expected InvocationNotFound, came a page")


@rule
async def a_journal_survives_every_requeue(lab: Lab) -> None:
    """Frames stay when a row is given back or lost, and a reader reads on over the attempts with the same cursor."""
    claimed = await lab.start(lease=lab.short)
    await lab.plane.do(Append(fence_of(claimed), 0, (b"1",)))
    await lab.lapse(claimed)
    claimed = await lab.claim()
    await lab.plane.do(Append(fence_of(claimed), 1, (b"2",)))
    await lab.plane.do(Requeue(fence_of(claimed)))
    claimed = await lab.claim()
    await lab.plane.do(Append(fence_of(claimed), 2, (b"3",)))
    page = await lab.journal(claimed.id, numbered(b"1", b"2", b"3"), False)
    lab.same("the state of the page", page.state, "running")
    await lab.plane.do(Cancel(claimed.id))
    await lab.plane.do(Requeue(fence_of(claimed)))
    page = await lab.plane.page(claimed.id, 2)
    lab.same("what follows the cursor", ([seq for seq, _ in page.frames], page.closed), ([3], True))


@rule
async def pages_keep_their_limits(lab: Lab) -> None:
    """A page holds at most `limit` frames and `max_bytes` bytes, but always one; only the last page is closed."""
    claimed = await lab.start()
    frames = [bytes([n]) * size for n, size in enumerate((10, 10, 50, 1, 1, 1, 30))]
    await lab.plane.do(Append(fence_of(claimed), 0, tuple(frames)))
    await lab.plane.do(Finish(fence_of(claimed), "succeeded", final=FinalFrame(7, b"END")))
    whole = numbered(*frames, b"END")
    for limit, max_bytes, sizes in [
        (100, 10_000, [8]), (8, 10_000, [8]), (3, 10_000, [3, 3, 2]), (1, 1, [1] * 8), (100, 20, [2, 1, 3, 1, 1]),
        (2, 20, [2, 1, 2, 1, 1, 1]), (100, 106, [8]), (100, 105, [7, 1]),
    ]:  # fmt: skip
        pages = await read_pages(lab, claimed.id, limit, max_bytes)
        what = f"pages of {limit} frames and {max_bytes} bytes"
        lab.same(f"the sizes of {what}", [len(page.frames) for page in pages], sizes)
        lab.same(f"the frames of {what}", [frame for page in pages for frame in page.frames], whole)


async def read_pages(lab: Lab, id: str, limit: int, max_bytes: int) -> list[Page]:
    """All pages of an ended journal, each from where the last one ended."""
    pages: list[Page] = []
    since = -1
    while not pages or not pages[-1].closed:
        pages.append(await lab.plane.page(id, since, limit=limit, max_bytes=max_bytes))
        lab.same("that a page which is not the last has frames", pages[-1].frames != [], True)
        since = pages[-1].frames[-1][0]
    return pages


@rule
async def a_large_body_result_and_frame_come_back(lab: Lab) -> None:
    """An envelope, a result and a frame of some megabytes come back byte for byte."""
    body, result, frame = (bytes([n]) * (2 << 20) + b"end" for n in (1, 2, 3))
    claimed = await lab.start(body=body)
    lab.same("that the envelope came with the claim", claimed.body == body, True)
    await lab.plane.do(Append(fence_of(claimed), 0, (frame, b"small")))
    page = await lab.plane.page(claimed.id)
    lab.same("that the frames came back", page.frames == numbered(frame, b"small"), True)
    lab.same("a page of one byte", [seq for seq, _ in (await lab.plane.page(claimed.id, max_bytes=1)).frames], [0])
    await lab.plane.do(Finish(fence_of(claimed), "succeeded", result))
    (outcome,) = await lab.plane.current_outcomes([claimed.id])
    lab.same("that the result came back", (outcome.state, outcome.result == result), ("succeeded", True))
    lab.same("that the row has the envelope", (await lab.row(claimed.id)).body == body, True)
    await lab.pass_time(lab.short)
    lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [])
    lab.same("what a claim finds", await lab.plane.do(Claim(("q",), "w")), [])
