"""Large bodies and results, stored in pieces so that no single write holds the database for long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import queries

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterable

    from .batch import Batch

__all__ = [
    "INLINE_BYTES",
    "PIECE_BYTES",
    "drop_blobs",
    "link_blob",
    "new_blob",
    "read_blob",
    "write_blob",
    "write_piece",
]

INLINE_BYTES = 4096
"""Bodies of up to this many bytes are stored in the invocation's own row, which every UPDATE rewrites whole."""
PIECE_BYTES = 256 * 1024
"""Bytes of a piece: about a millisecond of writing, after which other writers get their turn."""


def new_blob(db: sqlite3.Connection, now: float) -> int:
    """Insert a blob that no row refers to yet, and return its ref."""
    ref = db.execute(queries.INSERT_BLOB, (now,)).lastrowid
    assert ref is not None
    return ref


def write_piece(db: sqlite3.Connection, ref: int, part: int, data: memoryview) -> None:
    """Write piece number `part` of a blob."""
    db.execute(queries.INSERT_PIECE, (ref, part, data))


def write_blob(batch: Batch, data: bytes) -> int:
    """Write a whole blob in this transaction, and return its ref. The row written next must refer to it."""
    ref = new_blob(batch.db, batch.now)
    view = memoryview(data)
    for part, start in enumerate(range(0, len(view), PIECE_BYTES)):
        write_piece(batch.db, ref, part, view[start : start + PIECE_BYTES])
    link_blob(batch, ref)
    return ref


def link_blob(batch: Batch, ref: int) -> None:
    """Mark a blob as referred to, in the transaction that writes the row which does."""
    batch.db.execute(queries.LINK_BLOB, (ref,))
    batch.linked.add(ref)


def read_blob(db: sqlite3.Connection, ref: int) -> bytes:
    """Return the bytes of a blob."""
    return b"".join(row[0] for row in db.execute(queries.PIECES, (ref,)))


def drop_blobs(db: sqlite3.Connection, refs: Iterable[int | None]) -> None:
    """Delete blobs with their pieces."""
    for ref in refs:
        if ref is not None:
            db.execute(queries.DELETE_PIECES, (ref,))
            db.execute(queries.DELETE_BLOB, (ref,))
