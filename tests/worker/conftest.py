"""A plane in a file, its queue, and an empty record of what bodies did at the start of each test."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import worker_bodies

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """Forget what bodies recorded, and let threads go on that a test has left waiting."""
    worker_bodies.forget()
    yield
    worker_bodies.open_gates()


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[dls.Dispatch]:
    async with dls.Dispatch(tmp_path / "plane.db") as plane:
        yield plane


@pytest.fixture
def queue(plane: dls.Dispatch) -> dls.Queue:
    return dls.Queue("q", dispatch=plane)
