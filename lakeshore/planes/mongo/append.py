"""Journals: frames are appended under a fence in two round trips, for many invocations at a time, and read in pages.

First the row promises the numbers, by one update whose condition is the fence; then the frames are inserted. A claim that
comes in between begins after all that was promised, so a late frame never takes a number of the next attempt. What breaks
off between the two is repeated by its writer, who finds its numbers promised and its frames missing. If the writer is gone,
too, nobody ever fills them: readers go on behind them once another claim has begun.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING, Any, TypeAlias

from bson import Int64

from ...errors import ClaimLost, InvocationNotFound, PlaneUnavailable
from ..contract.failures import claim_lost
from ..contract.operations import Append, Appended
from .bodies import FRAME
from .connection import DUPLICATE, Database, foreign
from .documents import Document, holds, key_of
from .fences import FENCE_FIELDS, fence_filter, update_each
from .journal import SETTLES
from .submit import as_exception, insert_errors
from .updates import projection, revive_fields

if TYPE_CHECKING:
    from collections.abc import Sequence


__all__ = ["append"]

Frames: TypeAlias = list[tuple[int, bytes]]

_JOURNAL = (*FENCE_FIELDS, "nextSeq", "closed", "final", "error")
_TRIES = 5


def _last(op: Append) -> int:
    return op.first_seq + len(op.frames) - 1


def _closing(op: Append, attempt: int) -> Document:
    return {"closed": {"seq": Int64(_last(op)), "attempt": attempt}} if op.final else {}


async def append(db: Database, ops: Sequence[Append]) -> list[Any]:
    """Append to different journals: two round trips where each goes on where its journal ends."""
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
            promise = {"nextSeq": Int64(_last(op) + 1), "appendId": token} | _closing(op, op.fence.attempt)
            plain[at] = ready, {"$set": promise}
    promised, asked = set(plain), time.monotonic()
    if await update_each(db, list(plain.values())) < len(plain):
        keys = [ready["_id"] for ready, _ in plain.values()]
        mine = db.invocations.find({"_id": {"$in": keys}, "appendId": token}, {"_id": 1}) if len(plain) > 1 else None
        held = set[str]() if mine is None else {row["_id"] async for row in mine}
        promised = {at for at, (ready, _) in plain.items() if ready["_id"] in held}
    if time.monotonic() - asked > SETTLES / 2:  # readers may be about to go on behind these numbers: ask again
        promised.clear()
    parts: list[Document] = []
    of: list[int] = []
    for at in sorted(promised):
        some = await _documents(db, ops[at], range(len(ops[at].frames)), ops[at].fence.attempt or 0)
        parts += some
        of += [at] * len(some)
    refused = await insert_errors(db, db.frames, parts) if parts else {}
    again = {of[place] for place in refused}
    for at, op in enumerate(ops):
        if answers[at] is None and at in promised and at not in again:
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
            "bytes": await db.bodies.store(op.frames[place], FRAME, key),
        }
        for place in places
    ]


async def _append_slowly(db: Database, op: Append) -> Appended:
    """An append that is a repeat, fills a gap, is refused, or whose claim had lapsed: judged in the contract's order."""
    key, count = key_of(db.ns, op.fence.id), len(op.frames)
    written = 0
    for _ in range(_TRIES):
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
        if row["closed"] is not None and row["closed"] != closing.get("closed"):  # its own promise may be half kept
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
    raise PlaneUnavailable(f"the journal of {op.fence.id!r} changed under each of {_TRIES} appends")


async def _there(db: Database, row: Document, op: Append) -> dict[int, int]:
    """The numbers of the append that the journal has, each with the attempt that wrote it."""
    first, last = op.first_seq, _last(op)
    there: dict[int, int] = {}
    if first < row["nextSeq"]:
        run = {"invocation": row["_id"], "seq": {"$gte": first, "$lte": last}}
        async for frame in db.frames.find(run, {"seq": 1, "attempt": 1}):
            there[int(frame["seq"])] = frame["attempt"]
    if (final := row["final"]) is not None and first <= final["seq"] <= last:
        there[int(final["seq"])] = final["attempt"]
    return there


# Pages --------------------------------------------------------------------------------------------------------------
