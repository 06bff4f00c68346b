"""What is read from the tables, and never waits: outcomes, pages of a journal, rows, counts, and news since a cursor."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InvocationNotFound
from ..contract import news as contract
from ..contract.records import TERMINAL, Outcome, Page, Row, RowFilter
from .rows import read_blob, read_failure

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Sequence

__all__ = [
    "Cursor",
    "Due",
    "News",
    "ages",
    "cancels",
    "counts",
    "cursor",
    "due",
    "holders",
    "news",
    "outcomes",
    "page",
    "rows",
]

SMALL_RESULT = 4096
"""Results up to this many bytes are told with the news of them; larger ones are read by those who wait."""
NEWS_ROWS = 2000


class Cursor(NamedTuple):
    """Up to where the news is read: the last outcome seen, and the last frame (None: nobody wanted to know)."""

    outcome: int
    frame: int | None


class Due(NamedTuple):
    """What time asks for: the file's change counter, whether delayed rows are due, and who holds the rows that run.

    Of each holder: its name (None for claims that name none), and when the first of its leases is over, once and tenfold.
    """

    version: int
    late: bool
    holders: list[tuple[str | None, float | None, float | None]]


# CROSS JOIN fixes the order of the loops: left to itself the planner reads every invocation of the namespace.
_OUTCOMES = """
SELECT i.id, i.state, o.result, o.result_ref, o.error FROM json_each(?) wanted
CROSS JOIN invocation i ON i.ns = ? AND i.id = wanted.value LEFT JOIN outcome o ON o.n = i.outcome
"""


def outcomes(db: sqlite3.Connection, ns: str, ids: Sequence[str]) -> list[Outcome]:
    """How each of `ids` stands, in order."""
    found: dict[str, Outcome] = {}
    for id, state, result, ref, error in db.execute(_OUTCOMES, (json.dumps(ids), ns)).fetchall():
        if state in TERMINAL:
            found[id] = Outcome(id, state, result if ref is None else read_blob(db, ref), read_failure(error))
        else:
            found[id] = Outcome(id, "pending")
    return [found.get(id) or Outcome(id, "unknown") for id in ids]


_PAGE_ROW = """
SELECT i.seq, i.state, i.closed, o.error FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome
WHERE i.ns = ? AND i.id = ?
"""


def page(db: sqlite3.Connection, ns: str, id: str, since: int, limit: int, max_bytes: int) -> Page:
    """Frames after `since`. The row is read before its frames: what it says then holds for the frames found."""
    row = db.execute(_PAGE_ROW, (ns, id)).fetchone()
    if row is None:
        raise InvocationNotFound(id)
    inv, state, closed, error = row
    ended = bool(closed) or state in TERMINAL
    frames: list[tuple[int, bytes]] = []
    size, more = 0, False
    sql = "SELECT seq, bytes FROM frame WHERE inv = ? AND seq > ? ORDER BY seq LIMIT ?"
    found = db.execute(sql, (inv, since, limit + 1))
    for seq, data in found:
        if not ended and seq != max(since, -1) + 1 + len(frames):
            break
        size += len(data)
        if len(frames) == limit or (frames and size > max_bytes):
            more = True
            break
        frames.append((seq, data))
    found.close()
    return Page(frames, ended and not more, state, read_failure(error))


def cancels(db: sqlite3.Connection, ns: str, worker: str) -> list[tuple[str, int]]:
    """The claims of `worker` whose cancellation is asked for."""
    sql = "SELECT id, attempt FROM invocation WHERE ns = ? AND worker = ? AND state = 'running' AND cancel = 1"
    return db.execute(sql, (ns, worker)).fetchall()


_ROWS = """
SELECT i.id, i.queue, i.state, i.priority, i.key, i.attempt, i.failures, i.lost, i.worker, i.parent, i.root, i.trusted,
    i.cancel, i.submitted_at, i.not_before, i.started_at, i.lease_until, i.finished_at,
    iif(i.outcome IS NULL, i.last_error, o.error), {body}
FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome WHERE {where} ORDER BY i.seq DESC LIMIT ?
"""


def rows(db: sqlite3.Connection, ns: str, filter: RowFilter) -> list[Row]:
    """Rows, newest first."""
    wanted = {name: getattr(filter, name) for name in ("id", "queue", "state", "key", "root")}
    wanted = {"ns": ns} | {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"i.{name} = ?" for name in wanted)
    sql = _ROWS.format(where=where, body="i.body, i.body_ref" if filter.body else "NULL, NULL")
    found = db.execute(sql, (*wanted.values(), filter.limit)).fetchall()
    return [_row(db, filter.id is not None, *row) for row in found]


def _row(db: sqlite3.Connection, whole: bool, *columns: Any) -> Row:
    *plain, error, body, ref = columns
    plain[11], plain[12] = bool(plain[11]), bool(plain[12])
    if ref is not None:
        body = read_blob(db, ref) if whole else None
    return Row._make([*plain, read_failure(error), body])


def counts(db: sqlite3.Connection, ns: str, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
    """Rows by (queue, state)."""
    wanted = {"ns": ns, "queue": queue, "state": state}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    where = " AND ".join(f"{name} = ?" for name in wanted)
    sql = f"SELECT queue, state, count(*) FROM invocation WHERE {where} GROUP BY queue, state"
    return {(queue, state): n for queue, state, n in db.execute(sql, tuple(wanted.values()))}


def ages(db: sqlite3.Connection, ns: str, now: float) -> dict[str, float]:
    """For each queue with something due, how long ago the oldest of it was submitted."""
    due = "SELECT queue, min(submitted_at) FROM invocation WHERE ns = ? AND state = 'queued' AND due = 1 GROUP BY queue"
    return {queue: max(0.0, now - submitted_at) for queue, submitted_at in db.execute(due, (ns,))}


def cursor(db: sqlite3.Connection) -> Cursor:
    """Where the news stands now."""
    last = dict(db.execute("SELECT name, seq FROM sqlite_sequence WHERE name IN ('outcome', 'frame')"))
    return Cursor(last.get("outcome", 0), last.get("frame", 0))


# Rows of other namespaces are read too: the cursors pass over them, and no index knows both.
_OUTCOME_NEWS = """
SELECT n, ns, id, state, CASE WHEN length(result) <= ? THEN result END, result IS NULL AND result_ref IS NULL, error
FROM outcome WHERE n > ? ORDER BY n LIMIT ?
"""
# The + keeps the planner from walking the whole index of frames to have them grouped already.
_FRAME_NEWS = """
SELECT max(f.n), i.id, i.ns FROM frame f CROSS JOIN invocation i ON i.seq = f.inv WHERE f.n > ? GROUP BY +f.inv
"""


class News(NamedTuple):
    """The new cursor, what ended, with small outcomes, and whose journals grew. Without them: that is not known."""

    cursor: Cursor
    ended: list[tuple[str, Outcome | None]] | None = None
    grown: list[str] | None = None


def told(news: News) -> Iterator[contract.News]:
    """The news as those who wait are told it; where it is not known, so that all of them look."""
    if news.ended is None or news.grown is None:
        yield contract.News("id")
        yield contract.News("journal")
        return
    for id, outcome in news.ended:
        yield contract.News("id", id, outcome)
        yield contract.News("journal", id)
    for id in news.grown:
        yield contract.News("journal", id)


def news(db: sqlite3.Connection, ns: str, since: Cursor, want_journals: bool) -> News:
    """What ended and which journals grew since a cursor: the new cursor, ended ids with small outcomes, journals' ids."""
    ended: list[tuple[str, Outcome | None]] = []
    last, frame = since
    while True:
        found = db.execute(_OUTCOME_NEWS, (SMALL_RESULT, last, NEWS_ROWS)).fetchall()
        for n, where, id, state, result, empty, error in found:
            last = n
            if where == ns:
                told = result is not None or empty
                ended.append((id, Outcome(id, state, result, read_failure(error)) if told else None))
        if len(found) < NEWS_ROWS:
            break
    if frame is None or not want_journals:
        return News(Cursor(last, None), ended, [])
    grown: list[str] = []
    for n, id, where in db.execute(_FRAME_NEWS, (frame,)).fetchall():
        frame = max(frame, n)
        if where == ns:
            grown.append(id)
    return News(Cursor(last, frame), ended, grown)


def holders(db: sqlite3.Connection) -> set[str]:
    """Who holds what runs, in any namespace."""
    return {row[0] for row in db.execute("SELECT DISTINCT holder FROM invocation WHERE state = 'running'")}


_RUNNING = """
SELECT holder, min(lease_until), min(lease_until + 9 * lease) FROM invocation
WHERE ns = ? AND state = 'running' AND (holder IS NOT NULL OR ? + lease <= ?) GROUP BY holder
"""


def due(db: sqlite3.Connection, ns: str, now: float, since: float, with_holders: bool) -> Due:
    """Whether time asks for something, and whether others have committed (`version` differs from the last one).

    since: see `Reap`.
    """
    (version,) = db.execute("PRAGMA data_version").fetchone()
    delayed = "SELECT 1 FROM invocation WHERE ns = ? AND state = 'queued' AND due = 0 AND not_before <= ? LIMIT 1"
    late = db.execute(delayed, (ns, now)).fetchone() is not None
    return Due(version, late, db.execute(_RUNNING, (ns, since, now)).fetchall() if with_holders else [])
