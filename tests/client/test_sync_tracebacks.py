"""What a script shows of an error of a blocking call: its own lines, few of the package, and each error once."""

from __future__ import annotations

import socket
import traceback
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import portal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def q(tmp_path: Path) -> Iterator[dls.SyncQueue]:
    plane = dls.Dispatch(tmp_path / "plane.db")
    yield dls.SyncQueue("q", dispatch=plane)
    portal().call(plane.aclose)


def shown(call: Callable[[], Any]) -> str:
    """The traceback of a call that raises."""
    try:
        call()
    except Exception as exc:
        return "".join(traceback.format_exception(exc))
    raise AssertionError("it raised nothing")


def check(said: str, error: str) -> None:
    assert said.count("Traceback (most recent call last)") == 1
    assert said.count('  File "') <= 6, said
    assert "concurrency/portal.py" not in said
    assert "concurrent" not in said
    assert sum(line.startswith(error) for line in said.splitlines()) == 1


def wait_in_vain(q: dls.SyncQueue) -> Callable[[], Any]:
    id = q.submit(1)
    return lambda: q.result(id, timeout=0.01)


def failing(q: dls.SyncQueue) -> Callable[[], Any]:
    id = q.submit(1)
    job = q.claim()
    assert job is not None
    q.nack(job, error="no luck")
    return lambda: q.result(id)


CASES: list[tuple[Callable[[dls.SyncQueue], Callable[[], Any]], str]] = [
    (wait_in_vain, "TimeoutError: invocation "),
    (failing, "dreamlake.lakeshore.errors.InvocationFailed: invocation "),
    (
        lambda q: lambda: q.submit(object()),
        "dreamlake.lakeshore.errors.EncodeError: cannot pack a value of type object",
    ),
    (lambda q: lambda: q.submit(shown), "dreamlake.lakeshore.errors.EncodeError: a queue takes a Thunk or plain data"),
]


@pytest.mark.parametrize(("make", "error"), CASES)
def test_an_error_of_a_script(q: dls.SyncQueue, make: Callable[[dls.SyncQueue], Callable[[], Any]], error: str) -> None:
    check(shown(make(q)), error)


@pytest.mark.anyio
@pytest.mark.parametrize(("make", "error"), CASES)
async def test_an_error_in_a_worker_thread(
    q: dls.SyncQueue, make: Callable[[dls.SyncQueue], Callable[[], Any]], error: str
) -> None:
    def blocking() -> str:
        return shown(make(q))

    check(await anyio.to_thread.run_sync(blocking), error)
    await q.dispatch.aclose()


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        plane = dls.HttpDispatch(f"http://127.0.0.1:{free.getsockname()[1]}")
    plane.patience = 0.1
    q = dls.SyncQueue("q", dispatch=plane)
    check(
        shown(lambda: q.submit(1)),
        "dreamlake.lakeshore.errors.PlaneUnavailable: no answer to POST /producer/submit-many",
    )
    portal().call(plane.aclose)


def test_a_fault_of_ours_is_shown_whole(q: dls.SyncQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    async def faulty(op: Any) -> Any:
        raise RuntimeError("out of order")

    monkeypatch.setattr(q.dispatch, "do", faulty)
    said = shown(lambda: q.submit(1))
    assert "in faulty" in said
    assert "concurrency/portal.py" in said
