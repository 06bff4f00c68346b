"""A worker in a process of its own: `worker_process.py DB OPTIONS`, OPTIONS being JSON for `run_worker`.

MOMENT in the environment names the moment at which it kills itself, LOG a file for what it has to say. The package
knows of none of this: functions of it are wrapped here.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import anyio
import worker_bodies

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Append, Claim, Finish
from dreamlake.lakeshore.planes.sqlite import apply as applying
from dreamlake.lakeshore.planes.sqlite import inline_writer, store
from dreamlake.lakeshore.planes.sqlite.store import SqliteStore
from dreamlake.lakeshore.worker.loop import Worker
from dreamlake.lakeshore.worker.outcome import ActiveClaim

if TYPE_CHECKING:
    from collections.abc import Sequence

MOMENT = os.environ.get("MOMENT", "")
LOG = os.environ.get("LOG", os.devnull)


def die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("not reached")


def before(owner: Any, name: str, moment: str) -> None:
    """Die instead of calling it."""
    if moment == MOMENT:
        setattr(owner, name, lambda *args, **kwargs: die())


def kind_of_commit(ops: Sequence[Any], answers: Sequence[Any]) -> str:
    """The kind of what a transaction did, as moments name it; "" for what none of them names."""
    kind = ""
    for op, answer in zip(ops, answers, strict=True):
        if answer and isinstance(op, (Claim, Append, Finish)):
            if not isinstance(op, Append) or op.first_seq > 0:
                kind = type(op).__name__.lower()
    return kind


def die_at_a_commit() -> None:
    """In the transaction, before its end, or right after it."""
    apply = applying.apply
    commit = applying.commit

    @wraps(apply)
    def apply_and_die(batch: Any, ops: Sequence[Any]) -> list[Any]:
        answers = apply(batch, ops)
        if f"before the commit of {kind_of_commit(ops, answers)}" == MOMENT:
            die()
        return answers

    @wraps(commit)
    def commit_and_die(batch: Any, ops: Sequence[Any]) -> list[Any]:
        answers = commit(batch, ops)
        if f"after the commit of {kind_of_commit(ops, answers)}" == MOMENT:
            die()
        return answers

    applying.apply = apply_and_die
    for module in (inline_writer, store):
        module.commit = commit_and_die  # type: ignore[attr-defined]


def log_answered_appends() -> None:
    """Each append that was answered, as the number after its last frame."""
    original = dls.Dispatch.append

    @wraps(original)
    async def append(self: Any, fence: Any, first_seq: int, frames: Sequence[bytes], **rest: Any) -> Any:
        answer = await original(self, fence, first_seq, frames, **rest)
        worker_bodies.append_line(LOG, f"{fence.id} {first_seq + len(frames)}")
        return answer

    dls.Dispatch.append = append  # type: ignore[method-assign]


def die_before_a_claim() -> None:
    original = SqliteStore.apply_at_once  # which `apply` tries first

    @wraps(original)
    def apply_at_once(self: SqliteStore, ops: Sequence[Any]) -> Any:
        if any(isinstance(op, Claim) for op in ops) and Path(f"{self._plane.path}-now").exists():
            die()
        return original(self, ops)

    SqliteStore.apply_at_once = apply_at_once  # type: ignore[method-assign]


def arm() -> None:
    before(Worker, "_start_claims", "between claim and start")
    before(ActiveClaim, "deliver", "between result and ack")
    if "commit of" in MOMENT:
        die_at_a_commit()
    if MOMENT == "before the claim":
        die_before_a_claim()
    if MOMENT == "mid-body":
        worker_bodies.moment = die
    log_answered_appends()


async def main(path: str, options: dict[str, Any]) -> None:
    async with dls.Dispatch(path) as plane:
        await dls.run_worker(dls.Queue("q", dispatch=plane), **options)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    arm()
    anyio.run(main, sys.argv[1], json.loads(sys.argv[2]), backend=os.environ.get("BACKEND", "asyncio"))
