"""Starting processes: their environment, their limits, and what a start that goes wrong leaves behind."""

from __future__ import annotations

import os
import resource
import sys
from typing import TYPE_CHECKING, Any

import anyio
import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, environ, folders, holders, process_runner
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.tasks import run_to_end
from dreamlake.lakeshore.daemon.workdir import ChildSettings, Folder
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners import process_groups as groups
from dreamlake.lakeshore.runners.environment import child_environ
from dreamlake.lakeshore.runners.process import runner as process_module
from dreamlake.lakeshore.runners.process.runner import ProcessOptions, ProcessRunner
from dreamlake.lakeshore.wire import pack
from dreamlake.lakeshore.worker import child
from dreamlake.lakeshore.worker.runner import Launch

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def launch(tmp_path: Path, fn: Any = bodies.nothing, *args: Any, **more: Any) -> Launch:
    folder = Folder.take(tmp_path / "work", "a", dls.thunk(fn, *args).to_envelope().to_bytes())
    assert folder is not None
    fields: dict[str, Any] = {"script": None, "as_user": None, **more}
    return Launch("a", 1, folder, ChildSettings(folder.path, tmp_path, "a").environ(), **fields)


def test_what_children_have_of_an_environment() -> None:
    env = {"PATH": "/bin", "LC_ALL": "C", "SECRET": "s", "LAKESHORE_CLIENT_TOKEN": "t", "PYTHONPATH": "/mine", "A": "1"}
    kept = {"PATH": "/bin", "LC_ALL": "C", "PYTHONPATH": f"{os.getcwd()}{os.pathsep}/mine"}
    assert child_environ(environ=env) == kept
    assert child_environ(["A", "B", "C=", "D=a=b"], env) == {**kept, "A": "1", "C": "", "D": "a=b"}
    assert child_environ(environ={}) == {"PYTHONPATH": os.getcwd()}
    for wrong in ("", "=x", "A=\0"):
        with pytest.raises(ValueError, match="expected NAME or NAME=VALUE for the environment of children, got "):
            child_environ([wrong], env)


def test_limits_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(resource, "prlimit")
    ProcessRunner(environ={})
    monkeypatch.delattr(os, "waitid")
    with pytest.raises(ValueError, match=r"the runner option warm needs Linux, or Python 3\.13 on macOS"):
        ProcessOptions(warm=True)
    with pytest.raises(ValueError, match=r"limits of a process \(rlimit_cpu\) can be set on Linux only"):
        ProcessOptions(rlimit_cpu=1)


async def test_limits_that_cannot_be_set_fail_the_start(queue: dls.Queue, tmp_path: Path) -> None:
    runner = ProcessRunner(ProcessOptions(rlimit_nofile=1 << 40), environ=environ())
    async with children(queue, tmp_path, runner):
        id = await queue.submit(dls.thunk(bodies.nothing))
        await queue.dispatch.outcome(id, timeout=60)
        row = await queue.get(id)
        assert row.error is not None
        assert row.error.type == "DaemonError"
        assert row.error.message.startswith(
            "the process runner could not start a child: the limits {'rlimit_nofile': 1099511627776} cannot be set: "
        )
        assert holders(tmp_path) == []


async def test_another_fault_after_the_start_ends_the_child_too(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise OSError("no such luck")

    monkeypatch.setattr(process_module, "kill_with_this_process", broken)
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.nothing))
        await queue.dispatch.outcome(id, timeout=60)
        row = await queue.get(id)
        assert row.error is not None
        assert row.error.message == "the process runner could not start a child: no such luck"
        assert holders(tmp_path) == []


async def test_as_user_needs_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    asked = launch(tmp_path, as_user="root")
    with pytest.raises(dls.DispatchError, match="`as_user` names 'root', and only a worker that runs as root can run"):
        await process_runner().start(asked)
    asked.folder.close()


@pytest.mark.parametrize("waitid", [True, False])
@pytest.mark.parametrize("stopped", [False, True])
async def test_on_systems_that_offer_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stopped: bool, waitid: bool
) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    if not waitid:
        monkeypatch.delattr(os, "waitid")
    path = tmp_path / "notes"
    asked = launch(tmp_path, *((bodies.stubborn, str(path)) if stopped else (bodies.nothing,)))
    started = await process_runner(grace=0.1).start(asked)
    if stopped:
        with anyio.move_on_after(0.05):
            await started.wait()
        await wait_until(lambda: notes(path), 60.0)
        assert (await run_to_end(started.kill)).code == -9
    else:
        assert (await started.wait()).code == 0
        assert (await started.wait()).code == 0
    asked.folder.remove()


async def test_a_warm_interpreter_that_does_not_answer_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(groups, "FORK_TIMEOUT", 0.2)
    silent = tmp_path / "silent"
    silent.write_text(f'#!/bin/sh\ncase "$*" in *daemon.warm*) exec sleep 60;; esac\nexec {sys.executable} "$@"\n')
    silent.chmod(0o755)
    runner, asked = process_runner(python=str(silent), warm=True), launch(tmp_path)
    assert (await (await runner.start(asked)).wait()).code == 0
    await runner.aclose()
    asked.folder.remove()


async def test_a_folder_that_stays_held_is_a_failure_that_names_it(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "FOLDER_TIMEOUT", 0.2)
    id = await queue.submit(dls.thunk(bodies.nothing))
    held = Folder.take(tmp_path / "work", id, b"")
    assert held is not None
    async with children(queue, tmp_path):
        await queue.dispatch.outcome(id, timeout=60)
        row = await queue.get(id)
        assert row.error is not None
        assert row.error.message == (
            f"its folder could not be prepared: {tmp_path / 'work' / id} is held by the process of an earlier attempt, "
            "which has not ended in 0.2 s: end it, or give each machine a workdir of its own"
        )
    held.close()


async def test_a_workdir_that_cannot_be_made_is_a_failure(queue: dls.Queue, tmp_path: Path) -> None:
    (tmp_path / "work").touch()
    async with children(queue, tmp_path):
        with pytest.raises(dls.InvocationFailed, match=r"DaemonError: its folder could not be prepared: .*work"):
            await queue.call(dls.thunk(bodies.nothing))


async def test_an_engine_may_speak_in_place_of_the_child(queue: dls.Queue, tmp_path: Path) -> None:
    """As one does that knows better why a child has ended, and has its output elsewhere."""
    from dreamlake.lakeshore.planes.contract.records import Failure
    from dreamlake.lakeshore.worker.runner import Exit

    ends = [
        Exit(137, "timeout", Failure("TimeoutError", "the time limit of the job")),
        Exit(3, output="said elsewhere"),
    ]

    class Engine(ProcessRunner):
        async def start(self, launch: Launch) -> Any:
            started = await super().start(launch)
            await started.wait()
            return Ended(ends.pop(0))

    class Ended:
        def __init__(self, exit: Exit) -> None:
            self._exit = exit

        async def wait(self) -> Exit:
            return self._exit

        async def kill(self) -> Exit:
            return self._exit

    async with children(queue, tmp_path, Engine(environ=environ())):
        with pytest.raises(dls.InvocationTimedOut, match="the time limit of the job"):
            await queue.call(dls.thunk(bodies.nothing))
        with pytest.raises(dls.InvocationFailed, match="the end of its output:\nsaid elsewhere"):
            await queue.call(dls.thunk(bodies.nothing))


async def test_a_folder_that_cannot_be_deleted_stays_and_the_result_counts(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def stuck(self: Folder) -> None:
        self.close()
        raise OSError("Device or resource busy")

    monkeypatch.setattr(Folder, "remove", stuck)
    async with children(queue, tmp_path):
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2
    (left,) = folders(tmp_path)
    assert f"the folder {tmp_path / 'work' / left} could not be deleted: Device or resource busy" in caplog.text


async def test_output_goes_into_new_files_only(tmp_path: Path) -> None:
    asked = launch(tmp_path)
    (asked.folder.path / "stderr.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileExistsError):
        await process_runner().start(asked)
    assert not (tmp_path / "elsewhere").exists()
    asked.folder.remove()


async def test_a_fault_after_the_fork_ends_the_child(tmp_path: Path) -> None:
    runner = process_runner(warm=True, rlimit_nofile=1 << 40)
    asked = launch(tmp_path, bodies.stubborn, str(tmp_path / "notes"))
    with pytest.raises(dls.DispatchError, match="cannot be set"):
        await runner.start(asked)
    assert holders(tmp_path) == []
    await runner.aclose()
    asked.folder.remove()


async def test_a_run_config_that_cannot_be_read_says_nothing(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        for config in (b"\xc1", pack([]), pack({"run_config": 7})):
            id = new_id()
            envelope = dls.thunk(bodies.double, 2).to_envelope(id=id).to_bytes()
            await queue.dispatch.do(Submit(id, "q", envelope, config=config))
            assert await queue.result(id) == 4


async def test_a_result_with_half_a_frame_is_none(queue: dls.Queue, tmp_path: Path) -> None:
    script = r"printf '\x94\x00\x00' > frames.msgpack; printf '\x07' > result.msgpack"
    async with children(queue, tmp_path, rules={"allow_script": True}):
        id = new_id()
        envelope = dls.thunk(bodies.nothing).to_envelope(id=id).to_bytes()
        await queue.dispatch.do(Submit(id, "q", envelope, config=pack({"run_config": {"script": script}})))
        with pytest.raises(dls.InvocationFailed, match=r"frames\.msgpack ends inside a frame, 3 bytes after its begin"):
            await queue.result(id)


async def test_a_signal_without_a_name_is_given_as_a_number(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        with pytest.raises(dls.InvocationFailed, match="the child was killed by signal 40 and wrote no"):
            await queue.call(dls.thunk(bodies.killed_by, 40))


async def test_too_much_that_is_left_is_not_forwarded(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MAX_REMAINING_BYTES", 10)
    path = tmp_path / "notes"
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.yields_when_stopped, str(path)))
        await wait_until(lambda: notes(path), 60.0)
        assert await queue.cancel(id, wait=True)
        assert (await queue.get(id)).state == "killed"
