"""Beat: renew the leases of the claims that it lists, and report those that are lost or to be cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract.operations import Beaten, Fence
from . import queries
from .rows import ClaimRow, holds

if TYPE_CHECKING:
    from ..contract.operations import Beat
    from .batch import Batch

__all__ = ["beat"]


def beat(batch: Batch, op: Beat) -> Beaten:
    """Renew claims. One that has expired is revived if no other claim of its row was made."""
    lost: list[tuple[str, int]] = []
    cancel: list[tuple[str, int]] = []
    until = batch.now + op.lease
    for id, attempt in op.claims:
        columns = batch.db.execute(queries.CLAIM_ROW, (batch.ns, id)).fetchone()
        row = None if columns is None else ClaimRow._make(columns)
        if row is None or not holds(row, Fence(id, op.worker, attempt)):
            lost.append((id, attempt))
            continue
        batch.db.execute(queries.RENEW, (op.lease, until, row.seq))
        if row.cancel:
            cancel.append((id, attempt))
    return Beaten(lost, cancel)
