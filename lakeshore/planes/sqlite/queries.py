"""Every SQL statement of the plane, by name. The comment above each tells what it does and which index serves it.

`rowid` stands for a table's own primary key, `walk` for reading a table from its beginning. Statements whose text depends
on a number of queues, columns or rows are built by the functions at the end. `tests/planes/sqlite/test_queries.py`
compares the indexes named here with SQLite's plans.
"""

from __future__ import annotations

from functools import lru_cache

# Submit

# Insert an invocation unless its id, or its key in the queue, is there already. Index: none.
SUBMIT = """
INSERT INTO invocation (ns, id, queue, key, priority, parent, root, trusted, submitted_at, config, body_ref, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING
"""

# The root of a parent. Index: invocation_id.
ROOT_OF = "SELECT root FROM invocation WHERE ns = ? AND id = ?"

# The id itself, if there is such an invocation. Index: invocation_id.
ID_IF_THERE = "SELECT id FROM invocation WHERE ns = ? AND id = ?"

# The id of the invocation that was submitted with this key. Index: invocation_key.
ID_OF_KEY = "SELECT id FROM invocation WHERE ns = ? AND queue = ? AND key = ?"

# The columns of `insert_rows` for submits without key, parent and large body.
SUBMIT_COLUMNS = "invocation (ns, id, queue, priority, trusted, submitted_at, config, body)"

# Claim

# The columns of a claimed row, in the order of `claim._claimed`.
CLAIMED_COLUMNS = "seq, priority, id, queue, body, body_ref, attempt, failures, lost, trusted, parent, root, config"

# Claim the best queued rows; see `claim`. Index: invocation_ready, rowid.
_CLAIM = """
UPDATE invocation SET state = 'running', attempt = attempt + 1, reaped = 0, worker = ?, holder = ?, poll = ?, lease = ?,
    lease_until = ?, max_lost = ?, started_at = ?
WHERE seq IN (
    SELECT seq FROM invocation WHERE ns = ? AND queue IN ({queues}) AND state = 'queued' AND due = 1 {extra}
    ORDER BY priority DESC, seq LIMIT ?
) RETURNING {columns}
"""

# A claimer without a lease numbers its frames from 0, so it gets no row that has frames. Index: frame_seq.
_WITHOUT_FRAMES = "AND (attempt = 0 OR NOT EXISTS (SELECT 1 FROM frame WHERE inv = invocation.seq))"

# Renew and return the claims that an earlier request with this poll id made. Index: invocation_running.
CLAIM_AGAIN = f"""
UPDATE invocation SET lease = iif(lease IS NULL, NULL, ?), lease_until = iif(lease IS NULL, NULL, ?)
WHERE ns = ? AND worker = ? AND poll = ? AND state = 'running' RETURNING {CLAIMED_COLUMNS}
"""

# Make delayed rows due whose delay is over. Index: invocation_delayed.
PROMOTE = """
UPDATE invocation SET due = 1 WHERE ns = ? AND state = 'queued' AND due = 0 AND not_before <= ? RETURNING queue
"""

# Whether there are rows to claim, and delayed rows to promote; see `finds_nothing`.
# Index: invocation_ready, invocation_delayed.
_CLAIMABLE = """
SELECT EXISTS (SELECT 1 FROM invocation WHERE ns = ? AND queue IN ({queues}) AND state = 'queued' AND due = 1),
    EXISTS (SELECT 1 FROM invocation WHERE ns = ? AND state = 'queued' AND due = 0 AND not_before <= ?)
"""

# Whether an earlier request with this poll id still holds claims. Index: invocation_running.
HELD_BY_POLL = """
SELECT EXISTS (SELECT 1 FROM invocation WHERE ns = ? AND worker = ? AND poll = ? AND state = 'running')
"""

# The last frame that earlier attempts wrote. Index: frame_seq.
LAST_FRAME_BEFORE = "SELECT seq FROM frame WHERE inv = ? AND attempt < ? ORDER BY seq DESC LIMIT 1"

# Claims that hold

# The columns of `rows.ClaimRow`, in its order.
CLAIM_ROW_COLUMNS = (
    "seq, id, queue, state, worker, attempt, lease, reaped, cancel, acked, closed, failures, lost, max_lost"
)

# What a fence is checked against. Index: invocation_id.
CLAIM_ROW = f"SELECT {CLAIM_ROW_COLUMNS} FROM invocation WHERE ns = ? AND id = ?"

# Renew a claim; if it had expired meanwhile, undo that. Index: rowid.
RENEW = """
UPDATE invocation SET state = 'running', due = 1, lost = lost - reaped, reaped = 0,
    lease = iif(lease IS NULL, NULL, ?), lease_until = iif(lease IS NULL, NULL, ?)
WHERE seq = ?
"""

# Finish

# End a row under a claim that holds. Index: invocation_id.
FINISH = """
UPDATE invocation SET state = ?, outcome = ?, finished_at = ?, acked = 1, lost = lost - reaped, reaped = 0
WHERE ns = ? AND id = ? AND attempt = ? AND worker = ? AND (state = 'running' OR (state = 'queued' AND reaped = 1))
"""

# The number of the last outcome that was ever written. Index: none (a table of four rows).
LAST_OUTCOME = "SELECT seq FROM sqlite_sequence WHERE name = 'outcome'"

# The columns of `insert_rows` for the outcomes of a batch.
OUTCOME_COLUMNS = "outcome (n, ns, id, state, finished_at, error, result_ref, result)"

# Insert an outcome under a number of its own, or under the next one (n NULL). Index: none.
INSERT_OUTCOME = f"INSERT INTO {OUTCOME_COLUMNS} VALUES (?, ?, ?, ?, ?, ?, ?, ?)"

# End a row without its worker. Index: rowid.
END = "UPDATE invocation SET state = ?, outcome = ?, finished_at = ?, reaped = 0, acked = 0, lost = ? WHERE seq = ?"

# Requeue, cancel, reap

# Put a claimed row back into its queue. Index: rowid.
REQUEUE = """
UPDATE invocation SET state = 'queued', worker = NULL, holder = NULL, poll = NULL, lease = NULL, lease_until = NULL,
    cancel = 0, lost = lost - reaped, reaped = 0, due = ?, not_before = ?, failures = failures + ?,
    last_error = coalesce(?, last_error)
WHERE seq = ?
"""

# Ask the worker of a running row to cancel it. Index: rowid.
ASK_TO_CANCEL = "UPDATE invocation SET cancel = 1 WHERE seq = ?"

# Running rows whose claim has expired; see `reap`. Index: invocation_running.
EXPIRED = f"""
SELECT {CLAIM_ROW_COLUMNS} FROM invocation WHERE ns = ? AND state = 'running' AND (
    holder IN (SELECT value FROM json_each(?))
    OR (lease_until <= ? AND (holder IS NULL OR holder NOT IN (SELECT value FROM json_each(?))))
    OR lease_until + 9 * lease <= ?
) AND (holder IS NOT NULL OR ? + lease <= ?) ORDER BY seq
"""

# Put an expired row back into its queue; its claim may still end it until another one is made. Index: rowid.
EXPIRE = "UPDATE invocation SET state = 'queued', due = 1, reaped = 1, lost = lost + 1, not_before = NULL WHERE seq = ?"

# Append

# Insert one frame. Index: none.
INSERT_FRAME = "INSERT INTO frame (inv, seq, attempt, final, bytes) VALUES (?, ?, ?, ?, ?)"

# The columns of `insert_rows` for frames.
FRAME_COLUMNS = "frame (inv, seq, attempt, final, bytes)"

# The highest frame number of a journal. Index: frame_seq.
HIGHEST_FRAME = "SELECT max(seq) FROM frame WHERE inv = ?"

# Which of these frames are there, and of which attempt. Index: frame_seq.
FRAMES_THERE = "SELECT seq, attempt FROM frame WHERE inv = ? AND seq >= ? AND seq < ?"

# Close a journal. Index: rowid.
CLOSE_JOURNAL = "UPDATE invocation SET closed = 1 WHERE seq = ?"

# Purge

# Of the oldest outcomes those that are old enough, with what belongs to them. Index: walk, invocation_id.
OLDEST = """
SELECT i.seq, o.n, i.body_ref, o.result_ref
FROM (SELECT * FROM outcome WHERE ns = ? ORDER BY n LIMIT ?) o JOIN invocation i ON i.ns = o.ns AND i.id = o.id
WHERE o.finished_at < ?
"""

# Delete a journal. Index: frame_seq.
DELETE_FRAMES = "DELETE FROM frame WHERE inv = ?"

# Delete an outcome. Index: rowid.
DELETE_OUTCOME = "DELETE FROM outcome WHERE n = ?"

# Delete an invocation. Index: rowid.
DELETE_INVOCATION = "DELETE FROM invocation WHERE seq = ?"

# Blobs that no row refers to. Index: walk (the table is as short as large bodies are rare).
UNLINKED_BLOBS = "SELECT ref FROM blob WHERE linked = 0 AND made_at < ? LIMIT ?"

# Blobs

# A new blob that no row refers to yet. Index: none.
INSERT_BLOB = "INSERT INTO blob (made_at) VALUES (?)"

# One piece of a blob. Index: none.
INSERT_PIECE = "INSERT INTO piece (ref, part, bytes) VALUES (?, ?, ?)"

# Mark a blob as referred to. Index: rowid.
LINK_BLOB = "UPDATE blob SET linked = 1 WHERE ref = ?"

# The pieces of a blob, in order. Index: sqlite_autoindex_piece_1.
PIECES = "SELECT bytes FROM piece WHERE ref = ? ORDER BY part"

# How many bytes a blob has. Index: sqlite_autoindex_piece_1.
BLOB_LENGTH = "SELECT coalesce(sum(length(bytes)), 0) FROM piece WHERE ref = ?"

# Delete the pieces of a blob. Index: sqlite_autoindex_piece_1.
DELETE_PIECES = "DELETE FROM piece WHERE ref = ?"

# Delete a blob. Index: rowid.
DELETE_BLOB = "DELETE FROM blob WHERE ref = ?"

# Restore

# What stands in the way of a restore, or is to be completed by it. Index: invocation_id.
RESTORED_ROW = "SELECT seq, state, worker FROM invocation WHERE ns = ? AND id = ?"

# Enter a row as it stood on another plane. Index: none.
RESTORE = """
INSERT INTO invocation (state, due, worker, closed, not_before, finished_at, outcome, last_error,
    ns, id, queue, priority, trusted, key, parent, root, attempt, failures, lost, submitted_at, started_at, config,
    body_ref, body)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
"""

# Give a row its final state once its last frames are there. Index: rowid.
COMPLETE_RESTORE = """
UPDATE invocation SET state = ?, due = ?, worker = ?, closed = ?, not_before = ?, finished_at = ?, outcome = ?,
    last_error = ?
WHERE seq = ?
"""

# The highest number taken in a range of outcomes. Index: rowid.
HIGHEST_OUTCOME = "SELECT max(n) FROM outcome WHERE n >= ? AND n < ?"

# The place of a row in submit order. Index: invocation_id.
SEQ_OF = "SELECT seq FROM invocation WHERE ns = ? AND id = ?"

# Rows in submit order, whole; the + keeps the planner at the table itself, which is in that order. Index: rowid.
_COPIES = """
SELECT i.id, i.queue, i.state, i.body, i.key, i.priority, i.parent, i.root, i.config, i.attempt, i.failures, i.lost,
    iif(i.state = 'queued', NULL, i.worker), i.submitted_at, i.not_before, i.started_at, i.finished_at, o.result,
    iif(i.outcome IS NULL, i.last_error, o.error), i.closed, i.seq, i.body_ref, o.result_ref
FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome
WHERE +i.ns = ? AND i.seq > ? {queues} ORDER BY i.seq LIMIT ?
"""

# Frames after a number. Index: frame_seq.
FRAMES_AFTER = "SELECT seq, bytes FROM frame WHERE inv = ? AND seq > ? ORDER BY seq LIMIT ?"

# Whether there are frames after a number. Index: frame_seq.
MORE_FRAMES = "SELECT 1 FROM frame WHERE inv = ? AND seq > ? LIMIT 1"

# Reads

# How invocations stand, with their results. CROSS JOIN fixes the order of the loops: left to itself the planner reads
# every invocation of the namespace. Index: invocation_id, rowid.
OUTCOMES = """
SELECT i.id, i.state, o.result, o.result_ref, o.error FROM json_each(?) wanted
CROSS JOIN invocation i ON i.ns = ? AND i.id = wanted.value LEFT JOIN outcome o ON o.n = i.outcome
"""

# Whether one of these invocations has a result that is larger than that: SQLite finds out without reading the result.
# Index: invocation_id, rowid.
ANY_LARGE_RESULT = """
SELECT 1 FROM json_each(?) wanted CROSS JOIN invocation i ON i.ns = ? AND i.id = wanted.value
CROSS JOIN outcome o ON o.n = i.outcome WHERE o.result_ref IS NOT NULL OR length(o.result) > ? LIMIT 1
"""

# How a journal and its row stand. Index: invocation_id, rowid.
JOURNAL_STATE = """
SELECT i.seq, i.state, i.closed, o.error FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome
WHERE i.ns = ? AND i.id = ?
"""

# The claims of a worker that are to be cancelled. Index: invocation_running.
CANCELS = "SELECT id, attempt FROM invocation WHERE ns = ? AND worker = ? AND state = 'running' AND cancel = 1"

# Rows as people see them. Which index serves it depends on what they are asked for by.
_ROWS = """
SELECT i.id, i.queue, i.state, i.priority, i.key, i.attempt, i.failures, i.lost, i.worker, i.parent, i.root, i.trusted,
    i.cancel, i.submitted_at, i.not_before, i.started_at, i.lease_until, i.finished_at,
    iif(i.outcome IS NULL, i.last_error, o.error), {body}
FROM invocation i LEFT JOIN outcome o ON o.n = i.outcome WHERE {where} ORDER BY i.seq DESC LIMIT ?
"""

# The oldest claimable row of each queue. Index: invocation_ready.
AGES = "SELECT queue, min(submitted_at) FROM invocation WHERE ns = ? AND state = 'queued' AND due = 1 GROUP BY queue"

# The last outcome and the last frame that were ever written. Index: none (a table of four rows).
LAST_NUMBERS = "SELECT name, seq FROM sqlite_sequence WHERE name IN ('outcome', 'frame')"

# Outcomes after a number, with small results. Those of other namespaces are read too: the cursor has to pass over them,
# and no index knows both. Index: rowid.
NEW_OUTCOMES = """
SELECT n, ns, id, state, CASE WHEN length(result) <= ? THEN result END, result IS NULL AND result_ref IS NULL, error
FROM outcome WHERE n > ? ORDER BY n LIMIT ?
"""

# The journals that have frames after a number. The + keeps the planner from walking the whole index of frames to have
# them grouped already. Index: rowid.
NEW_FRAMES = """
SELECT max(f.n), i.id, i.ns FROM frame f CROSS JOIN invocation i ON i.seq = f.inv WHERE f.n > ? GROUP BY +f.inv
"""

# The holders of all running rows, in any namespace. Index: invocation_running.
HOLDERS = "SELECT DISTINCT holder FROM invocation WHERE state = 'running'"

# A number that changes whenever another connection commits. Index: none.
DATA_VERSION = "PRAGMA data_version"

# Whether the delay of a row is over. Index: invocation_delayed.
DELAY_OVER = "SELECT 1 FROM invocation WHERE ns = ? AND state = 'queued' AND due = 0 AND not_before <= ? LIMIT 1"

# For each holder of running rows, when its first lease ends, and when ten lengths of a lease have passed.
# Index: invocation_running.
LEASES = """
SELECT holder, min(lease_until), min(lease_until + 9 * lease) FROM invocation
WHERE ns = ? AND state = 'running' AND (holder IS NOT NULL OR ? + lease <= ?) GROUP BY holder
"""


# Statements whose text depends on numbers. SQLite keeps a prepared statement for each text, so the texts are kept too.


def _marks(count: int) -> str:
    return ", ".join("?" * count)


@lru_cache(maxsize=64)
def claim(queues: int, *, without_frames: bool) -> str:
    """The claim of rows from a number of queues."""
    extra = _WITHOUT_FRAMES if without_frames else ""
    return _CLAIM.format(queues=_marks(queues), extra=extra, columns=CLAIMED_COLUMNS)


@lru_cache(maxsize=64)
def claimable(queues: int) -> str:
    """The check whether a claim from a number of queues would find anything."""
    return _CLAIMABLE.format(queues=_marks(queues))


def copies(queues: int) -> str:
    """Rows in submit order: of a number of queues, or of all (0)."""
    return _COPIES.format(queues=f"AND i.queue IN ({_marks(queues)})" if queues else "")


def rows(columns: tuple[str, ...], *, body: bool) -> str:
    """Rows, newest first, that have given values in `columns`."""
    where = " AND ".join(f"i.{column} = ?" for column in columns)
    return _ROWS.format(where=where, body="i.body, i.body_ref" if body else "NULL, NULL")


def counts(columns: tuple[str, ...]) -> str:
    """The number of rows by queue and state, of those that have given values in `columns`."""
    where = " AND ".join(f"{column} = ?" for column in columns)
    return f"SELECT queue, state, count(*) FROM invocation WHERE {where} GROUP BY queue, state"


@lru_cache(maxsize=64)
def insert(into: str, width: int, count: int) -> str:
    """Insert `count` rows of `width` columns, those that are there already left out."""
    row = f"({_marks(width)})"
    return f"INSERT INTO {into} VALUES {', '.join([row] * count)} ON CONFLICT DO NOTHING"
