"""`lakeshore queue` and `lakeshore inv`: how queues and invocations stand, what came of them, and ending them."""

from __future__ import annotations

import json
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click

from ..errors import DispatchError, InvocationNotFound, LakeshoreError
from ..planes.contract.operations import Fence
from ..planes.contract.records import Row, RowFilter
from .envelopes import describe_body, function_name
from .output import clean, document, frames_of, jsonable, moment, say, since, table, value_text, waiting
from .shared import Where, error_document, json_flag, on_plane, plane_options, reading, seconds

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from ..planes.plane import Plane

__all__ = ["inv", "queue"]

STATES = ("queued", "running", "succeeded", "failed", "killed", "timeout")

ID = click.argument("id", metavar="ID")


# --- queues ---------------------------------------------------------------------------------------------------------


@click.group()
def queue() -> None:
    """Look at queues."""


@queue.command("list")
@plane_options
@reading
def queue_list(where: Where, as_json: bool) -> None:
    """The queues that have invocations, and how many are in each state."""
    queues = _by_queue(on_plane(where, lambda plane: plane.counts()))
    if as_json:
        document([{"name": name, **counts} for name, counts in queues.items()])
    else:
        table(["queue", *STATES], [[name, *counts.values()] for name, counts in queues.items()])


@queue.command("show")
@click.argument("name")
@plane_options
@reading
def queue_show(where: Where, name: str, as_json: bool) -> None:
    """One queue: how many invocations are in each state, and those that run now."""

    async def act(plane: Plane) -> tuple[dict[tuple[str, str], int], list[Row]]:
        return await plane.counts(), await plane.rows(RowFilter(queue=name, state="running", limit=1000, body=True))

    counts, running = on_plane(where, act)
    queues = _by_queue(counts)
    if name not in queues:
        there = ", ".join(map(repr, queues)) or "none"
        raise DispatchError(f"no invocation is in a queue {name!r} on this plane; queues with invocations: {there}")
    if as_json:
        document({"name": name, **queues[name], "running_now": [_listed(row) for row in running]})
        return
    table(["state", "invocations"], list(queues[name].items()))
    if running:
        say("")
        _show_rows(running)


def _by_queue(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    names = sorted({name for name, _ in counts})
    return {name: {state: counts.get((name, state), 0) for state in STATES} for name in names}


# --- invocations ----------------------------------------------------------------------------------------------------


@click.group()
def inv() -> None:
    """Look at invocations, wait for them, and end them."""


@inv.command("list")
@click.option("--queue", metavar="NAME", help="Only those of this queue.")
@click.option("--state", type=click.Choice(STATES), help="Only those in this state.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="How many, at most.")
@plane_options
@reading
def inv_list(where: Where, queue: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """Invocations, newest first."""
    rows = on_plane(where, lambda plane: plane.rows(RowFilter(queue=queue, state=state, limit=limit, body=True)))
    if as_json:
        document([_listed(row) for row in rows])
    else:
        _show_rows(rows)


def _show_rows(rows: list[Row]) -> None:
    now = time.time()
    columns = ["id", "queue", "state", "attempt", "age", "seconds", "function", "error"]
    cells = [[*row[:3], row.attempt, since(row.submitted_at, now), _seconds(row, now)] for row in rows]
    names = [function_name(row.body or b"") or "" for row in rows]
    table(columns, [[*cell, name, _error(row)] for cell, name, row in zip(cells, names, rows, strict=True)])


def _seconds(row: Row, now: float) -> str:
    """How long the latest attempt ran, or has been running."""
    if row.started_at is None or row.state == "queued":
        return ""
    return f"{(row.finished_at or now) - row.started_at:.3f}"


def _error(row: Row) -> str:
    if row.error is None:
        return ""
    text = f"{row.error.type}: {row.error.message}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _row_document(row: Row) -> dict[str, Any]:
    fields = row._asdict() | {"error": None if row.error is None else row.error.as_dict()}
    del fields["body"]
    return fields


def _listed(row: Row) -> dict[str, Any]:
    return _row_document(row) | {"function": function_name(row.body or b"")}


@inv.command("show")
@ID
@plane_options
@reading
def inv_show(where: Where, id: str, as_json: bool) -> None:
    """One invocation: its row, what it calls, and its error with the traceback. Nothing is unpickled."""
    row = on_plane(where, lambda plane: _row(plane, id, body=True))
    called = describe_body(row.body or b"")
    if as_json:
        document(_row_document(row) | {"call": called.as_document()})
        return
    fields = _row_document(row)
    del fields["error"], fields["trusted"]
    for name in ("submitted_at", "not_before", "started_at", "lease_until", "finished_at"):
        fields[name] = moment(fields[name])
    if row.state != "running":
        del fields["lease_until"]
    shown = {"id": fields.pop("id"), "call": str(called), "prefix": called.prefix, "pickled": called.pickled, **fields}
    if not row.trusted:
        shown["trusted"] = "no, it came in through a server"
    for name, value in shown.items():
        if value:
            say(f"{name.replace('_', ' '):<17}{clean(value)}")
    if row.error is not None:
        say(f"\n{clean(frames_of(row.error.traceback) or f'{row.error.type}: {row.error.message}')}")


async def _row(plane: Plane, id: str, *, body: bool = False) -> Row:
    rows = await plane.rows(RowFilter(id=id, limit=1, body=body))
    if not rows:
        raise InvocationNotFound(id)
    return rows[0]


@inv.command("result")
@ID
@click.option("--timeout", type=seconds, help="How long to wait.  [default: as long as it takes]")
@plane_options
@reading
def inv_result(where: Where, id: str, timeout: float | None, as_json: bool) -> None:
    """Wait for the value of an invocation and print it, as Python writes it; exit 1 with its error if it failed.

    The invocation goes on when this command is interrupted.
    """
    from ..client.queue import value_of

    with waiting(f"waiting for {id}"):
        value = value_of(on_plane(where, lambda plane: plane.outcome(id, timeout=timeout)))
    with _depth_is_named(f"the value of invocation {id!r}"):
        if as_json:
            document({"id": id, "state": "succeeded", "value": jsonable(value)})
        else:
            say(value_text(value))


@contextmanager
def _depth_is_named(what: str) -> Generator[None]:
    """The wire carries more levels than Python shows."""
    try:
        yield
    except RecursionError:
        raise DispatchError(f"{what} is nested too deep to be shown: read it in Python") from None


@inv.command("stream")
@ID
@click.option("--since", type=int, default=-1, metavar="SEQ", help="Go on after this one.  [default: from the first]")
@click.option(
    "--on-restart",
    type=click.Choice(["raise", "continue"]),
    default="raise",
    show_default=True,
    help="What to do when the body is started again and yields all anew: end with an error, or print that, too.",
)
@plane_options
@json_flag
def inv_stream(where: Where, id: str, since: int, on_restart: Literal["raise", "continue"], as_json: bool) -> None:
    """Print what an invocation yields, live: a line each of its number and the value as Python writes it.

    With --json it is one array of {"seq", "value"}, written as the values come; where the stream ends with an error, the
    last item is that error, and the array is complete all the same.
    """
    printer = _ArrayPrinter() if as_json else _LinePrinter()

    async def act(plane: Plane) -> None:
        from ..client.streams import Values

        values = Values(plane, id, since, None, on_restart)
        async for value in values:
            with _depth_is_named(f"value {values.seq} of invocation {id!r}"):
                printer.item(values.seq, value)

    try:
        on_plane(where, act)
    except (LakeshoreError, TimeoutError) as exc:
        printer.error(exc)
        raise
    finally:
        printer.close()


class _LinePrinter:
    """A line for each value."""

    def item(self, seq: int, value: Any) -> None:
        say(f"{seq}\t{value_text(value, one_line=True)}")

    def error(self, exc: Exception) -> None:
        """It has a line of its own on stderr."""

    def close(self) -> None:
        """Nothing is open."""


class _ArrayPrinter(_LinePrinter):
    """The same as one JSON array, whose items go out as they come."""

    def __init__(self) -> None:
        self._before = "[\n"

    def item(self, seq: int, value: Any) -> None:
        self._add({"seq": seq, "value": jsonable(value)})

    def error(self, exc: Exception) -> None:
        self._add(error_document(exc))

    def _add(self, item: dict[str, Any]) -> None:
        say(f"{self._before}{json.dumps(item, allow_nan=False)}")  # a whole line: those who read lines get it now
        self._before = ","

    def close(self) -> None:
        say("[]" if self._before == "[\n" else "]")


@inv.command("cancel")
@ID
@click.option("--wait", is_flag=True, help="Come back when it has ended.")
@plane_options
def inv_cancel(where: Where, id: str, wait: bool) -> None:
    """Kill a queued invocation, or ask a running one's worker to end it, and say how it stands; exit 0 in any case.

    A body that succeeds all the same has succeeded.
    """

    async def act(plane: Plane) -> tuple[bool, str]:
        changed = await plane.cancel(id, wait=wait)
        return changed, (await _row(plane, id)).state

    with waiting(f"waiting for the end of {id}"):
        changed, state = on_plane(where, act)
    if not changed:
        say(f"{id} had ended before: {state}")
    elif state in ("queued", "running"):
        say(f"{id} is {state}, and its worker is asked to end it")
    else:
        say(f"{id} ended {state}")


@inv.command("release")
@ID
@plane_options
def inv_release(where: Where, id: str) -> None:
    """Take an invocation from a claim without a lease, which would hold it for ever, and queue it again.

    What that claim says later is refused.
    """

    async def act(plane: Plane) -> str:
        row = await _row(plane, id)
        if row.state == "running" and row.lease_until is not None:
            raise DispatchError(
                f"invocation {id!r} is held by worker {row.worker!r} under a lease: it goes back to its queue by itself "
                "when that worker is gone; to end it, cancel it"
            )
        if row.state != "running":
            stands = "is queued" if row.state == "queued" else f"ended {row.state}"
            raise DispatchError(f"invocation {id!r} {stands}: nothing holds it, so there is nothing to release")
        return (await plane.release(Fence(id, row.worker, row.attempt))).state

    state = on_plane(where, act)
    say(f"{id} is queued again" if state == "queued" else f"{id} ended {state}")
