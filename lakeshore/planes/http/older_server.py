"""What is left of a plane where the server knows the function protocol's own routes and none of our additions.

One request for each operation and each wait, a GET for each stream that is read. No heartbeats: such servers' claims
never expire. What has no route of its own becomes what comes nearest: a retry a failed ack, a release the ack of a
daemon that is shut down.
"""

from __future__ import annotations

import logging
import random
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
from ..protocol.fields import is_list
from .attempt import HttpClient, MissingRoute, decoding

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...concurrency.portal import Home
    from ..contract.store import Interest

__all__ = ["PlainServer"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

FORGET_S = 60.0
"""Seconds after which a route that was missing is tried again: the 404 may have been of something before the server."""
AT_ONCE = 4
"""Awaits in flight at a time."""
SHARED_S = 1.0
"""Seconds of one await where many others wait for their turn."""
SILENCE_S = 0.005
"""After a frame, how long to wait for the next one before the page is handed on."""
LOOK_S, BEGIN_S = 0.5, 15.0
"""How long a stream may be silent before a look at it, which does not wait, is over; not so before it has begun, nor when
it is known to come to its end, for which it has the second time."""
END, ERROR = 3, 4
_NO_FRAME: list[Any] = [0, None, None, None]
_SHUTDOWN = Failure("Cancelled", "daemon shutdown grace expired")


class PlainServer:
    """The far side without our additions."""

    def __init__(self, client: HttpClient) -> None:
        self._client = client
        self._lacking: dict[str, float] = {}  # routes, and until when that is believed
        self._said_of: dict[str, tuple[str, str | None]] = {}
        self._said = False

    def lacks(self, route: str) -> bool:
        """Whether the far side was found not to have this route, within the last FORGET_S seconds."""
        return route in self._lacking and anyio.current_time() < self._lacking[route]

    def missing(self, route: str) -> MissingRoute:
        """What was said when that was found out."""
        return MissingRoute(*self._said_of[route])

    def learn(self, route: str, exc: MissingRoute) -> None:
        """The far side has no such route."""
        self._said_of[route] = str(exc), exc.wrong_address
        if not self._said:
            logger.info("the server lacks the route %s: single requests, no heartbeats from now on", route)
        self._said = True
        self._lacking[route] = anyio.current_time() + FORGET_S

    # Operations

    async def apply(self, op: Operation, fields: dict[str, Any]) -> Any:
        """One operation by itself; its answer or what is wrong with it."""
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
        except (DispatchError, ValueError) as exc:
            if isinstance(exc, ConnectionError):
                raise
            return exc
        return DispatchError(f"the server has no route for {type(op).__name__.lower()}: it is of an older kind")

    async def _finish(self, op: Finish, fields: dict[str, Any]) -> bool:
        if op.final is not None:  # which such a server would not look for in an ack
            frame = {"seq": op.final.seq, "bytes": op.final.bytes, "final": True}
            try:
                await self._client.call("chunk", self._fence(op) | frame, id=op.fence.id)
            except (DispatchError, ValueError) as exc:
                if isinstance(exc, ConnectionError):
                    raise
                logger.debug("the final frame of %s was not taken: %s", op.fence.id, exc)
        return not (await self._client.call("ack", fields, id=op.fence.id)).get("repeat")

    async def _append(self, op: Append) -> Appended:
        written = duplicates = 0
        for at, frame in enumerate(op.frames):
            last = op.final and at == len(op.frames) - 1
            chunk = self._fence(op) | {"seq": op.first_seq + at, "bytes": frame, "final": last}
            answer = await self._client.call("chunk", chunk, id=op.fence.id)
            new = not answer.get("duplicate") and not messages.decode_append_answer(op, answer).duplicates
            written, duplicates = written + new, duplicates + (not new)
        return Appended(written, duplicates)

    async def _requeue(self, op: Requeue) -> Requeued:
        error, state = (op.error or _SHUTDOWN, "failed") if op.reason == "retry" else (_SHUTDOWN, "killed")
        ack = self._fence(op) | {"state": state, "result_blob": b"", "error": error.as_dict()}
        await self._client.call("ack", ack, id=op.fence.id)
        return Requeued(state, "")

    @staticmethod
    def _fence(op: Finish | Append | Requeue) -> dict[str, Any]:
        id, worker, attempt = op.fence
        return {"invocation_id": id, "worker_id": worker or "", "attempt": attempt}

    async def beat(self, op: Beat) -> Beaten:
        """Nothing is lost and nothing cancelled, as far as anybody can tell."""
        await self._client.pause(op.wait, op)
        return Beaten([], [])

    # Reads

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        found: dict[str, Outcome] = {}
        limiter = anyio.Semaphore(AT_ONCE)

        async def look(id: str) -> None:
            async with limiter:
                found[id] = await self._await(id, 0.0)

        async with anyio.create_task_group() as group:
            for id in dict.fromkeys(ids):
                group.start_soon(look, id)
        return [found[id] for id in ids]

    async def _await(self, id: str, held: float) -> Outcome:
        try:
            fields = await self._client.call("await", {"invocation_id": id, "timeout_s": held}, id=id, hold=held)
        except (MissingRoute, InvocationNotFound):
            return Outcome(id, "unknown")
        with decoding("await"):
            return messages.decode_outcome(id, fields)

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        return await self._page(Cursor(id, since, limit, max_bytes), LOOK_S)

    async def _page(self, cursor: Cursor, silence: float) -> Page:
        """What a GET gives within `silence` seconds of waiting for a frame, until the page is full.

        A body may be cut off, or have ended before the invocation did: that a journal without a final frame is over is
        known only from a body that was begun after the end and says nothing.
        """
        terminal = False
        while True:
            splitter, known = _Splitter(cursor), terminal
            over = await self._fill(splitter, cursor, max(silence, BEGIN_S) if terminal else silence)
            stood = await self._await(cursor.id, 0.0)
            terminal = stood.state in TERMINAL
            nothing = over and terminal and not splitter.frames and not splitter.begun
            if known or not terminal or splitter.frames or (over and splitter.begun):
                break
        closed = splitter.closed or nothing
        return Page(splitter.frames, closed, stood.state if terminal else "running", stood.error)

    async def _fill(self, splitter: _Splitter, cursor: Cursor, silence: float) -> bool:
        """Read on until the page is full or nothing more comes; whether the body has ended."""
        stream = self._client.stream(cursor.id, cursor.since)
        patience = max(silence, BEGIN_S)
        try:
            while not splitter.full:
                with anyio.move_on_after(SILENCE_S if splitter.frames else patience) as waited:
                    chunk = await anext(stream, None)
                    if chunk is None:
                        return True
                    patience = silence
                    splitter.feed(chunk)
                if waited.cancelled_caught:
                    break
        except MissingRoute:
            raise InvocationNotFound(cursor.id) from None
        except PlaneUnavailable:
            if not splitter.frames:  # else they are a page, and the next one is asked for after them
                raise
        finally:
            with anyio.CancelScope(shield=True):
                await stream.aclose()
        return False

    # Waits

    async def watch(self, interest: Interest, tell: Callable[[News], None], home: Home) -> None:
        """A task for each invocation and each journal that is waited for; for FORGET_S seconds."""
        changed = anyio.Event()
        running: set[str | Cursor] = set()
        limiter = anyio.Semaphore(AT_ONCE)

        def notify() -> None:
            changed.set()

        async def serve(key: str | Cursor) -> None:
            try:
                if isinstance(key, Cursor):
                    tell(await self._news_of_journal(key, home))
                else:
                    async with limiter:
                        held = POLL_TIMEOUT if len(running) <= AT_ONCE else SHARED_S
                        outcome = await across(home, lambda: run_to_end(self._await, key, held, may_leave=True))
                    if outcome.state != "pending":
                        tell(News("id", key, outcome))
            except LakeshoreError as exc:
                logger.warning("a wait goes on as soon as the plane answers: %s", exc)
                await anyio.sleep(random.uniform(0.5, 1.5))
            finally:
                running.discard(key)
                notify()

        interest.changed(notify, each=True)
        try:
            async with anyio.create_task_group() as group:
                group.cancel_scope.deadline = anyio.current_time() + FORGET_S
                while True:
                    changed = anyio.Event()
                    wanted: set[str | Cursor] = {*interest.names("id"), *interest.cursors()}
                    for key in wanted - running:
                        running.add(key)
                        group.start_soon(serve, key)
                    await changed.wait()
                    await checkpoint()
        finally:
            interest.changed(lambda: None)

    async def _news_of_journal(self, cursor: Cursor, home: Home) -> News:
        """Waits for the next frames, or the journal's end; a stream that breaks off is asked for again."""
        while True:
            try:
                page = await across(home, self._page, cursor, POLL_TIMEOUT)
            except InvocationNotFound:
                return News("journal", cursor.id)
            if page.frames or page.closed:
                return News("journal", cursor.id, None, (cursor, page))
            await anyio.sleep(random.uniform(0.05, 0.15))


class _Splitter:
    """Frames out of a stream's bytes, each as it came, with its number."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._unpacker = Unpacker(raw=True, strict_map_key=False, max_buffer_size=2**31 - 1)
        self._bytes, self._start, self._last = bytearray(), 0, cursor.since
        self.frames: list[tuple[int, bytes]] = []
        self.closed: bool = False
        self._size = 0

    @property
    def full(self) -> bool:
        return self.closed or len(self.frames) >= self._cursor.limit or self._size >= self._cursor.max_bytes

    @property
    def begun(self) -> bool:
        """Whether there is the beginning of a frame."""
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
        kind, seq, _, meta = frame if is_list(frame) and len(frame) == 4 else _NO_FRAME
        restart = isinstance(meta, dict) and cast("dict[bytes, Any]", meta).get(b"type") == b"StreamRestarted"
        self.closed = self.closed or bool(kind == END or (kind == ERROR and not restart))
        # Workers of an older kind write -1 into the last frame.
        number = seq if type(seq) is int and seq > self._last else self._last + 1
        if self.full and not self.closed:
            return
        self._last = number
        self.frames.append((number, raw))
        self._size += len(raw)
