"""The SQLite plane does what every plane has to do: in memory and in a file, by a clock that stands still and by ours."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING

import anyio
import matrix
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plane_kit import FakeClock

from dreamlake.lakeshore.planes.sqlite.store import Dispatch, SqliteStore
from dreamlake.lakeshore.testing import check_plane
from dreamlake.lakeshore.testing.sequences import Sequence

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from random import Random

    from dreamlake.lakeshore.planes.plane import Plane

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Path | str]:
    """Where the next fresh plane is."""
    numbers = count()
    return lambda: ":memory:" if request.param == "memory" else tmp_path / f"{next(numbers)}.db"


async def holder_of_dispatch(plane: Plane) -> str:
    store = (await plane._engines.get()).store
    assert isinstance(store, SqliteStore)
    return store._liveness.holder


@pytest.mark.timeout(400)
async def test_it_passes_by_a_fake_clock(place: Callable[[], Path | str]) -> None:
    clock = FakeClock()
    await check_plane(
        lambda: Dispatch(place(), clock=clock.now),
        clock=clock,
        holder=holder_of_dispatch,
        sequences=matrix.tier().sequences,
        patience=90,
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_it_passes_by_the_real_clock(place: Callable[[], Path | str]) -> None:
    await check_plane(lambda: Dispatch(place()), holder=holder_of_dispatch, sequences=30, patience=90)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param("counts_equal_the_rows", id="R18"),
        pytest.param("of_two_reaps_one_changes_the_row", id="R23"),
        pytest.param("a_stale_attempt_writes_no_frame", id="R37"),
        pytest.param("many_waiters_and_a_claimer_share_one_loop", id="R88"),
        pytest.param("a_claimer_who_leaves_leaves_no_row_running", id="R90-claim"),
        pytest.param("an_operation_that_was_left_can_be_repeated", id="R90-others"),
        pytest.param("claims_go_by_priority_then_by_submit_order", id="R99"),
        pytest.param("concurrent_submits_with_one_key_are_one_invocation", id="R102"),
        pytest.param("a_submit_is_idempotent_by_key", id="R103"),
    ],
)
async def test_reported_fault(place: Callable[[], Path | str], check: str) -> None:
    await check_plane(lambda: Dispatch(place()), only=[check], sequences=0)


@given(random=st.randoms(use_true_random=False), length=st.integers(1, 40))
@settings(max_examples=matrix.examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_sequence_of_operations_is_answered_as_by_the_model(
    place: Callable[[], Path | str], random: Random, length: int
) -> None:
    async def run() -> None:
        clock = FakeClock()
        async with Dispatch(place(), clock=clock.now) as plane:
            await Sequence(plane, random, clock, await holder_of_dispatch(plane)).run(length)

    anyio.run(run)
