"""What each change of a row sets: parts of update pipelines, each one atomic with the condition that it is sent with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contract.failures import CANCELLED_QUEUED, CANCELLED_RUNNING
from .documents import Document, date

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "acked", "cancelled", "ended", "held", "lapsed", "lease", "let_go", "literal", "renewed", "revived", "unreadable",
]  # fmt: skip

_REGAINED: Document = {"$subtract": ["$lost", {"$cond": ["$lapsed", 1, 0]}]}
"""`lost`, without the loss of a claim that speaks after all."""


def literal(value: Any) -> Document:
    """A value that is no expression, whatever it looks like."""
    return {"$literal": value}


def _when(condition: Any, fields: Document) -> Document:
    return {name: {"$cond": [condition, value, f"${name}"]} for name, value in fields.items()}


def lease(seconds: float | None, now: float) -> Document:
    """A claim lasts for so long from now, or for ever."""
    until = None if seconds is None else date(now + seconds)
    return {"lease": seconds, "leaseUntil": until, "wakeAt": until}


def held(worker: str, poll: str, seconds: float | None, max_lost: int, now: float) -> list[Document]:
    """A due row becomes a claim."""
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
    return [{"$set": fields | lease(seconds, now)}]


def renewed(seconds: float, now: float) -> list[Document]:
    """A claim that holds goes on; one with a lease has it anew."""
    leased = {"$ne": ["$lease", None]}
    fields: Document = {"state": "running", "lapsed": False, "lost": _REGAINED, "due": True}
    return [{"$set": fields | _when(leased, lease(seconds, now))}]


def revived(seconds: float | None, now: float) -> Document:
    """A lapsed claim that speaks runs again, with the lease that it had."""
    return {"state": "running", "lapsed": False, "lost": _REGAINED} | lease(seconds, now)


def let_go(failed: bool, error: Any, not_before: float | None) -> list[Document]:
    """A claim goes back to its queue."""
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
    } | lease(None, 0.0)
    if failed:
        fields["failures"] = {"$add": ["$failures", 1]}
        if error is not None:
            fields["error"] = literal(error)
    fields["wakeAt"] = date(not_before)
    return [{"$set": fields}]


def lapsed() -> Document:
    """A claim has expired; until somebody else claims the row, it may still speak."""
    return {"state": "queued", "due": True, "notBefore": None, "lapsed": True, "wakeAt": None} | {
        "lost": {"$add": ["$lost", 1]}
    }


def _closed(seq: Any, attempt: Any, data: Any) -> Document:
    """The journal ends with this frame, unless it has ended."""
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


def acked(
    state: str, result: Any, error: Any, final: tuple[int, Any] | None, ack_id: str, now: float
) -> list[Document]:
    """The claim ends the row, and the journal with it where it brings the final frame."""
    fields = _over(state, error, now) | {"result": literal(result), "ackId": ack_id, "lost": _REGAINED}
    if final is not None:
        seq, data = final
        fields |= _closed({"$max": [seq, "$nextSeq"]}, "$attempt", literal(data))
    return [{"$set": fields}]


def ended(state: str, error: Any, now: float, lost: Any = _REGAINED) -> list[Document]:
    """The row ends without its worker. The final frame tells the error, and is of no attempt: a late append of its number
    is no repeat of it."""
    fields = _over(state, error, now) | {"ackId": None, "lost": lost}
    return [{"$set": fields | _closed("$nextSeq", 0, None)}]


def unreadable(error: Any, now: float) -> list[Document]:
    """The row ends, whatever its other fields hold."""
    return [{"$set": _over("failed", error, now) | {"ackId": None}}]


def cancelled(now: float) -> list[Document]:
    """A row that is queued, or claimed without a lease, ends; of another claim the end is asked for; one that has ended
    stays as it is."""
    queued: Document = {"$eq": ["$state", "queued"]}
    running: Document = {"$eq": ["$state", "running"]}
    kill: Document = {"$or": [queued, {"$and": [running, {"$eq": ["$lease", None]}]}]}
    error = {"$cond": [queued, literal(CANCELLED_QUEUED.as_dict()), literal(CANCELLED_RUNNING.as_dict())]}
    fields = _over("killed", None, now) | {"error": error, "ackId": None} | _closed("$nextSeq", 0, None)
    asked = {"$or": ["$cancelRequested", {"$and": [running, {"$ne": ["$lease", None]}]}]}
    return [{"$set": _when(kill, fields) | {"cancelRequested": asked}}]


def names(fields: Iterable[str]) -> dict[str, int]:
    """A projection of these fields."""
    return dict.fromkeys(fields, 1)
