"""What comes from no server of ours, or not for us: proxies' errors, others' answers, and answers of another shape."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgpack
import pytest
from helpers import each_row, quiet, wait_until
from http_kit import requests_of, scripted

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Claim, Fence, Finish, Submit
from dreamlake.lakeshore.planes.http import older_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from http_kit import Seen

pytestmark = pytest.mark.anyio

MSGPACK = {"content-type": "application/x-msgpack"}
HTML = (404, {"content-type": "text/html"}, b"<html>default backend</html>")
Answer: TypeAlias = tuple[int, dict[str, str], bytes]


def good(fields: dict[str, Any], **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return 200, MSGPACK | named, msgpack.packb(fields)


def fields_of(seen: Seen) -> dict[str, Any]:
    return dict(msgpack.unpackb(seen.body))


def submitted(seen: Seen, **headers: str) -> Answer:
    """What a server says to submits of either kind."""
    fields = fields_of(seen)
    if "items" not in fields:
        return good({"invocation_id": fields["invocation_id"]}, **headers)
    return good({"results": [{"invocation_id": one["invocation_id"]} for one in fields["items"]]}, **headers)


def paths(seen: list[Seen]) -> list[str]:
    return [one.path.rpartition("/")[2] for one in seen]


@asynccontextmanager
async def raw(answer: Callable[[str], list[bytes | anyio.Event]]) -> AsyncIterator[str]:
    """A server that sends the pieces that `answer` gives for a request's head, waiting for events between; its URL."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            data = b""
            while True:
                while b"\r\n\r\n" not in data:
                    data += await stream.receive()
                head, _, data = data.partition(b"\r\n\r\n")
                text = head.decode().lower()
                size = int(text.partition("content-length: ")[2].split("\r\n")[0])
                while len(data) < size:
                    data += await stream.receive()
                data = data[size:]
                for piece in answer(text):
                    await (piece.wait() if isinstance(piece, anyio.Event) else stream.send(piece))

    async def forgiving(stream: anyio.abc.SocketStream) -> None:
        try:
            await serve(stream)
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            pass

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, forgiving)
        yield f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"
        group.cancel_scope.cancel()


def framed(fields: dict[str, Any], *headers: bytes) -> bytes:
    body: bytes = msgpack.packb(fields)
    return b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"content-length: %d" % len(body), b"", body])


# Missing routes ------------------------------------------------------------------------------------------------------


async def test_a_404_of_a_proxy_does_not_take_a_route_away_that_has_answered() -> None:
    answers = iter([None, HTML, HTML, None, None])
    with scripted(lambda seen: next(answers) or submitted(seen)) as server:
        async with dls.HttpDispatch(server.url) as plane:
            for _ in range(3):
                await plane.submit("q", b"x")
        assert paths(server.seen) == ["submit-many"] * 5


async def test_a_404_of_the_server_s_own_takes_it_away() -> None:
    own = 404, MSGPACK, msgpack.packb({"error": {"type": "NoSuchRoute", "message": "no route"}})
    answers = iter([None, own, None, None])
    with scripted(lambda seen: next(answers) or submitted(seen)) as server:
        async with dls.HttpDispatch(server.url) as plane:
            for _ in range(3):
                await plane.submit("q", b"x")
        assert paths(server.seen) == ["submit-many", "submit-many", "submit", "submit"]


async def test_a_missing_route_is_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_server, "RECHECK_INTERVAL", 0.2)
    answers = iter([HTML])
    with scripted(lambda seen: next(answers, None) or submitted(seen)) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with anyio.fail_after(20):
                while paths(server.seen).count("submit-many") < 2:
                    await plane.submit("q", b"x")
            await plane.submit("q", b"x")
        assert paths(server.seen)[:2] == ["submit-many", "submit"]
        assert paths(server.seen)[-2:] == ["submit-many", "submit-many"]


async def test_waits_go_back_to_the_common_poll_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_server, "RECHECK_INTERVAL", 0.2)
    back = threading.Event()

    def script(seen: Seen) -> Answer:
        if seen.path.endswith("/await"):
            back.set()
            time.sleep(0.02)
            return good({"state": "pending"})
        return good({"results": [["i1", {"state": "succeeded", "result_blob": b"r"}]]}) if back.is_set() else HTML

    with scripted(script) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with anyio.fail_after(20):
                assert (await plane.outcome("i1")).result == b"r"


@pytest.mark.timing("the first frame must come in time after the server's delay")
async def test_a_look_at_a_journal_waits_for_a_server_that_is_slow_to_begin() -> None:
    frame = b"\x94\x00\x00\x01\xc0"

    def script(seen: Seen) -> Answer:
        if seen.method == "POST":
            return good({"state": "pending"}) if seen.path.endswith("/await") else HTML
        time.sleep(2 * older_server.READ_TIMEOUT)
        return 200, {"content-type": "application/x-msgpack-stream"}, frame

    with scripted(script) as server:
        async with dls.HttpDispatch(server.url) as plane:
            assert (await plane.page("i1")).frames == [(0, frame)]


# Errors of the whole request -----------------------------------------------------------------------------------------


@each_row("status", [408, 425, 429, 500, 502, 503, 504, 520, 524, 599])
@each_row("body", [b"<html>error</html>", b"", msgpack.packb({"error": {"type": "ServerError"}})])
async def test_what_may_go_better_later_is_asked_again(status: int, body: bytes) -> None:
    answers = iter([(status, MSGPACK, body)])
    with scripted(lambda seen: next(answers, None) or submitted(seen)) as server:
        async with dls.HttpDispatch(server.url) as plane:
            assert await plane.submit("q", b"x", id="i1") == "i1"
        assert paths(server.seen) == ["submit-many"] * 2


async def test_the_server_s_own_refusal_of_a_request_or_an_item_stands() -> None:
    error = {"error": {"type": "DispatchError", "message": "not today"}}
    with scripted(lambda seen: (500, MSGPACK, msgpack.packb(error))) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(dls.DispatchError, match="not today"):
                await plane.submit("q", b"x")
        assert len(server.seen) == 1
    failed = {"results": [{"error": {"type": "ServerError", "message": "the server failed with KeyError"}}]}
    with scripted(lambda seen: good(failed)) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(dls.DispatchError, match="failed with KeyError") as caught:
                await plane.submit("q", b"x")
        assert not isinstance(caught.value, dls.PlaneUnavailable)
        assert len(server.seen) == 1


async def test_an_answer_without_a_body_is_none() -> None:
    with scripted(lambda seen: (204, {}, b"")) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(dls.DispatchError, match="expected an answer with a body to POST /producer/submit-many"):
                await plane.submit("q", b"x")


# Answers to others ---------------------------------------------------------------------------------------------------


async def test_an_answer_that_names_another_request_is_not_believed() -> None:
    other = iter([new_id(), new_id()])
    with scripted(lambda seen: submitted(seen, x_request_id=next(other, seen.headers["x-request-id"]))) as server:
        async with dls.HttpDispatch(server.url) as plane:
            plane.patience = 0.0
            with pytest.raises(
                dls.PlaneUnavailable, match=r"expected the answer to request .{26}, got that to request"
            ):
                await plane.submit("q", b"x")
            plane.patience = 30.0
            assert await plane.submit("q", b"x", id="i1") == "i1"
        assert len(server.seen) == 3


async def test_a_proxy_s_own_request_ids_are_nobody_s_business() -> None:
    with scripted(lambda seen: submitted(seen, x_request_id="7f0c2f5e-5a8e-4a52-8c0e-0d9be2b8a0f1")) as server:
        async with dls.HttpDispatch(server.url) as plane:
            assert await plane.submit("q", b"x", id="i1") == "i1"
        assert len(server.seen) == 1


async def test_what_lies_on_an_idle_connection_is_no_answer() -> None:
    go, told = anyio.Event(), anyio.Event()
    asked = 0

    def answer(head: str) -> list[bytes | anyio.Event]:
        nonlocal asked
        asked += 1
        if asked == 1:
            again = framed({"results": [{"invocation_id": "first"}]})
            told_soon: list[bytes | anyio.Event] = [again, go, again]
            return told_soon
        told.set()
        return [framed({"results": [{"invocation_id": "second"}]})]

    async with raw(answer) as url, dls.HttpDispatch(url) as plane:
        assert await plane.submit("q", b"x", key="a") == "first"
        go.set()
        await anyio.wait_all_tasks_blocked()
        assert await plane.submit("q", b"x", key="b") == "second"
    assert told.is_set()


async def test_a_submit_without_a_key_has_no_other_s_id() -> None:
    results = {"results": [{"invocation_id": "i1"}, {"invocation_id": "i7"}, {"invocation_id": "i7"}]}
    with scripted(lambda seen: good(results)) as server:
        async with dls.HttpDispatch(server.url) as plane:
            submits = [Submit("i1", "q", b"x"), Submit("i2", "q", b"x"), Submit("i3", "q", b"x", "a-key")]
            first, second, third = await plane.many(submits)
    assert (first, third) == ("i1", "i7")
    assert isinstance(second, dls.DispatchError)
    assert str(second) == "expected the answer to the submit of 'i2', got that to the submit of 'i7'"


# Answers of another shape --------------------------------------------------------------------------------------------

INF = float("inf")


@each_row(
    "item",
    [{"frames": [[INF, b""]]}, {"frames": [[0, 10**9]]}, {"frames": [[True, b""]]}, {"frames": 7}, {"frames": [7]}, 5],
    ids=repr,
)
async def test_a_page_of_another_shape_is_an_error(item: Any) -> None:
    def script(seen: Seen) -> Answer:
        asked = fields_of(seen)["streams"]
        return good({"pages": [[one["invocation_id"], one["since"], item] for one in asked]})

    with scripted(script) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(dls.DispatchError, match="expected an answer of the protocol to await_many"):
                with anyio.fail_after(20):
                    await plane.next_page("i1", -1)


@each_row(
    "results",
    [[[[1], {"state": "failed"}]], [["i1", {"state": "succeeded", "result_blob": 5}]], 5, [["i1"]], [["i1", 7]]],
    ids=repr,
)
async def test_an_outcome_of_another_shape_is_an_error(results: Any) -> None:
    with scripted(lambda seen: good({"results": results})) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(dls.DispatchError, match="expected an answer of the protocol to await_many"):
                with anyio.fail_after(20):
                    await plane.outcome("i1")


@pytest.mark.parametrize("whole", [True, False])
async def test_an_odd_error_of_the_server_reaches_who_waits(whole: bool) -> None:
    error = {"error": {"type": "ValueError", "message": "no such thing"}}
    answer = (400, MSGPACK, msgpack.packb(error)) if whole else good({"results": [["i1", error]]})
    with scripted(lambda seen: answer) as server:
        async with dls.HttpDispatch(server.url) as plane:
            with pytest.raises(ValueError if whole else dls.DispatchError, match="no such thing"):
                with anyio.fail_after(20):
                    await plane.outcome("i1")


@pytest.mark.parametrize("fields", [{}, {"results": [["another", {"state": "failed"}]]}], ids=repr)
async def test_a_server_that_holds_nothing_is_not_asked_in_a_circle(fields: dict[str, Any]) -> None:
    async with raw(lambda head: [framed(fields)]) as url, dls.HttpDispatch(url) as plane:
        async with anyio.create_task_group() as group:
            group.start_soon(plane.outcome, "i1")
            await wait_until(lambda: requests_of(plane) >= 2, description="that it asks again")
            await quiet(lambda: requests_of(plane), 0.6, most=20, description="no circle")
            group.cancel_scope.cancel()
        before = requests_of(plane)
        with anyio.move_on_after(0.6):
            await plane.outcome("i1")
        assert requests_of(plane) - before <= 20
        before = requests_of(plane)
        assert await plane.claim(["q"], "w", timeout=0.6) == []
        assert requests_of(plane) - before <= 20
        before = requests_of(plane)
        with anyio.move_on_after(0.6):
            while True:
                assert await plane.next_cancels("w", 10.0) == []
        assert requests_of(plane) - before <= 20


async def test_commands_that_cannot_be_run_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    body = {"invocation_id": "i1", "args_blob": b"x", "attempt": 2}
    wrong = [
        {"invocation_id": "../x"},
        {"invocation_id": 7},
        {"args_blob": "text"},
        {"args_blob": 10**9},
        {"attempt": INF},
        {"lost": -1},
        {"next_seq": 2**63},
        {"run_config": [1]},
        {"queue": 5},
        {"config": "text"},
    ]
    commands = [{"kind": "run", "body": body | one} for one in wrong]
    commands += [7, {"kind": "run"}, {"kind": "run", "body": [1]}]  # type: ignore[list-item]
    commands += [{"kind": "run", "body": body}] * 2 + [{"kind": "run", "body": body | {"attempt": 3}}]
    with scripted(lambda seen: good({"commands": commands})) as server, caplog.at_level(logging.WARNING):
        async with dls.HttpDispatch(server.url) as plane:
            claims = await plane.do(Claim(("q",), "w", 5))
    assert [(one.id, one.attempt, one.body, one.queue) for one in claims] == [
        ("i1", 2, b"x", "q"),
        ("i1", 3, b"x", "q"),
    ]
    (record,) = caplog.records
    assert record.getMessage().startswith("a poll brought 13 commands that cannot be run; the first: expected an invoc")


# Large and small -----------------------------------------------------------------------------------------------------


async def test_a_small_result_does_not_wait_behind_a_large_one() -> None:
    small_came, waited = threading.Event(), list[bool]()

    def script(seen: Seen) -> Answer:
        if len(seen.body) < 1 << 20:
            small_came.set()
        else:
            waited.append(small_came.wait(20))
        return good({"results": [{"ok": True}]})

    with scripted(script) as server:
        async with dls.HttpDispatch(server.url) as plane, anyio.create_task_group() as group:
            group.start_soon(plane.do, Finish(Fence("i1", "w", 1), "succeeded", b"x" * (2 << 20)))
            await anyio.wait_all_tasks_blocked()
            group.start_soon(plane.do, Finish(Fence("i2", "w", 1), "succeeded", b"x"))
    assert waited == [True]


async def test_small_outcomes_and_large_ones_come_in_answers_of_their_own() -> None:
    large = {f"i{n}" for n in range(0, 8, 2)}
    async with dls.Dispatch(":memory:") as plane:
        ids = [await plane.submit("q", b"x", id=f"i{n}") for n in range(8)]
        for one in await plane.claim(["q"], "w", limit=8):
            result = b"r" * ((2 << 20) if one.id in large else 10)
            await plane.finish(Fence(one.id, "w", one.attempt), "succeeded", result=result)
        left, answers = set(ids), list[set[str]]()
        while left:
            found = await plane.await_many(sorted(left), [], timeout=5.0)
            answers.append({outcome.id for outcome in found.outcomes})
            left -= answers[-1]
            assert found.more == bool(left)
        assert sorted(map(sorted, answers)) == [["i0", "i2", "i4", "i6"], ["i1", "i3", "i5", "i7"]]
