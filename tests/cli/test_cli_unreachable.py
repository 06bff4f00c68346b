"""Workers whose plane is out of reach, or no longer theirs: what they say, and how they end."""

from __future__ import annotations

import re
import socket
from contextlib import ExitStack
from datetime import datetime
from typing import TYPE_CHECKING

import cli_jobs
from cli_kit import LIMIT, Process, appears, environment
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import portal
from dreamlake.lakeshore.server.tokens import create_token, revoke_token

if TYPE_CHECKING:
    from pathlib import Path


def at(line: str) -> datetime:
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")


def test_a_worker_that_reaches_nothing_says_so_at_once_and_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Process("worker", "start", "--queue", "q", "--url", url) as process:
        process.says("until it succeeds: ")
        started, said = process.err.splitlines()[:2]
        assert (
            f" WARNING HttpDispatch({url!r}) does not answer; an operation is retried for 30 s, a worker's until it "
            "succeeds: no answer to POST /daemon/poll at "
        ) in said
        assert (at(said) - at(started)).total_seconds() < 4  # where one that had answered before gets five
        process.signal()
        ran = process.ends()
    assert ran.code == 0
    assert "Traceback" not in ran.err


def test_a_worker_whose_token_is_revoked_ends_in_order_although_its_bodies_hang(tmp_path: Path) -> None:
    """Its only slot is taken: nothing but its heartbeats is refused."""
    env, token, begun = environment(LAKESHORE_HOME=str(tmp_path)), tmp_path / "token", tmp_path / "begun"
    key = create_token(tmp_path / "tokens", "app", "worker", "default")
    token.touch(mode=0o600)
    token.write_text(key)
    with ExitStack() as stack:
        server = stack.enter_context(Process("server", "start", "--port", 0, env=env))
        (port,) = wait_until_sync(lambda: re.findall(r" on http://[^ ,]*:(\d+)", server.err), LIMIT, "the server")
        url = f"http://127.0.0.1:{port}"
        options = ("--url", url, "--token-file", token, "--queue", "q", "--lease", 2, "--grace", 1)
        worker = stack.enter_context(Process("worker", "start", *options, "--allow-module", "cli_jobs"))
        plane = dls.HttpDispatch(url, token=key)
        dls.SyncQueue("q", dispatch=plane).submit(dls.thunk(cli_jobs.hang, str(begun)))
        portal().call(plane.aclose)
        appears(begun)
        assert revoke_token(tmp_path / "tokens", "app")
        ran = worker.ends()
    assert ran.code == 4
    assert "Traceback" not in ran.err
    assert len(re.findall(r"WARNING the plane refuses the heartbeats of worker \S+: expected a token", ran.err)) == 1
    *_, said, cut = ran.err.splitlines()
    assert re.match(
        r"lakeshore: expected a token, `Authorization: Bearer \.\.\.`, got one that is not known here", said
    )
    assert cut.endswith("1 bodies still run in threads, which cannot be stopped; the process ends without them")
