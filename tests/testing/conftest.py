"""A plane in a file, and its queue."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[dls.Dispatch]:
    async with dls.Dispatch(tmp_path / "plane.db") as plane:
        yield plane


@pytest.fixture
def queue(plane: dls.Dispatch) -> dls.Queue:
    return dls.Queue("q", dispatch=plane)
