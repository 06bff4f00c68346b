"""Run a body of any of the four kinds: inside the context of its call, with its returned keys checked at the end.

A local UDF call and a worker run bodies in the same way. Only the `BodyContext` differs.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar, cast

from .context import local_context

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    from .context import BodyContext

__all__ = ["BodyKind", "GuardedAiter", "GuardedIter", "body_kind", "call_local", "run_body"]

T = TypeVar("T")

_MAX_WRAPPERS = 100  # wrappers around wrappers: some objects have any attribute, and would lead on for ever

BodyKind = Literal["def", "async", "gen", "asyncgen"]

_BY_FLAGS: dict[int, BodyKind] = {CO_COROUTINE: "async", CO_GENERATOR: "gen", CO_ASYNC_GENERATOR: "asyncgen"}


def body_kind(fn: Callable[..., Any]) -> BodyKind:
    """Return which of the four kinds of body `fn` is: that decides what a call returns.

    Unwraps partials, bound, static and class methods, instances with `__call__`, and plain wrappers that name what they
    wrap (`functools.wraps`): such a wrapper returns what the inner function returns.
    """
    if type(fn) is FunctionType and not fn.__dict__:  # nothing wrapped, nothing marked: its flags are enough
        return _BY_FLAGS.get(fn.__code__.co_flags & (CO_COROUTINE | CO_GENERATOR | CO_ASYNC_GENERATOR), "def")
    one: Any = fn
    for _ in range(_MAX_WRAPPERS):
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
    """The callable to which a callable of none of these kinds passes its calls on, or None."""
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
    """Call `fn` here; its kind decides what is returned: a value, a coroutine, an iterator or an async iterator.

    The body sees the `dls.scope` that is in force at this call. A body that completes without returning a key that it
    wrote raises KeyContractError. A body that fails, or is closed early, is not checked.
    """
    return run_body(local_context(), fn, kind, args, kwargs)


def run_body(
    context: BodyContext, fn: Callable[..., Any], kind: BodyKind, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Do the same inside a given context."""
    if kind == "def":
        value = context.step(fn, *args, **kwargs)
        context.check_value(value, fn)
        return value
    if kind == "async":
        return _run_async(context, fn, args, kwargs)
    guarded: type[GuardedIter[Any] | GuardedAiter[Any]] = GuardedIter if kind == "gen" else GuardedAiter
    return guarded(context, context.step(fn, *args, **kwargs), fn)


async def _run_async(
    context: BodyContext, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    value = await context.astep(fn, *args, **kwargs)
    context.check_value(value, fn)
    return value


class GuardedIter(Generic[T]):
    """The iterator over a generator body. The context of the call is in force while the body runs, never in between.

    After the last item the written keys are checked against everything that was yielded. `close` closes the body without
    that check, and so does the garbage collection of an iterator that was not read to its end. The body's return value is
    the value of StopIteration.
    """

    __slots__ = ("__weakref__", "_body", "_checked", "_context", "_fn")

    def __init__(self, context: BodyContext, body: Any, fn: object) -> None:
        self._checked = False
        self._context = context
        self._fn = fn
        self._body: Iterator[T] = iter(body)

    def __iter__(self) -> GuardedIter[T]:
        return self

    def __next__(self) -> T:
        try:
            item = self._context.step(self._body.__next__)
        except StopIteration:
            if not self._checked:
                self._checked = True
                self._context.check_yielded(self._fn)
            raise
        except BaseException:
            self._checked = True  # it did not complete
            raise
        self._context.add_yielded(item)
        return item

    def close(self) -> None:
        """Close the body, whose `finally` blocks run now, without checking its keys."""
        self._checked = True
        close = getattr(self._body, "close", None)
        if close is not None:
            self._context.step(close)

    def __del__(self) -> None:
        if hasattr(self, "_body"):  # not when there was nothing to iterate over
            # In a contextvars context of its own: on 3.11 the collector may run this in the middle of a ContextVar.set,
            # and another set in the same context then crashes the interpreter.
            contextvars.copy_context().run(self.close)


class GuardedAiter(Generic[T]):
    """The async iterator over an async generator body, with the same rules.

    After a `break` the body is closed only when the event loop finalizes it; `contextlib.aclosing` closes it at once.
    Cancelling `anext` cancels the body where it waits.
    """

    __slots__ = ("__weakref__", "_body", "_checked", "_context", "_fn")

    def __init__(self, context: BodyContext, body: Any, fn: object) -> None:
        self._checked = False
        self._context = context
        self._fn = fn
        self._body: AsyncIterator[T] = aiter(body)

    def __aiter__(self) -> GuardedAiter[T]:
        return self

    async def __anext__(self) -> T:
        try:
            item = await self._context.astep(self._body.__anext__)
        except StopAsyncIteration:
            if not self._checked:
                self._checked = True
                self._context.check_yielded(self._fn)
            raise
        except BaseException:
            self._checked = True
            raise
        self._context.add_yielded(item)
        return item

    async def aclose(self) -> None:
        """Close the body, whose `finally` blocks run now, without checking its keys. Cancelling it cancels those blocks."""
        self._checked = True
        close = getattr(self._body, "aclose", None)
        if close is not None:
            await self._context.astep(close)
