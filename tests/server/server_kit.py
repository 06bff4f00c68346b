"""Three ways to ask a server, from near to far.

`Asked` drives the application by hand, as an ASGI server would: when the client leaves is the test's to say.
`client_of(app)` is httpx on top of the application, in this event loop. It cannot stream, nor leave.
`served(make_plane)` is uvicorn on a loopback socket, in a thread and an event loop of its own: for what only real
connections show. Its plane lives there; `Served.call` runs something beside it.

A test module takes the fixtures (`plane`, in a file and in memory, and `client` of an application over it) by
`plane, client = server_kit.plane, server_kit.client`.
"""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import anyio
import httpx
import pytest
import uvicorn
from anyio.from_thread import start_blocking_portal
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.protocol.fields import decode, encode
from dreamlake.lakeshore.planes.protocol.routes import CONTENT_TYPE
from dreamlake.lakeshore.server.app import ControlPlane, create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from pathlib import Path

    from anyio.from_thread import BlockingPortal

    from dreamlake.lakeshore.planes.plane import Plane

PATIENCE = 20.0
"""Seconds after which a test that should have ended hangs."""
HERE = "http://127.0.0.1:8750"


class Answer:
    """An answer's status, headers and body; `fields` where it is msgpack."""

    def __init__(self, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
        self.status, self.body = status, body
        self.headers = {name.decode(): value.decode() for name, value in headers}

    @property
    def fields(self) -> dict[str, Any]:
        assert self.headers["content-type"] == CONTENT_TYPE, self
        return decode(self.body, "a test")

    @property
    def error(self) -> tuple[int, str, str]:
        """The status, the error's type, and its sentence."""
        error = self.fields["error"]
        assert error["request_id"] == self.headers["x-request-id"]
        return self.status, error["type"], error["message"]

    def __repr__(self) -> str:
        return f"<{self.status} {self.headers} {self.body[:300]!r}>"


# --- by hand ----------------------------------------------------------------------------------------------------------


class Asked:
    """One request: a GET where there are no `fields`, which may be bytes or a list of pieces of a body as well.

    `leave` is the client's going; from then on the server drops what is sent, or fails where `deaf`.
    """

    def __init__(self, app: Any, path: str, fields: Any = None, *, deaf: Any = False, **headers: str) -> None:
        path, _, query = path.partition("?")
        more = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "GET" if fields is None else "POST",
            "path": path,
            "query_string": query.encode(),
            "headers": [(b"host", b"127.0.0.1:8750"), (b"content-type", CONTENT_TYPE.encode()), *more],
            "server": ("127.0.0.1", 8750),
        }
        body = fields if isinstance(fields, list) else [fields if isinstance(fields, bytes) else encode(fields or {})]
        self._app, self._deaf, self.pieces = app, deaf, [] if fields is None else body
        self._gone, self._over = anyio.Event(), anyio.Event()
        self.status, self.headers, self.chunks = 0, list[tuple[bytes, bytes]](), list[bytes]()
        self.complete = False
        """Whether the whole answer was sent."""
        self.receiving: Callable[[], Awaitable[dict[str, Any]]] = self.receive
        """What the application receives by, for a test to replace."""

    @property
    def disconnected(self) -> bool:
        """What uvicorn's object of this place is asked."""
        return self._gone.is_set()

    async def receive(self) -> dict[str, Any]:
        if self.pieces:
            piece = self.pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self.pieces)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if self._gone.is_set():
            if self._deaf:
                raise OSError("nobody hears")
            return
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], message["headers"]
            return
        self.chunks.append(message["body"])
        self.complete = not message["more_body"]

    async def run(self) -> None:
        """Until the application is through with it."""
        try:
            await self._app(self.scope, self.receiving, self.send)
        finally:
            self._gone.set()
            self._over.set()

    def leave(self) -> None:
        self._gone.set()

    async def over(self) -> None:
        with anyio.fail_after(PATIENCE):
            await self._over.wait()

    async def answer(self) -> Answer:
        """The answer, which must come."""
        await self.over()
        assert self.complete, "the application left the request without an answer"
        return Answer(self.status, self.headers, b"".join(self.chunks))

    async def fields(self) -> dict[str, Any]:
        """The fields of an answer of 200."""
        answer = await self.answer()
        assert answer.status == 200, answer
        return answer.fields


# --- in this event loop -----------------------------------------------------------------------------------------------


class Client:
    """Raw requests over any transport of httpx."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def post(self, path: str, fields: Any = None, /, **headers: str) -> Answer:
        """Fields are packed, bytes and pieces go as they are."""
        content = fields if isinstance(fields, bytes) or hasattr(fields, "__aiter__") else encode(fields or {})
        named = {"content-type": CONTENT_TYPE} | {name.replace("_", "-"): value for name, value in headers.items()}
        with anyio.fail_after(PATIENCE):
            found = await self.http.post(path, content=content, headers=named, timeout=PATIENCE)
        return Answer(found.status_code, found.headers.raw, found.content)

    async def get(self, path: str, query: dict[str, Any] | None = None, /, **headers: str) -> Answer:
        url = f"{path}?{urlencode(query)}" if query else path
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with anyio.fail_after(PATIENCE):
            found = await self.http.get(url, headers=named, timeout=PATIENCE)
        return Answer(found.status_code, found.headers.raw, found.content)

    async def do(self, path: str, fields: Any = None, /) -> dict[str, Any]:
        """The fields of an answer of 200."""
        answer = await self.post(path, fields)
        assert answer.status == 200, answer
        return answer.fields


@contextlib.asynccontextmanager
async def client_of(app: Any, base_url: str = HERE, **headers: str) -> AsyncIterator[Client]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers) as http:
        yield Client(http)


@pytest.fixture(params=["file", "memory"])
async def plane(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[dls.Dispatch]:
    where = tmp_path / "plane.db" if request.param == "file" else ":memory:"
    async with dls.Dispatch(where) as plane:
        yield plane


@pytest.fixture
async def client(plane: dls.Dispatch) -> AsyncIterator[Client]:
    async with client_of(create_app(plane)) as client:
        yield client


# --- behind a socket --------------------------------------------------------------------------------------------------


class Served:
    """A server that runs in a thread of its own."""

    def __init__(self, portal: BlockingPortal, app: ControlPlane, plane: Plane, port: int) -> None:
        self._portal, self.app, self.plane, self.port = portal, app, plane, port
        self.url = f"http://127.0.0.1:{port}"

    def call(self, fn: Callable[..., Awaitable[Any]], *args: Any) -> Any:
        """Run something on the server's event loop; what it gives."""
        return self._portal.call(fn, *args)

    async def drain(self) -> None:
        self.app.drain()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with httpx.AsyncClient(base_url=self.url) as http:
            yield Client(http)

    async def connect(self, head: str, body: bytes = b"", **headers: str) -> anyio.abc.SocketStream:
        """A connection on which a request has begun: `head` is its method and path."""
        stream = await anyio.connect_tcp("127.0.0.1", self.port)
        lines = [f"{head} HTTP/1.1", f"host: 127.0.0.1:{self.port}", f"content-type: {CONTENT_TYPE}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        await stream.send("\r\n".join([*lines, "", ""]).encode() + body)
        return stream

    async def ask(self, path: str, fields: Any) -> anyio.abc.SocketStream:
        """A connection on which a whole POST was sent."""
        body = encode(fields)
        return await self.connect(f"POST {path}", body, content_length=str(len(body)))


@contextlib.contextmanager
def served(make_plane: Callable[[], Plane], **options: Any) -> Iterator[Served]:
    """The options are those of `create_app`. The server has ended, and its plane is closed, when the block is left."""
    with (
        start_blocking_portal("asyncio", {"use_uvloop": True}) as portal,
        portal.wrap_async_context_manager(_running(portal, make_plane, options)) as running,
    ):
        yield running


@contextlib.asynccontextmanager
async def _running(
    portal: BlockingPortal, make_plane: Callable[[], Plane], options: dict[str, Any]
) -> AsyncIterator[Served]:
    plane = make_plane()
    app = create_app(plane, **options)
    sock = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, http="httptools", ws="none", lifespan="on", log_config=None, access_log=False, timeout_graceful_shutdown=10
    )
    server = uvicorn.Server(config)
    ended = anyio.Event()
    async with plane, anyio.create_task_group() as group:

        async def run() -> None:
            await server.serve([sock])
            ended.set()

        group.start_soon(run)
        await wait_until(lambda: server.started, PATIENCE, "the server's start")
        try:
            yield Served(portal, app, plane, sock.getsockname()[1])
        finally:
            app.drain()
            server.should_exit = True
            with anyio.CancelScope(shield=True):  # a test that failed must not cancel it
                await ended.wait()
