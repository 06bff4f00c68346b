"""The contract's operations and answers as the HTTP protocol says them: both directions of both, side by side.

`ask_*` and `hear_*` are the client's (operation to fields, fields to answer), `read_*` and `say_*` the server's. What a
client says is believed by nobody: `read_*` raise WireError for whatever no operation is made of. Times are float seconds.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, cast

from ...errors import WireError
from ...ids import check_id, check_queue, new_id
from ..contract.operations import (
    Append,
    Appended,
    Beat,
    Beaten,
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
from ..contract.records import TERMINAL
from .routes import STUB, decode, encode, failure_from, field, number, read_names, read_pairs, whole

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

Fields = dict[str, Any]

logger = logging.getLogger("dreamlake.lakeshore.planes")

MOST_CLAIMED = 1000
"""Invocations that one poll takes at most."""


# Submit -------------------------------------------------------------------------------------------------------------


def ask_submit(op: Submit) -> Fields:
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


def read_submit(fields: Mapping[str, Any]) -> Submit:
    """What came in through a server is not trusted, whatever it says of itself."""
    run_config = field(fields, "run_config", dict, {})
    queue = check_queue(field(fields, "queue", str, "") or "default")
    key, parent = field(run_config, "key", str, "") or None, field(fields, "parent_invocation_id", str, "") or None
    return Submit(
        check_id(field(fields, "invocation_id", str)),
        queue,
        field(fields, "args_blob", bytes),
        None if key is None else _text(key, "key"),
        whole_priority(run_config.get("priority")),
        None if parent is None else check_id(parent),
        False,
        _config(fields, run_config, queue),
    )


def _text(value: str, name: str) -> str:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WireError(f"expected the field `{name}` to be text, got half of a character in {value!r:.60}") from None
    return value


def _config(fields: Mapping[str, Any], run_config: Mapping[str, Any], queue: str) -> bytes | None:
    """What is handed out with the claim; nothing is stored where `run_config_of` would make the same of nothing."""
    ours = field(fields, "config", bytes, b"")
    if ours:
        return ours
    function, code_context = field(fields, "function", dict, STUB), field(fields, "code_context", dict, {})
    stamped = {**run_config, "queue": queue}
    if stamped == _plain(queue) and function == STUB and not code_context:
        return None
    return encode({"run_config": stamped, "function": function, "code_context": code_context})


_CONFIG = {"run_config": None, "function": None, "code_context": None}.keys()
"""What is stored of a submit beside its envelope."""


def _plain(queue: str) -> Fields:
    return {"queue": queue, "priority": 0, "key": None}


def say_submit(op: Submit, answer: str) -> Fields:
    return {"invocation_id": answer, "queue": op.queue}


def hear_submit(op: Submit, fields: Mapping[str, Any]) -> str:
    return str(fields.get("invocation_id") or op.id)


# Claim --------------------------------------------------------------------------------------------------------------


def ask_claim(op: Claim, wait: float) -> Fields:
    return {
        "worker_id": op.worker,
        "queue": op.queues[0],
        "queues": list(op.queues),
        "max_commands": op.limit,
        "lease_s": op.lease,
        "max_lost": op.max_lost,
        "poll_id": op.poll_id,
        "timeout_s": wait,
        "busy": op.busy,
    }


def read_claim(fields: Mapping[str, Any]) -> Claim:
    """A poll without `lease_s` is a claim that never expires: its daemon sends no heartbeats.

    One of no commands, with an id, asks for those that the poll of this id has taken.
    """
    lease = None if fields.get("lease_s") is None else number(fields, "lease_s", 0.0, 1e9)
    if lease == 0:
        raise WireError("expected `lease_s` to be above 0, or absent for a claim that never expires, got 0")
    limit, max_lost = field(fields, "max_commands", int, 1), field(fields, "max_lost", int, 5)
    poll_id = read_poll_id(fields)
    if limit < (1 if poll_id is None else 0) or max_lost < 1:
        raise WireError(f"expected `max_commands` and `max_lost` from 1, got {limit} and {max_lost}")
    return Claim(
        read_names(fields),
        read_worker(fields),
        min(limit, MOST_CLAIMED),
        lease,
        min(max_lost, 2**31),
        poll_id,
        False,
        busy=field(fields, "busy", bool, False),
    )


def read_worker(fields: Mapping[str, Any]) -> str:
    """The worker's id: text of at most 200 characters."""
    worker = _text(field(fields, "worker_id", str), "worker_id")
    if not 0 < len(worker) <= 200:
        raise WireError(f"expected `worker_id` to be 1 to 200 characters, got {len(worker)}")
    return worker


def read_poll_id(fields: Mapping[str, Any]) -> str | None:
    """The poll's own id, where it has one."""
    poll_id = field(fields, "poll_id", str, "")
    return check_id(poll_id) if poll_id else None


def say_claims(claims: Sequence[Claimed]) -> Fields:
    """The answer to a poll: one run command for each claim."""
    return {"commands": [{"id": new_id(), "kind": "run", "body": _say_claimed(one)} for one in claims]}


def _say_claimed(claimed: Claimed) -> Fields:
    (run_config, function, code_context), ours = _config_of(claimed)
    body: Fields = {
        "invocation_id": claimed.id,
        "function": function,
        "args_blob": claimed.body,
        "run_config": run_config,
        "code_context": code_context,
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
    if claimed.config is not None and not ours:
        body["config"] = claimed.config
    return body


def _config_of(claimed: Claimed) -> tuple[tuple[Fields, Fields, Fields], bool]:
    """Run config, function and code context as the submit said them, plain ones where it did not; and whether they are
    all that is stored, since `_config` made it: what is opaque to us goes out as it came, under `config`."""
    found: Fields = {}
    if claimed.config is not None:
        try:
            found = decode(claimed.config, "the stored run_config")
        except WireError:
            pass
    said = [found.get(name) for name in _CONFIG]
    plain: tuple[Fields, ...] = _plain(claimed.queue), STUB, {}
    run_config, function, context = (
        cast("Fields", one) if isinstance(one, dict) else other for one, other in zip(said, plain, strict=True)
    )
    return (run_config, function, context), found.keys() == _CONFIG and all(isinstance(one, dict) for one in said)


def hear_claims(op: Claim, fields: Mapping[str, Any]) -> list[Claimed]:
    """The run commands of a poll's answer; one that cannot be run is passed over, with a warning for all of them."""
    claims: list[Claimed] = []
    wrong: list[ValueError] = []
    for command in fields.get("commands") or ():
        try:
            said: Fields = field({"command": command}, "command", dict, {})
            if said.get("kind") == "run":
                claims.append(_hear_claimed(op, field(said, "body", dict, {})))
        except ValueError as exc:
            wrong.append(exc)
    if wrong:
        logger.warning("a poll brought %d commands that cannot be run; the first: %s", len(wrong), wrong[0])
    return claims


def _hear_claimed(op: Claim, body: Fields) -> Claimed:
    run_config: Fields = field(body, "run_config", dict, {})
    queue = field(body, "queue", str, "") or field(run_config, "queue", str, "") or op.queues[0]
    id, blob = check_id(body.get("invocation_id")), field(body, "args_blob", bytes)
    attempt = whole(body, "attempt", 1) or 1
    failures, lost, next_seq = (whole(body, name, 0) for name in ("failures", "lost", "next_seq"))
    parent, root = (field(body, f"{name}_invocation_id", str, "") or None for name in ("parent", "root"))
    config = field(body, "config", bytes, b"") or _config_said(body, run_config)
    return Claimed(id, queue, blob, attempt, failures, lost, next_seq, False, parent, root, config)


def _config_said(body: Fields, run_config: Fields) -> bytes | None:
    """What the submit said beside its envelope, as it is stored, where the command tells it piece by piece."""
    said = {name: body[name] for name in ("function", "code_context") if isinstance(body.get(name), dict)}
    queue = str(run_config.get("queue") or body.get("queue") or "")
    if not run_config.keys() - _plain(queue).keys():
        run_config = _plain(queue)  # where it goes, and nothing beside: the row itself says as much
    return _config(said, run_config, queue)


# What a claim's holder says -----------------------------------------------------------------------------------------


def _ask_fence(fence: Fence) -> Fields:
    fields: Fields = {"invocation_id": fence.id}
    if fence.worker:
        fields["worker_id"] = fence.worker
    if fence.attempt is not None:
        fields["attempt"] = fence.attempt
    return fields


def read_fence(fields: Mapping[str, Any]) -> Fence:
    """Whose claim speaks; a peer may name no worker, or no attempt."""
    attempt = whole(fields, "attempt", -1, -1)
    worker = _text(field(fields, "worker_id", str, ""), "worker_id") or None
    return Fence(check_id(field(fields, "invocation_id", str)), worker, None if attempt < 0 else attempt)


def ask_beat(op: Beat, wait: float = 0.0, known: Sequence[tuple[str, int]] = ()) -> Fields:
    """wait: how long the answer may be held for a cancellation that is not `known`."""
    fields: Fields = {"worker_id": op.worker, "claims": [*op.claims], "lease_s": op.lease}
    return fields | {"wait_s": wait, "known": [*known]} if wait else fields


def read_beat(fields: Mapping[str, Any]) -> Beat:
    lease = number(fields, "lease_s", 30.0, 1e9) or 30.0
    return Beat(read_worker(fields), read_pairs(fields, "claims"), lease)


def say_beaten(answer: Beaten) -> Fields:
    return {"lost": [*answer.lost], "cancel": [*answer.cancel]}


def hear_beaten(fields: Mapping[str, Any]) -> Beaten:
    return Beaten(*([(str(id), int(attempt)) for id, attempt in fields.get(name) or ()] for name in ("lost", "cancel")))


def ask_finish(op: Finish) -> Fields:
    fields = _ask_fence(op.fence) | {"state": op.state, "result_blob": op.result or b""}
    if op.error is not None:
        fields["error"] = op.error.as_dict()
    if op.final is not None:
        fields["final_frame"] = {"seq": op.final.seq, "bytes": op.final.bytes}
    return fields


def read_finish(fields: Mapping[str, Any]) -> Finish:
    state = field(fields, "state", str)
    if state not in TERMINAL:
        raise WireError(f"expected `state` to be one of {sorted(TERMINAL)}, got {state!r:.60}")
    frame = field(fields, "final_frame", dict, {})
    final = FinalFrame(read_seq(frame, "seq"), field(frame, "bytes", bytes)) if frame else None
    result = field(fields, "result_blob", bytes, b"")
    return Finish(read_fence(fields), state, result or None, failure_from(fields.get("error")), final)


def read_seq(fields: Mapping[str, Any], name: str) -> int:
    """A number of a frame, from 0."""
    return whole(fields, name)


def say_finished(answer: bool) -> Fields:
    return {"ok": True, "repeat": not answer}


def ask_requeue(op: Requeue) -> Fields:
    fields = _ask_fence(op.fence)
    if op.reason == "retry":
        fields["delay_s"] = op.delay
        if op.error is not None:
            fields["error"] = op.error.as_dict()
    return fields


def read_requeue(fields: Mapping[str, Any], reason: Any) -> Requeue:
    if reason == "release":
        return Requeue(read_fence(fields))
    return Requeue(read_fence(fields), "retry", number(fields, "delay_s", 0.0, 1e9), failure_from(fields.get("error")))


def say_requeued(answer: Requeued) -> Fields:
    return {"state": answer.state, "queue": answer.queue, "delayed": answer.delayed}


def hear_requeued(fields: Mapping[str, Any]) -> Requeued:
    return Requeued(str(fields.get("state")), str(fields.get("queue")), bool(fields.get("delayed")))


def ask_append(op: Append) -> Fields:
    return _ask_fence(op.fence) | {"seq": op.first_seq, "frames": list(op.frames), "final": op.final}


def read_append(fields: Mapping[str, Any]) -> Append:
    """One frame under `bytes`, or several under `frames` of which the first has `seq`."""
    frames = field(fields, "frames", list, [])
    if "frames" not in fields:
        frames = [field(fields, "bytes", bytes)]
    if any(type(frame) is not bytes for frame in frames):
        raise WireError("expected each of `frames` to be bytes")
    return Append(read_fence(fields), read_seq(fields, "seq"), tuple(frames), field(fields, "final", bool, False))


def say_appended(op: Append, answer: Appended) -> Fields:
    fields: Fields = {"ok": True, "seq": op.first_seq, "written": answer.written, "duplicates": answer.duplicates}
    return fields | {"duplicate": True} if answer.duplicates and not answer.written else fields


def hear_appended(fields: Mapping[str, Any]) -> Appended:
    return Appended(int(fields.get("written") or 0), int(fields.get("duplicates") or 0))


# The rest -----------------------------------------------------------------------------------------------------------


def say_cancelled(answer: Cancelled) -> Fields:
    return {"what": answer.what, "worker_id": answer.worker}


def hear_cancelled(fields: Mapping[str, Any]) -> Cancelled:
    what = fields.get("what")
    return Cancelled(what if what in ("killed", "asked") else "terminal", fields.get("worker_id"))


def ask_reap(op: Reap) -> Fields:
    return {"dead": list(op.dead), "alive": list(op.alive), "counted": op.counted}


def read_reap(fields: Mapping[str, Any]) -> Reap:
    dead, alive = (tuple(_texts(fields, name)) for name in ("dead", "alive"))
    return Reap(dead, alive, field(fields, "counted", bool, True))


def _texts(fields: Mapping[str, Any], name: str) -> list[str]:
    texts: list[Any] = field(fields, name, list, [])
    for text in texts:
        if not isinstance(text, str):
            raise WireError(f"expected each of `{name}` to be text, got a {type(text).__name__}")
    return texts


def say_reaped(answer: Reaped) -> Fields:
    return {"rows": [list(row) for row in answer.rows], "due": answer.due}


def hear_reaped(fields: Mapping[str, Any]) -> Reaped:
    return Reaped([(str(id), str(queue), str(state)) for id, queue, state in fields["rows"]], list(fields["due"]))
