"""Which invocation an id is: it may be used again after a purge, and what comes late is told apart by that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bson import Timestamp

from .documents import Document, birth_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

__all__ = ["Incarnations"]

MOST = 50_000
"""Ids that are kept in mind; beyond that the oldest are forgotten, and read again when they are asked for."""


class Incarnations:
    """The latest invocation that one engine has seen under each id. `read` gives the documents of ids it has not."""

    def __init__(self, read: Callable[[Sequence[str]], Awaitable[list[Document]]]) -> None:
        self._read = read
        self._seen: dict[str, tuple[Timestamp, str]] = {}

    def remember(self, row: Document) -> None:
        """Keep in mind which invocation of its id this row is. Of two reads the answers may come in either order."""
        id, at = row["id"], row.get("submittedAt")
        if not isinstance(at, Timestamp):  # a stranger's: nothing is told of it, everything looked up
            return
        known = self._seen.get(id)
        if known is not None and known[0] > at:
            return
        if known is None and len(self._seen) >= MOST:
            del self._seen[next(iter(self._seen))]
        self._seen[id] = at, birth_of(row)

    def forget(self, ids: Iterable[str]) -> None:
        """These ids are being submitted, maybe again."""
        for id in ids:
            self._seen.pop(id, None)

    def known(self, id: str) -> str | None:
        """Which invocation `id` is, as far as has been seen."""
        seen = self._seen.get(id)
        return None if seen is None else seen[1]

    async def of(self, ids: Sequence[str]) -> dict[str, str]:
        """Which invocation each of `ids` is, of those that are there. Raises what `read` does."""
        incarnations = {id: birth for id in ids if (birth := self.known(id)) is not None}
        if unknown := [id for id in ids if id not in incarnations]:
            for row in await self._read(unknown):
                self.remember(row)
            incarnations |= {id: birth for id in unknown if (birth := self.known(id)) is not None}
        return incarnations
