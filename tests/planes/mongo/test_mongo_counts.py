"""What each operation asks of MongoDB and of Redis, in round trips: the benchmark counts them, here they are held to the
targets. Numbers of the code, not of the machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARK = Path(__file__).resolve().parents[3] / "benchmarks" / "mongo.py"
BOUND = 110.0  # seconds


def figures(mongo_url: str, redis_url: str, *options: str) -> dict[str, dict[str, Any]]:
    found = subprocess.run(
        [sys.executable, str(BENCHMARK), "--json", *options],
        env=os.environ | {"LAKESHORE_TEST_MONGODB_URL": mongo_url, "LAKESHORE_TEST_REDIS_URL": redis_url},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert list(document) == ["figures"]
    told = {figure["name"]: figure for figure in document["figures"]}
    for figure in told.values():
        assert list(figure) == ["name", "value", "unit", "ratio", "target", "met", "rounds"]
        assert figure["ratio"] is None
    return told


@pytest.fixture(scope="module")
def told(mongo_url: str, redis_url: str) -> dict[str, dict[str, Any]]:
    return figures(mongo_url, redis_url, "--rounds", "1")


def test_everything_is_counted(told: dict[str, dict[str, Any]]) -> None:
    assert list(told) == [
        *("submit-1", "submit-100", "submit-redis-1", "submit-redis-100"),
        *("claim-1", "claim-100", "claim-redis-1", "claim-redis-100"),
        *("ack-1", "ack-100", "ack-redis-1", "ack-redis-100"),
        *("frames-1", "frames-100", "frames-redis-1", "frames-redis-100"),
        *("beat-1", "beat-redis-1"),
        *("await-ended-1", "await-ended-100", "await-1", "await-100"),
        *("queries", "without-index", "claims-sorted-in-memory", "collection-scans"),
    ]
    for name in ("submit-1", "claim-1", "ack-1", "frames-1", "beat-1", "await-1"):
        assert told[name]["value"] >= 1, name
    for name in ("submit-redis-1", "submit-redis-100", "ack-redis-1", "frames-redis-1"):
        assert told[name]["value"] > 0, name  # what is sent to Redis gathers
    assert told["queries"]["value"] > 20


def test_operations_take_no_more_round_trips_than_they_should(told: dict[str, dict[str, Any]]) -> None:
    assert [figure for figure in told.values() if figure["unit"] == "trips" and not figure["met"]] == []


def test_each_query_has_an_index_and_no_claim_is_sorted_in_memory(told: dict[str, dict[str, Any]]) -> None:
    """By MongoDB's own rules. The plans that the server chooses are told, but compatible servers choose worse ones."""
    assert told["without-index"]["met"], told
    assert told["claims-sorted-in-memory"]["met"], told
    assert told["collection-scans"]["target"] is None


def test_on_trio_the_same_is_counted_without_targets(mongo_url: str, redis_url: str) -> None:
    told = figures(mongo_url, redis_url, "--rounds", "1", "--backend", "trio", "--only", "submit")
    assert list(told) == ["submit-1", "submit-100", "submit-redis-1", "submit-redis-100"]
    assert told["submit-1"]["value"] <= 1
    assert told["submit-1"]["target"] is None
