"""`lakeshore queue`: list queues, and show one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ..errors import DispatchError
from ..planes.contract.records import Row, RowFilter
from .options import Where, on_plane, plane_options, reading
from .output import document, say, table
from .rows import STATES, listed_row, show_rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..planes.plane import Plane

__all__ = ["queue"]


@click.group()
def queue() -> None:
    """List queues and show their invocations by state."""


@queue.command("list")
@plane_options
@reading
def queue_list(where: Where, as_json: bool) -> None:
    """List the queues that have invocations, with the number in each state."""
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
    """Show one queue: the number of invocations in each state, and those that run now."""

    async def act(plane: Plane) -> tuple[dict[tuple[str, str], int], list[Row]]:
        return await plane.counts(), await plane.rows(RowFilter(queue=name, state="running", limit=1000, body=True))

    counts, running = on_plane(where, act)
    queues = _by_queue(counts)
    if name not in queues:
        there = ", ".join(map(repr, queues)) or "none"
        raise DispatchError(f"no invocation is in a queue {name!r} on this plane; queues with invocations: {there}")
    if as_json:
        document({"name": name, **queues[name], "running_now": [listed_row(row) for row in running]})
        return
    table(["state", "invocations"], list(queues[name].items()))
    if running:
        say("")
        show_rows(running)


def _by_queue(counts: Mapping[tuple[str, str], int]) -> dict[str, dict[str, int]]:
    names = sorted({name for name, _ in counts})
    return {name: {state: counts.get((name, state), 0) for state in STATES} for name in names}
