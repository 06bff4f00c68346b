"""Choose the environment variables of children."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..daemon.workdir import MODULES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["child_environ"]

INHERITED = (
    "PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TEMP TMP "
    "PYTHONPATH PYTHONUTF8 PYTHONHASHSEED PYTHONWARNINGS PYTHONUNBUFFERED PYTHONDONTWRITEBYTECODE "
    "VIRTUAL_ENV CONDA_PREFIX LD_LIBRARY_PATH DYLD_LIBRARY_PATH SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE "
    "OMP_NUM_THREADS MKL_NUM_THREADS OPENBLAS_NUM_THREADS CUDA_HOME CUDA_PATH CUDA_VISIBLE_DEVICES "
    "CUDA_DEVICE_ORDER LAKESHORE_HOME LAKESHORE_URL LAKESHORE_NAMESPACE LAKESHORE_QUEUE"
).split()
"""The variables of this process that a child inherits. Tokens are not among them."""
INHERITED_PREFIXES = ("LC_", "XDG_", "NVIDIA_", "NCCL_")
INHERITED_ELSEWHERE = ("LANG", "LANGUAGE", "TZ", *(name for name in INHERITED if name.startswith("LAKESHORE_")))
"""The same for a child that has another file system."""
INHERITED_PREFIXES_ELSEWHERE = ("LC_",)


def child_environ(
    more: Iterable[str] = (), environ: Mapping[str, str] | None = None, *, elsewhere: bool = False
) -> dict[str, str]:
    """Return the environment of children.

    A child imports modules from where this process imports them, first of all from its current folder.

    Args:
        more: NAME for another variable to inherit, NAME=VALUE for one to set.
        environ: The environment to inherit from; by default that of this process.
        elsewhere: Whether children have a file system of their own. They keep the paths and programs that they have there,
            and import from the current folder if it is mounted.

    Raises:
        ValueError: An item of `more` is neither NAME nor NAME=VALUE.
    """
    env = dict(os.environ) if environ is None else environ
    names = INHERITED_ELSEWHERE if elsewhere else INHERITED
    prefixes = INHERITED_PREFIXES_ELSEWHERE if elsewhere else INHERITED_PREFIXES
    found = {name: value for name, value in env.items() if name in names or name.startswith(prefixes)}
    for item in more:
        name, has_value, value = item.partition("=")
        if not name or "\0" in item:
            raise ValueError(f"expected NAME or NAME=VALUE for the environment of children, got {item!r}")
        if has_value:
            found[name] = value
        elif name in env:
            found[name] = env[name]
    if elsewhere:
        found[MODULES] = os.getcwd()
    else:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), found.get("PYTHONPATH")]))
    return found
