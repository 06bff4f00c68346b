"""What is said of a plane that does not answer: when, and for how long it is asked again."""

from __future__ import annotations

import socket
import time

import anyio
import pytest
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.outage import Outage

pytestmark = pytest.mark.anyio

SILENT = dls.PlaneUnavailable("no connection")
SAID = "a plane does not answer; an operation is retried for 30 s, a worker's until it succeeds: no connection"
LONG_AGO = -1e9


def nowhere() -> dls.HttpDispatch:
    """A plane at whose address nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return dls.HttpDispatch(f"http://127.0.0.1:{free.getsockname()[1]}")


async def test_a_server_that_never_answered_is_said_soon(caplog: pytest.LogCaptureFixture) -> None:
    async with nowhere() as plane, anyio.create_task_group() as group:
        began = time.monotonic()
        group.start_soon(plane.counts)
        await wait_until(lambda: caplog.messages, description="the line")
        assert time.monotonic() - began < Outage.LOG_AFTER - 1
        assert caplog.messages[0].startswith(
            f"{plane!r} does not answer; an operation is retried for 30 s, a worker's until it succeeds: no answer to "
        )
        group.cancel_scope.cancel()


async def test_it_is_said_once_and_its_end_too(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("a plane", remote=True)
    for _ in range(2):
        outage.record_failure(SILENT, 30.0, LONG_AGO)
    assert caplog.messages == [SAID]
    outage.record_answer()
    assert caplog.messages == [SAID, "a plane answers, after 0 s"]


async def test_one_that_starts_meanwhile_is_nothing_to_talk_about(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("a plane", remote=True)
    outage.record_failure(SILENT, 30.0, time.monotonic())
    outage.record_answer()
    assert caplog.messages == []


async def test_one_that_has_answered_gets_longer(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    outage = Outage("a plane", remote=True)
    outage.record_answer()
    outage.record_failure(SILENT, 30.0, LONG_AGO)
    assert caplog.messages == []
    monkeypatch.setattr(Outage, "LOG_AFTER", 0.0)
    outage.record_failure(SILENT, 30.0, LONG_AGO)
    assert caplog.messages == [SAID]
    outage.record_answer()
    assert caplog.messages[1:] == ["a plane answers again, after 0 s"]


@pytest.mark.parametrize(("patience", "far"), [(3.0, True), (30.0, False)])
async def test_nothing_is_said_soon_where_the_error_comes_soon_or_the_plane_is_here(
    caplog: pytest.LogCaptureFixture, patience: float, far: bool
) -> None:
    Outage("a plane", remote=far).record_failure(SILENT, patience, LONG_AGO)
    assert caplog.messages == []


async def test_what_asks_nothing_of_a_server_does_not_end_its_outage(caplog: pytest.LogCaptureFixture) -> None:
    async with nowhere() as plane:
        plane._outage.record_failure(SILENT, 30.0, LONG_AGO)
        assert await plane.cancel_on_close() == set()
        assert len(caplog.messages) == 1
        assert plane._outage._since
