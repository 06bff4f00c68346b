"""Children that leave traps, too much data, or processes behind."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import children, folders

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.daemon import workdir
from dreamlake.lakeshore.daemon.workdir import Folder, last_output, prune, read_error, read_file
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.wire import pack
from dreamlake.lakeshore.worker import child_outcome
from dreamlake.lakeshore.worker import frame_tail as tail

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can own a file of somebody else")
NOBODY = 65534


def take(root: Path, args: bytes = b"args") -> Folder:
    folder = Folder.take(root, "a", args)
    assert folder is not None
    return folder


async def said_of(queue: dls.Queue, fn: Callable[..., object], *args: object) -> str:
    """Return the error with which an invocation fails."""
    id = await queue.submit(dls.thunk(fn, *args))
    await queue.dispatch.outcome(id, timeout=60)
    row = await queue.get(id)
    assert row.error is not None
    return f"{row.error.type}: {row.error.message}"


# --- more than can be read -------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_what_is_larger_than_any_plane_takes_is_not_read(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (child_outcome, tail):
        monkeypatch.setattr(module, "MAX_VALUE_BYTES", 1 << 20)
    async with children(queue, tmp_path):
        assert await said_of(queue, bodies.leaves_as_result, (1 << 20) + 1) == (
            "DaemonError: result.msgpack has 1048577 bytes, and no plane takes more than 1048576"
        )
        assert await said_of(queue, bodies.leaves_a_large_frame) == (
            "WireError: frames.msgpack holds a frame of more than 1048576 bytes, which no plane takes"
        )
        assert await queue.call(dls.thunk(bodies.double, 2)) == 4


@pytest.mark.anyio
async def test_an_empty_result_is_none(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        assert await said_of(queue, bodies.leaves_as_result, 0) == (
            "DaemonError: the child ended with exit code 0 and wrote no result.msgpack"
        )


# --- who holds a folder ----------------------------------------------------------------------------------------------


@pytest.mark.anyio
async def test_a_process_that_left_its_group_holds_up_no_further_attempt(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    try:
        async with children(queue, tmp_path, retries=1):
            id = await queue.submit(dls.thunk(bodies.leaves_its_group, str(path)))
            assert await queue.result(id, timeout=60) == "the second attempt"
    finally:
        for pid in notes(path):
            os.kill(int(pid), signal.SIGKILL)
    assert folders(tmp_path) == []


@pytest.mark.parametrize("how", ["remove", "prune"])
def test_an_attempt_that_comes_while_the_folder_is_deleted_keeps_what_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The lock file is deleted last. Before that no attempt can take the folder, and after that nothing more is deleted."""
    folder = take(tmp_path)
    (folder.path / "of the earlier attempt").mkdir()
    if how == "prune":
        folder.close()
    rmdir, came = Path.rmdir, list[Folder]()

    def late(path: Path) -> None:
        if path == folder.path and not came:
            came.append(take(tmp_path, b"new"))
        rmdir(path)

    def tries(path: Path, **_: object) -> None:
        assert Folder.take(tmp_path, "a", b"too early") is None
        remove(path)

    remove = workdir.shutil.rmtree
    monkeypatch.setattr(Path, "rmdir", late)
    monkeypatch.setattr(workdir.shutil, "rmtree", tries)
    if how == "prune":
        prune(tmp_path, 0)
    else:
        folder.remove()
    monkeypatch.undo()
    assert (came[0].path / "args.msgpack").read_bytes() == b"new"
    assert Folder.take(tmp_path, "a", b"") is None
    came[0].remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_held_does_not_count_as_kept(tmp_path: Path) -> None:
    """It may still succeed. Then the folder of a failure would have been deleted in its place."""
    for name in "abc":
        folder = Folder.take(tmp_path, name, b"")
        assert folder is not None
        folder.release()
        os.utime(folder.path / ".lock", (ord(name), ord(name)))
    held = Folder.take(tmp_path, "held", b"")
    assert held is not None
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c", "held"]
    held.remove()


def test_a_folder_that_was_left_names_no_group(tmp_path: Path) -> None:
    """The number may meanwhile be that of another group."""
    folder = take(tmp_path)
    folder.name_group(12345)
    folder.release()
    assert (folder.path / ".lock").read_bytes() == b""


@pytest.mark.parametrize("at", ["mkdir", "lstat"])
def test_a_folder_that_is_deleted_while_it_is_asked_for_can_be_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    first, call = take(tmp_path), getattr(os, at)

    def late(path: Path, *args: object) -> object:
        if path != first.path:
            return call(path, *args)
        monkeypatch.undo()
        try:
            return call(path, *args)
        finally:
            first.remove()

    monkeypatch.setattr(os, at, late)
    assert Folder.take(tmp_path, "a", b"") is None
    take(tmp_path).remove()


def test_a_folder_that_cannot_be_filled_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(workdir, "write_file", fail)
    with pytest.raises(OSError, match="No space left"):
        Folder.take(tmp_path, "a", b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.anyio
async def test_what_an_attempt_puts_in_place_of_its_lock_keeps_no_further_one_away(
    queue: dls.Queue, tmp_path: Path
) -> None:
    async with children(queue, tmp_path, retries=1):
        assert await queue.call(dls.thunk(bodies.spoils_its_lock)) == "the second attempt"
    assert folders(tmp_path) == []


@pytest.mark.anyio
async def test_a_variable_can_have_no_nul_in_it(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        envelope = dls.thunk(bodies.nothing).to_envelope()
        config = pack({"run_config": {"prefix": "a\0b"}})
        await queue.dispatch.do(Submit(envelope.id, "q", envelope.to_bytes(), config=config))
        await queue.dispatch.outcome(envelope.id, timeout=60)
        error = (await queue.get(envelope.id)).error
    assert error is not None
    assert error.message == "expected `prefix` of the run_config to be text without NUL, got 'a\\x00b'"


# --- traps -----------------------------------------------------------------------------------------------------------


def test_a_file_that_has_another_name_elsewhere_is_not_read(tmp_path: Path) -> None:
    """A child may link to a file that only its daemon can read."""
    (tmp_path / "secret").write_text('{"type": "Secret", "message": "told"}')
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("result.msgpack", "error.json", "stderr.log"):
        os.link(tmp_path / "secret", folder / name)
    assert read_file(folder / "result.msgpack") is None
    assert read_error(folder) is None
    assert last_output(folder) == ""


def test_a_lock_file_that_has_another_name_elsewhere_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "precious").write_bytes(b"precious")
    (tmp_path / "work" / "a").mkdir(parents=True)
    os.link(tmp_path / "precious", tmp_path / "work" / "a" / ".lock")
    folder = take(tmp_path / "work")
    folder.name_group(12345)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    folder.remove()


@ROOT
def test_the_user_of_an_earlier_attempt_has_no_say_in_a_further_one(tmp_path: Path) -> None:
    """Otherwise it could put links into the folder that lead the daemon elsewhere."""
    first = take(tmp_path)
    os.chown(first.path, NOBODY, NOBODY)
    first.path.chmod(0o777)
    first.close()
    second = take(tmp_path)
    status = second.path.stat()
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o700)
    second.remove()


@contextmanager
def without_rights() -> Generator[Path]:
    """A folder of a user that is not root. Inside, this thread runs as that user."""
    root = os.geteuid() == 0
    with tempfile.TemporaryDirectory() as place:
        if root:
            os.chown(place, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        try:
            yield Path(place)
        finally:
            if root:
                os.seteuid(0)


def test_folders_that_may_not_be_written_to_are_deleted_all_the_same() -> None:
    """Caches of packages contain such folders. The targets of links stay as they are."""
    with without_rights() as place:
        other = place / "other"
        other.mkdir(mode=0o555)
        folder = take(place / "work")
        (folder.path / "cache" / "deep").mkdir(parents=True)
        (folder.path / "cache" / "deep" / "file").touch()
        (folder.path / "cache" / "link").symlink_to(other)
        for name in ("cache/deep", "cache"):
            (folder.path / name).chmod(0o500)
        folder.remove()
        assert list((place / "work").iterdir()) == []
        assert stat.S_IMODE(other.stat().st_mode) == 0o555
