"""Engines that start a child late, and engines that lose one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, environ, folders, holders
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.runners.process.runner import ProcessOptions, ProcessRunner
from dreamlake.lakeshore.worker.runner import Exit

if TYPE_CHECKING:
    from pathlib import Path

    from dreamlake.lakeshore.planes.contract.records import Row
    from dreamlake.lakeshore.worker.runner import Launch, Process

pytestmark = pytest.mark.anyio


class Crowded(ProcessRunner):
    """Starts each child `seconds` late."""

    def __init__(self, seconds: float) -> None:
        super().__init__(ProcessOptions(grace=0.2), environ=environ())
        self.seconds = seconds
        self.waiting = 0

    async def start(self, launch: Launch) -> Process:
        self.waiting += 1
        try:
            await anyio.sleep(self.seconds)
        finally:
            self.waiting -= 1
        return await super().start(launch)


class Ending(ProcessRunner):
    """Reports the given exits in place of the real ones, then the real ones."""

    def __init__(self, *ends: Exit) -> None:
        super().__init__(environ=environ())
        self.ends = list(ends)

    async def start(self, launch: Launch) -> Any:
        started = await super().start(launch)
        if not self.ends:
            return started
        await started.wait()
        return _Ended(self.ends.pop(0))


class _Ended:
    def __init__(self, exit: Exit) -> None:
        self._exit = exit

    async def wait(self) -> Exit:
        return self._exit

    async def kill(self) -> Exit:
        return self._exit


async def ended(queue: dls.Queue, id: str) -> Row:
    await queue.dispatch.outcome(id, timeout=60)
    return await queue.get(id)


async def test_waiting_does_not_count_against_the_timeout(queue: dls.Queue, tmp_path: Path) -> None:
    states = list[str]()
    async with children(queue, tmp_path, Crowded(6.5), timeout=5.0, lease=0.8):
        while "succeeded" not in states and len(states) < 3:  # a machine that stalls may need longer for one
            row = await ended(queue, await queue.submit(dls.thunk(bodies.double, 1)))
            assert (row.attempt, row.lost) == (1, 0)
            states.append(row.state)
    assert states[-1] == "succeeded"


async def test_a_child_that_had_to_wait_has_all_of_its_time_then(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    for timeout in (3.0, 10.0, 30.0):  # on a machine that stalls, the time may be over before the child begins
        async with children(queue, tmp_path, Crowded(1.0), timeout=timeout):
            row = await ended(queue, await queue.submit(dls.thunk(bodies.sleeps, str(path))))
        assert row.error is not None
        assert row.state == "timeout"
        assert row.error.message == f"the body ran longer than this worker's timeout of {timeout} s"
        if notes(path):
            break
    assert notes(path)[1:] == ["cleaned up"]


async def test_what_waits_is_cancelled_at_once(queue: dls.Queue, tmp_path: Path) -> None:
    runner = Crowded(1000.0)
    async with children(queue, tmp_path, runner, timeout=0.2):
        id = await queue.submit(dls.thunk(bodies.double, 1))
        await wait_until(lambda: runner.waiting, 60.0, "the start of the child")
        await anyio.sleep(0.5)  # longer than the timeout
        assert (await queue.get(id)).state == "running"
        assert await queue.cancel(id, wait=True)
        row = await queue.get(id)
        assert row.error is not None
        assert (row.state, row.error.message) == ("killed", "cancelled while running")
    assert folders(tmp_path) == holders(tmp_path) == []


@pytest.mark.parametrize("on_shutdown", ["killed", "release"])
async def test_what_waits_goes_back_with_its_worker(queue: dls.Queue, tmp_path: Path, on_shutdown: str) -> None:
    runner = Crowded(1000.0)
    async with children(queue, tmp_path, runner, grace=0.1, rules={"on_shutdown": on_shutdown}) as stop:
        id = await queue.submit(dls.thunk(bodies.double, 1))
        await wait_until(lambda: runner.waiting, 60.0, "the start of the child")
        stop.set()
    row = await queue.get(id)
    assert (row.state, row.failures, row.lost) == ("queued", 0, 0)
    assert folders(tmp_path) == []


LOST = Exit(-9, error=Failure("WorkerLost", "its node failed"))


async def test_a_lost_child_is_tried_again_without_retries(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, Ending(LOST, LOST)):
        row = await ended(queue, await queue.submit(dls.thunk(bodies.double, 1)))
        assert (row.state, row.attempt, row.failures) == ("succeeded", 3, 2)
    assert folders(tmp_path) == []


async def test_losses_have_an_end(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, Ending(LOST, LOST, LOST), max_lost=2):
        row = await ended(queue, await queue.submit(dls.thunk(bodies.double, 1)))
        assert (row.state, row.attempt, row.error) == ("failed", 2, LOST.error)


@pytest.mark.parametrize("state", ["timeout", "killed"])
async def test_an_engine_that_ends_a_child_on_purpose_has_the_last_word(
    queue: dls.Queue, tmp_path: Path, state: str
) -> None:
    said = Failure("Cancelled", "by the engine")
    async with children(queue, tmp_path, Ending(Exit(-9, state, said)), retries=3):
        row = await ended(queue, await queue.submit(dls.thunk(bodies.double, 1)))
        assert (row.state, row.attempt, row.error) == (state, 1, said)
