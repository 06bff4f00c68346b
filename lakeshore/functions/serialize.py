"""Describe a callable for an Envelope: by reference when its name leads back to it, by pickle otherwise.

Only the callable is ever pickled. Arguments go through the wire codec.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, cast
from weakref import WeakKeyDictionary

from ..errors import TransportError
from .runtime import this_runtime
from .source import loaded_source, source_hash

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["INLINE_PICKLE_LIMIT", "UDFLike", "importable", "is_udf", "serialize_fn"]

INLINE_PICKLE_LIMIT = 32768
"""The most bytes that a pickled callable may have. A larger one captures data, which belongs in the arguments."""

_MAIN_MODULES = ("__main__", "__mp_main__")  # multiprocessing gives its child processes the second name for the first


class UDFLike(Protocol):
    """What this layer knows about a UDF, whose class is defined in a higher one: the function inside, and its transport.

    The mark is read from the class: `functools.wraps` copies instance attributes to wrappers that are not UDFs.
    """

    __lakeshore_udf__: bool
    __wrapped__: Callable[..., Any]
    transport: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


def is_udf(fn: object) -> TypeGuard[UDFLike]:
    """Return whether `fn` is a UDF object."""
    return getattr(type(fn), "__lakeshore_udf__", False) is True


def importable(fn: Callable[..., Any]) -> bool:
    """Return whether importing the name of `fn` leads back to this very function, or to its UDF.

    False for lambdas, local functions, functions of `__main__`, bound methods, partials and instances. True for static
    methods, and for class methods that are reached through their own class.
    """
    return _why_not_importable(fn) is None


def _why_not_importable(fn: Callable[..., Any]) -> str | None:
    """Why no worker can import `fn`, with the fix; None when a worker can."""
    target = fn.__wrapped__ if is_udf(fn) else fn
    module = getattr(target, "__module__", None)
    qualname = getattr(target, "__qualname__", None)
    if not (isinstance(module, str) and isinstance(qualname, str) and module and qualname):
        return f"a {type(target).__name__} object has no name of its own: wrap it in a function at module level"
    if module in _MAIN_MODULES:
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
    if _is_same(found, fn) or _is_same(found, target) or (is_udf(found) and _is_same(found.__wrapped__, target)):
        return None
    return f"the name {module}.{qualname} leads to something else: give it a name of its own at module level"


def _is_same(one: Any, other: Any) -> bool:
    """Identity; class methods are made anew at each access, so two of them are the same when they are equal."""
    return one is other or (inspect.ismethod(one) and isinstance(one.__self__, type) and one == other)


def serialize_fn(fn: Callable[..., Any], transport: str | None = None) -> dict[str, Any]:
    """Make the `fn` field of an Envelope: a reference or a pickle.

    Args:
        fn: Any callable. Of a UDF the function inside is taken.
        transport: "auto" refers to what is importable and pickles the rest. "ref" requires a reference. "pickle" always
            takes a snapshot, also of an importable function, with the functions and classes of its module that it uses.
            None: the transport of the UDF; "auto" for other callables.

    Raises:
        TransportError: The callable cannot be sent in that way.
    """
    target: Any = fn
    if is_udf(fn):
        target = fn.__wrapped__
        transport = transport or fn.transport
    transport = transport or "auto"
    if transport not in ("auto", "ref", "pickle"):
        raise TransportError(f"expected transport 'auto', 'ref' or 'pickle', got {transport!r}")
    if transport == "pickle":
        return _pickled(target, whole_module=True)
    known = _known_reference(fn, target)
    if known is not None:
        return known
    obstacle = _why_not_importable(fn)
    if obstacle and transport == "auto":
        return _pickled(target, whole_module=False)
    if obstacle:
        raise TransportError(
            f"{_name_of(target)} cannot cross with transport='ref': {obstacle}, "
            "or use transport='auto' and a worker that allows pickled functions"
        )
    reference = {
        "kind": "ref",
        "module": target.__module__,
        "qualname": target.__qualname__,
        "src_hash": source_hash(target),
    }
    if isinstance(target, FunctionType) and reference["src_hash"] is not None:
        _references[target] = reference
    return dict(reference)


_references: WeakKeyDictionary[FunctionType, dict[str, Any]] = WeakKeyDictionary()


def _known_reference(fn: Any, target: Any) -> dict[str, Any] | None:
    """The reference made before for this function, when its name still leads to it."""
    reference = _references.get(target) if isinstance(target, FunctionType) else None
    if reference is None:
        return None
    module = sys.modules.get(reference["module"])
    found = module.__dict__.get(reference["qualname"]) if module is not None else None
    return dict(reference) if found is fn or found is target else None


def _pickled(target: Callable[..., Any], whole_module: bool) -> dict[str, Any]:
    from . import pickles  # only those who pickle functions load cloudpickle

    function = _innermost(target)
    try:
        blob = pickles.dumps(target, getattr(function, "__module__", None) if whole_module else None)
    except Exception as exc:
        raise TransportError(
            f"{_name_of(target)} cannot be pickled: {type(exc).__name__}: {exc}; what it captures travels with it, so "
            "pass data as arguments and open files, locks and connections inside the function"
        ) from exc
    if len(blob) > INLINE_PICKLE_LIMIT:
        raise TransportError(
            f"{_name_of(target)} pickles to {len(blob)} bytes, more than the {INLINE_PICKLE_LIMIT} that may travel with "
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
        "runtime": this_runtime(),
    }


def _innermost(target: Any) -> Any:
    """The function inside a partial or a method; else the callable itself."""
    if isinstance(target, (functools.partial, MethodType)):
        inside: Any = cast("Any", target)
        return _innermost(inside.__func__ if hasattr(inside, "__func__") else inside.func)
    return target


def _name_of(fn: Any) -> str:
    return f"function {getattr(fn, '__qualname__', None) or repr(fn)[:100]!r}"
