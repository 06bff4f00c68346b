"""The claims of dead processes go back at once, and those of living ones are kept."""

from __future__ import annotations

import signal
from pathlib import Path
from textwrap import dedent
from typing import Any

import anyio
import anyio.to_thread
import pytest
from helpers import run_python, wait_until
from sqlite_kit import CLAIM_AND, needs_proc

from dreamlake.lakeshore import Dispatch, PlaneUnavailable
from dreamlake.lakeshore.planes.contract.operations import Claim, Reap
from dreamlake.lakeshore.planes.contract.records import RowFilter

pytestmark = pytest.mark.anyio


async def test_R1_R5_the_claims_of_a_killed_process_go_back_at_once(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(CLAIM_AND.format(then="os.kill(os.getpid(), signal.SIGKILL)"), str(path), code=-signal.SIGKILL)
        with anyio.fail_after(20):
            (again,) = await plane.claim(["q"], "heir", timeout=None)
        assert (again.id, again.attempt, again.lost) == ("a", 2, 1)
        holders = Path(f"{path}-presence") / "holders"
        assert len(list(holders.iterdir())) == 1, "the dead holder's file is gone, ours is there"


async def test_a_process_that_closes_its_plane_gives_its_claims_back_at_no_cost(path: Path) -> None:
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(CLAIM_AND.format(then="return"), str(path))
        (row,) = await plane.rows(RowFilter())
        assert (row.state, row.attempt, row.lost) == ("queued", 1, 0)
        assert len(list((Path(f"{path}-presence") / "holders").iterdir())) == 1


async def test_a_living_holder_keeps_its_claims_for_ten_leases(path: Path) -> None:
    """A lease that runs out while its holder's lock is held may be a body that keeps the GIL in C code."""
    now = [1000.0]
    async with Dispatch(path, clock=lambda: now[0]) as holder, Dispatch(path, clock=lambda: now[0]) as other:
        await other.submit("q", b"x")
        (claimed,) = await holder.claim(["q"], "w", lease=10.0)

        async def due() -> list[Any]:
            engine = await other._engines.get()
            await engine.read(engine.store.due)
            return await engine.read(engine.store.due)  # leases are read at every second check

        now[0] += 99.0
        assert await due() == []
        assert await other.claim(["q"], "thief") == []
        now[0] += 2.0
        (reap,) = await due()
        await other.do(reap)
        (again,) = await other.claim(["q"], "heir")
        assert again.attempt == claimed.attempt + 1


async def test_a_forked_child_does_not_hold_its_parents_lock(path: Path) -> None:
    script = """
        import anyio, os, sys, time
        from dreamlake.lakeshore import Dispatch
        async def main():
            plane = Dispatch(sys.argv[1])
            (claimed,) = await plane.claim(["q"], "doomed", lease=3600.0, timeout=10)
            if os.fork() == 0:
                os.close(1), os.close(2)
                time.sleep(30)
                os._exit(0)
            os.kill(os.getpid(), 9)
        anyio.run(main)
    """
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(
            "import warnings; warnings.simplefilter('ignore')\n" + dedent(script), str(path), code=-signal.SIGKILL
        )
        with anyio.fail_after(20):
            (again,) = await plane.claim(["q"], "heir", timeout=None)
        assert again.attempt == 2


@needs_proc
async def test_a_close_that_fails_releases_the_holders_lock(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other engines find its claims only if its lock is free."""
    async with Dispatch(path) as other:
        await other.submit("q", b"x")
        plane = Dispatch(path)
        assert len(await plane.claim(["q"], "w", lease=3600.0)) == 1
        store: Any = (await plane._engines.get()).store

        async def fails(ops: object) -> Any:
            raise PlaneUnavailable("the disk is full")

        monkeypatch.setattr(store, "apply", fails)
        await plane.aclose()
        with anyio.fail_after(20):
            (again,) = await other.claim(["q"], "heir", timeout=None)
        assert again.attempt == 2


async def test_a_removed_holders_file_does_not_mean_that_it_is_dead(path: Path) -> None:
    async with Dispatch(path) as holder, Dispatch(path) as other:
        await holder.submit("q", b"x")
        await holder.claim(["q"], "w", lease=600.0)
        for file in (Path(f"{path}-presence") / "holders").iterdir():
            file.unlink()
        engine = await other._engines.get()
        await engine.read(engine.store.due)
        assert await engine.read(engine.store.due) == []


async def test_after_a_step_of_the_clock_holders_may_renew_first(path: Path) -> None:
    now = [1000.0]
    async with Dispatch(path, clock=lambda: now[0]) as plane:
        await plane.submit("q", b"x")
        await plane.do(Claim(("q",), "w", lease=10.0, local=False))
        engine = await plane._engines.get()
        store: Any = engine.store
        ticks = [0.0]
        store._clock_steps._steady = lambda: ticks[0]

        async def due() -> list[Any]:
            await engine.read(store.due)
            return list(await engine.read(store.due))

        assert await due() == []
        now[0] += 86_400.0
        ticks[0] += 0.25
        assert await due() == [], "the machine slept, and nobody could renew"
        ticks[0], now[0] = ticks[0] + 61.0, now[0] + 61.0
        assert len(await due()) == 1


async def test_a_dead_holders_file_is_removed_after_its_claims_went_back(path: Path) -> None:
    """A process that finds a dead holder and is killed before it reaps leaves the file for the next one to find."""
    async with Dispatch(path) as plane:
        await plane.submit("q", b"x", id="a")
        run_python(CLAIM_AND.format(then="os.kill(os.getpid(), signal.SIGKILL)"), str(path), code=-signal.SIGKILL)
        engine = await plane._engines.get()
        holders = Path(f"{path}-presence") / "holders"
        await engine.read(engine.store.due)
        (reap,) = await engine.read(engine.store.due)
        assert isinstance(reap, Reap)
        assert set(reap.dead) <= {p.name for p in holders.iterdir()}
        await plane.do(reap)
        await wait_until(lambda: len(list(holders.iterdir())) == 1, 5, "the removal of the file")
