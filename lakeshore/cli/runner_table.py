"""The runners that `worker start --runner` knows, by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["RUNNERS", "runner_class"]

RUNNERS = {
    "process": ("process.runner", "ProcessRunner"),
    "slurm": ("slurm.runner", "SlurmRunner"),
    "kube": ("kube.runner", "KubeRunner"),
    "docker": ("docker.runner", "DockerRunner"),
    "gvisor": ("docker.gvisor", "GvisorRunner"),
}
"""For each runner its module, in the package `runners`, and its class, which is imported only when it is needed."""


def runner_class(name: str) -> Any:
    """Import and return the class of a runner. Its `options_class` is the dataclass of its options."""
    module, kind = RUNNERS[name]
    return getattr(import_module(f"..runners.{module}", __package__), kind)
