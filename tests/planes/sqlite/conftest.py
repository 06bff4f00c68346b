"""Fixtures of the plane in a SQLite file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dreamlake.lakeshore.planes.sqlite.store import SqliteStore

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "plane.db"


@pytest.fixture
def no_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The watcher reads so seldom that an engine that wakes up was woken by its bell."""
    monkeypatch.setattr(SqliteStore, "net", 60.0)
