"""Purge: delete terminal rows that are old enough, with their journals, bodies and results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import queries
from .blobs import drop_blobs

if TYPE_CHECKING:
    from ..contract.operations import Purge
    from .batch import Batch

__all__ = ["purge"]

ROWS_PER_PURGE = 500
"""Rows that one Purge deletes at most, so that it does not hold the database for long; the plane repeats it."""
UNLINKED_BLOB_SECONDS = 86_400.0
"""Age of a blob that no row refers to from which its writer must have died before it wrote the row."""


def purge(batch: Batch, op: Purge) -> int:
    """Delete up to `ROWS_PER_PURGE` rows that ended more than `op.older_than` seconds ago, and return how many."""
    db = batch.db
    rows = db.execute(queries.OLDEST, (batch.ns, ROWS_PER_PURGE, batch.now - op.older_than)).fetchall()
    for seq, number, body_ref, result_ref in rows:
        db.execute(queries.DELETE_FRAMES, (seq,))
        db.execute(queries.DELETE_OUTCOME, (number,))
        db.execute(queries.DELETE_INVOCATION, (seq,))
        drop_blobs(db, (body_ref, result_ref))
    unlinked = db.execute(queries.UNLINKED_BLOBS, (batch.now - UNLINKED_BLOB_SECONDS, ROWS_PER_PURGE)).fetchall()
    drop_blobs(db, [ref for (ref,) in unlinked])
    return len(rows)
