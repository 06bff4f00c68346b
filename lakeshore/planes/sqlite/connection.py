"""SQLite connections through aiosqlite, in whose thread a whole transaction runs as one call.

The driver's public API crosses to its thread once for each statement. One crossing for each batch of operations is what
makes batches fast, so the connection class here takes a function in place of a statement and calls it there.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import nullcontext, suppress
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple, cast

import aiosqlite
import anyio

from ...concurrency.threads import on_daemon_thread
from ...errors import DispatchError, PlaneUnavailable
from . import forks
from .write_lock import WriteLock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CACHED_STATEMENTS", "MAX_LOG_PAGES", "PRAGMAS", "SqliteConnection", "as_plane_error", "in_transaction"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

APPLICATION_ID = 0x4C616B65
"""Marks a file as a plane of this package, for SQLite and for `file`."""
SCHEMA_VERSION = 1
MAX_LOG_PAGES = 16_000
"""Pages of 4 kB in the write-ahead log from which a checkpoint also takes the write lock, and from which SQLite makes
one of its own: concurrent writers would otherwise keep the checkpoint from ever finishing."""
PRAGMAS = (
    "PRAGMA busy_timeout = 10000",  # ms; the write lock makes this a rare case
    "PRAGMA temp_store = MEMORY",
    "PRAGMA cache_size = -16000",  # kB
    f"PRAGMA wal_autocheckpoint = {MAX_LOG_PAGES}",
)
CACHED_STATEMENTS = 256
"""Prepared statements that a connection keeps: more than `queries` has."""
DRIVER_THREAD_TIMEOUT = 5.0
"""Seconds to wait for the end of the driver's thread after a cancelled opening; it takes milliseconds."""
SET_WAL_TIMEOUT = 10.0
"""Seconds for which a new file may be locked by other processes that open it."""
SET_WAL_PAUSE = 0.02
"""Seconds between two attempts to set a new file to WAL."""


def in_transaction(db: sqlite3.Connection, fn: Callable[[*Ts], T], *args: *Ts) -> T:
    """Call `fn(*args)` in a transaction that takes SQLite's write lock at once; it is rolled back if `fn` raises."""
    db.execute("BEGIN IMMEDIATE")
    try:
        value = fn(*args)
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite may have rolled back by itself
            db.execute("ROLLBACK")
        raise
    return value


class SqliteConnection:
    """A connection to one file, or to an in-memory database, with its thread and its lock for writing."""

    def __init__(self, driver: aiosqlite.Connection, write_lock: WriteLock | None, path: Path | None) -> None:
        self._driver = driver
        self._write_lock = write_lock
        self._closed = False
        self.path = path
        """None: in memory."""
        forks.count_open(path, 1)

    @classmethod
    async def open(cls, path: Path | None, *, durable: bool) -> SqliteConnection:
        """Open a database; create or migrate it where needed.

        Args:
            path: The file; None for a database in memory.
            durable: Wait for the disk at each commit.

        Raises:
            DispatchError: The file is not a plane of this package, or of a newer version of it.
            PlaneUnavailable: It cannot be opened now.
        """
        if path is not None:
            forks.refuse_inherited(path)
            _create_file(path)
        options: dict[str, Any] = {
            "isolation_level": None,
            "cached_statements": CACHED_STATEMENTS,
            "factory": _CallingConnection,
            "check_same_thread": False,  # only the driver's thread uses it, but for `_Connector.undo`
        }
        connector = _Connector(partial(sqlite3.connect, ":memory:" if path is None else str(path), **options))
        try:
            # Made on a daemon thread, the driver's own thread is a daemon too: a plane that is never closed cannot
            # keep the interpreter from ending.
            driver = on_daemon_thread(lambda: aiosqlite.Connection(connector, 64))
            write_lock = WriteLock(Path(f"{path}-turn")) if path else None
        except OSError as exc:
            raise _cannot_open(path, exc) from exc
        self = cls(driver, write_lock, path)
        try:
            with anyio.CancelScope(shield=True):
                try:
                    await driver
                except BaseException as exc:  # also a cancellation by the end of the loop, which passes shields
                    connector.undo(wait=not isinstance(exc, Exception))
                    raise
            await self.call(lambda db: _prepare(db, write_lock, path, durable=durable))
        except BaseException as exc:
            await self.close()
            if isinstance(exc, (OSError, sqlite3.Error)):
                raise _cannot_open(path, exc) from exc
            raise
        return self

    async def call(self, fn: Callable[[sqlite3.Connection], T]) -> T:
        """Call `fn` with the connection, on its thread. The driver's errors are translated.

        Cancellation: `fn` is not called any more if it has not begun; otherwise its end is waited for. (The driver's
        thread would die of an answer for a loop that is closed.)
        """
        cancelled = False
        results: list[T] = []

        def call_unless_cancelled(db: sqlite3.Connection) -> None:
            if not cancelled:
                results.append(fn(db))

        try:
            await self._driver.executescript(cast("str", call_unless_cancelled))
            return results[0]
        except anyio.get_cancelled_exc_class():
            cancelled = True
            await self._wait_for_thread()
            raise
        except sqlite3.Error as exc:
            raise as_plane_error(exc, self.path) from exc
        except ValueError as exc:
            if "onnection" not in str(exc):  # the driver's "no active connection" or "Connection closed"
                raise
            raise PlaneUnavailable(f"the plane at {str(self.path)!r} is closed") from exc

    async def _wait_for_thread(self) -> None:
        """Wait until the thread has done what it was given, however often this task is cancelled."""
        with anyio.CancelScope(shield=True), suppress(ValueError, sqlite3.Error):
            while True:
                try:
                    await self._driver.executescript(cast("str", _do_nothing))
                    return
                except anyio.get_cancelled_exc_class():  # asyncio's own, which passes shields
                    continue

    def lock_for_writing(self) -> WriteLock | nullcontext[None]:
        """What to hold, on the connection's thread, around each write transaction."""
        return self._write_lock or nullcontext()

    async def checkpoint(self) -> int:
        """Copy what no reader needs from the write-ahead log into the file, beside writers; return the log's pages."""

        def checkpoint(db: sqlite3.Connection) -> int:
            _, pages, _ = db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            return int(pages)

        return await self.call(checkpoint)

    async def checkpoint_locked(self) -> None:
        """A checkpoint under the write lock, which gets to the end of the log: the next writer starts the log anew."""

        def checkpoint(db: sqlite3.Connection) -> None:
            with self.lock_for_writing():
                db.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()

        await self.call(checkpoint)

    async def close(self) -> None:
        """Close the connection and end its thread. Idempotent. Cancellation waits for the end."""
        try:
            with anyio.CancelScope(shield=True):
                await self._driver.close()
        except sqlite3.Error:
            pass  # nothing that a caller could do about it
        finally:
            if not self._closed:
                self._closed = True
                forks.count_open(self.path, -1)
            if self._write_lock is not None:
                self._write_lock.close()


class _CallingConnection(sqlite3.Connection):
    """A connection whose `executescript` takes a function and calls it. That is the driver's plainest way to its thread;
    `execute`, which the functions call, stays SQLite's own."""

    def executescript(self, sql_script: Any, /) -> Any:
        return sql_script(self)


class _Connector:
    """Connects on the driver's thread, and can undo that: a driver that is cancelled meanwhile forgets its connection."""

    def __init__(self, connect: Callable[[], sqlite3.Connection]) -> None:
        self._connect = connect
        self._connected = threading.Event()
        self._connection: sqlite3.Connection | None = None
        self._thread: threading.Thread | None = None

    def __call__(self) -> sqlite3.Connection:
        self._thread = threading.current_thread()
        try:
            self._connection = self._connect()
            return self._connection
        finally:
            self._connected.set()

    def undo(self, *, wait: bool) -> None:
        """Close the connection, if one was made, once the driver's thread has ended: it must send nothing to a closed loop.

        wait: the thread may still be connecting, which takes milliseconds.
        """
        if self._connected.wait(DRIVER_THREAD_TIMEOUT if wait else 0.0) and self._thread is not None:
            self._thread.join(DRIVER_THREAD_TIMEOUT)
            if self._connection is not None:
                self._connection.close()


def _do_nothing(_: sqlite3.Connection) -> None: ...


def _cannot_open(path: Path | None, exc: Exception) -> PlaneUnavailable:
    return PlaneUnavailable(f"cannot open the plane's file {str(path)!r}: {exc}")


def as_plane_error(exc: Exception, path: Path | None) -> DispatchError:
    """Translate an error of the driver: PlaneUnavailable if the operation may be repeated, DispatchError otherwise."""
    if isinstance(exc, sqlite3.OperationalError):
        return PlaneUnavailable(f"the plane at {str(path)!r} cannot be used now: {exc}")
    return DispatchError(f"the plane at {str(path)!r} refused an operation: {type(exc).__name__}: {exc}")


def _create_file(path: Path) -> None:
    """Create the file, for its owner only, and its folder; leave what exists as it is."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A file that exists is not even opened: to close a descriptor of it would drop the locks that SQLite holds on it
        # elsewhere in this process. The next process to close it would then take itself for the last one, and delete the
        # log that this one still writes to.
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except OSError as exc:
        if not path.is_file():  # it is one if another process has just created it
            raise DispatchError(f"cannot create the plane's file {str(path)!r}: {exc}; give another path") from exc


def _prepare(db: sqlite3.Connection, write_lock: WriteLock | None, path: Path | None, *, durable: bool) -> None:
    """Set the connection up, and create or migrate the schema."""
    try:
        for pragma in PRAGMAS:
            db.execute(pragma)
        if write_lock is None:
            _migrate(db, path)
        else:
            with write_lock:  # many processes may open one new file at once, and a change to WAL ignores busy_timeout
                if db.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                    _read_version(db, path)
                    _set_wal(db)
                _migrate(db, path)
    except sqlite3.DatabaseError as exc:
        if isinstance(exc, sqlite3.OperationalError):
            raise
        raise DispatchError(f"{str(path)!r} is not a plane of this package: {exc}; give another path") from exc
    db.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")


def _set_wal(db: sqlite3.Connection) -> None:
    deadline = time.monotonic() + SET_WAL_TIMEOUT
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(SET_WAL_PAUSE)


def _read_version(db: sqlite3.Connection, path: Path | None) -> int:
    """The version of the schema, 0 in a new file. Raises DispatchError for a file that this package must not touch."""
    (application_id,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    if application_id != APPLICATION_ID and (application_id or version or tables):
        raise DispatchError(
            f"{str(path)!r} is a SQLite file of another program (application id {application_id:#x}, {tables} tables and "
            "indexes), not a plane; give the path of a new file or of a plane"
        )
    if version > SCHEMA_VERSION:
        raise DispatchError(
            f"the plane {str(path)!r} has schema version {version}, this package knows versions up to {SCHEMA_VERSION}; "
            "upgrade dreamlake-lakeshore"
        )
    return int(version)


def _migrate(db: sqlite3.Connection, path: Path | None) -> None:
    if _read_version(db, path) == SCHEMA_VERSION:
        return
    schema = files(__name__.rpartition(".")[0]).joinpath("schema.sql").read_text(encoding="utf-8")
    in_transaction(db, _create_tables, db, schema)


def _create_tables(db: sqlite3.Connection, schema: str) -> None:
    lines = [line for line in schema.splitlines() if not line.startswith("--")]
    for statement in "\n".join(lines).split(";"):
        if statement.strip():
            db.execute(statement)
    db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
