"""What the named checks share: a fresh plane, its clock, the comparisons, and the register they stand in."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import anyio

from ..errors import ClaimLost, InvocationNotFound
from ..planes.contract.operations import Beat, Claim, Claimed, Fence, Finish, Reap, Submit
from ..planes.contract.records import Page, Row, RowFilter

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..planes.plane import Plane

__all__ = ["LONG", "RULES", "Clock", "Lab", "NamedRule", "fence_of", "kind_of", "rule"]

LONG = 600.0
"""Seconds: leases and delays that do not end during a check."""


class Clock(Protocol):
    """The time that a plane under test goes by."""

    def now(self) -> float:
        """Seconds since the epoch."""
        ...

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass at once."""
        ...


def kind_of(answer: Any) -> Any:
    """An answer as checks compare it: of an exception which of the contract's kinds it is."""
    if isinstance(answer, Exception):
        return next((kind for kind in (InvocationNotFound, ClaimLost, ValueError) if isinstance(answer, kind)), answer)
    return answer


def fence_of(claimed: Claimed, worker: str = "w") -> Fence:
    """The fence of a claim that `worker` made."""
    return Fence(claimed.id, worker, claimed.attempt)


@dataclass
class Lab:
    """One fresh plane and what a check needs beside it. The comparisons raise AssertionError with a whole sentence.

    patience: seconds within which `eventually` has to see what it looks for. short: a lease or delay that the check can
    let go by.
    """

    plane: Plane
    clock: Clock | None
    holder: str | None
    crowd: int
    patience: float
    sentence: str
    _submitted: int = field(default=0)

    @property
    def short(self) -> float:
        return 0.1 if self.clock is None else 8.0

    def trust(self, said: bool) -> bool:
        """The trust mark of a row whose submit said `said`: what is not of this machine is never trusted."""
        return said and self.plane.local

    def kept(self, result: bytes | None) -> bytes | None:
        """What becomes of a result: that it is empty, and not none, is said on this machine only."""
        return result if self.plane.local else result or None

    async def pass_time(self, seconds: float) -> None:
        """Let `seconds` go by on the plane's clock."""
        if self.clock is None:
            await anyio.sleep(seconds + 0.01)
        else:
            self.clock.advance(seconds)

    # Comparisons

    def same(self, what: str, came: Any, expected: Any) -> None:
        """`came` equals `expected`."""
        if came != expected:
            raise AssertionError(f"{self.sentence} {what}: expected {expected!r}, came {came!r}")

    async def refuses(self, op: Any, error: type[Exception]) -> None:
        """The plane refuses `op` with `error`."""
        try:
            answer = f"{await self.plane.do(op)!r}"
        except Exception as exc:
            if not isinstance(exc, error):
                raise AssertionError(f"{self.sentence} {op}: expected {error.__name__}, came {exc!r}") from exc
        else:
            raise AssertionError(f"{self.sentence} {op}: expected {error.__name__}, came the answer {answer}")

    async def stands(self, id: str, **fields: Any) -> Row:
        """The row of `id` has these fields; it is given back."""
        row = await self.row(id)
        for name, expected in fields.items():
            self.same(f"{name} of the row", getattr(row, name), expected)
        return row

    async def journal(self, id: str, expected: list[tuple[int, bytes]], closed: bool) -> Page:
        """A page from the start has these frames and this end; it is given back."""
        page = await self.plane.page(id)
        self.same("the frames of the journal", page.frames, expected)
        self.same("closed", page.closed, closed)
        return page

    async def eventually(self, what: str, look: Callable[[], Awaitable[Any]], expected: Any) -> None:
        """`look` gives `expected` before the check has lost patience."""
        until = anyio.current_time() + self.patience
        while True:
            came = await look()
            if came == expected or anyio.current_time() >= until:
                break
            await anyio.sleep(0.01)
        self.same(f"{what}, within {self.patience:g} seconds", came, expected)

    # Steps that many checks begin with

    async def row(self, id: str) -> Row:
        """The row of `id`, envelope included."""
        rows = await self.plane.rows(RowFilter(id=id, body=True))
        self.same(f"the number of rows with id {id!r}", len(rows), 1)
        return rows[0]

    async def submit(self, queue: str = "q", **fields: Any) -> str:
        """Submit a new invocation; its id."""
        self._submitted += 1
        # Ids that sort against the order in which they are submitted.
        id = str(fields.pop("id", f"i{999 - self._submitted:03}"))
        op = Submit(id, queue, fields.pop("body", b"body of " + id.encode()), **fields)
        self.same("the id that a new submit answers", await self.plane.do(op), id)
        return id

    async def claim(self, worker: str = "w", *, queue: str = "q", lease: float | None = LONG, **fields: Any) -> Claimed:
        """Claim exactly one row."""
        found = await self.plane.do(Claim((queue,), worker, lease=lease, **fields))
        self.same("the number of rows that a claim gets", len(found), 1)
        claimed: Claimed = found[0]
        return claimed

    async def start(
        self, worker: str = "w", *, lease: float | None = LONG, max_lost: int = 5, **fields: Any
    ) -> Claimed:
        """Submit a new invocation and claim it."""
        id = await self.submit(**fields)
        claimed = await self.claim(worker, queue=fields.get("queue", "q"), lease=lease, max_lost=max_lost)
        self.same("the id that is claimed", claimed.id, id)
        return claimed

    async def lapse(self, claimed: Claimed | None = None, *, max_lost: int = 5) -> Claimed:
        """A claim that has just been reaped for its lease."""
        claimed = claimed or await self.start(lease=self.short, max_lost=max_lost)
        await self.pass_time(self.short)
        self.same("the rows reaped", (await self.plane.do(Reap())).rows, [(claimed.id, claimed.queue, "queued")])
        return claimed

    async def in_each_state(self, check: Callable[[str], Awaitable[None]]) -> None:
        """Check while the one invocation there is queued, runs, is queued again since its lease ran out, and has ended."""
        await check("queued")
        claimed = await self.claim(lease=self.short)
        await check("running")
        await self.lapse(claimed)
        await check("queued")
        await self.plane.do(Finish(fence_of(claimed), "succeeded"))
        await check("succeeded")

    async def held(self, worker: str, *claims: Claimed) -> list[str]:
        """Those of the claims, by id, that still hold; asked with a heartbeat."""
        listed = tuple((claimed.id, claimed.attempt) for claimed in claims)
        beaten = await self.plane.do(Beat(worker, listed, LONG))
        return [id for id, attempt in listed if (id, attempt) not in beaten.lost]

    async def claim_ids(
        self, limit: int = 100, *, queues: tuple[str, ...] = ("q",), lease: float | None = LONG
    ) -> list[str]:
        """The ids that a claim takes, in order."""
        return [claimed.id for claimed in await self.plane.do(Claim(queues, "w", limit, lease))]


class NamedRule(NamedTuple):
    """One check: its name, the sentence it holds a plane to, and the function."""

    name: str
    sentence: str
    check: Callable[[Lab], Awaitable[None]]


RULES: list[NamedRule] = []
"""Every named check, in the order in which they run."""


def rule(check: Callable[[Lab], Awaitable[None]]) -> Callable[[Lab], Awaitable[None]]:
    """Enter a check; its docstring is the sentence."""
    RULES.append(NamedRule(check.__name__, inspect.cleandoc(check.__doc__ or "").replace("\n", " "), check))
    return check
