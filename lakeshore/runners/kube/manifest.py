"""The Job of one invocation: its name, its labels and its manifest."""

from __future__ import annotations

import hashlib
import re
import socket
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from ...errors import DispatchError
from ..commands import child_command
from .json_fields import entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...worker.runner import Launch
    from .options import KubeOptions

__all__ = [
    "CONTAINER",
    "FOLDER",
    "INVOCATION",
    "JOB",
    "NONCE",
    "WORKER",
    "JobPlan",
    "job_name",
    "label",
    "manifest",
    "place_labels",
]

CONTAINER = "child"
"""The name of the container."""
_PREFIX = "dreamlake.lakeshore/"
WORKER = f"{_PREFIX}worker"
INVOCATION = f"{_PREFIX}invocation"
ATTEMPT = f"{_PREFIX}attempt"
JOB = f"{_PREFIX}job"
NONCE = f"{_PREFIX}mark"
"""The label by which a Job differs from others that had its name before."""
PLACE = f"{_PREFIX}place"
HOST = f"{_PREFIX}host"
FOLDER = f"{_PREFIX}folder"
ID = f"{_PREFIX}id"
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_ULID = re.compile("[0-9A-Z]{26}")


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What one Job is made for."""

    launch: Launch
    namespace: str
    worker: str
    """The label of all Jobs of the runner."""
    nonce: str
    """Differs for each Job, also for those that had its name before."""
    environ: Mapping[str, str]
    uid: int
    gid: int


def place_labels(options: KubeOptions) -> dict[str, str]:
    """Return the labels of all Jobs of workers on this machine that share this one's claim."""
    return {PLACE: label(f"{options.claim}/{options.sub_path}"), HOST: label(socket.gethostname())}


def job_name(id: str, attempt: int) -> str:
    """Return the name of an attempt's Job. It contains a ULID; other ids may have letters that names may not have."""
    plain = id.lower() if _ULID.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:26]
    return f"lakeshore-{plain}-{attempt}"


def label(text: str) -> str:
    """Return the text if it can be the value of a label, otherwise a hash of it."""
    return text if _LABEL.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:40]


def manifest(options: KubeOptions, plan: JobPlan) -> dict[str, Any]:
    """Return the Job that runs an invocation. Raises DispatchError for a folder that is not on the claim."""
    launch = plan.launch
    name = job_name(launch.id, launch.attempt)
    labels = {
        "app.kubernetes.io/managed-by": "lakeshore",
        WORKER: plan.worker,
        INVOCATION: label(launch.id),
        ATTEMPT: str(launch.attempt),
        JOB: name,
        NONCE: plan.nonce,
        **place_labels(options),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": plan.namespace,
            "labels": labels,
            "annotations": {FOLDER: str(launch.folder.path), ID: launch.id},
        },
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "ttlSecondsAfterFinished": options.ttl,
            "template": {
                "metadata": {"labels": labels},
                "spec": _merged(_pod(options, plan), options.template or {}),
            },
        },
    }


def _pod(options: KubeOptions, plan: JobPlan) -> dict[str, Any]:
    launch = plan.launch
    volumes, mounts = _volumes(options, launch)
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": options.image,
        "command": [_escaped(word) for word in child_command(launch, options.python)],
        "workingDir": str(launch.folder.path),
        "env": [{"name": name, "value": _escaped(value)} for name, value in sorted(plan.environ.items())],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
        "securityContext": {
            "runAsUser": plan.uid,
            "runAsGroup": plan.gid,
            "runAsNonRoot": plan.uid != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # Then the child is not process 1, for which signals have other effects, and does not have to reap orphans.
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "automountServiceAccountToken": options.service_account is not None,
        "terminationGracePeriodSeconds": options.grace,
    }
    resources = options.resources()
    if resources:
        container["resources"] = {"limits": resources, "requests": dict(resources)}
    if options.image_pull_policy is not None:
        container["imagePullPolicy"] = options.image_pull_policy
    if options.service_account is not None:
        pod["serviceAccountName"] = options.service_account
    if options.node_selector:
        pod["nodeSelector"] = dict(options.node_selector)
    if options.image_pull_secret:
        pod["imagePullSecrets"] = [{"name": name} for name in options.image_pull_secret]
    if options.deadline:  # of the pod, which begins when it has a node: the time before that is not the body's
        pod["activeDeadlineSeconds"] = options.deadline
    return pod


def _volumes(options: KubeOptions, launch: Launch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the volumes of the pod, and the mounts of the child's folder and of the root of keys, at their paths here."""
    folder = launch.folder.path
    mount = options.mount or folder.parent
    if not folder.is_relative_to(mount):
        raise DispatchError(
            f"the claim {options.claim} is mounted at {mount} (the runner option mount), and the workdir {folder.parent} "
            "is not in that folder: children could not see it"
        )
    volumes = [_claimed("work", options.claim)]
    mounts = [_mount("work", folder, mount, options.sub_path)]
    if "LAKESHORE_ROOT" not in launch.environ:
        return volumes, mounts
    root = Path(launch.environ["LAKESHORE_ROOT"])
    if options.root_claim is not None:
        name = "work" if options.root_claim == options.claim else "root"
        if name == "root":
            volumes.append(_claimed(name, options.root_claim))
        mounts.append(_mount(name, root, root, options.root_sub_path))
    elif root.is_relative_to(mount):
        mounts.append(_mount("work", root, mount, options.sub_path))
    return volumes, mounts


def _claimed(name: str, claim: str) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def _mount(volume: str, path: Path, mount: Path, sub_path: str) -> dict[str, Any]:
    """Return the mount of `path`, at that path, of a volume whose folder `sub_path` is at `mount` here."""
    found = {"name": volume, "mountPath": str(path)}
    inside = str(PurePosixPath(sub_path, path.relative_to(mount)))
    if inside != ".":
        found["subPath"] = inside
    return found


def _escaped(value: str) -> str:
    """Return the text as Kubernetes takes it: it replaces `$(NAME)` in commands and in values, and `$$` by `$`."""
    return value.replace("$", "$$")


def _merged(base: Any, patch: Any) -> Any:
    """Merge JSON as RFC 7386 does, and lists of objects with a name (of mounts: a path) item by item, as kubectl does."""
    if isinstance(base, dict) and isinstance(patch, dict):
        found = dict(cast("dict[str, Any]", base))
        for name, value in cast("dict[str, Any]", patch).items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = _merged(found.get(name), value)
        return found
    old = entries(base)
    new = entries(patch)
    for key in ("mountPath", "name"):
        if old and new and all(key in item for item in (*old, *new)):
            by_key = {item[key]: item for item in old}
            for item in new:
                by_key[item[key]] = _merged(by_key.get(item[key]), item)
            return list(by_key.values())
    return patch
