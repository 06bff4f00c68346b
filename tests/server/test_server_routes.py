"""What every request goes through: where it leads, who may send it, its body, its answer, and what is noted of it."""

from __future__ import annotations

import json
import logging
import re
import tracemalloc
from typing import TYPE_CHECKING, Any

import anyio
import httpx
import matrix
import pytest
import server_kit
from helpers import each_row, wait_until
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_kit import PATIENCE, Asked, Client, client_of, served
from starlette.applications import Starlette
from starlette.routing import Mount

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import PlaneUnavailable
from dreamlake.lakeshore.limits import MAX_HOLD_TIME, MAX_ITEMS_PER_REQUEST, MAX_REQUEST_BYTES
from dreamlake.lakeshore.planes.contract.operations import Fence
from dreamlake.lakeshore.planes.contract.records import RowFilter
from dreamlake.lakeshore.planes.protocol.fields import decode, encode
from dreamlake.lakeshore.planes.protocol.routes import CONTENT_TYPE, ROUTES
from dreamlake.lakeshore.server.app import create_app
from dreamlake.lakeshore.server.limits import Limits
from dreamlake.lakeshore.server.requests import find
from dreamlake.lakeshore.server.routes import HANDLERS, HELD_ROUTES
from dreamlake.lakeshore.server.tokens import ROLES, TokenFile, create_token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

plane, client = server_kit.plane, server_kit.client

SUBMIT, SUBMIT_MANY, POLL = "/v1/producer/submit", "/v1/producer/submit-many", "/v1/daemon/poll"
INVOCATIONS, QUEUES = "/v1/producer/invocations", "/v1/producer/queues"
NOTHING = {"items": list[Any]()}
CANCEL = "/v1/producer/cancel"  # of nothing: what a test asks that cares for nothing else


def submit_of(id: str, queue: str = "q", **more: Any) -> dict[str, Any]:
    return {"invocation_id": id, "queue": queue, "args_blob": b"x", **more}


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[dls.Dispatch]:
    """A plane in a file, where it does not matter which."""
    async with dls.Dispatch(tmp_path / "here.db") as plane:
        yield plane


# --- where a path leads -----------------------------------------------------------------------------------------------


def test_every_route_of_the_protocol_leads_to_a_handler_with_and_without_a_namespace() -> None:
    for name, route in ROUTES.items():
        id = "an-id" if ":id" in route.path else ""
        for ns, prefix in ((None, "/v1"), ("ns 1", "/v1/namespaces/ns 1")):
            target, found_ns, found_id = find(prefix + route.path.replace(":id", "an-id"))
            assert target is not None
            assert (target.name, target.method, target.role) == (name, route.method, route.role)
            assert target.label == f"/v1{route.path}"
            assert (found_ns, found_id) == (ns, id)
    assert {*ROUTES} == {*HANDLERS, "stream"}
    assert {*ROUTES} > HELD_ROUTES


@each_row(
    "path",
    [
        "", "/", "/v1", "/v1/", "/v2/producer/submit", "/v1/producer/submit/", "/producer/submit", "//v1/producer/submit",
        "/v1/namespaces", "/v1/namespaces/", "/v1/namespaces/ns", "/v1/namespaces/a/b/producer/submit",
        "/v1/producer/invocations/", "/v1/producer/invocations//result/stream", "/v1/producer/invocations/result/stream",
        "/v1/producer/invocations/../../x", "/v1/producer/invocations/a/b", "/v1/producer/invocations/a/b/result/stream",
        "/v1/daemon/code-repos", "/v1/storages/presign",
    ],
)  # fmt: skip
async def test_what_is_no_route_is_quickly_a_404_of_another_name(here: dls.Dispatch, path: str) -> None:
    assert find(path)[0] is None
    for fields in (None, NOTHING):
        answer = await ask(here, path, fields)
        assert answer.error == (404, "NoSuchRoute", f"no route {path!r} on this server")


async def ask(plane: Any, path: str, fields: Any = None, /, *, app: Any = None, **headers: str) -> server_kit.Answer:
    """One request to an application over the plane, whatever comes of it."""
    request = Asked(app or create_app(plane), path, fields, **headers)
    with anyio.fail_after(PATIENCE):
        await request.run()
    return await request.answer()


async def test_another_method_is_a_405_that_names_the_right_one(client: Client) -> None:
    answer = await client.get(SUBMIT)
    assert answer.error == (405, "NoSuchMethod", f"expected the method POST for {SUBMIT}")
    assert answer.headers["allow"] == "POST"
    answer = await client.post(QUEUES)
    assert answer.error == (405, "NoSuchMethod", f"expected the method GET for {QUEUES}")
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"):
        assert (await client.http.request(method, SUBMIT)).status_code == 405


@each_row("id", ["a.b", "a b", "%", "ä", "x" * 65, "..", "a\x00b", "a\nb"])
async def test_an_id_in_a_path_that_is_none_is_a_400_that_says_so(here: dls.Dispatch, id: str) -> None:
    for path in (f"{INVOCATIONS}/{id}", f"{INVOCATIONS}/{id}/result/stream"):
        status, kind, message = (await ask(here, path)).error
        assert (status, kind) == (400, "WireError")
        assert message.startswith("expected an invocation id of 1 to 64 letters, digits, '_' or '-', got ")


async def test_a_websocket_is_closed(here: dls.Dispatch) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    await create_app(here)({"type": "websocket", "path": SUBMIT}, receive, send)
    assert [message["type"] for message in sent] == ["websocket.close"]


async def test_the_application_may_be_mounted_below_another_and_take_middleware(here: dls.Dispatch) -> None:
    app = create_app(here)

    class Counting:
        count = 0

        def __init__(self, app: Any) -> None:
            self.app = app

        async def __call__(self, *args: Any) -> None:
            Counting.count += 1
            await self.app(*args)

    app.add_middleware(Counting)
    async with client_of(Starlette(routes=[Mount("/below", app)])) as client:
        assert (await client.do(f"/below{SUBMIT}", submit_of("a")))["invocation_id"] == "a"
        assert (await client.post(SUBMIT, submit_of("a"))).status == 404
    assert Counting.count == 1


# --- browsers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", ["http://evil.example", "http://127.0.0.1:8750", "null", ""])
async def test_R112_a_request_from_a_page_in_a_browser_is_refused_whatever_it_asks(client: Client, origin: str) -> None:
    sentence = "expected a request without an Origin header, got one: this server accepts no requests from web pages"
    assert (await client.post(SUBMIT, submit_of("a"), origin=origin)).error == (403, "Refused", sentence)
    assert (await client.get(INVOCATIONS, origin=origin)).error == (403, "Refused", sentence)
    assert (await client.get("/metrics", origin=origin)).error == (403, "Refused", sentence)
    assert (await client.get(INVOCATIONS)).fields == {"invocations": []}


@pytest.mark.parametrize(
    "kind", ["", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
)
async def test_R112_a_body_of_another_type_is_a_415_and_changes_nothing(client: Client, kind: str) -> None:
    answer = await client.post(SUBMIT, submit_of("a"), content_type=kind)
    assert answer.error == (415, "Refused", f"expected the content type application/x-msgpack, got {kind!r}")
    assert (await client.get(INVOCATIONS)).fields == {"invocations": []}


@pytest.mark.parametrize("kind", [CONTENT_TYPE, "Application/X-Msgpack", f"{CONTENT_TYPE}; charset=binary"])
async def test_the_content_type_may_be_spelled_in_every_way(client: Client, kind: str) -> None:
    assert (await client.post(SUBMIT, submit_of("a"), content_type=kind)).status == 200


@each_row(
    "host",
    [
        "evil.example",
        "evil.example:8750",
        "127.0.0.1.evil.example",
        "[::1].evil.example",
        "[::1]x:1",
        "localhost:1:2",
        "localhost.",
        "",
        "[::2]",
        "::2",
    ],
)
async def test_R112_a_foreign_host_is_refused(client: Client, host: str) -> None:
    status, kind, message = (await client.post(SUBMIT, submit_of("a"), host=host)).error
    assert (status, kind) == (403, "Refused")
    name = {"[::2]": "::2", "evil.example:8750": "evil.example"}.get(host, host)
    assert message == (
        f"expected a Host header that names this server, got {name!r}: "
        "start the server with --allowed-host for each further name that clients use"
    )
    assert (await client.get(INVOCATIONS)).fields == {"invocations": []}


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:1", "127.0.0.1", "127.0.0.1:8750", "[::1]:8750", "[::1]", "::1"]
)
async def test_the_names_of_loopback_are_allowed(here: dls.Dispatch, host: str) -> None:
    async with client_of(create_app(here), "http://10.0.0.7:1") as client:
        assert (await client.post(CANCEL, NOTHING, host=host)).status == 200
        assert (await client.post(CANCEL, NOTHING)).status == 200, "so is the address that the connection came to"


async def test_hosts_that_are_allowed_by_name_are_checked_with_and_without_tokens(
    here: dls.Dispatch, tmp_path: Path
) -> None:
    token = create_token(tmp_path / "tokens", "t", "admin", "default")
    tokens = TokenFile(tmp_path / "tokens")
    named = {"authorization": f"Bearer {token}"}
    cases = [
        (
            create_app(here, allowed_hosts=["Lake.example"]),
            {"lake.example": 200, "other.example": 403, "localhost": 200},
        ),
        (
            create_app(here, tokens=tokens, allowed_hosts=["lake.example"]),
            {"lake.example": 200, "other.example": 403, "localhost": 200},
        ),
        (create_app(here, tokens=tokens), {"lake.example": 200, "other.example": 200}),
    ]
    for app, hosts in cases:
        async with client_of(app, **named) as client:
            for host, status in hosts.items():
                assert (await client.post(CANCEL, NOTHING, host=host)).status == status, host


# --- tokens and namespaces --------------------------------------------------------------------------------------------


class Tokens:
    """A token of each role for the namespace `ours`, and the plane's own namespace is another."""

    def __init__(self, path: Path) -> None:
        self.of = {role: create_token(path, role, role, "ours") for role in ROLES}
        self.file = TokenFile(path)


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    return Tokens(tmp_path / "tokens")


def body_of(name: str) -> dict[str, Any] | None:
    """What the route takes at least, to answer without a wait."""
    if ROUTES[name].method == "GET":
        return None
    return {
        "invocation_id": "none", "worker_id": "w", "args_blob": b"", "state": "killed", "seq": 0, "bytes": b"",
        "timeout_s": 0, "items": [], "claims": [],
    }  # fmt: skip


@pytest.mark.parametrize("name", ROUTES)
async def test_every_route_wants_a_token_of_its_role(here: dls.Dispatch, tokens: Tokens, name: str) -> None:
    route, app = ROUTES[name], create_app(here, tokens=tokens.file)
    path = f"/v1{route.path}".replace(":id", "none")
    for header, said in {
        "": "none",
        "Bearer wrong": "one that is not known here",
        "Basic x": "one that is not known here",
        f"Bearer {tokens.of['admin']}x": "one that is not known here",
    }.items():
        answer = await ask(here, path, body_of(name), app=app, **({"authorization": header} if header else {}))
        sentence = f"expected a token, `Authorization: Bearer ...`, got {said}"
        assert answer.error == (401, "NotAuthorized", sentence)
        assert answer.headers["www-authenticate"] == "Bearer"
    for role in ROLES:
        answer = await ask(here, path, body_of(name), app=app, authorization=f"Bearer {tokens.of[role]}")
        if ROLES.index(role) < ROLES.index(route.role):
            sentence = f"expected a token of the role {route.role}, got one of the role {role}"
            assert answer.error == (403, "NotAuthorized", sentence)
        else:
            assert answer.status in (200, 404), answer
    await app.endpoint.close()


async def test_a_request_that_is_refused_is_not_read(here: dls.Dispatch, tokens: Tokens) -> None:
    request = Asked(create_app(here, tokens=tokens.file), SUBMIT, submit_of("a"))
    await request.run()
    assert (await request.answer()).status == 401
    assert len(request.pieces) == 1


async def test_a_token_leads_to_its_namespace_with_and_without_one_in_the_path(
    here: dls.Dispatch, tokens: Tokens
) -> None:
    app = create_app(here, tokens=tokens.file)
    async with (
        app.router.lifespan_context(app),
        client_of(app, authorization=f"Bearer {tokens.of['worker']}") as client,
    ):
        await client.do(SUBMIT, submit_of("a"))
        await client.do("/v1/namespaces/ours/producer/submit", submit_of("b"))
        found = (await client.get(INVOCATIONS)).fields["invocations"]
        assert [row["id"] for row in found] == ["b", "a"]
        for other in ("default", "theirs", "OURS"):
            answer = await client.post(f"/v1/namespaces/{other}/producer/submit", submit_of("c"))
            sentence = f"expected the namespace of the token, 'ours', got {other!r}"
            assert answer.error == (403, "NotAuthorized", sentence)
        assert app.endpoint._other_planes.keys() == {"ours"}
    assert await here.rows(RowFilter()) == []


async def test_namespaces_share_no_rows_keys_queues_polls_or_watches(plane: dls.Dispatch) -> None:
    app = create_app(plane)
    async with app.router.lifespan_context(app), client_of(app) as client:
        names = ("default", "one", "two 2", "ä")
        for name in names:
            fields = submit_of("a", run_config={"key": "k"}, args_blob=name.encode())
            assert await client.do(f"/v1/namespaces/{name}/producer/submit", fields) == {
                "invocation_id": "a",
                "queue": "q",
            }
        for name in names:
            prefix = f"/v1/namespaces/{name}"
            fields = {"worker_id": "w", "queue": "q", "poll_id": "p", "timeout_s": 0}
            (command,) = (await client.do(f"{prefix}/daemon/poll", fields))["commands"]
            assert command["body"]["args_blob"] == name.encode()
            (row,) = (await client.get(f"{prefix}/producer/invocations")).fields["invocations"]
            assert (row["id"], row["state"]) == ("a", "running")
            counts = (await client.get(f"{prefix}/producer/queues")).fields["queues"]
            assert counts == [["q", "running", 1]]
        assert (await client.do(SUBMIT, submit_of("b", run_config={"key": "k"})))["invocation_id"] == "a"


async def test_no_more_namespaces_are_served_than_the_limit(here: dls.Dispatch) -> None:
    app = create_app(here, limits=Limits(namespaces=2))
    async with app.router.lifespan_context(app), client_of(app) as client:
        for name in ("one", "two", "default", "one"):
            assert (await client.post(f"/v1/namespaces/{name}/producer/cancel", NOTHING)).status == 200
        answer = await client.post("/v1/namespaces/three/producer/cancel", NOTHING)
        sentence = "expected one of the 2 namespaces in use, the server's maximum, got 'three'"
        assert answer.error == (403, "Refused", sentence)
        assert (await client.post(CANCEL, NOTHING)).status == 200


@pytest.mark.parametrize("name", ["", "x" * 201, "a\nb", "\x7f"])
async def test_what_is_no_name_of_a_namespace_is_a_400(here: dls.Dispatch, name: str) -> None:
    answer = await ask(here, f"/v1/namespaces/{name}/producer/cancel", NOTHING)
    sentence = f"expected a namespace of 1 to 200 printable characters, got {name[:80]!r}"
    assert answer.error == (400, "WireError", sentence)


# --- bodies -----------------------------------------------------------------------------------------------------------


async def test_a_body_may_come_in_pieces(here: dls.Dispatch) -> None:
    body = encode(submit_of("a", args_blob=bytes(1000)))
    for pieces in ([body, b""], [b"", body], [bytes([byte]) for byte in body], [body[:500], b"", body[500:]]):
        assert (await ask(here, SUBMIT, pieces)).fields == {"invocation_id": "a", "queue": "q"}


async def test_a_body_that_is_announced_larger_than_the_limit_is_a_413_before_it_is_read(here: dls.Dispatch) -> None:
    request = Asked(create_app(here, limits=Limits(body=1000)), SUBMIT, [b"x"] * 3, content_length="1001")
    await request.run()
    answer = await request.answer()
    sentence = "expected a body of at most 1000 bytes, got a larger one: send less in one request"
    assert answer.error == (413, "TooLarge", sentence)
    assert len(request.pieces) == 3


@pytest.mark.parametrize("announced", [{}, {"transfer_encoding": "chunked"}])
async def test_a_body_that_grows_larger_than_the_limit_is_a_413_once_it_does(
    here: dls.Dispatch, announced: dict[str, str]
) -> None:
    app = create_app(here, limits=Limits(body=1000, linger=0.05))
    assert (await ask(here, SUBMIT, [b"\x80", b""], app=app, **announced)).status == 400
    answer = await ask(here, SUBMIT, [bytes(400)] * 4, app=app, **announced)
    assert answer.error[:2] == (413, "TooLarge")
    assert answer.headers.get("connection") == ("close" if announced else None)
    assert app.endpoint.service.body_bytes == 0
    assert (await ask(here, SUBMIT, submit_of("a"), app=app)).status == 200


async def test_a_sender_of_too_much_is_told_so_and_not_cut_off(tmp_path: Path) -> None:
    """Closing the connection while it sends would take the answer away, and it would send the same again and again."""
    with served(lambda: dls.Dispatch(tmp_path / "plane.db"), limits=Limits(body=1 << 20)) as server:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(200):
                yield bytes(100_000)

        async with server.client() as client:
            for body in (bytes(20 << 20), pieces()):
                answer = await client.post(SUBMIT, body)
                assert answer.error[:2] == (413, "TooLarge")
                assert answer.headers["connection"] == "close"
            assert (await client.post(SUBMIT, submit_of("a"))).status == 200


async def test_a_refusal_of_a_small_body_leaves_the_connection_open(tmp_path: Path) -> None:
    with served(lambda: dls.Dispatch(tmp_path / "plane.db")) as server:
        async with await server.connect("POST /v1/none", encode({}), content_length="1") as connection:
            for _ in range(3):
                with anyio.fail_after(PATIENCE):
                    found = await connection.receive()
                assert found.startswith(b"HTTP/1.1 404 ")
                assert b"connection: close" not in found.lower()
                head = f"POST /v1/none HTTP/1.1\r\nhost: {server.url[7:]}\r\ncontent-length: 1\r\n\r\n"
                await connection.send(head.encode() + encode({}))


async def test_a_body_that_does_not_come_is_a_408_and_one_that_comes_slowly_is_read(tmp_path: Path) -> None:
    body = encode(submit_of("a"))
    with served(lambda: dls.Dispatch(tmp_path / "plane.db"), limits=Limits(body_timeout=0.3)) as server:
        async with await server.connect(f"POST {SUBMIT}", body[:5], content_length=str(len(body))) as connection:
            found = await _all(connection)
        head, _, said = found.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        assert b"connection: close" in head
        error = decode(said, "a test")["error"]
        sentence = "expected the rest of the body within 0.3 s, got 5 bytes of it: send it again"
        assert (error["type"], error["message"]) == ("PlaneUnavailable", sentence)
    with served(lambda: dls.Dispatch(tmp_path / "plane.db"), limits=Limits(body_timeout=4.0)) as server:
        async with await server.connect(
            f"POST {SUBMIT}", content_length=str(len(body)), connection="close"
        ) as connection:
            for byte in body[:4]:
                await anyio.sleep(1.1)
                await connection.send(bytes([byte]))
            await connection.send(body[4:])
            assert (await _all(connection)).startswith(b"HTTP/1.1 200 ")


async def _all(connection: Any) -> bytes:
    """What comes until the far side closes."""
    found = b""
    with anyio.fail_after(PATIENCE):
        while True:
            try:
                found += await connection.receive()
            except anyio.EndOfStream:
                return found


async def test_a_client_that_leaves_in_the_middle_of_its_body_does_nothing(here: dls.Dispatch) -> None:
    body = encode(submit_of("a"))
    request = Asked(create_app(here), SUBMIT, [body[:10], body[10:]])
    receive = request.receive

    async def cut() -> dict[str, Any]:
        if len(request.pieces) == 1:
            request.leave()
            request.pieces.clear()
        message: dict[str, Any] = await receive()
        return message

    request.receiving = cut
    await request.run()
    assert not request.chunks
    assert await here.rows(RowFilter()) == []


async def test_no_more_bytes_of_bodies_are_read_at_the_same_time_than_the_limit(here: dls.Dispatch) -> None:
    app = create_app(here, limits=Limits(bodies=10_000))
    body = encode(submit_of("a", args_blob=bytes(8000)))
    first = Asked(app, SUBMIT, [body[:7000], body[7000:]])
    receive, go = first.receive, anyio.Event()

    async def slowly() -> dict[str, Any]:
        if len(first.pieces) == 1:
            await go.wait()
        message: dict[str, Any] = await receive()
        return message

    first.receiving = slowly
    async with anyio.create_task_group() as group:
        group.start_soon(first.run)
        await wait_until(lambda: app.endpoint.service.body_bytes == 7000, description="the first piece")
        answer = await ask(here, SUBMIT, [body[:7000], body[7000:]], app=app)
        sentence = "the server already reads bodies of 10000 bytes, its maximum: retry later"
        assert answer.error == (503, "PlaneUnavailable", sentence)
        assert (await ask(here, SUBMIT, submit_of("b"), app=app)).status == 200, "small ones are read all the same"
        go.set()
    assert (await first.answer()).status == 200
    assert app.endpoint.service.body_bytes == 0


@each_row(
    "body",
    [
        b"\xc1",
        b"\x91\x01",
        b"\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x81" * 10_000,
        b"\x91" * 10_000,
        b"\x80\x80",
        b"\x81\x90\x01",
    ],
)
async def test_R50_bytes_that_are_no_map_are_a_400_that_says_where(client: Client, body: bytes) -> None:
    status, kind, message = (await client.post(SUBMIT, body)).error
    assert (status, kind) == (400, "WireError")
    assert message.startswith(f"expected a msgpack map as the body of {SUBMIT}, got ")


# --- answers ----------------------------------------------------------------------------------------------------------


async def test_a_request_keeps_the_id_that_it_came_with_and_gets_one_where_that_is_none(client: Client) -> None:
    found = await client.post(SUBMIT, submit_of("a"), x_request_id="My-id_1")
    assert found.headers["x-request-id"] == "My-id_1"
    made = set[str]()
    for id in ("", "x" * 65, "a b", "a\tb", "ä"):
        headers = httpx.Headers({"content-type": CONTENT_TYPE, "x-request-id": id}, encoding="utf-8")
        answer = await client.http.post(CANCEL, content=encode(NOTHING), headers=headers)
        made.add(answer.headers["x-request-id"])
    assert len(made) == 5
    assert all(re.fullmatch("[0-9a-f]{8}-[0-9a-f]+", id) for id in made)


async def test_what_nobody_expected_is_a_500_with_the_requests_id_and_a_traceback_in_the_log_only(
    here: dls.Dispatch, monkeypatch: Any, caplog: Any
) -> None:
    async def fail(*args: Any) -> Any:
        raise RuntimeError("a secret of the server")

    monkeypatch.setattr(here, "do", fail)
    monkeypatch.setattr(here, "many", fail)
    for path, fields in ((SUBMIT, submit_of("a")), (SUBMIT_MANY, {"items": [submit_of("a")]})):
        caplog.clear()
        answer = await ask(here, path, fields, x_request_id="this-one")
        assert answer.error == (500, "ServerError", "the server failed with RuntimeError; see its log")
        assert b"secret" not in answer.body
        (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
        assert record.getMessage() == f"request this-one to {path} failed: RuntimeError"
        assert record.exc_info[1].args == ("a secret of the server",)


async def test_an_item_that_nobody_expected_to_fail_fails_alone(
    here: dls.Dispatch, monkeypatch: Any, caplog: Any
) -> None:
    async def answers(ops: Any) -> list[Any]:
        return ["a", RuntimeError("a secret of the server"), PlaneUnavailable("locked")]

    monkeypatch.setattr(here, "many", answers)
    answer = await ask(here, SUBMIT_MANY, {"items": [submit_of(id) for id in "abc"]})
    first, second, third = answer.fields["results"]
    assert first == {"invocation_id": "a", "queue": "q"}
    assert second == {"error": {"type": "ServerError", "message": "the server failed with RuntimeError; see its log"}}
    assert third == {"error": {"type": "PlaneUnavailable", "message": "locked"}}
    (record,) = caplog.records
    assert record.exc_info[1].args == ("a secret of the server",)


async def test_a_plane_out_of_reach_is_a_503(here: dls.Dispatch, monkeypatch: Any, caplog: Any) -> None:
    async def fail(*args: Any) -> Any:
        raise PlaneUnavailable("the disk is full")

    monkeypatch.setattr(here, "do", fail)
    answer = await ask(here, SUBMIT, submit_of("a"))
    assert answer.error == (503, "PlaneUnavailable", "the disk is full")
    assert caplog.records == []


async def test_for_people_the_lists_come_as_json(client: Client) -> None:
    await client.do(SUBMIT, submit_of("a", queue="ä"))
    rows = await client.get(INVOCATIONS, {"body": "1"}, accept="application/json, */*")
    assert rows.headers["content-type"] == "application/json"
    (row,) = json.loads(rows.body)["invocations"]
    assert (row["id"], row["queue"], row["body"]) == ("a", "ä", None)
    assert json.loads((await client.get(f"{INVOCATIONS}/a", accept="application/json")).body)["id"] == "a"
    counts = json.loads((await client.get(QUEUES, accept="application/json")).body)
    assert counts["queues"] == [["ä", "queued", 1]]
    assert counts["ages"]["ä"] >= 0
    error = await client.get(f"{INVOCATIONS}/none", accept="application/json")
    assert (error.status, json.loads(error.body)["error"]["type"]) == (404, "InvocationNotFound")


# --- lists ------------------------------------------------------------------------------------------------------------


async def test_invocations_are_listed_by_every_filter_newest_first(client: Client) -> None:
    await client.do(SUBMIT, submit_of("a", run_config={"key": "k"}))
    await client.do(SUBMIT, submit_of("b", parent_invocation_id="a", args_blob=b"bytes"))
    await client.do(SUBMIT, submit_of("c", queue="other"))
    await client.do(CANCEL, {"invocation_id": "c"})
    queries: list[tuple[dict[str, Any], str]] = [
        ({}, "cba"),
        ({"queue": "q"}, "ba"),
        ({"state": "killed"}, "c"),
        ({"key": "k"}, "a"),
        ({"root": "a"}, "b"),
        ({"id": "b"}, "b"),
        ({"limit": 2}, "cb"),
        ({"queue": "none"}, ""),
        ({"state": "none"}, ""),
        ({"unknown": "x"}, "cba"),
    ]
    for query, ids in queries:
        found = (await client.get(INVOCATIONS, query)).fields["invocations"]
        assert "".join(row["id"] for row in found) == ids, query
    (row,) = (await client.get(INVOCATIONS, {"id": "b"})).fields["invocations"]
    assert (row["body"], row["trusted"], row["parent"], row["root"]) == (None, False, "a", "a")
    (row,) = (await client.get(INVOCATIONS, {"id": "b", "body": 1})).fields["invocations"]
    assert row["body"] == b"bytes"
    assert (await client.get(f"{INVOCATIONS}/b", {"body": 1})).fields == row
    assert (await client.get(f"{INVOCATIONS}/none")).error[:2] == (404, "InvocationNotFound")
    assert (await client.get(QUEUES, {"queue": "q"})).fields["queues"] == [["q", "queued", 2]]
    assert (await client.get(QUEUES, {"state": "killed"})).fields["queues"] == [["other", "killed", 1]]


@each_row(
    "query, sentence",
    [
        ("limit=0", f"expected `limit` from 1 to {MAX_ITEMS_PER_REQUEST}, got 0"),
        (
            f"limit={MAX_ITEMS_PER_REQUEST + 1}",
            f"expected `limit` from 1 to {MAX_ITEMS_PER_REQUEST}, got {MAX_ITEMS_PER_REQUEST + 1}",
        ),
        ("limit=x", "expected `limit` to be a whole number, got 'x'"),
        ("limit=", "expected `limit` to be a whole number, got ''"),
        ("limit=1.5", "expected `limit` to be a whole number, got '1.5'"),
        ("limit=%D9%A3", "expected `limit` to be a whole number, got '٣'"),
        (f"limit={'9' * 5000}", f"expected `limit` to be a whole number, got '{'9' * 40}'"),
        ("queue=%ff", "expected a query of at most 50 fields, percent-encoded UTF-8"),
        ("&".join(["a=b"] * 51), "expected a query of at most 50 fields, percent-encoded UTF-8"),
    ],
)
async def test_a_query_that_cannot_be_meant_is_a_400_that_says_so(
    here: dls.Dispatch, query: str, sentence: str
) -> None:
    assert (await ask(here, f"{INVOCATIONS}?{query}")).error == (400, "WireError", sentence)


async def test_a_bad_id_in_a_query_is_a_400_and_a_since_far_away_is_the_end(client: Client) -> None:
    assert (await client.get(INVOCATIONS, {"id": "../x"})).error[:2] == (400, "WireError")
    await client.do(SUBMIT, submit_of("a"))
    await client.do(CANCEL, {"invocation_id": "a"})
    stream = f"{INVOCATIONS}/a/result/stream"
    whole = (await client.get(stream)).body
    assert whole
    assert (await client.get(stream, {"since": -(10**18)})).body == whole
    assert (await client.get(stream, {"since": 10**19 - 1})).body == b""
    assert (await client.get(f"{INVOCATIONS}/none/result/stream")).error[:2] == (404, "InvocationNotFound")
    assert (await client.get(stream, {"since": "x"})).error[:2] == (400, "WireError")


# --- batches ----------------------------------------------------------------------------------------------------------


async def test_one_bad_item_of_any_batch_spoils_no_other(client: Client, plane: dls.Dispatch) -> None:
    ids = "abcdefgh"
    await client.do(SUBMIT_MANY, {"items": [submit_of(id) for id in ids]})
    fields = {"worker_id": "w", "queue": "q", "lease_s": 60.0, "max_commands": 8, "timeout_s": 0}
    assert len((await client.do(POLL, fields))["commands"]) == 8

    def claim(id: Any, **more: Any) -> dict[str, Any]:
        return {"invocation_id": id, "worker_id": "w", "attempt": 1, **more}

    batches: dict[str, dict[str, Any]] = {
        "/v1/daemon/result-chunks": {"seq": 0, "bytes": b"frame"},
        "/v1/daemon/ack-many": {"state": "succeeded", "result_blob": b"r"},
        "/v1/daemon/release": {},
        "/v1/daemon/retry": {"delay_s": 0.0, "error": {"type": "E", "message": "m"}},
        "/v1/producer/cancel": {},
    }
    for (path, more), good in zip(batches.items(), ("ab", "ab", "cd", "ef", "gh"), strict=True):
        bad = ["../x", 7, None, "none"]
        items = [claim(good[0], **more), *(claim(id, **more) for id in bad), {}, claim(good[1], **more)]
        results = (await client.do(path, {"items": items}))["results"]
        kinds = [result.get("error", {}).get("type") for result in results]
        assert kinds == [None, "WireError", "WireError", "WireError", "InvocationNotFound", "WireError", None], path
        assert len(results) == len(items)
    states = {row.id: (row.state, row.failures, row.cancel_requested) for row in await plane.rows(RowFilter())}
    ended, back, failed = ("succeeded", 0, False), ("queued", 0, False), ("queued", 1, False)
    asked = ("running", 0, True)
    assert states == dict(zip(ids, [ended, ended, back, back, failed, failed, asked, asked], strict=True))


async def test_claims_are_given_back_by_pairs_too(client: Client, plane: dls.Dispatch) -> None:
    for id in "ab":
        await client.do(SUBMIT, submit_of(id))
    fields = {"worker_id": "w", "queue": "q", "lease_s": 60.0, "max_commands": 2, "timeout_s": 0}
    await client.do(POLL, fields)
    released = await client.do("/v1/daemon/release", {"worker_id": "w", "claims": [["a", 1], ["a", 9], ["none", 1]]})
    assert [result.get("state") or result["error"]["type"] for result in released["results"]] == [
        "queued", "ClaimLost", "InvocationNotFound",
    ]  # fmt: skip
    retried = await client.do(
        "/v1/daemon/retry", {"worker_id": "w", "claims": [["b", 1]], "delay_s": 1000, "error": "m"}
    )
    assert retried == {"results": [{"state": "queued", "queue": "q", "delayed": True}]}
    (row,) = await plane.rows(RowFilter(id="b"))
    assert (row.failures, row.not_before is not None) == (1, True)


async def test_a_batch_has_at_most_so_many_items(client: Client) -> None:
    answer = await client.post(CANCEL, {"items": [{}] * (MAX_ITEMS_PER_REQUEST + 1)})
    most = MAX_ITEMS_PER_REQUEST
    sentence = f"expected at most {most} `items` in one request, got {most + 1}: send several"
    assert answer.error == (400, "WireError", sentence)


async def test_reaping_and_purging_are_told_by_what_they_did(tmp_path: Path) -> None:
    now = 1e9
    async with dls.Dispatch(tmp_path / "plane.db", clock=lambda: now) as plane, client_of(create_app(plane)) as client:
        await client.do(SUBMIT, submit_of("a"))
        await plane.claim(["q"], "w", lease=10.0, local=False)
        assert await client.do("/v1/admin/reap", {}) == {"rows": [], "due": []}
        now += 11
        assert await client.do("/v1/admin/reap", {}) == {"rows": [["a", "q", "queued"]], "due": []}
        await client.do(CANCEL, {"invocation_id": "a"})
        assert await client.do("/v1/admin/purge", {"older_than_s": 1000}) == {"count": 0}
        now += 1001
        assert await client.do("/v1/admin/purge", {"older_than_s": 1000}) == {"count": 1}


# --- what is noted ----------------------------------------------------------------------------------------------------


async def test_each_request_is_one_line_of_the_log_without_what_is_secret(
    here: dls.Dispatch, tokens: Tokens, caplog: Any
) -> None:
    app = create_app(here, tokens=tokens.file)
    key, blob, worker = "the-key", b"the-argument", "the-worker"
    with caplog.at_level(logging.DEBUG):
        async with (
            app.router.lifespan_context(app),
            client_of(app, authorization=f"Bearer {tokens.of['worker']}") as client,
        ):
            fields = submit_of("the-invocation", args_blob=blob, run_config={"key": key})
            await client.post(SUBMIT, fields, x_request_id="r1")
            await client.get(f"{INVOCATIONS}/the-invocation", {"key": key}, x_request_id="r2")
            await client.post(
                "/v1/namespaces/ours/daemon/poll", {"worker_id": worker, "timeout_s": 0.05}, x_request_id="r3"
            )
            await client.post("/v1/the-unknown", x_request_id="r4")
            await client.post(SUBMIT, fields, x_request_id="r5", authorization="Bearer the-wrong-token")
            await client.post(SUBMIT, fields | {"invocation_id": "the-bad id"}, x_request_id="r6")
            await client.get("/healthz", x_request_id="r7")
    lines = [record.getMessage() for record in caplog.records if record.name == "dreamlake.lakeshore.server"]
    assert [re.sub(r"\d+\.\d{4} s", "T s", line) for line in lines] == [
        "POST /v1/producer/submit 200 T s id=r1 ns=ours",
        "GET /v1/producer/invocations/:id 200 T s id=r2 ns=ours",
        "POST /v1/daemon/poll 200 T s id=r3 ns=ours",
        "POST unknown 404 T s id=r4 ns=-",
        "POST /v1/producer/submit 401 T s id=r5 ns=-",
        "POST /v1/producer/submit 400 T s id=r6 ns=ours",
        "GET /healthz 200 T s id=r7 ns=-",
    ]
    held = float(lines[2].split()[3])
    assert held >= 0.05
    ours = "\n".join(record.getMessage() for record in caplog.records if record.name.startswith("dreamlake"))
    for secret in (*tokens.of.values(), key, "the-argument", worker, "the-wrong-token", "the-unknown", "the-bad"):
        assert secret not in ours


async def test_a_request_whose_client_left_is_noted_when_it_ends(here: dls.Dispatch, caplog: Any) -> None:
    app = create_app(here)
    request = Asked(app, POLL, {"worker_id": "w", "timeout_s": PATIENCE})
    with caplog.at_level(logging.INFO, "dreamlake.lakeshore.server"):
        async with anyio.create_task_group() as group:
            group.start_soon(request.run)
            await wait_until(lambda: len(app.endpoint.service.polls) == 1, description="the poll")
            assert caplog.records == []
            request.leave()
    (record,) = caplog.records
    assert record.getMessage().startswith("POST /v1/daemon/poll 499 ")


async def test_the_metrics_count_requests_claims_and_readers(here: dls.Dispatch, tokens: Tokens) -> None:
    app = create_app(here)
    async with client_of(app) as client:
        await client.do(SUBMIT, submit_of("a"))
        await client.do(POLL, {"worker_id": "w", "queue": "q", "timeout_s": 0})
        await client.do(POLL, {"worker_id": "w", "queue": "q", "timeout_s": 0})
        await client.post("/v1/none")
        text = (await client.get("/metrics")).body.decode()
    for line in (
        'lakeshore_request_seconds_count{method="POST",route="submit",status="200"} 1.0',
        'lakeshore_request_seconds_count{method="POST",route="poll",status="200"} 2.0',
        'lakeshore_request_seconds_count{method="POST",route="(other)",status="404"} 1.0',
        "lakeshore_claim_seconds_count 1.0",
        "lakeshore_stream_readers 0.0",
        'lakeshore_invocations{queue="q",state="running"} 1.0',
    ):
        assert line in text.splitlines()
    closed = create_app(here, tokens=tokens.file)
    async with closed.router.lifespan_context(closed), client_of(closed) as client:
        assert (await client.get("/metrics")).error[:2] == (401, "NotAuthorized")
        assert (await client.get("/metrics", authorization=f"Bearer {tokens.of['worker']}")).error[0] == 403
        answer = await client.get("/metrics", authorization=f"Bearer {tokens.of['admin']}")
        assert answer.status == 200
        assert b'queue="q"' not in answer.body, "the queues are those of the token's namespace"


async def test_health_and_readiness_are_open_to_everybody(here: dls.Dispatch, tokens: Tokens, monkeypatch: Any) -> None:
    patient, app = (
        create_app(here, tokens=tokens.file, allowed_hosts=["lake.example"], limits=Limits(readiness=seconds))
        for seconds in (PATIENCE, 0.05)
    )
    async with client_of(patient) as with_time, client_of(app) as without:

        async def both(client: Client = without) -> list[tuple[int, bytes]]:
            answers = [await client.get(path, host="10.0.0.1") for path in ("/healthz", "/readyz")]
            return [(answer.status, answer.body) for answer in answers]

        assert await both(with_time) == [(200, b"ok\n"), (200, b"ready\n")]

        async def fail(*args: Any) -> Any:
            raise PlaneUnavailable("the disk is full")

        async def hang(*args: Any) -> Any:
            await anyio.sleep_forever()

        for broken in (fail, hang):
            with monkeypatch.context() as patch:
                patch.setattr(here, "current_outcomes", broken)
                assert await both() == [(200, b"ok\n"), (503, b"not ready\n")]
        patient.drain()
        assert await both(with_time) == [(200, b"ok\n"), (503, b"not ready\n")]


def test_the_limits_are_those_of_the_protocol() -> None:
    assert Limits().body == MAX_REQUEST_BYTES
    assert Limits().held == MAX_HOLD_TIME


# --- what nobody means ------------------------------------------------------------------------------------------------

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8) | st.binary(max_size=8)
    | st.sampled_from(["a", "none", "q", "w", "succeeded", "../../x", b"", {"seq": 0, "bytes": b"x"}, [["a", 1]]]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
FIELDS = [
    "invocation_id", "queue", "queues", "args_blob", "run_config", "function", "code_context", "config",
    "parent_invocation_id", "worker_id", "poll_id", "lease_s", "max_commands", "max_lost", "claims", "known",
    "state", "result_blob", "error", "attempt", "final_frame", "seq", "bytes", "frames", "final", "delay_s", "items",
    "streams", "watch", "linger_s", "older_than_s", "dead", "alive", "counted",
]  # fmt: skip
POSTS = [name for name, route in ROUTES.items() if route.method == "POST"]


@settings(
    max_examples=matrix.examples(150),
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    name=st.sampled_from(POSTS),
    fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6),
    usual=st.booleans(),
    in_items=st.booleans(),
)
async def test_fields_of_any_type_and_value_are_answered_by_name(
    here: dls.Dispatch, name: str, fields: dict[str, Any], usual: bool, in_items: bool
) -> None:
    """Nothing that a client can say is a failure of the server; and what comes out of a poll can be said."""
    if usual:
        fields = {
            "invocation_id": "a",
            "worker_id": "w",
            "args_blob": b"",
            "state": "killed",
            "seq": 0,
            "bytes": b"",
        } | fields
    if in_items:
        fields = {"items": [fields], "streams": [fields], "worker_id": "w"}
    try:
        body = encode(fields | {"timeout_s": 0, "wait_s": 0})
    except ValueError:  # half a character
        return
    answer = await ask(here, f"/v1{ROUTES[name].path}", body)
    assert answer.status in (200, 400, 404, 409), answer
    if answer.status != 200:
        assert answer.error[1] in ("WireError", "ValueError", "InvocationNotFound", "ClaimLost")
    poll = {"worker_id": "reader", "queues": ["q", "default"], "max_commands": 10, "timeout_s": 0}
    assert (await ask(here, POLL, poll)).status == 200


async def test_what_is_nested_as_deep_as_a_body_may_be_comes_out_of_a_poll_or_was_refused(here: dls.Dispatch) -> None:
    """A row whose claim could not be said would be claimed, and given back, for ever, before all others of its queue."""
    app, refused = create_app(here), 0
    for depth in range(1000, 1024):
        deep = b"\x81\xa4deep" + b"\x91" * depth + b"\x01"
        fields = submit_of(f"a{depth}", run_config=None)
        for body in (
            encode(fields).replace(b"run_config\xc0", b"run_config" + deep),
            encode(fields | {"config": b"\x81\xaarun_config" + deep}),
        ):
            answer = await ask(here, SUBMIT, body, app=app)
            assert answer.status in (200, 400)
            refused += answer.status == 400
            poll = {"worker_id": "w", "queue": "q", "timeout_s": 0, "lease_s": 60.0}
            found = await ask(here, POLL, poll, app=app)
            assert (found.status, len(found.fields["commands"])) == (200, answer.status == 200), depth
            if answer.status == 200:
                await here.finish(Fence(f"a{depth}", "w", 1), "succeeded")
                await here.purge(0)
    assert 0 < refused < 48


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/daemon/ack", {"invocation_id": "a", "state": "failed", "error": "DEEP"}),
        ("/v1/daemon/ack", {"invocation_id": "a", "state": "failed", "error": {"type": "DEEP"}}),
        ("/v1/producer/await", {"invocation_id": "a", "timeout_s": "DEEP"}),
        ("/v1/daemon/heartbeat", {"worker_id": "w", "claims": ["DEEP"]}),
        ("/v1/daemon/poll", {"worker_id": "w", "queues": ["DEEP"]}),
        ("/v1/admin/reap", {"dead": ["DEEP"]}),
    ],
)
async def test_a_value_too_deep_to_be_shown_is_a_400_alone_and_in_a_batch(
    here: dls.Dispatch, path: str, fields: dict[str, Any]
) -> None:
    body = encode(fields).replace(b"\xa4DEEP", b"\x91" * 1000 + b"\x01")
    answer = await ask(here, path, body)
    assert (answer.status, answer.error[1]) in ((400, "WireError"), (404, "InvocationNotFound")), answer
    if path == "/v1/daemon/ack":
        good = {"invocation_id": "none", "state": "killed"}
        body = encode({"items": [fields, good]}).replace(b"\xa4DEEP", b"\x91" * 1000 + b"\x01")
        results = (await ask(here, "/v1/daemon/ack-many", body)).fields["results"]
        assert results[1]["error"]["type"] == "InvocationNotFound"
        assert results[0]["error"]["type"] in ("WireError", "InvocationNotFound")


@pytest.mark.slow
async def test_R50_a_body_of_very_many_small_values_is_refused_and_takes_little_memory(here: dls.Dispatch) -> None:
    app = create_app(here)
    count = 20 << 20
    for item in (b"\x80", b"\x90", b"\x01", b"\xa0"):
        for head in (b"\x81\xa5items\xdd" + count.to_bytes(4, "big"), b"\x81\xa5items\xdd\x00\x01\x00\x00"):
            tracemalloc.start()
            answer = await ask(here, CANCEL, head + item * count, app=app)
            _, most = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert answer.error[:2] == (400, "WireError")
            assert most < 150 << 20, (item, most)
    many = b"\x81\xa5items\xdc\x00\x20" + 32 * (b"\xdd\x00\x01\x00\x00" + b"\x80" * 65536)
    status, kind, message = (await ask(here, CANCEL, many, app=app)).error
    assert (status, kind) == (400, "WireError")
    sentence = (
        f"expected a msgpack map as the body of {CANCEL}, got {len(many)} bytes: ValueError: more than 1000000 values"
    )
    assert message == sentence


async def test_large_bodies_of_what_is_usual_are_read(client: Client, plane: dls.Dispatch) -> None:
    items = [submit_of(f"a{number}", args_blob=bytes(100)) for number in range(MAX_ITEMS_PER_REQUEST)]
    results = (await client.do(SUBMIT_MANY, {"items": items}))["results"]
    assert len(results) == MAX_ITEMS_PER_REQUEST
    assert {tuple(result) for result in results} == {("invocation_id", "queue")}
    await client.do(SUBMIT, submit_of("large", queue="l", args_blob=bytes(20 << 20)))
    await client.do(POLL, {"worker_id": "w", "queue": "l", "timeout_s": 0})
    frames = {"invocation_id": "large", "worker_id": "w", "seq": 0, "frames": [b"frame"] * 50_000}
    assert (await client.do("/v1/daemon/result-chunk", frames))["written"] == 50_000
