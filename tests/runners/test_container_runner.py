"""What is particular to children in containers of docker and podman: what they see, and what can be wrong there."""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, folders
from conformance_kit import skip_without
from container_bodies import environ_of, second_time
from container_kit import DOCKER, PODMAN, Docker, Podman, launch, pairs
from helpers import wait_until, wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.tasks import run_to_end
from dreamlake.lakeshore.daemon.workdir import ChildSettings, Folder
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners import attached_client
from dreamlake.lakeshore.runners.docker import runner as container
from dreamlake.lakeshore.runners.docker.runner import DockerOptions, DockerRunner
from dreamlake.lakeshore.runners.environment import child_environ
from dreamlake.lakeshore.runners.leftovers import remove_earlier_files
from dreamlake.lakeshore.wire import pack
from dreamlake.lakeshore.worker.runner import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = pytest.mark.anyio
LIMIT = 60.0
LABEL = "dreamlake.lakeshore"


class Site:
    """An engine that is up, and runners on it."""

    def __init__(self, engine: Docker | Podman, arguments: list[str]) -> None:
        self.engine = engine
        self._options, self._variables = pairs(arguments)

    def runner(self, *variables: str, **options: str | None) -> DockerRunner:
        given = {**self._options, **{name.replace("_", "-"): value for name, value in options.items()}}
        told = {name: value for name, value in given.items() if value is not None}
        return DockerRunner.from_options(told, child_environ([*self._variables, *variables], elsewhere=True))

    def is_still(self) -> None:
        left = self.engine.leftovers
        wait_until_sync(lambda: not left(), LIMIT, f"the end of {left()}")

    def one(self) -> str:
        """The id of the only container. The engine may list it a moment after its program has begun."""

        def listed() -> list[str]:
            return self.engine.run("ps", "-q", "--filter", f"label={self.engine.mark}").split()

        (found,) = wait_until_sync(listed, LIMIT, "the container to be listed")
        return str(found)


@contextmanager
def _site(engine: Any) -> Iterator[Site]:
    skip_without(engine.missing())
    with engine.up() as arguments:
        yield Site(engine, arguments)


@pytest.fixture(scope="module")
def docker() -> Iterator[Site]:
    with _site(DOCKER) as site:
        yield site


@pytest.fixture(scope="module")
def podman() -> Iterator[Site]:
    with _site(PODMAN) as site:
        yield site


@pytest.fixture
def site(request: pytest.FixtureRequest, anyio_backend_name: str) -> Iterator[Site]:
    """Each engine, on another event loop, since each with each would only take longer."""
    found: Site = request.getfixturevalue("docker" if anyio_backend_name == "asyncio" else "podman")
    yield found
    found.is_still()


async def run(queue: dls.Queue, fn: Any, *args: Any, **config: Any) -> Row:
    """An invocation that has come to its end."""
    id = new_id()
    envelope = dls.thunk(fn, *args).to_envelope(id=id).to_bytes()
    await queue.dispatch.do(Submit(id, queue.name, envelope, config=pack({"run_config": config}) if config else None))
    await queue.dispatch.outcome(id, timeout=LIMIT)
    return await queue.get(id)


async def failure(queue: dls.Queue, tmp_path: Path, runner: DockerRunner, fn: Any, *args: Any, **config: Any) -> str:
    """Return the message of its failure."""
    rules = {"allow_script": True, "allow_as_user": True}
    async with children(queue, tmp_path, runner, rules=rules):
        row = await run(queue, fn, *args, **config)
    assert row.error is not None
    assert (row.state, row.error.type) == ("failed", "DaemonError"), row.error
    return row.error.message


# --- what a child sees -----------------------------------------------------------------------------------------------


async def test_a_child_has_the_variables_of_the_image_and_those_that_are_given(
    site: Site, queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("VIRTUAL_ENV", "LD_LIBRARY_PATH", "SECRET", "TAKEN"):
        monkeypatch.setenv(name, "the host's")
    odd = "two lines\nand \"quotes\" = 'more' # $HOME"
    runner = site.runner("TAKEN", f"ODD={odd}", "HOME=/elsewhere", "EMPTY=", "DOCKER_HOST=tcp://nowhere", "GREEK=αβγ")
    async with children(queue, tmp_path, runner):
        seen = (await run_result(queue, bodies.around))["environ"]
    assert "VIRTUAL_ENV" not in seen and "LD_LIBRARY_PATH" not in seen and "SECRET" not in seen  # noqa: PT018
    assert seen["PATH"] == "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    given = {"TAKEN": "the host's", "ODD": odd, "HOME": "/elsewhere", "EMPTY": "", "GREEK": "αβγ"}
    assert {name: seen[name] for name in given} == given
    assert seen["DOCKER_HOST"] == "tcp://nowhere"


async def test_modules_are_found_in_the_workers_folder(
    site: Site, queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which is the root of keys as a rule, and mounted as that."""
    (tmp_path / "homemade.py").write_text("def seven():\n    return 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "homemade", raising=False)
    seven = importlib.import_module("homemade").seven
    async with children(queue, tmp_path, site.runner()):
        assert await run_result(queue, seven) == 7


async def run_result(queue: dls.Queue, fn: Any, *args: Any) -> Any:
    return await queue.result(await queue.submit(dls.thunk(fn, *args)), timeout=LIMIT)


def test_children_elsewhere_keep_paths_and_programs_of_their_own() -> None:
    kept = {"LC_ALL": "C", "TZ": "UTC", "LAKESHORE_QUEUE": "q"}
    env = {**kept, "PATH": "/bin", "HOME": "/me", "PYTHONPATH": "/mine", "XDG_CACHE_HOME": "/c", "A": "1", "B": "2"}
    more = {"LAKESHORE_MODULES": os.getcwd()}
    assert child_environ(environ=env, elsewhere=True) == kept | more
    given = child_environ(["A", "PATH", "PYTHONPATH=/theirs"], env, elsewhere=True)
    assert given == {**kept, **more, "A": "1", "PATH": "/bin", "PYTHONPATH": "/theirs"}


def test_values_stand_in_no_argument() -> None:
    runner = DockerRunner(
        DockerOptions(image="i"), environ={"TOKEN": "secret-1", "LAKESHORE_CLIENT_TOKEN": "secret-2", "A": "secret-3\n"}
    )
    folder = Path("/jobs/a")
    asked = Launch("a", 1, Folder(folder, 0, 0), ChildSettings(folder, Path("/r"), "a").environ(), None, None)
    arguments, client, lines = runner._arguments(asked, "name")
    assert "secret" not in " ".join(arguments)
    assert (client["LAKESHORE_CLIENT_TOKEN"], client["A"], lines) == ("secret-2", "secret-3\n", b"TOKEN=secret-1\n")
    assert "TOKEN" not in client


@pytest.mark.parametrize("value", ["a\nb", "ends\r", "x" * 70_000], ids=["lines", "return", "long"])
async def test_values_come_as_they_are(site: Site, queue: dls.Queue, tmp_path: Path, value: str) -> None:
    """Also those that no file of variables could have as a line."""
    more = {"GIVEN": value, "SPACES": "  a =b  ", "OTHER": "$HOME `id` \\ \"'#"}
    async with children(queue, tmp_path, site.runner(*(f"{name}={said}" for name, said in more.items()))):
        seen = await queue.call(dls.thunk(environ_of, *more))
    assert seen == more


async def test_keys_and_folders_are_the_workers_own(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, site.runner()):
        id = await queue.submit(dls.thunk(bodies.keys, "deep/one", "two"))
        assert [key async for key in queue.stream(id)] == ["deep/one", "two"]
        assert (tmp_path / "deep" / "one").read_text() == "deep/one"
        assert (tmp_path / "two").stat().st_uid == os.geteuid()
        around = await run_result(queue, bodies.around)
    assert around["folder"].startswith(str(tmp_path / "work"))
    assert around["root"] == str(tmp_path)
    assert around["pid"] != 1
    assert folders(tmp_path) == []


async def test_limits_and_the_rest_reach_the_engine(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    runner = site.runner(read_only="1", memory="1g", cpus="0.5", user="1234:5678", grace="0.1")
    os.chmod(tmp_path, 0o777)
    async with children(queue, tmp_path, runner, rules={"allow_script": True}):
        script = f"id -u > {path}; ! touch /here && exec sleep 60"
        id = new_id()
        envelope = dls.thunk(bodies.nothing).to_envelope(id=id).to_bytes()
        await queue.dispatch.do(Submit(id, "q", envelope, config=pack({"run_config": {"script": script}})))
        await wait_until(lambda: notes(path), LIMIT)
        form = "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}"
        said = site.engine.run("inspect", "--format", form, site.one()).split()
        assert said[:2] == ["true", str(1 << 30)]
        assert said[2] in ("500000000", "0")  # podman reports it in another place
        assert await queue.cancel(id, wait=True)
    assert notes(path) == ["1234"]


async def test_what_a_body_submits_is_not_lost_with_its_container(
    docker: Site, queue: dls.Queue, tmp_path: Path
) -> None:
    def submits() -> None:
        import dreamlake.lakeshore as dls

        dls.SyncQueue("q").submit(dls.thunk(print))

    runner = docker.runner(f"LAKESHORE_HOME={tmp_path / 'home'}")
    async with children(queue, tmp_path, runner):
        row = await run(queue, submits)
    assert row.error is not None
    assert "/dev/null/the-plane-is-a-file-that-this-container-does-not-have" in row.error.message
    mounts = [attached_client.Mount("/x", "/home/me", False)]
    assert attached_client.container_environ({"LAKESHORE_HOME": "/home/me/h"}, mounts) == {
        "LAKESHORE_HOME": "/home/me/h"
    }
    assert attached_client.container_environ({"A": "1"}, mounts) == {"A": "1"}


async def test_a_user_of_the_image(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with children(queue, tmp_path, site.runner(), rules={"allow_as_user": True}):
        row = await run(queue, os.getuid, as_user="nobody")
        assert await queue.result(row.id) == 65534
    said = await failure(queue, tmp_path, site.runner(), bodies.nothing, as_user="nosuch")
    assert said == (
        "the docker runner could not start a child: `as_user` names 'nosuch', and there is no such user in the image "
        "'localhost/lakeshore-base:1'"
    )


async def test_another_user_needs_root(docker: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    asked = launch(tmp_path, as_user="nobody")
    monkeypatch.setattr(os, "chown", refuse)
    with pytest.raises(
        dls.DispatchError, match="names 'nobody', and only a worker that runs as root can run as another"
    ):
        await docker.runner().start(asked)
    asked.folder.remove()
    assert docker.engine.leftovers() == []


async def test_a_script(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, site.runner(), rules={"allow_script": True}):
        row = await run(queue, bodies.nothing, script=f"echo $DREAMLAKE_INVOCATION_ID > {path}")
        assert (row.state, notes(path)) == ("succeeded", [row.id])
        row = await run(queue, bodies.nothing, script="echo said >&2; exit 7")
        assert row.error is not None
        assert row.error.message == (
            "the child ended with exit code 7 and wrote no error.json; the end of its output:\nsaid"
        )


# --- what can be wrong -----------------------------------------------------------------------------------------------


def test_options() -> None:
    for options, said in (
        ({}, "the docker runner needs --runner-option image=NAME: The image to run"),
        ({"image": "i", "binary": "no-such"}, "there is no program 'no-such' here: install it, or name another with"),
        ({"image": "i", "colour": "red"}, "the docker runner knows no option colour: it has image, python, binary, "),
        ({"image": "i", "pull": "now"}, "the runner option pull to be missing, always or never, got 'now'"),
        ({"image": "i", "memory": "much"}, "expected a number from 0 for the runner option memory"),
        ({"image": "i", "mount": "/tmp:a"}, r"mount to be SRC\[:DST\]\[:ro\] with an absolute DST, got '/tmp:a'"),
        ({"image": "i", "mount": "/no/such"}, "mount names '/no/such', and there is no such file or folder here"),
    ):
        with pytest.raises(ValueError, match=said):
            DockerRunner.from_options({"binary": "true", **options}, {})


def test_mounts(tmp_path: Path) -> None:
    read = attached_client.read_mounts("mount", f"{tmp_path},{tmp_path}:ro,{tmp_path}:/a/../b:rw")
    here = str(tmp_path)
    expected = ((here, here, False), (here, here, True), (here, "/b", False))
    assert read == tuple(attached_client.Mount(*fields) for fields in expected)
    assert container._mount_argument(attached_client.Mount('/a,"b', "/c", True)) == (
        '--mount=type=bind,"source=/a,""b",target=/c,readonly'
    )
    asked = Launch("a", 1, Folder(tmp_path, 0, 0), {"LAKESHORE_ROOT": "/"}, None, None)
    with pytest.raises(dls.DispatchError, match="the root of keys is /, which cannot be mounted in a container: start"):
        attached_client.launch_mounts(asked, [])
    asked = replace(asked, environ={"LAKESHORE_ROOT": here})
    assert attached_client.launch_mounts(asked, read[1:2]) == list(read[1:2])


async def test_an_engine_out_of_reach(queue: dls.Queue, tmp_path: Path) -> None:
    skip_without(DOCKER.missing())
    runner = DockerRunner(DockerOptions(image="image", global_arg=(f"--host=unix://{tmp_path}/nothing",)))
    said = await failure(queue, tmp_path, runner, bodies.nothing)
    assert said.startswith(
        "the docker runner could not start a child: the engine of docker cannot be reached: Cannot connect to the Docker "
        f"daemon at unix://{tmp_path}/nothing"
    ), said
    gone = DockerRunner(DockerOptions(image="image", binary=str(tmp_path / "gone")))
    said = await failure(queue, tmp_path, gone, bodies.nothing)
    assert f"there is no program '{tmp_path / 'gone'}' here: install it, or name another" in said


async def test_an_engine_that_does_not_answer(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dreamlake.lakeshore.runners.docker import client as docker_client

    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 60\n")
    silent.chmod(0o755)
    monkeypatch.setattr(
        docker_client.ContainerEngine.call, "__kwdefaults__", {"timeout": 0.2, "environ": None, "input": None}
    )
    said = await failure(
        queue, tmp_path, DockerRunner(DockerOptions(image="image", binary=str(silent))), bodies.nothing
    )
    assert said == "the docker runner could not start a child: silent did not answer `create` within 0.2 s"


async def test_a_missing_image(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        nobody = f"127.0.0.1:{server.getsockname()[1]}/x:1"
    begun = time.monotonic()  # podman tries for three seconds; what would count as a hang takes minutes
    said = await failure(queue, tmp_path, site.runner(image=nobody), bodies.nothing)
    beginning = f"the docker runner could not start a child: the image '{nobody}' is not here and cannot be pulled: "
    assert said.startswith(beginning), said
    assert "connection refused" in said[len(beginning) :]
    assert time.monotonic() - begun < LIMIT
    if site.engine.name == "docker":  # podman tries for three seconds
        said = await failure(queue, tmp_path, site.runner(image=nobody, pull="always"), bodies.nothing)
        assert said.startswith(beginning)
    said = await failure(queue, tmp_path, site.runner(image=nobody, pull="never"), bodies.nothing)
    assert "could not create its container: " in said
    assert nobody in said


async def test_a_registry_that_does_not_answer_holds_nobody(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        image = f"127.0.0.1:{server.getsockname()[1]}/x:1"
        said = await failure(queue, tmp_path, site.runner(image=image, start_timeout="1"), bodies.nothing)
        assert "did not answer `pull` within 1 s" in said
        async with children(queue, tmp_path, site.runner(image=image), concurrency=2):
            id = await queue.submit(dls.thunk(bodies.nothing))
            await wait_until(lambda: folders(tmp_path).count(id), LIMIT)
            await anyio.sleep(0.3)
            begun = time.monotonic()
            assert await queue.cancel(id, wait=True)
            assert time.monotonic() - begun < LIMIT
            assert (await queue.get(id)).state == "killed"


async def test_an_image_without_the_program(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    for init in "10":
        said = await failure(queue, tmp_path, site.runner(python="python9", init=init), bodies.nothing)
        sentence = (
            "the image 'localhost/lakeshore-base:1' has no program 'python9': name its Python with --runner-option"
        )
        assert sentence in said
        assert ("exec" in said.partition("\n")[2]) or init == "0"
    (tmp_path / "empty").mkdir()
    hides = site._options["mount"] + f",{tmp_path / 'empty'}:/usr/bin:ro,{tmp_path / 'empty'}:/bin:ro"
    said = await failure(queue, tmp_path, site.runner(mount=hides), bodies.nothing, script="true")
    assert "the image 'localhost/lakeshore-base:1' has no bash, which `script` needs" in said


async def test_an_image_without_the_package(site: Site, queue: dls.Queue, tmp_path: Path) -> None:
    said = await failure(queue, tmp_path, site.runner("PYTHONPATH="), bodies.nothing)
    assert said.startswith(
        "'python3' of the image 'localhost/lakeshore-base:1' does not have this package: install dreamlake-lakeshore in "
        "it, or mount it and name the folder with --env PYTHONPATH=FOLDER; the end of its output:\n"
    )
    assert "No module named 'dreamlake'" in said
    old = tmp_path / "old-python"
    old.write_text("#!/bin/sh\necho 'Unknown option: -P' >&2; echo usage: python >&2; exit 2\n")
    old.chmod(0o755)
    said = await failure(queue, tmp_path, site.runner(python=str(old)), bodies.nothing)
    assert said.startswith(f"'{old}' of the image 'localhost/lakeshore-base:1' is older than Python 3.11, which ")


async def test_more_memory_than_there_may_be(
    site: Site, queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here := tmp_path / "here").mkdir()
    monkeypatch.chdir(here)
    said = await failure(queue, tmp_path, site.runner(memory="100m"), bodies.allocates, 1 << 30)
    sure = "" if site.engine.name == "docker" else "most likely "
    assert said.startswith(
        f"it was killed (exit code 137), {sure}because it used more than its memory limit of {100 << 20} bytes"
    )
    assert list(here.iterdir()) == [], "podman leaves a file where it was started"


async def test_what_an_engine_refuses(docker: Site, queue: dls.Queue, tmp_path: Path) -> None:
    said = await failure(queue, tmp_path, docker.runner(gpus="all"), bodies.nothing)
    assert said.startswith("the docker runner could not start a child: could not select device driver")
    said = await failure(queue, tmp_path, docker.runner(arg="--no-such-flag"), bodies.nothing)
    assert "could not create its container: unknown flag: --no-such-flag" in said


# --- ends ------------------------------------------------------------------------------------------------------------


async def test_a_client_that_is_killed_takes_the_container_along_and_loses_no_work(
    site: Site, queue: dls.Queue, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, site.runner()):
        id = await queue.submit(dls.thunk(second_time, str(path)))
        await wait_until(lambda: notes(path), LIMIT)
        (group, _) = (tmp_path / "work" / id / ".lock").read_text().split()
        os.kill(int(group), signal.SIGKILL)
        assert await queue.result(id, timeout=LIMIT) == 2


async def test_a_client_that_is_killed_before_the_child_began_loses_no_work(site: Site, tmp_path: Path) -> None:
    asked = launch(tmp_path)
    started: Any = await site.runner().start(asked)
    os.kill(started._client.pid, signal.SIGKILL)
    ended = await started.wait()
    assert (ended.code, ended.error and ended.error.type) in ((1, "WorkerLost"), (0, None)), ended
    asked.folder.remove()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (("kill", "--signal", "KILL"), "the child was killed by SIGKILL and wrote no error.json"),
        (("rm", "-f"), "its container was removed while it ran"),
    ],
    ids=["killed", "removed"],
)
async def test_a_container_that_somebody_ends(
    docker: Site, queue: dls.Queue, tmp_path: Path, command: tuple[str, ...], said: str
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, docker.runner()):
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        await wait_until(lambda: notes(path), LIMIT)
        docker.engine.run(*command, docker.one())
        await queue.dispatch.outcome(id, timeout=LIMIT)
        error = (await queue.get(id)).error
    assert error is not None
    assert error.message == said


async def test_a_container_of_an_earlier_attempt_goes_first(site: Site, tmp_path: Path) -> None:
    """One that nobody follows any more, and that goes on writing."""
    asked = launch(tmp_path, attempt=2)
    writes = "while true; do touch $0/earlier; done"
    folder = str(asked.folder.path)
    options, _ = site._options, None
    site.engine.run(
        *("run", "--detach", f"--label={LABEL}.folder={folder}", f"--label={site.engine.mark}", "--network=none"),
        *options["arg"].split(","),
        *(["--runtime=runc"] if site.engine.name == "podman" else []),
        *("-v", f"{folder}:{folder}", options["image"], "bash", "-c", writes, folder),
    )
    await wait_until((asked.folder.path / "earlier").exists, LIMIT)
    earlier = site.one()
    started = await site.runner().start(asked)
    assert (await started.wait()).code == 0
    assert earlier not in site.engine.run("ps", "-aq")
    assert not (asked.folder.path / "earlier").exists()
    asked.folder.remove()


@pytest.mark.parametrize("late", [0.0, 0.15])
async def test_killed_as_soon_as_it_was_started(site: Site, tmp_path: Path, late: float) -> None:
    asked = launch(tmp_path, bodies.stubborn, str(tmp_path / "notes"))
    started = await site.runner(grace="0.2").start(asked)
    await anyio.sleep(late)
    assert (await run_to_end(started.kill)).code != 0
    assert (await run_to_end(started.kill)).code != 0
    assert site.engine.leftovers() == []
    asked.folder.remove()


async def test_a_start_that_is_cancelled_leaves_nothing(site: Site, tmp_path: Path) -> None:
    for pause in (0.0, 0.03, 0.1):
        asked = launch(tmp_path)
        with anyio.move_on_after(pause):
            started = await site.runner().start(asked)
            await run_to_end(started.kill)
        assert site.engine.leftovers() == []
        asked.folder.remove()


async def test_a_child_that_never_begins(docker: Site, queue: dls.Queue, tmp_path: Path) -> None:
    runner = docker.runner(start_timeout="0.5", grace="0.1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(container._Container, "_has_begun", _says_no)
        said = await failure(queue, tmp_path, runner, bodies.stubborn, str(tmp_path / "notes"))
    assert said.startswith("the docker runner could not start a child: docker has not begun it within 0.5 s")
    docker.is_still()


async def _says_no(self: Any) -> bool:
    return False


# --- the engine goes away --------------------------------------------------------------------------------------------


@pytest.fixture
def mortal(docker: Site) -> Iterator[tuple[Site, Docker]]:
    """A dockerd to kill, which is there again for the next test."""
    engine = docker.engine
    assert isinstance(engine, Docker)
    yield docker, engine
    if engine.process is None:
        engine.start()
    if left := engine.run("ps", "-aq").split():  # nobody sees to those that outlive a runner and its engine
        engine.run("rm", "-f", *left)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_engine_that_comes_back_without_the_child_loses_no_work(
    mortal: tuple[Site, Docker], queue: dls.Queue, tmp_path: Path, number: signal.Signals
) -> None:
    site, engine = mortal
    path = tmp_path / "notes"
    async with children(queue, tmp_path, site.runner()):
        id = await queue.submit(dls.thunk(second_time, str(path)))
        await wait_until(lambda: notes(path), LIMIT)
        await anyio.to_thread.run_sync(engine.stop, number)
        await anyio.to_thread.run_sync(engine.start)
        assert await queue.result(id, timeout=LIMIT) == 2
        row = await queue.get(id)
    assert (row.attempt, row.state) == (2, "succeeded")


async def test_an_engine_that_comes_back_with_the_child_is_attached_client_again(
    mortal: tuple[Site, Docker], queue: dls.Queue, tmp_path: Path
) -> None:
    site, engine = mortal
    path = tmp_path / "notes"
    async with children(queue, tmp_path, site.runner()):
        id = await queue.submit(dls.thunk(second_time, str(path)))
        await wait_until(lambda: notes(path), LIMIT)
        await anyio.to_thread.run_sync(engine.stop, signal.SIGKILL)
        await anyio.to_thread.run_sync(engine.start, "--live-restore")
        Path(f"{path}-go").touch()
        assert await queue.result(id, timeout=LIMIT) == 1
    await anyio.to_thread.run_sync(engine.stop)


async def test_an_engine_that_does_not_come_back(
    mortal: tuple[Site, Docker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, engine = mortal
    monkeypatch.setattr(container, "ENGINE_RETURN_TIMEOUT", 1.0)
    asked = launch(tmp_path, second_time, str(tmp_path / "notes"))
    runner = site.runner(grace="0.1")
    started: Any = await runner.start(asked)
    await wait_until(lambda: notes(tmp_path / "notes"), LIMIT)
    assert await started._has_begun()
    await anyio.to_thread.run_sync(engine.stop, signal.SIGKILL)
    assert await started._may_have_begun()
    ended = await started.wait()
    assert ended.error is not None
    assert ended.error.type == "WorkerLost"
    assert "the engine of docker cannot be reached: Cannot connect to the Docker daemon" in ended.error.message
    assert ended.error.message.endswith("it was unreachable for 1 s; no result was there, and the body may have begun")
    (tmp_path / "notes-go").touch()
    await wait_until((asked.folder.path / "result.msgpack").exists, LIMIT)
    assert (await started._exit_of_lost("")).code == 0
    another = replace(asked, id="b")
    with pytest.raises(dls.DispatchError, match="cannot be reached"):
        await runner.start(another)
    await anyio.to_thread.run_sync(engine.start)
    remove_earlier_files(asked.folder.path)
    assert (await (await runner.start(another)).wait()).code == 0
    assert runner.abandoned == []
    asked.folder.remove()


async def test_a_runner_that_ends_before_its_engine_is_back(
    mortal: tuple[Site, Docker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site, engine = mortal
    asked = launch(tmp_path, second_time, str(tmp_path / "notes"))
    runner = site.runner(grace="0.1")
    started = await runner.start(asked)
    await wait_until(lambda: notes(tmp_path / "notes"), LIMIT)
    await anyio.to_thread.run_sync(engine.stop, signal.SIGKILL)
    assert (await run_to_end(started.kill)).code == -signal.SIGKILL
    assert len(runner.abandoned) == 1
    await runner.aclose()
    assert runner.abandoned == []
    asked.folder.remove()
