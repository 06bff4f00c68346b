"""The SQLite plane: `Dispatch`, a `Plane` over a file that needs no server, and its store."""

from __future__ import annotations

import logging
import math
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from ...concurrency.portal import across
from ...errors import DispatchError, LakeshoreError
from ...limits import LARGE_BYTES
from ..contract.operations import Claim, Finish, Operation, Reap, Reaped, Submit, weight_of
from ..plane import Plane
from . import copies, read
from .apply import commit
from .batch import Batch
from .blobs import PIECE_BYTES, drop_blobs, new_blob, write_piece
from .checkpoints import Checkpointer
from .claim import finds_nothing
from .connection import SqliteConnection, as_plane_error, in_transaction
from .doorbell import Bell, Doorbells, EventBell, FileDoorbells, MemoryDoorbells
from .inline_writer import MAX_INLINE_BYTES, MAX_INLINE_OPERATIONS, InlineWriter
from .liveness import ClockSteps, FileLiveness, Liveness, MemoryLiveness
from .watcher import Watcher

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Sequence

    from ...concurrency.portal import Home
    from ..contract.news import News
    from ..contract.operations import Restore
    from ..contract.records import Outcome, Page, Row, RowFilter
    from ..contract.store import Interest

__all__ = ["Dispatch", "SqliteStore"]

logger = logging.getLogger("dreamlake.lakeshore.sqlite")

T = TypeVar("T")

PIECES_PER_CHECKPOINT = 2
"""Pieces of a large operation after which the log is copied into the file: seldom enough to cost little, and so little at a
time that no small operation waits for it."""
PAGE_BYTES = 4096
"""Bytes of a database page."""


class SqliteStore:
    """One engine's access to a database file, or to the in-memory database that the engines of a plane share."""

    net = 0.25

    def __init__(self, plane: Dispatch) -> None:
        self._plane = plane
        self._ns = plane.ns
        self._clock = plane.clock
        self.home: Home = "portal" if plane.path is None else "asyncio"
        self._is_open = False
        self._own_connections: list[SqliteConnection] = []
        self._large_connection: SqliteConnection | None = None
        self._inline: InlineWriter | None = None
        self._checkpointer = Checkpointer(self._connection_for_large)
        self._liveness: Liveness = MemoryLiveness()
        self._doorbells: Doorbells = MemoryDoorbells(plane.ns, plane.bells)
        self._bell: Bell | None = None
        self._data_version = -1
        self._due_checks = 0
        self._clock_steps = ClockSteps(time.monotonic if plane.clock is time.time else plane.clock)
        self._serving_since: float | None = None

    async def open(self) -> None:
        """Open the database; create and migrate it where needed."""
        path = self._plane.path
        self._serving_since = self._clock() if self._plane.serving else None
        self._opening_large = anyio.Lock()
        self._connection = await self._plane.connection()
        if path is not None:
            self._own_connections.append(self._connection)
            await self._join(path)
        self._is_open = True

    async def _join(self, path: Path) -> None:
        """Become one of the engines that use the file."""
        folder = Path(f"{path}-presence")
        try:
            liveness = self._liveness = FileLiveness(folder)
            self._doorbells = FileDoorbells(folder, self._ns, liveness)
            if not self._plane.durable:  # a commit that waits for the disk must not be made on the event loop
                self._inline = InlineWriter(path)
        except OSError as exc:
            raise DispatchError(f"cannot open the files beside the plane {str(path)!r}: {exc}") from exc
        dead = liveness.dead_holders()
        if dead:
            holders = await self._connection.call(read.holders)
            self._forget_holders([name for name in dead if name not in holders])

    async def close(self) -> None:
        """Give back what this engine's claims still hold, and leave nothing open; also after an opening that failed."""
        try:
            if self._is_open:
                await self.apply([Reap(dead=(self._liveness.holder,), counted=False)])
                self._is_open = False
            self._liveness.leave()
        except LakeshoreError as exc:
            logger.warning("the plane was closed before its claims were given back; other processes will: %s", exc)
            self._liveness.abandon()
        self._doorbells.close()
        await self._checkpointer.wait()
        if self._inline is not None:
            self._inline.close()
            self._inline = None
        for connection in self._own_connections:
            await connection.close()

    # Operations

    def lane(self, op: Operation) -> str | None:
        """Small operations share a connection; large ones have one of their own, and are written in pieces."""
        return "large" if self._plane.path is not None and weight_of(op) > LARGE_BYTES else "small"

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Apply `ops`, which are of one lane, in one transaction, and wake waiters after its commit.

        It runs as one call on the connection's thread, or right here when it is small and the write lock is free.
        """
        if self.lane(ops[0]) == "large":
            return await self._apply_large(ops)
        answers = self.apply_at_once(ops)
        if answers is None:
            answers = await self._connection.call(lambda db: self._apply_on_thread(self._connection, db, ops, {}))
        return answers

    def apply_at_once(self, ops: Sequence[Operation]) -> Sequence[Any] | None:
        """The same without a wait, for a small batch when the write lock is free; None when it cannot be done so."""
        inline = self._inline
        if inline is None or len(ops) > MAX_INLINE_OPERATIONS:
            return None
        weight = sum(map(weight_of, ops))
        if weight > MAX_INLINE_BYTES or self._checkpointer.is_behind:  # the thread makes a checkpoint when it is behind
            return None
        batch = Batch(inline.db, self._ns, self._clock(), self._liveness.holder)
        try:
            if type(ops[0]) is Claim and finds_nothing(batch, ops):
                return [[] for _ in ops]
            answers = inline.commit(batch, ops)
        except Exception:  # the connection's thread tries again, and reports what is wrong
            answers = None
        if answers is not None:
            self._committed(batch, ops, answers, weight)
        self._checkpointer.start_if_due()  # the watcher, which also starts them, runs only while callers wait
        return answers

    def _apply_on_thread(
        self,
        connection: SqliteConnection,
        db: sqlite3.Connection,
        ops: Sequence[Operation],
        blobs: dict[int, int],
    ) -> list[Any]:
        """What runs on a connection's thread. An error of the database fails only the operation that causes it."""
        batch = Batch(db, self._ns, self._clock(), self._liveness.holder, blobs=blobs)
        if type(ops[0]) is Claim and finds_nothing(batch, ops):
            return [[] for _ in ops]
        try:
            with connection.lock_for_writing():
                answers = commit(batch, ops)
        except Exception as exc:
            if len(ops) == 1:
                return [as_plane_error(exc, connection.path)]
            alone: list[Any] = []
            for op in ops:
                ref = blobs.pop(id(op), None)
                own_blob = {} if ref is None else {id(op): ref}
                alone += self._apply_on_thread(connection, db, [op], own_blob)
            return alone
        self._committed(batch, ops, answers, sum(map(weight_of, ops)))
        unused = set(blobs.values()) - batch.linked
        if unused:  # their operations were repeats, or were refused
            with connection.lock_for_writing():
                in_transaction(db, drop_blobs, db, unused)
        return answers

    def _committed(self, batch: Batch, ops: Sequence[Operation], answers: Sequence[Any], weight: int) -> None:
        """Wake waiters, count what was written, and forget holders whose claims were given back."""
        self._doorbells.ring(batch.wakeups)
        self._checkpointer.pages_written += 2 + len(ops) + weight // PAGE_BYTES
        for op, answer in zip(ops, answers, strict=True):
            if type(op) is Reap and isinstance(answer, Reaped):
                self._forget_holders(op.dead)

    def _forget_holders(self, holders: Sequence[str]) -> None:
        """Remove what dead engines have left, once their claims have been given back."""
        for holder in holders:
            self._doorbells.remove(holder)
            self._liveness.remove(holder)

    # Large operations

    async def _apply_large(self, ops: Sequence[Operation]) -> Sequence[Any]:
        """Write large bodies and results ahead in pieces, each in its own transaction: small ones get turns in between."""
        connection = await self._connection_for_large()
        blobs: dict[int, int] = {}
        for op in ops:
            data: bytes | None = None
            if isinstance(op, Submit):
                data = op.body
            elif isinstance(op, Finish):
                data = op.result
            if data is not None and len(data) > LARGE_BYTES and id(op) not in blobs:
                blobs[id(op)] = await self._write_ahead(connection, data)
        return await connection.call(lambda db: self._apply_on_thread(connection, db, ops, blobs))

    async def _connection_for_large(self) -> SqliteConnection:
        """The connection of large operations, and of checkpoints."""
        async with self._opening_large:
            if self._large_connection is None:
                self._large_connection = await SqliteConnection.open(self._plane.path, durable=self._plane.durable)
                self._own_connections.append(self._large_connection)
            return self._large_connection

    async def _write_ahead(self, connection: SqliteConnection, data: bytes) -> int:
        """Write a blob that no row refers to yet, and return its ref."""
        view = memoryview(data)
        now = self._clock()

        def begin(db: sqlite3.Connection) -> int:
            with connection.lock_for_writing():
                return in_transaction(db, new_blob, db, now)

        def write(part: int, start: int, db: sqlite3.Connection) -> None:
            with connection.lock_for_writing():
                in_transaction(db, write_piece, db, ref, part, view[start : start + PIECE_BYTES])

        ref = await connection.call(begin)
        for part, start in enumerate(range(0, len(view), PIECE_BYTES)):
            await connection.call(partial(write, part, start))
            if (part + 1) % PIECES_PER_CHECKPOINT == 0:
                await connection.checkpoint()
        return ref

    # Reads

    def read_at_once(self, fn: Callable[[sqlite3.Connection], T]) -> T | None:
        """Call `fn`, which reads little, right here; None when that cannot be done. On the home loop only."""
        return None if self._inline is None else self._inline.read(fn)

    async def read_little(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Call `fn`, which reads little: right here, if that can be done."""
        found = self.read_at_once(fn)
        return await self._connection.call(fn) if found is None else found

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        if len(ids) <= MAX_INLINE_OPERATIONS:
            found = self.read_at_once(lambda db: read.small_outcomes(db, self._ns, ids))
            if found is not None:
                return found
        return await self._connection.call(lambda db: read.outcomes(db, self._ns, ids))

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self._connection.call(lambda db: read.page(db, self._ns, id, since, limit, max_bytes))

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return await self.read_little(lambda db: read.cancels(db, self._ns, worker))

    async def rows(self, filter: RowFilter) -> list[Row]:
        return await self._connection.call(lambda db: read.rows(db, self._ns, filter))

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        return await self._connection.call(lambda db: read.counts(db, self._ns, queue, state))

    async def ages(self) -> dict[str, float]:
        return await self._connection.call(lambda db: read.ages(db, self._ns, self._clock()))

    async def copies(self, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
        return await self._connection.call(lambda db: copies.copies(db, self._ns, after, queues, limit, max_bytes))

    async def journal(self, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
        return await self._connection.call(lambda db: copies.journal(db, self._ns, id, since, limit, max_bytes))

    # What time and other processes bring about

    async def due(self) -> list[Operation]:
        """Read the change counter and what is due; every second time also which holders are alive."""
        self._due_checks += 1
        with_leases = self._due_checks % 2 == 0
        reap, others_committed = await self._connection.call(lambda db: self._check_due(db, with_leases=with_leases))
        if others_committed and self._bell is not None:
            self._bell.ring_all()
        if self._plane.path is not None:
            self._checkpointer.start_if_due()
        return [] if reap is None else [reap]

    def _check_due(self, db: sqlite3.Connection, *, with_leases: bool) -> tuple[Reap | None, bool]:
        """The Reap that is due, if any, and whether another connection has committed since the last check."""
        now = self._clock()
        since = -math.inf if self._serving_since is None else self._serving_since
        found = read.check_due(db, self._ns, now, since, with_leases=with_leases)
        dead, alive = self._liveness.sort([name for name, _, _ in found.leases if name is not None])
        is_due = found.delay_over or bool(dead)
        if self._clock_steps.leases_may_be_judged(now):
            for name, one_lease_ends, ten_leases_end in found.leases:
                # A living holder may be in a call of C code that keeps every heartbeat of its process from running.
                ends = ten_leases_end if name in alive else one_lease_ends
                if ends is not None and ends <= now:
                    is_due = True
        others_committed = found.data_version != self._data_version
        self._data_version = found.data_version
        reap = Reap(tuple(dead), tuple(alive), since=self._serving_since) if is_due else None
        return reap, others_committed

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        """Tell everything once, and then what others commit. See `contract.store.Store`."""
        self._bell = self._doorbells.bell()
        try:
            await Watcher(self, self._ns, self._doorbells, self._bell, interest, tell).run()
        finally:
            self._bell = None


class Dispatch(Plane):
    """The plane in a SQLite file: no server, any number of processes of one machine.

    It is an async context manager, and can be used without: the first use opens it. One object may be used from several
    event loops.

    Args:
        path: The file, created with mode 0600 when it is new. ":memory:" keeps everything in this process.
        ns: The namespace: invocations of other namespaces in the same file are not seen.
        durable: Lose nothing in a power cut (synchronous=FULL), at a cost for each commit. Otherwise a killed process
            loses nothing, and a power cut may lose the last commits.
        clock: What gives the plane's time, in seconds since the epoch. For tests.

    Raises (at its first use):
        PlaneUnavailable: The file cannot be opened now.
        DispatchError: The file is not a plane, or of a newer version of this package.
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
        self.durable = durable
        self.clock = clock
        self.bells: set[EventBell] = set()
        """The bells of the engines of an in-memory plane, of all its namespaces."""
        self._memory: SqliteConnection | None = None
        self._opening: anyio.Lock | None = None
        self._owner = self
        """The plane whose in-memory database this one uses: itself, or the one it is a namespace of."""

    @property
    def address(self) -> str:
        return ":memory:" if self.path is None else str(self.path)

    def child_environ(self) -> dict[str, str]:
        """The variables name a folder: a file of another name than the default plane's has none."""
        if self.path is None or self.path.name != "lakeshore.db":
            return {}
        return {"LAKESHORE_URL": "", "LAKESHORE_HOME": str(self.path.parent), "LAKESHORE_NAMESPACE": self.ns}

    def within(self, ns: str) -> Dispatch:
        """The same file as another namespace sees it; it is closed on its own. In memory: as long as this one lives."""
        other = Dispatch(self.path or ":memory:", ns=ns, durable=self.durable, clock=self.clock)
        other.serving = self.serving
        other.bells = self.bells
        other._owner = self._owner
        return other

    async def connection(self) -> SqliteConnection:
        """A connection for one engine; for an in-memory plane the one that all share, on the portal's loop."""
        if self.path is not None:
            return await SqliteConnection.open(self.path, durable=self.durable)
        if self._owner is not self:
            return await self._owner.connection()
        if self._opening is None:
            self._opening = anyio.Lock()  # made on the portal's loop, and used there only
        async with self._opening:
            if self._memory is None:
                self._memory = await SqliteConnection.open(None, durable=False)
            return self._memory

    async def aclose(self) -> None:
        """Close the engines of every loop; an in-memory plane forgets its rows. It can be used again, and opens again."""
        await super().aclose()
        memory = self._memory
        self._memory = None
        if memory is not None:
            await across("portal", memory.close)
