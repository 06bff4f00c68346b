"""The MongoDB plane does what every plane has to do, with a Redis and without.

Small sizes, since the server it is tested on scans: see SIZES.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from mongo_kit import LEAVING, TIMED, fresh_ns

from dreamlake.lakeshore.testing import check_plane

if TYPE_CHECKING:
    from mongo_kit import Place

    from dreamlake.lakeshore import MongoDispatch

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(400)]

SIZES: dict[str, Any] = {"sequences": 4, "length": 25, "crowd": 40, "patience": 90.0}


@pytest.fixture(params=["redis", "alone"])
def either(place: Place, request: pytest.FixtureRequest) -> Place:
    return place if request.param == "redis" else place.without_redis()


async def test_it_passes(either: Place) -> None:
    def fresh() -> MongoDispatch:
        return either.plane(fresh_ns())

    await check_plane(fresh, only=TIMED, **SIZES)


async def test_it_passes_when_callers_leave(place: Place) -> None:
    def fresh() -> MongoDispatch:
        return place.plane(fresh_ns())

    await check_plane(fresh, only=LEAVING, sequences=0, patience=90)
