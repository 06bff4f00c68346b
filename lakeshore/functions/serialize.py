"""How a callable crosses to a worker: by reference when its name leads back to it, else by value; and thunks.

Only the callable is ever pickled. Arguments go through the wire codec, into an Envelope.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Protocol, TypeGuard, TypeVar, cast
from weakref import WeakKeyDictionary

from ..body.call import BodyKind, body_kind
from ..body.context import current_invocation, run
from ..errors import TransportError
from ..ids import new_id
from .source import loaded_source, note_source, source_hash

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ..wire import Envelope

__all__ = [
    "INLINE_PICKLE_LIMIT",
    "BodyKind",
    "Thunk",
    "UDFLike",
    "body_kind",
    "build_fn",
    "importable",
    "is_udf",
    "note_source",
    "source_hash",
    "thunk",
]

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

INLINE_PICKLE_LIMIT = 32768
"""The most bytes that a pickled callable may have; more of them is captured data, which belongs into the arguments."""

_MAIN = ("__main__", "__mp_main__")  # the second is what child processes of multiprocessing call the first


class UDFLike(Protocol):
    """What this layer knows of a UDF, whose class stands above it: the function inside, and how it wants to cross.

    The mark is looked up on the class: `functools.wraps` copies instance attributes to wrappers that are no UDFs.
    """

    __lakeshore_udf__: bool
    __wrapped__: Callable[..., Any]
    transport: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def is_udf(fn: object) -> TypeGuard[UDFLike]:
    """Whether `fn` is a UDF object."""
    return getattr(type(fn), "__lakeshore_udf__", False) is True


def importable(fn: Callable[..., Any]) -> bool:
    """Whether the name of `fn`, imported, leads back to this very function, or to its UDF.

    Not so for lambdas, local functions, what `__main__` defines, bound methods, partials, and instances; it is for
    static methods, and for class methods reached through their own class.
    """
    return _obstacle(fn) is None


def _obstacle(fn: Callable[..., Any]) -> str | None:
    """Why no worker can import `fn`, with the fix; None when one can."""
    target = fn.__wrapped__ if is_udf(fn) else fn
    module, qualname = getattr(target, "__module__", None), getattr(target, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str) and module and qualname):
        return f"a {type(target).__name__} object has no name of its own: wrap it in a function at module level"
    if module in _MAIN:
        return (
            "it is defined in the script that was started (__main__), which a worker cannot import: "
            "move it into a module and import it from there"
        )
    if "<" in qualname:
        return f"{qualname!r} is no name that an import reaches: define it with def at module level"
    if inspect.ismethod(target) and not isinstance(target.__self__, type):
        return f"it is bound to an instance of {type(target.__self__).__name__}: pass that as an argument to a function"
    found: Any = sys.modules.get(module)  # a module that is not loaded cannot hold this very object
    try:
        for part in qualname.split("."):
            found = getattr(found, part)
    except Exception:
        found = None
    if _same(found, fn) or _same(found, target) or (is_udf(found) and _same(found.__wrapped__, target)):
        return None
    return f"the name {module}.{qualname} leads to something else: give it a name of its own at module level"


def _same(one: Any, other: Any) -> bool:
    return one is other or (inspect.ismethod(one) and isinstance(one.__self__, type) and one == other)


def build_fn(fn: Callable[..., Any], transport: str = "auto") -> dict[str, Any]:
    """The `fn` field of an Envelope: a reference or a pickle, as `transport` says.

    "auto" refers to what is importable and pickles the rest; "ref" insists on a reference; "pickle" always takes a
    snapshot, of an importable function too, with the functions and classes of its module that it uses.
    Raises TransportError when the callable cannot cross that way.
    """
    if transport not in ("auto", "ref", "pickle"):
        raise TransportError(f"expected transport 'auto', 'ref' or 'pickle', got {transport!r}")
    target = fn.__wrapped__ if is_udf(fn) else fn
    if transport != "pickle" and (known := _known_arm(fn, target)) is not None:
        return known
    obstacle = None if transport == "pickle" else _obstacle(fn)
    if transport == "pickle" or (obstacle and transport == "auto"):
        return _pickle_arm(target, whole_module=transport == "pickle")
    if obstacle:
        raise TransportError(
            f"{_named(target)} cannot cross with transport='ref': {obstacle}, "
            "or use transport='auto' and a worker that allows pickled functions"
        )
    arm = {
        "kind": "ref",
        "module": target.__module__,
        "qualname": target.__qualname__,
        "src_hash": source_hash(target),
    }
    if isinstance(target, FunctionType) and arm["src_hash"] is not None:
        _arms[target] = arm
    return dict(arm)


_arms: WeakKeyDictionary[FunctionType, dict[str, Any]] = WeakKeyDictionary()


def _known_arm(fn: Any, target: Any) -> dict[str, Any] | None:
    """The reference made before for this function, if its name still leads to it."""
    arm = _arms.get(target) if isinstance(target, FunctionType) else None
    if arm is None:
        return None
    module = sys.modules.get(arm["module"])
    return dict(arm) if module is not None and module.__dict__.get(arm["qualname"]) is fn else None


def _pickle_arm(target: Callable[..., Any], whole_module: bool) -> dict[str, Any]:
    from . import pickles

    function = _innermost(target)
    try:
        blob = pickles.dumps(target, getattr(function, "__module__", None) if whole_module else None)
    except Exception as exc:
        raise TransportError(
            f"{_named(target)} cannot be pickled: {type(exc).__name__}: {exc}; what it captures travels with it, so "
            "pass data as arguments and open files, locks and connections inside the function"
        ) from exc
    if len(blob) > INLINE_PICKLE_LIMIT:
        raise TransportError(
            f"{_named(target)} pickles to {len(blob)} bytes, more than the {INLINE_PICKLE_LIMIT} that may travel with "
            "an invocation: it captures data, so pass the data as arguments instead"
        )
    code = getattr(function, "__code__", None)
    qualname = getattr(function, "__qualname__", type(function).__qualname__)
    return {
        "kind": "pickle",
        "blob": blob,
        "hash": f"sha256:{hashlib.sha256(blob).hexdigest()}",
        "source": loaded_source(function).text or "",
        "qualname": qualname,
        "where": f"{qualname} ({code.co_filename}:{code.co_firstlineno})" if code else qualname,
        "runtime": pickles.runtime(),
    }


def _innermost(target: Any) -> Any:
    """The function that a partial or a method is about; else the callable itself."""
    if isinstance(target, (functools.partial, MethodType)):
        inside: Any = cast("Any", target)
        return _innermost(inside.__func__ if hasattr(inside, "__func__") else inside.func)
    return target


def _named(fn: Any) -> str:
    return f"function {getattr(fn, '__qualname__', None) or repr(fn)[:100]!r}"


@functools.cache
def _wire() -> Any:
    from .. import wire  # not with this module: local calls load no msgpack; and not at every submit: 1 us

    return wire


@dataclass(frozen=True, eq=False)
class Thunk(Generic[T_co]):
    """A callable with its arguments, to be submitted: `queue.submit(thunk(f, x))`."""

    fn: Callable[..., T_co]
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def to_envelope(
        self,
        id: str | None = None,
        prefix: str | None = None,
        key: str | None = None,
        parent: str | None = None,
    ) -> Envelope:
        """The Envelope of one invocation; arguments and callable are packed now, later changes do not show.

        Without `id` a new one is made, without `prefix` that of the ambient `dls.scope` is taken, without `parent` the
        invocation that is running here, if one is. Raises TransportError when the callable cannot cross, EncodeError
        when an argument cannot be packed.
        """
        wire = _wire()
        envelope: Envelope = wire.Envelope(
            id=new_id() if id is None else id,
            fn=build_fn(self.fn, self.fn.transport if is_udf(self.fn) else "auto"),
            args=wire.pack(list(self.args)),
            kwargs=wire.pack(dict(self.kwargs)),
            prefix=run.prefix if prefix is None else prefix,
            key=key,
            parent=current_invocation() if parent is None else parent,
        )
        return envelope


def thunk(fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Thunk[T]:
    """Bundle `fn` (any callable, a UDF too) with concrete arguments, without calling it.

    Raises TypeError when `fn` is not callable.
    """
    if not callable(fn):
        raise TypeError(
            f"expected a callable and its arguments, got {type(fn).__name__}: write thunk(f, x), not thunk(f(x))"
        )
    return Thunk(fn, args, kwargs)
