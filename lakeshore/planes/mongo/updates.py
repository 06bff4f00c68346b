"""Update pipelines: the fields that each operation sets. Each is atomic with the condition that it is sent with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contract.failures import CANCELLED_QUEUED, CANCELLED_RUNNING
from .documents import Document, date

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "cancel_update",
    "claim_update",
    "end_update",
    "expire_fields",
    "finish_update",
    "lease_fields",
    "literal",
    "renew_update",
    "requeue_update",
    "revive_fields",
    "unreadable_update",
]  # fmt: skip

_REGAINED: Document = {"$subtract": ["$lost", {"$cond": ["$lapsed", 1, 0]}]}
"""`lost` without the loss that was counted for a claim whose worker is alive after all."""


def literal(value: Any) -> Document:
    """A value that MongoDB does not evaluate, even if it looks like an expression."""
    return {"$literal": value}


def _when(condition: Any, fields: Document) -> Document:
    return {name: {"$cond": [condition, value, f"${name}"]} for name, value in fields.items()}


def lease_fields(seconds: float | None, now: float) -> Document:
    """A lease of so many seconds from now; None never expires."""
    until = None if seconds is None else date(now + seconds)
    return {"lease": seconds, "leaseUntil": until, "wakeAt": until}


def claim_update(worker: str, poll: str, seconds: float | None, max_lost: int, now: float) -> list[Document]:
    """Claim a due row."""
    fields: Document = {
        "state": "running",
        "held": True,
        "lapsed": False,
        "attempt": {"$add": ["$attempt", 1]},
        "begins": "$nextSeq",
        "worker": literal(worker),
        "pollId": literal(poll),
        "maxLost": max_lost,
        "cancelRequested": False,
        "startedAt": date(now),
    }
    return [{"$set": fields | lease_fields(seconds, now)}]


def renew_update(seconds: float, now: float) -> list[Document]:
    """Renew a claim: extend its lease if it has one."""
    leased = {"$ne": ["$lease", None]}
    fields: Document = {"state": "running", "lapsed": False, "lost": _REGAINED, "due": True}
    return [{"$set": fields | _when(leased, lease_fields(seconds, now))}]


def revive_fields(seconds: float | None, now: float) -> Document:
    """Let an expired claim run again with the lease that it had: nobody else has claimed the row."""
    return {"state": "running", "lapsed": False, "lost": _REGAINED} | lease_fields(seconds, now)


def requeue_update(failed: bool, error: Any, not_before: float | None) -> list[Document]:
    """Give a claim back to its queue."""
    fields: Document = {
        "state": "queued",
        "due": not_before is None,
        "notBefore": date(not_before),
        "held": False,
        "lapsed": False,
        "lost": _REGAINED,
        "worker": None,
        "pollId": None,
        "cancelRequested": False,
    } | lease_fields(None, 0.0)
    if failed:
        fields["failures"] = {"$add": ["$failures", 1]}
        if error is not None:
            fields["error"] = literal(error)
    fields["wakeAt"] = date(not_before)
    return [{"$set": fields}]


def expire_fields() -> Document:
    """Expire a claim. Until another worker claims the row, its fence still holds."""
    return {"state": "queued", "due": True, "notBefore": None, "lapsed": True, "wakeAt": None} | {
        "lost": {"$add": ["$lost", 1]}
    }


def _closed(seq: Any, attempt: Any, data: Any) -> Document:
    """Close the journal with this frame unless it is closed."""
    frame = {"seq": seq, "attempt": attempt}
    return _when(
        {"$eq": ["$closed", None]},
        {"closed": frame, "final": frame | {"bytes": data}, "nextSeq": {"$add": [seq, 1]}},
    )


def _over(state: str, error: Any, now: float) -> Document:
    return {
        "state": state,
        "error": literal(error),
        "finishedAt": date(now),
        "held": False,
        "lapsed": False,
        "due": True,
        "notBefore": None,
        "wakeAt": None,
    }


def finish_update(
    state: str, result: Any, error: Any, final: tuple[int, Any] | None, ack_id: str, now: float
) -> list[Document]:
    """End the row with its outcome, and close its journal if there is a final frame."""
    fields = _over(state, error, now) | {"result": literal(result), "ackId": ack_id, "lost": _REGAINED}
    if final is not None:
        seq, data = final
        fields |= _closed({"$max": [seq, "$nextSeq"]}, "$attempt", literal(data))
    return [{"$set": fields}]


def end_update(state: str, error: Any, now: float, lost: Any = _REGAINED) -> list[Document]:
    """End the row without its worker. The final frame holds the error and belongs to no attempt, so that a late append of
    its number is not taken for a duplicate."""
    fields = _over(state, error, now) | {"ackId": None, "lost": lost}
    return [{"$set": fields | _closed("$nextSeq", 0, None)}]


def unreadable_update(error: Any, now: float) -> list[Document]:
    """Fail the row whatever its other fields hold."""
    return [{"$set": _over("failed", error, now) | {"ackId": None}}]


def cancel_update(now: float) -> list[Document]:
    """Kill a row that is queued or claimed without a lease; request cancellation of other claims; leave ended rows."""
    queued: Document = {"$eq": ["$state", "queued"]}
    running: Document = {"$eq": ["$state", "running"]}
    kill: Document = {"$or": [queued, {"$and": [running, {"$eq": ["$lease", None]}]}]}
    error = {"$cond": [queued, literal(CANCELLED_QUEUED.as_dict()), literal(CANCELLED_RUNNING.as_dict())]}
    fields = _over("killed", None, now) | {"error": error, "ackId": None} | _closed("$nextSeq", 0, None)
    asked = {"$or": ["$cancelRequested", {"$and": [running, {"$ne": ["$lease", None]}]}]}
    return [{"$set": _when(kill, fields) | {"cancelRequested": asked}}]


def projection(fields: Iterable[str]) -> dict[str, int]:
    """A projection that reads these fields."""
    return dict.fromkeys(fields, 1)
