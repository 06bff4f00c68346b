"""Test functions of your own, first as they are, then through a queue and a worker inside the test.

    pytest examples/test_own_functions.py
    python examples/test_own_functions.py

`f.local(...)` runs the body without a queue. `dls.Dispatch()` is a plane in memory, and `running_worker` runs a worker for
the length of a block: nothing is left behind. With pytest, anyio's plugin runs the test on an event loop.
"""

from __future__ import annotations

import anyio
import pytest

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.testing import running_worker


@dls.udf(queue="prices")
def total(prices: list[float], discount: float = 0.0) -> float:
    if not 0 <= discount < 1:
        raise ValueError(f"a discount from 0 up to 1, got {discount}")
    return round(sum(prices) * (1 - discount), 2)


def test_the_body_itself() -> None:
    assert total.local([1.5, 2.5], discount=0.5) == 2.0


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.mark.anyio
async def test_it_through_a_worker() -> None:
    async with dls.Dispatch() as plane:
        queue = dls.Queue("prices", dispatch=plane)
        async with running_worker(queue):
            assert await queue.call(dls.thunk(total, [1.5, 2.5])) == 4.0
            with pytest.raises(ValueError, match="a discount from 0 up to 1, got 2"):
                await queue.call(dls.thunk(total, [1.5], 2.0))


if __name__ == "__main__":
    test_the_body_itself()
    anyio.run(test_it_through_a_worker)
    print("both tests passed")
