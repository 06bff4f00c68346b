"""Rows of invocations as a table and as JSON."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from .envelopes import function_name
from .output import since, table

if TYPE_CHECKING:
    from ..planes.contract.records import Row


STATES = ("queued", "running", "succeeded", "failed", "killed", "timeout")


def show_rows(rows: list[Row]) -> None:
    """Print a table of invocations."""
    now = time.time()
    columns = ["id", "queue", "state", "attempt", "age", "seconds", "function", "error"]
    cells = [[*row[:3], row.attempt, since(row.submitted_at, now), _seconds(row, now)] for row in rows]
    names = [function_name(row.body or b"") or "" for row in rows]
    table(columns, [[*cell, name, _error(row)] for cell, name, row in zip(cells, names, rows, strict=True)])


def _seconds(row: Row, now: float) -> str:
    """The seconds that the latest attempt took or has taken so far, as text."""
    if row.started_at is None or row.state == "queued":
        return ""
    return f"{(row.finished_at or now) - row.started_at:.3f}"


def _error(row: Row) -> str:
    if row.error is None:
        return ""
    text = f"{row.error.type}: {row.error.message}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def row_document(row: Row) -> dict[str, Any]:
    """A row for JSON, without its body."""
    fields = row._asdict() | {"error": None if row.error is None else row.error.as_dict()}
    del fields["body"]
    return fields


def listed_row(row: Row) -> dict[str, Any]:
    """A row for JSON with the name of its function."""
    return row_document(row) | {"function": function_name(row.body or b"")}
