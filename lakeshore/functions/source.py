"""Find the source text of a function as this process has loaded it. Its file may have changed since.

A client and a worker compare hashes of this text, so that a worker never runs other code than the client means. Python does
not keep the text that a module was made from. These rules find it:

- A file is read when one of its functions is first seen; for UDFs that is at their decoration, during the import. That text
  counts for the functions seen in it, whatever happens to the file later.
- A file that has not changed since this process started can only hold the text that was loaded.
- In every other case the text is compiled, and must produce the function's code at the function's line.

Helpers, module constants and the values behind names are not part of the text, and not compared.
"""

from __future__ import annotations
import __future__

import ast
import hashlib
import inspect
import io
import linecache
import os
import textwrap
import time
import tokenize
from functools import lru_cache
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Source", "loaded_source", "note_source", "source_hash"]


class Source(NamedTuple):
    """The source of a function, as far as it is known."""

    text: str | None = None
    """Dedented, decorators included; None when there is no source."""
    hash: str | None = None
    """`sha256:` and 16 hex digits; None when there is no source."""
    edited: bool = False
    """There is a source, but it is not what this process has loaded."""


class _Snapshot(NamedTuple):
    unchanged: bool
    """The file has not changed since this process started."""
    text: str


_NO_SOURCE = Source()
_START_NS = time.time_ns() - 2_000_000_000  # file systems round their times, some to two seconds
_MAX_TEXTS = 16
"""Texts that are kept of one file: a notebook may reload a module again and again."""
_FUTURES: int = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_snapshots: dict[str, dict[tuple[int, ...] | None, _Snapshot]] = {}  # by file name and stamp
_noted: WeakKeyDictionary[FunctionType, _Snapshot] = WeakKeyDictionary()
_found: WeakKeyDictionary[FunctionType, Source] = WeakKeyDictionary()


def source_hash(fn: Callable[..., Any]) -> str | None:
    """Return the hash of the source that this process has loaded for `fn`; None when it is not known."""
    return loaded_source(fn).hash


def note_source(fn: Callable[..., Any]) -> None:
    """Keep the text of the file of `fn` as it is now. Decorators call it, since they run while the file is imported."""
    function = _function(fn)
    if function is not None and function not in _noted:
        snapshots = _snapshots_of(function)
        if snapshots:
            _noted[function] = snapshots[-1]


def loaded_source(fn: Callable[..., Any]) -> Source:
    """Return the source of the function inside `fn` (a method, wrapper or UDF) as this process has loaded it."""
    function = _function(fn)
    if function is None:
        return _NO_SOURCE
    source = _found.get(function)
    if source is None:
        source = _find(function)
        if not source.edited:  # a file that is being written now may be complete the next time
            _found[function] = source
    return source


def _function(fn: Any) -> FunctionType | None:
    try:
        inner = inspect.unwrap(fn)
        inner = inspect.unwrap(getattr(inner, "__func__", inner))
    except ValueError:  # wrappers in a circle
        return None
    return inner if isinstance(inner, FunctionType) else None


def _find(function: FunctionType) -> Source:
    snapshots = _snapshots_of(function)
    code = function.__code__
    if len(snapshots) == 1 and snapshots[0].unchanged:
        return _source(snapshots[0], code)
    noted = _noted.get(function)
    for snapshot in snapshots if noted is None else [noted, *snapshots]:
        if code in _codes(snapshot.text, code.co_flags & _FUTURES):
            return _source(snapshot, code)
    # Any text may have a file name such as "<string>": one that does not hold the code is another text, not a newer one.
    return Source(edited=bool(snapshots) and not code.co_filename.startswith("<"))


def _source(snapshot: _Snapshot, code: CodeType) -> Source:
    lines = io.StringIO(snapshot.text).readlines()
    try:
        block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    except (tokenize.TokenError, SyntaxError):
        block = []
    if not block:
        return _NO_SOURCE
    text = textwrap.dedent("".join(block))
    return Source(text, f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def _snapshots_of(function: FunctionType) -> list[_Snapshot]:
    """All texts that were read of the function's file, oldest first, the present one included."""
    name = function.__code__.co_filename
    seen = _snapshots.setdefault(name, {})
    before = _stamp(name)
    if before not in seen:
        text = _read(name, function.__globals__)
        stamp = _stamp(name)
        if text is not None:
            unchanged = stamp is not None and stamp == before and max(stamp[:2]) < _START_NS
            seen.setdefault(stamp, _Snapshot(unchanged, text))  # in one step: two threads may do this at once
            if len(seen) > _MAX_TEXTS:
                seen.pop(next(iter(seen)), None)
    return list(seen.values())


def _stamp(name: str) -> tuple[int, ...] | None:
    """What changes whenever the file does; None where there is no file."""
    try:
        status = os.stat(name)
    except (OSError, ValueError):
        return None
    # The change time as well: copying tools set the modification time back.
    return (status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino)


def _read(name: str, module_globals: dict[str, Any]) -> str | None:
    try:
        with tokenize.open(name) as file:  # not linecache: it may hold an older text
            text = file.read()
    except OSError:  # no file: a zip, a notebook cell, the interactive prompt
        text = "".join(linecache.getlines(name, module_globals))
        if not text:
            return None
    except (SyntaxError, ValueError):  # a file, but not of the encoding that it had when it was loaded
        text = ""
    return text if text.endswith("\n") else f"{text}\n"


@lru_cache(maxsize=64)
def _codes(text: str, flags: int) -> frozenset[CodeType]:
    """Every code object that the text compiles to; two are equal when they do the same at the same line."""
    try:
        # Notebooks allow await outside functions; the code of functions is the same with and without.
        flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        pending = [compile(text, "<source>", "exec", flags=flags, dont_inherit=True)]
    except (SyntaxError, ValueError, RecursionError):
        return frozenset()
    codes: set[CodeType] = set()
    while pending:
        code = pending.pop()
        codes.add(code)
        pending.extend(const for const in code.co_consts if isinstance(const, CodeType))
    return frozenset(codes)
