"""Runners and launches for the tests of the kube runner: children that are shell scripts, which start at once."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from helpers import wait_until

from dreamlake.lakeshore.daemon.workdir import ChildSettings, Folder
from dreamlake.lakeshore.runners.kube.runner import KubeRunner
from dreamlake.lakeshore.worker.runner import Launch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kube_server import Server

__all__ = ["SLEEPS", "begun", "launch", "make", "running"]

SLEEPS = "trap 'exit 3' TERM; echo began >began; while :; do sleep 0.02; done"


def launch(tmp_path: Path, script: str | None = "exit 0", id: str = "a", attempt: int = 1, **more: Any) -> Launch:
    folder = Folder.take(tmp_path / "work", id, b"")
    assert folder is not None
    environ = {**ChildSettings(folder.path, tmp_path / "root", id).environ(), **more.pop("environ", {})}
    return Launch(id, attempt, folder, environ, script, more.pop("as_user", None))


def make(server: Server, tmp_path: Path, **options: str) -> KubeRunner:
    """A runner with these options, `_` standing for `-`."""
    said = {
        "kubeconfig": str(server.kubeconfig(tmp_path / "kubeconfig")),
        "image": "base:1",
        "claim": "work",
        **options,
    }
    return KubeRunner.from_options({name.replace("_", "-"): value for name, value in said.items()}, {})


async def begun(asked: Launch) -> None:
    """Wait until a script has written that it runs."""
    await wait_until(lambda: (asked.folder.path / "began").exists(), description="the begin of the child")


@asynccontextmanager
async def running(server: Server, tmp_path: Path, **options: str) -> AsyncIterator[KubeRunner]:
    """The same during the block; nothing of it is in the cluster after it."""
    runner = make(server, tmp_path, **options)
    try:
        yield runner
    finally:
        await runner.aclose()
    with server.cluster.changed:
        assert [name for name, job in server.cluster.jobs.items() if "deletionTimestamp" not in job["metadata"]] == []
