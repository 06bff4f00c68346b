"""What the processes of a benchmark over HTTP do: those of `roles.py`, and a few more."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.sort(key=str(Path(__file__).parent).__eq__)  # this folder last: its http is not the standard library's

import logging
import os
import runpy
import time
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import jobs
from roles import BODY, COMMANDS, NONE, ROLES, SYNC_ROLES, Control, main, plane_at, spread, together

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.http.attempt import MAX_CONNECTIONS
from dreamlake.lakeshore.planes.protocol.fields import decode, encode
from dreamlake.lakeshore.planes.protocol.messages import encode_submit
from dreamlake.lakeshore.planes.protocol.routes import CONTENT_TYPE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dreamlake.lakeshore.planes.plane import Plane

# --- the server -----------------------------------------------------------------------------------------------------


class _Started(logging.Handler):
    """Tells the parent the URL in the line by which the server says that it accepts."""

    def __init__(self, control: Control) -> None:
        super().__init__()
        self._control = control

    def emit(self, record: logging.LogRecord) -> None:
        words = record.getMessage().split()
        if words[:1] == ["server"] and words[2:3] == ["on"]:
            self._control.say(url=words[3].rstrip(","))
            logging.getLogger(record.name).removeHandler(self)


def server(control: Control, path: str) -> None:
    """What `python -m dreamlake.lakeshore server start` is, with its log in a file."""
    home = Path(path).parent
    for name in [name for name in os.environ if name.startswith("LAKESHORE_")]:
        del os.environ[name]
    os.environ["LAKESHORE_HOME"] = str(home)
    log = os.open(home / "server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, sys.stderr.fileno())
    logging.getLogger("dreamlake.lakeshore.server").addHandler(_Started(control))
    sys.argv = ["lakeshore", "server", "start", "--port", "0", "--db", path]
    runpy.run_module("dreamlake.lakeshore", run_name="__main__", alter_sys=True)


# --- bare requests --------------------------------------------------------------------------------------------------


def _client(connections: int | None) -> httpx.AsyncClient:
    """A client with the settings that the plane's has, one pool of its two."""
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections, keepalive_expiry=60.0)
    headers = {"content-type": CONTENT_TYPE, "accept": CONTENT_TYPE}
    return httpx.AsyncClient(headers=headers, timeout=httpx.Timeout(90.0, pool=None), limits=limits, trust_env=False)


async def bare(plane: Plane, count: int) -> dict[str, Any]:
    """Posts to a route that does nothing, one after the other on one connection; the seconds of each."""
    url, body = f"{_url(plane)}/healthz", encode({"items": []})
    took: list[float] = []
    async with _client(1) as client:
        for _ in range(20 + count):
            started = time.perf_counter()
            response = await client.post(url, content=body)
            took.append(time.perf_counter() - started)
            assert response.status_code == 200
    return {"seconds": took[20:]}


async def one_by_one(plane: Plane, count: int, backend: str) -> dict[str, Any]:
    """`count` submits at once, each a request of its own; the seconds until all are answered."""
    url = f"{_url(plane)}/v1/producer/submit"

    async def one(n: int) -> None:
        body = encode(encode_submit(plane.submission("jobs", BODY)))
        response = await client.post(url, content=body)
        assert response.status_code == 200
        assert decode(response.content, url)["invocation_id"]

    async with _client(MAX_CONNECTIONS) as client:
        await together(backend, one, range(MAX_CONNECTIONS))
        started = time.perf_counter()
        await together(backend, one, range(count))
        return {"seconds": time.perf_counter() - started}


async def single_awaits(plane: Plane, ids: list[str], backend: str) -> dict[str, Any]:
    """Waits for all of `ids` at once, each by long polls of its own; the process' seconds of CPU meanwhile."""
    url = f"{_url(plane)}/v1/producer/await"
    requests = 0

    async def one(id: str) -> None:
        nonlocal requests
        state = "pending"
        while state == "pending":
            requests += 1
            response = await client.post(url, content=encode({"invocation_id": id, "timeout_s": 60.0}))
            state = decode(response.content, url)["state"]
        assert state == "succeeded", state

    async with _client(None) as client:
        cpu = time.process_time()
        await together(backend, one, ids)
        return {"cpu": time.process_time() - cpu, "requests": requests}


def _url(plane: Plane) -> str:
    return str(getattr(plane, "url", ""))


# --- the plane ------------------------------------------------------------------------------------------------------


async def bursts(plane: Plane, count: int, times: int, backend: str) -> dict[str, Any]:
    """`count` submits at once, `times` times; the seconds of all together, after a first time that is not counted."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)

    async def one(n: int) -> None:
        await jobs_queue.submit(dls.thunk(jobs.noop, n))

    async with plane:
        await together(backend, one, range(count))
        started = time.perf_counter()
        for _ in range(times):
            await together(backend, one, range(count))
        return {"seconds": time.perf_counter() - started}


async def round_trips(plane: Plane, count: int, width: int) -> dict[str, Any]:
    """`width` tasks, each with one call at a time; the seconds of all `count`."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)

    async def one(n: int) -> None:
        assert await jobs_queue.call(dls.thunk(jobs.noop, n)) == n

    async with plane:
        await spread(one, width, width)
        return {"seconds": await spread(one, count, width)}


async def results(plane: Plane, ids: list[str], backend: str) -> dict[str, Any]:
    """Waits for all of `ids` at once; the requests that it took, and the process' seconds of CPU."""
    jobs_queue = dls.Queue("jobs", dispatch=plane)
    async with plane:
        client = getattr((await plane._engines.get()).store, "client")  # noqa: B009
        requests, cpu = client.requests, time.process_time()
        await together(backend, jobs_queue.result, ids)
        return {"cpu": time.process_time() - cpu, "requests": client.requests - requests}


async def spaced(plane: Plane, count: int, pause: float) -> dict[str, Any]:
    """Submits one invocation after the other, with a pause between them; when each submit began."""
    began: dict[str, float] = {}
    for _ in range(count):
        now = time.time()
        began[await plane.submit("jobs", BODY)] = now
        await anyio.sleep(pause)
    return {"began": began}


async def crowd(control: Control, path: str, count: int) -> None:
    """`count` workers by hand, each with one poll or one claim at a time; told to, it says what came when."""
    claimed: dict[str, float] = {}

    async def one(name: str) -> None:
        while True:
            for found in await plane.claim(["jobs"], name, timeout=None):
                claimed[found.id] = time.time()
                await plane.finish(Fence(found.id, name, found.attempt), "succeeded", result=NONE)

    async with plane_at(path) as plane, anyio.create_task_group() as group:
        for n in range(count):
            group.start_soon(one, f"crowd-{os.getpid()}-{n}")
        control.say(ready=True)
        while True:
            await control.next()
            control.say(claimed=claimed)
            claimed.clear()


COMMANDS.update({fn.__name__: fn for fn in (bare, one_by_one, single_awaits, bursts, round_trips, results, spaced)})
HTTP_ROLES: Mapping[str, Any] = {**ROLES, "server": server, "crowd": crowd}

if __name__ == "__main__":
    main(HTTP_ROLES, (*SYNC_ROLES, server))
