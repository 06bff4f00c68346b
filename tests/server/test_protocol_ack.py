"""What the function protocol says of how an invocation ends: acks, their fences, cancels, and waiting for the outcome."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import raw_kit
from helpers import each_row
from raw_kit import (
    ACK,
    ACK_MANY,
    AWAIT,
    AWAIT_MANY,
    CANCEL,
    CHUNK,
    NO_MSGPACK,
    PATIENCE,
    PURGE,
    REAP,
    RELEASE,
    meanwhile,
)

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.protocol import routes as protocol

if TYPE_CHECKING:
    from raw_kit import Api

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue

ENDS = ["succeeded", "failed", "killed", "timeout"]
ERROR = {"type": "ValueError", "message": "boom", "traceback": "Traceback: ..."}


async def not_yet(later: Any, seconds: float = 0.2) -> None:
    """The request is still held after a while."""
    with anyio.move_on_after(seconds):
        await later.done.wait()
    assert not later.done.is_set()


# --- acks ------------------------------------------------------------------------------------------------------------


async def test_an_ack_as_the_document_shows_it_ends_the_invocation(api: Api, queue: str) -> None:
    id = await api.running(queue, "worker-1")
    answer = await api.do(
        ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r", "error": None, "worker_id": "worker-1"}
    )
    assert answer["ok"] is True
    assert await api.outcome(id) == {"state": "succeeded", "result_blob": b"r", "error": None}


async def test_an_ack_of_a_peer_names_no_worker(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r"})
    assert (await api.outcome(id))["result_blob"] == b"r"


@pytest.mark.parametrize("state", ENDS)
async def test_an_invocation_ends_in_any_of_four_states(api: Api, queue: str, state: str) -> None:
    id = await api.running(queue)
    error = None if state == "succeeded" else ERROR
    await api.do(ACK, {"invocation_id": id, "state": state, "result_blob": b"", "error": error})
    outcome = await api.outcome(id)
    assert (outcome["state"], outcome["error"]) == (state, error)
    assert not outcome["result_blob"]
    row = await api.row(id)
    assert (row["state"], row["error"]) == (state, error)


async def test_the_traceback_of_an_error_is_optional(api: Api, queue: str) -> None:
    id = await api.running(queue)
    error = {"type": "Cancelled", "message": "daemon shutdown grace expired"}
    await api.do(ACK, {"invocation_id": id, "state": "killed", "result_blob": b"", "error": error})
    assert await api.outcome(id) == {"state": "killed", "result_blob": b"", "error": error}


async def test_an_error_that_is_bare_text_is_a_DaemonErrors_message(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "failed", "error": "out of memory"})
    assert (await api.outcome(id))["error"] == {"type": "DaemonError", "message": "out of memory"}


@pytest.mark.parametrize("retry", [True, False])
async def test_the_retry_mark_of_a_peers_error_is_kept_and_changes_nothing(api: Api, queue: str, retry: bool) -> None:
    id = await api.running(queue)
    error = {"type": "WorkerError", "message": "ValueError: boom", "retry": retry}
    await api.do(ACK, {"invocation_id": id, "state": "failed", "error": error})
    outcome = await api.outcome(id)
    assert (outcome["state"], outcome["error"]) == ("failed", error)
    assert await api.poll(queue) == []


@each_row("result", [NO_MSGPACK, wire.pack((1, "a")), b"\xdd\xff\xff\xff\xff", b"\x91" * 20_000, b"\0" * 3_000_000])
async def test_a_result_is_bytes_that_the_server_never_decodes(api: Api, queue: str, result: bytes) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": result})
    assert (await api.outcome(id))["result_blob"] == result


@pytest.mark.parametrize("said", [{}, {"result_blob": None}, {"result_blob": b""}])
async def test_a_result_that_is_empty_nil_or_absent_is_no_result(api: Api, queue: str, said: dict[str, Any]) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", **said})
    outcome = await api.outcome(id)
    assert outcome["state"] == "succeeded"
    assert not outcome["result_blob"]


async def test_fields_of_an_ack_that_are_not_known_are_ignored(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_ref": "http://x", "later": [1]})
    assert (await api.outcome(id))["state"] == "succeeded"


async def test_finishedAt_is_now_by_the_servers_clock_whatever_the_daemon_says(api: Api, queue: str) -> None:
    id = await api.running(queue)
    assert (await api.row(id))["finished_at"] is None
    before = time.time()
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "finished_at": 5.0, "finishedAt": 5.0})
    row = await api.row(id)
    assert before - 1 <= row["finished_at"] <= time.time() + 1
    assert row["started_at"] <= row["finished_at"]


async def test_a_refused_or_repeated_ack_sets_no_finishedAt_and_changes_nothing(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    ack = {"invocation_id": id, "worker_id": "w", "attempt": 1, "state": "succeeded", "result_blob": b"first"}
    assert (await api.ask(ACK, {**ack, "attempt": 2})).error == (409, "ClaimLost")
    assert (await api.row(id))["finished_at"] is None
    await api.do(ACK, ack)
    row, outcome = await api.row(id), await api.outcome(id)
    assert (await api.do(ACK, {**ack, "state": "failed", "result_blob": b"second", "error": "e"}))["ok"] is True
    assert (await api.ask(ACK, {**ack, "worker_id": "other"})).error == (409, "ClaimLost")
    assert (await api.row(id), await api.outcome(id)) == (row, outcome)


@each_row("state", ["queued", "running", "", "Succeeded", "cancelled", None, 5, ["succeeded"]])
async def test_an_ack_of_any_other_state_is_a_400_that_names_it(api: Api, queue: str, state: Any) -> None:
    id = await api.running(queue)
    answer = await api.ask(ACK, {"invocation_id": id, "state": state})
    assert answer.error == (400, "WireError")
    assert "`state`" in answer.message
    assert (await api.row(id))["state"] == "running"


# --- whose ack it is -------------------------------------------------------------------------------------------------

OURS = {"worker_id": "w", "attempt": 1}
FENCES = [
    # what the ack says of itself, whether it holds for a claim with a lease, and for one without
    (OURS, True, True),
    ({"worker_id": "other", "attempt": 1}, False, False),
    ({"worker_id": "w", "attempt": 2}, False, False),
    ({"worker_id": "w", "attempt": 0}, False, False),
    ({"attempt": 2}, False, False),
    ({"worker_id": "w"}, False, True),
    ({"worker_id": "other"}, False, False),
    ({}, False, True),
    ({"worker_id": "", "attempt": None}, False, True),
    ({"worker_id": None}, False, True),
]


@each_row("lease", [60, None])
@each_row("fence, leased, unleased", FENCES)
async def test_an_ack_is_taken_from_the_claim_that_holds_and_from_no_other(
    api: Api, queue: str, fence: dict[str, Any], leased: bool, unleased: bool, lease: float | None
) -> None:
    """Without an attempt it is taken only for a claim without a lease, by that worker where it names one."""
    id = await api.running(queue, lease_s=lease)
    answer = await api.ask(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r", **fence})
    if leased if lease else unleased:
        assert answer.status == 200, answer
        assert (await api.outcome(id))["result_blob"] == b"r"
    else:
        assert answer.error == (409, "ClaimLost")
        assert answer.fields["error"]["id"] == id
        assert answer.fields["error"]["reason"]
        assert await api.outcome(id) == {"state": "pending"}
        await api.do(ACK, {"invocation_id": id, "state": "succeeded", **OURS})


@pytest.mark.parametrize("lease", [60, None])
@pytest.mark.parametrize("fence", [OURS, {"worker_id": "w"}, {}])
async def test_an_ack_of_a_row_that_nobody_holds_is_refused(
    api: Api, queue: str, fence: dict[str, Any], lease: float | None
) -> None:
    never = await api.submit("never-" + queue)
    released = await api.running(queue, lease_s=lease)
    await api.do(RELEASE, {"worker_id": "w", "claims": [[released, 1]]})
    for id in (never, released):
        answer = await api.ask(ACK, {"invocation_id": id, "state": "succeeded", **fence})
        assert answer.error == (409, "ClaimLost")
        assert (await api.row(id))["state"] == "queued"


async def test_an_ack_of_an_attempt_that_is_over_is_refused_and_the_new_one_goes_on(api: Api, queue: str) -> None:
    id = await api.running(queue, "w", lease_s=60)
    await api.do(RELEASE, {"worker_id": "w", "claims": [[id, 1]]})
    assert (await api.claim(queue, "w", lease_s=60))["attempt"] == 2
    answer = await api.ask(ACK, {"invocation_id": id, "state": "succeeded", **OURS})
    assert answer.error == (409, "ClaimLost")
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "worker_id": "w", "attempt": 2})


async def test_an_ack_after_the_lease_ran_out_is_taken_as_long_as_nobody_else_has_begun(api: Api, queue: str) -> None:
    """Finished work is never thrown away: only the next claim ends the old one."""
    early, late = [await api.running(queue, lease_s=0.05) for _ in range(2)]
    ended = {"state": "succeeded", **OURS}
    with anyio.fail_after(PATIENCE):
        while {(await api.row(id))["state"] for id in (early, late)} != {"queued"}:
            await api.do(REAP)
    assert (await api.do(ACK, {"invocation_id": early, **ended}))["ok"] is True
    assert (await api.row(early))["lost"] == 0
    assert (await api.claim(queue, "w2", lease_s=60))["invocation_id"] == late
    assert (await api.ask(ACK, {"invocation_id": late, **ended})).error == (409, "ClaimLost")


async def test_an_ack_of_an_unknown_invocation_is_a_404_of_that_name(api: Api) -> None:
    id = new_id()
    answer = await api.ask(ACK, {"invocation_id": id, "state": "succeeded", **OURS})
    assert answer.error == (404, "InvocationNotFound")
    assert answer.fields["error"]["id"] == id


@pytest.mark.parametrize(("lease", "fence"), [(60, OURS), (None, OURS), (None, {"worker_id": "w"}), (None, {})])
async def test_the_same_ack_again_is_answered_as_before(
    api: Api, queue: str, lease: float | None, fence: dict[str, Any]
) -> None:
    """Its first answer may have been lost on the way."""
    id = await api.running(queue, lease_s=lease)
    ack = {"invocation_id": id, "state": "failed", "error": ERROR, **fence}
    for _ in range(3):
        assert (await api.do(ACK, ack))["ok"] is True
    assert (await api.row(id))["error"] == ERROR


async def test_one_claim_of_many_acks_at_once_is_ended_by_one(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    acks = [
        api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"%d" % n, **OURS}) for n in range(20)
    ]
    async with meanwhile(*acks) as laters:
        answers = [await later() for later in laters]
    assert all(answer["ok"] is True for answer in answers)
    assert [answer["repeat"] for answer in answers].count(False) == 1
    (first,) = (n for n, answer in enumerate(answers) if not answer["repeat"])
    assert (await api.outcome(id))["result_blob"] == b"%d" % first


# --- with its final frame --------------------------------------------------------------------------------------------


async def test_the_final_frame_comes_with_the_ack_and_closes_the_journal(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    await api.do(CHUNK, {"invocation_id": id, **OURS, "seq": 0, "bytes": b"first"})
    final = {"seq": 1, "bytes": NO_MSGPACK}
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "final_frame": final, **OURS})
    assert await api.frames(id) == b"first" + NO_MSGPACK


async def test_a_refused_ack_writes_no_final_frame(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    ack = {"invocation_id": id, "state": "succeeded", "final_frame": {"seq": 0, "bytes": b"stale"}, **OURS}
    assert (await api.ask(ACK, {**ack, "attempt": 2})).status == 409
    await api.do(ACK, {**ack, "final_frame": {"seq": 0, "bytes": b"right"}})
    assert await api.frames(id) == b"right"


# --- several at once -------------------------------------------------------------------------------------------------


async def test_ack_many_answers_each_item_in_its_place_and_one_bad_one_fails_alone(api: Api, queue: str) -> None:
    ids = [await api.running(queue, lease_s=60) for _ in range(3)]
    acks = [{"invocation_id": id, "state": "succeeded", "result_blob": b"r", **OURS} for id in ids]
    acks[1]["attempt"] = 9
    unknown = {**acks[0], "invocation_id": new_id()}
    wrong = {**acks[0], "state": "odd"}
    results = (await api.do(ACK_MANY, {"items": [acks[0], unknown, acks[1], wrong, acks[2], acks[0]]}))["results"]
    assert [result.get("error", {}).get("type") for result in results] == [
        None, "InvocationNotFound", "ClaimLost", "WireError", None, None,
    ]  # fmt: skip
    assert [result.get("repeat") for result in results] == [False, None, None, None, False, True]
    assert [(await api.row(id))["state"] for id in ids] == ["succeeded", "running", "succeeded"]


# --- cancel ----------------------------------------------------------------------------------------------------------


async def test_cancelling_a_queued_invocation_kills_it(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    assert (await api.do(CANCEL, {"invocation_id": id}))["what"] == "killed"
    outcome = await api.outcome(id)
    error = {"type": "Cancelled", "message": "cancelled before it started"}
    assert (outcome["state"], outcome["error"]) == ("killed", error)
    assert await api.poll(queue) == []
    row = await api.row(id)
    assert row["started_at"] is None
    assert row["finished_at"] is not None


async def test_cancelling_a_claim_without_a_lease_kills_it_and_its_late_ack_is_refused(api: Api, queue: str) -> None:
    id = await api.running(queue)
    assert (await api.do(CANCEL, {"invocation_id": id}))["what"] == "killed"
    row = await api.row(id)
    for fence in (OURS, {"worker_id": "w"}, {}):
        answer = await api.ask(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"late", **fence})
        assert answer.error == (409, "ClaimLost")
    assert await api.row(id) == row
    outcome = await api.outcome(id)
    assert (outcome["state"], outcome["error"]) == (
        "killed", {"type": "Cancelled", "message": "cancelled while running"},
    )  # fmt: skip


@pytest.mark.parametrize("state", ENDS)
async def test_cancelling_a_claim_with_a_lease_asks_its_worker_whose_ack_decides(
    api: Api, queue: str, state: str
) -> None:
    id = await api.running(queue, lease_s=60)
    for _ in range(2):
        answer = await api.do(CANCEL, {"invocation_id": id})
        assert (answer["what"], answer["worker_id"]) == ("asked", "w")
    row = await api.row(id)
    assert (row["state"], row["cancel_requested"]) == ("running", True)
    await api.do(ACK, {"invocation_id": id, "state": state, **OURS})
    assert (await api.outcome(id))["state"] == state


async def test_a_claim_given_back_after_a_cancel_is_killed(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=60)
    await api.do(CANCEL, {"invocation_id": id})
    (result,) = (await api.do(RELEASE, {"worker_id": "w", "claims": [[id, 1]]}))["results"]
    assert result["state"] == "killed"
    assert (await api.outcome(id))["state"] == "killed"


async def test_cancelling_what_has_ended_changes_nothing(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r"})
    assert (await api.do(CANCEL, {"invocation_id": id}))["what"] == "terminal"
    assert (await api.outcome(id))["result_blob"] == b"r"


async def test_several_are_cancelled_in_one_request_each_for_itself(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    items = [{"invocation_id": id}, {"invocation_id": new_id()}, {"invocation_id": "../x"}]
    results = (await api.do(CANCEL, {"items": items}))["results"]
    assert results[0]["what"] == "killed"
    assert [result["error"]["type"] for result in results[1:]] == ["InvocationNotFound", "WireError"]


async def test_cancelling_an_unknown_invocation_is_a_404_of_that_name(api: Api) -> None:
    assert (await api.ask(CANCEL, {"invocation_id": new_id()})).error == (404, "InvocationNotFound")


# --- await -----------------------------------------------------------------------------------------------------------


async def test_an_await_answers_pending_after_its_timeout(api: Api, queue: str) -> None:
    queued = await api.submit(queue)
    began = time.monotonic()
    assert await api.outcome(queued, 0.4) == {"state": "pending"}
    assert 0.39 <= time.monotonic() - began < PATIENCE
    assert (await api.claim(queue))["invocation_id"] == queued
    assert await api.outcome(queued, 0.01) == {"state": "pending"}, "running is pending too"


async def test_an_await_without_a_timeout_is_held_and_its_default_is_60_seconds(api: Api, queue: str) -> None:
    assert protocol.AWAIT_S == 60.0
    id = await api.running(queue)
    async with meanwhile(api.do(AWAIT, {"invocation_id": id})) as (waited,):
        await not_yet(waited, 1.0)
        await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r"})
        assert await waited() == {"state": "succeeded", "result_blob": b"r", "error": None}


@pytest.mark.parametrize("state", ENDS)
async def test_a_held_await_is_answered_by_the_ack(api: Api, queue: str, state: str) -> None:
    id = await api.running(queue)
    error = None if state == "succeeded" else ERROR
    waits = [api.outcome(id, 60) for _ in range(3)]
    async with meanwhile(*waits) as laters:
        await not_yet(laters[0], 0.1)
        await api.do(ACK, {"invocation_id": id, "state": state, "result_blob": NO_MSGPACK, "error": error})
        for later in laters:
            assert await later() == {"state": state, "result_blob": NO_MSGPACK, "error": error}


async def test_a_held_await_is_answered_by_a_cancel_and_by_the_loss_of_the_worker(api: Api, queue: str) -> None:
    cancelled = await api.submit("other-" + queue)
    lost = await api.submit(queue)
    async with meanwhile(api.outcome(cancelled, 60), api.outcome(lost, 60)) as laters:
        await not_yet(laters[0], 0.1)
        await api.do(CANCEL, {"invocation_id": cancelled})
        assert (await laters[0]())["state"] == "killed"
        await api.claim(queue, lease_s=0.05, max_lost=1)
        assert (await laters[1]())["error"]["type"] == "WorkerLost"


async def test_an_await_of_what_has_ended_answers_at_once_as_often_as_it_is_asked(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r"})
    answers = [await api.outcome(id, timeout) for timeout in (0, 0.1, 60, 60)]
    assert all(answer == {"state": "succeeded", "result_blob": b"r", "error": None} for answer in answers)


@pytest.mark.parametrize("timeout", [0, 60])
async def test_an_await_of_an_unknown_invocation_is_a_404_at_once(api: Api, timeout: float) -> None:
    answer = await api.ask(AWAIT, {"invocation_id": new_id(), "timeout_s": timeout})
    assert answer.error == (404, "InvocationNotFound")


async def test_an_await_of_what_was_purged_is_a_404(api: Api, queue: str) -> None:
    id = await api.running(queue)
    await api.do(ACK, {"invocation_id": id, "state": "succeeded"})
    assert (await api.do(PURGE, {"older_than_s": 1e6}))["count"] == 0
    with anyio.fail_after(PATIENCE):
        while (await api.ask(AWAIT, {"invocation_id": id, "timeout_s": 0})).status == 200:
            await api.do(PURGE, {"older_than_s": 0})
    assert (await api.ask(AWAIT, {"invocation_id": id, "timeout_s": 0})).error == (404, "InvocationNotFound")


async def test_fields_of_an_await_that_are_not_known_are_ignored(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    fields = {"invocation_id": id, "timeout_s": 0, "accept_result_ref": True, "later": [1]}
    assert await api.do(AWAIT, fields) == {"state": "pending"}


@each_row(
    "change, named",
    [
        ({"invocation_id": None}, "`invocation_id`"), ({"invocation_id": "../x"}, "'../x'"),
        ({"timeout_s": "5"}, "`timeout_s`"), ({"timeout_s": -1}, "`timeout_s`"),
        ({"timeout_s": float("nan")}, "`timeout_s`"), ({"timeout_s": True}, "`timeout_s`"),
    ],
)  # fmt: skip
async def test_an_await_with_a_field_that_is_missing_or_wrong_is_a_400_that_names_it(
    api: Api, queue: str, change: dict[str, Any], named: str
) -> None:
    answer = await api.ask(AWAIT, {"invocation_id": await api.submit(queue), "timeout_s": 0, **change})
    assert answer.error == (400, "WireError")
    assert named in answer.message


# --- await-many ------------------------------------------------------------------------------------------------------


def these(*ids: str, **more: Any) -> dict[str, Any]:
    return {"items": [{"invocation_id": id} for id in ids], **more}


async def test_await_many_answers_with_those_that_have_ended(api: Api, queue: str) -> None:
    ended, running = [await api.running(queue) for _ in range(2)]
    await api.do(ACK, {"invocation_id": ended, "state": "failed", "error": ERROR})
    answer = await api.do(AWAIT_MANY, these(running, ended, timeout_s=60))
    assert answer["results"] == [[ended, {"state": "failed", "result_blob": b"", "error": ERROR}]]
    assert answer["pages"] == []


async def test_await_many_is_held_until_the_first_of_them_ends(api: Api, queue: str) -> None:
    ids = [await api.running(queue) for _ in range(20)]
    async with meanwhile(api.do(AWAIT_MANY, these(*ids, timeout_s=60))) as (waited,):
        await not_yet(waited)
        await api.do(ACK, {"invocation_id": ids[7], "state": "succeeded", "result_blob": NO_MSGPACK})
        assert (await waited())["results"] == [
            [ids[7], {"state": "succeeded", "result_blob": NO_MSGPACK, "error": None}]
        ]


async def test_await_many_answers_nothing_after_its_timeout_and_never_waits_with_0(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    began = time.monotonic()
    assert await api.do(AWAIT_MANY, these(id, timeout_s=0.4)) == {"results": [], "pages": []}
    assert time.monotonic() - began >= 0.39
    assert await api.do(AWAIT_MANY, these(id, timeout_s=0)) == {"results": [], "pages": []}


async def test_await_many_says_of_each_bad_or_unknown_id_what_it_is(api: Api, queue: str) -> None:
    id, unknown = await api.submit(queue), new_id()
    results = dict((await api.do(AWAIT_MANY, these(id, unknown, timeout_s=60)))["results"])
    assert list(results) == [unknown]
    assert results[unknown]["error"]["type"] == "InvocationNotFound"
    results = dict((await api.do(AWAIT_MANY, these(id, "../x", timeout_s=60)))["results"])
    assert results["../x"]["error"]["type"] == "WireError"


async def test_a_newer_await_many_of_the_same_watch_ends_the_older_one(api: Api, queue: str) -> None:
    id = await api.running(queue)
    watch = new_id()
    async with meanwhile(api.do(AWAIT_MANY, these(id, timeout_s=60, watch=watch))) as (older,):
        await not_yet(older)
        other = api.do(AWAIT_MANY, these(id, timeout_s=60, watch=new_id()))
        newer = api.do(AWAIT_MANY, these(id, timeout_s=60, watch=watch))
        async with meanwhile(other, newer) as laters:
            assert await older() == {"results": [], "pages": []}
            await not_yet(laters[0], 0.1)
            await api.do(ACK, {"invocation_id": id, "state": "succeeded"})
            for later in laters:
                assert [result[0] for result in (await later())["results"]] == [id]


@pytest.mark.timing("both acks must reach the server within the second that it waits for more")
async def test_await_many_lingers_for_what_ends_a_little_later(api: Api, queue: str) -> None:
    ids = [await api.running(queue, lease_s=60) for _ in range(2)]
    async with meanwhile(api.do(AWAIT_MANY, these(*ids, timeout_s=60, linger_s=1.0))) as (waited,):
        await not_yet(waited, 0.1)
        for id in ids:
            await api.do(ACK, {"invocation_id": id, "state": "succeeded", **OURS})
        assert {id for id, _ in (await waited())["results"]} == set(ids)


async def test_await_many_brings_the_frames_of_streams_too(api: Api, queue: str) -> None:
    ids = [await api.running(queue) for _ in range(2)]
    for seq, frame in enumerate([b"zero", NO_MSGPACK, b"two"]):
        await api.do(CHUNK, {"invocation_id": ids[0], "seq": seq, "bytes": frame})
    streams = [{"invocation_id": id, "since": 0} for id in ids]
    answer = await api.do(AWAIT_MANY, {"streams": streams, "timeout_s": 60})
    ((id, since, page),) = answer["pages"]
    assert (id, since) == (ids[0], 0)
    assert page["frames"] == [[1, NO_MSGPACK], [2, b"two"]]
    assert (page["closed"], page["state"]) == (False, "running")
    limited = [{"invocation_id": ids[0], "since": -1, "limit": 1}]
    ((_, _, page),) = (await api.do(AWAIT_MANY, {"streams": limited, "timeout_s": 60}))["pages"]
    assert page["frames"] == [[0, b"zero"]]


async def test_await_many_of_nothing_answers_nothing(api: Api) -> None:
    nothings: list[dict[str, Any]] = [{}, {"items": []}, {"items": None, "streams": None}]
    for fields in nothings:
        assert await api.do(AWAIT_MANY, {**fields, "timeout_s": 60}) == {"results": [], "pages": []}
