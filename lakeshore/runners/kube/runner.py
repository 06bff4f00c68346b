"""Run children as Jobs of a Kubernetes cluster: one for each invocation, made, watched and deleted through its API server.

Envelope and result pass through the workdir, which has to be on a persistent volume claim that pods can mount
(ReadWriteMany, unless all run on one node). Each pod sees the folder of its own invocation, under the path that it has
here, and the root of keys where a claim holds it. The variables of a child, tokens given with --env among them, are in its
Job, where everybody who may read Jobs in the namespace can see them.

The account of the worker needs, in that namespace: create, get, list and delete of jobs (batch); list, watch and delete
of pods; get of pods/log; list of events, which show why a pod cannot be made.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from ...concurrency.loops import loop_token
from ...concurrency.tasks import run_to_end
from ...daemon.workdir import ERROR, OUTPUT_TAIL_BYTES, RESULT
from ...errors import DispatchError
from ...worker.runner import Exit
from ..account import give_folder, numeric_ids
from ..commands import Guard
from ..failure import child_failed
from ..leftovers import remove_earlier_files
from ..options import read_options
from .api import ApiUnavailable, RequestRejected, check_client, keep_trying
from .config import find_cluster
from .guard import GuardSettings, delete_orphans
from .json_fields import part
from .manifest import CONTAINER, INVOCATION, NONCE, JobPlan, job_name, label, manifest, place_labels
from .options import KubeOptions
from .tracker import API_TIMEOUT, JobTracker

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from ...worker.runner import Launch
    from .config import Cluster
    from .pods import ChildState, TrackedJob

__all__ = ["KubeJob", "KubeRunner"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

FILE_TIMEOUT = 2.0
"""Seconds that a shared file system may take to show what another machine wrote."""
FILE_INTERVAL = 0.1
"""Seconds between two checks of a folder for a file."""
LOG_TIMEOUT = 5.0
"""Seconds that the API server may be unavailable before a child's output is given up."""

_unfinished: list[Guard] = []
"""Guards that still have Jobs to delete when this process ends."""


class KubeRunner:
    """Starts children as Jobs in `cluster`, with `environ` besides their image's environment."""

    name = "kube"
    elsewhere = True
    """Children have a file system of their own."""
    options_class = KubeOptions

    def __init__(self, cluster: Cluster, options: KubeOptions, *, environ: Mapping[str, str] | None = None) -> None:
        self.cluster = cluster
        self.options = options
        self.environ = dict(environ or {})
        self.namespace = options.namespace or cluster.namespace
        self.worker = secrets.token_hex(8)
        self._tracker: JobTracker | None = None
        self._guard: Guard | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> KubeRunner:
        """Make the runner for `--runner-option`. Raises ValueError, also where no cluster is known."""
        found = read_options(KubeOptions, cls.name, options)
        cluster = find_cluster(found.kubeconfig, found.context, os.environ)
        check_client(cluster)
        return cls(cluster, found, environ=environ)

    async def start(self, launch: Launch) -> KubeJob:
        """Create a Job, and wait until its container runs: for as long as the cluster has no place for it.

        Cancelled, or failing, it deletes the Job and waits until it is gone.

        Raises:
            DispatchError: The child will never run, with what the cluster reports.
        """
        uid, gid = numeric_ids(launch.as_user)
        nonce = secrets.token_hex(8)
        environ = {**self.environ, **launch.environ}
        job = manifest(self.options, JobPlan(launch, self.namespace, self.worker, nonce, environ, uid, gid))
        await anyio.to_thread.run_sync(give_folder, launch.folder.path, launch.as_user or "", uid, gid)
        await checkpoint_if_cancelled()
        tracker = self._open_tracker()
        tracked = tracker.add(job_name(launch.id, launch.attempt), launch.id, nonce)
        try:
            if launch.attempt > 1 and await tracker.end_earlier(launch.id):
                await anyio.to_thread.run_sync(remove_earlier_files, launch.folder.path)
            await self._create(tracker, tracked, launch, job)
            await checkpoint_if_cancelled()
            await tracker.wait_started(tracked)
        except BaseException:
            await run_to_end(partial(tracker.end, tracked))
            raise
        return KubeJob(tracker, tracked, launch)

    async def aclose(self) -> None:
        """Delete what is left of this runner's Jobs, and end the watch."""
        await run_to_end(self._close)

    async def _close(self) -> None:
        tracker = self._tracker
        self._tracker = None
        if tracker is not None and tracker.loop is not loop_token().native_token:
            tracker = self._new_tracker()  # the other one belongs to a loop that has ended
        nothing_left = tracker is None or await tracker.aclose()
        guard = self._guard
        self._guard = None
        if guard is not None and nothing_left:
            await anyio.to_thread.run_sync(guard.dismiss)
        elif guard is not None:
            _unfinished.append(guard)

    def _open_tracker(self) -> JobTracker:
        """Return the tracker of this event loop. The guard, one for the process, is started before there is a Job."""
        if self._guard is None:
            options = self.options
            settings = GuardSettings(options.kubeconfig, options.context, self.namespace, self.worker, options.grace)
            self._guard = Guard(settings.command())
        if self._tracker is None or self._tracker.loop is not loop_token().native_token:
            self._tracker = self._new_tracker()
            self._tracker.run_beside(partial(self._delete_orphans, self._tracker))
        return self._tracker

    def _new_tracker(self) -> JobTracker:
        return JobTracker(self.cluster, self.options, self.namespace, self.worker)

    async def _delete_orphans(self, tracker: JobTracker) -> None:
        try:
            for name in await delete_orphans(tracker.api, place_labels(self.options), self.worker):
                logger.warning("the Job %s was left by a worker that is gone, and is deleted", name)
        except DispatchError as exc:
            logger.warning("Jobs of workers that are gone may be left in the cluster: %s", exc)

    async def _create(self, tracker: JobTracker, tracked: TrackedJob, launch: Launch, job: Mapping[str, Any]) -> None:
        """Create the Job once, however often that has to be requested."""
        while True:
            try:
                await keep_trying(partial(tracker.create, tracked, job), API_TIMEOUT)
            except RequestRejected as exc:
                if exc.reason != "AlreadyExists":
                    raise
                existing = await keep_trying(partial(tracker.api.job, tracked.name), API_TIMEOUT)
                labels = part(existing, "metadata", "labels")
                if labels.get(NONCE) == tracked.nonce:
                    return  # it was created, and the answer was lost
                ended = await tracker.end_earlier(launch.id)
                if existing is not None and not ended and labels.get(INVOCATION) != label(launch.id):
                    raise DispatchError(
                        f"the cluster has a Job {tracked.name} already, which is not one of this invocation: "
                        f"`kubectl delete job {tracked.name} -n {self.namespace}` makes room, if nobody needs it"
                    ) from exc
                await anyio.to_thread.run_sync(remove_earlier_files, launch.folder.path)
            else:
                return


class KubeJob:
    """One child."""

    def __init__(self, tracker: JobTracker, tracked: TrackedJob, launch: Launch) -> None:
        self._tracker = tracker
        self._job = tracked
        self._launch = launch
        self._exit: Exit | None = None

    async def wait(self) -> Exit:
        if self._exit is None:
            child = await self._tracker.wait_ended(self._job)
            await run_to_end(partial(self._conclude, child))
        assert self._exit is not None
        return self._exit

    async def kill(self) -> Exit:
        if self._exit is None:
            await self._tracker.end(self._job)
            self._exit = await self._exit_of(self._job.child())
        return self._exit

    async def _conclude(self, child: ChildState) -> None:
        """Read what the child left, and delete its Job."""
        if self._exit is not None:
            return
        if child.state == "gone":
            await self._tracker.end(self._job)
        ended = await self._exit_of(child)
        if await self._needs_output(ended):
            ended = replace(ended, output=await self._output())
        if child.state != "gone":
            await self._tracker.delete_ended(self._job)
        self._exit = ended

    async def _needs_output(self, ended: Exit) -> bool:
        """Return whether only the child's output can show why it left neither a result nor an error."""
        if ended.error is not None or (ended.code == 0 and self._launch.script is not None):
            return False
        expected = ERROR if ended.code else RESULT
        return expected not in await self._names()

    async def _exit_of(self, child: ChildState) -> Exit:
        """Return how the child has ended, by the state of its pod and by what is in its folder."""
        ended = child.exit
        if ended is None:
            ended = Exit(-Signals.SIGKILL, error=child_failed(child.text) if child.text else None)
        if child.state != "ended" and RESULT in await self._names():
            return Exit(0)
        if ended.code == 0 and self._launch.script is None:
            with anyio.move_on_after(FILE_TIMEOUT):
                while RESULT not in await self._names():  # noqa: ASYNC110 -- another machine writes it
                    await anyio.sleep(FILE_INTERVAL)
        return ended

    async def _output(self) -> str:
        """Return the end of what the child wrote; "" where it cannot be read."""
        log = partial(self._tracker.api.log, self._job.pod_name, CONTAINER, OUTPUT_TAIL_BYTES)
        try:
            return await keep_trying(log, LOG_TIMEOUT)
        except ApiUnavailable as exc:
            logger.warning("the output of %s cannot be read: %s", self._launch.id, exc)
            return ""

    async def _names(self) -> list[str]:
        try:
            return await anyio.to_thread.run_sync(os.listdir, self._launch.folder.path)
        except OSError:
            return []
