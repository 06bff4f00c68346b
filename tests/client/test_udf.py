"""UDFs: what they are, how they are called here, and how through a queue, with a worker in this very loop."""

from __future__ import annotations

import functools
import gc
import inspect
import pickle
import time
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from anyio.lowlevel import checkpoint
from helpers import fresh_python, wait_until

from dreamlake.lakeshore import (
    UDF,
    Dispatch,
    DispatchError,
    EncodeError,
    InvocationFailed,
    InvocationKilled,
    Queue,
    StreamRestarted,
    TransportError,
    run,
    run_worker,
    scope,
    thunk,
    udf,
)
from dreamlake.lakeshore.client import default_plane
from dreamlake.lakeshore.concurrency import run_sync as _run_sync
from dreamlake.lakeshore.functions import pickles

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
    from pathlib import Path

    from dreamlake.lakeshore.planes.plane import Plane

pytestmark = pytest.mark.anyio

ENDED: list[str] = []
"""What bodies tell of their end; worker and test are one process."""


@udf(queue="q")
def add(a: int, b: int = 1) -> int:
    """The sum."""
    return a + b


@udf(queue="q")
async def add_async(a: int, b: int = 1) -> int:
    await checkpoint()
    return a + b


@udf(queue="q")
def count(n: int) -> Iterator[int]:
    yield from range(n)


@udf(queue="q")
async def count_async(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


@udf(queue="q")
def endless(tag: str) -> Iterator[int]:
    try:
        i = 0
        while True:
            yield i
            i += 1
            time.sleep(0.001)
    finally:
        ENDED.append(tag)


@udf(queue="q")
async def endless_async(tag: str) -> AsyncIterator[int]:
    try:
        i = 0
        while True:
            yield i
            i += 1
            await anyio.sleep(0.001)
    finally:
        ENDED.append(tag)


@udf(queue="q")
async def sleep_long(tag: str) -> None:
    try:
        await anyio.sleep(3600)
    finally:
        ENDED.append(tag)


@udf(queue="q")
def fail(text: str) -> None:
    raise ValueError(text)


@udf(queue="q")
def fail_late(n: int) -> Iterator[int]:
    yield from range(n)
    raise ValueError("late")


@udf(queue="q")
def submit_from_inside(depth: int) -> list[str]:
    here = run.invocation_id
    assert here is not None
    return [here] if depth == 0 else [here, *submit_from_inside(depth - 1)]


@udf(queue="q")
def where() -> str:
    return run.prefix


@udf(queue="q")
def write_silently() -> str:
    run.write("silent.txt").write_text("x")
    return "another"


@udf(queue="q")
def takes_anything(**kwargs: Any) -> dict[str, Any]:
    return kwargs


@udf
def local_only(x: int) -> int:
    return x + 1


class Model:
    def __init__(self, scale: int) -> None:
        self.scale = scale

    @udf(queue="q")
    def grow(self, by: int) -> int:
        """Larger."""
        return self.scale * by

    @udf(queue="q")
    async def grow_async(self, by: int) -> int:
        return self.scale * by

    @udf(queue="q")
    @staticmethod
    def parse(text: str) -> int:
        return int(text)

    @udf(queue="q")
    @classmethod
    def build(cls, scale: int) -> int:
        return cls(scale).scale


class Callme:
    def __call__(self, x: int) -> int:
        return x + 1


@pytest.fixture
async def plane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Plane]:
    """A plane that is that of the process, too."""
    ENDED.clear()
    async with Dispatch(tmp_path / "plane.db") as plane:
        monkeypatch.setattr(default_plane, "_default", {"plane": plane})
        yield plane


@pytest.fixture
def q(plane: Plane) -> Queue:
    return Queue("q", dispatch=plane)


@asynccontextmanager
async def working(q: Queue, **options: Any) -> AsyncGenerator[None]:
    async with anyio.create_task_group() as group:
        group.start_soon(functools.partial(run_worker, q, **{"concurrency": 4, "grace": 0.0} | options))
        with anyio.fail_after(60):
            yield
        group.cancel_scope.cancel()


async def in_thread(fn: Callable[[], Any]) -> Any:
    return await anyio.to_thread.run_sync(fn)


async def state_of(q: Queue) -> str:
    """The state of the only invocation there is."""
    (row,) = await q.list()
    return row.state


# --- what a UDF is --------------------------------------------------------------------------------------------------


def test_it_keeps_the_looks_of_its_function() -> None:
    assert (add.__name__, add.__qualname__, add.__doc__, add.__module__) == ("add", "add", "The sum.", __name__)
    assert str(inspect.signature(add)) == "(a: 'int', b: 'int' = 1) -> 'int'"
    assert (add.queue, add.transport) == ("q", "auto")
    assert repr(add) == f"<udf {__name__}.add (def) on queue 'q'>"
    assert repr(count_async) == f"<udf {__name__}.count_async (async def, yield) on queue 'q'>"
    assert repr(local_only) == f"<udf {__name__}.local_only (def)>"
    assert isinstance(add, UDF)


@pytest.mark.parametrize(
    ("one", "kind"),
    [
        (add, ""), (add_async, "is_async"), (count, "is_gen"), (count_async, "is_asyncgen"), (udf(Callme()), ""),
        (udf(functools.partial(count_async.__wrapped__, 3)), "is_asyncgen"), (udf(abs), ""), (Model.parse, ""),
        (Model(1).grow_async, "is_async"),
    ],
)  # fmt: skip
def test_the_kind_of_the_body_is_known(one: UDF[..., Any], kind: str) -> None:
    flags = {name: getattr(one, name) for name in ("is_async", "is_gen", "is_asyncgen")}
    assert flags == {name: name == kind for name in flags}


def test_called_as_a_function_it_takes_its_options() -> None:
    made = udf(local_only, queue="gpu", transport="pickle")
    assert (made.queue, made.transport, made.__wrapped__) == ("gpu", "pickle", local_only.__wrapped__)
    assert udf(Callme(), queue="gpu").local(1) == 2
    assert udf(queue="gpu", transport="ref")(add.__wrapped__).transport == "ref"


def test_attributes_of_the_function_do_not_take_the_place_of_its_own() -> None:
    def f() -> int:
        return 1

    f.queue, f.local, f.submit, f.mine = "theirs", "theirs", "theirs", "theirs"  # type: ignore[attr-defined]
    made: Any = udf(f)
    assert (made.queue, made.local(), made.mine) == (None, 1, "theirs")
    with pytest.raises(TypeError, match="needs a queue"):
        made.submit()


@pytest.mark.parametrize("name", ["_key", "_priority", "_dispatch"])
def test_a_parameter_that_submit_takes_itself_is_refused_at_decoration(name: str) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def taken(x, {name}=None): ...\ndef keyword(*, {name}): ...", namespace)
    for function in (namespace["taken"], namespace["keyword"], functools.partial(namespace["taken"], 1)):
        with pytest.raises(TypeError, match=rf"^parameter '{name}' of .*: _dispatch, _key, _priority are keywords of"):
            udf(function)


def test_odd_options_are_refused_at_decoration() -> None:
    with pytest.raises(TransportError, match=r"^expected transport 'auto', 'ref' or 'pickle', got 'json'$"):
        udf(add.__wrapped__, transport="json")
    with pytest.raises(TransportError):
        udf(transport="json")(add.__wrapped__)
    for queue in ("", 3):
        with pytest.raises(TypeError, match=r"^expected queue= to be the name of a queue or None, got ('')|3$"):
            udf(add.__wrapped__, queue=queue)  # type: ignore[call-overload]
    for odd in ("gpu", 3):
        with pytest.raises(TypeError, match=r"^expected a function to decorate, got .*: write @dls\.udf, @dls\.udf"):
            udf(odd)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="unexpected keyword argument 'retries'"):
        udf(retries=3)  # type: ignore[call-overload]


def test_without_a_queue_there_is_nothing_to_submit_to() -> None:
    assert local_only(1) == 2
    for verb in ("submit", "remote"):
        sentence = (
            rf"^local_only\.{verb}\(\) needs a queue to submit to: decorate it with @dls\.udf\(queue=\.\.\.\), or "
            r"submit dls\.thunk\(local_only, \.\.\.\) to a queue of your choice$"
        )
        with pytest.raises(TypeError, match=sentence):
            getattr(local_only, verb)(1)


# --- in pickles -----------------------------------------------------------------------------------------------------


def test_it_is_pickled_by_its_name_where_that_leads_back_to_it() -> None:
    assert pickle.loads(pickle.dumps(add)) is add
    assert pickle.loads(pickle.dumps(Model.parse)) is Model.parse
    assert pickle.loads(pickle.dumps(Model.build)).local(3) == 3
    assert pickle.loads(pickle.dumps(Model(2).grow)).local(3) == 6


def test_a_local_one_is_pickled_with_its_function() -> None:
    base = 40

    @udf(queue="gpu", transport="pickle")
    def inner(x: int) -> int:
        return base + x

    again = pickles.loads(pickles.dumps(lambda x: inner.local(x)))
    assert again(2) == 42
    copy = pickles.loads(pickles.dumps(inner))
    assert (copy.queue, copy.transport, copy.local(1), copy.__name__) == ("gpu", "pickle", 41, "inner")


# --- here -----------------------------------------------------------------------------------------------------------


async def test_local_runs_here_whatever_the_queue() -> None:
    assert add.local(1, b=2) == 3
    assert await add_async.local(1) == 2
    assert list(count.local(3)) == [0, 1, 2]
    assert [i async for i in count_async.local(3)] == [0, 1, 2]
    model = Model(3)
    assert (model.grow.local(2), Model.grow.local(model, 2), Model.parse.local("7"), Model.build.local(4)) == (
        6,
        6,
        7,
        4,
    )
    assert (model.parse.local("7"), model.build.local(4), model.grow.__doc__) == (7, 4, "Larger.")
    assert await model.grow_async.local(2) == 6


def test_a_bound_method_keeps_everything_but_self() -> None:
    bound = Model(2).grow
    assert (bound.queue, bound.__name__, bound.__qualname__) == ("q", "grow", "Model.grow")
    assert str(inspect.signature(bound)) == "(by: 'int') -> 'int'"
    assert Model.parse is Model.__dict__["parse"]

    class Keeps:
        kept = bound
        made = udf(functools.partial(add.__wrapped__, 1))

    assert Keeps().kept.local(4) == 8
    assert Keeps().made(b=5) == 6


# --- through the queue ----------------------------------------------------------------------------------------------


async def test_the_body_decides_what_a_remote_call_gives(q: Queue) -> None:
    async with working(q):
        for entry in ("__call__", "remote"):
            assert await in_thread(lambda: getattr(add, entry)(1, b=2)) == 3  # noqa: B023
            coroutine = getattr(add_async, entry)(1, b=2)
            assert inspect.iscoroutine(coroutine)
            assert await coroutine == 3
            assert await in_thread(lambda: list(getattr(count, entry)(3))) == [0, 1, 2]  # noqa: B023
            assert [i async for i in getattr(count_async, entry)(3)] == [0, 1, 2]
    rows = await q.list()
    assert [row.state for row in rows] == ["succeeded"] * 8


async def test_the_body_decides_what_submit_gives(q: Queue) -> None:
    for sync in (add, count):
        id = await in_thread(functools.partial(sync.submit, 1))
        assert isinstance(id, str)
        assert (await q.get(id)).state == "queued"
    for asynchronous in (add_async, count_async):
        waiting = asynchronous.submit(1)  # type: ignore[var-annotated]
        assert inspect.iscoroutine(waiting)
        assert (await q.get(await waiting)).state == "queued"


async def test_methods_run_remotely(q: Queue) -> None:
    async with working(q):
        assert await Model(3).grow_async(2) == 6
        assert await in_thread(lambda: Model(3).grow(2)) == 6
        assert await in_thread(lambda: Model.parse("7")) == 7
        assert await in_thread(lambda: Model.build(4)) == 4


async def test_the_private_keywords_are_for_submit_and_all_others_for_the_body(q: Queue, tmp_path: Path) -> None:
    id = await add_async.submit(1, _key="k", _priority=7)
    row = await q.get(id)
    assert (row.key, row.priority) == ("k", 7)
    assert await add_async.submit(2, _key="k") == id
    async with working(q):
        assert await add_async.remote(5, _key="k") == 2  # of the first submit
        assert await in_thread(lambda: takes_anything(key=1, _private=2, _priority=3)) == {"key": 1, "_private": 2}
    async with Dispatch(tmp_path / "other.db") as other:
        there = await add_async.submit(1, _dispatch=other)
        assert (await Queue("q", dispatch=other).get(there)).state == "queued"
    with pytest.raises(TypeError, match=r"^expected dispatch= to be a plane such as .*, got 'other\.db'$"):
        add_async.submit(1, _dispatch="other.db")  # type: ignore[call-overload]


async def test_what_cannot_be_sent_is_refused_at_the_call(q: Queue) -> None:
    for verb in (add_async, add_async.submit, add_async.remote, count_async):
        with pytest.raises(EncodeError):
            verb(object())  # type: ignore[operator]
    assert await q.count(None) == 0


def plain(a: int, /, b: int = 1, *, c: int, d: int = 2) -> int:
    return a + b + c + d


@functools.wraps(plain)
def with_an_argument_of_its_own(*args: Any, **kwargs: Any) -> int:
    return plain(0, *args, **kwargs)


class Counter:
    @udf(queue="q")
    def up(self, by: int) -> int:
        return by

    @udf(queue="q")
    @classmethod
    def made(cls, size: int) -> int:
        return size

    @udf(queue="q")
    @staticmethod
    def twice(x: int) -> int:
        return 2 * x


WRONG: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    ((), {}), ((1,), {}), ((1, 2, 3), {"c": 1}), ((1,), {"c": 1, "z": 2}), ((1, 2), {"b": 3, "c": 1}),
    ((), {"a": 1, "c": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("args", "kwargs"), WRONG, ids=repr)
async def test_wrong_arguments_are_refused_at_the_call(q: Queue, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    remote: Any = udf(plain, queue="q")
    with pytest.raises(TypeError):
        plain(*args, **kwargs)
    with pytest.raises(TypeError) as direct:
        inspect.signature(plain).bind(*args, **kwargs)
    for verb in (remote, remote.submit, remote.remote):
        with pytest.raises(TypeError) as refused:
            verb(*args, **kwargs)
        assert str(refused.value) == f"plain(): {direct.value}"
    assert await q.count(None) == 0


async def test_wrong_arguments_of_every_kind_of_body_and_method(q: Queue) -> None:
    bodies: list[Any] = [add, add_async, count, count_async, Counter().up, Counter.made, Counter.twice, Counter().twice]
    for body in bodies:
        with pytest.raises(TypeError, match=rf"^{body.__qualname__}\(\): got an unexpected keyword argument 'z'$"):
            body.submit(1, z=2)
        with pytest.raises(TypeError, match=rf"^{body.__qualname__}\(\): too many positional arguments$"):
            body.submit(1, 2, 3, 4)
    assert await q.count(None) == 0


async def test_arguments_that_a_call_takes_are_taken(q: Queue) -> None:
    async with working(q):
        ids = [
            await in_thread(lambda: udf(plain, queue="q").submit(1, c=3, _key="k")),
            await in_thread(lambda: udf(with_an_argument_of_its_own, queue="q").submit(c=3)),
            await in_thread(lambda: udf(functools.partial(plain, 1, c=3), queue="q").submit(4)),
            await in_thread(lambda: Counter.made.submit(5)),
            await in_thread(lambda: Counter().twice.submit(x=3)),
        ]
        assert [await q.result(id) for id in ids] == [7, 6, 10, 5, 6]


async def test_a_failure_is_that_of_the_body(q: Queue) -> None:
    async with working(q):
        with pytest.raises(ValueError, match="ended failed: ValueError: boom") as caught:
            await in_thread(lambda: fail("boom"))
    failed = caught.value
    assert isinstance(failed, InvocationFailed)
    assert failed.traceback is not None
    assert "raise ValueError(text)" in failed.traceback


async def test_the_scope_of_the_call_travels(q: Queue) -> None:
    async with working(q):
        with scope("scenes/7"):
            id = await in_thread(where.submit)
            bundle = thunk(where)
            assert await in_thread(where) == "scenes/7"
        assert await q.result(id) == "scenes/7"
        assert await q.call(bundle) == ""  # what counts for a thunk is where it is submitted


async def test_written_keys_must_come_back_from_workers_too(q: Queue, tmp_path: Path) -> None:
    async with working(q, root=tmp_path):
        for call in (lambda: in_thread(write_silently), lambda: q.call(thunk(write_silently))):
            with pytest.raises(InvocationFailed, match=r"KeyContractError: .*'silent\.txt'"):
                await call()


async def test_what_a_body_submits_names_its_parent(q: Queue) -> None:
    async with working(q):
        first, second, third = await in_thread(lambda: submit_from_inside(2))
    rows = {row.id: row for row in await q.list()}
    assert [rows[id].parent for id in (first, second, third)] == [None, first, second]
    assert {rows[id].root for id in (second, third)} == {first}


async def test_R87_a_blocking_call_on_the_worker_s_own_loop_is_an_error_that_names_the_spelling(q: Queue) -> None:
    spelling = r"use `await dls\.Queue\('q'\)\.{}\(dls\.thunk\(add, \.\.\.\)\)`"
    with _run_sync.worker_runs_here():
        with pytest.raises(DispatchError, match=spelling.format("call")):
            add(1)
        with pytest.raises(DispatchError, match=spelling.format("submit")):
            add.submit(1)
        with pytest.raises(
            DispatchError, match=r"use `async for value in .*\.stream\(await .*\.submit\(dls\.thunk\(count"
        ):
            next(iter(count(1)))
    assert await q.count(None) == 0


async def test_a_blocking_call_on_a_running_loop_warns(q: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_run_sync, "_warned", set())
    with pytest.warns(
        RuntimeWarning, match=r"use `await dls\.Queue\('q'\)\.submit\(dls\.thunk\(add, \.\.\.\)\)`$"
    ) as found:
        add.submit(1)
    assert found[0].filename == __file__
    assert await q.count() == 1


# --- calls that are left --------------------------------------------------------------------------------------------


async def test_leaving_an_async_call_cancels_the_body(q: Queue) -> None:
    async with working(q):
        with anyio.move_on_after(30) as patience:
            async with anyio.create_task_group() as group:
                group.start_soon(sleep_long, "left")
                await wait_until(lambda: q.count("running"), description="the body")
                group.cancel_scope.cancel()
        assert not patience.cancelled_caught
        await wait_until(lambda: ENDED == ["left"], description="the finally of the body")
        await wait_until(lambda: q.count("killed"), description="the end of the invocation")


async def test_leaving_a_call_with_a_key_leaves_the_body_alone(q: Queue) -> None:
    async with working(q):
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: sleep_long.remote("keyed", _key="k"))
            await wait_until(lambda: q.count("running"), description="the body")
            group.cancel_scope.cancel()
        (row,) = await q.list()
        assert (row.state, row.cancel_requested) == ("running", False)
        await q.cancel(row.id, wait=True)
    assert ENDED == ["keyed"]


# --- streams --------------------------------------------------------------------------------------------------------


async def test_items_come_while_the_body_still_runs(q: Queue) -> None:
    async with working(q):
        stream = endless_async("async")
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        assert ENDED == []
        await stream.aclose()  # type: ignore[attr-defined]
        await wait_until(lambda: ENDED == ["async"], description="the finally of the async body")

        def read() -> None:
            with_close: Any = endless("sync")
            assert [next(with_close) for _ in range(3)] == [0, 1, 2]
            assert ENDED == ["async"]
            with_close.close()
            assert list(with_close) == []

        await in_thread(read)
        await wait_until(lambda: ENDED == ["async", "sync"], description="the finally of the body")


async def test_a_stream_submits_when_it_is_first_asked(q: Queue) -> None:
    streams: list[Any] = [count(2), count_async(2)]
    del streams
    gc.collect()
    unasked: Any = count_async(2)
    await unasked.aclose()
    assert [i async for i in unasked] == []
    assert await q.count(None) == 0


async def test_a_stream_that_ends_by_itself_is_not_cancelled(q: Queue) -> None:
    async with working(q):
        whole: Any = count_async(3)
        async with aclosing(whole):
            assert [i async for i in whole] == [0, 1, 2]
        del whole

        def fail() -> None:
            failing = fail_late(2)
            with pytest.raises(ValueError, match="ended failed: ValueError: late"):
                list(failing)

        await in_thread(fail)
        gc.collect()
    assert [(row.state, row.cancel_requested) for row in await q.list()] == [("failed", False), ("succeeded", False)]


async def test_a_restarted_call_can_be_read_on_by_its_id(q: Queue) -> None:
    caught: list[tuple[str, int, int]] = []  # not the exception, which would keep the iterator

    async def read() -> None:
        try:
            async for _ in count_async(9):
                pass
        except StreamRestarted as exc:
            caught.append((exc.id, exc.seq, exc.attempt))

    with anyio.fail_after(30):
        async with anyio.create_task_group() as group:
            group.start_soon(read)
            job = await q.claim(timeout=None)
            assert job is not None
            await q.post(job, "a")
            await q.nack(job, retry=True)
            again = await q.claim()
            assert again is not None
            await q.post(again, "x")
    assert caught == [(job.id, 1, 2)]
    gc.collect()
    for _ in range(20):
        await checkpoint()
    await q.ack(again)
    assert [value async for value in q.stream(job.id, since=1)] == ["x"]
    assert (await q.get(job.id)).cancel_requested is False


async def _break(make: Any) -> None:
    async for i in make():
        if i == 5:
            break


async def _collected_elsewhere(make: Any) -> None:
    held = [make()]
    async for i in held[0]:
        if i == 5:
            break

    async def other() -> None:
        held.clear()
        gc.collect()
        await checkpoint()

    async with anyio.create_task_group() as group:
        group.start_soon(other)


async def _exception(make: Any) -> None:
    async def body() -> None:
        async for i in make():
            1 / (i - 5)

    with pytest.raises(ZeroDivisionError):
        await body()


async def _timeout_while_waiting(make: Any) -> None:
    with anyio.CancelScope() as found:
        async for i in make():
            if i == 0:  # it has begun
                found.deadline = anyio.current_time() + 0.2
    assert found.cancelled_caught


async def _timeout_in_the_body(make: Any) -> None:
    with anyio.CancelScope() as found:
        async for i in make():
            if i == 0:
                found.deadline = anyio.current_time() + 0.3
            await anyio.sleep(0.05)
    assert found.cancelled_caught


async def _another_task(make: Any) -> None:
    stream = make()
    assert await anext(stream) == 0
    got: list[int] = []

    async def rest() -> None:
        async for i in stream:
            got.append(i)
            if i == 5:
                break

    async with anyio.create_task_group() as group:
        group.start_soon(rest)
    assert got == [1, 2, 3, 4, 5]


async def _aclose(make: Any) -> None:
    stream = make()
    await anext(stream)
    await stream.aclose()
    await stream.aclose()


async def _aclosing_while_cancelled(make: Any) -> None:
    with anyio.CancelScope() as found:
        async with aclosing(make()) as stream:
            await anext(stream)
            found.cancel()
            await checkpoint()
    assert found.cancelled_caught


WAYS = [
    _break, _collected_elsewhere, _exception, _timeout_while_waiting, _timeout_in_the_body, _another_task, _aclose,
    _aclosing_while_cancelled,
]  # fmt: skip


@pytest.mark.parametrize("leave", WAYS, ids=[way.__name__.strip("_") for way in WAYS])
async def test_R38_R44_leaving_a_stream_early_ends_its_body(
    q: Queue, leave: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with working(q):
        await leave(functools.partial(endless_async, "left"))
        gc.collect()
        await wait_until(lambda: ENDED == ["left"], description="the finally of the body")
        await wait_until(lambda: q.count("killed"), description="the end of the invocation")
        assert await add_async(1) == 2  # by the same worker
    assert [record.getMessage() for record in caplog.records if record.levelname != "INFO"] == []


async def _two_readers(q: Queue) -> list[list[int]]:
    got: list[list[int]] = [[], []]
    id = await count_async.submit(50)

    async def read(mine: list[int]) -> None:
        async for i in q.stream(id):
            mine.append(i)  # noqa: PERF401

    async with anyio.create_task_group() as group:
        for mine in got:
            group.start_soon(read, mine)
    return got


async def test_two_readers_of_one_invocation_get_everything(q: Queue) -> None:
    async with working(q):
        assert await _two_readers(q) == [list(range(50))] * 2


@pytest.mark.parametrize("way", ["break", "exception", "close", "del"])
async def test_leaving_a_blocking_stream_early_ends_its_body(q: Queue, way: str) -> None:
    def body() -> None:
        for i in endless("left"):
            1 / (i - 5)

    def read() -> None:
        if way == "break":
            for i in endless("left"):
                if i == 5:
                    break
        elif way == "exception":
            with pytest.raises(ZeroDivisionError):
                body()
        else:
            stream: Any = endless("left")
            next(stream)
            if way == "close":
                stream.close()
            del stream

    async with working(q):
        await in_thread(read)
        await wait_until(lambda: ENDED == ["left"], description="the finally of the body")
        await wait_until(lambda: q.count("killed"), description="the end of the invocation")


async def test_leaving_a_stream_with_a_key_leaves_its_invocation_alone(q: Queue) -> None:
    async with working(q):
        shared: Any = endless_async.remote("shared", _key="k")
        await anext(shared)
        await shared.aclose()
        other: Any = endless_async.remote("never", _key="k")
        assert await anext(other) == 0
        del shared, other
        gc.collect()
        for _ in range(20):
            await checkpoint()
        (row,) = await q.list()
        assert (row.state, row.cancel_requested) == ("running", False)
        await q.cancel(row.id, wait=True)
    assert ENDED == ["shared"]


async def test_a_stream_left_during_its_submit_leaves_nothing_that_would_run(q: Queue) -> None:
    for steps in range(25):
        stream: Any = count_async(3)
        async with anyio.create_task_group() as group:
            group.start_soon(anext, stream)
            for _ in range(steps):
                await checkpoint()
            group.cancel_scope.cancel()
        if steps % 2:
            await stream.aclose()
        del stream
        gc.collect()
    await wait_until(lambda: _none_left(q), description="the cancels, which the collector only enqueues")


async def _none_left(q: Queue) -> bool:
    return not [row for row in await q.list() if row.state != "killed"]


async def test_a_cancelled_stream_never_looks_complete(q: Queue) -> None:
    async with working(q):
        stream: Any = endless_async("killed")
        await anext(stream)
        (row,) = await q.list()
        assert await q.cancel(row.id, wait=True)

        async def rest() -> None:
            async for _ in stream:
                pass

        with pytest.raises(InvocationKilled, match="ended killed: Cancelled: cancelled while running"):
            await rest()


AT_THE_END = """
    import functools, sys
    import anyio
    import dreamlake.lakeshore as dls

    @dls.udf(queue="q")
    async def numbers():
        while True:
            yield 1
            await anyio.sleep(0.001)

    async def main():
        plane = dls.Dispatch(sys.argv[1])
        async with anyio.create_task_group() as group:
            group.start_soon(dls.run_worker, dls.Queue("q", dispatch=plane))
            async for number in numbers.remote(_dispatch=plane):
                print(number)
                break
            group.cancel_scope.cancel()

    async def never_asked_to_end():
        plane = dls.Dispatch(sys.argv[1])
        await dls.Queue("q", dispatch=plane).submit(1)
        stream = numbers.remote(_dispatch=plane)
        with anyio.move_on_after(0.1):
            await anext(stream)

    anyio.run(main, backend=sys.argv[2])
    anyio.run(never_asked_to_end, backend=sys.argv[2])
"""


def test_a_stream_left_by_the_last_statement_of_a_program_makes_no_noise(
    tmp_path: Path, anyio_backend_name: str
) -> None:
    process = fresh_python(AT_THE_END, str(tmp_path / "plane.db"), anyio_backend_name)
    out, err = process.communicate(timeout=60)
    assert (out, err, process.returncode) == ("1\n", "", 0)
