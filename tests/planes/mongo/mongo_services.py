"""The services behind the plane as processes of our own: a MongoDB-compatible server, and Redis. Also for the benchmarks.

LAKESHORE_TEST_MONGODB_URL and LAKESHORE_TEST_REDIS_URL name running ones to use instead. Without them the servers are
found by LAKESHORE_TEST_SECANTUS, the path of `secantusd-py` (see install.py), and as `redis-server` on the PATH.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT = 60.0
"""Seconds that a service gets to start or to end."""


class ServiceAbsent(Exception):
    """A service that is nowhere to be found; the text says how to have it."""


def free_port() -> int:
    """A port for later, or for a server that is started again: below those that the system gives to whoever asks for
    any, or to whoever connects, since one of these might be another's by then."""
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", random.randrange(15_000, 30_000))) as free:
            return int(free.getsockname()[1])


class Service:
    """A server process at a port that stays the same when it is started again, over files in a folder of its own."""

    scheme = ""

    def __init__(self, folder: Path, *options: str) -> None:
        self.folder, self.options, self.port = folder, options, free_port()
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def command(self) -> list[str]:
        raise AssertionError

    def start(self) -> None:
        """Come back when it answers at its port."""
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                self.command(), cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        until = time.monotonic() + LIMIT
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > until:
                text = (self.folder / "log").read_text(errors="replace")
                self.kill()
                raise AssertionError(f"{self.command()[0]} does not answer at port {self.port}:\n{text}")
            time.sleep(0.01)

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5.0) as connection:
            return self._greet(connection)
        return False

    def _greet(self, connection: socket.socket) -> bool:
        return True

    def pause(self) -> None:
        """Answer nothing until `go_on`; connections stay."""
        os.kill(self.pid, signal.SIGSTOP)

    def go_on(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and its end."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(LIMIT)
            self._process = None


class Secantus(Service):
    scheme = "mongodb"

    def command(self) -> list[str]:
        place = ["--host", "127.0.0.1", "--port", str(self.port), "--storage-path", str(self.folder / "data")]
        return [secantus(), *place, "--cache-size", "256M", *self.options]


class Redis(Service):
    scheme = "redis"

    def command(self) -> list[str]:
        place = ["--bind", "127.0.0.1", "--port", str(self.port), "--dir", str(self.folder), "--save", ""]
        return [redis_server(), *place, "--appendonly", "yes", "--appendfsync", "everysec", *self.options]

    def _greet(self, connection: socket.socket) -> bool:
        """Not before it has read its file; a wrong password is an answer too."""
        connection.sendall(b"PING\r\n")
        return not connection.recv(100).startswith(b"-LOADING")


def secantus() -> str:
    path = os.environ.get("LAKESHORE_TEST_SECANTUS")
    if path and Path(path).exists():
        return path
    raise ServiceAbsent(
        "a MongoDB-compatible server: run `python tests/planes/mongo/install_mongo.py DIR` and set "
        "LAKESHORE_TEST_SECANTUS=DIR/bin/secantusd-py, or set LAKESHORE_TEST_MONGODB_URL"
    )


def redis_server() -> str:
    if path := shutil.which("redis-server"):
        return path
    raise ServiceAbsent("Redis: install redis-server, or set LAKESHORE_TEST_REDIS_URL")


@contextmanager
def running(service: Service) -> Iterator[None]:
    """The service, started, and its end."""
    service.start()
    try:
        yield
    finally:
        service.kill()


@contextmanager
def _running_here(kind: type[Service]) -> Iterator[str]:
    """The address of a service of our own, over a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix=f"{kind.scheme}-", ignore_cleanup_errors=True) as folder:
        service = kind(Path(folder))
        with running(service):
            yield service.url


@contextmanager
def mongo_url() -> Iterator[str]:
    """The address of a MongoDB server, without a database."""
    if given := os.environ.get("LAKESHORE_TEST_MONGODB_URL"):
        yield given
        return
    with _running_here(Secantus) as url:
        yield url


@contextmanager
def redis_url() -> Iterator[str]:
    """The address of a Redis."""
    if given := os.environ.get("LAKESHORE_TEST_REDIS_URL"):
        yield given
        return
    with _running_here(Redis) as url:
        yield url


def in_database(url: str, name: str) -> str:
    """The same server's database `name`."""
    scheme, netloc, _, query, _ = urlsplit(url)
    return urlunsplit((scheme, netloc, f"/{name}", query, ""))


def through_port(url: str, port: int, *options: str) -> str:
    """The same address through a proxy at a port of this machine, with more options."""
    scheme, netloc, path, query, _ = urlsplit(url)
    user, at, _ = netloc.rpartition("@")
    if scheme == "mongodb":
        options = ("directConnection=true", *options)  # or the driver asks the server where it is, and goes there
    return urlunsplit((scheme, f"{user}{at}127.0.0.1:{port}", path, "&".join(filter(None, [query, *options])), ""))


def port_of(url: str) -> int:
    """The port of a server of this machine, for a proxy before it."""
    port = urlsplit(url).port
    return port or {"mongodb": 27017, "redis": 6379}[urlsplit(url).scheme]
