"""Servers, peers and workers for the tests of a module, which end with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from install_peers import VERSIONS
from peer_kit import Peer, Processes, ours, processes, python_of, start_seed_server, start_server

from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(tmp_path_factory.mktemp("processes")) as made:
        yield made


@pytest.fixture(scope="module")
def _installed() -> None:
    """Before a server is started for them."""
    for version in VERSIONS:
        python_of(version)


@pytest.fixture(scope="module", params=["our_server", "stranger"])
def url(_installed: None, started: Processes, request: pytest.FixtureRequest) -> str:
    """Where both sides meet: through a stranger's server, our side does without everything that is not in the text."""
    if request.param == "our_server":
        return start_server(started, started.folder / "server.db").url
    return start_seed_server(started, "--namespaced")


@pytest.fixture(scope="module", params=VERSIONS)
def peer(started: Processes, url: str, request: pytest.FixtureRequest) -> Peer:
    return Peer(request.param, started, url)


@pytest.fixture(scope="module")
def their_queue(peer: Peer) -> Iterator[str]:
    """The name of a queue with one worker, of the peer's."""
    name = f"theirs-{new_id()}"
    worker = peer.work(name)
    yield name
    assert worker.alive, worker.err.read_text()
    worker.end()


@pytest.fixture(scope="module")
def our_queue(peer: Peer) -> Iterator[str]:
    """The name of a queue with one worker, of ours."""
    name = f"ours-{new_id()}"
    worker = peer.started.start(*ours("worker", "start", "--queue", name, "--url", peer.url))
    yield name
    assert worker.alive, worker.err.read_text()
    worker.end()


@pytest.fixture(scope="module", params=["our_queue", "their_queue"])
def queue(peer: Peer, request: pytest.FixtureRequest) -> str:
    """Either of them, anew for each peer."""
    name: str = request.getfixturevalue(request.param)
    return name
