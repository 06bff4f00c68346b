"""The numbers of a server: what they count, and that nothing a client makes up becomes a label."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.contract.records import Failure
from dreamlake.lakeshore.server import metrics
from dreamlake.lakeshore.server.metrics import OTHER, Metrics

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[dls.Dispatch]:
    async with dls.Dispatch(tmp_path / "plane.db") as plane:
        yield plane


async def samples(counted: Metrics, plane: dls.Dispatch | None = None) -> Samples:
    text = (await counted.render(plane)).decode()
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def of(found: Samples, name: str, **labels: str) -> float | None:
    return found.get((name, frozenset(labels.items())))


async def test_invocations_by_queue_and_state(plane: dls.Dispatch) -> None:
    counted = Metrics(plane)
    ids = [await plane.submit(queue, b"body") for queue in ("a", "a", "b")]
    (claimed,) = await plane.claim(["a"], "w")
    await plane.finish(Fence(claimed.id, "w", 1), "failed", error=Failure("ValueError", "no"))
    found = await samples(counted)
    assert of(found, "lakeshore_invocations", queue="a", state="queued") == 1
    assert of(found, "lakeshore_invocations", queue="a", state="failed") == 1
    assert of(found, "lakeshore_invocations", queue="b", state="queued") == 1
    assert sum(name == "lakeshore_invocations" for name, _ in found) == 3
    await plane.cancel(ids[2])
    found = await samples(counted)
    assert of(found, "lakeshore_invocations", queue="b", state="queued") is None  # not a number of before
    assert of(found, "lakeshore_invocations", queue="b", state="killed") == 1


async def test_the_age_of_the_oldest_that_can_be_claimed(tmp_path: Path) -> None:
    now = 1000.0
    async with dls.Dispatch(tmp_path / "clock.db", clock=lambda: now) as plane:
        counted = Metrics(plane)
        await plane.submit("a", b"body")
        now += 40
        await plane.submit("a", b"body")
        await plane.submit("b", b"body")
        now += 2
        found = await samples(counted)
        assert of(found, "lakeshore_oldest_ready_seconds", queue="a") == pytest.approx(42)
        assert of(found, "lakeshore_oldest_ready_seconds", queue="b") == pytest.approx(2)
        await plane.claim(["b"], "w", lease=None)
        assert of(await samples(counted), "lakeshore_oldest_ready_seconds", queue="b") is None


async def test_another_namespace_is_shown_by_its_own_plane(plane: dls.Dispatch, tmp_path: Path) -> None:
    counted = Metrics(plane)
    await plane.submit("theirs", b"body")
    async with dls.Dispatch(tmp_path / "plane.db", ns="team") as team:
        await team.submit("ours", b"body")
        found = await samples(counted, team)
    assert of(found, "lakeshore_invocations", queue="ours", state="queued") == 1
    assert of(found, "lakeshore_invocations", queue="theirs", state="queued") is None


async def test_requests_by_route_method_and_status(plane: dls.Dispatch) -> None:
    counted = Metrics(plane)
    for seconds in (0.002, 0.3, 400.0):
        counted.observe("poll", "POST", 200, seconds)
    counted.observe("poll", "POST", 401, 0.001)
    found = await samples(counted)
    poll = {"route": "poll", "method": "POST", "status": "200"}
    assert of(found, "lakeshore_request_seconds_count", **poll) == 3
    assert of(found, "lakeshore_request_seconds_sum", **poll) == pytest.approx(400.302)
    assert of(found, "lakeshore_request_seconds_bucket", **poll, le="0.0025") == 1
    assert of(found, "lakeshore_request_seconds_bucket", **poll, le="300.0") == 2
    assert of(found, "lakeshore_request_seconds_count", **poll | {"status": "401"}) == 1


async def test_what_clients_make_up_is_one_label(plane: dls.Dispatch) -> None:
    counted = Metrics(plane)
    for number in range(50):
        counted.observe(f"/v1/daemon/{number}", f"BREW{number}", 1000 + number, 0.1)
    counted.observe("submit", "BREW", 405, 0.1)
    found = await samples(counted)
    made_up = {"route": OTHER, "method": OTHER, "status": "0"}
    assert of(found, "lakeshore_request_seconds_count", **made_up) == 50
    assert of(found, "lakeshore_request_seconds_count", route="submit", method=OTHER, status="405") == 1
    assert sum(name == "lakeshore_request_seconds_count" for name, _ in found) == 2
    assert not counted._series  # nor is it kept anywhere else


async def test_claims_and_readers_of_streams(plane: dls.Dispatch) -> None:
    counted = Metrics(plane)
    counted.claimed(0.004)
    with counted.stream():
        with suppress(ZeroDivisionError), counted.stream():
            assert of(await samples(counted), "lakeshore_stream_readers") == 2
            1 / 0  # noqa: B018
        assert of(await samples(counted), "lakeshore_stream_readers") == 1
    found = await samples(counted)
    assert of(found, "lakeshore_stream_readers") == 0
    assert of(found, "lakeshore_claim_seconds_count") == 1
    assert of(found, "lakeshore_claim_seconds_bucket", le="0.005") == 1


async def test_names_of_queues_are_escaped_and_bounded(plane: dls.Dispatch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_QUEUES", 2)
    odd = 'a"b\\c\nd'
    for queue, count in ((odd, 3), ("x" * 10_000, 2), ("small", 1), ("little", 1)):
        for _ in range(count):
            await plane.submit(queue, b"body")
    found = await samples(Metrics(plane))
    assert {dict(labels)["queue"]: value for (name, labels), value in found.items() if "invocations" in name} == {
        odd: 3,
        "x" * metrics.MAX_QUEUE_NAME_LENGTH: 2,
        OTHER: 2,
    }
    assert {dict(labels)["queue"] for name, labels in found if "oldest" in name} == {
        odd,
        "x" * metrics.MAX_QUEUE_NAME_LENGTH,
        OTHER,
    }


async def test_the_oldest_of_several_queues_under_one_label(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "MAX_QUEUES", 0)
    now = 1000.0
    async with dls.Dispatch(tmp_path / "clock.db", clock=lambda: now) as plane:
        for queue in ("b", "a", "c"):
            await plane.submit(queue, b"body")
            now += 10
        assert of(await samples(Metrics(plane)), "lakeshore_oldest_ready_seconds", queue=OTHER) == pytest.approx(30)


async def test_every_name_is_ours_and_no_id_is_in_it(plane: dls.Dispatch) -> None:
    counted = Metrics(plane)
    id = await plane.submit("q", b"body", key="the-key")
    await plane.claim(["q"], "the-worker")
    text = (await counted.render()).decode()
    assert all(line.startswith(("lakeshore_", "# HELP lakeshore_", "# TYPE lakeshore_")) for line in text.splitlines())
    for secret in (id, "the-key", "the-worker"):
        assert secret not in text


async def test_those_who_ask_at_once_get_the_same(plane: dls.Dispatch) -> None:
    counted = Metrics(plane)
    for _ in range(3):
        await plane.submit("q", b"body")
    got: list[float | None] = []

    async def ask() -> None:
        got.append(of(await samples(counted), "lakeshore_invocations", queue="q", state="queued"))

    async with anyio.create_task_group() as group:
        for _ in range(8):
            group.start_soon(ask)
    assert got == [3] * 8


async def test_two_servers_of_a_process_count_apart(plane: dls.Dispatch) -> None:
    one, other = Metrics(plane), Metrics(plane)
    one.observe("submit", "POST", 200, 0.1)
    assert (
        of(await samples(other), "lakeshore_request_seconds_count", route="submit", method="POST", status="200") is None
    )
