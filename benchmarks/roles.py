"""What the processes of a benchmark do: `python roles.py ROLE SETTINGS`, started and told by `children.py`.

A plane is given as the path of its file, or as the URL of a server.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's

import asyncio
import gc
import json
import os
import queue
import resource
import sqlite3
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import jobs
from raw import answer_round_trips

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Fence, Finish

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping

    from dreamlake.lakeshore.planes.plane import Plane

T = TypeVar("T")

__all__ = [
    "BODY", "COMMANDS", "NONE", "ROLES", "SYNC_ROLES", "Control", "main", "plane_at", "spread", "together"
]  # fmt: skip

BODY = dls.thunk(jobs.noop, 5).to_envelope().to_bytes()
NONE = b"\xc0"


class Control:
    """The parent's words. `usage` is answered at once, whatever the process is busy with; the rest comes with `next`."""

    def __init__(self) -> None:
        self._commands: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in sys.stdin:
            command = json.loads(line)
            if command["do"] == "usage":
                self.say(**usage(command["reset"]))
            else:
                self._commands.put(command)
        os._exit(0)  # the parent has ended

    def next_sync(self) -> dict[str, Any]:
        return self._commands.get()

    async def next(self) -> dict[str, Any]:
        return await anyio.to_thread.run_sync(self.next_sync)

    def say(self, **answer: Any) -> None:
        print(json.dumps(answer), flush=True)


def usage(reset: bool) -> dict[str, Any]:
    spent = resource.getrusage(resource.RUSAGE_SELF)
    status = Path("/proc/self/status")
    if not status.exists():  # no Linux: only the peak is known, and it never falls
        peak = spent.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return {"cpu": spent.ru_utime + spent.ru_stime, "memory": peak, "peak": peak}
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
    memory, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return {"cpu": spent.ru_utime + spent.ru_stime, "memory": memory, "peak": peak}


def plane_at(where: str) -> Plane:
    return dls.HttpDispatch(where) if where.startswith("http://") else dls.Dispatch(where)


async def together(backend: str, one: Callable[[Any], Coroutine[Any, Any, Any]], items: Iterable[Any]) -> None:
    """Await `one(item)` for all items at once."""
    if backend == "asyncio":
        await asyncio.gather(*map(one, items))
    else:
        async with anyio.create_task_group() as group:
            for item in items:
                group.start_soon(one, item)


# --- those who work -------------------------------------------------------------------------------------------------


async def worker(control: Control, path: str, queues: list[str], concurrency: int, hold: bool = False) -> None:
    """A worker. `hold`: it starts when it is told to, and says when that was and what CPU it had used by then."""
    async with plane_at(path) as plane:
        control.say(ready=True)
        if hold:
            await control.next()
            control.say(started=time.time(), cpu=usage(False)["cpu"])
        await dls.run_worker([dls.Queue(name, dispatch=plane) for name in queues], concurrency=concurrency)


async def verbs(control: Control, path: str, width: int) -> None:
    """A worker that is nothing but plane verbs: claims, and ends what it has claimed."""
    async with plane_at(path) as plane:
        control.say(ready=True)
        while True:
            claimed = await plane.claim(["jobs"], "verbs", limit=width, timeout=None)
            fences = [Fence(one.id, "verbs", one.attempt) for one in claimed]
            await plane.many([Finish(fence, "succeeded", NONE) for fence in fences])


def raw_answerer(control: Control, path: str) -> None:
    answer_round_trips(path, lambda: control.say(ready=True))


# --- those who call -------------------------------------------------------------------------------------------------


async def waiter(control: Control, path: str, count: int) -> None:
    """Waits for `count` invocations that nobody runs."""
    async with plane_at(path) as plane, anyio.create_task_group() as group:
        jobs_queue = dls.Queue("jobs", dispatch=plane)
        for id in await jobs_queue.submit_many([dls.thunk(jobs.noop, n) for n in range(count)]):
            group.start_soon(jobs_queue.result, id)
        await anyio.sleep(0.1)
        control.say(ready=True)


async def caller(control: Control) -> None:
    """Does what it is told on the plane that each command names, which stays open."""
    planes: dict[str, Plane] = {}
    control.say(ready=True)
    while True:
        command = await control.next()
        path, verb = command.pop("path"), COMMANDS[command.pop("do")]
        plane = planes[path] if path in planes else planes.setdefault(path, plane_at(path))
        control.say(**await verb(plane, **command))


async def submit(plane: Plane, how: str, count: int, width: int) -> dict[str, Any]:
    """`width` tasks, each with one submit at a time."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)

    async def by_plane(n: int) -> None:
        await plane.submit("jobs", BODY)

    async def by_queue(n: int) -> None:
        await jobs_queue.submit(dls.thunk(jobs.noop, n))

    one = by_plane if how == "plane" else by_queue
    async with plane:
        return {"seconds": await spread(one, count, width)}


async def submit_many(plane: Plane, count: int) -> dict[str, Any]:
    """One `submit_many` of as many thunks of one function."""
    async with plane:
        jobs_queue = dls.Queue("jobs", dispatch=plane)
        thunks = [dls.thunk(jobs.noop, n) for n in range(count)]
        started = time.perf_counter()
        await jobs_queue.submit_many(thunks)
        return {"seconds": time.perf_counter() - started}


async def cycle(plane: Plane, count: int, width: int) -> dict[str, Any]:
    """`width` tasks, each with one invocation at a time from its submit to its outcome."""

    async def one(n: int) -> None:
        await plane.call(plane.submission("jobs", BODY))

    await one(0)
    return {"seconds": await spread(one, count, width)}


async def spread(one: Callable[[int], Awaitable[None]], count: int, width: int) -> float:
    async def some(first: int) -> None:
        for n in range(first, count, width):
            await one(n)

    started = time.perf_counter()
    async with anyio.create_task_group() as group:
        for first in range(width):
            group.start_soon(some, first)
    return time.perf_counter() - started


async def fill(plane: Plane, function: str, args: list[Any], count: int, queue: str = "jobs") -> dict[str, Any]:
    """Submits `count` invocations by reference; the plane is closed again."""
    thunk = dls.thunk(getattr(jobs, function), *args)
    async with plane:
        return {"ids": await dls.Queue(queue, dispatch=plane).submit_many([thunk] * count)}


async def calls(plane: Plane, count: int) -> dict[str, Any]:
    """One call after the other; the seconds of each."""
    return {"seconds": [await _call(dls.Queue("jobs", dispatch=plane)) for _ in range(count)]}


async def _call(jobs_queue: dls.Queue) -> float:
    started = time.perf_counter()
    assert await jobs_queue.call(dls.thunk(jobs.noop, 5)) == 5
    return time.perf_counter() - started


async def calls_beside_results(plane: Plane, count: int, results: int, size: int) -> dict[str, Any]:
    """Calls in quiet, and calls while `results` results of `size` bytes are made and written; the seconds of each."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)
    await calls(plane, 20)
    quiet = [await _call(jobs_queue) for _ in range(count)]
    with sqlite3.connect(str(getattr(plane, "path", ""))) as looker:  # not on the plane's own connection
        sql = "SELECT count(*) FROM outcome WHERE result_ref IS NOT NULL"
        there = looker.execute(sql).fetchone()[0] + results
        await dls.Queue("large", dispatch=plane).submit_many([dls.thunk(jobs.large, size)] * results)
        beside: list[float] = []
        while looker.execute(sql).fetchone()[0] < there:
            beside.append(await _call(jobs_queue))
    looker.close()
    return {"quiet": quiet, "beside": beside}


async def stream(plane: Plane, function: str, count: int, size: int) -> dict[str, Any]:
    """Submits a generator and reads it to its end: seconds to the first value, and to the end."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)
    first, seen = 0.0, 0
    started = time.perf_counter()
    async for _ in jobs_queue.stream(await jobs_queue.submit(dls.thunk(getattr(jobs, function), count, size))):
        seen += 1
        if seen == 1:
            first = time.perf_counter() - started
    assert seen == count, f"{seen} of {count} values came"
    return {"first": first, "seconds": time.perf_counter() - started}


async def gather(plane: Plane, ids: list[str], backend: str) -> dict[str, Any]:
    """Waits for all of `ids` at once; when that was over."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)
    async with plane:
        await together(backend, jobs_queue.result, ids)
        done = time.time()
    gc.collect()  # what is left of memory then is held, not waiting for its turn
    return {"done": done}


COMMANDS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    fn.__name__: fn for fn in (submit, submit_many, cycle, fill, calls, calls_beside_results, stream, gather)
}


def sync_caller(control: Control) -> None:
    """Blocking calls from a plain thread, one after the other; the seconds of each."""
    planes: dict[str, Plane] = {}
    control.say(ready=True)
    while True:
        command = control.next_sync()
        jobs_queue = dls.SyncQueue("jobs", dispatch=planes.setdefault(command["path"], plane_at(command["path"])))
        took: list[float] = []
        for _ in range(command["count"]):
            started = time.perf_counter()
            assert jobs_queue.call(dls.thunk(jobs.noop, 5)) == 5
            took.append(time.perf_counter() - started)
        control.say(seconds=took)


# --- memory ---------------------------------------------------------------------------------------------------------


def arrays(control: Control) -> None:
    """Packs and unpacks arrays; the peak of memory above what was there before, and the seconds."""
    import numpy as np

    from dreamlake.lakeshore.wire import pack, unpack

    unpack(pack([np.zeros(10_000)]))
    control.say(ready=True)
    while True:
        command = control.next_sync()
        array: Any = np.ones(command["size"] // 8)
        value = {"alone": array, "in-list": [array], "in-tuple": (array,)}[command["shape"]]
        packing, data = _peak(partial(pack, value))
        del array, value
        unpacking, _ = _peak(partial(unpack, data))
        control.say(pack=packing, unpack=unpacking)


def _peak(fn: Callable[[], T]) -> tuple[dict[str, float], T]:
    before = usage(True)["memory"]
    started = time.perf_counter()
    value = fn()
    seconds = time.perf_counter() - started
    return {"bytes": usage(False)["peak"] - before, "seconds": seconds}, value


# --------------------------------------------------------------------------------------------------------------------


def main(roles: Mapping[str, Callable[..., Any]], sync_roles: Collection[Callable[..., Any]]) -> None:
    role, settings = roles[sys.argv[1]], json.loads(sys.argv[2])
    backend, control = settings.pop("backend"), Control()
    if role in sync_roles:
        role(control, **settings)
    else:
        anyio.run(partial(role, control, **settings), backend=backend)


SYNC_ROLES = (raw_answerer, sync_caller, arrays)
ROLES: dict[str, Callable[..., Any]] = {fn.__name__: fn for fn in (worker, verbs, waiter, caller, *SYNC_ROLES)}

if __name__ == "__main__":
    main(ROLES, SYNC_ROLES)
