"""The HTTP plane: `HttpDispatch`, a `RemotePlane` whose store is a control-plane server, and that store."""

from __future__ import annotations

import logging
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from ...concurrency.portal import across
from ...concurrency.tasks import run_to_end
from ...errors import DispatchError, InvocationNotFound, PlaneUnavailable
from ...limits import LARGE_BYTES, MAX_ITEMS_PER_REQUEST
from ..contract.news import Cursor, News
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
    Requeue,
    Restore,
    Submit,
    weight_of,
)
from ..contract.records import Outcome, Page, Row, RowFilter
from ..protocol import messages
from ..protocol.errors import TooLarge, decode_error
from ..protocol.fields import is_list
from ..remote_plane import RemotePlane
from .address import check_address
from .attempt import HttpClient, MissingRoute, decoding, invocation_id
from .long_polls import Watch
from .older_server import PlainServer

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    import httpx

    from ..contract.store import Interest

__all__ = ["HttpDispatch", "HttpStore"]

logger = logging.getLogger("dreamlake.lakeshore.planes")

T = TypeVar("T")
Fields = dict[str, Any]

PATIENCE_AFTER_ANSWER = 300.0
"""Seconds for which a verb is retried once the server has answered: it is down then, and not missing."""


_LANES: dict[type[Any], str] = {
    Submit: "submit",
    Finish: "finish",
    Append: "append",
    Beat: "beat",
    Cancel: "cancel",
    Reap: "admin",
    Purge: "admin",
    Restore: "admin",
}
_SINGLE: dict[type[Any], tuple[str, str]] = {
    Submit: ("submit_many", "submit"),
    Finish: ("ack_many", "ack"),
    Append: ("chunks", "chunk"),
}
"""Routes that take many, and those of servers that know only one at a time."""


class HttpStore:
    """A control-plane server, from one event loop. Each kind of operation has a lane of its own, and so a request in
    flight of its own; what the far side holds goes alone."""

    home: Literal["asyncio", "portal"] = "asyncio"
    net = 30.0

    def __init__(self, plane: HttpDispatch) -> None:
        self._plane = plane
        self.client = HttpClient(plane.url, plane.token, plane.namespace, plane.transport, lambda: plane.patience)
        self._plain = PlainServer(self.client)

    async def open(self) -> None:
        self.client.open()

    async def begin_close(self) -> None:
        """The end is near: give no request much longer, and those that come no more than that either."""
        self.client.hurry()

    async def close(self) -> None:
        await self.client.close()

    def lane(self, op: Operation) -> str | None:
        if type(op) is Claim or (type(op) is Beat and op.wait > 0):
            return None
        if type(op) is Requeue:
            return op.reason
        # Small ones do not wait behind those that take seconds; an invocation's frames keep their order.
        large = type(op) is not Append and weight_of(op) > LARGE_BYTES
        return _LANES[type(op)] + "-large" if large else _LANES[type(op)]

    # Operations

    async def apply(self, ops: Sequence[Operation]) -> Sequence[Any]:
        answers: list[Any] = []
        for kind, run in groupby(ops, type):
            some: list[Any] = list(run)
            if kind in _SINGLE or kind is Requeue or kind is Cancel:
                answers += await self._batch(some)
            else:
                answers += [await self._alone(op) for op in some]
        self._plane.reached()
        return answers

    async def _alone(self, op: Any) -> Any:
        if isinstance(op, Restore):
            return DispatchError(f"the server at {self._plane.url} restores nothing: name the plane that it serves")
        try:
            if isinstance(op, Claim):
                return await self._claim(op)
            if isinstance(op, Beat):
                return await self._beat(op)
            if isinstance(op, Reap):
                return self._heard(
                    "reap", messages.decode_reap_answer, await self._call("reap", messages.encode_reap(op))
                )
            fields = await self._call("purge", {"older_than_s": op.older_than})
            return self._heard("purge", lambda fields: int(fields.get("count") or 0), fields)
        except MissingRoute as exc:
            raise (
                exc.of_every_server()
                if type(op) is Claim
                else exc.without_fallback(self._plane.url, type(op).__name__.lower())
            ) from None
        except PlaneUnavailable:
            raise
        except (DispatchError, ValueError) as exc:
            return exc

    async def _claim(self, op: Claim) -> list[Claimed]:
        asked = op
        if not op.queues or op.limit < 1:
            if op.poll_id is None:
                return []
            asked = op._replace(queues=op.queues or ("default",), limit=0)  # of none it does not matter which queue
        fields = await self._call("poll", messages.encode_claim(asked), hold=op.wait, tag=op)
        claims = self._heard("poll", partial(messages.decode_claim_answer, asked), fields)
        return list({(one.id, one.attempt): one for one in claims}.values())  # each body runs once

    async def _beat(self, op: Beat) -> Beaten:
        try:
            asked, answer = messages.encode_beat(op), min(max(1.0, op.lease / 6), 15.0)
            fields = await self._call("heartbeat", asked, hold=op.wait, tag=op, answer_timeout=answer)
            return self._heard("heartbeat", messages.decode_beat_answer, fields)
        except MissingRoute:
            return await self._plain.beat(op)

    async def _batch(self, ops: Sequence[Any]) -> list[Any]:
        """Operations of one kind in one request; alone each where the far side takes no batches."""
        name, asked = self._route(ops[0]), [_ask(op) for op in ops]
        try:
            fields = await self._call(name, {"items": asked})
        except TooLarge as exc:
            if len(ops) == 1:
                return [await self._in_parts(ops[0], exc)]
            middle = len(ops) // 2
            return [*await self._batch(ops[:middle]), *await self._batch(ops[middle:])]
        except MissingRoute:
            return [await self._plain.apply(op, fields) for op, fields in zip(ops, asked, strict=True)]
        results: Any = fields.get("results")
        if not is_list(results) or len(results) != len(ops):
            got = len(results) if is_list(results) else f"a {type(results).__name__}"
            raise DispatchError(f"expected {len(ops)} results of {name} from {self._plane!r}, got {got}")
        return self._heard(name, partial(self._answers, name, ops), results)

    async def _in_parts(self, op: Any, exc: TooLarge) -> Any:
        """One operation that is too large: of several frames each half is tried, in order."""
        if not isinstance(op, Append) or len(op.frames) < 2:
            return exc
        middle = len(op.frames) // 2
        first = op._replace(frames=op.frames[:middle], final=False)
        second = op._replace(frames=op.frames[middle:], first_seq=op.first_seq + middle)
        appended = Appended(0, 0)
        for part in (first, second):
            (answer,) = await self._batch([part])
            if isinstance(answer, Exception):
                return answer
            appended = Appended(appended.written + answer.written, appended.duplicates + answer.duplicates)
        return appended

    @staticmethod
    def _route(op: Any) -> str:
        return op.reason if isinstance(op, Requeue) else "cancel" if isinstance(op, Cancel) else _SINGLE[type(op)][0]

    def _heard(self, name: str, hear: Callable[[Any], T], answer: Any) -> T:
        with decoding(f"{name} at {self._plane.url}"):
            return hear(answer)

    def _answers(self, name: str, ops: Sequence[Any], results: Sequence[Any]) -> list[Any]:
        return [self._answer(op, name, one) for op, one in zip(ops, results, strict=True)]

    def _answer(self, op: Any, name: str, fields: Mapping[str, Any]) -> Any:
        error = fields.get("error")
        if error is not None:
            return decode_error(error, 400, f"{name} at {self._plane.url}", op.id if hasattr(op, "id") else op.fence.id)
        try:
            return hear(op, fields)
        except DispatchError as exc:
            return exc

    async def _call(self, name: str, fields: Fields | None = None, **kwargs: Any) -> Fields:
        if self._plain.lacks(name):
            raise self._plain.missing(name)
        try:
            return await self.client.call(name, fields, **kwargs)
        except MissingRoute as exc:
            self._plain.learn(name, exc)
            raise

    async def abandon(self, op: Operation) -> None:
        """The caller of a held operation has gone: end the poll, and give back what it took."""
        if isinstance(op, Claim) and op.poll_id is not None:
            try:
                await self._call("release", {"worker_id": op.worker, "poll_id": op.poll_id})
                return
            except DispatchError as exc:
                logger.debug("what a poll took whose caller left may come back only with its lease: %s", exc)
        self.client.cancel_held(op)

    # Reads

    async def _read(self, name: str, fields: Fields | None = None, **kwargs: Any) -> Fields:
        answer = await run_to_end(partial(self._call, name, fields, **kwargs), may_leave=True)
        self._plane.reached()
        return answer

    async def outcomes(self, ids: Sequence[str]) -> list[Outcome]:
        found: dict[str, Outcome] = {}
        left = list(dict.fromkeys(ids))
        while left:
            asked, later = left[:MAX_ITEMS_PER_REQUEST], left[MAX_ITEMS_PER_REQUEST:]
            items = [{"invocation_id": id} for id in asked]
            try:
                fields = await self._read("await_many", {"items": items, "timeout_s": 0.0})
            except MissingRoute:
                return await run_to_end(self._plain.outcomes, ids, may_leave=True)
            some = self._heard("await_many", _outcomes, fields)
            found |= some
            # Large ones come in several answers.
            left = ([id for id in asked if id not in some] if some and fields.get("more") else []) + later
        return [found.get(id) or Outcome(id, "pending") for id in ids]

    async def page(self, id: str, since: int, limit: int, max_bytes: int) -> Page:
        fields = {"streams": [messages.encode_cursor(Cursor(id, since, limit, max_bytes))], "timeout_s": 0.0}
        try:
            found = await self._read("await_many", fields)
        except MissingRoute:
            return await run_to_end(self._plain.page, id, since, limit, max_bytes, may_leave=True)
        return self._heard("await_many", partial(_page, id), found)

    async def cancels(self, worker: str) -> list[tuple[str, int]]:
        return (await run_to_end(self._beat, Beat(worker, (), 30.0), may_leave=True)).cancel

    async def rows(self, filter: RowFilter) -> list[Row]:
        query = {name: str(int(value) if value is True else value) for name, value in filter._asdict().items() if value}
        try:
            fields = await self._read("invocations", query=query)
        except MissingRoute as exc:
            raise exc.without_fallback(self._plane.url, "list invocations") from None
        return self._heard(
            "invocations", lambda got: [messages.decode_row(row) for row in got.get("invocations") or ()], fields
        )

    async def counts(self, queue: str | None, state: str | None) -> dict[tuple[str, str], int]:
        query = {name: value for name, value in (("queue", queue), ("state", state)) if value is not None}
        return self._heard("queues", messages.decode_counts, await self._queues(query))

    async def ages(self) -> dict[str, float]:
        return self._heard("queues", messages.decode_ages, await self._queues({}))

    async def _queues(self, query: dict[str, str]) -> Fields:
        try:
            return await self._read("queues", query=query)
        except MissingRoute as exc:
            raise exc.without_fallback(self._plane.url, "count its queues") from None

    # What time and others do

    async def due(self) -> list[Operation]:
        return []  # the server's to find out

    async def watch(self, interest: Interest, tell: Callable[[News], None]) -> None:
        """One or two long polls for all waits of this loop; or what a server without them offers."""
        while True:
            watch = Watch(self._ask_watch, interest, tell, lambda: self._plane.patience, self._plane.pause)
            try:
                await watch.run()
            except* MissingRoute:
                pass
            await self._plain.watch(interest, tell, self.home)

    async def _ask_watch(self, fields: Fields, held: float) -> Mapping[str, Any]:
        def ask() -> Awaitable[Mapping[str, Any]]:
            return run_to_end(partial(self._call, "await_many", fields, hold=held), may_leave=True)

        answer = await across(self.home, ask)
        self._plane.reached()
        return answer


def _outcomes(fields: Fields) -> dict[str, Outcome]:
    return {invocation_id(id): _outcome(id, item) for id, item in fields.get("results") or ()}


def _page(id: str, fields: Fields) -> Page:
    for _, _, item in fields.get("pages") or ():
        if "frames" not in item:
            raise decode_error(item.get("error"), 400, "await_many", id)
        return messages.decode_page(item)
    return Page([], False, "running", None)


def _outcome(id: str, item: Mapping[str, Any]) -> Outcome:
    if "state" in item:
        return messages.decode_outcome(id, item)
    exc = decode_error(item.get("error"), 400, "await_many", id)
    if isinstance(exc, InvocationNotFound):
        return Outcome(id, "unknown")
    raise exc


def _ask(op: Any) -> Fields:
    if isinstance(op, Submit):
        return messages.encode_submit(op)
    if isinstance(op, Finish):
        return messages.encode_finish(op)
    if isinstance(op, Append):
        return messages.encode_append(op)
    return messages.encode_requeue(op) if isinstance(op, Requeue) else {"invocation_id": op.id}


def hear(op: Any, fields: Mapping[str, Any]) -> Any:
    """The answer to an operation of a batch."""
    if isinstance(op, Submit):
        return messages.decode_submit_answer(op, fields)
    if isinstance(op, Finish):
        return messages.decode_finish_answer(op, fields)
    if isinstance(op, Append):
        return messages.decode_append_answer(op, fields)
    if isinstance(op, Requeue):
        return messages.decode_requeue_answer(op, fields)
    return messages.decode_cancel_answer(op, fields)


class HttpDispatch(RemotePlane):
    """The plane behind a control-plane server, `lakeshore server start`, from any number of machines.

    url: where the server is, `http://` or `https://`, without a token in it. token: the bearer token, white space around
    it aside; never shown.
    namespace: whose invocations; None: those that the token is for. Lost connections, restarts of the server and answers
    of 502, 503 and 504 are waited out: every operation can be repeated. For how many seconds, `patience` says: 30 for a
    server that never answered, 300 after it has, or what it is set to.

    An async context manager, and usable without: the first use opens it. One object may be used from several event
    loops. Raises ValueError for a url or token that is none; verbs raise NotAuthorized for a token that does not do.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        namespace: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        token = None if token is None else token.strip()  # files and variables end in a newline
        check_address(url, token)
        if namespace is not None and (not namespace or "/" in namespace):
            raise ValueError(
                f"expected the name of a namespace, without a /, or None for that of the token, got {namespace!r}"
            )
        self.url, self.token, self.namespace, self.transport = url, token, namespace, transport
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
        """The same server, another namespace."""
        return HttpDispatch(self.url, token=self.token, namespace=ns, transport=self.transport)
