"""The errors of this package. The message of each names what was expected, what came, where, and how to fix it.

LakeshoreError
├─ EncodeError(TypeError)             a value that cannot be packed
├─ WireError(ValueError)              bytes or fields that are not in the expected form
├─ TransportError(RuntimeError)       a function that cannot be sent to a worker, or that a worker refused
├─ KeyContractError(ValueError)       a key of dls.run that breaks the rules
└─ DispatchError(RuntimeError)        an invocation, or the plane that holds it
   ├─ InvocationNotFound(LookupError)  ├─ ClaimLost
   ├─ PlaneUnavailable(ConnectionError)  ├─ NotAuthorized(PermissionError)
   ├─ InvocationFailed -> InvocationKilled, InvocationTimedOut
   └─ StreamRestarted
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

__all__ = [
    "ClaimLost",
    "DispatchError",
    "EncodeError",
    "InvocationFailed",
    "InvocationKilled",
    "InvocationNotFound",
    "InvocationTimedOut",
    "KeyContractError",
    "LakeshoreError",
    "NotAuthorized",
    "PlaneUnavailable",
    "StreamRestarted",
    "TransportError",
    "WireError",
    "invocation_failed",
]


class LakeshoreError(Exception):
    """Base of every error that this package raises on purpose."""


class EncodeError(LakeshoreError, TypeError):
    """A value that cannot be packed; the message names its type, the path to it and the fix."""


class WireError(LakeshoreError, ValueError):
    """Bytes or fields that are not in the expected form: malformed, cut short, trailing, too deep or too large."""


class TransportError(LakeshoreError, RuntimeError):
    """A function that cannot be sent to a worker, or that a worker refused to run."""


class KeyContractError(LakeshoreError, ValueError):
    """A key given to `dls.run` breaks the key rules, or the function wrote a key that it did not return."""


class DispatchError(LakeshoreError, RuntimeError):
    """An operation on an invocation, or on the plane that holds it, failed. Base of the more precise ones."""


class InvocationNotFound(DispatchError, LookupError):
    """No invocation of this id is on the plane: it was never submitted there, or it was purged."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id

    def __str__(self) -> str:
        return (
            f"no invocation {self.id!r} on this plane; it was never submitted here or has been purged: "
            "check the id, the plane and the namespace"
        )


class ClaimLost(DispatchError):
    """The claim does not hold its invocation any more: that was released, claimed by another worker, or ended."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(id, reason)
        self.id = id
        self.reason = reason

    def __str__(self) -> str:
        return f"the claim on invocation {self.id!r} is lost: {self.reason}; drop this attempt's work"


class PlaneUnavailable(DispatchError, ConnectionError):
    """The plane did not answer: it is down, locked, closed, or out of reach. The operation can be repeated."""


class NotAuthorized(DispatchError, PermissionError):
    """The plane refused the request: no token, a wrong one, or one without the role or namespace that it needs."""


class InvocationFailed(DispatchError):
    """The invocation ended in another state than `succeeded`.

    When the remote error is of a well-known builtin class, this error is an instance of that class too. The remote
    traceback is also a note of the exception.

    Attributes:
        id: The invocation.
        state: How it ended: `failed`, `killed` or `timeout`.
        type: The class of the remote error.
        message: Its message.
        traceback: Its traceback, if the worker reported one.
    """

    def __init__(self, id: str, state: str, type: str, message: str, traceback: str | None = None) -> None:
        super().__init__(id, state, type, message, traceback)
        self.id = id
        self.state = state
        self.type = type
        self.message = message
        self.traceback = traceback
        if traceback:
            self.add_note(f"remote traceback:\n{traceback.rstrip()}")

    def __str__(self) -> str:
        what = f"{self.type}: {self.message}" if self.message else self.type
        return f"invocation {self.id!r} ended {self.state}: {what}"

    def __reduce__(self) -> tuple[Any, ...]:
        return invocation_failed, (self.id, self.state, self.type, self.message, self.traceback)


class InvocationKilled(InvocationFailed):
    """The invocation was cancelled, before it started or while it ran."""


class InvocationTimedOut(InvocationFailed):
    """The body ran longer than its worker's timeout. A TimeoutError, in contrast, means that the caller's wait ended."""


class StreamRestarted(DispatchError):
    """The body of a stream was started again after some of its items had been delivered.

    Attributes:
        seq: Where to read on (`since=seq`) to get the items of the new attempt only.
        attempt: The number of the new attempt.
    """

    def __init__(self, id: str, seq: int, attempt: int) -> None:
        super().__init__(id, seq, attempt)
        self.id = id
        self.seq = seq
        self.attempt = attempt

    def __str__(self) -> str:
        return (
            f"the stream of invocation {self.id!r} was restarted as attempt {self.attempt}: the items delivered so far "
            f"are of an attempt that was lost or failed; drop them and read on with since={self.seq}, "
            'or ask for on_restart="continue"'
        )


_BUILTINS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        ValueError, TypeError, KeyError, IndexError, LookupError, AttributeError, NameError, AssertionError,
        ArithmeticError, FloatingPointError, OverflowError, ZeroDivisionError, NotImplementedError, RuntimeError,
        OSError, FileNotFoundError, PermissionError,
    )
}  # fmt: skip
"""The remote classes that callers may catch by their own name. A fixed list: the name comes from another process."""
_CLASS_FIRST = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*): ?(.*)", re.ASCII | re.DOTALL)
"""A message that begins with the class of the error."""
_BY_STATE = {"killed": InvocationKilled, "timeout": InvocationTimedOut}


@cache  # or each failure would make a class of its own
def _failed_class(base: type[InvocationFailed], remote: str) -> type[InvocationFailed]:
    builtin = _BUILTINS.get(remote)
    if builtin is None or issubclass(base, builtin):
        return base
    return type(base.__name__, (base, builtin), {"__module__": base.__module__, "__doc__": base.__doc__})


def invocation_failed(id: str, state: str, type: str, message: str, traceback: str | None = None) -> InvocationFailed:
    """The error for an invocation that ended in `state`.

    Args:
        id: The invocation.
        state: How it ended.
        type: The class of the remote error. A well-known builtin class becomes a base of the error. Older workers report
            `WorkerError` for every error, and begin the message with the real class.
        message: Its message.
        traceback: Its traceback.
    """
    if type == "WorkerError":
        found = _CLASS_FIRST.fullmatch(message)
        if found is not None:
            type = found[1]
            message = found[2]
    cls = _failed_class(_BY_STATE.get(state, InvocationFailed), type if type in _BUILTINS else "")
    return cls(id, state, type, message, traceback)
