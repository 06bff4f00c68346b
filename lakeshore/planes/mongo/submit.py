"""Submits: many in one insert, where the database itself decides who was first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pymongo.errors import BulkWriteError

from ...errors import PlaneUnavailable
from .bodies import ENVELOPE, is_ref
from .connection import DUPLICATE, Database, foreign
from .documents import SMALL, Document, check_names, invocation, key_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pymongo.errors import OperationFailure

    from ..contract.operations import Submit

__all__ = ["as_exception", "holding", "insert_errors", "submit"]


async def submit(db: Database, ops: Sequence[Submit]) -> list[Any]:
    """The ids that hold, one for each."""
    answers: list[Any] = []
    for run in _apart(ops):
        answers += await _submit(db, run)
    return answers


def _apart(ops: Sequence[Submit]) -> Iterator[list[Submit]]:
    """Children are not inserted together with the parents whose root they take."""
    run: list[Submit] = []
    ids: set[str] = set()
    for op in ops:
        if op.parent in ids:
            yield run
            run, ids = [], set()
        run.append(op)
        ids.add(op.id)
    if run:
        yield run


async def _submit(db: Database, ops: list[Submit]) -> list[Any]:
    for op in ops:  # before anything is written; where one is refused, each is sent alone
        check_names(queue=op.queue, key=op.key, parent=op.parent)
    roots = await _roots(db, [op.parent for op in ops if op.parent is not None])
    now, documents = db.clock.now(), list[Document]()
    for op in ops:
        key = key_of(db.ns, op.id)
        root = None if op.parent is None else roots.get(op.parent) or op.parent
        envelope = await db.bodies.store(op.body, ENVELOPE, key)
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
                await db.bodies.drop_all([documents[at]["_id"]])  # its id is nobody's: no purge will come for it
            if answers[at] is None:  # purged since
                answers[at] = PlaneUnavailable(f"the invocation with key {op.key!r:.100} went just now; submit again")
    return answers


def as_exception(error: Document) -> OperationFailure:
    from pymongo.errors import OperationFailure

    return OperationFailure(str(error.get("errmsg")), error.get("code"), error)


async def insert_errors(db: Database, collection: Any, documents: list[Document]) -> dict[int, Document]:
    """Insert documents; the errors of those that were refused, by their place."""
    try:
        await collection.insert_many(documents, ordered=False)
    except BulkWriteError as exc:
        details: Any = exc.details or {}
        if details.get("writeConcernErrors"):
            raise PlaneUnavailable(f"{db.name} could not say that a majority has what was written") from exc
        return {error["index"]: error for error in details.get("writeErrors", ())}
    return {}


async def _roots(db: Database, parents: list[str]) -> dict[str, str | None]:
    """The roots of these parents, of those that are there."""
    if not parents:
        return {}
    keys = list({key_of(db.ns, parent) for parent in parents})
    found = db.invocations.find({"_id": {"$in": keys}}, {"id": 1, "rootInvocationId": 1})
    return {row["id"]: row["rootInvocationId"] async for row in found}


async def holding(db: Database, wanted: list[tuple[str, str, str | None]]) -> dict[tuple[str, str | None], str]:
    """The ids that hold for rows that were refused, each as (id, queue, key): their own by (id, None), and those of their
    keys by (queue, key)."""
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
