"""The fork server: what children share with it, and what happens to them when it dies."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, environ, process_runner, runs
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners import process_groups as groups
from dreamlake.lakeshore.wire import pack

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a living interpreter however busy the machine is. Tests that need a short wait set one."""
    monkeypatch.setattr(groups, "FORK_TIMEOUT", 3600.0)


async def parent_of(queue: dls.Queue) -> int:
    return int(await queue.call(dls.thunk(bodies.parent)))


async def test_children_come_from_one_interpreter_which_ends_with_the_worker(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, process_runner(warm=True)):
        first = await parent_of(queue)
        assert first != os.getpid()
        assert await parent_of(queue) == first
    assert not runs(first)


async def test_R70_each_child_sees_modules_as_they_are_now(queue: dls.Queue, tmp_path: Path) -> None:
    module = tmp_path / "changing_module.py"
    env = environ()
    env["PYTHONPATH"] += os.pathsep + str(tmp_path)
    async with children(queue, tmp_path, process_runner(env, warm=True)):
        for version in ("one", "another"):
            module.write_text(f"def f():\n    return {version!r}\n")
            envelope = dls.thunk(bodies.nothing).to_envelope()
            envelope.fn = {"kind": "ref", "module": "changing_module", "qualname": "f"}
            await queue.dispatch.do(Submit(envelope.id, "q", envelope.to_bytes()))
            assert await queue.result(envelope.id) == version


async def test_what_one_child_changes_another_does_not_see(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, process_runner(warm=True)):
        await queue.call(dls.thunk(bodies.sets_environ, "LEFT_BEHIND", "x"))
        seen = await queue.call(dls.thunk(bodies.around))
        assert "LEFT_BEHIND" not in seen["environ"]
        assert await queue.call(dls.thunk(bodies.chance)) != await queue.call(dls.thunk(bodies.chance))


async def test_when_the_interpreter_dies_its_children_are_lost_and_there_is_another(
    queue: dls.Queue, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, process_runner(warm=True), max_lost=1):
        first = await parent_of(queue)
        id = await queue.submit(dls.thunk(bodies.stubborn, str(path)))
        await wait_until(lambda: notes(path), 60.0)
        pid = int(notes(path)[0].split()[1])
        os.kill(first, signal.SIGKILL)
        await queue.dispatch.outcome(id, timeout=30)
        row = await queue.get(id)
        assert row.error is not None
        assert row.error.type == "WorkerLost"
        assert row.error.message == (
            "the interpreter that its child was forked from has died, and the child was ended; the body may have begun"
        )
        await wait_until(lambda: not runs(pid))
        assert await parent_of(queue) not in (first, os.getpid())


async def test_a_body_that_kills_the_interpreter_costs_its_neighbours_an_attempt_only(
    queue: dls.Queue, tmp_path: Path
) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, process_runner(warm=True), concurrency=2):
        first = await parent_of(queue)
        id = await queue.submit(dls.thunk(bodies.second_time, str(path)))
        await wait_until(lambda: notes(path), 60.0)
        os.kill(first, signal.SIGKILL)
        assert await queue.result(id, timeout=30) == 2


FORKS_ONCE = """
import os, sys
from dreamlake.lakeshore.daemon import warm

fork, left = os.fork, [1]

def forks_once():
    if not left:
        raise BlockingIOError("Resource temporarily unavailable")
    left.pop()
    return fork()

os.fork = forks_once
warm.main()
"""


@pytest.mark.parametrize("short_of", ["processes", "descriptors"])
async def test_an_interpreter_that_cannot_fork_keeps_the_children_that_it_has(
    queue: dls.Queue, tmp_path: Path, short_of: str
) -> None:
    path, gate, python = tmp_path / "notes", tmp_path / "gate", tmp_path / "python"
    (tmp_path / "forks_once.py").write_text(FORKS_ONCE)
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *daemon.warm*) exec {sys.executable} {tmp_path}/forks_once.py "$4";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    told = {"python": str(python)} if short_of == "processes" else {}
    async with children(queue, tmp_path, process_runner(warm=True, **told), concurrency=2):
        id = await queue.submit(dls.thunk(bodies.waits_and_tells, str(path), str(gate)))
        await wait_until(lambda: notes(path), 60.0)
        warm = int(notes(path)[0])
        if short_of == "descriptors":
            resource.prlimit(warm, resource.RLIMIT_NOFILE, (0, 0))
        assert await parent_of(queue) == os.getpid()
        gate.touch()
        assert await queue.result(id, timeout=30) == "told"


async def test_an_interpreter_that_does_not_answer_is_given_up_and_its_children_are_not(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, gate = tmp_path / "notes", tmp_path / "gate"
    async with children(queue, tmp_path, process_runner(warm=True), concurrency=2):
        warm = await parent_of(queue)
        id = await queue.submit(dls.thunk(bodies.waits_and_tells, str(path), str(gate)))
        await wait_until(lambda: notes(path), 60.0)
        monkeypatch.setattr(groups, "FORK_TIMEOUT", 0.1)
        os.kill(warm, signal.SIGSTOP)
        assert await parent_of(queue) == os.getpid()  # one that was started plainly
        monkeypatch.setattr(groups, "FORK_TIMEOUT", 3600.0)
        assert await parent_of(queue) not in (warm, os.getpid())
        gate.touch()
        assert await queue.result(id, timeout=30) == "told"
        await wait_until(lambda: not runs(warm))


async def test_without_one_children_are_started(queue: dls.Queue, tmp_path: Path) -> None:
    """An interpreter that can run the entry only."""
    only = tmp_path / "only"
    only.write_text(f'#!/bin/sh\ncase "$*" in *daemon.warm*) exit 1;; esac\nexec {sys.executable} "$@"\n')
    only.chmod(0o755)
    async with children(queue, tmp_path, process_runner(warm=True, python=str(only))):
        assert await parent_of(queue) == os.getpid()


async def test_a_script_is_never_forked(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, process_runner(warm=True), rules={"allow_script": True}):
        id = new_id()
        envelope = dls.thunk(bodies.nothing).to_envelope(id=id).to_bytes()
        config = pack({"run_config": {"script": f"echo $PPID > {tmp_path}/parent"}})
        await queue.dispatch.do(Submit(id, "q", envelope, config=config))
        await queue.result(id)
        assert int((tmp_path / "parent").read_text()) == os.getpid()


def test_an_order_that_is_none_ends_it() -> None:
    """So does the end of the process that sends requests."""
    import socket

    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "dreamlake.lakeshore.daemon.warm", str(theirs.fileno())],
            env=environ(),
            pass_fds=(theirs.fileno(),),
        )
        ours.sendall(b"\0\0\0\1{")
        assert process.wait(timeout=30) == 0
