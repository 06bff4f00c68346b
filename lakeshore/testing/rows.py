"""Named checks: the rows of the transition table, from the submit to the purge, but for what the claim's fence decides."""

from __future__ import annotations

from collections import Counter
from typing import Any

import anyio

from ..errors import ClaimLost, InvocationNotFound
from ..planes.contract.failures import CANCELLED_QUEUED, CANCELLED_RUNNING, final_error, worker_lost
from ..planes.contract.operations import (
    Append,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claim,
    Finish,
    Purge,
    Reap,
    Requeue,
    Requeued,
    Submit,
)
from ..planes.contract.records import TERMINAL, Failure, Outcome, RowFilter
from .lab import LONG, Lab, fence_of, kind_of, rule

NOWHERE = "no-such-invocation"


# Submit -----------------------------------------------------------------------------------------------------------------


@rule
async def a_submit_makes_a_queued_row(lab: Lab) -> None:
    """A submit makes a row that is queued, due, and has no history; its queue need not have been there."""
    id = await lab.submit("new-queue", body=b"\x00envelope", key="k", priority=-3, trusted=False, config=b"c")
    row = await lab.stands(id, queue="new-queue", state="queued", body=b"\x00envelope", key="k", priority=-3)
    await lab.stands(id, attempt=0, failures=0, lost=0, worker=None, trusted=False, cancel_requested=False)
    await lab.stands(id, not_before=None, started_at=None, lease_until=None, finished_at=None, error=None)
    if lab.clock is not None:
        lab.same("submitted_at", row.submitted_at, lab.clock.now())
    lab.same("counts", await lab.plane.counts(), {("new-queue", "queued"): 1})


@rule
async def a_submit_is_idempotent_by_id(lab: Lab) -> None:
    """A second submit of an id answers the id and changes nothing, whatever its arguments and the row's state."""
    id = await lab.submit(body=b"first")
    again = Submit(id, "other", b"second", "key", 7, "parent", False, b"config")

    async def repeat(state: str) -> None:
        before = await lab.stands(id, state=state, queue="q", body=b"first")
        lab.same(f"the answer to a repeat while {state}", await lab.plane.do(again), id)
        lab.same("the row after it", await lab.row(id), before)

    await lab.in_each_state(repeat)


@rule
async def a_submit_is_idempotent_by_key(lab: Lab) -> None:
    """A key belongs to one invocation of its queue for as long as the row exists, also after its end."""
    id = await lab.submit(key="k")
    lab.same("the answer to another id with the key", await lab.plane.do(Submit("other", "q", b"", "k")), id)
    lab.same("how the other id stands", await lab.plane.current_outcomes(["other"]), [Outcome("other", "unknown")])
    await lab.submit("second-queue", key="k")
    await lab.plane.do(Finish(fence_of(await lab.claim()), "failed"))
    lab.same("the answer after the end", await lab.plane.do(Submit("other", "q", b"", "k")), id)
    await lab.pass_time(lab.short)
    lab.same("rows purged", await lab.plane.do(Purge(lab.short / 2)), 1)
    lab.same("the answer after a purge", await lab.plane.do(Submit("other", "q", b"", "k")), "other")


@rule
async def concurrent_submits_with_one_key_are_one_invocation(lab: Lab) -> None:
    """Submits with one key at the same time answer one id, raise nothing, and make one row."""
    answers: list[str] = []

    async def submit(id: str) -> None:
        answers.append(await lab.plane.do(Submit(id, "q", b"", "k")))

    async with anyio.create_task_group() as group:
        for n in range(lab.crowd):
            group.start_soon(submit, f"c{n}")
    lab.same("how many were answered", len(answers), lab.crowd)
    lab.same("the number of different answers", len(set(answers)), 1)
    lab.same("counts", await lab.plane.counts(), {("q", "queued"): 1})
    lab.same("the row that is there", [row.id for row in await lab.plane.rows(RowFilter())], answers[:1])


@rule
async def the_root_is_the_parents_root(lab: Lab) -> None:
    """A row's root is its parent's root, or the parent itself, known or not; a row without a parent has none."""
    first = await lab.submit(id="first")
    await lab.submit(id="second", parent=first)
    await lab.submit(id="third", parent="second")
    await lab.submit(id="stray", parent="never-seen")
    for id, parent, root in [
        ("first", None, None), ("second", "first", "first"), ("third", "second", "first"),
        ("stray", "never-seen", "never-seen"),
    ]:  # fmt: skip
        await lab.stands(id, parent=parent, root=root)
    taken = {claimed.id: claimed for claimed in await lab.plane.do(Claim(("q",), "w", 9))}
    lab.same("parent and root of a claim", (taken["third"].parent, taken["third"].root), ("second", "first"))


@rule
async def the_trust_mark_and_config_travel_with_the_claim(lab: Lab) -> None:
    """A claim carries its submit's trust mark and config, each time the row is claimed."""
    for trusted, config in [(True, None), (False, b"\x01config")]:
        id = await lab.submit(trusted=trusted, config=config)
        for _ in range(2):
            claimed = await lab.claim()
            lab.same("trusted and config", (claimed.trusted, claimed.config), (lab.trust(trusted), config))
            await lab.plane.do(Requeue(fence_of(claimed)))
        await lab.plane.do(Cancel(id))


@rule
async def priorities_are_whole_numbers_of_64_bits(lab: Lab) -> None:
    """A priority is truncated and clamped to 64 bits; what is no finite number is 0."""
    most, least = 2**63 - 1, -(2**63)
    wanted = [(2.9, 2), (-2.9, -2), (1e300, most), (-1e300, least), (float("nan"), 0), (float("inf"), 0)]
    for given, expected in [*wanted, (10**400, most), (-(2**70), least)]:
        id = await lab.plane.submit("q", b"", priority=given)
        await lab.stands(id, priority=expected)


# Cancel -----------------------------------------------------------------------------------------------------------------


@rule
async def cancel_kills_a_queued_row(lab: Lab) -> None:
    """A queued row that is cancelled is killed at once, with its own error and a final ERROR frame."""
    id = await lab.submit()
    lab.same("the answer", await lab.plane.do(Cancel(id)), Cancelled("killed"))
    await ended_by_the_plane(lab, id, "killed", CANCELLED_QUEUED)
    lab.same("the answer to a second cancel", await lab.plane.do(Cancel(id)), Cancelled("terminal"))
    lab.same("what a claim finds", await lab.claim_ids(), [])
    await lab.refuses(Cancel(NOWHERE), InvocationNotFound)


@rule
async def cancel_asks_a_worker_that_has_a_lease(lab: Lab) -> None:
    """A running row under a lease goes on when it is cancelled: its worker is told, and may succeed all the same."""
    claimed, other = await lab.start(), await lab.start()
    for _ in range(2):
        lab.same("the answer", await lab.plane.do(Cancel(claimed.id)), Cancelled("asked", "w"))
    await lab.stands(claimed.id, state="running", cancel_requested=True, error=None, finished_at=None)
    asked = [(claimed.id, claimed.attempt)]
    lab.same("the cancels of its worker", await lab.plane.cancels("w"), asked)
    lab.same("the cancels of another", await lab.plane.cancels("v"), [])
    beat = Beat("w", ((claimed.id, claimed.attempt), (other.id, other.attempt)), LONG)
    lab.same("the answer to a heartbeat", await lab.plane.do(beat), Beaten([], asked))
    lab.same("the outcome", await lab.plane.current_outcomes([claimed.id]), [Outcome(claimed.id, "pending")])
    lab.same("the late success", await lab.plane.do(Finish(fence_of(claimed), "succeeded", b"r")), True)
    lab.same("the outcome", await lab.plane.current_outcomes([claimed.id]), [Outcome(claimed.id, "succeeded", b"r")])
    lab.same("the cancels after its end", await lab.plane.cancels("w"), [])


@rule
async def cancel_kills_a_claim_without_a_lease(lab: Lab) -> None:
    """A running row whose claim has no lease is killed at once, and the late ack is refused."""
    claimed = await lab.start(lease=None)
    answer = await lab.plane.do(Cancel(claimed.id))
    lab.same("what became of it", answer.what, "killed")
    await ended_by_the_plane(lab, claimed.id, "killed", CANCELLED_RUNNING)
    await lab.refuses(Finish(fence_of(claimed), "succeeded"), ClaimLost)
    await lab.refuses(Append(fence_of(claimed), 0, (b"late",)), ClaimLost)


@rule
async def a_row_asked_to_end_is_never_queued_again(lab: Lab) -> None:
    """A row whose cancellation is asked for is killed by a release, a retry and the end of its lease."""
    for reason in ("release", "retry"):
        claimed = await lab.start()
        await lab.plane.do(Append(fence_of(claimed), 0, (b"frame",)))
        await lab.plane.do(Cancel(claimed.id))
        answer = await lab.plane.do(Requeue(fence_of(claimed), reason, 0.0, Failure("E", "of the body")))
        lab.same(f"the answer to a {reason}", answer, Requeued("killed", "q"))
        await ended_by_the_plane(lab, claimed.id, "killed", CANCELLED_RUNNING, [(0, b"frame")])
        await lab.refuses(Requeue(fence_of(claimed), reason), ClaimLost)
    claimed = await lab.start(lease=lab.short)
    await lab.plane.do(Cancel(claimed.id))
    await lab.pass_time(lab.short)
    lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [(claimed.id, "q", "killed")])
    await ended_by_the_plane(lab, claimed.id, "killed", CANCELLED_RUNNING)


async def ended_by_the_plane(
    lab: Lab, id: str, state: str, error: Failure, frames: list[tuple[int, bytes]] | None = None
) -> None:
    """The row ended without its worker: its outcome, its row and its journal say so alike."""
    frames = frames or []
    lab.same("the outcome", await lab.plane.current_outcomes([id]), [Outcome(id, state, None, error)])
    row = await lab.stands(id, state=state, error=error)
    lab.same("that finished_at is set", row.finished_at is not None, True)
    seq = len(frames)
    page = await lab.journal(id, [*frames, (seq, final_error(seq, error))], True)
    lab.same("state and error of the page", (page.state, page.error), (state, error))


# The end ----------------------------------------------------------------------------------------------------------------


@rule
async def an_ack_makes_the_row_terminal(lab: Lab) -> None:
    """An ack ends the row in the state it names, with its result and error as they were given."""
    error = Failure("ValueError", "no such thing", "Traceback ...")
    for state, result, failure in [
        ("succeeded", b"result", None), ("succeeded", b"", None), ("succeeded", None, None),
        ("failed", None, error), ("killed", None, CANCELLED_RUNNING), ("timeout", None, Failure("Timeout", "")),
    ]:  # fmt: skip
        claimed = await lab.start()
        lab.same("the answer", await lab.plane.do(Finish(fence_of(claimed), state, result, failure)), True)
        ended = Outcome(claimed.id, state, lab.kept(result), failure)
        lab.same("the outcome", await lab.plane.current_outcomes([claimed.id]), [ended])
        row = await lab.stands(claimed.id, state=state, error=failure, attempt=1, worker="w")
        if lab.clock is not None:
            lab.same("finished_at", row.finished_at, lab.clock.now())
    claimed = await lab.start()
    for odd in ("queued", "running", "done", ""):
        await lab.refuses(Finish(fence_of(claimed), odd), ValueError)
    await lab.stands(claimed.id, state="running")
    await lab.refuses(Finish(fence_of(claimed)._replace(id=NOWHERE), "succeeded"), InvocationNotFound)


@rule
async def a_repeated_ack_changes_nothing(lab: Lab) -> None:
    """The claim whose own ack ended the row may repeat it: the answer is False, and the row stays as it is."""
    claimed = await lab.start()
    await lab.plane.do(Finish(fence_of(claimed), "succeeded", b"first"))
    before = await lab.row(claimed.id)
    await lab.pass_time(lab.short)
    for state in ("succeeded", "failed"):
        answer = await lab.plane.do(Finish(fence_of(claimed), state, b"second", Failure("E", "")))
        lab.same("the answer to the repeat", answer, False)
    lab.same(
        "the outcome", await lab.plane.current_outcomes([claimed.id]), [Outcome(claimed.id, "succeeded", b"first")]
    )
    lab.same("the row", await lab.row(claimed.id), before)
    await lab.refuses(Finish(fence_of(claimed, "v"), "succeeded"), ClaimLost)
    await lab.refuses(Finish(fence_of(claimed)._replace(attempt=2), "succeeded"), ClaimLost)


@rule
async def terminal_states_never_change(lab: Lab) -> None:
    """Whatever comes late, a terminal row stays as it is, and a claim does not find it."""
    for state in sorted(TERMINAL):
        claimed = await lab.start(lease=lab.short)
        fence = fence_of(claimed)
        await lab.plane.do(Finish(fence, state, b"r"))
        before, page = await lab.row(claimed.id), await lab.plane.page(claimed.id)
        for op in (Requeue(fence), Requeue(fence, "retry"), Append(fence, 0, (b"late",))):
            await lab.refuses(op, ClaimLost)
        lab.same("those that hold", await lab.held("w", claimed), [])
        lab.same("the answer to a cancel", await lab.plane.do(Cancel(claimed.id)), Cancelled("terminal"))
        await lab.pass_time(lab.short)
        lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [])
        lab.same("what a claim finds", await lab.claim_ids(), [])
        lab.same("the row", await lab.row(claimed.id), before)
        lab.same("the journal", await lab.plane.page(claimed.id), page)


@rule
async def too_many_losses_are_the_end(lab: Lab) -> None:
    """A row that is lost as often as its claim allows fails as WorkerLost; before that it is queued again."""
    await lab.submit()
    for lost in (1, 2):
        claimed = await lab.claim(lease=lab.short, max_lost=3)
        lab.same("what the claim knows of losses", claimed.lost, lost - 1)
        await lab.lapse(claimed)
        await lab.stands(claimed.id, state="queued", lost=lost, failures=0, attempt=lost, worker="w")
    claimed = await lab.claim(lease=lab.short, max_lost=3)
    await lab.pass_time(lab.short)
    lab.same("the rows reaped", (await lab.plane.do(Reap())).rows, [(claimed.id, "q", "failed")])
    await ended_by_the_plane(lab, claimed.id, "failed", worker_lost(3))
    await lab.stands(claimed.id, lost=3, attempt=3, worker="w")
    await lab.refuses(Finish(fence_of(claimed), "succeeded"), ClaimLost)


@rule
async def a_purge_deletes_what_ended_long_ago(lab: Lab) -> None:
    """A purge deletes terminal rows that ended more than so long ago, with journal, outcome, key and id; no others."""
    old = await lab.start(key="k")
    await lab.plane.do(Append(fence_of(old), 0, (b"frame",)))
    await lab.plane.do(Finish(fence_of(old), "succeeded", b"r"))
    running, queued = await lab.start(), await lab.submit()
    lab.same("purged too early", await lab.plane.do(Purge(LONG)), 0)
    if lab.clock is not None:
        await lab.pass_time(lab.short)
        lab.same("purged at the very moment", await lab.plane.do(Purge(lab.short)), 0)
    await lab.pass_time(lab.short)
    lab.same("purged", await lab.plane.do(Purge(lab.short)), 1)
    lab.same("purged again", await lab.plane.do(Purge(lab.short)), 0)
    states = [outcome.state for outcome in await lab.plane.current_outcomes([old.id, running.id, queued])]
    lab.same("what is left", states, ["unknown", "pending", "pending"])
    lab.same("the rows left", {row.id for row in await lab.plane.rows(RowFilter())}, {running.id, queued})
    await lab.refuses(Cancel(old.id), InvocationNotFound)
    lab.same("the answer to its id and key", await lab.plane.do(Submit(old.id, "q", b"new", "k")), old.id)
    await lab.stands(old.id, state="queued", attempt=0, body=b"new", error=None)
    await lab.journal(old.id, [], False)
    lab.same("its outcome", await lab.plane.current_outcomes([old.id]), [Outcome(old.id, "pending")])


# Reads ------------------------------------------------------------------------------------------------------------------


@rule
async def counts_equal_the_rows(lab: Lab) -> None:
    """Counts by queue and state are those of the rows, and name nothing of which there is none."""
    for queue, state in [("a", "queued"), ("a", "running"), ("b", "succeeded"), ("b", "killed"), ("b", "killed")]:
        id = await lab.submit(queue)
        if state == "killed":
            await lab.plane.do(Cancel(id))
        elif state != "queued":
            claimed = await lab.claim(queue=queue)
            if state == "succeeded":
                await lab.plane.do(Finish(fence_of(claimed), state))
    rows = await lab.plane.rows(RowFilter())
    counted = Counter((row.queue, row.state) for row in rows)
    lab.same("the number of rows", len(rows), 5)
    lab.same("counts", await lab.plane.counts(), dict(counted))
    filters: list[tuple[str | None, str | None]]
    filters = [("a", None), (None, "killed"), ("b", "killed"), ("b", "queued"), ("c", None)]
    for of_queue, in_state in filters:
        wanted = {key: n for key, n in counted.items() if of_queue in (None, key[0]) and in_state in (None, key[1])}
        lab.same(f"counts of {of_queue}, {in_state}", await lab.plane.counts(of_queue, in_state), wanted)


@rule
async def rows_are_filtered_newest_first(lab: Lab) -> None:
    """Rows come newest first, as many as asked for, by id, queue, state, key and root; envelopes only when asked for."""
    for n in range(4):
        await lab.submit("ab"[n % 2], id=f"r{n}", key=f"k{n}", parent=None if n < 2 else "r0")
    await lab.plane.do(Cancel("r3"))
    for wanted, expected in [
        (RowFilter(), ["r3", "r2", "r1", "r0"]), (RowFilter(limit=2), ["r3", "r2"]), (RowFilter(id="r1"), ["r1"]),
        (RowFilter(queue="a"), ["r2", "r0"]), (RowFilter(state="killed"), ["r3"]), (RowFilter(key="k2"), ["r2"]),
        (RowFilter(root="r0"), ["r3", "r2"]), (RowFilter(root="r0", state="queued"), ["r2"]),
        (RowFilter(id=NOWHERE), []),
    ]:  # fmt: skip
        lab.same(f"the rows of {wanted}", [row.id for row in await lab.plane.rows(wanted)], expected)
    lab.same("an envelope not asked for", (await lab.plane.rows(RowFilter(id="r0")))[0].body, None)
    lab.same("one asked for", (await lab.plane.rows(RowFilter(id="r0", body=True)))[0].body, b"body of r0")


@rule
async def outcomes_come_in_order(lab: Lab) -> None:
    """Outcomes are answered in the order asked for: pending, unknown, or terminal; an id may be asked for twice."""
    done = await lab.start()
    await lab.plane.do(Finish(fence_of(done), "succeeded", b"r"))
    running, queued = await lab.start(), await lab.submit()
    expected = {
        done.id: Outcome(done.id, "succeeded", b"r"), running.id: Outcome(running.id, "pending"),
        queued: Outcome(queued, "pending"), NOWHERE: Outcome(NOWHERE, "unknown"),
    }  # fmt: skip
    ids = [queued, done.id, NOWHERE, running.id, done.id]
    lab.same("the outcomes", await lab.plane.current_outcomes(ids), [expected[id] for id in ids])
    lab.same("the outcomes of none", await lab.plane.current_outcomes([]), [])


@rule
async def each_operation_of_a_list_stands_alone(lab: Lab) -> None:
    """Operations given as a list are applied in order, and one that fails leaves the others alone."""
    ids = [await lab.submit() for _ in range(3)]
    first, second, third = [fence_of(claimed) for claimed in await lab.plane.do(Claim(("q",), "w", 3))]
    ops = [
        Finish(first, "succeeded", b"1"), Finish(second._replace(worker="v"), "succeeded", b"2"),
        Finish(second, "odd"), Finish(third, "failed"), Finish(first, "failed"), Finish(second, "killed"),
        Finish(first._replace(id=NOWHERE), "failed"),
    ]  # fmt: skip
    answers = await lab.plane.many(ops)
    kinds: list[Any] = [kind_of(answer) for answer in answers]
    lab.same("the answers", kinds, [True, ClaimLost, ValueError, True, False, True, InvocationNotFound])
    states = [outcome.state for outcome in await lab.plane.current_outcomes(ids)]
    lab.same("the states", states, ["succeeded", "killed", "failed"])
    answers = await lab.plane.many([Submit("m1", "q", b"", "k"), Submit("m2", "q", b"", "k"), Submit("m1", "q", b"")])
    lab.same("the answers to submits", answers, ["m1", "m1", "m1"])
    lab.same("the answers to nothing", await lab.plane.many([]), [])
