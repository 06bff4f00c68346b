"""Small batches on the event loop itself, when no other process is writing.

A commit takes tens of microseconds when the write lock is free, less than handing it to another thread and back. Nothing
here ever waits: when another process is writing, or SQLite is locked, the connection's thread has to do it. Nor are there
checkpoints here, or planes that wait for the disk at each commit.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .apply import commit
from .connection import CACHED_STATEMENTS, PRAGMAS, as_plane_error
from .write_lock import WriteLock

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.operations import Operation
    from .batch import Batch

__all__ = ["MAX_INLINE_BYTES", "MAX_INLINE_OPERATIONS", "InlineWriter"]

T = TypeVar("T")

MAX_INLINE_OPERATIONS = 64
"""Operations of a batch that is still small: about half a millisecond in which the event loop does nothing else."""
MAX_INLINE_BYTES = 64 * 1024
"""Bytes that such a batch writes at most, for the same reason."""


class InlineWriter:
    """A connection of the event loop's own to a file that a `SqliteConnection` has opened before. Belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(
            path, isolation_level=None, cached_statements=CACHED_STATEMENTS, check_same_thread=False
        )
        try:
            for pragma in (
                *PRAGMAS,
                "PRAGMA synchronous = NORMAL",
                "PRAGMA wal_autocheckpoint = 0",  # see `Checkpointer`
                "PRAGMA busy_timeout = 0",
            ):
                self.db.execute(pragma)
            self._write_lock = WriteLock(Path(f"{path}-turn"))
        except BaseException as exc:
            self.db.close()
            if isinstance(exc, sqlite3.Error):
                raise as_plane_error(exc, path) from exc
            raise

    def commit(self, batch: Batch, ops: Sequence[Operation]) -> list[Any] | None:
        """Commit a batch of this connection, unless another process is writing: None.

        Raises whatever the operations or SQLite raise; nothing is changed then.
        """
        if not self._write_lock.try_acquire():
            return None
        try:
            return commit(batch, ops)
        finally:
            self._write_lock.release()

    def read(self, fn: Callable[[sqlite3.Connection], T]) -> T | None:
        """Call `fn`, which reads little; None if that failed, so that the connection's thread has to do it."""
        try:
            return fn(self.db)
        except sqlite3.Error:
            return None

    def close(self) -> None:
        self.db.close()
        self._write_lock.close()
