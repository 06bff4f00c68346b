"""A Job and its pod, and what that says of the child in it: that it waits, runs, cannot run, or how it has ended."""

from __future__ import annotations

from signal import Signals
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import anyio

from ...planes.contract.records import Failure
from ...worker.runner import Exit
from .job import CHILD, MARK
from .json_fields import entries, meta, part

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .job import Shape

__all__ = ["Job", "Look", "deadline_passed", "disrupted", "look"]

_PULL = frozenset(
    "ErrImagePull ImagePullBackOff InvalidImageName ErrImageNeverPull ImageInspectError RegistryUnavailable "
    "SignatureValidationFailed".split()
)
_CREATE = frozenset(
    "CreateContainerConfigError CreateContainerError RunContainerError ContainerCannotRun StartError "
    "PreCreateHookError PreStartHookError".split()
)
_TAKEN = frozenset("Evicted NodeLost NodeShutdown Shutdown Terminated Preempting Preempted NodeAffinity".split())
"""Reasons of a pod that was ended through no fault of its own; those that begin with `OutOf` or `Unexpected` are others."""


class Job:
    """One Job, and what is known of its pod. `mark`: the label by which it is told from others that had its name."""

    def __init__(self, name: str, id: str, mark: str, shape: Shape) -> None:
        self.name, self.id, self.mark = name, id, mark
        self.made = self.asked = False
        """It may be there; it is to end."""
        self.pod: dict[str, Any] = {}
        """What was last told of its pod, which may be gone."""
        self.changed = anyio.Event()
        self.told = False
        self.since = anyio.current_time()
        """When it began, or when others began to delete its pod."""
        self._there = set[str]()
        self._shape = shape

    @property
    def pod_name(self) -> str:
        return meta(self.pod, "name")

    @property
    def gone(self) -> bool:
        """It had a pod, and has none."""
        return bool(self.pod) and not self._there

    def look(self) -> Look:
        return look(self.pod, self._shape, asked=self.asked, gone=self.gone)

    def see(self, pod: Mapping[str, Any], *, gone: bool = False) -> None:
        """Take what is told of a pod of this Job: the first one is the child's, and should be the only one."""
        if part(pod, "metadata", "labels").get(MARK) != self.mark:
            return
        name = meta(pod, "name")
        if gone:
            self._there.discard(name)
        else:
            self._there.add(name)
        if not self.pod or meta(self.pod, "name") == name:
            if meta(pod, "deletionTimestamp") and not meta(self.pod, "deletionTimestamp"):
                self.since = anyio.current_time()
            self.pod = dict(pod)
        self.wake()

    def missed(self, names: set[str]) -> None:
        """A list has these pods and no others."""
        if not self._there <= names:
            self._there &= names
            self.wake()

    def wake(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    async def change(self, seconds: float) -> None:
        """Wait until there is news, for so long at most."""
        changed = self.changed
        with anyio.move_on_after(seconds):
            await changed.wait()


class Look(NamedTuple):
    """What is known of a child. text: why it waits, or what keeps it from running. exit: how it has ended, as far as is
    known: of one that is `gone` nobody has said, and something of it may run still."""

    state: Literal["waits", "fails", "runs", "ended", "gone"]
    text: str = ""
    exit: Exit | None = None


def look(pod: Mapping[str, Any], shape: Shape, *, asked: bool, gone: bool) -> Look:
    """What a pod says. asked: this worker has had it deleted, so that its end is no accident. gone: it is no more there,
    and this is what it said last."""
    status = part(pod, "status")
    told = [*entries(status.get("initContainerStatuses")), *entries(status.get("containerStatuses"))]
    child = [one for one in entries(status.get("containerStatuses")) if one.get("name") == CHILD]
    for one in told:
        waiting = part(one, "state", "waiting")
        text = f"{waiting.get('reason')}: {waiting.get('message') or 'no more is known'}"
        if waiting.get("reason") in _PULL:
            return Look("fails", f"the image {one.get('image') or shape.image} cannot be had: {text}")
        if waiting.get("reason") in _CREATE:
            return Look("fails", f"the container cannot be made: {text}")
    ended = part(child[0], "state", "terminated") if child else {}
    if ended.get("reason") in _CREATE:
        return Look("fails", f"the container cannot be started: {ended.get('reason')}: {ended.get('message') or ''}")
    if ended or status.get("phase") in (
        "Succeeded",
        "Failed",
    ):  # a pod may have failed before its containers have ended
        return Look("ended" if ended else "gone", exit=_ended(pod, status, ended, shape, asked))
    if gone:
        taken = _taken(pod, status) or "its pod was deleted, and not by this worker"
        return Look("gone", exit=Exit(-Signals.SIGKILL) if asked else disrupted(taken))
    if child and part(child[0], "state", "running"):
        return Look("runs")
    return _waits(status, child)


def _waits(status: Mapping[str, Any], child: list[dict[str, Any]]) -> Look:
    for condition in entries(status.get("conditions")):
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            text = str(condition.get("message") or condition.get("reason") or "no node takes it")
            if "persistentvolumeclaim" in text and "not found" in text:
                return Look("fails", f"there is no place for its pod: {text}")
            return Look("waits", text)
    waiting = part(child[0], "state", "waiting") if child else {}
    return Look("waits", str(waiting.get("message") or ""))


def _ended(
    pod: Mapping[str, Any], status: Mapping[str, Any], ended: Mapping[str, Any], shape: Shape, asked: bool
) -> Exit:
    code = _code(ended)
    if status.get("reason") == "DeadlineExceeded":
        return deadline_passed(shape, code)
    if code == 0:
        return Exit(0)
    taken = _taken(pod, status)
    if taken and not asked:
        return disrupted(taken, code)
    if ended.get("reason") == "OOMKilled":
        most = shape.resources.get("memory")
        limit = "its node had no more" if most is None else f"it may use {most} bytes, the runner option memory"
        return Exit(code, error=Failure("DaemonError", f"the child was killed for want of memory (OOMKilled): {limit}"))
    if not ended and not asked:
        said = f"{status.get('reason') or 'Failed'}: {status.get('message') or 'no more is known'}"
        return disrupted(f"its pod failed ({said})", code)
    return Exit(code)


def _code(ended: Mapping[str, Any]) -> int:
    """The exit code; that of a process which a signal killed is told as 128 and its number."""
    code = ended.get("exitCode")
    if not isinstance(code, int):
        return -Signals.SIGKILL
    if isinstance(number := ended.get("signal"), int) and number > 0:
        return -number
    return 128 - code if code > 128 and code - 128 in {*Signals} else code


def _taken(pod: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """Why the pod was ended, where that was done to it; "" where it was not."""
    reason = str(status.get("reason") or "")
    if reason in _TAKEN or reason.startswith(("OutOf", "Unexpected")):
        return f"its pod was taken from its node ({reason}: {status.get('message') or 'no more is known'})"
    for condition in entries(status.get("conditions")):
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            text = condition.get("message") or "no more is known"
            return f"its pod was taken from its node ({condition.get('reason')}: {text})"
    if part(pod, "metadata").get("deletionTimestamp"):
        return "its pod was deleted, and not by this worker"
    return ""


def disrupted(what: str, code: int = -Signals.SIGKILL) -> Exit:
    """The cluster has ended the child, which is no failure of the body: another attempt may go well."""
    return Exit(code, error=Failure("WorkerLost", f"{what}; the body had not finished"))


def deadline_passed(shape: Shape, code: int = -Signals.SIGKILL) -> Exit:
    """The child has used up its time."""
    how_long = "its deadline" if shape.deadline is None else f"{shape.deadline} s, the runner option deadline"
    return Exit(code, "timeout", Failure("TimeoutError", f"the body ran longer than {how_long}"))
