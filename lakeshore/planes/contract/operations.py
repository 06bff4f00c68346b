"""The operations of the plane contract, and what they answer: plain records, no behaviour. See `planes.contract.store`.

They are NamedTuples and not frozen dataclasses, which take five times as long to make: one is made for every submit. Which
answer belongs to which operation is in the overloads of `planes.plane.Plane.do`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, TypeAlias

from ...limits import DEFAULT_LEASE, DEFAULT_MAX_LOST
from .records import TERMINAL, Failure

__all__ = [
    "Append",
    "Appended",
    "Beat",
    "Beaten",
    "Cancel",
    "Cancelled",
    "Claim",
    "Claimed",
    "Fence",
    "FinalFrame",
    "Finish",
    "Operation",
    "Purge",
    "Reap",
    "Reaped",
    "Requeue",
    "Requeued",
    "Restore",
    "Submit",
    "check_restore",
    "weight_of",
    "whole_priority",
]


class Fence(NamedTuple):
    """Which claim an operation is made under. `worker` and `attempt` may be missing only for claims without a lease."""

    id: str
    worker: str | None = None
    attempt: int | None = None


class FinalFrame(NamedTuple):
    """The frame that closes a journal, written by the very change that makes the row terminal."""

    seq: int
    bytes: bytes


class Submit(NamedTuple):
    """Add an invocation, due at once; its queue is created when it is new. Answers the id that holds (str).

    body: the Envelope, opaque here. parent: the id of the invocation that submits; the row's root is the parent's root,
    or the parent itself. trusted: False for what came in through a server. config: the producer's own routing fields,
    opaque, handed out with the claim.
    """

    id: str
    queue: str
    body: bytes
    key: str | None = None
    priority: int = 0
    parent: str | None = None
    trusted: bool = True
    config: bytes | None = None


class Claim(NamedTuple):
    """Take up to `limit` due rows of `queues` into state running. Answers a list of Claimed, best first, maybe empty.

    lease: seconds until the claim expires unless renewed; None: it never does (and a row whose journal is not empty is
    not handed out so: such claimers number frames from 0). max_lost: losses after which the row fails, stored with it.
    limit 0: only what the poll of this `poll_id` has taken and still holds. local: the claimer lives in this process.
    wait: seconds that a far side which holds polls may wait for the first; busy: the claimer keeps earlier claims, which
    are to be renewed before it is given more when they have not been for long. Other stores take no notice of the two.
    """

    queues: tuple[str, ...]
    worker: str
    limit: int = 1
    lease: float | None = DEFAULT_LEASE
    max_lost: int = DEFAULT_MAX_LOST
    poll_id: str | None = None
    local: bool = True
    wait: float = 0.0
    busy: bool = False


class Claimed(NamedTuple):
    """One claim: the fence is (id, worker, attempt). `next_seq` is where this attempt's frames begin."""

    id: str
    queue: str
    body: bytes
    attempt: int
    failures: int
    lost: int
    next_seq: int
    trusted: bool
    parent: str | None
    root: str | None
    config: bytes | None


class Beat(NamedTuple):
    """Renew the claims listed, as (id, attempt), for `lease` seconds from now. Answers Beaten.

    wait: seconds that a far side which holds polls may wait for a cancellation that is not `known`; other stores take no
    notice of it.
    """

    worker: str
    claims: tuple[tuple[str, int], ...]
    lease: float
    wait: float = 0.0
    known: tuple[tuple[str, int], ...] = ()


class Beaten(NamedTuple):
    """Of the claims listed: those that hold no more, and those whose cancellation is asked for."""

    lost: list[tuple[str, int]]
    cancel: list[tuple[str, int]]


class Finish(NamedTuple):
    """Make the row terminal, and write the journal's final frame with it. Answers True, or False for a repeat."""

    fence: Fence
    state: str
    result: bytes | None = None
    error: Failure | None = None
    final: FinalFrame | None = None


class Requeue(NamedTuple):
    """Give a claim back: a release costs nothing, a retry counts a failure and waits `delay` seconds. Answers Requeued.

    A row whose cancellation is asked for becomes killed in either case.
    """

    fence: Fence
    reason: Literal["release", "retry"] = "release"
    delay: float = 0.0
    error: Failure | None = None


class Requeued(NamedTuple):
    """What the row became (queued or killed), and of which queue it is. `delayed`: it is not due yet."""

    state: str
    queue: str
    delayed: bool = False


class Cancel(NamedTuple):
    """Kill a queued row or one claimed without a lease; ask for the cancellation of another. Answers Cancelled."""

    id: str


class Cancelled(NamedTuple):
    """`killed`: it ended now; `asked`: its worker has to end it; `terminal`: it had ended before."""

    what: Literal["killed", "asked", "terminal"]
    worker: str | None = None


class Append(NamedTuple):
    """Add frames `first_seq`, `first_seq + 1`, ... to a journal; `final` closes it after the last. Answers Appended.

    Judged in this order: unknown id, already there from this attempt (a duplicate), stale fence, closed journal.
    """

    fence: Fence
    first_seq: int
    frames: tuple[bytes, ...]
    final: bool = False


class Appended(NamedTuple):
    """How many of the frames are new, and how many were there already."""

    written: int
    duplicates: int


class Reap(NamedTuple):
    """What time does: rows whose delay is over become due, running rows that expired go back or fail. Answers Reaped.

    A row has expired when its holder is in `dead`; when its lease is over and its holder is not in `alive`; and when ten
    leases are over in any case. counted: whether that costs the row's `lost` budget (a clean goodbye does not). since:
    when a server for claimers elsewhere began: a claim without a holder has its lease's length from then on to be renewed.
    """

    dead: tuple[str, ...] = ()
    alive: tuple[str, ...] = ()
    counted: bool = True
    since: float | None = None


class Reaped(NamedTuple):
    """Rows that were given back or ended, as (id, queue, state), and the queues in which delayed rows became due."""

    rows: list[tuple[str, str, str]]
    due: list[str]


class Purge(NamedTuple):
    """Delete terminal rows that finished more than `older_than` seconds ago, with all that is theirs. Answers the count."""

    older_than: float


class Restore(NamedTuple):
    """Enter an invocation as it stood on another plane, queued or ended, last in submit order. Answers the id that holds.

    As with a submit an id, or a key of the queue, that is there already holds, and nothing changes. All is as given, the
    times too, but for two things: the row is untrusted, and no fence of an earlier claim holds, not even for a repeat.

    state: queued or a terminal one; ValueError otherwise. worker: for people, of an ended row. error: of a queued row that
    of its last try. frames: as (seq, bytes), in order, maybe with gaps; they are of no attempt that can speak, and the
    next one's begin after them. closed: no frame may follow them; so it is with every ended row.
    more: the rest of the frames comes with further restores, which say all else again; until the last has come nobody can
    claim the row, and it is seen as running without a worker, or not at all. Frames that are there stay as they are.
    """

    id: str
    queue: str
    state: str
    body: bytes
    key: str | None
    priority: int
    parent: str | None
    root: str | None
    config: bytes | None
    attempt: int
    failures: int
    lost: int
    worker: str | None
    submitted_at: float
    not_before: float | None
    started_at: float | None
    finished_at: float | None
    result: bytes | None
    error: Failure | None
    frames: tuple[tuple[int, bytes], ...] = ()
    closed: bool = False
    more: bool = False


Operation: TypeAlias = Submit | Claim | Beat | Finish | Requeue | Cancel | Append | Reap | Purge | Restore


def weight_of(op: Operation) -> int:
    """The bytes that an operation writes, as far as they can be many."""
    if type(op) is Submit:
        return len(op.body)
    if type(op) is Finish:
        return 0 if op.result is None else len(op.result)
    if type(op) is Append:
        return sum(map(len, op.frames))
    if type(op) is Restore:
        return len(op.body) + len(op.result or b"") + sum(len(data) for _, data in op.frames)
    return 0


def check_restore(op: Restore) -> None:
    """Raises ValueError for a state that no row is restored to."""
    if op.state != "queued" and op.state not in TERMINAL:
        raise ValueError(f"a restore names the state queued or one of {sorted(TERMINAL)}, not {op.state!r}")


def whole_priority(value: Any) -> int:
    """Any priority as every plane stores it: truncated, clamped to 64 bits, 0 for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0
    if isinstance(value, float) and not math.isfinite(value):
        return 0
    return max(-(2**63), min(2**63 - 1, int(value)))
