"""The folder of one invocation: the names in it, the environment of the child, and the lock.

A daemon of any make writes `args.msgpack` into a folder and starts `python3 -m dreamlake.lakeshore.daemon.entry` in it. It
finds `result.msgpack` after exit code 0, or `error.json` after any other. Files appear under their names by rename, so they
are complete from the first moment.

A daemon of this package also locks the folder. The lock belongs to an open file that the child inherits: it is held as long
as the daemon or the child lives. A new attempt that finds the lock held knows that an earlier attempt still runs, perhaps
without its daemon. It kills the process group that the lock file names, and begins only when the lock is free.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import signal
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..limits import OUTPUT_TAIL_BYTES
from ..settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "ARGS",
    "ERROR",
    "FRAMES",
    "GATE",
    "LOCK",
    "MODULES",
    "OUTPUT_TAIL_BYTES",
    "RESULT",
    "STDERR",
    "STDOUT",
    "ChildSettings",
    "ErrorReport",
    "Folder",
    "last_output",
    "prune",
    "read_error",
    "read_file",
    "remove_leftovers",
    "with_output",
    "write_error",
    "write_file",
]

ARGS = "args.msgpack"
RESULT = "result.msgpack"
ERROR = "error.json"
FRAMES = "frames.msgpack"
LOCK = ".lock"
STDOUT = "stdout.log"
STDERR = "stderr.log"

GATE = "LAKESHORE_GATE"
"""The variable with the descriptor from which a child reads one byte before it begins. Its daemon writes that byte when
everything that belongs to the start is done."""
MODULES = "LAKESHORE_MODULES"
"""The variable with a folder of modules. A child on another machine can import from it what its daemon can import."""

MAX_ERROR_BYTES = 1 << 20
"""Bytes of `error.json` that are read."""

_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_BOOLEANS = {"1": True, "0": False}


@dataclass(frozen=True)
class ChildSettings:
    """What the environment tells a child."""

    folder: Path
    """Where the child's files lie: DREAMLAKE_WORKDIR, else the current folder."""
    root: Path
    """The absolute folder of the `dls.run` keys."""
    id: str | None = None
    """The id of the invocation; None for the one in the envelope."""
    parent: str | None = None
    root_id: str | None = None
    prefix: str = ""
    """The prefix of keys, if the envelope has none."""
    runtime_policy: str = "minor"
    allow_pickled: bool = True
    """Whether functions may be unpickled. A daemon that does not set the variable allows it: whoever starts processes here
    may run code here."""
    allow_modules: tuple[str, ...] = ()
    attempt: int = 1

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ChildSettings:
        """Read the settings from environment variables. An empty variable counts as unset.

        Raises:
            ValueError: A variable has a value that is not allowed.
        """
        settings = read_settings(environ)
        allow_pickled = environ.get("LAKESHORE_ALLOW_PICKLED") or "1"
        if allow_pickled not in _BOOLEANS:
            raise ValueError(f"expected LAKESHORE_ALLOW_PICKLED to be 1 or 0, got {allow_pickled!r}")
        attempt = environ.get("LAKESHORE_ATTEMPT") or "1"
        if not (attempt.isascii() and attempt.isdigit()):
            raise ValueError(f"expected LAKESHORE_ATTEMPT to be a number from 1, got {attempt!r}")
        return cls(
            folder=folder_of(environ),
            root=Path(os.path.abspath(settings.root or "")),
            id=environ.get("DREAMLAKE_INVOCATION_ID") or None,
            parent=environ.get("DREAMLAKE_PARENT_INVOCATION_ID") or None,
            root_id=environ.get("DREAMLAKE_ROOT_INVOCATION_ID") or None,
            prefix=environ.get("DREAMLAKE_PREFIX", ""),
            runtime_policy=settings.runtime_policy,
            allow_pickled=_BOOLEANS[allow_pickled],
            allow_modules=tuple(filter(None, environ.get("LAKESHORE_ALLOW_MODULES", "").split(","))),
            attempt=int(attempt),
        )

    def environ(self) -> dict[str, str]:
        """Return the variables from which `read` makes the same settings. Empty ones are left out."""
        variables = {
            "DREAMLAKE_WORKDIR": str(self.folder),
            "DREAMLAKE_INVOCATION_ID": self.id,
            "DREAMLAKE_PARENT_INVOCATION_ID": self.parent,
            "DREAMLAKE_ROOT_INVOCATION_ID": self.root_id,
            "DREAMLAKE_PREFIX": self.prefix,
            "LAKESHORE_ROOT": str(self.root),
            "LAKESHORE_RUNTIME_POLICY": self.runtime_policy,
            "LAKESHORE_ALLOW_PICKLED": "1" if self.allow_pickled else "0",
            "LAKESHORE_ALLOW_MODULES": ",".join(self.allow_modules),
            "LAKESHORE_ATTEMPT": str(self.attempt),
        }
        return {name: value for name, value in variables.items() if value}


def folder_of(environ: Mapping[str, str]) -> Path:
    """Return the absolute path of the folder that `environ` names."""
    return Path(os.path.abspath(environ.get("DREAMLAKE_WORKDIR") or ""))


# --- files ------------------------------------------------------------------------------------------------------------


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Write a file that is complete from the first moment that its name is there."""
    temporary = folder / f".{name}.{secrets.token_hex(4)}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.replace(temporary, folder / name)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def open_file(path: Path) -> int | None:
    """Open a plain file for reading and return its descriptor; None if there is no file, or a pipe or a link of any kind.

    What a child put there may be a trap for a daemon that has more rights.
    """
    try:
        descriptor = os.open(path, _READ_FLAGS)
    except OSError:
        return None
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    return None


def read_file(path: Path, limit: int = -1) -> bytes | None:
    """Return the content of a plain file, or its first `limit` bytes; None if there is no plain file at `path`."""
    descriptor = open_file(path)
    if descriptor is None:
        return None
    with open(descriptor, "rb", buffering=0) as file:
        return file.readall() if limit < 0 else file.read(limit)


def last_output(folder: Path) -> str:
    """Return the end of what a child wrote to stderr, or to stdout if it wrote nothing there."""
    for name in (STDERR, STDOUT):
        descriptor = open_file(folder / name)
        if descriptor is None:
            continue
        with open(descriptor, "rb", buffering=0) as file:
            file.seek(max(0, os.fstat(descriptor).st_size - OUTPUT_TAIL_BYTES))
            text = (file.read(OUTPUT_TAIL_BYTES) or b"").decode("utf-8", "replace").strip()
        if text:
            return text
    return ""


def with_output(message: str, output: str) -> str:
    """Return the message of a failure with the end of what the child wrote, if it wrote anything."""
    return f"{message}; the end of its output:\n{output}" if output else message


@dataclass(frozen=True, slots=True)
class ErrorReport:
    """The content of `error.json`."""

    type: str
    message: str
    traceback: str | None
    final: bool
    """No further attempt can help."""


def write_error(folder: Path, type: str, message: str, traceback: str | None, final: bool) -> None:
    """Write `error.json`."""
    fields: dict[str, Any] = {"type": type, "message": message, "traceback": traceback or ""}
    if final:
        fields["final"] = True
    write_file(folder, ERROR, json.dumps(fields).encode())


def read_error(folder: Path) -> ErrorReport | None:
    """Read `error.json`. Return None if it is missing, or has not at least a type and a message."""
    data = read_file(folder / ERROR, MAX_ERROR_BYTES)
    try:
        found: Any = json.loads(data or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, Any]", found)
    type = fields.get("type")
    message = fields.get("message")
    if not isinstance(type, str) or not isinstance(message, str):
        return None
    traceback = fields.get("traceback")
    if isinstance(traceback, str) and traceback:
        traceback = _encodable(traceback)
    else:
        traceback = None
    return ErrorReport(_encodable(type), _encodable(message), traceback, fields.get("final") is True)


def _encodable(text: str) -> str:
    """Return text that can be encoded as UTF-8. JSON can hold half of a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


def remove_leftovers(folder: Path, *names: str) -> None:
    """Remove `names` from the folder; without names everything but the lock."""
    if names:
        paths = [folder / name for name in names]
    else:
        paths = [path for path in folder.iterdir() if path.name != LOCK]
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            _remove_tree(path)
        else:
            path.unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    """Delete a folder with everything in it, also if its owner has no right to write there, as in caches of packages."""
    try:
        shutil.rmtree(path)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        os.chmod(path, 0o700)
        for parent, names, _ in os.walk(path):
            for name in names:
                subfolder = Path(parent, name)
                if not subfolder.is_symlink():
                    os.chmod(subfolder, 0o700)
        shutil.rmtree(path)


# --- the lock ---------------------------------------------------------------------------------------------------------


class Folder:
    """The folder of one attempt. It is locked until `close`, and as long as a child lives that inherits `lock`."""

    def __init__(self, path: Path, lock: int, writable: int) -> None:
        self.path = path
        self.lock = lock
        """The descriptor of the lock file that holds the lock."""
        # Opened before there is a child, which could put another file under the same name.
        self._writable = writable

    @classmethod
    def take(cls, workdir: Path, id: str, args: bytes) -> Folder | None:
        """Lock the folder of the invocation `id` and empty it but for `args`.

        Returns:
            None if an earlier attempt still holds the folder. If that runs on this machine, it was sent a SIGKILL: try
            again.
        """
        workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = workdir / id
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
        lock = _lock(path)
        if lock is None:
            return None
        writable: int | None = None
        try:
            writable = os.open(path / LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            os.ftruncate(writable, 0)
            remove_leftovers(path)
            write_file(path, ARGS, args)
        except BaseException:
            with suppress(OSError):
                _delete(path)
            os.close(lock)
            if writable is not None:
                os.close(writable)
            raise
        return cls(path, lock, writable)

    def name_group(self, group: int) -> None:
        """Record the process group that a later attempt kills if it finds the folder locked."""
        os.pwrite(self._writable, f"{group} {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Close the descriptors. A child that still runs keeps the lock."""
        os.close(self._writable)
        os.close(self.lock)

    def release(self) -> None:
        """Unlock and close, after the child's end: a process that has left its group cannot hold up later attempts."""
        with suppress(OSError):
            os.ftruncate(self._writable, 0)
            fcntl.flock(self.lock, fcntl.LOCK_UN)
        self.close()

    def remove(self) -> None:
        """Delete the folder and release it.

        Raises:
            OSError: Something in the folder cannot be deleted.
        """
        try:
            _delete(self.path)
        finally:
            self.release()


def prune(workdir: Path, keep: int) -> None:
    """Delete the folders in `workdir` that are not locked, except for the `keep` of them that changed last."""
    found: list[tuple[float, Path]] = []
    for path in workdir.iterdir():
        with suppress(OSError):  # it is not one of ours, or gone
            found.append(((path / LOCK).stat().st_mtime, path))
    for _, path in sorted(found, reverse=True):
        with suppress(OSError), open(path / LOCK, opener=_open_for_reading) as lock:  # OSError: locked, or gone
            _flock(lock.fileno(), path / LOCK)
            keep -= 1
            if keep < 0:
                _delete(path)


def _open_for_reading(path: str, _: int) -> int:
    return os.open(path, _READ_FLAGS)


def _delete(path: Path) -> None:
    """Delete the folder `path`, which this process has locked.

    The lock file goes last. Once it is gone, the next attempt may have the folder, which stays then.
    """
    remove_leftovers(path)
    remove_leftovers(path, LOCK)
    try:
        path.rmdir()
    except OSError:
        if not (path / LOCK).exists():
            raise


def _lock(path: Path) -> int | None:
    """Lock the lock file in the folder `path`. Return its descriptor; None if it is locked, or the folder is being deleted.

    A lock file that is a link or a pipe, or that has a second name, was put there by a child and may lead elsewhere: it is
    removed. The descriptor is for reading only, where the file system can lock such ones: a child with fewer rights cannot
    record a process group then.
    """
    try:
        if os.lstat(path).st_uid != os.geteuid():
            _take_ownership(path)
        with suppress(FileNotFoundError):
            status = os.lstat(path / LOCK)
            if status.st_nlink > 1 or not stat.S_ISREG(status.st_mode):
                remove_leftovers(path, LOCK)
        lock = os.open(path / LOCK, os.O_CREAT | _READ_FLAGS, 0o600)
    except FileNotFoundError:
        return None
    try:
        _flock(lock, path / LOCK)
        if os.path.samestat(os.fstat(lock), os.stat(path / LOCK)):
            return lock
    except BlockingIOError:
        _kill_holder(lock)
    except FileNotFoundError:
        pass
    except BaseException:
        os.close(lock)
        raise
    os.close(lock)
    return None


def _take_ownership(path: Path) -> None:
    """Take a folder from the user of an earlier attempt, who has no more business in it."""
    with suppress(PermissionError):  # on some network file systems root has no rights
        os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)
        os.chmod(path, 0o700)


def _flock(lock: int, path: Path) -> None:
    """Lock the file at `path`, which is open as `lock`. Raises BlockingIOError if it is locked."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        writable = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)  # NFS locks nothing else
        os.dup2(writable, lock, inheritable=False)
        os.close(writable)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _kill_holder(lock: int) -> None:
    """Kill the process group that the lock file names, if that is on this machine."""
    if os.fstat(lock).st_uid != os.geteuid():  # another file, which the child put there
        return
    group, _, host = os.pread(lock, 400, 0).decode("ascii", "replace").strip().partition(" ")
    if host == socket.gethostname() and group.isdigit() and int(group) not in (0, 1, os.getpgrp()):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(int(group), signal.SIGKILL)
