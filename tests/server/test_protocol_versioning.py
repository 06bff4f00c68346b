"""What peers of any age may rely on: unknown things pass, errors have statuses and names, a missing route is a quick 404."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgpack
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
    CHUNKS,
    HEARTBEAT,
    INVOCATIONS,
    MSGPACK,
    POLL,
    PURGE,
    QUEUES,
    REAP,
    RELEASE,
    RETRY,
    SUBMIT,
    SUBMIT_MANY,
    pack,
    serving_here,
    stream_of,
)

import dreamlake.lakeshore as dls
from dreamlake.lakeshore import wire
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.protocol.routes import ROUTES
from dreamlake.lakeshore.server.tokens import TokenFile, create_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from raw_kit import Api

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue

POSTS = [
    SUBMIT, SUBMIT_MANY, AWAIT, AWAIT_MANY, CANCEL, POLL, ACK, ACK_MANY, CHUNK, CHUNKS, HEARTBEAT, RELEASE, RETRY, REAP,
    PURGE,
]  # fmt: skip
GETS = [INVOCATIONS, f"{INVOCATIONS}/x", QUEUES, stream_of("x")]


# --- versions --------------------------------------------------------------------------------------------------------


async def test_an_envelope_of_any_version_passes_and_only_its_reader_refuses_it(api: Api, queue: str) -> None:
    """The one version integer is inside the Envelope, which is bytes here; a reader says what to upgrade."""
    later = wire.pack({"v": 99, "id": "x", "fn": {"kind": "later"}, "new": 1})
    await api.submit(queue, later)
    blob = (await api.claim(queue))["args_blob"]
    assert blob == later
    with pytest.raises(dls.WireError, match="upgrade dreamlake-lakeshore"):
        wire.Envelope.from_bytes(blob)


async def test_unknown_ext_codes_and_cfg_keys_pass_untouched(api: Api, queue: str) -> None:
    value = {"a": msgpack.ExtType(99, b"later"), "b": [msgpack.ExtType(77, b"")]}
    envelope = wire.Envelope(
        "x", {"kind": "ref"}, wire.pack([value]), wire.pack({}), cfg={"code": {"commit": "c"}, "later": {"er": 1}}
    ).to_bytes()
    id = await api.submit(queue, envelope)
    blob = (await api.claim(queue))["args_blob"]
    assert blob == envelope
    read = wire.Envelope.from_bytes(blob)
    assert read.cfg == {"code": {"commit": "c"}, "later": {"er": 1}}
    assert wire.unpack(read.args) == [value]
    await api.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": wire.pack(value)})
    assert wire.unpack((await api.outcome(id))["result_blob"]) == value


LATER = {"later": {"than": [1, b"\xff"]}, "v": 99, "": None}


async def test_every_route_ignores_fields_that_it_does_not_know(api: Api, queue: str) -> None:
    id, fence = await api.running(queue, lease_s=60), {"worker_id": "w", "attempt": 1}
    bodies: dict[str, dict[str, Any]] = {
        SUBMIT: {"invocation_id": id, "args_blob": b"x", "queue": queue},
        SUBMIT_MANY: {"items": [{"invocation_id": id, "args_blob": b"x", **LATER}]},
        AWAIT: {"invocation_id": id, "timeout_s": 0},
        AWAIT_MANY: {"items": [{"invocation_id": id, **LATER}], "timeout_s": 0},
        POLL: {"worker_id": "w", "queue": queue, "timeout_s": 0},
        HEARTBEAT: {"worker_id": "w", "claims": [[id, 1]]},
        CHUNK: {"invocation_id": id, "seq": 0, "bytes": b"f", **fence},
        CHUNKS: {"items": [{"invocation_id": id, "seq": 1, "bytes": b"g", **fence, **LATER}]},
        ACK: {"invocation_id": id, "state": "succeeded", **fence},
        ACK_MANY: {"items": [{"invocation_id": id, "state": "succeeded", **fence, **LATER}]},
        CANCEL: {"invocation_id": id},
        RELEASE: {"worker_id": "w", "claims": []},
        RETRY: {"worker_id": "w", "claims": [], "delay_s": 0},
        REAP: {},
        PURGE: {"older_than_s": 1e9},
    }
    assert set(bodies) == set(POSTS)
    for path, fields in bodies.items():
        answers = await api.ask(path, fields), await api.ask(path, fields | LATER)
        assert [answer.status for answer in answers] == [200, 200], (path, answers)
    for path in (INVOCATIONS, f"{INVOCATIONS}/{id}", QUEUES):
        plain, more = await api.get(path), await api.get(path, later="1")
        assert {**more, "ages": 0} == {**plain, "ages": 0}, path  # ages grow
    assert await api.frames(id, later="1") == b"fg"


async def test_every_route_of_the_protocol_is_served(api: Api) -> None:
    for name, route in ROUTES.items():
        answer = await api.send(route.method, "/v1" + route.path.replace(":id", new_id()), pack({}))
        if answer.status == 404:
            assert answer.error == (404, "InvocationNotFound"), name
        assert answer.status in (200, 400, 404), (name, answer)


# --- namespaces ------------------------------------------------------------------------------------------------------


async def test_the_namespaced_routes_are_the_same_and_what_is_in_them_is_apart(api: Api, queue: str) -> None:
    """Ids, keys and queues of one namespace are unknown in another."""
    a, b = api.within("ns-a"), api.within("ns-b")
    id = new_id()
    for space, blob in ((a, b"a"), (b, b"b"), (api, b"default")):
        assert await space.submit(queue, blob, id=id, run_config={"key": "k"}) == id
    other = await a.submit(queue)
    assert (await api.send("GET", f"{INVOCATIONS}/{other}")).error == (404, "InvocationNotFound")
    assert (await b.ask(CANCEL, {"invocation_id": other})).error == (404, "InvocationNotFound")
    for space, blob in ((b, b"b"), (api, b"default"), (a, b"a")):
        body = await space.claim(queue)
        assert (body["invocation_id"], body["args_blob"]) == (id, blob)
        await space.do(CHUNK, {"invocation_id": id, "seq": 0, "bytes": blob})
        await space.do(ACK, {"invocation_id": id, "state": "succeeded", "result_blob": blob})
    for space, blob in ((a, b"a"), (b, b"b"), (api, b"default")):
        assert (await space.outcome(id))["result_blob"] == blob
        assert await space.frames(id) == blob
        counts = {(q, s): n for q, s, n in (await space.get(QUEUES, queue=queue))["queues"]}
        assert counts.get((queue, "succeeded")) == 1


async def test_the_default_namespace_may_be_named(api: Api, queue: str) -> None:
    id = await api.within("default").submit(queue)
    assert (await api.claim(queue))["invocation_id"] == id


async def test_a_namespace_is_percent_quoted_in_the_path(api: Api, queue: str) -> None:
    id = await api.within("my%20space").submit(queue)
    assert (await api.within("my%20space").claim(queue))["invocation_id"] == id
    assert await api.poll(queue) == []


# --- errors ----------------------------------------------------------------------------------------------------------


async def test_side_routes_of_peers_are_quick_404s_of_another_name(api: Api) -> None:
    """A peer asks for these before each submit, in JSON, and goes on after a 404."""
    asked = [
        ("GET", "/v1/namespaces/default/code-repos/lookup?remote=x"),
        ("POST", "/v1/namespaces/default/storages/code-staging/presign"),
        ("POST", "/v1/namespaces/default/code-repos"),
    ]
    for method, path in asked:
        answer = await api.send(method, path, b"{}", {"content-type": "application/json"})
        assert answer.error == (404, "NoSuchRoute"), path


@each_row(
    "path",
    [
        "/", "/v1", "/v1/", "/v2/producer/submit", "/v1/producer", "/v1/producer/submit/", "/v1/producer/Submit",
        "/v1//producer/submit", "/producer/submit", "/v1/namespaces/default",
        "/v1/namespaces/a/b/producer/submit", "/v1/producer/invocations/x/result", "/v1/admin", "/docs", "/openapi.json",
        "/v1/producer/invocations/a/b/result/stream", "/v1/daemon/poll/x", "/metrics/", "/v1/topics",
    ],
)  # fmt: skip
@each_row("method", ["GET", "POST"])
async def test_a_route_that_is_not_there_is_a_404_that_is_not_about_an_invocation(
    api: Api, path: str, method: str
) -> None:
    answer = await api.send(method, path, pack({"invocation_id": "a"}))
    assert answer.error == (404, "NoSuchRoute")


@each_row("path", [*POSTS, *GETS])
async def test_another_method_is_a_405(api: Api, path: str) -> None:
    right = "POST" if path in POSTS else "GET"
    for method in {"GET", "POST", "PUT", "DELETE", "PATCH"} - {right}:
        answer = await api.send(method, path, pack({}))
        assert answer.error[0] == 405, method
        assert answer.headers["allow"] == right


async def test_a_missing_invocation_is_a_404_of_that_name_on_every_route_that_names_one(api: Api) -> None:
    id, fence = new_id(), {"worker_id": "w", "attempt": 1}
    asked: list[Any] = [
        await api.ask(AWAIT, {"invocation_id": id, "timeout_s": 0}),
        await api.ask(CANCEL, {"invocation_id": id}),
        await api.ask(ACK, {"invocation_id": id, "state": "succeeded", **fence}),
        await api.ask(CHUNK, {"invocation_id": id, "seq": 0, "bytes": b"f", **fence}),
        await api.send("GET", f"{INVOCATIONS}/{id}"),
        await api.send("GET", stream_of(id)),
    ]
    for answer in asked:
        assert answer.error == (404, "InvocationNotFound")
        assert answer.fields["error"]["id"] == id


async def test_an_id_in_the_path_that_is_none_is_a_400(api: Api) -> None:
    for odd in ("a.b", "a%20b", "%2e%2e", "a" * 65, "%00", "é"):
        for path in (f"{INVOCATIONS}/{odd}", stream_of(odd)):
            answer = await api.send("GET", path)
            assert answer.error == (400, "WireError"), path


@pytest.mark.parametrize(
    "kind",
    ["", "application/json", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     "application/octet-stream", "application/x-msgpack-stream"],
)  # fmt: skip
async def test_a_post_of_another_content_type_is_a_415(api: Api, queue: str, kind: str) -> None:
    body = pack({"invocation_id": new_id(), "queue": queue, "args_blob": b"x"})
    for path in POSTS:
        answer = await api.send("POST", path, body, {"content-type": kind})
        assert answer.error[0] == 415, (path, answer)
        assert "application/x-msgpack" in answer.message
    assert (await api.get(QUEUES, queue=queue))["queues"] == []


async def test_a_content_type_may_carry_parameters(api: Api, queue: str) -> None:
    body = pack({"invocation_id": new_id(), "queue": queue, "args_blob": b"x"})
    answer = await api.send("POST", SUBMIT, body, {"content-type": "Application/X-Msgpack; charset=binary"})
    assert answer.status == 200


async def test_errors_are_msgpack_with_a_type_and_a_sentence(api: Api, queue: str) -> None:
    answer = await api.ask(SUBMIT, {"invocation_id": "../../x", "args_blob": b"", "queue": queue})
    assert (answer.status, answer.type) == (400, MSGPACK)
    assert answer.message.startswith("expected an invocation id of 1 to 64 letters")


async def test_a_request_id_is_echoed_or_made(api: Api) -> None:
    answer = await api.send("GET", QUEUES, headers={"x-request-id": "mine-7_X"})
    assert answer.headers["x-request-id"] == "mine-7_X"
    made = set()
    for odd in (None, "", "a b", "x" * 65, "a\tb", 'a"b'):
        answer = await api.send("GET", QUEUES, headers={} if odd is None else {"x-request-id": odd})
        assert answer.headers["x-request-id"] not in ("", odd)
        made.add(answer.headers["x-request-id"])
    assert len(made) == 6
    answer = await api.send("GET", "/v1/none", headers={"x-request-id": "mine"})
    assert answer.headers["x-request-id"] == "mine"


# --- for people and tools --------------------------------------------------------------------------------------------


async def test_invocations_are_listed_newest_first_by_what_is_asked(api: Api, queue: str) -> None:
    ids = [await api.submit(queue, run_config={"key": f"k{n}"}) for n in range(3)]
    await api.claim(queue)
    assert [row["id"] for row in (await api.get(INVOCATIONS, queue=queue))["invocations"]] == ids[::-1]
    assert [row["id"] for row in (await api.get(INVOCATIONS, queue=queue, state="running"))["invocations"]] == ids[:1]
    assert [row["id"] for row in (await api.get(INVOCATIONS, queue=queue, key="k1"))["invocations"]] == [ids[1]]
    assert [row["id"] for row in (await api.get(INVOCATIONS, queue=queue, limit=2))["invocations"]] == ids[:0:-1]
    assert [row["id"] for row in (await api.get(INVOCATIONS, id=ids[0]))["invocations"]] == [ids[0]]
    assert (await api.get(INVOCATIONS, id=new_id()))["invocations"] == []


async def test_an_envelope_is_shown_only_where_it_is_asked_for(api: Api, queue: str) -> None:
    id = await api.submit(queue, raw_kit.NO_MSGPACK)
    assert (await api.row(id))["body"] is None
    assert (await api.get(f"{INVOCATIONS}/{id}", body="1"))["body"] == raw_kit.NO_MSGPACK
    (row,) = (await api.get(INVOCATIONS, id=id, body="1"))["invocations"]
    assert row["body"] == raw_kit.NO_MSGPACK


async def test_queues_are_counted_by_state_with_the_age_of_their_oldest(api: Api, queue: str) -> None:
    await api.submit(queue)
    await api.running("busy-" + queue)
    answer = await api.get(QUEUES)
    rows = {(name, state): count for name, state, count in answer["queues"]}
    assert (rows[queue, "queued"], rows["busy-" + queue, "running"]) == (1, 1)
    assert 0 <= answer["ages"][queue] < 60
    assert "busy-" + queue not in answer["ages"]
    assert (await api.get(QUEUES, state="failed", queue=queue))["queues"] == []


@pytest.mark.parametrize("query", ["", "?body=1"])
async def test_people_may_ask_for_json(api: Api, queue: str, query: str) -> None:
    id = await api.submit(queue, raw_kit.NO_MSGPACK, run_config={"key": "é"})
    for path, name in ((INVOCATIONS, "invocations"), (f"{INVOCATIONS}/{id}", "id"), (QUEUES, "queues")):
        answer = await api.send("GET", path + query, headers={"accept": "application/json"})
        assert (answer.status, answer.type) == (200, "application/json"), answer
        assert name in json.loads(answer.body)
    answer = await api.send("GET", f"{INVOCATIONS}/{new_id()}", headers={"accept": "application/json"})
    assert (answer.status, json.loads(answer.body)["error"]["type"]) == (404, "InvocationNotFound")


# --- tokens ----------------------------------------------------------------------------------------------------------


class Doors:
    """A server with tokens, and an Api for each."""

    def __init__(self, api: Api, path: Path) -> None:
        self.open = api
        self.tokens = {
            f"{role}@{ns}": create_token(path, f"{role}@{ns}", role, ns)
            for ns in ("default", "other")
            for role in ("producer", "worker", "admin")
        }

    def __getitem__(self, name: str) -> Api:
        return self.open.with_token(self.tokens[name])


@pytest.fixture
async def doors(tmp_path: Path) -> AsyncIterator[Doors]:
    path = tmp_path / "tokens"
    create_token(path, "first", "admin", "default")
    async with serving_here(dls.Dispatch(tmp_path / "plane.db"), tokens=TokenFile(path)) as api:
        yield Doors(api, path)


NEEDS = {path: "producer" if "/producer/" in path else "admin" if "/admin/" in path else "worker" for path in POSTS}
MAY = {"producer": {"producer"}, "worker": {"producer", "worker"}, "admin": {"producer", "worker", "admin"}}


async def test_without_a_token_or_with_a_wrong_one_every_route_is_a_401(doors: Doors, queue: str) -> None:
    right = doors.tokens["admin@default"]
    odd = [None, "", right[:-1], right + "x", right.upper(), "lks_", "é", right + " " + right]
    for path in POSTS:
        for token in odd:
            headers: Any = {} if token is None else {"authorization": f"Bearer {token}".encode()}
            answer = await doors.open.send("POST", path, pack({}), headers)
            assert answer.error[0] == 401, (path, token)
    for path in GETS:
        assert (await doors.open.send("GET", path)).error[0] == 401, path
    for scheme in ("Basic", "Token", ""):
        answer = await doors.open.send("GET", QUEUES, headers={"authorization": f"{scheme} {right}".strip()})
        assert answer.error[0] == 401, scheme
    assert (await doors["admin@default"].get(QUEUES))["queues"] == []


async def test_a_role_that_is_not_enough_is_a_403_and_nothing_happens(doors: Doors, queue: str) -> None:
    id = await doors["producer@default"].submit(queue)
    for path, needed in NEEDS.items():
        for role, may in MAY.items():
            answer = await doors[f"{role}@default"].ask(
                path, {"older_than_s": 1e9} if path == PURGE else {"timeout_s": 0}
            )
            if needed in may:
                assert answer.status in (200, 400), (path, role, answer)
            else:
                assert answer.error == (403, "NotAuthorized"), (path, role)
                assert f"of the role {needed}" in answer.message
    assert (await doors["producer@default"].row(id))["state"] == "queued"


async def test_another_namespace_than_the_tokens_is_a_403_and_its_own_may_be_named(doors: Doors, queue: str) -> None:
    id = await doors["worker@other"].submit(queue)
    assert (await doors["worker@other"].within("other").row(id))["queue"] == queue
    assert (await doors["worker@default"].send("GET", f"{INVOCATIONS}/{id}")).error == (404, "InvocationNotFound")
    for path in POSTS:
        answer = await doors["admin@default"].within("other").ask(path, {})
        assert answer.error == (403, "NotAuthorized"), path
    for path in GETS:
        assert (await doors["admin@default"].within("other").send("GET", path)).status == 403, path
    assert (await doors["worker@default"].poll(queue)) == []
    assert (await doors["worker@other"].claim(queue))["invocation_id"] == id


async def test_only_the_two_health_routes_are_open_and_metrics_are_an_admins(doors: Doors) -> None:
    for path in ("/healthz", "/readyz"):
        assert (await doors.open.send("GET", path)).status == 200
    assert (await doors.open.send("GET", "/metrics")).error[0] == 401
    assert (await doors["worker@default"].send("GET", "/metrics")).error[0] == 403
    answer = await doors["admin@default"].send("GET", "/metrics")
    assert (answer.status, b"lakeshore_" in answer.body) == (200, True)
