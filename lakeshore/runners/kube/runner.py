"""Children as Jobs of a Kubernetes cluster: one for each invocation, made, watched and deleted through its API server.

Envelope and result pass through the workdir, which has to lie on a persistent volume claim that pods can mount
(ReadWriteMany, unless all run on one node); each pod sees the folder of its own invocation, under the path that it has
here, and the root of keys where a claim holds it. What a child is told, tokens given with --env among it, stands in its
Job, for everybody to see who may read Jobs in the namespace.

The account of the worker needs, in that namespace: create, get, list and delete of jobs (batch); list, watch and delete
of pods; get of pods/log; list of events, which say why a pod cannot be made.
"""

from __future__ import annotations

import logging
import os
import secrets
from dataclasses import replace
from functools import partial
from signal import Signals
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
from anyio.lowlevel import checkpoint_if_cancelled

from ...concurrency.loops import loop_token
from ...concurrency.tasks import run_to_end
from ...daemon.workdir import ARGS, ERROR, FRAMES, RESULT, remove_leftovers
from ...errors import DispatchError
from ...limits import OUTPUT_TAIL_BYTES
from ...planes.contract.records import Failure
from ...worker.runner import Exit
from ..commands import Guard
from ..options import amount, check_known
from .api import Away, Rejected, check_client, insist
from .config import find_cluster
from .guard import Orders, sweep
from .job import CHILD, INVOCATION, MARK, OPTIONS, Shape, User, job_name, label, manifest
from .json_fields import part
from .watch import PATIENCE, Session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...worker.runner import Launch
    from .config import Cluster
    from .pods import Job, Look

__all__ = ["KubeJob", "KubeRunner"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

POLL = 30.0
"""Seconds after which all pods are listed anew, beside the watch."""
LAG = 2.0
"""Seconds that a shared file system may take to show what another machine wrote."""
LOG_PATIENCE = 5.0


_unfinished: list[Guard] = []
"""Those that have something left to delete when this process ends."""


class KubeRunner:
    """Starts children as Jobs in `cluster`, each made after `shape`, with `environ` besides their image's environment.

    poll: seconds after which pods are listed anew, in case the watch has missed something. kubeconfig, context: where
    `cluster` was found, for the guard that deletes Jobs when this process is killed.
    """

    name = "kube"
    elsewhere = True
    """Children have a file system of their own."""

    def __init__(
        self,
        cluster: Cluster,
        shape: Shape,
        *,
        environ: Mapping[str, str] | None = None,
        poll: float = POLL,
        kubeconfig: str | None = None,
        context: str | None = None,
    ) -> None:
        self.cluster, self.shape, self.environ, self.poll = cluster, shape, dict(environ or {}), poll
        self.worker = secrets.token_hex(8)
        self._orders = Orders(kubeconfig, context, shape.namespace, self.worker, shape.grace)
        self._session: Session | None = None
        self._guard: Guard | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> KubeRunner:
        """The runner that `--runner-option` asks for. Raises ValueError for anything else, and when no cluster is
        known."""
        check_known("kube", options, [*OPTIONS, "context", "kubeconfig", "poll"])
        kubeconfig, context = options.get("kubeconfig"), options.get("context")
        poll = amount("poll", options.get("poll", str(POLL)))
        if poll < 1:
            raise ValueError(f"expected a number from 1 for the runner option poll, got {options['poll']!r}")
        cluster = find_cluster(kubeconfig, context, os.environ)
        check_client(cluster)
        shape = Shape.read(options, cluster.namespace)
        found = None if kubeconfig is None else os.path.abspath(os.path.expanduser(kubeconfig))
        return cls(cluster, shape, environ=environ, poll=poll, kubeconfig=found, context=context)

    async def start(self, launch: Launch) -> KubeJob:
        """Have a Job made, and wait until its container runs: for as long as the cluster has no place for it.

        Raises DispatchError with what the cluster says when it never will. Cancelled, or failing, it deletes the Job and
        waits until it is gone.
        """
        user = User.read(launch.as_user)
        mark = secrets.token_hex(8)
        job = manifest(self.shape, launch, self.worker, mark, {**self.environ, **launch.environ}, user)
        await anyio.to_thread.run_sync(user.give, launch.folder.path, ARGS)
        await checkpoint_if_cancelled()
        session = self._open()
        known = session.add(job_name(launch.id, launch.attempt), launch.id, mark)
        try:
            if launch.attempt > 1 and await session.clear(launch.id):
                await _remove_leftovers(launch)
            await self._create(session, known, launch, job)
            await checkpoint_if_cancelled()
            await session.started(known)
        except BaseException:
            await run_to_end(partial(session.end, known))
            raise
        return KubeJob(session, known, launch)

    async def aclose(self) -> None:
        """Delete what is left of this runner's Jobs, and end the watch."""
        await run_to_end(self._close)

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None and session.loop is not loop_token().native_token:
            session = Session(self.cluster, self.shape, self.worker, self.poll)  # that of a loop that has ended
        nothing_left = session is None or await session.aclose()
        guard, self._guard = self._guard, None
        if guard is not None and nothing_left:
            await anyio.to_thread.run_sync(guard.dismiss)
        elif guard is not None:
            _unfinished.append(guard)

    def _open(self) -> Session:
        """What belongs to this event loop; the guard, which has to be there before there is a Job, to this process."""
        if self._guard is None:
            self._guard = Guard(self._orders.argv())
        if self._session is None or self._session.loop is not loop_token().native_token:
            self._session = Session(self.cluster, self.shape, self.worker, self.poll)
            self._session.beside(partial(self._sweep, self._session))
        return self._session

    async def _sweep(self, session: Session) -> None:
        try:
            for name in await sweep(session.api, self.shape.place(), self.worker):
                logger.warning("the Job %s was left by a worker that is gone, and is deleted", name)
        except DispatchError as exc:
            logger.warning("whether workers that are gone have left Jobs is not known: %s", exc)

    async def _create(self, session: Session, known: Job, launch: Launch, job: Mapping[str, Any]) -> None:
        """Have the Job made, once, however often it has to be asked for."""
        while True:
            try:
                await insist(partial(session.create, known, job), PATIENCE)
            except Rejected as exc:
                if exc.reason != "AlreadyExists":
                    raise
                found = await insist(partial(session.api.job, known.name), PATIENCE)
                if part(found, "metadata", "labels").get(MARK) == known.mark:
                    return  # it was made, and the answer that said so was lost
                cleared = await session.clear(launch.id)
                if (
                    found is not None
                    and not cleared
                    and part(found, "metadata", "labels").get(INVOCATION) != label(launch.id)
                ):
                    raise DispatchError(
                        f"the cluster has a Job {known.name} already, which is not one of this invocation: "
                        f"`kubectl delete job {known.name} -n {self.shape.namespace}` makes room, if nobody needs it"
                    ) from exc
                await _remove_leftovers(launch)
            else:
                return


class KubeJob:
    """One child."""

    def __init__(self, session: Session, job: Job, launch: Launch) -> None:
        self._session, self._job, self._launch = session, job, launch
        self._exit: Exit | None = None

    async def wait(self) -> Exit:
        if self._exit is None:
            seen = await self._session.ended(self._job)
            await run_to_end(partial(self._conclude, seen))
        assert self._exit is not None
        return self._exit

    async def kill(self) -> Exit:
        if self._exit is None:
            await self._session.end(self._job)
            self._exit = await self._judged(self._job.look())
        return self._exit

    async def _conclude(self, seen: Look) -> None:
        """Look at what the child left, and delete its Job."""
        if self._exit is None:
            if seen.state == "gone":
                await self._session.end(self._job)
            ended = await self._judged(seen)
            silent = ended.error is None and (ERROR if ended.code else RESULT) not in await self._names()
            if silent and (ended.code or self._launch.script is None):
                ended = replace(ended, output=await self._output())
            if seen.state != "gone":
                await self._session.forget(self._job)
            self._exit = ended

    async def _judged(self, seen: Look) -> Exit:
        """How the child has ended: by what is told of it, or else by what lies in its folder."""
        ended = seen.exit or Exit(-Signals.SIGKILL, error=Failure("DaemonError", seen.text) if seen.text else None)
        if seen.state != "ended" and RESULT in await self._names():
            return Exit(0)
        if ended.code == 0 and self._launch.script is None:
            with anyio.move_on_after(LAG):
                while RESULT not in await self._names():  # noqa: ASYNC110 - another machine writes it
                    await anyio.sleep(0.1)
        return ended

    async def _output(self) -> str:
        try:
            return await insist(
                partial(self._session.api.log, self._job.pod_name, CHILD, OUTPUT_TAIL_BYTES), LOG_PATIENCE
            )
        except Away as exc:
            logger.warning("the output of %s cannot be had: %s", self._launch.id, exc)
            return ""

    async def _names(self) -> list[str]:
        try:
            return await anyio.to_thread.run_sync(os.listdir, self._launch.folder.path)
        except OSError:
            return []


async def _remove_leftovers(launch: Launch) -> None:
    await anyio.to_thread.run_sync(partial(remove_leftovers, launch.folder.path, RESULT, ERROR, FRAMES))
