"""How the plane works with a server that has the function protocol's own routes and none of our additions.

It sends one request for each operation and each wait, and a GET for each stream that is read. It sends no heartbeats: the
claims of such servers never expire. What has no route becomes what is closest: a retry becomes a failed ack, a release the
ack of a daemon that is shut down.
"""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import anyio
from anyio.lowlevel import checkpoint

from ...concurrency.portal import across
from ...concurrency.tasks import run_to_end
from ...errors import DispatchError, InvocationNotFound, LakeshoreError, PlaneUnavailable
from ...limits import POLL_TIMEOUT
from ...wire._msgpack import READ_ERRORS, Unpacker
from ..contract.news import Cursor, News
from ..contract.operations import Append, Appended, Beat, Beaten, Finish, Operation, Requeue, Requeued, Submit
from ..contract.records import TERMINAL, Failure, Outcome, Page
from ..protocol import messages
from ..protocol.fields import Fields, is_list
from .attempt import HttpClient, MissingRoute, decoding

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from ...concurrency.portal import Home
    from ..contract.store import Interest

__all__ = ["OlderServer"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

RECHECK_INTERVAL = 60.0
"""Seconds after which a missing route is tried again: the 404 may have come from a proxy before the server."""
MAX_AWAITS = 4
"""Awaits in flight at a time."""
SHARED_AWAIT_TIMEOUT = 1.0
"""Seconds that one await is held while more waits than MAX_AWAITS take turns."""
FRAME_GAP = 0.005
"""Seconds to wait for the next frame before a page with some frames is handed on."""
READ_TIMEOUT = 0.5
"""Seconds to wait for a first frame in a read that is not meant to wait."""
STREAM_START_TIMEOUT = 15.0
"""Seconds to wait for the start of a stream's body, and for the end of a body that is known to end."""
PAUSE_AFTER_ERROR = 1.0
PAUSE_AFTER_DROP = 0.1
"""Seconds, half of it more or less, before a wait is tried again after an error, or after a stream ended too early."""

END_FRAME = 3
ERROR_FRAME = 4
_SHUT_DOWN = Failure("Cancelled", "daemon shutdown grace expired")


@dataclass(frozen=True, slots=True)
class _Lack:
    """A missing route. until: when it is tried again. message, wrong_address: of the MissingRoute that showed it."""

    until: float
    message: str
    wrong_address: str | None


class OlderServer:
    """The server without our additions, and which routes it was found to lack."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._lacking: dict[str, _Lack] = {}

    def lacks(self, route: str) -> bool:
        """Whether the server was found not to have this route, within the last RECHECK_INTERVAL seconds."""
        lack = self._lacking.get(route)
        return lack is not None and anyio.current_time() < lack.until

    def missing(self, route: str) -> MissingRoute:
        """The error of a route that `lacks` knows to be missing."""
        lack = self._lacking[route]
        return MissingRoute(lack.message, lack.wrong_address)

    def learn(self, route: str, exc: MissingRoute) -> None:
        """Remember that the server has no such route."""
        if not self._lacking:
            logger.info("the server lacks the route %s: single requests, no heartbeats from now on", route)
        self._lacking[route] = _Lack(anyio.current_time() + RECHECK_INTERVAL, str(exc), exc.wrong_address)

    # Operations

    async def apply(self, op: Operation, fields: Fields) -> Any:
        """Apply one operation. Returns its answer, or the exception that is its result.

        fields: the operation as an item of a batch.
        """
        try:
            if isinstance(op, Submit):
                return messages.decode_submit_answer(op, await self._client.call("submit", fields, id=op.id))
            if isinstance(op, Finish):
                return await self._finish(op, fields)
            if isinstance(op, Append):
                return await self._append(op)
            if isinstance(op, Requeue):
                return await self._requeue(op)
        except MissingRoute as exc:
            return exc.of_every_server()
        except PlaneUnavailable:
            raise
        except (DispatchError, ValueError) as exc:
            return exc
        return DispatchError(f"the server has no route for {type(op).__name__.lower()}: it is of an older kind")

    async def _finish(self, op: Finish, fields: Fields) -> bool:
        if op.final is not None:  # such a server does not read it from an ack
            frame = {"seq": op.final.seq, "bytes": op.final.bytes, "final": True}
            try:
                await self._client.call("chunk", _fence_fields(op) | frame, id=op.fence.id)
            except PlaneUnavailable:
                raise
            except (DispatchError, ValueError) as exc:
                logger.debug("the final frame of %s was not taken: %s", op.fence.id, exc)
        return messages.decode_finish_answer(op, await self._client.call("ack", fields, id=op.fence.id))

    async def _append(self, op: Append) -> Appended:
        written = 0
        duplicates = 0
        for at, frame in enumerate(op.frames):
            is_last = op.final and at == len(op.frames) - 1
            chunk = _fence_fields(op) | {"seq": op.first_seq + at, "bytes": frame, "final": is_last}
            answer = await self._client.call("chunk", chunk, id=op.fence.id)
            if answer.get("duplicate") or messages.decode_append_answer(op, answer).duplicates:
                duplicates += 1
            else:
                written += 1
        return Appended(written, duplicates)

    async def _requeue(self, op: Requeue) -> Requeued:
        error = _SHUT_DOWN
        state = "killed"
        if op.reason == "retry":
            error = op.error or _SHUT_DOWN
            state = "failed"
        ack = _fence_fields(op) | {"state": state, "result_blob": b"", "error": error.as_dict()}
        await self._client.call("ack", ack, id=op.fence.id)
        return Requeued(state, "")

    async def beat(self, op: Beat) -> Beaten:
        """As if nothing were lost and nothing cancelled: such a server tells neither."""
        await self._client.pause(op.wait, op)
        return Beaten([], [])

    # Reads

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        found: dict[str, Outcome] = {}
        limiter = anyio.Semaphore(MAX_AWAITS)

        async def read(id: str) -> None:
            async with limiter:
                found[id] = await self._await(id, 0.0)

        async with anyio.create_task_group() as group:
            for id in dict.fromkeys(ids):
                group.start_soon(read, id)
        return [found[id] for id in ids]

    async def _await(self, id: str, hold: float) -> Outcome:
        try:
            fields = await self._client.call("await", {"invocation_id": id, "timeout_s": hold}, id=id, hold=hold)
        except (MissingRoute, InvocationNotFound):
            return Outcome(id, "unknown")
        with decoding("await"):
            return messages.decode_outcome(id, fields)

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self._page(Cursor(id, since, limit, max_bytes), READ_TIMEOUT)

    async def _page(self, cursor: Cursor, silence: float) -> Page:
        """What a GET returns until the page is full, or until no frame came for `silence` seconds.

        A body may be cut off, or may end before the invocation does. That a journal without a final frame has ended is
        only certain from a body that began after the end of the invocation and is empty.
        """
        was_terminal = False
        while True:
            splitter = _FrameSplitter(cursor)
            body_ended = await self._fill(
                splitter, cursor, max(silence, STREAM_START_TIMEOUT) if was_terminal else silence
            )
            outcome = await self._await(cursor.id, 0.0)
            is_terminal = outcome.state in TERMINAL
            is_empty = body_ended and not splitter.frames and not splitter.has_partial_frame
            if was_terminal or not is_terminal or splitter.frames or (body_ended and splitter.has_partial_frame):
                break
            was_terminal = True
        closed = splitter.closed or (is_empty and is_terminal)
        return Page(splitter.frames, closed, outcome.state if is_terminal else "running", outcome.error)

    async def _fill(self, splitter: _FrameSplitter, cursor: Cursor, silence: float) -> bool:
        """Read until the page is full or nothing more comes. Returns whether the body has ended."""
        stream = self._client.stream(cursor.id, cursor.since)
        patience = max(silence, STREAM_START_TIMEOUT)
        try:
            while not splitter.full:
                with anyio.move_on_after(FRAME_GAP if splitter.frames else patience) as timeout:
                    chunk = await anext(stream, None)
                    if chunk is None:
                        return True
                    patience = silence
                    splitter.feed(chunk)
                if timeout.cancelled_caught:
                    break
        except MissingRoute:
            raise InvocationNotFound(cursor.id) from None
        except PlaneUnavailable:
            if not splitter.frames:  # frames that arrived are a page, and the next one starts after them
                raise
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        return False

    # Waits

    async def watch(self, interest: Interest, publish: Callable[[News], None], home: Home) -> None:
        """Run a task for each invocation and each journal that is waited for, for RECHECK_INTERVAL seconds."""
        changed = anyio.Event()
        running: set[str | Cursor] = set()
        limiter = anyio.Semaphore(MAX_AWAITS)

        def notify() -> None:
            changed.set()

        def await_outcome(id: str, hold: float) -> Awaitable[Outcome]:
            return run_to_end(self._await, id, hold, may_leave=True)

        async def serve(key: str | Cursor) -> None:
            try:
                if isinstance(key, Cursor):
                    publish(await self._news_of_journal(key, home))
                else:
                    async with limiter:
                        hold = POLL_TIMEOUT if len(running) <= MAX_AWAITS else SHARED_AWAIT_TIMEOUT
                        outcome = await across(home, await_outcome, key, hold)
                    if outcome.state != "pending":
                        publish(News("id", key, outcome))
            except LakeshoreError as exc:
                logger.warning("a wait goes on as soon as the plane answers: %s", exc)
                await anyio.sleep(PAUSE_AFTER_ERROR * random.uniform(0.5, 1.5))
            finally:
                running.discard(key)
                notify()

        interest.changed(notify, each=True)
        try:
            async with anyio.create_task_group() as group:
                group.cancel_scope.deadline = anyio.current_time() + RECHECK_INTERVAL
                while True:
                    changed = anyio.Event()
                    wanted: set[str | Cursor] = {*interest.names("id"), *interest.cursors()}
                    for key in wanted - running:
                        running.add(key)
                        group.start_soon(serve, key)
                    await changed.wait()
                    await checkpoint()
        finally:
            interest.changed(_nothing)

    async def _news_of_journal(self, cursor: Cursor, home: Home) -> News:
        """Wait for the next frames or the journal's end; a stream that was cut off is requested again."""
        while True:
            try:
                page = await across(home, self._page, cursor, POLL_TIMEOUT)
            except InvocationNotFound:
                return News("journal", cursor.id)
            if page.frames or page.closed:
                return News("journal", cursor.id, None, (cursor, page))
            await anyio.sleep(PAUSE_AFTER_DROP * random.uniform(0.5, 1.5))


def _nothing() -> None: ...


def _fence_fields(op: Finish | Append | Requeue) -> Fields:
    """The fence as such servers expect it: every field is there."""
    return {"invocation_id": op.fence.id, "worker_id": op.fence.worker or "", "attempt": op.fence.attempt}


class _FrameSplitter:
    """Splits the bytes of a stream into frames, each as it came, with its number."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._unpacker = Unpacker(raw=True, strict_map_key=False, max_buffer_size=2**31 - 1)
        self._bytes = bytearray()
        self._start = 0  # where in the stream `_bytes` begin
        self._last = cursor.since
        self._size = 0
        self.frames: list[tuple[int, bytes]] = []
        self.closed: bool = False

    @property
    def full(self) -> bool:
        return self.closed or len(self.frames) >= self._cursor.limit or self._size >= self._cursor.max_bytes

    @property
    def has_partial_frame(self) -> bool:
        return bool(self._bytes)

    def feed(self, chunk: bytes) -> None:
        self._unpacker.feed(chunk)
        self._bytes += chunk
        try:
            for frame in self._unpacker:
                end: int = self._unpacker.tell()
                self._take(frame, bytes(self._bytes[: end - self._start]))
                del self._bytes[: end - self._start]
                self._start = end
        except READ_ERRORS as exc:
            raise DispatchError(f"the stream of {self._cursor.id!r} holds no frame after {self._last}: {exc}") from exc

    def _take(self, frame: Any, raw: bytes) -> None:
        if is_list(frame) and len(frame) == 4:
            kind, seq, _, meta = frame
        else:
            kind, seq, meta = 0, None, None
        is_restart = isinstance(meta, dict) and cast("dict[bytes, Any]", meta).get(b"type") == b"StreamRestarted"
        if kind == END_FRAME or (kind == ERROR_FRAME and not is_restart):
            self.closed = True
        # Older workers write -1 into the last frame.
        number = seq if type(seq) is int and seq > self._last else self._last + 1
        if self.full and not self.closed:
            return
        self._last = number
        self.frames.append((number, raw))
        self._size += len(raw)
