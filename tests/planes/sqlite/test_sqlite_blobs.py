"""Large bodies and results: written in pieces, whole, and gone with their rows."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from sqlite_kit import MB, fence_of, query, query_write

from dreamlake.lakeshore import Dispatch, DispatchError
from dreamlake.lakeshore.planes.contract.operations import Finish, Submit
from dreamlake.lakeshore.planes.sqlite.blobs import PIECE_BYTES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("size", [0, 4096, 4097, MB, MB + 1, 5 * MB + 3])
async def test_bodies_and_results_of_any_size_come_back_whole(path: Path, size: int) -> None:
    body = os.urandom(size)
    async with Dispatch(path) as plane:
        await plane.submit("q", body, id="a")
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.body == body
        assert await plane.finish(fence_of(claimed, "w"), "succeeded", result=body[::-1]) is True
        assert await plane.finish(fence_of(claimed, "w"), "succeeded", result=body[::-1]) is False
        (outcome,) = await plane.current_outcomes(["a"])
        assert outcome.result == body[::-1]
        await plane.submit("q", body, id="a")  # a repeat writes nothing
        assert await plane.purge(-1.0) == 1
    assert query(path, "SELECT count(*) FROM piece") == query(path, "SELECT count(*) FROM blob") == [(0,)]


async def test_refused_large_operations_leave_no_pieces(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x" * (2 * MB), id="a", key="k")
        assert await plane.submit("q", b"y" * (2 * MB), id="b", key="k") == "a"
        (claimed,) = await plane.claim(["q"], "w")
        await plane.release(fence_of(claimed, "w"))
        answers = await plane.many([Finish(fence_of(claimed, "w"), "succeeded", b"z" * (2 * MB))])
        assert "is lost" in str(answers[0])
    assert query(path, "SELECT count(*) FROM blob") == [(1,)]
    assert query(path, "SELECT count(*) FROM piece") == [(2 * MB // PIECE_BYTES,)]


async def test_a_batch_may_hold_the_same_large_operation_twice(path: Path) -> None:
    """The blob that was written ahead for it belongs to the first; the second is a repeat."""
    body = os.urandom(2 * MB)
    async with Dispatch(path) as plane:
        submit = Submit("a", "q", body)
        assert await plane.many([submit, submit]) == ["a", "a"]
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.body == body
        finish = Finish(fence_of(claimed, "w"), "succeeded", body[::-1])
        assert await plane.many([finish, finish]) == [True, False]
        (outcome,) = await plane.current_outcomes(["a"])
        assert outcome.result == body[::-1]
    assert (
        query(path, "SELECT count(*) FROM blob WHERE linked = 1") == query(path, "SELECT count(*) FROM blob") == [(2,)]
    )


async def test_a_large_operation_beside_one_that_the_driver_refuses_keeps_its_body(path: Path) -> None:
    body = os.urandom(2 * MB)
    async with Dispatch(path) as plane:
        good, bad = Submit("good", "q", body), Submit("bad", "q", body, priority=2**70)
        answers = await plane.many([bad, good, good])
        assert isinstance(answers[0], DispatchError)
        assert answers[1:] == ["good", "good"]
        (claimed,) = await plane.claim(["q"], "w")
        assert claimed.body == body


async def test_small_operations_run_between_the_pieces_of_a_large_one(path: Path) -> None:
    """While 64 MB are written a small submit is answered many times over, not once at the end."""
    async with Dispatch(path) as plane:
        await plane.submit("small", b"x")
        done = anyio.Event()
        small = 0
        async with anyio.create_task_group() as group:

            async def large() -> None:
                await plane.submit("large", b"x" * (64 * MB))
                done.set()

            group.start_soon(large)
            while not done.is_set():
                await plane.submit("small", b"x")
                small += 1
        assert small >= 16


async def test_a_purge_deletes_pieces_that_no_row_refers_to(path: Path) -> None:
    now = [1_000_000.0]
    async with Dispatch(path, clock=lambda: now[0]) as plane:
        await plane.submit("q", b"x")
        query_write(path, "INSERT INTO blob (linked, made_at) VALUES (0, 1000.0)")
        query_write(path, "INSERT INTO piece SELECT ref, 0, x'00' FROM blob")
        await plane.purge(3600.0)
    assert query(path, "SELECT count(*) FROM piece") == [(0,)]
