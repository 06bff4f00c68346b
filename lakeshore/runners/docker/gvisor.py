"""Run children in gVisor's sandboxes: in containers whose runtime, under docker or podman, is `runsc`."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Self

from ..options import Option
from .runner import DockerOptions, DockerRunner, options_with_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["GvisorOptions", "GvisorRunner"]

INFO_TIMEOUT = 10.0
"""Seconds within which an engine lists its runtimes. If it takes longer, the worker starts nevertheless."""


def _default_engine() -> str:
    return "podman" if shutil.which("docker") is None and shutil.which("podman") is not None else "docker"


@dataclass(frozen=True, slots=True, kw_only=True)
class GvisorOptions(DockerOptions):
    """The options of the gvisor runner: those of docker, with a default for the runtime."""

    runtime: Annotated[str | None, Option("NAME", "gVisor's runtime, as docker or podman knows it.")] = "runsc"


class GvisorRunner(DockerRunner):
    """A docker runner whose containers have a kernel of their own, and therefore file locks of their own."""

    name = "gvisor"
    shares_locks = False
    options_class = GvisorOptions

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> Self:
        """Make the runner for `--runner-option`.

        Raises:
            ValueError: An option is wrong, or the engine does not have the runtime.
        """
        found = options_with_program(GvisorOptions, cls.name, {"binary": _default_engine(), **options})
        runner = cls(found, environ=environ)
        if found.runtime is not None and not _has_runtime(runner.engine.argv, found.runtime):
            raise ValueError(
                f"the gvisor runner needs docker or podman with the runtime {found.runtime!r}, and {found.binary} does not "
                "have it: install gVisor's runsc and add it to the engine's runtimes, or name another engine or runtime "
                "with --runner-option binary=PATH and runtime=NAME"
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
