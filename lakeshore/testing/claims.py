"""Named checks: who gets which row, for how long, and what his fence is good for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from ..errors import ClaimLost, InvocationNotFound
from ..planes.contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Claim,
    Claimed,
    Fence,
    FinalFrame,
    Finish,
    Reap,
    Reaped,
    Requeue,
    Requeued,
)
from ..planes.contract.records import Failure, RowFilter
from .lab import LONG, Lab, fence_of, rule
from .rows import NOWHERE

if TYPE_CHECKING:
    from collections.abc import Callable

# Order ------------------------------------------------------------------------------------------------------------------


@rule
async def a_claim_starts_the_row(lab: Lab) -> None:
    """A claim makes a row running under its worker, one attempt further, and hands out all that the worker needs."""
    id = await lab.submit(body=b"\xffbody", parent="p", config=b"c")
    claimed = await lab.claim(lease=LONG)
    expected = Claimed(id, "q", b"\xffbody", 1, 0, 0, 0, lab.trust(True), "p", "p", b"c")
    lab.same("the claim", claimed, expected)
    row = await lab.stands(id, state="running", attempt=1, worker="w", failures=0, lost=0, cancel_requested=False)
    lab.same("that started_at is set", row.started_at is not None, True)
    if lab.clock is not None:
        now = lab.clock.now()
        lab.same("started_at and lease_until", (row.started_at, row.lease_until), (now, now + LONG))
    lab.same("what a second claim finds", await lab.claim_ids(), [])


@rule
async def claims_go_by_priority_then_by_submit_order(lab: Lab) -> None:
    """A claim takes the highest priority first, then the oldest submit, whatever the id; what comes back keeps its place."""
    ids = [await lab.submit(priority=priority) for priority in (0, -1, 5, 0, 2**63 - 1, -(2**63), 5)]
    best_first = [ids[n] for n in (4, 2, 6, 0, 3, 1, 5)]
    taken = await lab.plane.do(Claim(("q",), "w", 100, LONG))
    lab.same("the order", [claimed.id for claimed in taken], best_first)
    for claimed in taken:
        await lab.plane.do(Requeue(fence_of(claimed)))
    one_by_one = [(await lab.claim()).id for _ in ids]
    lab.same("the order one by one", one_by_one, best_first)


@rule
async def claims_go_over_all_their_queues(lab: Lab) -> None:
    """Over several queues a claim goes by priority, then by submit order, over all of them, and takes no others."""
    wanted = [("a", 0), ("b", 1), ("a", 1), ("c", 9), ("b", 0), ("a", -1)]
    ids = [await lab.submit(queue, priority=priority) for queue, priority in wanted]
    taken = await lab.claim_ids(queues=("b", "a", "nowhere"))
    lab.same("the order", taken, [ids[n] for n in (1, 2, 0, 4, 5)])
    lab.same("what no queues give", await lab.claim_ids(queues=()), [])
    await lab.stands(ids[3], state="queued")


@rule
async def a_claim_takes_no_more_than_its_limit(lab: Lab) -> None:
    """A claim takes up to `limit` rows, and an empty plane gives none."""
    lab.same("what an empty plane gives", await lab.claim_ids(), [])
    ids = [await lab.submit() for _ in range(5)]
    for limit, expected in [(0, []), (2, ids[:2]), (1, ids[2:3]), (9, ids[3:]), (1, [])]:
        lab.same(f"what a claim of {limit} takes", await lab.claim_ids(limit), expected)


@rule
async def no_row_goes_to_two_claims(lab: Lab) -> None:
    """Claims at the same time get different rows, and together all of them."""
    ids = {await lab.submit() for _ in range(24)}
    taken: list[str] = []

    async def claim(worker: str) -> None:
        while found := await lab.plane.do(Claim(("q",), worker, 2, LONG)):
            taken.extend(claimed.id for claimed in found)

    async with anyio.create_task_group() as group:
        for n in range(6):
            group.start_soon(claim, f"w{n}")
    lab.same("the rows taken", sorted(taken), sorted(ids))


@rule
async def a_repeated_poll_gets_the_same_claims(lab: Lab) -> None:
    """A claim repeated with its poll_id gets those of its claims that still hold, and new ones only when none does."""
    ids = [await lab.submit() for _ in range(5)]
    poll = Claim(("q",), "w", 2, LONG, poll_id="p1")
    first = await lab.plane.do(poll)
    lab.same("the rows of the first", [claimed.id for claimed in first], ids[:2])
    await lab.plane.do(Append(fence_of(first[0]), 0, (b"frame",)))
    lab.same("the claims of the repeat", await lab.plane.do(poll), first)
    other = await lab.plane.do(poll._replace(worker="v", limit=1))
    lab.same("the rows of another worker with this poll_id", [claimed.id for claimed in other], ids[2:3])
    other = await lab.plane.do(poll._replace(poll_id="p2", limit=1))
    lab.same("the rows of this worker's next poll", [claimed.id for claimed in other], ids[3:4])
    await lab.plane.do(Finish(fence_of(first[0]), "succeeded"))
    lab.same("what still holds", await lab.plane.do(poll), first[1:])
    await lab.plane.do(Requeue(fence_of(first[1])))
    again = await lab.plane.do(poll._replace(limit=1))
    lab.same("the claim when none holds", [(one.id, one.attempt) for one in again], [(ids[1], 2)])


# Leases -----------------------------------------------------------------------------------------------------------------


@rule
async def a_lease_ends_when_its_time_is_over(lab: Lab) -> None:
    """A claim expires when its lease is over, not before; worker and attempt stay on the row, and it is queued."""
    claimed = await lab.start(lease=lab.short)
    if lab.clock is not None:
        await lab.pass_time(lab.short - 0.25)
        lab.same("reaped too early", await lab.plane.do(Reap()), Reaped([], []))
        await lab.pass_time(0.25)
    else:
        await lab.pass_time(lab.short)
    await lab.stands(claimed.id, state="running")
    lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [(claimed.id, "q", "queued")])
    lab.same("the rows reaped again", (await lab.plane.do(Reap())).rows, [])
    await lab.stands(claimed.id, state="queued", lost=1, failures=0, attempt=1, worker="w")
    again = await lab.claim("v")
    lab.same("attempt and losses of the next claim", (again.id, again.attempt, again.lost), (claimed.id, 2, 1))
    await lab.stands(claimed.id, worker="v", lost=1)


@rule
async def a_heartbeat_renews_exactly_what_it_lists(lab: Lab) -> None:
    """A heartbeat renews the claims that it lists, from now on, and no other claim of its worker."""
    listed, silent = await lab.start(lease=lab.short), await lab.start(lease=lab.short)
    beat = Beat("w", ((listed.id, 1),), LONG)
    lab.same("the answer", await lab.plane.do(beat), Beaten([], []))
    if lab.clock is not None:
        await lab.stands(listed.id, lease_until=lab.clock.now() + LONG)
    await lab.pass_time(lab.short)
    lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [(silent.id, "q", "queued")])
    await lab.stands(listed.id, state="running", lost=0)


@rule
async def a_heartbeat_names_lost_claims(lab: Lab) -> None:
    """A heartbeat tells of each claim listed that holds no more: unknown, stale, given back, ended, or somebody else's."""
    mine, gone, ended = await lab.start(), await lab.start(), await lab.start()
    theirs = await lab.start("v", queue="second")
    await lab.plane.do(Requeue(fence_of(gone)))
    await lab.plane.do(Finish(fence_of(ended), "succeeded"))
    lost = [(NOWHERE, 1), (mine.id, 2), (mine.id, 0), (gone.id, 1), (ended.id, 1), (theirs.id, 1)]
    answer = await lab.plane.do(Beat("w", ((mine.id, 1), *lost), LONG))
    lab.same("the lost ones", (sorted(answer.lost), answer.cancel), (sorted(lost), []))
    lab.same("the answer about none", await lab.plane.do(Beat("w", (), LONG)), Beaten([], []))


@rule
async def a_claim_without_a_lease_never_expires(lab: Lab) -> None:
    """A claim made without a lease is never reaped, also after a heartbeat by one who beats all the same."""
    first = await lab.start(lease=None)
    await lab.stands(first.id, state="running", lease_until=None)
    lab.same("the answer to a heartbeat", await lab.plane.do(Beat("w", ((first.id, 1),), lab.short)), Beaten([], []))
    await lab.pass_time(lab.short if lab.clock is None else 1e8)
    lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [])
    lab.same("the answer to its ack", await lab.plane.do(Finish(Fence(first.id, "w"), "succeeded")), True)


@rule
async def a_journal_that_was_begun_needs_a_lease(lab: Lab) -> None:
    """A row whose journal is not empty is not given to a claim without a lease; the rows behind it are."""
    begun = await lab.start()
    await lab.plane.do(Append(fence_of(begun), 0, (b"frame",)))
    await lab.plane.do(Requeue(fence_of(begun)))
    behind = await lab.submit()
    lab.same("what a claim without a lease takes", await lab.claim_ids(lease=None), [behind])
    lab.same("what a claim with one takes", await lab.claim_ids(), [begun.id])


@rule
async def of_two_reaps_one_changes_the_row(lab: Lab) -> None:
    """Of reaps at the same time that see the same expired rows, each row is changed, and told, by exactly one."""
    ids = [(await lab.start(lease=lab.short)).id for _ in range(3)]
    await lab.pass_time(lab.short)
    told: list[str] = []

    async def reap() -> None:
        told.extend(id for id, _, _ in (await lab.plane.do(Reap())).rows)

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(reap)
    lab.same("the rows told", sorted(told), sorted(ids))
    for id in ids:
        await lab.stands(id, lost=1, attempt=1)


@rule
async def a_clean_goodbye_costs_nothing(lab: Lab) -> None:
    """A reap that does not count gives rows back free of cost, as a release does: the fence is gone."""
    claimed = await lab.start(lease=lab.short, max_lost=1)
    await lab.pass_time(lab.short)
    lab.same("the rows reaped", (await lab.plane.do(Reap(counted=False))).rows, [(claimed.id, "q", "queued")])
    await lab.stands(claimed.id, state="queued", lost=0, failures=0, attempt=1)
    await lab.refuses(Finish(fence_of(claimed), "succeeded"), ClaimLost)


@rule
async def a_dead_holder_is_reaped_at_once_and_a_live_one_late(lab: Lab) -> None:
    """Claims of a dead holder expire at once, with a lease or without; those of a live one after ten leases."""
    if lab.holder is None:
        return
    leased, free = await lab.start(), await lab.start(lease=None)
    foreign = await lab.submit()
    await lab.claim("v", lease=lab.short, local=False)
    expected = [(leased.id, "q", "queued"), (free.id, "q", "queued")]
    lab.same("the rows of the dead", sorted((await lab.plane.do(Reap(dead=(lab.holder,)))).rows), sorted(expected))
    await lab.pass_time(lab.short)
    alive = Reap(alive=(lab.holder,))
    lab.same("one without a holder", (await lab.plane.do(alive)).rows, [(foreign, "q", "queued")])
    if lab.clock is None:
        return
    claimed = await lab.start(queue="second", lease=lab.short)
    await lab.pass_time(10 * lab.short - 0.25)
    lab.same("reaped within ten leases", (await lab.plane.do(alive)).rows, [])
    await lab.pass_time(0.25)
    lab.same("reaped after ten leases", (await lab.plane.do(alive)).rows, [(claimed.id, "second", "queued")])


# Fences -----------------------------------------------------------------------------------------------------------------


def _fenced(fence: Fence) -> list[Any]:
    """Every operation that a fence is asked for."""
    return [
        Finish(fence, "succeeded", b"r", None, FinalFrame(0, b"f")),
        Append(fence, 0, (b"frame",)),
        Requeue(fence),
        Requeue(fence, "retry", 0.0, Failure("E", "")),
    ]


@rule
async def a_stale_fence_changes_nothing(lab: Lab) -> None:
    """Acks, frames, releases and retries by another worker, attempt or former holder are refused and change nothing."""
    claimed = await lab.start()
    await lab.plane.do(Requeue(fence_of(claimed)))
    queued = await lab.row(claimed.id)
    for op in _fenced(fence_of(claimed)):
        await lab.refuses(op, ClaimLost)
    lab.same("the queued row", await lab.row(claimed.id), queued)
    again = await lab.claim("v")
    running = await lab.row(claimed.id)
    for fence in (fence_of(claimed), fence_of(again, "w"), Fence(claimed.id, "v", 1), Fence(claimed.id, "v", 3)):
        for op in _fenced(fence):
            await lab.refuses(op, ClaimLost)
    for fence in (Fence(claimed.id), Fence(claimed.id, "v")):
        for op in _fenced(fence):
            await lab.refuses(op, ClaimLost)
    for op in _fenced(Fence(NOWHERE, "w", 1)):
        await lab.refuses(op, InvocationNotFound)
    lab.same("the running row", await lab.row(claimed.id), running)
    await lab.journal(claimed.id, [], False)
    lab.same("those that hold", await lab.held("v", again), [again.id])


@rule
async def a_fence_without_an_attempt_is_for_claims_without_a_lease(lab: Lab) -> None:
    """Without an attempt a fence speaks for a claim that has no lease, of its worker where it names one."""
    for fence in (Fence("", "w"), Fence("")):
        claimed = await lab.start(lease=None)
        fence = fence._replace(id=claimed.id)
        for op in _fenced(fence._replace(worker="v")):
            await lab.refuses(op, ClaimLost)
        lab.same("a frame", await lab.plane.do(Append(fence, 0, (b"frame",))), Appended(1, 0))
        lab.same("its repeat", await lab.plane.do(Append(fence, 0, (b"frame",))), Appended(0, 1))
        lab.same("the ack", await lab.plane.do(Finish(fence, "failed")), True)
        lab.same("its repeat", await lab.plane.do(Finish(fence, "failed")), False)
        await lab.refuses(Finish(fence._replace(worker="v"), "failed"), ClaimLost)
        claimed = await lab.start(lease=None)
        lab.same("a release", await lab.plane.do(Requeue(fence._replace(id=claimed.id))), Requeued("queued", "q"))
        await lab.refuses(Requeue(fence._replace(id=claimed.id)), ClaimLost)
        await lab.plane.do(Cancel(claimed.id))


@rule
async def a_release_costs_nothing(lab: Lab) -> None:
    """A release queues the row at once and counts in no budget; only the attempt has grown."""
    claimed = await lab.start()
    for attempt in (2, 3):
        lab.same("the answer", await lab.plane.do(Requeue(fence_of(claimed))), Requeued("queued", "q"))
        await lab.stands(claimed.id, state="queued", failures=0, lost=0, worker=None, error=None, not_before=None)
        await lab.refuses(Requeue(fence_of(claimed)), ClaimLost)
        claimed = await lab.claim()
        lab.same("the budgets of the next claim", claimed[3:6], (attempt, 0, 0))


@rule
async def a_retry_counts_a_failure_and_waits(lab: Lab) -> None:
    """A retry counts one failure, keeps its error for people, and is not due before its delay is over."""
    claimed = await lab.start()
    error = Failure("ValueError", "first try")
    answer = await lab.plane.do(Requeue(fence_of(claimed), "retry", lab.short, error))
    lab.same("the answer", answer, Requeued("queued", "q", True))
    row = await lab.stands(claimed.id, state="queued", failures=1, lost=0, worker=None, error=error)
    lab.same("the outcome", (await lab.plane.current_outcomes([claimed.id]))[0].state, "pending")
    if lab.clock is not None:
        lab.same("not_before", row.not_before, lab.clock.now() + lab.short)
        await lab.pass_time(lab.short - 0.25)
        lab.same("what a claim finds too early", await lab.claim_ids(), [])
        lab.same("what a reap finds too early", await lab.plane.do(Reap()), Reaped([], []))
        await lab.pass_time(0.25)
    else:
        await lab.pass_time(lab.short)
    again = await lab.claim()
    lab.same("the budgets of the next claim", again[3:6], (2, 1, 0))
    answer = await lab.plane.do(Requeue(fence_of(again), "retry"))
    lab.same("the answer without a delay", answer, Requeued("queued", "q", False))
    last = await lab.claim()
    lab.same("the failures of the last claim", last.failures, 2)
    await lab.plane.do(Finish(fence_of(last), "succeeded"))
    await lab.stands(claimed.id, error=None)


@rule
async def a_reap_tells_where_delayed_rows_became_due(lab: Lab) -> None:
    """A reap names each queue in which rows became due since, once."""
    started = [(await lab.start(queue=queue), lab.short if queue == "a" else LONG) for queue in ("a", "a", "b")]
    await lab.plane.many([Requeue(fence_of(claimed), "retry", delay) for claimed, delay in started])
    await lab.pass_time(lab.short)
    answer = await lab.plane.do(Reap())
    lab.same("the answer", (answer.rows, sorted(answer.due)), ([], ["a"]))
    lab.same("the answer to the next", await lab.plane.do(Reap()), Reaped([], []))
    lab.same("the number of rows to claim", len(await lab.claim_ids(queues=("a", "b"))), 2)


# Lapsed claims ----------------------------------------------------------------------------------------------------------


def _speaking(claimed: Claimed) -> list[tuple[Any, Any, dict[str, Any]]]:
    """What a claim may do after it was reaped: the operation, its answer, and how the row then stands."""
    fence = fence_of(claimed)
    running = {"state": "running", "worker": "w"}
    return [
        (Finish(fence, "succeeded", b"r"), True, {"state": "succeeded"}),
        (Beat("w", ((claimed.id, claimed.attempt),), LONG), Beaten([], []), running),
        (Append(fence, 0, (b"frame",)), Appended(1, 0), running),
        (Requeue(fence), Requeued("queued", "q"), {"state": "queued", "worker": None}),
        (Requeue(fence, "retry"), Requeued("queued", "q"), {"state": "queued", "failures": 1}),
    ]


@rule
async def a_lapsed_claim_speaks_until_somebody_else_has_begun(lab: Lab) -> None:
    """A claim that was reaped may ack, beat, append and give back as if still running, and the loss is taken back."""
    for n in range(5):
        claimed = await lab.lapse()
        op, answer, fields = _speaking(claimed)[n]
        lab.same(f"the answer to {op}", await lab.plane.do(op), answer)
        await lab.stands(claimed.id, lost=0, attempt=1, **fields)
        await lab.pass_time(lab.short)
        rows = (await lab.plane.do(Reap())).rows
        lab.same("the rows reaped later", rows, [(claimed.id, "q", "queued")] if isinstance(op, Append) else [])
        for row in await lab.plane.rows(RowFilter(state="queued")):
            await lab.plane.do(Cancel(row.id))


@rule
async def a_lapsed_claim_is_silent_when_somebody_else_has_begun(lab: Lab) -> None:
    """A claim that was reaped and whose row was claimed again, or cancelled, holds no more."""
    endings: list[Callable[[str], Any]] = [lambda id: Claim(("q",), "w", 1, LONG), Cancel]
    for ending in endings:
        claimed = await lab.lapse()
        await lab.plane.do(ending(claimed.id))
        before = await lab.row(claimed.id)
        for op, _, _ in _speaking(claimed):
            if not isinstance(op, Beat):
                await lab.refuses(op, ClaimLost)
        lab.same("those that hold", await lab.held("w", claimed), [])
        lab.same("the row", await lab.row(claimed.id), before)
