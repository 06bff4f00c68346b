"""dockerd and podman for the tests, also with gVisor as runtime, each in a folder of its own with the image of `engines`.

The image has a Python and nothing of ours: the package, what it needs, and the modules of this folder are mounted.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import child_bodies as bodies
from engines import IMAGE, engines_folder, import_image, podman_arguments, root_filesystem
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.daemon.workdir import ChildSettings, Folder
from dreamlake.lakeshore.worker.runner import Launch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_kit import Engine

__all__ = ["DOCKER", "GVISOR", "PODMAN", "Docker", "Podman", "launch", "pairs"]

HERE = Path(__file__).resolve().parent
SOURCE, SITE = "/lakeshore/source", "/lakeshore/site"
PACKAGE = Path(dls.__file__).resolve().parent
MOUNTS = [f"{PACKAGE}:{SOURCE}/dreamlake/lakeshore:ro", f"{sysconfig.get_path('purelib')}:{SITE}:ro", f"{HERE}:ro"]
VARIABLES = [
    f"PYTHONPATH={SOURCE}:{HERE}:{SITE}",
    "PYTHONDONTWRITEBYTECODE=1",
    "PYTHONWARNINGS=error",
]
INVOCATION = "dreamlake.lakeshore.invocation"


def pairs(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The options of the runner, and the variables, in the arguments of a worker."""
    found = dict[str, list[str]]()
    for flag, value in zip(arguments[::2], arguments[1::2], strict=True):
        found.setdefault(flag, []).append(value)
    return dict(one.split("=", 1) for one in found["--runner-option"]), found["--env"]


def _arguments(runner: str, **options: str) -> list[str]:
    told = [f"{name.replace('_', '-')}={value}" for name, value in {**options, "mount": ",".join(MOUNTS)}.items()]
    return [
        *("--runner", runner),
        *(word for one in told for word in ("--runner-option", one)),
        *(word for one in VARIABLES for word in ("--env", one)),
    ]


def _missing(*programs: str) -> str | None:
    if os.geteuid() != 0:
        return "root, which engines of containers are started as"
    absent = [name for name in (*programs, "debootstrap") if shutil.which(name) is None]
    return f"the programs {', '.join(absent)}" if absent else None


def _write_runsc(folder: Path) -> Path:
    """Write a program that runs runsc in a way that works on every machine."""
    wrapper = folder / "runsc"
    wrapper.write_text('#!/bin/sh\nexec runsc --platform=ptrace --ignore-cgroups --network=none "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


class _Containers:
    """What docker and podman have in common for a test."""

    argv: list[str]
    mark: str
    runner: str

    def run(self, *args: str) -> str:
        """Return the output of a command of the engine; nothing where it fails."""
        return subprocess.run([*self.argv, *args], stdin=subprocess.DEVNULL, capture_output=True, text=True).stdout

    def ids(self, invocation: str) -> list[str]:
        return self.run("ps", "-aq", "--filter", f"label={INVOCATION}={invocation}").split()

    def kill_child(self, id: str) -> None:
        """The one below the init of the container; the container itself where gVisor runs it, whose processes are not
        those of this machine."""
        for container in self.ids(id):
            if self.runner == "gvisor":
                self.run("kill", "--signal", "KILL", container)
                continue
            init = self.run("inspect", "--format", "{{.State.Pid}}", container).strip()
            with suppress(OSError):
                for child in Path(f"/proc/{init}/task/{init}/children").read_text().split():
                    os.kill(int(child), signal.SIGKILL)

    def leftovers(self) -> list[str]:
        return self.run("ps", "-a", "--filter", f"label={self.mark}", "--format", "{{.Names}} {{.Status}}").splitlines()


class Docker(_Containers):
    """A dockerd that has no network and touches no other; it knows gVisor as `runsc` where that is installed."""

    def __init__(self, name: str = "docker", runner: str = "docker", **options: str) -> None:
        self.name, self.runner, self._options = name, runner, options
        self._folder = Path()
        self.process: subprocess.Popen[bytes] | None = None

    def missing(self) -> str | None:
        return _missing("containerd", "dockerd", "docker", *(["runsc"] if self.runner == "gvisor" else []))

    @contextmanager
    def up(self) -> Iterator[list[str]]:
        root = root_filesystem(engines_folder())
        with tempfile.TemporaryDirectory(prefix="lsd") as folder:
            self._folder = Path(folder)
            self.argv = ["docker", f"--host=unix://{folder}/sock"]
            self.mark = f"test={secrets.token_hex(8)}"
            with self._containerd(), closing(self):
                self.start()
                import_image(root, self.argv)
                options = {
                    "image": IMAGE,
                    "binary": "docker",
                    "global_arg": self.argv[1],
                    "network": "none",
                    "arg": f"--label={self.mark}",
                    **self._options,
                }
                yield _arguments(self.runner, **options)

    def close(self) -> None:
        """Remove what a failed test has left, which would hold the folder, and end dockerd."""
        if left := self.run("ps", "-aq").split():
            self.run("rm", "-f", *left)
        self.stop()

    def start(self, *options: str) -> None:
        """Start dockerd, or start it again."""
        places = [f"--{name}={self._folder / name}" for name in ("data-root", "exec-root", "pidfile")]
        self.process = self._spawn(
            *("dockerd", *places, f"--host=unix://{self._folder}/sock", f"--containerd={self._folder}/c.sock"),
            *("--iptables=false", "--ip6tables=false", "--bridge=none", "--default-ulimit=nofile=4096:4096"),
            *("--storage-driver=overlay2", f"--add-runtime=runsc={self._folder}/runsc"),
            *options,
        )
        self._answers("dockerd", self.argv)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """End dockerd. With SIGKILL what it runs goes on: its containerd stays."""
        if self.process is not None:
            self.process.send_signal(number)
            self.process.wait(60)
            self.process = None

    @contextmanager
    def _containerd(self) -> Iterator[None]:
        """What dockerd runs containers with, as a service of its own like on most machines."""
        (self._folder / "c.toml").write_text('version = 2\ndisabled_plugins = ["io.containerd.grpc.v1.cri"]\n')
        _write_runsc(self._folder)
        places = [f"--{name}={self._folder}/c.{name}" for name in ("root", "state")]
        argv = ["containerd", f"--config={self._folder}/c.toml", f"--address={self._folder}/c.sock", *places]
        process = self._spawn(*argv)
        try:
            self._answers("containerd", ["ctr", f"--address={self._folder}/c.sock"])
            yield
        finally:
            process.terminate()
            process.wait(60)
            for line in reversed(
                Path("/proc/self/mounts").read_text().splitlines()
            ):  # a dockerd that was killed left them
                if (place := line.split()[1]).startswith(f"{self._folder}/"):
                    subprocess.run(["umount", "--lazy", place], check=True)

    def _spawn(self, *argv: str) -> subprocess.Popen[bytes]:
        with open(self._folder / "log", "ab") as log:
            return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)

    def _answers(self, program: str, argv: list[str]) -> None:
        """Wait until it does."""

        def answers() -> bool:
            return subprocess.run([*argv, "version"], stdin=subprocess.DEVNULL, capture_output=True).returncode == 0

        try:
            wait_until_sync(answers, 60.0, f"an answer of {program}")
        except BaseException:
            sys.stderr.write((self._folder / "log").read_text()[-8000:])
            raise


class Podman(_Containers):
    """podman on a store of the tests' own."""

    def __init__(self, name: str = "podman", runner: str = "docker") -> None:
        self.name, self.runner = name, runner

    def missing(self) -> str | None:
        return _missing("podman", "runsc" if self.runner == "gvisor" else "runc")

    @contextmanager
    def up(self) -> Iterator[list[str]]:
        before = podman_arguments(engines_folder())
        self.argv, self.mark = ["podman", *before], f"test={secrets.token_hex(8)}"
        with tempfile.TemporaryDirectory(prefix="lsp") as folder:
            runtime = str(_write_runsc(Path(folder))) if self.runner == "gvisor" else "runc"
            yield _arguments(
                self.runner,
                binary="podman",
                image=IMAGE,
                network="none",
                runtime=runtime,
                global_arg=",".join(before),
                arg=f"--ulimit=nofile=4096:4096,--ulimit=nproc=4096:4096,--label={self.mark}",
            )


DOCKER: Engine = Docker()
PODMAN: Engine = Podman()
GVISOR: Engine = Docker("gvisor", "gvisor")


def launch(tmp_path: Path, fn: Any = bodies.nothing, *args: Any, attempt: int = 1, **more: Any) -> Launch:
    folder = Folder.take(tmp_path / "work", "a", dls.thunk(fn, *args).to_envelope().to_bytes())
    assert folder is not None
    fields: dict[str, Any] = {"script": None, "as_user": None, **more}
    return Launch("a", attempt, folder, ChildSettings(folder.path, tmp_path, "a").environ(), **fields)
