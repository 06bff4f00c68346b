"""The four body kinds: how they are told apart, run inside their call's surroundings, and held to their keys."""

from __future__ import annotations

import contextlib
import functools
import gc
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from dreamlake.lakeshore.body.call import GuardedAiter, GuardedIter, body_kind, call_local, run_body
from dreamlake.lakeshore.body.context import invocation_context, run, scope
from dreamlake.lakeshore.errors import KeyContractError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path


def plain(x: int = 0) -> int:
    return x


async def coroutine(x: int = 0) -> int:
    await anyio.lowlevel.checkpoint()
    return x


def generator(x: int = 2) -> Iterator[int]:
    yield from range(x)


async def async_generator(x: int = 2) -> AsyncIterator[int]:
    for n in range(x):
        await anyio.lowlevel.checkpoint()
        yield n


KINDS: list[tuple[Any, str]] = [
    (plain, "def"),
    (coroutine, "async"),
    (generator, "gen"),
    (async_generator, "asyncgen"),
]


class Holder:
    plain, coroutine, generator, async_generator = plain, coroutine, generator, async_generator
    s_plain, s_coroutine = staticmethod(plain), staticmethod(coroutine)
    s_generator, s_async_generator = staticmethod(generator), staticmethod(async_generator)


def logged(fn: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return fn(*args, **kwargs)

    return wrapper


@pytest.mark.parametrize(("fn", "kind"), KINDS)
def test_the_kind_is_seen_through_what_wraps_the_body(fn: Callable[..., Any], kind: str) -> None:
    class Instance:
        __call__ = fn

    shapes: list[Any] = [
        fn,
        functools.partial(fn, 1),
        functools.partial(functools.partial(fn), x=1),
        getattr(Holder(), fn.__name__),
        staticmethod(fn),
        classmethod(fn),
        getattr(Holder, f"s_{fn.__name__}"),
        logged(fn),
        logged(logged(fn)),
        functools.partial(logged(fn)),
        functools.lru_cache(fn),
        Instance(),
    ]
    assert [body_kind(shape) for shape in shapes] == [kind] * len(shapes)


def test_other_callables_give_values() -> None:
    class Strange:
        def __getattr__(self, name: str) -> Any:
            return Strange()

        def __call__(self) -> int:
            return 1

    for fn in (len, int, Holder, lambda: 1, "".join, functools.partial(len), Strange()):
        assert body_kind(fn) == "def"


@pytest.mark.anyio
@pytest.mark.parametrize("wrap", [lambda fn: fn, logged])
async def test_each_kind_gives_its_shape(wrap: Callable[..., Any]) -> None:
    def called(fn: Any, *args: Any) -> Any:
        return call_local(wrap(fn), body_kind(wrap(fn)), args, {})

    assert called(plain, 3) == 3
    assert await called(coroutine, 3) == 3
    items = called(generator, 3)
    assert isinstance(items, GuardedIter)
    assert iter(items) is items
    assert list(items) == [0, 1, 2]
    async_items = called(async_generator, 3)
    assert isinstance(async_items, GuardedAiter)
    assert [item async for item in async_items] == [0, 1, 2]


@pytest.mark.parametrize("fn", [plain, generator, async_generator])
def test_wrong_arguments_are_refused_at_the_call(fn: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'y'"):
        call_local(fn, body_kind(fn), (), {"y": 1})


# --- the surroundings of a generator body ---------------------------------------------------------------------------


def prefixes(steps: int = 3) -> Iterator[str]:
    for n in range(steps):
        with scope(f"step{n}"):
            yield run.prefix
    yield run.prefix


async def async_prefixes(steps: int = 3) -> AsyncIterator[str]:
    for n in range(steps):
        with scope(f"step{n}"):
            await anyio.lowlevel.checkpoint()
            yield run.prefix
    yield run.prefix


def test_a_generator_body_keeps_its_scope_and_never_leaks_it() -> None:
    with scope("call"):
        items = call_local(prefixes, "gen", (), {})
    seen: list[Any] = []
    with scope("consumer"):
        for item in items:
            seen.append((item, run.prefix))
            with scope("between"):
                pass
    assert seen == [
        ("call/step0", "consumer"),
        ("call/step1", "consumer"),
        ("call/step2", "consumer"),
        ("call", "consumer"),
    ]


def test_a_generator_may_be_read_from_several_threads() -> None:
    with scope("call"):
        items = call_local(prefixes, "gen", (1,), {})
    seen: list[str] = []
    for _ in range(2):
        thread = threading.Thread(target=lambda: seen.append(next(items)))
        thread.start()
        thread.join()
    assert seen == ["call/step0", "call"]


@pytest.mark.anyio
async def test_an_async_generator_body_keeps_its_scope_and_never_leaks_it() -> None:
    with scope("call"):
        items = call_local(async_prefixes, "asyncgen", (), {})
    seen: list[Any] = []
    with scope("consumer"):
        seen.extend([(item, run.prefix) async for item in items])
    assert seen == [
        ("call/step0", "consumer"),
        ("call/step1", "consumer"),
        ("call/step2", "consumer"),
        ("call", "consumer"),
    ]


@pytest.mark.anyio
async def test_an_async_generator_may_be_read_in_several_tasks() -> None:
    with scope("call"):
        items = call_local(async_prefixes, "asyncgen", (1,), {})
    seen: list[str] = []

    async def read() -> None:
        seen.append(await anext(items))
        assert run.prefix == ""

    async with contextlib.aclosing(items):
        for _ in range(2):
            async with anyio.create_task_group() as group:
                group.start_soon(read)
    assert seen == ["call/step0", "call"]


@pytest.mark.anyio
async def test_a_coroutine_runs_in_the_scope_of_its_call() -> None:
    async def body() -> str:
        return run.prefix

    with scope("call"):
        pending = call_local(body, "async", (), {})
    with scope("elsewhere"):
        assert await pending == "call"


@pytest.mark.anyio
async def test_a_second_reader_meanwhile_disturbs_nothing() -> None:
    started, go = anyio.Event(), anyio.Event()

    async def body() -> AsyncIterator[str]:
        started.set()
        await go.wait()
        yield run.prefix

    with scope("call"):
        items = call_local(body, "asyncgen", (), {})
    got: list[str] = []

    async def first() -> None:
        with scope("first"):
            got.extend([item async for item in items])
            assert run.prefix == "first"

    async with anyio.create_task_group() as group:
        group.start_soon(first)
        await started.wait()
        with scope("second"):
            with pytest.raises(RuntimeError, match="already running"):
                await anext(items)
            assert run.prefix == "second"
        go.set()
    assert got == ["call"]


# --- return-your-keys -----------------------------------------------------------------------------------------------


def writes(key: str, gives: Any) -> Any:
    run.write(key)
    return gives


async def async_writes(key: str, gives: Any) -> Any:
    run.write(key)
    await anyio.lowlevel.checkpoint()
    return gives


def gen_writes(key: str, *gives: Any) -> Iterator[Any]:
    yield gives[0]
    run.write(key)
    yield from gives[1:]


async def asyncgen_writes(key: str, *gives: Any) -> AsyncIterator[Any]:
    for item in gen_writes(key, *gives):
        await anyio.lowlevel.checkpoint()
        yield item


async def completed(fn: Callable[..., Any], *args: Any) -> Any:
    """Run the body to its end, whatever its kind."""
    kind = body_kind(fn)
    given = call_local(fn, kind, args, {})
    if kind == "async":
        return await given
    if kind == "gen":
        return list(given)
    return [item async for item in given] if kind == "asyncgen" else given


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fn", "verb"),
    [(writes, "return"), (async_writes, "return"), (gen_writes, "yield"), (asyncgen_writes, "yield")],
)
async def test_every_kind_is_held_to_its_keys(tmp_path: Path, fn: Callable[..., Any], verb: str) -> None:
    with scope("p", root=tmp_path):
        await completed(fn, "a", {"deep": ["a", "/data"]})
        with pytest.raises(KeyContractError) as caught:
            await completed(fn, "a", "b")
    assert str(caught.value) == (
        f"function {fn.__name__!r} wrote 'a' through dls.run.write but {verb}ed no such key (strings it {verb}ed: 'b'): "
        f"{verb} each written key, not its path, alone or in a list, tuple or dict's values"
    )


@pytest.mark.anyio
async def test_the_union_of_the_items_counts_also_what_came_before_the_write(tmp_path: Path) -> None:
    with scope(root=tmp_path):
        for fn in (gen_writes, asyncgen_writes):
            assert await completed(fn, "a", "a", 1, 2) == ["a", 1, 2]
            assert await completed(fn, "a", 1, 2, ("a",)) == [1, 2, ("a",)]


@pytest.mark.anyio
async def test_a_failed_body_is_asked_for_no_keys(tmp_path: Path) -> None:
    def fails() -> None:
        run.write("a")
        raise ZeroDivisionError

    async def async_fails() -> None:
        fails()

    def gen_fails() -> Iterator[int]:
        yield 1
        fails()

    async def asyncgen_fails() -> AsyncIterator[int]:
        yield 1
        fails()

    with scope(root=tmp_path):
        for fn in (fails, async_fails, gen_fails, asyncgen_fails):
            with pytest.raises(ZeroDivisionError):
                await completed(fn)
        items, async_items = call_local(gen_fails, "gen", (), {}), call_local(asyncgen_fails, "asyncgen", (), {})
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError):
                assert list(items) in ([1], [])
            with contextlib.suppress(ZeroDivisionError):
                assert [item async for item in async_items] in ([1], [])


def test_the_check_comes_once(tmp_path: Path) -> None:
    with scope(root=tmp_path):
        items = call_local(gen_writes, "gen", ("a", "b"), {})
        assert next(items) == "b"
        with pytest.raises(KeyContractError):
            next(items)
        assert list(items) == []


def test_the_return_value_of_a_generator_is_kept() -> None:
    def body() -> Any:
        yield 1
        return "end"

    def around() -> Any:
        return (yield from call_local(body, "gen", (), {}))

    items = around()
    assert next(items) == 1
    with pytest.raises(StopIteration) as caught:
        next(items)
    assert caught.value.value == "end"


# --- leaving early --------------------------------------------------------------------------------------------------


def test_a_generator_left_early_is_closed_inside_its_scope_and_asked_for_nothing(tmp_path: Path) -> None:
    ended: list[str] = []

    def body() -> Iterator[int]:
        try:
            run.write("a")
            yield 1
            yield 2
        finally:
            ended.append(run.prefix)

    with scope("call", root=tmp_path):
        items = call_local(body, "gen", (), {})
        with contextlib.closing(items):
            assert next(items) == 1
        assert ended == ["call"]
        assert list(items) == []
        for _ in call_local(body, "gen", (), {}):
            break
        gc.collect()
        assert ended == ["call", "call"]
        call_local(body, "gen", (), {}).close()  # never started: its body never runs
    assert len(ended) == 2


def test_a_body_that_the_collector_closes_leaves_its_scope_there() -> None:
    for _ in range(20):
        items = call_local(prefixes, "gen", (), {})
        next(items)
        cycle: list[Any] = [items]
        cycle.append(cycle)
        del items, cycle
        with scope("consumer"):
            gc.collect()
            assert run.prefix == "consumer"


COLLECTED = """
import gc
from dreamlake.lakeshore.body.call import call_local
from dreamlake.lakeshore.body.context import ContextRecord, _current, run, scope

def body():
    with scope("deep"):
        yield

idle = ContextRecord()
records = [ContextRecord(prefix=str(n)) for n in range(20)]
gc.disable()
for turn in range(10000):
    items = call_local(body, "gen", (), {})
    next(items)
    cycle = [items]
    cycle.append(cycle)
    del items, cycle
    gc.set_threshold(gc.get_count()[0] + 1 + turn % 7)
    gc.enable()
    for record in records:
        _current.set(record)  # allocates; on 3.11 the collector may close the body in the middle of it
        assert _current.get() is record
    gc.disable()
    _current.set(idle)
"""


def test_generators_that_the_collector_closes_disturb_nobody() -> None:
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", COLLECTED], capture_output=True, timeout=100)
    assert (done.returncode, done.stderr.decode()) == (0, "")


@pytest.mark.anyio
async def test_an_async_generator_left_early_is_closed_inside_its_scope(tmp_path: Path) -> None:
    ended: list[str] = []

    async def body() -> AsyncIterator[int]:
        try:
            run.write("a")
            yield 1
            yield 2
        finally:
            await anyio.lowlevel.checkpoint()
            ended.append(run.prefix)

    with scope("call", root=tmp_path):
        items = call_local(body, "asyncgen", (), {})
        with scope("consumer"):
            async with contextlib.aclosing(items):
                assert await anext(items) == 1
            assert run.prefix == "call/consumer"
        assert ended == ["call"]
        assert [item async for item in items] == []
        await call_local(body, "asyncgen", (), {}).aclose()
    assert ended == ["call"]


@pytest.mark.anyio
async def test_cancelling_a_read_cancels_the_body(tmp_path: Path) -> None:
    ended: list[str] = []

    async def body() -> AsyncIterator[int]:
        try:
            run.write("a")
            cancelled.cancel()
            await anyio.sleep_forever()
            yield 1
        finally:
            ended.append(run.prefix)

    with scope("call", root=tmp_path):
        items = call_local(body, "asyncgen", (), {})
        with anyio.CancelScope() as cancelled:
            await anext(items)
        assert cancelled.cancelled_caught
        assert ended == ["call"]
        assert run.prefix == "call"
        with pytest.raises(StopAsyncIteration):
            await anext(items)


@pytest.mark.anyio
async def test_iterables_that_are_no_generators_serve_as_bodies() -> None:
    class Countdown:
        def __init__(self) -> None:
            self.left = 2

        def __iter__(self) -> Countdown:
            return self

        def __aiter__(self) -> Countdown:
            return self

        def __next__(self) -> int:
            self.left -= 1
            if self.left < 0:
                raise StopIteration
            return self.left

        async def __anext__(self) -> int:
            try:
                return next(self)
            except StopIteration:
                raise StopAsyncIteration from None

    items, async_items = call_local(Countdown, "gen", (), {}), call_local(Countdown, "asyncgen", (), {})
    assert list(items) == [1, 0]
    assert [item async for item in async_items] == [1, 0]
    items.close()
    await async_items.aclose()
    with pytest.raises(TypeError, match="'int' object is not iterable"):
        call_local(plain, "gen", (), {})
    gc.collect()


@pytest.mark.anyio
async def test_a_worker_runs_the_same_bodies_in_its_own_surroundings(tmp_path: Path) -> None:
    def surroundings() -> Any:
        return run.prefix, run.root, run.invocation_id, run.attempt

    async def async_surroundings() -> Any:
        return surroundings()

    def gen_surroundings() -> Iterator[Any]:
        yield surroundings()

    async def asyncgen_surroundings() -> AsyncIterator[Any]:
        yield surroundings()

    def given(fn: Callable[..., Any]) -> Any:
        return run_body(invocation_context(tmp_path, "p", "01ABC", 3), fn, body_kind(fn), (), {})

    seen = [given(surroundings), await given(async_surroundings), *given(gen_surroundings)]
    seen += [item async for item in given(asyncgen_surroundings)]
    assert seen == [("p", tmp_path, "01ABC", 3)] * 4
    assert run.invocation_id is None
