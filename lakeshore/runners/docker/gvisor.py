"""Run children in gVisor's sandboxes: in containers whose runtime, under docker or podman, is `runsc`."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

from .runner import DockerRunner

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["GvisorRunner"]

RUNTIME = "runsc"
INFO_TIMEOUT = 10.0
"""Seconds within which an engine lists its runtimes. One that takes longer is not asked again."""


class GvisorRunner(DockerRunner):
    """A docker runner whose containers have a kernel of their own, and therefore file locks of their own."""

    name = "gvisor"
    shares_locks = False

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> GvisorRunner:
        """Make the runner for `--runner-option`: the options of docker, with `runtime` set to runsc unless given.

        Raises:
            ValueError: An option is wrong, or the engine does not have the runtime.
        """
        runtime = options.get("runtime") or RUNTIME
        default = "docker" if shutil.which("docker") or not shutil.which("podman") else "podman"
        binary = options.get("binary") or default
        runner = super().from_options({**options, "runtime": runtime, "binary": binary}, environ)
        assert isinstance(runner, GvisorRunner)
        if not _has_runtime(runner.engine.argv, runtime):
            raise ValueError(
                f"the gvisor runner needs docker or podman with the runtime {runtime!r}, and {binary} does not have it: "
                "install gVisor's runsc and add it to the engine's runtimes, or name another engine or runtime with "
                "--runner-option binary=PATH and runtime=NAME"
            )
        return runner


def _has_runtime(engine: Sequence[str], runtime: str) -> bool:
    """Return whether the engine has the runtime; True also while the engine does not answer, since it may come back."""
    try:
        docker = _info(engine, "--format={{json .Runtimes}}")
        if docker.returncode == 0:
            known: Any = json.loads(docker.stdout)
            return not isinstance(known, dict) or runtime in known
        if _info(engine).returncode != 0:
            return True
        return _info(engine, f"--runtime={runtime}").returncode == 0  # podman, which also takes a path
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return True


def _info(engine: Sequence[str], *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*engine, "info", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=INFO_TIMEOUT,
        check=False,
    )
