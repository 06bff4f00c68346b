"""uvicorn as the server runs it: the bounds of a connection, and every way in which serving ends.

uvicorn knows asyncio only, so these tests do too.
"""

from __future__ import annotations

import logging
import re
import socket
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
from helpers import run_python, wait_until

from dreamlake.lakeshore.errors import DispatchError
from dreamlake.lakeshore.planes.protocol.fields import decode
from dreamlake.lakeshore.server import serve as serving
from dreamlake.lakeshore.server.serve import Bounds, addresses, listen, loopback_only, serve, url_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from anyio.abc import SocketStream

UVLOOP = pytest.param(("asyncio", {"use_uvloop": True}), id="asyncio+uvloop")

pytestmark = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", [UVLOOP])]

LIMIT = 20.0
SOON = 0.5
"""Seconds for what is to be too slow."""
LOOSE = Bounds(headers_s=LIMIT)


class App:
    """An application for these tests: `/held` answers when it is drained, `/stuck` never, `/body` what it was sent."""

    def __init__(self) -> None:
        self.draining = anyio.Event()
        self.seen: list[str] = []
        self.ended: list[str] = []
        self.waiting_behind: list[int] = []
        self.left = 0
        """How many requests were told that their client has gone."""
        self.lifespan: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        path = scope["path"]
        self.seen.append(path)
        try:
            body = getattr(self, path.strip("/").split("/")[0])
            await send_all(send, await body(receive, send))
        finally:
            self.ended.append(path)

    async def _live(self, receive: Any, send: Any) -> None:
        for _ in range(2):
            message = await receive()
            self.lifespan.append(message["type"])
            await send({"type": f"{message['type']}.complete"})

    async def quick(self, receive: Any, send: Any) -> bytes:
        return b"quick"

    async def held(self, receive: Any, send: Any) -> bytes:
        await self.draining.wait()
        return b"drained"

    async def stuck(self, receive: Any, send: Any) -> bytes:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.left += 1
        return b""

    async def deaf(self, receive: Any, send: Any) -> bytes:
        await anyio.sleep_forever()
        return b""

    async def body(self, receive: Any, send: Any) -> bytes:
        body = b""
        while True:
            message = await receive()
            body += message.get("body", b"")
            if not message.get("more_body"):
                return body

    async def broken(self, receive: Any, send: Any) -> bytes:
        raise RuntimeError("the application is broken")

    async def stream(self, receive: Any, send: Any) -> bytes:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first,", "more_body": True})
        await self.draining.wait()
        await send({"type": "http.response.body", "body": b"last"})
        return b""

    async def large(self, receive: Any, send: Any) -> bytes:
        return bytes(32 << 20)

    async def waiting(self, receive: Any, send: Any) -> bytes:
        self.waiting_behind.append(len(receive.__self__.on_response.__self__.pipeline))
        return b"waited"

    async def big(self, receive: Any, send: Any) -> bytes:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(256):
            await send({"type": "http.response.body", "body": bytes(64 << 10), "more_body": True})
        await send({"type": "http.response.body"})
        return b""


async def send_all(send: Any, body: bytes) -> None:
    if body:
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})


class Served:
    """A server that runs, and what ends it."""

    def __init__(self) -> None:
        self.app = App()
        self.stop, self.cut, self.ended = anyio.Event(), anyio.Event(), anyio.Event()
        (self.socket,) = listen(addresses("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]

    async def run(self, bounds: Bounds, grace: float, *, task_status: Any = anyio.TASK_STATUS_IGNORED) -> None:
        await serve(
            self.app,
            [self.socket],
            stop=self.stop,
            cut=self.cut,
            grace=grace,
            drain=self.app.draining.set,
            ready=task_status.started,
            bounds=bounds,
        )
        self.ended.set()

    async def connect(self) -> SocketStream:
        return await anyio.connect_tcp("127.0.0.1", self.port)


@asynccontextmanager
async def served(bounds: Bounds = LOOSE, grace: float = LIMIT) -> AsyncIterator[Served]:
    """A server for a test; it has ended afterwards, within the limit."""
    with anyio.fail_after(3 * LIMIT):
        async with anyio.create_task_group() as group:
            here = Served()
            await group.start(here.run, bounds, grace)
            yield here
            here.stop.set()
            here.cut.set()


async def rest(stream: SocketStream) -> bytes:
    """What comes until the far side closes."""
    got = b""
    with anyio.fail_after(LIMIT):
        try:
            while True:
                got += await stream.receive()
        except (anyio.EndOfStream, anyio.BrokenResourceError):
            return got


async def some(stream: SocketStream, until: bytes) -> bytes:
    got = b""
    with anyio.fail_after(LIMIT):
        while until not in got:
            got += await stream.receive()
    return got


def request(path: str, *headers: str, method: str = "GET") -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "host: x", *headers, "", ""]).encode()


def refusal(answer: bytes) -> tuple[int, str, str]:
    """Status, class and sentence of an answer that refuses, after which the connection was closed."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head
    assert b"content-type: application/x-msgpack" in head
    error = decode(body, "the answer")["error"]
    return int(head.split()[1]), error["type"], error["message"]


async def ask(here: Served, path: str) -> bytes:
    """One request on a connection of its own, answered whole."""
    async with await here.connect() as stream:
        await stream.send(request(path, "connection: close"))
        return await rest(stream)


# --- half a request holds nothing -----------------------------------------------------------------------------------

TOO_SLOW = (408, "WireError", f"expected a request's headers within {SOON} s")


@pytest.mark.parametrize("sent", [b"GET /quick HT", request("/quick")[:-2], request("/quick")[:-1]])
async def test_half_a_request_is_answered_and_its_connection_closed(sent: bytes) -> None:
    async with served(Bounds(headers_s=SOON)) as here, await here.connect() as stream:
        await stream.send(sent)
        assert refusal(await rest(stream)) == TOO_SLOW
        assert here.app.seen == []


async def test_a_connection_without_a_word_is_closed() -> None:
    async with served(Bounds(headers_s=SOON)) as here, await here.connect() as stream:
        assert await rest(stream) == b""


async def test_headers_that_come_drop_by_drop_have_one_deadline() -> None:
    begun = time.monotonic()
    async with served(Bounds(headers_s=SOON)) as here, await here.connect() as stream:
        await stream.send(b"GET /quick HTTP/1.1\r\n")

        async def drip() -> None:
            with anyio.CancelScope() as dripping:
                drops.append(dripping)
                while True:
                    await anyio.sleep(SOON / 10)
                    try:
                        await stream.send(b"x: y\r\n")
                    except anyio.BrokenResourceError:
                        return

        drops: list[anyio.CancelScope] = []
        async with anyio.create_task_group() as group:
            group.start_soon(drip)
            answer = await some(stream, b"headers within")
            for scope in drops:
                scope.cancel()
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert time.monotonic() - begun >= SOON * 0.9


@pytest.mark.parametrize("sent", [b"\r\n", b"GET /quick HTTP/1.1\r\n"])
async def test_the_next_request_of_a_connection_has_a_deadline_too(sent: bytes) -> None:
    async with served(Bounds(headers_s=SOON)) as here, await here.connect() as stream:
        await stream.send(request("/quick"))
        await some(stream, b"quick")
        await stream.send(sent)
        assert refusal(await rest(stream)) == TOO_SLOW


async def test_a_body_that_nobody_waits_for_does_not_hold_its_connection() -> None:
    async with served(Bounds(headers_s=SOON)) as here, await here.connect() as stream:
        await stream.send(request("/quick", "content-length: 1000000", method="POST"))
        await some(stream, b"quick")
        await stream.send(b"x")
        await rest(stream)


async def test_what_takes_long_for_good_reasons_is_left_alone() -> None:
    """A held request, one whose body comes slowly, and a connection between two requests."""
    async with (
        served(Bounds(headers_s=8 * SOON)) as here,
        await here.connect() as held,
        await here.connect() as slow,
        await here.connect() as idle,
    ):
        for piece in (request("/held")[:9], request("/held")[9:20], request("/held")[20:]):
            await held.send(piece)
            await anyio.sleep(SOON / 10)
        await slow.send(request("/body", "content-length: 4", method="POST"))
        await idle.send(request("/quick"))
        await some(idle, b"quick")
        for letter in b"body":
            await anyio.sleep(SOON * 2.5)
            await slow.send(bytes([letter]))
        assert (await some(slow, b"body")).startswith(b"HTTP/1.1 200 ")
        await idle.send(request("/quick"))
        await some(idle, b"quick")
        here.app.draining.set()
        await some(held, b"drained")


async def test_a_request_behind_one_that_is_held_does_not_end_it() -> None:
    async with served(Bounds(headers_s=SOON)) as here, await here.connect() as stream:
        await stream.send(request("/held") + request("/quick") + request("/quick")[:20])
        await wait_until(lambda: here.app.seen, LIMIT, "the held request")
        await anyio.sleep(SOON * 2)
        here.app.draining.set()
        answer = await rest(stream)
        assert answer.index(b"drained") < answer.index(b"quick") < answer.index(b"HTTP/1.1 408 ")


# --- no request fills the memory ------------------------------------------------------------------------------------

TOO_MUCH = (431, "WireError", "expected headers of at most 65536 bytes, got more")


async def flood(stream: SocketStream, piece: bytes, most: int = 64 << 20) -> int:
    """Send the same again and again until the far side has had enough; how much that was."""
    sent = 0
    with anyio.fail_after(LIMIT):
        while sent < most:
            try:
                await stream.send(piece)
            except anyio.BrokenResourceError:
                break
            sent += len(piece)
    return sent


@pytest.mark.parametrize(
    "head",
    [b"GET /quick HTTP/1.1\r\nx: ", b"GET /quick", b"GET /quick HTTP/1.1\r\n", b"GET /quick HTTP/1.1\r\nx: y\r\n x"],
)
async def test_headers_without_an_end_are_refused(head: bytes) -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(head)
        assert await flood(stream, b"y" * 60_000 if head[-1:] != b"\n" else b"x: y\r\n" * 10_000) < 64 << 20
        answer = await rest(stream)
        assert answer == b"" or refusal(answer) == TOO_MUCH  # a reset may overtake the answer
        assert here.app.seen == []


async def test_the_refusal_of_long_headers_says_why() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(b"GET /quick HTTP/1.1\r\nx: " + b"y" * 65_536)
        assert refusal(await rest(stream)) == TOO_MUCH


async def test_long_headers_within_the_bound_are_taken() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/quick", "x: " + "y" * 60_000))
        await some(stream, b"quick")
        await stream.send(request("/quick", "x: " + "y" * 60_000))
        await some(stream, b"quick")


@pytest.mark.parametrize("piece", [b"x: y\r\n" * 10_000, b"x" * 60_000], ids=["many", "one without an end"])
async def test_trailers_without_an_end_are_cut(piece: bytes) -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/body", "transfer-encoding: chunked", method="POST") + b"1\r\nx\r\n0\r\n")
        assert await flood(stream, piece) < 64 << 20
        await wait_until(lambda: here.app.ended, LIMIT, "the end of the request")


async def test_a_large_body_is_none_of_this() -> None:
    async with served() as here, await here.connect() as stream:
        body = b"x" * (4 << 20)
        await stream.send(request("/body", f"content-length: {len(body)}", method="POST") + body)
        answer = await some(stream, body)
        assert answer.startswith(b"HTTP/1.1 200 ")
        chunks = b"".join(b"%x\r\n%s\r\n" % (1000, b"y" * 1000) for _ in range(1000)) + b"0\r\n\r\n"
        await stream.send(request("/body", "transfer-encoding: chunked", method="POST") + chunks)
        await some(stream, b"y" * 1_000_000)


# --- what is no request ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        request("/quick", "content-length: -1"),
        request("/quick", "content-length: 5", "transfer-encoding: chunked", method="POST"),
        b"GET http://[ HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n",
        request("/body", "transfer-encoding: chunked", method="POST") + b"nonsense\r\n",
    ],
)
async def test_what_is_no_request_is_refused_by_name(sent: bytes) -> None:
    async with served() as here:
        async with await here.connect() as stream:
            await stream.send(sent)
            answer = refusal(await rest(stream))
        assert answer == (400, "WireError", "expected an HTTP/1.1 request, got something else")
        assert (await ask(here, "/quick")).endswith(b"quick")


async def test_nonsense_in_the_middle_of_an_answer_does_not_get_into_it() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/stream", "transfer-encoding: chunked", method="POST"))
        await some(stream, b"first,")
        await stream.send(b"nonsense\r\n")
        assert await rest(stream) == b""


async def test_nonsense_behind_a_further_request_does_not_get_into_the_answer_either() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/stream"))
        await some(stream, b"first,")
        await stream.send(request("/quick") + b"nonsense\r\n")
        assert await rest(stream) == b""


async def test_a_websocket_gets_none() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/quick", "connection: upgrade, close", "upgrade: websocket"))
        assert b"101" not in await some(stream, b"quick")


async def test_an_application_that_fails_is_a_500_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as here:
        assert (await ask(here, "/broken")).startswith(b"HTTP/1.1 500 ")
        assert (await ask(here, "/quick")).endswith(b"quick")
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.name == "uvicorn.error"
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "the application is broken"


# --- requests ahead of their answers ----------------------------------------------------------------------------------

TOO_MANY = (
    400,
    "WireError",
    "expected at most 16 requests behind one that is not answered, got more: wait for answers",
)


async def test_sixteen_requests_behind_one_that_is_held_are_answered_in_their_order() -> None:
    async with served() as here, await here.connect() as stream:
        behind = [f"/quick/{number}" for number in range(16)]
        await stream.send(b"".join(map(request, ["/held", *behind])))
        await wait_until(lambda: here.app.seen, LIMIT, "the held request")
        assert here.app.seen == ["/held"]
        here.app.draining.set()
        await wait_until(lambda: len(here.app.ended) == 17, LIMIT, "the last of them")
        assert here.app.seen == ["/held", *behind]
        await stream.send(request("/quick", "connection: close"))
        assert (await rest(stream)).count(b"HTTP/1.1 200 ") == 18


async def test_more_requests_behind_one_that_is_held_are_refused_and_none_of_them_is_run() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/stuck"))
        await wait_until(lambda: here.app.seen, LIMIT, "the request")
        await stream.send(17 * request("/quick"))
        assert refusal(await rest(stream)) == TOO_MANY
        await wait_until(lambda: here.app.left, LIMIT, "its end: nobody hears it any more")
        assert here.app.seen == ["/stuck"]


async def test_a_flood_of_whole_requests_is_cut() -> None:
    async with served() as here:
        async with await here.connect() as stream:
            assert await flood(stream, 2000 * request("/quick")) < 32 << 20
        assert (await ask(here, "/quick")).endswith(b"quick")


async def test_no_more_is_read_while_requests_wait_for_their_turn() -> None:
    """Also after an answer, when uvicorn would read on: of what comes, no more than one piece waits at a time."""
    async with served(LOOSE._replace(ahead=1 << 20)) as here, await here.connect() as stream:
        await stream.send(2000 * request("/waiting", f"x: {4000 * 'x'}") + request("/quick", "connection: close"))
        assert (await rest(stream)).count(b"HTTP/1.1 200 ") == 2001
    assert 0 < max(here.app.waiting_behind) < 400


@pytest.mark.parametrize("before", [[], ["/quick"]])
async def test_a_request_whose_client_leaves_is_told_also_when_another_came_behind_it(before: list[str]) -> None:
    async with served() as here:
        async with await here.connect() as stream:
            await stream.send(b"".join(map(request, [*before, "/stuck", "/quick"])))
            await wait_until(lambda: "/stuck" in here.app.seen, LIMIT, "the request")
        here.stop.set()
        here.cut.set()
        await here.ended.wait()
    assert here.app.left == 1


async def test_a_refusal_ends_what_runs_although_the_answers_before_it_are_not_read_yet() -> None:
    async with served() as here, await here.connect() as stream:
        await stream.send(request("/large"))
        await stream.send(request("/stuck"))
        await wait_until(lambda: "/stuck" in here.app.seen, LIMIT, "the second request")
        await stream.send(17 * request("/quick"))
        await wait_until(lambda: here.app.left, LIMIT, "its end")


async def test_a_client_that_does_not_read_and_leaves_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as here:
        async with await here.connect() as stream:
            await stream.send(request("/big") + request("/quick"))
            await some(stream, b"200 OK")
        await wait_until(lambda: here.app.ended, LIMIT, "the end of the answer")
        await ask(here, "/quick")
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# --- how many -------------------------------------------------------------------------------------------------------


async def test_connections_beyond_the_bound_are_told_to_come_again() -> None:
    async with served(Bounds(connections=2)) as here:
        async with await here.connect() as one, await here.connect() as two:
            for stream in (one, two):
                await stream.send(request("/quick"))
                await some(stream, b"quick")
            async with await here.connect() as third:
                assert refusal(await rest(third)) == (
                    503,
                    "PlaneUnavailable",
                    "the server already has 2 connections, its maximum: retry later",
                )
            await two.send(request("/quick"))
            await some(two, b"quick")

        async def has_room() -> bool:
            return (await ask(here, "/quick")).endswith(b"quick")

        await wait_until(has_room, LIMIT, "room for another connection")


def test_the_bound_is_what_the_system_allows(monkeypatch: pytest.MonkeyPatch, anyio_backend: Any) -> None:
    class Limits:
        RLIMIT_NOFILE, RLIM_INFINITY = 7, -1

        def __init__(self, soft: int, hard: int, obeys: bool = True) -> None:
            self.soft, self.hard, self.obeys = soft, hard, obeys

        def getrlimit(self, what: int) -> tuple[int, int]:
            return self.soft, self.hard

        def setrlimit(self, what: int, limits: tuple[int, int]) -> None:
            if not self.obeys:
                raise ValueError("not allowed to raise maximum limit")
            self.soft, self.hard = limits

    for limits, most, soft in [
        (Limits(1024, 4096), 4096 - 128, 4096),
        (Limits(1024, -1), 10_000, 10_128),
        (Limits(1024, 1 << 20), 10_000, 10_128),
        (Limits(1 << 20, 1 << 20), 10_000, 1 << 20),
        (Limits(-1, -1), 10_000, -1),
        (Limits(1024, 4096, obeys=False), 1024 - 128, 1024),
        (Limits(100, 100), 1, 100),
    ]:
        monkeypatch.setattr(serving, "resource", limits)
        assert serving._most_connections(10_000) == most
        assert limits.soft == soft


# --- how it ends ----------------------------------------------------------------------------------------------------


async def test_held_requests_are_answered_and_streams_end() -> None:
    async with served() as here, await here.connect() as held, await here.connect() as stream:
        await held.send(request("/held"))
        await stream.send(request("/stream"))
        assert (await some(stream, b"first,")).startswith(b"HTTP/1.1 200 ")
        await wait_until(lambda: "/held" in here.app.seen, LIMIT, "the held request")
        here.stop.set()
        answer = await rest(held)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"\r\n\r\ndrained")
        assert (await rest(stream)).endswith(b"4\r\nlast\r\n0\r\n\r\n")
        with anyio.fail_after(LIMIT):
            await here.ended.wait()
        with pytest.raises(OSError, match="attempts failed"):
            await here.connect()
        assert here.app.lifespan == ["lifespan.startup", "lifespan.shutdown"]


async def test_idle_connections_do_not_delay_the_end() -> None:
    async with served() as here, await here.connect() as silent, await here.connect() as idle:
        await idle.send(request("/quick"))
        await some(idle, b"quick")
        here.stop.set()
        with anyio.fail_after(LIMIT):
            await here.ended.wait()
        assert await rest(idle) == b""
        assert await rest(silent) == b""


@pytest.mark.parametrize("path", ["/stuck", "/deaf"])
@pytest.mark.parametrize("how", ["the grace is over", "a second signal"])
async def test_what_does_not_end_is_cut(path: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with served(grace=0.1 if how == "the grace is over" else LIMIT) as here, await here.connect() as stream:
        await stream.send(request(path))
        await wait_until(lambda: here.app.seen, LIMIT, "the request")
        here.stop.set()
        if how == "a second signal":
            here.cut.set()
        assert await rest(stream) == b""  # cut, which a client may repeat, and no answer, which it may not
        with anyio.fail_after(LIMIT):
            await here.ended.wait()
        assert here.app.ended == [path]
        assert here.app.lifespan == ["lifespan.startup", "lifespan.shutdown"]
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.getMessage() == "1 connection is cut off"


async def test_an_application_that_does_not_start_is_an_error(anyio_backend: Any) -> None:
    class Failing(App):
        async def _live(self, receive: Any, send: Any) -> None:
            raise RuntimeError("no start")

    (sock,) = listen(addresses("127.0.0.1", 0))
    never, begun = anyio.Event(), list[None]()
    run = partial(serve, stop=never, cut=never, grace=1.0, drain=never.set, ready=partial(begun.append, None))
    with pytest.raises(DispatchError, match=r"^the server did not start: its application failed, see the log$"):
        await run(Failing(), [sock])
    assert not begun
    assert sock.fileno() == -1


def test_a_cancelled_server_leaves_nothing_that_its_loop_waits_for(anyio_backend: Any) -> None:
    run_python(
        """
        import anyio
        from dreamlake.lakeshore.server.serve import addresses, listen, serve

        async def app(scope, receive, send):
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})

        async def main():
            sockets, never = listen(addresses("127.0.0.1", 0)), anyio.Event()
            async with anyio.create_task_group() as group:
                await serve(
                    app,
                    sockets,
                    stop=never,
                    cut=never,
                    grace=1.0,
                    drain=never.set,
                    ready=group.cancel_scope.cancel,
                )
            assert sockets[0].fileno() == -1

        anyio.run(main, backend="asyncio", backend_options={"use_uvloop": True})
        """
    )


# --- where ----------------------------------------------------------------------------------------------------------


def test_all_addresses_of_a_name_share_a_port(anyio_backend: Any) -> None:
    sockets = listen([(socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET, ("127.0.0.2", 0))])
    try:
        ports = {sock.getsockname()[1] for sock in sockets}
        assert len(ports) == 1
        assert url_of(sockets[0]) == f"http://127.0.0.1:{ports.pop()}"
    finally:
        for sock in sockets:
            sock.close()


def test_connections_of_the_dead_and_the_deaf_end(anyio_backend: Any) -> None:
    (sock,) = listen(addresses("127.0.0.1", 0))
    with sock, socket.create_connection(sock.getsockname()):
        sock.settimeout(LIMIT)
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            if sys.platform == "linux":
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == serving.UNREAD_TIMEOUT * 1000


def test_a_port_that_is_taken(anyio_backend: Any) -> None:
    (sock,) = listen(addresses("127.0.0.1", 0))
    port = sock.getsockname()[1]
    with (
        sock,
        pytest.raises(
            DispatchError,
            match=rf"^cannot listen on 127\.0\.0\.1:{port}: Address already in use; a server may be running there already: "
            r"give another --port, or 0 for one that is free$",
        ),
    ):
        listen(addresses("127.0.0.1", port))


def test_an_address_of_another_machine(anyio_backend: Any) -> None:
    other, here = (socket.AF_INET, ("192.0.2.1", 0)), (socket.AF_INET, ("127.0.0.1", 0))
    (sock,) = listen([other, here])
    with sock:
        assert url_of(sock).startswith("http://127.0.0.1:")
    fix = r"give --host an address or a name of this machine$"
    with pytest.raises(
        DispatchError, match=rf"^cannot listen on 192\.0\.2\.1:0: Cannot assign requested address; {fix}"
    ):
        listen([other])
    with pytest.raises(DispatchError, match=rf"^cannot listen on any of 192\.0\.2\.1, 192\.0\.2\.1: {fix}"):
        listen([other, other])


def test_a_name_that_is_none(anyio_backend: Any) -> None:
    for host in ("", "x" * 300, "a\ud800"):
        with pytest.raises(
            DispatchError,
            match=f"^cannot listen on {re.escape(repr(host))}: .*; give --host an address or a name of this machine$",
        ):
            addresses(host, 0)


@pytest.mark.parametrize(
    ("hosts", "only"),
    [
        (["127.0.0.1"], True),
        (["127.0.0.1", "127.8.9.1"], True),
        (["::1"], True),
        (["0.0.0.0"], False),
        (["::"], False),
        (["127.0.0.1", "10.1.2.3"], False),
        (["fe80::1%lo"], False),
        (["::ffff:10.1.2.3"], False),
    ],
)
def test_which_addresses_others_reach(hosts: list[str], only: bool, anyio_backend: Any) -> None:
    assert loopback_only([(socket.AF_INET, (host, 0)) for host in hosts]) is only


def test_a_url_of_the_sixth_version(anyio_backend: Any) -> None:
    class Socket:
        def getsockname(self) -> tuple[str, int, int, int]:
            return "::1", 8750, 0, 0

    sock: Any = Socket()
    assert url_of(sock) == "http://[::1]:8750"
