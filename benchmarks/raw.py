"""The raw limits: plain loops of stdlib sqlite3 over the plane's own schema, with its pragmas and its statements.

One process, one connection, one `execute` a row, a number of rows a transaction; nothing waits for anything. The raw
round trip is two processes with blocking datagram sockets that run the same statements in three transactions.
"""

from __future__ import annotations

import hashlib
import itertools
import socket
import sqlite3
import sys
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

__all__ = ["RawPlane", "answer_round_trips", "round_trips"]

NS, QUEUE, WORKER, HOLDER, LEASE = "default", "jobs", "raw-worker", "1-holder", 30.0
_PRAGMAS = ("busy_timeout = 10000", "temp_store = MEMORY", "cache_size = -16000", "wal_autocheckpoint = 4000")

_SUBMIT = """
INSERT INTO invocation (ns, id, queue, key, priority, parent, root, trusted, submitted_at, config, body_ref, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""
_CLAIM = """
UPDATE invocation SET state = 'running', attempt = attempt + 1, reaped = 0, worker = ?, holder = ?, poll = ?, lease = ?,
    lease_until = ?, max_lost = ?, started_at = ?
WHERE seq IN (
    SELECT seq FROM invocation WHERE ns = ? AND queue IN (?) AND state = 'queued' AND due = 1
    ORDER BY priority DESC, seq LIMIT ?
) RETURNING seq, priority, id, queue, body, body_ref, attempt, failures, lost, trusted, parent, root, config
"""
_FINISH = """
UPDATE invocation SET state = ?, outcome = ?, finished_at = ?, acked = 1, lost = lost - reaped, reaped = 0
WHERE ns = ? AND id = ? AND attempt = ? AND worker = ? AND (state = 'running' OR (state = 'queued' AND reaped = 1))
"""
_OUTCOME = """
INSERT INTO outcome (n, ns, id, state, finished_at, error, result_ref, result) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
"""
_FRAME = "INSERT INTO frame (inv, seq, attempt, final, bytes) VALUES (?, ?, ?, ?, ?)"
_RESULT = """
SELECT i.id, i.state, o.result, o.result_ref, o.error FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome
WHERE i.ns = ? AND i.id = ?
"""


class RawPlane:
    """A connection to a file with the plane's tables, and what one can do to them without a plane."""

    def __init__(self, path: Path | str) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        for pragma in _PRAGMAS:
            self.db.execute(f"PRAGMA {pragma}")
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = NORMAL")
        if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'invocation'").fetchone():
            schema = files("dreamlake.lakeshore.planes.sqlite").joinpath("schema.sql").read_text(encoding="utf-8")
            self.db.executescript(schema)
        self._outcomes = itertools.count(self.ended() + 1)

    def __enter__(self) -> RawPlane:
        return self

    def __exit__(self, *_: object) -> None:
        self.db.close()

    def ended(self) -> int:
        """How many outcomes were written so far."""
        row = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'outcome'").fetchone()
        return row[0] if row else 0

    # One row

    def submit(self, id: str, body: bytes) -> None:
        values = (NS, id, QUEUE, None, 0, None, None, True, time.time(), None, None, body)
        self.db.execute(_SUBMIT, values)

    def claim(self) -> tuple[str, int]:
        """Of the next row the id and the attempt."""
        now = time.time()
        values = (WORKER, HOLDER, None, LEASE, now + LEASE, 5, now, NS, QUEUE, 1)
        ((_, _, id, _, _, _, attempt, *_),) = self.db.execute(_CLAIM, values).fetchall()
        return id, attempt

    def ack(self, id: str, attempt: int, result: bytes = b"\x05") -> None:
        n, now = next(self._outcomes), time.time()
        self.db.execute(_FINISH, ("succeeded", n, now, NS, id, attempt, WORKER))
        self.db.execute(_OUTCOME, (n, NS, id, "succeeded", now, None, None, result))

    def result(self, id: str) -> bytes:
        row = self.db.execute(_RESULT, (NS, id)).fetchone()
        result: bytes = row[2]
        return result

    # Many rows

    def each(self, items: Iterable[Any], rows: int, fn: Callable[..., Any]) -> list[Any]:
        """Call `fn(*item)` for each, `rows` of them in a transaction; what they gave."""
        given: list[Any] = []
        for batch in _batches(items, rows):
            self.db.execute("BEGIN IMMEDIATE")
            given += [fn(*item) for item in batch]
            self.db.execute("COMMIT")
        return given

    def submits(self, count: int, rows: int, body: bytes) -> float:
        """Rows a second."""
        items = [(new_id(), body) for _ in range(count)]
        started = time.perf_counter()
        self.each(items, rows, self.submit)
        return count / (time.perf_counter() - started)

    def claims_and_acks(self, count: int, rows: int) -> float:
        """Rows a second, of those that are queued."""
        started = time.perf_counter()
        for batch in _batches([()] * count, rows):
            self.each(self.each(batch, rows, self.claim), rows, self.ack)
        return count / (time.perf_counter() - started)

    def cycles(self, count: int, rows: int, body: bytes) -> float:
        """Rows a second through submit, claim and ack: three transactions for each `rows` of them."""
        items = [(new_id(), body) for _ in range(count)]
        started = time.perf_counter()
        for batch in _batches(items, rows):
            self.each(batch, rows, self.submit)
            self.each(self.each([()] * len(batch), rows, self.claim), rows, self.ack)
        return count / (time.perf_counter() - started)

    def frames(self, count: int, rows: int, frame: bytes) -> float:
        """Frames a second into one journal."""
        items = [(_FRAME, (1, seq, 1, False, frame)) for seq in range(count)]
        started = time.perf_counter()
        self.each(items, rows, self.db.execute)
        return count / (time.perf_counter() - started)


def _batches(items: Iterable[Any], rows: int) -> Iterator[Sequence[Any]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, rows)):
        yield batch


# --- the raw round trip ---------------------------------------------------------------------------------------------


def _address(path: object, who: str) -> str:
    """Where `who` of the plane at `path` listens: on Linux no file, whose path could be too long for a socket."""
    if not sys.platform.startswith("linux"):
        return f"{path}-{who}"
    return f"\0{hashlib.blake2b(str(path).encode(), digest_size=12).hexdigest()}-{who}"


def _bell(address: str) -> socket.socket:
    bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    bell.bind(address)
    return bell


def round_trips(path: Path, count: int, body: bytes) -> list[float]:
    """Seconds of each of `count` round trips to the process that runs `answer_round_trips`."""
    took: list[float] = []
    caller, worker = _address(path, f"caller-{new_id()[-6:]}"), _address(path, "worker")
    with _bell(caller) as mine, RawPlane(path) as plane:
        mine.settimeout(30)
        for _ in range(count):
            id = new_id()
            started = time.perf_counter()
            plane.each([(id, body)], 1, plane.submit)
            mine.sendto(caller.encode(), worker)
            mine.recv(200)
            plane.result(id)
            took.append(time.perf_counter() - started)
    return took


def answer_round_trips(path: str, ready: Callable[[], None]) -> None:
    """The other process: claims and acks a row each time it is rung, and rings back."""
    with _bell(_address(path, "worker")) as mine, RawPlane(path) as plane:
        ready()
        while True:
            caller = mine.recv(200).decode()
            claimed = plane.each([()], 1, plane.claim)
            plane.each(claimed, 1, plane.ack)
            mine.sendto(b"!", caller)
