"""For tests of planes, and of programs that use one."""

from __future__ import annotations

from .check import check_plane as check_plane
from .running import running_worker as running_worker
