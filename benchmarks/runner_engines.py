"""Each engine without us: `python3 -c CODE` inside it, with the mounts and variables that children get there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, TypeAlias

from container_kit import pairs

from dreamlake.lakeshore.runners.attached_client import read_mounts

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["IMPORTS", "Bare", "bare_containers", "bare_process", "bare_slurm"]

Bare: TypeAlias = "Callable[[str], None]"
"""Runs a line of Python to its end."""

IMPORTS = "import os, dreamlake.lakeshore.daemon.entry, conformance_bodies; os._exit(0)"
"""What a child imports before its body runs, the body's own module too; as a child does, it leaves without taking all that
apart again."""


def _run(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> None:
    done = subprocess.run(argv, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with exit code {done.returncode}:\n{done.stdout}{done.stderr}")


def bare_process(folder: Path, arguments: list[str]) -> Bare:
    """A process of this Python, spawned."""
    environ = dict(os.environ) | dict(one.split("=", 1) for one in arguments if one.startswith("PYTHON"))
    return lambda code: _run([sys.executable, "-P", "-c", code], environ)


def bare_containers(folder: Path, arguments: list[str]) -> Bare:
    """`docker run --rm`, or that of podman."""
    options, variables = pairs(arguments)
    given = [word for word in options.get("arg", "").split(",") if word]
    argv = [
        *(options["binary"], *options["global-arg"].split(","), "run", "--rm", "--log-driver=none", *given),
        *(f"--{name}={options[name]}" for name in ("network", "runtime") if name in options),
        *(f"--volume={one.source}:{one.target}:ro" for one in read_mounts("mount", options["mount"])),
        *(f"--env={one}" for one in variables),
        options["image"],
    ]
    return lambda code: _run([*argv, "python3", "-P", "-c", code])


def bare_slurm(folder: Path, arguments: list[str]) -> Bare:
    """`sbatch --wait` of a script."""
    options, variables = pairs(arguments)
    environ = dict(os.environ) | dict(one.split("=", 1) for one in variables) | {"SLURM_CONF": options["conf"]}

    def start(code: str) -> None:
        script = f'exec {sys.executable} -P -c "{code}"'
        _run(["sbatch", "--quiet", "--wait", f"--output={folder}/out", "--wrap", script], environ)

    return start
