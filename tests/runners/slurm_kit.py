"""A Slurm cluster of one node, this machine: its three daemons on free ports, in a folder of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine_kit import HERE
from helpers import wait_until_sync

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from engine_kit import Engine

__all__ = ["SLURM", "Cluster", "missing"]

PROGRAMS = "munged slurmctld slurmd sbatch squeue scancel scontrol".split()
FOUND_IN = os.pathsep.join([os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"])

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock
CredType=cred/munge
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1
JobAcctGatherParams=OverMemoryKill
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=450
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,sched_min_interval=1,batch_sched_delay=0
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
MinJobAge={remembered}
PropagateResourceLimits=NONE
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=small Nodes=ALL MaxTime=10 State=UP
"""


def missing() -> str | None:
    """Which programs of Slurm are not here."""
    absent = [name for name in PROGRAMS if shutil.which(name, path=FOUND_IN) is None]
    return f"Slurm ({', '.join(absent)}): apt-get install slurm-wlm munge" if absent else None


class Cluster:
    """The daemons in `folder`, which they leave when `stop` is called."""

    def __init__(self, folder: Path, remembered: int = 300) -> None:
        self.folder = folder
        self.conf = folder / "slurm.conf"
        self._host = socket.gethostname().partition(".")[0]
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("munge", "log", "state", "spool"):
            (folder / name).mkdir(mode=0o700)
        for path in (folder, folder / "spool"):
            path.chmod(0o711)  # other users' jobs pass through
        key = folder / "munge" / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        controller, node = _free_ports(2)
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        self.conf.write_text(
            CONF.format(
                host=self._host, folder=folder, controller=controller, node=node, user=user, remembered=remembered
            )
        )
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nConstrainCores=no\n")

    @property
    def environ(self) -> dict[str, str]:
        return {**os.environ, "PATH": FOUND_IN, "SLURM_CONF": str(self.conf)}

    def start(self, *names: str) -> None:
        """Start daemons, all or those named, and wait until the node takes jobs."""
        munge = self.folder / "munge"
        logs = [
            f"--log-file={self.folder}/log/munged.log",
            f"--pid-file={munge}/munged.pid",
            f"--seed-file={munge}/seed",
        ]
        daemons = {
            "munged": [
                "--foreground",
                "--force",
                f"--key-file={munge}/munge.key",
                f"--socket={munge}/munge.sock",
                *logs,
            ],
            "slurmctld": ["-D", "-f", str(self.conf)],
            "slurmd": ["-D", "-f", str(self.conf), "-N", self._host],
        }
        for name in names or daemons:
            program = shutil.which(name, path=FOUND_IN)
            assert program is not None
            with (self.folder / "log" / f"{name}.out").open("ab") as out:
                self._daemons[name] = subprocess.Popen(
                    [program, *daemons[name]],
                    env=self.environ,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            if name == "munged":
                wait_until_sync((munge / "munge.sock").exists, 30.0, "munged")
        wait_until_sync(self._takes_jobs, 60.0, "a node that takes jobs")

    def stop(self, *names: str) -> None:
        """Stop daemons, all or those named."""
        for name in names or ("slurmd", "slurmctld", "munged"):
            daemon = self._daemons.pop(name, None)
            if daemon is not None:
                daemon.terminate()
                try:
                    daemon.wait(20.0)
                except subprocess.TimeoutExpired:
                    daemon.kill()
                    daemon.wait()

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a daemon."""
        self._daemons[name].send_signal(number)

    def run(self, *argv: str) -> str:
        """What one of Slurm's programs writes to stdout."""
        return subprocess.run(
            argv, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60
        ).stdout.strip()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """The jobs that have not ended: the number and the state of each by its name."""
        lines = self.run("squeue", "--noheader", "--format=%j|%i|%T").splitlines()
        return {name: (id, state) for name, id, state in (line.split("|") for line in lines)}

    def history(self) -> str:
        """The states of all jobs, ended ones too."""
        return self.run("squeue", "--noheader", "--states=all", "--format=%j %T")

    def node(self, state: Literal["up", "down"]) -> None:
        """Have the node fail, or take jobs again."""
        if state == "down":
            self.run("scontrol", "update", f"NodeName={self._host}", "State=DOWN", "Reason=test")
        else:
            if not self._takes_jobs():
                self.run("scontrol", "update", f"NodeName={self._host}", "State=RESUME")
            wait_until_sync(self._takes_jobs, 60.0, "a node that takes jobs")

    def end_jobs(self) -> None:
        """Cancel what is left."""
        if "slurmctld" in self._daemons:
            for id, _ in self.jobs().values():
                self.run("scancel", "--signal=KILL", "--batch", id)
                self.run("scancel", id)
            wait_until_sync(lambda: not self.jobs(), 60.0, "the end of all jobs")

    def _takes_jobs(self) -> bool:
        return self.run("sinfo", "--noheader", "--format=%T", "--partition=debug") in ("idle", "mixed", "allocated")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


@contextmanager
def running(remembered: int = 300) -> Iterator[Cluster]:
    """A cluster during the block. Its folder has a short path, since a socket lies in there."""
    folder = Path(tempfile.mkdtemp(prefix="slurm"))
    cluster = Cluster(folder, remembered)
    try:
        cluster.start()
        yield cluster
    finally:
        try:
            cluster.end_jobs()
        finally:
            cluster.stop()
            shutil.rmtree(folder, ignore_errors=True)


def processes_of(id: str) -> list[int]:
    """The processes of an invocation that a job runs, by their environment; the child itself is the first."""
    found = list[tuple[int, int]]()
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            environ: Mapping[bytes, bytes] = dict(
                item.split(b"=", 1) for item in (entry / "environ").read_bytes().split(b"\0") if b"=" in item
            )
            if environ.get(b"DREAMLAKE_INVOCATION_ID") == id.encode() and b"SLURM_JOB_ID" in environ:
                started = (entry / "stat").read_text().rpartition(")")[2].split()
                if started[0] not in ("Z", "X"):
                    found.append((int(started[19]), int(entry.name)))
    return [pid for _, pid in sorted(found)]


class _Slurm:
    """The engine of the conformance tests."""

    name = "slurm"

    def __init__(self) -> None:
        self._cluster: Cluster | None = None

    def missing(self) -> str | None:
        return missing()

    @contextmanager
    def up(self) -> Iterator[list[str]]:
        with running() as cluster:
            self._cluster = cluster
            try:
                options = [f"conf={cluster.conf}", "poll=1"]
                told = [f"PYTHONPATH={HERE}", "PYTHONDONTWRITEBYTECODE=1", "PYTHONWARNINGS=error"]
                yield [
                    *("--runner", "slurm"),
                    *(word for one in options for word in ("--runner-option", one)),
                    *(word for one in told for word in ("--env", one)),
                ]
            finally:
                self._cluster = None

    def kill_child(self, id: str) -> None:
        for pid in processes_of(id)[:1]:
            os.kill(pid, signal.SIGKILL)

    def leftovers(self) -> list[str]:
        assert self._cluster is not None
        return [f"job {name} ({state})" for name, (_, state) in self._cluster.jobs().items()]


SLURM: Engine = _Slurm()
