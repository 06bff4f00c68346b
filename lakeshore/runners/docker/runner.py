"""Children in containers of docker or podman, through the command line that both have.

The container is created first, which is quick and never runs anything, and then a client of the engine starts it and
stays as long as the child does: the child's output comes through it into the folder, and it holds the folder's lock. A
guard removes the container when this process is gone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ...concurrency.tasks import run_to_end
from ...daemon.workdir import ARGS, LOCK, remove_leftovers
from ...errors import DispatchError
from ...worker.runner import Exit, start_or_undo
from ..attached_client import (
    ENTRY,
    Followed,
    Mount,
    Program,
    Unreachable,
    follow,
    mounts_of,
    name_of,
    own_environ,
    read_mounts,
)
from ..commands import Guard
from ..options import amount, check_known, flag, words
from .client import Engine, State, no_program

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ...worker.runner import Launch, Process

__all__ = ["GRACE", "START_TIMEOUT", "DockerRunner", "give", "sweep"]

GRACE = 5.0
START_TIMEOUT = 300.0
BACK = 30.0
"""Seconds that an engine has to come back: one that is started again may still run what it ran."""
LABEL = "dreamlake.lakeshore"
_END = (
    'name=$1; shift; for pause in 0 0.5 1 2; do sleep $pause; "$@" kill --signal KILL "$name" '
    '&& "$@" rm -f -v "$name" && exit; "$@" rm -f -v "$name"; done'
)
"""Ends the container NAME; again after a while, since one may just be coming into being."""

PASSED = ("network", "gpus", "runtime")
KNOWN = [
    *("image", "python", "binary", "pull", "mount", "user", "network", "memory", "cpus", "gpus", "read-only"),
    *("runtime", "init", "arg", "global-arg", "grace", "start-timeout"),
]


class DockerRunner:
    """Starts each child in a container of `image`.

    The folder of the invocation and the root of keys are there under the same absolute paths as here. environ: variables
    for children. python: the program in the image. user: UID[:GID] or a name in the image; None: this process's. fixed:
    further arguments of `create`. memory: bytes, which are among these already, for messages. pull: `missing`, `always`
    or `never`. grace: seconds between SIGTERM and SIGKILL. start_timeout: seconds that an engine has for an image, and
    to begin a child.
    """

    name = "docker"
    elsewhere = True
    shares_locks = True
    """Whether file locks hold between a child and this machine, as those of a plane in a file must."""

    def __init__(
        self,
        image: str,
        *,
        environ: Mapping[str, str] | None = None,
        binary: str = "docker",
        global_arguments: Sequence[str] = (),
        python: str = "python3",
        mounts: Sequence[Mount] = (),
        user: str | None = None,
        memory: int | None = None,
        fixed: Sequence[str] = (),
        init: bool = True,
        pull: str = "missing",
        grace: float = GRACE,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        self.engine = Engine(binary, global_arguments)
        self.image, self.python, self.pull = image, python, pull
        self.environ, self.mounts, self.memory = dict(environ or {}), list(mounts), memory
        self.user = f"{os.geteuid()}:{os.getegid()}" if user is None else user
        self.fixed = [*(["--init"] if init else []), *fixed]
        self.grace, self.start_timeout = grace, start_timeout
        self.abandoned: list[tuple[str, Guard]] = []

    @classmethod
    def from_options(cls, options: Mapping[str, str], environ: Mapping[str, str]) -> DockerRunner:
        """The runner that `--runner-option` asks for, see `cli.runner_table`. Raises ValueError for anything else, and
        where the program of the engine is not here."""
        check_known(cls.name, options, KNOWN)
        if not options.get("image"):
            raise ValueError(f"the {cls.name} runner needs the image to run: add --runner-option image=NAME")
        binary = options.get("binary") or "docker"
        if shutil.which(binary) is None:
            raise ValueError(no_program(binary))
        pull = options.get("pull", "missing")
        if pull not in ("missing", "always", "never"):
            raise ValueError(f"expected the runner option pull to be missing, always or never, got {pull!r}")
        memory = int(amount("memory", options["memory"])) if "memory" in options else None
        fixed = [f"--{name}={options[name]}" for name in PASSED if options.get(name)]
        if memory is not None:
            fixed.append(f"--memory={memory}")
        if "cpus" in options:
            fixed.append(f"--cpus={amount('cpus', options['cpus']):g}")
        if flag("read-only", options.get("read-only", "0")):
            fixed.append("--read-only")
        return cls(
            options["image"],
            environ=environ,
            binary=binary,
            global_arguments=words(options.get("global-arg")),
            python=options.get("python") or "python3",
            mounts=read_mounts(options.get("mount")),
            user=options.get("user") or None,
            memory=memory,
            fixed=[*fixed, *words(options.get("arg"))],
            init=flag("init", options.get("init", "1")),
            pull=pull,
            grace=amount("grace", options.get("grace", str(GRACE))),
            start_timeout=amount("start-timeout", options.get("start-timeout", str(START_TIMEOUT))),
        )

    async def start(self, launch: Launch) -> Process:
        """Start a child. Raises DispatchError with what the engine says. Cancelled while an image is pulled, it waits for
        nothing; while the container is created, for that."""
        mine = f"label={LABEL}.folder={launch.folder.path}"
        if self.abandoned:
            await run_to_end(self._collect)
        if launch.attempt > 1:
            await self._clear(launch, mine)
        if self.pull == "always":
            await self._pull()
        try:
            return await self._kept(launch)
        except _Refused as exc:
            await self.engine.check()
            if not (await self._clear(launch, mine) or await self._pulled()):
                raise DispatchError(str(exc)) from None
        return await self._kept(launch)

    async def aclose(self) -> None:
        """Remove containers of an engine that went away, if it is back."""
        with suppress(Unreachable):
            await run_to_end(self._collect)
        while self.abandoned:
            await anyio.to_thread.run_sync(self.abandoned.pop()[1].dismiss)

    async def _collect(self) -> None:
        while self.abandoned:
            name, guard = self.abandoned.pop()
            try:
                await self.engine.remove(f"name=^{name}$")
            except Unreachable:
                self.abandoned.append((name, guard))
                raise
            await anyio.to_thread.run_sync(guard.dismiss)

    async def _clear(self, launch: Launch, mine: str) -> bool:
        """Remove the container of an earlier attempt, and what it may have written into the folder since then."""
        if not await self.engine.remove(mine):
            return False
        await anyio.to_thread.run_sync(sweep, launch.folder.path)
        return True

    async def _pulled(self) -> bool:
        """Whether the image was missing, and has been pulled."""
        if self.pull != "missing" or (await self.engine.call("image", "inspect", self.image)).code == 0:
            return False
        await self._pull()
        return True

    async def _pull(self) -> None:
        answer = await self.engine.call("pull", "--quiet", self.image, timeout=self.start_timeout)
        if answer.code != 0:
            raise DispatchError(f"the image {self.image!r} is not here and cannot be pulled: {answer.said}")

    async def _kept(self, launch: Launch) -> Process:
        return await start_or_undo(partial(self._start, launch))

    async def _start(self, launch: Launch) -> _Container:
        name = name_of(launch)
        arguments, environ, lines = self._arguments(launch, name)
        ending = ["/bin/sh", "-c", _END, "sh", name, *self.engine.argv]
        guard = await anyio.to_thread.run_sync(Guard, ending)
        try:
            answer = await self.engine.call("create", *arguments, environ=environ, input=lines)
            if answer.code != 0:
                raise _Refused(f"{self.engine.program} could not create its container: {answer.said}")
            if launch.as_user is not None:
                await self._give(launch, launch.as_user, name)
            client = await follow([*self.engine.argv, "start", "--attach", name], launch)
        except BaseException as exc:
            if not isinstance(exc, _Refused):
                with suppress(Unreachable):  # what says why has been raised
                    await self.engine.remove(f"name=^{name}$")
            await anyio.to_thread.run_sync(guard.dismiss)
            raise
        return _Container(self, launch, name, client, guard)

    def _arguments(self, launch: Launch, name: str) -> tuple[list[str], dict[str, str], bytes]:
        """The arguments of `create`, the environment of the client, and what it is to read.

        Values stand in no argument, which others could see. The client hands on those of its own environment; what would
        change what the client itself does, it reads.
        """
        told, client, lines = list[str](), dict(os.environ), list[str]()
        shared = self.mounts if self.shares_locks else []
        for variable, value in own_environ({**self.environ, **launch.environ}, shared).items():
            ours = variable.startswith(("LAKESHORE_", "DREAMLAKE_")) or client.get(variable) == value
            if ours or not (variable.isidentifier() and _is_line(value)):
                client[variable] = value
                told += ["--env", variable]
            else:
                lines.append(f"{variable}={value}\n")
        folder = launch.folder.path
        labels = {"invocation": launch.id, "attempt": launch.attempt, "folder": folder}
        command = ["bash", "-c", launch.script] if launch.script is not None else [self.python, *ENTRY]
        arguments = [
            *(f"--name={name}", f"--workdir={folder}", f"--user={launch.as_user or self.user}"),
            *("--pull=never", "--log-driver=none", "--entrypoint="),
            *(f"--label={LABEL}.{label}={value}" for label, value in labels.items()),
            *(_mount(one) for one in mounts_of(launch, self.mounts)),
            *told,
            *(["--env-file=/dev/stdin"] if lines else []),
            *self.fixed,
            self.image,
            *command,
        ]
        return arguments, client, "".join(lines).encode("utf-8", "surrogateescape")

    async def _give(self, launch: Launch, user: str, name: str) -> None:
        """Let a user of the image into the folder."""
        answer = await self.engine.call("cp", f"{name}:/etc/passwd", "-")
        given = re.search(rf"(?:^|[\n\0]){re.escape(user)}:[^:\n]*:(\d+):(\d+):", answer.out)
        if given is None:
            raise DispatchError(f"`as_user` names {user!r}, and there is no such user in the image {self.image!r}")
        await anyio.to_thread.run_sync(give, launch, user, int(given[1]), int(given[2]))


class _Refused(DispatchError):
    """The engine created nothing."""


class _Container(Followed):
    """A child in a container."""

    def __init__(
        self, runner: DockerRunner, launch: Launch, name: str, client: anyio.abc.Process, guard: Guard
    ) -> None:
        what = f"the image {runner.image!r}"
        program = Program(runner.name, runner.engine.program, what, runner.python)
        super().__init__(launch, client, guard, program, runner.grace, runner.start_timeout)
        self._runner, self._engine, self._name = runner, runner.engine, name
        self._attached = True
        self._away_since: float | None = None

    async def wait(self) -> Exit:
        while self._exit is None:
            await self._client_ended()
            try:
                await run_to_end(self._settle)
            except Unreachable as exc:
                now = anyio.current_time()
                self._away_since = self._away_since or now
                if now > self._away_since + BACK:
                    await run_to_end(partial(self._give_up, exc))
                await anyio.sleep(0.5)
        return self._exit

    async def _has_begun(self) -> bool:
        state = await self._engine.look(self._name)
        return state is None or state.started

    async def _settle(self) -> None:
        code = self._client.returncode
        assert code is not None
        if code == 0 and self._attached:
            ended = Exit(0)
        else:
            state = await self._engine.look(self._name)
            if state is not None and state.running and code >= 0 and not self._stopping:
                # The engine was away and has come back with the container. Its further output has no way here.
                arguments = [*self._engine.argv, "wait", self._name]
                self._client, self._attached = await follow(arguments, self._launch, output=False), False
                return
            ended = await self._ended(state, code)
        await self._engine_removes()
        await self._end(ended)

    async def _ended(self, state: State | None, client: int) -> Exit:
        program = self._engine.program
        if state is None or state.running:
            if self._stopping:
                return Exit(-signal.SIGKILL)
            if state is None:
                return Exit(1, error=self._failure("its container was removed while it ran"))
            return await self._lost(
                f"the client of {program} was killed by signal {-client}, and the container after it"
            )
        if not state.started and client < 0 and not self._stopping:
            return await self._lost(f"the client of {program} was killed by signal {-client} before the child began")
        if not state.started:
            return Exit(1, error=await self._not_started(state.error))
        if self._away_since is not None and state.code != 0:
            return await self._lost(f"{program} went away while it ran, and ended it")
        memory = self._runner.memory
        if state.out_of_memory or (memory and state.code == 137 and not self._stopping):
            sure = "" if state.out_of_memory else "most likely "
            return await self._exit_of(
                137,
                f"it was killed (exit code 137), {sure}because it used more than its memory limit"
                + (f" of {memory} bytes" if memory else ""),
            )
        return await self._exit_of(state.code)

    async def _give_up(self, exc: Unreachable) -> None:
        said = f"{exc}; it was away for {BACK:g} s"
        await self._end(await self._lost(said), gone=False)

    def _abandon(self) -> bool:
        self._runner.abandoned.append((self._name, self._guard))
        return True

    async def _engine_removes(self) -> None:
        if (await self._engine.call("rm", "-f", "-v", self._name)).code != 0 or self._stopping:
            await self._engine.remove(f"name=^{self._name}$")

    async def _signal(self, name: str) -> bool:
        return (await self._engine.call("kill", "--signal", name, self._name)).code == 0

    async def _remove(self) -> None:
        await self._engine.remove(f"name=^{self._name}$")


def _is_line(value: str) -> bool:
    """Whether it comes out of a file of variables as it is; docker reads no lines of 64 kB."""
    return len(value) < 10_000 and not set(value) & set("\r\n")


def _mount(mount: Mount) -> str:
    fields = [
        "type=bind",
        f"source={mount.source}",
        f"target={mount.target}",
        *(["readonly"] if mount.read_only else []),
    ]
    quoted = [f'"{field.replace(chr(34), chr(34) * 2)}"' if set(field) & set(',"') else field for field in fields]
    return f"--mount={','.join(quoted)}"


def give(launch: Launch, user: str, uid: int, gid: int) -> None:
    """Let a user into the folder of an invocation: what is below the root of all folders stays closed to others."""
    try:
        os.chmod(launch.folder.path.parent, 0o711)
        for path in (launch.folder.path / ARGS, launch.folder.path):
            os.chown(path, uid, gid)
    except PermissionError:
        raise DispatchError(
            f"`as_user` names {user!r}, and only a worker that runs as root can run as another user"
        ) from None


def sweep(folder: Path) -> None:
    """Remove from the folder what an earlier attempt may have written since it was taken."""
    names = [path.name for path in folder.iterdir() if path.name not in (ARGS, LOCK)]
    if names:
        remove_leftovers(folder, *names)
