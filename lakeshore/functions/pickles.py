"""Functions by value: the only place that pickles or unpickles, and so the only one that loads cloudpickle."""

from __future__ import annotations

import inspect
import io
import platform
import sys
from functools import lru_cache
from types import FunctionType
from typing import Any, cast

import cloudpickle as _cloudpickle

__all__ = ["dumps", "loads", "runtime"]

cloudpickle: Any = _cloudpickle  # which has no types


def dumps(fn: Any, module: str | None = None) -> bytes:
    """`fn` by value with the state it captures; what is defined in `module` too, anything else importable by name.

    cloudpickle's own switch for a module, register_pickle_by_value, is global: it would change what other threads
    pickle meanwhile. So the choice is made here, for this one pickle.
    """
    with io.BytesIO() as file:
        pickler = cloudpickle.CloudPickler(file)
        usual = pickler.reducer_override

        def reduce(obj: Any) -> Any:
            kind = cast("Any", type(obj))
            if getattr(kind, "__lakeshore_udf__", False) and obj.__module__ == module:  # would go by its name, too
                return kind, (obj._raw, obj.queue, obj.transport)
            if isinstance(obj, FunctionType):
                reduced = pickler._dynamic_function_reduce(obj) if obj.__module__ == module else usual(obj)
                return reduced if reduced is NotImplemented else _with_textual_annotations(reduced)
            if isinstance(obj, type) and obj.__module__ == module:
                return cloudpickle.cloudpickle._dynamic_class_reduce(obj)
            return usual(obj)

        pickler.reducer_override = reduce
        pickler.dump(fn)
        return file.getvalue()


def _with_textual_annotations(reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """A function runs without its annotations, and they may name what only the submitter can import."""
    slots = reduced[2][1]
    slots["__annotations__"] = {
        name: note if isinstance(note, str) else inspect.formatannotation(note)
        for name, note in slots["__annotations__"].items()
    }
    return reduced


def loads(blob: bytes) -> Any:
    """Runs code: whoever made the blob decides which. For blobs that have passed the gates only."""
    return cloudpickle.loads(blob)


@lru_cache(maxsize=1)
def runtime() -> dict[str, Any]:
    """What a pickle of this process needs to be read: versions and protocol, and the platform for people."""
    return {
        "python": platform.python_version(),
        "impl": sys.implementation.name,
        "cloudpickle": cloudpickle.__version__,
        "pickle_protocol": cloudpickle.DEFAULT_PROTOCOL,
        "platform": f"{sys.platform}-{platform.machine()}",
    }
