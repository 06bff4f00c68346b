"""Threads that cannot keep the interpreter alive."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["on_daemon_thread"]

T = TypeVar("T")


def on_daemon_thread(make: Callable[[], T]) -> T:
    """Call `make` in a daemon thread and wait for its result.

    The threads that `make` creates are daemons too, for they inherit that, and cannot keep the interpreter alive.
    """
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(make())
        except BaseException as exc:
            result.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return result.result()
