"""The Jobs of one runner on one event loop: one watch tells what becomes of all their pods."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from ...concurrency.loops import loop_token
from ...concurrency.tasks import run_to_end, spawn
from ...errors import DispatchError
from ...planes.contract.records import Failure
from ...worker.runner import Exit
from .api import REFUSED_S, Api, Away, Rejected, insist
from .job import INVOCATION, JOB, WORKER, label
from .json_fields import entries, meta, part
from .pods import Job, Look, deadline_passed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.abc import TaskGroup

    from .config import Cluster
    from .job import Shape

__all__ = ["Session"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

PATIENCE = 60.0
"""Seconds that the API server may be away before a request that somebody waits for fails."""
FORCE = 10.0
"""Seconds past its grace after which a pod that is to end is taken away, whatever its node says."""
NO_POD, NO_WORD = 1.0, 10.0
"""Seconds without a pod, or without a word why it does not run, after which the cluster is asked for its warnings."""
LOST_NODE = 30.0
"""Seconds past the grace of a pod that others have deleted, after which its node is taken to be lost."""
STEADY = 5.0
"""Seconds after which a watch that broke off had been a good one."""
LATER = 30.0
"""Seconds after which a Job is to be deleted again, where that was refused."""
_REMEMBERED = 1000


class Session:
    """What a runner has on one event loop. `worker` is the label of all its Jobs."""

    def __init__(self, cluster: Cluster, shape: Shape, worker: str, poll: float) -> None:
        self.loop = loop_token().native_token
        self.api = Api(cluster, shape.namespace)
        self._shape, self._poll, self._mine = shape, poll, {WORKER: worker}
        self._jobs: dict[str, Job] = {}
        self._over = deque[str](maxlen=_REMEMBERED)  # names of which late news comes
        self._left = set[str]()  # those that could not be deleted yet
        self._refused: Rejected | None = None
        self._refused_since = self._listed = 0.0
        self._away = self.doubtful = False
        self._version = ""
        self._group: TaskGroup | None = None
        self._first = list[Callable[[], Coroutine[Any, Any, None]]]()
        self._scope, self._ended = anyio.CancelScope(), anyio.Event()
        spawn(self._run, self._ended.set)

    def add(self, name: str, id: str, mark: str) -> Job:
        """From now on what is told of a Job of that name is known."""
        job = self._jobs[name] = Job(name, id, mark, self._shape)
        self._left.discard(name)
        with suppress(ValueError):
            self._over.remove(name)
        return job

    async def aclose(self) -> bool:
        """End the watch, and delete what is still there; whether that is nothing now. Not to be cancelled."""
        self._scope.cancel()
        await self._ended.wait()
        known = not (self.doubtful or self._jobs)
        try:
            self._left.update(meta(one, "name") for one in await self.api.jobs(self._mine))
            known = True
            for name in list(self._left):
                await self.api.delete_job(name)
                self._left.discard(name)
        except DispatchError as exc:
            logger.warning("whether Jobs are left is not known: %s", exc)
        await self.api.aclose()
        return known and not self._left

    # Starting and ending

    async def create(self, job: Job, manifest: Mapping[str, Any]) -> None:
        """Have a Job made. Raises Rejected; Away when it may come into being all the same, then or later."""
        before, job.made = job.made, True
        try:
            await run_to_end(partial(self.api.create_job, manifest))
        except Away:
            self.doubtful = True
            raise
        except Rejected:
            job.made = before
            raise

    async def started(self, job: Job) -> None:
        """Wait until the child runs, or has run. Raises DispatchError with what keeps it from that."""
        asked = anyio.current_time()
        while True:
            seen = job.look()
            if seen.state in ("ended", "gone") or (seen.state == "runs" and self._refused is None):
                return
            if seen.state == "fails":
                raise DispatchError(seen.text)
            if self._refused is not None and anyio.current_time() - self._refused_since >= REFUSED_S:
                raise DispatchError(f"what becomes of its pod cannot be seen: {self._refused}")
            self._tell(job, seen.text)
            await job.change(NO_POD)
            now = anyio.current_time()
            if now - asked >= (NO_WORD if job.pod else NO_POD):
                asked = now
                with suppress(Away):
                    await self._examine(job)

    async def _examine(self, job: Job) -> None:
        """Ask the cluster why nothing happens."""
        if job.pod:
            for reason, message in (await self.api.warnings("Pod", meta(job.pod, "name")))[-1:]:
                self._tell(job, f"{reason}: {message}")
            return
        found = await self.api.job(job.name)
        if found is None:
            raise DispatchError("its Job was deleted before it had a pod, and not by this worker")
        for pod in (await self.api.pods({JOB: job.name}))[0]:  # of which the watch has not told yet
            job.see(pod)
        if job.pod:
            return
        for reason, message in await self.api.warnings("Job", job.name):
            if reason == "FailedCreate":
                raise DispatchError(f"the cluster makes no pod for it: {message}")
        if failed := failure_of(found):
            raise DispatchError(f"its Job failed before it had a pod: {failed[0]}: {failed[1]}")

    def _tell(self, job: Job, text: str) -> None:
        if text and not job.told:
            job.told = True
            logger.warning("%s waits for its pod, as long as that takes: %s", job.id, text)

    async def ended(self, job: Job) -> Look:
        """Wait for the end of a child that has `started`. May be cancelled and called again."""
        while True:
            seen = job.look()
            if seen.state in ("ended", "gone", "fails"):
                return seen._replace(exit=await self._why(job, seen.exit))
            await job.change(self._poll)
            grace = part(job.pod, "metadata").get("deletionGracePeriodSeconds") or 0
            if (
                meta(job.pod, "deletionTimestamp")
                and not job.asked
                and anyio.current_time() - job.since > grace + LOST_NODE
            ):
                job.since = anyio.current_time()
                with suppress(Rejected):
                    await insist(partial(self.force, job.name))

    async def _why(self, job: Job, ended: Exit | None) -> Exit | None:
        """Why the pod of a child was taken away, if it was: where the Job knows more than the pod."""
        if ended is None or ended.error is None or ended.error.type != "WorkerLost":
            return ended
        try:
            there = await insist(partial(self.api.job, job.name))
        except Rejected:
            return ended
        if there is None or meta(there, "deletionTimestamp"):
            said = f"the Job {job.name} was deleted in the cluster, and not by its worker"
            return Exit(ended.code, "killed", Failure("Cancelled", said))
        failed = failure_of(there)
        return deadline_passed(self._shape, ended.code) if failed and failed[0] == "DeadlineExceeded" else ended

    async def clear(self, id: str) -> bool:
        """End the Jobs of earlier attempts, which may be orphans; whether there were any."""
        found = await insist(partial(self.api.jobs, {INVOCATION: label(id)}), PATIENCE)
        for one in found:
            await insist(partial(self.api.delete_job, meta(one, "name")), PATIENCE)
        for one in found:
            await self._until_gone(meta(one, "name"), None)
        return await self._end_pods({INVOCATION: label(id)}) or bool(found)

    async def end(self, job: Job) -> None:
        """Delete a Job and wait until nothing of it is there. Where the API server stays away it is deleted later."""
        job.asked = True
        try:
            if job.made:
                await self._end(job)
        except DispatchError as exc:
            logger.error("the Job %s is to end, and cannot be deleted now: %s", job.name, exc)
            self._leave(job.name)
        self._jobs.pop(job.name, None)

    async def _end(self, job: Job) -> None:
        await insist(partial(self.api.delete_job, job.name), PATIENCE)
        await self._until_gone(job.name, job)
        with anyio.move_on_after(FORCE):  # what the watch has still to tell is how the child ended
            while job.pod and not job.gone and job.look().state != "ended":
                await job.change(FORCE)

    async def forget(self, job: Job) -> None:
        """Delete the Job of a child that has ended."""
        self._jobs.pop(job.name, None)
        self._over.append(job.name)
        try:
            if not await self.api.delete_job(job.name):  # by others, who may have left its pod
                await self._end_pods({JOB: job.name})
        except DispatchError as exc:
            logger.warning("the Job %s has ended, and is deleted later: %s", job.name, exc)
            self._leave(job.name)

    async def _until_gone(self, name: str, job: Job | None) -> None:
        pause, deadline = 0.02, anyio.current_time() + self._shape.grace + FORCE
        while await insist(partial(self.api.job, name), PATIENCE) is not None:
            if anyio.current_time() > deadline:
                deadline = anyio.current_time() + FORCE
                await insist(partial(self.force, name), PATIENCE)
            if job is not None:
                await job.change(pause)
            else:
                await anyio.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        if job is not None and not job.gone:
            await self._end_pods({JOB: name})

    async def _end_pods(self, labels: Mapping[str, str]) -> bool:
        """End what Jobs that are gone have left, whose deletion need not wait for their pods; whether there was any."""
        pause, late, found = 0.02, anyio.current_time() + self._shape.grace + FORCE, False
        while pods := (await insist(partial(self.api.pods, labels), PATIENCE))[0]:
            found, grace = True, 0 if anyio.current_time() > late else self._shape.grace
            for pod in pods:
                if grace == 0 or not meta(pod, "deletionTimestamp"):
                    await insist(partial(self.api.delete_pod, meta(pod, "name"), grace), PATIENCE)
            await anyio.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        return found

    async def force(self, name: str) -> None:
        """Take the pods of a Job away at once."""
        for pod in (await self.api.pods({JOB: name}))[0]:
            logger.warning("the pod %s has not ended in its grace, and is taken away", meta(pod, "name"))
            await self.api.delete_pod(meta(pod, "name"), 0)

    def _leave(self, name: str) -> None:
        """Have a Job deleted, when that can be done."""
        if name not in self._left:
            self._left.add(name)
            self.beside(partial(self._later, name))

    async def _later(self, name: str) -> None:
        told = False

        async def delete() -> None:
            if name in self._left:  # and none has been begun under that name since
                await self.api.delete_job(name)

        while name in self._left:
            try:
                await insist(delete)
                self._left.discard(name)
            except DispatchError as exc:
                if not told:
                    told = True
                    logger.error("the Job %s stays until it may be deleted: %s", name, exc)
                await anyio.sleep(LATER)

    # The watch

    def beside(self, fn: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `fn` run beside the watch, as long as that lasts."""
        if self._group is not None:
            self._group.start_soon(fn)
        else:
            self._first.append(fn)

    async def _run(self) -> None:
        try:
            await self._watch_on()
        finally:
            if not self._scope.cancel_called:  # the loop ends, and nobody has said so
                with anyio.CancelScope(shield=True):
                    await self.api.aclose()

    async def _watch_on(self) -> None:
        with self._scope:
            async with anyio.create_task_group() as self._group:
                for fn in self._first:
                    self._group.start_soon(fn)
                while True:
                    try:
                        await self._watch()
                    except Exception:
                        self._version = ""  # or it might be told the same again
                        logger.exception("the watch of pods failed, and begins again")
                        await anyio.sleep(1.0)

    async def _watch(self) -> None:
        failures = 0
        while True:
            began = anyio.current_time()
            try:
                if not self._version:
                    await self._list()
                await self.api.watch_pods(self._mine, self._version, self._poll, self._take, self._back)
                self._version, failures = "", 0  # begun anew with a list, in case anything was not told
            except Rejected as exc:
                self._version = ""
                if exc.status == 410:
                    failures = failures + 1 if anyio.current_time() - began < STEADY else 0
                    await anyio.sleep(min(0.05 * 2**failures, 5.0))
                    continue
                if self._refused is None:
                    self._refused_since = anyio.current_time()
                    logger.warning("what becomes of pods cannot be seen for now: %s", exc)
                self._refused = exc
                for job in self._jobs.values():
                    job.wake()
                await anyio.sleep(1.0)
            except Away as exc:
                failures = failures + 1 if anyio.current_time() - began < STEADY else 1
                if failures > 1 or anyio.current_time() - self._listed >= self._poll:
                    self._version = ""
                if failures > 1:
                    self._refused = None
                    if not self._away:
                        self._away = True
                        logger.warning("children go on, and nothing is heard of them for now: %s", exc)
                await anyio.sleep(max(min(0.05 * 2**failures, 5.0), min(exc.pause, 5.0)))

    def _back(self) -> None:
        if self._away or self._refused is not None:
            logger.warning("the API server answers again")
        self._away, self._refused = False, None

    async def _list(self) -> None:
        self._listed = anyio.current_time()
        pods, version = await self.api.pods(self._mine)
        names = {meta(pod, "name") for pod in pods}
        for pod in pods:
            self._see(pod, gone=False)
        for job in self._jobs.values():
            job.missed(names)
        self._version = version

    def _take(self, what: str, pod: dict[str, Any]) -> None:
        self._version = meta(pod, "resourceVersion") or self._version
        if what != "BOOKMARK":
            self._see(pod, gone=what == "DELETED")

    def _see(self, pod: Mapping[str, Any], *, gone: bool) -> None:
        name = part(pod, "metadata", "labels").get(JOB)
        if not isinstance(name, str):
            return  # no pod of this worker, whatever it is
        job = self._jobs.get(name)
        if job is not None:
            job.see(pod, gone=gone)
        elif not gone and name not in self._over and name not in self._left and not meta(pod, "deletionTimestamp"):
            logger.warning("the Job %s has begun after it was given up, and is deleted", name)
            self._leave(name)


def failure_of(job: Mapping[str, Any]) -> tuple[str, str] | None:
    """Reason and message of a Job that has failed."""
    for one in entries(part(job, "status").get("conditions")):
        if one.get("type") in ("Failed", "FailureTarget") and one.get("status") == "True":
            return str(one.get("reason") or "Failed"), str(one.get("message") or "no more is known")
    return None
