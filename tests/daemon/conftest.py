from __future__ import annotations

from child_fixtures import _no_process_left, each_start, plane, queue

__all__ = ["_no_process_left", "each_start", "plane", "queue"]
