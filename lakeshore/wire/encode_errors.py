"""Errors of packing: the type of the value, the path to it, and the fix.

Nothing here runs while packing succeeds. The path to the value is searched for afterwards, from the root.
"""

from __future__ import annotations

import enum
import types
from typing import TYPE_CHECKING

from ..errors import EncodeError
from .values import Node, kind_of, type_name, walk

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CannotPack", "describe_error", "encode_error", "unknown_type"]

GENERIC_FIX = (
    "make it one of str, bytes, int, float, bool, None, list, tuple, dict, a numpy array, a torch tensor or an image, "
    "or register a codec for it with wire.register(wire.Codec(...))"
)
_BASES = (tuple, dict, list, str, bytes, int, float)
"""The types whose subclasses people expect to be packed."""
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_TYPES_OF_STDLIB = frozenset({
    "datetime.datetime", "datetime.date", "datetime.time", "datetime.timedelta", "uuid.UUID", "decimal.Decimal",
    "set", "frozenset", "complex", "int", "pathlib.PurePosixPath", "pathlib.PureWindowsPath", "pathlib.PosixPath",
    "pathlib.WindowsPath",
})  # fmt: skip
"""What `STDLIB` has codecs for, by name: the error must not import that module, and what it imports, for a hint."""


class CannotPack(Exception):
    """A value cannot be packed. `encode_error` adds the path to it and makes it an EncodeError."""

    def __init__(self, value: object, reason: str, fix: str, as_key: bool = False) -> None:
        """
        Args:
            value: The value.
            reason: Why not.
            fix: What to do instead.
            as_key: Only a dict key is meant, not the same object elsewhere.
        """
        super().__init__(reason)
        self.value = value
        self.reason = reason
        self.fix = fix
        self.as_key = as_key


def unknown_type(value: object) -> CannotPack:
    """The error for a value that no codec takes, with the fix that fits its type."""
    kind = kind_of(value)
    names = dir(kind)
    base = next((base for base in _BASES if issubclass(kind, base)), None)
    reason = "msgpack has no form for it"
    if issubclass(kind, enum.Enum):
        reason = "an enum member would come back as something else"
        fix = "send value.value or value.name"
    elif type_name(value).replace("pathlib._local.", "pathlib.") in _TYPES_OF_STDLIB:
        if kind is int:
            reason = "it is outside -2^63 to 2^64-1"
        fix = (
            "turn its ready-made codec on, on both sides, with wire.register(*wire.STDLIB), or send it in another form"
        )
    elif base is not None:
        reason = f"it is a subclass of {base.__name__} and would come back as {base.__name__}"
        fix = f"send {base.__name__}(value), or register a codec for it with wire.register(wire.Codec(...))"
    elif kind in _FUNCTIONS:
        reason = "functions do not travel as data"
        fix = "send a name or the result of calling it"
    elif "__dataclass_fields__" in names:
        fix = f"send dataclasses.asdict(value), or {GENERIC_FIX}"
    elif "__next__" in names:
        reason = "it is an iterator, which can be read only once"
        fix = "send list(value)"
    else:
        fix = GENERIC_FIX
    return CannotPack(value, reason, fix)


def encode_error(root: object, error: Exception) -> EncodeError:
    """The EncodeError for what was raised while `root` was packed."""
    bad = root
    node: Node | None = None
    if isinstance(error, CannotPack):
        as_key = error.as_key
        bad = error.value
        reason = error.reason
        fix = error.fix
        node = _find(root, lambda node: node.value is bad and node.is_key >= as_key)
    elif isinstance(error, UnicodeEncodeError):
        bad = error.object
        node = _find(root, lambda node: node.value is bad)
        reason = "it holds a lone surrogate, which UTF-8 has no form for"
        fix = 'send bytes (value.encode("utf-8", "surrogatepass")) or take the surrogate out'
    elif isinstance(error, BufferError):
        node = _find(root, lambda node: type(node.value) is memoryview and not node.value.contiguous)
        if node is not None:
            bad = node.value
        reason = "its memory is not contiguous"
        fix = "send bytes(value)"
    elif isinstance(error, RecursionError) or "recursion limit" in str(error):
        node = _deepest(root)
        bad = node.value
        if node.cyclic:
            reason = "the value contains itself"
            fix = "send a tree without cycles"
        else:
            reason = "it lies deeper than msgpack can nest containers"
            fix = "flatten it, or send its parts one by one"
    else:
        reason = str(error)
        fix = "send it in parts of less than 4 GiB"
    where = ""
    if node is not None:
        where = f" as a dict key at {node.path()}" if node.is_key else f" at {node.path()}"
    return EncodeError(f"cannot pack a value of type {type_name(bad)}{where}: {reason}; {fix}")


def _find(root: object, is_wanted: Callable[[Node], bool]) -> Node | None:
    return next(filter(is_wanted, walk(root)), None)


def _deepest(root: object) -> Node:
    """A container that contains itself, or else the node that lies deepest."""
    deepest = Node(root)
    for node in walk(root):
        if node.cyclic:
            return node
        if node.depth > deepest.depth:
            deepest = node
    return deepest


def describe_error(error: BaseException) -> str:
    """An error as part of a sentence."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
