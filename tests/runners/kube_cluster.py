"""What is behind the tests' API server: its objects and their history, a Job controller, and one node that runs pods.

A pod is a real process group of this machine with the pod's command, environment and folder. What goes wrong in clusters
can be switched on. The behaviour is that of the Kubernetes documentation, as far as the runner can see it.
"""

from __future__ import annotations

import itertools
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

__all__ = ["Cluster", "copied"]

T = TypeVar("T")

IMAGE = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/", "LANG": "C.UTF-8", "IMAGE": "base"}
"""The environment that the image brings along."""


class Cluster:
    """One namespace. Attributes that tests set are the faults; everything is guarded by `changed`, a condition."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.folder = Path(tempfile.mkdtemp(prefix="lakeshore-kube-"))
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.manifests: list[dict[str, Any]] = []
        """Every Job that was ever made, as it was sent."""
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.compacted = 0
        """Versions up to this one are too old to be watched from."""
        self.claims: dict[str, Path | None] = {"work": None, "root": None}
        """Claims there are, and where they are on this machine; None: that is not checked."""
        self.waiting: tuple[str, str] | None = None
        """Why containers do not start: reason and message."""
        self.unschedulable: str | None = None
        self.no_pods: str | None = None
        """Why no pods can be made."""
        self.lost_node = False
        """The node runs what it ran, and receives no further orders."""
        self.kill_as: dict[str, str] = {}
        """Reasons for containers that a SIGKILL ends, by Job."""
        self._versions = itertools.count(100)
        self.version = 100
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def close(self) -> None:
        with self.changed:
            for process in self._running.values():
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self._running and time.monotonic() < deadline:
            time.sleep(0.01)
        shutil.rmtree(self.folder)

    # Objects

    def touch(self, what: str, pod: dict[str, Any]) -> None:
        """Write a change of a pod down."""
        with self.changed:
            self.version = next(self._versions)
            pod["metadata"]["resourceVersion"] = str(self.version)
            self.history.append((self.version, what, copied(pod)))
            self.changed.notify_all()

    def compact(self) -> None:
        """Forget what happened before now."""
        with self.changed:
            self.version = self.compacted = next(self._versions)
            self.history.clear()
            self.changed.notify_all()

    def warn(self, kind: str, name: str, reason: str, message: str) -> None:
        about = {"kind": kind, "name": name}
        when = f"2026-01-01T00:00:{len(self.events):02}Z"
        event = {"involvedObject": about, "type": "Warning", "reason": reason, "message": message}
        self.events.append({**event, "lastTimestamp": when})

    def create(self, job: dict[str, Any]) -> dict[str, Any]:
        """Take a new Job, and make its pod soon."""
        with self.changed:
            self.manifests.append(copied(job))
            self.version = next(self._versions)
            job["metadata"].update(uid=secrets.token_hex(8), resourceVersion=str(self.version))
            job["status"] = {}
            self.jobs[job["metadata"]["name"]] = job
        threading.Thread(target=self._control, args=(job,), daemon=True).start()
        return job

    def delete_job(self, name: str) -> dict[str, Any]:
        """Delete in the foreground: the Job goes when its pods are gone."""
        with self.changed:
            job = self.jobs[name]
            job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
            for pod in self.of(name):
                self.delete_pod(pod["metadata"]["name"])
            if not self.of(name):
                self.jobs.pop(name, None)
        return job

    def of(self, job: str) -> list[dict[str, Any]]:
        return [pod for pod in self.pods.values() if pod["metadata"]["labels"]["job-name"] == job]

    def delete_pod(self, name: str, grace: int | None = None) -> dict[str, Any]:
        """Have a pod end; with a grace of 0 it is gone at once."""
        with self.changed:
            pod = self.pods[name]
            usual = pod["spec"]["terminationGracePeriodSeconds"]
            grace = usual if grace is None else grace
            if grace == 0:
                self._kill(name)
                self._remove(pod)
            elif "deletionTimestamp" not in pod["metadata"]:
                pod["metadata"].update(deletionTimestamp="2026-01-01T00:00:00Z", deletionGracePeriodSeconds=grace)
                self.touch("MODIFIED", pod)
                if name not in self._running and not self.lost_node:
                    self._remove(pod)
                elif not self.lost_node:
                    self._stop(name, grace)
        return pod

    def _remove(self, pod: dict[str, Any]) -> None:
        name, job = pod["metadata"]["name"], pod["metadata"]["labels"]["job-name"]
        if self.pods.pop(name, None) is None:
            return
        self.touch("DELETED", pod)
        if not self.of(job) and "deletionTimestamp" in self.jobs.get(job, {}).get("metadata", {}):
            del self.jobs[job]

    # The Job controller

    def _control(self, job: dict[str, Any]) -> None:
        name = job["metadata"]["name"]
        while self.no_pods is not None:
            if not any(event["involvedObject"]["name"] == name for event in self.events):
                self.warn("Job", name, "FailedCreate", self.no_pods)
            if self.jobs.get(name) is not job:
                return
            time.sleep(0.01)
        template = copied(job["spec"]["template"])
        with self.changed:
            if self.jobs.get(name) is not job or "deletionTimestamp" in job["metadata"]:
                return
            labels = template["metadata"]["labels"]
            meta: dict[str, Any] = {"name": f"{name}-{secrets.token_hex(3)}", "labels": {**labels}}
            meta["labels"]["job-name"] = name
            pod = {"metadata": meta, "spec": template["spec"], "status": {"phase": "Pending"}}
            self.pods[meta["name"]] = pod
            self.touch("ADDED", pod)
        self._run(pod)

    def _fail(self, name: str, reason: str, message: str) -> None:
        with self.changed:
            if name in self.jobs:
                failed = {"type": "Failed", "status": "True", "reason": reason, "message": message}
                self.jobs[name]["status"]["conditions"] = [failed]

    # The node

    def _run(self, pod: dict[str, Any]) -> None:
        """The life of a pod."""
        name = pod["metadata"]["name"]
        if not self._placed(pod):
            return
        (container,) = pod["spec"]["containers"]
        wrong = self.waiting or self._unmountable(pod, container)
        if wrong is not None:
            self._say(pod, container, {"waiting": {"reason": wrong[0], "message": wrong[1]}})
            return
        self._say(pod, container, {"waiting": {"reason": "ContainerCreating"}})
        with self.changed:
            if name not in self.pods:
                return
            try:
                process = self._running[name] = self._start(pod, container)
            except OSError as exc:
                ended = {"exitCode": 128, "reason": "StartError", "message": f"exec: {exc}"}
                self._say(pod, container, {"terminated": ended}, "Failed")
                return
        self._say(pod, container, {"running": {"startedAt": "2026-01-01T00:00:00Z"}}, "Running")
        late = pod["spec"].get("activeDeadlineSeconds")
        with suppress(subprocess.TimeoutExpired):
            process.wait(late)
            late = None
        if late is not None:
            pod["status"].update(
                reason="DeadlineExceeded", message="Pod was active on the node longer than the deadline"
            )
            self._stop(name, pod["spec"]["terminationGracePeriodSeconds"])
            process.wait()
        self._ended(pod, container, process)

    def _placed(self, pod: dict[str, Any]) -> bool:
        """Wait until the node takes the pod; whether it still is there then."""
        missing = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"].get("volumes", [])
            if volume.get("persistentVolumeClaim", {}).get("claimName", "work") not in self.claims
        ]
        said = False
        while (why := f'persistentvolumeclaim "{missing[0]}" not found' if missing else self.unschedulable) is not None:
            with self.changed:
                if pod["metadata"]["name"] not in self.pods:
                    return False
                if not said:
                    said, condition = True, {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
                    pod["status"]["conditions"] = [{**condition, "message": why}]
                    self.touch("MODIFIED", pod)
            time.sleep(0.01)
        with self.changed:
            pod["status"]["conditions"] = [{"type": "PodScheduled", "status": "True"}]
            return pod["metadata"]["name"] in self.pods

    def _unmountable(self, pod: dict[str, Any], container: dict[str, Any]) -> tuple[str, str] | None:
        """There are no mounts here, so what is mounted has to lie where it is seen."""
        claims = {
            volume["name"]: self.claims[volume["persistentVolumeClaim"]["claimName"]]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        }
        seen = [Path(mount["mountPath"]) for mount in container["volumeMounts"]]
        for mount in container["volumeMounts"]:
            place = claims.get(mount["name"])
            if place is not None and place / mount.get("subPath", "") != Path(mount["mountPath"]):
                return "CreateContainerConfigError", f"{place / mount.get('subPath', '')} is not {mount['mountPath']}"
        if not any(Path(container["workingDir"]).is_relative_to(path) for path in seen):
            return "CreateContainerError", f"{container['workingDir']} is in no volume"
        return None

    def _start(self, pod: dict[str, Any], container: dict[str, Any]) -> subprocess.Popen[bytes]:
        environ = dict(IMAGE)
        for one in container["env"]:
            environ[one["name"]] = _expanded(one["value"], environ)
        user = pod["spec"]["securityContext"]
        other = os.geteuid() == 0 and (user["runAsUser"], user["runAsGroup"]) != (0, 0)
        with open(self.folder / pod["metadata"]["name"], "wb") as log:
            return subprocess.Popen(
                [_expanded(word, environ) for word in container["command"]],
                cwd=container["workingDir"],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                user=user["runAsUser"] if other else None,
                group=user["runAsGroup"] if other else None,
                extra_groups=[] if other else None,
            )

    def _ended(self, pod: dict[str, Any], container: dict[str, Any], process: subprocess.Popen[bytes]) -> None:
        name = pod["metadata"]["name"]
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with self.changed:
            del self._running[name]
            code = process.returncode if process.returncode >= 0 else 128 - process.returncode
            reason = "Completed" if code == 0 else "Error"
            if code == 128 + signal.SIGKILL:
                reason = self.kill_as.get(pod["metadata"]["labels"]["job-name"], reason)
            phase = "Succeeded" if code == 0 and "reason" not in pod["status"] else "Failed"
            self._say(pod, container, {"terminated": {"exitCode": code, "reason": reason}}, phase)
            if "deletionTimestamp" in pod["metadata"] and not self.lost_node:
                self._remove(pod)
            elif phase == "Failed":
                self._fail(pod["metadata"]["labels"]["job-name"], "BackoffLimitExceeded", "Job has reached the limit")

    def _say(
        self, pod: dict[str, Any], container: dict[str, Any], state: dict[str, Any], phase: str | None = None
    ) -> None:
        with self.changed:
            if pod["metadata"]["name"] not in self.pods:
                return
            about = {"name": container["name"], "image": container["image"], "state": state}
            pod["status"]["containerStatuses"] = [about]
            pod["status"]["phase"] = phase or pod["status"]["phase"]
            self.touch("MODIFIED", pod)

    def _stop(self, name: str, grace: float) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        with self.changed:
            process = self._running.get(name)
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)

        def finish() -> None:
            deadline = time.monotonic() + grace
            while self._running.get(name) is process and time.monotonic() < deadline:
                time.sleep(0.01)
            self._kill(name)

        threading.Thread(target=finish, daemon=True).start()

    def _kill(self, name: str) -> None:
        with self.changed:
            process = self._running.get(name)
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    # What happens to pods

    def running(self, id: str) -> str | None:
        """The name of the pod in which that invocation runs."""
        with self.changed:
            for name in self._running:
                annotations = self.jobs.get(self.pods[name]["metadata"]["labels"]["job-name"], {}).get("metadata", {})
                if annotations.get("annotations", {}).get("dreamlake.lakeshore/id") == id:
                    return name
        return None

    def kill(self, pod: str, reason: str = "Error") -> None:
        """SIGKILL its process, for that reason."""
        with self.changed:
            self.kill_as[self.pods[pod]["metadata"]["labels"]["job-name"]] = reason
        self._kill(pod)

    def evict(self, pod: str) -> None:
        """The node needs its memory for others: the pod has failed, and its container ends in its grace."""
        with self.changed:
            message = "The node was low on resource: memory."
            self.pods[pod]["status"].update(phase="Failed", reason="Evicted", message=message)
            self.touch("MODIFIED", self.pods[pod])
            self._stop(pod, self.pods[pod]["spec"]["terminationGracePeriodSeconds"])

    def disrupt(self, pod: str, reason: str, message: str) -> None:
        """Somebody with a right to it has the pod end: a drain, a preemption."""
        with self.changed:
            condition = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
            self.pods[pod]["status"].setdefault("conditions", []).append(condition)
            self.delete_pod(pod)

    def vanish(self, pod: str) -> None:
        """The pod is gone, and nobody has seen how it ended."""
        with self.changed:
            found = self.pods[pod]
            self._kill(pod)
            self._remove(found)

    def log(self, pod: str) -> bytes:
        try:
            return (self.folder / pod).read_bytes()
        except FileNotFoundError:
            return b""


def copied(value: T) -> T:
    """JSON that nobody else changes."""
    found: Any = value
    if isinstance(value, dict):
        found = {name: copied(one) for name, one in value.items()}
    elif isinstance(value, list):
        found = [copied(one) for one in value]
    return cast("T", found)


def _expanded(text: str, environ: dict[str, str]) -> str:
    """What Kubernetes makes of `$(NAME)` and `$$`."""

    def one(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environ.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]*)\)", one, text)
