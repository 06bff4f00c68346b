"""Batches, namespaces and arguments, and many users of one file: tasks, threads and processes."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from textwrap import dedent
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import pytest
from helpers import run_python, wait_until
from sqlite_kit import fence_of

from dreamlake.lakeshore import Dispatch
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.planes.contract.records import RowFilter

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_namespaces_do_not_see_each_other(path: Path) -> None:
    async with Dispatch(path, ns="a") as a, Dispatch(path, ns="b") as b:
        await a.submit("q", b"of a", id="same", key="k")
        await b.submit("q", b"of b", id="same", key="k")
        (claimed,) = await b.claim(["q"], "w")
        assert claimed.body == b"of b"
        assert await a.counts() == {("q", "queued"): 1}
        assert await b.counts() == {("q", "running"): 1}
        assert (await a.current_outcomes(["same"]))[0].state == "pending"


async def test_bad_arguments_are_refused_before_the_batch(path: Path) -> None:
    async with Dispatch(path) as plane:
        id = await plane.submit("q", b"x")
        for bad in (b"x", None, float("nan"), "\ud800", "../x", ""):
            with pytest.raises(ValueError, match="expected an invocation id"):
                await plane.outcome(bad, timeout=5)  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="expected an invocation id"):
                await plane.cancel(bad)  # type: ignore[arg-type]
        for bad in ("", "\ud800", None):
            with pytest.raises(ValueError, match="expected the name of a queue"):
                await plane.submit(bad, b"x")  # type: ignore[arg-type]
            with pytest.raises(ValueError, match="expected the name of a queue"):
                await plane.claim([bad], "w")  # type: ignore[list-item]
        for lease in (0.0, -1.0, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="expected a lease in seconds above 0"):
                await plane.claim(["q"], "w", lease=lease)
        assert (await plane.current_outcomes([id]))[0].state == "pending"


async def test_an_operation_that_the_driver_refuses_fails_alone(path: Path) -> None:
    """A value that no column takes: the other operations of the batch are committed."""
    async with Dispatch(path) as plane:
        good, bad = Submit("good", "q", b"x"), Submit("bad", "q", b"x", priority=2**70)
        answers = await plane.many([good, bad, Submit("fine", "q", b"x")])
        assert answers[0] == "good"
        assert isinstance(answers[1], Exception)
        assert answers[2] == "fine"
        assert await plane.counts() == {("q", "queued"): 2}


async def test_R90_cancelled_operations_leave_no_transaction_open(path: Path) -> None:
    handed_out: set[str] = set()  # a caller that is cancelled between its claim and its ack keeps the claim

    async with Dispatch(path) as plane, Dispatch(path) as other:
        for steps in range(30):
            async with anyio.create_task_group() as group:

                async def work(limit: int = steps) -> None:
                    with anyio.move_on_after(0.0005 * limit):
                        id = await plane.submit("q", b"x")
                        for claimed in await plane.claim(["q"], "w"):
                            handed_out.add(claimed.id)
                            await plane.finish(fence_of(claimed, "w"), "succeeded")
                        await plane.outcome(id)

                for _ in range(3):
                    group.start_soon(work)
            with anyio.fail_after(20):
                await other.submit("free", b"x")
        await wait_until(lambda: _only_these_run(other, handed_out), 10, "every claim nobody was given to go back")


async def _only_these_run(plane: Dispatch, handed_out: set[str]) -> bool:
    return {row.id for row in await plane.rows(RowFilter(state="running"))} <= handed_out


def test_many_callers_on_a_loop_of_plain_asyncio(path: Path) -> None:
    """`asyncio.run` instead of `anyio.run`: in its plain callbacks anyio does not know which loop is running."""

    async def crowd() -> int:
        async with Dispatch(path) as plane:
            await plane.submit("q", b"x")
            async with asyncio.timeout(30):
                await asyncio.gather(*(plane.submit("q", b"x") for _ in range(300)))
            return (await plane.counts())["q", "queued"]

    assert asyncio.run(crowd()) == 301


def test_threads_with_loops_of_their_own_share_one_plane(path: Path) -> None:
    script = """
        import anyio, sys, threading
        from dreamlake.lakeshore import Dispatch
        plane = Dispatch(sys.argv[1])
        def run(name, backend):
            async def main():
                for number in range(50):
                    await plane.submit(name, b"x")
            anyio.run(main, backend=backend)
        threads = [threading.Thread(target=run, args=(f"q{i}", b)) for i, b in enumerate(["asyncio", "trio", "asyncio"])]
        [t.start() for t in threads]; [t.join() for t in threads]
        print(sorted(anyio.run(plane.counts).values()))
    """
    out, err = run_python(script, str(path))
    assert (out, err) == ("[50, 50, 50]\n", "")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_R95_R96_many_processes_open_one_new_file(path: Path) -> None:
    script = """
        import anyio, sys
        from dreamlake.lakeshore import Dispatch
        from dreamlake.lakeshore.planes.contract.operations import Fence
        async def main():
            mine = []
            async with Dispatch(sys.argv[1]) as plane:
                for number in range(20):
                    await plane.submit("q", b"x")
                    for one in await plane.claim(["q"], sys.argv[2]):
                        await plane.finish(Fence(one.id, sys.argv[2], one.attempt), "succeeded")
                        mine.append(one.id)
            print(*mine)
        anyio.run(main)
    """
    code = dedent(script)
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    crowd = [
        subprocess.Popen([*command, f"w{n}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(24)
    ]
    seen: list[str] = []
    for process in crowd:
        out, err = process.communicate(timeout=300)
        assert (process.returncode, err) == (0, "")
        seen += out.split()
    assert len(seen) == len(set(seen)) == 480
