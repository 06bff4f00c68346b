"""What a migration reads: rows whole, as `Restore` operations for another plane, and their journals."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InvocationNotFound
from ...limits import MAX_FRAMES_PER_PAGE
from ..contract.operations import Restore
from ..contract.records import TERMINAL
from . import queries
from .blobs import read_blob
from .rows import read_failure

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Sequence

__all__ = ["copies", "journal"]


def copies(
    db: sqlite3.Connection, ns: str, after: str | None, queues: Sequence[str], limit: int, max_bytes: int
) -> list[Restore]:
    """See `contract.store.Movable.copies`."""
    start = 0 if after is None else _seq_of(db, ns, after)
    found = db.execute(queries.copies(len(queues)), (ns, start, *queues, limit))
    copied: list[Restore] = []
    size = 0
    for *columns, closed, seq, body_ref, result_ref in found:
        copy = Restore(*columns)
        size += _size(db, copy.body, body_ref) + _size(db, copy.result, result_ref)
        if copied and size > max_bytes:
            break
        frames: list[tuple[int, bytes]] = []
        if size < max_bytes:
            frames = _frames(db, seq, -1, MAX_FRAMES_PER_PAGE, max_bytes - size)
            size += sum(len(data) for _, data in frames)
        last = frames[-1][0] if frames else -1
        error: Any = copy.error  # as its column holds it
        copied.append(
            copy._replace(
                body=copy.body if body_ref is None else read_blob(db, body_ref),
                result=copy.result if result_ref is None else read_blob(db, result_ref),
                error=read_failure(error),
                frames=tuple(frames),
                closed=bool(closed) or copy.state in TERMINAL,
                more=db.execute(queries.MORE_FRAMES, (seq, last)).fetchone() is not None,
            )
        )
    found.close()
    return copied


def journal(
    db: sqlite3.Connection, ns: str, id: str, since: int, limit: int, max_bytes: int
) -> list[tuple[int, bytes]]:
    """See `contract.store.Movable.journal`."""
    return _frames(db, _seq_of(db, ns, id), since, limit, max_bytes)


def _seq_of(db: sqlite3.Connection, ns: str, id: str) -> int:
    row = db.execute(queries.SEQ_OF, (ns, id)).fetchone()
    if row is None:
        raise InvocationNotFound(id)
    return int(row[0])


def _size(db: sqlite3.Connection, inline: bytes | None, ref: int | None) -> int:
    if ref is not None:
        return int(db.execute(queries.BLOB_LENGTH, (ref,)).fetchone()[0])
    return 0 if inline is None else len(inline)


def _frames(db: sqlite3.Connection, inv: int, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
    """Frames with numbers above `since`: at most `limit`, and of at most `max_bytes` unless one alone is larger."""
    frames: list[tuple[int, bytes]] = []
    size = 0
    found = db.execute(queries.FRAMES_AFTER, (inv, since, limit))
    for number, data in found:
        size += len(data)
        if frames and size > max_bytes:
            break
        frames.append((number, data))
    found.close()
    return frames
