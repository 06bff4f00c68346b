"""Daemon threads."""

from __future__ import annotations

import threading

import pytest

from dreamlake.lakeshore.concurrency.threads import on_daemon_thread


def test_on_daemon_thread_makes_daemons() -> None:
    thread = on_daemon_thread(lambda: threading.Thread(target=print))
    assert thread.daemon
    with pytest.raises(ZeroDivisionError):
        on_daemon_thread(lambda: 1 // 0)
