"""An executor that is cancelled at any place where it waits leaves no process, no lock and no half of an outcome."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import child_bodies as bodies
import pytest
from child_kit import holders, process_runner

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.body.execute import Backpressure
from dreamlake.lakeshore.daemon.workdir import Folder
from dreamlake.lakeshore.planes.contract.operations import Claimed
from dreamlake.lakeshore.testing.leaving import WAYS, Caller, Way
from dreamlake.lakeshore.wire import unpack
from dreamlake.lakeshore.worker.child import ChildExecutor, ChildRules

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio


class Quiet:
    """A channel without a reader: it makes the executor wait after every value."""

    function = "?"
    in_thread = False
    kill_at_shutdown = False
    stop_reason = None

    def __init__(self) -> None:
        self.values: list[Any] = []

    def begin(self) -> None: ...

    def add(self, value: Any) -> Backpressure:
        raise AssertionError("children give packed values")

    def add_packed(self, data: bytes) -> Backpressure:
        self.values.append(unpack(data))
        return Backpressure.WAIT

    async def room(self) -> None:
        await anyio.sleep(0.001)


@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
@pytest.mark.parametrize(("fn", "values"), [(bodies.double, []), (bodies.count, [0, 1, 2])])
@pytest.mark.parametrize("way", WAYS)
async def test_at_every_place(
    tmp_path: Path, anyio_backend_name: str, way: Way, fn: Callable[..., Any], values: list[int], warm: bool
) -> None:
    if way == "native" and anyio_backend_name != "asyncio":
        return
    runner = process_runner(warm=warm, grace=2.0)
    rules = ChildRules(tmp_path / "work", tmp_path, local=True, keep=0)
    child = ChildExecutor(runner, rules, 1)
    claimed = Claimed("a", "q", dls.thunk(fn, 3).to_envelope().to_bytes(), 1, 0, 0, 0, True, None, None, None)
    left = 0
    try:
        for at in count(1):
            emit = Quiet()
            caller = Caller(way, at, later=at % 3)
            await caller.make(child.run(claimed, emit), None)
            assert holders(tmp_path) == []
            folder = Folder.take(rules.workdir, "a", b"")
            assert folder is not None, f"the lock is still held after it was left at place {at}"
            folder.remove()
            for done in caller.returned:
                assert done.state == "succeeded"
                assert emit.values == values
            left += not caller.returned
            if caller.through:
                break
    finally:
        await runner.aclose()
    assert left > 1
