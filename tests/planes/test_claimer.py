"""A worker's claimer on a plane of its own: what it renews before it takes more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
from helpers import wait_until

from dreamlake.lakeshore import Dispatch
from dreamlake.lakeshore.planes.contract.records import RowFilter

if TYPE_CHECKING:
    from dreamlake.lakeshore.planes.contract.operations import Claimed

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("keeps", [True, False])
async def test_what_a_worker_keeps_is_renewed_before_it_is_given_more_after_a_long_wait(keeps: bool) -> None:
    """Its process, or the way to the plane, may have stood still: what it is woken for may be its own lapsed row."""
    async with Dispatch(":memory:") as plane:
        id = await plane.submit("q", b"x")
        (claimed,) = await plane.claim(["q"], "w", lease=0.5, local=False)
        claimer = plane.claimer(["q"], "w", lease=0.5, max_lost=5)
        found: list[Claimed] = []

        async def work() -> None:
            found.extend(await claimer.claim(1, [(id, claimed.attempt)] if keeps else []))

        async def stands() -> tuple[str, int, int]:
            (row,) = await plane.rows(RowFilter(id=id))
            return row.state, row.attempt, row.lost

        async with anyio.create_task_group() as group:
            group.start_soon(work)
            if keeps:
                until = anyio.current_time() + 2.0  # four leases
                while anyio.current_time() < until:
                    assert (await stands())[:2] in [("running", 1), ("queued", 1)]
                    await anyio.sleep(0.05)
                assert found == []
                other = await plane.submit("q", b"x")
                await wait_until(lambda: found, description="another row")
                assert [one.id for one in found] == [other]
            else:
                await wait_until(lambda: found, description="its own row")
                assert [(one.id, one.attempt, one.lost) for one in found] == [(id, 2, 1)]
        claimer.stop_waiting()
