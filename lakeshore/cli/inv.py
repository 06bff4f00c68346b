"""`lakeshore inv`: list, show, wait for, read, cancel and release invocations."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import click

from ..errors import DispatchError, InvocationNotFound, LakeshoreError
from ..planes.contract.operations import Fence
from ..planes.contract.records import Row, RowFilter
from .envelopes import describe_body
from .options import Where, error_document, json_flag, on_plane, plane_options, reading, seconds
from .output import clean, document, frames_of, jsonable, moment, say, value_text, waiting
from .rows import STATES, listed_row, row_document, show_rows

if TYPE_CHECKING:
    from collections.abc import Generator

    from ..planes.plane import Plane

__all__ = ["inv"]


ID = click.argument("id", metavar="ID")


# --- queues ---------------------------------------------------------------------------------------------------------


# --- invocations ----------------------------------------------------------------------------------------------------


@click.group()
def inv() -> None:
    """List invocations, wait for their results, and cancel them."""


@inv.command("list")
@click.option("--queue", metavar="NAME", help="Only invocations of this queue.")
@click.option("--state", type=click.Choice(STATES), help="Only invocations in this state.")
@click.option("--limit", type=click.IntRange(1), default=50, show_default=True, help="The largest number of rows.")
@plane_options
@reading
def inv_list(where: Where, queue: str | None, state: str | None, limit: int, as_json: bool) -> None:
    """List invocations, newest first."""
    rows = on_plane(where, lambda plane: plane.rows(RowFilter(queue=queue, state=state, limit=limit, body=True)))
    if as_json:
        document([listed_row(row) for row in rows])
    else:
        show_rows(rows)


@inv.command("show")
@ID
@plane_options
@reading
def inv_show(where: Where, id: str, as_json: bool) -> None:
    """Show one invocation: its row, its call, and its error with the traceback. Nothing is unpickled."""
    row = on_plane(where, lambda plane: _row(plane, id, body=True))
    called = describe_body(row.body or b"")
    if as_json:
        document(row_document(row) | {"call": called.as_document()})
        return
    fields = row_document(row)
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
@click.option("--timeout", type=seconds, help="Seconds to wait.  [default: no limit]")
@plane_options
@reading
def inv_result(where: Where, id: str, timeout: float | None, as_json: bool) -> None:
    """Wait for the result of an invocation and print it as a Python literal; exit 1 with its error if it failed.

    If you interrupt this command, the invocation goes on.
    """
    from ..client.calls import value_of

    with waiting(f"waiting for {id}"):
        value = value_of(on_plane(where, lambda plane: plane.outcome(id, timeout=timeout)))
    with _depth_is_named(f"the value of invocation {id!r}"):
        if as_json:
            document({"id": id, "state": "succeeded", "value": jsonable(value)})
        else:
            say(value_text(value))


@contextmanager
def _depth_is_named(what: str) -> Generator[None]:
    """Raise a clear error for values that are nested deeper than Python can print."""
    try:
        yield
    except RecursionError:
        raise DispatchError(f"{what} is nested too deep to be shown: read it in Python") from None


@inv.command("stream")
@ID
@click.option(
    "--since",
    type=int,
    default=-1,
    metavar="SEQ",
    help="Start after the value with this number.  [default: the first value]",
)
@click.option(
    "--on-restart",
    type=click.Choice(["raise", "continue"]),
    default="raise",
    show_default=True,
    help="If the body is restarted and yields its values again: end with an error, or print the new values too.",
)
@plane_options
@json_flag
def inv_stream(where: Where, id: str, since: int, on_restart: Literal["raise", "continue"], as_json: bool) -> None:
    """Print the values that an invocation yields, as they arrive: one line with the number and the value.

    With --json the output is one array of {"seq", "value"}, written as the values arrive. If the stream ends with an
    error, the last item is that error, and the array is still complete.
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
    """Prints one line for each value."""

    def item(self, seq: int, value: Any) -> None:
        say(f"{seq}\t{value_text(value, one_line=True)}")

    def error(self, exc: Exception) -> None:
        """Print nothing: the command prints the error on stderr."""

    def close(self) -> None:
        """Print nothing: no bracket is open."""


class _ArrayPrinter(_LinePrinter):
    """Prints one JSON array, each item as soon as its value arrives."""

    def __init__(self) -> None:
        self._before = "[\n"

    def item(self, seq: int, value: Any) -> None:
        self._add({"seq": seq, "value": jsonable(value)})

    def error(self, exc: Exception) -> None:
        self._add(error_document(exc))

    def _add(self, item: dict[str, Any]) -> None:
        say(
            f"{self._before}{json.dumps(item, allow_nan=False)}"
        )  # a whole line, so that programs that read lines get it at once
        self._before = ","

    def close(self) -> None:
        say("[]" if self._before == "[\n" else "]")


@inv.command("cancel")
@ID
@click.option("--wait", is_flag=True, help="Return only after the invocation has ended.")
@plane_options
def inv_cancel(where: Where, id: str, wait: bool) -> None:
    """Cancel an invocation and print its state. Always exits 0.

    A queued invocation is killed at once. A running one is cancelled by its worker; if its body succeeds before that,
    it has succeeded.
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
    """Queue an invocation again that is held by a claim without a lease, which would never expire.

    The plane then rejects any later result of that claim.
    """

    async def act(plane: Plane) -> str:
        row = await _row(plane, id)
        if row.state == "running" and row.lease_until is not None:
            raise DispatchError(
                f"invocation {id!r} is held by worker {row.worker!r} under a lease: if that worker is gone, the "
                "invocation returns to its queue by itself; to end it, use `lakeshore inv cancel`"
            )
        if row.state != "running":
            stands = "is queued" if row.state == "queued" else f"ended {row.state}"
            raise DispatchError(f"invocation {id!r} {stands}: nothing holds it, so there is nothing to release")
        return (await plane.release(Fence(id, row.worker, row.attempt))).state

    state = on_plane(where, act)
    say(f"{id} is queued again" if state == "queued" else f"{id} ended {state}")
