"""Reads a stream to its end, which may be an error."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterable


async def read_into(got: list[Any], stream: AsyncIterable[Any]) -> None:
    """Append the values to `got`, where they stay if the stream ends with an error."""
    async for value in stream:
        got.append(value)  # noqa: PERF401 -- a comprehension would lose it
