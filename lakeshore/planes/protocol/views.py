"""The results of a plane's reads as the HTTP protocol encodes them: outcomes, pages of frames, rows. See `messages`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...errors import InvocationNotFound
from ..contract.records import TERMINAL, Failure, Outcome, Page, Row
from .routes import failure_from, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

Fields = dict[str, Any]


def say_outcome(outcome: Outcome) -> Fields:
    """The answer to an await. Raises InvocationNotFound for what is unknown."""
    if outcome.state == "unknown":
        raise InvocationNotFound(outcome.id)
    if outcome.state == "pending":
        return {"state": "pending"}
    error = None if outcome.error is None else outcome.error.as_dict()
    return {"state": outcome.state, "result_blob": outcome.result or b"", "error": error}


def hear_outcome(id: str, fields: Mapping[str, Any]) -> Outcome:
    state = str(fields.get("state") or "pending")
    if state not in TERMINAL:
        return Outcome(id, "pending")
    error = fields.get("error") or None  # peers say of a success that its error is empty
    result = fields.get("result_blob") or None
    if not isinstance(result, bytes | None):
        raise TypeError(f"expected a result to be bytes, got a {type(result).__name__}")
    return Outcome(id, state, result, failure_from(error))


def say_page(page: Page) -> Fields:
    error = None if page.error is None else page.error.as_dict()
    return {"frames": [*page.frames], "closed": page.closed, "state": page.state, "error": error}


def hear_page(fields: Mapping[str, Any]) -> Page:
    frames = [_frame(seq, data) for seq, data in fields.get("frames") or ()]
    error = fields.get("error")
    return Page(frames, bool(fields.get("closed")), str(fields.get("state")), failure_from(error))


def _frame(seq: object, data: object) -> tuple[int, bytes]:
    if type(seq) is not int or not -1 <= seq < 2**63 or type(data) is not bytes:
        raise TypeError(f"expected a frame to be its number and its bytes, got {shown(seq, 40)} and {shown(data, 40)}")
    return seq, data


def hear_counts(fields: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    return {(str(name), str(state)): int(count) for name, state, count in fields.get("queues") or ()}


def hear_ages(fields: Mapping[str, Any]) -> dict[str, float]:
    ages: Fields = fields.get("ages") or {}
    return {str(queue): float(age) for queue, age in ages.items()}


def say_row(row: Row) -> Fields:
    return row._asdict() | {"error": None if row.error is None else row.error.as_dict()}


def hear_row(fields: Mapping[str, Any]) -> Row:
    known: dict[str, Any] = {name: fields.get(name) for name in Row._fields}
    if known["error"] is not None:
        known["error"] = Failure.from_dict(known["error"])
    return Row(**known)
