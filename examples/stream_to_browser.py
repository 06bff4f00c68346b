"""Send the values of a stream to a browser as server-sent events; a browser that reconnects goes on where it stopped.

    python examples/stream_to_browser.py       serves itself, reads the events twice, prints them and ends
    uvicorn stream_to_browser:app              in this folder: open http://127.0.0.1:8000 in a browser

The number of each value is the id of its event. A browser sends the last id that it has seen when it reconnects. Needs the
extra `[server]`.
"""

# ruff: noqa: TC002, TC003 -- an example reads better without a block for type checkers
from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import anyio
import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, StreamingResponse
from starlette.routing import Route

import dreamlake.lakeshore as dls

queue = dls.Queue("progress")

PAGE = """<!doctype html><title>progress</title><pre id="log"></pre><script>
fetch("/jobs", {method: "POST"}).then(answer => answer.json()).then(({id}) => {
  const source = new EventSource(`/jobs/${id}/events`);
  source.onmessage = event => document.getElementById("log").append(event.data + "\\n");
  source.addEventListener("end", () => source.close());
});
</script>"""


@dls.udf(queue="progress")
async def squares(n: int) -> AsyncIterator[dict[str, int]]:
    for i in range(n):
        yield {"n": i, "square": i * i}
        await anyio.sleep(0.05)


async def page(request: Request) -> HTMLResponse:
    return HTMLResponse(PAGE)


async def start_job(request: Request) -> JSONResponse:
    return JSONResponse({"id": await squares.submit(5)}, status_code=202)


async def events(request: Request) -> StreamingResponse:
    """Read the stream of any job, from the value after the last one that the browser has."""
    since = int(request.headers.get("last-event-id", "-1"))
    stream = queue.stream(request.path_params["id"], since=since)

    async def body() -> AsyncIterator[str]:
        async for value in stream:
            yield f"id: {stream.seq}\ndata: {json.dumps(value)}\n\n"
        yield "event: end\ndata:\n\n"

    return StreamingResponse(body(), media_type="text/event-stream")


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncGenerator[None]:
    stop = anyio.Event()
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: dls.run_worker(queue, stop=stop))
        yield
        stop.set()


app = Starlette(
    lifespan=lifespan,
    routes=[
        Route("/", page),
        Route("/jobs", start_job, methods=["POST"]),
        Route("/jobs/{id}/events", events),
    ],
)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home, socket.create_server(("127.0.0.1", 0)) as listener:
        os.environ["LAKESHORE_HOME"] = home
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: server.serve(sockets=[listener]))
            await read_like_a_browser(f"http://127.0.0.1:{listener.getsockname()[1]}")
            server.should_exit = True
        await dls.default_dispatch().aclose()


async def read_like_a_browser(url: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as client:
        id = (await client.post("/jobs")).json()["id"]
        print("all events:", data_of(await client.get(f"/jobs/{id}/events")))
        print("after event 2:", data_of(await client.get(f"/jobs/{id}/events", headers={"last-event-id": "2"})))


def data_of(answer: httpx.Response) -> list[int]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line)["square"] for line in lines]


if __name__ == "__main__":
    anyio.run(main)
