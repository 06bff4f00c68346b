"""The HTTP plane does what every plane has to do: over an application in this process, and over a socket to a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from http_kit import Server, served_fresh, server_process
from plane_kit import FakeClock

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.testing import check_plane, leaving
from dreamlake.lakeshore.testing.lab import RULES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path


pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(400)]

NAMESPACES = 60
"""Fresh planes that one server process gives, each a namespace of its own; it serves 64."""


async def test_it_passes_by_a_fake_clock() -> None:
    clock = FakeClock()
    await check_plane(lambda: served_fresh(clock.now), clock=clock, sequences=4, crowd=50, patience=90)


async def test_it_passes_by_the_real_clock() -> None:
    """Without the checks that know no time, but take long."""
    timed = [rule.name for rule in RULES if rule.check.__module__ != leaving.__name__]
    await check_plane(served_fresh, only=timed, sequences=0, crowd=50, patience=90)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[Server]]:
    with server_process(tmp_path / "1.db") as first, server_process(tmp_path / "2.db") as second:
        yield [first, second]
        for server in (first, second):
            assert server.alive, server.err
            assert "Traceback" not in server.err, server.err


async def test_it_passes_over_a_socket(servers: list[Server]) -> None:
    given = 0

    def fresh() -> AbstractAsyncContextManager[dls.HttpDispatch]:
        nonlocal given
        given += 1
        return dls.HttpDispatch(servers[(given - 1) // NAMESPACES].url, namespace=new_id())

    await check_plane(fresh, sequences=1, crowd=50, patience=90)
    assert given > NAMESPACES
