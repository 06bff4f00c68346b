"""A worker's settings: which make sense, and what they allow to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import worker_bodies as bodies

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"concurrency": 0}, "a worker cannot work with concurrency=0 (at least 1)"),
        ({"retries": -1, "max_lost": 0}, "a worker cannot work with retries=-1 (at least 0), max_lost=0 (at least 1)"),
        ({"lease": 0.0}, "a worker cannot work with lease=0.0 (seconds above 0)"),
        ({"lease": float("inf")}, "a worker cannot work with lease=inf (seconds above 0)"),
        ({"timeout": -1.0}, "a worker cannot work with timeout=-1.0 (seconds above 0)"),
        ({"grace": float("nan")}, "a worker cannot work with grace=nan (at least 0)"),
    ],
)
async def test_settings_that_make_no_sense_are_refused(queue: dls.Queue, options: Any, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:
        await dls.run_worker(queue, **options)
    assert str(caught.value) == sentence


async def test_queues_of_two_planes_are_refused(queue: dls.Queue) -> None:
    other = dls.Queue("q", dispatch=dls.Dispatch())
    for queues in ([queue, other], []):
        with pytest.raises(ValueError, match="expected one queue or several of the same dispatch plane"):
            await dls.run_worker(queues)


async def test_an_unknown_runtime_policy_is_refused(queue: dls.Queue) -> None:
    with pytest.raises(dls.TransportError, match="expected the runtime policy 'strict', 'minor' or 'off', got 'some'"):
        await dls.run_worker(queue, runtime_policy="some")


async def test_the_root_of_keys_is_the_option_or_the_environment(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKESHORE_ROOT", str(tmp_path / "env"))
    await queue.submit(dls.thunk(bodies.write_and_return, "one"))
    await queue.submit(dls.thunk(bodies.write_and_return, "two"))
    assert await dls.run_worker(queue, once=True) == 1
    assert await dls.run_worker(queue, once=True, root=tmp_path / "option") == 1
    assert (tmp_path / "env" / "one").exists()
    assert (tmp_path / "option" / "two").exists()


# --- trust -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("allow", "trusted", "runs"),
    [(None, True, True), (None, False, False), (True, False, True), (False, True, False), (False, False, False)],
)
async def test_pickles_run_where_they_are_allowed(
    queue: dls.Queue, allow: bool | None, trusted: bool, runs: bool
) -> None:
    """With None, those submitted on this machine are allowed, and those that came through a server are not."""
    body = dls.thunk(lambda: "unpickled").to_envelope(id="pickled").to_bytes()
    await queue.dispatch.do(Submit("pickled", "q", body, trusted=trusted))
    async with running_worker(queue, allow_pickled=allow):
        if runs:
            assert await queue.result("pickled", timeout=20) == "unpickled"
        else:
            with pytest.raises(dls.InvocationFailed, match="submitted as a pickle, which this worker refuses"):
                await queue.result("pickled", timeout=20)


async def test_pickles_from_a_plane_that_others_write_to_are_refused(
    queue: dls.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(queue.dispatch), "local", False)
    async with running_worker(queue):
        with pytest.raises(dls.InvocationFailed, match="which this worker refuses"):
            await queue.call(dls.thunk(lambda: 1))
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_an_untrusted_reference_reaches_only_what_is_allowed(queue: dls.Queue) -> None:
    import json

    body = dls.thunk(json.dumps, [1]).to_envelope(id="a").to_bytes()
    other = dls.thunk(json.dumps, [1]).to_envelope(id="b").to_bytes()
    await queue.dispatch.do(Submit("a", "q", body, trusted=False))
    async with running_worker(queue):
        with pytest.raises(dls.InvocationFailed, match=r"--allow-module json"):
            await queue.result("a", timeout=20)
    await queue.dispatch.do(Submit("b", "q", other, trusted=False))
    async with running_worker(queue, allow_modules=["json"]):
        assert await queue.result("b", timeout=20) == "[1]"


async def test_the_registry_wins_over_import(queue: dls.Queue) -> None:
    async with running_worker(queue, registry={"double": lambda x: f"registered {x}"}, runtime_policy="off"):
        assert await queue.call(dls.thunk(bodies.double, 1)) == "registered 1"
        assert await queue.call(dls.thunk(bodies.adouble, 1)) == 2
