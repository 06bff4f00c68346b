"""Waits for bodies of a worker, and checks that the worker still works."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import worker_bodies as bodies
from helpers import wait_until

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from dreamlake.lakeshore.planes.contract.records import Row


async def started(name: str) -> None:
    await wait_until(lambda: f"{name} began" in bodies.SEEN, description=f"the start of {name}")


async def goes_on(queue: dls.Queue) -> None:
    """Check that the worker still works. With a short timeout, a busy machine may make the first calls time out."""
    for _ in range(4):
        with suppress(dls.InvocationTimedOut):
            assert await queue.call(dls.thunk(bodies.double, 21)) == 42
            return
    assert await queue.call(dls.thunk(bodies.double, 21)) == 42


async def ended(queue: dls.Queue, id: str) -> Row:
    await queue.dispatch.outcome(id, timeout=30)
    return await queue.get(id)


async def all_ended(queue: dls.Queue, ids: list[str]) -> None:
    for id in ids:
        await queue.result(id, timeout=30)
