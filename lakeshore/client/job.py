"""Claiming jobs by hand: claim one, write values to its stream, and report how it ended."""

from __future__ import annotations

import logging
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import anyio

from ..body.execute import describe_exception
from ..concurrency.tasks import run_to_end
from ..errors import ClaimLost, EncodeError, LakeshoreError, PlaneUnavailable, WireError
from ..ids import new_id
from ..planes.contract.failures import CANCELLED_RUNNING
from ..planes.contract.operations import Fence, FinalFrame
from ..planes.contract.records import Failure, Outcome
from ..planes.lease_keeper import LeaseKeeper
from ..wire import Frame, FrameKind, pack, unpack
from .calls import CANCEL_TIMEOUT, error_of
from .cursors import restart_frame

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from ..planes.plane import Plane

__all__ = [
    "Job",
    "JobLease",
    "LeaseEvent",
    "ack_job",
    "claim_job",
    "claim_or_timeout",
    "end_work",
    "nack_job",
    "post_value",
    "work_on_job",
]

logger = logging.getLogger("dreamlake.lakeshore.queue")

LeaseEvent = Literal["lost", "cancel"]
"""What ended the work on a job: its claim was lost, or its cancellation was asked for."""


@dataclass(eq=False)
class Job:
    """One claim, made by hand. It is the fence of everything that is done with it."""

    id: str
    payload: Any
    """What was submitted, unpacked; a Thunk is the dict of its Envelope."""
    attempt: int
    """Counts from 1."""
    queue: str
    worker: str
    failures: int = 0
    """How many attempts asked for a retry."""
    parent: str | None = None
    trusted: bool = True
    result: Any = None
    """The value with which `working` acknowledges the job; set it in the body."""
    next_seq: int = field(default=0, repr=False)
    """The number of the next frame."""
    unsent: dict[int, bytes] = field(default_factory=dict[int, bytes], repr=False)
    """Frames whose append was not answered: the next append sends them again."""
    begun: bool = field(default=False, repr=False)
    """This attempt has written to the journal."""
    closed: bool = field(default=False, repr=False)
    """A final post was made."""

    @property
    def fence(self) -> Fence:
        return Fence(self.id, self.worker, self.attempt)

    def add_frame(self, kind: FrameKind, body: Any = None, meta: dict[str, Any] | None = None) -> int:
        """Number a frame and append it to `unsent`; return its seq. Raises EncodeError, and then nothing was added."""
        seq = self.next_seq + self._restarts
        frame = Frame(kind, seq, body, meta).to_bytes()
        self._begin()
        return self._add(frame)

    def final_frame(self, kind: FrameKind, meta: dict[str, Any]) -> FinalFrame | None:
        """The frame that ends the journal together with the row; None when a final post has ended it. Takes no number."""
        if self.closed:
            return None
        # An error needs no restart frame before it: it ends the stream of the earlier attempt too.
        seq = self._begin() if kind == FrameKind.END else self.next_seq
        return FinalFrame(seq, Frame(kind, seq, None, meta).to_bytes())

    @property
    def _restarts(self) -> bool:
        return not self.begun and self.next_seq > 0

    def _begin(self) -> int:
        """Return the next number. Before the first frame, announce the restart if an earlier attempt wrote frames."""
        if self._restarts:
            self._add(restart_frame(self.next_seq, self.attempt))
        self.begun = True
        return self.next_seq

    def _add(self, frame: bytes) -> int:
        seq = self.next_seq
        self.next_seq += 1
        self.unsent[seq] = frame
        return seq


async def claim_job(plane: Plane, queue: str, timeout: float | None, lease: float | None) -> Job | None:
    """Take the next due job of the queue, waiting for it up to `timeout` seconds."""
    worker = f"{socket.gethostname()}-{new_id()}"  # of this claim alone: each has a lease keeper of its own
    found = await plane.claim([queue], worker, lease=lease, timeout=timeout)
    if not found:
        return None
    claimed = found[0]
    try:
        payload = unpack(claimed.body)
    except WireError as exc:
        error = WireError(f"the payload of invocation {claimed.id!r} cannot be read: {exc}")
        failure = Failure("WireError", str(error))
        seq = claimed.next_seq
        final = FinalFrame(seq, Frame(FrameKind.ERROR, seq, None, failure.as_dict()).to_bytes())
        fence = Fence(claimed.id, worker, claimed.attempt)
        await plane.finish(fence, "failed", error=failure, final=final)
        raise error from exc
    return Job(
        id=claimed.id,
        payload=payload,
        attempt=claimed.attempt,
        queue=claimed.queue,
        worker=worker,
        failures=claimed.failures,
        parent=claimed.parent,
        trusted=claimed.trusted,
        next_seq=claimed.next_seq,
    )


async def claim_or_timeout(plane: Plane, queue: str, timeout: float | None, lease: float) -> Job:
    """Take the next due job; raises TimeoutError when none comes."""
    job = await claim_job(plane, queue, timeout, lease)
    if job is None:
        raise TimeoutError(f"queue {queue!r} had no job within {timeout} s: wait longer, or use claim()")
    return job


async def ack_job(plane: Plane, job: Job, result: Any) -> None:
    """End the job as succeeded."""
    blob = pack(result)
    final = job.final_frame(FrameKind.END, {"state": "succeeded"}) if job.next_seq > 0 else None
    await _finish(plane, job, "succeeded", blob, None, final)


async def nack_job(
    plane: Plane, job: Job, error: BaseException | str | Failure | None, retry: bool = False, delay: float = 0.0
) -> None:
    """End the job as failed, or with `retry` queue it again."""
    failure = _failure(error)
    if retry:
        await plane.retry(job.fence, delay=delay, error=failure)
    else:
        await _fail(plane, job, "failed", failure)


async def post_value(plane: Plane, job: Job, value: Any, final: bool) -> int:
    """Write a value to the job's stream; return its seq."""
    if job.closed:
        raise ValueError(f"the stream of job {job.id!r} was closed by a final post: post before it, or ack the job")
    seq = job.add_frame(FrameKind.VALUE, value)
    if final:
        job.add_frame(FrameKind.END, None, {"state": "succeeded"})
        job.closed = True
    await _append_unsent(plane, job)
    return seq


async def _append_unsent(plane: Plane, job: Job) -> None:
    """Append the frames that no answer confirmed yet; each keeps its number, so that a repeat is a duplicate."""
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
        await _append_unsent(plane, job)
    await plane.finish(job.fence, state, result=blob, error=failure, final=final)


def _failure(error: BaseException | str | Failure | None) -> Failure:
    if isinstance(error, BaseException):  # tested first: an exception cannot pretend to be none
        return describe_exception(error)
    if isinstance(error, Failure):
        return error
    return Failure("Error", error or "the job was ended as failed, without a reason")


# --- working --------------------------------------------------------------------------------------------------------


class JobLease:
    """The lease of a job that is being worked on, renewed until `stop`. `event`: how the work ended early, if it did."""

    def __init__(self, plane: Plane, job: Job, lease: float, scope: anyio.CancelScope | None = None) -> None:
        self.event: LeaseEvent | None = None
        self._plane = plane
        self._job = job
        self._lease = lease
        self._scope = scope
        self._keeper: LeaseKeeper | None = None

    async def prepare(self) -> None:
        """Make the keeper, on the loop on which events are to be handled."""
        self._keeper = LeaseKeeper(self._plane, self._job.worker, self._lease, self._on_event)
        self._keeper.add(self._job.id, self._job.attempt)

    def start(self) -> None:
        """Begin to renew, after `prepare`; from any thread but the portal's."""
        if self._keeper is not None:
            self._keeper.start()

    def _on_event(self, claim: tuple[str, int], event: LeaseEvent) -> None:
        self.event = event
        if self._scope is not None:
            self._scope.cancel()

    def stop(self) -> None:
        """Renew no more; from any thread."""
        if self._keeper is not None:
            self._keeper.stop()


@asynccontextmanager
async def work_on_job(plane: Plane, queue: str, timeout: float | None, lease: float) -> AsyncGenerator[Job]:
    """Claim a job, renew its lease while the body runs, and report how it ended."""
    job = await claim_or_timeout(plane, queue, timeout, lease)
    scope = anyio.CancelScope()
    job_lease = JobLease(plane, job, lease, scope)
    try:
        await job_lease.prepare()
        job_lease.start()
        with scope:
            yield job
    except BaseException as exc:
        job_lease.stop()
        await end_work(plane, job, job_lease.event, exc)
        raise
    job_lease.stop()
    await end_work(plane, job, job_lease.event, None, cancelled=scope.cancelled_caught)


async def end_work(
    plane: Plane, job: Job, event: LeaseEvent | None, error: BaseException | None, cancelled: bool = False
) -> None:
    """Report how the work on a job ended.

    Args:
        plane: The plane.
        job: The job.
        event: What the lease keeper reported.
        error: What the body raised.
        cancelled: The body was cancelled because of `event`.
    """
    if error is not None and not issubclass(type(error), Exception):
        await _release_to_end(plane, job)
        return
    try:
        if cancelled and event == "lost":
            raise ClaimLost(job.id, "its lease ran out, or it was ended, while it was worked on")
        if cancelled:
            await _fail(plane, job, "killed", CANCELLED_RUNNING)
            raise error_of(Outcome(job.id, "killed", None, CANCELLED_RUNNING))
        if error is None:
            await _ack_or_fail(plane, job)
        else:
            await _report_failure(plane, job, event, error)
    except anyio.get_cancelled_exc_class():
        await _release_to_end(plane, job)
        raise


async def _ack_or_fail(plane: Plane, job: Job) -> None:
    try:
        await ack_job(plane, job, job.result)
    except EncodeError as exc:
        await nack_job(plane, job, exc)
        raise


async def _report_failure(plane: Plane, job: Job, event: LeaseEvent | None, error: BaseException) -> None:
    """Report what the body raised. The caller gets that exception, so an error of the plane is only logged."""
    try:
        if event == "cancel":
            await _fail(plane, job, "killed", CANCELLED_RUNNING)
        else:
            await nack_job(plane, job, error)
    except LakeshoreError as exc:
        logger.warning("the failure of job %s could not be reported: %s", job.id, exc)


async def _release_to_end(plane: Plane, job: Job) -> None:
    """Release the job in a task of the loop, which no further cancellation of the caller interrupts."""
    try:
        await run_to_end(_release, plane, job)
    except PlaneUnavailable as exc:  # the loop ended
        logger.debug("job %s could not be released: %s", job.id, exc)


async def _release(plane: Plane, job: Job) -> None:
    with anyio.move_on_after(CANCEL_TIMEOUT, shield=True):
        try:
            try:
                await plane.release(job.fence)
            except anyio.get_cancelled_exc_class():  # the loop is ending: asyncio cancels once, whatever the shield
                await plane.release(job.fence)
                raise
        except LakeshoreError as exc:
            logger.debug("job %s could not be released: %s", job.id, exc)
