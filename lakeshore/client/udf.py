"""`@dls.udf`: a function, and whether a call runs it here or submits it to a queue.

A local call needs nothing of `remote_udf`, which is therefore imported at the first remote one.
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

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine
    from typing import Self

    from ..body.call import BodyKind
    from ..planes.plane import Plane

__all__ = ["UDF", "Decorator", "Entry", "udf"]

P = ParamSpec("P")
Q = ParamSpec("Q")
T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

TRANSPORTS = ("auto", "ref", "pickle")
OPTIONS = ("_dispatch", "_key", "_priority")
"""Keywords of `.submit` and `.remote` themselves, which no function may have as parameters."""
_METHODS: tuple[type[Any], ...] = (staticmethod, classmethod)
_SHAPES: dict[BodyKind, str] = {"def": "def", "async": "async def", "gen": "def, yield", "asyncgen": "async def, yield"}


class Entry(Generic[P, T_co]):
    """`f.submit` or `f.remote`: takes the function's own arguments, and three keywords of its own.

    With one of the three, type checkers do not check the other arguments; in the spelling
    `q.submit(dls.thunk(f, x), key=..., priority=...)` they check all of them.

    Args:
        _dispatch: The plane; None: that of the process.
        _key: The idempotency key. Of several submits to the queue with one key the first wins.
        _priority: Higher goes first.
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
    """The descriptor of `.submit`, which returns a coroutine of the id for async bodies, and the id for the others."""

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
    """A function, and where a call runs it: here without a queue, or on any worker of its queue.

    `f(...)` calls it there, `f.local(...)` always here, `f.remote(...)` always through the queue. `f.submit(...)` returns
    the id of the invocation at once. The kind of the body decides what a call returns, here and there: a value, a
    coroutine, an iterator or an async iterator; `.is_async`, `.is_gen` and `.is_asyncgen` name the kind. `f.submit` of an
    async body returns a coroutine.

    A remote call waits as long as it takes. Cancelling it, or closing its iterator, cancels the invocation, unless the
    call has a key.

    Raises:
        InvocationFailed: The invocation ended in another state than `succeeded`.
        PlaneUnavailable: The plane does not answer.
        EncodeError: An argument cannot be packed.
        TransportError: The function cannot be sent to a worker.
    """

    __lakeshore_udf__ = True

    __wrapped__: Callable[P, R_co]
    _raw: Any  # what was decorated: maybe a static or class method
    __name__: str
    __qualname__: str

    def __init__(self, fn: Callable[P, R_co], queue: str | None = None, transport: str = "auto") -> None:
        raw, function = _unwrapped(fn)
        _check_decoration(function, queue, transport)
        self.__dict__.update({name: value for name, value in _attributes(function) if not hasattr(UDF, name)})
        functools.update_wrapper(self, function, updated=())
        self._raw = raw
        self.queue = queue
        self.transport = transport
        self._bind: Callable[..., Any] | None = None
        if not isinstance(raw, functools.partial):  # in a class a partial takes no self, whatever the Python
            self._bind = getattr(raw.__class__, "__get__", None)
        self._kind: BodyKind = body_kind(function)
        self.is_async = self._kind == "async"
        self.is_gen = self._kind == "gen"
        self.is_asyncgen = self._kind == "asyncgen"
        self._signature = _own_signature(function)
        note_source(function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        if self.queue is not None:
            return cast("R_co", self._call(args, kwargs))
        value: R_co = call_local(self.__wrapped__, self._kind, args, kwargs)
        return value

    def local(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Call the function here, whether or not it has a queue."""
        value: R_co = call_local(self.__wrapped__, self._kind, args, kwargs)
        return value

    @property
    def remote(self) -> Entry[P, R_co]:
        """Call the function through its queue. Raises TypeError when it has none."""
        return Entry(cast("Callable[[tuple[Any, ...], dict[str, Any]], R_co]", self._call))

    submit = _Submit()

    def __repr__(self) -> str:
        where = "" if self.queue is None else f" on queue {self.queue!r}"
        return f"<udf {self.__module__}.{getattr(self, '__qualname__', '?')} ({_SHAPES[self._kind]}){where}>"

    # Through the queue

    def _submit(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from .remote_udf import submit_udf

        dispatch, key, priority = self._take_options("submit", args, kwargs)
        return submit_udf(self, args, kwargs, dispatch, key, priority)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        from .remote_udf import call_udf

        dispatch, key, priority = self._take_options("remote", args, kwargs)
        return call_udf(self, args, kwargs, dispatch, key, priority)

    def _take_options(
        self, verb: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Plane | None, str | None, float]:
        """Take the three options out of `kwargs`. Raises TypeError where a call of the function itself would."""
        if self.queue is None:
            name = getattr(self, "__name__", "f")
            raise TypeError(
                f"{name}.{verb}() needs a queue to submit to: decorate it with @dls.udf(queue=...), or submit "
                f"dls.thunk({name}, ...) to a queue of your choice"
            )
        dispatch = kwargs.pop("_dispatch", None)
        key = kwargs.pop("_key", None)
        priority = kwargs.pop("_priority", None) or 0
        if self._signature is not None:
            bound: Any = self.__wrapped__
            own = (bound.__self__, *args) if type(bound) is MethodType else args
            try:
                self._signature.bind(*own, **kwargs)
            except TypeError as exc:
                raise TypeError(f"{bound.__qualname__}(): {exc}") from None
        return dispatch, key, priority

    # As a method

    # Type checkers are right about static methods that are reached through the class, and about class methods that are
    # reached through an instance: a decorator gets plain functions from them, and nothing tells these two from methods.
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

    # In pickles: by its name where that leads back to it, by the function inside otherwise

    def __reduce__(self) -> tuple[Any, ...]:
        if importable(self):
            return _named, (self.__module__, self.__qualname__)
        return UDF, (self._raw, self.queue, self.transport)


def _named(module: str, qualname: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in qualname.split("."):
        found = getattr(found, part)
    return found


def _own_signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """The parameters of the function: of a wrapper its own, not those of what it wraps.

    None where they are not known: of builtins, partials and instances, and of a function that declares a signature.
    """
    plain = function.__func__ if isinstance(function, MethodType) else function
    if not isinstance(plain, FunctionType) or hasattr(plain, "__signature__"):
        return None
    return inspect.signature(plain, follow_wrapped=False)


def _unwrapped(fn: Any) -> tuple[Any, Callable[..., Any]]:
    """What was decorated, taken out of another UDF; and the callable itself, taken out of a static or class method."""
    raw: Any = cast("Any", fn)._raw if isinstance(fn, UDF) else fn
    function = raw.__func__ if isinstance(raw, _METHODS) else raw
    if not callable(function):
        raise TypeError(
            f"expected a function to decorate, got {fn!r:.100}: write @dls.udf, @dls.udf(queue='gpu') "
            "or dls.udf(f, queue='gpu')"
        )
    return raw, cast("Callable[..., Any]", function)


def _attributes(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    """The attributes that decorators and authors have set on the function."""
    return list(getattr(function, "__dict__", {}).items())


def _check_decoration(function: Callable[..., Any], queue: object, transport: str) -> None:
    if queue is not None and (not isinstance(queue, str) or not queue):
        raise TypeError(f"expected queue= to be the name of a queue or None, got {queue!r:.100}")
    if transport not in TRANSPORTS:
        raise TransportError(f"expected transport 'auto', 'ref' or 'pickle', got {transport!r:.100}")
    try:
        taken = [name for name in inspect.signature(function).parameters if name in OPTIONS]
    except (TypeError, ValueError):  # some builtins have none
        return
    if taken:
        raise TypeError(
            f"parameter {taken[0]!r} of {getattr(function, '__qualname__', function)!r}: {', '.join(OPTIONS)} are "
            "keywords of .submit and .remote themselves; give it another name"
        )


class Decorator:
    """What `@dls.udf(queue="gpu")` returns: it takes the function."""

    def __init__(self, queue: str | None, transport: str) -> None:
        self._queue = queue
        self._transport = transport

    def __call__(self, fn: Callable[P, T], /) -> UDF[P, T]:
        return UDF(fn, self._queue, self._transport)


@overload
def udf(fn: Callable[P, T], *, queue: str | None = None, transport: str = "auto") -> UDF[P, T]: ...
@overload
def udf(*, queue: str | None = None, transport: str = "auto") -> Decorator: ...
def udf(fn: Any = None, *, queue: str | None = None, transport: str = "auto") -> Any:
    """Make a function callable through a queue: `@dls.udf`, `@dls.udf(queue="gpu")` or `dls.udf(f, queue="gpu")`.

    On methods, static and class methods it is the outermost decorator. Retries, timeouts and the place where a call runs
    are matters of the queue and its workers.

    Args:
        fn: The function.
        queue: The queue of its calls; None: they run here.
        transport: How the function is sent. "ref": by its name, which the worker imports. "pickle": by value, as it is at
            the submit. "auto": by its name where that leads back to it, by value otherwise.

    Raises:
        TypeError: `fn` is not callable, or a parameter of it is called `_key`, `_priority` or `_dispatch`.
        TransportError: The transport is not one of the three.
    """
    return Decorator(queue, transport) if fn is None else UDF(fn, queue, transport)
