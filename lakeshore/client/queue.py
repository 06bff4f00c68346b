"""Queues: submitting, waiting and reading for callers; claiming by hand for those who run no worker."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio

from ..body.context import current_invocation
from ..errors import EncodeError, InvocationNotFound, WireError
from ..limits import DEFAULT_LEASE
from ..planes.contract.records import TERMINAL, Outcome, Row, RowFilter
from ..planes.plane import Plane
from ..settings import read_settings
from ..wire import pack, unpack
from . import job as jobs
from .job import Job
from .streams import Frames, Restart, Values, failure_of, leave
from .thunk import Thunk

if TYPE_CHECKING:
    import builtins
    from collections.abc import Iterable
    from contextlib import AbstractAsyncContextManager

    from ..planes.contract.operations import Submit
    from ..planes.contract.records import Failure
    from .sync_queue import SyncQueue

__all__ = ["Job", "Queue", "call", "default_dispatch", "plane_of", "submission", "value_of"]

STATES = frozenset({"queued", "running", *TERMINAL})

_default: dict[str, Plane] = {}


def default_dispatch() -> Plane:
    """The plane of this process, found once: the server at LAKESHORE_URL, with the token LAKESHORE_CLIENT_TOKEN; without
    that the file `lakeshore.db` in the folder LAKESHORE_HOME.

    Later changes of the environment have no effect. Raises ValueError for a LAKESHORE_URL that is none.
    """
    # Not under a lock, which a forked child might inherit held: a plane that is not opened is nothing yet.
    return _default.get("plane") or _default.setdefault("plane", _resolve())


_default_dispatch = default_dispatch


def take_as_default(plane: Plane) -> None:
    """Make `plane` that of this process, where none was found yet: the children of bodies go where these came from."""
    _default.setdefault("plane", plane)


def plane_of(dispatch: Plane | None) -> Plane:
    """The plane that a `dispatch=` means. Raises TypeError for what is none."""
    if dispatch is None:
        return default_dispatch()
    if not isinstance(dispatch, Plane):
        raise TypeError(f"expected dispatch= to be a plane such as dls.Dispatch(path), got {dispatch!r:.100}")
    return dispatch


def _resolve() -> Plane:
    settings = read_settings()
    if settings.url is not None:
        from ..planes.http.store import HttpDispatch

        return HttpDispatch(settings.url, token=settings.client_token, namespace=settings.namespace)
    from ..planes.sqlite.store import Dispatch

    return Dispatch(settings.home / "lakeshore.db", ns=settings.namespace or "default")


# --- what queues and UDFs share -------------------------------------------------------------------------------------


def submission(queue: str, payload: Any, key: str | None = None, priority: float = 0) -> Submit:
    """The operation that submits a Thunk, as an Envelope, or any other value, packed as it is.

    It records the ambient `dls.scope` and the invocation that is running here. Raises EncodeError for what cannot be
    packed, TransportError for a callable that cannot cross, TypeError for a key that is no str.
    """
    if key is not None and (not isinstance(key, str) or not key):
        raise TypeError(f"expected a key, a str that is not empty, or None, got {key!r:.100}")
    if isinstance(payload, Thunk):
        envelope = payload.to_envelope(key=key)
        body, id, parent = envelope.to_bytes(), envelope.id, envelope.parent
    else:
        body, id, parent = _plain(payload), None, current_invocation()
    return Plane.submission(queue, body, id=id, key=key, priority=priority, parent=parent)


def _plain(payload: Any) -> bytes:
    try:
        return pack(payload)
    except EncodeError:
        if callable(payload):
            raise EncodeError(
                f"a queue takes a Thunk or plain data, not a {type(payload).__name__}: "
                "bundle a function with its arguments, q.submit(dls.thunk(f, x))"
            ) from None
        raise


async def call(plane: Plane, op: Submit) -> Any:
    """Submit and wait for the value. Raises what the invocation raised, as `Queue.result` does.

    Being left, by cancellation or Ctrl-C, it cancels the invocation, best effort and within a second; not so with a
    key, since others may share such an invocation.
    """
    try:
        outcome = await plane.call(op)
    except (anyio.get_cancelled_exc_class(), KeyboardInterrupt):
        if op.key is None:
            await leave(plane, op)
        raise
    return value_of(outcome)


def value_of(outcome: Outcome) -> Any:
    """The value of an invocation that succeeded; InvocationFailed for any other, WireError when it is garbled."""
    if outcome.state != "succeeded":
        raise failure_of(outcome)
    if not outcome.result:
        return None
    try:
        return unpack(outcome.result)
    except WireError as exc:
        raise WireError(f"the result of invocation {outcome.id!r} cannot be read: {exc}") from exc


# --- the queue ------------------------------------------------------------------------------------------------------


class Queue:
    """A queue of a plane, by its name: the async form; `SyncQueue` is the blocking one.

    dispatch: the plane; None: `default_dispatch()`, found when it is first needed. All waits are cancellable and take
    float seconds. Verbs raise PlaneUnavailable after half a minute without an answer of the plane.
    """

    def __init__(self, name: str, *, dispatch: Plane | None = None) -> None:
        if not isinstance(name, str) or not name:
            raise TypeError(f"expected the name of a queue, a str that is not empty, got {name!r:.100}")
        self.name = name
        self._dispatch = None if dispatch is None else plane_of(dispatch)

    def __repr__(self) -> str:
        where = "" if self._dispatch is None else f", dispatch={self._dispatch!r}"
        return f"{type(self).__name__}({self.name!r}{where})"

    @property
    def dispatch(self) -> Plane:
        """The plane that the queue is on."""
        if self._dispatch is None:
            self._dispatch = default_dispatch()
        return self._dispatch

    @property
    def aio(self) -> Queue:
        """The async form: this object."""
        return self

    @property
    def sync(self) -> SyncQueue:
        """The same queue for blocking callers."""
        from .sync_queue import SyncQueue

        return SyncQueue(self.name, dispatch=self._dispatch)

    # Callers

    async def submit(self, payload: Any, *, key: str | None = None, priority: float = 0) -> str:
        """Add an invocation; its id. Higher priorities go first, always: a steady flow of them keeps lower ones waiting.

        payload: a Thunk, for workers to run; any other value is packed as it is, for those who claim by hand. key: of
        several submits to this queue with one key the first wins, whatever its arguments, and its id is everybody's.
        Raises EncodeError, TransportError. A cancelled submit may have happened.
        """
        id = await self.dispatch.do(submission(self.name, payload, key, priority))
        return id

    async def submit_many(self, payloads: Iterable[Any], *, priority: float = 0) -> builtins.list[str]:
        """Add many at once, in order; their ids. When one cannot be packed, none is submitted."""
        ops = [submission(self.name, payload, None, priority) for payload in payloads]
        answers = await self.dispatch.many(ops)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        if refused:
            refused[0].add_note(f"{len(refused)} of {len(ops)} submits failed, the others are queued")
            raise refused[0]
        return answers

    async def result(self, id: str, *, timeout: float | None = None) -> Any:
        """Wait for an invocation's value; of any queue of this plane. Leaving the wait leaves the invocation alone.

        Raises InvocationFailed (InvocationKilled, InvocationTimedOut) when it ended otherwise than `succeeded`;
        TimeoutError after `timeout` seconds (None: never); InvocationNotFound; WireError for a garbled result.
        """
        return value_of(await self.dispatch.outcome(id, timeout=timeout))

    async def call(self, payload: Any, *, key: str | None = None, priority: float = 0) -> Any:
        """Submit and wait for the value, as long as it takes; raises what `submit` and `result` raise.

        Cancelling the call cancels the invocation, best effort and within a second; not so with a key.
        """
        return await call(self.dispatch, submission(self.name, payload, key, priority))

    def stream(
        self, id: str, *, since: int = -1, timeout: float | None = None, on_restart: Restart = "raise"
    ) -> Values:
        """An async iterator over the values that an invocation yields, while it runs and later; see `Values`.

        since: the seq of the last value already seen (`stream.seq`). timeout: seconds between two frames. on_restart:
        what happens where the body was started again: "raise" StreamRestarted, or "continue" with the new attempt.
        """
        return Values(self.dispatch, id, since, timeout, on_restart)

    def stream_frames(self, id: str, *, since: int = -1, timeout: float | None = None) -> Frames:
        """An async iterator over the frames themselves, each with its seq; see `Frames`."""
        return Frames(self.dispatch, id, since, timeout)

    async def cancel(self, id: str, *, wait: bool = False) -> bool:
        """Kill a queued invocation, or ask a running one's worker to; False when it had ended before.

        wait: come back when it has ended; a body that succeeds all the same has succeeded. Raises InvocationNotFound.
        """
        return await self.dispatch.cancel(id, wait=wait)

    async def get(self, id: str) -> Row:
        """How an invocation stands: state, attempts, times, error. Raises InvocationNotFound."""
        rows = await self.dispatch.rows(RowFilter(id=id, limit=1))
        if not rows:
            raise InvocationNotFound(id)
        return rows[0]

    async def count(self, state: str | None = "queued") -> int:
        """How many invocations of this queue are in `state`; None: all there are."""
        return sum((await self.dispatch.counts(self.name, _checked_state(state))).values())

    async def list(self, *, state: str | None = None, key: str | None = None, limit: int = 100) -> builtins.list[Row]:
        """The newest invocations of this queue, at most `limit`; of one state or key only where given."""
        return await self.dispatch.rows(RowFilter(queue=self.name, state=_checked_state(state), key=key, limit=limit))

    # Workers, by hand

    async def claim(self, *, timeout: float | None = 0.0, lease: float | None = DEFAULT_LEASE) -> Job | None:
        """Take the next due job: highest priority first, then submit order. None when there is none.

        timeout: seconds to wait for one (None: for ever). lease: seconds after which the job goes to others unless it
        is acknowledged by then; None: it stays here. A job whose payload cannot be read is ended as failed, and raises
        WireError. A cancelled claim gives back what it took.
        """
        return await jobs.claim(self.dispatch, self.name, timeout, lease)

    async def ack(self, job: Job, result: Any = None) -> None:
        """End a job as succeeded, with its value. Raises EncodeError, after which the job is still held; ClaimLost."""
        await jobs.ack(self.dispatch, job, result)

    async def nack(
        self,
        job: Job,
        *,
        error: BaseException | str | Failure | None = None,
        retry: bool = False,
        delay: float = 0.0,
    ) -> None:
        """End a job as failed; with `retry` queue it again, due in `delay` seconds, one failure richer.

        Raises ClaimLost.
        """
        await jobs.nack(self.dispatch, job, error, retry, delay)

    async def post(self, job: Job, value: Any, final: bool = False) -> int:
        """Write a value to the job's stream; its seq. `final`: it is the last one.

        Raises EncodeError, ClaimLost, ValueError after the last one. A value whose post was cancelled may be there, and
        is once the next one is.
        """
        return await jobs.post(self.dispatch, job, value, final)

    def working(
        self, *, timeout: float | None = None, lease: float = DEFAULT_LEASE
    ) -> AbstractAsyncContextManager[Job]:
        """`async with q.working() as job: job.result = ...`: claim, renew the lease meanwhile, acknowledge at the end.

        Waits `timeout` seconds for a job (None: for ever), then raises TimeoutError. An exception of the body ends the
        job as failed and goes on; cancellation gives the job back. When the job's cancellation is asked for, or it is
        lost, the body is cancelled, and InvocationKilled or ClaimLost raised.
        """
        return jobs.working(self.dispatch, self.name, timeout, lease)


def _checked_state(state: str | None) -> str | None:
    if state is not None and state not in STATES:
        raise ValueError(f"expected a state, one of {', '.join(sorted(STATES))}, got {state!r:.100}")
    return state
