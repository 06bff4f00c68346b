"""The worker: claims what can start now, runs it, delivers what came of it, and gives back what it cannot finish.

It knows slots, claims and reasons to stop one; how a body runs is the executor's matter, keeping leases the keeper's.
"""

from __future__ import annotations

import contextvars
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio

from ..body.execute import Done, Site, describe, failed, leaves, refused
from ..concurrency.run_sync import worker_runs_here
from ..errors import DispatchError, PlaneUnavailable
from ..functions.resolve import check_policy
from ..planes.auth_grace import Refusals
from ..planes.contract.operations import Claimed, Fence, Requeue
from ..planes.lease_keeper import LeaseKeeper
from ..settings import read_settings
from .inline import InlineExecutor
from .outcome import ActiveClaim
from .settings import WorkerSettings
from .slots import Slots, run_in_context, was_cancelled_from_outside

if TYPE_CHECKING:
    from ..client.queue import Queue
    from ..planes.plane import Plane
    from .executor import Executor, StopReason

__all__ = ["Worker", "run_executor", "run_worker"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

LOOK = 0.25
"""Seconds between two questions to a `stop` that is a function."""
GOODBYE = 5.0
"""Seconds that a worker on its way out takes, at most, to deliver outcomes and to give back what it holds."""
SUSPECT = 2
"""Losses from which a row may be what kills its workers: it runs with nothing beside it."""


async def run_worker(
    queues: Queue | Sequence[Queue],
    *,
    root: str | os.PathLike[str] | None = None,
    registry: Mapping[str, Callable[..., Any]] | None = None,
    once: bool = False,
    concurrency: int = 1,
    retries: int = 0,
    timeout: float | None = None,
    lease: float = 30.0,
    max_lost: int = 5,
    grace: float = 30.0,
    allow_pickled: bool | None = None,
    runtime_policy: str = "minor",
    allow_modules: Sequence[str] = (),
    stop: anyio.Event | Callable[[], bool] | None = None,
) -> int:
    """Run invocations of one queue or several of one plane until told to stop; how many bodies were run.

    It can be one task among others of an application. root: the folder below which `dls.run` keys lie (default
    LAKESHORE_ROOT, else the current folder). registry: qualified name -> function, asked before anything is imported.
    once: run at most one invocation that is there now, and return. concurrency: bodies at a time. retries: further
    attempts after a body raised, with growing delays. timeout: seconds that a body may run; a `def` body cannot be
    stopped, its outcome is `timeout` all the same and its slot stays taken until it ends. lease: seconds after which a
    worker that no longer answers loses its claims. max_lost: losses of one invocation after which it fails. grace:
    seconds that running bodies get after `stop`, and threads to end once their outcome is decided. allow_pickled:
    whether functions may be unpickled; None: only those submitted on this machine, to a local plane. runtime_policy:
    `strict`, `minor` or `off`, for those. allow_modules: modules that may be named by reference besides the user's own.
    stop: an event, or a function asked several times a second.

    Raises ValueError for settings that make no sense; DispatchError when every slot is held by a body that could not be
    stopped; PlaneUnavailable with `once` only, otherwise it waits for the plane. What a body raises never ends a worker.
    Cancellation: bodies are cancelled, and what is held goes back to its queue, in no budget, within a few seconds;
    threads are left to themselves.
    """
    terms = WorkerSettings(concurrency, retries, timeout, lease, max_lost, grace)
    check_policy(runtime_policy)
    plane, _ = _where(queues)
    site = Site(_folder(root), bool(allow_pickled), runtime_policy, registry, tuple(allow_modules))
    trusted = replace(site, allow_pickled=plane.local) if allow_pickled is None else site
    return await run_executor(
        queues, lambda threads: InlineExecutor(trusted, site, threads), terms, once=once, stop=stop
    )


async def run_executor(
    queues: Queue | Sequence[Queue],
    executor: Callable[[int], Executor],
    terms: WorkerSettings,
    *,
    once: bool = False,
    stop: anyio.Event | Callable[[], bool] | None = None,
) -> int:
    """The same, with bodies run by `executor(concurrency)`."""
    plane, names = _where(queues)
    terms.check()
    if once:
        terms = replace(terms, concurrency=1)
    return await Worker(plane, names, executor(terms.concurrency), terms).run(once=once, stop=stop)


def _where(queues: Queue | Sequence[Queue]) -> tuple[Plane, list[str]]:
    named = list(queues) if isinstance(queues, Sequence) else [queues]
    if not named or any(queue.dispatch is not named[0].dispatch for queue in named):
        raise ValueError("expected one queue or several of the same dispatch plane; run one worker for each plane")
    return named[0].dispatch, [queue.name for queue in named]


def _folder(root: str | os.PathLike[str] | None) -> Path:
    return Path(os.path.abspath(root or read_settings().root or ""))


class Worker:
    """One worker on one event loop: slots, the claims in them, and what stops them."""

    def __init__(self, plane: Plane, queues: Sequence[str], executor: Executor, terms: WorkerSettings) -> None:
        self.id = f"{socket.gethostname()[:32]}-{os.getpid()}-{secrets.token_hex(6)}"
        self._plane, self._queues, self._executor, self._terms = plane, queues, executor, terms
        self._running: dict[tuple[str, int], ActiveClaim] = {}
        self._changed: anyio.Event | None = None  # while somebody waits for a body's end
        self._context = contextvars.copy_context()
        self._claiming = anyio.CancelScope()
        self._alone = False
        self._leaving = False
        self._goodbyes: set[anyio.CancelScope] = set()
        self._jobs = 0

    async def run(self, *, once: bool, stop: anyio.Event | Callable[[], bool] | None) -> int:
        """Work until stopped; see `run_worker`."""
        self._keeper = LeaseKeeper(self._plane, self.id, self._terms.lease, self._told)
        failure: BaseException | None = None
        try:
            with worker_runs_here():
                async with anyio.create_task_group() as self._group:
                    self._slots = Slots(self._group, self._run)
                    self._keeper.start(self._group)
                    try:
                        await self._work(once, stop)
                    finally:
                        self._leave()
                        self._group.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = next(leaves(group))
        finally:
            if self._slots.waiting:
                await self._release([running.claimed for running in self._slots.waiting])
            self._keeper.stop()
            with anyio.move_on_after(GOODBYE, shield=True):
                await self._plane.settled()
                await self._keeper.ended()
        if failure is not None:
            raise failure
        return self._jobs

    async def _work(self, once: bool, stop: anyio.Event | Callable[[], bool] | None) -> None:
        if self._terms.timeout is not None:
            self._group.start_soon(self._watch_clock, self._terms.timeout)
        if stop is not None:
            self._group.start_soon(self._watch_stop, stop)
        with self._claiming:
            await self._claim(once)
        with anyio.move_on_after(None if once else self._terms.grace):
            while self._running:
                await self._change()

    # Claiming

    async def _claim(self, once: bool) -> None:
        terms, delay, reached, refusals = self._terms, 0.5, False, Refusals(self._terms.lease)
        claimer = self._plane.claimer(self._queues, self.id, lease=terms.lease, max_lost=terms.max_lost)
        try:
            while True:
                while len(self._running) >= terms.concurrency or (self._alone and self._busy):
                    claimer.rest()
                    await self._change()
                self._alone = False
                if not once and (rest := self._executor.paused_until - time.monotonic()) > 0:
                    claimer.rest()
                    await anyio.sleep(rest)
                    continue
                try:
                    limit = terms.concurrency - len(self._running)
                    found = await (claimer.look(limit) if once else claimer.next(limit, [*self._running]))
                except DispatchError as exc:
                    far = reached and not self._plane.local and not refusals.lasted(exc)
                    if once or not (far or isinstance(exc, PlaneUnavailable)):
                        raise
                    logger.warning("no claims, again in %.1f s: %s", delay, exc)
                    await anyio.sleep(delay)
                    delay = min(delay * 2, 10.0)
                    continue
                delay, reached, refusals = 0.5, True, Refusals(terms.lease)
                self._begin([claimed for claimed in found if (claimed.id, claimed.attempt) not in self._running])
                if once:
                    return
        finally:
            claimer.rest()

    def _begin(self, found: Sequence[Claimed]) -> None:
        """Start what was claimed, as far as it can start now; the rest goes back, for others to take.

        A row lost twice may be what kills its process, which must not take its neighbours along: it starts alone, once
        the others are back in their queues, and until nothing runs nothing is claimed.
        """
        now, back = found, list[Claimed]()
        suspects = [claimed for claimed in found if claimed.lost >= SUSPECT]
        if suspects:
            self._alone = True
            now = [claimed for claimed in found if claimed.lost < SUSPECT] if self._busy else suspects[:1]
            begun = {claimed.id for claimed in now}
            back = [claimed for claimed in found if claimed.id not in begun]
        for claimed in now:
            running = ActiveClaim(self._plane, self.id, claimed, self._group)
            self._running[claimed.id, claimed.attempt] = running
            self._keeper.add(claimed.id, claimed.attempt)
            running.release_first, back = back, []
            self._slots.give(running)
        if back:
            self._group.start_soon(self._release, back)

    @property
    def _busy(self) -> bool:
        """Whether an outcome is still to come from a body that runs here."""
        return any(running.early is None for running in self._running.values())

    async def _release(self, claims: Sequence[Claimed]) -> None:
        ops = [Requeue(Fence(one.id, self.id, one.attempt)) for one in claims]
        with self._goodbye("give back what it had not begun"):
            try:
                answers = await self._plane.many(ops)
            except Exception as exc:  # whatever it is, others get them after the lease
                answers = [exc]
            for answer in answers:
                if isinstance(answer, Exception):
                    logger.warning("a claim that was not begun could not go back: %s", describe(answer).message)

    # Running

    async def _run(self, running: ActiveClaim) -> bool:
        """Run a body and say what came of it; whether its task can run another."""
        done: Done | None = None
        try:
            if running.release_first:
                await self._release(running.release_first)
            id, attempt = running.claimed.id, running.claimed.attempt
            while attempt > 1 and any(one == id and other < attempt for one, other in self._running):
                await self._change()  # the older claim was lost, but no body runs twice at a time here
            done = await self._body(running)
        finally:
            self._jobs += 1
            try:
                await self._settle(running, done)
            finally:
                self._end(running)
        return not running.spoiled

    async def _body(self, running: ActiveClaim) -> Done | None:
        """What the body gave; None when it was stopped from outside."""
        try:
            with running.scope:
                return await run_in_context(self._context.copy(), self._executor.run(running.claimed, running))
        except anyio.get_cancelled_exc_class() as exc:
            if not await was_cancelled_from_outside(lambda: self._leaving):
                running.spoiled = True  # on asyncio a body may cancel itself, which its task does not forget
                return failed(exc)
        except Exception as exc:  # of the executor, since what a body raises is an outcome
            return refused(exc)
        return None

    async def _settle(self, running: ActiveClaim, done: Done | None) -> None:
        if running.early is not None:
            with anyio.CancelScope(shield=True):
                await running.early.wait()
            return
        running.decided = True
        running.stop_reason = running.stop_reason or ("shutdown" if done is None else None)
        if done is not None and running.repeatable(done):
            try:
                await self._say(running, done)
            except anyio.get_cancelled_exc_class():  # the worker is on its way out
                running.spoiled = True
            else:
                return
        await self._deliver(running, done)

    async def _deliver(self, running: ActiveClaim, done: Done | None) -> None:
        """Say what came of it; not cut short by the worker's own end, but not for ever then either."""
        with self._goodbye(f"deliver the outcome of {running.claimed.id}"):
            try:
                await self._say(running, done)
            except anyio.get_cancelled_exc_class():  # asyncio's own cancellation, which no shield stops, comes once
                await self._say(running, done)

    async def _say(self, running: ActiveClaim, done: Done | None) -> None:
        state = await running.deliver(done, self._terms)
        if state is not None and logger.isEnabledFor(logging.INFO):
            seconds = time.monotonic() - running.started
            why = "" if done is None or done.error is None else f", {done.error.type}"
            logger.info("%s %s %s %.3f s%s", running.claimed.id, running.function, state, seconds, why)

    def _end(self, running: ActiveClaim) -> None:
        claimed = running.claimed
        del self._running[claimed.id, claimed.attempt]
        self._keeper.discard(claimed.id, claimed.attempt)
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    async def _change(self) -> None:
        """Wait until a slot comes free."""
        self._changed = self._changed or anyio.Event()
        await self._changed.wait()

    # Interrupting

    def _told(self, claim: tuple[str, int], what: Literal["lost", "cancel"]) -> None:
        running = self._running.get(claim)
        if running is not None:
            self._interrupt(running, what)

    def _interrupt(self, running: ActiveClaim, reason: StopReason) -> None:
        early = running.interrupt(reason)
        if early is not None:
            self._group.start_soon(self._deliver_early, running, early)

    async def _deliver_early(self, running: ActiveClaim, delivered: anyio.Event) -> None:
        """The outcome of a body in a thread does not wait for its end; the slot does, but not for ever."""
        try:
            await self._deliver(running, None)
        finally:
            delivered.set()
        self._keeper.discard(running.claimed.id, running.claimed.attempt)
        await anyio.sleep(self._terms.grace)
        running.stuck = True
        if sum(other.stuck for other in self._running.values()) >= self._terms.concurrency:
            raise DispatchError(
                f"every slot of worker {self.id} ({self._terms.concurrency}) is held by a body in a thread that was "
                f"cancelled or timed out {self._terms.grace} s ago and cannot be stopped: start the worker again, and "
                "write such bodies as `async def`, or so that they end by themselves"
            )

    async def _watch_clock(self, timeout: float) -> None:
        while True:
            now, wake = time.monotonic(), timeout
            for running in list(self._running.values()):
                left = timeout if running.timeout_start is None else running.timeout_start + timeout - now
                if running.stoppable and left <= 0:
                    self._interrupt(running, "timeout")
                elif running.stoppable:
                    wake = min(wake, left)
            await anyio.sleep(wake)

    # The end

    async def _watch_stop(self, stop: anyio.Event | Callable[[], bool]) -> None:
        if isinstance(stop, anyio.Event):
            await stop.wait()
        else:
            while not stop():  # noqa: ASYNC110 -- what cannot wake anybody is asked
                await anyio.sleep(LOOK)
        self._claiming.cancel()

    def _leave(self) -> None:
        """From now on nothing takes long: bodies are stopped, deliveries have a few seconds."""
        self._leaving = True
        for running in list(self._running.values()):
            self._interrupt(running, "shutdown")
        for scope in self._goodbyes:
            scope.deadline = anyio.current_time() + GOODBYE

    @contextmanager
    def _goodbye(self, what: str) -> Generator[None]:
        """Inside, neither the worker's end nor its cancellation reaches; once it is leaving, time is short."""
        with anyio.CancelScope(shield=True) as scope:
            if self._leaving:
                scope.deadline = anyio.current_time() + GOODBYE
            self._goodbyes.add(scope)
            try:
                yield
            finally:
                self._goodbyes.discard(scope)
        if scope.cancelled_caught:
            logger.warning("worker %s left before it could %s: others will, after its lease", self.id, what)
