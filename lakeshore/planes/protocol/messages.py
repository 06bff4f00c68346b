"""The messages of the HTTP protocol: the contract's operations and their answers as the fields of bodies.

Each message has up to four functions: the client calls `encode_x` (operation to fields) and `decode_x_answer` (fields to
answer), the server calls `decode_x` and `encode_x_answer`. The server trusts nothing that a client sends: `decode_x`
raises WireError for fields that make no operation. Times are float seconds.

After the operations come the results of reads: outcomes, pages of frames, rows, counts.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from ...errors import DispatchError, InvocationNotFound, WireError
from ...ids import check_id, check_queue, new_id
from ..contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
    Cancel,
    Cancelled,
    Claim,
    Claimed,
    Fence,
    FinalFrame,
    Finish,
    Reap,
    Reaped,
    Requeue,
    Requeued,
    Submit,
    whole_priority,
)
from ..contract.records import TERMINAL, Failure, Outcome, Page, Row
from .fields import (
    Fields,
    abbreviated,
    decode,
    decode_failure,
    encode,
    field,
    read_pairs,
    seconds,
    text,
    whole_number,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..contract.news import Cursor

logger = logging.getLogger("dreamlake.lakeshore.planes")

MAX_CLAIMED = 1000
"""Invocations that one poll takes at most."""
MAX_QUEUES = 100
"""Queues that one poll names at most."""
MAX_SECONDS = 1e9
"""The longest lease and the longest delay of a retry, about 30 years: longer ones are cut down to it."""

STUB: Fields = {"module": "_native_wire", "qualname": "_native_wire.envelope", "version": "v1"}
"""The `function` of every submit: the real callable is inside the Envelope, which nothing on the way opens."""


# Submit -------------------------------------------------------------------------------------------------------------


def encode_submit(op: Submit) -> Fields:
    fields: Fields = {
        "invocation_id": op.id,
        "queue": op.queue,
        "function": STUB,
        "args_blob": op.body,
        "run_config": {"queue": op.queue, "priority": op.priority, "key": op.key},
        "code_context": {},
    }
    if op.parent is not None:
        fields["parent_invocation_id"] = op.parent
    if op.config is not None:
        fields["config"] = op.config
    return fields


def decode_submit(fields: Mapping[str, Any]) -> Submit:
    """The submit in a request, marked untrusted whatever the request claims."""
    run_config: Fields = field(fields, "run_config", dict, {})
    queue = check_queue(field(fields, "queue", str, "") or "default")
    parent = field(fields, "parent_invocation_id", str, "")
    return Submit(  # by position: keywords would take a third of the time of this function
        check_id(field(fields, "invocation_id", str)),
        queue,
        field(fields, "args_blob", bytes),
        text(run_config, "key", "") or None,
        whole_priority(run_config.get("priority")),
        check_id(parent) if parent else None,
        False,
        _stored_config(fields, run_config, queue),
    )


def encode_submit_answer(op: Submit, id: str) -> Fields:
    return {"invocation_id": id, "queue": op.queue}


def decode_submit_answer(op: Submit, fields: Mapping[str, Any]) -> str:
    """The id that holds. A submit without a key always gets its own: any other id is an answer to another request."""
    id = str(fields.get("invocation_id") or op.id)
    if op.key is None and id != op.id:
        raise DispatchError(f"expected the answer to the submit of {op.id!r}, got that to the submit of {id!r:.100}")
    return id


# What a producer sends beside the Envelope (run_config, function, code_context) is stored with the row, in the column
# `config`, and goes out with the claim. Nothing is stored where all three are what our own client sends.


def _stored_config(fields: Mapping[str, Any], run_config: Fields, queue: str) -> bytes | None:
    if fields.get("config") is None and fields.get("function") == STUB and fields.get("code_context") == {}:
        return _encode_config(run_config, STUB, {}, queue)  # what our own client sends: nothing else to check
    opaque = field(fields, "config", bytes, b"")
    if opaque:
        return opaque
    function: Fields = field(fields, "function", dict, STUB)
    code_context: Fields = field(fields, "code_context", dict, {})
    return _encode_config(run_config, function, code_context, queue)


def _encode_config(run_config: Fields, function: Fields, code_context: Fields, queue: str) -> bytes | None:
    run_config = {**run_config, "queue": queue}
    if run_config == _default_run_config(queue) and function == STUB and not code_context:
        return None
    return encode({"run_config": run_config, "function": function, "code_context": code_context})


_CONFIG_FIELDS = frozenset({"run_config", "function", "code_context"})


def _default_run_config(queue: str) -> Fields:
    return {"queue": queue, "priority": 0, "key": None}


# Claim --------------------------------------------------------------------------------------------------------------


def encode_claim(op: Claim) -> Fields:
    return {
        "worker_id": op.worker,
        "queue": op.queues[0],
        "queues": list(op.queues),
        "max_commands": op.limit,
        "lease_s": op.lease,
        "max_lost": op.max_lost,
        "poll_id": op.poll_id,
        "timeout_s": op.wait,
        "busy": op.busy,
    }


def decode_claim(fields: Mapping[str, Any]) -> Claim:
    """The claim of a poll.

    Without `lease_s` the claim never expires: workers of the function protocol send no heartbeats. With `poll_id` and
    `max_commands` 0 it asks only for what the poll of that id has taken already.
    """
    lease = None
    if fields.get("lease_s") is not None:
        lease = seconds(fields, "lease_s", 0.0, MAX_SECONDS)
    if lease == 0:
        raise WireError("expected `lease_s` to be above 0, or absent for a claim that never expires, got 0")
    limit = field(fields, "max_commands", int, 1)
    max_lost = field(fields, "max_lost", int, 5)
    poll_id = read_poll_id(fields)
    if limit < (1 if poll_id is None else 0) or max_lost < 1:
        raise WireError(f"expected `max_commands` and `max_lost` from 1, got {limit} and {max_lost}")
    return Claim(
        queues=_read_queues(fields),
        worker=read_worker(fields),
        limit=min(limit, MAX_CLAIMED),
        lease=lease,
        max_lost=min(max_lost, 2**31),
        poll_id=poll_id,
        local=False,
        busy=field(fields, "busy", bool, False),
    )


def _read_queues(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The queues of a poll: `queues`, else `queue`, else the one named default."""
    names: list[Any] = field(fields, "queues", list, []) or [field(fields, "queue", str, "") or "default"]
    if len(names) > MAX_QUEUES:
        raise WireError(f"expected at most {MAX_QUEUES} `queues` in one poll, got {len(names)}")
    for name in names:
        if not isinstance(name, str):
            raise WireError(f"expected each of `queues` to be text, the name of a queue, got a {type(name).__name__}")
    return tuple(map(check_queue, names))


def read_worker(fields: Mapping[str, Any]) -> str:
    """The worker's id: text of at most 200 characters."""
    worker = text(fields, "worker_id")
    if not 0 < len(worker) <= 200:
        raise WireError(f"expected `worker_id` to be 1 to 200 characters, got {len(worker)}")
    return worker


def read_poll_id(fields: Mapping[str, Any]) -> str | None:
    """The id of a poll, or None for a poll without one."""
    poll_id = field(fields, "poll_id", str, "")
    return check_id(poll_id) if poll_id else None


def encode_claim_answer(claims: Sequence[Claimed]) -> Fields:
    """The answer to a poll: one command of kind `run` for each claim."""
    return {"commands": [{"id": new_id(), "kind": "run", "body": _encode_claimed(one)} for one in claims]}


def _encode_claimed(claimed: Claimed) -> Fields:
    config: Fields = {}
    if claimed.config is not None:
        try:
            config = decode(claimed.config, "the stored run_config")
        except WireError:
            pass  # opaque bytes of another client, which go out as they are
    run_config = _map_or(config.get("run_config"), _default_run_config(claimed.queue))
    body: Fields = {
        "invocation_id": claimed.id,
        "function": _map_or(config.get("function"), STUB),
        "args_blob": claimed.body,
        "run_config": run_config,
        "code_context": _map_or(config.get("code_context"), {}),
        "queue": claimed.queue,
        "attempt": claimed.attempt,
        "failures": claimed.failures,
        "lost": claimed.lost,
        "next_seq": claimed.next_seq,
        "root_invocation_id": claimed.root,
        "parent_invocation_id": claimed.parent,
    }
    if run_config.get("prefix"):
        body["prefix"] = run_config["prefix"]
    if claimed.config is not None and not _is_our_config(config):
        body["config"] = claimed.config
    return body


def _map_or(value: object, default: Fields) -> Fields:
    return cast("Fields", value) if isinstance(value, dict) else default


def _is_our_config(config: Fields) -> bool:
    """Whether `_encode_config` made it, so that the other fields of a command hold all of it."""
    return config.keys() == _CONFIG_FIELDS and all(isinstance(value, dict) for value in config.values())


def decode_claim_answer(op: Claim, fields: Mapping[str, Any]) -> list[Claimed]:
    """The claims in the answer to a poll. Commands that cannot be run are skipped, with one warning for all of them."""
    claims: list[Claimed] = []
    errors: list[ValueError] = []
    for command in fields.get("commands") or ():
        try:
            run: Fields = field({"command": command}, "command", dict, {})
            if run.get("kind") == "run":
                claims.append(_decode_claimed(op, field(run, "body", dict, {})))
        except ValueError as exc:
            errors.append(exc)
    if errors:
        logger.warning("a poll brought %d commands that cannot be run; the first: %s", len(errors), errors[0])
    return claims


def _decode_claimed(op: Claim, body: Fields) -> Claimed:
    run_config: Fields = field(body, "run_config", dict, {})
    return Claimed(
        id=check_id(body.get("invocation_id")),
        queue=field(body, "queue", str, "") or field(run_config, "queue", str, "") or op.queues[0],
        body=field(body, "args_blob", bytes),
        attempt=whole_number(body, "attempt", 1) or 1,
        failures=whole_number(body, "failures", 0),
        lost=whole_number(body, "lost", 0),
        next_seq=whole_number(body, "next_seq", 0),
        trusted=False,
        parent=field(body, "parent_invocation_id", str, "") or None,
        root=field(body, "root_invocation_id", str, "") or None,
        config=field(body, "config", bytes, b"") or _config_of_command(body, run_config),
    )


def _config_of_command(body: Fields, run_config: Fields) -> bytes | None:
    """What was stored beside the Envelope, put together again from the fields of the command."""
    queue = str(run_config.get("queue") or body.get("queue") or "")
    default = _default_run_config(queue)
    if not run_config.keys() - default.keys():
        run_config = default  # queue, priority and key are columns of the row itself
    return _encode_config(run_config, _map_or(body.get("function"), STUB), _map_or(body.get("code_context"), {}), queue)


# The fence, by which a worker names its claim -----------------------------------------------------------------------


def _encode_fence(fence: Fence) -> Fields:
    fields: Fields = {"invocation_id": fence.id}
    if fence.worker:
        fields["worker_id"] = fence.worker
    if fence.attempt is not None:
        fields["attempt"] = fence.attempt
    return fields


def decode_fence(fields: Mapping[str, Any]) -> Fence:
    """The claim that a request names; workers of the function protocol may send no worker, or no attempt."""
    attempt = whole_number(fields, "attempt", -1, -1)
    worker = text(fields, "worker_id", "") or None
    return Fence(check_id(field(fields, "invocation_id", str)), worker, None if attempt < 0 else attempt)


# Heartbeat ----------------------------------------------------------------------------------------------------------


def encode_beat(op: Beat) -> Fields:
    fields: Fields = {"worker_id": op.worker, "claims": [*op.claims], "lease_s": op.lease}
    if op.wait:
        fields["wait_s"] = op.wait
        fields["known"] = [*op.known]
    return fields


def decode_beat(fields: Mapping[str, Any]) -> Beat:
    lease = seconds(fields, "lease_s", 30.0, MAX_SECONDS) or 30.0
    return Beat(read_worker(fields), read_pairs(fields, "claims"), lease)


def encode_beat_answer(answer: Beaten) -> Fields:
    return {"lost": [*answer.lost], "cancel": [*answer.cancel]}


def decode_beat_answer(fields: Mapping[str, Any]) -> Beaten:
    return Beaten(_decode_pairs(fields.get("lost")), _decode_pairs(fields.get("cancel")))


def _decode_pairs(pairs: Any) -> list[tuple[str, int]]:
    return [(str(id), int(attempt)) for id, attempt in pairs or ()]


# Finish -------------------------------------------------------------------------------------------------------------


def encode_finish(op: Finish) -> Fields:
    fields = _encode_fence(op.fence)
    fields["state"] = op.state
    fields["result_blob"] = op.result or b""
    if op.error is not None:
        fields["error"] = op.error.as_dict()
    if op.final is not None:
        fields["final_frame"] = {"seq": op.final.seq, "bytes": op.final.bytes}
    return fields


def decode_finish(fields: Mapping[str, Any]) -> Finish:
    state = field(fields, "state", str)
    if state not in TERMINAL:
        raise WireError(f"expected `state` to be one of {sorted(TERMINAL)}, got {state!r:.60}")
    frame: Fields = field(fields, "final_frame", dict, {})
    final = FinalFrame(whole_number(frame, "seq"), field(frame, "bytes", bytes)) if frame else None
    result = field(fields, "result_blob", bytes, b"") or None
    return Finish(decode_fence(fields), state, result, decode_failure(fields.get("error")), final)


def encode_finish_answer(op: Finish, accepted: bool) -> Fields:
    return {"ok": True, "repeat": not accepted}


def decode_finish_answer(op: Finish, fields: Mapping[str, Any]) -> bool:
    return not fields.get("repeat")


# Requeue: a release or a retry --------------------------------------------------------------------------------------


def encode_requeue(op: Requeue) -> Fields:
    fields = _encode_fence(op.fence)
    if op.reason == "retry":
        fields["delay_s"] = op.delay
        if op.error is not None:
            fields["error"] = op.error.as_dict()
    return fields


def decode_release(fields: Mapping[str, Any]) -> Requeue:
    return Requeue(decode_fence(fields))


def decode_retry(fields: Mapping[str, Any]) -> Requeue:
    delay, error = read_retry(fields)
    return Requeue(decode_fence(fields), "retry", delay, error)


def read_retry(fields: Mapping[str, Any]) -> tuple[float, Failure | None]:
    """The delay of a retry, in seconds, and the failure that caused it."""
    return seconds(fields, "delay_s", 0.0, MAX_SECONDS), decode_failure(fields.get("error"))


def encode_requeue_answer(op: Requeue, answer: Requeued) -> Fields:
    return {"state": answer.state, "queue": answer.queue, "delayed": answer.delayed}


def decode_requeue_answer(op: Requeue, fields: Mapping[str, Any]) -> Requeued:
    return Requeued(str(fields.get("state")), str(fields.get("queue")), bool(fields.get("delayed")))


# Append -------------------------------------------------------------------------------------------------------------


def encode_append(op: Append) -> Fields:
    return _encode_fence(op.fence) | {"seq": op.first_seq, "frames": list(op.frames), "final": op.final}


def decode_append(fields: Mapping[str, Any]) -> Append:
    """Several frames under `frames`, of which the first has the number `seq`, or one frame under `bytes`."""
    if "frames" in fields:
        frames: list[Any] = field(fields, "frames", list, [])
    else:
        frames = [field(fields, "bytes", bytes)]
    if any(type(frame) is not bytes for frame in frames):
        raise WireError("expected each of `frames` to be bytes")
    return Append(decode_fence(fields), whole_number(fields, "seq"), tuple(frames), field(fields, "final", bool, False))


def encode_append_answer(op: Append, answer: Appended) -> Fields:
    fields: Fields = {"ok": True, "seq": op.first_seq, "written": answer.written, "duplicates": answer.duplicates}
    if answer.duplicates and not answer.written:
        fields["duplicate"] = True
    return fields


def decode_append_answer(op: Append, fields: Mapping[str, Any]) -> Appended:
    return Appended(int(fields.get("written") or 0), int(fields.get("duplicates") or 0))


# Cancel -------------------------------------------------------------------------------------------------------------


def encode_cancel(op: Cancel) -> Fields:
    return {"invocation_id": op.id}


def decode_cancel(fields: Mapping[str, Any]) -> Cancel:
    return Cancel(read_invocation_id(fields))


def encode_cancel_answer(op: Cancel, answer: Cancelled) -> Fields:
    return {"what": answer.what, "worker_id": answer.worker}


def decode_cancel_answer(op: Cancel, fields: Mapping[str, Any]) -> Cancelled:
    what = fields.get("what")
    return Cancelled(what if what in ("killed", "asked") else "terminal", fields.get("worker_id"))


def read_invocation_id(fields: Mapping[str, Any]) -> str:
    return check_id(field(fields, "invocation_id", str))


# Reap ---------------------------------------------------------------------------------------------------------------


def encode_reap(op: Reap) -> Fields:
    return {"dead": list(op.dead), "alive": list(op.alive), "counted": op.counted}


def decode_reap(fields: Mapping[str, Any]) -> Reap:
    return Reap(_read_texts(fields, "dead"), _read_texts(fields, "alive"), field(fields, "counted", bool, True))


def _read_texts(fields: Mapping[str, Any], name: str) -> tuple[str, ...]:
    texts: list[Any] = field(fields, name, list, [])
    for one in texts:
        if not isinstance(one, str):
            raise WireError(f"expected each of `{name}` to be text, got a {type(one).__name__}")
    return tuple(texts)


def encode_reap_answer(answer: Reaped) -> Fields:
    return {"rows": [list(row) for row in answer.rows], "due": answer.due}


def decode_reap_answer(fields: Mapping[str, Any]) -> Reaped:
    return Reaped([(str(id), str(queue), str(state)) for id, queue, state in fields["rows"]], list(fields["due"]))


# Results of reads. What decodes them in the client raises TypeError, ValueError or LookupError for another shape. -----


def encode_outcome(outcome: Outcome) -> Fields:
    """The answer to an await. Raises InvocationNotFound for an outcome that is unknown."""
    if outcome.state == "unknown":
        raise InvocationNotFound(outcome.id)
    if outcome.state == "pending":
        return {"state": "pending"}
    error = None if outcome.error is None else outcome.error.as_dict()
    return {"state": outcome.state, "result_blob": outcome.result or b"", "error": error}


def decode_outcome(id: str, fields: Mapping[str, Any]) -> Outcome:
    state = str(fields.get("state") or "pending")
    if state not in TERMINAL:
        return Outcome(id, "pending")
    error = fields.get("error") or None  # servers of the function protocol send an empty error with a success
    result = fields.get("result_blob") or None
    if not isinstance(result, bytes | None):
        raise TypeError(f"expected a result to be bytes, got a {type(result).__name__}")
    return Outcome(id, state, result, decode_failure(error))


def encode_cursor(cursor: Cursor) -> Fields:
    return {
        "invocation_id": cursor.id,
        "since": cursor.since,
        "limit": cursor.limit,
        "max_bytes": cursor.max_bytes,
    }


def encode_page(page: Page) -> Fields:
    error = None if page.error is None else page.error.as_dict()
    return {"frames": [*page.frames], "closed": page.closed, "state": page.state, "error": error}


def decode_page(fields: Mapping[str, Any]) -> Page:
    frames = [_decode_frame(seq, data) for seq, data in fields.get("frames") or ()]
    return Page(frames, bool(fields.get("closed")), str(fields.get("state")), decode_failure(fields.get("error")))


def _decode_frame(seq: object, data: object) -> tuple[int, bytes]:
    if type(seq) is not int or not -1 <= seq < 2**63 or type(data) is not bytes:
        raise TypeError(
            f"expected a frame to be its number and its bytes, got {abbreviated(seq, 40)} and {abbreviated(data, 40)}"
        )
    return seq, data


def encode_row(row: Row) -> Fields:
    return row._asdict() | {"error": None if row.error is None else row.error.as_dict()}


def decode_row(fields: Mapping[str, Any]) -> Row:
    columns: Fields = {name: fields.get(name) for name in Row._fields}
    if columns["error"] is not None:
        columns["error"] = Failure.from_dict(columns["error"])
    return Row(**columns)


def decode_counts(fields: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """How many invocations each queue has in each state."""
    return {(str(name), str(state)): int(count) for name, state, count in fields.get("queues") or ()}


def decode_ages(fields: Mapping[str, Any]) -> dict[str, float]:
    """The age in seconds of the oldest due invocation of each queue."""
    ages: Fields = fields.get("ages") or {}
    return {str(queue): float(age) for queue, age in ages.items()}
