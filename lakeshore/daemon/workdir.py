"""The folder of one invocation: the names in it, the environment that leads a child there, and who may write into it.

A daemon of any make writes `args.msgpack` into a folder, starts `python3 -m dreamlake.lakeshore.daemon.entry` in it,
and finds `result.msgpack` (exit 0) or `error.json` (any other exit). Files appear under their names complete, by rename.

A daemon of this package also locks the folder. The lock belongs to an open file that the child inherits, so it is held
as long as either lives, and a new attempt that finds it held knows that an earlier one goes on, perhaps without a daemon:
it kills the process group that the lock file names, and begins only when the lock comes free.
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
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
"""The variable with the descriptor that a child reads a byte from before it begins: its daemon has more to do first."""

MODULES = "LAKESHORE_MODULES"
"""The variable with the folder in which a child elsewhere finds the modules that its daemon finds, if it is there, too."""

_ERROR_LIMIT = 1 << 20
_LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_TRUTH = {"1": True, "0": False}


@dataclass(frozen=True)
class ChildSettings:
    """What the environment says to a child.

    folder: where its files lie (DREAMLAKE_WORKDIR, else the current folder). id: of the invocation; None: the
    Envelope's own. prefix: used where the Envelope has none. root: the absolute folder of `dls.run` keys. allow_pickled:
    a daemon that says nothing allows it, since whoever starts processes here may run code here.
    """

    folder: Path
    root: Path
    id: str | None = None
    parent: str | None = None
    root_id: str | None = None
    prefix: str = ""
    runtime_policy: str = "minor"
    allow_pickled: bool = True
    allow_modules: tuple[str, ...] = ()
    attempt: int = 1

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> ChildSettings:
        """The orders in `environ`; an empty variable counts as unset. Raises ValueError for words that are none."""
        settings = read_settings(environ)
        allow = environ.get("LAKESHORE_ALLOW_PICKLED") or "1"
        if allow not in _TRUTH:
            raise ValueError(f"expected LAKESHORE_ALLOW_PICKLED to be 1 or 0, got {allow!r}")
        attempt = environ.get("LAKESHORE_ATTEMPT") or "1"
        if not (attempt.isascii() and attempt.isdigit()):
            raise ValueError(f"expected LAKESHORE_ATTEMPT to be a number from 1, got {attempt!r}")
        return cls(
            folder_of(environ),
            Path(os.path.abspath(settings.root or "")),
            environ.get("DREAMLAKE_INVOCATION_ID") or None,
            environ.get("DREAMLAKE_PARENT_INVOCATION_ID") or None,
            environ.get("DREAMLAKE_ROOT_INVOCATION_ID") or None,
            environ.get("DREAMLAKE_PREFIX", ""),
            settings.runtime_policy,
            _TRUTH[allow],
            tuple(filter(None, environ.get("LAKESHORE_ALLOW_MODULES", "").split(","))),
            int(attempt),
        )

    def environ(self) -> dict[str, str]:
        """The variables that `read` makes the same orders of; those with nothing to say are left out."""
        said = {
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
        return {name: value for name, value in said.items() if value}


def folder_of(environ: Mapping[str, str]) -> Path:
    """The folder that `environ` names, absolute."""
    return Path(os.path.abspath(environ.get("DREAMLAKE_WORKDIR") or ""))


# --- files ------------------------------------------------------------------------------------------------------------


def write_file(folder: Path, name: str, data: bytes) -> None:
    """Have `data` under `name`, complete from the first moment that the name is there."""
    passing = folder / f".{name}.{secrets.token_hex(4)}"
    out = os.open(passing, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(out, "wb", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        os.replace(passing, folder / name)
    except BaseException:
        passing.unlink(missing_ok=True)
        raise


def open_file(path: Path) -> int | None:
    """A descriptor to read the plain file at `path`; None where nothing is, or something else: a pipe, either kind of link.

    What a child left there may be a trap for a daemon that has more rights.
    """
    try:
        found = os.open(path, _LOOK)
    except OSError:
        return None
    status = os.fstat(found)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return found
    os.close(found)
    return None


def read_file(path: Path, limit: int = -1) -> bytes | None:
    """The content of the plain file at `path`, its first `limit` bytes; None where there is none."""
    found = open_file(path)
    if found is None:
        return None
    with open(found, "rb", buffering=0) as file:
        return file.readall() if limit < 0 else file.read(limit)


def last_output(folder: Path) -> str:
    """The end of what a child wrote to stderr, or to stdout if nothing; at most 4 kB."""
    for name in (STDERR, STDOUT):
        found = open_file(folder / name)
        if found is None:
            continue
        with open(found, "rb", buffering=0) as file:
            file.seek(max(0, os.fstat(found).st_size - OUTPUT_TAIL_BYTES))
            text = (file.read(OUTPUT_TAIL_BYTES) or b"").decode("utf-8", "replace").strip()
        if text:
            return text
    return ""


class ErrorReport(NamedTuple):
    """What `error.json` says. `final`: a further attempt could not help."""

    type: str
    message: str
    traceback: str | None
    final: bool


def write_error(folder: Path, type: str, message: str, traceback: str | None, final: bool) -> None:
    """Write `error.json`."""
    fields: dict[str, Any] = {"type": type, "message": message, "traceback": traceback or ""}
    if final:
        fields["final"] = True
    write_file(folder, ERROR, json.dumps(fields).encode())


def read_error(folder: Path) -> ErrorReport | None:
    """What `error.json` says; None where it is missing, or does not say at least a type and a message."""
    data = read_file(folder / ERROR, _ERROR_LIMIT)
    try:
        found: Any = json.loads(data or b"")
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict):
        return None
    fields = cast("dict[str, Any]", found)
    type, message, traceback = fields.get("type"), fields.get("message"), fields.get("traceback")
    if not isinstance(type, str) or not isinstance(message, str):
        return None
    shown = _clean(traceback) if isinstance(traceback, str) and traceback else None
    return ErrorReport(_clean(type), _clean(message), shown, fields.get("final") is True)


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()  # JSON can say half a character


def remove_leftovers(folder: Path, *names: str) -> None:
    """Remove `names` from the folder; none named: everything but the lock."""
    for path in [folder / name for name in names] if names else list(folder.iterdir()):
        if names or path.name != LOCK:
            if path.is_dir() and not path.is_symlink():
                _remove_tree(path)
            else:
                path.unlink(missing_ok=True)


def _remove_tree(path: Path) -> None:
    """Delete a folder of a child's, also where it has taken the right to write from itself, as caches of packages do."""
    try:
        shutil.rmtree(path)
    except PermissionError:
        if os.geteuid() == 0:
            raise
        os.chmod(path, 0o700)
        for place, names, _ in os.walk(path):
            for found in (Path(place, name) for name in names):
                if not found.is_symlink():
                    os.chmod(found, 0o700)
        shutil.rmtree(path)


# --- the lock ---------------------------------------------------------------------------------------------------------


class Folder:
    """The folder of one attempt, locked until `close`, and as long as the child lives that inherits `lock`."""

    def __init__(self, path: Path, lock: int, writing: int) -> None:
        self.path, self.lock = path, lock
        self._writing = writing  # opened before the child is there, which may put something else under the name

    @classmethod
    def take(cls, workdir: Path, id: str, args: bytes) -> Folder | None:
        """The folder of the invocation `id`, locked, empty but for `args`. None: an earlier attempt still holds it,
        and was sent a SIGKILL if it runs on this machine; ask again."""
        workdir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = workdir / id
        with suppress(FileExistsError):  # it may be gone again already
            os.mkdir(path, 0o700)
        lock = _locked(path)
        if lock is None:
            return None
        writing: int | None = None
        try:
            writing = os.open(path / LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            os.ftruncate(writing, 0)
            remove_leftovers(path)
            write_file(path, ARGS, args)
        except BaseException:
            with suppress(OSError):
                _delete(path)
            for fd in (lock, writing):
                if fd is not None:
                    os.close(fd)
            raise
        return cls(path, lock, writing)

    def name_group(self, group: int) -> None:
        """Write down which process group is to be killed by who needs this folder."""
        os.pwrite(self._writing, f"{group} {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        """Leave the folder as it is. A child that runs still holds it."""
        os.close(self._writing)
        os.close(self.lock)

    def release(self) -> None:
        """The same once the child has ended: what has left its group, and lives on, holds up no further attempt."""
        with suppress(OSError):
            os.ftruncate(self._writing, 0)
            fcntl.flock(self.lock, fcntl.LOCK_UN)
        self.close()

    def remove(self) -> None:
        """Delete the folder and leave it. Raises OSError when something in it does not let itself be deleted."""
        try:
            _delete(self.path)
        finally:
            self.release()


def _delete(path: Path) -> None:
    """Delete the folder that this process has locked. The lock file goes last: without it the next attempt may have the
    folder before it is gone, and then it stays."""
    for names in ((), (LOCK,)):
        remove_leftovers(path, *names)
    try:
        path.rmdir()
    except OSError:
        if not (path / LOCK).exists():
            raise


def _locked(path: Path) -> int | None:
    """The descriptor of the locked lock file in the folder `path`; None: it is held, or the folder is being deleted.

    A link, a pipe, or a file that has a further name, is one that a child put there, and may lead elsewhere: it goes. Where
    the file system locks such files it is open for reading only: a child with fewer rights cannot name a group then.
    """
    try:
        if os.lstat(path).st_uid != os.geteuid():  # that of an earlier attempt's user, who has no say in it any more
            with suppress(PermissionError):  # there are file systems on which root is nobody
                os.chown(path, os.geteuid(), os.getegid(), follow_symlinks=False)
                os.chmod(path, 0o700)
        with suppress(FileNotFoundError):
            there = os.lstat(path / LOCK)
            if there.st_nlink > 1 or not stat.S_ISREG(there.st_mode):
                remove_leftovers(path, LOCK)
        lock = os.open(path / LOCK, os.O_CREAT | _LOOK, 0o600)
    except FileNotFoundError:
        return None
    try:
        _hold(lock, path / LOCK)
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


def _hold(lock: int, path: Path) -> None:
    """Lock the file at `path`, which is open as `lock`. Raises BlockingIOError when it is held."""
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
    if os.fstat(lock).st_uid != os.geteuid():  # the child put another file there
        return
    group, _, host = os.pread(lock, 400, 0).decode("ascii", "replace").strip().partition(" ")
    if host == socket.gethostname() and group.isdigit() and int(group) not in (0, 1, os.getpgrp()):
        try:
            os.killpg(int(group), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass


def prune(workdir: Path, keep: int) -> None:
    """Delete the folders in `workdir` that nobody holds, but for the `keep` of them that changed last."""
    found = list[tuple[float, Path]]()
    for path in workdir.iterdir():
        with suppress(OSError):  # no folder of ours, or gone
            found.append(((path / LOCK).stat().st_mtime, path))
    for _, path in sorted(found, reverse=True):
        with suppress(OSError), open(path / LOCK, opener=lambda name, _: os.open(name, _LOOK)) as lock:  # held, or gone
            _hold(lock.fileno(), path / LOCK)
            keep -= 1
            if keep < 0:
                _delete(path)
