"""Reading what an API server says: JSON in which anything may be missing, or be something else."""

from __future__ import annotations

from typing import Any, cast

__all__ = ["entries", "meta", "part"]


def part(found: Any, *names: str) -> dict[str, Any]:
    """The object below those names; an empty one where there is none."""
    for name in names:
        found = cast("dict[str, Any]", found).get(name) if isinstance(found, dict) else None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else {}


def entries(found: Any) -> list[dict[str, Any]]:
    """The objects in a list; none where there is no list."""
    kind: type[Any] = list
    return [part(one) for one in found if isinstance(one, dict)] if isinstance(found, kind) else []


def meta(found: Any, name: str) -> str:
    """A text among an object's metadata; "" where there is none."""
    return str(part(found, "metadata").get(name) or "")
