"""Generated operation sequences, and the comparison of a plane with the reference model after each of them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ..planes.contract.operations import (
    Append,
    Beat,
    Beaten,
    Cancel,
    Claim,
    Fence,
    FinalFrame,
    Finish,
    Operation,
    Purge,
    Reap,
    Reaped,
    Requeue,
    Restore,
    Submit,
)
from ..planes.contract.records import TERMINAL, Failure, Page, Row, RowFilter
from .lab import LONG, Clock, kind_of
from .moving import is_movable
from .reference.model import Model

if TYPE_CHECKING:
    from random import Random

    from ..planes.plane import Plane
    from .reference.effects import Invocation

__all__ = ["Sequence"]

IDS = tuple("fbdaec")
QUEUES = ("q", "p", "r")
WORKERS = ("w", "v", "u")
SEVERAL = (Submit, Finish, Append, Requeue, Cancel, Beat, Restore)
"""Operations that are also given as lists: of one kind each, for planes keep order within a kind only."""


class Sequence:
    """One sequence of operations, applied to a fresh plane and to a fresh model, with all answers compared.

    random: where the choices come from; one that hypothesis drives lets it shrink the sequence. What time does is part
    of it when the plane goes by `clock`; otherwise leases and delays are too long to end.
    """

    def __init__(self, plane: Plane, random: Random, clock: Clock | None, holder: str | None) -> None:
        self._plane, self._random, self._clock, self._holder = plane, random, clock, holder
        self._now = time.time if clock is None else clock.now
        self._model = Model(self._now, holder=holder or "here")
        self._told: list[str] = []
        self._movable = False

    async def run(self, length: int) -> None:
        """Apply `length` steps. Raises AssertionError that tells the whole sequence and the first difference."""
        self._movable = await is_movable(self._plane)
        for _ in range(length):
            if self._clock is not None and self._random.random() < 0.2:
                seconds = self._random.choice((0.25, 1.0, 3.75, 4.0, 8.0, 40.0))
                self._told.append(f"{seconds} seconds pass")
                self._clock.advance(seconds)
                continue
            op = self._draw()
            ops = [op]
            if isinstance(op, SEVERAL) and self._random.random() < 0.2:
                ops += [self._drawn(type(op)) for _ in range(self._random.randint(1, 4))]
            await self._step(ops)
            if self._random.random() < 0.1:
                await self._compare()
        await self._compare()

    # Drawing

    def _draw(self) -> Operation:
        if not self._model.memory.rows and self._random.random() < 0.8:
            return self._drawn(Submit)
        late = any(row.lease_until is not None and row.lease_until <= self._now() for row in self._claimed("running"))
        if late and self._random.random() < 0.3:
            return self._drawn(Reap)
        kinds: list[type[Operation]] = [Submit, Claim, Beat, Finish, Requeue, Cancel, Append, Reap, Purge, Restore]
        (kind,) = self._random.choices(kinds, (20, 20, 8, 10, 12, 6, 16, 8, 2, 4 if self._movable else 0))
        return self._drawn(kind)

    def _drawn(self, kind: type[Operation]) -> Operation:
        pick = self._random.choice
        if kind is Submit:
            key, parent = pick((None, None, "k", "l")), pick((None, *IDS, "stranger"))
            priority = pick((0, 0, 0, 1, -1, 2**63 - 1, -(2**63)))
            trusted = pick((True, False)) and self._plane.local
            body, config = pick((b"x", b"")), pick((None, b"c"))
            return Submit(pick(IDS), pick(QUEUES), body, key, priority, parent, trusted, config)
        if kind is Claim:
            queues = tuple(queue for queue in QUEUES if pick((True, True, False)))
            poll, local = pick((None, None, "leased", "free")), pick((True, False))
            free = poll == "free" or (poll is None and self._random.random() < 0.2)  # a repeated poll repeats its lease
            lease = None if free else self._lease()
            return Claim(queues, pick(WORKERS), pick((0, 1, 1, 2, 9)), lease, pick((1, 2, 5)), poll, local)
        if kind is Beat:
            return self._beat()
        if kind is Finish:
            final = pick((None, FinalFrame(pick((0, 0, 1, 2, 5)), b"END")))
            error = pick((None, Failure("E", "of the ack"), Failure("E", "", "trace")))
            result = pick((None, b"" if self._plane.local else None, b"r"))
            return Finish(self._fence(), pick((*sorted(TERMINAL), "queued")), result, error, final)
        if kind is Requeue:
            if pick((True, False)):
                return Requeue(self._fence())
            delay = pick((0.0, LONG if self._clock is None else 4.0))
            return Requeue(self._fence(), "retry", delay, pick((None, Failure("E", "of a try"))))
        if kind is Cancel:
            return Cancel(pick((*IDS, "nobody")))
        if kind is Append:
            return self._append()
        if kind is Restore:
            return self._restore()
        if kind is Purge:
            return Purge(LONG if self._clock is None else pick((0.0, 4.0, 20.0)))
        held = () if self._holder is None else (self._holder,)
        return Reap(pick(((), (), held)), pick(((), held)), pick((True, True, True, False)))

    def _lease(self) -> float:
        return LONG if self._clock is None else self._random.choice((4.0, 8.0))

    def _target(self) -> Invocation | None:
        """Some row of the model: mostly one with a claim that may speak."""
        rows = list(self._model.memory.rows.values())
        for standing, chance in (("lapsed", 0.5), ("running", 0.8)):
            claimed = self._claimed(standing)
            if claimed and self._random.random() < chance:
                return self._random.choice(claimed)
        return self._random.choice(rows) if rows else None

    def _claimed(self, standing: str) -> list[Invocation]:
        return [row for row in self._model.memory.rows.values() if row.stands == standing]

    def _fence(self, row: Invocation | None = None) -> Fence:
        row = row or self._target()
        if row is None or self._random.random() < 0.03:
            return Fence("nobody", "w", 1)
        id, worker, attempt = row.submit.id, row.worker or self._random.choice(WORKERS), row.attempt
        (kind,) = self._random.choices(("right", "stale", "other", "bare", "worker"), (75, 8, 5, 6, 6))
        return {
            "right": Fence(id, worker, attempt),
            "stale": Fence(id, worker, max(0, attempt - 1)),
            "other": Fence(id, self._random.choice(WORKERS), attempt),
            "bare": Fence(id),
            "worker": Fence(id, worker),
        }[kind]

    def _beat(self) -> Beat:
        worker = self._random.choice(WORKERS)
        claims: dict[str, int] = {}
        for _ in range(self._random.randint(0, 3)):
            row = self._target()
            if row is not None:
                worker = row.worker or worker
                claims[row.submit.id] = max(0, row.attempt - self._random.choice((0, 0, 0, 1)))
        return Beat(worker, tuple(claims.items()), self._lease())

    def _append(self) -> Append:
        row = self._target()
        after = row.next_seq if row else 0
        first_seq = after + self._random.choice((0, 0, 0, 0, -1, -2, 1, 2))
        frames = tuple(
            self._random.choice((b"a", b"bb", b"c" * 20)) for _ in range(self._random.choice((1, 1, 2, 3, 0)))
        )
        return Append(self._fence(row), first_seq, frames, self._random.random() < 0.1)

    def _restore(self) -> Restore:
        """A row as another plane might have had it, whole; of parts the contract leaves open what is seen."""
        pick, ended = self._random.choice, self._random.random() < 0.5
        attempt, ago = pick((1, 1, 3)), pick((0.0, 3.0, 30.0))
        now = self._now()
        return Restore(
            id=pick(IDS),
            queue=pick(QUEUES),
            state=pick(sorted(TERMINAL)) if ended else "queued",
            body=pick((b"x", b"")),
            key=pick((None, None, "k", "l")),
            priority=pick((0, 0, 1, -1)),
            parent=pick((None, "stranger")),
            root=pick((None, "stranger")),
            config=pick((None, b"c")),
            attempt=attempt,
            failures=pick((0, 1)),
            lost=pick((0, 1)),
            worker=pick((None, *WORKERS)) if ended else None,
            submitted_at=now - ago - 2.0,
            not_before=None if ended else pick((None, now + 4.0, now - 1.0)),
            started_at=now - ago - 1.0,
            finished_at=now - ago if ended else None,
            result=pick((None, b"r")) if ended else None,
            error=pick((None, Failure("E", "of another plane"))),
            frames=pick(((), ((0, b"a"),), ((0, b"a"), (2, b"bb")))),
            closed=ended or self._random.random() < 0.1,
        )

    # Comparing

    async def _step(self, ops: list[Operation]) -> None:
        expected = await self._model.apply(ops)
        came = await self._plane.many(ops)
        for n, (op, wanted, answer) in enumerate(zip(ops, expected, came, strict=True)):
            rest = f", given together with {ops[n + 1 :]}" if len(ops) > n + 1 else ""
            self._same(f"{op}{rest}", _plain(answer), _plain(wanted))
            self._told.append(f"{op} -> {wanted!r}")

    def _same(self, what: str, came: Any, expected: Any) -> None:
        if came != expected:
            told = "\n  ".join(self._told)
            raise AssertionError(f"{what}: expected {expected!r}, came {came!r}; before that:\n  {told}")

    async def _compare(self) -> None:
        """All that can be read is alike."""
        plane, model, pick = self._plane, self._model, self._random.choice
        everything = RowFilter(limit=1000, body=True)
        rows, expected = await plane.rows(everything), await model.rows(everything)
        self._same("the rows' ids", [row.id for row in rows], [row.id for row in expected])
        for row, wanted in zip(rows, expected, strict=True):
            for name, came in self._visible(row).items():
                self._same(f"{name} of row {row.id}", came, self._visible(wanted)[name])
        self._same("the counts", await plane.counts(), await model.counts(None, None))
        if self._movable:
            await self._compare_copies(expected)
        ids = [*IDS, "nobody"]
        self._same("the outcomes", await plane.current_outcomes(ids), await model.outcomes(ids))
        for worker in WORKERS:
            asked = sorted(await plane.cancels(worker))
            self._same(f"the cancels of {worker}", asked, sorted(await model.cancels(worker)))
        for row in expected:
            since, limit, max_bytes = pick((-1, -1, 0, 1, 3)), pick((1, 2, 100)), pick((1, 21, 1000))
            page = await plane.page(row.id, since, limit=limit, max_bytes=max_bytes)
            wanted_page = await model.page(row.id, since, limit, max_bytes)
            what = f"the page of {row.id} after {since}, of {limit} frames and {max_bytes} bytes"
            self._same(what, _shown_page(page), _shown_page(wanted_page))

    async def _compare_copies(self, rows: list[Row]) -> None:
        """What would restore the rows is alike too; of a row that might not go on there, when it was due at last."""
        after = self._random.choice((None, *(row.id for row in rows)))

        async def look(store: Any) -> list[Restore]:
            found: list[Restore] = await store.copies(after, (), 1000, 1 << 20)
            return found

        for one, wanted in zip(await self._plane.read_store(look), await look(self._model), strict=True):
            fields, expected = one._asdict(), wanted._asdict()
            for name, came in fields.items():
                if not name.endswith(("_at", "_before")):  # those of the row are compared as its own
                    self._same(f"{name} of the copy of {one.id}", came, expected[name])

    def _visible(self, row: Row) -> dict[str, Any]:
        """The fields of a row that the contract decides in its state, and that the clocks in use can tell."""
        fields = row._asdict()
        if row.not_before is not None and row.not_before <= self._now():
            fields["not_before"] = None  # promoted or not: it is due
        if row.state != "running":
            del fields["lease_until"], fields["started_at"]
        if row.state in TERMINAL:
            del fields["cancel_requested"], fields["not_before"]
        if self._clock is None:
            fields = {name: value for name, value in fields.items() if not name.endswith(("_at", "_until", "_before"))}
        return fields


def _plain(answer: Any) -> Any:
    """An answer as it can be compared: exceptions by their kind, and no order where the contract knows none."""
    if isinstance(answer, Beaten):
        return Beaten(sorted(answer.lost), sorted(answer.cancel))
    if isinstance(answer, Reaped):
        return sorted(answer.rows)  # which delayed rows a claim has found before is the store's affair
    return kind_of(answer)


def _shown_page(page: Page) -> Page:
    return page if page.state in TERMINAL else page._replace(error=None)
