"""Reading a stream to its end, whatever that is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterable


async def read_into(got: list[Any], stream: AsyncIterable[Any]) -> None:
    """What came before an error stays in `got`."""
    async for value in stream:
        got.append(value)  # noqa: PERF401 -- a comprehension would lose it
