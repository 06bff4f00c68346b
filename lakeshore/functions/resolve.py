"""Turn the `fn` field of an Envelope into a callable, through the gates of a worker (`_pass_gates`).

Whoever can submit wrote that field. Nothing is unpickled before every gate is passed. A worker that refuses pickles also
refuses references that would do the same harm: `subprocess.run` is a name like any other.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from ..errors import TransportError
from .runtime import check_policy, check_runtime, shorten
from .serialize import is_udf
from .source import loaded_source, note_source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import ModuleType

__all__ = ["resolve_fn"]

_THIS_PACKAGE = __name__.rpartition(".functions.")[0]
_MAX_RESOLVED = 4096
"""How many resolved references are kept; then all are dropped."""


def resolve_fn(
    spec: Mapping[str, Any],
    *,
    registry: Mapping[str, Callable[..., Any]] | None = None,
    allow_pickled: bool,
    runtime_policy: str = "minor",
    allow_modules: Collection[str] = (),
    cfg: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the callable that `spec` describes; a UDF stays a UDF.

    Args:
        spec: The `fn` field of an Envelope.
        registry: Maps qualified names to functions. It is asked before anything is imported.
        allow_pickled: Whether a pickle may be loaded, which runs code that the submitter chose.
        runtime_policy: See `runtime.check_runtime`. "off" also skips the comparison of sources.
        allow_modules: Modules, with all that is below them, whose callables a reference may name although pickles are
            refused.
        cfg: The `cfg` field of the Envelope, for the words of an error.

    Raises:
        TransportError: Whatever goes wrong, also what an import or an unpickling raises.
    """
    if not isinstance(spec, Mapping):
        raise TransportError(f"expected a map that describes a function, got {type(spec).__name__}")
    rules = (allow_pickled, runtime_policy, allow_modules)
    if not registry:
        known = _resolved.get(_names(spec))
        if known is not None and known.holds(spec, rules):
            return known.fn
    modules = (allow_modules,) if isinstance(allow_modules, str) else tuple(allow_modules)
    fn = _pass_gates(spec, registry or {}, allow_pickled, runtime_policy, modules, cfg)
    _remember(spec, rules, fn)
    return fn


def _pass_gates(
    spec: Mapping[str, Any],
    registry: Mapping[str, Callable[..., Any]],
    allow_pickled: bool,
    runtime_policy: str,
    allow_modules: tuple[str, ...],
    cfg: Mapping[str, Any] | None,
) -> Callable[..., Any]:
    """Check every gate, in this order, and return the callable behind them."""
    # Gate 1: this worker knows its own policy and the kind of the function.
    check_policy(runtime_policy)
    kind = spec.get("kind", "ref")
    if kind not in ("ref", "pickle"):
        raise TransportError(
            f"expected a function of kind 'ref' or 'pickle', got {shorten(kind)}: upgrade "
            "dreamlake-lakeshore on the side that is older"
        )

    if kind == "pickle":
        what = f"function {shorten(spec.get('where') or spec.get('qualname'))}"
        # Pickle, gate 2: this worker loads pickles at all.
        if not allow_pickled:
            raise TransportError(
                f"{what} was submitted as a pickle, which this worker refuses because loading one runs its code: submit a "
                "function that the worker can import, or start it with --allow-pickled (allow_pickled=True) if everybody "
                "who can submit may run code there"
            )
        # Pickle, gate 3: this runtime can read what the submitter's runtime wrote.
        check_runtime(spec.get("runtime") or {}, runtime_policy)
        # Pickle, gate 4: the bytes are those that the submitter hashed.
        blob = _checked_blob(spec, what)
        return _callable(_unpickle(blob, what), what)

    fn = registry.get(spec["qualname"]) if isinstance(spec.get("qualname"), str) else None
    if fn is None:
        # Reference, gate 2: the names can lead to something on a worker.
        module, qualname = _checked_names(spec)
        what = f"function {shorten(f'{module}.{qualname}')}"
        # Reference, gate 3: the module may be imported, which runs code too.
        if not allow_pickled and _is_closed(module) and not _is_listed(module, allow_modules):
            raise _refusal(what, module)
        fn = _callable(_attribute(_import(module, what, cfg), qualname, what), what)
        # Reference, gate 4: what the name led to may be called.
        if not allow_pickled and not _may_be_called(fn, allow_modules):
            raise _refusal(what, str(getattr(fn, "__module__", None) or type(fn).__module__))
    # Reference, gate 5: the worker has loaded the source that the submitter has.
    note_source(fn)  # compared or not: what is loaded now counts for the next time
    if runtime_policy != "off":
        _check_source(fn, spec)
    return fn


# --- references that passed before ------------------------------------------------------------------------------------


class _Resolved(NamedTuple):  # a tuple: one is read for every invocation
    """A reference that passed every gate under some rules. It does again while its name leads to the same function."""

    module: ModuleType
    src_hash: object
    rules: tuple[object, ...]
    fn: Callable[..., Any]

    def holds(self, spec: Mapping[str, Any], rules: tuple[object, ...]) -> bool:
        return (
            self.rules == rules
            and self.src_hash == spec.get("src_hash")
            and sys.modules.get(spec["module"]) is self.module
            and self.module.__dict__.get(spec["qualname"]) is self.fn
        )


_resolved: dict[tuple[str, str], _Resolved] = {}


def _names(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Module and function of a reference to a module-level function; of anything else, names that nothing has."""
    module = spec.get("module")
    qualname = spec.get("qualname")
    if spec.get("kind", "ref") == "ref" and isinstance(module, str) and isinstance(qualname, str):
        return module, qualname
    return "", ""


def _remember(spec: Mapping[str, Any], rules: tuple[object, ...], fn: Callable[..., Any]) -> None:
    names = _names(spec)
    module = sys.modules.get(names[0])
    if module is not None and module.__dict__.get(names[1]) is fn:
        if len(_resolved) >= _MAX_RESOLVED:
            _resolved.clear()
        _resolved[names] = _Resolved(module, spec.get("src_hash"), rules, fn)


# --- pickles --------------------------------------------------------------------------------------------------------


def _checked_blob(spec: Mapping[str, Any], what: str) -> bytes:
    blob = spec.get("blob")
    stated = spec.get("hash")
    if not isinstance(blob, bytes):
        raise TransportError(f"{what}: expected the pickle's bytes under 'blob', got {type(blob).__name__}")
    actual = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    if stated != actual:
        raise TransportError(
            f"{what}: the pickle hashes to {actual}, its submitter stated {shorten(stated)}: it was damaged or changed "
            "on the way; submit it again"
        )
    return blob


def _unpickle(blob: bytes, what: str) -> Any:
    from . import pickles  # only those who load pickles load cloudpickle

    try:
        return pickles.loads(blob)
    except BaseException as exc:
        _let_interrupts_through(exc)
        raise TransportError(
            f"{what} cannot be unpickled here: {_text(exc)}; {_place()}: make what it uses importable on the worker"
        ) from exc


# --- references -----------------------------------------------------------------------------------------------------


def _checked_names(spec: Mapping[str, Any]) -> tuple[str, str]:
    module = spec.get("module")
    qualname = spec.get("qualname")
    if not (isinstance(module, str) and isinstance(qualname, str) and module and qualname):
        raise TransportError(
            f"expected the names of a module and a function in it, got {shorten(module)} and {shorten(qualname)}: "
            "submit the function again, or put it into the worker's registry"
        )
    what = f"function {shorten(f'{module}.{qualname}')}"
    if module in ("__main__", "__mp_main__"):
        raise TransportError(
            f"{what} stands in the submitter's script; __main__ is another module on a worker: "
            "move the function into a module that both can import"
        )
    if "<" in qualname:
        raise TransportError(
            f"{what} is a lambda or local function, which no import reaches: define it at module level, or submit it "
            "with transport='pickle' to a worker that allows pickled functions"
        )
    return module, qualname


def _import(name: str, what: str, cfg: Mapping[str, Any] | None) -> Any:
    if name not in sys.modules:
        importlib.invalidate_caches()  # it may have been installed a moment ago
    try:
        return importlib.import_module(name)
    except BaseException as exc:  # SystemExit too: a script that was not meant to be imported must not end the worker
        _let_interrupts_through(exc)
        archive = ""
        if cfg and cfg.get("code"):
            archive = " The submitter stated a code archive (cfg.code), which this version does not fetch."
        raise TransportError(
            f"cannot import the module of {what}: {_text(exc)}; {_place()}: install it there, set PYTHONPATH, or start "
            f"the worker in the project's folder.{archive}"
        ) from exc


def _attribute(found: Any, qualname: str, what: str) -> Any:
    for part in qualname.split("."):
        try:
            found = getattr(found, part)
        except Exception as exc:
            raise TransportError(
                f"{what} is not there: {_text(exc)}; deploy the submitter's code on the worker and restart it"
            ) from exc
    return found


def _callable(fn: Any, what: str) -> Callable[..., Any]:
    if not callable(fn):
        raise TransportError(f"{what} is a {type(fn).__name__}, which cannot be called: submit a function")
    return cast("Callable[..., Any]", fn)


def _may_be_called(fn: Any, allow_modules: tuple[str, ...]) -> bool:
    """Whether a worker that refuses pickles may call `fn`. What it is decides, not the name that led to it."""
    if is_udf(fn) or _is_listed(getattr(fn, "__module__", None), allow_modules):
        return True
    function = fn.__func__ if inspect.ismethod(fn) and isinstance(fn.__self__, type) else fn
    if not isinstance(function, FunctionType) or _is_closed(function.__module__):
        return False
    return not _is_in_library(function.__code__.co_filename)


@lru_cache(maxsize=1024)
def _is_in_library(file: str) -> bool:
    if file.startswith("<"):  # frozen, or made of text at run time
        return True
    real = os.path.normcase(os.path.realpath(file))
    named = {"site-packages", "dist-packages"} & set(Path(real).parts)
    return bool(named) or any(real.startswith(folder) for folder in _library_folders())


def _is_closed(module: object) -> bool:
    """Whether a worker that refuses pickles must neither import this module nor call what it defines."""
    if not isinstance(module, str):
        return True
    parts = module.split(".")
    return parts[0] in sys.stdlib_module_names or "__main__" in parts or _within(module, _THIS_PACKAGE)


def _is_listed(module: object, allow_modules: tuple[str, ...]) -> bool:
    """Whether the operator allowed the module. Never this package, which can unpickle: `dreamlake`, its namespace, may be
    allowed for another distribution."""
    if not isinstance(module, str) or _within(module, _THIS_PACKAGE):
        return False
    return any(_within(module, allowed) for allowed in allow_modules)


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    """The standard library, installed packages, and this package itself, wherever it was imported from."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [os.__file__.rpartition(os.sep)[0], *site.getsitepackages(), site.getusersitepackages()]
    folders.append(str(Path(__file__).parents[1]))
    return tuple(os.path.normcase(os.path.realpath(folder)).rstrip(os.sep) + os.sep for folder in folders)


def _refusal(what: str, module: str) -> TransportError:
    return TransportError(
        f"{what} is refused: this worker refuses pickles, and with them references to anything but UDFs and functions "
        f"of your own modules; this one belongs to {module!r}. Decorate what is to be called with @dls.udf, or start "
        f"the worker with --allow-module {module} (allow_modules=({module!r},))"
    )


def _check_source(fn: Callable[..., Any], spec: Mapping[str, Any]) -> None:
    stated = spec.get("src_hash")
    if not stated:
        return
    here = loaded_source(fn)
    if here.edited:
        finding = "has changed on disk since this worker imported it"
    elif here.hash is not None and here.hash != stated:
        finding = f"is {here.hash} in this worker"
    else:
        return
    raise TransportError(
        f"the source of function {shorten(spec.get('qualname'))} is {shorten(stated)} at the submitter and {finding}: "
        "deploy the same code on both sides and restart whichever still runs the old one, or set the runtime policy "
        "to 'off'"
    )


def _let_interrupts_through(exc: BaseException) -> None:
    """Raise a Ctrl-C on, which Python raises in the main thread only; elsewhere the code itself raised KeyboardInterrupt."""
    if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise exc


def _text(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"


def _place() -> str:
    try:
        folder = os.getcwd()
    except OSError:
        folder = "a folder that was removed"
    more = " ..." if len(sys.path) > 5 else ""
    return f"the worker runs in {folder!r} with sys.path {sys.path[:5]!r}{more}"
