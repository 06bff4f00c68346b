"""Two servers over one MongoDB: a worker at one of them, the caller at the other.

    python examples/fleet.py mongodb://127.0.0.1/lakeshore redis://127.0.0.1/0

Needs the extras `[mongo]` and `[server]`, a MongoDB and a Redis. Any number of servers share the two; if one server ends,
its workers and callers reach the same queues through another one. A load balancer in front of them gives them one address.
"""

# ruff: noqa: TC003 -- an example reads better without a block for type checkers
from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import dreamlake.lakeshore as dls


@dls.udf(queue="fleet")
def double(n: int) -> int:
    return 2 * n


@contextmanager
def start(*command: str, **environment: str) -> Iterator[None]:
    line = [sys.executable, "-m", "dreamlake.lakeshore", *command]
    process = subprocess.Popen(line, cwd=Path(__file__).parent, env={**os.environ, **environment})
    try:
        yield
    finally:
        process.terminate()
        print(f"the {command[0]} ended with code {process.wait(timeout=60)}")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(mongo: str, redis: str) -> None:
    # An address may hold a password: the environment keeps it out of the list of processes.
    services = {"LAKESHORE_MONGO_URL": mongo, "LAKESHORE_REDIS_URL": redis}
    ports = [str(free_port()), str(free_port())]
    first, second = (f"http://127.0.0.1:{port}" for port in ports)
    with ExitStack() as running:
        for port in ports:
            running.enter_context(start("server", "start", "--port", port, **services))
        running.enter_context(start("worker", "start", "--queue", "fleet", LAKESHORE_URL=first))
        queue = dls.SyncQueue("fleet", dispatch=dls.HttpDispatch(second))
        ids = [queue.submit(dls.thunk(double, n)) for n in range(5)]
        print("through two servers:", [queue.result(id, timeout=60) for id in ids])


if __name__ == "__main__":
    importlib.import_module(Path(__file__).stem).main(*sys.argv[1:])
