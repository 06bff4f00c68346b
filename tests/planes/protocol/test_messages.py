"""The words of the HTTP protocol: what one side says the other side hears, and what nobody could mean is refused by name."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import matrix
import msgpack
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dreamlake.lakeshore.errors import (
    ClaimLost,
    DispatchError,
    InvocationNotFound,
    NotAuthorized,
    PlaneUnavailable,
    WireError,
)
from dreamlake.lakeshore.planes.contract.operations import (
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
)
from dreamlake.lakeshore.planes.contract.records import TERMINAL, Failure, Outcome, Page, Row
from dreamlake.lakeshore.planes.protocol import errors, messages, routes
from dreamlake.lakeshore.planes.protocol import fields as bodies

if TYPE_CHECKING:
    from collections.abc import Callable

QUICK = settings(deadline=None, max_examples=matrix.examples(60), derandomize=True)
WIDE = settings(deadline=None, max_examples=matrix.examples(100), derandomize=True)


def sent(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields after their journey as bytes."""
    return bodies.decode(bodies.encode(fields), "a test")


# --- what the strategies draw ----------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
IDS = st.from_regex(r"[0-9A-Za-z_-]{1,64}", fullmatch=True)
BYTES = st.binary(max_size=40)
SOME_BYTES = st.binary(min_size=1, max_size=40)
COUNTS = st.integers(0, 2**31)
SEQS = st.integers(0, 2**62 - 1)
SECONDS = st.floats(0, 1e9, allow_nan=False)
MOMENTS = st.floats(0, 4e9)
FAILURES = st.builds(Failure, NAMES, TEXT, st.none() | TEXT)
FENCES = st.builds(Fence, IDS, st.none() | NAMES, st.none() | SEQS)
FINALS = st.builds(FinalFrame, SEQS, BYTES)
STATES = st.sampled_from(sorted(TERMINAL))
PAIRS = st.lists(st.tuples(IDS, SEQS), max_size=4)

SUBMITS = st.builds(
    Submit, IDS, NAMES, BYTES, st.none() | NAMES, st.integers(-(2**63), 2**63 - 1), st.none() | IDS,
    st.booleans(), st.none() | SOME_BYTES,
)  # fmt: skip
CLAIMS = st.builds(
    Claim, st.lists(NAMES, min_size=1, max_size=3).map(tuple), NAMES, st.integers(1, messages.MAX_CLAIMED),
    st.none() | st.floats(0.001, 1e9), st.integers(1, 2**31), st.none() | IDS, st.booleans(), SECONDS, st.booleans(),
)  # fmt: skip
CLAIMED = st.builds(
    Claimed, IDS, NAMES, BYTES, st.integers(1, 2**31), COUNTS, COUNTS, SEQS, st.booleans(), st.none() | IDS,
    st.none() | IDS, st.none() | SOME_BYTES,
)  # fmt: skip
BEATS = st.builds(Beat, NAMES, PAIRS.map(tuple), st.floats(0.001, 1e9), SECONDS, PAIRS.map(tuple))
FINISHES = st.builds(
    Finish, FENCES, STATES, st.none() | SOME_BYTES, st.none() | FAILURES, st.none() | FINALS
)  # fmt: skip
RETRIES = st.builds(Requeue, FENCES, st.just("retry"), SECONDS, st.none() | FAILURES)
RELEASES = FENCES.map(Requeue)
APPENDS = st.builds(Append, FENCES, SEQS, st.lists(BYTES, max_size=4).map(tuple), st.booleans())
REAPS = st.builds(Reap, *[st.lists(NAMES, max_size=3).map(tuple)] * 2, st.booleans())
ROWS = st.builds(
    Row, IDS, NAMES, st.sampled_from(["queued", "running", *TERMINAL]), st.integers(-(2**63), 2**63 - 1),
    st.none() | NAMES, COUNTS, COUNTS, COUNTS, st.none() | NAMES, st.none() | IDS, st.none() | IDS,
    st.booleans(), st.booleans(), MOMENTS, *[st.none() | MOMENTS] * 4, st.none() | FAILURES, st.none() | BYTES,
)  # fmt: skip


# --- operations: from the client's hand into the server's ------------------------------------------------------------


@QUICK
@given(SUBMITS)
def test_a_submit_arrives_as_it_was_meant_but_untrusted(op: Submit) -> None:
    heard = messages.decode_submit(sent(messages.encode_submit(op)))
    assert heard[:6] == op[:6]
    assert heard.trusted is False
    if op.config is not None:
        assert heard.config == op.config


@QUICK
@given(CLAIMS, SECONDS)
def test_a_claim_arrives_as_it_was_meant_but_never_as_a_local_one(op: Claim, wait: float) -> None:
    fields = sent(messages.encode_claim(op._replace(wait=wait)))
    heard = messages.decode_claim(fields)
    assert heard[:6] == op[:6]
    assert heard.local is False
    assert bodies.seconds(fields, "timeout_s", 1.0) == wait


@QUICK
@given(BEATS, SECONDS, PAIRS)
def test_a_heartbeat_arrives_with_what_is_known_already(op: Beat, wait: float, known: list[tuple[str, int]]) -> None:
    fields = sent(messages.encode_beat(op._replace(wait=wait, known=tuple(known))))
    assert messages.decode_beat(fields)[:3] == op[:3]
    assert bodies.seconds(fields, "wait_s", 0.0) == wait
    assert bodies.read_pairs(fields, "known") == (tuple(known) if wait else ())


@QUICK
@given(FINISHES)
def test_an_ack_arrives_with_fence_result_error_and_final_frame(op: Finish) -> None:
    assert messages.decode_finish(sent(messages.encode_finish(op))) == op


@QUICK
@given(RETRIES)
def test_a_retry_arrives_with_its_delay_and_error(op: Requeue) -> None:
    assert messages.decode_retry(sent(messages.encode_requeue(op))) == op


@QUICK
@given(RELEASES)
def test_a_release_arrives_with_its_fence(op: Requeue) -> None:
    assert messages.decode_release(sent(messages.encode_requeue(op))) == op


@QUICK
@given(APPENDS)
def test_frames_arrive_with_their_numbers_and_bytes(op: Append) -> None:
    assert messages.decode_append(sent(messages.encode_append(op))) == op


@QUICK
@given(FENCES, SEQS, BYTES, st.booleans())
def test_one_frame_under_bytes_is_a_batch_of_one(fence: Fence, seq: int, frame: bytes, final: bool) -> None:
    fields = messages.encode_append(Append(fence, seq, (), final))
    del fields["frames"]
    assert messages.decode_append(sent({**fields, "bytes": frame})) == Append(fence, seq, (frame,), final)


@QUICK
@given(REAPS)
def test_a_reap_arrives_with_the_dead_and_the_living(op: Reap) -> None:
    assert messages.decode_reap(sent(messages.encode_reap(op)))[:3] == op[:3]


LATER: dict[str, Any] = {"later": {"than": [1, 2, 3]}, "host_key": "h", "accept_result_ref": True, "": None}


@QUICK
@given(SUBMITS, CLAIMS)
def test_a_reader_of_submits_and_polls_ignores_fields_that_it_does_not_know(submit: Submit, claim: Claim) -> None:
    assert messages.decode_submit(sent(messages.encode_submit(submit) | LATER))[:6] == submit[:6]
    assert messages.decode_claim(sent(messages.encode_claim(claim._replace(wait=1.0)) | LATER))[:6] == claim[:6]


@QUICK
@given(BEATS, FINISHES, RETRIES, APPENDS)
def test_a_reader_of_what_workers_say_ignores_fields_that_it_does_not_know(
    beat: Beat, finish: Finish, retry: Requeue, append: Append
) -> None:
    assert messages.decode_beat(sent(messages.encode_beat(beat) | LATER))[:3] == beat[:3]
    assert messages.decode_finish(sent(messages.encode_finish(finish) | LATER)) == finish
    assert messages.decode_retry(sent(messages.encode_requeue(retry) | LATER)) == retry
    assert messages.decode_append(sent(messages.encode_append(append) | LATER)) == append


# --- answers: from the server's mouth to the client's ear ------------------------------------------------------------


@QUICK
@given(SUBMITS, IDS)
def test_the_answer_to_a_submit_is_the_id_that_holds(op: Submit, id: str) -> None:
    fields = sent(messages.encode_submit_answer(op, id))
    assert fields == {"invocation_id": id, "queue": op.queue}
    assert messages.decode_submit_answer(op._replace(key=op.key or "a key"), fields) == id


@QUICK
@given(CLAIMS, st.lists(CLAIMED, max_size=3))
def test_claims_are_handed_out_as_they_are_and_never_as_trusted_ones(op: Claim, claims: list[Claimed]) -> None:
    fields = sent(messages.encode_claim_answer(claims))
    ids = {command["id"] for command in fields["commands"]}
    assert len(ids) == len(claims)
    assert messages.decode_claim_answer(op, fields) == [claimed._replace(trusted=False) for claimed in claims]


def test_a_command_that_cannot_be_run_is_passed_over_and_one_without_our_fields_is_not() -> None:
    """Peers send no attempt, queue or numbers; commands of other kinds, or without id or envelope, are none."""
    op = Claim(("gpu", "cpu"), "w")
    body = {"invocation_id": "a", "args_blob": b"x", "run_config": {"queue": "cpu"}}
    commands: list[dict[str, Any]] = [
        {"id": "1", "kind": "stop", "body": body},
        {"id": "2", "kind": "run", "body": {"args_blob": b"x"}},
        {"id": "3", "kind": "run", "body": {"invocation_id": "b"}},
        {"id": "4", "kind": "run"},
        {"id": "5", "kind": "run", "body": body},
        {"id": "6", "kind": "run", "body": {"invocation_id": "c", "args_blob": b""}},
    ]
    assert messages.decode_claim_answer(op, sent({"commands": commands})) == [
        Claimed("a", "cpu", b"x", 1, 0, 0, 0, False, None, None, None),
        Claimed("c", "gpu", b"", 1, 0, 0, 0, False, None, None, None),
    ]
    assert messages.decode_claim_answer(op, {"commands": None}) == messages.decode_claim_answer(op, {}) == []


@QUICK
@given(PAIRS, PAIRS)
def test_a_heartbeat_is_told_what_is_lost_and_what_is_to_be_cancelled(
    lost: list[tuple[str, int]], cancel: list[tuple[str, int]]
) -> None:
    assert messages.decode_beat_answer(sent(messages.encode_beat_answer(Beaten(lost, cancel)))) == Beaten(lost, cancel)
    assert messages.decode_beat_answer({}) == Beaten([], [])


def test_an_ack_is_told_whether_it_is_a_repeat() -> None:
    op = Finish(Fence("a"), "succeeded")
    for accepted in (True, False):
        fields = sent(messages.encode_finish_answer(op, accepted))
        assert fields == {"ok": True, "repeat": not accepted}
        assert messages.decode_finish_answer(op, fields) is accepted


@QUICK
@given(RELEASES, st.builds(Requeued, st.sampled_from(["queued", "killed"]), NAMES, st.booleans()))
def test_the_answer_to_a_requeue_holds_the_row_s_state_and_queue(op: Requeue, answer: Requeued) -> None:
    assert messages.decode_requeue_answer(op, sent(messages.encode_requeue_answer(op, answer))) == answer


@QUICK
@given(APPENDS, COUNTS, COUNTS)
def test_an_append_is_told_what_was_new_and_only_a_whole_repeat_is_a_duplicate(
    op: Append, written: int, duplicates: int
) -> None:
    fields = sent(messages.encode_append_answer(op, Appended(written, duplicates)))
    assert messages.decode_append_answer(op, fields) == Appended(written, duplicates)
    assert (fields["ok"], fields["seq"]) == (True, op.first_seq)
    assert fields.get("duplicate", False) is (duplicates > 0 and written == 0)


@QUICK
@given(st.builds(Cancelled, st.sampled_from(["killed", "asked", "terminal"]), st.none() | NAMES))
def test_a_cancel_is_told_what_it_did(answer: Cancelled) -> None:
    op = Cancel("a")
    assert messages.decode_cancel(sent(messages.encode_cancel(op))) == op
    assert messages.decode_cancel_answer(op, sent(messages.encode_cancel_answer(op, answer))) == answer


def test_an_answer_to_a_cancel_that_is_not_known_counts_as_nothing_done() -> None:
    assert messages.decode_cancel_answer(Cancel("a"), {"what": "postponed"}) == Cancelled("terminal")


@QUICK
@given(st.builds(Reaped, st.lists(st.tuples(IDS, NAMES, STATES), max_size=3), st.lists(NAMES, max_size=3)))
def test_a_reap_is_told_which_rows_and_queues_it_touched(answer: Reaped) -> None:
    assert messages.decode_reap_answer(sent(messages.encode_reap_answer(answer))) == answer


@QUICK
@given(IDS, STATES, st.none() | SOME_BYTES, FAILURES)
def test_an_outcome_is_heard_with_result_and_error(id: str, state: str, result: bytes | None, error: Failure) -> None:
    outcome = Outcome(id, state, result, None if state == "succeeded" else error)
    fields = sent(messages.encode_outcome(outcome))
    assert set(fields) == {"state", "result_blob", "error"}
    assert messages.decode_outcome(id, fields) == outcome


def test_what_is_pending_says_nothing_else_and_what_is_unknown_is_an_error() -> None:
    assert messages.encode_outcome(Outcome("a", "pending")) == {"state": "pending"}
    assert messages.decode_outcome("a", {"state": "pending"}) == Outcome("a", "pending")
    with pytest.raises(InvocationNotFound, match="no invocation 'a' on this plane"):
        messages.encode_outcome(Outcome("a", "unknown"))


@pytest.mark.parametrize("state", sorted(TERMINAL - {"succeeded"}))
def test_an_error_is_heard_in_whatever_form_a_peer_says_it(state: str) -> None:
    """Peers leave the error out, say it as bare text, or put the type into the message."""
    nothings: list[dict[str, Any]] = [{}, {"error": None}, {"error": ""}, {"error": {}}]
    for nothing in nothings:
        assert messages.decode_outcome("a", {"state": state, **nothing}) == Outcome("a", state)
    assert messages.decode_outcome("a", {"state": state, "error": "oom"}).error == Failure("DaemonError", "oom")
    error = {"type": "WorkerError", "message": "ValueError: boom", "retry": True}
    assert messages.decode_outcome("a", {"state": state, "error": error}).error == Failure(
        "WorkerError", "ValueError: boom", None, True
    )


@QUICK
@given(
    st.lists(st.tuples(SEQS, BYTES), max_size=4), st.booleans(), st.sampled_from(["running", *TERMINAL]),
    st.none() | FAILURES,
)  # fmt: skip
def test_a_page_is_heard_with_its_frames(
    frames: list[tuple[int, bytes]], closed: bool, state: str, error: Failure | None
) -> None:
    page = Page(frames, closed, state, error)
    assert messages.decode_page(sent(messages.encode_page(page))) == page


@QUICK
@given(ROWS)
def test_a_row_is_heard_with_all_its_columns(row: Row) -> None:
    fields = sent(messages.encode_row(row))
    assert set(fields) == set(Row._fields)
    assert messages.decode_row({**fields, "later": 1}) == row


# --- what the server is sent by others -------------------------------------------------------------------------------


def test_what_a_submit_leaves_out_has_the_protocols_defaults() -> None:
    plain = Submit("a", "default", b"x", None, 0, None, False)
    assert messages.decode_submit({"invocation_id": "a", "args_blob": b"x"})[:7] == plain[:7]
    empty = {"queue": "", "run_config": None, "parent_invocation_id": "", "config": b"", "function": None}
    assert messages.decode_submit({"invocation_id": "a", "args_blob": b"x", **empty})[:7] == plain[:7]


@pytest.mark.parametrize(
    ("said", "stored"),
    [
        (3, 3), (2.9, 2), (-2.9, -2), ("7", 0), (None, 0), (True, 0), ([1], 0), (b"9", 0), (float("nan"), 0),
        (float("inf"), 0), (float("-inf"), 0), (1e300, 2**63 - 1), (-1e300, -(2**63)), (2**64 - 1, 2**63 - 1),
    ],
)  # fmt: skip
def test_a_priority_is_a_whole_number_of_64_bits_or_none(said: Any, stored: int) -> None:
    fields = {"invocation_id": "a", "args_blob": b"", "run_config": {"priority": said}}
    assert messages.decode_submit(sent(fields)).priority == stored


def handed_out(fields: dict[str, Any]) -> dict[str, Any]:
    """The body of the run command that comes of a submit."""
    op = messages.decode_submit(sent({"invocation_id": "a", "args_blob": b"x", **fields}))
    claimed = Claimed(op.id, op.queue, op.body, 1, 0, 0, 0, False, op.parent, op.parent, op.config)
    body = sent(messages.encode_claim_answer([claimed]))["commands"][0]["body"]
    assert isinstance(body, dict)
    return body


def test_what_a_submit_says_around_its_envelope_is_handed_out_again() -> None:
    fields = {
        "queue": "gpu",
        "function": {"module": "m", "qualname": "m.f", "version": "v9", "more": [1]},
        "run_config": {"queue": "elsewhere", "priority": 2.5, "key": "k", "prefix": "scenes/0007", "image": None},
        "code_context": {"commit": "abc"},
    }
    body = handed_out(fields)
    assert body["run_config"] == {**fields["run_config"], "queue": "gpu"}  # type: ignore[dict-item]
    assert (body["function"], body["code_context"]) == (fields["function"], fields["code_context"])
    assert body["prefix"] == "scenes/0007"


@pytest.mark.parametrize("run_config", [{}, {"prefix": ""}, {"prefix": None}])
def test_a_run_config_without_a_prefix_gives_a_command_without_one(run_config: dict[str, Any]) -> None:
    assert "prefix" not in handed_out({"run_config": run_config})


def test_the_plain_native_submit_needs_nothing_stored_beside_its_envelope() -> None:
    op = messages.decode_submit(sent(messages.encode_submit(Submit("a", "gpu", b"x"))))
    assert op.config is None
    body = handed_out({"queue": "gpu"})
    assert body["function"] == {"module": "_native_wire", "qualname": "_native_wire.envelope", "version": "v1"}
    assert body["run_config"]["queue"] == "gpu"


@pytest.mark.parametrize("config", [b"\xc1", b"\x93", b"text", msgpack.packb([1]), msgpack.packb({"run_config": 1})])
def test_routing_fields_of_another_kind_go_out_as_they_came(config: bytes) -> None:
    body = handed_out({"queue": "gpu", "config": config})
    assert body["config"] == config
    assert (body["function"], body["run_config"]["queue"]) == (messages.STUB, "gpu")


@pytest.mark.parametrize(
    ("fields", "queues"),
    [
        ({}, ("default",)), ({"queue": "a"}, ("a",)), ({"queue": ""}, ("default",)), ({"queues": []}, ("default",)),
        ({"queue": "a", "queues": ["b", "c"]}, ("b", "c")), ({"queues": None, "queue": None}, ("default",)),
    ],
)  # fmt: skip
def test_a_poll_names_queues_or_a_queue_or_means_the_default_one(
    fields: dict[str, Any], queues: tuple[str, ...]
) -> None:
    assert messages.decode_claim({"worker_id": "w", **fields}) == Claim(queues, "w", 1, None, 5, None, False)


def test_a_poll_claims_no_more_than_there_is_room_for() -> None:
    assert messages.decode_claim({"worker_id": "w", "max_commands": 2**63}).limit == messages.MAX_CLAIMED
    assert messages.decode_claim({"worker_id": "w", "max_lost": 2**64 - 1}).max_lost == 2**31


@pytest.mark.parametrize("blob", [None, b"", "absent"])
def test_an_empty_result_is_none(blob: Any) -> None:
    fields = {"invocation_id": "a", "state": "succeeded"} | ({} if blob == "absent" else {"result_blob": blob})
    assert messages.decode_finish(sent(fields)) == Finish(Fence("a"), "succeeded")


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (None, None),
        ("gone", Failure("DaemonError", "gone")),
        ({"type": "ValueError", "message": "m", "traceback": "t"}, Failure("ValueError", "m", "t")),
        (
            {"type": "WorkerError", "message": "ValueError: m", "retry": True},
            Failure("WorkerError", "ValueError: m", None, True),
        ),
        ({}, Failure("Error", "")),
        ({"type": 5, "message": [1], "traceback": 2.5}, Failure("5", "[1]", "2.5")),
        (17, Failure("DaemonError", "17")),
        ([1, 2], Failure("DaemonError", "[1, 2]")),
        (b"\xff", Failure("DaemonError", "b'\\xff'")),
    ],
)
def test_an_acks_error_is_a_map_or_bare_text_and_nothing_odd_is_refused(error: Any, failure: Failure | None) -> None:
    fields = {"invocation_id": "a", "state": "failed", "error": error}
    assert messages.decode_finish(sent(fields)).error == failure


# --- what nobody could mean ------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "submit": messages.decode_submit,
    "native submit": messages.decode_submit,
    "claim": messages.decode_claim,
    "fence": messages.decode_fence,
    "beat": messages.decode_beat,
    "finish": messages.decode_finish,
    "release": messages.decode_release,
    "retry": messages.decode_retry,
    "append": messages.decode_append,
    "reap": messages.decode_reap,
    "items": bodies.read_items,
    "known": lambda fields: bodies.read_pairs(fields, "known"),
    "seconds": lambda fields: bodies.seconds(fields, "timeout_s", 60.0, 300.0),
}
GOOD: dict[str, dict[str, Any]] = {
    "submit": {
        **messages.encode_submit(Submit("a", "q", b"x", "k", 1, "p")), "function": {}, "code_context": {},
    },
    "native submit": messages.encode_submit(Submit("a", "q", b"x", "k", 1, "p", True, b"c")),
    "claim": messages.encode_claim(Claim(("q",), "w", 1, 30.0, 5, "p", wait=1.0)),
    "fence": {"invocation_id": "a", "worker_id": "w", "attempt": 1},
    "beat": messages.encode_beat(Beat("w", (("a", 1),), 30.0, 1.0, (("a", 1),))),
    "finish": messages.encode_finish(
        Finish(Fence("a", "w", 1), "failed", b"r", Failure("T", "m", "t"), FinalFrame(0, b"f"))
    ),
    "release": messages.encode_requeue(Requeue(Fence("a", "w", 1))),
    "retry": messages.encode_requeue(Requeue(Fence("a", "w", 1), "retry", 1.0, Failure("T", "m"))),
    "append": messages.encode_append(Append(Fence("a", "w", 1), 0, (b"f",), True)),
    "reap": messages.encode_reap(Reap(("d",), ("a",))),
    "items": {"items": [{"invocation_id": "a"}]},
    "known": {"known": [["a", 1]]},
    "seconds": {"timeout_s": 1.0},
}  # fmt: skip
FIELDS = sorted({name for fields in GOOD.values() for name in fields} | {"priority", "key", "prefix", "bytes", "type"})


PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), TEXT, BYTES,
    st.builds(msgpack.ExtType, st.integers(0, 127), BYTES), st.sampled_from(["running", "succeeded", "../../x", "a"]),
)  # fmt: skip
VALUES: st.SearchStrategy[Any] = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS) | TEXT, inner, max_size=4),
    max_leaves=8,
)
MAPS = st.dictionaries(st.sampled_from(FIELDS) | TEXT | st.integers(-9, 9) | BYTES, VALUES, max_size=8)

ODD: list[Any] = [
    None,
    True,
    0,
    -1,
    1.5,
    float("nan"),
    2**64 - 1,
    -(2**63),
    "",
    "a",
    "../../x",
    b"",
    b"\xff",
    [],
    [1],
    [[]],
    {},
]


def operation_or_refusal(read: Callable[[dict[str, Any]], Any], fields: dict[str, Any]) -> Exception | None:
    """None where the reader makes something of the fields, else its refusal, which names what it did not like."""
    try:
        read(fields)
    except ValueError as exc:
        refusal = exc
    else:
        return None
    assert "expected" in str(refusal), f"a refusal says what was expected, not: {refusal!r}"
    assert len(str(refusal)) < 1000, "a refusal is a sentence, whatever was sent"
    return refusal


@pytest.mark.parametrize("reader", READERS)
@WIDE
@given(MAPS)
def test_any_map_gives_an_operation_or_a_refusal(reader: str, fields: dict[str, Any]) -> None:
    operation_or_refusal(READERS[reader], sent(fields))


@pytest.mark.parametrize("reader", READERS)
@WIDE
@given(st.data())
def test_a_good_message_with_odd_fields_gives_an_operation_or_a_refusal(reader: str, data: st.DataObject) -> None:
    good = GOOD[reader]
    fields = {**good, **data.draw(st.dictionaries(st.sampled_from(sorted(good)), VALUES, max_size=3))}
    operation_or_refusal(READERS[reader], sent(fields))


SAYS = {"invocation_id": "invocation id", "parent_invocation_id": "invocation id", "poll_id": "invocation id"}
"""What is checked by what it is, and named so."""


@pytest.mark.parametrize(("reader", "name"), [(reader, name) for reader in GOOD for name in GOOD[reader]])
def test_a_field_of_a_wrong_kind_is_refused_by_its_name(reader: str, name: str) -> None:
    for odd in [*ODD, msgpack.ExtType(5, b"x")]:
        refusal = operation_or_refusal(READERS[reader], sent({**GOOD[reader], name: odd}))
        if refusal is not None:
            named = f"`{name}`" in str(refusal) or SAYS.get(name, "\0") in str(refusal)
            inner = {"final_frame": ("`seq`", "`bytes`"), "claims": ("invocation id",), "known": ("invocation id",)}
            queue = name in ("queue", "queues") and "the name of a queue" in str(refusal)
            assert named or queue or any(word in str(refusal) for word in inner.get(name, ())), (name, odd, refusal)


LISTS, MAPS_IN_MAPS = b"\x91", b"\x81\xa1a"


@pytest.mark.parametrize("opener", [LISTS, MAPS_IN_MAPS], ids=["lists", "maps"])
@pytest.mark.parametrize("depth", [505, 1020])
@pytest.mark.parametrize("reader", GOOD)
def test_a_field_nested_as_deep_as_a_body_may_be_gives_an_operation_or_a_refusal(
    reader: str, depth: int, opener: bytes
) -> None:
    """Deeper than a packer goes, and than the text of such a value can be made."""
    for name in GOOD[reader]:
        for wrap in (b"", b"\x91", b"\x91\x92", b"\x81\xa4type", b"\x81\xa6prefix", b"\x81\xa3seq"):
            rest = {key: value for key, value in GOOD[reader].items() if key != name}
            head = msgpack.Packer().pack_map_header(len(rest) + 1)
            pairs = b"".join(msgpack.packb(key) + msgpack.packb(value) for key, value in rest.items())
            end = b"\xc0" if wrap == b"\x91\x92" else b""
            body = head + pairs + msgpack.packb(name) + wrap + opener * depth + b"\x90" + end
            try:
                fields = bodies.decode(body, "a test")
            except WireError:
                continue
            operation_or_refusal(READERS[reader], fields)


@pytest.mark.parametrize(
    ("reader", "change", "sentence"),
    [
        ("submit", {"invocation_id": None}, "expected the field `invocation_id`, text, which is missing"),
        ("submit", {"args_blob": "text"}, "expected the field `args_blob` to be bytes, got a str"),
        ("submit", {"run_config": []}, "expected the field `run_config` to be a map, got a list"),
        ("submit", {"run_config": {"key": 5}}, "expected the field `key` to be text, got a int"),
        ("submit", {"invocation_id": "../../x"}, "expected an invocation id of 1 to 64 letters, digits, '_' or '-'"),
        ("submit", {"invocation_id": "a" * 65}, "expected an invocation id of 1 to 64 letters, digits, '_' or '-'"),
        ("submit", {"invocation_id": "a\n"}, "expected an invocation id of 1 to 64 letters, digits, '_' or '-'"),
        ("submit", {"parent_invocation_id": "a/b"}, "expected an invocation id of 1 to 64 letters, digits, '_' or '-'"),
        ("claim", {"worker_id": ""}, "expected `worker_id` to be 1 to 200 characters, got 0"),
        ("claim", {"worker_id": "w" * 201}, "expected `worker_id` to be 1 to 200 characters, got 201"),
        ("claim", {"max_commands": 0, "poll_id": None}, "expected `max_commands` and `max_lost` from 1, got 0 and 5"),
        ("claim", {"max_commands": -1}, "expected `max_commands` and `max_lost` from 1, got -1 and 5"),
        ("claim", {"max_commands": True}, "expected the field `max_commands` to be a whole number, got a bool"),
        ("claim", {"lease_s": 0}, "expected `lease_s` to be above 0, or absent for a claim that never expires, got 0"),
        ("claim", {"lease_s": -1}, "expected the field `lease_s` to be a number of seconds from 0, got -1"),
        ("claim", {"lease_s": float("nan")}, "expected the field `lease_s` to be a number of seconds from 0, got nan"),
        ("claim", {"queues": ["q"] * 101}, "expected at most 100 `queues` in one poll, got 101"),
        ("claim", {"poll_id": "../p"}, "expected an invocation id of 1 to 64 letters, digits, '_' or '-'"),
        ("fence", {"attempt": -2}, "expected the field `attempt` from 0 to 2^62, got -2"),
        ("fence", {"attempt": 2**63}, "expected the field `attempt` from 0 to 2^62, got 9223372036854775808"),
        ("beat", {"claims": [["a"]]}, "expected each of `claims` to be a pair of id and attempt, got ['a']"),
        ("beat", {"claims": [["a", -1]]}, "expected each of `claims` to be a pair of id and attempt, got ['a', -1]"),
        ("finish", {"state": "queued"}, "expected `state` to be one of ['failed', 'killed', 'succeeded', 'timeout']"),
        ("finish", {"final_frame": {"seq": -1, "bytes": b""}}, "expected the field `seq` from 0 to 2^62, got -1"),
        ("append", {"seq": -1}, "expected the field `seq` from 0 to 2^62, got -1"),
        ("append", {"frames": [b"", 1]}, "expected each of `frames` to be bytes"),
        ("append", {"final": 1}, "expected the field `final` to be true or false, got a int"),
        ("retry", {"delay_s": "1"}, "expected the field `delay_s` to be a number of seconds from 0, got '1'"),
        ("items", {"items": [1]}, "expected each of `items` to be a map, got a int"),
        ("items", {"items": [{}] * 10_001}, "expected at most 10000 `items` in one request, got 10001: send several"),
        ("known", {"known": [["a", 1]] * 10_001}, "expected at most 10000 `known` in one request, got 10001"),
    ],
)
def test_a_refusal_says_what_was_expected_and_what_came(reader: str, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(WireError, match=re.escape(sentence)):
        READERS[reader](sent({**GOOD[reader], **change}))


# --- bodies ----------------------------------------------------------------------------------------------------------


@WIDE
@given(st.binary(max_size=60))
@example(b"\xdd\xff\xff\xff\xff")
@example(b"\xdf\xff\xff\xff\xff")
@example(b"\xc6\xff\xff\xff\xff")
@example(b"\xc9\xff\xff\xff\xff\x01")
@example(b"\x91" * 10_000)
@example(b"\x81" * 10_000)
@example(b"\x81\xd6\xff\xff\xff\xff\xff\x01")
@example(b"\x81\x80\x01")
def test_R50_any_body_is_a_map_or_a_refusal(body: bytes) -> None:
    refusal = ""
    try:
        assert isinstance(bodies.decode(body, "POST /v1/x"), dict)
    except WireError as exc:
        refusal = str(exc)
    assert not refusal or refusal.startswith("expected a msgpack map as the body of POST /v1/x, got")
    assert len(refusal) < 400


def test_no_body_is_a_map_without_fields() -> None:
    assert bodies.decode(b"", "GET /v1/x") == {}


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"\xc1", "expected a msgpack map as the body of POST /v1/x, got 1 bytes: FormatError"),
        (b"\x93\x01", "expected a msgpack map as the body of POST /v1/x, got 2 bytes: "),
        (b"\x90", "expected a msgpack map as the body of POST /v1/x, got a list"),
        (b"{}", "expected a msgpack map as the body of POST /v1/x, got 2 bytes: "),
        (b"\x80\x80", "expected a msgpack map as the body of POST /v1/x, got 2 bytes: "),
    ],
)
def test_a_body_that_is_none_is_refused_with_the_place_it_came_to(body: bytes, sentence: str) -> None:
    with pytest.raises(WireError, match=re.escape(sentence)):
        bodies.decode(body, "POST /v1/x")


# --- errors ----------------------------------------------------------------------------------------------------------

ERRORS: list[tuple[Exception, int, type[Exception]]] = [
    (InvocationNotFound("a"), 404, InvocationNotFound),
    (ClaimLost("a", "it ended killed"), 409, ClaimLost),
    (errors.TooLarge("too large"), 413, errors.TooLarge),
    (NotAuthorized("no"), 403, NotAuthorized),
    (errors.ForbiddenRequest("another origin"), 403, NotAuthorized),
    (PlaneUnavailable("down"), 503, PlaneUnavailable),
    (WireError("odd bytes"), 400, WireError),
    (ValueError("odd value"), 400, ValueError),
    (DispatchError("something"), 500, DispatchError),
    (KeyError("secret"), 500, DispatchError),
]


@pytest.mark.parametrize(("exc", "status", "kind"), ERRORS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_an_error_crosses_with_its_status_class_and_sentence(
    exc: Exception, status: int, kind: type[Exception]
) -> None:
    assert errors.status_of(exc) == status
    fields = sent(errors.encode_error(exc))
    assert set(fields) == {"error"}
    heard = errors.decode_error(fields["error"], status, "POST /v1/x, request r", "a")
    assert type(heard) is kind
    if isinstance(exc, (InvocationNotFound, ClaimLost)):
        assert (str(heard), heard.id) == (str(exc), "a")  # type: ignore[attr-defined]
    elif not isinstance(exc, KeyError):
        assert str(exc) in str(heard)
        assert "POST /v1/x, request r" in str(heard)


def test_of_an_exception_that_is_not_ours_only_its_class_is_told() -> None:
    fields = errors.encode_error(KeyError("secret"))
    assert fields == {"error": {"type": "ServerError", "message": "the server failed with KeyError; see its log"}}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (None, 401, NotAuthorized), (None, 403, NotAuthorized), (None, 409, ClaimLost), (None, 413, errors.TooLarge),
        (None, 429, PlaneUnavailable), (None, 502, PlaneUnavailable), (None, 503, PlaneUnavailable),
        (None, 504, PlaneUnavailable), (None, 500, DispatchError), (None, 404, DispatchError), ("text", 400, DispatchError),
        ({"type": "NoSuchRoute", "message": "no"}, 404, DispatchError), ([1], 418, DispatchError),
        ({"type": 5, "message": b"\xff"}, 400, DispatchError),
    ],
)  # fmt: skip
def test_an_error_without_a_known_type_is_judged_by_its_status(error: Any, status: int, kind: type[Exception]) -> None:
    heard = errors.decode_error(error, status, "GET /v1/x", "a")
    assert type(heard) is kind
    assert str(heard)


@WIDE
@given(VALUES, st.integers(400, 599))
def test_any_error_of_any_peer_becomes_one_of_ours(error: Any, status: int) -> None:
    heard = errors.decode_error(error, status, "GET /v1/x")
    assert isinstance(heard, (DispatchError, ValueError))


def test_each_route_has_a_method_a_place_and_the_least_role_it_asks_for() -> None:
    assert {route.role for route in routes.ROUTES.values()} == {"producer", "worker", "admin"}
    places = [(route.method, route.path) for route in routes.ROUTES.values()]
    assert len(set(places)) == len(places)
    for name, route in routes.ROUTES.items():
        assert route.path.startswith(("/producer/", "/daemon/", "/admin/")), name
        assert route.method in ("GET", "POST"), name
    known = {name for name, route in routes.ROUTES.items() if not route.added}
    assert known == {"submit", "await", "stream", "poll", "ack", "chunk"}
