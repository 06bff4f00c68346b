"""What is particular to children in gVisor's sandboxes, those of runsc alone and those that docker starts."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, folders
from conformance_kit import skip_without
from container_bodies import second_time
from container_kit import GVISOR, Docker, Runsc, launch, pairs
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners.attached_client import NO_PLANE
from dreamlake.lakeshore.runners.docker import gvisor as runsc
from dreamlake.lakeshore.runners.docker.gvisor import GvisorRunner, RunscRunner
from dreamlake.lakeshore.runners.docker.runner import DockerRunner
from dreamlake.lakeshore.runners.process.runner import child_environ
from dreamlake.lakeshore.wire import pack
from dreamlake.lakeshore.worker.runner import to_the_end

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = pytest.mark.anyio
PATIENCE = 60.0


@pytest.fixture(scope="module")
def arguments() -> Iterator[list[str]]:
    skip_without(GVISOR.missing())
    with GVISOR.up() as arguments:
        yield arguments


@pytest.fixture
def engine(arguments: list[str]) -> Iterator[Runsc]:
    assert isinstance(GVISOR, Runsc)
    yield GVISOR
    assert GVISOR.leftovers() == []


def made(arguments: list[str], *variables: str, **options: str) -> Any:
    given, told = pairs(arguments)
    given |= {name.replace("_", "-"): value for name, value in options.items()}
    return GvisorRunner.from_options(given, child_environ([*told, *variables], elsewhere=True))


async def run(queue: dls.Queue, fn: Any, *args: Any, **config: Any) -> Row:
    id = new_id()
    envelope = dls.thunk(fn, *args).to_envelope(id=id).to_bytes()
    await queue.dispatch.do(Submit(id, queue.name, envelope, config=pack({"run_config": config})))
    await queue.dispatch.outcome(id, timeout=PATIENCE)
    return await queue.get(id)


async def failure(queue: dls.Queue, tmp_path: Path, runner: Any, fn: Any, *args: Any, **config: Any) -> str:
    rules = {"allow_script": True, "allow_as_user": True}
    async with children(queue, tmp_path, runner, rules=rules):
        row = await run(queue, fn, *args, **config)
    assert row.error is not None
    assert (row.state, row.error.type) == ("failed", "DaemonError"), row.error
    return row.error.message


def test_options(tmp_path: Path) -> None:
    for options, said in (
        ({}, "the gvisor runner needs a root file system, or an image and docker: add --runner-option rootfs=FOLDER"),
        ({"rootfs": "/", "memory": "1g"}, "the gvisor runner knows no option memory: it has rootfs, python, binary, "),
        ({"rootfs": "/no/such"}, "the runner option rootfs names '/no/such', and there is no such folder here"),
        ({"rootfs": "/", "binary": "no-such"}, "there is no program 'no-such' here: install it, or name another with"),
        ({"image": "i", "colour": "red"}, "the gvisor runner knows no option colour: it has image, python, binary, "),
    ):
        with pytest.raises(ValueError, match=said):
            GvisorRunner.from_options({"binary": "true", **options}, {})
    made = GvisorRunner.from_options({"image": "i", "binary": "true"}, {})
    assert isinstance(made, DockerRunner)
    assert (made.name, made.fixed) == ("gvisor", ["--init", "--runtime=runsc"])
    made = GvisorRunner.from_options({"image": "i", "binary": "true", "runtime": "mine"}, {})
    assert isinstance(made, DockerRunner)
    assert made.fixed == ["--init", "--runtime=mine"]
    alone = GvisorRunner.from_options({"rootfs": "/", "binary": "true", "platform": "kvm", "arg": "--debug,--x"}, {})
    assert isinstance(alone, RunscRunner)
    told = ["--ignore-cgroups", "--platform=kvm", "--network=none", "--debug", "--x"]
    assert alone.engine.argv[1:-1] == told


async def test_a_child_has_a_kernel_and_variables_of_its_own(
    engine: Runsc, arguments: list[str], queue: dls.Queue, tmp_path: Path
) -> None:
    runner = made(arguments, "ODD=two\nlines", "TAKEN=1")
    async with children(queue, tmp_path, runner, rules={"allow_script": True}):
        row = await run(queue, bodies.around)
        seen = await queue.result(row.id)
        assert seen["environ"]["ODD"] == "two\nlines"
        assert seen["environ"]["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        assert seen["root"] == str(tmp_path)
        row = await run(queue, bodies.nothing, script=f"dmesg > {tmp_path / 'kernel'}; touch /tmp/x && ! touch /x")
        assert row.state == "succeeded", row.error
    assert "Starting gVisor" in (tmp_path / "kernel").read_text()
    assert folders(tmp_path) == []
    assert not Path(f"{runner.rootfs}{tmp_path}/work").exists()


def test_a_bundle_is_for_nobody_else(tmp_path: Path) -> None:
    runner = RunscRunner(
        str(tmp_path), environ={"TOKEN": "secret", "LAKESHORE_HOME": "/h"}, state=str(tmp_path / "state"), user="12:34"
    )
    asked = launch(tmp_path)
    bundle = tmp_path / "state" / "bundles" / "one"
    runner._write(asked, bundle)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == stat.S_IMODE(bundle.stat().st_mode) == 0o700
    config = bundle / "config.json"
    assert stat.S_IMODE(config.stat().st_mode) == 0o600
    process = json.loads(config.read_text())["process"]
    assert f"LAKESHORE_HOME={NO_PLANE}" in process["env"]  # a mount of it would not do: locks do not reach outside
    assert "TOKEN=secret" in process["env"]
    assert process["user"] == {"uid": 12, "gid": 34}
    assert process["capabilities"] == {"bounding": [], "effective": [], "permitted": []}
    asked.folder.remove()


@pytest.mark.parametrize("other", ["b-3-tag", "b-2-gat"])
def test_the_guard_of_an_attempt_leaves_the_next_one_its_mount_point(tmp_path: Path, other: str) -> None:
    place, bundles = tmp_path / "place", tmp_path / "bundles"
    for folder in (place, bundles / "lakeshore-b-2-tag", bundles / f"lakeshore-{other}"):
        folder.mkdir(parents=True)
    name, bundle = "lakeshore-b-2-tag", str(bundles / "lakeshore-b-2-tag")
    subprocess.run(["/bin/sh", "-c", runsc._END, "sh", name, bundle, str(place), "true"], check=True, timeout=60)
    assert [path.name for path in bundles.iterdir()] == [f"lakeshore-{other}"]
    assert place.exists() == (other == "b-3-tag")


async def test_users(engine: Runsc, arguments: list[str], queue: dls.Queue, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with children(queue, tmp_path, made(arguments), rules={"allow_as_user": True}):
        row = await run(queue, os.getuid, as_user="nobody")
        assert row.state == "succeeded", row.error
        assert await queue.result(row.id) == 65534
    said = await failure(queue, tmp_path, made(arguments), bodies.nothing, as_user="nosuch")
    assert "could not start a child: `as_user` names 'nosuch', and there is no such user in " in said
    said = await failure(queue, tmp_path, made(arguments, user="nosuch"), bodies.nothing)
    assert "could not start a child: the runner option user names 'nosuch', and there is no such user in " in said


async def test_what_can_be_wrong(engine: Runsc, arguments: list[str], queue: dls.Queue, tmp_path: Path) -> None:
    root = pairs(arguments)[0]["rootfs"]
    said = await failure(queue, tmp_path, made(arguments, python="python9"), bodies.nothing)
    assert said.startswith(
        f"the gvisor runner could not start a child: {root} has no program 'python9': name its Python with --runner-option"
    )
    said = await failure(queue, tmp_path, made(arguments, platform="no-such"), bodies.nothing)
    assert said.startswith("the gvisor runner could not start a child: ")
    assert "no-such" in said
    said = await failure(queue, tmp_path, made(arguments, "PYTHONPATH="), bodies.nothing)
    assert said.startswith(f"'python3' of {root} does not have this package: install dreamlake-lakeshore in it")


async def test_a_runsc_that_is_killed_takes_the_sandbox_along_and_loses_no_work(
    engine: Runsc, arguments: list[str], queue: dls.Queue, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, made(arguments)):
        id = await queue.submit(dls.thunk(second_time, str(path)))
        await wait_until(lambda: notes(path), PATIENCE)
        (group, _) = (tmp_path / "work" / id / ".lock").read_text().split()
        os.kill(int(group), signal.SIGKILL)
        assert await queue.result(id, timeout=PATIENCE) == 2


async def test_a_sandbox_of_an_earlier_attempt_goes_first(engine: Runsc, arguments: list[str], tmp_path: Path) -> None:
    runner = made(arguments, grace="0.1")
    asked = launch(tmp_path, bodies.stubborn, str(tmp_path / "notes"))
    earlier = await runner.start(asked)
    await wait_until(lambda: notes(tmp_path / "notes"), PATIENCE)
    assert await earlier._has_begun()
    for name in ("stdout.log", "stderr.log"):
        (asked.folder.path / name).rename(asked.folder.path / f"{name}-earlier")
    second = await runner.start(asked._replace(attempt=2, script="true"))
    assert (await earlier.wait()).code != 0
    assert (await second.wait()).code == 0
    assert not (asked.folder.path / "stdout.log-earlier").exists()
    asked.folder.remove()


@pytest.mark.parametrize("late", [0.0, 0.1])
async def test_killed_as_soon_as_it_was_started(
    engine: Runsc, arguments: list[str], tmp_path: Path, late: float
) -> None:
    asked = launch(tmp_path, bodies.stubborn, str(tmp_path / "notes"))
    started = await made(arguments, grace="0.2").start(asked)
    await anyio.sleep(late)
    assert (await to_the_end(started.kill)).code != 0
    assert engine.leftovers() == []
    asked.folder.remove()


async def test_a_start_that_is_cancelled_leaves_nothing(engine: Runsc, arguments: list[str], tmp_path: Path) -> None:
    asked = launch(tmp_path)
    with anyio.CancelScope() as scope:
        scope.cancel()
        started = await made(arguments).start(asked)
        await to_the_end(started.kill)
    assert engine.leftovers() == []
    asked.folder.remove()


async def test_a_sandbox_that_does_not_begin(
    engine: Runsc, arguments: list[str], queue: dls.Queue, tmp_path: Path
) -> None:
    silent = tmp_path / "silent"
    silent.write_text('#!/bin/sh\ncase "$*" in *" run "*) exec sleep 60;; esac\nexec runsc "$@"\n')
    silent.chmod(0o755)
    runner = made(arguments, binary=str(silent), start_timeout="0.5")
    said = await failure(queue, tmp_path, runner, bodies.nothing)
    assert said == "the gvisor runner could not start a child: silent has not begun it in 0.5 s"


async def test_under_docker(queue: dls.Queue, tmp_path: Path) -> None:
    docker = Docker("gvisor-docker", "gvisor")
    skip_without(docker.missing())
    path = tmp_path / "notes"
    with docker.up() as arguments:
        runner = made(arguments, grace="0.2")
        async with children(queue, tmp_path, runner, rules={"allow_script": True}):
            row = await run(queue, bodies.nothing, script=f"dmesg > {tmp_path / 'kernel'}")
            assert row.state == "succeeded", row.error
            assert "Starting gVisor" in (tmp_path / "kernel").read_text()
            row = await run(queue, bodies.boom, "no")
            assert row.error is not None
            assert (row.error.type, row.error.message) == ("LookupError", "no")
            id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
            await wait_until(lambda: notes(path), PATIENCE)
            assert await queue.cancel(id, wait=True)
        assert docker.leftovers() == []
