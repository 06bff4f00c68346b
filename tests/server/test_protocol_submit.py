"""What the function protocol says of a submit, byte by byte against the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import pytest
import raw_kit
from helpers import each_row
from raw_kit import INVOCATIONS, NO_MSGPACK, QUEUES, SUBMIT, SUBMIT_MANY, pack

from dreamlake.lakeshore import wire
from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from raw_kit import Api

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue

STUB = {"module": "_native_wire", "qualname": "_native_wire.envelope", "version": "v1"}


def documented(id: str, queue: str, blob: bytes, parent: str | None = None) -> dict[str, Any]:
    """A submit with every field that the document shows."""
    fields: dict[str, Any] = {
        "invocation_id": id,
        "queue": queue,
        "function": STUB,
        "args_blob": blob,
        "run_config": {"queue": queue, "priority": 0.0, "key": None},
        "code_context": {},
    }
    return fields if parent is None else {**fields, "parent_invocation_id": parent}


async def test_a_submit_is_answered_with_its_id_and_queue_in_msgpack(api: Api, queue: str) -> None:
    answer = await api.ask(SUBMIT, documented("a-" + queue, queue, b"x"))
    assert (answer.status, answer.type) == (200, "application/x-msgpack")
    assert answer.fields == {"invocation_id": "a-" + queue, "queue": queue}


async def test_a_submitted_row_is_queued_and_nothing_of_it_has_happened_yet(api: Api, queue: str) -> None:
    row = await api.row(await api.submit(queue))
    assert (row["state"], row["queue"], row["attempt"], row["failures"], row["lost"]) == ("queued", queue, 0, 0, 0)
    assert row["started_at"] is row["finished_at"] is row["worker"] is row["error"] is row["key"] is None
    assert row["submitted_at"] > 1.7e9
    assert row["trusted"] is False, "what came over HTTP is not trusted"


async def test_fields_that_are_not_known_are_ignored_at_every_level(api: Api, queue: str) -> None:
    fields = documented(new_id(), queue, b"x")
    fields |= {"later": [1, {"a": b"\xff"}], "trusted": True, "state": "succeeded", "attempt": 9, "host_key": "h"}
    fields["run_config"] |= {"runner": "docker", "image": "i", "deep": {"er": [1]}}
    id = (await api.do(SUBMIT, fields))["invocation_id"]
    row = await api.row(id)
    assert (row["state"], row["attempt"], row["trusted"]) == ("queued", 0, False)
    assert (await api.claim(queue))["invocation_id"] == id


@pytest.mark.parametrize("said", [{}, {"queue": None}, {"queue": ""}])
async def test_a_submit_without_a_queue_goes_to_the_one_called_default(api: Api, said: dict[str, Any]) -> None:
    id = new_id()
    answer = await api.do(SUBMIT, {"invocation_id": id, "args_blob": b"x", **said})
    assert answer == {"invocation_id": id, "queue": "default"}
    assert (await api.row(id))["queue"] == "default"
    while (body := await api.claim("default"))["invocation_id"] != id:
        pass  # the queue is everybody's
    assert body["run_config"]["queue"] == "default"


async def test_the_queue_is_created_by_its_first_submit_and_the_second_finds_it(api: Api, queue: str) -> None:
    assert (await api.get(QUEUES, queue=queue))["queues"] == []
    await api.submit(queue)
    await api.submit(queue)
    assert (await api.get(QUEUES, queue=queue))["queues"] == [[queue, "queued", 2]]


@pytest.mark.parametrize("name", ["a b", "Größe/7", "x" * 300, "../..", "日本", "a\nb"])
async def test_a_queue_may_be_called_anything(api: Api, queue: str, name: str) -> None:
    id = await api.submit(name + queue)
    assert (await api.claim(name + queue))["invocation_id"] == id


async def test_the_run_config_is_kept_with_the_queue_stamped_onto_it(api: Api, queue: str) -> None:
    run_config = {"priority": 2.5, "key": None, "image": "i", "more": {"nested": [1, b"\xff", None]}}
    id = await api.submit(queue, run_config=run_config)
    body = await api.claim(queue)
    assert body["invocation_id"] == id
    assert body["run_config"] == {**run_config, "queue": queue}


async def test_dispatch_goes_by_the_stamped_queue_not_by_what_the_run_config_said(api: Api, queue: str) -> None:
    id = await api.submit(queue, run_config={"queue": "elsewhere-" + queue, "priority": 0})
    assert await api.poll("elsewhere-" + queue) == []
    body = await api.claim(queue)
    assert (body["invocation_id"], body["run_config"]["queue"]) == (id, queue)


@pytest.mark.parametrize("run_config", ["absent", None, {}])
async def test_a_submit_without_a_run_config_has_one_with_its_queue(api: Api, queue: str, run_config: Any) -> None:
    more = {} if run_config == "absent" else {"run_config": run_config}
    await api.submit(queue, **more)
    assert (await api.claim(queue))["run_config"]["queue"] == queue


async def test_the_native_submit_comes_out_as_it_went_in(api: Api, queue: str) -> None:
    """Every documented field of it: the stub, the run_config, the envelope's bytes."""
    envelope = wire.Envelope("e", {"kind": "ref"}, wire.pack([1]), wire.pack({})).to_bytes()
    fields = documented(new_id(), queue, envelope)
    await api.do(SUBMIT, fields)
    body = await api.claim(queue)
    assert {name: body[name] for name in ("function", "args_blob", "run_config")} == {
        "function": STUB,
        "args_blob": envelope,
        "run_config": fields["run_config"],
    }


async def test_the_function_is_a_stub_that_is_handed_out_verbatim(api: Api, queue: str) -> None:
    function = {"module": "m", "qualname": "m.f", "version": "v2", "more": [1, {"x": b"\xff"}]}
    await api.submit(queue, function=function, code_context={"commit": "abc"})
    assert (await api.claim(queue))["function"] == function


BLOBS = [b"", b"\x00", NO_MSGPACK, b"\x91" * 20_000, b"\x81\xa1v\x63", bytes(range(256)) * 5000]


@pytest.mark.parametrize("blob", BLOBS, ids=lambda blob: f"{len(blob)}")
async def test_the_envelope_is_bytes_that_the_server_never_decodes(api: Api, queue: str, blob: bytes) -> None:
    """No msgpack, an Envelope of a later version, nesting without end: in and out, the same bytes."""
    id = await api.submit(queue, blob)
    assert (await api.claim(queue))["args_blob"] == blob
    assert (await api.row(id))["state"] == "running"


# --- priority --------------------------------------------------------------------------------------------------------

MOST, LEAST = 2**63 - 1, -(2**63)


@each_row(
    "said, stored",
    [
        (0.0, 0), (3, 3), (-3, -3), (2.9, 2), (-2.9, -2), (0.999, 0), ("7", 0), ("", 0), (b"7", 0), (None, 0), (True, 0),
        (False, 0), ([7], 0), ({"p": 7}, 0), (float("nan"), 0), (float("inf"), 0), (float("-inf"), 0), (1e300, MOST),
        (-1e300, LEAST), (2**64 - 1, MOST), (MOST, MOST), (LEAST, LEAST), (5e-324, 0),
    ],
)  # fmt: skip
async def test_a_priority_is_truncated_and_what_is_no_finite_number_is_0(
    api: Api, queue: str, said: Any, stored: int
) -> None:
    id = await api.submit(queue, run_config={"priority": said})
    assert (await api.row(id))["priority"] == stored


async def test_the_claim_takes_the_highest_priority_and_of_those_the_first_submitted(api: Api, queue: str) -> None:
    said = [0, 5, "9", 5.9, -1, float("nan"), 6, 1e300]
    ids = [await api.submit(queue, run_config={"priority": one}) for one in said]
    assert [body["invocation_id"] for body in await api.poll(queue, max_commands=100)] == [
        ids[at] for at in (7, 6, 1, 3, 0, 2, 5, 4)
    ]


async def test_submit_order_is_the_servers_not_that_of_the_ids(api: Api, queue: str) -> None:
    ids = [await api.submit(queue, id=f"{letter}-{queue}") for letter in "zamb"]
    assert [(await api.claim(queue))["invocation_id"] for _ in ids] == ids


async def test_only_the_run_configs_priority_counts(api: Api, queue: str) -> None:
    id = await api.submit(queue, priority=7)
    assert (await api.row(id))["priority"] == 0


# --- lineage ---------------------------------------------------------------------------------------------------------


async def test_a_row_without_a_parent_has_no_root(api: Api, queue: str) -> None:
    row = await api.row(await api.submit(queue))
    assert (row["parent"], row["root"]) == (None, None)


async def test_the_root_of_a_child_is_its_parent_and_of_a_grandchild_the_parents_root(api: Api, queue: str) -> None:
    first = await api.submit(queue)
    child = await api.submit(queue, parent_invocation_id=first)
    grandchild = await api.submit(queue, parent_invocation_id=child)
    other = await api.submit("other-" + queue, parent_invocation_id=grandchild)
    rows = [await api.row(id) for id in (child, grandchild, other)]
    assert [(row["parent"], row["root"]) for row in rows] == [(first, first), (child, first), (grandchild, first)]
    found = (await api.get(INVOCATIONS, root=first))["invocations"]
    assert {row["id"] for row in found} == {child, grandchild, other}


async def test_the_root_of_a_child_whose_parent_is_not_known_is_that_parent(api: Api, queue: str) -> None:
    gone = new_id()
    row = await api.row(await api.submit(queue, parent_invocation_id=gone))
    assert (row["parent"], row["root"]) == (gone, gone)


async def test_lineage_is_handed_out_with_the_claim(api: Api, queue: str) -> None:
    first = await api.running(queue)
    child = await api.running(queue, parent_invocation_id=first)
    await api.submit(queue, parent_invocation_id=child)
    body = await api.claim(queue)
    assert (body["parent_invocation_id"], body["root_invocation_id"]) == (child, first)


# --- the same again --------------------------------------------------------------------------------------------------


async def test_a_repeated_submit_answers_the_same_and_the_first_one_holds(api: Api, queue: str) -> None:
    """A lost answer may be asked for again, also after the row has ended."""
    id = await api.submit(queue, b"first")
    assert await api.submit(queue, b"second", id=id, run_config={"priority": 9}) == id
    body = await api.claim(queue)
    assert body["args_blob"] == b"first"
    await api.do(raw_kit.ACK, {"invocation_id": id, "state": "succeeded", "result_blob": b"r"})
    assert await api.submit(queue, b"third", id=id) == id
    assert (await api.row(id))["state"] == "succeeded"
    assert await api.poll(queue) == []


async def test_a_key_that_is_taken_in_its_queue_answers_the_id_of_its_first_submit(api: Api, queue: str) -> None:
    first = await api.submit(queue, run_config={"key": "k"})
    assert await api.submit(queue, b"other", run_config={"key": "k"}) == first
    assert await api.submit(queue, run_config={"key": "k2"}) != first
    assert await api.submit("other-" + queue, run_config={"key": "k"}) != first
    assert (await api.row(first))["key"] == "k"
    assert (await api.get(INVOCATIONS, queue=queue, key="k"))["invocations"][0]["id"] == first


async def test_R102_many_submits_of_one_key_at_once_make_one_row(api: Api, queue: str) -> None:
    ids = set[str]()

    async def submit() -> None:
        ids.add(await api.submit(queue, run_config={"key": "k"}))

    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(submit)
    assert len(ids) == 1
    assert (await api.get(QUEUES, queue=queue))["queues"] == [[queue, "queued", 1]]


@pytest.mark.parametrize("key", [None, ""])
async def test_a_submit_without_a_key_is_always_a_row_of_its_own(api: Api, queue: str, key: Any) -> None:
    ids = {await api.submit(queue, run_config={"key": key}) for _ in range(2)}
    assert len(ids) == 2


# --- several at once -------------------------------------------------------------------------------------------------


async def test_submit_many_answers_each_item_in_its_place_and_one_bad_one_fails_alone(api: Api, queue: str) -> None:
    items: list[dict[str, Any]] = [
        documented("1-" + queue, queue, b"1"),
        {"invocation_id": "../../x", "args_blob": b"2", "queue": queue},
        {"invocation_id": "3-" + queue, "queue": queue},
        documented("4-" + queue, queue, NO_MSGPACK) | {"later": 1},
    ]
    results = (await api.do(SUBMIT_MANY, {"items": items, "later": 1}))["results"]
    assert results[0] == {"invocation_id": "1-" + queue, "queue": queue}
    assert results[3] == {"invocation_id": "4-" + queue, "queue": queue}
    assert results[1]["error"]["type"] == results[2]["error"]["type"] == "WireError"
    assert "expected an invocation id" in results[1]["error"]["message"]
    assert "`args_blob`" in results[2]["error"]["message"]
    bodies = await api.poll(queue, max_commands=9)
    assert [(body["invocation_id"], body["args_blob"]) for body in bodies] == [
        ("1-" + queue, b"1"), ("4-" + queue, NO_MSGPACK),
    ]  # fmt: skip


@pytest.mark.parametrize("fields", [{}, {"items": []}, {"items": None}])
async def test_submit_many_of_nothing_answers_nothing(api: Api, fields: dict[str, Any]) -> None:
    assert await api.do(SUBMIT_MANY, fields) == {"results": []}


# --- refused ---------------------------------------------------------------------------------------------------------


@each_row(
    "change, named",
    [
        ({"invocation_id": None}, "`invocation_id`"), ({"invocation_id": 5}, "`invocation_id`"),
        ({"invocation_id": ""}, "invocation id"), ({"invocation_id": "../../x"}, "'../../x'"),
        ({"invocation_id": "a" * 65}, "1 to 64"), ({"invocation_id": "a/b"}, "'a/b'"), ({"invocation_id": "é"}, "'é'"),
        ({"args_blob": None}, "`args_blob`"), ({"args_blob": "text"}, "`args_blob`"), ({"queue": 5}, "`queue`"),
        ({"run_config": [1]}, "`run_config`"), ({"run_config": {"key": 5}}, "`key`"),
        ({"parent_invocation_id": "../x"}, "'../x'"), ({"parent_invocation_id": 5}, "`parent_invocation_id`"),
        ({"function": "f"}, "`function`"), ({"code_context": 1}, "`code_context`"),
    ],
)  # fmt: skip
async def test_a_submit_with_a_field_that_is_missing_or_wrong_is_a_400_that_names_it(
    api: Api, queue: str, change: dict[str, Any], named: str
) -> None:
    answer = await api.ask(SUBMIT, {**documented(new_id(), queue, b"x"), **change})
    assert answer.error == (400, "WireError")
    assert named in answer.message
    assert "expected" in answer.message
    assert (await api.get(QUEUES, queue=queue))["queues"] == [], "nothing of it was stored"


@pytest.mark.parametrize("body", [b"\xc1", b"\x90", b"text", pack(None), pack(5), b"\xdf\xff\xff\xff\xff", b"\x80\x80"])
async def test_a_body_that_is_no_msgpack_map_is_a_400_that_says_so(api: Api, body: bytes) -> None:
    answer = await api.send("POST", SUBMIT, body)
    assert answer.error == (400, "WireError")
    assert "expected a msgpack map as the body of" in answer.message
