"""The SQLite plane: `Dispatch`, a `Plane` over a file that needs no server, and the store below it."""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import anyio

from ...concurrency.portal import across, at_home
from ...errors import DispatchError, LakeshoreError
from ...limits import LARGE_BYTES
from ..contract.news import Kind, News
from ..contract.operations import Finish, Operation, Reap, Reaped, Submit, weight_of
from ..engine import Engine
from ..plane import Plane
from . import read as reads
from . import statements
from .claim import look
from .connection import Checkpoints, Database, foreign
from .doorbell import CANCELS, ENDS, JOBS, Bell, EventBell, jobs_of
from .inline_writer import MOST_BYTES, MOST_OPERATIONS, Direct
from .liveness import FilePresence, LocalPresence, Presence, Steps
from .restore import Copying
from .rows import PIECE, Batch, Changes, drop_blobs, new_blob, write_piece

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from ..contract.records import Outcome, Page, Row, RowFilter
    from ..contract.store import Interest

__all__ = ["Dispatch", "SqliteStore"]

logger = logging.getLogger("dreamlake.lakeshore.sqlite")

T = TypeVar("T")

_ENDS, _NONE = {ENDS}, set[str]()
_KINDS: tuple[Kind, ...] = ("queue", "id", "journal", "claims")


class SqliteStore(Copying):
    """One engine's access to a database file, or to the in-memory database that the engines of a plane share."""

    net = 0.25

    def __init__(self, plane: Dispatch) -> None:
        self._plane, self._ns, self._clock = plane, plane.ns, plane.clock
        self.home: Literal["asyncio", "portal"] = "portal" if plane.path is None else "asyncio"
        self._files: list[Database] = []
        self._large: Database | None = None
        self._direct: Direct | None = None
        self._at_home = False  # the watcher, which runs on the loop of those who wait
        self._bell: Bell | None = None
        self._version, self._ticks = -1, 0
        self._cursor = reads.Cursor(0, None)
        self._steady = time.monotonic if plane.clock is time.time else plane.clock  # a test's own never steps
        self._steps = Steps(lambda: self._steady())
        self._since: float | None = None
        self._presence: Presence = LocalPresence(plane.ns, plane.bells)
        self._checkpoints = Checkpoints(self._second)

    async def open(self) -> None:
        """Open the database; create and migrate it where needed."""
        path = self._plane.path
        self._since = self._clock() if self._plane.serving else None
        self._opening = anyio.Lock()
        self._small = await self._plane.database()
        if path is None:
            return
        self._files.append(self._small)
        try:
            self._presence = FilePresence(Path(f"{path}-presence"), self._ns)
            if not self._plane.durable:  # a commit that waits for the disk is none for the event loop
                self._direct = Direct(path)
        except OSError as exc:
            raise DispatchError(f"cannot join those who use the plane {str(path)!r}: {exc}") from exc
        if left := self._presence.left_behind():
            held = await self._small.call(reads.holders)
            self._presence.bury(name for name in left if name not in held)

    async def close(self) -> None:
        """Give back what this engine's claims still hold, leave, and close."""
        try:
            await self.apply([Reap(dead=(self._presence.holder,), counted=False)])
            self._presence.leave()
        except LakeshoreError as exc:
            logger.warning("left without giving claims back, others will find them: %s", exc)
            self._presence.forget()
        await self._checkpoints.idle()
        await self._disconnect()

    async def discard(self) -> None:
        """Close what an opening that failed, or that nobody waits for any more, has opened."""
        self._presence.leave()
        await self._disconnect()

    async def _disconnect(self) -> None:
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        for file in self._files:
            await file.close()

    # Operations

    def lane(self, op: Operation) -> str | None:
        """Small operations share a connection; large ones have one of their own, and are written in pieces."""
        return "large" if self._plane.path is not None and weight_of(op) > LARGE_BYTES else "small"

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """One transaction for all of `ops`; bells after the commit.

        It runs as one call on the connection's thread, or right here when it is small and nobody else is writing.
        """
        weight = sum(map(weight_of, ops))
        if weight > LARGE_BYTES and any(weight_of(op) > LARGE_BYTES for op in ops):
            return await self._apply_large(ops)
        if (answers := self.apply_at_once(ops)) is not None:
            return answers
        return await self._small.call(lambda db: self._apply(self._small, db, ops, {}))

    def apply_at_once(self, ops: Sequence[Operation]) -> Sequence[Any] | None:
        """The same without a wait, for a small batch when nobody else is writing; None when it cannot be done so."""
        direct = self._direct
        if direct is None or len(ops) > MOST_OPERATIONS or sum(map(weight_of, ops)) > MOST_BYTES:
            return None
        if self._checkpoints.behind:  # the other connection makes its own
            return None
        now, changes = self._clock(), Changes()
        seen = direct.read(lambda db: look(db, self._ns, ops, now)) or (True, True)
        if not any(seen):
            return [[] for _ in ops]
        answers = direct.write(lambda db: statements.apply(self._batch(db, now, changes, {}, seen[1]), ops))
        self._checkpoints.start_if_due()  # this connection makes none, and `due` is asked only while somebody waits
        return None if answers is None else self._applied(ops, answers, changes)

    def _apply(
        self, database: Database, db: sqlite3.Connection, ops: Sequence[Operation], blobs: dict[int, int]
    ) -> Sequence[Any]:
        now, changes = self._clock(), Changes()
        seen = look(db, self._ns, ops, now)
        if not any(seen):
            return [[] for _ in ops]
        try:
            answers = database.write(db, lambda: statements.apply(self._batch(db, now, changes, blobs, seen[1]), ops))
        except Exception as exc:
            if len(ops) == 1:
                return [foreign(exc, database.path)]
            return [self._apply(database, db, [op], {})[0] for op in ops]  # one bad apple spoils only itself
        return self._applied(ops, answers, changes)

    def _batch(self, db: sqlite3.Connection, now: float, changes: Changes, blobs: dict[int, int], late: bool) -> Batch:
        return Batch(db, self._ns, now, self._presence.holder, changes, blobs, late)

    def _applied(self, ops: Sequence[Operation], answers: list[Any], changes: Changes) -> list[Any]:
        """After the commit: who is to know, and how much has been written."""
        self._presence.ring(changes)
        weight = 0
        for at, op in enumerate(ops):
            weight += weight_of(op)
            if type(op) is Reap and isinstance(answers[at], Reaped):
                self._presence.bury(op.dead)
        self._checkpoints.written += 2 + len(ops) + weight // 4096
        return answers

    async def _apply_large(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Bodies and results are written ahead in pieces, each in its own turn, so that small operations get theirs."""
        if self._plane.path is None:
            return await self._small.call(lambda db: self._apply(self._small, db, ops, {}))
        large, blobs = await self._second(), dict[int, int]()
        for at, op in enumerate(ops):
            data = op.body if isinstance(op, Submit) else op.result if isinstance(op, Finish) else None
            if data is not None and len(data) > LARGE_BYTES:
                blobs[at] = await self._write_ahead(large, data)
        answers = await large.call(lambda db: self._apply(large, db, ops, blobs))
        unused = [ref for at, ref in blobs.items() if answers[at] is not True and isinstance(ops[at], Finish)]
        if unused:
            await large.call(lambda db: large.write(db, lambda: drop_blobs(db, unused)))
        return answers

    async def _second(self) -> Database:
        """The connection of the large operations, and of checkpoints, to a file."""
        async with self._opening:
            if self._large is None:
                self._large = await Database.open(self._plane.path, durable=self._plane.durable)
                self._files.append(self._large)
            return self._large

    async def _write_ahead(self, large: Database, data: bytes) -> int:
        view, now = memoryview(data), self._clock()
        ref = await large.call(lambda db: large.write(db, lambda: new_blob(db, now)))

        def piece(part: int) -> Callable[[sqlite3.Connection], None]:
            start = part * PIECE
            return lambda db: large.write(db, lambda: write_piece(db, ref, part, view[start : start + PIECE]))

        for part in range(-(-len(view) // PIECE)):
            await large.call(piece(part))
            if part % 2 == 1:  # often, and so little at a time that nobody notices
                await large.checkpoint()
        return ref

    # Reads

    async def _read(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """A read of little: right here, if it can be."""
        found = None if self._direct is None else self._direct.read(fn)
        return await self._small.call(fn) if found is None else found

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        return await self._small.call(lambda db: reads.outcomes(db, self._ns, ids))

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self._small.call(lambda db: reads.page(db, self._ns, id, since, limit, max_bytes))

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return await self._read(lambda db: reads.cancels(db, self._ns, worker))

    async def rows(self, filter: RowFilter) -> list[Row]:
        return await self._small.call(lambda db: reads.rows(db, self._ns, filter))

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        return await self._small.call(lambda db: reads.counts(db, self._ns, queue, state))

    async def ages(self) -> dict[str, float]:
        return await self._small.call(lambda db: reads.ages(db, self._ns, self._clock()))

    # What time and others do

    async def due(self) -> list[Operation]:
        """Look at the change counter and the clock; at every second look also at who holds what runs."""
        self._ticks += 1
        with_holders = self._ticks % 2 == 0
        reap, changed = await self._small.call(lambda db: self._due(db, with_holders))
        if changed and self._bell is not None:
            self._bell.poke()
        if self._plane.path is not None:
            self._checkpoints.start_if_due()
        return [] if reap is None else [reap]

    def _due(self, db: sqlite3.Connection, with_holders: bool) -> tuple[Reap | None, bool]:
        now = self._clock()
        found = reads.due(db, self._ns, now, -math.inf if self._since is None else self._since, with_holders)
        dead, alive = self._presence.judge([name for name, _, _ in found.holders if name is not None])
        late = found.late or bool(dead)
        if not self._steps.merciful(now):
            for name, once, tenfold in found.holders:
                until = tenfold if name in alive else once
                late = late or (until is not None and until <= now)
        changed, self._version = found.version != self._version, found.version
        return (Reap(tuple(dead), tuple(alive), since=self._since) if late else None), changed

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        """Hang up a bell, tell everything once, and then what the bell and the cursor say."""
        bell = self._bell = self._presence.bell()
        self._at_home = at_home(self.home)
        hung: dict[str, str] = {}  # where the bell hangs, and for which queue if for one

        def hang() -> None:
            wanted = {jobs_of(self._ns, queue): queue for queue in interest.names("queue")}
            wanted |= {ENDS: ""} if interest.waits("id") or interest.waits("journal") else {}
            wanted |= {CANCELS: ""} if interest.waits("claims") else {}
            for place in wanted.keys() - hung.keys():
                bell.hang(place, True)
                hung[place] = wanted[place]

        def pass_on() -> None:
            """Claimers come back sooner than a link is made again, so a bell stays until it is rung in vain."""
            waiting = interest.names("queue")
            for place, queue in [(place, queue) for place, queue in hung.items() if queue and queue not in waiting]:
                bell.hang(place, False)
                del hung[place]
                self._presence.ring(Changes({queue: 1}))

        def hear(rung: set[str]) -> set[str]:
            """In the loop's own callback, which spares the watcher's task: what cannot wait for the next step of one."""
            if JOBS in rung:
                pass_on()
                tell(News("queue"))
            if CANCELS in rung:
                tell(News("claims"))
            return rung & _ENDS if ENDS in rung and not self._tell_ends_at_once(interest, tell) else _NONE

        try:
            hang()
            interest.changed(hang)
            self._cursor = await across(self.home, self._small.call, reads.cursor)
            for kind in _KINDS:
                tell(News(kind))
            bell.hear = hear
            while True:
                await bell.wait()
                await self._tell_ends(interest, tell)
        finally:
            self._bell = bell.hear = None
            interest.changed(lambda: None)
            bell.close()

    def _tell_ends_at_once(self, interest: Interest, tell: Callable[[News], None]) -> bool:
        """Whether it could be done without a wait."""
        direct = self._direct if self._at_home else None
        found = None if direct is None else direct.read(self._news(interest))
        if found is not None:
            self._pass_on_news(found, tell)
        return found is not None

    async def _tell_ends(self, interest: Interest, tell: Callable[[News], None]) -> None:
        self._pass_on_news(await across(self.home, self._read, self._news(interest)), tell)

    def _news(self, interest: Interest) -> Callable[[sqlite3.Connection], reads.News]:
        ids, journals, since = interest.waits("id"), interest.waits("journal"), self._cursor
        if (journals and since.frame is None) or not (ids or journals):
            return lambda db: reads.News(reads.cursor(db))
        return lambda db: reads.news(db, self._ns, since, journals)

    def _pass_on_news(self, news: reads.News, tell: Callable[[News], None]) -> None:
        self._cursor = news.cursor
        for one in reads.told(news):
            tell(one)


class Dispatch(Plane):
    """The plane in a SQLite file: no server, any number of processes of one machine.

    path: the file, created with mode 0600 when it is new; ":memory:" keeps all in this process. ns: whose invocations
    are seen. durable: survive a power cut with nothing lost (synchronous=FULL), at a cost for each commit; otherwise a
    killed process loses nothing and a power cut may lose the last commits.

    An async context manager, and usable without: the first use opens it. One object may be used from several event
    loops. Raises PlaneUnavailable when the file cannot be opened, DispatchError when it is not a plane's.
    """

    local = True

    def __init__(
        self,
        path: str | Path = ":memory:",
        *,
        ns: str = "default",
        durable: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(lambda: SqliteStore(self), f"Dispatch({str(path)!r})", ns=ns)
        self.path = None if str(path) == ":memory:" else Path(path).expanduser().absolute()
        self.durable, self.clock = durable, clock
        self.bells: set[EventBell] = set()
        self._memory: Database | None = None
        self._opening: anyio.Lock | None = None
        self._whole = self

    def within(self, ns: str) -> Dispatch:
        """The same file as another namespace sees it; it is closed on its own. In memory: as long as this one lives."""
        other = Dispatch(self.path or ":memory:", ns=ns, durable=self.durable, clock=self.clock)
        other.serving, other.bells, other._whole = self.serving, self.bells, self._whole
        return other

    async def _open(self) -> Engine:
        store = SqliteStore(self)
        try:
            await across(store.home, store.open)
        except BaseException:  # also when it was done on the portal's loop just before its caller was cancelled
            with anyio.CancelScope(shield=True):
                await across(store.home, store.discard)
            raise
        return Engine(store)

    async def database(self) -> Database:
        """A connection for one engine; for an in-memory plane the one that all share, on the portal's loop."""
        if self.path is not None:
            return await Database.open(self.path, durable=self.durable)
        if self._whole is not self:
            return await self._whole.database()
        self._opening = self._opening or anyio.Lock()  # made on the portal's loop, and used there only
        async with self._opening:
            if self._memory is None:
                self._memory = await Database.open(None, durable=False)
            return self._memory

    async def aclose(self) -> None:
        """End the engines of every loop; an in-memory plane forgets its rows. It can be used, and opens, again."""
        await super().aclose()
        memory, self._memory = self._memory, None
        if memory is not None:
            await across("portal", memory.close)
