"""What the tests of the HTTP plane share: servers in this process and in others, and planes that speak to them."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from signal import SIGTERM
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import httpx
import pytest
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import across
from dreamlake.lakeshore.server.app import create_app

if TYPE_CHECKING:
    from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping

HERE = Path(__file__).resolve().parent
LIMIT = 60.0
"""Seconds that a process gets to start or to end."""


def environment(**more: str) -> dict[str, str]:
    """Ours without the package's own variables, with the modules of these tests importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **more}


# In this process -----------------------------------------------------------------------------------------------------


@asynccontextmanager
async def served(inner: dls.Dispatch, **options: Any) -> AsyncIterator[dls.HttpDispatch]:
    """A plane whose server is an ASGI application over `inner`, in this process, without a socket."""
    app = create_app(inner, **options)
    plane = dls.HttpDispatch("http://127.0.0.1", transport=httpx.ASGITransport(app=app))
    try:
        async with plane:
            yield plane
    finally:
        await across("asyncio", app.endpoint.close)
        await inner.aclose()


@asynccontextmanager
async def served_fresh(clock: Callable[[], float] | None = None, **options: Any) -> AsyncIterator[dls.HttpDispatch]:
    """The same over a new and empty plane in memory."""
    inner = dls.Dispatch(":memory:") if clock is None else dls.Dispatch(":memory:", clock=clock)
    async with served(inner, **options) as plane:
        yield plane


async def read_into(got: list[Any], stream: AsyncIterable[Any]) -> None:
    """Append the values one by one: what came before an exception is there."""
    async for value in stream:
        got.append(value)  # noqa: PERF401 -- see above


def requests_of(plane: dls.HttpDispatch) -> int:
    """How many requests the plane has begun, from all event loops."""
    engines = (slot.value for slot in plane._engines._slots.values())
    return sum(engine.store.client.requests for engine in engines if engine is not None)  # type: ignore[attr-defined]


# In a process of its own ---------------------------------------------------------------------------------------------


class Process:
    """A command line of the package as a process; what it writes to stderr can be looked at while it runs."""

    def __init__(self, *args: object, env: Mapping[str, str] | None = None, cwd: Path = HERE) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, "-W", "error", *map(str, args)],
            cwd=cwd,
            env={**(env or environment())},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self.popen.pid
        self._parts: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self.popen.stdout), ("err", self.popen.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        with stream:
            self._parts[name].extend(stream)  # extend takes the lines as they come

    @property
    def out(self) -> str:
        return "".join(self._parts["out"])

    @property
    def err(self) -> str:
        return "".join(self._parts["err"])

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def says(self, text: str) -> None:
        """Wait until its stderr holds `text`."""

        def said() -> bool:
            if not self.alive and text not in self.err:
                pytest.fail(f"it ended with code {self.popen.returncode} and never said {text!r}:\n{self.err}")
            return text in self.err

        wait_until_sync(said, LIMIT, f"{text!r} in the stderr of {self.popen.args!r}")

    def signal(self, number: int = SIGTERM) -> None:
        self.popen.send_signal(number)

    def ends(self) -> int:
        """Wait until it ends by itself; its exit code."""
        try:
            code = self.popen.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {LIMIT:g} s:\n{self.out}\n{self.err}")
        for reader in self._readers:
            reader.join()
        return code

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.popen.kill()
        self.popen.wait(LIMIT)

    def end(self) -> None:
        self.kill()
        for reader in self._readers:
            reader.join()


class Server(Process):
    """`lakeshore server start` over a file, on a port of its own unless one is given."""

    def __init__(self, db: Path, *options: object, port: int = 0, tokens: Path | None = None) -> None:
        self.db = db
        tokens = tokens or db.with_name("no-tokens")
        command = ["server", "start", "--port", port, "--db", db, "--token-file", tokens, *options]
        super().__init__("-m", "dreamlake.lakeshore", *command)
        try:
            self.port = int(wait_until_sync(self._started, LIMIT, "the line that a server starts with"))
        except BaseException:
            self.end()
            raise

    def _started(self) -> str | None:
        if not self.alive:
            pytest.fail(f"the server ended with code {self.popen.returncode}:\n{self.err}")
        found = re.search(r" on http://[^ ,]*:(\d+)", self.err)
        return found and found[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def server_process(db: Path, *options: object, **more: Any) -> Iterator[Server]:
    server = Server(db, *options, **more)
    try:
        yield server
    finally:
        server.end()


class Processes:
    """Starts processes, and ends those that still run."""

    def __init__(self) -> None:
        self._all: list[Process] = []

    def server(self, db: Path, *options: object, **more: Any) -> Server:
        server = Server(db, *options, **more)
        self._all.append(server)
        return server

    def worker(self, url: str, *options: object, queue: str = "q", **variables: str) -> Process:
        """A worker process of a queue that has begun to claim."""
        command = ["worker", "start", "--queue", queue, "--url", url, *options]
        worker = self.command(*command, **variables)
        worker.says("pickled functions")
        return worker

    def command(self, *args: object, **variables: str) -> Process:
        """A command line of the package."""
        process = Process("-m", "dreamlake.lakeshore", *args, env=environment(**variables))
        self._all.append(process)
        return process

    def end(self) -> None:
        for process in self._all:
            process.end()


# Scripted ------------------------------------------------------------------------------------------------------------


class Seen(NamedTuple):
    """A request that a scripted server was asked."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Script: TypeAlias = "Callable[[Seen], tuple[int, dict[str, str], bytes]]"


class Scripted:
    """A server that answers as its script says, and remembers what it was asked."""

    def __init__(self, script: Script) -> None:
        self.seen: list[Seen] = []
        kit = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(OSError):
                    super().handle_one_request()

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                seen = Seen(self.command, self.path, headers, body)
                kit.seen.append(seen)
                status, fields, answer = script(seen)
                self.send_response(status)
                for name, value in {"content-length": str(len(answer)), **fields}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(answer)

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def end(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def scripted(script: Script) -> Iterator[Scripted]:
    server = Scripted(script)
    try:
        yield server
    finally:
        server.end()


@contextmanager
def unused_port() -> Iterator[int]:
    """A port of the loopback at which nobody listens, nor begins to."""
    with socket.socket() as kept:
        kept.bind(("127.0.0.1", 0))
        yield int(kept.getsockname()[1])
