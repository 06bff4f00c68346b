"""What is particular to children in gVisor's sandboxes, those that docker starts and those of podman."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children
from conformance_kit import skip_without
from container_kit import Docker, Podman, pairs
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.cli.runner import ChildOptions, make_runner
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners.docker.gvisor import GvisorRunner
from dreamlake.lakeshore.runners.environment import child_environ
from dreamlake.lakeshore.wire import pack

if TYPE_CHECKING:
    from pathlib import Path

    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = pytest.mark.anyio
LIMIT = 60.0


def made(arguments: list[str], *variables: str, **options: str) -> GvisorRunner:
    given, told = pairs(arguments)
    given |= {name.replace("_", "-"): value for name, value in options.items()}
    return GvisorRunner.from_options(given, child_environ([*told, *variables], elsewhere=True))


async def run(queue: dls.Queue, fn: Any, *args: Any, **config: Any) -> Row:
    id = new_id()
    envelope = dls.thunk(fn, *args).to_envelope(id=id).to_bytes()
    await queue.dispatch.do(Submit(id, queue.name, envelope, config=pack({"run_config": config})))
    await queue.dispatch.outcome(id, timeout=LIMIT)
    return await queue.get(id)


def program(path: Path, script: str) -> str:
    """A program that answers as an engine would."""
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_options() -> None:
    for options, message in (
        ({}, "the gvisor runner needs --runner-option image=NAME: The image to run"),
        ({"image": "i", "binary": "no-such"}, "there is no program 'no-such' here: install it, or name another with"),
        ({"image": "i", "rootfs": "/"}, "the gvisor runner knows no option rootfs: it has image, python, binary, "),
    ):
        with pytest.raises(ValueError, match=message):
            GvisorRunner.from_options({"binary": "true", **options}, {})
    for options, runtime in (({}, "runsc"), ({"runtime": "mine"}, "mine")):
        runner = GvisorRunner.from_options({"image": "i", "binary": "false", **options}, {})
        assert (runner.name, runner.options.create_arguments()) == ("gvisor", ["--init", f"--runtime={runtime}"])


def test_an_engine_without_the_runtime(tmp_path: Path) -> None:
    docker = program(tmp_path / "docker", """echo '{"runc": {}, "kata": {}}'""")
    podman = program(tmp_path / "podman", 'case "$*" in *Runtimes*|*runtime=runsc*) exit 125;; esac')
    away = program(tmp_path / "away", "exit 1")
    for binary, absent, there in ((docker, "runsc", "kata"), (podman, "runsc", "/usr/bin/runsc")):
        with pytest.raises(
            ValueError, match=r"needs docker or podman with the runtime 'runsc', and .* does not have it"
        ):
            GvisorRunner.from_options({"image": "i", "binary": binary, "runtime": absent}, {})
        GvisorRunner.from_options({"image": "i", "binary": binary, "runtime": there}, {})
    GvisorRunner.from_options({"image": "i", "binary": away}, {})  # an engine that is not there yet may come back


def test_a_worker_with_such_an_engine_does_not_start(tmp_path: Path) -> None:
    binary = program(tmp_path / "docker", "echo '{}'")
    options = ("image=i", f"binary={binary}")
    with pytest.raises(Exception, match="the gvisor runner needs docker or podman") as caught:
        make_runner(ChildOptions("gvisor", options, None, None, (), None, False, False))
    assert getattr(caught.value, "exit_code", None) == 2


@pytest.mark.parametrize(
    "engine", [Docker("gvisor", "gvisor"), Podman("gvisor-podman", "gvisor")], ids=lambda one: one.name
)
async def test_under_an_engine(queue: dls.Queue, tmp_path: Path, engine: Docker | Podman) -> None:
    skip_without(engine.missing())
    path = tmp_path / "notes"
    with engine.up() as arguments:
        runner = made(arguments, grace="0.2")
        async with children(queue, tmp_path, runner, rules={"allow_script": True}):
            row = await run(queue, bodies.nothing, script=f"dmesg > {tmp_path / 'kernel'}")
            assert row.state == "succeeded", row.error
            assert "Starting gVisor" in (tmp_path / "kernel").read_text()
            row = await run(queue, bodies.boom, "no")
            assert row.error is not None
            assert (row.error.type, row.error.message) == ("LookupError", "no")
            id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
            await wait_until(lambda: notes(path), LIMIT)
            assert await queue.cancel(id, wait=True)
        assert engine.leftovers() == []
