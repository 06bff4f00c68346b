"""A child does nothing before its daemon has tied it to its own life, and nothing at all if the daemon ends before that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import HERE, environ, holders
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.daemon.workdir import GATE, Folder
from dreamlake.lakeshore.wire import unpack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ENTRY = (sys.executable, "-m", "dreamlake.lakeshore.daemon.entry")
DAEMON = """
import os, signal, sys
from pathlib import Path
import anyio, child_kit
from dreamlake.lakeshore.daemon.workdir import Folder, ChildSettings
from dreamlake.lakeshore.worker.runner import Launch
from dreamlake.lakeshore.runners.process import runner as process

def dies(reading, group):
    print(group, flush=True)
    sys.stdin.read(1)
    os.kill(os.getpid(), signal.SIGKILL)

async def main(work, warm, script):
    process.kill_with_this_process = dies
    folder = Folder.take(work, "a", (work / "args").read_bytes())
    orders = ChildSettings(folder.path, work, "a").environ()
    await child_kit.process_runner(warm=bool(warm)).start(Launch("a", 1, folder, orders, script or None, None))

anyio.run(main, Path(sys.argv[1]), *sys.argv[2:])
"""


@pytest.fixture
def gate() -> Iterator[tuple[int, int]]:
    reading, opening = os.pipe()
    ends = [reading, opening]
    yield reading, opening
    for fd in ends:
        try:
            os.close(fd)
        except OSError:  # the test has closed it
            continue


def begin(folder: Path, gate: int) -> subprocess.Popen[bytes]:
    (folder / "args.msgpack").write_bytes(dls.thunk(bodies.around).to_envelope().to_bytes())
    env = {**environ(), GATE: str(gate)}
    return subprocess.Popen(ENTRY, cwd=folder, env=env, pass_fds=[gate], stderr=subprocess.PIPE)


def test_a_byte_opens_it_and_the_body_sees_nothing_of_it(tmp_path: Path, gate: tuple[int, int]) -> None:
    child = begin(tmp_path, gate[0])
    os.write(gate[1], b"\n")
    assert child.communicate(timeout=60) == (None, b"")
    assert child.returncode == 0
    assert GATE not in unpack((tmp_path / "result.msgpack").read_bytes())["environ"]


def test_without_a_byte_the_child_leaves_and_says_nothing(tmp_path: Path, gate: tuple[int, int]) -> None:
    child = begin(tmp_path, gate[0])
    os.close(gate[1])
    assert child.communicate(timeout=60) == (None, b"")
    assert child.returncode == 143
    assert [path.name for path in tmp_path.iterdir()] == ["args.msgpack"]


@pytest.mark.parametrize("way", ["cold", "warm", "script"])
def test_a_daemon_that_dies_in_the_middle_of_a_start_leaves_nothing(tmp_path: Path, way: str) -> None:
    path = tmp_path / "notes"
    (tmp_path / "args").write_bytes(dls.thunk(bodies.stubborn, str(path)).to_envelope().to_bytes())
    script = f"echo began >>{path}; exec sleep 1000" if way == "script" else ""
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(tmp_path), "1" if way == "warm" else "", script],
        env=environ(),
        cwd=HERE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert daemon.stdout is not None
    group = int(daemon.stdout.readline())
    wait_until_sync(lambda: holders(tmp_path) == [group], description="the child to be there")
    _, err = daemon.communicate("\n", timeout=60)
    assert (daemon.returncode, err) == (-signal.SIGKILL, "")
    wait_until_sync(lambda: holders(tmp_path) == [], 90.0, "the end of the child")
    assert notes(path) == []
    folder = Folder.take(tmp_path, "a", b"")
    assert folder is not None, "the lock of the folder is still held"
    folder.remove()
