"""The environment, read once into a frozen record. An empty variable counts as unset."""

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
    """What the LAKESHORE_* variables say.

    url: the control plane to use in place of the local file (LAKESHORE_URL).
    client_token: its bearer token (LAKESHORE_CLIENT_TOKEN); never shown by repr.
    namespace: whose invocations are seen (LAKESHORE_NAMESPACE; None: those of `default`, or those that the token is for).
    home: the folder of the local plane (LAKESHORE_HOME, default `~/.lakeshore`).
    root: where workers resolve the keys of `dls.run` (LAKESHORE_ROOT; None: the current folder).
    queue: the queue of a worker started without `--queue` (LAKESHORE_QUEUE).
    runtime_policy: `strict`, `minor` or `off` (LAKESHORE_RUNTIME_POLICY).
    mongo, redis: what a server started without `--mongo` and `--redis` serves (LAKESHORE_MONGO_URL, LAKESHORE_REDIS_URL);
    their passwords never shown by repr.
    """

    url: str | None
    client_token: str | None
    namespace: str | None
    home: Path
    root: Path | None
    queue: str
    runtime_policy: str
    mongo: str | None
    redis: str | None

    def __repr__(self) -> str:
        token = "set" if self.client_token else None
        url = self.url and re.sub("//.*@", "//", self.url)  # a password may stand there
        return f"Settings(url={url!r}, client_token={token}, namespace={self.namespace!r}, home={str(self.home)!r})"


def read_settings(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that `environ` (default: this process's environment) gives."""
    env = os.environ if environ is None else environ

    def get(name: str) -> str | None:
        return env.get(f"LAKESHORE_{name}") or None

    home, root = get("HOME"), get("ROOT")
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
