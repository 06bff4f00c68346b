"""A plane in a file, and its queue `q` for blocking callers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from cli_kit import Work

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.client import default_plane
from dreamlake.lakeshore.concurrency.portal import portal

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def _own_default_plane(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker sets the default plane of its process, which here is that of the tests."""
    monkeypatch.setattr(default_plane, "_default", {})


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "plane.db"


@pytest.fixture
def plane(db: Path) -> Iterator[dls.Dispatch]:
    plane = dls.Dispatch(db)
    yield plane
    portal().call(plane.aclose)


@pytest.fixture
def q(plane: dls.Dispatch) -> dls.SyncQueue:
    return dls.SyncQueue("q", dispatch=plane)


@pytest.fixture
def work(db: Path) -> Work:
    return Work(db)
