"""A plane that refuses a worker for a moment, as servers do that start anew: nobody ends, and nothing is lost by it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Literal

import anyio
import child_bodies as bodies
import httpx
import pytest
from child_kit import children, folders
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.body.execute import leaf_exceptions
from dreamlake.lakeshore.concurrency.portal import across
from dreamlake.lakeshore.planes.contract.operations import Beat
from dreamlake.lakeshore.planes.lease_keeper import LeaseKeeper
from dreamlake.lakeshore.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from pathlib import Path

pytestmark = pytest.mark.anyio
How = Literal["inline", "child"]
HOW = pytest.mark.parametrize("how", ["inline", "child"])
MODULES = ("child_bodies",)


class Moody(httpx.AsyncBaseTransport):
    """Leads to an application, and refuses requests whose path has one of `refused` in it, `times` times."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.refused: tuple[str, ...] = ()
        self.times = 1_000_000
        self.seen: list[str] = []
        """The paths of what was refused."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.times > 0 and any(one in request.url.path for one in self.refused):
            self.times -= 1
            self.seen.append(request.url.path)
            return httpx.Response(401, text="who are you?")
        return await self._inner.handle_async_request(request)


@asynccontextmanager
async def moody(folder: Path) -> AsyncGenerator[tuple[Moody, dls.Queue, dls.Queue]]:
    """The transport of a worker, the queue that it works for over it, and the same queue beside it."""
    async with dls.Dispatch(folder / "plane.db") as file:
        app = create_app(file)
        transport = Moody(httpx.ASGITransport(app=app))
        async with dls.HttpDispatch("http://127.0.0.1", transport=transport) as plane:
            yield transport, dls.Queue("q", dispatch=plane), dls.Queue("q", dispatch=file)
        await across("asyncio", app.endpoint.close)


@asynccontextmanager
async def working(how: How, queue: dls.Queue, folder: Path, *, lease: float = 30.0) -> AsyncGenerator[None]:
    """A worker during the block, which ends when it is stopped, and not before."""
    if how == "child":
        rules = {"allow_modules": MODULES}
        async with children(queue, folder, rules=rules, lease=lease, concurrency=2):
            yield
        return
    stop, failure = anyio.Event(), list[BaseException]()

    async def work() -> None:
        await dls.run_worker(queue, root=folder, lease=lease, concurrency=2, allow_modules=MODULES, stop=stop)

    try:
        async with anyio.create_task_group() as group:
            group.start_soon(work)
            yield
            stop.set()
    except BaseExceptionGroup as raised:
        failure.append(next(leaf_exceptions(raised)))
    if failure:
        raise failure[0]


@HOW
async def test_a_result_is_kept_while_it_is_refused(how: How, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with moody(tmp_path) as (transport, far, near), working(how, far, tmp_path):
        assert await near.call(dls.thunk(bodies.double, 1)) == 2
        transport.refused, transport.times = ("/daemon/ack",), 3
        id = await near.submit(dls.thunk(bodies.double, 21))
        assert await near.result(id, timeout=60) == 42
        assert len(transport.seen) == 3
    assert f"the outcome of {id} is kept, the plane fails with: " in caplog.text


@HOW
async def test_frames_are_kept_while_they_are_refused(how: How, tmp_path: Path) -> None:
    async with moody(tmp_path) as (transport, far, near), working(how, far, tmp_path):
        transport.refused, transport.times = ("/daemon/result-chunk",), 2
        found = [item async for item in near.stream(await near.submit(dls.thunk(bodies.count, 5)))]
        assert found == [0, 1, 2, 3, 4]
        assert len(transport.seen) == 2


@HOW
async def test_claims_that_are_refused_for_a_moment_end_no_worker(
    how: How, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One body runs meanwhile: that its worker could claim nothing more for a moment is nothing to it."""
    gate = tmp_path / "gate"
    async with moody(tmp_path) as (transport, far, near), working(how, far, tmp_path):
        id = await near.submit(dls.thunk(bodies.waits_and_tells, str(tmp_path / "began"), str(gate)))
        await wait_until(lambda: (tmp_path / "began").exists(), 30, "the begin of the body")
        transport.refused, transport.times = ("/daemon/poll",), 2
        await near.call(dls.thunk(bodies.double, 1))  # ends a poll, and another one follows
        await wait_until(lambda: len(transport.seen) == 2, 30, "polls that are refused")
        assert await near.call(dls.thunk(bodies.double, 2)) == 4
        gate.touch()
        assert isinstance(await near.result(id, timeout=60), str)
    assert "claiming failed, the next attempt is in 0.5 s: " in caplog.text
    assert folders(tmp_path) == []


@HOW
async def test_claims_that_are_refused_for_a_lease_end_the_worker(how: How, tmp_path: Path) -> None:
    async with moody(tmp_path) as (transport, far, near):
        with anyio.fail_after(60), pytest.raises(dls.NotAuthorized, match="401"):  # noqa: PT012 -- it is running meanwhile
            async with working(how, far, tmp_path, lease=1.0):
                assert await near.call(dls.thunk(bodies.double, 1)) == 2
                transport.refused = ("/daemon/poll",)
                await near.submit(dls.thunk(bodies.double, 1))
                await anyio.sleep_forever()


@HOW
async def test_who_is_refused_for_good_ends_soon_with_an_outcome_in_hand(
    how: How, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its invocation is another's after the lease, and no failure."""
    gate, id = tmp_path / "gate", ""
    async with moody(tmp_path) as (transport, far, near):
        with anyio.fail_after(60), pytest.raises(dls.NotAuthorized, match="401"):  # noqa: PT012 -- it is running meanwhile
            async with working(how, far, tmp_path, lease=1.0):
                id = await near.submit(dls.thunk(bodies.waits_and_tells, str(tmp_path / "began"), str(gate)))
                await wait_until(lambda: (tmp_path / "began").exists(), 30, "the begin of the body")
                transport.refused = ("/daemon/",)
                gate.touch()
                await anyio.sleep_forever()
        assert (await near.get(id)).state in ("running", "queued")
        transport.refused = ()
        async with working(how, far, tmp_path):
            assert isinstance(await near.result(id, timeout=60), str)
    assert "return less" not in caplog.text


async def test_refusals_long_ago_do_not_count(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A keeper that was refused, had nothing to keep for longer than a lease, and is refused for a moment again."""
    told = list[object]()
    async with moody(tmp_path) as (transport, far, near):
        ids = [await near.submit(dls.thunk(bodies.nothing)) for _ in range(2)]
        claims = await far.dispatch.claim(["q"], "w", lease=60, limit=2)
        first, second = ((one.id, one.attempt) for one in claims)
        assert {first[0], second[0]} == set(ids)
        keeper = LeaseKeeper(far.dispatch, "w", 1.0, lambda claim, what: told.append(claim))
        async with anyio.create_task_group() as group:
            transport.refused = ("/daemon/heartbeat",)
            keeper.start(group)
            keeper.add(*first)
            await wait_until(lambda: "refuses the heartbeats" in caplog.text, 30, "a heartbeat that is refused")
            keeper.discard(*first)
            await anyio.sleep(1.5)  # more than a lease, parked
            before, transport.times = len(transport.seen), 2
            keeper.add(*second)
            await wait_until(lambda: len(transport.seen) == before + 2, 30, "heartbeats that are refused again")
            await anyio.sleep(0.5)  # it would have raised
            keeper.stop()
            await keeper.ended()
            group.cancel_scope.cancel()


class Deaf(dls.Dispatch):
    """A plane that takes no heartbeats."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.asked: list[float] = []

    async def do(self, op: Any) -> Any:
        if isinstance(op, Beat):
            self.asked.append(anyio.current_time())
            raise dls.PlaneUnavailable("for a moment")
        return await super().do(op)


async def test_a_heartbeat_that_fails_is_made_again_soon(tmp_path: Path) -> None:
    """Two thirds of the lease are left then, of which no half is to be waited for."""
    async with Deaf(tmp_path / "plane.db") as plane:
        await dls.Queue("q", dispatch=plane).submit(dls.thunk(bodies.nothing))
        (claimed,) = await plane.claim(["q"], "w", lease=60)
        keeper = LeaseKeeper(plane, "w", 9.0, lambda claim, what: None)
        keeper.start()
        keeper.add(claimed.id, claimed.attempt)
        await wait_until(lambda: len(plane.asked) >= 2, 30, "two heartbeats")
        keeper.stop()
        await keeper.ended()
        assert plane.asked[1] - plane.asked[0] < 2.5
