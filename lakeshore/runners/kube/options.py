"""The options of the kube runner."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping  # noqa: TC003 -- `read_options` reads the annotations
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, cast

from ..options import Option, amount, choice, whole_amount, words

__all__ = ["KubeOptions"]

GRACE = 5
TTL = 3600
POLL_INTERVAL = 30.0


def _absolute_path(name: str, value: str) -> Path:
    if not value.startswith("/"):
        raise ValueError(f"expected an absolute path for the runner option {name}, got {value!r}")
    return Path(os.path.normpath(value))


def _inner_path(name: str, value: str) -> str:
    if value.startswith("/") or ".." in PurePosixPath(value).parts:
        raise ValueError(f"expected a path inside the claim for the runner option {name}, got {value!r}")
    return value


def _config_path(name: str, value: str) -> str:
    return os.path.abspath(os.path.expanduser(value))


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 <= number < 1e6:
        raise ValueError(f"expected a number from 0 for the runner option {name}, such as 2, got {value!r}")
    return number


def _whole_number(name: str, value: str) -> int:
    number = _number(name, value)
    if number % 1:
        raise ValueError(f"expected a whole number from 0 for the runner option {name}, such as 2, got {value!r}")
    return int(number)


def _whole_seconds(name: str, value: str) -> int:
    return math.ceil(amount(name, value))


def _grace(name: str, value: str) -> int:
    return max(1, _whole_seconds(name, value))


def _interval(name: str, value: str) -> float:
    seconds = amount(name, value)
    if seconds < 1:
        raise ValueError(f"expected a number from 1 for the runner option {name}, got {value!r}")
    return seconds


def _pairs(name: str, value: str) -> dict[str, str]:
    found = dict[str, str]()
    for word in words(name, value):
        key, _, inner = word.partition("=")
        if not key or not inner:
            raise ValueError(f"expected NAME=VALUE,NAME=VALUE for the runner option {name}, got {value!r}")
        found[key] = inner
    return found


def _json_file(name: str, value: str) -> Mapping[str, Any]:
    try:
        found: Any = json.loads(Path(value).read_text())
    except (OSError, ValueError, RecursionError) as exc:
        raise ValueError(f"expected a file of JSON for the runner option {name}, got {value!r}: {exc}") from None
    if not isinstance(found, dict):
        raise ValueError(f"expected an object in {value}, which is merged into the spec of pods, got something else")
    return cast("Mapping[str, Any]", found)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeOptions:
    """The options of the kube runner."""

    notes: ClassVar[str] = (
        "The workdir has to be on the volume of the claim. The variables of children, those of --env too, are in their "
        "Jobs, where everybody who may read Jobs can see them."
    )

    image: Annotated[str, Option("NAME", "The image to run, which has Python and this package.")]
    claim: Annotated[str, Option("NAME", "The persistent volume claim that this worker's workdir is on.")]
    mount: Annotated[
        Path | None, Option("PATH", "Where this worker sees that volume.  [default: the workdir]", _absolute_path)
    ] = None
    sub_path: Annotated[
        str, Option("PATH", "The folder of the volume that is seen there.  [default: all of it]", _inner_path)
    ] = ""
    root_claim: Annotated[str | None, Option("NAME", "The claim that the root of keys is on.")] = None
    root_sub_path: Annotated[str, Option("PATH", "The folder of that claim that is the root of keys.", _inner_path)] = (
        ""
    )
    kubeconfig: Annotated[str | None, Option("FILE", "The kubeconfig to use.", _config_path)] = None
    context: Annotated[str | None, Option("NAME", "The context of the kubeconfig to use.")] = None
    namespace: Annotated[str | None, Option("NAME", "The namespace of Jobs.  [default: that of the context]")] = None
    python: Annotated[str, Option("PATH", "The Python in the image that runs children.")] = "python3"
    service_account: Annotated[str | None, Option("NAME", "The account of pods, whose token they get.")] = None
    cpus: Annotated[float | None, Option("NUMBER", "The CPUs of a pod, such as 1.5.", _number)] = None
    memory: Annotated[int | None, Option("BYTES", "The memory of a pod, such as 8g.", whole_amount)] = None
    gpus: Annotated[int | None, Option("NUMBER", "The NVIDIA GPUs of a pod.", _whole_number)] = None
    node_selector: Annotated[
        Mapping[str, str] | None, Option("NAME=VALUE,...", "Labels of the nodes to run on.", _pairs)
    ] = None
    template: Annotated[
        Mapping[str, Any] | None, Option("FILE", "JSON that is merged into the spec of pods.", _json_file)
    ] = None
    image_pull_policy: Annotated[
        str | None,
        Option(
            "POLICY",
            "When to pull the image: Always, IfNotPresent or Never.",
            choice("Always", "IfNotPresent", "Never"),
        ),
    ] = None
    image_pull_secret: Annotated[tuple[str, ...], Option("NAME,...", "Secrets to pull the image with.", words)] = ()
    deadline: Annotated[int | None, Option("SECONDS", "Limit of the time that a pod runs.", _whole_seconds)] = None
    grace: Annotated[int, Option("SECONDS", "From SIGTERM to SIGKILL.", _grace)] = GRACE
    ttl: Annotated[int, Option("SECONDS", "How long a Job stays that nobody deletes.", _whole_seconds)] = TTL
    poll: Annotated[float, Option("SECONDS", "Between two lists of all pods, beside the watch.", _interval)] = (
        POLL_INTERVAL
    )

    def resources(self) -> dict[str, str]:
        """Return what the container requests, which is also its limit."""
        found = dict[str, str]()
        if self.cpus is not None:
            found["cpu"] = f"{math.ceil(self.cpus * 1000)}m"
        if self.memory is not None:
            found["memory"] = str(self.memory)
        if self.gpus is not None:
            found["nvidia.com/gpu"] = str(self.gpus)
        return found
