"""Modules of a test's own: written to a folder on sys.path, and forgotten afterwards."""

from __future__ import annotations

import importlib
import itertools
import os
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_numbers = itertools.count(1)


class Folder:
    """A folder on sys.path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []

    def environment(self) -> dict[str, str]:
        """The environment of a process that finds this folder, too."""
        paths = [str(self.path), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}

    def write(self, source: str, name: str | None = None) -> str:
        """Write a module and give its name, which no other test uses."""
        if name is None:
            name = f"user_module_{next(_numbers)}"
            self.names.append(name)
        (self.path / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")
        return name

    def load(self, source: str) -> Any:
        """Write a module and import it."""
        return importlib.import_module(self.write(source))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    monkeypatch.syspath_prepend(tmp_path)
    made = Folder(tmp_path)
    yield made
    for name in [name for name in sys.modules if name.partition(".")[0] in made.names]:
        del sys.modules[name]


class FakeUDF:
    """What ship and load know of a UDF."""

    __lakeshore_udf__ = True

    def __init__(self, fn: Any, transport: str = "auto") -> None:
        self.__wrapped__, self.transport = fn, transport

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__wrapped__(*args, **kwargs)


@pytest.fixture
def fake_udf() -> type[FakeUDF]:
    return FakeUDF
