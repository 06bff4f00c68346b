"""Processes that end with their test, and servers that the tests of a module share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import http_bodies
import pytest
from http_kit import Processes, Server, server_process

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    """What bodies noted in this process is gone, and what they wait for has come."""
    http_bodies.forget()
    yield
    http_bodies.open_gates()


@pytest.fixture
def started() -> Iterator[Processes]:
    made = Processes()
    try:
        yield made
    finally:
        made.end()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server process over an empty file, shared by the tests of a module: each takes queues of its own."""
    with server_process(tmp_path_factory.mktemp("server") / "plane.db") as made:
        yield made
        assert made.alive, made.err
        assert "Traceback" not in made.err, made.err
