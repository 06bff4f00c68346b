"""Multiply two matrices in blocks: `asyncio.gather` over `Queue.result`, with NumPy arrays as arguments and results.

    python examples/fan_out.py

There is no special gather: a pending invocation is its id, and waiting for one is a coroutine like any other. Needs numpy.
"""

# ruff: noqa: TC002 -- an example reads better without a block for type checkers
from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import dreamlake.lakeshore as dls


def multiply(rows: NDArray[np.float64], matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """A plain function: `dls.thunk` bundles it with its arguments, no decorator is needed."""
    return rows @ matrix


async def main() -> None:
    rng = np.random.default_rng(7)
    left, right = rng.standard_normal((1200, 400)), rng.standard_normal((400, 300))

    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        path = Path(home) / "lakeshore.db"
        print(f"the plane is {path}")
        async with dls.Dispatch(path) as plane:
            queue = dls.Queue("matrices", dispatch=plane)
            # A worker is a coroutine too. Here it is a task beside its caller; `lakeshore worker start` is the same
            # in a process of its own. Bodies that are plain functions run in threads.
            worker = asyncio.create_task(dls.run_worker(queue, concurrency=4))
            try:
                product = await in_blocks(queue, left, right)
            finally:
                worker.cancel()
                await asyncio.wait([worker])

    print(f"shape {product.shape}, dtype {product.dtype}, largest error {np.abs(product - left @ right).max():.1e}")


async def in_blocks(queue: dls.Queue, left: NDArray[np.float64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    started = time.perf_counter()
    blocks = np.array_split(left, 12)
    ids = await queue.submit_many(dls.thunk(multiply, block, right) for block in blocks)
    print(f"{len(ids)} blocks are queued, {sum(block.nbytes for block in blocks) / 1e6:.1f} MB and one matrix each")
    results = await asyncio.gather(*(queue.result(id, timeout=60) for id in ids))
    print(f"all are back after {time.perf_counter() - started:.2f} s")
    return np.concatenate(results)


if __name__ == "__main__":
    asyncio.run(main())
