"""The handlers of the routes: each decodes fields to an operation, applies it to the plane, and encodes the answer.

No handler decodes a user's value. A batch applies all items that can be decoded together; each item has its own answer.
"""

from __future__ import annotations

import logging
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio

from ..errors import InvocationNotFound, WireError
from ..ids import check_id
from ..limits import MAX_BYTES_PER_PAGE, MAX_FRAMES_PER_PAGE, MAX_ITEMS_PER_REQUEST, MAX_SEQ, POLL_TIMEOUT
from ..planes.contract.news import Cursor
from ..planes.contract.operations import Beaten, Claim, Claimed, Fence, Requeue
from ..planes.contract.records import Outcome, RowFilter
from ..planes.protocol import messages
from ..planes.protocol.errors import encode_error, status_of
from ..planes.protocol.fields import encode, field, read_items, read_pairs, seconds
from ..planes.protocol.routes import AWAIT_S
from .requests import presentable_error, whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence

    from ..planes.contract.news import Kind
    from ..planes.contract.operations import Operation, Submit
    from ..planes.contract.records import Page
    from ..planes.plane import Plane
    from .polls import HeldRequest, Name
    from .requests import RequestContext

__all__ = ["HANDLERS", "HELD_ROUTES", "stream"]

Fields = dict[str, Any]
Handler: TypeAlias = "Callable[[RequestContext], Coroutine[Any, Any, Fields]]"

MAX_LINGER = 1.0

logger = logging.getLogger("dreamlake.lakeshore.server")


# Batches ------------------------------------------------------------------------------------------------------------


async def _each(
    request: RequestContext,
    items: Iterable[Any],
    read: Callable[[Any], Operation],
    answer: Callable[[Any, Any], Fields],
) -> Fields:
    """Apply the items that can be decoded in as few batches as possible; return an answer or an error for each item."""
    results: list[Fields] = []
    ops: list[Operation] = []
    places: list[int] = []
    for item in items:
        try:
            ops.append(read(item))
            places.append(len(results))
            results.append({})
        except (ValueError, RecursionError) as exc:
            results.append(encode_error(presentable_error(exc)))
    for place, op, found in zip(places, ops, await request.plane.many(ops), strict=True):
        results[place] = _error(found) if isinstance(found, Exception) else answer(op, found)
    return {"results": results}


def _error(exc: Exception) -> Fields:
    if status_of(exc) >= 500 and status_of(exc) != 503:
        logger.error("an item of a batch failed", exc_info=exc)
    return encode_error(exc)


async def _one(request: RequestContext, op: Operation, answer: Callable[[Any, Any], Fields]) -> Fields:
    return answer(op, await request.plane.do(op))


# Producers ----------------------------------------------------------------------------------------------------------


def _read_submit(fields: Mapping[str, Any]) -> Submit:
    """Decode a submit, and reject one whose `config` is nested too deep for the answer to a poll.

    That answer holds the config some levels deeper. If it could not be encoded, no poll of the queue could be answered.
    """
    op = messages.decode_submit(fields)
    if op.config is not None:
        try:
            encode(
                messages.encode_claim_answer(
                    [Claimed(op.id, op.queue, b"", 1, 0, 0, 0, False, op.parent, op.parent, op.config)]
                )
            )
        except (ValueError, RecursionError):
            raise WireError("expected `run_config`, `function` and `code_context` not nested 1000 deep") from None
    return op


async def submit(request: RequestContext) -> Fields:
    return await _one(request, _read_submit(request.fields), messages.encode_submit_answer)


async def submit_many(request: RequestContext) -> Fields:
    return await _each(request, read_items(request.fields), _read_submit, messages.encode_submit_answer)


async def await_one(request: RequestContext) -> Fields:
    id = messages.read_invocation_id(request.fields)
    timeout = request.seconds("timeout_s", AWAIT_S)
    outcome: Outcome | None = None
    if timeout > 0:
        with request.hold() as held:
            try:
                outcome = await held.wait_for(partial(request.plane.outcome, id, timeout=timeout))
            except TimeoutError:
                pass
    else:
        (outcome,) = await request.plane.current_outcomes([id])
    return messages.encode_outcome(outcome or Outcome(id, "pending"))


async def await_many(request: RequestContext) -> Fields:
    """Wait until some of the invocations end, are unknown or have new frames; a malformed item is answered at once."""
    results: list[Any] = []
    pages: list[Any] = []
    ids = _readable(read_items(request.fields), messages.read_invocation_id, results)
    cursors = _readable(read_items(request.fields, "streams"), _cursor, pages, "since")
    timeout = 0.0 if results or pages else request.seconds("timeout_s", AWAIT_S)
    linger = seconds(request.fields, "linger_s", 0.0, MAX_LINGER)
    watch = field(request.fields, "watch", str, "")
    if not ids and not cursors:
        return {"results": results, "pages": pages}
    with request.hold(("watch", request.ns, watch) if watch else None) as held:
        wait = partial(request.plane.await_many, ids, cursors, timeout=timeout, linger=linger)
        if timeout > 0:
            found = await held.wait_for(wait)
        else:
            found = await wait()
    if found is None:
        return {"results": results, "pages": pages}
    asked = {*ids}
    since = {cursor.id: cursor.since for cursor in cursors}
    for outcome in found.outcomes:
        id = outcome.id
        unknown = outcome.state == "unknown"
        answer = encode_error(InvocationNotFound(id)) if unknown else messages.encode_outcome(outcome)
        if id in asked:
            results.append([id, answer])
        if unknown and id in since:
            pages.append([id, since[id], answer])
    pages += [[cursor.id, cursor.since, messages.encode_page(page)] for cursor, page in found.pages]
    fields: Fields = {"results": results, "pages": pages}
    if found.more:
        fields["more"] = True
    return fields


def _readable(items: Iterable[Fields], read: Callable[[Fields], Any], bad: list[Any], *also: str) -> list[Any]:
    """Decode the items that can be decoded; the others go to `bad`, with their identifying fields and their error."""
    good: list[Any] = []
    for item in items:
        try:
            good.append(read(item))
        except (ValueError, RecursionError) as exc:
            bad.append(
                [*(_echo(item.get(name)) for name in ("invocation_id", *also)), encode_error(presentable_error(exc))]
            )
    return good


def _echo(value: object) -> Any:
    """The value of an identifying field, for the answer; None for anything but a number or a short text."""
    if type(value) is int or (type(value) is str and len(value) <= 200):
        return value
    return None


def _cursor(fields: Mapping[str, Any]) -> Cursor:
    since = field(fields, "since", int, -1)
    limit = field(fields, "limit", int, MAX_FRAMES_PER_PAGE)
    max_bytes = field(fields, "max_bytes", int, MAX_BYTES_PER_PAGE)
    if limit < 1 or max_bytes < 1:
        raise WireError(f"expected `limit` and `max_bytes` from 1, got {limit} and {max_bytes}")
    return Cursor(
        messages.read_invocation_id(fields),
        max(-1, min(since, MAX_SEQ)),
        min(limit, MAX_FRAMES_PER_PAGE),
        min(max_bytes, MAX_BYTES_PER_PAGE),
    )


async def cancel(request: RequestContext) -> Fields:
    if "items" in request.fields:
        return await _each(request, read_items(request.fields), messages.decode_cancel, messages.encode_cancel_answer)
    return await _one(request, messages.decode_cancel(request.fields), messages.encode_cancel_answer)


async def stream(request: RequestContext) -> AsyncGenerator[bytes]:
    """Yield the stored frames after `since` until the journal is closed, the client disconnects or the server ends.

    The first chunk comes at once and may be empty.

    Raises:
        InvocationNotFound: in place of the first chunk.
    """
    since = whole(request.query, "since", -1)
    limit = request.service.limits.page
    with request.hold() as held, request.service.metrics.stream():
        page: Page | None = await request.plane.page(request.id, since, max_bytes=limit)
        while page is not None:
            yield b"".join([frame for _, frame in page.frames])
            if page.closed:
                return
            if page.frames:
                since = page.frames[-1][0]
            page = await held.wait_for(partial(request.plane.next_page, request.id, since, max_bytes=limit))
            request.recheck_access()


async def invocation(request: RequestContext) -> Fields:
    for row in await request.plane.rows(RowFilter(id=request.id, limit=1, body=request.query.get("body") == "1")):
        return messages.encode_row(row)
    raise InvocationNotFound(request.id)


async def invocations(request: RequestContext) -> Fields:
    query = request.query
    limit = whole(query, "limit", 100)
    if not 1 <= limit <= MAX_ITEMS_PER_REQUEST:
        raise WireError(f"expected `limit` from 1 to {MAX_ITEMS_PER_REQUEST}, got {limit}")
    names = {name: query.get(name) for name in ("queue", "state", "key", "root")}
    id = check_id(query["id"]) if "id" in query else None
    rows = await request.plane.rows(RowFilter(id, **names, limit=limit, body=query.get("body") == "1"))
    return {"invocations": [messages.encode_row(row) for row in rows]}


async def queues(request: RequestContext) -> Fields:
    counts = await request.plane.counts(request.query.get("queue"), request.query.get("state"))
    rows = [[queue, state, count] for (queue, state), count in counts.items()]
    return {"queues": rows, "ages": await request.plane.ages()}


# Workers ------------------------------------------------------------------------------------------------------------


async def poll(request: RequestContext) -> Fields:
    """Wait for claims.

    A repeated poll with the same id gets its claims again. A poll without an id releases claims that its client did not
    receive.
    """
    op = messages.decode_claim(request.fields)
    timeout = request.seconds("timeout_s", POLL_TIMEOUT)
    name = None if op.poll_id is None else _poll_name(request, op.worker, op.poll_id)
    claims: list[Claimed] = []
    with request.hold(name) as held:
        if name is None or not request.service.polls.released(name):
            claims = await _claim(request, held, op, timeout)
        if held.dropped:
            claims = []
    if claims:
        request.undo_forbidden = partial(_give_back, request.plane, op.worker, claims)
        request.undo_unsent = request.undo_forbidden if op.poll_id is None else None
    answer = messages.encode_claim_answer(claims)
    if request.ns in request.service.target_versions:
        answer["target_nymph_version"] = request.service.target_versions[request.ns]
    return answer


def _poll_name(request: RequestContext, worker: str, poll_id: str) -> Name:
    return "poll", request.ns, worker, poll_id


async def _claim(request: RequestContext, held: HeldRequest, op: Claim, timeout: float) -> list[Claimed]:
    """Claim now, or wait for work and claim.

    A disconnect does not cancel a claim that has started: its result has to be known, to answer with it, to release it,
    or to keep it for the repeated poll.
    """
    plane = request.plane
    polls = request.service.polls
    renewals = request.service.renewals
    topics: list[tuple[Kind, str]] = [("queue", queue) for queue in op.queues]

    async def claim() -> list[Claimed] | None:
        began = perf_counter()
        claims: list[Claimed] = []
        late = op.busy and op.lease is not None and renewals.late((request.ns, op.worker), op.lease)
        with anyio.CancelScope(shield=True):
            claims = await plane.do(op._replace(limit=0) if late else op)
        if claims:
            request.service.metrics.claimed(perf_counter() - began)
            if not op.busy:
                renewals.renewed((request.ns, op.worker))  # the worker holds no other claims
        if claims or late:
            return claims  # a list ends the wait
        return None

    async def wait() -> list[Claimed] | None:
        key = (request.ns, op.queues, op.lease is None)  # polls that would take the same invocations
        with anyio.move_on_after(timeout):
            return await polls.share_wait(key, lambda: plane.wait(topics, claim, None))
        return None

    if not await held.wait_for_older():
        return []
    claims = await claim()
    if not claims and timeout > 0:
        claims = await held.wait_for(wait)
    return claims or []


async def _give_back(plane: Plane, worker: str, claims: Sequence[Claimed]) -> list[tuple[Requeue, Any]]:
    """Release claims; return each release with its answer or its exception."""
    ops = [Requeue(Fence(claimed.id, worker, claimed.attempt)) for claimed in claims]
    return list(zip(ops, await plane.many(ops), strict=True))


async def release(request: RequestContext) -> Fields:
    """Release single claims, or all claims of a poll, including one that has not been answered yet."""
    poll_id = messages.read_poll_id(request.fields)
    if poll_id is None:
        return await _requeue(request, "release")
    worker = messages.read_worker(request.fields)
    await request.service.polls.release(_poll_name(request, worker, poll_id))
    claims = await request.plane.do(Claim((), worker, 0, poll_id=poll_id, local=False))
    results: list[Fields] = []
    for op, found in await _give_back(request.plane, worker, claims):
        results.append(_error(found) if isinstance(found, Exception) else messages.encode_requeue_answer(op, found))
    return {"results": results}


async def retry(request: RequestContext) -> Fields:
    return await _requeue(request, "retry")


async def _requeue(request: RequestContext, reason: Any) -> Fields:
    """Requeue each of `items`, or all `claims` of one worker, for the same reason."""
    fields = request.fields
    if "claims" not in fields:
        decode = messages.decode_release if reason == "release" else messages.decode_retry
        return await _each(request, read_items(fields), decode, messages.encode_requeue_answer)
    worker = messages.read_worker(fields)
    pairs = read_pairs(fields, "claims")
    delay, error = messages.read_retry(fields)
    if reason == "release":
        delay = 0.0
        error = None

    def requeue(claim: tuple[str, int]) -> Requeue:
        return Requeue(Fence(claim[0], worker, claim[1]), reason, delay, error)

    return await _each(request, pairs, requeue, messages.encode_requeue_answer)


async def ack(request: RequestContext) -> Fields:
    return await _one(request, messages.decode_finish(request.fields), messages.encode_finish_answer)


async def ack_many(request: RequestContext) -> Fields:
    return await _each(request, read_items(request.fields), messages.decode_finish, messages.encode_finish_answer)


async def chunk(request: RequestContext) -> Fields:
    return await _one(request, messages.decode_append(request.fields), messages.encode_append_answer)


async def chunks(request: RequestContext) -> Fields:
    return await _each(request, read_items(request.fields), messages.decode_append, messages.encode_append_answer)


async def heartbeat(request: RequestContext) -> Fields:
    """Renew at once; then wait for cancellations that the worker does not know, for at most half a lease."""
    beat = messages.decode_beat(request.fields)
    known = {*read_pairs(request.fields, "known")}
    wait = request.seconds("wait_s", 0.0)
    plane = request.plane
    answer = Beaten([], [])

    async def renew() -> Beaten | None:
        nonlocal answer
        if beat.claims:
            answer = await plane.do(beat)
            request.service.renewals.renewed((request.ns, beat.worker))
        else:
            answer = Beaten([], await plane.cancels(beat.worker))
        if answer.lost or not known.issuperset(answer.cancel):
            return answer
        return None

    if beat.claims:
        wait = min(wait, beat.lease / 2)
    if wait <= 0 or request.service.polls.draining:
        await renew()
    else:
        with request.hold() as held:
            await held.wait_for(lambda: plane.wait([("claims", beat.worker)], renew, wait))
    return messages.encode_beat_answer(answer)


# Operators ----------------------------------------------------------------------------------------------------------


async def reap(request: RequestContext) -> Fields:
    return messages.encode_reap_answer(await request.plane.do(messages.decode_reap(request.fields)))


async def purge(request: RequestContext) -> Fields:
    return {"count": await request.plane.purge(seconds(request.fields, "older_than_s", 0.0, 1e12))}


_NAMED: tuple[Handler, ...] = (
    submit, submit_many, await_many, cancel, invocation, invocations, queues,
    poll, ack, ack_many, chunk, chunks, heartbeat, release, retry, reap, purge,
)  # fmt: skip
HANDLERS: Mapping[str, Handler] = {"await": await_one} | {handler.__name__: handler for handler in _NAMED}
"""By the names of ROUTES, except `stream`, which yields chunks."""
HELD_ROUTES = frozenset({"await", "await_many", "heartbeat", "poll", "stream"})
"""Routes whose handlers may hold a request."""
