"""What is read and never waits: outcomes, pages of a journal, rows, counts, and what has happened since a cursor."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ...errors import InvocationNotFound
from ..contract.records import TERMINAL, Outcome, Page, Row, RowFilter
from . import queries
from .blobs import read_blob
from .rows import read_failure

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

__all__ = [
    "DueCheck",
    "EventCursor",
    "NewEvents",
    "ages",
    "cancels",
    "check_due",
    "counts",
    "event_cursor",
    "holders",
    "new_events",
    "outcomes",
    "page",
    "rows",
    "skip_events",
    "small_outcomes",
]

SMALL_RESULT_BYTES = 4096
"""Results of up to this many bytes are read with the news of them; larger ones are read by the waiters themselves."""
OUTCOMES_PER_READ = 2000
"""Rows of one read of new outcomes, which bounds how long the lock of a read is held."""


class EventCursor(NamedTuple):  # compared and unpacked at every ring
    """Up to where events were read: the number of the last outcome, and of the last frame (None: no frames were read)."""

    outcome: int
    frame: int | None


@dataclass(frozen=True, slots=True)
class NewEvents:
    """What has happened since a cursor."""

    cursor: EventCursor
    """Where to read on from."""
    ended: list[tuple[str, Outcome | None]] | None = None
    """The ids that ended, with their outcomes where those are small; None: not known."""
    grown: list[str] | None = None
    """The ids whose journals have grown; None: not known."""


@dataclass(frozen=True, slots=True)
class DueCheck:
    """What the clock and other processes may have brought about."""

    data_version: int
    """A number that has changed if another connection has committed since the last check."""
    delay_over: bool
    """Whether the delay of a row is over."""
    leases: list[tuple[str | None, float | None, float | None]]
    """Of each holder of running rows: its name (None for claims that name none), when the first of its leases ends, and
    when the first has been over for nine lengths more; in seconds since the epoch."""


def outcomes(db: sqlite3.Connection, ns: str, ids: Sequence[str]) -> list[Outcome]:
    """How each of `ids` stands, in order."""
    found: dict[str, Outcome] = {}
    for id, state, result, ref, error in db.execute(queries.OUTCOMES, (json.dumps(ids), ns)).fetchall():
        if state not in TERMINAL:
            found[id] = Outcome(id, "pending")
            continue
        if ref is not None:
            result = read_blob(db, ref)
        found[id] = Outcome(id, state, result, read_failure(error))
    return [found.get(id) or Outcome(id, "unknown") for id in ids]


def small_outcomes(db: sqlite3.Connection, ns: str, ids: Sequence[str]) -> list[Outcome] | None:
    """How each of `ids` stands, in order; None if one of the results is not small."""
    if db.execute(queries.ANY_LARGE_RESULT, (json.dumps(ids), ns, SMALL_RESULT_BYTES)).fetchone() is not None:
        return None
    return outcomes(db, ns, ids)


def page(db: sqlite3.Connection, ns: str, id: str, since: int, limit: int, max_bytes: int) -> Page:
    """Frames with numbers above `since`. Raises InvocationNotFound.

    The row is read before its frames, so that what it has about the journal's end holds for the frames that are found.
    """
    row = db.execute(queries.JOURNAL_STATE, (ns, id)).fetchone()
    if row is None:
        raise InvocationNotFound(id)
    inv, state, closed, error = row
    ended = bool(closed) or state in TERMINAL
    next_number = max(since, -1) + 1
    frames: list[tuple[int, bytes]] = []
    size = 0
    more = False
    found = db.execute(queries.FRAMES_AFTER, (inv, since, limit + 1))
    for number, data in found:
        if not ended and number != next_number:
            break  # the frames before it are still to come
        next_number += 1
        size += len(data)
        if len(frames) == limit or (frames and size > max_bytes):
            more = True
            break
        frames.append((number, data))
    found.close()
    return Page(frames, ended and not more, state, read_failure(error))


def cancels(db: sqlite3.Connection, ns: str, worker: str) -> list[tuple[str, int]]:
    """The claims of `worker`, as (id, attempt), that are to be cancelled."""
    return db.execute(queries.CANCELS, (ns, worker)).fetchall()


def rows(db: sqlite3.Connection, ns: str, filter: RowFilter) -> list[Row]:
    """Rows, newest first. A large body is read only for a row that is asked for by its id."""
    wanted: dict[str, Any] = {"ns": ns}
    for name in ("id", "queue", "state", "key", "root"):
        value = getattr(filter, name)
        if value is not None:
            wanted[name] = value
    sql = queries.rows(tuple(wanted), body=filter.body)
    found: list[Row] = []
    for *columns, error, body, ref in db.execute(sql, (*wanted.values(), filter.limit)).fetchall():
        if ref is not None:
            body = None if filter.id is None else read_blob(db, ref)
        row = Row._make([*columns, read_failure(error), body])
        found.append(row._replace(trusted=bool(row.trusted), cancel_requested=bool(row.cancel_requested)))
    return found


def counts(db: sqlite3.Connection, ns: str, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
    """The number of rows by (queue, state)."""
    wanted = {"ns": ns}
    if queue is not None:
        wanted["queue"] = queue
    if state is not None:
        wanted["state"] = state
    found = db.execute(queries.counts(tuple(wanted)), tuple(wanted.values()))
    return {(queue, state): count for queue, state, count in found}


def ages(db: sqlite3.Connection, ns: str, now: float) -> dict[str, float]:
    """For each queue with claimable rows: the seconds since the oldest of them was submitted."""
    return {queue: max(0.0, now - submitted_at) for queue, submitted_at in db.execute(queries.AGES, (ns,))}


def event_cursor(db: sqlite3.Connection) -> EventCursor:
    """The cursor after everything that has happened so far."""
    last = dict(db.execute(queries.LAST_NUMBERS))
    return EventCursor(last.get("outcome", 0), last.get("frame", 0))


def skip_events(db: sqlite3.Connection) -> NewEvents:
    """Everything that has happened, unread."""
    return NewEvents(event_cursor(db))


def new_events(db: sqlite3.Connection, *, ns: str, since: EventCursor, with_journals: bool) -> NewEvents:
    """What has happened in namespace `ns` since a cursor."""
    ended: list[tuple[str, Outcome | None]] = []
    last, last_frame = since
    while True:
        found = db.execute(queries.NEW_OUTCOMES, (SMALL_RESULT_BYTES, last, OUTCOMES_PER_READ)).fetchall()
        for number, row_ns, id, state, result, is_none, error in found:
            last = number
            if row_ns == ns:
                has_result = result is not None or is_none
                ended.append((id, Outcome(id, state, result, read_failure(error)) if has_result else None))
        if len(found) < OUTCOMES_PER_READ:
            break
    if last_frame is None or not with_journals:
        return NewEvents(EventCursor(last, None), ended, [])
    grown: list[str] = []
    for number, id, row_ns in db.execute(queries.NEW_FRAMES, (last_frame,)).fetchall():
        last_frame = max(last_frame, number)
        if row_ns == ns:
            grown.append(id)
    return NewEvents(EventCursor(last, last_frame), ended, grown)


def holders(db: sqlite3.Connection) -> set[str]:
    """The holders of all running rows, in any namespace."""
    return {holder for (holder,) in db.execute(queries.HOLDERS)}


def check_due(db: sqlite3.Connection, ns: str, now: float, since: float, *, with_leases: bool) -> DueCheck:
    """Read what may be due. since: see `Reap`, -inf for none; with_leases: read the leases of running rows, too."""
    (data_version,) = db.execute(queries.DATA_VERSION).fetchone()
    delay_over = db.execute(queries.DELAY_OVER, (ns, now)).fetchone() is not None
    leases = db.execute(queries.LEASES, (ns, since, now)).fetchall() if with_leases else []
    return DueCheck(data_version, delay_over, leases)
