"""Retries and timeouts belong to the worker: the same function is tried again, or cut off, without a word in its code.

    python examples/retry_and_timeout.py

A body that raises fails for good unless its worker has `retries`. `dls.run.attempt` counts the attempts. A body that takes
longer than the worker's `timeout` is cancelled, and its caller gets `dls.InvocationTimedOut`.
"""

from __future__ import annotations

import anyio

import dreamlake.lakeshore as dls


async def flaky() -> str:
    attempt = dls.run.attempt or 1  # None outside of a worker
    if attempt < 3:
        raise ConnectionError(f"attempt {attempt} failed")
    return f"attempt {attempt} worked"


async def slow() -> None:
    await anyio.sleep(3600)


async def broken() -> None:
    raise ValueError("this never works")


async def main() -> None:
    async with dls.Dispatch() as plane, anyio.create_task_group() as group:
        queue = dls.Queue("jobs", dispatch=plane)
        group.start_soon(lambda: dls.run_worker(queue, concurrency=4, retries=2, timeout=20))
        print("flaky:", await queue.call(dls.thunk(flaky)))

        # `except ValueError` works too: the error is an instance of the builtin class that the body raised.
        try:
            await queue.call(dls.thunk(broken))
        except dls.InvocationFailed as exc:
            print("broken:", isinstance(exc, ValueError), (await queue.get(exc.id)).attempt, "attempts")

        # A second worker serves a queue with a shorter timeout.
        hasty = dls.Queue("hasty", dispatch=plane)
        group.start_soon(lambda: dls.run_worker(hasty, timeout=0.5))
        try:
            await hasty.call(dls.thunk(slow))
        except dls.InvocationTimedOut as exc:
            print("slow:", exc.state)
        group.cancel_scope.cancel()


if __name__ == "__main__":
    anyio.run(main)
