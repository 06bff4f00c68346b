"""The error tree: whose fault it is, and a sentence that says what was expected, what came, where, and the fix.

LakeshoreError
├─ EncodeError(TypeError)             a value that no codec takes
├─ WireError(ValueError)              bytes that are not what they should be
├─ TransportError(RuntimeError)       a function that cannot cross, or that a gate refused
├─ KeyContractError(ValueError)       a key of dls.run
└─ DispatchError(RuntimeError)
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
    """Base of every error this package raises on purpose."""


class EncodeError(LakeshoreError, TypeError):
    """A value that cannot be packed; the message names its type, the path to it and the fix."""


class WireError(LakeshoreError, ValueError):
    """Bytes that are not what they should be: malformed, cut short, trailing, too deep or too large."""


class TransportError(LakeshoreError, RuntimeError):
    """A function that cannot cross to a worker, or that a worker's gate refused."""


class KeyContractError(LakeshoreError, ValueError):
    """A key given to `dls.run` that breaks the key rules, or a written key that the function did not return."""


class DispatchError(LakeshoreError, RuntimeError):
    """Something about an invocation or the plane that holds it."""


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
    """The invocation is no longer this claim's: it was given back, taken over, or ended by somebody else."""

    def __init__(self, id: str, reason: str) -> None:
        super().__init__(id, reason)
        self.id, self.reason = id, reason

    def __str__(self) -> str:
        return f"the claim on invocation {self.id!r} is lost: {self.reason}; drop this attempt's work"


class PlaneUnavailable(DispatchError, ConnectionError):
    """The plane did not answer: it may be down, locked, closed, or out of reach. The operation can be repeated."""


class NotAuthorized(DispatchError, PermissionError):
    """The plane refused the caller: no token, a wrong one, or one without the role or namespace asked for."""


class InvocationFailed(DispatchError):
    """The invocation ended otherwise than `succeeded`.

    `.id .state .type .message .traceback` say what the worker reported; the remote traceback is also a note of the
    exception. When the remote type is a well-known builtin the error is an instance of that class too.
    """

    def __init__(self, id: str, state: str, type: str, message: str, traceback: str | None = None) -> None:
        super().__init__(id, state, type, message, traceback)
        self.id, self.state, self.type, self.message, self.traceback = id, state, type, message, traceback
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
    """The body ran longer than its worker's timeout. Not a TimeoutError: that one means your own wait ended."""


class StreamRestarted(DispatchError):
    """The body of a stream was started again after some of its items had been delivered.

    `.seq` is the cursor to go on from (`since=seq`) to read the new attempt only; `.attempt` is its number.
    """

    def __init__(self, id: str, seq: int, attempt: int) -> None:
        super().__init__(id, seq, attempt)
        self.id, self.seq, self.attempt = id, seq, attempt

    def __str__(self) -> str:
        return (
            f"the stream of invocation {self.id!r} was restarted as attempt {self.attempt}: the items delivered so far "
            f"are of an attempt that was lost or failed; drop them and read on with since={self.seq}, "
            'or ask for on_restart="continue"'
        )


# The remote types that callers may catch by their own name. A fixed list: the name comes from another process.
_BUILTINS: dict[str, type[Exception]] = {
    cls.__name__: cls
    for cls in (
        ValueError, TypeError, KeyError, IndexError, LookupError, AttributeError, NameError, AssertionError,
        ArithmeticError, FloatingPointError, OverflowError, ZeroDivisionError, NotImplementedError, RuntimeError,
        OSError, FileNotFoundError, PermissionError,
    )
}  # fmt: skip
_CLASS_FIRST = re.compile(r"(?:[A-Za-z_]\w*\.)*([A-Z]\w*): ?(.*)", re.ASCII | re.DOTALL)
_BY_STATE = {"killed": InvocationKilled, "timeout": InvocationTimedOut}


@cache
def _failed_class(base: type[InvocationFailed], remote: str) -> type[InvocationFailed]:
    builtin = _BUILTINS.get(remote)
    if builtin is None or issubclass(base, builtin):
        return base
    return type(base.__name__, (base, builtin), {"__module__": base.__module__, "__doc__": base.__doc__})


def invocation_failed(id: str, state: str, type: str, message: str, traceback: str | None = None) -> InvocationFailed:
    """The error for an invocation that ended in `state`, of the remote builtin class too where that is a known one.

    Workers of an older kind call every error a WorkerError, and begin its message with the real class.
    """
    if type == "WorkerError" and (said := _CLASS_FIRST.fullmatch(message)) is not None:
        type, message = said[1], said[2]
    cls = _failed_class(_BY_STATE.get(state, InvocationFailed), type if type in _BUILTINS else "")
    return cls(id, state, type, message, traceback)
