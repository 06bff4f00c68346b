"""A worker inside a test."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import anyio

from ..body.execute import leaf_exceptions
from ..worker.loop import run_worker

if TYPE_CHECKING:
    import os
    from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
    from typing import Any, Unpack

    from ..client.queue import Queue

__all__ = ["WorkerOptions", "running_worker"]


class WorkerOptions(TypedDict, total=False):
    """What `run_worker` takes, without `once` and `stop`."""

    root: str | os.PathLike[str] | None
    registry: Mapping[str, Callable[..., Any]] | None
    concurrency: int
    retries: int
    timeout: float | None
    lease: float
    max_lost: int
    grace: float
    allow_pickled: bool | None
    runtime_policy: str
    allow_modules: Sequence[str]


@asynccontextmanager
async def running_worker(queues: Queue | Sequence[Queue], **options: Unpack[WorkerOptions]) -> AsyncGenerator[None]:
    """`async with running_worker(q): ...`: a worker of the queue, or of several, runs during the block.

    The options are those of `run_worker`. At the end of the block the worker finishes what runs, for `grace` seconds (5
    unless given), and gives the rest back; when the block raises or is cancelled, at once. What the block raises comes
    out as it is. A worker that ends with an error cancels the block, and the error comes out.
    """
    options.setdefault("grace", 5.0)
    stop = anyio.Event()
    failure: BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(partial(run_worker, queues, **options, stop=stop))
            try:
                yield
            except Exception as exc:
                failure = exc
                group.cancel_scope.cancel()
            stop.set()
    except BaseExceptionGroup as raised:
        failure = failure or next(leaf_exceptions(raised))
    if failure is not None:
        raise failure
