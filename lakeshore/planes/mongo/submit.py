"""Submit: insert invocations; unique indexes decide which of two submits with one id or key was first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo.errors import BulkWriteError

from ...errors import PlaneUnavailable
from .bodies import MAX_INLINE_ENVELOPE, is_ref
from .connection import DUPLICATE, Database, foreign
from .documents import SMALL, Document, check_names, invocation, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pymongo.errors import OperationFailure

    from ..contract.operations import Submit

__all__ = ["as_exception", "holding", "insert_errors", "submit"]


async def submit(db: Database, ops: Sequence[Submit]) -> list[Any]:
    """Insert invocations. Returns for each the id that holds: with a key that is taken, the id of its first submit."""
    answers: list[Any] = []
    for run in _apart(ops):
        answers += await _submit(db, run)
    return answers


def _apart(ops: Sequence[Submit]) -> Iterator[list[Submit]]:
    """Split submits so that no child is inserted together with its parent, whose root it takes."""
    run: list[Submit] = []
    ids: set[str] = set()
    for op in ops:
        if op.parent in ids:
            yield run
            run = []
            ids = set()
        run.append(op)
        ids.add(op.id)
    if run:
        yield run


async def _submit(db: Database, ops: list[Submit]) -> list[Any]:
    for op in ops:  # before anything is written: if one is rejected, each is sent alone
        check_names(queue=op.queue, key=op.key, parent=op.parent)
    roots = await _roots(db, [op.parent for op in ops if op.parent is not None])
    now = db.clock.now()
    documents: list[Document] = []
    for op in ops:
        key = key_of(db.ns, op.id)
        root = None if op.parent is None else roots.get(op.parent) or op.parent
        envelope = await db.bodies.store(op.body, MAX_INLINE_ENVELOPE, key)
        config = await db.bodies.store(op.config, SMALL, key)
        documents.append(invocation(db.ns, op, root, envelope, config, db.submitted_at(), now))
    answers: list[Any] = [op.id for op in ops]
    taken: list[int] = []
    for at, error in (await insert_errors(db, db.invocations, documents)).items():
        if error.get("code") == DUPLICATE:
            taken.append(at)
        else:
            answers[at] = foreign(as_exception(error), db.name)
    if taken:
        await db.bodies.drop(
            value for at in taken for value in (documents[at]["envelope"], documents[at]["runConfig"]["config"])
        )
        held = await holding(db, [(ops[at].id, ops[at].queue, ops[at].key) for at in taken if ops[at].key is not None])
        for at in taken:
            op = ops[at]
            answers[at] = op.id if op.key is None else held.get((op.id, None)) or held.get((op.queue, op.key))
            if answers[at] not in (None, op.id) and is_ref(documents[at]["envelope"]):
                await db.bodies.drop_all(
                    [documents[at]["_id"]]
                )  # no row has this id, so no purge would delete its bodies
            if answers[at] is None:  # purged meanwhile
                answers[at] = PlaneUnavailable(
                    f"the invocation with key {op.key!r:.100} was purged during the submit; submit again"
                )
    return answers


def as_exception(error: Document) -> OperationFailure:
    from pymongo.errors import OperationFailure

    return OperationFailure(str(error.get("errmsg")), error.get("code"), error)


async def insert_errors(db: Database, collection: Any, documents: list[Document]) -> dict[int, Document]:
    """Insert documents. Returns the errors of those that were rejected, by their position."""
    try:
        await collection.insert_many(documents, ordered=False)
    except BulkWriteError as exc:
        details: Any = exc.details or {}
        if details.get("writeConcernErrors"):
            raise PlaneUnavailable(
                f"{db.name} did not confirm that a majority of its servers has the documents"
            ) from exc
        return {error["index"]: error for error in details.get("writeErrors", ())}
    return {}


async def _roots(db: Database, parents: list[str]) -> dict[str, str | None]:
    """The roots of those parents that exist."""
    if not parents:
        return {}
    keys = list({key_of(db.ns, parent) for parent in parents})
    found = db.invocations.find({"_id": {"$in": keys}}, {"id": 1, "rootInvocationId": 1})
    return {row["id"]: row["rootInvocationId"] async for row in found}


async def holding(db: Database, wanted: list[tuple[str, str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Find the ids that hold for rejected submits, each given as (id, queue, key).

    Returns the existing ids under (id, None), and the ids that hold their keys under (queue, key).
    """
    if not wanted:
        return {}
    by_id = {"_id": {"$in": [key_of(db.ns, id) for id, _, _ in wanted]}}
    by_key = [{"ns": db.ns, "key": key, "runConfig.queue": queue} for _, queue, key in wanted if key is not None]
    found = db.invocations.find({"$or": [by_id, *by_key]}, {"id": 1, "runConfig.queue": 1, "key": 1})
    held: dict[tuple[str, str | None], str] = {}
    async for row in found:
        held[row["id"], None] = row["id"]
        if (key := row.get("key")) is not None:
            held[row["runConfig"]["queue"], key] = row["id"]
    return held
