"""What a forked child inherits and must not use: its parent's locks and sockets, and SQLite's own record of locks.

SQLite counts its locks in memory that the child inherits, so the child would believe that it holds the parent's: what it
writes to a file that was open at the fork can be lost.
"""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Protocol

from ...errors import DispatchError

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Inherited", "close_in_forked_child", "count_open", "keep_in_forked_child", "open_paths", "refuse_inherited"]


class Inherited(Protocol):
    """Something with file descriptors that a forked child has to close."""

    def close_inherited(self) -> None:
        """Close the descriptors and do nothing else: locks and names are the parent's."""
        ...


_resources: weakref.WeakSet[Inherited] = weakref.WeakSet()
open_paths: dict[Path, int] = {}
"""How many connections this process has open, by file."""
_inherited_paths: set[Path] = set()


def close_in_forked_child(resource: Inherited) -> None:
    """From now on close `resource` in forked children."""
    _resources.add(resource)


def keep_in_forked_child(resource: Inherited) -> None:
    """The end of `close_in_forked_child`: it is closed already."""
    _resources.discard(resource)


def count_open(path: Path | None, change: int) -> None:
    """Count a connection to `path` that was opened (1) or closed (-1). None: in memory, which nobody can share."""
    if path is None:
        return
    count = open_paths.get(path, 0) + change
    if count > 0:
        open_paths[path] = count
    else:
        open_paths.pop(path, None)


def refuse_inherited(path: Path) -> None:
    """Raise DispatchError for a file that was open when this process was forked."""
    if path in _inherited_paths:
        raise DispatchError(
            f"the plane {str(path)!r} was open when this process was forked, and SQLite does not allow its use here: "
            "open it only after the fork, close it before, or start processes by multiprocessing's 'spawn' or 'forkserver'"
        )


def _in_forked_child() -> None:
    _inherited_paths.update(open_paths)
    open_paths.clear()
    for resource in list(_resources):
        resource.close_inherited()
    _resources.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_forked_child)
