"""Keys: plain relative strings that name files under a root, and the rule that a function returns the keys it writes.

A key is read below a prefix (`dls.scope`), and the prefix below a root, which is a folder of this machine that no key
names. `..` may climb out of the prefix, but never out of the root: neither by its spelling nor through a symbolic link.
"""

from __future__ import annotations

import os
import posixpath
from typing import TYPE_CHECKING, Any, cast

from ..errors import KeyContractError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

__all__ = ["Ledger", "Manifest", "ReturnedKeys", "check_returned", "join_prefix", "normalise_key", "resolve"]

_MAX_PART_BYTES = 255  # what file systems accept
_MAX_KEY_BYTES = 1024  # what object stores accept
_SEARCHED_TYPES: tuple[type[Any], ...] = (str, list, tuple, dict)
_RULE = "a key is a relative path such as 'process/mesh.ply'"


def normalise_key(key: object) -> str:
    """Return the key in its one spelling: `./a`, `a/` and `b/../a` are all `a`; `.` is the prefix folder itself.

    Raises:
        KeyContractError: The key is not a str, or it is empty, absolute, too long (255 bytes a part, 1024 in all), not
            encodable, or contains a NUL, a backslash or a drive letter.
    """
    if not isinstance(key, str):
        raise KeyContractError(f"expected a key, got {_shown(key)} of type {type(key).__name__}: {_RULE}, as a str")
    normal = posixpath.normpath(key) if key else ""
    if fault := _fault(key, normal):
        raise KeyContractError(f"key {_shown(key)} {fault}: {_RULE}")
    return normal


def _fault(key: str, normal: str) -> str | None:
    if not key:
        return "is empty"
    if "\0" in key:
        return "holds a NUL character"
    if "\\" in key:
        return "holds a backslash, which is a separator on some systems only; write '/' between the parts"
    if key.startswith("/"):
        return "is absolute; leave out the leading part that dls.scope(root=...) or the worker's root stands for"
    if _has_drive(key) or _has_drive(normal):
        return "begins with a drive letter"
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        return "holds half a surrogate pair, which UTF-8 cannot write"
    if size > _MAX_KEY_BYTES:
        return f"is {size} bytes long, more than {_MAX_KEY_BYTES}"
    longest = max(len(part.encode()) for part in normal.split("/")) if size > _MAX_PART_BYTES else 0
    if longest > _MAX_PART_BYTES:
        return f"has a part of {longest} bytes, more than the {_MAX_PART_BYTES} that file systems take"
    return None


def _has_drive(path: str) -> bool:
    return path[1:2] == ":" and path[0].isascii() and path[0].isalpha()


def join_prefix(prefix: str, sub: str) -> str:
    """Return where `sub` leads below `prefix`, as a path seen from the root; '' is the root itself.

    Args:
        prefix: A key, or '' for the root.
        sub: A key, or '' for the prefix itself.

    Raises:
        KeyContractError: One of them is not a key, or `..` climbs out of the root.
    """
    if prefix == "" == sub:
        return ""
    inner = normalise_key(sub) if sub != "" else "."
    outer = normalise_key(prefix) if prefix != "" else "."
    place = posixpath.normpath(f"{outer}/{inner}")
    if place == ".." or place.startswith("../"):
        raise KeyContractError(
            f"key {_shown(sub)} leads out of the root (prefix {prefix!r}): "
            "'..' may climb out of the prefix, never out of the root"
        )
    if _has_drive(place):  # 'a/../C:x' of a prefix and a key that are each harmless
        raise KeyContractError(f"key {_shown(sub)} below prefix {prefix!r} begins with a drive letter: {_RULE}")
    return "" if place == "." else place


def resolve(root: Path, prefix: str, key: str) -> Path:
    """Return the path of `key` below `prefix` and `root`, whether or not anything exists there.

    Links inside the root may point anywhere inside the root.

    Raises:
        KeyContractError: The key is not a key, or it leads out of the root by `..` or through a symbolic link.
    """
    path = root / join_prefix(prefix, normalise_key(key))
    real_root = os.path.realpath(root)
    real = os.path.realpath(path)
    if real != real_root and not real.startswith(real_root.rstrip(os.sep) + os.sep):
        raise KeyContractError(
            f"key {_shown(key)} leads out of the root {str(root)!r} through a symbolic link, to {real!r} "
            f"(prefix {prefix!r}): put the data inside the root, or choose a root that holds both"
        )
    return path


class Ledger:
    """The keys that one call wrote; shared by the tasks and threads of that call."""

    __slots__ = ("_entries",)

    def __init__(self) -> None:
        self._entries: dict[tuple[str, str], None] = {}  # a dict keeps the order, and several threads may add to it

    def record(self, key: str, place: str) -> None:
        """Record a written key: as it was given (normalised), and its place as seen from the root."""
        self._entries[key, place] = None

    def entries(self) -> list[tuple[str, str]]:
        return list(self._entries)

    def __bool__(self) -> bool:
        return bool(self._entries)


class ReturnedKeys:
    """The values that a body has returned or yielded: `add` each, then `check` that no written key is missing.

    `prefix` is the prefix of the call. A key that was written inside an inner `dls.scope` counts as returned under its
    own spelling, and under the one that leads to it from the call's prefix.
    """

    __slots__ = ("_ledger", "_prefix", "_strings")

    def __init__(self, ledger: Ledger, prefix: str = "") -> None:
        self._ledger = ledger
        self._prefix = prefix
        self._strings: set[str] = set()

    def add(self, value: object) -> None:
        """Record the strings in `value`: itself, or at any depth of lists, tuples and values of dicts."""
        self._strings.update(text for text in _strings(value) if len(text) <= _MAX_KEY_BYTES)  # longer ones are no keys

    def check(self, function: str = "the function", verb: str = "return") -> None:
        """Raise KeyContractError with the written keys that no value holds. Other strings do not matter."""
        missing = [entry for entry in self._ledger.entries() if entry[0] not in self._strings]
        if missing:
            keys, places = self._normalised()
            missing = [(key, place) for key, place in missing if key not in keys and place not in places]
        if missing:
            named = ", ".join(dict.fromkeys(repr(key) for key, _ in missing))
            raise KeyContractError(
                f"{function} wrote {named} through dls.run.write but {verb}ed no such key (strings it {verb}ed: "
                f"{self._sample()}): {verb} each written key, not its path, alone or in a list, tuple or dict's values"
            )

    def _normalised(self) -> tuple[set[str], set[str]]:
        keys: set[str] = set()
        places: set[str] = set()
        for text in self._strings:
            try:
                keys.add(normalise_key(text))
                places.add(join_prefix(self._prefix, text))
            except KeyContractError:  # plain data
                continue
        return keys, places

    def _sample(self) -> str:
        some = sorted(self._strings)[:5]
        more = len(self._strings) - len(some)
        shown = ", ".join(map(_shown, some)) or "none"
        return f"{shown} and {more} more" if more else shown


def check_returned(written: Ledger, value: object, prefix: str = "") -> None:
    """Raise KeyContractError unless every key of the ledger is somewhere in `value`."""
    if written:
        returned = ReturnedKeys(written, prefix)
        returned.add(value)
        returned.check()


def _strings(value: object) -> Iterator[str]:
    pending: list[Any] = [value]
    seen: set[int] = set()  # values may contain themselves
    while pending:
        one = pending.pop()
        if isinstance(one, str):
            yield one
        elif id(one) not in seen:
            seen.add(id(one))
            pending.extend(each for each in _inside(one) if isinstance(each, _SEARCHED_TYPES))


def _inside(value: object) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("Mapping[Any, Any]", value).values()
    return cast("Iterable[Any]", value) if isinstance(value, (list, tuple)) else ()


class Manifest:
    """The result of a generator's invocation: its items merged, when every one of them is made of strings.

    Items that are a str, or a list or tuple of str, make one list. Dicts of str to str make one dict, in which later items
    win. Both together make a list that ends with the dict's values. Any other item, or none at all, makes None.
    """

    __slots__ = ("_by_name", "_items", "_listed", "_other")

    def __init__(self) -> None:
        self._items: list[str] = []
        self._by_name: dict[str, str] = {}
        self._listed: bool | None = None  # None until the first item, True once one of them was no dict
        self._other = False  # an item was not made of strings

    def add(self, item: object) -> None:
        """Merge one yielded item."""
        if self._other:
            return
        values = [item] if isinstance(item, str) else _inside(item)
        named = cast("Mapping[str, str]", item) if isinstance(item, dict) else None
        if named is not None and _all_text(named) and _all_text(values):
            self._by_name.update(named)
            self._listed = bool(self._listed)
        elif isinstance(item, (str, list, tuple)) and _all_text(values):
            self._items.extend(values)
            self._listed = True
        else:
            self._other = True
            self._items.clear()
            self._by_name.clear()

    def value(self) -> list[str] | dict[str, str] | None:
        """The manifest of the items so far, or None."""
        if self._other or self._listed is None:
            return None
        if self._listed:
            return [*self._items, *self._by_name.values()]
        return dict(self._by_name)


def _all_text(values: Iterable[Any]) -> bool:
    return all(type(value) is str for value in values)


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}...{text[-10:]}"
