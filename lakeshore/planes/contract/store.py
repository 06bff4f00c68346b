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

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .news import Cursor, Kind, News
    from .operations import Operation, Restore
    from .records import Outcome, Page, Row, RowFilter

__all__ = ["Interest", "Movable", "Store"]


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
