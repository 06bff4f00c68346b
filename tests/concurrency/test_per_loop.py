"""Resources of which each event loop has one: opened once and closed on its loop, however that ends."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from anyio.lowlevel import checkpoint
from helpers import run_python, wait_until

from dreamlake.lakeshore.concurrency import per_loop as _per_loop
from dreamlake.lakeshore.concurrency.per_loop import PerLoop
from dreamlake.lakeshore.concurrency.portal import across
from dreamlake.lakeshore.concurrency.run_sync import run_sync

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

pytestmark = pytest.mark.anyio
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


class Resource:
    alive = 0

    def __init__(self) -> None:
        self.thread, self.closes, self.whole = threading.get_ident(), 0, False
        Resource.alive += 1

    async def close(self) -> None:
        assert threading.get_ident() == self.thread
        self.closes += 1
        await anyio.sleep(0.01)
        if not self.whole:
            self.whole = True
            Resource.alive -= 1


@pytest.fixture(autouse=True)
def _all_closed() -> Any:
    Resource.alive = 0
    yield
    assert Resource.alive == 0


async def opened() -> Resource:
    await anyio.sleep(0.005)
    return Resource()


async def test_many_first_users_open_once() -> None:
    resources, seen = PerLoop(opened), set[Resource]()

    async def use() -> None:
        seen.add(await resources.get())

    async with anyio.create_task_group() as group:
        for _ in range(20):
            group.start_soon(use)
    assert len(seen) == 1
    await resources.aclose()


async def test_close_and_open_again() -> None:
    resources = PerLoop(opened)
    first = await resources.get()
    await resources.aclose()
    await resources.aclose()
    second = await resources.get()
    assert first is not second
    await resources.aclose_all()
    await resources.aclose_all()
    assert (first.closes, second.closes) == (1, 1)


async def test_a_cancelled_or_failed_opening_leaves_nothing() -> None:
    fail = True

    async def opener() -> Resource:
        if fail:
            raise OSError("no")
        return await opened()

    resources = PerLoop(opener)
    with pytest.raises(OSError, match="no"):
        await resources.get()
    fail = False
    with anyio.move_on_after(0):
        await resources.get()
    assert Resource.alive == 0
    assert (await resources.get()).closes == 0
    await resources.aclose()


async def test_closing_in_a_cancelled_scope_still_closes() -> None:
    for close in ("aclose", "aclose_all"):
        resources = PerLoop(opened)
        await resources.get()
        with anyio.CancelScope() as scope:
            scope.cancel()
            await getattr(resources, close)()
        assert Resource.alive == 0


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_asyncio_cancellation_of_a_closer_still_closes() -> None:
    resources = PerLoop(opened)
    resource = await resources.get()
    task = asyncio.create_task(resources.aclose())
    await wait_until(lambda: resource.closes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (resource.closes, resource.whole) == (2, True)


@both_loops
@pytest.mark.parametrize("forgotten", [False, True])
def test_the_end_of_the_loop_closes(backend: str, forgotten: bool) -> None:
    keep: list[Any] = []

    async def main() -> None:
        resources = PerLoop(opened)
        await resources.get()
        if not forgotten:
            keep.append(resources)
        del resources
        gc.collect()
        await checkpoint()
        assert Resource.alive == 1

    anyio.run(main, backend=backend)
    assert Resource.alive == 0


def in_thread(backend: str, main: Callable[[], Awaitable[Any]]) -> threading.Thread:
    thread = threading.Thread(target=lambda: anyio.run(main, backend=backend))
    thread.start()
    return thread


async def test_aclose_all_closes_on_every_loop_that_lives() -> None:
    resources, seen, release = PerLoop(opened), list[Resource](), threading.Event()

    async def use() -> Resource:
        seen.append(await resources.get())
        return seen[-1]

    async def elsewhere() -> None:
        await use()
        await wait_until(release.is_set, 60)

    ended = in_thread("trio", use)
    await wait_until(lambda: not ended.is_alive())
    threads = [in_thread("asyncio", elsewhere), in_thread("trio", elsewhere)]
    mine = await use()
    await across("portal", use)
    await wait_until(lambda: len(seen) == 5)
    assert len({resource.thread for resource in seen}) >= 4  # that of the ended loop may have been used again
    assert Resource.alive == 4
    await resources.aclose_all()
    assert Resource.alive == 0
    assert [resource.closes for resource in seen] == [1] * 5
    assert await resources.get() is not mine
    await resources.aclose()
    release.set()
    for thread in threads:
        await anyio.to_thread.run_sync(thread.join)


async def test_aclose_all_does_not_wait_for_ever_for_a_loop_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_per_loop, "CLOSE_ALL_TIMEOUT", 0.1)
    resources, stuck, release = PerLoop(opened), threading.Event(), threading.Event()

    async def hang() -> None:
        await resources.get()
        stuck.set()
        release.wait()
        await wait_until(lambda: Resource.alive == 0)

    thread = in_thread("asyncio", hang)
    await wait_until(stuck.is_set)
    with anyio.fail_after(60):
        await resources.aclose_all()
    assert Resource.alive == 1
    release.set()  # it closes as soon as it can
    await anyio.to_thread.run_sync(thread.join)


@pytest.mark.filterwarnings("ignore:a blocking call")
async def test_aclose_all_does_not_wait_for_the_loop_that_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_per_loop, "CLOSE_ALL_TIMEOUT", 40.0)
    resources = PerLoop(opened)
    await resources.get()
    begin = anyio.current_time()
    run_sync(resources.aclose_all, hint="await q.aclose()")
    assert anyio.current_time() - begin < _per_loop.CLOSE_ALL_TIMEOUT
    await wait_until(lambda: Resource.alive == 0)


def test_ended_loops_are_forgotten() -> None:
    resources = PerLoop(opened)

    async def use() -> None:
        await resources.get()

    for backend in ("asyncio", "trio") * 3:
        anyio.run(use, backend=backend)
    assert len(resources._slots) == 1


def test_a_forked_child_has_resources_of_its_own() -> None:
    out, err = run_python(
        """
        import anyio, os, time
        from dreamlake.lakeshore.concurrency import per_loop as _per_loop
        from dreamlake.lakeshore.concurrency.per_loop import PerLoop
        from dreamlake.lakeshore.concurrency.run_sync import run_sync

        class Resource:
            def __init__(self): self.pid = os.getpid()
            async def close(self):
                assert self.pid == os.getpid()
                print("closed", flush=True)
        async def opener(): return Resource()
        _per_loop.CLOSE_ALL_TIMEOUT = 40.0
        resources = PerLoop(opener)
        use = lambda: run_sync(resources.get, hint="")
        first = use()
        if (pid := os.fork()) == 0:
            assert use() is not first and use().pid == os.getpid()
            begin = time.monotonic()
            run_sync(resources.aclose_all, hint="")
            assert time.monotonic() - begin < _per_loop.CLOSE_ALL_TIMEOUT  # it does not wait for the parent's loops
            assert first in [slot.value for slot in _per_loop._inherited if getattr(slot, "value", None)]
        else:
            assert os.waitpid(pid, 0)[1] == 0
            assert use() is first
        """
    )
    assert (out.split(), err) == (["closed"] * 2, "")
