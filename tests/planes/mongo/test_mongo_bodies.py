"""Bodies that no document can hold come back as any other, and go with their invocation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from helpers import wait_until
from mongo_kit import Stored, fence

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Append, FinalFrame, Finish, Submit
from dreamlake.lakeshore.planes.contract.records import Failure, RowFilter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mongo_kit import Place

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]

MB = 1 << 20
SIZES = (8 * MB - 10, 8 * MB + 1, 17 * MB, 20 * MB)
"""Around the bound for documents of 8 MB, and beyond the 16 MB that a document may have at all."""


def blob(size: int) -> bytes:
    """Bytes that do not repeat."""
    return os.urandom(1000) * (size // 1000) + os.urandom(size % 1000)


@pytest.fixture
def stored(place: Place) -> Iterator[Stored]:
    with Stored(place.mongo) as seen:
        yield seen


@pytest.mark.parametrize("size", SIZES)
async def test_an_envelope_a_result_and_a_frame(place: Place, size: int) -> None:
    body, result, frame, last = (blob(size) for _ in range(4))
    async with place.plane() as plane, place.plane() as other:
        id = await plane.submit("q", body, key="key")
        assert await plane.submit("q", blob(size), key="key") == id
        (claimed,) = await other.claim(["q"], "w")
        assert claimed.body == body
        await other.append(fence(claimed), 0, [b"small", frame, b"after"])
        page = await plane.next_page(id, -1, max_bytes=64 * MB)
        assert page.frames == [(0, b"small"), (1, frame), (2, b"after")]
        assert await other.append(fence(claimed), 1, [frame]) == (0, 1)
        assert await other.finish(fence(claimed), "succeeded", result=result, final=FinalFrame(3, last))
        outcome = await plane.outcome(id)
        assert (outcome.state, outcome.result == result) == ("succeeded", True)
        page = await plane.next_page(id, 2, max_bytes=64 * MB)
        assert (page.frames == [(3, last)], page.closed) == (True, True)
        assert await other.finish(fence(claimed), "succeeded", result=result) is False
        (row,) = await plane.rows(RowFilter(id=id, body=True))
        assert row.body == body


async def test_several_at_once(place: Place) -> None:
    """One batch of small and of large ones, of which each goes its own way."""
    sizes = (10, 9 * MB, 10, 12 * MB, 10, 9 * MB)
    bodies = [blob(size) for size in sizes]
    async with place.plane() as plane:
        ids = await plane.many([Submit(f"id-{n}", "q", body) for n, body in enumerate(bodies)])
        assert ids == [f"id-{n}" for n in range(len(sizes))]
        claims = await plane.claim(["q"], "w", limit=10)
        assert [(one.id, one.body == body) for one, body in zip(claims, bodies, strict=True)] == [
            (f"id-{n}", True) for n in range(len(sizes))
        ]
        frames = [Append(fence(one), 0, (one.body, b"end")) for one in claims]
        assert [tuple(one) for one in await plane.many(frames)] == [(2, 0)] * len(sizes)
        assert set(await plane.many([Finish(fence(one), "succeeded", one.body) for one in claims])) == {True}
        outcomes = await plane.current_outcomes(ids)
        assert [outcome.result == body for outcome, body in zip(outcomes, bodies, strict=True)] == [True] * len(sizes)
        for id, body in zip(ids, bodies, strict=True):
            page = await plane.page(id, max_bytes=64 * MB)
            assert page.frames == [(0, body), (1, b"end")]


async def test_pages_keep_their_bounds_with_large_frames(place: Place) -> None:
    async with place.plane() as plane:
        await plane.submit("q", b"body")
        (claimed,) = await plane.claim(["q"], "w")
        frames = [blob(size) for size in (5 * MB, 5 * MB, 10 * MB, 5 * MB)]
        for n, frame in enumerate(frames):
            await plane.append(fence(claimed), n, [frame])
        since, sizes = -1, []
        while since < 3:
            page = await plane.page(claimed.id, since)
            sizes.append(len(page.frames))
            assert [frame for _, frame in page.frames] == frames[since + 1 : since + 1 + len(page.frames)]
            since = page.frames[-1][0]
        assert sizes == [2, 2]


async def test_errors_and_configs_that_are_too_large_for_a_document(place: Place) -> None:
    """A traceback may be long, and routing fields are a stranger's to choose."""
    trace, config = "x" * (17 * MB), blob(17 * MB)
    async with place.plane() as plane:
        id = await plane.do(Submit("large", "q", b"body", config=config))
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.config == config
        await plane.finish(fence(claimed), "failed", error=Failure("E", "long", trace))
        (outcome,) = await plane.current_outcomes([id])
        assert outcome.error == Failure("E", "long", trace)


async def test_a_purge_leaves_nothing(place: Place, stored: Stored) -> None:
    large = blob(9 * MB)
    async with place.plane() as plane:
        before = stored.counts()
        for _ in range(2):
            id = await plane.submit("q", large, key="key")
            (claimed,) = await plane.claim(["q"], "w")
            await plane.append(fence(claimed), 0, [large, b"small"])
            await plane.finish(fence(claimed), "succeeded", result=large, final=FinalFrame(2, large))
            assert stored.chunks() > 0
            assert await wait_until(lambda: plane.purge(0.0)) == 1
            assert stored.chunks() == 0
            with pytest.raises(dls.InvocationNotFound):
                await plane.page(id)
        after = stored.counts()
    # What remains is about queues and the database itself.
    assert sum(after.values()) - sum(before.values()) <= 2, (before, after)


async def test_what_is_refused_leaves_no_file(place: Place, stored: Stored) -> None:
    """Stale acks, stale and repeated frames, and submits whose key is taken: their bodies are not kept."""
    large = blob(9 * MB)
    async with place.plane() as plane:
        await plane.submit("q", b"body", key="key")
        await plane.submit("q", large, key="key")
        (claimed,) = await plane.claim(["q"], "w")
        stale = fence(claimed)._replace(attempt=7)
        with pytest.raises(dls.ClaimLost):
            await plane.append(stale, 0, [large])
        with pytest.raises(dls.ClaimLost):
            await plane.finish(stale, "succeeded", result=large, final=FinalFrame(0, large))
        await plane.append(fence(claimed), 0, [b"small"])
        assert await plane.append(fence(claimed), 0, [large]) == (0, 1)
        assert stored.chunks() == 0
        await plane.finish(fence(claimed), "succeeded", result=b"r")
        assert await plane.finish(fence(claimed), "succeeded", result=large) is False
        assert stored.chunks() == 0


KEYS = ("a\0b", "$where", "dotted.name", "x" * 5000, "schlüssel 🗝", "", " ", "ns_1_queue_1_key_1")


@pytest.mark.parametrize("number", range(len(KEYS)))
async def test_any_text_is_a_key_and_a_queue(place: Place, number: int) -> None:
    key, queue = KEYS[number], KEYS[number] or "q"
    async with place.plane() as plane:
        id = await plane.submit(queue, b"body", key=key)
        assert await plane.submit(queue, b"other", key=key) == id
        (claimed,) = await plane.claim([queue], "w" + key)
        assert (claimed.id, claimed.queue) == (id, queue)
        (row,) = await plane.rows(RowFilter(queue=queue, key=key))
        assert (row.id, row.key, row.worker) == (id, key, "w" + key)
        assert await plane.counts(queue) == {(queue, "running"): 1}


async def test_a_key_that_no_document_can_hold_is_refused_by_its_name(place: Place) -> None:
    """Half of a character: the sentence says which key, and neighbours in the batch are left alone."""
    async with place.plane() as plane:
        answers = await plane.many([Submit("a", "q", b""), Submit("b", "q", b"", "half \ud800"), Submit("c", "q", b"")])
        assert [answers[0], answers[2]] == ["a", "c"]
        assert isinstance(answers[1], dls.DispatchError | ValueError), answers[1]
        assert "half \\ud800" in str(answers[1])
        assert sorted(row.id for row in await plane.rows(RowFilter(queue="q"))) == ["a", "c"]
