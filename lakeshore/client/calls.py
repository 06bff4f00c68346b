"""What queues and UDFs share: make the operation of a submit, wait for a value, and cancel what its caller gave up."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import anyio

from ..body.context import current_context
from ..errors import EncodeError, InvocationNotFound, LakeshoreError, WireError, invocation_failed
from ..functions.serialize import serialize_fn
from ..ids import new_id
from ..planes.contract.operations import Cancel, Submit
from ..planes.contract.records import Failure, Outcome
from ..planes.plane import Plane
from ..wire import pack, unpack
from .envelopes import pack_thunk
from .thunk import is_thunk

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "CANCEL_TIMEOUT",
    "call",
    "cancel_remote",
    "error_of",
    "submit_operation",
    "submit_operations",
    "value_of",
]

logger = logging.getLogger("dreamlake.lakeshore.streams")

CANCEL_TIMEOUT = 1.0
"""Seconds that a caller that gives up a call, or a job, waits until the plane knows."""


def submit_operation(queue: str, payload: Any, key: str | None = None, priority: float = 0) -> Submit:
    """Make the operation of a submit. It records the ambient `dls.scope` and the invocation that is running here.

    Args:
        queue: The queue's name.
        payload: A Thunk, which becomes an Envelope; any other value is packed as it is.
        key: The idempotency key.
        priority: Higher goes first.

    Raises:
        EncodeError: The payload, or an argument, cannot be packed.
        TransportError: The callable cannot be sent to a worker.
        TypeError: The key is not a str, or is empty.
    """
    if key is not None and (not isinstance(key, str) or not key):
        raise TypeError(f"expected a key, a str that is not empty, or None, got {key!r:.100}")
    id = new_id()
    here = current_context()
    parent = here.invocation_id
    if is_thunk(payload):
        fn = serialize_fn(payload.fn)
        body = pack_thunk(payload, fn, id=id, prefix=here.prefix, key=key, parent=parent).to_bytes()
    else:
        body = _pack(payload)
    return Plane.submission(queue, body, id=id, key=key, priority=priority, parent=parent)


def submit_operations(queue: str, payloads: Iterable[Any], priority: float = 0) -> list[Submit]:
    """Make the operations of many submits, in order, as `submit_operation` does.

    A function that is sent by reference is described once for all the Thunks of it that follow each other. A pickle is
    made for each Thunk: what the function captures may change while `payloads` is iterated.
    """
    ops: list[Submit] = []
    fn: Any = None
    reference: dict[str, Any] | None = None
    for payload in payloads:
        here = current_context()
        id = new_id()
        if is_thunk(payload):
            if reference is None or payload.fn is not fn:
                fn = payload.fn
                described = serialize_fn(fn)
                reference = described if described["kind"] == "ref" else None
            else:
                described = reference
            envelope = pack_thunk(payload, described, id=id, prefix=here.prefix, key=None, parent=here.invocation_id)
            body = envelope.to_bytes()
        else:
            body = _pack(payload)
        if ops:  # the first one is checked
            ops.append(Submit(id, queue, body, None, ops[0].priority, here.invocation_id))
        else:
            ops.append(Plane.submission(queue, body, id=id, priority=priority, parent=here.invocation_id))
    return ops


def _pack(payload: Any) -> bytes:
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
    """Submit, and wait for the value. Raises what the invocation raised, as `Queue.result` does.

    Cancellation, and Ctrl-C, cancel the invocation too, best effort and within a second; not with a key, since others may
    share such an invocation.
    """
    try:
        outcome = await plane.call(op)
    except (anyio.get_cancelled_exc_class(), KeyboardInterrupt):
        if op.key is None:
            await cancel_remote(plane, op)
        raise
    return value_of(outcome)


def value_of(outcome: Outcome) -> Any:
    """Return the value of an invocation that succeeded.

    Raises:
        InvocationFailed: It ended in another state.
        WireError: The value cannot be read.
    """
    if outcome.state != "succeeded":
        raise error_of(outcome)
    if not outcome.result:
        return None
    try:
        return unpack(outcome.result)
    except WireError as exc:
        raise WireError(f"the result of invocation {outcome.id!r} cannot be read: {exc}") from exc


def error_of(outcome: Outcome) -> Exception:
    """Return the error to raise for an outcome other than `succeeded`."""
    error = outcome.error or Failure("Error", "no error was reported")
    return invocation_failed(outcome.id, outcome.state, error.type, error.message, error.traceback)


async def cancel_remote(plane: Plane, op: Submit) -> None:
    """Cancel the invocation of a call that its caller gives up, however far its submit has come.

    Best effort, for CANCEL_TIMEOUT at most; the cancellation of the caller does not cut it short.
    """
    with anyio.move_on_after(CANCEL_TIMEOUT, shield=True):
        try:
            await plane.cancel(op.id)
        except InvocationNotFound:
            # The submit was withdrawn, or is still under way, maybe on another lane. Submitted again it has come to its
            # end before the cancel begins; where it was withdrawn, that leaves one killed row.
            await plane.many([op, Cancel(op.id)])
        except LakeshoreError as exc:
            logger.debug("the call of invocation %s was given up, and it could not be cancelled: %s", op.id, exc)
