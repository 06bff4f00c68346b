"""When the write-ahead log is copied into the database file, on a connection that no commit waits for."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import anyio

from ...concurrency.tasks import spawn
from ...errors import LakeshoreError
from .connection import MAX_LOG_PAGES

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .connection import SqliteConnection

__all__ = ["Checkpointer"]

logger = logging.getLogger("dreamlake.lakeshore.sqlite")

CHECKPOINT_PAGES = 4000
"""Pages of 4 kB, roughly, that one engine writes between two checkpoints of its own."""


class Checkpointer:
    """Makes the checkpoints of one engine, one at a time.

    connection: opens, or returns, the connection on which they are made.
    """

    def __init__(self, connection: Callable[[], Awaitable[SqliteConnection]]) -> None:
        self._connection = connection
        # It starts anywhere: of many short-lived processes that write too little for a checkpoint, some must make one.
        self.pages_written = random.randrange(CHECKPOINT_PAGES)
        """Pages written since the last checkpoint, roughly. Any thread may add to it."""
        self._running: anyio.Event | None = None

    @property
    def is_behind(self) -> bool:
        """Whether far more was written than should be before a checkpoint: the loop was too busy to run it."""
        return self.pages_written > MAX_LOG_PAGES

    def start_if_due(self) -> None:
        """Make a checkpoint, if one is due, in a task of this loop. Its errors are logged."""
        if self.pages_written <= CHECKPOINT_PAGES or self._running is not None:
            return
        done = self._running = anyio.Event()

        def ended() -> None:
            self._running = None
            done.set()

        spawn(self._checkpoint, ended)

    async def _checkpoint(self) -> None:
        self.pages_written = 0
        try:
            connection = await self._connection()
            if await connection.checkpoint() > MAX_LOG_PAGES:
                await connection.checkpoint_locked()
        except LakeshoreError as exc:
            logger.warning("a checkpoint of the write-ahead log failed, and is made again later: %s", exc)

    async def wait(self) -> None:
        """Wait for the checkpoint that is under way, if any."""
        if self._running is not None:
            await self._running.wait()
