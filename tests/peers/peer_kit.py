"""Old peers in virtual environments of their own, and the servers and workers that tests put beside them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import httpx
import pytest
from helpers import wait_until_sync

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent
SEED_SERVER = HERE.parent / "planes" / "http" / "seed_server.py"
LIMIT = 60.0
"""Seconds that a process gets."""


def python_of(version: str) -> Path:
    """The peer's interpreter; without one the test is skipped, or fails where LAKESHORE_TEST_NO_SKIPS=1."""
    folder = os.environ.get("LAKESHORE_TEST_PEERS")
    if folder and (python := Path(folder) / version / "bin" / "python").exists():
        return python
    reason = (
        f"needs dreamlake-lakeshore {version} in an environment of its own: run `python tests/peers/install_peers.py DIR` "
        "and set LAKESHORE_TEST_PEERS=DIR"
    )
    if os.environ.get("LAKESHORE_TEST_NO_SKIPS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def environment(**more: str) -> dict[str, str]:
    """Ours without the package's own variables, with the bodies importable."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LAKESHORE_", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(HERE), "PYTHONDONTWRITEBYTECODE": "1", **more}


class Running(NamedTuple):
    """A process and the files that hold what it writes."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end(self) -> None:
        self.process.terminate()
        try:
            self.process.communicate(timeout=10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()


class Processes:
    """Starts processes that write to files of this folder, and ends those that still run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Running] = []

    def start(
        self, *args: object, cwd: Path | None = None, stdin: int = subprocess.DEVNULL, **variables: str
    ) -> Running:
        out, err = (self.folder / f"{len(self._all)}.{name}" for name in ("out", "err"))
        with out.open("wb") as to_out, err.open("wb") as to_err:
            process = subprocess.Popen(
                [str(arg) for arg in args],
                env=environment(**{"LAKESHORE_HOME": str(self.folder), **variables}),
                cwd=cwd or self.folder,
                stdin=stdin,
                stdout=to_out,
                stderr=to_err,
            )
        self._all.append(Running(process, out, err))
        return self._all[-1]

    def end(self) -> None:
        for running in reversed(self._all):  # the servers last
            running.end()


@contextmanager
def processes(folder: Path) -> Iterator[Processes]:
    made = Processes(folder)
    try:
        yield made
    finally:
        made.end()


class Shell:
    """An interpreter of the peer's that runs scripts, see peer_shell."""

    def __init__(self, started: Processes, python: Path, **variables: str) -> None:
        self._running = started.start(python, HERE / "peer_shell.py", stdin=subprocess.PIPE, **variables)
        self._read = 0

    def run(self, script: str, argv: tuple[Any, ...], plane: dict[str, Any]) -> list[Any]:
        stdin = self._running.process.stdin
        assert stdin is not None
        stdin.write(json.dumps({"script": textwrap.dedent(script), "argv": argv, "plane": plane}).encode() + b"\n")
        stdin.flush()
        answer = wait_until_sync(self._answer, LIMIT, f"what the peer says to\n{script}")
        assert "failed" not in answer, answer["failed"]
        said: list[Any] = answer["said"]
        return said

    def _answer(self) -> Any:
        assert self._running.alive, self._running.err.read_text()
        text = self._running.out.read_text()[self._read :]
        if not text.endswith("\n"):
            return None
        self._read += len(text)
        return json.loads(text)


class Peer:
    """One version of the peer, and the plane that it speaks to."""

    def __init__(self, version: str, started: Processes, url: str, token: str | None = None) -> None:
        self.version, self.python, self.url, self.token = version, python_of(version), url, token
        self.started = started
        self._shell: Shell | None = None

    def run(self, script: str, *argv: Any, **options: Any) -> list[Any]:
        """What `script` says, run in the peer's interpreter; its `plane` is this server, with these options."""
        self._shell = self._shell or Shell(self.started, self.python)
        return self._shell.run(script, argv, {"base_url": self.url, "token": self.token, **options})

    def work(self, queue: str, *options: str) -> Running:
        """A worker process of the peer's own."""
        token = ["--token", self.token] if self.token else []
        worker = [self.python, "-m", "dreamlake.lakeshore.daemon", "--queue", queue, "--url", self.url]
        return self.started.start(*worker, *token, *options)


def start_seed_server(started: Processes, *options: str) -> str:
    """The address of a server that speaks the protocol's own routes and no other."""
    running = started.start(sys.executable, "-W", "error", SEED_SERVER, *options)
    wait_until_sync(lambda: running.out.read_text().endswith("\n") or not running.alive, LIMIT, "the server's port")
    assert running.alive, running.err.read_text()
    return _answering(f"http://127.0.0.1:{running.out.read_text().strip()}", "/-/seen", running)


class Server(NamedTuple):
    """Our server, as the command line starts it."""

    url: str
    running: Running


def start_server(started: Processes, db: Path, *options: object, port: int = 0) -> Server:
    running = started.start(*ours("server", "start", "--port", port, "--db", db, *options))

    def said() -> str | None:
        if not running.alive:
            pytest.fail(f"the server ended with {running.process.returncode}: {running.err.read_text()}")
        found = re.search(r" on http://[^ ,]*:(\d+)", running.err.read_text())
        return found and found[1]

    port = int(wait_until_sync(said, LIMIT, "the line that a server starts with"))
    return Server(_answering(f"http://127.0.0.1:{port}", "/healthz", running), running)


def ours(*args: object) -> list[object]:
    """A command line of this package."""
    return [sys.executable, "-W", "error", "-m", "dreamlake.lakeshore", *args]


def _answering(url: str, path: str, running: Running) -> str:
    def answers() -> bool:
        if not running.alive:
            pytest.fail(f"the server ended with {running.process.returncode}: {running.err.read_text()}")
        try:
            return httpx.get(url + path).status_code == 200
        except httpx.TransportError:
            return False

    wait_until_sync(answers, LIMIT, f"an answer of {url}{path}")
    return url
