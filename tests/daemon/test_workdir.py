"""The folder of one invocation: its files, its lock, and what a hostile child could leave there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from child_kit import runs
from helpers import wait_until_sync

from dreamlake.lakeshore.daemon import workdir
from dreamlake.lakeshore.daemon.workdir import (
    ErrorReport,
    Folder,
    last_output,
    prune,
    read_error,
    read_file,
    remove_leftovers,
    write_error,
    write_file,
)

if TYPE_CHECKING:
    from pathlib import Path


def take(root: Path, id: str = "a", args: bytes = b"args") -> Folder:
    folder = Folder.take(root, id, args)
    assert folder is not None
    return folder


# --- files -----------------------------------------------------------------------------------------------------------


def test_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "work"
    folder = take(root)
    assert root.stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "args.msgpack").stat().st_mode & 0o777 == 0o600
    assert (folder.path / "args.msgpack").read_bytes() == b"args"
    folder.remove()
    assert not folder.path.exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "result.msgpack").mkdir()
    with pytest.raises(OSError, match=r"result\.msgpack"):
        write_file(tmp_path, "result.msgpack", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["result.msgpack"]


def test_leftovers_go_whatever_they_are(tmp_path: Path) -> None:
    folder = take(tmp_path)
    (folder.path / "deep" / "er").mkdir(parents=True)
    (folder.path / "link").symlink_to(tmp_path)
    remove_leftovers(folder.path)
    assert [path.name for path in folder.path.iterdir()] == [".lock"]
    assert tmp_path.exists()
    folder.close()


def test_traps_are_not_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    for name in ("link", "pipe", "folder", "missing"):
        assert read_file(tmp_path / name) is None
    assert read_file(secret) == b"secret"
    assert read_file(secret, 3) == b"sec"


def test_errors_are_read_as_they_were_written(tmp_path: Path) -> None:
    assert read_error(tmp_path) is None
    write_error(tmp_path, "E", "half: \ud800", None, final=True)
    assert read_error(tmp_path) == ErrorReport("E", "half: \\ud800", None, True)
    write_error(tmp_path, "E", "", "trace", final=False)
    assert read_error(tmp_path) == ErrorReport("E", "", "trace", False)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", '{"type": "E"}', '{"type": 7, "message": ""}', "[" * 100_000, '"\\ud800"', "\xff"]
)
def test_what_is_no_error_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "error.json").write_text(content, encoding="latin-1")
    assert read_error(tmp_path) is None


def test_an_error_of_a_foreign_child_needs_a_type_and_a_message_only(tmp_path: Path) -> None:
    (tmp_path / "error.json").write_text(json.dumps({"type": "E", "message": "m", "traceback": 7, "more": []}))
    assert read_error(tmp_path) == ErrorReport("E", "m", None, False)


def test_the_last_output_is_that_of_stderr_if_there_is_any(tmp_path: Path) -> None:
    assert last_output(tmp_path) == ""
    (tmp_path / "stdout.log").write_bytes(b"out\xff\n")
    assert last_output(tmp_path) == "out\ufffd"
    (tmp_path / "stderr.log").write_bytes(b"\n")
    assert last_output(tmp_path) == "out\ufffd"
    (tmp_path / "stderr.log").write_bytes(b"x" * 10_000 + b"end\n")
    assert last_output(tmp_path) == "x" * 4092 + "end"


# --- the lock --------------------------------------------------------------------------------------------------------

HOLDER = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(flush=True)
time.sleep(60)
"""


def holder(folder: Folder) -> subprocess.Popen[bytes]:
    """Start a process that inherits the lock and ignores SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], pass_fds=(folder.lock,), process_group=0, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_folder_that_this_process_holds_is_not_had_twice(tmp_path: Path) -> None:
    folder = take(tmp_path)
    assert Folder.take(tmp_path, "a", b"") is None
    folder.name_group(os.getpgrp())  # never its own
    assert Folder.take(tmp_path, "a", b"") is None
    folder.close()
    take(tmp_path).close()


def test_the_lock_lives_in_the_child_and_a_new_attempt_kills_it(tmp_path: Path) -> None:
    folder = take(tmp_path)
    process = holder(folder)
    (folder.path / "result.msgpack").write_bytes(b"of the earlier attempt")
    folder.name_group(process.pid)
    folder.close()
    found: Any = wait_until_sync(lambda: Folder.take(tmp_path, "a", b"new"), description="the folder")
    assert process.wait(timeout=60) == -signal.SIGKILL
    assert not runs(process.pid)
    assert sorted(path.name for path in found.path.iterdir()) == [".lock", "args.msgpack"]
    assert (found.path / ".lock").read_bytes() == b""
    found.close()
    process.communicate()


@pytest.mark.parametrize("content", ["", "what", "0 {host}", "1 {host}", "-5 {host}", "{pid} another-host", "{pid}"])
def test_nothing_else_is_killed(tmp_path: Path, content: str) -> None:
    folder = take(tmp_path)
    process = holder(folder)
    (folder.path / ".lock").write_text(content.format(host=socket.gethostname(), pid=process.pid))
    folder.close()
    for _ in range(3):
        assert Folder.take(tmp_path, "a", b"") is None
    assert runs(process.pid)
    process.kill()
    process.communicate()
    wait_until_sync(lambda: Folder.take(tmp_path, "a", b"")).close()


def test_a_group_that_is_gone_is_no_obstacle(tmp_path: Path) -> None:
    folder = take(tmp_path)
    process = holder(folder)
    gone = subprocess.Popen([sys.executable, "-c", ""], process_group=0)
    gone.wait()
    folder.name_group(gone.pid)
    folder.close()
    assert Folder.take(tmp_path, "a", b"") is None
    process.kill()
    process.communicate()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can own a file of somebody else")
def test_a_lock_file_of_somebody_else_names_nobody(tmp_path: Path) -> None:
    folder = take(tmp_path)
    process = holder(folder)
    folder.name_group(process.pid)
    os.chown(folder.path / ".lock", 65534, 65534)
    folder.close()
    assert Folder.take(tmp_path, "a", b"") is None
    assert runs(process.pid)
    process.kill()
    process.communicate()


def test_a_folder_deleted_in_the_meantime_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the opening of the lock file and its locking, its holder may delete the folder."""
    first, flock = take(tmp_path), fcntl.flock

    def late(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        first.remove()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    assert Folder.take(tmp_path, "a", b"") is None
    second = take(tmp_path)
    assert (second.path / "args.msgpack").exists()
    second.close()


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".lock").symlink_to(tmp_path / "elsewhere")
    folder = take(tmp_path)
    assert not (folder.path / ".lock").is_symlink()
    folder.close()
    assert not (tmp_path / "elsewhere").exists()


def test_a_file_system_that_locks_only_what_is_writable_will_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As NFS does, see flock(2)."""
    flock = fcntl.flock

    def as_nfs(fd: int, how: int) -> None:
        if how & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", as_nfs)
    before = len(os.listdir("/proc/self/fd"))
    folder = Folder.take(tmp_path, "a", b"x")
    assert folder is not None
    assert Folder.take(tmp_path, "a", b"y") is None
    prune(tmp_path, 0)
    assert (tmp_path / "a" / "args.msgpack").read_bytes() == b"x"
    folder.close()
    prune(tmp_path, 0)
    assert not (tmp_path / "a").exists()
    assert len(os.listdir("/proc/self/fd")) == before


def test_pruning_keeps_the_newest_and_what_is_held(tmp_path: Path) -> None:
    for number, name in enumerate("abcd"):
        folder = take(tmp_path, name)
        os.utime(folder.path / ".lock", (number, number))
        folder.close()
    held = take(tmp_path, "held")
    os.utime(held.path / ".lock", (0, 0))
    (tmp_path / "not ours").mkdir()
    (tmp_path / "file").touch()
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c", "d", "file", "held", "not ours"]
    held.close()
    prune(tmp_path, 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "not ours"]


def test_a_lock_file_that_the_child_has_replaced_leads_nowhere(tmp_path: Path) -> None:
    folder = take(tmp_path)
    (tmp_path / "elsewhere").touch()
    (folder.path / ".lock").unlink()
    (folder.path / ".lock").symlink_to(tmp_path / "elsewhere")
    folder.name_group(12345)
    assert (tmp_path / "elsewhere").read_bytes() == b""
    folder.close()


def test_a_lock_that_is_a_pipe_blocks_nobody(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / ".lock")
    prune(tmp_path, 0)
    assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    os.mkfifo(tmp_path / "a" / ".lock")
    take(tmp_path).remove()


@pytest.mark.parametrize("broken", ["flock", "write"])
def test_a_folder_that_cannot_be_had_is_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    def fail(*_: object) -> None:
        raise OSError("no locks available")

    with monkeypatch.context() as patch:
        if broken == "flock":
            patch.setattr(fcntl, "flock", fail)
        else:
            patch.setattr(workdir, "write_file", fail)
        with pytest.raises(OSError, match="no locks available"):
            Folder.take(tmp_path, "a", b"")
    take(tmp_path).close()
