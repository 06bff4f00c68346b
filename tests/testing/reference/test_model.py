"""The transition table and the model that runs on it, against what the specification says, written out by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import pytest
from plane_kit import FakeClock

from dreamlake.lakeshore.errors import ClaimLost, InvocationNotFound
from dreamlake.lakeshore.planes.contract.failures import claim_lost, final_error
from dreamlake.lakeshore.planes.contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claim,
    Claimed,
    Fence,
    FinalFrame,
    Finish,
    Operation,
    Purge,
    Reap,
    Reaped,
    Requeue,
    Requeued,
    Submit,
)
from dreamlake.lakeshore.planes.contract.records import TERMINAL, Failure, Outcome, Page, RowFilter
from dreamlake.lakeshore.testing.reference.effects import CONDITIONS, EFFECTS
from dreamlake.lakeshore.testing.reference.model import Model
from dreamlake.lakeshore.testing.reference.transitions import (
    TABLE,
    Condition,
    Effect,
    Event,
    Rule,
    Standing,
    find_rule,
)
from dreamlake.lakeshore.wire.frames import Frame, FrameKind

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.anyio

# The rows of the specification's table, each as: standing, event, conditions, where it goes. Written down here once more
# so that a slip in the table does not go unnoticed because the model and every check follow it.
SPECIFIED = [
    ("queued", "claim", {"due", "renumbers"}, "running"),
    ("queued", "cancel", set(), "killed"),
    ("running", "finish", {"fence"}, "acked"),
    ("running", "release", {"fence"}, "queued"),
    ("running", "retry", {"fence"}, "queued"),
    ("running", "cancel", {"leased"}, "running"),
    ("running", "cancel", set(), "killed"),
    ("running", "release", {"fence", "asked"}, "killed"),
    ("running", "retry", {"fence", "asked"}, "killed"),
    ("running", "expire", {"expired", "asked"}, "killed"),
    ("running", "expire", {"expired", "budget"}, "lapsed"),
    ("running", "expire", {"expired", "uncounted"}, "queued"),
    ("running", "expire", {"expired"}, "failed"),
    ("lapsed", "finish", {"fence"}, "acked"),
    ("lapsed", "beat", {"fence"}, "running"),
    ("lapsed", "append", {"fence", "open", "unwritten"}, "running"),
    ("lapsed", "claim", {"due", "renumbers"}, "running"),
    ("ended", "finish", {"own"}, None),
]


@pytest.mark.parametrize(("standing", "event", "when", "to"), SPECIFIED)
def test_every_row_of_the_specification_is_in_the_table(standing: str, event: str, when: set[str], to: str) -> None:
    assert [
        rule for rule in TABLE if (rule.standing, rule.event, set(rule.when), rule.to) == (standing, event, when, to)
    ]


def test_effects_of_the_rows_that_cost_or_refund() -> None:
    def effects(standing: str, event: str, when: str) -> set[Effect]:
        (rule,) = [
            rule for rule in TABLE if (rule.standing, rule.event, " ".join(rule.when)) == (standing, event, when)
        ]
        return set(rule.effects)

    assert effects("queued", "claim", "due renumbers") >= {"next attempt", "hold", "start"}
    assert effects("running", "release", "fence") == {"let go"}
    assert effects("running", "retry", "fence") == {"fail", "delay", "let go"}
    assert effects("running", "expire", "expired budget") == {"lose"}
    assert effects("running", "expire", "expired uncounted") == {"let go"}
    assert "revive" in effects("lapsed", "finish", "fence") & effects("lapsed", "beat", "fence")
    killed: set[Effect] = {"cancelled running", "error frame", "end"}
    assert effects("running", "expire", "expired asked") == killed == effects("running", "retry", "fence asked")


def test_a_terminal_row_goes_nowhere_but_away() -> None:
    assert {rule.to for rule in TABLE if rule.standing == "ended"} == {None, "absent"}
    assert {rule.event for rule in TABLE if rule.to == "absent"} == {"purge"}


def test_every_name_is_used_and_has_a_meaning() -> None:
    assert {name for rule in TABLE for name in rule.when} == set(get_args(Condition)) == set(CONDITIONS)
    assert {name for rule in TABLE for name in rule.effects} == set(get_args(Effect)) == set(EFFECTS)
    assert {rule.event for rule in TABLE} == set(get_args(Event))
    assert {rule.standing for rule in TABLE} == set(get_args(Standing))
    assert {rule.to for rule in TABLE} <= TERMINAL | {
        "queued",
        "lapsed",
        "running",
        "acked",
        "restored",
        "absent",
        None,
    }


def test_no_rule_stands_in_the_shadow_of_an_earlier_one() -> None:
    def shadowed(at: int, rule: Rule) -> bool:
        earlier = [one for one in TABLE[:at] if (one.standing, one.event) == (rule.standing, rule.event)]
        return any(set(one.when) <= set(rule.when) for one in earlier)

    assert [rule for at, rule in enumerate(TABLE) if shadowed(at, rule)] == []


def test_the_first_rule_whose_conditions_hold_applies() -> None:
    table = [Rule("running", "cancel", ("leased",), "running"), Rule("running", "cancel", (), "killed")]
    assert find_rule(table, "running", "cancel", lambda name: name == "leased") is table[0]
    assert find_rule(table, "running", "cancel", lambda name: False) is table[1]
    assert find_rule(table, "queued", "cancel", lambda name: True) is None


def test_the_final_error_frame_carries_the_failure() -> None:
    frame = Frame.from_bytes(final_error(7, Failure("E", "why", "trace")))
    assert (frame.kind, frame.seq, frame.body) == (FrameKind.ERROR, 7, None)
    assert frame.meta == {"type": "E", "message": "why", "traceback": "trace"}


@pytest.mark.parametrize(
    ("fence", "state", "reason"),
    [
        (Fence("i", "w", 1), "killed", "it ended killed"),
        (Fence("i", "w", 1), "running", "attempt 1 is over, the row is at attempt 2"),
        (Fence("i", "w", 2), "queued", "it is queued, and no claim holds it"),
        (Fence("i"), "running", "it is held by another claim"),
    ],
)
def test_a_lost_claim_says_why(fence: Fence, state: str, reason: str) -> None:
    expected = f"the claim on invocation 'i' is lost: {reason}; drop this attempt's work"
    assert str(claim_lost(fence, state, 2)) == expected


# The model, one history at a time ---------------------------------------------------------------------------------------

LEASE = 10.0


class History:
    """A model with its clock; operations in, answers out, exceptions raised."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.model = Model(self.clock.now, holder="h")

    async def do(self, op: Operation) -> Any:
        (answer,) = await self.model.apply([op])
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def start(self, id: str = "i", worker: str = "w", lease: float | None = LEASE, **fields: Any) -> Claimed:
        await self.do(Submit(id, "q", b"body"))
        (claimed,) = await self.do(Claim(("q",), worker, lease=lease, **fields))
        return claimed

    async def state(self, id: str = "i") -> str:
        (row,) = await self.model.rows(RowFilter(id=id))
        return row.state

    async def page(self, id: str = "i", since: int = -1) -> Page:
        return await self.model.page(id, since, 100, 10_000)


@pytest.fixture
def history() -> History:
    return History()


async def test_each_operation_of_a_batch_fails_alone(history: History) -> None:
    ops: list[Operation] = [
        Submit("a", "q", b""), Cancel("nobody"), Finish(Fence("a", "w", 1), "odd"), Cancel("a"), Purge(-1.0),
    ]  # fmt: skip
    answers = await history.model.apply(ops)
    assert [answers[0], *map(type, answers[1:3]), answers[3], answers[4]] == [
        "a", InvocationNotFound, ValueError, Cancelled("killed"), 1,
    ]  # fmt: skip


async def test_a_submit_to_a_purged_parent_has_the_parent_as_root(history: History) -> None:
    await history.do(Submit("grand", "q", b""))
    await history.do(Submit("parent", "q", b"", parent="grand"))
    await history.do(Submit("child", "q", b"", parent="parent"))
    await history.do(Cancel("parent"))
    history.clock.advance(1)
    assert await history.do(Purge(0.5)) == 1
    await history.do(Submit("late", "q", b"", parent="parent"))
    roots = {row.id: row.root for row in await history.model.rows(RowFilter())}
    assert roots == {"grand": None, "child": "grand", "late": "parent"}


async def test_delayed_rows_come_due_to_the_second(history: History) -> None:
    claimed = await history.start()
    requeued = await history.do(Requeue(Fence("i", "w", claimed.attempt), "retry", 5.0))
    assert requeued == Requeued("queued", "q", delayed=True)
    assert await history.model.due() == []
    history.clock.advance(4.75)
    assert await history.do(Claim(("q",), "v")) == []
    history.clock.advance(0.25)
    assert await history.model.due() == [Reap()]
    # A claim finds it without anybody having reaped before, and a later reap has nothing to tell.
    (again,) = await history.do(Claim(("q",), "v"))
    assert (again.attempt, again.failures, again.lost) == (2, 1, 0)
    assert await history.do(Reap()) == Reaped([], [])


async def test_a_reap_tells_each_due_queue_once(history: History) -> None:
    await history.start()
    await history.do(Requeue(Fence("i", "w", 1), "retry", 5.0))
    history.clock.advance(5.0)
    assert await history.do(Reap()) == Reaped([], ["q"])
    assert await history.do(Reap()) == Reaped([], [])


@pytest.mark.parametrize(
    ("max_lost", "states"), [(0, ["failed"]), (1, ["failed"]), (3, ["queued", "queued", "failed"])]
)
async def test_the_last_loss_that_the_claim_allows_fails_the_row(
    history: History, max_lost: int, states: list[str]
) -> None:
    await history.do(Submit("i", "q", b""))
    seen: list[str] = []
    while await history.do(Claim(("q",), "w", lease=LEASE, max_lost=max_lost)):
        history.clock.advance(LEASE)
        assert [row[0] for row in (await history.do(Reap())).rows] == ["i"]
        seen.append(await history.state())
    assert seen == states
    (outcome,) = await history.model.outcomes(["i"])
    times = len(states)
    assert outcome.error == Failure(
        "WorkerLost", f"its worker died or stopped renewing its lease {times} times; the body may be the cause"
    )


async def test_a_living_holder_has_ten_leases(history: History) -> None:
    await history.start()
    history.clock.advance(10 * LEASE - 1)
    assert (await history.do(Reap(alive=("h",)))).rows == []
    history.clock.advance(1)
    assert (await history.do(Reap(alive=("h",)))).rows == [("i", "q", "queued")]


async def test_a_dead_holder_has_none_and_a_foreign_one_is_nobodys(history: History) -> None:
    await history.start("mine", lease=None)
    await history.start("theirs", local=False)
    assert (await history.do(Reap(dead=("h",)))).rows == [("mine", "q", "queued")]


@pytest.mark.parametrize(
    "speak",
    [
        lambda fence: Finish(fence, "succeeded"),
        lambda fence: Beat("w", (("i", 1),), LEASE),
        lambda fence: Append(fence, 0, (b"f",)),
        lambda fence: Requeue(fence),
        lambda fence: Requeue(fence, "retry"),
    ],
)
async def test_what_a_lapsed_claim_says_takes_the_loss_back(
    history: History, speak: Callable[[Fence], Operation]
) -> None:
    await history.start()
    history.clock.advance(LEASE)
    await history.do(Reap())
    assert history.model.memory.rows["i"].lost == 1
    await history.do(speak(Fence("i", "w", 1)))
    assert history.model.memory.rows["i"].lost == 0
    assert history.model.memory.rows["i"].stands != "lapsed"


async def test_an_append_gives_a_lapsed_claim_its_lease_anew(history: History) -> None:
    await history.start()
    history.clock.advance(LEASE)
    await history.do(Reap())
    await history.do(Append(Fence("i", "w", 1), 0, (b"f",)))
    history.clock.advance(LEASE - 1)
    assert (await history.do(Reap())).rows == []
    history.clock.advance(1)
    assert (await history.do(Reap())).rows == [("i", "q", "queued")]


async def test_a_heartbeat_gives_no_lease_to_a_claim_that_has_none(history: History) -> None:
    await history.start(lease=None)
    assert await history.do(Beat("w", (("i", 1),), LEASE)) == Beaten([], [])
    history.clock.advance(1e9)
    assert (await history.do(Reap())).rows == []


async def test_a_repeated_poll_begins_where_its_claim_began(history: History) -> None:
    await history.start()
    await history.do(Append(Fence("i", "w", 1), 0, (b"a", b"b")))
    await history.do(Requeue(Fence("i", "w", 1)))
    poll = Claim(("q",), "w", poll_id="p")
    (first,) = await history.do(poll)
    await history.do(Append(Fence("i", "w", 2), 2, (b"c",)))
    assert first.next_seq == 2
    assert await history.do(poll) == [first]


async def test_a_late_frame_is_no_duplicate_of_the_planes_own(history: History) -> None:
    await history.start(lease=None)
    await history.do(Cancel("i"))
    page = await history.page()
    assert [seq for seq, _ in page.frames] == [0]
    with pytest.raises(ClaimLost, match="it ended killed"):
        await history.do(Append(Fence("i", "w", 1), 0, (b"late",)))


async def test_a_duplicate_is_answered_before_the_fence_is_asked(history: History) -> None:
    await history.start()
    await history.do(Append(Fence("i", "w", 1), 0, (b"a",)))
    await history.do(Finish(Fence("i", "w", 1), "succeeded"))
    assert await history.do(Append(Fence("i", "w", 1), 0, (b"other",))) == Appended(0, 1)
    with pytest.raises(ClaimLost, match="it ended succeeded"):
        await history.do(Append(Fence("i", "w", 1), 0, (b"a", b"new")))
    assert (await history.page()).frames == [(0, b"a")]


async def test_a_frame_of_another_attempt_is_never_overwritten(history: History) -> None:
    await history.start()
    await history.do(Append(Fence("i", "w", 1), 3, (b"far",)))
    await history.do(Requeue(Fence("i", "w", 1)))
    (again,) = await history.do(Claim(("q",), "w", lease=LEASE))
    assert again.next_seq == 4
    with pytest.raises(ClaimLost, match="its journal is closed, or holds frames of another attempt at these numbers"):
        await history.do(Append(Fence("i", "w", 2), 2, (b"b", b"c")))
    assert sorted(history.model.memory.rows["i"].frames) == [3]


@pytest.mark.parametrize(("seq", "at"), [(-1, 2), (0, 2), (2, 2), (9, 9)])
async def test_a_final_frame_finds_a_free_number(history: History, seq: int, at: int) -> None:
    await history.start()
    await history.do(Append(Fence("i", "w", 1), 0, (b"a", b"b")))
    await history.do(Finish(Fence("i", "w", 1), "succeeded", final=FinalFrame(seq, b"END")))
    page = await history.page()
    assert (page.frames[-1], page.closed) == ((at, b"END"), True)


@pytest.mark.parametrize(("first_seq", "frames"), [(-1, (b"a",)), (0, ()), (-2, ())])
async def test_an_append_of_nothing_or_below_zero_is_refused(
    history: History, first_seq: int, frames: tuple[bytes, ...]
) -> None:
    with pytest.raises(ValueError, match=f"frames from seq 0 on, not {len(frames)} from seq {first_seq}"):
        await history.do(Append(Fence("nobody", "w", 1), first_seq, frames))


async def test_a_finish_names_a_terminal_state(history: History) -> None:
    await history.start()
    expected = r"one of \['failed', 'killed', 'succeeded', 'timeout'\], not 'running'"
    with pytest.raises(ValueError, match=expected):
        await history.do(Finish(Fence("i", "w", 1), "running"))


async def test_a_repeat_after_somebody_elses_end_is_a_lost_claim(history: History) -> None:
    await history.start()
    await history.do(Cancel("i"))
    await history.do(Requeue(Fence("i", "w", 1)))
    assert await history.state() == "killed"
    with pytest.raises(ClaimLost, match="it ended killed"):
        await history.do(Finish(Fence("i", "w", 1), "killed"))


async def test_reads_of_an_unknown_id(history: History) -> None:
    assert await history.model.outcomes(["nobody"]) == [Outcome("nobody", "unknown")]
    with pytest.raises(InvocationNotFound, match="no invocation 'nobody' on this plane"):
        await history.page("nobody")
