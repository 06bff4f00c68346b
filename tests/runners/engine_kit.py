"""What the conformance tests ask of each engine that runners start children in, and the two that every machine has.

The modules of this folder can be imported by the children of every engine: its arguments see to that (PYTHONPATH, and a
mount where it needs one). What bodies note lies below the worker's root, which every child sees.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Generator
    from contextlib import AbstractContextManager

__all__ = ["HERE", "PROCESS", "WARM", "Engine"]

HERE = Path(__file__).resolve().parent
MARK = "LAKESHORE_TEST_CHILDREN"
_ID = re.compile("[0-9A-Z]{26}")


class Engine(Protocol):
    """One engine. Its names are unique among them."""

    name: str

    def missing(self) -> str | None:
        """What is absent for it here, for the skip; None: it can run."""
        ...

    def up(self) -> AbstractContextManager[list[str]]:
        """Start the services; gives the arguments for `lakeshore worker start` (--runner X --runner-option ... --env ...),
        workdir aside."""
        ...

    def kill_child(self, id: str) -> None:
        """SIGKILL the child of that invocation from outside."""
        ...

    def leftovers(self) -> list[str]:
        """Containers (jobs, processes) of invocations that still exist."""
        ...


class Processes:
    """Children that are processes of this machine: known by a variable that they have, and by where they work."""

    def __init__(self, name: str, *options: str) -> None:
        self.name, self._options = name, options
        self._mark = b""

    def missing(self) -> str | None:
        return None

    @contextmanager
    def up(self) -> Generator[list[str]]:
        token = secrets.token_hex(8)
        self._mark = f"{MARK}={token}".encode()
        told = [f"{MARK}={token}", f"PYTHONPATH={HERE}", "PYTHONDONTWRITEBYTECODE=1", "PYTHONWARNINGS=error"]
        yield ["--runner", "process", *self._options, *(word for one in told for word in ("--env", one))]

    def kill_child(self, id: str) -> None:
        for pid, folder in self._running():
            if folder == id and os.getpgid(pid) == pid:
                os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        return [f"process {pid} in {folder}" for pid, folder in self._running() if _ID.fullmatch(folder)]

    def remains(self) -> list[str]:
        """All that is left of a worker: the interpreter that forks, too."""
        return [f"process {pid} in {folder}" for pid, folder in self._running()]

    def _running(self) -> list[tuple[int, str]]:
        """The processes that have the variable, and the name of the folder that each works in."""
        found = list[tuple[int, str]]()
        for entry in Path("/proc").iterdir():
            with suppress(OSError):  # it has ended, or is another user's
                if entry.name.isdigit() and self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    where = os.readlink(entry / "cwd").removesuffix(" (deleted)")
                    found.append((int(entry.name), Path(where).name))
        return found


PROCESS: Engine = Processes("process")
WARM: Engine = Processes("warm", "--runner-option", "warm=1")
