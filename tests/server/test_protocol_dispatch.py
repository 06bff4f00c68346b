"""What the function protocol says of handing work out, byte by byte: polls, claims, heartbeats, giving claims back."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import raw_kit
from helpers import each_row, wait_until
from raw_kit import (
    ACK,
    CANCEL,
    CHUNK,
    HEARTBEAT,
    NO_MSGPACK,
    PATIENCE,
    POLL,
    REAP,
    RELEASE,
    RETRY,
    meanwhile,
    serving_here,
)

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from pathlib import Path

    from raw_kit import Api, Later

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue


# --- a poll ----------------------------------------------------------------------------------------------------------


async def test_a_poll_is_answered_with_one_run_command(api: Api, queue: str) -> None:
    """Shape and fields as documented: an id of the command's own, the kind, and the body with what was submitted."""
    id = await api.submit(queue, NO_MSGPACK)
    answer = await api.do(POLL, {"worker_id": "w", "queue": queue, "timeout_s": 1.0})
    assert set(answer) == {"commands"}
    (command,) = answer["commands"]
    assert set(command) == {"id", "kind", "body"}
    assert command["kind"] == "run"
    assert isinstance(command["id"], str)
    assert len(command["id"]) == 26
    assert command["id"] != id
    body = command["body"]
    assert (body["invocation_id"], body["args_blob"], body["run_config"]["queue"]) == (id, NO_MSGPACK, queue)
    assert body["function"] == {"module": "_native_wire", "qualname": "_native_wire.envelope", "version": "v1"}


async def test_a_run_command_says_which_attempt_it_is_and_where_its_frames_begin(api: Api, queue: str) -> None:
    await api.submit(queue)
    body = await api.claim(queue)
    assert (body["attempt"], body["failures"], body["next_seq"]) == (1, 0, 0)
    assert (body["root_invocation_id"], body["parent_invocation_id"]) == (None, None)


async def test_each_command_has_an_id_of_its_own(api: Api, queue: str) -> None:
    for _ in range(5):
        await api.submit(queue)
    answer = await api.do(POLL, {"worker_id": "w", "queue": queue, "max_commands": 5})
    assert len({command["id"] for command in answer["commands"]}) == 5


async def test_a_poll_takes_one_invocation_unless_it_asks_for_more(api: Api, queue: str) -> None:
    """A peer uses the first command only: what came with it would be lost to it."""
    ids = [await api.submit(queue) for _ in range(6)]
    assert [body["invocation_id"] for body in await api.poll(queue)] == ids[:1]
    assert [body["invocation_id"] for body in await api.poll(queue, max_commands=3)] == ids[1:4]
    assert [body["invocation_id"] for body in await api.poll(queue, max_commands=100)] == ids[4:]


async def test_a_poll_of_a_peer_needs_nothing_but_worker_queue_and_timeout(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    answer = await api.do(POLL, {"worker_id": "host-" + new_id(), "timeout_s": 1.0, "queue": queue})
    assert answer["commands"][0]["body"]["invocation_id"] == id


async def test_fields_of_a_poll_that_are_not_known_are_ignored(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    assert (await api.claim(queue, kind="fifo", temperature=1.0, later={"a": [1]}))["invocation_id"] == id


async def test_an_empty_queue_answers_no_commands(api: Api, queue: str) -> None:
    assert await api.do(POLL, {"worker_id": "w", "queue": queue, "timeout_s": 0}) == {"commands": []}


async def test_a_poll_is_held_for_its_timeout_and_then_answers_nothing(api: Api, queue: str) -> None:
    began = time.monotonic()
    assert await api.do(POLL, {"worker_id": "w", "queue": queue, "timeout_s": 0.4}) == {"commands": []}
    assert 0.39 <= time.monotonic() - began < PATIENCE


@pytest.mark.parametrize("again", range(3))
async def test_a_held_poll_is_answered_by_the_submit_it_waited_for(api: Api, queue: str, again: int) -> None:
    """Not by its end, which is far away: the time from the submit to the answer is a small part of it."""
    async with meanwhile(api.poll(queue, timeout_s=60)) as (polled,):
        await anyio.wait_all_tasks_blocked()
        with anyio.move_on_after(0.2):
            await polled.done.wait()
        assert not polled.done.is_set(), "nothing was there, so it is held"
        id = await api.submit(queue)
        submitted = time.monotonic()
        (body,) = await polled()
        assert body["invocation_id"] == id
        assert time.monotonic() - submitted < 20


async def test_a_held_poll_names_all_the_queues_it_waits_for(api: Api, queue: str) -> None:
    names = [f"{letter}-{queue}" for letter in "abc"]
    for name in names:
        async with meanwhile(api.poll(names[0], queues=names, timeout_s=60)) as (polled,):
            id = await api.submit(name)
            assert [body["invocation_id"] for body in await polled()] == [id]


async def test_a_claim_over_several_queues_goes_by_priority_then_by_submit_order(api: Api, queue: str) -> None:
    a, b = "a-" + queue, "b-" + queue
    first = await api.submit(b)
    second = await api.submit(a)
    best = await api.submit(b, run_config={"priority": 1})
    bodies = await api.poll(a, queues=[a, b], max_commands=9)
    assert [body["invocation_id"] for body in bodies] == [best, first, second]


async def test_R96_of_many_polls_at_once_each_invocation_goes_to_one(api: Api, queue: str) -> None:
    """The claim is one atomic change: no row is handed out twice, none is passed over."""
    ids = [await api.submit(queue) for _ in range(20)]
    async with meanwhile(*(api.poll(queue, f"w{n}", timeout_s=0.2) for n in range(30))) as polls:
        bodies = [body for later in polls for body in await later()]
    assert sorted(body["invocation_id"] for body in bodies) == sorted(ids)
    rows = [await api.row(id) for id in ids]
    assert {(row["state"], row["attempt"]) for row in rows} == {("running", 1)}
    assert len({row["worker"] for row in rows}) == 20


async def test_one_submit_reaches_one_of_many_waiting_polls_and_the_others_go_on_waiting(api: Api, queue: str) -> None:
    async with meanwhile(*(api.poll(queue, f"w{n}", timeout_s=60) for n in range(12))) as polls:
        for count in (1, 2, 3):
            await api.submit(queue)
            await wait_until(partial(answered, polls, count), PATIENCE, "one more answer")
        assert [len(await later()) for later in polls if later.done.is_set()] == [1, 1, 1]


def answered(polls: list[Later], count: int) -> bool:
    return sum(later.done.is_set() for later in polls) == count


# --- what a claim does to the row ------------------------------------------------------------------------------------


async def test_the_claim_makes_the_row_running_and_sets_startedAt(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    before = await api.row(id)
    await api.claim(queue, "worker-7")
    row = await api.row(id)
    assert (row["state"], row["attempt"], row["worker"]) == ("running", 1, "worker-7")
    assert before["started_at"] is None
    assert before["submitted_at"] <= row["started_at"] <= time.time() + 1
    assert row["finished_at"] is None


async def test_startedAt_is_the_servers_and_nothing_that_a_daemon_says_changes_it(api: Api, queue: str) -> None:
    id = await api.submit(queue, started_at=5.0, startedAt=5.0)
    await api.claim(queue, started_at=5.0, startedAt=5.0)
    started = (await api.row(id))["started_at"]
    assert started > 1.7e9
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "started_at": 5.0, "startedAt": 5.0})
    assert (await api.row(id))["started_at"] == started


async def test_a_claim_without_a_lease_never_expires(api: Api, queue: str) -> None:
    id = await api.running(queue)
    assert (await api.row(id))["lease_until"] is None
    await api.do(REAP)
    assert (await api.row(id))["state"] == "running"


async def test_a_claim_with_a_lease_lasts_for_it_and_goes_back_to_its_queue(api: Api, queue: str) -> None:
    row = await api.row(await api.running("kept-" + queue, lease_s=30))
    assert row["lease_until"] == pytest.approx(row["started_at"] + 30, abs=0.1)
    id = await api.submit(queue)
    await api.claim(queue, "dead", lease_s=0.3)
    (body,) = await api.poll(queue, "alive", lease_s=30, timeout_s=PATIENCE)
    assert (body["invocation_id"], body["attempt"], body["lost"]) == (id, 2, 1)


async def test_a_row_that_was_lost_as_often_as_its_claim_allows_fails(api: Api, queue: str) -> None:
    id = await api.submit(queue)
    await api.claim(queue, lease_s=0.05, max_lost=1)
    outcome = await api.outcome(id, PATIENCE)
    assert (outcome["state"], outcome["error"]["type"]) == ("failed", "WorkerLost")


# --- prefix and version ----------------------------------------------------------------------------------------------


async def test_the_prefix_of_the_run_config_is_in_the_command(api: Api, queue: str) -> None:
    await api.submit(queue, run_config={"prefix": "scenes/0007"})
    body = await api.claim(queue)
    assert body["prefix"] == body["run_config"]["prefix"] == "scenes/0007"


@pytest.mark.parametrize("run_config", [{}, {"prefix": ""}, {"prefix": None}, {"priority": 1, "key": None}])
async def test_without_a_prefix_in_the_run_config_the_command_has_none(
    api: Api, queue: str, run_config: dict[str, Any]
) -> None:
    await api.submit(queue, run_config=run_config)
    assert "prefix" not in await api.claim(queue)


async def test_the_target_version_is_told_only_in_a_namespace_that_pins_one(tmp_path: Path, queue: str) -> None:
    versions = {"pinned": "0.1.4"}
    async with serving_here(dls.Dispatch(tmp_path / "plane.db"), target_versions=versions) as api:
        pinned = api.within("pinned")
        await api.submit(queue)
        await pinned.submit(queue)
        poll = {"worker_id": "w", "queue": queue, "timeout_s": 0}
        told = await pinned.do(POLL, poll)
        assert (told["target_nymph_version"], len(told["commands"])) == ("0.1.4", 1)
        assert "target_nymph_version" not in await api.do(POLL, poll)
        assert "target_nymph_version" not in await api.within("another").do(POLL, poll)


async def test_the_default_namespace_may_pin_a_version_too(tmp_path: Path, queue: str) -> None:
    versions = {"default": "0.2.0"}
    async with serving_here(dls.Dispatch(tmp_path / "plane.db"), target_versions=versions) as api:
        await api.submit(queue)
        assert (await api.do(POLL, {"worker_id": "w", "queue": queue}))["target_nymph_version"] == "0.2.0"


# --- polls with an id ------------------------------------------------------------------------------------------------


async def test_a_repeated_poll_is_given_the_same_claims_again(api: Api, queue: str) -> None:
    """Its answer may have been lost on the way: no job is, and none is started twice."""
    ids = [await api.submit(queue) for _ in range(3)]
    poll: dict[str, Any] = {"poll_id": new_id(), "max_commands": 2, "lease_s": 30}
    first = await api.poll(queue, **poll)
    again = await api.poll(queue, **poll)
    assert again == first
    assert [body["invocation_id"] for body in first] == ids[:2]
    assert [body["attempt"] for body in again] == [1, 1]


async def test_a_repeated_poll_is_given_only_those_claims_that_still_hold(api: Api, queue: str) -> None:
    ids = [await api.submit(queue) for _ in range(3)]
    poll: dict[str, Any] = {"poll_id": new_id(), "max_commands": 2, "lease_s": 30}
    await api.poll(queue, **poll)
    await api.do(ACK, {"invocation_id": ids[0], "worker_id": "w", "attempt": 1, "state": "succeeded"})
    assert [body["invocation_id"] for body in await api.poll(queue, **poll)] == [ids[1]]


async def test_a_repeated_poll_whose_claims_hold_no_more_polls_anew(api: Api, queue: str) -> None:
    ids = [await api.submit(queue) for _ in range(2)]
    poll: dict[str, Any] = {"poll_id": new_id(), "lease_s": 30}
    await api.poll(queue, **poll)
    await api.do(ACK, {"invocation_id": ids[0], "worker_id": "w", "attempt": 1, "state": "succeeded"})
    assert [body["invocation_id"] for body in await api.poll(queue, **poll)] == [ids[1]]


async def test_a_poll_for_no_more_commands_is_given_what_it_has_taken_and_takes_nothing(api: Api, queue: str) -> None:
    ids = [await api.submit(queue) for _ in range(2)]
    poll_id = new_id()
    assert await api.poll(queue, poll_id=poll_id, max_commands=0) == []
    assert [body["invocation_id"] for body in await api.poll(queue, poll_id=poll_id, lease_s=30)] == ids[:1]
    again = await api.poll(queue, poll_id=poll_id, max_commands=0, lease_s=30)
    assert [body["invocation_id"] for body in again] == ids[:1]
    assert (await api.row(ids[1]))["state"] == "queued"


async def test_a_repeat_ends_the_older_poll_with_nothing(api: Api, queue: str) -> None:
    poll: dict[str, Any] = {"poll_id": new_id(), "timeout_s": 60}
    async with meanwhile(api.poll(queue, **poll)) as (older,):
        with anyio.move_on_after(0.2):
            await older.done.wait()
        async with meanwhile(api.poll(queue, **poll)) as (newer,):
            assert await older() == []
            id = await api.submit(queue)
            assert [body["invocation_id"] for body in await newer()] == [id]
    assert (await api.row(id))["attempt"] == 1


async def test_two_workers_may_use_the_same_poll_id(api: Api, queue: str) -> None:
    ids = {await api.submit(queue), await api.submit(queue)}
    poll_id = new_id()
    found = [await api.claim(queue, worker, poll_id=poll_id) for worker in ("w1", "w2")]
    assert {body["invocation_id"] for body in found} == ids


# --- giving back -----------------------------------------------------------------------------------------------------


async def test_a_released_claim_is_queued_again_at_no_cost(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=30)
    answer = await api.do(RELEASE, {"worker_id": "w", "claims": [[id, 1]]})
    assert answer["results"] == [{"state": "queued", "queue": queue, "delayed": False}]
    row = await api.row(id)
    assert (row["state"], row["failures"], row["lost"], row["worker"]) == ("queued", 0, 0, None)
    assert (await api.claim(queue, "w2", lease_s=30))["attempt"] == 2


async def test_a_retried_claim_is_queued_after_its_delay_and_counts_a_failure(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=30)
    error = {"type": "ValueError", "message": "boom", "traceback": "tb"}
    fields = {"worker_id": "w", "claims": [[id, 1]], "delay_s": 0.3, "error": error}
    began = time.monotonic()
    assert (await api.do(RETRY, fields))["results"] == [{"state": "queued", "queue": queue, "delayed": True}]
    row = await api.row(id)
    assert (row["state"], row["failures"], row["error"]) == ("queued", 1, error)
    (body,) = await api.poll(queue, lease_s=30) or await api.poll(queue, lease_s=30, timeout_s=PATIENCE)
    assert time.monotonic() - began >= 0.29
    assert (body["invocation_id"], body["attempt"], body["failures"]) == (id, 2, 1)


async def test_claims_are_given_back_as_items_too(api: Api, queue: str) -> None:
    ids = [await api.running(queue, lease_s=30) for _ in range(3)]
    claims = [{"invocation_id": id, "worker_id": "w", "attempt": 1} for id in ids]
    claims[1]["attempt"] = 7
    results = (await api.do(RELEASE, {"items": claims[:2]}))["results"]
    assert results[0]["state"] == "queued"
    assert results[1]["error"]["type"] == "ClaimLost"
    (retried,) = (await api.do(RETRY, {"items": [{**claims[2], "delay_s": 0, "error": "bare text"}]}))["results"]
    assert retried == {"state": "queued", "queue": queue, "delayed": False}
    assert (await api.row(ids[2]))["error"]["message"] == "bare text"


async def test_a_claim_is_given_back_once_and_by_its_own_worker_only(api: Api, queue: str) -> None:
    id = await api.running(queue, lease_s=30)
    for worker, attempt in (("other", 1), ("w", 2), ("w", 0)):
        (result,) = (await api.do(RELEASE, {"worker_id": worker, "claims": [[id, attempt]]}))["results"]
        assert result["error"]["type"] == "ClaimLost"
    assert (await api.row(id))["state"] == "running"
    await api.do(RELEASE, {"worker_id": "w", "claims": [[id, 1]]})
    (again,) = (await api.do(RETRY, {"worker_id": "w", "claims": [[id, 1]]}))["results"]
    assert again["error"]["type"] == "ClaimLost"
    (unknown,) = (await api.do(RELEASE, {"worker_id": "w", "claims": [[new_id(), 1]]}))["results"]
    assert unknown["error"]["type"] == "InvocationNotFound"


async def test_a_release_by_poll_id_gives_back_what_that_poll_took_and_still_holds(api: Api, queue: str) -> None:
    ids = [await api.submit(queue) for _ in range(3)]
    poll_id = new_id()
    await api.poll(queue, poll_id=poll_id, max_commands=3, lease_s=30)
    await api.do(ACK, {"invocation_id": ids[0], "worker_id": "w", "attempt": 1, "state": "succeeded"})
    await api.do(RELEASE, {"worker_id": "other", "poll_id": poll_id})
    assert (await api.row(ids[1]))["state"] == "running"
    await api.do(RELEASE, {"worker_id": "w", "poll_id": poll_id})
    assert [(await api.row(id))["state"] for id in ids] == ["succeeded", "queued", "queued"]


async def test_a_release_by_poll_id_ends_that_poll_with_nothing(api: Api, queue: str) -> None:
    poll_id = new_id()
    async with meanwhile(api.poll(queue, poll_id=poll_id, timeout_s=60)) as (polled,):
        with anyio.move_on_after(0.2):
            await polled.done.wait()
        await api.do(RELEASE, {"worker_id": "w", "poll_id": poll_id})
        assert await polled() == []
    id = await api.submit(queue)
    assert (await api.row(id))["state"] == "queued"


async def test_a_poll_that_arrives_after_its_release_gets_nothing(api: Api, queue: str) -> None:
    """The two travel on different connections: the release of a poll that was given up may overtake it."""
    id = await api.submit(queue)
    poll_id = new_id()
    await api.do(RELEASE, {"worker_id": "w", "poll_id": poll_id})
    assert await api.poll(queue, poll_id=poll_id, timeout_s=0.1) == []
    assert (await api.claim(queue, poll_id=new_id()))["invocation_id"] == id


async def test_a_row_with_frames_is_never_given_to_a_poll_without_a_lease(api: Api, queue: str) -> None:
    """An old daemon numbers from 0, and its frames would be taken for those that are there."""
    id = await api.running(queue, lease_s=30)
    fence = {"invocation_id": id, "worker_id": "w", "attempt": 1}
    await api.do(CHUNK, {**fence, "seq": 0, "bytes": b"a"})
    await api.do(CHUNK, {**fence, "seq": 1, "bytes": b"b"})
    await api.do(RELEASE, {"worker_id": "w", "claims": [[id, 1]]})
    assert await api.poll(queue, timeout_s=0.1) == []
    body = await api.claim(queue, lease_s=30)
    assert (body["invocation_id"], body["attempt"], body["next_seq"]) == (id, 2, 2)


# --- heartbeats ------------------------------------------------------------------------------------------------------


async def test_a_heartbeat_renews_the_claims_it_lists_and_no_others(api: Api, queue: str) -> None:
    listed, other = [await api.running(queue, lease_s=30) for _ in range(2)]
    beat = {"worker_id": "w", "claims": [[listed, 1]], "lease_s": 300}
    assert await api.do(HEARTBEAT, beat) == {"lost": [], "cancel": []}
    row = await api.row(listed)
    assert row["lease_until"] > row["started_at"] + 200
    row = await api.row(other)
    assert row["lease_until"] < row["started_at"] + 100


async def test_a_heartbeat_says_which_claims_are_lost(api: Api, queue: str) -> None:
    held = await api.running(queue, lease_s=30)
    claims = [[held, 1], [held, 2], [new_id(), 1]]
    answer = await api.do(HEARTBEAT, {"worker_id": "w", "claims": claims, "lease_s": 30})
    assert sorted(answer["lost"]) == sorted(claims[1:])
    other = await api.do(HEARTBEAT, {"worker_id": "other", "claims": [[held, 1]], "lease_s": 30})
    assert other["lost"] == [[held, 1]]


async def test_a_held_heartbeat_is_answered_at_once_by_a_cancel(api: Api, queue: str) -> None:
    id = await api.running(queue, worker="w-" + queue, lease_s=60)
    beat = {"worker_id": "w-" + queue, "claims": [[id, 1]], "lease_s": 60, "wait_s": 25}
    async with meanwhile(api.do(HEARTBEAT, beat)) as (beaten,):
        with anyio.move_on_after(0.2):
            await beaten.done.wait()
        assert not beaten.done.is_set()
        assert (await api.do(CANCEL, {"invocation_id": id}))["what"] == "asked"
        assert await beaten() == {"lost": [], "cancel": [[id, 1]]}
    assert (await api.do(HEARTBEAT, {**beat, "wait_s": 20}))["cancel"] == [[id, 1]], "not held: it is not known yet"


async def test_a_cancel_that_is_known_does_not_answer_a_heartbeat_again(api: Api, queue: str) -> None:
    id = await api.running(queue, worker="w-" + queue, lease_s=60)
    await api.do(CANCEL, {"invocation_id": id})
    began = time.monotonic()
    beat = {"worker_id": "w-" + queue, "claims": [[id, 1]], "lease_s": 60, "wait_s": 0.4, "known": [[id, 1]]}
    assert (await api.do(HEARTBEAT, beat))["lost"] == []
    assert time.monotonic() - began >= 0.39


# --- refused ---------------------------------------------------------------------------------------------------------


@each_row(
    "change, named",
    [
        ({"worker_id": None}, "`worker_id`"), ({"worker_id": ""}, "`worker_id`"), ({"worker_id": 7}, "`worker_id`"),
        ({"queue": 7}, "`queue`"), ({"queues": "q"}, "`queues`"), ({"queues": [7]}, "the name of a queue"),
        ({"timeout_s": "1"}, "`timeout_s`"), ({"timeout_s": -1}, "`timeout_s`"), ({"lease_s": 0}, "`lease_s`"),
        ({"timeout_s": float("nan")}, "`timeout_s`"), ({"timeout_s": float("inf")}, "`timeout_s`"),
        ({"lease_s": True}, "`lease_s`"), ({"max_commands": 0}, "`max_commands`"),
        ({"max_commands": 1.5}, "`max_commands`"), ({"max_lost": 0}, "`max_lost`"), ({"poll_id": "../x"}, "'../x'"),
        ({"poll_id": 7}, "`poll_id`"),
    ],
)  # fmt: skip
async def test_a_poll_with_a_field_that_is_missing_or_wrong_is_a_400_that_names_it(
    api: Api, queue: str, change: dict[str, Any], named: str
) -> None:
    id = await api.submit(queue)
    answer = await api.ask(POLL, {"worker_id": "w", "queue": queue, "timeout_s": 0, **change})
    assert answer.error == (400, "WireError")
    assert named in answer.message
    assert (await api.row(id))["state"] == "queued"
