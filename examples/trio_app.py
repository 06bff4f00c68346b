"""The whole of it under trio: a worker in a nursery, a stream, and a call that is left before its end.

    python examples/trio_app.py

Nothing here is special to trio but the names of its own: the same package runs on asyncio. Needs trio.
"""

# ruff: noqa: TC003 -- an example reads better without a block for type checkers
from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import trio

import dreamlake.lakeshore as dls


async def collatz(n: int) -> AsyncIterator[int]:
    """An async generator: what it yields is read while it runs."""
    while n != 1:
        yield n
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        await trio.sleep(0.01)
    yield 1


async def patient(seconds: float) -> str:
    try:
        await trio.sleep(seconds)
    finally:
        print("patient: the worker was told, and the `finally` of the body ran")
    return "slept well"


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        path = Path(home) / "lakeshore.db"
        print(f"the plane is {path}")
        async with dls.Dispatch(path) as plane, trio.open_nursery() as nursery:
            queue = dls.Queue("numbers", dispatch=plane)
            nursery.start_soon(lambda: dls.run_worker(queue, concurrency=4))

            id = await queue.submit(dls.thunk(collatz, 27))
            values = [value async for value in queue.stream(id)]
            print(f"collatz: {len(values)} values, the highest is {max(values)}, the last is {values[-1]}")

            # Leaving a call cancels its invocation, also on another machine; leaving a wait for a result does not.
            with trio.move_on_after(0.5):
                await queue.call(dls.thunk(patient, 3600.0))
            (newest,) = await queue.list(limit=1)
            try:
                await queue.result(newest.id)
            except dls.InvocationKilled as exc:
                print("patient:", exc)
            nursery.cancel_scope.cancel()  # the worker is a task like any other


if __name__ == "__main__":
    trio.run(main)
