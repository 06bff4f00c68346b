"""The environment variables as a frozen record. An empty variable counts as unset."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Settings", "read_settings"]


@dataclass(frozen=True)
class Settings:
    """The settings that the LAKESHORE_* variables give. `repr` shows no secrets."""

    url: str | None
    """The control plane to use in place of the local file (LAKESHORE_URL)."""
    client_token: str | None
    """The bearer token for it (LAKESHORE_CLIENT_TOKEN)."""
    namespace: str | None
    """Whose invocations are visible (LAKESHORE_NAMESPACE); None for `default`, or for the namespace of the token."""
    home: Path
    """The folder of the local plane (LAKESHORE_HOME, by default `~/.lakeshore`)."""
    root: Path | None
    """The folder of the keys of `dls.run` on a worker (LAKESHORE_ROOT); None for the current folder."""
    queue: str
    """The queue of a worker that is started without `--queue` (LAKESHORE_QUEUE, by default `default`)."""
    runtime_policy: str
    """How much the versions of two Pythons may differ: `strict`, `minor` or `off` (LAKESHORE_RUNTIME_POLICY)."""
    mongo: str | None
    """The database of a server that is started without `--mongo` (LAKESHORE_MONGO_URL)."""
    redis: str | None
    """The Redis of a server that is started without `--redis` (LAKESHORE_REDIS_URL)."""

    def __repr__(self) -> str:
        token = "set" if self.client_token else None
        url = self.url and re.sub("//.*@", "//", self.url)  # it may contain a password
        return f"Settings(url={url!r}, client_token={token}, namespace={self.namespace!r}, home={str(self.home)!r})"


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """Read the settings.

    Args:
        environ: The variables; by default those of this process.
    """
    env = os.environ if environ is None else environ

    def get(name: str) -> str | None:
        return env.get(f"LAKESHORE_{name}") or None

    home = get("HOME")
    root = get("ROOT")
    return Settings(
        url=get("URL"),
        client_token=get("CLIENT_TOKEN"),
        namespace=get("NAMESPACE"),
        home=Path(home).expanduser() if home else Path.home() / ".lakeshore",
        root=Path(root).expanduser() if root else None,
        queue=get("QUEUE") or "default",
        runtime_policy=get("RUNTIME_POLICY") or "minor",
        mongo=get("MONGO_URL"),
        redis=get("REDIS_URL"),
    )
