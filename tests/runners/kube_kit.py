"""The kube runner against an API server of the tests' own, as an engine like the others."""

from __future__ import annotations

import secrets
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from engine_kit import HERE
from kube_server import Server, serving

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_kit import Engine

__all__ = ["KUBE", "arguments"]


def arguments(kubeconfig: Path) -> list[str]:
    """What has a worker's children be Jobs there, with the modules of these tests importable."""
    options = {
        "kubeconfig": str(kubeconfig),
        "image": "registry.example/base:1",
        "claim": "work",
        "root-claim": "root",
        "python": sys.executable,
    }
    told = [f"PYTHONPATH={HERE}", "PYTHONDONTWRITEBYTECODE=1", "PYTHONWARNINGS=error"]
    words = [word for name, value in options.items() for word in ("--runner-option", f"{name}={value}")]
    return ["--runner", "kube", *words, *(word for one in told for word in ("--env", one))]


class _Kube:
    name = "kube"
    server: Server | None = None

    def missing(self) -> str | None:
        return None

    @contextmanager
    def up(self) -> Iterator[list[str]]:
        with TemporaryDirectory(prefix="lakeshore-kube-") as folder, serving() as self.server:
            yield arguments(self.server.kubeconfig(Path(folder, f"config-{secrets.token_hex(4)}")))
        self.server = None

    def kill_child(self, id: str) -> None:
        assert self.server is not None
        pod = self.server.cluster.running(id)
        if pod is not None:
            self.server.cluster.kill(pod)

    def leftovers(self) -> list[str]:
        assert self.server is not None
        cluster = self.server.cluster
        with cluster.changed:
            return [f"Job {name}" for name in cluster.jobs] + [f"pod {name}" for name in cluster.pods]


KUBE: Engine = _Kube()
