"""One engine with a plane, a root and a workdir, and real workers over them: processes of the command line."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import portal
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.planes.contract.records import RowFilter

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self

    from engine_kit import Engine

    from dreamlake.lakeshore.planes.contract.records import Row
    from dreamlake.lakeshore.wire import Envelope

__all__ = ["LIMIT", "Site", "Worker", "skip_without"]

LIMIT = 60.0
"""Seconds for what takes one or two, on a machine that has other things to do."""
_MARK = "LAKESHORE_TEST_WORKER"


def skip_without(absent: str | None) -> None:
    """Skip the test for what is absent, if anything is; fail where LAKESHORE_TEST_NO_SKIPS=1 forbids skipping."""
    if absent is not None:
        if os.environ.get("LAKESHORE_TEST_NO_SKIPS") == "1":
            pytest.fail(f"needs {absent}")
        pytest.skip(f"needs {absent}")


class Worker:
    """`lakeshore worker start` as a process that has begun to claim; it is gone after the block, and all it started.

    Ended there by SIGTERM, it ends of itself, with exit code 0 and no traceback in what it says.
    """

    def __init__(self, site: Site, queue: str, *options: object) -> None:
        self._site = site
        self._mark = f"{_MARK}={secrets.token_hex(8)}"
        self._log = site.folder / f"{queue}-{secrets.token_hex(4)}.log"
        places = ["--db", site.db, "--root", site.root, "--workdir", site.work]
        argv = ["worker", "start", "--queue", queue, *places, *site.arguments, *map(str, options)]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
        name, _, value = self._mark.partition("=")
        with open(self._log, "xb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "error", "-m", "dreamlake.lakeshore", *map(str, argv)],
                cwd=site.root,
                env={**environ, "LAKESHORE_HOME": str(site.folder / "home"), name: value},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def __enter__(self) -> Self:
        wait_until_sync(lambda: self._claims() or self.process.poll() is not None, LIMIT, "the begin of the worker")
        if not self._claims():
            pytest.fail(f"the worker ended with exit code {self.process.returncode}:\n{self.said}")
        return self

    def _claims(self) -> bool:
        return "pickled functions" in self.said

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and self.process.poll() is None:
                self.ends()
        finally:
            self.kill()
        if kind is None:
            self.is_gone()
        else:
            sys.stderr.write(f"the output of the worker:\n{self.said}\n")  # shown beside the failure

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        with suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()

    def ends(self, *, asked: bool = False) -> None:
        """Ask it to end, unless it was `asked` already, and wait until it does."""
        if not asked:
            self.signal()
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the worker did not end within {LIMIT:g} s:\n{self.said}")
        assert code == 0, self.said
        assert "Traceback" not in self.said, self.said

    def is_gone(self) -> None:
        """Wait until nothing is left of the programs that it called."""
        _wait_empty(self._called, "started by the worker and still there")

    def _called(self) -> list[str]:
        return _processes(self._mark.encode())


class Site:
    """Where the tests of one engine happen. Each may use a queue of its own."""

    def __init__(self, engine: Engine, arguments: list[str], folder: Path) -> None:
        self.engine, self.arguments, self.folder = engine, arguments, folder
        self.db, self.root, self.work = folder / "plane.db", folder / "root", folder / "work"
        self.root.mkdir()
        self.plane = dls.Dispatch(self.db)
        self._kept: set[str] = set()

    def close(self) -> None:
        portal().call(self.plane.aclose)

    def worker(self, queue: str, *options: object) -> Worker:
        return Worker(self, queue, *options)

    def queue(self, name: str) -> dls.SyncQueue:
        return dls.SyncQueue(name, dispatch=self.plane)

    def submit(self, queue: str, envelope: Envelope) -> str:
        """Submit an envelope of the test's own making."""
        portal().call(self.plane.do, Submit(envelope.id, queue, envelope.to_bytes()))
        return envelope.id

    def ended(self, id: str) -> Row:
        """The invocation, once it has come to an end."""
        portal().call(lambda: self.plane.outcome(id, timeout=LIMIT))
        return self.queue("q").get(id)

    def failure(self, id: str) -> tuple[str, str, str]:
        """State, type and message of an invocation that comes to a bad end; its folder stays."""
        row = self.ended(id)
        assert row.error is not None, row
        self._kept.add(id)
        return row.state, row.error.type, row.error.message

    def notes(self, name: str) -> list[str]:
        """The lines that bodies wrote under that name."""
        try:
            return (self.root / name).read_text().splitlines()
        except FileNotFoundError:
            return []

    def begun(self, name: str, times: int = 1) -> None:
        """Wait until so many bodies have noted under that name that they began."""
        wait_until_sync(lambda: self.notes(name).count("began") >= times, LIMIT, "the begin of the body")

    def is_clean(self) -> None:
        """Nothing runs, and no folder is there but those of failures. Folders are deleted before outcomes are delivered."""
        found = {path.name for path in self.work.iterdir()} if self.work.exists() else set[str]()
        kept, self._kept = self._kept, set()
        for name in found:
            shutil.rmtree(self.work / name)
        assert found == kept
        self.is_still()

    def is_still(self) -> None:
        """Wait until nothing of invocations is in the engine, and no process here has to do with one."""
        _wait_empty(self.engine.leftovers, f"still in the engine {self.engine.name}")
        ids = [row.id.encode() for row in portal().call(self.plane.rows, RowFilter(limit=1000))]
        _wait_empty(lambda: _processes(*ids), "of an invocation that has ended, and still there")

    def stays_still(self, name: str, seconds: float = 0.3) -> None:
        """The body that notes under that name has stopped doing so."""
        before = self.notes(name)
        time.sleep(seconds)
        assert self.notes(name) == before


def _processes(*words: bytes) -> list[str]:
    """The processes of this machine that have one of the words in their environment or their command."""
    found = list[str]()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):  # it has ended, or is another user's
            if entry.name.isdigit():
                command, environ = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
                if any(word in command or word in environ for word in words):
                    found.append(f"{entry.name} ({command.replace(bytes(1), b' ').decode('utf-8', 'replace').strip()})")
    return found


def _wait_empty(list_left: Callable[[], list[str]], what: str) -> None:
    until = time.monotonic() + LIMIT / 2
    while left := list_left():
        if time.monotonic() > until:
            pytest.fail(f"{what}: {left}")
        time.sleep(0.02)
