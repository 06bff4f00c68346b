"""What is said when a wait for a result is over and the invocation is not: how it stands, over a file and over HTTP."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx
import pytest

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import across
from dreamlake.lakeshore.planes import engine
from dreamlake.lakeshore.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from dreamlake.lakeshore.planes.plane import Plane

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["file", "http"])
async def q(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dls.Queue]:
    async with dls.Dispatch(tmp_path / "plane.db") as file:
        if request.param == "file":
            yield dls.Queue("gpu", dispatch=file)
            return
        app = create_app(file)
        async with dls.HttpDispatch("http://127.0.0.1", transport=httpx.ASGITransport(app=app)) as plane:
            yield dls.Queue("gpu", dispatch=plane)
        await across("asyncio", app.endpoint.close)


async def in_vain(q: dls.Queue, id: str) -> str:
    with pytest.raises(TimeoutError) as caught:
        await q.result(id, timeout=0.05)
    said = str(caught.value)
    begin, end = f"invocation {id!r} had not ended after 0.05 s; ", ", wait again with its id"
    assert (said[: len(begin)], said[-len(end) :]) == (begin, end)
    return said[len(begin) : -len(end)]


async def test_a_wait_in_vain_says_how_the_invocation_stands(q: dls.Queue) -> None:
    id = await q.submit(1)
    assert await in_vain(q, id) == "no worker has taken it from queue 'gpu' yet (all are busy, or none serves it)"
    job = await q.claim()
    assert job is not None
    worker = (await q.get(id)).worker
    assert worker
    assert await in_vain(q, id) == f"it runs on worker {worker!r} (attempt 1)"
    await q.cancel(id)
    assert await in_vain(q, id) == f"it runs on worker {worker!r} (attempt 1), which is asked to cancel it"


async def test_one_that_was_given_back_is_no_new_one(q: dls.Queue) -> None:
    id = await q.submit(1)
    job = await q.claim()
    assert job is not None
    await q.nack(job, retry=True)
    assert await in_vain(q, id) == "it is back in queue 'gpu' after attempt 1"


async def test_nobody_knows_an_id_that_is_not_there_any_better_after_a_wait(q: dls.Queue) -> None:
    with pytest.raises(dls.InvocationNotFound, match="'nobody'"):
        await q.result("nobody", timeout=0.0)


async def test_many_waits_in_vain_ask_a_few_times_only(q: dls.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, reads = await q.submit_many(range(50)), list[Any]()
    here = await q.dispatch._engines.get()
    rows = here.store.rows

    async def counted(filter: Any) -> Any:
        reads.append(filter)
        await anyio.sleep(0.05)  # until all have come to their end
        return await rows(filter)

    monkeypatch.setattr(here.store, "rows", counted)
    said = list[str]()

    async def wait(id: str) -> None:
        said.append(await in_vain(q, id))

    async with anyio.create_task_group() as group:
        for id in ids:
            group.start_soon(wait, id)
    assert len(said) == 50
    assert 1 <= len(reads) < 25
    assert {"it goes on"} < set(said)


@pytest.mark.parametrize("fault", [dls.PlaneUnavailable("away"), dls.DispatchError("no such route"), None])
async def test_where_it_cannot_be_found_out_soon_it_goes_on(
    q: dls.Queue, monkeypatch: pytest.MonkeyPatch, fault: Exception | None
) -> None:
    plane: Plane = q.dispatch
    id = await q.submit(1)

    async def rows(filter: Any) -> Any:
        if fault is None:
            await anyio.sleep_forever()
        raise fault or AssertionError

    monkeypatch.setattr(engine, "DESCRIBE_TIMEOUT", 0.05)
    monkeypatch.setattr((await plane._engines.get()).store, "rows", rows)
    assert await in_vain(q, id) == "it goes on"
