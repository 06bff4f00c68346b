"""A plane in a file, its queue, and a look for processes that a test left behind."""

from __future__ import annotations

from typing import TYPE_CHECKING

import child_kit
import pytest
from child_kit import holders
from helpers import wait_until_sync

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture(scope="module", params=["cold", "warm"])
def each_start(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children are started, and forked."""
    child_kit.WARM[0] = request.param == "warm"
    yield
    child_kit.WARM[0] = False


@pytest.fixture(autouse=True)
def _no_process_left(tmp_path: Path) -> Iterator[None]:
    yield
    wait_until_sync(lambda: not holders(tmp_path), 30.0, f"the end of {holders(tmp_path)}, which the test left")


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[dls.Dispatch]:
    async with dls.Dispatch(tmp_path / "plane.db") as plane:
        yield plane


@pytest.fixture
def queue(plane: dls.Dispatch) -> dls.Queue:
    return dls.Queue("q", dispatch=plane)
