"""Named checks: a caller who leaves, at whatever place he waits, takes nothing with him and breaks nothing."""

from __future__ import annotations

from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import anyio
from anyio.lowlevel import checkpoint

from ..errors import ClaimLost
from ..planes.contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claimed,
    Finish,
    Operation,
    Requeue,
    Requeued,
    Submit,
)
from ..planes.contract.records import RowFilter
from .lab import LONG, Lab, fence_of, rule

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Generator

Way: TypeAlias = Literal["scope", "native"]
WAYS: tuple[Way, ...] = ("scope", "native")
"""How a caller is made to leave: by a cancel scope, or as asyncio's own `Task.cancel` does it."""


LATER = (0, 1, 2, 4, 8, 16, 32)
"""Turns of the event loop after which a caller leaves: at once, or while what he waits for is under way."""


class Watched:
    """Awaits a coroutine and calls `reached(trap)` at the n-th place where it waits; `places` counts them."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], at: int, reached: Callable[[Any], None]) -> None:
        self._coroutine, self._at, self._reached = coroutine, at, reached
        self.places = 0

    def __await__(self) -> Generator[Any, Any, Any]:
        step: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            try:
                trap = step()
            except StopIteration as stop:
                return stop.value
            self.places += 1
            if self.places == self._at:
                self._reached(trap)
            try:
                step = partial(self._coroutine.send, (yield trap))
            except BaseException as exc:
                step = partial(self._coroutine.throw, exc)


class Caller:
    """Makes one call and leaves it at its n-th place, `later` turns of the loop after it began to wait there.

    The native way cancels what the task waits for, as asyncio does; where there is no such thing (on trio, at a bare
    checkpoint) the caller stays.
    """

    def __init__(self, way: Way, at: int, later: int) -> None:
        self._way, self._at, self._later = way, at, later
        self._scope = anyio.CancelScope()
        self._waits = anyio.Event()
        self._trap: Any = None
        self.returned: list[Any] = []
        """What the call returned; empty where the caller left before."""
        self.through = False
        """Whether the call has fewer places than the one to leave at."""

    async def make(self, call: Coroutine[Any, Any, Any], beside: Callable[[], Awaitable[Any]] | None) -> None:
        watched = Watched(call, self._at, self._reached)
        with self._scope:
            async with anyio.create_task_group() as group:
                group.start_soon(self._leave_later)
                if beside is not None:
                    group.start_soon(_soon, beside)
                try:
                    self.returned.append(await watched)
                except anyio.get_cancelled_exc_class():
                    if self._way == "scope":
                        raise
                group.cancel_scope.cancel()
        self.through = watched.places < self._at

    def _reached(self, trap: Any) -> None:
        self._trap = trap
        self._waits.set()
        if self._later == 0:
            self._leave()

    async def _leave_later(self) -> None:
        await self._waits.wait()
        for _ in range(self._later):
            await checkpoint()
        self._leave()

    def _leave(self) -> None:
        if self._way == "scope":
            self._scope.cancel()
        elif hasattr(self._trap, "cancel"):
            self._trap.cancel()


async def _soon(step: Callable[[], Awaitable[Any]]) -> None:
    for _ in range(8):
        await checkpoint()
    with anyio.CancelScope(shield=True):
        await step()


async def leave_everywhere(
    call: Callable[[], Coroutine[Any, Any, Any]],
    after: Callable[[list[Any]], Awaitable[None]],
    beside: Callable[[], Awaitable[Any]] | None = None,
) -> None:
    """Call and leave, at every place where the call waits, at once and later; `after` judges what is left each time.

    after: takes what the call returned, as a list that is empty where it did not. beside: runs as a task meanwhile.
    """
    for way in WAYS:
        through = False
        for at in count(1):
            for later in LATER:
                caller = Caller(way, at, later)
                await caller.make(call(), beside)
                await after(caller.returned)
                through = through or caller.through
            if through:
                break


async def none_running(lab: Lab) -> None:
    """Soon no row is running."""

    async def running() -> dict[tuple[str, str], int]:
        return await lab.plane.counts(None, "running")

    await lab.eventually("the rows running", running, {})


async def give_back(lab: Lab, found: list[list[Claimed]]) -> None:
    """Release what claims returned; then no row is running, once those that were left are back too."""
    await lab.plane.settled()
    for claimed in [claimed for claims in found for claimed in claims]:
        await lab.plane.do(Requeue(fence_of(claimed)))
    await none_running(lab)


@rule
async def a_claimer_who_leaves_leaves_no_row_running(lab: Lab) -> None:
    """A claim whose caller is cancelled, wherever it waits, is given back at once and costs no budget."""
    id = await lab.submit()
    await leave_everywhere(partial(lab.plane.claim, ["q"], "w", lease=LONG), partial(give_back, lab))
    await lab.stands(id, state="queued", failures=0, lost=0)


@rule
async def a_waiting_claimer_who_leaves_leaves_no_row_running(lab: Lab) -> None:
    """A claim that waits, and whose caller is cancelled while the row arrives, leaves that row to others."""

    async def after(returned: list[list[Claimed]]) -> None:
        await give_back(lab, returned)
        for row in await lab.plane.rows(RowFilter(state="queued")):
            lab.same("the budgets of a row left", (row.failures, row.lost), (0, 0))
            await lab.plane.do(Cancel(row.id))

    claim = partial(lab.plane.claim, ["q"], "w", lease=LONG, timeout=None)
    await leave_everywhere(claim, after, lab.submit)


@rule
async def a_crowd_of_claimers_who_leave_leaves_no_row_running(lab: Lab) -> None:
    """Twelve tasks that claim from one plane, each cancelled after another number of steps, leave no row running."""
    for _ in range(12):
        await lab.submit()
    for round in range(15):
        scopes = [anyio.CancelScope() for _ in range(12)]
        found: list[list[Claimed]] = []

        async def claim(scope: anyio.CancelScope, found: list[list[Claimed]] = found) -> None:
            with scope:
                while True:
                    found.append(await lab.plane.claim(["q"], "w", lease=LONG, timeout=None))

        async with anyio.create_task_group() as group:
            for scope in scopes:
                group.start_soon(claim, scope)
            for scope in scopes:
                for _ in range(round):
                    await checkpoint()
                scope.cancel()
        await give_back(lab, found)
    lab.same("counts", await lab.plane.counts(), {("q", "queued"): 12})


def _verbs(claimed: Claimed) -> list[tuple[Operation, list[Any]]]:
    """Operations on a claim, and what a repeat may answer after one that was left under way."""
    fence, id = fence_of(claimed), claimed.id
    return [
        (Submit(f"{id}-child", "second", b""), [f"{id}-child"]),
        (Beat("w", ((id, claimed.attempt),), LONG), [Beaten([], [])]),
        (Append(fence, 0, (b"frame",)), [Appended(1, 0), Appended(0, 1)]),
        (Cancel(id), [Cancelled("asked", "w")]),
        (Finish(fence, "succeeded", b"r"), [True, False]),
        (Requeue(fence), [Requeued("queued", "q"), ClaimLost]),
    ]


@rule
async def an_operation_that_was_left_can_be_repeated(lab: Lab) -> None:
    """An operation whose caller is cancelled, wherever it waits, was done whole or not at all; the next works at once."""
    for n in range(6):
        await _leave_and_repeat(lab, n)


async def _leave_and_repeat(lab: Lab, n: int) -> None:
    claimed = await lab.start()

    async def after(returned: list[Any]) -> None:
        nonlocal claimed
        op, allowed = _verbs(claimed)[n]
        (answer,) = await lab.plane.many([op])
        if (type(answer) if isinstance(answer, Exception) else answer) not in allowed:
            raise AssertionError(f"{lab.sentence} {op}, repeated: expected one of {allowed}, came {answer!r}")
        await lab.plane.do(Cancel(claimed.id))
        claimed = await lab.start()

    await leave_everywhere(lambda: lab.plane.do(_verbs(claimed)[n][0]), after)


@rule
async def a_wait_that_was_left_disturbs_nobody(lab: Lab) -> None:
    """Whoever leaves a wait for an outcome or a frame leaves the row alone, and the others who wait for it are woken."""
    for verb in (lab.plane.outcome, partial(lab.plane.next_page, since=-1)):
        claimed = await lab.start()
        stayed: list[Any] = []

        async def stay(
            verb: Callable[[str], Coroutine[Any, Any, Any]] = verb, id: str = claimed.id, stayed: list[Any] = stayed
        ) -> None:
            stayed.append(await verb(id))

        async with anyio.create_task_group() as group:
            group.start_soon(stay)
            for round in range(20):
                with anyio.CancelScope() as scope:
                    async with anyio.create_task_group() as leavers:
                        leavers.start_soon(verb, claimed.id)
                        for _ in range(round):
                            await checkpoint()
                        scope.cancel()
            lab.same("what they got who stayed", stayed, [])
            await lab.stands(claimed.id, state="running")
            await lab.plane.do(Finish(fence_of(claimed), "succeeded"))
        lab.same("the state they got who stayed", [came.state for came in stayed], ["succeeded"])
