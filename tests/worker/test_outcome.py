"""Whatever a body does becomes the outcome of its invocation, and the worker goes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
import worker_bodies as bodies
from helpers import each_row, wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.testing import running_worker

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio

ASYNC_AND_NOT = pytest.mark.parametrize("is_async", [False, True], ids=["def", "async def"])


async def failure(queue: dls.Queue, id: str) -> dls.InvocationFailed:
    with pytest.raises(dls.InvocationFailed) as caught:
        await queue.result(id, timeout=20)
    return caught.value


async def goes_on(queue: dls.Queue) -> None:
    """The same worker still works."""
    assert await queue.call(dls.thunk(bodies.double, 21)) == 42


async def test_four_kinds_of_bodies(queue: dls.Queue) -> None:
    async with running_worker(queue, concurrency=2):
        assert await queue.call(dls.thunk(bodies.double, "ab")) == "abab"
        assert await queue.call(dls.thunk(bodies.adouble, [1, 2])) == [1, 2, 1, 2]
        for body in (bodies.count, bodies.acount):
            id = await queue.submit(dls.thunk(body, 5))
            assert [value async for value in queue.stream(id)] == [0, 1, 2, 3, 4]
            assert await queue.result(id) is None


async def test_udfs_run_their_function_and_submit_nothing(queue: dls.Queue) -> None:
    async with running_worker(queue):
        assert await queue.call(dls.thunk(bodies.udf_double, 4)) == 8
        assert await queue.call(dls.thunk(bodies.Shelf.static, 4)) == 5
        assert await queue.call(dls.thunk(bodies.Shelf.named, 4)) == "Shelf 4"
        id = await queue.submit(dls.thunk(bodies.udf_acount, 3))
        assert [value async for value in queue.stream(id)] == [0, 1, 2]
        assert await queue.count(None) == 4


@ASYNC_AND_NOT
@each_row(
    "kind, type, message",
    [
        ("exit", "SystemExit", "3"),
        ("interrupt", "KeyboardInterrupt", ""),
        ("generator exit", "GeneratorExit", "not mine"),
        ("two", "TwoArguments", "this and that"),
        ("lock", "WithLock", "locked"),
        ("args", "OddArgs", "odd"),
        ("unprintable", "Unprintable", "<the text of this Unprintable could not be made: RuntimeError>"),
        ("unprintable hard", "UnprintableHard", "<the text of this UnprintableHard could not be made: SystemExit>"),
        ("surrogate", "ValueError", "half a pair: \\ud800"),
        ("group", "ExceptionGroup", "several (2 sub-exceptions)"),
        ("cancelled", "CancelledError", "by itself"),
        ("plain", "ValueError", "plain"),
    ],
)
async def test_R61_what_a_body_raises_fails_its_invocation_alone(
    queue: dls.Queue, is_async: bool, kind: str, type: str, message: str
) -> None:
    bodies.forget()
    async with running_worker(queue):
        body: Any = bodies.afail if is_async else bodies.fail
        error = await failure(queue, await queue.submit(dls.thunk(body, kind)))
        assert (error.state, error.type, error.message) == ("failed", type, message)
        await goes_on(queue)
    assert bodies.SEEN == [kind]  # once


@ASYNC_AND_NOT
@each_row("kind", ["exit", "interrupt", "generator exit", "cancelled", "unprintable hard"])
async def test_R61_what_a_generator_raises_ends_its_stream(queue: dls.Queue, is_async: bool, kind: str) -> None:
    async with running_worker(queue):
        body: Any = bodies.afail_after if is_async else bodies.fail_after
        stream = queue.stream(await queue.submit(dls.thunk(body, 2, kind)))
        assert [await anext(stream), await anext(stream)] == [0, 1]
        with pytest.raises(dls.InvocationFailed):
            await anext(stream)
        await goes_on(queue)


@ASYNC_AND_NOT
async def test_R62_the_caller_sees_the_real_error(queue: dls.Queue, is_async: bool) -> None:
    async with running_worker(queue):
        body: Any = bodies.afail if is_async else bodies.fail
        id = await queue.submit(dls.thunk(body, "cause"))
        with pytest.raises(ValueError, match="outer words") as caught:  # by the name of the builtin
            await queue.result(id, timeout=20)
    error = caught.value
    assert isinstance(error, dls.InvocationFailed)
    assert str(error) == f"invocation {id!r} ended failed: ValueError: outer words"
    shown = error.traceback or ""
    for text in ("inner cause", "direct cause of the following exception", "a note on it", "in _raise", "in fail"):
        assert text.replace("in fail", f"in {body.__name__}") in shown
    assert "lakeshore/invoke.py" not in shown
    assert error.__notes__ == [f"remote traceback:\n{shown.rstrip()}"]


@pytest.mark.parametrize(
    ("kind", "words"), [("lock", ["lock", "$"]), ("nested", ["object", '$["a"][1]'])], ids=["lock", "nested"]
)
async def test_R64_a_result_that_cannot_be_packed_fails_once(queue: dls.Queue, kind: str, words: list[str]) -> None:
    async with running_worker(queue, retries=3):
        error = await failure(queue, await queue.submit(dls.thunk(bodies.unpackable, kind)))
        assert error.type == "EncodeError"
        assert error.message.startswith("the result of 'unpackable' cannot be packed: ")
        assert all(word in error.message for word in words)
        assert (await queue.get(error.id)).attempt == 1
        await goes_on(queue)


@ASYNC_AND_NOT
async def test_R64_a_yielded_value_that_cannot_be_packed_fails_once(queue: dls.Queue, is_async: bool) -> None:
    async with running_worker(queue, retries=3):
        body: Any = bodies.ayields_unpackable if is_async else bodies.yields_unpackable
        id = await queue.submit(dls.thunk(body))
        error = await failure(queue, id)
        assert error.type == "EncodeError"
        assert error.message.startswith(
            f"a value that '{body.__name__}' yielded cannot be packed: cannot pack a value of"
        )
        stream = queue.stream(id)
        assert await anext(stream) == 1
        with pytest.raises(dls.InvocationFailed, match="yielded cannot be packed"):
            await anext(stream)
        assert (await queue.get(id)).attempt == 1
        await goes_on(queue)
    assert bodies.SEEN == (["closed"] if is_async else [])


async def submit_bytes(queue: dls.Queue, id: str, body: bytes) -> str:
    return str(await queue.dispatch.do(Submit(id, queue.name, body)))


async def test_an_undecodable_envelope_fails_once(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=3):
        for number, body in enumerate([b"", b"\xc1", b"\x93\x01\x02", bytes(100), b"\x81\xa1v\x01"]):
            error = await failure(queue, await submit_bytes(queue, f"odd{number}", body))
            assert error.type == "WireError"
            assert error.message.startswith(f"the payload of invocation 'odd{number}' is not one that a worker can run")
            assert (await queue.get(error.id)).attempt == 1
        await goes_on(queue)


async def test_a_newer_envelope_fails_once(queue: dls.Queue) -> None:
    envelope = dls.wire.unpack(dls.thunk(bodies.double, 1).to_envelope(id="new").to_bytes())
    async with running_worker(queue, retries=3):
        error = await failure(queue, await submit_bytes(queue, "new", dls.wire.pack(envelope | {"v": 99})))
        assert "upgrade dreamlake-lakeshore" in error.message
        await goes_on(queue)


async def test_arguments_that_cannot_be_unpacked_fail_once(queue: dls.Queue) -> None:
    envelope = dls.thunk(bodies.double, 1).to_envelope(id="args")
    envelope.args = b"\xc1\xc1"
    async with running_worker(queue, retries=3):
        error = await failure(queue, await submit_bytes(queue, "args", envelope.to_bytes()))
        assert (error.type, (await queue.get("args")).attempt) == ("WireError", 1)
        await goes_on(queue)


async def test_a_plain_payload_fails_with_the_fix(queue: dls.Queue) -> None:
    async with running_worker(queue, retries=3):
        error = await failure(queue, await queue.submit({"not": "a thunk"}))
        assert error.type == "WireError"
        assert "submit a function, or `dls.thunk(fn, ...)`, for a worker to run" in error.message
        await goes_on(queue)


async def test_R78_a_function_that_is_not_there_fails_once_and_says_where_it_looked(queue: dls.Queue) -> None:
    envelope = dls.thunk(bodies.double, 1).to_envelope(id="gone")
    envelope.fn = {"kind": "ref", "module": "no_such_module_anywhere", "qualname": "f", "src_hash": None}
    async with running_worker(queue, retries=3):
        error = await failure(queue, await submit_bytes(queue, "gone", envelope.to_bytes()))
        assert error.type == "TransportError"
        assert "No module named 'no_such_module_anywhere'" in error.message
        assert "sys.path" in error.message
        assert "the worker runs in" in error.message
        assert (await queue.get("gone")).attempt == 1
        await goes_on(queue)


async def test_R70_changed_source_is_refused_once(queue: dls.Queue) -> None:
    envelope = dls.thunk(bodies.double, 1).to_envelope(id="stale")
    envelope.fn = envelope.fn | {"src_hash": "sha256:0123456789abcdef"}
    async with running_worker(queue, retries=3):
        error = await failure(queue, await submit_bytes(queue, "stale", envelope.to_bytes()))
        assert error.type == "TransportError"
        assert "sha256:0123456789abcdef" in error.message
        assert (await queue.get("stale")).attempt == 1
        await goes_on(queue)


async def test_R75_a_pickle_of_another_python_is_refused_before_it_is_loaded(queue: dls.Queue) -> None:
    envelope = dls.thunk(lambda: bodies.note("loaded")).to_envelope(id="other")
    envelope.fn = envelope.fn | {"runtime": envelope.fn["runtime"] | {"python": "3.2.1"}, "blob": b"not a pickle"}
    async with running_worker(queue, retries=3):
        error = await failure(queue, await submit_bytes(queue, "other", envelope.to_bytes()))
        assert error.type == "TransportError"
        assert "3.2.1" in error.message
        assert (await queue.get("other")).attempt == 1
        await goes_on(queue)


async def test_a_codec_that_exits_while_decoding_fails_once(queue: dls.Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs are the user's code, and run on the worker's event loop."""

    def leave(self: Any) -> Any:
        raise SystemExit(5)

    async with running_worker(queue, retries=3):
        with monkeypatch.context() as patch:
            patch.setattr(dls.wire.Envelope, "arguments", leave)
            error = await failure(queue, await queue.submit(dls.thunk(bodies.double, 1)))
        assert (error.type, (await queue.get(error.id)).attempt) == ("SystemExit", 1)
        await goes_on(queue)


async def test_wrong_arguments_fail_like_any_exception(queue: dls.Queue) -> None:
    wrong: Any = bodies.double
    async with running_worker(queue):
        for body in (wrong, bodies.adouble, bodies.count, bodies.acount):
            error = await failure(queue, await queue.submit(dls.thunk(body, 1, 2, 3)))
            assert error.type == "TypeError"
            assert "positional argument" in error.message
        await goes_on(queue)


async def test_a_module_that_is_slow_to_import_does_not_block_the_loop(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anyio_backend_name: str
) -> None:
    """Two invocations need it: the second must not block the loop while a thread imports the module."""
    module = f"slow_to_import_{anyio_backend_name}"
    (tmp_path / f"{module}.py").write_text(
        "import worker_bodies\nworker_bodies.note('importing')\nworker_bodies.gate('import').wait(60)\ndef f(): return 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = {"kind": "ref", "module": module, "qualname": "f", "src_hash": None}

    async def submit(name: str) -> str:
        envelope = dls.thunk(bodies.double, 1).to_envelope(id=name)
        envelope.args, envelope.fn = b"", spec
        return await submit_bytes(queue, name, envelope.to_bytes())

    async with running_worker(queue, concurrency=3):
        ids = [await submit("one")]
        await wait_until(lambda: bodies.SEEN, description="the import to begin")
        ids.append(await submit("two"))
        with anyio.fail_after(50):
            await goes_on(queue)
        bodies.gate("import").set()
        assert [await queue.result(id, timeout=20) for id in ids] == [1, 1]


@pytest.mark.parametrize("anyio_backend", ["asyncio"])  # trio has no such thing
async def test_a_body_that_cancels_its_own_task_fails_alone(queue: dls.Queue) -> None:
    async with running_worker(queue):
        error = await failure(queue, await queue.submit(dls.thunk(bodies.cancels_itself_and_waits)))
        assert (error.state, error.type) == ("failed", "CancelledError")
        result = await queue.call(dls.thunk(bodies.cancels_itself))
        assert result == "cancelled, and returned all the same"
        await goes_on(queue)


async def test_keys_are_held_to_the_contract_and_the_root(queue: dls.Queue, tmp_path: Path) -> None:
    async with running_worker(queue, root=tmp_path / "root"):
        with dls.scope("sub"):
            assert await queue.call(dls.thunk(bodies.write_and_return, "k.txt")) == "k.txt"
    assert (tmp_path / "root" / "sub" / "k.txt").read_text() == "x"


async def test_children_name_their_parent(queue: dls.Queue) -> None:
    with bodies.current(plane=queue.dispatch):
        async with running_worker(queue):
            parent = await queue.submit(dls.thunk(bodies.children, 2))
            ids = await queue.result(parent, timeout=20)
            rows = [await queue.get(id) for id in ids]
    assert [(row.parent, row.root) for row in rows] == [(parent, parent)] * 2
