"""Track the Jobs of one runner on one event loop: one watch reports the changes of all their pods."""

from __future__ import annotations

import logging
from collections import deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from ...concurrency.backoff import Backoff
from ...concurrency.loops import loop_token
from ...concurrency.tasks import run_to_end, spawn
from ...errors import DispatchError
from ...planes.contract.records import Failure
from ...worker.runner import Exit
from .api import UNAUTHORIZED_GRACE, ApiUnavailable, KubeApi, RequestRejected, keep_trying
from .json_fields import entries, meta, part
from .manifest import INVOCATION, JOB, WORKER, label
from .pods import ChildState, TrackedJob, exit_at_deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Mapping

    from anyio.abc import TaskGroup

    from .config import Cluster
    from .options import KubeOptions

__all__ = ["API_TIMEOUT", "JobTracker"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

Task: TypeAlias = "Callable[[], Coroutine[Any, Any, None]]"

API_TIMEOUT = 60.0
"""Seconds that the API server may be unavailable before a request that a caller waits for fails."""
FORCE_AFTER = 10.0
"""Seconds past its grace after which a pod that is to end is removed, even if its node does not report its end."""
NO_POD_INTERVAL = 1.0
"""Seconds without a pod after which the cluster is asked why."""
NOT_RUNNING_INTERVAL = 10.0
"""Seconds without a change of a pod that does not run after which the cluster is asked why."""
LOST_NODE_AFTER = 30.0
"""Seconds past the grace of a pod that something else has deleted, after which its node is considered lost."""
STEADY_WATCH = 5.0
"""Seconds after which a watch that broke off had worked, so that the next one begins without a pause."""
DELETE_RETRY_INTERVAL = 30.0
"""Seconds after which a Job is deleted again, where that was rejected."""
MAX_REMEMBERED = 1000
"""Names of ended Jobs that are remembered, since late changes of their pods may still arrive."""


def _gone_backoff() -> Backoff:
    return Backoff(0.02, 0.5, factor=1.5, jitter=0.0)


class JobTracker:
    """The Jobs of a runner on one event loop."""

    def __init__(self, cluster: Cluster, options: KubeOptions, namespace: str, worker: str) -> None:
        """`worker`: the label of all Jobs of the runner."""
        self.loop = loop_token().native_token
        self.api = KubeApi(cluster, namespace)
        self.unknown_jobs = False
        """Whether Jobs may exist whose creation got no answer."""
        self._options = options
        self._own = {WORKER: worker}
        self._jobs: dict[str, TrackedJob] = {}
        self._ended_names = deque[str](maxlen=MAX_REMEMBERED)
        self._to_delete = set[str]()
        """Names of Jobs that could not be deleted yet."""
        self._rejected: RequestRejected | None = None
        """Why pods cannot be watched."""
        self._rejected_since = 0.0
        self._listed_at = 0.0
        self._unavailable = False
        self._version = ""
        """The version of the pods from which the next watch goes on; "" to list them first."""
        self._group: TaskGroup | None = None
        self._first_tasks = list[Task]()
        self._scope = anyio.CancelScope()
        self._ended = anyio.Event()
        spawn(self._run, self._ended.set)

    def add(self, name: str, id: str, nonce: str) -> TrackedJob:
        """Track the Job of that name, which is yet to be created."""
        job = TrackedJob(name, id, nonce, self._options)
        self._jobs[name] = job
        self._to_delete.discard(name)
        with suppress(ValueError):
            self._ended_names.remove(name)
        return job

    async def aclose(self) -> bool:
        """End the watch, and delete the Jobs that are left. Not to be cancelled.

        Returns:
            Whether it is known that none is left.
        """
        self._scope.cancel()
        await self._ended.wait()
        known = not (self.unknown_jobs or self._jobs)
        try:
            self._to_delete.update(meta(job, "name") for job in await self.api.jobs(self._own))
            known = True
            for name in list(self._to_delete):
                await self.api.delete_job(name)
                self._to_delete.discard(name)
        except DispatchError as exc:
            logger.warning("Jobs of this worker may be left in the cluster: %s", exc)
        await self.api.aclose()
        return known and not self._to_delete

    # Starting and ending

    async def create(self, job: TrackedJob, manifest: Mapping[str, Any]) -> None:
        """Create a Job.

        Raises:
            RequestRejected: The cluster does not create it.
            ApiUnavailable: It may come into being all the same, now or later.
        """
        could_exist = job.may_exist
        job.may_exist = True
        try:
            await run_to_end(partial(self.api.create_job, manifest))
        except ApiUnavailable:
            self.unknown_jobs = True
            raise
        except RequestRejected:
            job.may_exist = could_exist
            raise

    async def wait_started(self, job: TrackedJob) -> None:
        """Wait until the child runs, or has run. Raises DispatchError with what keeps it from that."""
        diagnosed_at = anyio.current_time()
        while True:
            child = job.child()
            if child.state in ("ended", "gone") or (child.state == "runs" and self._rejected is None):
                return
            if child.state == "fails":
                raise DispatchError(child.text)
            if self._rejected is not None and anyio.current_time() - self._rejected_since >= UNAUTHORIZED_GRACE:
                raise DispatchError(f"its pod cannot be watched: {self._rejected}")
            self._warn_waiting(job, child.text)
            await job.wait_for_change(NO_POD_INTERVAL)
            now = anyio.current_time()
            if now - diagnosed_at >= (NOT_RUNNING_INTERVAL if job.pod else NO_POD_INTERVAL):
                diagnosed_at = now
                with suppress(ApiUnavailable):
                    await self._diagnose(job)

    async def _diagnose(self, job: TrackedJob) -> None:
        """Ask the cluster why the child does not run. Raises DispatchError where it never will."""
        if job.pod:
            for reason, message in (await self.api.warnings("Pod", job.pod_name))[-1:]:
                self._warn_waiting(job, f"{reason}: {message}")
            return
        found = await self.api.job(job.name)
        if found is None:
            raise DispatchError("its Job was deleted before it had a pod, and not by this worker")
        pods, _ = await self.api.pods({JOB: job.name})  # which the watch may not have reported yet
        for pod in pods:
            job.update(pod)
        if job.pod:
            return
        for reason, message in await self.api.warnings("Job", job.name):
            if reason == "FailedCreate":
                raise DispatchError(f"the cluster creates no pod for it: {message}")
        failure = _failure_of(found)
        if failure is not None:
            raise DispatchError(f"its Job failed before it had a pod: {failure[0]}: {failure[1]}")

    def _warn_waiting(self, job: TrackedJob, text: str) -> None:
        if text and not job.warned:
            job.warned = True
            logger.warning("%s waits for its pod, for as long as that takes: %s", job.id, text)

    async def wait_ended(self, job: TrackedJob) -> ChildState:
        """Wait for the end of a child that has started. May be cancelled and called again."""
        while True:
            child = job.child()
            if child.state in ("ended", "gone", "fails"):
                return replace(child, exit=await self._refined_exit(job, child.exit))
            await job.wait_for_change(self._options.poll)
            grace = part(job.pod, "metadata").get("deletionGracePeriodSeconds") or 0
            deleted_by_others = meta(job.pod, "deletionTimestamp") and not job.ending
            if deleted_by_others and anyio.current_time() - job.since > grace + LOST_NODE_AFTER:
                job.since = anyio.current_time()
                with suppress(RequestRejected):
                    await keep_trying(partial(self.remove_pods, job.name))

    async def _refined_exit(self, job: TrackedJob, ended: Exit | None) -> Exit | None:
        """Replace the exit of a child whose pod was taken away, where its Job shows why."""
        if ended is None or ended.error is None or ended.error.type != "WorkerLost":
            return ended
        try:
            found = await keep_trying(partial(self.api.job, job.name))
        except RequestRejected:
            return ended
        if found is None or meta(found, "deletionTimestamp"):
            message = f"the Job {job.name} was deleted in the cluster, and not by its worker"
            return Exit(ended.code, "killed", Failure("Cancelled", message))
        failure = _failure_of(found)
        if failure is not None and failure[0] == "DeadlineExceeded":
            return exit_at_deadline(self._options, ended.code)
        return ended

    async def end_earlier(self, id: str) -> bool:
        """End the Jobs of earlier attempts, and pods that have lost their Job; return whether there were any."""
        labels = {INVOCATION: label(id)}
        found = await keep_trying(partial(self.api.jobs, labels), API_TIMEOUT)
        for job in found:
            await keep_trying(partial(self.api.delete_job, meta(job, "name")), API_TIMEOUT)
        for job in found:
            await self._wait_gone(meta(job, "name"), None)
        return await self._end_pods(labels) or bool(found)

    async def end(self, job: TrackedJob) -> None:
        """Delete a Job and wait until nothing of it exists. While the API server is unavailable it is deleted later."""
        job.ending = True
        try:
            if job.may_exist:
                await self._end(job)
        except DispatchError as exc:
            logger.error("the Job %s has to end, and cannot be deleted now: %s", job.name, exc)
            self._delete_later(job.name)
        self._jobs.pop(job.name, None)

    async def _end(self, job: TrackedJob) -> None:
        await keep_trying(partial(self.api.delete_job, job.name), API_TIMEOUT)
        await self._wait_gone(job.name, job)
        with anyio.move_on_after(FORCE_AFTER):  # the watch may still report how the child ended
            while job.pod and not job.gone and job.child().state != "ended":
                await job.wait_for_change(FORCE_AFTER)

    async def delete_ended(self, job: TrackedJob) -> None:
        """Delete the Job of a child that has ended."""
        self._jobs.pop(job.name, None)
        self._ended_names.append(job.name)
        try:
            if not await self.api.delete_job(job.name):  # something else did, and may have left its pod
                await self._end_pods({JOB: job.name})
        except DispatchError as exc:
            logger.warning("the Job %s has ended, and is deleted later: %s", job.name, exc)
            self._delete_later(job.name)

    async def _wait_gone(self, name: str, job: TrackedJob | None) -> None:
        """Wait until a Job that was deleted is gone; remove its pods when they do not end in time."""
        backoff = _gone_backoff()
        deadline = anyio.current_time() + self._options.grace + FORCE_AFTER
        while await keep_trying(partial(self.api.job, name), API_TIMEOUT) is not None:
            if anyio.current_time() > deadline:
                deadline = anyio.current_time() + FORCE_AFTER
                await keep_trying(partial(self.remove_pods, name), API_TIMEOUT)
            if job is not None:
                await job.wait_for_change(backoff.next_delay())
            else:
                await backoff.pause()
        if job is not None and not job.gone:
            await self._end_pods({JOB: name})

    async def _end_pods(self, labels: Mapping[str, str]) -> bool:
        """End the pods of Jobs that are gone, and wait for that; return whether there were any."""
        backoff = _gone_backoff()
        deadline = anyio.current_time() + self._options.grace + FORCE_AFTER
        found = False
        while True:
            pods, _ = await keep_trying(partial(self.api.pods, labels), API_TIMEOUT)
            if not pods:
                return found
            found = True
            grace = 0 if anyio.current_time() > deadline else self._options.grace
            for pod in pods:
                if grace == 0 or not meta(pod, "deletionTimestamp"):
                    await keep_trying(partial(self.api.delete_pod, meta(pod, "name"), grace), API_TIMEOUT)
            await backoff.pause()

    async def remove_pods(self, name: str) -> None:
        """Remove the pods of a Job at once, without waiting for their nodes."""
        pods, _ = await self.api.pods({JOB: name})
        for pod in pods:
            logger.warning("the pod %s has not ended in its grace, and is removed", meta(pod, "name"))
            await self.api.delete_pod(meta(pod, "name"), 0)

    def _delete_later(self, name: str) -> None:
        if name not in self._to_delete:
            self._to_delete.add(name)
            self.run_beside(partial(self._delete_until_done, name))

    async def _delete_until_done(self, name: str) -> None:
        warned = False

        async def delete() -> None:
            if name in self._to_delete:  # and no other Job of that name has been added since
                await self.api.delete_job(name)

        while name in self._to_delete:
            try:
                await keep_trying(delete)
                self._to_delete.discard(name)
            except DispatchError as exc:
                if not warned:
                    warned = True
                    logger.error("the Job %s stays until it may be deleted: %s", name, exc)
                await anyio.sleep(DELETE_RETRY_INTERVAL)

    # The watch

    def run_beside(self, task: Task) -> None:
        """Run a task beside the watch, as long as that lasts."""
        if self._group is not None:
            self._group.start_soon(task)
        else:
            self._first_tasks.append(task)

    async def _run(self) -> None:
        try:
            with self._scope:
                async with anyio.create_task_group() as self._group:
                    for task in self._first_tasks:
                        self._group.start_soon(task)
                    await self._watch_forever()
        finally:
            if not self._scope.cancel_called:  # the event loop ends without `aclose`
                with anyio.CancelScope(shield=True):
                    await self.api.aclose()

    async def _watch_forever(self) -> None:
        while True:
            try:
                await self._watch()
            except Exception:  # whatever it is, without a watch no child would ever end
                self._version = ""  # or the same change might raise again
                logger.exception("the watch of pods failed, and begins again")
                await anyio.sleep(1.0)

    async def _watch(self) -> None:
        backoff = Backoff(0.1, 5.0)
        while True:
            began = anyio.current_time()
            try:
                if not self._version:
                    await self._list()
                await self.api.watch_pods(self._own, self._version, self._options.poll, self._on_event, self._on_begun)
                self._version = ""  # list all pods again, in case a change was not reported
                backoff.reset()
            except RequestRejected as exc:
                self._version = ""
                if exc.status == 410:  # the version is too old
                    self._reset_if_steady(backoff, began)
                    await backoff.pause()
                    continue
                self._on_rejected(exc)
                await anyio.sleep(1.0)
            except ApiUnavailable as exc:
                self._reset_if_steady(backoff, began)
                delay = backoff.next_delay()
                self._on_unavailable(exc, backoff.failures)
                await anyio.sleep(max(delay, min(exc.retry_after, backoff.cap)))

    def _reset_if_steady(self, backoff: Backoff, began: float) -> None:
        if anyio.current_time() - began >= STEADY_WATCH:
            backoff.reset()

    def _on_begun(self) -> None:
        if self._unavailable or self._rejected is not None:
            logger.warning("the API server answers again")
        self._unavailable = False
        self._rejected = None

    def _on_rejected(self, exc: RequestRejected) -> None:
        if self._rejected is None:
            self._rejected_since = anyio.current_time()
            logger.warning("pods cannot be watched for now: %s", exc)
        self._rejected = exc
        for job in self._jobs.values():
            job.wake()

    def _on_unavailable(self, exc: ApiUnavailable, failures: int) -> None:
        if failures > 1 or anyio.current_time() - self._listed_at >= self._options.poll:
            self._version = ""
        if failures > 1:
            self._rejected = None
            if not self._unavailable:
                self._unavailable = True
                logger.warning("children run on, but their pods cannot be watched for now: %s", exc)

    async def _list(self) -> None:
        self._listed_at = anyio.current_time()
        pods, version = await self.api.pods(self._own)
        for pod in pods:
            self._on_pod(pod, gone=False)
        names = {meta(pod, "name") for pod in pods}
        for job in self._jobs.values():
            job.keep_listed(names)
        self._version = version

    def _on_event(self, kind: str, pod: dict[str, Any]) -> None:
        self._version = meta(pod, "resourceVersion") or self._version
        if kind != "BOOKMARK":
            self._on_pod(pod, gone=kind == "DELETED")

    def _on_pod(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        name = part(pod, "metadata", "labels").get(JOB)
        if not isinstance(name, str):
            return  # it is not a pod of this worker
        job = self._jobs.get(name)
        if job is not None:
            job.update(pod, gone=gone)
            return
        known = name in self._ended_names or name in self._to_delete
        if not gone and not known and not meta(pod, "deletionTimestamp"):
            logger.warning("the Job %s has begun after it was given up, and is deleted", name)
            self._delete_later(name)


def _failure_of(job: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the reason and the message of a Job that has failed."""
    for condition in entries(part(job, "status").get("conditions")):
        if condition.get("type") in ("Failed", "FailureTarget") and condition.get("status") == "True":
            return str(condition.get("reason") or "Failed"), str(condition.get("message") or "no more is known")
    return None
