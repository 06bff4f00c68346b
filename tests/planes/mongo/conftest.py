"""The services, once for each process that runs tests, and a database of its own for each test."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import TYPE_CHECKING

import mongo_services
import pytest
from mongo_kit import Place, absent
from mongo_services import ServiceAbsent, in_database

from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The driver leaves a socket open whose connecting is cancelled, which any of its clients may do when it is closed."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Such a socket is closed here, not in a test of somebody else's."""
    yield
    gc.collect()


@pytest.fixture(scope="session")
def mongo_url() -> Iterator[str]:
    """The address of a MongoDB server."""
    try:
        with mongo_services.mongo_url() as url:
            yield url
    except ServiceAbsent as exc:
        absent(exc)


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The address of a Redis."""
    try:
        with mongo_services.redis_url() as url:
            yield url
    except ServiceAbsent as exc:
        absent(exc)


@pytest.fixture
def mongo_database(mongo_url: str) -> Iterator[str]:
    """The address of an empty database, which goes with the test."""
    name = f"lakeshore-test-{new_id()}"
    yield in_database(mongo_url, name)
    from pymongo import MongoClient

    with MongoClient(mongo_url) as client:
        client.drop_database(name)


@pytest.fixture
def place(mongo_database: str, redis_url: str) -> Place:
    return Place(mongo_database, redis_url)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis counts as gone when it is, and not when this machine has stood still for two seconds."""
    monkeypatch.setattr("dreamlake.lakeshore.planes.mongo.redis_news.ANSWER_TIMEOUT", 30.0)


@pytest.fixture
def impatient_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver looks at a server that has failed it after half a second; here that is made short."""
    monkeypatch.setattr("pymongo.common.MIN_HEARTBEAT_INTERVAL", 0.02)
