"""Remove what an earlier attempt left in the folder of its invocation."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ..daemon.workdir import ARGS, LOCK, remove_leftovers

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["remove_earlier_files"]


def remove_earlier_files(folder: Path) -> None:
    """Remove all files but those that the worker prepared for the coming attempt.

    The folder was emptied when it was taken, but an earlier attempt may have written into it until its engine ended it.
    """
    left = set(os.listdir(folder)) - {ARGS, LOCK}
    if left:
        remove_leftovers(folder, *left)
