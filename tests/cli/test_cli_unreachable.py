"""Workers whose plane is out of reach, or no longer theirs: what they say, and how they end."""

from __future__ import annotations

import socket
from datetime import datetime

from cli_kit import Process


def at(line: str) -> datetime:
    return datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f")


def test_a_worker_that_reaches_nothing_says_so_at_once_and_goes_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with Process("worker", "start", "--queue", "q", "--url", url) as process:
        process.says("for as long as it takes: ")
        started, said = process.err.splitlines()[:2]
        assert (
            f" WARNING HttpDispatch({url!r}) does not answer; it is asked again for 30 s, by a worker for as long as it "
            "takes: no answer to POST /daemon/poll at "
        ) in said
        assert (at(said) - at(started)).total_seconds() < 4  # where one that had answered before gets five
        process.signal()
        ran = process.ends()
    assert ran.code == 0
    assert "Traceback" not in ran.err
