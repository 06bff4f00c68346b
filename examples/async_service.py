"""A web service whose requests wait for a queue, with the worker as one task of the service itself.

    python examples/async_service.py           serves itself, makes some requests, prints the answers and ends
    uvicorn async_service:app                  in this folder: serves until it is stopped

A job outlives the request that asked for it, and the service: its id is all that a later request needs. Needs the extra
`[server]`.
"""

# ruff: noqa: TC002, TC003 -- an example reads better without a block for type checkers
from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.to_thread
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import dreamlake.lakeshore as dls

queue = dls.Queue("primes")


@dls.udf(queue="primes")
async def count_primes(below: int) -> int:
    """An async body runs as a task of the worker; what takes long it hands to a thread."""
    return await anyio.to_thread.run_sync(sieve, below)


def sieve(below: int) -> int:
    flags = bytearray([1]) * below
    flags[:2] = bytes(min(2, below))
    for n in range(2, int(below**0.5) + 1):
        if flags[n]:
            flags[n * n :: n] = bytes(len(range(n * n, below, n)))
    return sum(flags)


async def primes(request: Request) -> JSONResponse:
    """Submit and wait: a client that hangs up cancels its own invocation."""
    below = request.path_params["below"]
    return JSONResponse({"below": below, "primes": await count_primes(below)})


async def start_job(request: Request) -> JSONResponse:
    """Submit only: the answer is the id."""
    return JSONResponse({"id": await count_primes.submit(request.path_params["below"])}, status_code=202)


async def show_job(request: Request) -> JSONResponse:
    """Wait a little for a job of any earlier request."""
    try:
        return JSONResponse({"state": "succeeded", "primes": await queue.result(request.path_params["id"], timeout=20)})
    except TimeoutError:
        return JSONResponse({"state": "pending"}, status_code=202)
    except dls.InvocationNotFound as exc:
        return JSONResponse({"error": str(exc)}, status_code=404)


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    """The worker begins and ends with the service. When it is told to stop it finishes what it runs."""
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: dls.run_worker(queue, concurrency=4, grace=10, stop=stop))
        yield
        stop.set()


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/primes/{below:int}", primes),
        Route("/jobs/{below:int}", start_job, methods=["POST"]),
        Route("/jobs/{id}", show_job),
    ],
)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home, socket.create_server(("127.0.0.1", 0)) as listener:
        os.environ["LAKESHORE_HOME"] = home
        print(f"the plane is {dls.default_dispatch()}")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: server.serve(sockets=[listener]))
            await ask(f"http://127.0.0.1:{listener.getsockname()[1]}")
            server.should_exit = True
        await dls.default_dispatch().aclose()


async def ask(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        for below in (10, 1000, 1_000_000):
            print(f"GET /primes/{below}:", (await client.get(f"/primes/{below}")).json())
        id = (await client.post("/jobs/3000000")).json()["id"]
        print(f"POST /jobs/3000000: {id}")
        print(f"GET /jobs/{id}:", (await client.get(f"/jobs/{id}")).json())
        print("GET /jobs/nobody:", (await client.get("/jobs/nobody")).status_code)


if __name__ == "__main__":
    anyio.run(main)
