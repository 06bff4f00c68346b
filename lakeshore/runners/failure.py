"""Make the failures that runners report in place of a body's own error."""

from __future__ import annotations

from ..daemon.workdir import with_output
from ..planes.contract.records import Failure

__all__ = ["child_failed", "child_lost"]


def child_failed(message: str, output: str = "") -> Failure:
    """Return the failure of a child that could not run, or that its engine ended for what the child did.

    Args:
        message: What the engine reports.
        output: The end of what the child wrote, if that helps to understand it.
    """
    return Failure("DaemonError", with_output(message, output))


def child_lost(message: str) -> Failure:
    """Return the failure of a child that its engine lost through no fault of the body: another attempt may succeed."""
    return Failure("WorkerLost", message)
