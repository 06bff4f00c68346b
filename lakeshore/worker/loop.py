"""The worker loop: claims invocations, runs their bodies, delivers the outcomes, and returns what it cannot finish.

How a body runs is the executor's part, how its leases are kept is that of `planes.lease_keeper`.
"""

from __future__ import annotations

import contextvars
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import anyio

from ..body.execute import BodyOutcome, BodySettings, failed, failed_permanently, leaf_exceptions
from ..concurrency.backoff import Backoff
from ..concurrency.run_sync import worker_runs_here
from ..errors import DispatchError, PlaneUnavailable
from ..functions.runtime import check_policy
from ..limits import DEFAULT_LEASE, DEFAULT_MAX_LOST
from ..planes.auth_grace import AuthGrace
from ..planes.lease_keeper import LeaseKeeper
from ..settings import read_settings
from .inline import InlineExecutor
from .outcome import ActiveClaim
from .settings import WorkerSettings
from .shutdown import SHUTDOWN_TIMEOUT, Shutdown
from .slots import Slots, run_in_context
from .timeouts import watch_timeouts

if TYPE_CHECKING:
    from ..client.queue import Queue
    from ..planes.claimer import Claimer
    from ..planes.contract.operations import Claimed
    from ..planes.plane import Plane
    from .executor import Executor, StopReason

__all__ = ["Worker", "run_executor", "run_worker"]

logger = logging.getLogger("dreamlake.lakeshore.worker")

FIRST_CLAIM_DELAY = 0.5
MAX_CLAIM_DELAY = 10.0
"""Seconds between two claims while the plane is out of reach."""
SUSPECT_LOSSES = 2
"""Losses after which an invocation may be what kills its workers. It runs with no other body beside it."""


async def run_worker(
    queues: Queue | Sequence[Queue],
    *,
    root: str | os.PathLike[str] | None = None,
    registry: Mapping[str, Callable[..., Any]] | None = None,
    once: bool = False,
    concurrency: int = 1,
    retries: int = 0,
    timeout: float | None = None,
    lease: float = DEFAULT_LEASE,
    max_lost: int = DEFAULT_MAX_LOST,
    grace: float = 30.0,
    allow_pickled: bool | None = None,
    runtime_policy: str = "minor",
    allow_modules: Sequence[str] = (),
    stop: anyio.Event | Callable[[], bool] | None = None,
) -> int:
    """Run the invocations of one queue, or of several queues of one plane, until stopped.

    It can be one task among others of an application.

    Cancellation: running bodies are cancelled, and their invocations go back to their queues within a few seconds; this
    counts neither as a failure nor as a loss. Bodies in threads cannot be stopped: they run on without their claims.

    Args:
        queues: One queue, or several of the same plane.
        root: The folder of the `dls.run` keys. Default: LAKESHORE_ROOT, else the current folder.
        registry: Maps qualified names to functions. It is used before anything is imported.
        once: Run at most one invocation that is due now, then return.
        concurrency: How many bodies run at the same time.
        retries: Further attempts after a body raised. The delay before them grows.
        timeout: Seconds that a body may run. A `def` body runs in a thread, which cannot be stopped: its outcome is
            `timeout` all the same, and its slot stays occupied until it ends.
        lease: Seconds after which a worker that no longer answers loses its claims.
        max_lost: After how many losses an invocation fails.
        grace: Seconds that running bodies get after `stop`, and bodies in threads after their outcome is decided.
        allow_pickled: Whether functions may be unpickled. None allows it for invocations submitted on this machine to a
            local plane.
        runtime_policy: Which interpreter may run unpickled functions: `strict`, `minor` or `off`.
        allow_modules: Modules besides the user's own that references may name.
        stop: An event, or a function that is called several times a second. Once set or true, the worker drains.

    Returns:
        The number of bodies that were run. What a body raises never ends a worker.

    Raises:
        ValueError: A setting makes no sense.
        DispatchError: Every slot is held by a body that could not be stopped.
        PlaneUnavailable: Only with `once`. Otherwise the worker waits for the plane.
    """
    settings = WorkerSettings(concurrency, retries, timeout, lease, max_lost, grace)
    check_policy(runtime_policy)
    plane, _ = _plane_and_names(queues)
    untrusted = BodySettings(_root_folder(root), bool(allow_pickled), runtime_policy, registry, tuple(allow_modules))
    trusted = untrusted
    if allow_pickled is None:
        trusted = replace(untrusted, allow_pickled=plane.local)

    def inline(concurrency: int) -> InlineExecutor:
        return InlineExecutor(trusted, untrusted, concurrency)

    return await run_executor(queues, inline, settings, once=once, stop=stop)


async def run_executor(
    queues: Queue | Sequence[Queue],
    make_executor: Callable[[int], Executor],
    settings: WorkerSettings,
    *,
    once: bool = False,
    stop: anyio.Event | Callable[[], bool] | None = None,
) -> int:
    """Do what `run_worker` does, with bodies run by the executor that `make_executor(concurrency)` returns."""
    plane, names = _plane_and_names(queues)
    settings.check()
    if once:
        settings = replace(settings, concurrency=1)
    worker = Worker(plane, names, make_executor(settings.concurrency), settings)
    return await worker.run(once=once, stop=stop)


def _root_folder(root: str | os.PathLike[str] | None) -> Path:
    return Path(os.path.abspath(root or read_settings().root or ""))


def _plane_and_names(queues: Queue | Sequence[Queue]) -> tuple[Plane, list[str]]:
    all_queues = list(queues) if isinstance(queues, Sequence) else [queues]
    if not all_queues or any(queue.dispatch is not all_queues[0].dispatch for queue in all_queues):
        raise ValueError("expected one queue or several of the same dispatch plane; run one worker for each plane")
    return all_queues[0].dispatch, [queue.name for queue in all_queues]


class Worker:
    """One worker on one event loop.

    The way of a claim: `_claim_loop` takes it from the plane, `_start_claims` gives it to a slot, `_run_claim` has the
    executor run its body and delivers the outcome. `_stop_body` is how a cancellation, a timeout, a lost claim or the
    worker's end reaches a body that runs.
    """

    def __init__(self, plane: Plane, queues: Sequence[str], executor: Executor, settings: WorkerSettings) -> None:
        self.id = f"{socket.gethostname()[:32]}-{os.getpid()}-{secrets.token_hex(6)}"
        self._plane = plane
        self._queues = queues
        self._executor = executor
        self._settings = settings
        self._claims: dict[tuple[str, int], ActiveClaim] = {}
        self._claim_ended: anyio.Event | None = None  # only while a task waits for it
        self._claims_alone = False
        """Nothing is claimed while a body runs, because one of them may kill this process."""
        self._context = contextvars.copy_context()
        self._shutdown = Shutdown(plane, self.id)
        self._jobs = 0

    async def run(self, *, once: bool, stop: anyio.Event | Callable[[], bool] | None) -> int:
        """Work until stopped; see `run_worker`."""
        self._keeper = LeaseKeeper(self._plane, self.id, self._settings.lease, self._on_lease_news)
        failure: BaseException | None = None
        try:
            with worker_runs_here():
                async with anyio.create_task_group() as self._group:
                    self._slots = Slots(self._group, self._run_claim)
                    self._keeper.start(self._group)
                    try:
                        await self._work(once, stop)
                    finally:
                        self._shutdown.begin()
                        for claim in list(self._claims.values()):
                            self._stop_body(claim, "shutdown")
                        self._group.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            failure = next(leaf_exceptions(group))
        finally:
            if self._slots.waiting:
                await self._shutdown.release([claim.claimed for claim in self._slots.waiting])
            self._keeper.stop()
            with anyio.move_on_after(SHUTDOWN_TIMEOUT, shield=True):
                await self._plane.settled()
                await self._keeper.ended()
        if failure is not None:
            raise failure
        return self._jobs

    async def _work(self, once: bool, stop: anyio.Event | Callable[[], bool] | None) -> None:
        if self._settings.timeout is not None:
            self._group.start_soon(watch_timeouts, self._claims, self._settings.timeout, self._stop_body)
        if stop is not None:
            self._group.start_soon(self._shutdown.drain_when, stop)
        claiming_ended = anyio.Event()
        self._group.start_soon(self._claim_loop, once, claiming_ended)
        await claiming_ended.wait()
        with anyio.move_on_after(None if once else self._settings.grace):
            while self._claims:
                await self._wait_for_claim_end()

    # --- claiming ---

    async def _claim_loop(self, once: bool, ended: anyio.Event) -> None:
        """Claim as many invocations as there are free slots, again and again, and start their bodies.

        Ends when the worker drains; with `once` after one claim. Then it sets `ended`.
        """
        settings = self._settings
        claimer = self._plane.claimer(self._queues, self.id, lease=settings.lease, max_lost=settings.max_lost)
        reached = False
        outage: _ClaimOutage | None = None
        try:
            with self._shutdown.claiming:
                while True:
                    await self._wait_until_claimable(claimer, once)
                    limit = settings.concurrency - len(self._claims)
                    try:
                        if once:
                            found = await claimer.try_claim(limit)
                        else:
                            found = await claimer.claim(limit, [*self._claims])
                    except DispatchError as exc:
                        if outage is None:
                            outage = _ClaimOutage(settings.lease, repeats_all=reached and not self._plane.local)
                        if once or not outage.repeats(exc):
                            raise
                        await outage.pause(exc)
                        continue
                    reached = True
                    outage = None
                    self._start_claims(found)
                    if once:
                        return
        finally:
            claimer.stop_waiting()
            ended.set()

    async def _wait_until_claimable(self, claimer: Claimer, once: bool) -> None:
        """Wait for a free slot and for the executor. What is submitted meanwhile is left to other workers."""
        while True:
            if len(self._claims) >= self._settings.concurrency or (self._claims_alone and self._body_runs()):
                claimer.stop_waiting()
                await self._wait_for_claim_end()
                continue
            self._claims_alone = False
            pause = self._executor.paused_until - time.monotonic()
            if pause <= 0 or once:
                return
            claimer.stop_waiting()
            await anyio.sleep(pause)

    def _start_claims(self, found: Sequence[Claimed]) -> None:
        """Start the bodies of new claims, and return those claims to their queues that cannot start now.

        An invocation that was lost `SUSPECT_LOSSES` times may be what kills its worker. No other body should run beside
        it: it starts when no other body runs, and nothing is claimed before it has ended.
        """
        new: list[Claimed] = []
        suspect: Claimed | None = None
        for claimed in found:
            if (claimed.id, claimed.attempt) in self._claims:
                continue  # the plane has returned a claim again that this worker already holds
            new.append(claimed)
            if suspect is None and claimed.lost >= SUSPECT_LOSSES:
                suspect = claimed
        starting = new
        returned: list[Claimed] = []
        if suspect is not None:
            self._claims_alone = True
            if self._body_runs():
                starting = [claimed for claimed in new if claimed.lost < SUSPECT_LOSSES]
            else:
                starting = [suspect]
            returned = [claimed for claimed in new if claimed not in starting]
        for claimed in starting:
            claim = ActiveClaim(self._plane, self.id, claimed, self._group)
            self._claims[claimed.id, claimed.attempt] = claim
            self._keeper.add(claimed.id, claimed.attempt)
            claim.release_first = returned  # before a body starts that may kill this process
            returned = []
            self._slots.start(claim)
        if returned:
            self._group.start_soon(self._shutdown.release, returned)

    def _body_runs(self) -> bool:
        """Return whether the outcome of some claim is still to be decided by its body."""
        return any(claim.delivered_early is None for claim in self._claims.values())

    # --- running ---

    async def _run_claim(self, claim: ActiveClaim) -> bool:
        """Run the body of a claim and deliver the outcome. Return whether this task can run another one."""
        outcome: BodyOutcome | None = None  # of a body that was stopped
        try:
            if claim.release_first:
                await self._shutdown.release(claim.release_first)
            while claim.claimed.attempt > 1 and self._earlier_attempt_runs(claim.claimed):
                await self._wait_for_claim_end()
            try:
                with claim.scope:
                    outcome = await run_in_context(self._context.copy(), self._executor.run(claim.claimed, claim))
            except anyio.get_cancelled_exc_class() as exc:
                if not await self._shutdown.cancelled_from_outside():
                    claim.task_spoiled = True
                    outcome = failed(exc)
            except Exception as exc:  # an error of the executor: what a body raises is its outcome
                outcome = failed_permanently(exc)
        finally:
            self._jobs += 1
            try:
                await self._deliver(claim, outcome)
            finally:
                del self._claims[claim.claimed.id, claim.claimed.attempt]
                self._keeper.discard(claim.claimed.id, claim.claimed.attempt)
                if self._claim_ended is not None:
                    self._claim_ended.set()
                    self._claim_ended = None
        return not claim.task_spoiled

    def _earlier_attempt_runs(self, claimed: Claimed) -> bool:
        """Return whether a body of a lost claim of the same invocation still runs here."""
        return any(id == claimed.id and attempt < claimed.attempt for id, attempt in self._claims)

    async def _deliver(self, claim: ActiveClaim, outcome: BodyOutcome | None) -> None:
        if claim.delivered_early is not None:
            with anyio.CancelScope(shield=True):
                await claim.delivered_early.wait()
            return
        claim.decided = True
        if outcome is None and claim.stop_reason is None:
            claim.stop_reason = "shutdown"
        if outcome is not None and outcome.state == "succeeded" and not claim.streams:
            # It does no harm to deliver this outcome twice, so it needs no shield, which would cost more.
            try:
                await claim.deliver(outcome, self._settings)
            except anyio.get_cancelled_exc_class():  # the worker stops
                claim.task_spoiled = True
            else:
                return
        await self._deliver_shielded(claim, outcome)

    async def _deliver_shielded(self, claim: ActiveClaim, outcome: BodyOutcome | None) -> None:
        """Deliver although the worker is cancelled, but in limited time then."""
        with self._shutdown.finishing(f"deliver the outcome of {claim.claimed.id}"):
            try:
                await claim.deliver(outcome, self._settings)
            except anyio.get_cancelled_exc_class():  # asyncio's own cancellation, which no shield stops; it comes once
                await claim.deliver(outcome, self._settings)

    async def _wait_for_claim_end(self) -> None:
        """Wait until a claim has ended and its slot is free."""
        if self._claim_ended is None:
            self._claim_ended = anyio.Event()
        await self._claim_ended.wait()

    # --- stopping bodies ---

    def _on_lease_news(self, claim: tuple[str, int], news: Literal["lost", "cancel"]) -> None:
        found = self._claims.get(claim)
        if found is not None:
            self._stop_body(found, news)

    def _stop_body(self, claim: ActiveClaim, reason: StopReason) -> None:
        delivered = claim.interrupt(reason)
        if delivered is not None:
            self._group.start_soon(self._deliver_early, claim, delivered)

    async def _deliver_early(self, claim: ActiveClaim, delivered: anyio.Event) -> None:
        """Deliver the outcome of a body in a thread before its end. If it does not end, its slot counts as stuck."""
        try:
            await self._deliver_shielded(claim, None)
        finally:
            delivered.set()
        self._keeper.discard(claim.claimed.id, claim.claimed.attempt)
        await anyio.sleep(self._settings.grace)
        claim.stuck = True
        if sum(other.stuck for other in self._claims.values()) >= self._settings.concurrency:
            raise DispatchError(
                f"every slot of worker {self.id} ({self._settings.concurrency}) is held by a body in a thread that was "
                f"cancelled or timed out {self._settings.grace} s ago and cannot be stopped: start the worker again, and "
                "write such bodies as `async def`, or so that they end by themselves"
            )


class _ClaimOutage:
    """Decides whether claims that fail are repeated, and the pause before the next one.

    Args:
        lease: Seconds for which the plane may reject this worker's credentials.
        repeats_all: Repeat every failure; otherwise only those of a plane out of reach.
    """

    def __init__(self, lease: float, *, repeats_all: bool) -> None:
        self._repeats_all = repeats_all
        self._auth_grace = AuthGrace(lease)
        self._backoff = Backoff(FIRST_CLAIM_DELAY, MAX_CLAIM_DELAY, jitter=0.0)

    def repeats(self, exc: DispatchError) -> bool:
        if self._repeats_all and not self._auth_grace.exceeded(exc):
            return True
        return isinstance(exc, PlaneUnavailable)

    async def pause(self, exc: DispatchError) -> None:
        delay = self._backoff.next_delay()
        logger.warning("claiming failed, the next attempt is in %.1f s: %s", delay, exc)
        await self._backoff.pause(delay)
