"""What packing says when it refuses a value: the type, the way to it, and the fix.

Nothing here runs while packing goes well. The way to the value is searched for afterwards, from the root.
"""

from __future__ import annotations

import enum
import json
import types
from typing import TYPE_CHECKING, Any

from ..errors import EncodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Node", "Refused", "dicts_in", "explain", "kind_of", "type_name", "unknown_type", "walk"]

GENERIC_FIX = (
    "make it one of str, bytes, int, float, bool, None, list, tuple, dict, a numpy array, a torch tensor or an image, "
    "or register a codec for it with wire.register(wire.Codec(...))"
)
_CONTAINERS = frozenset({list, tuple, dict})
_BASES = (tuple, dict, list, str, bytes, int, float)  # whose subclasses people expect to pass
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_SHOWN = 6  # steps of a long path that are written out at each end


class Refused(Exception):
    """A value that cannot be packed: why, and what to do. `explain` adds the way to it and makes it an EncodeError."""

    def __init__(self, value: object, why: str, fix: str, as_key: bool = False) -> None:
        super().__init__(why)
        self.value, self.why, self.fix, self.as_key = value, why, fix, as_key


def kind_of(value: object) -> type[Any]:
    """`type(value)`, as type checkers like it for values from outside: not narrowed to a list of who knows what."""
    return type(value)


def type_name(value: object) -> str:
    """The type of a value as its author would write it: `set`, `numpy.int64`, `collections.OrderedDict`."""
    kind = kind_of(value)
    module = getattr(kind, "__module__", "builtins")  # a class made by exec may have none
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


class Node:
    """A value inside a packed one and the way to it.

    `is_key` when it is a dict key, the step then being the key; `cyclic` when it is a container that it lies in.
    """

    __slots__ = ("cyclic", "depth", "is_key", "parent", "step", "value")

    def __init__(self, value: object, parent: Node | None = None, step: object = None, is_key: bool = False) -> None:
        self.value, self.parent, self.step, self.is_key = value, parent, step, is_key
        self.depth = 0
        self.cyclic = False

    def path(self) -> str:
        """The way from the root, like `$[0]["x"]`."""
        steps: list[str] = []
        node: Node = self
        while node.parent is not None:
            if not node.is_key:  # the path of a bad key ends at its dict; the sentence says that it is a key
                steps.append(_step(node.step))
            node = node.parent
        steps.reverse()
        if len(steps) > 2 * _SHOWN:
            steps[_SHOWN:-_SHOWN] = ["..."]
        return "$" + "".join(steps)


def _step(step: object) -> str:
    text = json.dumps(step, ensure_ascii=False) if type(step) is str else repr(step)
    return f"[{text if len(text) <= 60 else text[:57] + '...'}]"


def walk(root: object) -> Iterator[Node]:
    """Each value in `root` in the order of packing, keys included; what is shared or cyclic is entered once."""
    entered: set[int] = set()
    around: dict[int, None] = {0: None}  # the containers that the walk is in, by identity, the innermost last
    levels: list[Iterator[Node]] = [iter((Node(root),))]
    while levels:
        node = next(levels[-1], None)
        if node is None:
            levels.pop()
            around.popitem()
            continue
        is_container = type(node.value) in _CONTAINERS
        identity = id(node.value)
        node.depth = len(levels)
        node.cyclic = is_container and identity in around
        yield node
        if is_container and identity not in entered:
            entered.add(identity)
            around[identity] = None
            levels.append(_children(node))


def _children(node: Node) -> Iterator[Node]:
    value: Any = node.value
    if kind_of(value) is dict:
        for key, item in value.items():
            yield Node(key, node, key, is_key=True)
            yield Node(item, node, key)
    else:
        for index, item in enumerate(value):
            yield Node(item, node, index)


def dicts_in(root: object) -> Iterator[dict[Any, Any]]:
    """Every dict in `root`, once, without looking at more than the types of what is no container."""
    entered: set[int] = set()
    pending: list[Any] = [root]
    while pending:
        value = pending.pop()
        if id(value) in entered or kind_of(value) not in _CONTAINERS:
            continue
        entered.add(id(value))
        if kind_of(value) is dict:
            yield value
            value = value.values()
        pending.extend(item for item in value if type(item) in _CONTAINERS)


def _find(root: object, wanted: Callable[[Node], bool]) -> Node | None:
    return next(filter(wanted, walk(root)), None)


def explain(root: object, error: Exception) -> EncodeError:
    """The EncodeError for what went wrong while `root` was packed."""
    if isinstance(error, Refused):
        bad, why, fix, as_key = error.value, error.why, error.fix, error.as_key
        node = _find(root, lambda node: node.value is bad and node.is_key >= as_key)
    elif isinstance(error, UnicodeEncodeError):
        text = error.object
        node = _find(root, lambda node: node.value is text)
        bad, why = text, "it holds a lone surrogate, which UTF-8 has no form for"
        fix = 'send bytes (value.encode("utf-8", "surrogatepass")) or take the surrogate out'
    elif isinstance(error, BufferError):
        node = _find(root, lambda node: type(node.value) is memoryview and not node.value.contiguous)
        bad, why, fix = node.value if node else root, "its memory is not contiguous", "send bytes(value)"
    elif isinstance(error, RecursionError) or "recursion limit" in str(error):
        node = _deepest(root)
        bad, why = node.value, "it lies deeper than msgpack can nest containers"
        fix = "flatten it, or send its parts one by one"
        if node.cyclic:
            why, fix = "the value contains itself", "send a tree without cycles"
    else:
        node, bad, why, fix = None, root, str(error), "send it in parts of less than 4 GiB"
    return EncodeError(_sentence(node, bad, why, fix))


def _sentence(node: Node | None, bad: object, why: str, fix: str) -> str:
    what = f"a value of type {type_name(bad)}"
    if node is None:
        return f"cannot pack {what}: {why}; {fix}"
    where = f"as a dict key at {node.path()}" if node.is_key else f"at {node.path()}"
    return f"cannot pack {what} {where}: {why}; {fix}"


def _deepest(root: object) -> Node:
    """A container that lies in itself, or else what lies deepest."""
    deepest = Node(root)
    for node in walk(root):
        if node.cyclic:
            return node
        if node.depth > deepest.depth:
            deepest = node
    return deepest


def unknown_type(value: object, suggest_stdlib: Callable[[object], bool]) -> Refused:
    """The refusal of a value that no codec takes, with the fix that fits its type."""
    kind = kind_of(value)
    names = dir(kind)
    base = next((base for base in _BASES if issubclass(kind, base)), None)
    if issubclass(kind, enum.Enum):
        why, fix = "an enum member would come back as something else", "send value.value or value.name"
    elif suggest_stdlib(value):
        why = "it is outside -2^63 to 2^64-1" if kind is int else "msgpack has no form for it"
        fix = (
            "turn its ready-made codec on, on both sides, with wire.register(*wire.STDLIB), or send it in another form"
        )
    elif base is not None:
        why = f"it is a subclass of {base.__name__} and would come back as {base.__name__}"
        fix = f"send {base.__name__}(value), or register a codec for it with wire.register(wire.Codec(...))"
    elif kind in _FUNCTIONS:
        why, fix = "functions do not travel as data", "send a name or the result of calling it"
    elif "__dataclass_fields__" in names:
        why, fix = "msgpack has no form for it", "send dataclasses.asdict(value), or " + GENERIC_FIX
    elif "__next__" in names:
        why, fix = "it is an iterator, which can be read only once", "send list(value)"
    else:
        why, fix = "msgpack has no form for it", GENERIC_FIX
    return Refused(value, why, fix)
