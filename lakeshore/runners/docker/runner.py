"""Run children in containers of docker or podman.

A container is created first, which is quick and runs nothing. Then a client of the engine starts it and runs as long as
the child does: it writes the child's output into the folder and holds the folder's lock. A guard removes the container
when this process is gone.
"""

from __future__ import annotations

import os
import shutil
import signal
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import anyio
import anyio.to_thread

from ...concurrency.tasks import run_to_end
from ...errors import DispatchError
from ...worker.runner import Exit, start_or_undo
from ..account import find_in_passwd, give_folder
from ..attached_client import (
    AttachedChild,
    ChildProgram,
    EngineUnreachable,
    Mount,
    container_environ,
    container_name,
    launch_mounts,
    read_mounts,
    start_client,
)
from ..commands import Guard, child_command
from ..failure import child_failed
from ..leftovers import remove_earlier_files
from ..options import Option, amount, choice, flag, read_options, whole_amount, words
from .client import ContainerEngine, ContainerState, no_program

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    from ...worker.runner import Launch, Process

__all__ = ["DockerOptions", "DockerRunner", "options_with_program"]

GRACE = 5.0
START_TIMEOUT = 300.0
ENGINE_RETURN_TIMEOUT = 30.0
"""Seconds that an unreachable engine has to come back: after a restart it may still run what it ran."""
MAX_ENV_FILE_VALUE = 10_000
"""Characters of a variable that is passed in a file: docker reads no lines of 64 kB."""
LABEL = "dreamlake.lakeshore"
_GUARD = (
    'name=$1; shift; for pause in 0 0.5 1 2; do sleep $pause; "$@" kill --signal KILL "$name" '
    '&& "$@" rm -f -v "$name" && exit; "$@" rm -f -v "$name"; done'
)
"""Ends the container NAME. It tries again after a while, since the engine may just be creating it."""

OptionsT = TypeVar("OptionsT", bound="DockerOptions")


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerOptions:
    """The options of the docker and gvisor runners."""

    notes: ClassVar[str] = (
        "The folder of an invocation and the root of keys are mounted under their own paths. Of this worker's variables, "
        "children get LAKESHORE_*, the locale and those of --env. Bodies that submit need a server, or a mount of "
        "LAKESHORE_HOME."
    )

    image: Annotated[str, Option("NAME", "The image to run.")]
    python: Annotated[str, Option("PATH", "The Python in the image that runs children.")] = "python3"
    binary: Annotated[str, Option("PATH", "docker, podman, or a path to one of them.")] = "docker"
    pull: Annotated[
        str, Option("WHEN", "When to pull the image: missing, always or never.", choice("missing", "always", "never"))
    ] = "missing"
    mount: Annotated[
        tuple[Mount, ...], Option("SRC[:DST][:ro],...", "Files or folders of this machine to mount.", read_mounts)
    ] = ()
    user: Annotated[
        str | None,
        Option(
            "UID[:GID]",
            "The user in the container, by default this worker's; 0:0 for a rootless docker, and arg=--userns=keep-id for a "
            "rootless podman.",
        ),
    ] = None
    network: Annotated[str | None, Option("NAME", "The network, as the engine takes it.")] = None
    memory: Annotated[int | None, Option("BYTES", "Limit of the memory, such as 2g.", whole_amount)] = None
    cpus: Annotated[float | None, Option("NUMBER", "Limit of the CPUs, such as 1.5.", amount)] = None
    gpus: Annotated[str | None, Option("WHICH", "The GPUs, as the engine takes them.")] = None
    read_only: Annotated[bool, Option("1", "Make the file system of the container read-only.", flag)] = False
    runtime: Annotated[str | None, Option("NAME", "The runtime, as the engine knows it.")] = None
    init: Annotated[bool, Option("0", "Start no init process, for an image that has one of its own.", flag)] = True
    arg: Annotated[tuple[str, ...], Option("--FLAG,...", "Further arguments of `create`.", words)] = ()
    global_arg: Annotated[
        tuple[str, ...], Option("--FLAG,...", "Arguments before each command of the engine.", words)
    ] = ()
    grace: Annotated[float, Option("SECONDS", "From SIGTERM to SIGKILL.", amount)] = GRACE
    start_timeout: Annotated[float, Option("SECONDS", "To pull the image, and to begin a child.", amount)] = (
        START_TIMEOUT
    )

    def create_arguments(self) -> list[str]:
        """Return the arguments of `create` that are the same for all children."""
        arguments = ["--init"] if self.init else []
        for name, value in (("network", self.network), ("gpus", self.gpus), ("runtime", self.runtime)):
            if value is not None:
                arguments.append(f"--{name}={value}")
        if self.memory is not None:
            arguments.append(f"--memory={self.memory}")
        if self.cpus is not None:
            arguments.append(f"--cpus={self.cpus:g}")
        if self.read_only:
            arguments.append("--read-only")
        return [*arguments, *self.arg]


def options_with_program(kind: type[OptionsT], runner: str, given: Mapping[str, str]) -> OptionsT:
    """Parse the options of a runner. Raises ValueError, also where the engine's program is not here."""
    options = read_options(kind, runner, given)
    if shutil.which(options.binary) is None:
        raise ValueError(no_program(options.binary))
    return options


class DockerRunner:
    """Starts each child in a container of its own, in the environment `environ`."""

    name = "docker"
    elsewhere = True
    """Children have a file system of their own."""
    shares_locks = True
    """Whether file locks hold between a child and this machine, as those of a plane in a file must."""
    options_class = DockerOptions

    def __init__(self, options: DockerOptions, *, environ: Mapping[str, str] | None = None) -> None:
        self.options = options
        self.environ = dict(environ or {})
        self.engine = ContainerEngine(options.binary, options.global_arg)
        self.abandoned: list[tuple[str, Guard]] = []
        """Names and guards of containers that could not be removed while the engine was unreachable."""

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> Self:
        """Make the runner for `--runner-option`. Raises ValueError, also where the engine's program is not here."""
        return cls(options_with_program(DockerOptions, cls.name, options), environ=environ)

    async def start(self, launch: Launch) -> Process:
        """Start a child. Cancelled while an image is pulled, it waits for nothing; else it removes the container.

        Raises:
            DispatchError: The engine does not answer, or reports why it cannot start the child.
        """
        if self.abandoned:
            await run_to_end(self._remove_abandoned)
        if launch.attempt > 1:
            await self._remove_earlier(launch)
        if self.options.pull == "always":
            await self._pull()
        try:
            return await start_or_undo(partial(self._start, launch))
        except _NotCreated as exc:
            await self.engine.check()
            if not (await self._remove_earlier(launch) or await self._pull_if_missing()):
                raise DispatchError(str(exc)) from None
        return await start_or_undo(partial(self._start, launch))

    async def aclose(self) -> None:
        """Remove the containers of an engine that was unreachable, if it is back."""
        with suppress(EngineUnreachable):
            await run_to_end(self._remove_abandoned)
        while self.abandoned:
            _, guard = self.abandoned.pop()
            await anyio.to_thread.run_sync(guard.dismiss)

    async def _remove_abandoned(self) -> None:
        while self.abandoned:
            name, guard = self.abandoned.pop()
            try:
                await self.engine.remove(f"name=^{name}$")
            except EngineUnreachable:
                self.abandoned.append((name, guard))
                raise
            await anyio.to_thread.run_sync(guard.dismiss)

    async def _remove_earlier(self, launch: Launch) -> bool:
        """Remove the container of an earlier attempt, and what it may have written into the folder since then.

        Returns whether there was one.
        """
        if not await self.engine.remove(f"label={LABEL}.folder={launch.folder.path}"):
            return False
        await anyio.to_thread.run_sync(remove_earlier_files, launch.folder.path)
        return True

    async def _pull_if_missing(self) -> bool:
        """Pull the image if it is missing and may be pulled; return whether it was."""
        if self.options.pull != "missing":
            return False
        if (await self.engine.call("image", "inspect", self.options.image)).code == 0:
            return False
        await self._pull()
        return True

    async def _pull(self) -> None:
        image = self.options.image
        result = await self.engine.call("pull", "--quiet", image, timeout=self.options.start_timeout)
        if result.code != 0:
            raise DispatchError(f"the image {image!r} is not here and cannot be pulled: {result.message}")

    async def _start(self, launch: Launch) -> _Container:
        name = container_name(launch)
        arguments, environ, env_file = self._arguments(launch, name)
        guard_command = ["/bin/sh", "-c", _GUARD, "sh", name, *self.engine.argv]
        guard = await anyio.to_thread.run_sync(Guard, guard_command)
        try:
            result = await self.engine.call("create", *arguments, environ=environ, input=env_file)
            if result.code != 0:
                raise _NotCreated(f"{self.engine.program} could not create its container: {result.message}")
            if launch.as_user is not None:
                await self._give_folder(launch, launch.as_user, name)
            client = await start_client([*self.engine.argv, "start", "--attach", name], launch)
        except BaseException as exc:
            if not isinstance(exc, _NotCreated):
                with suppress(EngineUnreachable):  # the first error has the reason
                    await self.engine.remove(f"name=^{name}$")
            await anyio.to_thread.run_sync(guard.dismiss)
            raise
        return _Container(self, launch, name, client, guard)

    def _arguments(self, launch: Launch, name: str) -> tuple[list[str], dict[str, str], bytes]:
        """Return the arguments of `create`, the environment of the client, and what the client reads from stdin.

        No value of a variable is in an argument, which other users could see. The client passes variables of its own
        environment on; those that would change what the client itself does, it reads as a file.
        """
        options = self.options
        variables = list[str]()
        client_environ = dict(os.environ)
        lines = list[str]()
        shared = options.mount if self.shares_locks else ()
        for variable, value in container_environ({**self.environ, **launch.environ}, shared).items():
            ours = variable.startswith(("LAKESHORE_", "DREAMLAKE_")) or client_environ.get(variable) == value
            if ours or not (variable.isidentifier() and _fits_env_file(value)):
                client_environ[variable] = value
                variables += ["--env", variable]
            else:
                lines.append(f"{variable}={value}\n")
        folder = launch.folder.path
        user = launch.as_user or options.user or f"{os.geteuid()}:{os.getegid()}"
        labels = {"invocation": launch.id, "attempt": launch.attempt, "folder": folder}
        arguments = [
            *(f"--name={name}", f"--workdir={folder}", f"--user={user}"),
            *("--pull=never", "--log-driver=none", "--entrypoint="),
            *(f"--label={LABEL}.{label}={value}" for label, value in labels.items()),
            *(_mount_argument(mount) for mount in launch_mounts(launch, options.mount)),
            *variables,
            *(["--env-file=/dev/stdin"] if lines else []),
            *options.create_arguments(),
            options.image,
            *child_command(launch, options.python),
        ]
        return arguments, client_environ, "".join(lines).encode("utf-8", "surrogateescape")

    async def _give_folder(self, launch: Launch, user: str, name: str) -> None:
        """Make a user of the image the owner of the folder."""
        result = await self.engine.call("cp", f"{name}:/etc/passwd", "-")
        found = find_in_passwd(result.stdout, user)
        if found is None:
            image = self.options.image
            raise DispatchError(f"`as_user` names {user!r}, and there is no such user in the image {image!r}")
        await anyio.to_thread.run_sync(give_folder, launch.folder.path, user, *found)


class _NotCreated(DispatchError):
    """The engine created no container."""


class _Container(AttachedChild):
    """A child in a container."""

    def __init__(
        self, runner: DockerRunner, launch: Launch, name: str, client: anyio.abc.Process, guard: Guard
    ) -> None:
        options = runner.options
        program = ChildProgram(runner.name, runner.engine.program, f"the image {options.image!r}", options.python)
        super().__init__(launch, client, guard, program, grace=options.grace, start_timeout=options.start_timeout)
        self._runner = runner
        self._engine = runner.engine
        self._name = name
        self._attached = True
        """Whether the client ends with the child's exit code; one that was started later only waits."""
        self._unreachable_since: float | None = None

    async def wait(self) -> Exit:
        while self._exit is None:
            await self._wait_for_client()
            try:
                await run_to_end(self._conclude)
            except EngineUnreachable as exc:
                now = anyio.current_time()
                self._unreachable_since = self._unreachable_since or now
                if now > self._unreachable_since + ENGINE_RETURN_TIMEOUT:
                    await run_to_end(partial(self._give_up, exc))
                await anyio.sleep(0.5)
        return self._exit

    async def _has_begun(self) -> bool:
        state = await self._engine.inspect(self._name)
        return state is None or state.started

    async def _conclude(self) -> None:
        code = self._client.returncode
        assert code is not None
        if code == 0 and self._attached:
            ended = Exit(0)
        else:
            state = await self._engine.inspect(self._name)
            if state is not None and state.running and code >= 0 and not self._stopping:
                # The engine was away and came back with the container, whose further output is lost.
                arguments = [*self._engine.argv, "wait", self._name]
                self._client = await start_client(arguments, self._launch, output=False)
                self._attached = False
                return
            ended = await self._exit_by_state(state, code)
        if (await self._engine.call("rm", "-f", "-v", self._name)).code != 0 or self._stopping:
            await self._remove_container()
        await self._set_exit(ended)

    async def _exit_by_state(self, state: ContainerState | None, client: int) -> Exit:
        """Return how the child has ended, by the container's state and the client's exit code."""
        program = self._engine.program
        if state is None or state.running:
            if self._stopping:
                return Exit(-signal.SIGKILL)
            if state is None:
                return Exit(1, error=child_failed("its container was removed while it ran"))
            return await self._exit_of_lost(
                f"the client of {program} was killed by signal {-client}, and the container after it"
            )
        if not state.started and client < 0 and not self._stopping:
            return await self._exit_of_lost(
                f"the client of {program} was killed by signal {-client} before the child began"
            )
        if not state.started:
            return Exit(1, error=await self._start_failure(state.error))
        if self._unreachable_since is not None and state.code != 0:
            return await self._exit_of_lost(f"{program} went away while it ran, and ended it")
        limit = self._runner.options.memory
        if state.out_of_memory or (limit and state.code == 137 and not self._stopping):
            likely = "" if state.out_of_memory else "most likely "
            of_bytes = f" of {limit} bytes" if limit else ""
            cause = f"it was killed (exit code 137), {likely}because it used more than its memory limit{of_bytes}"
            return await self._exit_for(137, cause)
        return await self._exit_for(state.code)

    async def _give_up(self, exc: EngineUnreachable) -> None:
        message = f"{exc}; it was unreachable for {ENGINE_RETURN_TIMEOUT:g} s"
        await self._set_exit(await self._exit_of_lost(message), gone=False)

    def _hand_over_guard(self) -> bool:
        self._runner.abandoned.append((self._name, self._guard))
        return True

    async def _send_signal(self, name: str) -> bool:
        return (await self._engine.call("kill", "--signal", name, self._name)).code == 0

    async def _remove_container(self) -> None:
        await self._engine.remove(f"name=^{self._name}$")


def _fits_env_file(value: str) -> bool:
    """Return whether the value comes out of a file of variables unchanged."""
    return len(value) < MAX_ENV_FILE_VALUE and not set(value) & set("\r\n")


def _mount_argument(mount: Mount) -> str:
    fields = ["type=bind", f"source={mount.source}", f"target={mount.target}"]
    if mount.read_only:
        fields.append("readonly")
    quoted = [f'"{field.replace(chr(34), chr(34) * 2)}"' if set(field) & set(',"') else field for field in fields]
    return f"--mount={','.join(quoted)}"
