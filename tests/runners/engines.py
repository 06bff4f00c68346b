"""`engines.py FOLDER`: prepare there what the tests of containers start from; the second time it is there already.

A root file system of Debian with its Python 3.11 (debootstrap, about a minute), and where podman is, a store that has it
as an image.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

IMAGE = "localhost/lakeshore-base:1"
NEEDLESS = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
    "usr/share/info",
    "var/cache/apt",
    "var/lib/apt/lists",
)


def engines_folder() -> Path:
    """LAKESHORE_TEST_ENGINES, or one that stays in the folder of temporary files."""
    named = os.environ.get("LAKESHORE_TEST_ENGINES")
    return Path(named or Path(tempfile.gettempdir()) / f"lakeshore-test-engines-{os.geteuid()}").resolve()


def root_filesystem(folder: Path) -> Path:
    """A folder with Debian in it, not to be written to."""
    root = folder / "rootfs"
    with _alone(folder):
        if not root.exists():
            making = folder / "rootfs.new"
            shutil.rmtree(making, ignore_errors=True)
            packages = "--include=python3-minimal,libpython3-stdlib"
            _run(["debootstrap", "--variant=minbase", packages, "bookworm", str(making)])
            for name in NEEDLESS:
                shutil.rmtree(making / name, ignore_errors=True)
            making.rename(root)
    return root


def podman_arguments(folder: Path) -> list[str]:
    """Those before the command that lead to a store of the tests' own, which has the image."""
    root = root_filesystem(folder)
    store = folder / "podman"
    arguments = ["--storage-driver=overlay", f"--root={store}", f"--runroot={folder / 'podman-run'}"]
    with _alone(folder):
        if not (folder / "podman.ready").exists():
            import_image(root, ["podman", *arguments])
            (folder / "podman.ready").touch()
    return arguments


def import_image(root: Path, engine: Sequence[str]) -> None:
    """Have a root file system as IMAGE."""
    with subprocess.Popen(["tar", "-C", str(root), "-c", "."], stdout=subprocess.PIPE) as packing:
        _run([*engine, "import", "-", IMAGE], stdin=packing.stdout)


def _run(argv: list[str], stdin: object = subprocess.DEVNULL) -> None:
    done = subprocess.run(argv, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)  # type: ignore[call-overload]
    if done.returncode != 0:
        raise RuntimeError(f"{argv[0]} ended with exit code {done.returncode}:\n{done.stdout.decode()[-4000:]}")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    folder.mkdir(mode=0o755, parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    where = Path(sys.argv[1]).resolve()
    root_filesystem(where)
    if shutil.which("podman"):
        podman_arguments(where)
