"""One transaction's worth of operations: what they share, and which waiters are to be woken after the commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from . import queries

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

    from ..contract.operations import Operation

__all__ = ["Batch", "Wakeups", "insert_rows"]

ROWS_PER_INSERT = (50, 10, 1)
"""Rows of one INSERT: a few sizes only, so that the driver keeps their prepared statements."""


@dataclass(slots=True)
class Wakeups:
    """The waiters that a commit concerns, of this process and of others."""

    jobs: dict[str, int] = field(default_factory=dict[str, int])
    """By queue: how many rows have become claimable."""
    outcomes: bool = False
    """Whether outcomes or frames were written."""
    cancels: bool = False
    """Whether workers were asked to cancel a claim."""

    def add_job(self, queue: str) -> None:
        """Count one more row of `queue` that can be claimed."""
        self.jobs[queue] = self.jobs.get(queue, 0) + 1


@dataclass(slots=True)
class Batch:
    """What the operations of one transaction share."""

    db: sqlite3.Connection
    ns: str
    now: float
    """The plane's time, in seconds since the epoch: one for the whole transaction."""
    holder: str
    """The name under which this engine holds its claims."""
    promote: bool = True
    """Whether delayed rows may have become due, so that a claim has to promote them first."""
    blobs: dict[int, int] = field(default_factory=dict[int, int])
    """By `id()` of its operation: the blob of a large body or result that was written ahead."""
    linked: set[int] = field(default_factory=set[int])
    """The blobs that a row of this transaction refers to."""
    wakeups: Wakeups = field(default_factory=Wakeups)

    def blob_written_ahead(self, op: Operation) -> int | None:
        """The blob that was written ahead for `op`, unless a row refers to it already."""
        ref = self.blobs.get(id(op)) if self.blobs else None
        return None if ref in self.linked else ref


def insert_rows(db: sqlite3.Connection, into: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Insert rows, those that are there already left out, with as few statements as possible."""
    start = 0
    for count in ROWS_PER_INSERT:
        while len(rows) - start >= count:
            part = rows[start : start + count]
            db.execute(queries.insert(into, len(part[0]), count), [*chain.from_iterable(part)])
            start += count
