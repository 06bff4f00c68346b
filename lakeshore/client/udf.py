"""`@dls.udf`: whether calling a function runs it here or submits it somewhere else.

A local call needs none of what a remote one needs, so that stands in imports inside functions.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

from ..body.call import body_kind, call_local
from ..errors import TransportError
from ..functions.serialize import importable
from ..functions.source import note_source
from .thunk import Thunk

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from typing import Self

    from ..body.call import BodyKind
    from ..planes.contract.operations import Submit
    from ..planes.plane import Plane

__all__ = ["UDF", "Decorator", "Entry", "udf"]

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

TRANSPORTS = ("auto", "ref", "pickle")
PRIVATE = ("_dispatch", "_key", "_priority")
_METHODS: tuple[type[Any], ...] = (staticmethod, classmethod)
_SHAPES: dict[BodyKind, str] = {"def": "def", "async": "async def", "gen": "def, yield", "asyncgen": "async def, yield"}


class Entry(Generic[P, T_co]):
    """`f.submit` or `f.remote`: takes the function's own arguments and three of its own, keywords all.

    _dispatch: the plane, in place of the process's. _key: an idempotency key: of several submits to the queue with one
    key the first wins. _priority: higher goes first. With one of them given, type checkers let the other arguments pass
    unchecked; `q.submit(dls.thunk(f, x), key=..., priority=...)` is the spelling in which they check all of it.
    """

    __slots__ = ("_start",)

    def __init__(self, start: Callable[[tuple[Any, ...], dict[str, Any]], T_co]) -> None:
        self._start = start

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...
    @overload
    def __call__(
        self, *args: Any, _dispatch: Plane, _key: str | None = ..., _priority: float = ..., **kwargs: Any
    ) -> T_co: ...
    @overload
    def __call__(
        self, *args: Any, _key: str, _dispatch: Plane | None = ..., _priority: float = ..., **kwargs: Any
    ) -> T_co: ...
    @overload
    def __call__(
        self, *args: Any, _priority: float, _dispatch: Plane | None = ..., _key: str | None = ..., **kwargs: Any
    ) -> T_co: ...
    def __call__(self, *args: Any, **kwargs: Any) -> T_co:
        return self._start(args, kwargs)


class _Submit:
    """Reads off the body kind what `.submit` gives: async bodies a coroutine of the id, the others the id."""

    @overload
    def __get__(self, udf: None, owner: Any, /) -> Self: ...
    @overload
    def __get__(self, udf: UDF[P, Coroutine[Any, Any, Any]], owner: Any, /) -> Entry[P, Coroutine[Any, Any, str]]: ...
    @overload
    def __get__(self, udf: UDF[P, AsyncIterator[Any]], owner: Any, /) -> Entry[P, Coroutine[Any, Any, str]]: ...
    @overload
    def __get__(self, udf: UDF[P, Any], owner: Any, /) -> Entry[P, str]: ...
    def __get__(self, udf: UDF[P, Any] | None, owner: Any, /) -> Any:
        return self if udf is None else Entry(udf._submit)


class UDF(Generic[P, R_co]):
    """A function, and where calling it runs it: without a queue here, with one wherever a worker of that queue is.

    `f(...)` calls it there, `f.local(...)` always here, `f.remote(...)` always through the queue; `f.submit(...)` gives
    the id of the invocation at once. The kind of the body decides what a call gives, here and there: a value, a
    coroutine, an iterator or an async iterator. `.is_async`, `.is_gen` and `.is_asyncgen` say which; `f.submit` of an
    async body is a coroutine.

    A remote call waits as long as it takes; leaving it cancels the invocation, unless it has a key. It raises
    InvocationFailed, PlaneUnavailable, EncodeError for arguments and TransportError for a function that cannot cross.
    """

    __lakeshore_udf__ = True

    __wrapped__: Callable[P, R_co]
    _raw: Any  # what was decorated: perhaps a static or class method
    __name__: str
    __qualname__: str

    def __init__(self, fn: Callable[P, R_co], queue: str | None = None, transport: str = "auto") -> None:
        raw, function = _unwrapped(fn)
        _check(function, queue, transport)
        self.__dict__.update({name: value for name, value in _attributes(function) if not hasattr(UDF, name)})
        functools.update_wrapper(self, function, updated=())
        self._raw, self.queue, self.transport = raw, queue, transport
        # A partial in a class takes no self, on any Python: the one that is about to change that only warns so far.
        binds = None if isinstance(raw, functools.partial) else getattr(raw.__class__, "__get__", None)
        self._bind: Callable[..., Any] | None = binds
        self._kind: BodyKind = body_kind(function)
        self.is_async, self.is_gen = self._kind == "async", self._kind == "gen"
        self.is_asyncgen = self._kind == "asyncgen"
        self._takes = _blank(function)
        note_source(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        local = self.queue is None
        value: R_co = call_local(self.__wrapped__, self._kind, args, kwargs) if local else self._call(args, kwargs)
        return value

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here, whether or not it has a queue."""
        value: R_co = call_local(self.__wrapped__, self._kind, args, kwargs)
        return value

    @property
    def remote(self) -> Entry[P, R_co]:
        """Call the function through its queue. TypeError without one."""
        return Entry(cast("Callable[[tuple[Any, ...], dict[str, Any]], R_co]", self._call))

    submit = _Submit()

    def __repr__(self) -> str:
        where = "" if self.queue is None else f" on queue {self.queue!r}"
        return f"<udf {self.__module__}.{getattr(self, '__qualname__', '?')} ({_SHAPES[self._kind]}){where}>"

    # Through the queue

    def _operation(self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Plane, Submit]:
        """The plane, and the submit; what is wrong with it shows here, before anything is sent or awaited."""
        from .queue import plane_of, submission

        name = getattr(self, "__name__", "f")
        if self.queue is None:
            raise TypeError(
                f"{name}.{verb}() needs a queue to submit to: decorate it with @dls.udf(queue=...), or submit "
                f"dls.thunk({name}, ...) to a queue of your choice"
            )
        options = {option: kwargs.pop(option, None) for option in PRIVATE}
        if self._takes is not None:
            bound: Any = self.__wrapped__
            self._takes(*((bound.__self__, *args) if type(bound) is MethodType else args), **kwargs)
        plane = plane_of(options["_dispatch"])
        return plane, submission(self.queue, Thunk(self, args, kwargs), options["_key"], options["_priority"] or 0)

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plane, op = self._operation("submit", args, kwargs)
        if self.is_async or self.is_asyncgen:
            return _submit(plane, op)
        from .sync_queue import sync_submit

        return sync_submit(plane, op, self._hint("await {q}.submit({thunk})"))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plane, op = self._operation("remote", args, kwargs)
        if self.is_async:
            from .queue import call

            return call(plane, op)
        if self.is_asyncgen:
            from .streams import CallValues

            return CallValues(plane, op)
        from .sync_queue import SyncCallValues, sync_call

        if self.is_gen:
            return SyncCallValues(plane, op, self._hint("async for value in {q}.stream(await {q}.submit({thunk}))"))
        return sync_call(plane, op, self._hint("await {q}.call({thunk})"))

    def _hint(self, spelling: str) -> str:
        """The async spelling, for those who block their loop."""
        name = getattr(self, "__name__", "f")
        return spelling.format(q=f"dls.Queue({self.queue!r})", thunk=f"dls.thunk({name}, ...)")

    # As a method

    # Checkers see static methods right through their class, class methods through an instance: what they hand to a
    # decorator are plain functions, and nothing that both understand tells these two from methods.
    @overload
    def __get__(self, instance: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self: UDF[Concatenate[Any, Q], T], instance: object, owner: type[Any] | None = None) -> UDF[Q, T]: ...
    def __get__(self, instance: object | None, owner: type[Any] | None = None) -> Any:
        target: Any = self._bind(self._raw, instance, owner) if self._bind else self
        if target is self._raw or target is self.__wrapped__ or target is self:
            return self
        bound = cast("UDF[..., Any]", object.__new__(UDF))
        bound.__dict__.update(self.__dict__)
        bound._raw = bound.__wrapped__ = target
        bound._bind = None
        return bound

    # In pickles: by its name where that leads back to it, else by the function inside

    def __reduce__(self) -> tuple[Any, ...]:
        if importable(self):
            return _named, (self.__module__, self.__qualname__)
        return UDF, (self._raw, self.queue, self.transport)


def _named(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


async def _submit(plane: Plane, op: Submit) -> str:
    id = await plane.do(op)
    return id


_NOTHING = (lambda: None).__code__


def _blank(function: Callable[..., Any]) -> Callable[..., None] | None:
    """A function with the parameters of this one that does nothing, to raise the TypeError that a call of it would.

    A tenth of the time of `inspect.Signature.bind`, and the interpreter's own sentence. None where the parameters
    cannot be told: builtins, partials, instances. A wrapper is asked for its own, not for those of what it wraps.
    """
    plain = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(plain, FunctionType):
        return None
    code, stars = plain.__code__, inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
    count = code.co_argcount + code.co_kwonlyargcount + (code.co_flags & stars).bit_count()
    parameters = _NOTHING.replace(
        co_argcount=code.co_argcount,
        co_posonlyargcount=code.co_posonlyargcount,
        co_kwonlyargcount=code.co_kwonlyargcount,
        co_varnames=code.co_varnames[:count],
        co_nlocals=count,
        co_flags=_NOTHING.co_flags | (code.co_flags & stars),
    )
    blank = FunctionType(parameters, {}, plain.__name__, plain.__defaults__)
    blank.__kwdefaults__, blank.__qualname__ = plain.__kwdefaults__, plain.__qualname__
    return blank


def _unwrapped(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """What was decorated, out of another UDF; and the callable itself, out of a static or class method."""
    raw: Any = cast("Any", fn)._raw if isinstance(fn, UDF) else fn
    function = raw.__func__ if isinstance(raw, _METHODS) else raw
    if not callable(function):
        raise TypeError(
            f"expected a function to decorate, got {fn!r:.100}: write @dls.udf, @dls.udf(queue='gpu') "
            "or dls.udf(f, queue='gpu')"
        )
    return raw, cast("Callable[..., Any]", function)


def _attributes(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """What decorators and authors have hung on the function."""
    return list(getattr(function, "__dict__", {}).items())


def _check(function: Callable[..., Any], queue: object, transport: str) -> None:
    if queue is not None and (not isinstance(queue, str) or not queue):
        raise TypeError(f"expected queue= to be the name of a queue or None, got {queue!r:.100}")
    if transport not in TRANSPORTS:
        raise TransportError(f"expected transport 'auto', 'ref' or 'pickle', got {transport!r:.100}")
    try:
        taken = [name for name in inspect.signature(function).parameters if name in PRIVATE]
    except (TypeError, ValueError):  # some builtins have none
        return
    if taken:
        raise TypeError(
            f"parameter {taken[0]!r} of {getattr(function, '__qualname__', function)!r}: {', '.join(PRIVATE)} are "
            "keywords of .submit and .remote themselves; give it another name"
        )


class Decorator:
    """`@dls.udf(queue="gpu")`, waiting for its function."""

    def __init__(self, queue: str | None, transport: str) -> None:
        self._queue, self._transport = queue, transport

    def __call__(self, fn: Callable[P, T], /) -> UDF[P, T]:
        return UDF(fn, self._queue, self._transport)


@overload
def udf(fn: Callable[P, T], *, queue: str | None = None, transport: str = "auto") -> UDF[P, T]: ...
@overload
def udf(*, queue: str | None = None, transport: str = "auto") -> Decorator: ...
def udf(fn: Any = None, *, queue: str | None = None, transport: str = "auto") -> Any:
    """Make a function callable through a queue: `@dls.udf`, `@dls.udf(queue="gpu")` or `dls.udf(f, queue="gpu")`.

    queue: where its calls go; None: they run here. transport: how the function crosses: "ref" by its name, which the
    worker imports; "pickle" by value, as it is at the submit; "auto": by its name where that leads back to it, else by
    value. On methods, static and class methods it stands outermost. How often a call is tried, for how long, and where,
    is the queue's and the worker's matter. Raises TypeError when a parameter is called `_key`, `_priority` or
    `_dispatch`, TransportError for another transport.
    """
    return Decorator(queue, transport) if fn is None else UDF(fn, queue, transport)
