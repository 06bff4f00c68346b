"""The Job of one invocation: what the options say of it, its name and labels, and the manifest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, cast

from ...errors import DispatchError
from ..options import amount, words
from .json_fields import entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ...worker.runner import Launch

__all__ = ["CHILD", "FOLDER", "INVOCATION", "OPTIONS", "WORKER", "Shape", "User", "job_name", "label", "manifest"]

ENTRY = ("-P", "-m", "dreamlake.lakeshore.daemon.entry")
"""-P: the folder of the invocation is no place to import from."""
CHILD = "child"
"""The name of the container."""
_OURS = "dreamlake.lakeshore/"
WORKER, INVOCATION, ATTEMPT, JOB, MARK = (
    f"{_OURS}{name}" for name in ("worker", "invocation", "attempt", "job", "mark")
)
PLACE, HOST = f"{_OURS}place", f"{_OURS}host"
FOLDER = f"{_OURS}folder"
GRACE, TTL = 5.0, 3600.0
OPTIONS = (
    "image claim mount sub-path root-claim root-sub-path namespace python service-account cpus memory gpus node-selector "
    "template image-pull-policy image-pull-secret deadline grace ttl"
).split()
_PULL = ("Always", "IfNotPresent", "Never")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")
_NUMBERS = re.compile(r"([0-9]{1,10})(:([0-9]{1,10}))?")


@dataclass(frozen=True)
class Shape:
    """What all Jobs of a runner have in common. grace, deadline, ttl: seconds.

    claim: the volume claim that holds the workdir: what lies in its folder `sub_path` is what this worker sees at `mount`
    (None: at its workdir). root_claim: the same for the root of keys. resources: what the container is given, and held to.
    template: merged into the pod's spec.
    """

    image: str
    claim: str
    mount: Path | None
    sub_path: str
    root_claim: str | None
    root_sub_path: str
    namespace: str
    python: str
    service_account: str | None
    resources: Mapping[str, str]
    node_selector: Mapping[str, str]
    template: Mapping[str, Any]
    pull_policy: str | None
    pull_secrets: tuple[str, ...]
    deadline: int | None
    grace: int
    ttl: int

    @classmethod
    def read(cls, options: Mapping[str, str], namespace: str) -> Shape:
        """What the options say. Raises ValueError."""
        for name in ("image", "claim"):
            if not options.get(name):
                raise ValueError(f"the kube runner needs --runner-option {name}=NAME: {_NEEDED[name]}")
        mount, policy = options.get("mount"), options.get("image-pull-policy")
        if mount is not None and not mount.startswith("/"):
            raise ValueError(f"expected an absolute path for the runner option mount, got {mount!r}")
        if policy is not None and policy not in _PULL:
            raise ValueError(f"expected {', '.join(_PULL)} for the runner option image-pull-policy, got {policy!r}")
        deadline = _seconds(options, "deadline", 0.0)
        return cls(
            options["image"],
            options["claim"],
            None if mount is None else Path(os.path.normpath(mount)),
            _inner(options, "sub-path"),
            options.get("root-claim"),
            _inner(options, "root-sub-path"),
            options.get("namespace") or namespace,
            options.get("python") or "python3",
            options.get("service-account"),
            _resources(options),
            _pairs("node-selector", options.get("node-selector")),
            _template(options.get("template")),
            policy,
            tuple(words(options.get("image-pull-secret"))),
            deadline or None,
            max(1, _seconds(options, "grace", GRACE)),
            _seconds(options, "ttl", TTL),
        )

    def place(self) -> dict[str, str]:
        """The labels of all Jobs of workers on this machine that share this one's claim."""
        return {PLACE: label(f"{self.claim}/{self.sub_path}"), HOST: label(socket.gethostname())}


_NEEDED = {
    "image": "it is where children run, and has to hold Python and this package",
    "claim": "the persistent volume claim that this worker's workdir lies on, through which children get their work",
}


@dataclass(frozen=True)
class User:
    """Whom a child runs as. Files of this worker are readable for itself only, so it is itself unless told otherwise."""

    uid: int
    gid: int

    @classmethod
    def read(cls, as_user: str | None) -> User:
        """Raises DispatchError for a name, and for a user that this worker could not give a folder to."""
        if as_user is None:
            return cls(os.geteuid(), os.getegid())
        found = _NUMBERS.fullmatch(as_user)
        if found is None:
            raise DispatchError(
                f"`as_user` names {as_user!r}, and the kube runner takes numbers only, UID or UID:GID: "
                "names mean what the image says they do"
            )
        user = cls(int(found[1]), int(found[3] or found[1]))
        if user.uid != os.geteuid() and os.geteuid() != 0:
            raise DispatchError(
                f"`as_user` names {as_user!r}, and only a worker that runs as root can give another user its folder"
            )
        return user

    def give(self, folder: Path, *names: str) -> None:
        """Have the folder be this user's, and those files in it."""
        if (self.uid, self.gid) != (os.geteuid(), os.getegid()):
            for path in (*(folder / name for name in names), folder):
                os.chown(path, self.uid, self.gid)


def job_name(id: str, attempt: int) -> str:
    """The name of an attempt's Job: that of a ULID is in it; other ids may have letters that no name may have."""
    plain = id.lower() if re.fullmatch("[0-9A-Z]{26}", id) else hashlib.sha256(id.encode()).hexdigest()[:26]
    return f"lakeshore-{plain}-{attempt}"


def label(text: str) -> str:
    """The text as the value of a label, where it can be one; otherwise a hash of it."""
    return text if _LABEL.fullmatch(text) else hashlib.sha256(text.encode()).hexdigest()[:40]


def manifest(
    shape: Shape, launch: Launch, worker: str, mark: str, environ: Mapping[str, str], user: User
) -> dict[str, Any]:
    """The Job that runs `launch` for the runner `worker`; `mark` tells it from others that had its name.

    Raises DispatchError for a folder that the claim cannot hold.
    """
    name = job_name(launch.id, launch.attempt)
    labels = {
        "app.kubernetes.io/managed-by": "lakeshore",
        WORKER: worker,
        INVOCATION: label(launch.id),
        ATTEMPT: str(launch.attempt),
        JOB: name,
        MARK: mark,
        **shape.place(),
    }
    spec = _pod(shape, launch, environ, user)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "namespace": shape.namespace,
            "labels": labels,
            "annotations": {FOLDER: str(launch.folder.path), f"{_OURS}id": launch.id},
        },
        "spec": {
            "backoffLimit": 0,
            "completions": 1,
            "parallelism": 1,
            "ttlSecondsAfterFinished": shape.ttl,
            "template": {"metadata": {"labels": labels}, "spec": _merged(spec, shape.template)},
        },
    }


def _pod(shape: Shape, launch: Launch, environ: Mapping[str, str], user: User) -> dict[str, Any]:
    said = ["bash", "-c", launch.script] if launch.script is not None else [shape.python, *ENTRY]
    volumes, mounts = _volumes(shape, launch)
    container: dict[str, Any] = {
        "name": CHILD,
        "image": shape.image,
        "command": [_plain(word) for word in said],
        "workingDir": str(launch.folder.path),
        "env": [{"name": name, "value": _plain(value)} for name, value in sorted(environ.items())],
        "volumeMounts": mounts,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
        "securityContext": {
            "runAsUser": user.uid,
            "runAsGroup": user.gid,
            "runAsNonRoot": user.uid != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # The child is not process 1 then, for which signals mean something else, and who reaps those it leaves is another.
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "automountServiceAccountToken": shape.service_account is not None,
        "terminationGracePeriodSeconds": shape.grace,
    }
    if shape.resources:
        container["resources"] = {"limits": dict(shape.resources), "requests": dict(shape.resources)}
    if shape.pull_policy is not None:
        container["imagePullPolicy"] = shape.pull_policy
    if shape.service_account is not None:
        pod["serviceAccountName"] = shape.service_account
    if shape.node_selector:
        pod["nodeSelector"] = dict(shape.node_selector)
    if shape.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in shape.pull_secrets]
    if shape.deadline is not None:  # the pod's own, which begins when it has a node: waiting for one is no fault of it
        pod["activeDeadlineSeconds"] = shape.deadline
    return pod


def _volumes(shape: Shape, launch: Launch) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The child's folder, and the root of keys, each under the path that it has here."""
    folder = launch.folder.path
    mount = shape.mount or folder.parent
    if not folder.is_relative_to(mount):
        raise DispatchError(
            f"the claim {shape.claim} is mounted at {mount} (the runner option mount), and the workdir {folder.parent} does "
            "not lie there: children could not see it"
        )
    volumes, mounts = [_claimed("work", shape.claim)], [_mount("work", folder, folder, mount, shape.sub_path)]
    said = launch.environ.get("LAKESHORE_ROOT")
    root = None if said is None else Path(said)
    if root is not None and shape.root_claim is not None:
        name = "work" if shape.root_claim == shape.claim else "root"
        if name == "root":
            volumes.append(_claimed(name, shape.root_claim))
        mounts.append(_mount(name, root, root, root, shape.root_sub_path))
    elif root is not None and root.is_relative_to(mount):
        mounts.append(_mount("work", root, root, mount, shape.sub_path))
    return volumes, mounts


def _claimed(name: str, claim: str) -> dict[str, Any]:
    return {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def _mount(name: str, at: Path, path: Path, mount: Path, sub_path: str) -> dict[str, Any]:
    """`path` at `at`, of a volume whose folder `sub_path` is at `mount` here."""
    inside = str(PurePosixPath(sub_path, path.relative_to(mount)))
    return {"name": name, "mountPath": str(at), **({} if inside == "." else {"subPath": inside})}


def _plain(text: str) -> str:
    """Kubernetes replaces `$(NAME)` in commands and in values, and `$$` by `$`."""
    return text.replace("$", "$$")


def _merged(base: Any, patch: Any) -> Any:
    """As RFC 7386 merges JSON, and lists of what has a name (of mounts: a path) item by item, as kubectl does."""
    if isinstance(base, dict) and isinstance(patch, dict):
        found = dict(cast("dict[str, Any]", base))
        for name, value in cast("dict[str, Any]", patch).items():
            if value is None:
                found.pop(name, None)
            else:
                found[name] = _merged(found.get(name), value)
        return found
    old, new = entries(base), entries(patch)
    for key in ("mountPath", "name"):
        if old and new and all(key in one for one in (*old, *new)):
            by = {one[key]: one for one in old}
            return list({**by, **{one[key]: _merged(by.get(one[key]), one) for one in new}}.values())
    return patch


# --- options ----------------------------------------------------------------------------------------------------------


def _seconds(options: Mapping[str, str], name: str, usual: float) -> int:
    return math.ceil(amount(name, options[name])) if name in options else int(usual)


def _inner(options: Mapping[str, str], name: str) -> str:
    text = options.get(name, "")
    if text.startswith("/") or ".." in PurePosixPath(text).parts:
        raise ValueError(f"expected a path inside the claim for the runner option {name}, got {text!r}")
    return text


def _resources(options: Mapping[str, str]) -> dict[str, str]:
    found = dict[str, str]()
    if "cpus" in options:
        found["cpu"] = f"{math.ceil(_number('cpus', options['cpus']) * 1000)}m"
    if "memory" in options:
        found["memory"] = str(int(amount("memory", options["memory"])))
    if "gpus" in options:
        found["nvidia.com/gpu"] = str(int(_number("gpus", options["gpus"])))
    return found


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e6 or (name == "gpus" and value % 1):
        raise ValueError(f"expected a number from 0 for the runner option {name}, such as 2, got {text!r}")
    return value


def _pairs(name: str, text: str | None) -> dict[str, str]:
    found = dict[str, str]()
    for word in words(text):
        key, given, value = word.partition("=")
        if not key or not given:
            raise ValueError(f"expected NAME=VALUE,NAME=VALUE for the runner option {name}, got {text!r}")
        found[key] = value
    return found


def _template(path: str | None) -> Mapping[str, Any]:
    if path is None:
        return {}
    try:
        found: Any = json.loads(Path(path).read_text())
    except (OSError, ValueError, RecursionError) as exc:
        raise ValueError(f"the runner option template={path} names no file of JSON: {exc}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in {path}, which is merged into the spec of pods, got something else")
    return cast("Mapping[str, Any]", found)
