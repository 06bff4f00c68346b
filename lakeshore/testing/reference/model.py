"""The reference model: a `Store` in plain dicts whose every change is a rule of `transitions`. For tests only."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import anyio

from ...errors import ClaimLost, InvocationNotFound, LakeshoreError
from ...planes.contract.failures import claim_lost
from ...planes.contract.news import News
from ...planes.contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claim,
    Claimed,
    Fence,
    Finish,
    Operation,
    Purge,
    Reap,
    Reaped,
    Requeue,
    Requeued,
    Restore,
    Submit,
    check_restore,
    whole_priority,
)
from ...planes.contract.records import TERMINAL, Outcome, Page, Row, RowFilter
from .effects import CONDITIONS, EFFECTS, Invocation, Memory, Moment
from .transitions import TABLE, Condition, Effect, Event, Rule, find_rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ...planes.contract.store import Interest

__all__ = ["Model"]


class Model:
    """A store that does what the table says, in this process's memory.

    clock: seconds since the epoch, as the plane sees them. holder: the name under which `Reap.dead` and `Reap.alive`
    know the claims that are `local`. A subclass that replaces `table`, `conditions` or `effects` is wrong on purpose.
    """

    table: Sequence[Rule] = TABLE
    conditions: Mapping[Condition, Callable[[Moment], bool]] = CONDITIONS
    effects: Mapping[Effect, Callable[[Moment], None]] = EFFECTS

    home: Literal["asyncio", "portal"] = "asyncio"
    net = 0.05

    def __init__(self, clock: Callable[[], float], *, holder: str = "here") -> None:
        self.memory = Memory(holder)
        self._clock = clock
        self._submitted = 0

    async def open(self) -> None:
        """Nothing to open."""

    async def close(self) -> None:
        """Nothing to close."""

    def lane(self, op: Operation) -> str | None:
        """One lane for all: operations are applied in the order in which they come."""
        return "all"

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Apply `ops` one after the other; for each its answer or the exception it raised."""
        answers: list[Any] = []
        for op in ops:
            try:
                answers.append(self._apply(op))
            except (LakeshoreError, ValueError) as exc:
                answers.append(exc)
        return answers

    def _apply(self, op: Operation) -> Any:
        match op:
            case Submit():
                return self._submit(op)
            case Claim():
                return self._claim(op)
            case Beat():
                return self._beat(op)
            case Finish():
                return self._finish(op)
            case Requeue():
                return self._requeue(op)
            case Cancel():
                return self._cancel(op)
            case Append():
                return self._append(op)
            case Reap():
                return self._reap(op)
            case Restore():
                return self._restore(op)
            case Purge():
                return sum(self._event("purge", row, op) is not None for row in list(self.memory.rows.values()))

    def _event(self, event: Event, row: Invocation, op: Any, fence: Fence | None = None) -> Rule | None:
        """Let `event` happen to `row`: the rule that applied, or None where none does."""
        at = Moment(self.memory, row, op, fence or Fence(row.submit.id), self._clock())
        rule = find_rule(self.table, at.standing, event, lambda condition: self.conditions[condition](at))
        if rule is not None:
            for effect in rule.effects:
                self.effects[effect](at)
            if rule.to is not None:
                row.stands = op.state if rule.to in ("acked", "restored") else rule.to
        return rule

    def _row(self, id: str) -> Invocation:
        try:
            return self.memory.rows[id]
        except KeyError:
            raise InvocationNotFound(id) from None

    def _submit(self, op: Submit) -> str:
        row = self.memory.rows.get(op.id)
        if row is None:
            parent = self.memory.rows.get(op.parent or "")
            root = parent.root if parent and parent.root else op.parent
            row = self._new(op, root, self._clock())
        return self._holding("submit", row, op)

    def _new(self, submit: Submit, root: str | None, submitted_at: float) -> Invocation:
        self._submitted += 1
        return Invocation(self._submitted, submit, root, submitted_at)

    def _holding(self, event: Event, row: Invocation, op: Submit | Restore) -> str:
        """Let `row` enter: the id that holds."""
        rule = self._event(event, row, op)
        entered = op.id in self.memory.rows
        return op.id if rule is None or entered else self.memory.keys[op.queue, op.key or ""]

    def _restore(self, op: Restore) -> str:
        check_restore(op)
        row = self.memory.rows.get(op.id)
        if row is None:
            submit = Submit(op.id, op.queue, op.body, op.key, op.priority, op.parent, False, op.config)
            row = self._new(submit, op.root, op.submitted_at)
        return self._holding("restore", row, op)

    def _claim(self, op: Claim) -> list[Claimed]:
        ranked = self._ranked()
        taken = [row for row in ranked if op.poll_id is not None and self._event("again", row, op)]
        if not taken:
            for row in ranked:
                if len(taken) < op.limit and row.submit.queue in op.queues and self._event("claim", row, op):
                    taken.append(row)
        return [_claimed(row) for row in taken]

    def _ranked(self) -> list[Invocation]:
        return sorted(self.memory.rows.values(), key=lambda row: row.rank)

    def _beat(self, op: Beat) -> Beaten:
        beaten = Beaten([], [])
        for id, attempt in op.claims:
            row = self.memory.rows.get(id)
            if row is None or self._event("beat", row, op, Fence(id, op.worker, attempt)) is None:
                beaten.lost.append((id, attempt))
            elif row.asked:
                beaten.cancel.append((id, attempt))
        return beaten

    def _finish(self, op: Finish) -> bool:
        if op.state not in TERMINAL:
            raise ValueError(f"a finish names one of {sorted(TERMINAL)}, not {op.state!r}")
        row = self._row(op.fence.id)
        rule = self._event("finish", row, op, op.fence)
        if rule is None:
            raise claim_lost(op.fence, row.state, row.attempt)
        return rule.to is not None

    def _requeue(self, op: Requeue) -> Requeued:
        row = self._row(op.fence.id)
        if self._event(op.reason, row, op, op.fence) is None:
            raise claim_lost(op.fence, row.state, row.attempt)
        return Requeued(row.state, row.submit.queue, row.state == "queued" and row.not_before is not None)

    def _cancel(self, op: Cancel) -> Cancelled:
        row = self._row(op.id)
        worker = row.worker if row.state == "running" else None
        rule = self._event("cancel", row, op)
        if rule is None or rule.to is None:
            return Cancelled("terminal")
        return Cancelled("killed" if row.ended else "asked", worker)

    def _append(self, op: Append) -> Appended:
        if op.first_seq < 0 or not op.frames:
            raise ValueError(f"an append takes frames from seq 0 on, not {len(op.frames)} from seq {op.first_seq}")
        row = self._row(op.fence.id)
        before = len(row.frames)
        if self._event("append", row, op, op.fence) is None:
            if row.is_of(op.fence) and not row.ended:
                raise ClaimLost(
                    op.fence.id, "its journal is closed, or holds frames of another attempt at these numbers"
                )
            raise claim_lost(op.fence, row.state, row.attempt)
        written = len(row.frames) - before
        return Appended(written, len(op.frames) - written)

    def _reap(self, op: Reap) -> Reaped:
        due: set[str] = set()
        for row in self.memory.rows.values():
            if self._is_due(row):
                row.not_before = None
                due.add(row.submit.queue)
        ranked = sorted(self.memory.rows.values(), key=lambda row: row.order)
        gone = [row for row in ranked if self._event("expire", row, op)]
        return Reaped([(row.submit.id, row.submit.queue, row.state) for row in gone], sorted(due))

    def _is_due(self, row: Invocation) -> bool:
        return row.state == "queued" and row.not_before is not None and row.not_before <= self._clock()

    # Reads --------------------------------------------------------------------------------------------------------

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        """How each of `ids` stands."""
        return [self._outcome(id) for id in ids]

    def _outcome(self, id: str) -> Outcome:
        row = self.memory.rows.get(id)
        if row is None:
            return Outcome(id, "unknown")
        return Outcome(id, row.state, row.result, row.error) if row.ended else Outcome(id, "pending")

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        """Frames after `since`."""
        row = self._row(id)
        complete = row.closed or row.ended
        frames: list[tuple[int, bytes]] = []
        size, expected = 0, max(since, -1) + 1
        for seq in sorted(seq for seq in row.frames if seq > since):
            data = row.frames[seq][1]
            if not complete and seq != expected:
                break
            size, expected = size + len(data), seq + 1
            if len(frames) == limit or (frames and size > max_bytes):
                complete = False
                break
            frames.append((seq, data))
        return Page(frames, complete, row.state, row.error if row.ended else None)

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        """The claims of `worker` whose cancellation is asked for."""
        rows = (row for row in self.memory.rows.values() if row.state == "running" and row.worker == worker)
        return [(row.submit.id, row.attempt) for row in rows if row.asked]

    async def rows(self, filter: RowFilter) -> list[Row]:
        """Rows, newest first."""
        newest = sorted(self.memory.rows.values(), key=lambda row: -row.order)
        found = [_shown(row, filter.body) for row in newest]
        wanted = {name: getattr(filter, name) for name in ("id", "queue", "state", "key", "root")}
        wanted = {name: value for name, value in wanted.items() if value is not None}
        return [row for row in found if all(getattr(row, name) == value for name, value in wanted.items())][
            : filter.limit
        ]

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        """Rows by (queue, state)."""
        counted = Counter((row.submit.queue, row.state) for row in self.memory.rows.values())
        return {key: n for key, n in counted.items() if queue in (None, key[0]) and state in (None, key[1])}

    async def ages(self) -> dict[str, float]:
        """Of each queue with something due, how long ago the oldest of it was submitted."""
        ages: dict[str, float] = {}
        for row in self.memory.rows.values():
            if row.state == "queued" and row.not_before is None:
                ages[row.submit.queue] = max(ages.get(row.submit.queue, 0.0), self._clock() - row.submitted_at)
        return ages

    async def copies(self, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
        """What would restore the rows after one, in submit order."""
        begin = 0 if after is None else self._row(after).order
        rows = sorted((row for row in self.memory.rows.values() if row.order > begin), key=lambda row: row.order)
        found: list[Restore] = []
        size = 0
        for row in (row for row in rows if not queues or row.submit.queue in queues):
            size += len(row.submit.body) + len(row.result or b"")
            if len(found) == limit or (found and size > max_bytes):
                break
            frames = await self.journal(row.submit.id, -1, limit, max_bytes)
            found.append(_copy(row, tuple(frames)))
        return found

    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        """Frames after `since`, gaps or not."""
        frames: list[tuple[int, bytes]] = []
        size = 0
        for seq, (_, data) in sorted(self._row(id).frames.items()):
            size += len(data) if seq > since else 0
            if len(frames) == limit or (frames and size > max_bytes):
                break
            if seq > since:
                frames.append((seq, data))
        return frames

    async def due(self) -> list[Operation]:
        """A `Reap` when a delay or a lease is over."""
        now = self._clock()
        for row in self.memory.rows.values():
            late = row.state == "running" and row.lease_until is not None and row.lease_until <= now
            if late or self._is_due(row):
                return [Reap()]
        return []

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        """Tell each kind once; nobody else ever changes these rows."""
        for kind in ("queue", "id", "journal", "claims"):
            tell(News(kind))
        await anyio.sleep_forever()


def _claimed(row: Invocation) -> Claimed:
    id, queue, body, _, _, parent, trusted, config = row.submit
    begins, root = row.begins, row.root
    return Claimed(id, queue, body, row.attempt, row.failures, row.lost, begins, trusted, parent, root, config)


def _copy(row: Invocation, frames: tuple[tuple[int, bytes], ...]) -> Restore:
    submit = row.submit
    return Restore(
        id=submit.id,
        queue=submit.queue,
        state=row.state,
        body=submit.body,
        key=submit.key,
        priority=whole_priority(submit.priority),
        parent=submit.parent,
        root=row.root,
        config=submit.config,
        attempt=row.attempt,
        failures=row.failures,
        lost=row.lost,
        worker=None if row.state == "queued" else row.worker,
        submitted_at=row.submitted_at,
        not_before=row.not_before,
        started_at=row.started_at,
        finished_at=row.finished_at,
        result=row.result,
        error=row.error,
        frames=frames,
        closed=row.closed or row.ended,
        more=len(frames) < len(row.frames),
    )


def _shown(row: Invocation, body: bool) -> Row:
    submit = row.submit
    return Row(
        id=submit.id,
        queue=submit.queue,
        state=row.state,
        priority=whole_priority(submit.priority),
        key=submit.key,
        attempt=row.attempt,
        failures=row.failures,
        lost=row.lost,
        worker=row.worker,
        parent=submit.parent,
        root=row.root,
        trusted=submit.trusted,
        cancel_requested=row.asked,
        submitted_at=row.submitted_at,
        not_before=row.not_before,
        started_at=row.started_at,
        lease_until=row.lease_until if row.state == "running" else None,
        finished_at=row.finished_at,
        error=row.error,
        body=submit.body if body else None,
    )
