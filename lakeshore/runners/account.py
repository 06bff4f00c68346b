"""Find the account that `as_user` names, and give it the folder of its invocation."""

from __future__ import annotations

import os
import pwd
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..daemon.workdir import ARGS
from ..errors import DispatchError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Account", "find_account", "find_in_passwd", "give_folder", "numeric_ids", "only_root"]

_NUMBERS = re.compile(r"([0-9]{1,10})(:([0-9]{1,10}))?")


@dataclass(frozen=True, slots=True)
class Account:
    """An account of this machine, and the variables of its login that a child gets."""

    uid: int
    gid: int
    groups: Sequence[int]
    environ: Mapping[str, str]


def find_account(name: str) -> Account:
    """Return the account of this machine that `as_user` names.

    Raises:
        DispatchError: There is no such user, or this process may not run programs as another user.
    """
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        raise DispatchError(f"`as_user` names {name!r}, and there is no such user here") from None
    if os.geteuid() != 0:
        raise only_root(name)
    environ = {"HOME": found.pw_dir, "USER": name, "LOGNAME": name, "SHELL": found.pw_shell}
    return Account(found.pw_uid, found.pw_gid, os.getgrouplist(name, found.pw_gid), environ)


def find_in_passwd(passwd: str, name: str) -> tuple[int, int] | None:
    """Return the UID and GID of a user in the text of an /etc/passwd, which may come inside a tar archive."""
    found = re.search(rf"(?:^|[\n\0]){re.escape(name)}:[^:\n]*:(\d+):(\d+):", passwd)
    return None if found is None else (int(found[1]), int(found[2]))


def give_folder(folder: Path, name: str, uid: int, gid: int) -> None:
    """Make the user the owner of the folder of an invocation and of what the worker wrote into it.

    Other users may pass through the folder above, which holds all invocations, but not list it. `name` is that of
    `as_user`, for the error.

    Raises:
        DispatchError: This process may not do that.
    """
    if (uid, gid) == (os.geteuid(), os.getegid()):
        return
    try:
        if uid != os.geteuid():
            os.chmod(folder.parent, 0o711)
        for path in (folder / ARGS, folder):
            os.chown(path, uid, gid)
    except PermissionError:
        raise only_root(name) from None


def only_root(name: str) -> DispatchError:
    """Return the error for an `as_user` where this process is not root."""
    return DispatchError(f"`as_user` names {name!r}, and only a worker that runs as root can run as another user")


def numeric_ids(as_user: str | None) -> tuple[int, int]:
    """Return the UID and GID of a child on another machine: those of `as_user`, by default those of this process.

    Files of this worker are readable for its own user only, so a child runs as that user by default.

    Raises:
        DispatchError: `as_user` is a name, or a user that this worker cannot give a folder to.
    """
    if as_user is None:
        return os.geteuid(), os.getegid()
    found = _NUMBERS.fullmatch(as_user)
    if found is None:
        raise DispatchError(
            f"`as_user` names {as_user!r}, and the kube runner takes numbers only, UID or UID:GID: each image gives "
            "names a meaning of its own"
        )
    uid = int(found[1])
    if uid != os.geteuid() and os.geteuid() != 0:
        raise DispatchError(
            f"`as_user` names {as_user!r}, and only a worker that runs as root can give another user its folder"
        )
    return uid, int(found[3] or found[1])
