"""Pack a thunk into an Envelope."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..wire import Envelope, pack

if TYPE_CHECKING:
    from .thunk import Thunk

__all__ = ["pack_thunk"]

_EMPTY_MAP = pack({})


def pack_thunk(
    thunk: Thunk[Any], fn: dict[str, Any], *, id: str, prefix: str, key: str | None, parent: str | None
) -> Envelope:
    """Make the Envelope of a thunk whose function is described already, by `serialize_fn`."""
    args = pack(list(thunk.args))
    kwargs = pack(dict(thunk.kwargs)) if thunk.kwargs else _EMPTY_MAP
    return Envelope(id, fn, args, kwargs, prefix, key, parent=parent)
