"""The manifest of a Job: what options make of it, that real schemas take it, and options that make no sense."""

from __future__ import annotations

import json
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest
from helpers import needs
from kube_runs import launch

from dreamlake.lakeshore.runners.kube.manifest import JobPlan, _merged, job_name, label, manifest
from dreamlake.lakeshore.runners.kube.options import KubeOptions
from dreamlake.lakeshore.runners.kube.runner import KubeRunner
from dreamlake.lakeshore.runners.options import describe_options, read_options

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dreamlake.lakeshore.worker.runner import Launch

ULID = "01JABCDEFGHJKMNPQRSTVWXYZ0"
NEEDED = {"image": "base:1", "claim": "work"}


def made(tmp_path: Path, options: Mapping[str, str], environ: Mapping[str, str] | None = None, **more: Any) -> Any:
    asked: Launch = launch(tmp_path, id=ULID, **{"script": None, **more})
    asked.folder.remove()
    found = read_options(KubeOptions, "kube", {**NEEDED, **options})
    variables = {**(environ or {}), **asked.environ}
    plan = JobPlan(asked, "lab", "w" * 16, "m" * 16, variables, os.geteuid(), os.getegid())
    return manifest(found, plan)


def everything(tmp_path: Path) -> dict[str, str]:
    template = {
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "priorityClassName": "low",
        "enableServiceLinks": None,
        "containers": [
            {
                "name": "child",
                "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                "envFrom": [{"secretRef": {"name": "tokens"}}],
            }
        ],
        "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
    }
    (tmp_path / "template.json").write_text(json.dumps(template))
    return {
        "mount": str(tmp_path),
        "sub-path": "here",
        "root-claim": "root",
        "root-sub-path": "there",
        "python": "/usr/bin/python3",
        "service-account": "bodies",
        "cpus": "1.5",
        "memory": "2g",
        "gpus": "1",
        "node-selector": "disk=ssd,example.com/zone=a",
        "template": str(tmp_path / "template.json"),
        "image-pull-policy": "IfNotPresent",
        "image-pull-secret": "one,two",
        "deadline": "3600",
        "grace": "7.5",
        "ttl": "60",
    }


@pytest.mark.parametrize("version", ["1.29", "1.33", "1.37"])
def test_real_schemas_take_it(tmp_path: Path, version: str) -> None:
    validate = needs("kubernetes_validate").validate
    least, most = made(tmp_path, {}), made(tmp_path, everything(tmp_path), {"A": "1"})
    for job in (least, most, made(tmp_path, {}, script="echo $HOME")):
        validate(job, version, strict=True)
    most["spec"]["template"]["spec"]["containers"][0]["imagePolicy"] = "Never"
    with pytest.raises(Exception, match="'imagePolicy' was unexpected"):
        validate(most, version, strict=True)


def test_the_least(tmp_path: Path) -> None:
    job = made(tmp_path, {}, {"TOKEN": "a$b"})
    folder = str(tmp_path / "work" / ULID)
    assert job["metadata"]["name"] == f"lakeshore-{ULID.lower()}-1"
    assert job["metadata"]["namespace"] == "lab"
    labels = job["metadata"]["labels"]
    assert labels == job["spec"]["template"]["metadata"]["labels"]
    assert labels["dreamlake.lakeshore/invocation"] == ULID
    assert labels["dreamlake.lakeshore/attempt"] == "1"
    assert labels["dreamlake.lakeshore/mark"] == "m" * 16
    assert labels["dreamlake.lakeshore/host"] == label(socket.gethostname())
    assert job["metadata"]["annotations"] == {"dreamlake.lakeshore/folder": folder, "dreamlake.lakeshore/id": ULID}
    spec = job["spec"]
    assert (spec["backoffLimit"], spec["ttlSecondsAfterFinished"]) == (0, 3600)
    pod = spec["template"]["spec"]
    (container,) = pod.pop("containers")
    assert pod == {
        "restartPolicy": "Never",
        "volumes": [{"name": "work", "persistentVolumeClaim": {"claimName": "work"}}],
        "securityContext": {
            "runAsUser": os.geteuid(),
            "runAsGroup": os.getegid(),
            "runAsNonRoot": os.geteuid() != 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "shareProcessNamespace": True,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 5,
    }
    assert container["command"] == ["python3", "-P", "-m", "dreamlake.lakeshore.daemon.entry"]
    assert container["workingDir"] == folder
    assert container["volumeMounts"] == [{"name": "work", "mountPath": folder, "subPath": ULID}]
    env = {one["name"]: one["value"] for one in container["env"]}
    assert env["TOKEN"] == "a$$b"
    assert env["DREAMLAKE_WORKDIR"] == folder
    assert "resources" not in container


def test_everything(tmp_path: Path) -> None:
    job = made(tmp_path, everything(tmp_path), script="echo $(A)")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    folder, root = str(tmp_path / "work" / ULID), str(tmp_path / "root")
    assert container["command"] == ["bash", "-c", "echo $$(A)"]
    assert container["volumeMounts"] == [
        {"name": "work", "mountPath": folder, "subPath": "/".join(("here", "work", ULID))},
        {"name": "root", "mountPath": root, "subPath": "there"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    assert [volume["name"] for volume in pod["volumes"]] == ["work", "root", "shm"]
    much = {"cpu": "1500m", "memory": "2147483648", "nvidia.com/gpu": "1"}
    assert container["resources"] == {"limits": much, "requests": much}
    assert (container["imagePullPolicy"], container["envFrom"]) == ("IfNotPresent", [{"secretRef": {"name": "tokens"}}])
    assert pod["nodeSelector"] == {"disk": "ssd", "example.com/zone": "a"}
    assert pod["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("bodies", True)
    assert (pod["activeDeadlineSeconds"], pod["terminationGracePeriodSeconds"]) == (3600, 8)
    assert (pod["priorityClassName"], "enableServiceLinks" in pod) == ("low", False)
    assert pod["tolerations"][0]["key"] == "gpu"
    assert job["spec"]["ttlSecondsAfterFinished"] == 60


def test_the_root_of_keys_may_lie_on_the_same_claim(tmp_path: Path) -> None:
    for options, inside in (
        ({"mount": str(tmp_path)}, "root"),
        ({"mount": str(tmp_path), "sub-path": "a"}, "a/root"),
        ({"root-claim": "work", "root-sub-path": "b"}, "b"),
    ):
        pod = made(tmp_path, options)["spec"]["template"]["spec"]
        assert [volume["name"] for volume in pod["volumes"]] == ["work"]
        mounts = pod["containers"][0]["volumeMounts"]
        assert mounts[1:] == [{"name": "work", "mountPath": str(tmp_path / "root"), "subPath": inside}]


def test_names() -> None:
    assert job_name(ULID, 12) == f"lakeshore-{ULID.lower()}-12"
    others = ["a", "A", "a_b", "x" * 64, ULID.lower()]
    names = [job_name(id, 1) for id in others]
    assert len({*names, job_name(ULID, 1)}) == 6
    assert all(len(name) < 50 and name.replace("-", "").isalnum() and name.islower() for name in names)
    assert (label("a.b-C_d"), len(label("-a")), len(label("x" * 64))) == ("a.b-C_d", 40, 40)


def test_merging() -> None:
    base: Any = {"a": {"b": 1, "c": 2}, "l": [1], "n": [{"name": "x", "v": 1}, {"name": "y"}]}
    patch: Any = {"a": {"b": None, "d": 3}, "l": [2], "n": [{"name": "x", "w": 2}, {"name": "z"}]}
    assert _merged(base, patch) == {
        "a": {"c": 2, "d": 3},
        "l": [2],
        "n": [{"name": "x", "v": 1, "w": 2}, {"name": "y"}, {"name": "z"}],
    }
    assert _merged(base, {"n": [1]})["n"] == [1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"image": ""}, "the kube runner needs --runner-option image=NAME: The image to run, which has Python and"),
        (
            {"claim": ""},
            "the kube runner needs --runner-option claim=NAME: The persistent volume claim that this worker's",
        ),
        ({"mount": "here"}, "expected an absolute path for the runner option mount, got 'here'"),
        ({"sub-path": "/a"}, "expected a path inside the claim for the runner option sub-path, got '/a'"),
        ({"root-sub-path": "a/../.."}, "expected a path inside the claim for the runner option root-sub-path, got 'a/"),
        ({"cpus": "many"}, "expected a number from 0 for the runner option cpus, such as 2, got 'many'"),
        ({"gpus": "0.5"}, "expected a whole number from 0 for the runner option gpus, such as 2, got '0.5'"),
        ({"memory": "-1"}, "expected a number from 0 for the runner option memory, such as 10 or 2g, got '-1'"),
        ({"node-selector": "ssd"}, "expected NAME=VALUE,NAME=VALUE for the runner option node-selector, got 'ssd'"),
        (
            {"image-pull-policy": "always"},
            "expected the runner option image-pull-policy to be Always, IfNotPresent or Never, got 'always'",
        ),
        (
            {"template": "/nowhere"},
            "expected a file of JSON for the runner option template, got '/nowhere': .*No such file",
        ),
        (
            {"template": "list"},
            "expected an object in .*list, which is merged into the spec of pods, got something else",
        ),
        ({"poll": "0"}, "expected a number from 1 for the runner option poll, got '0'"),
        ({"nodes": "3"}, "the kube runner knows no option nodes: it has image, claim, mount, sub-path, "),
        ({"kubeconfig": "/nowhere"}, "the kubeconfig /nowhere cannot be read: "),
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: dict[str, str], said: str) -> None:
    (tmp_path / "list").write_text("[]")
    cluster = {"server": "http://h"}
    context = {"current-context": "a", "contexts": [{"name": "a", "context": {"cluster": "c"}}]}
    (tmp_path / "config").write_text(json.dumps({**context, "clusters": [{"name": "c", "cluster": cluster}]}))
    given = {name: str(tmp_path / "list") if value == "list" else value for name, value in options.items()}
    with pytest.raises(ValueError, match=said):
        KubeRunner.from_options({**NEEDED, "kubeconfig": str(tmp_path / "config"), **given}, {})


def test_all_options_are_described() -> None:
    names = (
        "image claim mount sub-path root-claim root-sub-path kubeconfig context namespace python service-account cpus"
    )
    more = "memory gpus node-selector template image-pull-policy image-pull-secret deadline grace ttl poll"
    described = [name.partition("=")[0] for name, _ in describe_options(KubeOptions)]
    assert described == f"{names} {more}".split()
