"""An engine that cannot start children: which invocations fail, and which stay in their queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import child_bodies as bodies
import pytest
from child_kit import children, process_runner
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import DispatchError
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners.process.runner import ProcessRunner

if TYPE_CHECKING:
    from pathlib import Path

    from dreamlake.lakeshore.worker.runner import Launch, Process

pytestmark = pytest.mark.anyio


class Engine(ProcessRunner):
    """An engine that can be down."""

    down = True

    async def start(self, launch: Launch) -> Process:
        if self.down:
            raise DispatchError("the engine is down")
        return await super().start(launch)


async def test_an_engine_that_is_down_does_not_empty_the_queue(
    queue: dls.Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(environ=process_runner().environ)
    ids = [await queue.submit(dls.thunk(bodies.double, n)) for n in range(12)]
    async with children(queue, tmp_path, engine, concurrency=2):
        await wait_until(lambda: "nothing is claimed" in caplog.text, 60, "the worker to rest")
        engine.down = False
        states = [await ended(queue, id) for id in ids]
    assert states.count("failed") <= 2, "those that were claimed together"
    assert states.count("succeeded") == len(ids) - states.count("failed")
    (said,) = (one.message for one in caplog.records if "nothing is claimed" in one.message)
    assert said.startswith("the process runner cannot start children, nothing is claimed for ")
    assert said.endswith(" s: the engine is down")


async def ended(queue: dls.Queue, id: str) -> str:
    try:
        await queue.result(id, timeout=30)
    except dls.InvocationFailed as exc:
        said = str(exc)
    else:
        return "succeeded"
    assert "the process runner could not start a child: the engine is down" in said
    return "failed"


async def test_a_submitter_cannot_have_a_worker_rest(
    queue: dls.Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefix that does not fit into an environment is the fault of the submitter, not of the engine."""
    id = new_id()
    envelope = dls.thunk(bodies.double, 1).to_envelope(id=id).to_bytes()
    config = dls.wire.pack({"run_config": {"prefix": "p" * 200_000}})
    async with children(queue, tmp_path, process_runner(warm=False)):
        await queue.dispatch.do(Submit(id, queue.name, envelope, config=config))
        assert (await queue.dispatch.outcome(id, timeout=30)).state == "failed"
        assert await queue.call(dls.thunk(bodies.double, 2)) == 4
    assert "nothing is claimed" not in caplog.text


async def test_it_goes_on_asking_the_engine(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("dreamlake.lakeshore.worker.child.MAX_START_PAUSE", 0.02)
    for n in range(4):
        await queue.submit(dls.thunk(bodies.double, n))
    async with children(queue, tmp_path, Engine(environ=process_runner().environ)):
        await wait_until(lambda: caplog.text.count("nothing is claimed") == 4, 60, "four rests")
