"""Running a body here: the four kinds, each inside its call's surroundings and held to return-your-keys at its end.

A local UDF call and a worker do the same with a body; they differ in the surroundings only, which are a `Call`.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from .context import call_scope

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from .context import Call

__all__ = ["BodyKind", "GuardedAiter", "GuardedIter", "body_kind", "call_local", "run_body"]

T = TypeVar("T")

_DEEPEST = 100  # wrappers around wrappers; some objects claim to have any attribute, and would lead on for ever

BodyKind = Literal["def", "async", "gen", "asyncgen"]


_BY_FLAGS: dict[int, BodyKind] = {CO_COROUTINE: "async", CO_GENERATOR: "gen", CO_ASYNC_GENERATOR: "asyncgen"}


def body_kind(fn: Callable[..., Any]) -> BodyKind:
    """What calling `fn` gives: a value, a coroutine, an iterator or an async iterator.

    Looks through partials, bound, static and class methods, instances with `__call__`, and plain wrappers that name
    what they wrap (`functools.wraps`): such a wrapper hands on what the inner function gives.
    """
    if type(fn) is FunctionType and not fn.__dict__:  # nothing wrapped, nothing marked: its flags say it
        return _BY_FLAGS.get(fn.__code__.co_flags & (CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR), "def")
    one: Any = fn
    for _ in range(_DEEPEST):
        if inspect.isasyncgenfunction(one):
            return "asyncgen"
        if inspect.iscoroutinefunction(one):
            return "async"
        if inspect.isgeneratorfunction(one):
            return "gen"
        one = _inner(one)
        if one is None:
            break
    return "def"


def _inner(fn: Any) -> Any:
    """What a callable that is no coroutine or generator function itself passes its calls on to, or None."""
    if isinstance(fn, functools.partial):
        return cast("Any", fn.func)
    if isinstance(fn, (staticmethod, classmethod)) or inspect.ismethod(fn):
        return cast("Any", fn).__func__
    if isinstance(fn, type):
        return None
    wrapped = getattr(fn, "__wrapped__", None)
    if wrapped is not None or inspect.isroutine(fn):
        return wrapped
    return type(fn).__call__


def call_local(fn: Callable[..., Any], kind: BodyKind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call `fn` here and give what its body kind gives: value, coroutine, iterator or async iterator.

    The body sees the scope that was in force at this call. A completed body that did not give back a key it wrote
    raises KeyContractError at its end; a body that failed or was left early is not asked.
    """
    return run_body(call_scope(), fn, kind, args, kwargs)


def run_body(call: Call, fn: Callable[..., Any], kind: BodyKind, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same inside given surroundings."""
    if kind == "def":
        value = call.step(fn, *args, **kwargs)
        call.check_value(value, fn)
        return value
    if kind == "async":
        return _run_async(call, fn, args, kwargs)
    guarded: type[GuardedIter[Any] | GuardedAiter[Any]] = GuardedIter if kind == "gen" else GuardedAiter
    return guarded(call, call.step(fn, *args, **kwargs), fn)


async def _run_async(call: Call, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value = await call.astep(fn, *args, **kwargs)
    call.check_value(value, fn)
    return value


class GuardedIter(Generic[T]):
    """The iterator of a generator body: the call's surroundings are in force while the body runs, never in between.

    After the last item the written keys are checked against all that was yielded. `close`, and the collection of an
    iterator that was left early, close the body without that check. The body's return value ends up in StopIteration.
    """

    __slots__ = ("__weakref__", "_body", "_call", "_checked", "_fn")

    def __init__(self, call: Call, body: Any, fn: object) -> None:
        self._checked, self._call, self._fn = False, call, fn
        self._body: Iterator[T] = iter(body)

    def __iter__(self) -> GuardedIter[T]:
        return self

    def __next__(self) -> T:
        try:
            item = self._call.step(self._body.__next__)
        except StopIteration:
            if not self._checked:
                self._checked = True
                self._call.check(self._fn)
            raise
        except BaseException:
            self._checked = True  # it did not complete
            raise
        self._call.see(item)
        return item

    def close(self) -> None:
        """End the body, whose `finally` blocks run now, and ask for no keys."""
        self._checked = True
        close = getattr(self._body, "close", None)
        if close is not None:
            self._call.step(close)

    def __del__(self) -> None:
        if hasattr(self, "_body"):  # not when there was nothing to iterate over
            # In a context of its own: on 3.11 the collector may run this in the middle of somebody's ContextVar.set,
            # and another set in the same context then crashes the interpreter.
            contextvars.copy_context().run(self.close)


class GuardedAiter(Generic[T]):
    """The async iterator of an async generator body, with the same rules.

    Leaving it by `break` closes the body only when the loop's collector comes to it: `contextlib.aclosing` does it at
    once. Cancelling `anext` cancels the body where it waits.
    """

    __slots__ = ("__weakref__", "_body", "_call", "_checked", "_fn")

    def __init__(self, call: Call, body: Any, fn: object) -> None:
        self._checked, self._call, self._fn = False, call, fn
        self._body: AsyncIterator[T] = aiter(body)

    def __aiter__(self) -> GuardedAiter[T]:
        return self

    async def __anext__(self) -> T:
        try:
            item = await self._call.astep(self._body.__anext__)
        except StopAsyncIteration:
            if not self._checked:
                self._checked = True
                self._call.check(self._fn)
            raise
        except BaseException:
            self._checked = True
            raise
        self._call.see(item)
        return item

    async def aclose(self) -> None:
        """End the body, whose `finally` blocks run now, and ask for no keys. Cancelling it cancels those blocks."""
        self._checked = True
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await self._call.astep(close)
