"""`python -m dreamlake.lakeshore.runners.kube.guard SETTINGS`: delete the Jobs of a worker that is gone.

A worker's guard becomes this program when its worker has died, on the same machine. When that machine itself is gone, the
next worker on a machine of the same name, with the same claim, deletes the Jobs (`delete_orphans`), and in any case the
next attempt of an invocation.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ...daemon.workdir import LOCK
from ...errors import LakeshoreError
from .api import KubeApi, keep_trying
from .config import find_cluster
from .json_fields import meta, part
from .manifest import FOLDER, JOB, WORKER

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["GuardSettings", "delete_orphans", "end_all"]

_MODULE = "dreamlake.lakeshore.runners.kube.guard"
API_TIMEOUT = 3600.0
"""Seconds that the API server may be unavailable."""
QUIET_TIME = 2.0
"""Seconds without a Job after which there will be none: the last request of the worker has arrived."""
FORCE_AFTER = 10.0
"""Seconds past its grace after which a pod is removed, even if its node does not report its end."""
POLL_INTERVAL = 0.25
CREDENTIALS_TIMEOUT = 60.0
"""Seconds for which credentials may be missing or rejected, as they may while something renews them."""
CREDENTIALS_INTERVAL = 1.0
"""Seconds between two attempts meanwhile."""


@dataclass(frozen=True, slots=True)
class GuardSettings:
    """Which Jobs to delete. No secret is among the settings: credentials are looked for again."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    worker: str
    """The label of the Jobs."""
    grace: int
    """Seconds that their pods have from SIGTERM to SIGKILL."""

    def command(self) -> list[str]:
        """Return the command that deletes them."""
        return [sys.executable, "-P", "-m", _MODULE, json.dumps(asdict(self))]


async def end_all(api: KubeApi, worker: str, grace: int) -> None:
    """Delete the Jobs of a worker and their pods, and wait until there are none."""
    own = {WORKER: worker}
    began = anyio.current_time()
    last_seen = began
    while True:
        jobs = await keep_trying(partial(api.jobs, own), API_TIMEOUT)
        now = anyio.current_time()
        late = now - began > grace + FORCE_AFTER
        if jobs:
            last_seen = now
            for job in jobs:
                await _end_job(api, job, late)
        else:
            pods, _ = await keep_trying(partial(api.pods, own), API_TIMEOUT)  # their Jobs are gone
            for pod in pods:
                last_seen = now
                if late or not meta(pod, "deletionTimestamp"):
                    await keep_trying(partial(api.delete_pod, meta(pod, "name"), 0 if late else grace), API_TIMEOUT)
        if now - last_seen >= QUIET_TIME:
            return
        await anyio.sleep(POLL_INTERVAL)


async def _end_job(api: KubeApi, job: Mapping[str, object], late: bool) -> None:
    """Delete a Job; where that takes too long, remove its pods."""
    name = meta(job, "name")
    if not meta(job, "deletionTimestamp"):
        await keep_trying(partial(api.delete_job, name), API_TIMEOUT)
    elif late:
        pods, _ = await keep_trying(partial(api.pods, {JOB: name}), API_TIMEOUT)
        for pod in pods:
            await keep_trying(partial(api.delete_pod, meta(pod, "name"), 0), API_TIMEOUT)


async def delete_orphans(api: KubeApi, place: Mapping[str, str], worker: str) -> list[str]:
    """Delete the Jobs of workers on this machine that are gone. A living worker holds the folder of each of its Jobs.

    Args:
        api: The API server.
        place: The labels of Jobs of workers on this machine that share the claim.
        worker: The label of the Jobs that stay.

    Returns:
        The names of the Jobs.
    """
    found = list[str]()
    for job in await keep_trying(partial(api.jobs, place)):
        folder = part(job, "metadata", "annotations").get(FOLDER)
        if part(job, "metadata", "labels").get(WORKER) == worker or not isinstance(folder, str):
            continue
        if not await anyio.to_thread.run_sync(_is_held, Path(folder)):
            name = meta(job, "name")
            found.append(name)
            await keep_trying(partial(api.delete_job, name))
    return found


def _is_held(folder: Path) -> bool:
    """Return whether a living process holds the folder; True where that cannot be known."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return not folder.parent.is_dir()  # without the workdir, nothing is known
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


async def main(settings: GuardSettings) -> None:
    """Delete the Jobs. Raises LakeshoreError or ValueError when credentials stay missing or rejected."""
    deadline = anyio.current_time() + CREDENTIALS_TIMEOUT
    while True:
        try:
            cluster = find_cluster(settings.kubeconfig, settings.context, os.environ)
            api = KubeApi(cluster, settings.namespace)
            try:
                return await end_all(api, settings.worker, settings.grace)
            finally:
                await api.aclose()
        except (LakeshoreError, ValueError):
            if anyio.current_time() > deadline:
                raise
        await anyio.sleep(CREDENTIALS_INTERVAL)


if __name__ == "__main__":
    try:
        anyio.run(main, GuardSettings(**json.loads(sys.argv[1])))
    except (LakeshoreError, ValueError) as exc:
        sys.exit(str(exc))
