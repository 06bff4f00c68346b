"""Command lines for the tests: run in this process, or as processes of their own."""

from __future__ import annotations

import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import pytest
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.cli.main import run

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HERE = Path(__file__).resolve().parent
LIMIT = 60.0
"""Seconds that a process gets."""


class Ran(NamedTuple):
    """What a command line came to."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The one JSON document on stdout; JSON itself knows no NaN and no infinity."""
        return json.loads(self.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def cli(*args: object) -> Ran:
    """Run a command line in this process, whose loggers are afterwards as they were."""
    out, err = io.StringIO(), io.StringIO()
    with _loggers_restored(), redirect_stdout(out), redirect_stderr(err):
        code = run([str(arg) for arg in args])
    return Ran(code, out.getvalue(), err.getvalue())


@contextmanager
def _loggers_restored() -> Iterator[None]:
    """Undo what a command does to the loggers of its own process, which usually ends with it."""
    loggers = [logging.getLogger(name) for name in ("dreamlake.lakeshore", "uvicorn.error")]
    before = [(logger.level, [*logger.handlers], logger.propagate) for logger in loggers]
    try:
        yield
    finally:
        for logger, (level, handlers, propagate) in zip(loggers, before, strict=True):
            logger.setLevel(level)
            logger.handlers = handlers
            logger.propagate = propagate


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without the package's own variables, and with `variables`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
    return kept | variables


class Process:
    """A command line as a process of its own. What it writes to stderr can be looked at while it runs."""

    def __init__(
        self,
        *args: object,
        cwd: Path = HERE,
        env: Mapping[str, str] | None = None,
        module: str = "dreamlake.lakeshore",
    ) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-W", "error", "-m", module, *map(str, args)],
            cwd=cwd,
            env={**(env or environment())},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pid = self._popen.pid
        self._parts: dict[str, list[str]] = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=(name, stream), daemon=True)
            for name, stream in (("out", self._popen.stdout), ("err", self._popen.stderr))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, name: str, stream: Any) -> None:
        with stream:
            for line in stream:
                self._parts[name].append(line)

    @property
    def out(self) -> str:
        return "".join(self._parts["out"])

    @property
    def err(self) -> str:
        return "".join(self._parts["err"])

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self._popen.kill()
        self._popen.wait()
        for reader in self._readers:
            reader.join()

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._popen.send_signal(number)

    def says(self, text: str) -> None:
        """Wait until its stderr holds `text`."""

        def said() -> bool:
            if self._popen.poll() is not None and text not in self.err:
                pytest.fail(f"it ended with code {self._popen.returncode} and never said {text!r}:\n{self.err}")
            return text in self.err

        wait_until_sync(said, LIMIT, f"{text!r} in the stderr of {self._popen.args!r}")

    def ends(self) -> Ran:
        """Wait until it ends by itself."""
        try:
            code = self._popen.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"it did not end within {LIMIT:g} s:\n{self.out}\n{self.err}")
        for reader in self._readers:
            reader.join()
        return Ran(code, self.out, self.err)


def worker(db: Path, *options: object, **process: Any) -> Process:
    """A worker of the queue `q` that has begun to claim."""
    started = Process("worker", "start", "--queue", "q", "--db", db, *options, **process)
    started.says("pickled functions")
    return started


def appears(path: Path) -> None:
    """Wait for a file, by which a body says that it runs."""
    wait_until_sync(path.exists, LIMIT, f"the file {path.name}")


class Work:
    """Runs what is queued in `q`, here."""

    def __init__(self, db: Path) -> None:
        self._db = db

    def __call__(self) -> None:
        async def drain() -> None:
            async with dls.Dispatch(self._db) as plane:
                while await dls.run_worker(dls.Queue("q", dispatch=plane), once=True):
                    pass

        anyio.run(drain)
