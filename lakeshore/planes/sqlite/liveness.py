"""How a dead process of this machine is noticed at once, by a lock that the kernel drops when it dies.

Beside the database is a folder, in it a folder `holders` with a file of each engine, which the engine keeps locked for
life. If another process can lock that
file, its engine is gone, and the claims made under its name have no holder.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, Protocol

from ...limits import CLOCK_STEP, CLOCK_STEP_GRACE
from . import forks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

try:
    import fcntl as _fcntl
except ImportError:  # Windows has no such locks; leases alone decide there
    fcntl: Any = None
else:
    fcntl = _fcntl

__all__ = ["ClockSteps", "FileLiveness", "Liveness", "MemoryLiveness", "list_folder", "remove_file"]

UNLOCKED_SUFFIX = ".new"
"""Ends the name of a holder's file that may not be locked yet."""


class Liveness(Protocol):
    """One engine among those that use a database: its own mark of life, and those of the others."""

    holder: str
    """The name under which this engine holds claims."""

    def sort(self, holders: Iterable[str]) -> tuple[list[str], list[str]]:
        """Of `holders` those that are dead and those that are alive; one of which nothing is known is in neither list."""
        ...

    def remove(self, holder: str) -> None:
        """Remove the mark of a dead holder, once all that it held has been given back."""
        ...

    def dead_holders(self) -> list[str]:
        """The dead holders whose marks have not been removed."""
        ...

    def leave(self) -> None:
        """Stop being a holder, as the last act, once all that this engine held has been given back. Idempotent."""
        ...

    def abandon(self) -> None:
        """Stop being a holder and leave the mark, so that others find the dead holder and give back what it held."""
        ...


class MemoryLiveness:
    """For engines of one process on one in-memory database: none of them dies alone."""

    def __init__(self) -> None:
        self.holder = _new_holder()

    def sort(self, holders: Iterable[str]) -> tuple[list[str], list[str]]:
        return [], list(holders)

    def remove(self, holder: str) -> None: ...

    def dead_holders(self) -> list[str]:
        return []

    def leave(self) -> None: ...

    def abandon(self) -> None: ...


class FileLiveness:
    """For engines of processes that share a database file. Its methods block for a few system calls.

    Raises OSError when its folders or its own file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self.holder = _new_holder()
        self._folder = folder / "holders"
        for part in (folder, self._folder):
            part.mkdir(mode=0o700, exist_ok=True)
        self._lock_fd: int | None = None
        if fcntl is not None:
            self._lock_fd = self._lock_own_file()
        forks.close_in_forked_child(self)

    def _lock_own_file(self) -> int:
        """Lock the file before it gets its name: under that name it is never unlocked while this engine lives."""
        path = self._folder / self.holder
        unlocked = path.with_suffix(UNLOCKED_SUFFIX)
        fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(unlocked, path)
        except BaseException:
            remove_file(unlocked)
            os.close(fd)
            raise
        return fd

    def sort(self, holders: Iterable[str]) -> tuple[list[str], list[str]]:
        dead: list[str] = []
        alive: list[str] = []
        for holder in holders:
            is_alive = self.is_alive(holder)
            if is_alive is True:
                alive.append(holder)
            elif is_alive is False:
                dead.append(holder)
        return dead, alive

    def is_alive(self, holder: str) -> bool | None:
        """Whether a holder's file is locked. None: it cannot be found out, and leases alone decide."""
        if holder == self.holder:
            return True
        if fcntl is None:
            return None
        try:
            fd = os.open(self._folder / holder, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None  # it was removed, or is no file of ours: a holder that is killed leaves its file
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(fd)
        return False

    def remove(self, holder: str) -> None:
        if holder != self.holder:
            remove_file(self._folder / holder)

    def dead_holders(self) -> list[str]:
        names = [name for name in list_folder(self._folder) if not name.endswith(UNLOCKED_SUFFIX)]
        return self.sort(names)[0]

    def leave(self) -> None:
        if self._lock_fd is not None:
            remove_file(self._folder / self.holder)
        self.abandon()

    def abandon(self) -> None:
        forks.keep_in_forked_child(self)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close the file in a forked child: the lock stays its parent's."""
        fd = self._lock_fd
        self._lock_fd = None
        if fd is not None:
            os.close(fd)


class ClockSteps:
    """Notices that the wall clock was set forward, or that the machine slept: then nobody could renew its leases.

    steady: a clock that counts seconds and is never set, nor counts those of a sleep.
    """

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._offset: float | None = None
        self._judge_from = 0.0

    def leases_may_be_judged(self, now: float) -> bool:
        """False for `CLOCK_STEP_GRACE` seconds after a step. now: the wall clock's time. To be called every second or so."""
        steady_now = self._steady()
        offset = now - steady_now
        if self._offset is not None and offset - self._offset > CLOCK_STEP:
            self._judge_from = steady_now + CLOCK_STEP_GRACE
        self._offset = offset
        return steady_now >= self._judge_from


def _new_holder() -> str:
    return f"{os.getpid()}-{secrets.token_hex(8)}"


def list_folder(folder: Path | str) -> list[str]:
    """The names in a folder; [] if it cannot be read."""
    try:
        return os.listdir(folder)
    except OSError:
        return []


def remove_file(path: Path) -> None:
    """Remove a file if that is possible: it may be gone, or be something that is not ours."""
    try:
        path.unlink()
    except OSError:
        pass
