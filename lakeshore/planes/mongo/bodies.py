"""What is too large for a document stands in GridFS, and the document refers to it.

A document holds 16 MB. Of these an envelope may take 8, a result 4, a final frame 2 and the small parts the rest, so that
together they always fit; a frame of its own may take 8. What is larger is written before the document that refers to it,
so that whoever sees the document finds the bytes.

The layout is GridFS's own, and any tool for it reads these files; they are written here because the driver writes the file's
document last, and what breaks off before that nobody finds again. Here it comes first, and names the invocation that it is
of: whatever became of an upload, it goes with the purge of its invocation.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bson import ObjectId

from ...errors import PlaneUnavailable, WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pymongo.asynchronous.database import AsyncDatabase

__all__ = ["ENVELOPE", "FINAL", "FRAME", "RESULT", "Bodies", "BytesLost", "is_ref"]

MB = 1 << 20
ENVELOPE, RESULT, FINAL, FRAME = 8 * MB, 4 * MB, 2 * MB, 8 * MB
"""Bytes up to which each of these stands in its document."""
CHUNK = 4 * MB - 1024
"""Bytes of a chunk: a large body is few round trips."""
TOGETHER = 4
"""Chunks that are sent at once."""


class BytesLost(PlaneUnavailable):
    """What a document refers to is not there: a purge has passed by between the two, or somebody has deleted it."""


def is_ref(value: Any) -> bool:
    """Whether a field holds a reference in place of what it stands for."""
    return isinstance(value, dict) and "ref" in value


class Bodies:
    """Uploads and downloads."""

    def __init__(self, database: AsyncDatabase[dict[str, Any]]) -> None:
        self._files, self._chunks = database["bodies.files"], database["bodies.chunks"]

    async def store(self, data: bytes | None, limit: int, invocation: str) -> Any:
        """What a field is to hold for `data`: the bytes themselves, or a reference to where they are now."""
        if data is None or len(data) <= limit:
            return data
        ref, view = ObjectId(), memoryview(data)
        file: dict[str, Any] = {
            "_id": ref,
            "filename": "body",
            "length": len(data),
            "chunkSize": CHUNK,
            "uploadDate": datetime.now(UTC),  # GridFS asks for one; nothing here goes by it
            "metadata": {"invocation": invocation},
        }
        await self._files.insert_one(file)
        numbers = range(-(-len(data) // CHUNK))
        for first in numbers[::TOGETHER]:
            some = [(n, view[n * CHUNK : (n + 1) * CHUNK]) for n in numbers[first : first + TOGETHER]]
            await self._chunks.insert_many([{"files_id": ref, "n": n, "data": bytes(part)} for n, part in some])
        return {"ref": ref, "length": len(data)}

    async def whole(self, value: Any) -> bytes | None:
        """The bytes that a field holds or refers to."""
        if value is None or isinstance(value, bytes):
            return value
        if not is_ref(value):
            raise WireError(f"expected bytes in a document, or a reference to some, got {value!r:.100}")
        chunks = self._chunks.find({"files_id": value["ref"]}, {"data": 1}).sort("n", 1)
        data = b"".join([chunk["data"] async for chunk in chunks])
        if len(data) != value.get("length"):
            raise BytesLost("the bytes that a document refers to are being purged with it, or are lost")
        return data

    async def drop(self, values: Iterable[Any]) -> None:
        """Delete what these fields refer to."""
        await self._delete([value["ref"] for value in values if is_ref(value)])

    async def drop_all(self, invocations: Sequence[str]) -> None:
        """Delete all that is of these invocations."""
        found = self._files.find({"metadata.invocation": {"$in": list(invocations)}}, {"_id": 1})
        await self._delete([file["_id"] async for file in found])

    async def _delete(self, refs: list[Any]) -> None:
        if refs:
            await self._chunks.delete_many({"files_id": {"$in": refs}})
            await self._files.delete_many({"_id": {"$in": refs}})
