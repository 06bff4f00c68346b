"""The server as foreign clients see it: msgpack over HTTP and nothing of our own client in between.

`api` is the server in this process and event loop, and the same behind a socket in a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import msgpack
import pytest
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from anyio.abc import TaskGroup

MSGPACK = "application/x-msgpack"
MB = 1 << 20
PATIENCE = 20.0
"""Seconds after which whatever should have happened has not."""

SUBMIT, AWAIT, CANCEL = "/v1/producer/submit", "/v1/producer/await", "/v1/producer/cancel"
SUBMIT_MANY, AWAIT_MANY = "/v1/producer/submit-many", "/v1/producer/await-many"
POLL, ACK, CHUNK = "/v1/daemon/poll", "/v1/daemon/ack", "/v1/daemon/result-chunk"
ACK_MANY, CHUNKS = "/v1/daemon/ack-many", "/v1/daemon/result-chunks"
HEARTBEAT, RELEASE, RETRY = "/v1/daemon/heartbeat", "/v1/daemon/release", "/v1/daemon/retry"
INVOCATIONS, QUEUES = "/v1/producer/invocations", "/v1/producer/queues"
REAP, PURGE = "/v1/admin/reap", "/v1/admin/purge"

NO_MSGPACK = b"\xc1\xdd\xff\xff\xff\xff not msgpack"
"""What a decoder of user values would choke on."""


def stream_of(id: str) -> str:
    return f"{INVOCATIONS}/{id}/result/stream"


def pack(fields: Any) -> bytes:
    return bytes(msgpack.packb(fields))


def unpack(body: bytes) -> Any:
    return msgpack.unpackb(body, strict_map_key=False)


class Answer:
    """Status, headers and fields of an answer."""

    def __init__(self, response: httpx.Response) -> None:
        self.status, self.headers, self.body = response.status_code, response.headers, response.content
        self.type = response.headers.get("content-type", "").partition(";")[0]

    @property
    def fields(self) -> dict[str, Any]:
        assert self.type == MSGPACK, (self.status, self.type, self.body[:300])
        fields = unpack(self.body)
        assert isinstance(fields, dict)
        return fields

    @property
    def error(self) -> tuple[int, str]:
        """Status and type; that the error has both and a sentence is checked here for all."""
        error = self.fields["error"]
        assert isinstance(error["type"], str)
        assert error["type"]
        assert isinstance(error["message"], str)
        assert error["message"]
        return self.status, error["type"]

    @property
    def message(self) -> str:
        return str(self.fields["error"]["message"])

    def __repr__(self) -> str:
        return f"<{self.status} {self.body[:300]!r}>"


class Api:
    """Raw requests to one server."""

    def __init__(self, client: httpx.AsyncClient, token: str | None = None, prefix: str = "") -> None:
        self.client, self._prefix = client, prefix
        self._headers = {} if token is None else {"authorization": f"Bearer {token}"}

    def with_token(self, token: str | None) -> Api:
        return Api(self.client, token, self._prefix)

    def within(self, namespace: str) -> Api:
        """The same, with the namespace in the path."""
        api = Api(self.client, None, f"/v1/namespaces/{namespace}")
        api._headers = self._headers
        return api

    def path(self, path: str) -> str:
        return self._prefix + path.removeprefix("/v1") if self._prefix else path

    def headers(self, more: dict[str, str] | None = None) -> dict[str, str]:
        return {"content-type": MSGPACK, **self._headers, **(more or {})}

    async def ask(self, path: str, fields: Any = None, /, headers: dict[str, str] | None = None) -> Answer:
        """A POST, whatever comes of it."""
        return await self.send("POST", path, pack({} if fields is None else fields), headers)

    async def send(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, **more: Any
    ) -> Answer:
        with anyio.fail_after(PATIENCE * 2):
            response = await self.client.request(
                method, self.path(path), content=body, headers=self.headers(headers), timeout=PATIENCE * 2, **more
            )
        return Answer(response)

    async def do(self, path: str, fields: Any = None, /) -> dict[str, Any]:
        """A POST that succeeds; the answer's fields."""
        answer = await self.ask(path, fields)
        assert answer.status == 200, answer
        return answer.fields

    async def get(self, path: str, **query: Any) -> dict[str, Any]:
        answer = await self.send("GET", path, params=query)
        assert answer.status == 200, answer
        return answer.fields

    # What the tests say all the time

    async def submit(self, queue: str, blob: bytes = b"x", id: str | None = None, **more: Any) -> str:
        id = new_id() if id is None else id
        fields = {"invocation_id": id, "queue": queue, "args_blob": blob, **more}
        answer = await self.do(SUBMIT, fields)
        assert isinstance(answer["invocation_id"], str)
        return answer["invocation_id"]

    async def poll(self, queue: str, worker: str = "w", **more: Any) -> list[dict[str, Any]]:
        """The bodies of the commands that a poll gives out; without `timeout_s` it does not wait."""
        fields = {"worker_id": worker, "queue": queue, "timeout_s": 0, **more}
        return [command["body"] for command in (await self.do(POLL, fields))["commands"]]

    async def claim(self, queue: str, worker: str = "w", **more: Any) -> dict[str, Any]:
        """The one claim that a poll gives out."""
        (body,) = await self.poll(queue, worker, **more)
        return body

    async def running(self, queue: str, worker: str = "w", lease_s: float | None = None, **more: Any) -> str:
        """Submit and claim one; its id."""
        id = await self.submit(queue, **more)
        assert (await self.claim(queue, worker, lease_s=lease_s))["invocation_id"] == id
        return id

    async def outcome(self, id: str, timeout_s: float = 0) -> dict[str, Any]:
        return await self.do(AWAIT, {"invocation_id": id, "timeout_s": timeout_s})

    async def row(self, id: str) -> dict[str, Any]:
        return await self.get(f"{INVOCATIONS}/{id}")

    async def frames(self, id: str, **query: Any) -> bytes:
        """The whole body of a stream, which must end."""
        answer = await self.send("GET", stream_of(id), params=query)
        assert answer.status == 200, answer
        assert answer.type == "application/x-msgpack-stream"
        return answer.body

    @contextlib.asynccontextmanager
    async def reading(self, id: str, **query: Any) -> AsyncIterator[Reader]:
        """A stream while it is being read."""
        url, timeout = self.path(stream_of(id)), PATIENCE
        async with self.client.stream("GET", url, params=query, headers=self._headers, timeout=timeout) as response:
            assert response.status_code == 200, await response.aread()
            chunks: Any = response.aiter_raw()
            async with contextlib.aclosing(chunks):
                yield Reader(chunks)


class Reader:
    """The bytes of a stream as they come."""

    def __init__(self, chunks: AsyncIterator[bytes]) -> None:
        self._chunks, self._held = chunks, b""

    async def take(self, wanted: bytes) -> None:
        """The next bytes of the stream are these."""
        with anyio.fail_after(PATIENCE):
            while len(self._held) < len(wanted):
                self._held += await anext(self._chunks)
        assert self._held[: len(wanted)] == wanted
        self._held = self._held[len(wanted) :]

    async def end(self) -> bytes:
        """What comes until the end."""
        with anyio.fail_after(PATIENCE):
            async for chunk in self._chunks:
                self._held += chunk
        rest, self._held = self._held, b""
        return rest


async def still_serves(api: Api) -> None:
    """The whole way of one invocation."""
    queue = "check-" + new_id()
    id = await api.submit(queue, b"x")
    assert (await api.claim(queue))["invocation_id"] == id
    await api.do(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"f"})
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r"})
    assert (await api.outcome(id, PATIENCE))["result_blob"] == b"r"
    assert await api.frames(id) == b"f"


# --- several requests at once -----------------------------------------------------------------------------------------


class Later:
    """The answer to a request that is still under way."""

    def __init__(self) -> None:
        self.done, self.value = anyio.Event(), None

    async def run(self, request: Any) -> None:
        self.value = await request
        self.done.set()

    async def __call__(self) -> Any:
        with anyio.fail_after(PATIENCE):
            await self.done.wait()
        return self.value


@contextlib.asynccontextmanager
async def meanwhile(*requests: Any) -> AsyncIterator[list[Later]]:
    """The requests under way; what has not ended with the block is left by its client."""
    async with anyio.create_task_group() as group:
        laters = [Later() for _ in requests]
        for later, request in zip(laters, requests, strict=True):
            group.start_soon(later.run, request)
        yield laters
        group.cancel_scope.cancel()


# --- in this process -------------------------------------------------------------------------------------------------


class AppTransport(httpx.AsyncBaseTransport):
    """Requests to an ASGI application as a server of HTTP brings them: answers stream, and closing one is a disconnect."""

    def __init__(self, app: Any, group: TaskGroup) -> None:
        self._app, self._group = app, group
        self.errors: list[BaseException] = []
        self.latest: Exchange | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.latest = exchange = Exchange(await request.aread())
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": request.url.path,
            "raw_path": request.url.raw_path.partition(b"?")[0],
            "query_string": request.url.query,
            "root_path": "",
            "headers": [(name.lower(), value) for name, value in request.headers.raw],
            "client": ("127.0.0.1", 50_000),
            "server": ("127.0.0.1", 8750),
        }
        self._group.start_soon(self._run, exchange, scope)
        try:
            await exchange.begun.wait()
        except BaseException:
            exchange.abandon()
            raise
        return httpx.Response(exchange.status, headers=exchange.headers, stream=AnswerStream(exchange))

    async def _run(self, exchange: Exchange, scope: Any) -> None:
        try:
            await self._app(scope, exchange.receive, exchange.send)
        except Exception as exc:
            self.errors.append(exc)
        finally:
            exchange.leave()
            exchange.begun.set()
            exchange.over.set()


class Exchange:
    """One request and its answer, between a client and an application.

    begun: the answer has; over: the application is done; delivered: the client was there when the answer began.
    """

    def __init__(self, body: bytes) -> None:
        self._pieces = [body[:100], body[100:]] if len(body) > 100 else [body]
        self.begun, self.over, self._gone = anyio.Event(), anyio.Event(), anyio.Event()
        self.delivered = False
        self.status, self.headers = 500, list[tuple[bytes, bytes]]()
        self._send, self.chunks = anyio.create_memory_object_stream[bytes](4)

    @property
    def disconnected(self) -> bool:
        """As uvicorn's own cycle of a request says it, before the application can be told."""
        return self._gone.is_set()

    def leave(self) -> None:
        self._gone.set()
        self._send.close()

    def abandon(self) -> None:
        """The client leaves, and reads no more."""
        self.leave()
        self.chunks.close()

    async def receive(self) -> dict[str, Any]:
        if self._pieces:
            piece = self._pieces.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], [*message["headers"]]
            self.delivered = not self._gone.is_set()
            self.begun.set()
            return
        with contextlib.suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # nobody reads any more
            if message.get("body"):
                await self._send.send(message["body"])
        if not message.get("more_body"):
            self.leave()


class AnswerStream(httpx.AsyncByteStream):
    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._exchange.chunks

    async def aclose(self) -> None:
        self._exchange.abandon()


@contextlib.asynccontextmanager
async def serving_here(plane: Any, **options: Any) -> AsyncIterator[Api]:
    """The application over a plane, from its startup to its shutdown, in this event loop; then the plane is closed."""
    app: Any = create_app(plane, **options)
    to_app, from_tests = anyio.create_memory_object_stream[dict[str, Any]](2)
    to_tests, from_app = anyio.create_memory_object_stream[dict[str, Any]](2)
    try:
        with to_app, from_tests, to_tests, from_app:
            async with anyio.create_task_group() as group:
                group.start_soon(
                    app, {"type": "lifespan", "asgi": {"version": "3.0"}}, from_tests.receive, to_tests.send
                )
                await to_app.send({"type": "lifespan.startup"})
                assert (await from_app.receive())["type"] == "lifespan.startup.complete"
                transport = AppTransport(app, group)
                async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8750") as client:
                    yield Api(client)
                with anyio.fail_after(PATIENCE):
                    await to_app.send({"type": "lifespan.shutdown"})
                    assert (await from_app.receive())["type"] == "lifespan.shutdown.complete"
                group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True):
            await plane.aclose()
    assert transport.errors == [], "no exception leaves the application"


# --- in a process of its own -----------------------------------------------------------------------------------------


class Server:
    """A process that says where it serves; all that it writes to stderr is in `err`."""

    def __init__(self, *command: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
        self._popen = subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            env=kept,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            said = wait_until_sync(self._started, 60, "the line that a server starts with")
        except BaseException:
            self.close()
            raise
        self.url = f"http://127.0.0.1:{said}"
        self.port, self.pid = int(said), self._popen.pid

    def _read(self) -> None:
        assert self._popen.stderr is not None
        with self._popen.stderr as stream:
            self._lines.extend(stream)  # extend takes the lines as they come

    def _started(self) -> str | None:
        if self._popen.poll() is not None:
            self._reader.join(5)
            pytest.fail(f"the server ended with code {self._popen.returncode}:\n{self.err}")
        found = re.search(r" on http://[^ ,]*:(\d+)", self.err)
        return found and found[1]

    @property
    def err(self) -> str:
        return "".join(self._lines)

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def memory(self, what: str = "VmRSS") -> int:
        """Bytes of memory of the process now, or at most so far (VmHWM)."""
        with open(f"/proc/{self.pid}/status") as file:
            (line,) = (line for line in file if line.startswith(what + ":"))
        return int(line.split()[1]) << 10

    def stop(self, number: int = signal.SIGTERM, timeout: float = 30) -> int:
        self._popen.send_signal(number)
        code = self._popen.wait(timeout)
        self._reader.join(5)
        return code

    def close(self) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        self._reader.join(5)

    @contextlib.asynccontextmanager
    async def api(self, token: str | None = None) -> AsyncIterator[Api]:
        limits = httpx.Limits(max_connections=500, max_keepalive_connections=100)
        async with httpx.AsyncClient(base_url=self.url, limits=limits, trust_env=False) as client:
            yield Api(client, token)


@contextlib.contextmanager
def server_process(db: Path, *options: str, tokens: Path | None = None) -> Iterator[Server]:
    """`lakeshore server start` over a file, on a port that is free."""
    command = ["server", "start", "--port", "0", "--db", str(db)]
    command += ["--token-file", str(tokens or db.with_name("no-tokens")), *options]
    with contextlib.closing(Server("-m", "dreamlake.lakeshore", *command)) as made:
        yield made


@contextlib.contextmanager
def script_process(script: str, *args: str) -> Iterator[Server]:
    """A script that serves and says so in the same way."""
    with contextlib.closing(Server("-c", script, *args)) as made:
        yield made


# --- bare connections -----------------------------------------------------------------------------------------------

TYPE = "Content-Type: application/x-msgpack"


class Wire:
    """A bare connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Status and fields of the answer, after which the server closes or waits for the next request."""
        with self.socket.makefile("rb") as file:
            status = int(file.readline().split()[1])
            length = 0
            while (line := file.readline()) not in (b"\r\n", b""):
                name, _, value = line.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            return status, unpack(file.read(length))

    def closed(self) -> bool:
        """Whether the server closes the connection, in time."""
        try:
            while self.socket.recv(65536):
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True


def head(*lines: str, path: str = SUBMIT, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", f"Host: {host}", *lines, "", ""]).encode()


# --- fixtures; a module of tests takes them by assigning them to names of its own -------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A process that all tests of a module share."""
    with server_process(tmp_path_factory.mktemp("served") / "plane.db") as made:
        yield made
        assert made.alive
        assert "Traceback" not in made.err, made.err


@pytest.fixture(scope="module", params=["asyncio", "trio", "socket"])
def place(request: pytest.FixtureRequest) -> str:
    """Where the server runs: in this process on one of the loops, or in its own."""
    return str(request.param)


SOCKET = pytest.mark.parametrize("place", ["socket"], indirect=True)
"""For tests of the process alone, which is the same whatever the loop here."""


@pytest.fixture(scope="module")
def anyio_backend(place: str) -> str:
    return "asyncio" if place == "socket" else place


@pytest.fixture
async def api(place: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Api]:
    if place == "socket":
        async with request.getfixturevalue("server").api() as api:
            yield api
    else:
        async with serving_here(dls.Dispatch(tmp_path / "plane.db")) as api:
            yield api


_numbers = itertools.count()


@pytest.fixture
def queue() -> str:
    """A queue of which nobody else knows."""
    return f"queue-{next(_numbers)}-{new_id()}"
