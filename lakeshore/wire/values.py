"""Values as the codec sees them: their types, and the paths to the values inside them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Node", "dicts_in", "kind_of", "type_name", "walk"]

MAX_STEP_LENGTH = 60
"""Characters of one step of a path that are written out."""
MAX_END_STEPS = 6
"""Steps of a long path that are written out at each end."""
_CONTAINERS = frozenset({list, tuple, dict})


def kind_of(value: object) -> type[Any]:
    """`type(value)`, typed so that type checkers do not narrow a value from outside to a list of unknown items."""
    return type(value)


def type_name(value: object) -> str:
    """The type of a value as its author would write it: `set`, `numpy.int64`, `collections.OrderedDict`."""
    kind = kind_of(value)
    module = getattr(kind, "__module__", "builtins")  # a class made by exec may have none
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


class Node:
    """A value inside a packed one and the path to it."""

    __slots__ = ("cyclic", "depth", "is_key", "parent", "step", "value")

    def __init__(self, value: object, parent: Node | None = None, step: object = None, is_key: bool = False) -> None:
        """
        Args:
            value: The value.
            parent: The container that it lies in; None for the root.
            step: Its index or key in that container; for a dict key, the key itself.
            is_key: It is a dict key.
        """
        self.value = value
        self.parent = parent
        self.step = step
        self.is_key = is_key
        self.depth = 0
        self.cyclic = False
        """It is a container that contains itself."""

    def path(self) -> str:
        """The path from the root, like `$[0]["x"]`."""
        steps: list[str] = []
        node: Node = self
        while node.parent is not None:
            if not node.is_key:  # the path of a bad key ends at its dict; the sentence names it as a key
                steps.append(_step_text(node.step))
            node = node.parent
        steps.reverse()
        if len(steps) > 2 * MAX_END_STEPS:
            steps[MAX_END_STEPS:-MAX_END_STEPS] = ["..."]
        return "$" + "".join(steps)


def _step_text(step: object) -> str:
    text = json.dumps(step, ensure_ascii=False) if type(step) is str else repr(step)
    if len(text) > MAX_STEP_LENGTH:
        text = f"{text[: MAX_STEP_LENGTH - 3]}..."
    return f"[{text}]"


def walk(root: object) -> Iterator[Node]:
    """Each value in `root` in the order of packing, keys included. Containers that are shared or cyclic are entered once."""
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
    """Every dict in `root`, once. Of values that are no containers only the types are read."""
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
