"""Read the JSON of an API server, in which any field may be missing or have another type."""

from __future__ import annotations

from typing import Any, cast

__all__ = ["entries", "items", "meta", "part"]


def part(found: Any, *names: str) -> dict[str, Any]:
    """Return the object below those names; an empty one where there is none."""
    for name in names:
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def entries(found: Any) -> list[dict[str, Any]]:
    """Return the objects in a list; none where there is no list."""
    return [part(item) for item in items(found) if isinstance(item, dict)]


def items(found: Any) -> list[Any]:
    """Return the items of a list; none where there is no list."""
    kind: type[Any] = list  # type checkers disagree on what Any is after a check for `list` itself
    return [*found] if isinstance(found, kind) else []


def meta(found: Any, name: str) -> str:
    """Return a text of an object's metadata; "" where there is none."""
    return str(part(found, "metadata").get(name) or "")
