"""Calls of a UDF through its queue. It is imported at the first one, so that a local call loads no event loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..concurrency.run_sync import run_sync
from .calls import call, submit_operation
from .default_plane import plane_of
from .streams import CallValues, SyncCallValues
from .thunk import Thunk

if TYPE_CHECKING:
    from ..planes.plane import Plane
    from .udf import UDF

__all__ = ["call_udf", "submit_udf"]


def submit_udf(
    udf: UDF[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dispatch: Plane | None,
    key: str | None,
    priority: float,
) -> Any:
    """Submit a call: return a coroutine of the id for async bodies, the id for the others.

    Whatever is wrong with the call is raised here, before anything is sent or awaited.
    """
    plane = plane_of(dispatch)
    op = submit_operation(udf.queue or "", Thunk(udf, args, kwargs), key, priority)
    if udf.is_async or udf.is_asyncgen:
        return plane.do(op)
    return run_sync(plane.do, op, hint=_hint(udf, "await {q}.submit({thunk})"))


def call_udf(
    udf: UDF[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dispatch: Plane | None,
    key: str | None,
    priority: float,
) -> Any:
    """Submit a call; the kind of the body decides what is returned: the value, a coroutine of it, or an iterator."""
    plane = plane_of(dispatch)
    op = submit_operation(udf.queue or "", Thunk(udf, args, kwargs), key, priority)
    if udf.is_async:
        return call(plane, op)
    if udf.is_asyncgen:
        return CallValues(plane, op)
    if udf.is_gen:
        return SyncCallValues(plane, op, _hint(udf, "async for value in {q}.stream(await {q}.submit({thunk}))"))
    return run_sync(call, plane, op, hint=_hint(udf, "await {q}.call({thunk})"))


def _hint(udf: UDF[..., Any], spelling: str) -> str:
    """The async spelling, for callers that block their loop."""
    name = getattr(udf, "__name__", "f")
    return spelling.format(q=f"dls.Queue({udf.queue!r})", thunk=f"dls.thunk({name}, ...)")
