"""A Job and its pod, and what the pod's status means for the child in it."""

from __future__ import annotations

from dataclasses import dataclass
from signal import Signals
from typing import TYPE_CHECKING, Any, Literal

import anyio

from ...planes.contract.records import Failure
from ...worker.runner import Exit
from ..failure import child_failed, child_lost
from .json_fields import entries, meta, part
from .manifest import CONTAINER, NONCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .options import KubeOptions

__all__ = ["ChildState", "TrackedJob", "child_state", "exit_at_deadline"]

_IMAGE_REASONS = frozenset(
    "ErrImagePull ImagePullBackOff InvalidImageName ErrImageNeverPull ImageInspectError RegistryUnavailable "
    "SignatureValidationFailed".split()
)
"""Why a container waits whose image cannot be pulled."""
_START_REASONS = frozenset(
    "CreateContainerConfigError CreateContainerError RunContainerError ContainerCannotRun StartError "
    "PreCreateHookError PreStartHookError".split()
)
"""Why a container waits, or has ended, that cannot be created or started."""
_DISRUPTIONS = frozenset("Evicted NodeLost NodeShutdown Shutdown Terminated Preempting Preempted NodeAffinity".split())
_DISRUPTION_PREFIXES = ("OutOf", "Unexpected")
"""Reasons of a pod that was ended through no fault of its own."""
_UNKNOWN = "no more is known"


@dataclass(frozen=True, slots=True)
class ChildState:
    """What is known about a child."""

    state: Literal["waits", "fails", "runs", "ended", "gone"]
    """`gone`: its end was not reported, and something of it may still run."""
    text: str = ""
    """Why it waits, or what keeps it from running."""
    exit: Exit | None = None
    """How it has ended, as far as is known."""


class TrackedJob:
    """One Job, and what is known about its pod."""

    def __init__(self, name: str, id: str, nonce: str, options: KubeOptions) -> None:
        """
        Args:
            name: The name of the Job.
            id: The id of its invocation.
            nonce: The label by which it differs from others that had its name before.
            options: The runner's options.
        """
        self.name = name
        self.id = id
        self.nonce = nonce
        self.may_exist = False
        """Whether its creation has been requested."""
        self.ending = False
        """Whether this worker ends it, so that its end is no accident."""
        self.pod: dict[str, Any] = {}
        """The last version of its pod that was seen. The pod may be gone."""
        self.changed = anyio.Event()
        self.warned = False
        """Whether a warning that it waits was logged."""
        self.since = anyio.current_time()
        """When it was added, or when something else began to delete its pod."""
        self._existing_pods = set[str]()
        self._options = options

    @property
    def pod_name(self) -> str:
        return meta(self.pod, "name")

    @property
    def gone(self) -> bool:
        """Whether it had a pod and has none any more."""
        return bool(self.pod) and not self._existing_pods

    def child(self) -> ChildState:
        return child_state(self.pod, self._options, ending=self.ending, gone=self.gone)

    def update(self, pod: Mapping[str, Any], *, gone: bool = False) -> None:
        """Take a version of a pod of this Job. The first pod is the child's, and should be the only one."""
        if part(pod, "metadata", "labels").get(NONCE) != self.nonce:
            return
        name = meta(pod, "name")
        if gone:
            self._existing_pods.discard(name)
        else:
            self._existing_pods.add(name)
        if not self.pod or self.pod_name == name:
            if meta(pod, "deletionTimestamp") and not meta(self.pod, "deletionTimestamp"):
                self.since = anyio.current_time()
            self.pod = dict(pod)
        self.wake()

    def keep_listed(self, names: set[str]) -> None:
        """Take the names of all pods that exist: others of this Job are gone."""
        if not self._existing_pods <= names:
            self._existing_pods &= names
            self.wake()

    def wake(self) -> None:
        """Wake the tasks in `wait_for_change`."""
        self.changed.set()
        self.changed = anyio.Event()

    async def wait_for_change(self, timeout: float) -> None:
        """Wait for the next change, for `timeout` seconds at most."""
        changed = self.changed
        with anyio.move_on_after(timeout):
            await changed.wait()


def child_state(pod: Mapping[str, Any], options: KubeOptions, *, ending: bool, gone: bool) -> ChildState:
    """Return what a pod's status means for its child.

    Args:
        pod: The last version of the pod.
        options: The runner's options.
        ending: Whether this worker has had it deleted, so that its end is no accident.
        gone: Whether the pod does not exist any more.
    """
    status = part(pod, "status")
    statuses = entries(status.get("containerStatuses"))
    child = next((entry for entry in statuses if entry.get("name") == CONTAINER), dict[str, Any]())
    for container in (*entries(status.get("initContainerStatuses")), *statuses):
        waiting = part(container, "state", "waiting")
        reason = waiting.get("reason")
        text = f"{reason}: {waiting.get('message') or _UNKNOWN}"
        if reason in _IMAGE_REASONS:
            return ChildState("fails", f"the image {container.get('image') or options.image} cannot be pulled: {text}")
        if reason in _START_REASONS:
            return ChildState("fails", f"the container cannot be created: {text}")
    terminated = part(child, "state", "terminated")
    if terminated.get("reason") in _START_REASONS:
        text = f"{terminated.get('reason')}: {terminated.get('message') or ''}"
        return ChildState("fails", f"the container cannot be started: {text}")
    if terminated:
        return ChildState("ended", exit=_exit_of_pod(pod, terminated, options, ending))
    if status.get("phase") in ("Succeeded", "Failed"):  # a pod may have failed before its containers have ended
        return ChildState("gone", exit=_exit_of_pod(pod, terminated, options, ending))
    if gone:
        if ending:
            return ChildState("gone", exit=Exit(-Signals.SIGKILL))
        return ChildState("gone", exit=_lost(_disruption(pod) or "its pod was deleted, and not by this worker"))
    if part(child, "state", "running"):
        return ChildState("runs")
    return _waiting_state(status, child)


def _waiting_state(status: Mapping[str, Any], child: Mapping[str, Any]) -> ChildState:
    for condition in entries(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = str(condition.get("message") or condition.get("reason") or "no node takes it")
            if "persistentvolumeclaim" in text and "not found" in text:
                return ChildState("fails", f"its pod cannot be scheduled: {text}")
            return ChildState("waits", text)
    return ChildState("waits", str(part(child, "state", "waiting").get("message") or ""))


def _exit_of_pod(pod: Mapping[str, Any], terminated: Mapping[str, Any], options: KubeOptions, ending: bool) -> Exit:
    status = part(pod, "status")
    code = _exit_code(terminated)
    if status.get("reason") == "DeadlineExceeded":
        return exit_at_deadline(options, code)
    if code == 0:
        return Exit(0)
    disruption = _disruption(pod)
    if disruption and not ending:
        return _lost(disruption, code)
    if terminated.get("reason") == "OOMKilled":
        limit = "its node had no more"
        if options.memory is not None:
            limit = f"it may use {options.memory} bytes, the runner option memory"
        return Exit(code, error=child_failed(f"the child was killed for lack of memory (OOMKilled): {limit}"))
    if not terminated and not ending:
        text = f"{status.get('reason') or 'Failed'}: {status.get('message') or _UNKNOWN}"
        return _lost(f"its pod failed ({text})", code)
    return Exit(code)


def _exit_code(terminated: Mapping[str, Any]) -> int:
    """Return the exit code of a container, negative for a signal, which is reported as 128 and its number."""
    code = terminated.get("exitCode")
    if not isinstance(code, int):
        return -Signals.SIGKILL
    number = terminated.get("signal")
    if isinstance(number, int) and number > 0:
        return -number
    if code > 128 and code - 128 in {*Signals}:
        return 128 - code
    return code


def _disruption(pod: Mapping[str, Any]) -> str:
    """Return why the cluster has ended the pod; "" where it has not."""
    status = part(pod, "status")
    reason = str(status.get("reason") or "")
    if reason in _DISRUPTIONS or reason.startswith(_DISRUPTION_PREFIXES):
        return f"its pod was taken from its node ({reason}: {status.get('message') or _UNKNOWN})"
    for condition in entries(status.get("conditions")):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            text = condition.get("message") or _UNKNOWN
            return f"its pod was taken from its node ({condition.get('reason')}: {text})"
    if part(pod, "metadata").get("deletionTimestamp"):
        return "its pod was deleted, and not by this worker"
    return ""


def _lost(what: str, code: int = -Signals.SIGKILL) -> Exit:
    """Return the end of a child that the cluster has ended, which is no failure of the body."""
    return Exit(code, error=child_lost(f"{what}; the body had not finished"))


def exit_at_deadline(options: KubeOptions, code: int = -Signals.SIGKILL) -> Exit:
    """Return the end of a child that has used up its time."""
    limit = f"{options.deadline} s, the runner option deadline" if options.deadline else "its deadline"
    return Exit(code, "timeout", Failure("TimeoutError", f"the body ran longer than {limit}"))
