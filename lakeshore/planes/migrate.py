"""Invocations copied from one plane to another, through the contract alone: whichever stores the two are over.

Rows are written in the order in which they were submitted, each with its journal. So what an earlier run wrote is the
beginning of what this one has to write, and going on is reading both planes side by side until the target ends. Whatever
is there and not the same stops the migration: nothing is ever written over.

**What holds in the end.** When everything is written both planes are read once more, side by side. Only when they are
alike to the last byte has the migration succeeded; what somebody did to either meanwhile shows there. The source is only
read. It has to be at rest, and no row may be running: two planes would run it. What is submitted to the source after its
last row was read is not on the target, so producers have to be told of their new plane first.

**What is compared**, by SHA-256 over every row in submit order: id, queue, state, key, priority, parent, root, attempt and
budgets, config, envelope, result, error, and the journal. Times are carried as precisely as the target keeps them, and not
compared. Every row on the target is untrusted, and no claim of the source holds there.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import DispatchError, InvocationNotFound
from ..limits import MAX_FRAMES_PER_PAGE
from .contract.operations import Restore, weight_of
from .contract.records import RowFilter
from .contract.store import Movable

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .contract.store import Store
    from .plane import Plane

__all__ = ["Migration", "Tally", "check_at_rest", "settle"]

ROWS, BYTES = 200, 4 << 20
"""How much is read or written at once, unless one body alone is larger."""
NAMED = 5
"""Running rows that a refusal names."""

_COMPARED = (
    "id", "queue", "state", "key", "priority", "parent", "root", "attempt", "failures", "lost", "error", "config", "body",
    "result",
)  # fmt: skip


@dataclass
class Tally:
    """What was read of one plane: rows by (queue, state), and one hash over all of them in submit order."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter[tuple[str, str]])
    _hash: Any = field(default_factory=hashlib.sha256)

    def add(self, copy: Restore, digest: bytes) -> None:
        self.counts[copy.queue, copy.state] += 1
        self._hash.update(digest)

    @property
    def digest(self) -> str:
        return f"sha256:{self._hash.hexdigest()}"


def _nobody(done: int) -> None:
    """Nobody wants to know."""


class Migration:
    """One copy of the queues named, or of all, from `source` to `target`; None for a target that is not there yet.

    tell: called with how many rows are done. Both rounds raise DispatchError with what is in the way, and PlaneUnavailable
    where a plane does not answer for the seconds of its patience. Cancelled or killed at any moment, the copy can be
    started again, and goes on.
    """

    def __init__(self, source: Plane, target: Plane | None, queues: Sequence[str] = ()) -> None:
        self._source, self._target, self._queues = source, target, queues
        self.written = self.there = 0
        """Rows that this run wrote, or would; and those that the target had."""

    async def copy(self, tell: Callable[[int], object] = _nobody, *, dry: bool = False) -> None:
        """Write what is missing on the target; `dry`: only find out what that is."""
        await check_at_rest(self._source, self._queues)
        source, target = _Rows(self._source, self._queues), _Rows(self._target, self._queues)
        writer = None if self._target is None or dry else _Writer(self._source, self._target)
        held: Restore | None = None
        while (row := await source.next()) is not None:
            if row.state == "running":
                raise DispatchError(f"invocation {row.id!r} of the source has begun to run meanwhile: {_REST}")
            held = None if self.written else await target.next()
            if held is not None and not _is_part(held):
                await self._check_same(row, held)
                self.there += 1
            else:
                if held is not None and held.id != row.id:
                    raise self._foreign(held)
                if held is not None and (after := await target.next()) is not None:
                    raise self._foreign(after)
                self.written += 1
                if writer is not None:
                    await writer.put(row)
            tell(self.there + self.written)
        if not self.written and (held := await target.next()) is not None:
            raise self._foreign(held)
        if writer is not None:
            await writer.flush()

    async def verify(self, tell: Callable[[int], object] = _nobody) -> tuple[Tally, Tally, str | None]:
        """Read both planes: what each holds, and where they differ first, if they do."""
        source, target = _Rows(self._source, self._queues), _Rows(self._target, self._queues)
        here, there, difference, done = Tally(), Tally(), None, 0
        while True:
            row, mine = await source.counted(here)
            held, theirs = await target.counted(there)
            if row is held is None:
                return here, there, difference
            if mine != theirs and difference is None:
                difference = _difference(row, held)
            done += 1
            tell(done)

    async def _check_same(self, row: Restore, held: Restore) -> None:
        if row.id != held.id:
            raise self._foreign(held)
        assert self._target is not None
        if await _digest(self._source, row) != await _digest(self._target, held):
            raise DispatchError(f"{_difference(row, held)}; nothing is written over. {_EMPTY}")

    def _foreign(self, held: Restore) -> DispatchError:
        return DispatchError(
            f"the target holds invocation {held.id!r} of queue {held.queue!r}, which the source does not have, or not in "
            f"this place. {_EMPTY}"
        )


_REST = (
    "Stop the workers of the source, which finish or give back what they run, then migrate; `lakeshore inv release ID` "
    "takes one from a claim without a lease, and what a dead worker held goes back when its lease is over"
)
_EMPTY = "A target has to be empty, or to hold only what an earlier run of this very migration wrote: give a new one"


async def check_at_rest(source: Plane, queues: Sequence[str]) -> None:
    """Raises DispatchError where invocations of the queues named, or of any, are running."""
    named: list[str] = []
    total = 0
    for queue in queues or (None,):
        total += sum((await source.counts(queue, "running")).values())
        rows = await source.rows(RowFilter(queue=queue, state="running", limit=NAMED))
        named += [f"{row.id!r} (held by {row.worker!r})" for row in rows]
    if total:
        shown = ", ".join(named[:NAMED]) + (f" and {total - NAMED} more" if total > NAMED else "")
        what = "1 invocation of the source is" if total == 1 else f"{total} invocations of the source are"
        raise DispatchError(f"{what} running: {shown}. {_REST}")


async def settle(plane: Plane) -> None:
    """Do what time asks for, as whoever waits on a plane does: what dead workers held goes back."""

    async def due(store: Store) -> Any:
        return [*await store.due(), *await store.due()]  # a store may look at more every second time

    for op in await plane.read_store(due):
        await plane.do(op)


def _is_part(held: Restore) -> bool:
    """Whether a row of the target is one that a migration has begun, and not ended."""
    return held.state == "running" and held.worker is None


class _Rows:
    """The rows of a plane, one after the other in submit order; of no plane, none."""

    def __init__(self, plane: Plane | None, queues: Sequence[str]) -> None:
        self._plane, self._queues = plane, queues
        self._read: deque[Restore] = deque()
        self._after: str | None = None

    async def next(self) -> Restore | None:
        if not self._read and self._plane is not None:
            self._read.extend(await _copies(self._plane, self._after, self._queues))
        if not self._read:
            return None
        row = self._read.popleft()
        self._after = row.id
        return row

    async def counted(self, tally: Tally) -> tuple[Restore | None, bytes]:
        """The next row, entered in `tally`, and its hash."""
        row = await self.next()
        if row is None or self._plane is None:
            return None, b""
        digest = await _digest(self._plane, row)
        tally.add(row, digest)
        return row, digest


class _Writer:
    """Writes rows to the target, many at a time; a journal that is too long for that in parts."""

    def __init__(self, source: Plane, target: Plane) -> None:
        self._source, self._target = source, target
        self._rows: list[Restore] = []
        self._bytes = 0

    async def put(self, row: Restore) -> None:
        if row.more:
            await self.flush()
            await self._in_parts(row)
            return
        if self._rows and (len(self._rows) == ROWS or self._bytes + weight_of(row) > BYTES):
            await self.flush()
        self._rows.append(row)
        self._bytes += weight_of(row)

    async def flush(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        for row, answer in zip(rows, await self._target.many(rows), strict=True):
            if isinstance(answer, ValueError):
                raise DispatchError(f"the target does not take invocation {row.id!r}: {answer}") from answer
            if isinstance(answer, Exception):
                raise answer
            if answer != row.id:
                raise DispatchError(
                    f"the target has given key {row.key!r} of queue {row.queue!r}, which is that of invocation {row.id!r}, "
                    f"to {answer!r}. {_EMPTY}"
                )

    async def _in_parts(self, row: Restore) -> None:
        frames = [*row.frames]
        while True:
            coming = await _frames(self._source, row.id, frames[-1][0] if frames else -1)
            self._rows = [row._replace(frames=tuple(frames), more=bool(coming))]
            await self.flush()
            if not coming:
                return
            frames = coming


async def _copies(plane: Plane, after: str | None, queues: Sequence[str]) -> list[Restore]:
    async def look(store: Store) -> list[Restore]:
        return await _movable(plane, store).copies(after, queues, ROWS, BYTES)

    try:
        return await plane.read_store(look)
    except InvocationNotFound as exc:
        raise DispatchError(
            f"{plane!r} was purged while it was read: {exc}; start again when nobody else uses it"
        ) from exc


async def _frames(plane: Plane, id: str, since: int) -> list[tuple[int, bytes]]:
    async def look(store: Store) -> list[tuple[int, bytes]]:
        return await _movable(plane, store).journal(id, since, MAX_FRAMES_PER_PAGE, BYTES)

    return await plane.read_store(look)


def _movable(plane: Plane, store: Any) -> Movable:
    if not isinstance(store, Movable):
        raise DispatchError(f"invocations of {plane!r} cannot be moved: name the file or the database that it serves")
    return store


async def _digest(plane: Plane, row: Restore) -> bytes:
    """A hash over all of a row that is compared, its journal read to the end."""
    head = [getattr(row, name) for name in _COMPARED[:10]]
    error = None if row.error is None else row.error.as_dict()
    found = hashlib.sha256()
    _enter(found, json.dumps([*head, error, row.config is None, row.closed], sort_keys=True).encode())
    for data in (row.config or b"", row.body, row.result or b""):  # an empty result is none on many planes
        _enter(found, data)
    frames, more = [*row.frames], row.more
    while True:
        for seq, data in frames:
            _enter(found, b"%d" % seq)
            _enter(found, data)
        if not more or not (frames := await _frames(plane, row.id, frames[-1][0] if frames else -1)):
            return found.digest()


def _enter(found: Any, data: bytes) -> None:
    found.update(b"%d:" % len(data))
    found.update(data)


def _difference(row: Restore | None, held: Restore | None) -> str:
    """Where two rows that have different hashes differ first, as a sentence without its end."""
    if held is None or row is None or row.id != held.id:
        here, there = ("nothing" if one is None else f"invocation {one.id!r}" for one in (row, held))
        return f"the source has {here} where the target has {there}"
    for name in _COMPARED:
        mine, theirs = getattr(row, name), getattr(held, name)
        if mine == theirs or (name == "result" and (mine or b"") == (theirs or b"")):
            continue
        if isinstance(mine or theirs, bytes):
            return f"invocation {row.id!r} has another {name} on the target than on the source"
        return f"invocation {row.id!r} has the {name} {mine!r} on the source and {theirs!r} on the target"
    return f"invocation {row.id!r} has another journal on the target than on the source"
