"""Pickle and unpickle functions by value. No other module does, and only this one loads cloudpickle for it."""

from __future__ import annotations

import inspect
import io
from types import FunctionType
from typing import Any, cast

import cloudpickle as _cloudpickle

__all__ = ["dumps", "loads"]

cloudpickle: Any = _cloudpickle  # which has no types


def dumps(fn: Any, module: str | None = None) -> bytes:
    """Pickle `fn` by value, with the state that it captures.

    cloudpickle's own switch for a module, register_pickle_by_value, is global: it would change what other threads
    pickle at the same time. So the choice is made here, for this one pickle.

    Args:
        fn: Any callable.
        module: Functions, classes and UDFs that this module defines are pickled by value too, everything else that can
            be imported by name.
    """
    with io.BytesIO() as file:
        pickler = cloudpickle.CloudPickler(file)
        default_reduce = pickler.reducer_override

        def reduce(obj: Any) -> Any:
            kind = cast("Any", type(obj))
            if getattr(kind, "__lakeshore_udf__", False) and obj.__module__ == module:
                return kind, (obj._raw, obj.queue, obj.transport)
            if isinstance(obj, FunctionType):
                by_value = obj.__module__ == module
                reduced = pickler._dynamic_function_reduce(obj) if by_value else default_reduce(obj)
                return reduced if reduced is NotImplemented else _with_textual_annotations(reduced)
            if isinstance(obj, type) and obj.__module__ == module:
                return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
            return default_reduce(obj)

        pickler.reducer_override = reduce
        pickler.dump(fn)
        return file.getvalue()


def _with_textual_annotations(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Turn annotations into text: a function runs without them, and the worker may be unable to import what they name."""
    slots = reduced[2][1]
    slots["__annotations__"] = {
        name: note if isinstance(note, str) else inspect.formatannotation(note)
        for name, note in slots["__annotations__"].items()
    }
    return reduced


def loads(blob: bytes) -> Any:
    """Unpickle. This runs code that the maker of the blob chose: call it only for blobs that have passed the gates."""
    return cloudpickle.loads(blob)
