"""Append: a worker adds frames to the journal of its claim, in two round trips for any number of invocations.

First an update with the fence as its condition reserves the numbers in the row; then the frames are inserted. A claim in
between begins after the reserved numbers, so a late frame never takes a number of the next attempt. If an append breaks off
between the two steps, its writer repeats it, and finds the numbers reserved and the frames missing. If the writer is gone
too, the frames never come: readers skip them after the next claim has begun (see `journal`).
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from bson import Int64

from ...errors import ClaimLost, InvocationNotFound, PlaneUnavailable
from ..contract.failures import claim_lost
from ..contract.operations import Append, Appended
from . import journal
from .bodies import MAX_INLINE_FRAME
from .connection import DUPLICATE, Database, foreign
from .documents import Document, holds, key_of
from .fences import FENCE_FIELDS, fence_filter, update_each
from .submit import as_exception, insert_errors
from .updates import projection, revive_fields

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["append"]

Frames: TypeAlias = list[tuple[int, bytes]]

_JOURNAL = (*FENCE_FIELDS, "nextSeq", "closed", "final", "error")
MAX_TRIES = 5
"""How often an append is repeated when its journal changes meanwhile."""


def _last(op: Append) -> int:
    return op.first_seq + len(op.frames) - 1


def _closing(op: Append, attempt: int) -> Document:
    """The fields that close the journal, if the append ends it."""
    if not op.final:
        return {}
    return {"closed": {"seq": Int64(_last(op)), "attempt": attempt}}


async def append(db: Database, ops: Sequence[Append]) -> list[Any]:
    """Append to different journals: two round trips if each append begins at the end of its journal."""
    answers: list[Any] = [None] * len(ops)
    token = secrets.token_hex(8)
    plain: dict[int, tuple[Document, Any]] = {}
    for at, op in enumerate(ops):
        if op.first_seq < 0 or not op.frames:
            answers[at] = ValueError(
                f"an append takes frames from seq 0 on, not {len(op.frames)} from seq {op.first_seq}"
            )
        elif op.fence.attempt is not None and op.fence.worker is not None:
            ready = fence_filter(db, op.fence) | {"state": "running", "closed": None, "nextSeq": op.first_seq}
            reserve = {"nextSeq": Int64(_last(op) + 1), "appendId": token} | _closing(op, op.fence.attempt)
            plain[at] = ready, {"$set": reserve}
    reserved = set(plain)
    started = time.monotonic()
    if await update_each(db, list(plain.values())) < len(plain):
        updated: set[str] = set()
        if len(plain) > 1:
            keys = [ready["_id"] for ready, _ in plain.values()]
            rows = db.invocations.find({"_id": {"$in": keys}, "appendId": token}, {"_id": 1})
            updated = {row["_id"] async for row in rows}
        reserved = {at for at, (ready, _) in plain.items() if ready["_id"] in updated}
    # After a long pause readers may be about to skip these numbers: take the slow way, which checks the fence again.
    if time.monotonic() - started > journal.MISSING_FRAMES_TIMEOUT / 2:
        reserved.clear()
    documents: list[Document] = []
    owners: list[int] = []
    for at in sorted(reserved):
        some = await _documents(db, ops[at], range(len(ops[at].frames)), ops[at].fence.attempt or 0)
        documents += some
        owners += [at] * len(some)
    refused = await insert_errors(db, db.frames, documents) if documents else {}
    again = {owners[place] for place in refused}
    for at, op in enumerate(ops):
        if answers[at] is None and at in reserved and at not in again:
            answers[at] = Appended(len(op.frames), 0)
        elif answers[at] is None:
            try:
                answers[at] = await _append_slowly(db, op)
            except (ClaimLost, InvocationNotFound) as exc:
                answers[at] = exc
    return answers


async def _documents(db: Database, op: Append, places: Sequence[int], attempt: int) -> list[Document]:
    key = key_of(db.ns, op.fence.id)
    return [
        {
            "invocation": key,
            "seq": Int64(op.first_seq + place),
            "attempt": attempt,
            "final": op.final and place == len(op.frames) - 1,
            "bytes": await db.bodies.store(op.frames[place], MAX_INLINE_FRAME, key),
        }
        for place in places
    ]


async def _append_slowly(db: Database, op: Append) -> Appended:
    """Append when the fast way did not apply: a repeat, a gap, a closed journal, or a claim that had expired.

    The checks run in the order that the contract names.
    """
    key = key_of(db.ns, op.fence.id)
    count = len(op.frames)
    written = 0
    for _ in range(MAX_TRIES):
        row = await db.invocations.find_one({"_id": key}, projection(_JOURNAL))
        if row is None:
            raise InvocationNotFound(op.fence.id)
        attempt: int = row["attempt"] if op.fence.attempt is None else op.fence.attempt
        there = await _there(db, row, op)
        missing = [place for place in range(count) if there.get(op.first_seq + place) != attempt]
        if not missing:
            return Appended(written, count - written)
        if not holds(row, op.fence):
            raise claim_lost(op.fence, row["state"], row["attempt"])
        closing = _closing(op, attempt)
        if row["closed"] is not None and row["closed"] != closing.get("closed"):  # its own reservation may be there
            raise ClaimLost(op.fence.id, "its journal is closed")
        for seq in (op.first_seq + place for place in missing):
            if seq in there:
                raise ClaimLost(op.fence.id, f"frame {seq} is there from attempt {there[seq]}")
        change: Document = dict(closing)
        if row["lapsed"]:
            change |= revive_fields(row["lease"], db.clock.now())
        change["nextSeq"] = {"$max": ["$nextSeq", Int64(_last(op) + 1)]}
        seen = fence_filter(db, op.fence) | {
            "attempt": row["attempt"],
            "lapsed": row["lapsed"],
            "closed": row["closed"],
        }
        if not await update_each(db, [(seen, [{"$set": change}])]):
            continue
        documents = await _documents(db, op, missing, row["attempt"])
        refused = await insert_errors(db, db.frames, documents)
        written += len(documents) - len(refused)
        for error in refused.values():
            if error.get("code") != DUPLICATE:
                raise foreign(as_exception(error), db.name)
        if not refused:
            return Appended(written, count - written)
        await db.bodies.drop(documents[place]["bytes"] for place in refused)
    raise PlaneUnavailable(f"the journal of {op.fence.id!r} changed during each of {MAX_TRIES} appends")


async def _there(db: Database, row: Document, op: Append) -> dict[int, int]:
    """The numbers of the append that the journal already has, each with the attempt that wrote it."""
    first = op.first_seq
    last = _last(op)
    there: dict[int, int] = {}
    if first < row["nextSeq"]:
        run = {"invocation": row["_id"], "seq": {"$gte": first, "$lte": last}}
        async for frame in db.frames.find(run, {"seq": 1, "attempt": 1}):
            there[int(frame["seq"])] = frame["attempt"]
    if (final := row["final"]) is not None and first <= final["seq"] <= last:
        there[int(final["seq"])] = final["attempt"]
    return there


# Pages --------------------------------------------------------------------------------------------------------------
