"""A plane in a file, its queue, and bodies that begin each test without a memory."""

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
    """Whatever a test left waiting in a thread goes on, and what bodies noted is gone."""
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
