"""What a plane is: operations, reads, rows and the `Store` protocol. Written before any plane; every plane obeys it.

**Operations change state, and nothing else does.** A store applies lists of them, in order, as one batch; each operation
in a batch succeeds or fails alone, and its effects are durable before its answer is given (what durable means on power
loss is the store's to say). An operation never waits. Every operation may be repeated after a lost answer:

    Submit   by id, and by (queue, key): the first submit wins whatever the arguments; answers the id that holds
    Claim    by (worker, poll_id), where given: hands out again those of its claims that still hold
    Beat     renews exactly the claims that it lists; nothing is ever renewed by worker
    Finish   by fence: the same fence again answers the same and changes nothing
    Requeue  by fence: after it the fence holds no more
    Cancel   by id
    Append   by (id, seq) and fence: a frame that is there from this attempt is a duplicate, and the first bytes stay
    Reap     by condition: of two that see the same expired row one changes it
    Purge    by condition

**Fences.** `attempt` of a row only grows: (id, worker, attempt) names one claim for ever. A fence holds while its row is
running under it, and while the row is queued again only because its lease ran out or its holder died and nobody has
claimed it since: finished work is never thrown away when nobody else has begun. A stale fence raises ClaimLost. A fence
without an attempt is for peers that know none: it holds only for a claim made without a lease (by that worker, where the
fence names one).

**Order.** A claim takes rows by priority (higher first), then by submit order, over all the queues it names. Submit
order is the plane's own, never that of the ids. Rows whose delay is not over are not there for a claim.

**Leases** are float seconds, judged by the plane's clock alone. A claim without one never expires. A claim made by this
process for itself (`local`) also names the process's holder, by which the plane can see that the process is gone.

**Errors.** InvocationNotFound, ClaimLost, ValueError for arguments that no plane takes, PlaneUnavailable when the
operation may be repeated. No exception of a driver leaves a store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from .operations import CANCELLED_QUEUED as CANCELLED_QUEUED
from .operations import CANCELLED_RUNNING as CANCELLED_RUNNING
from .operations import TERMINAL as TERMINAL
from .operations import Append as Append
from .operations import Appended as Appended
from .operations import Beat as Beat
from .operations import Beaten as Beaten
from .operations import Cancel as Cancel
from .operations import Cancelled as Cancelled
from .operations import Claim as Claim
from .operations import Claimed as Claimed
from .operations import Failure as Failure
from .operations import Fence as Fence
from .operations import FinalFrame as FinalFrame
from .operations import Finish as Finish
from .operations import Operation as Operation
from .operations import Purge as Purge
from .operations import Reap as Reap
from .operations import Reaped as Reaped
from .operations import Requeue as Requeue
from .operations import Requeued as Requeued
from .operations import Restore as Restore
from .operations import Submit as Submit
from .operations import check_restore as check_restore
from .operations import weight_of as weight_of
from .operations import whole_priority as whole_priority
from .operations import worker_lost as worker_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = [
    "CANCELLED_QUEUED",
    "CANCELLED_RUNNING",
    "TERMINAL",
    "Append",
    "Appended",
    "Beat",
    "Beaten",
    "Cancel",
    "Cancelled",
    "Claim",
    "Claimed",
    "Cursor",
    "Failure",
    "Fence",
    "FinalFrame",
    "Finish",
    "Interest",
    "Kind",
    "Movable",
    "News",
    "Operation",
    "Outcome",
    "Page",
    "Purge",
    "Reap",
    "Reaped",
    "Requeue",
    "Requeued",
    "Restore",
    "Row",
    "RowFilter",
    "Store",
    "Submit",
    "check_restore",
    "news_of",
    "weight_of",
    "whole_priority",
    "worker_lost",
]


class Outcome(NamedTuple):
    """How an invocation stands: a terminal state with its result or error, or `pending`, or `unknown`."""

    id: str
    state: str
    result: bytes | None = None
    error: Failure | None = None


class Page(NamedTuple):
    """Frames after a cursor, as (journal seq, bytes), and how the journal and the row stood when they were read.

    The frames are contiguous from the cursor on until the journal is closed or the row terminal; then the rest comes. What
    an earlier claim was given the number of and never wrote is left out, once a later one runs.
    closed: nothing follows the frames given here.
    """

    frames: list[tuple[int, bytes]]
    closed: bool
    state: str
    error: Failure | None


class Row(NamedTuple):
    """An invocation as people and tools see it. Times are seconds since the epoch by the plane's clock."""

    id: str
    queue: str
    state: str
    priority: int
    key: str | None
    attempt: int
    failures: int
    lost: int
    worker: str | None
    parent: str | None
    root: str | None
    trusted: bool
    cancel_requested: bool
    submitted_at: float
    not_before: float | None
    started_at: float | None
    lease_until: float | None
    finished_at: float | None
    error: Failure | None
    body: bytes | None

    def standing(self) -> str:
        """How it stands, as part of a sentence, for who waits for its end in vain."""
        if self.state == "queued" and self.attempt:
            return f"it is back in queue {self.queue!r} after attempt {self.attempt}"
        if self.state == "queued":
            return f"no worker has taken it from queue {self.queue!r} yet (all are busy, or none serves it)"
        if self.state != "running":
            return "it has ended just now"
        stopping = ", which is asked to cancel it" if self.cancel_requested else ""
        return f"it runs on worker {self.worker!r} (attempt {self.attempt}){stopping}"


class RowFilter(NamedTuple):
    """Which rows: newest first, at most `limit`.

    body: read the envelopes too; where no id is named a store may leave out those that are large.
    """

    id: str | None = None
    queue: str | None = None
    state: str | None = None
    key: str | None = None
    root: str | None = None
    limit: int = 100
    body: bool = False


class Cursor(NamedTuple):
    """A place in a journal, and how much of what comes after it is wanted at once: frames and bytes at most."""

    id: str
    since: int
    limit: int
    max_bytes: int


Kind: TypeAlias = Literal["queue", "id", "journal", "claims"]


class News(NamedTuple):
    """A hint that something changed: of which kind, under which name (None: any), maybe with the very thing.

    outcome: how the invocation ended, or that it is unknown. page: what a journal has after a cursor.
    """

    kind: Kind
    name: str | None = None
    outcome: Outcome | None = None
    page: tuple[Cursor, Page] | None = None


def news_of(op: Operation, answer: Any) -> Iterable[News]:
    """What `answer` to `op` means to those who wait in this process, without a read."""
    match op:
        case Submit():
            yield News("queue", op.queue)
        case Restore() if not op.more:
            yield from _row_news(op.id, op.queue, op.state)
        case Finish():
            id = op.fence.id
            yield News("id", id, Outcome(id, op.state, op.result, op.error) if answer else None)
            yield News("journal", id)
        case Append():
            yield News("journal", op.fence.id)
        case Requeue():
            yield from _row_news(op.fence.id, answer.queue if not answer.delayed else None, answer.state)
            yield News("claims", op.fence.worker)  # somebody else may have given it back
        case Cancel():
            if answer.what == "asked":
                yield News("claims", answer.worker)
            elif answer.what == "killed":
                yield from _row_news(op.id, None, "killed")
        case Reap():
            for id, queue, state in answer.rows:
                yield from _row_news(id, queue, state)
            for queue in answer.due:
                yield News("queue", queue)
        case _:
            pass


def _row_news(id: str, queue: str | None, state: str) -> Iterable[News]:
    if state in TERMINAL:
        yield News("id", id)
        yield News("journal", id)
    elif queue is not None:
        yield News("queue", queue)


class Interest(Protocol):
    """What is being waited for in this process, as the hub knows it."""

    def waits(self, kind: Kind) -> bool:
        """Whether anybody waits for news of `kind`."""
        ...

    def names(self, kind: Kind) -> Sequence[str]:
        """The names waited for under `kind`."""
        ...

    def cursors(self) -> Sequence[Cursor]:
        """The places in journals at which somebody waits for more."""
        ...

    def changed(self, notify: Callable[[], None], *, each: bool = False) -> None:
        """From now on call `notify`, and no other, whenever a kind or a queue becomes waited for or no longer is; with
        `each`, whenever anything becomes waited for."""
        ...


class Store(Protocol):
    """Where the rows live. One object serves one event loop; it owns no queue, no retry and no wait.

    Each method is called on the loop the store is at home on: `asyncio` is the loop of the plane's user when that is
    asyncio and the process's portal otherwise; `portal` is always the portal. A caller's cancellation may reach a read;
    `apply` runs in a task of its own and is never cancelled but by the end of its loop.
    """

    home: Literal["asyncio", "portal"]
    net: float
    """Seconds after which the hub looks unasked."""

    async def open(self) -> None: ...

    async def close(self) -> None:
        """Leave nothing open: also after an opening that failed, or that nobody waits for any more."""
        ...

    def lane(self, op: Operation) -> str | None:
        """Operations of one lane are applied in order, in batches; None: alone, beside all others."""
        ...

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Apply `ops`; for each, in order, its answer or the exception it raised."""
        ...

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        """How each of `ids` stands, in order."""
        ...

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        """Frames with seq > `since`: at most `limit`, and of at most `max_bytes` unless one alone is larger."""
        ...

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        """The claims of `worker`, as (id, attempt), whose cancellation is asked for."""
        ...

    async def rows(self, filter: RowFilter) -> list[Row]: ...

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        """Rows by (queue, state), of one queue or state only where named."""
        ...

    async def ages(self) -> dict[str, float]:
        """For each queue in which something is due: the seconds since the oldest of it was submitted."""
        ...

    async def due(self) -> list[Operation]:
        """What time asks for now: asked about every `net` seconds while somebody waits."""
        ...

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        """Tell what others change, until cancelled. Runs on the waiters' loop. Begins by telling each kind once,
        since something may have happened before."""
        ...


@runtime_checkable
class Movable(Protocol):
    """What a store offers besides, whose invocations can be moved: it takes `Restore`, and tells what would restore them.

    A store without these refuses a `Restore` with DispatchError.
    """

    async def copies(self, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
        """In submit order what would restore the rows after that of id `after` (None: from the first), of `queues` only
        where any are named: at most `limit`, and of at most `max_bytes` of bodies and results unless one alone is larger.

        Each stands as people see it, running too, and has of its journal from the beginning, gaps or not, what the bytes
        allow; where that is not all, `more` is true. Raises InvocationNotFound for `after`.
        """
        ...

    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """The frames with seq > `since` as (seq, bytes), gaps or not, within the limits that `page` has; [] at the end.

        Raises InvocationNotFound.
        """
        ...
