"""The runners that `worker start --runner` knows: where each is, and what its options are."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["RUNNERS", "Known"]


class Known(NamedTuple):
    """A runner: its module among `runners`, the class in it, and its options, for people."""

    module: str
    kind: str
    options: str


RUNNERS = {
    "process": Known(
        "process.runner",
        "ProcessRunner",
        "python=PATH, grace=SECONDS from SIGTERM to SIGKILL (5), warm=1 to fork children from an interpreter that has "
        "loaded what they need, rlimit_as=8g, rlimit_cpu, rlimit_fsize, rlimit_nofile, rlimit_nproc, rlimit_core.",
    ),
    "slurm": Known(
        "slurm.runner",
        "SlurmRunner",
        "partition, account, qos, time=LIMIT, cpus, memory=8G, gres, gpus, constraint, nodelist: as sbatch has them "
        "(cpus: --cpus-per-task, memory: --mem), sbatch=FLAGS for it, between commas, python=PATH on the nodes (this one), "
        "conf=PATH of a slurm.conf, poll=SECONDS between two looks at the queue, which serve all jobs (2), grace=SECONDS "
        "from SIGTERM to scancel (5), start-timeout=SECONDS that one call of Slurm's programs may take (30). The workdir "
        "has to lie on a file system that the nodes share; a job may wait in Slurm's queue for as long as it takes.",
    ),
    "kube": Known(
        "kube.runner",
        "KubeRunner",
        "image=NAME and claim=NAME of the volume that the workdir lies on, both needed; mount=PATH where this worker "
        "sees that volume, sub-path (the workdir, all of it), root-claim=NAME, root-sub-path for the root of keys, "
        "kubeconfig=FILE, context, namespace, python=PATH, service-account, cpus, memory=8g, gpus, "
        "node-selector=NAME=VALUE,..., image-pull-policy, image-pull-secret=NAME,..., template=FILE of JSON merged into "
        "the spec of pods, deadline=SECONDS, grace=SECONDS from SIGTERM to SIGKILL (5), ttl=SECONDS that a Job which "
        "nobody deletes stays (3600), poll=SECONDS between two lists beside the watch (30). What children are told, --env "
        "too, stands in their Jobs, for all to see who may read those.",
    ),
    "docker": Known(
        "docker.runner",
        "DockerRunner",
        "image=NAME (needed), python=PATH in it (python3), binary=docker or podman or a path, pull=missing or always or "
        "never, mount=SRC[:DST][:ro], several between commas, user=UID[:GID] (this worker's; 0:0 "
        "for a rootless docker, and arg=--userns=keep-id for a rootless podman), network, memory=2g, cpus=1.5, gpus, "
        "runtime: as the engine has them, read-only=1, init=0 for an image with an init of its own, arg=--FLAG for "
        "`create` and global-arg=--FLAG before it, several between commas, grace=SECONDS from SIGTERM to SIGKILL (5), "
        "start-timeout=SECONDS to pull an image, and to begin a child (300). The folder of an invocation and the root are "
        "mounted at their own paths; of variables, children have LAKESHORE_*, the locale and those of --env. Bodies that "
        "submit need a server, or a mount of LAKESHORE_HOME.",
    ),
    "gvisor": Known(
        "docker.gvisor",
        "GvisorRunner",
        "runtime=NAME (runsc), which docker or podman has to know, and the other options of docker.",
    ),
}
