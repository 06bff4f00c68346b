"""Large bodies: bytes that do not fit into a document are stored in GridFS, and the document holds a reference.

A document holds 16 MB. An envelope may take 8 of them, a result 4, a final frame 2, and the small fields the rest, so that
everything always fits; a separate frame may take 8. Larger bytes are written before the document that refers to them, so
that a reader of the document finds them.

The layout is that of GridFS, so its tools can read the files. The driver writes the document of a file last, so that nothing
finds the chunks of an interrupted upload. Here it is written first and names its invocation: the purge of the invocation
also deletes interrupted uploads.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from bson import ObjectId

from ...errors import PlaneUnavailable, WireError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pymongo.asynchronous.database import AsyncDatabase

__all__ = [
    "MAX_INLINE_ENVELOPE",
    "MAX_INLINE_FINAL_FRAME",
    "MAX_INLINE_FRAME",
    "MAX_INLINE_RESULT",
    "Bodies",
    "BytesLost",
    "is_ref",
]

MB = 1 << 20
MAX_INLINE_ENVELOPE = 8 * MB
MAX_INLINE_RESULT = 4 * MB
MAX_INLINE_FINAL_FRAME = 2 * MB
MAX_INLINE_FRAME = 8 * MB
"""The most bytes of each kind that its document holds itself."""
CHUNK_BYTES = 4 * MB - 1024
"""The size of a chunk: few round trips for a large body."""
CHUNKS_PER_INSERT = 4
"""Chunks that are sent in one round trip."""


class BytesLost(PlaneUnavailable):
    """The bytes that a document refers to do not exist: a purge ran in between, or they were deleted by hand."""


def is_ref(value: Any) -> bool:
    """True if the value of a field is a reference to stored bytes."""
    return isinstance(value, dict) and "ref" in value


class Bodies:
    """Stores, reads and deletes large bodies."""

    def __init__(self, database: AsyncDatabase[dict[str, Any]]) -> None:
        self._files = database["bodies.files"]
        self._chunks = database["bodies.chunks"]

    async def store(self, data: bytes | None, limit: int, invocation: str) -> Any:
        """Return the value of a field for `data`: the bytes, or a reference after storing them."""
        if data is None or len(data) <= limit:
            return data
        ref = ObjectId()
        view = memoryview(data)
        file: dict[str, Any] = {
            "_id": ref,
            "filename": "body",
            "length": len(data),
            "chunkSize": CHUNK_BYTES,
            "uploadDate": datetime.now(UTC),  # GridFS requires one; this package does not use it
            "metadata": {"invocation": invocation},
        }
        await self._files.insert_one(file)
        numbers = range(-(-len(data) // CHUNK_BYTES))
        for first in numbers[::CHUNKS_PER_INSERT]:
            some = [
                (n, view[n * CHUNK_BYTES : (n + 1) * CHUNK_BYTES]) for n in numbers[first : first + CHUNKS_PER_INSERT]
            ]
            await self._chunks.insert_many([{"files_id": ref, "n": n, "data": bytes(part)} for n, part in some])
        return {"ref": ref, "length": len(data)}

    async def whole(self, value: Any) -> bytes | None:
        """Return the bytes that a field holds or refers to."""
        if value is None or isinstance(value, bytes):
            return value
        if not is_ref(value):
            raise WireError(f"expected bytes in a document, or a reference to some, got {value!r:.100}")
        chunks = self._chunks.find({"files_id": value["ref"]}, {"data": 1}).sort("n", 1)
        data = b"".join([chunk["data"] async for chunk in chunks])
        if len(data) != value.get("length"):
            raise BytesLost("the bytes that a document refers to are purged or lost")
        return data

    async def drop(self, values: Iterable[Any]) -> None:
        """Delete the bytes that these fields refer to."""
        await self._delete([value["ref"] for value in values if is_ref(value)])

    async def drop_all(self, invocations: Sequence[str]) -> None:
        """Delete all stored bytes of these invocations."""
        found = self._files.find({"metadata.invocation": {"$in": list(invocations)}}, {"_id": 1})
        await self._delete([file["_id"] async for file in found])

    async def _delete(self, refs: list[Any]) -> None:
        if refs:
            await self._chunks.delete_many({"files_id": {"$in": refs}})
            await self._files.delete_many({"_id": {"$in": refs}})
