"""Named checks: what waits, and who wakes it."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from ..errors import InvocationNotFound
from ..planes.contract.operations import Append, Cancel, Claimed, FinalFrame, Finish, Requeue
from ..planes.contract.records import Failure, Outcome, RowFilter
from .lab import LONG, Lab, fence_of, rule
from .rows import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

T = TypeVar("T")

SETTLED = 0.1
"""Seconds after which a wait that was begun has surely looked in vain; the check holds without them, only weaker."""


async def woken(lab: Lab, wait: Callable[[], Awaitable[T]], *steps: Callable[[], Awaitable[Any]]) -> T:
    """What `wait` gives; another task takes the steps once it waits. The check's own patience bounds it."""
    answers: list[T] = []

    async def waiter() -> None:
        answers.append(await wait())

    async with anyio.create_task_group() as group:
        group.start_soon(waiter)
        await anyio.sleep(SETTLED)
        lab.same("what a wait gives before there is anything", answers, [])
        for step in steps:
            await step()
    return answers[0]


# Outcomes ---------------------------------------------------------------------------------------------------------------


@rule
async def a_wait_for_an_outcome_is_woken(lab: Lab) -> None:
    """Whoever waits for an outcome is woken by the ack, the cancel or the last loss; one that is there is given at once."""
    claimed = await lab.start()
    ended = Outcome(claimed.id, "succeeded", b"r")
    finish = partial(lab.plane.do, Finish(fence_of(claimed), "succeeded", b"r"))
    lab.same("the outcome", await woken(lab, lambda: lab.plane.outcome(claimed.id), finish), ended)
    lab.same("the outcome of what has ended", await lab.plane.outcome(claimed.id), ended)
    id = await lab.submit()
    came = await woken(lab, lambda: lab.plane.outcome(id), partial(lab.plane.do, Cancel(id)))
    lab.same("the state after a cancel", came.state, "killed")
    claimed = await lab.start()
    asked = [partial(lab.plane.do, Cancel(claimed.id)), partial(lab.plane.do, Requeue(fence_of(claimed)))]
    came = await woken(lab, lambda: lab.plane.outcome(claimed.id), *asked)
    lab.same("the state after a cancel and a release", came.state, "killed")
    await lab.submit()
    claimed = await lab.claim(lease=lab.short, max_lost=1, local=False)
    # No step but time: somebody who waits looks after the leases.
    waiting = partial(lab.plane.outcome, claimed.id)
    if lab.clock is None:
        came = await waiting()
    else:
        came = await woken(lab, waiting, partial(lab.pass_time, lab.short))
    lab.same("state and error after the loss", (came.state, came.error and came.error.type), ("failed", "WorkerLost"))


@rule
async def a_wait_for_an_outcome_ends_with_its_time(lab: Lab) -> None:
    """A wait that runs out of time is a TimeoutError and leaves the invocation alone; one for an unknown id ends at once."""
    id = await lab.submit()
    before = await lab.row(id)
    for timeout in (0.0, 0.05):
        await ends_with(lab, partial(lab.plane.outcome, id, timeout=timeout), TimeoutError)
        await ends_with(lab, partial(lab.plane.next_page, id, -1, timeout=timeout), TimeoutError)
    await ends_with(lab, partial(lab.plane.outcome, NOWHERE), InvocationNotFound)
    await ends_with(lab, partial(lab.plane.next_page, NOWHERE, -1), InvocationNotFound)
    lab.same("the row", await lab.row(id), before)
    for timeout in (0.0, 0.05):
        lab.same("a claim in vain", await lab.plane.claim(["nowhere"], "w", timeout=timeout), [])


async def ends_with(lab: Lab, wait: Callable[[], Awaitable[Any]], error: type[Exception]) -> None:
    """The wait raises `error`."""
    try:
        came = await wait()
    except error:
        return
    raise AssertionError(f"{lab.sentence} expected {error.__name__}, came {came!r}")


@rule
async def many_waiters_and_a_claimer_share_one_loop(lab: Lab) -> None:
    """Sixty-four waiters, a claimer that finishes their invocations, and two waiters for each all come to their end."""
    ids = [await lab.submit() for _ in range(64)]
    outcomes: list[Outcome] = []

    async def wait(id: str) -> None:
        outcomes.append(await lab.plane.outcome(id))

    async def work() -> None:
        for _ in ids:
            (claimed,) = await lab.plane.claim(["q"], "w", lease=LONG, timeout=None)
            await lab.plane.do(Finish(fence_of(claimed), "succeeded", claimed.id.encode()))

    async with anyio.create_task_group() as group:
        for id in [*ids, *ids]:
            group.start_soon(wait, id)
        group.start_soon(work)
    expected = sorted(Outcome(id, "succeeded", id.encode()) for id in [*ids, *ids])
    lab.same("the outcomes", sorted(outcomes), expected)


@rule
async def a_cancel_can_wait_for_the_end(lab: Lab) -> None:
    """A cancel that waits comes back when the row has ended; the worker who waits for cancellations is told."""
    claimed = await lab.start()
    told: list[tuple[str, int]] = []

    async def worker() -> None:
        told.extend(await lab.plane.next_cancels("w", LONG))
        await lab.plane.do(Finish(fence_of(claimed), "killed", None, Failure("Cancelled", "while running")))

    async with anyio.create_task_group() as group:
        group.start_soon(worker)
        await anyio.sleep(SETTLED)
        lab.same("the answer", await lab.plane.cancel(claimed.id, wait=True), True)
        await lab.stands(claimed.id, state="killed")
    lab.same("what the worker was told", told, [(claimed.id, claimed.attempt)])
    lab.same("the answer after the end", await lab.plane.cancel(claimed.id, wait=True), False)


# Frames -----------------------------------------------------------------------------------------------------------------


@rule
async def a_reader_is_woken(lab: Lab) -> None:
    """Whoever waits for frames is woken by the next one, by the end of the row, and by whoever ends it without a worker."""
    claimed = await lab.start()
    fence, id = fence_of(claimed), claimed.id
    append = partial(lab.plane.do, Append(fence, 0, (b"a",)))
    page = await woken(lab, lambda: lab.plane.next_page(id, -1), append)
    lab.same("the frames", (page.frames, page.closed), ([(0, b"a")], False))
    lab.same("the frames that are there", (await lab.plane.next_page(id, -1)).frames, [(0, b"a")])
    gap = partial(lab.plane.do, Append(fence, 2, (b"c",)))
    missing = partial(lab.plane.do, Append(fence, 1, (b"b",)))
    page = await woken(lab, lambda: lab.plane.next_page(id, 0), gap, missing)
    lab.same("the frames after a gap was filled", page.frames[0], (1, b"b"))
    finish = partial(lab.plane.do, Finish(fence, "succeeded", None, None, FinalFrame(3, b"END")))
    page = await woken(lab, lambda: lab.plane.next_page(id, 2), finish)
    lab.same("the end", (page.frames, page.closed, page.state), ([(3, b"END")], True, "succeeded"))
    page = await lab.plane.next_page(id, 3)
    lab.same("after the end", (page.frames, page.closed), ([], True))
    id = await lab.submit()
    page = await woken(lab, lambda: lab.plane.next_page(id, -1), partial(lab.plane.do, Cancel(id)))
    lab.same("the end by a cancel", (len(page.frames), page.closed, page.state), (1, True, "killed"))
    claimed = await lab.start()
    finish = partial(lab.plane.do, Finish(fence_of(claimed), "failed"))
    page = await woken(lab, lambda: lab.plane.next_page(claimed.id, -1), finish)
    lab.same("the end without a frame", (page.frames, page.closed, page.state), ([], True, "failed"))


# Claims -----------------------------------------------------------------------------------------------------------------


def _claiming(lab: Lab) -> Callable[[], Awaitable[list[Claimed]]]:
    return partial(lab.plane.claim, ["p", "q"], "v", lease=LONG, timeout=None)


@rule
async def a_waiting_claim_is_woken(lab: Lab) -> None:
    """A waiting claim gets what is submitted, given back, or due, and a row whose worker is lost."""
    (claimed,) = await woken(lab, _claiming(lab), lab.submit)
    fence = fence_of(claimed, "v")
    for back in (Requeue(fence), Requeue(fence, "retry"), Requeue(fence, "retry", lab.short)):
        back = back._replace(fence=fence_of(claimed, "v"))
        steps = partial(lab.plane.do, back), partial(lab.pass_time, back.delay)
        (again,) = await woken(lab, _claiming(lab), *steps)
        lab.same(f"the claim after a {back.reason}", (again.id, again.attempt), (claimed.id, claimed.attempt + 1))
        claimed = again
    await lab.plane.do(Requeue(fence_of(claimed, "v")))
    claimed = await lab.claim(lease=lab.short, local=False)
    waiting = _claiming(lab)
    (again,) = await (waiting() if lab.clock is None else woken(lab, waiting, partial(lab.pass_time, lab.short)))
    lab.same("the claim after a loss", (again.id, again.lost), (claimed.id, 1))


@rule
async def every_waiting_claim_gets_its_row(lab: Lab) -> None:
    """As many claimers as rows come are woken, also when rows become due while others claim without waiting."""
    started = [await lab.start(queue="a") for _ in range(3)]
    await lab.plane.many([Requeue(fence_of(claimed), "retry", lab.short) for claimed in started])
    taken: list[str] = []

    async def claim(worker: str) -> None:
        taken.extend(one.id for one in await lab.plane.claim(["a"], worker, lease=LONG, timeout=None))

    async with anyio.create_task_group() as group:
        group.start_soon(claim, "v1")
        group.start_soon(claim, "v2")
        await anyio.sleep(SETTLED if lab.clock is not None else 0)
        await lab.pass_time(lab.short)
        # It may find rows that are due before anybody was told of them; the others have to be told all the same.
        taken += await lab.claim_ids(1, queues=("a",))
    lab.same("the rows taken", sorted(taken), sorted(row.id for row in await lab.plane.rows(RowFilter(queue="a"))))
