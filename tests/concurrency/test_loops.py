"""Event loops: callbacks on them."""

from __future__ import annotations

import threading
from typing import Any

import anyio
import pytest
from helpers import wait_until

from dreamlake.lakeshore.concurrency.loops import loop_token, run_sync_soon

pytestmark = pytest.mark.anyio
both_loops = pytest.mark.parametrize("backend", ["asyncio", "trio"])


async def test_run_sync_soon_from_a_thread_has_the_context_of_the_loop() -> None:
    token, made, told = loop_token(), list[anyio.Event](), anyio.Event()

    def callback() -> None:
        made.append(anyio.Event())  # needs to know which loop this is
        told.set()

    done = list[bool]()
    thread = threading.Thread(target=lambda: done.append(run_sync_soon(token, callback)))
    thread.start()
    await told.wait()
    thread.join()
    assert done == [True]
    assert len(made) == 1


async def test_run_sync_soon_logs_what_its_callback_raises(caplog: pytest.LogCaptureFixture) -> None:
    def callback() -> None:
        raise ValueError("from the callback")

    assert run_sync_soon(loop_token(), callback)
    await wait_until(lambda: "ValueError: from the callback" in caplog.text)


@both_loops
def test_run_sync_soon_returns_false_when_the_loop_has_ended(backend: str) -> None:
    async def main() -> Any:
        return loop_token()

    assert run_sync_soon(anyio.run(main, backend=backend), print) is False
