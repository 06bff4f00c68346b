"""Real worker processes for the tests, which end with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

HERE = Path(__file__).resolve().parent


def environment(**more: str) -> dict[str, str]:
    """Return our environment, with the modules of these tests importable."""
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", **more}


class Workers:
    """Starts worker processes, and ends those that still run."""

    def __init__(self, db: Path, log: Path, backend: str) -> None:
        self._db, self._log, self._backend = db, log, backend
        self._all: list[subprocess.Popen[str]] = []

    def start(self, moment: str = "", **options: Any) -> subprocess.Popen[str]:
        """Start one; it kills itself at `moment`. The options are those of `run_worker`."""
        return self.run("worker_process.py", str(self._db), json.dumps(options), MOMENT=moment)

    def run(self, script: str, *args: str, **more: str) -> subprocess.Popen[str]:
        """Start any script of this folder."""
        return self._start(str(HERE / script), *args, **more)

    def module(self, name: str, *args: str) -> subprocess.Popen[str]:
        """Start a module as a program."""
        return self._start("-m", name, *args)

    def _start(self, *args: str, **more: str) -> subprocess.Popen[str]:
        """Start an interpreter in which warnings are errors."""
        process = subprocess.Popen(
            [sys.executable, "-W", "error", *args],
            env=environment(LOG=str(self._log), BACKEND=self._backend, **more),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._all.append(process)
        return process

    def end(self) -> None:
        for process in self._all:
            if process.poll() is None:
                process.kill()
            process.communicate()


@contextmanager
def workers(db: Path, log: Path, backend: str) -> Iterator[Workers]:
    made = Workers(db, log, backend)
    try:
        yield made
    finally:
        made.end()
