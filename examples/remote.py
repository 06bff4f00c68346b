"""A server, a worker and a producer that share nothing but an address and a token, as on three machines.

    python examples/remote.py

Needs the extra `[server]`. The three processes here are on one machine, so that one command shows it; on three, each
`start` is a command in its own place, and the address is not 127.0.0.1.
"""

# ruff: noqa: TC003 -- an example reads better without a block for type checkers
from __future__ import annotations

import importlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import dreamlake.lakeshore as dls


@dls.udf(queue="numbers")
def divisors(n: int) -> list[int]:
    """Travels by its name: the worker imports this module from the folder that it was started in."""
    return [d for d in range(1, n + 1) if n % d == 0]


@dls.udf(queue="numbers")
def countdown(n: int) -> Iterator[str]:
    """What it yields goes through the server's journal, and can be read from anywhere while it runs."""
    for left in range(n, 0, -1):
        yield f"{left} left, says process {os.getpid()}"


LAKESHORE = [sys.executable, "-m", "dreamlake.lakeshore"]


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as folder:
        # The server keeps a hash of the token; what is printed here, once, is what the others are given.
        tokens = f"{folder}/tokens"
        create = [*LAKESHORE, "token", "create", "--name", "demo", "--role", "worker", "--token-file", tokens]
        token = subprocess.run(create, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
        port = str(free_port())
        url = f"http://127.0.0.1:{port}"
        with (
            start("server", "start", "--port", port, "--db", f"{folder}/plane.db", "--token-file", tokens),
            start("worker", "start", "--queue", "numbers", LAKESHORE_URL=url, LAKESHORE_CLIENT_TOKEN=token),
        ):
            produce(url, token)


@contextmanager
def start(*command: str, **environment: str) -> Iterator[None]:
    process = subprocess.Popen([*LAKESHORE, *command], cwd=Path(__file__).parent, env={**os.environ, **environment})
    try:
        yield
    finally:
        process.terminate()  # it finishes what it does, and ends
        print(f"the {command[0]} ended with code {process.wait(timeout=60)}")


def produce(url: str, token: str) -> None:
    """Submits and waits; that the server is not up yet at first is no different from one that restarts."""
    print(f"the plane is {url}, this is process {os.getpid()}")
    queue = dls.SyncQueue("numbers", dispatch=dls.HttpDispatch(url, token=token))
    ids = {n: queue.submit(dls.thunk(divisors, n)) for n in (60, 97, 360)}
    for n, id in ids.items():
        print(f"{n}: {queue.result(id, timeout=60)}")
    for line in queue.stream(queue.submit(dls.thunk(countdown, 3)), timeout=60):
        print(line)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


if __name__ == "__main__":
    # A function of a script would travel by value, which remote workers refuse; that of a module travels by its name.
    importlib.import_module(Path(__file__).stem).main()
