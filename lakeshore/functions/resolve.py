"""From the `fn` field of an Envelope to a callable, through the gates that a worker sets before it.

What comes in was written by whoever can submit. Nothing is unpickled before every gate is passed, and a worker that
refuses pickles also refuses references to what would do the same harm: `subprocess.run` is a name like any other.
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
from .serialize import is_udf
from .source import loaded_source, note_source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import ModuleType

__all__ = ["check_policy", "check_runtime", "resolve_fn"]

_POLICIES = ("strict", "minor", "off")
_OURS = __name__.rpartition(".functions.")[0]


def resolve_fn(
    spec: Mapping[str, Any],
    *,
    registry: Mapping[str, Callable[..., Any]] | None = None,
    allow_pickled: bool,
    runtime_policy: str = "minor",
    allow_modules: Collection[str] = (),
    cfg: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The callable that `spec` means; a UDF stays a UDF.

    `registry` maps qualified names to functions and wins over import. `allow_modules` names modules (and with them what
    is below) whose callables a reference may reach although pickles are refused. Raises TransportError for everything
    that goes wrong, also for whatever an import or an unpickle raises.
    """
    if not isinstance(spec, Mapping):
        raise TransportError(f"expected a map that describes a function, got {type(spec).__name__}")
    rules = (allow_pickled, runtime_policy, allow_modules)
    if not registry and (known := _resolved.get(_names(spec), None)) is not None and known.holds(spec, rules):
        return known.fn
    check_policy(runtime_policy)
    kind = spec.get("kind", "ref")
    if kind == "pickle":
        return _unpickled(spec, allow_pickled, runtime_policy)
    if kind != "ref":
        raise TransportError(
            f"expected a function of kind 'ref' or 'pickle', got {_short(kind)}: upgrade "
            "dreamlake-lakeshore on the side that is older"
        )
    fn = _registered(spec, registry)
    if fn is None:
        listed = (allow_modules,) if isinstance(allow_modules, str) else tuple(allow_modules)
        fn = _imported(spec, cfg, None if allow_pickled else listed)
    note_source(fn)  # whether it is compared this time or not: what is loaded now counts for the next time
    if runtime_policy != "off":
        _check_source(fn, spec)
    _remember(spec, rules, fn)
    return fn


class _Resolved(NamedTuple):
    """A reference that passed every gate under some rules: it does again while the same function has the same name."""

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
_MOST_RESOLVED = 4096


def _names(spec: Mapping[str, Any]) -> tuple[str, str]:
    """Module and function of a reference to a module-level function; of anything else, names that nothing has."""
    module, qualname = spec.get("module"), spec.get("qualname")
    if spec.get("kind", "ref") == "ref" and isinstance(module, str) and isinstance(qualname, str):
        return module, qualname
    return "", ""


def _remember(spec: Mapping[str, Any], rules: tuple[object, ...], fn: Callable[..., Any]) -> None:
    names = _names(spec)
    module = sys.modules.get(names[0])
    if module is not None and module.__dict__.get(names[1]) is fn:
        if len(_resolved) >= _MOST_RESOLVED:
            _resolved.clear()
        _resolved[names] = _Resolved(module, spec.get("src_hash"), rules, fn)


# --- pickles --------------------------------------------------------------------------------------------------------


def _unpickled(spec: Mapping[str, Any], allow_pickled: bool, policy: str) -> Callable[..., Any]:
    what = f"function {_short(spec.get('where') or spec.get('qualname'))}"
    if not allow_pickled:
        raise TransportError(
            f"{what} was submitted as a pickle, which this worker refuses because loading one runs its code: submit a "
            "function that the worker can import, or start it with --allow-pickled (allow_pickled=True) if everybody "
            "who can submit may run code there"
        )
    check_runtime(spec.get("runtime") or {}, policy)
    blob, stated = spec.get("blob"), spec.get("hash")
    if not isinstance(blob, bytes):
        raise TransportError(f"{what}: expected the pickle's bytes under 'blob', got {type(blob).__name__}")
    actual = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    if stated != actual:
        raise TransportError(
            f"{what}: the pickle hashes to {actual}, its submitter stated {_short(stated)}: it was damaged or changed "
            "on the way; submit it again"
        )
    from . import pickles

    try:
        fn = pickles.loads(blob)
    except BaseException as exc:
        _let_interrupts_through(exc)
        raise TransportError(
            f"{what} cannot be unpickled here: {_text(exc)}; {_place()}: make what it uses importable on the worker"
        ) from exc
    return _callable(fn, what)


def check_runtime(meta: Mapping[str, Any], policy: str = "minor") -> None:
    """Whether a pickle made by the runtime that `meta` describes may be loaded by this one; else TransportError.

    "strict": exactly this python and this cloudpickle. "minor": the same major.minor python and major cloudpickle.
    Under both the implementation is the same, and the pickle protocol is one that this python reads. "off": anything.
    """
    check_policy(policy)
    if policy == "off":
        return
    from . import pickles

    here = pickles.runtime()
    if not isinstance(meta, Mapping):
        raise TransportError(f"expected a map that describes the submitter's runtime, got {type(meta).__name__}")
    parts: dict[str, int | None] = {"python": 2, "cloudpickle": 1} if policy == "minor" else {}
    for name in ("impl", "python", "cloudpickle"):
        there = meta.get(name)
        if not isinstance(there, str) or _leading(there, parts.get(name)) != _leading(here[name], parts.get(name)):
            raise TransportError(
                f"the function was pickled under {_said(meta)}, this worker runs {_said(here)}: the runtime policy "
                f"{policy!r} does not let {name} {_short(there)} pass; use the same on both sides, a function that the "
                "worker can import, or at your own risk the policy 'off'"
            )
    protocol = meta.get("pickle_protocol")
    if type(protocol) is not int or protocol > here["pickle_protocol"]:
        raise TransportError(
            f"the function was pickled with protocol {_short(protocol)}, this worker reads up to "
            f"{here['pickle_protocol']}: run the worker on the submitter's python"
        )


def _leading(version: str, parts: int | None) -> list[str]:
    return version.split(".")[:parts]


def _said(meta: Mapping[str, Any]) -> str:
    impl, python, cloudpickle = (_short(meta.get(name)) for name in ("impl", "python", "cloudpickle"))
    return f"python {python} of {impl} with cloudpickle {cloudpickle}"


def check_policy(policy: str) -> None:
    """Whether `policy` is a runtime policy; else TransportError."""
    if policy not in _POLICIES:
        raise TransportError(f"expected the runtime policy 'strict', 'minor' or 'off', got {policy!r}")


# --- references -----------------------------------------------------------------------------------------------------


def _registered(
    spec: Mapping[str, Any], registry: Mapping[str, Callable[..., Any]] | None
) -> Callable[..., Any] | None:
    name = spec.get("qualname")
    return registry.get(name) if registry and isinstance(name, str) else None


def _imported(
    spec: Mapping[str, Any], cfg: Mapping[str, Any] | None, allow_modules: tuple[str, ...] | None
) -> Callable[..., Any]:
    """The named object; `allow_modules` is None on workers that allow pickles, where no reference adds to the risk."""
    module, qualname = spec.get("module"), spec.get("qualname")
    if not (isinstance(module, str) and isinstance(qualname, str) and module and qualname):
        raise TransportError(
            f"expected the names of a module and a function in it, got {_short(module)} and {_short(qualname)}: "
            "submit the function again, or put it into the worker's registry"
        )
    what = f"function {_short(f'{module}.{qualname}')}"
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
    if allow_modules is not None and _closed(module) and not _listed(module, allow_modules):
        raise TransportError(_refusal(what, module))
    found = _walk(_module(module, what, cfg), qualname, what)
    fn = _callable(found, what)
    if allow_modules is not None and not _admitted(fn, allow_modules):
        raise TransportError(_refusal(what, str(getattr(fn, "__module__", None) or type(fn).__module__)))
    return fn


def _module(name: str, what: str, cfg: Mapping[str, Any] | None) -> Any:
    if name not in sys.modules:
        importlib.invalidate_caches()  # it may have been installed a moment ago
    try:
        return importlib.import_module(name)
    except BaseException as exc:  # SystemExit too: a script that was not meant to be imported must not end the worker
        _let_interrupts_through(exc)
        archive = (
            " The submitter stated a code archive (cfg.code), which this version does not fetch."
            if cfg and cfg.get("code")
            else ""
        )
        raise TransportError(
            f"cannot import the module of {what}: {_text(exc)}; {_place()}: install it there, set PYTHONPATH, or start "
            f"the worker in the project's folder.{archive}"
        ) from exc


def _walk(found: Any, qualname: str, what: str) -> Any:
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


def _admitted(fn: Any, allow_modules: tuple[str, ...]) -> bool:
    """Whether a worker that refuses pickles may call `fn`: by what it is, not by the name that led to it."""
    if is_udf(fn) or _listed(getattr(fn, "__module__", None), allow_modules):
        return True
    function = fn.__func__ if inspect.ismethod(fn) and isinstance(fn.__self__, type) else fn
    if not isinstance(function, FunctionType) or _closed(function.__module__):
        return False
    return not _in_library(function.__code__.co_filename)


@lru_cache(maxsize=1024)
def _in_library(file: str) -> bool:
    if file.startswith("<"):  # frozen, or made of text at run time
        return True
    real = os.path.normcase(os.path.realpath(file))
    named = {"site-packages", "dist-packages"} & set(Path(real).parts)
    return bool(named) or any(real.startswith(folder) for folder in _library_folders())


def _closed(module: object) -> bool:
    """Modules that no reference may lead into, nor import, on a worker that refuses pickles: importing runs code too."""
    if not isinstance(module, str):
        return True
    parts = module.split(".")
    return parts[0] in sys.stdlib_module_names or "__main__" in parts or _within(module, _OURS)


def _listed(module: object, allow_modules: tuple[str, ...]) -> bool:
    """Whether the operator named it; never with this package, which can unpickle and shares its namespace with others."""
    return isinstance(module, str) and not _within(module, _OURS) and any(_within(module, n) for n in allow_modules)


def _within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@lru_cache(maxsize=1)
def _library_folders() -> tuple[str, ...]:
    """The standard library, installed packages, and this package itself, wherever it was imported from."""
    folders = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [os.__file__.rpartition(os.sep)[0], *site.getsitepackages(), site.getusersitepackages()]
    folders.append(str(Path(__file__).parents[1]))
    return tuple(os.path.normcase(os.path.realpath(folder)).rstrip(os.sep) + os.sep for folder in folders)


def _refusal(what: str, module: str) -> str:
    return (
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
        said = "has changed on disk since this worker imported it"
    elif here.hash is not None and here.hash != stated:
        said = f"is {here.hash} in this worker"
    else:
        return
    raise TransportError(
        f"the source of function {_short(spec.get('qualname'))} is {_short(stated)} at the submitter and {said}: "
        "deploy the same code on both sides and restart whichever still runs the old one, or set the runtime policy "
        "to 'off'"
    )


def _let_interrupts_through(exc: BaseException) -> None:
    """Ctrl-C is raised in the main thread only; elsewhere a KeyboardInterrupt is the code's own doing."""
    if isinstance(exc, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
        raise exc


def _short(value: object) -> str:
    """A field of the spec for a sentence: whoever wrote it may have put anything there, of any size and depth."""
    if isinstance(value, str):
        return repr(value if len(value) <= 200 else f"{value[:200]}...")
    return repr(value) if value is None or isinstance(value, (int, float)) else f"a {type(value).__name__}"


def _text(exc: BaseException) -> str:
    return f"{type(exc).__name__}: {exc}"


def _place() -> str:
    try:
        folder = os.getcwd()
    except OSError:
        folder = "a folder that was removed"
    return f"the worker runs in {folder!r} with sys.path {sys.path[:5]!r}{' ...' if len(sys.path) > 5 else ''}"
