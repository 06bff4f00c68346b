"""The processes of a benchmark over HTTP: those of `http_roles.py`, and servers among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx
from children import Child, Children

if TYPE_CHECKING:
    from figures import Bench

__all__ = ["Served", "processes", "serve"]


def processes(bench: Bench) -> Children:
    return Children(bench.backend, "http_roles.py")


class Served:
    """A server in a process of its own, with a fresh file."""

    def __init__(self, child: Child, url: str) -> None:
        self.child, self.url = child, url

    def requests(self) -> float:
        """How many requests of the protocol have come to their end."""
        text = httpx.get(f"{self.url}/metrics", trust_env=False).raise_for_status().text
        lines = [line for line in text.splitlines() if line.startswith("lakeshore_request_seconds_count{")]
        return sum(float(line.split()[-1]) for line in lines if 'route="metrics"' not in line)


def serve(bench: Bench, children: Children) -> Served:
    """Start a server and wait until it accepts. RuntimeError with its log when it does not."""
    path = bench.fresh()
    child = children.start("server", path=str(path))
    try:
        return Served(child, child.hear()["url"])
    except RuntimeError as exc:
        log = path.with_name("server.log")
        raise RuntimeError(
            f"the server did not start: {log.read_text()[-2000:] if log.exists() else 'no log'}"
        ) from exc
