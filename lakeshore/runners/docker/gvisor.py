"""Children in sandboxes of gVisor: by its runtime under docker, or by `runsc` alone on a root file system."""

from __future__ import annotations

import json
import os
import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import anyio
import anyio.to_thread

from ...daemon.workdir import last_output
from ...errors import DispatchError
from ...settings import read_settings
from ...worker.runner import Exit, start_or_undo, to_the_end
from ..attached_client import ENTRY, Followed, Mount, Program, follow, mounts_of, name_of, own_environ, read_mounts
from ..commands import Guard
from ..options import amount, check_known, words
from .client import Engine, no_program
from .runner import GRACE, START_TIMEOUT, DockerRunner, give, sweep

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ...worker.runner import Launch, Process, Runner

__all__ = ["GvisorRunner", "RunscRunner"]

KNOWN = [
    *("rootfs", "python", "binary", "platform", "network", "mount", "user", "state", "arg", "grace", "start-timeout"),
    "image",
]
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CAPABILITIES = [
    f"CAP_{name}"
    for name in "CHOWN DAC_OVERRIDE FOWNER FSETID KILL SETGID SETUID SETPCAP NET_BIND_SERVICE SYS_CHROOT MKNOD".split()
]
"""What root may do in a sandbox: what docker lets it."""
_END = (
    'name=$1 bundle=$2 place=$3; shift 3; for pause in 0 0.5 1 2; do sleep $pause; "$@" kill "$name" KILL; said=$?; '
    '"$@" delete --force "$name"; rm -rf "$bundle"; tag=${bundle##*-} kin=${bundle%-*-*}; used=; '
    'for other in "$kin"-*-"$tag"; do [ -e "$other" ] && used=1; done; '
    '[ -n "$used" ] || rmdir "$place"; [ $said = 0 ] && exit; done'
)
"""Ends the sandbox NAME. The mount point stays if another attempt has a bundle, and thus needs it."""
_NEVER_BEGAN = re.compile(r"^(running|starting|creating|loading) container\b|FATAL ERROR", re.M)


class GvisorRunner:
    """What `--runner gvisor` means: a DockerRunner where `image` is given, else a RunscRunner."""

    name = "gvisor"
    elsewhere = True

    @staticmethod
    def from_options(options: Mapping[str, str], environ: Mapping[str, str]) -> Runner:
        """The runner that `--runner-option` asks for, see `cli.runner_table`. Raises ValueError."""
        if "image" in options:
            return _Docker.from_options({"runtime": "runsc", **options}, environ)
        check_known("gvisor", options, KNOWN)
        if not options.get("rootfs"):
            raise ValueError(
                "the gvisor runner needs a root file system, or an image and docker: add --runner-option rootfs=FOLDER, or "
                "--runner-option image=NAME and runtime=NAME as docker knows it (runsc)"
            )
        binary = options.get("binary") or "runsc"
        if shutil.which(binary) is None:
            raise ValueError(no_program(binary))
        rootfs = os.path.abspath(options["rootfs"])
        if not os.path.isdir(rootfs):
            raise ValueError(f"the runner option rootfs names {rootfs!r}, and there is no such folder here")
        told = [f"--{name}={options[name]}" for name in ("platform",) if options.get(name)]
        return RunscRunner(
            rootfs,
            environ=environ,
            binary=binary,
            arguments=[*told, f"--network={options.get('network') or 'none'}", *words(options.get("arg"))],
            python=options.get("python") or "python3",
            mounts=read_mounts(options.get("mount")),
            user=options.get("user") or None,
            state=options.get("state"),
            grace=amount("grace", options.get("grace", str(GRACE))),
            start_timeout=amount("start-timeout", options.get("start-timeout", str(START_TIMEOUT))),
        )


class _Docker(DockerRunner):
    name = "gvisor"
    shares_locks = False


class User(NamedTuple):
    """Whom a child runs as."""

    uid: int
    gid: int


class RunscRunner:
    """Starts each child in a sandbox of its own, whose root file system is the folder `rootfs`.

    It is read-only there and shared by all; /tmp is in memory. The folder of the invocation and the root of keys are there
    under the same absolute paths as here; their mount points are made in `rootfs`. No limits are set. arguments: those
    before the command. state: the folder of what runsc and this runner keep, default `$LAKESHORE_HOME/runsc`.
    """

    name = "gvisor"
    elsewhere = True

    def __init__(
        self,
        rootfs: str,
        *,
        environ: Mapping[str, str] | None = None,
        binary: str = "runsc",
        arguments: Sequence[str] = ("--network=none",),
        python: str = "python3",
        mounts: Sequence[Mount] = (),
        user: str | None = None,
        state: str | None = None,
        grace: float = GRACE,
        start_timeout: float = START_TIMEOUT,
    ) -> None:
        self.rootfs, self.python, self.mounts = os.path.abspath(rootfs), python, list(mounts)
        self.environ, self.user = dict(environ or {}), user
        self.state = Path(os.path.abspath(state)) if state else read_settings().home / "runsc"
        self.engine = Engine(binary, ["--ignore-cgroups", *arguments, f"--root={self.state / 'containers'}"])
        self.grace, self.start_timeout = grace, start_timeout

    async def start(self, launch: Launch) -> Process:
        """Start a child. Raises OSError or DispatchError with what is wrong with its root or its user."""
        if launch.attempt > 1:
            await self._clear(launch)
        return await start_or_undo(partial(self._start, launch))

    async def aclose(self) -> None:
        """Nothing is kept for the next child."""

    async def _clear(self, launch: Launch) -> None:
        """End the sandbox of an earlier attempt, and remove what it may have written into the folder since then."""
        answer = await self.engine.call("list", "-quiet")
        tag = name_of(launch).rpartition("-")[2]
        earlier = [name for name in answer.out.split() if name.endswith(f"-{tag}")]
        for name in earlier:
            await self.delete(name)
        if earlier:
            await anyio.to_thread.run_sync(sweep, launch.folder.path)

    async def _start(self, launch: Launch) -> _Sandbox:
        name = name_of(launch)
        bundle = self.state / "bundles" / name
        place = f"{self.rootfs}{launch.folder.path}"
        await anyio.to_thread.run_sync(self._write, launch, bundle)
        ending = ["/bin/sh", "-c", _END, "sh", name, str(bundle), place, *self.engine.argv]
        guard = await anyio.to_thread.run_sync(Guard, ending)
        try:
            client = await follow([*self.engine.argv, "run", "--bundle", str(bundle), name], launch)
        except BaseException:
            await anyio.to_thread.run_sync(self.forget, name, place)
            await anyio.to_thread.run_sync(guard.dismiss)
            raise
        return _Sandbox(self, launch, name, place, client, guard)

    def _write(self, launch: Launch, bundle: Path) -> None:
        """Write the bundle, which holds the environment: for nobody else to read."""
        user = self._user(launch)
        if launch.as_user is not None:
            give(launch, launch.as_user, user.uid, user.gid)
        config = json.dumps(self._config(launch, user))
        for folder in (self.state, self.state / "containers", bundle):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(bundle / "config.json", "w", opener=partial(os.open, mode=0o600)) as out:
            out.write(config)

    def _user(self, launch: Launch) -> User:
        name = launch.as_user or self.user
        if name is None:
            return User(os.geteuid(), os.getegid())
        numbers = re.fullmatch(r"(\d+)(?::(\d+))?", name) if launch.as_user is None else None
        if numbers is not None:
            return User(int(numbers[1]), int(numbers[2] or numbers[1]))
        accounts = ""
        with suppress(FileNotFoundError):
            accounts = Path(f"{self.rootfs}/etc/passwd").read_text("utf-8", "replace")
        found = re.search(rf"^{re.escape(name)}:[^:\n]*:(\d+):(\d+):", accounts, re.M)
        if found is None:
            said = "`as_user`" if launch.as_user is not None else "the runner option user"
            raise DispatchError(f"{said} names {name!r}, and there is no such user in {self.rootfs}")
        return User(int(found[1]), int(found[2]))

    def _config(self, launch: Launch, user: User) -> dict[str, Any]:
        environ = own_environ({"PATH": PATH, **self.environ, **launch.environ}, [])
        able = CAPABILITIES if user.uid == 0 else []
        mounts: list[dict[str, Any]] = [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
        ]
        for source, target, read_only in sorted(mounts_of(launch, self.mounts), key=lambda one: one.target.count("/")):
            options = ["rbind", "ro" if read_only else "rw"]
            mounts.append({"destination": target, "type": "bind", "source": source, "options": options})
        return {
            "ociVersion": "1.0.2",
            "process": {
                "user": {"uid": user.uid, "gid": user.gid},
                "args": ["bash", "-c", launch.script] if launch.script is not None else [self.python, *ENTRY],
                "env": [f"{name}={value}" for name, value in environ.items()],
                "cwd": str(launch.folder.path),
                "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), able),
                "noNewPrivileges": True,
            },
            "root": {"path": self.rootfs, "readonly": True},
            "hostname": "lakeshore",
            "mounts": mounts,
            "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount", "network")]},
        }

    async def delete(self, name: str) -> None:
        """End a sandbox, if it is there. Raises Unreachable."""
        await self.engine.call("kill", name, "KILL")
        await self.engine.call("delete", "--force", name)

    def forget(self, name: str, place: str) -> None:
        """Remove what is left of one that has ended."""
        shutil.rmtree(self.state / "bundles" / name, ignore_errors=True)
        with suppress(OSError):
            os.rmdir(place)


class _Sandbox(Followed):
    """A child in a sandbox."""

    def __init__(
        self, runner: RunscRunner, launch: Launch, name: str, place: str, client: anyio.abc.Process, guard: Guard
    ) -> None:
        program = Program(runner.name, runner.engine.program, runner.rootfs, runner.python)
        super().__init__(launch, client, guard, program, runner.grace, runner.start_timeout)
        self._runner, self._name, self._place = runner, name, place

    async def wait(self) -> Exit:
        while self._exit is None:
            await self._client_ended()
            await to_the_end(self._settle)
        return self._exit

    async def _settle(self) -> None:
        code = self._client.returncode
        assert code is not None
        if code != 0:
            await self._remove()
        await anyio.to_thread.run_sync(self._runner.forget, self._name, self._place)
        await self._end(await self._ended(code))

    async def _ended(self, code: int) -> Exit:
        if code < 0 and self._stopping:
            return Exit(code)
        if code < 0:
            said = f"its {self._runner.engine.program} was killed by signal {-code}, and the sandbox with it"
            return await self._lost(said)
        if code == 128 and not self._stopping:
            output = await anyio.to_thread.run_sync(last_output, self._launch.folder.path)
            if _NEVER_BEGAN.search(output):
                return Exit(code, error=await self._not_started(output))
        return await self._exit_of(code)

    async def _has_begun(self) -> bool:
        answer = await self._runner.engine.call("state", self._name)
        return '"running"' in answer.out

    async def _signal(self, name: str) -> bool:
        return (await self._runner.engine.call("kill", self._name, name)).code == 0

    async def _remove(self) -> None:
        if self._client.returncode is None:
            self._client.kill()  # what it has begun ends with it
            await self._client.wait()
        await self._runner.delete(self._name)
