"""Invocations that move between planes: what would restore those of this database, and the restore of others into it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bson import Int64

from ...errors import DispatchError, InvocationNotFound
from ...ids import check_id, check_queue
from ...limits import MAX_FRAMES_PER_PAGE
from ..contract.operations import Restore, Submit, check_restore
from ..contract.records import TERMINAL
from .bodies import MAX_INLINE_ENVELOPE, MAX_INLINE_FRAME, MAX_INLINE_RESULT, BytesLost, is_ref
from .connection import DUPLICATE, Database, foreign
from .documents import SMALL, Document, check_names, date, invocation, key_of, seconds
from .fences import store_error, update_each
from .journal import failure_of, journal
from .submit import as_exception, holding, insert_errors

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

__all__ = ["copies", "journal_of", "restore"]


# Reading ------------------------------------------------------------------------------------------------------------


async def _row(db: Database, id: str) -> Document:
    row = await db.invocations.find_one({"_id": key_of(db.ns, id)}, {"envelope": 0, "result": 0})
    if row is None:
        raise InvocationNotFound(id)
    return row


async def journal_of(db: Database, id: str, since: int, limit: int, max_bytes: int) -> list[tuple[int, bytes]]:
    """Frames after `since`, gaps or not."""
    row = await _row(db, id)
    with _told_of(db, row):
        return (await journal(db, row, since, limit, max_bytes))[0]


@contextmanager
def _told_of(db: Database, row: Document) -> Generator[None]:
    """Inside, what is wrong with a document is said of it."""
    try:
        yield
    except (BytesLost, KeyError, TypeError, ValueError, AttributeError) as exc:
        raise DispatchError(
            f"document {row['_id']!r} of {db.name}, or its journal, is none that this package has written, or what it "
            f"refers to is lost: {type(exc).__name__}: {exc!s:.200}; mend or delete it"
        ) from exc


async def copies(db: Database, after: str | None, queues: Sequence[str], limit: int, max_bytes: int) -> list[Restore]:
    """What would restore the rows after that one, in submit order."""
    wanted: Document = {"ns": db.ns}
    if after is not None:
        wanted["submittedAt"] = {"$gt": (await _row(db, after))["submittedAt"]}
    if queues:
        wanted["runConfig.queue"] = {"$in": list(queues)}
    found: list[Restore] = []
    size = 0
    async with db.invocations.find(wanted).sort("submittedAt", 1).limit(limit) as rows:
        async for row in rows:
            with _told_of(db, row):
                size += _length(row["envelope"]) + _length(row["result"])
                if found and size > max_bytes:
                    break
                copy = await _copy(db, row, max_bytes - size)
            size += sum(len(data) for _, data in copy.frames)
            found.append(copy)
    return found


def _length(value: Any) -> int:
    return int(value["length"]) if is_ref(value) else len(value or b"")


async def _copy(db: Database, row: Document, max_bytes: int) -> Restore:
    some, more = await journal(db, row, -1, MAX_FRAMES_PER_PAGE if max_bytes > 0 else 0, max_bytes)
    state = row["state"]
    return Restore(
        id=check_id(row["id"]),
        queue=check_queue(row["runConfig"]["queue"]),
        state=state,
        body=await db.bodies.whole(row["envelope"]) or b"",
        key=row.get("key"),
        priority=int(row["priority"]),
        parent=row["parentInvocationId"],
        root=row["rootInvocationId"],
        config=await db.bodies.whole(row["runConfig"]["config"]),
        attempt=int(row["attempt"]),
        failures=int(row["failures"]),
        lost=int(row["lost"]),
        worker=None if state == "queued" else row["worker"],
        submitted_at=seconds(row["createdAt"]) or 0.0,
        not_before=seconds(row["notBefore"]),
        started_at=seconds(row["startedAt"]),
        finished_at=seconds(row["finishedAt"]),
        result=await db.bodies.whole(row["result"]),
        error=await failure_of(db, row),
        frames=tuple(some),
        closed=row["closed"] is not None or state in TERMINAL,
        more=more,
    )


# Restoring ----------------------------------------------------------------------------------------------------------


async def restore(db: Database, ops: Sequence[Restore]) -> list[Any]:
    """Enter rows, or parts of them. One whose journal is not there yet is running, without a worker and under no claim,
    so that nobody claims it and no reader takes its journal for whole."""
    answers: list[Any] = [op.id for op in ops]
    entered: dict[int, Document] = {}
    for at, op in enumerate(ops):
        try:
            check_restore(op)
            check_names(queue=op.queue, key=op.key, parent=op.parent, root=op.root, worker=op.worker)
        except ValueError as exc:
            answers[at] = exc
            continue
        entered[at] = await _entered(db, op)
        if not op.more and not op.frames:
            entered[at] |= await _stands(db, op)
    places = list(entered)
    refused = await insert_errors(db, db.invocations, list(entered.values())) if entered else {}
    there: list[int] = []
    for place, error in refused.items():
        at = places[place]
        if error.get("code") == DUPLICATE:
            there.append(at)
        else:
            answers[at] = foreign(as_exception(error), db.name)
            del entered[at]
    if there:
        held = await holding(db, [(ops[at].id, ops[at].queue, ops[at].key) for at in there])
        for at in there:
            op = ops[at]
            await db.bodies.drop([entered[at]["envelope"], entered[at]["runConfig"]["config"]])
            answers[at] = held.get((op.id, None)) or held.get((op.queue, op.key)) or op.id
        partly = await _partly(db, [ops[at].id for at in there])
        for at in there:
            if ops[at].id not in partly:
                del entered[at]
    await _write_frames(db, [ops[at] for at in entered])
    rest = [ops[at] for at in entered if ops[at].frames or at in there]
    await update_each(db, [(_unheld(db, op.id), [{"$set": await _goes_on(db, op)}]) for op in rest])
    return answers


def _unheld(db: Database, id: str) -> Document:
    return {"_id": key_of(db.ns, id), "state": "running", "worker": None}


async def _partly(db: Database, ids: list[str]) -> set[str]:
    """Those of `ids` that are there in part."""
    keys = [key_of(db.ns, id) for id in ids]
    found = db.invocations.find({"_id": {"$in": keys}, "state": "running", "worker": None}, {"id": 1})
    return {row["id"] async for row in found}


async def _entered(db: Database, op: Restore) -> Document:
    """A new row whose journal is still to come."""
    key = key_of(db.ns, op.id)
    submit = Submit(op.id, op.queue, b"", op.key, op.priority, op.parent)
    envelope = await db.bodies.store(op.body, MAX_INLINE_ENVELOPE, key)
    config = await db.bodies.store(op.config, SMALL, key)
    document = invocation(db.ns, submit, op.root, envelope, config, db.submitted_at(), op.submitted_at)
    return document | {
        "state": "running",
        "attempt": op.attempt,
        "failures": op.failures,
        "lost": op.lost,
        "startedAt": date(op.started_at),
    }


async def _stands(db: Database, op: Restore) -> Document:
    """What a row becomes when its journal is there."""
    now, ended = db.clock.now(), op.state in TERMINAL
    fields: Document = {"state": op.state, "error": await store_error(db, op.error, op.id)}
    if ended or op.closed:
        last = op.frames[-1][0] if op.frames else -1
        fields["closed"] = {"seq": Int64(last), "attempt": 0}
    if ended:
        result = await db.bodies.store(op.result or None, MAX_INLINE_RESULT, key_of(db.ns, op.id))
        finished = now if op.finished_at is None else op.finished_at
        return fields | {"worker": op.worker, "result": result, "finishedAt": date(finished)}
    waits = op.not_before is not None and op.not_before > now
    until = date(op.not_before)
    return fields | {"due": not waits, "notBefore": until, "wakeAt": until if waits else None}


async def _goes_on(db: Database, op: Restore) -> Document:
    """What changes in a row with this part."""
    last = max((seq for seq, _ in op.frames), default=-1)
    fields: Document = {"nextSeq": {"$max": ["$nextSeq", Int64(last + 1)]}}
    if not op.more:
        fields |= {name: {"$literal": value} for name, value in (await _stands(db, op)).items()}
    return fields


async def _write_frames(db: Database, ops: Sequence[Restore]) -> None:
    """Frames of no attempt that can speak; those that are there stay as they are."""
    documents: list[Document] = []
    for op in ops:
        key, last = key_of(db.ns, op.id), op.frames[-1][0] if op.frames and op.closed and not op.more else None
        documents += [
            {
                "invocation": key,
                "seq": Int64(seq),
                "attempt": 0,
                "final": seq == last,
                "bytes": await db.bodies.store(data, MAX_INLINE_FRAME, key),
            }
            for seq, data in op.frames
        ]
    if not documents:
        return
    for error in (await insert_errors(db, db.frames, documents)).values():
        if error.get("code") != DUPLICATE:
            raise foreign(as_exception(error), db.name)
