"""What the tests of the MongoDB plane share: the services, a database of its own for each test, planes, and servers."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import pytest
from helpers import wait_until_sync
from mongo_services import Redis, Secantus, ServiceAbsent, port_of, running, through_port
from wire_proxy import CallProxy

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.testing import leaving
from dreamlake.lakeshore.testing.lab import RULES

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http"))  # where http_kit and its bodies lie

from http_kit import LIMIT, Process, Server, environment

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from mongo_services import Service


TIMED = [rule.name for rule in RULES if rule.check.__module__ != leaving.__name__]
LEAVING = [rule.name for rule in RULES if rule.check.__module__ == leaving.__name__]
"""The checks of planes that take thousands of operations each, and all others."""
IMPATIENT = "serverMonitoringMode=poll"
"""An option by which the driver's own watch of a server can be made quick, see `impatient_driver`."""


def absent(exc: ServiceAbsent) -> NoReturn:
    """Skip the test, or let it fail where LAKESHORE_TEST_NO_SKIPS=1 forbids skipping."""
    reason = f"needs {exc}"
    if os.environ.get("LAKESHORE_TEST_NO_SKIPS") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


class Place(NamedTuple):
    """Where the plane of a test lives: a database of its own, and a Redis, which others use too."""

    mongo: str
    redis: str | None

    def plane(self, ns: str = "default") -> dls.MongoDispatch:
        return dls.MongoDispatch(self.mongo, self.redis, ns=ns)

    def without_redis(self) -> Place:
        return self._replace(redis=None)

    @contextmanager
    def proxied(self, kind: Any = "mongodb", *options: str) -> Iterator[tuple[Place, CallProxy]]:
        """The same place through a proxy before its database, or before its Redis."""
        url = self.mongo if kind == "mongodb" else self.redis
        assert url is not None
        with CallProxy(port_of(url), kind) as proxy:
            through = through_port(url, proxy.port, *options)
            yield self._replace(**{"mongo" if kind == "mongodb" else "redis": through}), proxy


class Stored:
    """What a database holds, seen past the plane."""

    def __init__(self, url: str) -> None:
        from pymongo import MongoClient

        self.client = MongoClient[Any](url)
        self.database = self.client.get_default_database()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def counts(self) -> dict[str, int]:
        """Documents by collection, of those collections that have any."""
        names = sorted(self.database.list_collection_names())
        counts = {name: self.database[name].count_documents({}) for name in names}
        return {name: count for name, count in counts.items() if count}

    def chunks(self) -> int:
        return sum(count for name, count in self.counts().items() if name.endswith(".chunks"))


@contextmanager
def own_redis(folder: Path, *options: str) -> Iterator[Service]:
    """A Redis that the test may kill."""
    with _own(Redis, folder, *options) as service:
        yield service


@contextmanager
def own_mongo(folder: Path, *options: str) -> Iterator[Service]:
    """A database server that the test may kill."""
    with _own(Secantus, folder, *options) as service:
        yield service


@contextmanager
def _own(kind: type[Service], folder: Path, *options: str) -> Iterator[Service]:
    service = kind(folder, *options)
    try:
        service.command()
    except ServiceAbsent as exc:
        absent(exc)
    with running(service):
        yield service


class MongoServer(Server):
    """`lakeshore server start` over a database, on a port of its own unless one is given."""

    def __init__(
        self, place: Place, *options: object, port: int = 0, tokens: Path, by_environment: bool = False
    ) -> None:
        named = {"mongo": place.mongo, "redis": place.redis}
        given = {kind: url for kind, url in named.items() if url is not None}
        urls: list[str] = []
        variables: dict[str, str] = {}
        for kind, url in given.items():
            if by_environment:
                variables[f"LAKESHORE_{kind.upper()}_URL"] = url
            else:
                urls += [f"--{kind}", url]
        command = ["server", "start", "--port", port, *urls, "--token-file", tokens, *options]
        Process.__init__(self, "-m", "dreamlake.lakeshore", *command, env=environment(**variables))
        try:
            self.port = int(wait_until_sync(self._started, LIMIT, "the line that a server starts with"))
        except BaseException:
            self.end()
            raise


def fence(claimed: Any, worker: str = "w") -> Fence:
    """The fence of a claim."""
    return Fence(claimed.id, worker, claimed.attempt)


def fresh_ns() -> str:
    return f"ns-{new_id()}"
