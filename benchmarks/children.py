"""The processes that a benchmark starts, seen from the one that starts them: `roles.py` is what they run, or a script
like it.

Each talks in lines of JSON over its standard streams. When its input ends, so does the process: nothing is left behind,
however the parent ends.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import IO, Self

__all__ = ["Child", "Children", "Usage"]

_FOLDER = Path(__file__).parent
PATIENCE = 120.0
"""Seconds that a child may take for one answer."""


class Usage(NamedTuple):
    """What a process has used: seconds of CPU, and bytes of memory now and at most since the last reset."""

    cpu: float
    memory: int
    peak: int


class Child:
    """One process among `siblings`. Its first line says that it is ready; `ready` waits for it."""

    def __init__(self, script: str, role: str, settings: dict[str, Any], siblings: Sequence[Child]) -> None:
        self.role = role
        self._siblings = siblings
        self._process = subprocess.Popen(
            [sys.executable, str(_FOLDER / script), role, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._heard = b""
        self._unready = True

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def ready(self) -> Self:
        if self._unready:
            self.hear()
        return self

    def tell(self, do: str, **arguments: Any) -> None:
        """Say what to do; the answer is to be heard."""
        self.ready()
        stdin = _stream(self._process.stdin)
        stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next line. RuntimeError when this process or a sibling ends instead, or it takes too long."""
        self._unready = False
        stdout = _stream(self._process.stdout)
        until = time.monotonic() + PATIENCE
        while b"\n" not in self._heard:
            if select.select([stdout], [], [], 0.2)[0]:
                self._heard += os.read(stdout.fileno(), 1 << 20)
            ended = [child.role for child in self._siblings if child.ended]
            if (ended and b"\n" not in self._heard) or time.monotonic() > until:
                raise RuntimeError(f"no answer of the {self.role} process; these have ended: {ended}")
        line, self._heard = self._heard.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.tell(do, **arguments)
        return self.hear()

    def usage(self, *, reset: bool = False) -> Usage:
        """What it has used; `reset`: the peak of its memory starts from now."""
        return Usage(**self.ask("usage", reset=reset))

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(BrokenPipeError):
                _stream(stream).close()


class Children:
    """A context: all that was started in it has ended behind it."""

    def __init__(self, backend: str, script: str = "roles.py") -> None:
        self._backend, self._script = backend, script
        self._children: list[Child] = []

    def start(self, role: str, **settings: Any) -> Child:
        """Start a process; it may not be ready yet."""
        child = Child(self._script, role, {"backend": self._backend, **settings}, self._children)
        self._children.append(child)
        return child

    def end(self, child: Child) -> None:
        """SIGKILL to one of them."""
        self._children.remove(child)
        child.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for child in reversed(self._children):  # who was there first may be whom the others use
            child.kill()


def _stream(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
