"""Incarnations: which invocation an id means. An id may be used again after a purge; late messages name the old one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bson import Timestamp

from .documents import Document, birth_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Sequence

__all__ = ["Incarnations"]

MAX_IDS = 50_000
"""The most ids to remember; the oldest are forgotten and read again when needed."""


class Incarnations:
    """The latest invocation that one engine has seen under each id; `read` returns the documents of other ids."""

    def __init__(self, read: Callable[[Sequence[str]], Awaitable[list[Document]]]) -> None:
        self._read = read
        self._seen: dict[str, tuple[Timestamp, str]] = {}

    def remember(self, row: Document) -> None:
        """Remember the incarnation of this row. The answers of two reads may arrive in either order."""
        id = row["id"]
        at = row.get("submittedAt")
        if not isinstance(at, Timestamp):  # not written by this package: always read from the database
            return
        known = self._seen.get(id)
        if known is not None and known[0] > at:
            return
        if known is None and len(self._seen) >= MAX_IDS:
            del self._seen[next(iter(self._seen))]
        self._seen[id] = at, birth_of(row)

    def forget(self, ids: Iterable[str]) -> None:
        """Forget ids that are being submitted, perhaps again."""
        for id in ids:
            self._seen.pop(id, None)

    def known(self, id: str) -> str | None:
        """The incarnation last seen under `id`, or None."""
        seen = self._seen.get(id)
        if seen is None:
            return None
        return seen[1]

    async def of(self, ids: Sequence[str]) -> dict[str, str]:
        """The incarnations of those `ids` that exist. Raises what `read` raises."""
        unknown = [id for id in ids if self.known(id) is None]
        if unknown:
            for row in await self._read(unknown):
                self.remember(row)
        found: dict[str, str] = {}
        for id in ids:
            incarnation = self.known(id)
            if incarnation is not None:
                found[id] = incarnation
        return found
