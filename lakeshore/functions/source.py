"""The source text of a function as this process has loaded it, which need not be what its file says by now.

A producer and a worker compare hashes of this text, so that neither runs code the other does not mean. Python does not
keep the text that a module was made from; these rules find it:

- a file is read when one of its functions is first seen (for UDFs that is their decoration, so during the import), and
  what was read then counts for the functions seen in it, whatever becomes of the file;
- a file that has not changed since this process began can only hold the text that was loaded;
- in every other case the text is compiled, and the function's code must come out of it, at its line.

What the text cannot show is not covered: helpers, module constants and the values behind names.
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
    """The dedented text of a function, decorators included, and its hash: `sha256:` and 16 hex digits.

    Both are None when there is no source. `edited`: there is one, but it is not what this process has loaded.
    """

    text: str | None = None
    hash: str | None = None
    edited: bool = False


class _Snapshot(NamedTuple):
    settled: bool  # unchanged since this process began
    text: str


_NOTHING = Source()
_BEGAN_NS = time.time_ns() - 2_000_000_000  # file systems round their times, some to two seconds
_KEPT = 16  # texts of one file, for a notebook that reloads a module again and again
_FUTURES: int = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
_snapshots: dict[str, dict[tuple[int, ...] | None, _Snapshot]] = {}  # by file name and stamp
_noted: WeakKeyDictionary[FunctionType, _Snapshot] = WeakKeyDictionary()
_found: WeakKeyDictionary[FunctionType, Source] = WeakKeyDictionary()


def source_hash(fn: Callable[..., Any]) -> str | None:
    """The hash of the source that this process has loaded for `fn`; None when it cannot be told."""
    return loaded_source(fn).hash


def note_source(fn: Callable[..., Any]) -> None:
    """Keep the text of the file that `fn` stands in as it is now; for decorators, which run while it is imported."""
    function = _function(fn)
    if function is not None and function not in _noted:
        snapshots = _look(function)
        if snapshots:
            _noted[function] = snapshots[-1]


def loaded_source(fn: Callable[..., Any]) -> Source:
    """The source of the function behind `fn` (a method, wrapper or UDF leads to it), as this process has loaded it."""
    function = _function(fn)
    if function is None:
        return _NOTHING
    source = _found.get(function)
    if source is None:
        source = _find(function)
        if not source.edited:  # a file in the middle of being written may be whole again the next time
            _found[function] = source
    return source


def _function(fn: Any) -> FunctionType | None:
    try:
        one = inspect.unwrap(fn)
        one = inspect.unwrap(getattr(one, "__func__", one))
    except ValueError:  # wrappers in a circle
        return None
    return one if isinstance(one, FunctionType) else None


def _find(function: FunctionType) -> Source:
    snapshots = _look(function)
    code = function.__code__
    if len(snapshots) == 1 and snapshots[0].settled:
        return _source(snapshots[0], code)
    noted = _noted.get(function)
    for snapshot in snapshots if noted is None else [noted, *snapshots]:
        if code in _codes(snapshot.text, code.co_flags & _FUTURES):
            return _source(snapshot, code)
    # A name such as "<string>" is that of any text: one which does not hold the code is another, not a newer one.
    return Source(edited=bool(snapshots) and not code.co_filename.startswith("<"))


def _source(snapshot: _Snapshot, code: CodeType) -> Source:
    lines = io.StringIO(snapshot.text).readlines()
    try:
        block = inspect.getblock(lines[code.co_firstlineno - 1 :])
    except (tokenize.TokenError, SyntaxError):
        block = []
    if not block:
        return _NOTHING
    text = textwrap.dedent("".join(block))
    return Source(text, f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}")


def _look(function: FunctionType) -> list[_Snapshot]:
    """All texts seen of the function's file, oldest first, the present one included."""
    name = function.__code__.co_filename
    seen = _snapshots.setdefault(name, {})
    before = _stamp(name)
    if before not in seen:
        text = _read(name, function.__globals__)
        stamp = _stamp(name)
        if text is not None:
            settled = stamp is not None and stamp == before and max(stamp[:2]) < _BEGAN_NS
            seen.setdefault(stamp, _Snapshot(settled, text))  # in one step: two threads may look at once
            if len(seen) > _KEPT:
                seen.pop(next(iter(seen)), None)
    return list(seen.values())


def _stamp(name: str) -> tuple[int, ...] | None:
    """Something that changes whenever the file does; None where there is no file."""
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
