"""What a plane answers: outcomes, pages of frames, rows, and the failure of an invocation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["TERMINAL", "Failure", "Outcome", "Page", "Row", "RowFilter"]

TERMINAL = frozenset({"succeeded", "failed", "killed", "timeout"})
"""States that never change again. The others are `queued` and `running`."""


class Failure(NamedTuple):
    """Why an invocation did not succeed: the remote class name, its text, and the traceback's text where there is one.

    retry: what workers of an older kind say of it; kept, and otherwise nobody's business.
    """

    type: str
    message: str
    traceback: str | None = None
    retry: bool | None = None

    def as_dict(self) -> dict[str, Any]:
        """The form that rides in error columns, acks and ERROR frames; no traceback, no such key."""
        fields: dict[str, Any] = {"type": self.type, "message": self.message}
        if self.traceback is not None:
            fields["traceback"] = self.traceback
        return fields if self.retry is None else fields | {"retry": self.retry}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Failure:
        """Read what `as_dict` gave, or what a peer sent: missing or odd fields become text, nothing is refused."""
        traceback, retry = fields.get("traceback"), fields.get("retry")
        return cls(
            _text(fields.get("type") or "Error"),
            _text(fields.get("message") or ""),
            None if traceback is None else _text(traceback),
            retry if isinstance(retry, bool) else None,
        )


def _text(value: object) -> str:
    try:
        return str(value)
    except RecursionError:
        return f"a {type(value).__name__} nested too deep to be shown"


class Outcome(NamedTuple):
    """How an invocation stands: a terminal state with its result or error, or `pending`, or `unknown`."""

    id: str
    state: str
    result: bytes | None = None
    error: Failure | None = None


class Page(NamedTuple):
    """Frames after a cursor, as (journal seq, bytes), and how the journal and the row stood when they were read.

    The frames are contiguous from the cursor on until the journal is closed or the row terminal; then the rest comes. What
    an earlier claim was given the number of and never wrote is left out, once a later one runs.
    closed: nothing follows the frames given here.
    """

    frames: list[tuple[int, bytes]]
    closed: bool
    state: str
    error: Failure | None


class Row(NamedTuple):
    """An invocation as people and tools see it. Times are seconds since the epoch by the plane's clock."""

    id: str
    queue: str
    state: str
    priority: int
    key: str | None
    attempt: int
    failures: int
    lost: int
    worker: str | None
    parent: str | None
    root: str | None
    trusted: bool
    cancel_requested: bool
    submitted_at: float
    not_before: float | None
    started_at: float | None
    lease_until: float | None
    finished_at: float | None
    error: Failure | None
    body: bytes | None

    def describe(self) -> str:
        """How it stands, as part of a sentence, for who waits for its end in vain."""
        if self.state == "queued" and self.attempt:
            return f"it is back in queue {self.queue!r} after attempt {self.attempt}"
        if self.state == "queued":
            return f"no worker has taken it from queue {self.queue!r} yet (all are busy, or none serves it)"
        if self.state != "running":
            return "it has ended just now"
        stopping = ", which is asked to cancel it" if self.cancel_requested else ""
        return f"it runs on worker {self.worker!r} (attempt {self.attempt}){stopping}"


class RowFilter(NamedTuple):
    """Which rows: newest first, at most `limit`.

    body: read the envelopes too; where no id is named a store may leave out those that are large.
    """

    id: str | None = None
    queue: str | None = None
    state: str | None = None
    key: str | None = None
    root: str | None = None
    limit: int = 100
    body: bool = False
