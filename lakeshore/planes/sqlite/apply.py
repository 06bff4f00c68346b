"""A batch of operations as one transaction: which function applies which operation.

Each function decides before its first write, so that an operation that raises has changed nothing and the others in its
batch stand. The conditions are those of `testing.reference.transitions`; `testing.check_plane` compares the two.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from ...errors import ClaimLost, InvocationNotFound
from ..contract.operations import Append, Beat, Cancel, Claim, Finish, Purge, Reap, Requeue, Restore, Submit
from .append import append
from .beat import beat
from .cancel import cancel
from .claim import claim
from .connection import in_transaction
from .finish import finish_many
from .purge import purge
from .reap import reap
from .requeue import requeue
from .restore import restore
from .submit import submit_many

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..contract.operations import Operation
    from .batch import Batch

__all__ = ["apply", "commit"]

ONE_BY_ONE: dict[type[Any], Callable[[Batch, Any], Any]] = {
    Append: append,
    Beat: beat,
    Cancel: cancel,
    Claim: claim,
    Purge: purge,
    Reap: reap,
    Requeue: requeue,
    Restore: restore,
}
"""What applies one operation: it returns the answer or raises the error."""

TOGETHER: dict[type[Any], Callable[[Batch, Any], list[Any]]] = {Finish: finish_many, Submit: submit_many}
"""What applies all operations of a type that follow each other, with fewer statements: for each its answer or error."""


def apply(batch: Batch, ops: Sequence[Operation]) -> list[Any]:
    """Apply `ops` in order; for each its answer, or the error of ours that it raised. Any other error is raised."""
    answers: list[Any] = []
    for kind, run in groupby(ops, type):
        together = TOGETHER.get(kind)
        if together is not None:
            answers += together(batch, list(run))
            continue
        apply_one = ONE_BY_ONE[kind]
        for op in run:
            try:
                answers.append(apply_one(batch, op))
            except (ClaimLost, InvocationNotFound, ValueError) as exc:
                answers.append(exc)
    return answers


def commit(batch: Batch, ops: Sequence[Operation]) -> list[Any]:
    """Apply `ops` in a transaction of their own, which is rolled back if this raises."""
    return in_transaction(batch.db, apply, batch, ops)
