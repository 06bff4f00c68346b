"""What the conditions of the transition table look at and what its effects do, on plain objects in memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...planes.contract.failures import CANCELLED_QUEUED, CANCELLED_RUNNING, final_error, worker_lost
from ...planes.contract.operations import Append, Fence, Submit, whole_priority
from ...planes.contract.records import TERMINAL, Failure

if TYPE_CHECKING:
    from collections.abc import Callable

    from .transitions import Condition, Effect, Standing

__all__ = ["CONDITIONS", "EFFECTS", "Invocation", "Memory", "Moment"]


@dataclass
class Invocation:
    """A row with its journal: seq -> (attempt, bytes). `stands`: its state, or `lapsed`."""

    order: int
    submit: Submit
    root: str | None
    submitted_at: float
    stands: str = "queued"
    attempt: int = 0
    failures: int = 0
    lost: int = 0
    max_lost: int = 0
    worker: str | None = None
    holder: str | None = None
    poll: str | None = None
    lease: float | None = None
    lease_until: float | None = None
    asked: bool = False
    acked: bool = False
    not_before: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    result: bytes | None = None
    error: Failure | None = None
    closed: bool = False
    frames: dict[int, tuple[int, bytes]] = field(default_factory=dict[int, tuple[int, bytes]])

    @property
    def state(self) -> str:
        """The state that people see."""
        return "queued" if self.stands == "lapsed" else self.stands

    @property
    def ended(self) -> bool:
        """Whether the state is a terminal one."""
        return self.stands in TERMINAL

    @property
    def next_seq(self) -> int:
        """The number after the highest in the journal."""
        return max(self.frames, default=-1) + 1

    @property
    def begins(self) -> int:
        """Where this attempt's frames begin: the same whenever its claim is handed out."""
        return max((seq for seq, (attempt, _) in self.frames.items() if attempt < self.attempt), default=-1) + 1

    @property
    def rank(self) -> tuple[int, int]:
        """What claims go by, lowest first."""
        return -whole_priority(self.submit.priority), self.order

    def is_of(self, fence: Fence) -> bool:
        """Whether `fence` names the row's last claim."""
        if fence.attempt is None:
            return self.lease is None and self.worker is not None and fence.worker in (None, self.worker)
        return (self.worker, self.attempt) == (fence.worker, fence.attempt)

    def lease_from(self, now: float, lease: float | None) -> None:
        """Let the claim last for `lease` seconds from `now`, or for ever."""
        self.lease, self.lease_until = lease, None if lease is None else now + lease

    def close(self, seq: int, attempt: int, data: bytes) -> None:
        """Write the journal's final frame, at `seq` or the next free one, where it has none."""
        if not self.closed:
            self.frames[max(seq, self.next_seq)] = attempt, data
            self.closed = True


@dataclass
class Memory:
    """All rows by id, the ids by queue and key, and the name that local claims are held under."""

    holder: str
    rows: dict[str, Invocation] = field(default_factory=dict[str, Invocation])
    keys: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])


@dataclass
class Moment:
    """One event for one row: what comes, who speaks, and when."""

    memory: Memory
    row: Invocation
    op: Any
    fence: Fence
    now: float

    @property
    def standing(self) -> Standing:
        """How the row stands, as the table's rules say it."""
        if self.memory.rows.get(self.row.submit.id) is not self.row:
            return "absent"
        match self.row.stands:
            case "queued" | "lapsed" | "running" as standing:
                return standing
            case _:
                return "ended"

    @property
    def speaking(self) -> int:
        """The attempt that speaks: the fence's, or the row's where it names none."""
        return self.row.attempt if self.fence.attempt is None else self.fence.attempt

    def written_by(self) -> list[int | None]:
        """For each of the frames that come: the attempt that wrote the frame of its number, or None."""
        op: Append = self.op
        numbers = range(op.first_seq, op.first_seq + len(op.frames))
        return [self.row.frames[seq][0] if seq in self.row.frames else None for seq in numbers]


# Conditions -----------------------------------------------------------------------------------------------------------


def _expired(at: Moment) -> bool:
    row, reap = at.row, at.op
    if row.holder is not None and row.holder in reap.dead:
        return True
    if row.lease is None or row.lease_until is None:
        return False
    if row.holder is None and reap.since is not None and reap.since + row.lease > at.now:
        return False
    over = row.lease_until <= at.now and row.holder not in reap.alive
    return over or row.lease_until + 9 * row.lease <= at.now


CONDITIONS: dict[Condition, Callable[[Moment], bool]] = {
    "key taken": lambda at: (at.op.queue, at.op.key) in at.memory.keys,
    "due": lambda at: at.row.not_before is None or at.row.not_before <= at.now,
    "renumbers": lambda at: at.op.lease is not None or not at.row.frames,
    "same poll": lambda at: (at.row.worker, at.row.poll) == (at.op.worker, at.op.poll_id),
    "fence": lambda at: at.row.is_of(at.fence),
    "own": lambda at: at.row.acked and at.row.is_of(at.fence),
    "leased": lambda at: at.row.lease is not None,
    "asked": lambda at: at.row.asked,
    "all there": lambda at: all(attempt == at.speaking for attempt in at.written_by()),
    "open": lambda at: not at.row.closed,
    "unwritten": lambda at: all(attempt in (None, at.speaking) for attempt in at.written_by()),
    "expired": _expired,
    "uncounted": lambda at: not at.op.counted,
    "budget": lambda at: at.row.lost + 1 < at.row.max_lost,
    "old": lambda at: at.row.finished_at is not None and at.row.finished_at < at.now - at.op.older_than,
    "partly": lambda at: at.op.more,
    "unheld": lambda at: at.row.worker is None,
}


# Effects --------------------------------------------------------------------------------------------------------------


def _enter(at: Moment) -> None:
    at.memory.rows[at.op.id] = at.row
    if at.op.key is not None:
        at.memory.keys[at.op.queue, at.op.key] = at.op.id


def _next_attempt(at: Moment) -> None:
    at.row.attempt += 1


def _hold(at: Moment) -> None:
    row, claim = at.row, at.op
    row.worker, row.poll, row.max_lost = claim.worker, claim.poll_id, claim.max_lost
    row.holder = at.memory.holder if claim.local else None
    row.not_before = None
    row.lease_from(at.now, claim.lease)


def _start(at: Moment) -> None:
    at.row.started_at = at.now


def _renew(at: Moment) -> None:
    if at.row.lease is not None:
        at.row.lease_from(at.now, at.op.lease)


def _revive(at: Moment) -> None:
    at.row.lost -= 1
    at.row.lease_from(at.now, at.row.lease)


def _ask(at: Moment) -> None:
    at.row.asked = True


def _write(at: Moment) -> None:
    for seq, data in enumerate(at.op.frames, at.op.first_seq):
        at.row.frames.setdefault(seq, (at.row.attempt, data))
    at.row.closed = at.op.final


def _acked(at: Moment) -> None:
    at.row.result, at.row.error, at.row.acked = at.op.result, at.op.error, True


def _final_frame(at: Moment) -> None:
    if at.op.final is not None:
        at.row.close(at.op.final.seq, at.row.attempt, at.op.final.bytes)


def _lose(at: Moment) -> None:
    at.row.lost += 1


def _fail(at: Moment) -> None:
    at.row.failures += 1
    at.row.error = at.op.error or at.row.error


def _delay(at: Moment) -> None:
    at.row.not_before = at.now + at.op.delay if at.op.delay > 0 else None


def _let_go(at: Moment) -> None:
    row = at.row
    row.worker = row.holder = row.poll = row.lease = row.lease_until = None
    row.asked = False


def _cancelled_queued(at: Moment) -> None:
    at.row.error = CANCELLED_QUEUED


def _cancelled_running(at: Moment) -> None:
    at.row.error = CANCELLED_RUNNING


def _worker_lost(at: Moment) -> None:
    at.row.error = worker_lost(at.row.lost)


def _error_frame(at: Moment) -> None:
    assert at.row.error is not None
    seq = at.row.next_seq
    at.row.close(seq, 0, final_error(seq, at.row.error))  # of no attempt: a late frame of this number is no duplicate


def _end(at: Moment) -> None:
    at.row.finished_at = at.now


def _delete(at: Moment) -> None:
    submit = at.row.submit
    del at.memory.rows[submit.id]
    if submit.key is not None:
        del at.memory.keys[submit.queue, submit.key]


def _restore(at: Moment) -> None:
    row, op = at.row, at.op
    _enter(at)
    row.attempt, row.failures, row.lost = op.attempt, op.failures, op.lost
    row.started_at = op.started_at
    for seq, data in op.frames:
        row.frames.setdefault(seq, (0, data))  # of no attempt, as the plane's own
    if op.more:
        return
    ended = op.state in TERMINAL
    row.closed, row.error = ended or op.closed, op.error
    if ended:
        row.worker, row.result, row.finished_at = op.worker, op.result, op.finished_at or at.now
    else:
        row.not_before = op.not_before


EFFECTS: dict[Effect, Callable[[Moment], None]] = {
    "enter": _enter,
    "next attempt": _next_attempt,
    "hold": _hold,
    "start": _start,
    "renew": _renew,
    "revive": _revive,
    "ask": _ask,
    "write": _write,
    "acked": _acked,
    "final frame": _final_frame,
    "lose": _lose,
    "fail": _fail,
    "delay": _delay,
    "let go": _let_go,
    "cancelled queued": _cancelled_queued,
    "cancelled running": _cancelled_running,
    "worker lost": _worker_lost,
    "error frame": _error_frame,
    "end": _end,
    "delete": _delete,
    "restore": _restore,
}
