"""`python -m dreamlake.lakeshore.runners.kube.guard ORDERS`: deletes the Jobs of a worker that is gone.

It is what a worker's guard becomes when its worker has died, on the same machine. What that machine itself takes along
is deleted by the next worker of the same name and claim (`sweep`), and in any case by the next attempt of an invocation.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import anyio
import anyio.to_thread

from ...daemon.workdir import LOCK
from ...errors import LakeshoreError
from .api import Api, insist
from .config import find_cluster
from .job import FOLDER, JOB, WORKER
from .json_fields import meta, part

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODULE", "Orders", "end_all", "sweep"]

MODULE = "dreamlake.lakeshore.runners.kube.guard"
PATIENCE = 3600.0
"""Seconds that the API server may be away."""
SETTLE = 2.0
"""Seconds without a Job after which there will be none: what the worker had sent last has arrived."""
FORCE = 10.0
LOOK = 0.25
REFUSED, AGAIN = 60.0, 1.0
"""Seconds for which it may be refused, and between two attempts."""


class Orders(NamedTuple):
    """Where to delete, and what: Jobs with the label `worker`, whose pods have `grace` seconds."""

    kubeconfig: str | None
    context: str | None
    namespace: str
    worker: str
    grace: int

    def argv(self) -> list[str]:
        """The command that does it. No secret is in it: credentials are looked for again."""
        return [sys.executable, "-P", "-m", MODULE, json.dumps(self._asdict())]


async def end_all(api: Api, worker: str, grace: int) -> None:
    """Delete the Jobs of a worker, and wait until there are none."""
    mine, began, quiet = {WORKER: worker}, anyio.current_time(), anyio.current_time()
    while True:
        found = await insist(partial(api.jobs, mine), PATIENCE)
        now = anyio.current_time()
        if found:
            quiet = now
        for pod in [] if found else (await insist(partial(api.pods, mine), PATIENCE))[0]:  # whose Job is gone
            quiet, late = now, now - began > grace + FORCE
            if late or not meta(pod, "deletionTimestamp"):
                await insist(partial(api.delete_pod, meta(pod, "name"), 0 if late else grace), PATIENCE)
        for job in found:
            name = meta(job, "name")
            if not meta(job, "deletionTimestamp"):
                await insist(partial(api.delete_job, name), PATIENCE)
            elif now - began > grace + FORCE:
                for pod in (await insist(partial(api.pods, {JOB: name}), PATIENCE))[0]:
                    await insist(partial(api.delete_pod, meta(pod, "name"), 0), PATIENCE)
        if now - quiet >= SETTLE:
            return
        await anyio.sleep(LOOK)


async def sweep(api: Api, place: Mapping[str, str], worker: str) -> list[str]:
    """Delete the Jobs of other workers in this `place` that are gone: a living one holds the folder of each of its Jobs.

    The names of those Jobs.
    """
    found = list[str]()
    for job in await insist(partial(api.jobs, place)):
        theirs = part(job, "metadata", "labels").get(WORKER) != worker
        folder = part(job, "metadata", "annotations").get(FOLDER)
        if theirs and isinstance(folder, str) and not await anyio.to_thread.run_sync(_held, Path(folder)):
            found.append(meta(job, "name"))
            await insist(partial(api.delete_job, found[-1]))
    return found


def _held(folder: Path) -> bool:
    """Whether somebody lives who holds that folder; so it is taken to be where that cannot be known."""
    try:
        lock = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return not folder.parent.is_dir()  # where its workdir is not seen from here, nothing is known
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock)
    return False


async def main(orders: Orders) -> None:
    """Do what is ordered. Who is refused, or finds no credentials, may be between two of them: that is tried for a while."""
    until = anyio.current_time() + REFUSED
    while True:
        try:
            api = Api(find_cluster(orders.kubeconfig, orders.context, os.environ), orders.namespace)
            try:
                return await end_all(api, orders.worker, orders.grace)
            finally:
                await api.aclose()
        except (LakeshoreError, ValueError):
            if anyio.current_time() > until:
                raise
        await anyio.sleep(AGAIN)


if __name__ == "__main__":
    try:
        anyio.run(main, Orders(**json.loads(sys.argv[1])))
    except (LakeshoreError, ValueError) as exc:
        sys.exit(str(exc))
