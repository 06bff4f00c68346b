"""The driver: SQLite connections through aiosqlite, a whole batch of statements as one call in their thread.

The driver's public API crosses to its thread once a statement. One crossing a batch is what makes group commit worth it,
so the connection class takes a function in place of a statement and calls it there.
"""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import aiosqlite
import anyio

from ...concurrency.tasks import spawn
from ...concurrency.threads import on_daemon_thread
from ...errors import DispatchError, LakeshoreError, PlaneUnavailable
from .liveness import Turn

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["PRAGMAS", "Checkpoints", "Database", "foreign", "transaction"]

logger = logging.getLogger("dreamlake.lakeshore.sqlite")

T = TypeVar("T")

CHECKPOINT = 4000
"""Pages, as a rough guess, that one engine writes between two checkpoints of its own."""
MOST_PAGES = 16000
"""Pages of the log from which a checkpoint ends in a turn of its own: writers never let it get to the log's end else."""

APPLICATION_ID = 0x4C616B65
VERSION = 1
PRAGMAS = (
    "PRAGMA busy_timeout = 10000",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -16000",
    f"PRAGMA wal_autocheckpoint = {MOST_PAGES}",
)


class _Rows:
    """What the driver asks for after `execute`: here, what a function returned."""

    def __init__(self, value: object) -> None:
        self._value = value

    def fetchall(self) -> object:
        return self._value


class _Connection(sqlite3.Connection):
    def execute(self, sql: Any, parameters: Any = (), /) -> Any:
        if callable(sql):
            return _Rows(sql(self))
        return super().execute(sql, parameters)


class _Connector:
    """Connects on the driver's thread, and can take that back: a cancelled driver forgets what it has opened."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect, self._opened = connect, threading.Event()
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None

    def __call__(self) -> sqlite3.Connection:
        self._thread = threading.current_thread()
        try:
            self._connection = self._connect()
            return self._connection
        finally:
            self._opened.set()

    def undo(self, *, wait: bool) -> None:
        """Close what was opened, once the driver's thread has ended: it must not have a word for a loop that is closed.

        wait: it may still be under way, which takes no time to speak of.
        """
        if self._opened.wait(5.0 if wait else 0.0) and self._thread is not None:
            self._thread.join(5.0)
            if self._connection is not None:
                self._connection.close()


def _nothing(_: sqlite3.Connection) -> None: ...


class Database:
    """One connection, and the turn in which it writes. `path` None: in memory."""

    def __init__(self, connection: aiosqlite.Connection, turn: Turn | None, path: Path | None) -> None:
        self._connection, self._turn, self.path = connection, turn, path
        self._closed = False
        _count_open(path, 1)

    @classmethod
    async def open(cls, path: Path | None, *, durable: bool) -> Database:
        """Open, create or migrate. Raises DispatchError for a file that is not ours, PlaneUnavailable otherwise."""
        if path is not None:
            _refuse_inherited(path)
            _make_folder(path)
        name = ":memory:" if path is None else str(path)
        options: dict[str, Any] = {
            "isolation_level": None,
            "cached_statements": 256,
            "factory": _Connection,
            "check_same_thread": False,  # but for `undo`, only its own uses it
        }
        connector = _Connector(partial(sqlite3.connect, name, **options))
        try:
            # Made on a daemon thread, the driver's own thread is a daemon too: a plane that is never closed cannot
            # keep the interpreter from ending.
            connection = on_daemon_thread(lambda: aiosqlite.Connection(connector, 64))
            turn = Turn(Path(f"{path}-turn")) if path else None
        except OSError as exc:
            raise _cannot_open(path, exc) from exc
        self = cls(connection, turn, path)
        try:
            with anyio.CancelScope(shield=True):
                try:
                    await connection
                except BaseException as exc:  # cancelled by the end of the loop, too, which no shield stops
                    connector.undo(wait=not isinstance(exc, Exception))
                    raise
            await self.call(lambda db: _prepare(db, turn, path, durable))
        except BaseException as exc:
            await self.close()
            if isinstance(exc, (OSError, sqlite3.Error)):
                raise _cannot_open(path, exc) from exc
            raise
        return self

    async def call(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Call `fn` with the connection, on its thread. The driver's errors become ours.

        Cancelled: what has begun there is waited for, since a thread that has an answer for a loop that is closed dies.
        """
        left = False

        def unless_left(db: sqlite3.Connection) -> T | None:
            return None if left else fn(db)

        try:
            return cast("T", await self._connection.execute_fetchall(cast("str", unless_left)))
        except anyio.get_cancelled_exc_class():
            left = True
            await self._catch_up()
            raise
        except sqlite3.Error as exc:
            raise foreign(exc, self.path) from exc
        except ValueError as exc:
            if "onnection" not in str(exc):
                raise
            raise PlaneUnavailable(f"the plane at {str(self.path)!r} is closed") from exc

    async def _catch_up(self) -> None:
        """Wait until the thread has done what it was given, whatever cancellation says."""
        with anyio.CancelScope(shield=True), suppress(ValueError, sqlite3.Error):
            while True:
                try:
                    await self._connection.execute_fetchall(cast("str", _nothing))
                    return
                except anyio.get_cancelled_exc_class():  # asyncio's own, which no shield stops
                    continue

    def write(self, db: sqlite3.Connection, fn: Callable[[], T]) -> T:
        """On the connection's thread: call `fn` in a transaction, which is rolled back when it raises."""
        if self._turn is None:
            return transaction(db, fn)
        with self._turn:
            return transaction(db, fn)

    async def close(self) -> None:
        """Close the connection and end its thread; cancellation waits for that."""
        try:
            with anyio.CancelScope(shield=True):
                await self._connection.close()
        except sqlite3.Error:
            pass  # it is going away in any case
        finally:
            if not self._closed:
                self._closed = True
                _count_open(self.path, -1)
            if self._turn is not None:
                self._turn.close()

    async def checkpoint(self) -> int:
        """Bring home what nobody reads of the log that SQLite writes ahead, beside writers; how many pages it has."""

        def checkpoint(db: sqlite3.Connection) -> int:
            _, pages, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return int(pages)

        return await self.call(checkpoint)

    async def rewind(self) -> None:
        """A checkpoint in a turn of its own, which gets to the end of the log: the next writer begins it anew."""

        def checkpoint(db: sqlite3.Connection) -> None:
            with self._turn or nullcontext():
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

        await self.call(checkpoint)


class Checkpoints:
    """When one engine brings the log home: one checkpoint at a time, on a connection that no commit waits for."""

    def __init__(self, second: Callable[[], Awaitable[Database]]) -> None:
        self._second = second
        # Not 0: of many processes that write too little for one, now and then one is to make it all the same.
        self.written = random.randrange(CHECKPOINT)
        """Pages written since the last one; a guess, to be added to from any thread."""
        self._under_way: anyio.Event | None = None

    @property
    def behind(self) -> bool:
        """Whether far more has been written than one was to wait for: nothing else gets to run, or it takes too long."""
        return self.written > MOST_PAGES

    def start_if_due(self) -> None:
        """In a task of this loop's own, whose errors are logged."""
        if self.written > CHECKPOINT and self._under_way is None:
            over = self._under_way = anyio.Event()

            def ended() -> None:
                self._under_way = None
                over.set()

            spawn(self._make, ended)

    async def _make(self) -> None:
        self.written = 0
        try:
            second = await self._second()
            if await second.checkpoint() > MOST_PAGES:
                await second.rewind()
        except LakeshoreError as exc:
            logger.warning("the log written ahead could not be brought home, it is tried again later: %s", exc)

    async def idle(self) -> None:
        """Wait for the one under way, if any."""
        if self._under_way is not None:
            await self._under_way.wait()


def transaction(db: sqlite3.Connection, fn: Callable[[], T]) -> T:
    """Call `fn` in a transaction that takes the write lock at once, and is rolled back when `fn` raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        value = fn()
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")
    return value


def _cannot_open(path: Path | None, exc: Exception) -> PlaneUnavailable:
    return PlaneUnavailable(f"cannot open the plane's file {str(path)!r}: {exc}")


def foreign(exc: Exception, path: Path | None) -> DispatchError:
    """The driver's error as ours: what can be repeated, and what cannot."""
    if isinstance(exc, sqlite3.OperationalError):
        return PlaneUnavailable(f"the plane at {str(path)!r} cannot be used now: {exc}")
    return DispatchError(f"the plane at {str(path)!r} refused an operation: {type(exc).__name__}: {exc}")


# SQLite keeps count of its locks in memory that a forked child inherits, so the child would believe that it holds the
# parent's: what it writes to a file that was open at the fork can be lost.
_open: dict[Path, int] = {}
_inherited: set[Path] = set()


def _in_forked_child() -> None:
    _inherited.update(_open)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)


def _refuse_inherited(path: Path) -> None:
    if path in _inherited:
        raise DispatchError(
            f"the plane {str(path)!r} was open when this process was forked, and SQLite does not allow its use here: "
            "open it only after the fork, close it before, or start processes by multiprocessing's 'spawn' or 'forkserver'"
        )


def _count_open(path: Path | None, step: int) -> None:
    if path is not None:
        _open[path] = _open.get(path, 0) + step
        if _open[path] <= 0:
            del _open[path]


def _make_folder(path: Path) -> None:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Only ever a new file: closing one that this process has open elsewhere would drop SQLite's locks on it, and the
        # next process to leave would take itself for the last one, and delete the log that this one still writes to.
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        if not path.is_file():  # or somebody else was quicker
            raise DispatchError(f"cannot create the plane's file {str(path)!r}: {exc}; give another path") from exc


def _prepare(db: sqlite3.Connection, turn: Turn | None, path: Path | None, durable: bool) -> None:
    try:
        for pragma in PRAGMAS:
            db.execute(pragma)
        if turn is None:
            _migrate(db, path)
        else:
            with turn:  # many processes may open one new file at once; changing to WAL takes no part in busy handling
                if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    _refuse_foreign(db, path)
                    _set_wal(db)
                _migrate(db, path)
    except sqlite3.DatabaseError as exc:
        if isinstance(exc, sqlite3.OperationalError):
            raise
        raise DispatchError(f"{str(path)!r} is not a plane of this package: {exc}; give another path") from exc
    db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")


def _set_wal(db: sqlite3.Connection) -> None:
    until = time.monotonic() + 10.0
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def _refuse_foreign(db: sqlite3.Connection, path: Path | None) -> tuple[int, int]:
    (app,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    tables = db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if app != APPLICATION_ID and (app or version or tables):
        raise DispatchError(
            f"{str(path)!r} is a SQLite file of another program (application id {app:#x}, {tables} tables and indexes), "
            "not a plane; give the path of a new file or of a plane"
        )
    if version > VERSION:
        raise DispatchError(
            f"the plane {str(path)!r} has schema version {version}, this package knows versions up to {VERSION}; "
            "upgrade dreamlake-lakeshore"
        )
    return app, version


def _migrate(db: sqlite3.Connection, path: Path | None) -> None:
    _, version = _refuse_foreign(db, path)
    if version == VERSION:
        return
    schema = files(__name__.rpartition(".")[0]).joinpath("schema.sql").read_text(encoding="utf-8")

    def create() -> None:
        lines = [line for line in schema.splitlines() if not line.startswith("--")]
        for statement in "\n".join(lines).split(";"):
            if statement.strip():
                db.execute(statement)
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {VERSION}")

    transaction(db, create)
