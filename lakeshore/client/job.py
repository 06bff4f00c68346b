"""Claiming by hand, for those who run no worker: one job at a time, from its claim to what became of it."""

from __future__ import annotations

import logging
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import anyio

from ..concurrency.tasks import run_to_end
from ..errors import ClaimLost, EncodeError, LakeshoreError, WireError
from ..ids import new_id
from ..planes.contract.failures import CANCELLED_RUNNING
from ..planes.contract.operations import Fence, FinalFrame
from ..planes.contract.records import Failure, Outcome
from ..wire import Frame, FrameKind, pack, unpack
from .streams import LEAVE_BOUND, failure_of, restart_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ..planes.lease_keeper import LeaseKeeper
    from ..planes.plane import Plane

__all__ = ["Held", "Job", "Told", "ack", "claim", "claim_for_work", "nack", "post", "settle", "working"]

logger = logging.getLogger("dreamlake.lakeshore.queue")

Told = Literal["lost", "cancel"]


@dataclass(eq=False)
class Job:
    """One claim, made by hand, and the fence of all that is done with it.

    payload: what was submitted, unpacked; a Thunk is the dict of its Envelope. attempt: from 1. failures: how many
    attempts asked for a retry. result: what `working` acknowledges with, to be set by its body.
    """

    id: str
    payload: Any
    attempt: int
    queue: str
    worker: str
    failures: int = 0
    parent: str | None = None
    trusted: bool = True
    result: Any = None
    next_seq: int = field(default=0, repr=False)
    """The number of the next frame."""
    unsent: dict[int, bytes] = field(default_factory=dict[int, bytes], repr=False)
    """Frames whose append was not answered: the next one sends them again."""
    begun: bool = field(default=False, repr=False)
    """This attempt has written to the journal."""
    closed: bool = field(default=False, repr=False)
    """A final post was made."""

    @property
    def fence(self) -> Fence:
        return Fence(self.id, self.worker, self.attempt)

    def add_frame(self, kind: FrameKind, body: Any = None, meta: dict[str, Any] | None = None) -> int:
        """Number a frame and put it behind the others; its seq. Raises EncodeError, and then nothing was added."""
        seq = self.next_seq + self._restarts
        frame = Frame(kind, seq, body, meta).to_bytes()
        self._begin()
        return self._add(frame)

    def final_frame(self, kind: FrameKind, meta: dict[str, Any]) -> FinalFrame | None:
        """The frame that ends the journal with the row; None where a final post has closed it. Takes no number."""
        if self.closed:
            return None
        seq = self._begin() if kind == FrameKind.END else self.next_seq  # an error says enough of what came before
        return FinalFrame(seq, Frame(kind, seq, None, meta).to_bytes())

    @property
    def _restarts(self) -> bool:
        return not self.begun and self.next_seq > 0

    def _begin(self) -> int:
        """The next number; what an earlier attempt left in the journal is declared over first."""
        if self._restarts:
            self._add(restart_frame(self.next_seq, self.attempt))
        self.begun = True
        return self.next_seq

    def _add(self, frame: bytes) -> int:
        seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.unsent[seq] = frame
        return seq


async def claim(plane: Plane, queue: str, timeout: float | None, lease: float | None) -> Job | None:
    """Take the next due job of the queue, waiting for it up to `timeout` seconds."""
    worker = f"{socket.gethostname()}-{new_id()}"  # of this claim alone: each has a keeper of its own
    found = await plane.claim([queue], worker, lease=lease, timeout=timeout)
    if not found:
        return None
    one = found[0]
    try:
        payload = unpack(one.body)
    except WireError as exc:
        error = WireError(f"the payload of invocation {one.id!r} cannot be read: {exc}")
        failure = Failure("WireError", str(error))
        final = FinalFrame(one.next_seq, Frame(FrameKind.ERROR, one.next_seq, None, failure.as_dict()).to_bytes())
        fence = Fence(one.id, worker, one.attempt)
        await plane.finish(fence, "failed", error=failure, final=final)
        raise error from exc
    return Job(
        id=one.id,
        payload=payload,
        attempt=one.attempt,
        queue=one.queue,
        worker=worker,
        failures=one.failures,
        parent=one.parent,
        trusted=one.trusted,
        next_seq=one.next_seq,
    )


async def claim_for_work(plane: Plane, queue: str, timeout: float | None, lease: float) -> Job:
    """The same for `working`, which needs a job; TimeoutError without one."""
    job = await claim(plane, queue, timeout, lease)
    if job is None:
        raise TimeoutError(f"queue {queue!r} had no job within {timeout} s: wait longer, or use claim()")
    return job


async def ack(plane: Plane, job: Job, result: Any) -> None:
    blob = pack(result)
    final = job.final_frame(FrameKind.END, {"state": "succeeded"}) if job.next_seq > 0 else None
    await _finish(plane, job, "succeeded", blob, None, final)


async def nack(
    plane: Plane, job: Job, error: BaseException | str | Failure | None, retry: bool = False, delay: float = 0.0
) -> None:
    failure = _failure(error)
    if retry:
        await plane.retry(job.fence, delay=delay, error=failure)
    else:
        await _fail(plane, job, "failed", failure)


async def post(plane: Plane, job: Job, value: Any, final: bool) -> int:
    if job.closed:
        raise ValueError(f"the stream of job {job.id!r} was closed by a final post: post before it, or ack the job")
    seq = job.add_frame(FrameKind.VALUE, value)
    if final:
        job.add_frame(FrameKind.END, None, {"state": "succeeded"})
        job.closed = True
    await _send(plane, job)
    return seq


async def _send(plane: Plane, job: Job) -> None:
    """Append what was not answered yet; numbered once, so that a repeat is a duplicate."""
    frames = tuple(job.unsent.values())
    first = next(iter(job.unsent))
    await plane.append(job.fence, first, frames, final=job.closed)
    for seq in range(first, first + len(frames)):
        job.unsent.pop(seq, None)


async def _fail(plane: Plane, job: Job, state: str, failure: Failure) -> None:
    await _finish(plane, job, state, None, failure, job.final_frame(FrameKind.ERROR, failure.as_dict()))


async def _finish(
    plane: Plane, job: Job, state: str, blob: bytes | None, failure: Failure | None, final: FinalFrame | None
) -> None:
    if job.unsent:
        await _send(plane, job)
    await plane.finish(job.fence, state, result=blob, error=failure, final=final)


def _failure(error: BaseException | str | Failure | None) -> Failure:
    if isinstance(error, BaseException):  # asked first: what is one cannot deny it
        from ..body.execute import describe_exception

        return describe_exception(error)
    if isinstance(error, Failure):
        return error
    return Failure("Error", error or "whoever claimed it gave it up, and no reason")


# --- working --------------------------------------------------------------------------------------------------------


class Held:
    """The lease of a job that is being worked on, renewed until `stop`. `told`: how it was lost, if it was."""

    def __init__(self, plane: Plane, job: Job, lease: float, cut: anyio.CancelScope | None = None) -> None:
        self.told: Told | None = None
        self._plane, self._job, self._lease, self._cut = plane, job, lease, cut
        self._keeper: LeaseKeeper | None = None

    async def make(self) -> None:
        """First, on the loop that is to be told."""
        from ..planes.lease_keeper import LeaseKeeper

        self._keeper = LeaseKeeper(self._plane, self._job.worker, self._lease, self._tell)
        self._keeper.add(self._job.id, self._job.attempt)

    def start(self) -> None:
        """Then, from any thread but the portal's."""
        if self._keeper is not None:
            self._keeper.start()

    def _tell(self, claim: tuple[str, int], what: Told) -> None:
        self.told = what
        if self._cut is not None:
            self._cut.cancel()

    def stop(self) -> None:
        """Renew no more; from any thread."""
        if self._keeper is not None:
            self._keeper.stop()


@asynccontextmanager
async def working(plane: Plane, queue: str, timeout: float | None, lease: float) -> AsyncGenerator[Job]:
    """Claim a job, keep it while the body runs, and say what became of it."""
    job = await claim_for_work(plane, queue, timeout, lease)
    scope = anyio.CancelScope()
    held = Held(plane, job, lease, scope)
    try:
        await held.make()
        held.start()
        with scope:
            yield job
    except BaseException as exc:
        held.stop()
        await settle(plane, job, held.told, exc)
        raise
    held.stop()
    await settle(plane, job, held.told, None, cut=scope.cancelled_caught)


async def settle(plane: Plane, job: Job, told: Told | None, error: BaseException | None, cut: bool = False) -> None:
    """Say what became of a job that was worked on. `cut`: its body was cut short for what was `told`."""
    if error is not None and not issubclass(type(error), Exception):
        await _give_back(plane, job)
        return
    try:
        if cut and told == "lost":
            raise ClaimLost(job.id, "its lease ran out, or it was ended, while it was worked on")
        if cut:
            await _fail(plane, job, "killed", CANCELLED_RUNNING)
            raise failure_of(Outcome(job.id, "killed", None, CANCELLED_RUNNING))
        if error is None:
            await _ack_or_fail(plane, job)
        else:
            await _report(plane, job, told, error)
    except anyio.get_cancelled_exc_class():
        await _give_back(plane, job)
        raise


async def _ack_or_fail(plane: Plane, job: Job) -> None:
    try:
        await ack(plane, job, job.result)
    except EncodeError as exc:
        await nack(plane, job, exc)
        raise


async def _report(plane: Plane, job: Job, told: Told | None, error: BaseException) -> None:
    """The body's exception is what its caller is to see, whatever the plane says to it."""
    try:
        if told == "cancel":
            await _fail(plane, job, "killed", CANCELLED_RUNNING)
        else:
            await nack(plane, job, error)
    except LakeshoreError as exc:
        logger.warning("the failure of job %s could not be reported: %s", job.id, exc)


async def _give_back(plane: Plane, job: Job) -> None:
    """Release the job's claim. A cancelled caller stays until that has ended; it takes LEAVE_BOUND seconds at most."""
    try:
        await run_to_end(_release, plane, job)
    except LakeshoreError as exc:
        logger.debug("job %s could not be given back: %s", job.id, exc)


async def _release(plane: Plane, job: Job) -> None:
    with anyio.move_on_after(LEAVE_BOUND, shield=True):
        try:
            await plane.release(job.fence)
        except anyio.get_cancelled_exc_class():  # the loop is ending; asyncio cancels once, whatever the shield
            await plane.release(job.fence)
            raise
