"""The routes: fields -> operation -> plane -> fields. What a request is made of, and who may send it, is `app`'s.

Nothing here decodes a user's value. Batches apply what can be read, in one go, and each item answers for itself.
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
from .requests import told, whole

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence

    from ..planes.contract.news import Kind
    from ..planes.contract.operations import Operation, Submit
    from ..planes.contract.records import Page
    from ..planes.plane import Plane
    from .polls import Name, Turn
    from .requests import Call

__all__ = ["HANDLERS", "HELD", "stream"]

Fields = dict[str, Any]
Handler: TypeAlias = "Callable[[Call], Coroutine[Any, Any, Fields]]"

MOST_LINGER_S = 1.0

logger = logging.getLogger("dreamlake.lakeshore.server")


# Batches ------------------------------------------------------------------------------------------------------------


async def _each(
    call: Call, items: Iterable[Any], read: Callable[[Any], Operation], answer: Callable[[Any, Any], Fields]
) -> Fields:
    """Apply what can be read of `items` in as few batches as can be; for each its answer or its error."""
    results: list[Fields] = []
    ops: list[Operation] = []
    places: list[int] = []
    for item in items:
        try:
            ops.append(read(item))
            places.append(len(results))
            results.append({})
        except (ValueError, RecursionError) as exc:
            results.append(encode_error(told(exc)))
    for place, op, found in zip(places, ops, await call.plane.many(ops), strict=True):
        results[place] = _error(found) if isinstance(found, Exception) else answer(op, found)
    return {"results": results}


def _error(exc: Exception) -> Fields:
    if status_of(exc) >= 500 and status_of(exc) != 503:
        logger.error("an item of a batch failed", exc_info=exc)
    return encode_error(exc)


async def _one(call: Call, op: Operation, answer: Callable[[Any, Any], Fields]) -> Fields:
    return answer(op, await call.plane.do(op))


# Producers ----------------------------------------------------------------------------------------------------------


def _read_submit(fields: Mapping[str, Any]) -> Submit:
    """What a submit says around its envelope goes out with the claim, some levels deeper: what could not is refused here,
    or no poll of its queue would be answered again."""
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


async def submit(call: Call) -> Fields:
    return await _one(call, _read_submit(call.fields), messages.encode_submit_answer)


async def submit_many(call: Call) -> Fields:
    return await _each(call, read_items(call.fields), _read_submit, messages.encode_submit_answer)


async def await_one(call: Call) -> Fields:
    id, timeout = messages.read_invocation_id(call.fields), call.seconds("timeout_s", AWAIT_S)
    outcome: Outcome | None = None
    if timeout > 0:
        with call.turn() as turn:
            try:
                outcome = await turn.hold(partial(call.plane.outcome, id, timeout=timeout))
            except TimeoutError:
                pass
    else:
        (outcome,) = await call.plane.current_outcomes([id])
    return messages.encode_outcome(outcome or Outcome(id, "pending"))


async def await_many(call: Call) -> Fields:
    """Whatever ended, or is unknown, or has frames to read, of all that is asked about; what is bad answers at once."""
    results: list[Any] = []
    pages: list[Any] = []
    ids = _readable(read_items(call.fields), messages.read_invocation_id, results)
    cursors = _readable(read_items(call.fields, "streams"), _cursor, pages, "since")
    timeout = 0.0 if results or pages else call.seconds("timeout_s", AWAIT_S)
    linger = seconds(call.fields, "linger_s", 0.0, MOST_LINGER_S)
    watch = field(call.fields, "watch", str, "")
    if not ids and not cursors:
        return {"results": results, "pages": pages}
    with call.turn(("watch", call.ns, watch) if watch else None) as turn:
        wait = partial(call.plane.await_many, ids, cursors, timeout=timeout, linger=linger)
        found = await (turn.hold(wait) if timeout > 0 else wait())
    if found is None:
        return {"results": results, "pages": pages}
    asked, since = {*ids}, {cursor.id: cursor.since for cursor in cursors}
    for outcome in found.outcomes:
        id, unknown = outcome.id, outcome.state == "unknown"
        answer = encode_error(InvocationNotFound(id)) if unknown else messages.encode_outcome(outcome)
        if id in asked:
            results.append([id, answer])
        if unknown and id in since:
            pages.append([id, since[id], answer])
    pages += [[cursor.id, cursor.since, messages.encode_page(page)] for cursor, page in found.pages]
    return {"results": results, "pages": pages} | ({"more": True} if found.more else {})


def _readable(items: Iterable[Fields], read: Callable[[Fields], Any], bad: list[Any], *also: str) -> list[Any]:
    """What can be read of `items`; the others go to `bad` with what they say of themselves and their error."""
    good: list[Any] = []
    for item in items:
        try:
            good.append(read(item))
        except (ValueError, RecursionError) as exc:
            bad.append([*(_echo(item.get(name)) for name in ("invocation_id", *also)), encode_error(told(exc))])
    return good


def _echo(value: object) -> Any:
    return value if type(value) is int or (type(value) is str and len(value) <= 200) else None


def _cursor(fields: Mapping[str, Any]) -> Cursor:
    since, limit, most = (
        field(fields, name, int, default)
        for name, default in (("since", -1), ("limit", MAX_FRAMES_PER_PAGE), ("max_bytes", MAX_BYTES_PER_PAGE))
    )
    if limit < 1 or most < 1:
        raise WireError(f"expected `limit` and `max_bytes` from 1, got {limit} and {most}")
    return Cursor(
        messages.read_invocation_id(fields),
        max(-1, min(since, MAX_SEQ)),
        min(limit, MAX_FRAMES_PER_PAGE),
        min(most, MAX_BYTES_PER_PAGE),
    )


async def cancel(call: Call) -> Fields:
    if "items" in call.fields:
        return await _each(call, read_items(call.fields), messages.decode_cancel, messages.encode_cancel_answer)
    return await _one(call, messages.decode_cancel(call.fields), messages.encode_cancel_answer)


async def stream(call: Call) -> AsyncGenerator[bytes]:
    """The frames after `since` as they are, until the journal is closed, the client has gone or the server ends.

    The first chunk comes at once and may be empty. Raises InvocationNotFound in its place.
    """
    since, limit = whole(call.query, "since", -1), call.service.limits.page
    with call.turn() as turn, call.service.metrics.stream():
        page: Page | None = await call.plane.page(call.id, since, max_bytes=limit)
        while page is not None:
            yield b"".join([frame for _, frame in page.frames])
            if page.closed:
                return
            if page.frames:
                since = page.frames[-1][0]
            page = await turn.hold(partial(call.plane.next_page, call.id, since, max_bytes=limit))
            call.check_again()


async def invocation(call: Call) -> Fields:
    for row in await call.plane.rows(RowFilter(id=call.id, limit=1, body=call.query.get("body") == "1")):
        return messages.encode_row(row)
    raise InvocationNotFound(call.id)


async def invocations(call: Call) -> Fields:
    query, limit = call.query, whole(call.query, "limit", 100)
    if not 1 <= limit <= MAX_ITEMS_PER_REQUEST:
        raise WireError(f"expected `limit` from 1 to {MAX_ITEMS_PER_REQUEST}, got {limit}")
    names = {name: query.get(name) for name in ("queue", "state", "key", "root")}
    id = check_id(query["id"]) if "id" in query else None
    rows = await call.plane.rows(RowFilter(id, **names, limit=limit, body=query.get("body") == "1"))
    return {"invocations": [messages.encode_row(row) for row in rows]}


async def queues(call: Call) -> Fields:
    counts = await call.plane.counts(call.query.get("queue"), call.query.get("state"))
    rows = [[queue, state, count] for (queue, state), count in counts.items()]
    return {"queues": rows, "ages": await call.plane.ages()}


# Workers ------------------------------------------------------------------------------------------------------------


async def poll(call: Call) -> Fields:
    """Wait for claims. The repeat of a poll with an id gets its claims again; a poll without an id releases what its client
    did not receive."""
    op, timeout = messages.decode_claim(call.fields), call.seconds("timeout_s", POLL_TIMEOUT)
    name = None if op.poll_id is None else _poll_name(call, op.worker, op.poll_id)
    with call.turn(name) as turn:
        claims = [] if name is not None and call.service.polls.released(name) else await _claim(call, turn, op, timeout)
        if turn.dropped:
            claims = []
    if claims:
        call.taken = partial(_give_back, call.plane, op.worker, claims)
        call.unsent = call.taken if op.poll_id is None else None
    answer = messages.encode_claim_answer(claims)
    if call.ns in call.service.target_versions:
        answer["target_nymph_version"] = call.service.target_versions[call.ns]
    return answer


def _poll_name(call: Call, worker: str, poll_id: str) -> Name:
    return "poll", call.ns, worker, poll_id


async def _claim(call: Call, turn: Turn, op: Claim, timeout: float) -> list[Claimed]:
    """A claim under way is waited for whoever leaves meanwhile, so that what it takes is known: to answer it, to give it
    back, or to leave it to the repeat that is already there."""
    plane, polls, renewals = call.plane, call.service.polls, call.service.renewals
    topics: list[tuple[Kind, str]] = [("queue", queue) for queue in op.queues]

    async def look() -> list[Claimed] | None:
        began, claims = perf_counter(), list[Claimed]()
        late = op.busy and op.lease is not None and renewals.late((call.ns, op.worker), op.lease)
        with anyio.CancelScope(shield=True):
            claims = await plane.do(op._replace(limit=0) if late else op)
        if claims:
            call.service.metrics.claimed(perf_counter() - began)
            if not op.busy:
                renewals.renewed((call.ns, op.worker))  # these are all that it has
        return claims or ([] if late else None)  # a list ends the wait

    async def wait() -> list[Claimed] | None:
        place = call.ns, op.queues, op.lease is None  # who takes the same of the same
        with anyio.move_on_after(timeout):
            return await polls.in_line(place, lambda: plane.wait(topics, look, None))
        return None

    if not await turn.alone():
        return []
    return await look() or (await turn.hold(wait) if timeout > 0 else None) or []


async def _give_back(plane: Plane, worker: str, claims: Sequence[Claimed]) -> list[tuple[Requeue, Any]]:
    """Release claims; each release with its answer or its exception."""
    ops = [Requeue(Fence(claimed.id, worker, claimed.attempt)) for claimed in claims]
    return list(zip(ops, await plane.many(ops), strict=True))


async def release(call: Call) -> Fields:
    """Give claims back, or all that a poll has taken or would have."""
    poll_id = messages.read_poll_id(call.fields)
    if poll_id is None:
        return await _requeue(call, "release")
    worker = messages.read_worker(call.fields)
    await call.service.polls.release(_poll_name(call, worker, poll_id))
    claims = await call.plane.do(Claim((), worker, 0, poll_id=poll_id, local=False))
    results: list[Fields] = []
    for op, found in await _give_back(call.plane, worker, claims):
        results.append(_error(found) if isinstance(found, Exception) else messages.encode_requeue_answer(op, found))
    return {"results": results}


async def retry(call: Call) -> Fields:
    return await _requeue(call, "retry")


async def _requeue(call: Call, reason: Any) -> Fields:
    """Requeue what stands under `items`, or all `claims` of a worker, for the same reason."""
    fields = call.fields
    if "claims" not in fields:
        decode = messages.decode_release if reason == "release" else messages.decode_retry
        return await _each(call, read_items(fields), decode, messages.encode_requeue_answer)
    worker = messages.read_worker(fields)
    pairs = read_pairs(fields, "claims")
    delay, error = messages.read_retry(fields)
    if reason == "release":
        delay, error = 0.0, None

    def requeue(claim: tuple[str, int]) -> Requeue:
        return Requeue(Fence(claim[0], worker, claim[1]), reason, delay, error)

    return await _each(call, pairs, requeue, messages.encode_requeue_answer)


async def ack(call: Call) -> Fields:
    return await _one(call, messages.decode_finish(call.fields), messages.encode_finish_answer)


async def ack_many(call: Call) -> Fields:
    return await _each(call, read_items(call.fields), messages.decode_finish, messages.encode_finish_answer)


async def chunk(call: Call) -> Fields:
    return await _one(call, messages.decode_append(call.fields), messages.encode_append_answer)


async def chunks(call: Call) -> Fields:
    return await _each(call, read_items(call.fields), messages.decode_append, messages.encode_append_answer)


async def heartbeat(call: Call) -> Fields:
    """Renew at once; then wait for what the worker does not know yet, and no longer than its leases allow."""
    beat, known = messages.decode_beat(call.fields), {*read_pairs(call.fields, "known")}
    wait, plane = call.seconds("wait_s", 0.0), call.plane
    answer = Beaten([], [])

    async def look() -> Beaten | None:
        nonlocal answer
        answer = await plane.do(beat) if beat.claims else Beaten([], await plane.cancels(beat.worker))
        if beat.claims:
            call.service.renewals.renewed((call.ns, beat.worker))
        return answer if answer.lost or not known.issuperset(answer.cancel) else None

    if beat.claims:
        wait = min(wait, beat.lease / 2)
    if wait <= 0 or call.service.polls.draining:
        await look()
    else:
        with call.turn() as turn:
            await turn.hold(lambda: plane.wait([("claims", beat.worker)], look, wait))
    return messages.encode_beat_answer(answer)


# Operators ----------------------------------------------------------------------------------------------------------


async def reap(call: Call) -> Fields:
    return messages.encode_reap_answer(await call.plane.do(messages.decode_reap(call.fields)))


async def purge(call: Call) -> Fields:
    return {"count": await call.plane.purge(seconds(call.fields, "older_than_s", 0.0, 1e12))}


_NAMED: tuple[Handler, ...] = (
    submit, submit_many, await_many, cancel, invocation, invocations, queues,
    poll, ack, ack_many, chunk, chunks, heartbeat, release, retry, reap, purge,
)  # fmt: skip
HANDLERS: Mapping[str, Handler] = {"await": await_one} | {handler.__name__: handler for handler in _NAMED}
"""By the names of ROUTES; `stream` alone answers otherwise."""
HELD = frozenset({"await", "await_many", "heartbeat", "poll", "stream"})
