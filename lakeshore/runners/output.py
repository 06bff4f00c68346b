"""Create the files into which children write their output."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["create_output"]


def create_output(path: Path) -> io.FileIO:
    """Create a file to append to. Fails where something of that name exists, which could be a link to elsewhere."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    return io.FileIO(os.open(path, flags, 0o600), "a")
