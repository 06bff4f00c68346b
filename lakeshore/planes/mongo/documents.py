"""What stands in MongoDB: the documents, the indexes with the reason for each, and how rows and outcomes are read.

    invocations   one document for each invocation, claimed by a single findAndModify
    frames        one document for each frame of a journal, but for the frame that ends with the row, which stands in it
    bodies        GridFS: what is too large for a document
    about         one document: the version of all this, and the name under which Redis knows the database

Times of people (`createdAt`, `startedAt`, `finishedAt`, `notBefore`, `leaseUntil`) are dates by the database's clock.
`submittedAt` is a timestamp in MongoDB's own sense: an insert leaves it empty and the server fills it in, each time with
one that it has never given before. So it is the plane's own and total order of submits, whichever server took them, and
costs no round trip; servers that leave it empty are given one by their clock (see `clock`).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from bson import Int64, Timestamp
from bson.datetime_ms import DatetimeMS

from ...errors import WireError
from ..contract.failures import final_error
from ..contract.operations import Fence, Submit, whole_priority
from ..contract.records import TERMINAL, Failure, Row

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = [
    "CLAIM_SORT",
    "INDEXES",
    "NAMES",
    "SMALL",
    "VERSION",
    "Document",
    "Index",
    "birth_of",
    "check_names",
    "date",
    "error_bytes",
    "error_document",
    "failure_in",
    "final_frame",
    "holds",
    "invocation",
    "is_same_claim",
    "key_of",
    "seconds",
    "shown",
]

Document: TypeAlias = dict[str, Any]

VERSION = 1
FIRST, LAST = -62_135_596_800_000, 253_402_300_799_000
"""Milliseconds in which the year 1 begins and the year 9999 ends: every reader of dates knows those in between."""
SMALL = 1 << 18
"""Bytes up to which an error or routing fields stand in the document, whatever else does."""

NAMES = 1 << 18
"""Bytes of the names that a submit brings, and as many of those that a claim does: beside them everything else fits."""

CLAIM_SORT = [("priority", -1), ("submittedAt", 1)]


class Index(NamedTuple):
    """One index of a collection."""

    name: str
    keys: Sequence[tuple[str, int]]
    why: str
    unique: bool = False
    partial: Mapping[str, Any] | None = None


INDEXES: dict[str, tuple[Index, ...]] = {
    "invocations": (
        Index(
            "claim",
            (("ns", 1), ("due", 1), ("runConfig.queue", 1), *CLAIM_SORT),
            "the claim: its equalities first, then its sort, so that the first entry is the row and nothing is sorted in "
            "memory; over several queues their runs are merged. Only what is queued is in it, so that it stays small, and "
            "rows that wait for their delay (due: false) are a part of it that no claim reads",
            partial={"state": "queued"},
        ),
        Index(
            "key",
            (("ns", 1), ("key", 1), ("runConfig.queue", 1)),
            "of two submits with one key in one queue the second is refused by the database; lists of one key",
            unique=True,
            partial={"key": {"$gte": ""}},
        ),
        Index(
            "wake",
            (("ns", 1), ("due", 1), ("wakeAt", 1)),
            "what time asks for: delays that are over (due: false), and leases that are (due: true)",
        ),
        Index(
            "asked",
            (("ns", 1), ("worker", 1)),
            "the claims of a worker whose cancellation is asked for; it is nearly always empty",
            partial={"state": "running", "cancelRequested": True},
        ),
        Index(
            "worker",
            (("ns", 1), ("worker", 1), ("pollId", 1)),
            "the claims of a poll that is repeated, and those whose answers were lost",
            partial={"state": "running"},
        ),
        Index("finished", (("ns", 1), ("finishedAt", 1)), "purges, and what has ended since the last look"),
        Index("newest", (("ns", 1), ("submittedAt", -1)), "lists, newest first"),
        Index(
            "queue",
            (("ns", 1), ("runConfig.queue", 1), ("state", 1), ("submittedAt", -1)),
            "counts by queue and state out of the index alone, and lists of one queue or state of it",
        ),
        Index("root", (("ns", 1), ("rootInvocationId", 1), ("submittedAt", -1)), "lists of what one call has led to"),
    ),
    "frames": (
        Index(
            "journal",
            (("invocation", 1), ("seq", 1)),
            "a page is one run of it; of two frames of one number the second is refused by the database",
            unique=True,
        ),
    ),
    "bodies.files": (
        Index("owner", (("metadata.invocation", 1),), "what a purge deletes, uploads that nothing refers to included"),
    ),
    "bodies.chunks": (
        Index(
            "files_id_1_n_1",
            (("files_id", 1), ("n", 1)),
            "a body is one run of it; the name is GridFS's own",
            unique=True,
        ),
    ),
}


def key_of(ns: str, id: str) -> str:
    """The `_id` of an invocation: an id has no slash in it."""
    return f"{ns}/{id}"


def check_names(**names: str | None) -> None:
    """Raises WireError for names that a document cannot hold, or not beside all that is to stand in it yet: an invocation
    that was taken could never be ended."""
    size = 0
    for what, name in names.items():
        try:
            size += 0 if name is None else len(name.encode())
        except UnicodeEncodeError:
            raise WireError(f"expected the {what} to be text, got half of a character in {name!r:.100}") from None
    if size > NAMES:
        raise WireError(
            f"expected a {' and a '.join(names)} of at most {NAMES} bytes together, got {size}: shorten them"
        )


def birth_of(row: Document) -> str:
    """What tells an invocation from an earlier one of the same id."""
    at: Timestamp = row["submittedAt"]
    return f"{at.time}.{at.inc}"


def date(at: float | None) -> DatetimeMS | None:
    """A time in seconds, or never, as a date."""
    return None if at is None else DatetimeMS(int(max(FIRST, min(LAST, at * 1000))))


def seconds(at: DatetimeMS | None) -> float | None:
    """A date in seconds."""
    return None if at is None else int(at) / 1000


def invocation(
    ns: str, op: Submit, root: str | None, envelope: Any, config: Any, at: Timestamp, now: float
) -> Document:
    """The document of a new invocation. Every field is there from the start: expressions need not ask.

    held: a fence may speak; lapsed: though the row is queued. nextSeq: the number after the highest that a frame was
    promised. begins: where the frames of this attempt do. closed: which frame closes the journal. final: that frame, if
    the row's end brought it; without bytes it tells the row's error.
    """
    document: Document = {
        "_id": key_of(ns, op.id),
        "ns": ns,
        "id": op.id,
        "state": "queued",
        "due": True,
        "runConfig": {"queue": op.queue, "config": config},
        "priority": Int64(whole_priority(op.priority)),
        "submittedAt": at,
        "parentInvocationId": op.parent,
        "rootInvocationId": root,
        "trusted": False,  # everybody who reaches the database can write this
        "envelope": envelope,
        "attempt": 0,
        "failures": 0,
        "lost": 0,
        "maxLost": 0,
        "worker": None,
        "pollId": None,
        "lease": None,
        "leaseUntil": None,
        "wakeAt": None,
        "held": False,
        "lapsed": False,
        "cancelRequested": False,
        "ackId": None,
        "createdAt": date(now),
        "notBefore": None,
        "startedAt": None,
        "finishedAt": None,
        "result": None,
        "error": None,
        "nextSeq": Int64(0),
        "begins": Int64(0),
        "closed": None,
        "final": None,
    }
    if op.key is not None:
        document["key"] = op.key
    return document


# Errors -------------------------------------------------------------------------------------------------------------


def error_bytes(error: Failure) -> bytes | None:
    """An error as JSON, where no document takes it as it is: too long, or text that is no UTF-8."""
    texts = (error.type, error.message, error.traceback or "")
    try:
        if sum(len(text.encode()) for text in texts) <= SMALL:
            return None
    except UnicodeEncodeError:
        pass
    return json.dumps(error.as_dict()).encode()


def error_document(error: Failure | None) -> Document | None:
    """An error that a document takes."""
    return None if error is None else error.as_dict()


def failure_in(error: Any) -> Failure | None:
    """The error that a document holds: as it is, or as JSON. What others have written is shown as it stands."""
    if error is None:
        return None
    try:
        return Failure.from_dict(json.loads(error) if isinstance(error, bytes | str) else error)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return Failure("Error", str(error))


# Fences -------------------------------------------------------------------------------------------------------------


def is_same_claim(row: Document, fence: Fence) -> bool:
    """Whether `fence` names the row's last claim."""
    if fence.attempt is None:
        return row["lease"] is None and row["worker"] is not None and fence.worker in (None, row["worker"])
    return bool(row["attempt"] == fence.attempt and row["worker"] == fence.worker)


def holds(row: Document, fence: Fence) -> bool:
    """Whether `fence` may speak."""
    return bool(row["held"]) and is_same_claim(row, fence)


# What people see ----------------------------------------------------------------------------------------------------


def final_frame(row: Document, data: bytes | None, error: Failure | None) -> tuple[int, bytes] | None:
    """The frame that the row's end brought, if it brought one; `data` are its bytes where it has some of its own."""
    final = row["final"]
    if final is None:
        return None
    seq = int(final["seq"])
    return seq, final_error(seq, error or Failure("Error", "")) if data is None else data


def shown(row: Document, error: Failure | None, body: bytes | None) -> Row:
    """The row that a document is."""
    state = row["state"]
    created = seconds(row["createdAt"])
    assert created is not None
    return Row(
        id=row["id"],
        queue=row["runConfig"]["queue"],
        state=state,
        priority=int(row["priority"]),
        key=row.get("key"),
        attempt=row["attempt"],
        failures=row["failures"],
        lost=row["lost"],
        worker=row["worker"],
        parent=row["parentInvocationId"],
        root=row["rootInvocationId"],
        trusted=bool(row["trusted"]),
        cancel_requested=bool(row["cancelRequested"]),
        submitted_at=created,
        not_before=None if state in TERMINAL else seconds(row["notBefore"]),
        started_at=seconds(row["startedAt"]),
        lease_until=seconds(row["leaseUntil"]) if state == "running" else None,
        finished_at=seconds(row["finishedAt"]),
        error=error,
        body=body,
    )
