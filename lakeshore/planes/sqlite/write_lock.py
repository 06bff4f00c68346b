"""The lock around each write transaction, which lets processes write in turns.

SQLite's own busy handler is not fair: among several busy writers it keeps one waiting for more than a second.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from ...concurrency.backoff import Backoff
from . import forks

if TYPE_CHECKING:
    from pathlib import Path

try:
    import fcntl as _fcntl
except ImportError:  # Windows has no such locks; SQLite's busy handler remains
    fcntl: Any = None
else:
    fcntl = _fcntl

__all__ = ["WriteLock"]

WRITE_LOCK_TIMEOUT = 5.0
"""Seconds after which a transaction begins without the lock: its holder is stopped, and SQLite's own lock is enough."""
FIRST_PAUSE = 0.0001
"""Seconds between the first two attempts, about the length of a small transaction; each is 1.5 times as long as the last."""
LONGEST_PAUSE = 0.002
"""Seconds between two attempts at most, so that a free lock is never left for long."""


class WriteLock:
    """A file that is locked during each write transaction. The kernel drops the lock when the process dies.

    Where there are no such locks (Windows, some network file systems), SQLite's own keep writers apart. One object
    belongs to one connection and is used on one thread at a time.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if fcntl else -1
        self._held = False
        forks.close_in_forked_child(self)

    def __enter__(self) -> None:
        """Wait for the lock, blocking the thread, for up to `WRITE_LOCK_TIMEOUT` seconds; then go on without it."""
        deadline = time.monotonic() + WRITE_LOCK_TIMEOUT
        pauses = Backoff(FIRST_PAUSE, LONGEST_PAUSE, factor=1.5)
        while self._fd >= 0 and not self.try_acquire() and time.monotonic() < deadline:
            time.sleep(pauses.next_delay())

    def __exit__(self, *_: object) -> None:
        self.release()

    def try_acquire(self) -> bool:
        """Take the lock if it is free. False if it is not, or where there are no such locks."""
        if self._fd < 0:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # no locks on this file system
            self.close()
            return False
        self._held = True
        return True

    def release(self) -> None:
        """Release the lock, if it is held."""
        if self._held:
            self._held = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which releases the lock. Idempotent."""
        forks.keep_in_forked_child(self)
        self.close_inherited()

    def close_inherited(self) -> None:
        """Close the file in a forked child: the lock stays its parent's."""
        fd = self._fd
        self._fd = -1
        self._held = False
        if fd >= 0:
            os.close(fd)
