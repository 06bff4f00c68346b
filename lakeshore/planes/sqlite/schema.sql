-- Schema version 1 of the SQLite plane. Applied statement by statement, in one transaction, under the writers' lock.

-- One row an invocation. seq is the submit order. Small envelopes stay in `body`; larger ones are pieces under `body_ref`,
-- because an UPDATE rewrites a row whole. `reaped`: queued again only because its claim expired, which may still finish it.
-- `acked`: the claim's own ack ended the row, so that a repeat can be told from a late one. `due`: its delay is over.
CREATE TABLE invocation (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    ns TEXT NOT NULL,
    id TEXT NOT NULL,
    queue TEXT NOT NULL,
    state TEXT NOT NULL DEFAULT 'queued',
    due INTEGER NOT NULL DEFAULT 1,
    priority INTEGER NOT NULL DEFAULT 0,
    trusted INTEGER NOT NULL DEFAULT 1,
    key TEXT,
    parent TEXT,
    root TEXT,
    attempt INTEGER NOT NULL DEFAULT 0,
    failures INTEGER NOT NULL DEFAULT 0,
    lost INTEGER NOT NULL DEFAULT 0,
    max_lost INTEGER,
    worker TEXT,
    holder TEXT,
    poll TEXT,
    lease REAL,
    lease_until REAL,
    reaped INTEGER NOT NULL DEFAULT 0,
    cancel INTEGER NOT NULL DEFAULT 0,
    acked INTEGER NOT NULL DEFAULT 0,
    closed INTEGER NOT NULL DEFAULT 0,
    submitted_at REAL NOT NULL,
    not_before REAL,
    started_at REAL,
    finished_at REAL,
    outcome INTEGER,
    last_error BLOB,
    config BLOB,
    body_ref INTEGER,
    body BLOB
);

CREATE UNIQUE INDEX invocation_id ON invocation (ns, id);
CREATE UNIQUE INDEX invocation_key ON invocation (ns, queue, key) WHERE key IS NOT NULL;

-- What a claim reads, in its own order: queued rows that are due. Delayed rows have an index of their own until the tick
-- promotes them; in this one a hundred thousand of them made a claim five hundred times slower.
CREATE INDEX invocation_ready ON invocation (ns, queue, priority DESC, seq) WHERE state = 'queued' AND due = 1;
CREATE INDEX invocation_delayed ON invocation (ns, not_before) WHERE state = 'queued' AND due = 0;

-- What is claimed now: heartbeats, reaping, repeats of a poll, cancellations.
CREATE INDEX invocation_running ON invocation (ns, worker, poll) WHERE state = 'running';

-- One row an ended invocation, in the order they ended: the cursor of those who wait. A result is inserted here rather
-- than put into the invocation's row. n never comes again, or a purge would let a cursor miss news.
CREATE TABLE outcome (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    ns TEXT NOT NULL,
    id TEXT NOT NULL,
    state TEXT NOT NULL,
    finished_at REAL NOT NULL,
    error BLOB,
    result_ref INTEGER,
    result BLOB
);

-- The journals. n is the cursor of those who follow any of them; seq is the frame's number in its own.
CREATE TABLE frame (
    n INTEGER PRIMARY KEY AUTOINCREMENT,
    inv INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    final INTEGER NOT NULL DEFAULT 0,
    bytes BLOB NOT NULL
);

CREATE UNIQUE INDEX frame_seq ON frame (inv, seq);

-- Large bodies and results, in pieces, so that writing one never holds the write lock for long. A blob that nothing
-- refers to (its writer was killed between the pieces and the row) has `linked` 0 and goes with a purge.
CREATE TABLE blob (
    ref INTEGER PRIMARY KEY AUTOINCREMENT,
    linked INTEGER NOT NULL DEFAULT 0,
    made_at REAL NOT NULL
);

CREATE TABLE piece (
    ref INTEGER NOT NULL,
    part INTEGER NOT NULL,
    bytes BLOB NOT NULL,
    PRIMARY KEY (ref, part)
);
