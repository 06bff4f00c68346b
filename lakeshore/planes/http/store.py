"""The HTTP plane: `HttpDispatch`, a `RemotePlane` whose store is a control-plane server, and that store."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...concurrency.portal import across
from ...concurrency.tasks import run_to_end
from ...errors import DispatchError, InvocationNotFound, PlaneUnavailable
from ...limits import LARGE_BYTES, MAX_ITEMS_PER_REQUEST
from ..contract.news import Cursor
from ..contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Claim,
    Claimed,
    Finish,
    Operation,
    Purge,
    Reap,
    Reaped,
    Requeue,
    Restore,
    Submit,
    weight_of,
)
from ..contract.records import Outcome, Page, Row, RowFilter
from ..protocol import messages
from ..protocol.errors import TooLarge, decode_error
from ..protocol.fields import Fields, is_list
from ..remote_plane import RemotePlane
from .address import check_address
from .attempt import HttpClient, MissingRoute, decoding, invocation_id
from .long_polls import LongPolls
from .older_server import OlderServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import httpx

    from ..contract.news import News
    from ..contract.store import Interest

__all__ = ["HttpDispatch", "HttpStore"]

T = TypeVar("T")

logger = logging.getLogger("dreamlake.lakeshore.planes")

PATIENCE_AFTER_ANSWER = 300.0
"""Seconds for which a verb is retried once the server has answered: it is down then, and not missing."""
MAX_BEAT_TIMEOUT = 15.0
"""The longest wait for the answer to a heartbeat, in seconds; less for a short lease, which must not run out meanwhile."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """How operations of one type travel: many in one request.

    lane: operations of one lane are sent one request after the other. route: its name in ROUTES.
    """

    lane: str
    route: str
    encode: Callable[[Any], Fields]
    decode_answer: Callable[[Any, Mapping[str, Any]], Any]


_BATCHES: dict[type[Any], _Batch] = {
    Submit: _Batch("submit", "submit_many", messages.encode_submit, messages.decode_submit_answer),
    Finish: _Batch("finish", "ack_many", messages.encode_finish, messages.decode_finish_answer),
    Append: _Batch("append", "chunks", messages.encode_append, messages.decode_append_answer),
    Cancel: _Batch("cancel", "cancel", messages.encode_cancel, messages.decode_cancel_answer),
}
_REQUEUES = {
    reason: _Batch(reason, reason, messages.encode_requeue, messages.decode_requeue_answer)
    for reason in ("release", "retry")
}


def _batch_of(op: object) -> _Batch | None:
    if isinstance(op, Requeue):
        return _REQUEUES[op.reason]
    return _BATCHES.get(type(op))


class HttpStore:
    """A control-plane server, as one event loop uses it.

    Each kind of operation has a lane, and so a request in flight, of its own. What the server may hold is sent alone.
    """

    home: Literal["asyncio", "portal"] = "asyncio"
    net = 30.0

    def __init__(self, plane: HttpDispatch) -> None:
        self._plane = plane
        self.client = HttpClient(plane.url, plane.token, plane.namespace, plane.transport, lambda: plane.patience)
        self._older = OlderServer(self.client)
        self._singles: dict[type[Any], Callable[[Any], Awaitable[Any]]] = {
            Claim: self._claim,
            Beat: self._beat,
            Reap: self._reap,
            Purge: self._purge,
            Restore: self._restore,
        }

    async def open(self) -> None:
        self.client.open()

    async def begin_close(self) -> None:
        """Limit the time of the requests under way, and of those that follow, to a few seconds."""
        self.client.hurry()

    async def close(self) -> None:
        await self.client.close()

    def lane(self, op: Operation) -> str | None:
        batch = _batch_of(op)
        if batch is None:
            if type(op) is Claim or (type(op) is Beat and op.wait > 0):
                return None
            return "beat" if type(op) is Beat else "admin"
        # Small operations do not wait for the transfer of large ones. Frames of one invocation keep their order.
        if type(op) is not Append and weight_of(op) > LARGE_BYTES:
            return f"{batch.lane}-large"
        return batch.lane

    # Operations

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers: list[Any] = []
        for kind, group in groupby(ops, type):
            if kind in self._singles:
                answers += [await self._apply_one(op) for op in group]
            else:
                answers += await self._apply_batch(list(group))
        self._plane.reached()
        return answers

    async def _apply_batch(self, ops: Sequence[Any]) -> list[Any]:
        """Send operations of one kind in one request, or one by one to a server that takes no batches."""
        batch = _batch_of(ops[0])
        assert batch is not None
        items = [batch.encode(op) for op in ops]
        try:
            fields = await self._call(batch.route, {"items": items})
        except TooLarge as exc:
            if len(ops) == 1:
                return [await self._apply_in_parts(ops[0], exc)]
            middle = len(ops) // 2
            return [*await self._apply_batch(ops[:middle]), *await self._apply_batch(ops[middle:])]
        except MissingRoute:
            return [await self._older.apply(op, item) for op, item in zip(ops, items, strict=True)]
        results: Any = fields.get("results")
        if not is_list(results) or len(results) != len(ops):
            got = len(results) if is_list(results) else f"a {type(results).__name__}"
            raise DispatchError(f"expected {len(ops)} results of {batch.route} from {self._plane!r}, got {got}")
        with self._decoding(batch.route):
            return [self._decode_result(batch, op, result) for op, result in zip(ops, results, strict=True)]

    def _decode_result(self, batch: _Batch, op: Any, result: Mapping[str, Any]) -> Any:
        error = result.get("error")
        if error is not None:
            id = op.id if hasattr(op, "id") else op.fence.id
            return decode_error(error, 400, f"{batch.route} at {self._plane.url}", id)
        try:
            return batch.decode_answer(op, result)
        except DispatchError as exc:
            return exc

    async def _apply_in_parts(self, op: Any, exc: TooLarge) -> Any:
        """One operation that the server finds too large: an append of several frames is sent in two halves, in order."""
        if not isinstance(op, Append) or len(op.frames) < 2:
            return exc
        middle = len(op.frames) // 2
        first = op._replace(frames=op.frames[:middle], final=False)
        second = op._replace(frames=op.frames[middle:], first_seq=op.first_seq + middle)
        written = 0
        duplicates = 0
        for part in (first, second):
            (answer,) = await self._apply_batch([part])
            if isinstance(answer, Exception):
                return answer
            written += answer.written
            duplicates += answer.duplicates
        return Appended(written, duplicates)

    async def _apply_one(self, op: Any) -> Any:
        try:
            return await self._singles[type(op)](op)
        except MissingRoute as exc:
            if isinstance(op, Claim):
                raise exc.of_every_server() from None
            raise exc.without_fallback(self._plane.url, type(op).__name__.lower()) from None
        except PlaneUnavailable:
            raise
        except (DispatchError, ValueError) as exc:
            return exc

    async def _claim(self, op: Claim) -> list[Claimed]:
        request = op
        if not op.queues or op.limit < 1:
            if op.poll_id is None:
                return []
            # It asks for what its poll has taken already, of whichever queue.
            request = op._replace(queues=op.queues or ("default",), limit=0)
        fields = await self._call("poll", messages.encode_claim(request), hold=op.wait, tag=op)
        with self._decoding("poll"):
            claims = messages.decode_claim_answer(request, fields)
        return list({(one.id, one.attempt): one for one in claims}.values())  # each body runs once

    async def _beat(self, op: Beat) -> Beaten:
        timeout = min(max(1.0, op.lease / 6), MAX_BEAT_TIMEOUT)
        try:
            fields = await self._call(
                "heartbeat", messages.encode_beat(op), hold=op.wait, tag=op, answer_timeout=timeout
            )
        except MissingRoute:
            return await self._older.beat(op)
        with self._decoding("heartbeat"):
            return messages.decode_beat_answer(fields)

    async def _reap(self, op: Reap) -> Reaped:
        fields = await self._call("reap", messages.encode_reap(op))
        with self._decoding("reap"):
            return messages.decode_reap_answer(fields)

    async def _purge(self, op: Purge) -> int:
        fields = await self._call("purge", {"older_than_s": op.older_than})
        with self._decoding("purge"):
            return int(fields.get("count") or 0)

    async def _restore(self, op: Restore) -> int:
        raise DispatchError(f"the server at {self._plane.url} restores nothing: name the plane that it serves")

    def _decoding(self, route: str) -> AbstractContextManager[None]:
        return decoding(f"{route} at {self._plane.url}")

    async def _call(self, route: str, fields: Fields | None = None, **options: Any) -> Fields:
        """One attempt at a request. A route that is known to be missing is not asked for; see `HttpClient.call`."""
        if self._older.lacks(route):
            raise self._older.missing(route)
        try:
            return await self.client.call(route, fields, **options)
        except MissingRoute as exc:
            self._older.learn(route, exc)
            raise

    async def abandon(self, op: Operation) -> None:
        """The caller of a held operation has left: end the poll, and release what it took."""
        if isinstance(op, Claim) and op.poll_id is not None:
            try:
                await self._call("release", {"worker_id": op.worker, "poll_id": op.poll_id})
                return
            except DispatchError as exc:
                logger.debug("claims of a poll whose caller left may stay taken until their lease ends: %s", exc)
        self.client.cancel_held(op)

    # Reads

    async def _read(self, route: str, fields: Fields | None = None, **options: Any) -> Fields:
        answer = await run_to_end(partial(self._call, route, fields, **options), may_leave=True)
        self._plane.reached()
        return answer

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        found: dict[str, Outcome] = {}
        left = list(dict.fromkeys(ids))
        while left:
            asked = left[:MAX_ITEMS_PER_REQUEST]
            left = left[MAX_ITEMS_PER_REQUEST:]
            items = [{"invocation_id": id} for id in asked]
            try:
                fields = await self._read("await_many", {"items": items, "timeout_s": 0.0})
            except MissingRoute:
                return await run_to_end(self._older.outcomes, ids, may_leave=True)
            with self._decoding("await_many"):
                answered = {invocation_id(id): _decode_outcome(id, item) for id, item in fields.get("results") or ()}
            found |= answered
            if answered and fields.get("more"):  # large ones come in several answers
                left = [id for id in asked if id not in answered] + left
        return [found.get(id) or Outcome(id, "pending") for id in ids]

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        cursor = Cursor(id, since, limit, max_bytes)
        try:
            fields = await self._read("await_many", {"streams": [messages.encode_cursor(cursor)], "timeout_s": 0.0})
        except MissingRoute:
            return await run_to_end(self._older.page, id, since, limit, max_bytes, may_leave=True)
        with self._decoding("await_many"):
            for _, _, item in fields.get("pages") or ():
                if "frames" not in item:
                    raise decode_error(item.get("error"), 400, "await_many", id)
                return messages.decode_page(item)
        return Page([], False, "running", None)

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return (await run_to_end(self._beat, Beat(worker, (), 30.0), may_leave=True)).cancel

    async def rows(self, filter: RowFilter) -> list[Row]:
        query: dict[str, str] = {}
        for name, value in filter._asdict().items():
            if value:
                query[name] = "1" if value is True else str(value)
        try:
            fields = await self._read("invocations", query=query)
        except MissingRoute as exc:
            raise exc.without_fallback(self._plane.url, "list invocations") from None
        with self._decoding("invocations"):
            return [messages.decode_row(row) for row in fields.get("invocations") or ()]

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        query = {name: value for name, value in (("queue", queue), ("state", state)) if value is not None}
        fields = await self._read_queues(query)
        with self._decoding("queues"):
            return messages.decode_counts(fields)

    async def ages(self) -> dict[str, float]:
        fields = await self._read_queues({})
        with self._decoding("queues"):
            return messages.decode_ages(fields)

    async def _read_queues(self, query: dict[str, str]) -> Fields:
        try:
            return await self._read("queues", query=query)
        except MissingRoute as exc:
            raise exc.without_fallback(self._plane.url, "count its queues") from None

    # Waits

    async def due(self) -> list[Operation]:
        return []  # the server itself sees to delays and leases

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        """Send all waits of this loop as one or two long polls, or as requests that an older server knows."""
        while True:
            polls = LongPolls(self._poll, interest, tell, lambda: self._plane.patience, self._plane.pause)
            try:
                await polls.run()
            except* MissingRoute:
                pass
            await self._older.watch(interest, tell, self.home)

    async def _poll(self, fields: Fields, hold: float) -> Fields:
        answer = await across(self.home, self._held_read, fields, hold)
        self._plane.reached()
        return answer

    async def _held_read(self, fields: Fields, hold: float) -> Fields:
        return await run_to_end(partial(self._call, "await_many", fields, hold=hold), may_leave=True)


def _decode_outcome(id: str, item: Mapping[str, Any]) -> Outcome:
    if "state" in item:
        return messages.decode_outcome(id, item)
    exc = decode_error(item.get("error"), 400, "await_many", id)
    if isinstance(exc, InvocationNotFound):
        return Outcome(id, "unknown")
    raise exc


class HttpDispatch(RemotePlane):
    """The plane behind a control-plane server (`lakeshore server start`), for callers and workers on any machine.

    Lost connections, restarts of the server and answers of 502, 503 and 504 are retried for `patience` seconds, since
    every operation can be repeated: 30 s for a server that never answered, 300 s after it has, or what it is set to.

    An async context manager, and usable without: the first use opens it. One object may be used from several event
    loops. Verbs raise NotAuthorized for a token that does not allow them.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        namespace: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Args:
            url: Where the server is, `http://` or `https://`, without a token in it.
            token: The bearer token; white space around it is removed. It is never shown.
            namespace: Whose invocations; None for those of the token.
            transport: What sends the requests in place of connections of our own: tests, and callers with their own needs.

        Raises:
            ValueError: For a url, a token or a namespace that cannot be one.
        """
        token = None if token is None else token.strip()  # files and variables end in a newline
        check_address(url, token)
        if namespace is not None and (not namespace or "/" in namespace):
            raise ValueError(
                f"expected the name of a namespace, without a /, or None for that of the token, got {namespace!r}"
            )
        self.url = url
        self.token = token
        self.namespace = namespace
        self.transport = transport
        super().__init__(lambda: HttpStore(self), f"HttpDispatch({url!r})", ns=namespace or "default")

    def reached(self) -> None:
        """Note that the server has answered, which ends an outage; from now on callers retry for longer."""
        self._outage.record_answer()
        self.default_patience = PATIENCE_AFTER_ANSWER

    @property
    def address(self) -> str:
        return self.url

    def child_environ(self) -> dict[str, str]:
        return {"LAKESHORE_URL": self.url, "LAKESHORE_NAMESPACE": self.namespace or ""}

    def within(self, ns: str) -> HttpDispatch:
        """The same server with another namespace."""
        return HttpDispatch(self.url, token=self.token, namespace=ns, transport=self.transport)
