"""Responses that are not what HTTP/1.1 allows, over plain connections and over TLS: whatever a server sends, no caller gets
another caller's answer, and a connection with anything odd on it carries no further request."""

from __future__ import annotations

import ssl
import subprocess
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import anyio
import msgpack
import pytest
from anyio.streams.tls import TLSListener
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.planes.http import attempt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate of 127.0.0.1 and its key, as PEM files."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
        timeout=60,
    )  # fmt: skip
    return certificate, key


class Place:
    """Where the servers of a test are: on plain sockets, or behind TLS with a certificate that clients trust."""

    def __init__(self, server_context: ssl.SSLContext | None) -> None:
        self.server_context = server_context


@pytest.fixture(params=["plain", "tls"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Place:
    if request.param == "plain":
        return Place(None)
    certificate, key = request.getfixturevalue("certificate")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    return Place(context)


class Request:
    """One request that a raw server got: the number of its connection, its number on it, its head and its fields."""

    def __init__(self, connection: int, number: int, head: str, body: bytes) -> None:
        self.connection = connection
        self.number = number
        self.head = head
        self.fields: dict[str, Any] = msgpack.unpackb(body) if body else {}

    @property
    def keys(self) -> list[str]:
        """The keys of the submits in it."""
        return [str(item["run_config"]["key"]) for item in self.fields["items"]]

    @property
    def key(self) -> str:
        """The key of the one submit in it."""
        (key,) = self.keys
        return key


Step: TypeAlias = "bytes | anyio.Event | float | None"
"""What a raw server does: send bytes, wait for an event or for some seconds, or close the connection (None)."""
Reply: TypeAlias = "Callable[[Request], list[Step]]"
"""What a raw server does for a request."""


class RawServer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[Request] = []
        self.connections = 0


@asynccontextmanager
async def raw_server(place: Place, reply: Reply, greeting: bytes = b"") -> AsyncIterator[RawServer]:
    """A server of the test's own, which sends whatever bytes `reply` gives it. greeting: sent before any request."""

    async def serve(stream: anyio.abc.ByteStream) -> None:
        server.connections += 1
        connection = server.connections
        number = 0
        data = b""
        try:
            if greeting:
                await stream.send(greeting)
            while True:
                while b"\r\n\r\n" not in data:
                    data += await stream.receive()
                head, _, data = data.partition(b"\r\n\r\n")
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                while len(data) < size:
                    data += await stream.receive()
                number += 1
                request = Request(connection, number, head.decode(), data[:size])
                data = data[size:]
                server.requests.append(request)
                for step in reply(request):
                    if step is None:
                        return
                    if isinstance(step, float):
                        await anyio.sleep(step)
                    elif isinstance(step, anyio.Event):
                        await step.wait()
                    else:
                        await stream.send(step)
        except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError, ssl.SSLError):
            pass
        finally:
            await anyio.aclose_forcefully(stream)

    tcp = await anyio.create_tcp_listener(local_host="127.0.0.1")
    port = tcp.extra(anyio.abc.SocketAttribute.local_port)
    scheme, listener = "http", tcp
    if place.server_context is not None:
        # Without the closing handshake: these servers close as a crash does.
        scheme, listener = "https", TLSListener(tcp, place.server_context, standard_compatible=False)  # type: ignore[assignment]
    server = RawServer(f"{scheme}://127.0.0.1:{port}")
    async with listener, anyio.create_task_group() as group:
        group.start_soon(listener.serve, serve)
        yield server
        group.cancel_scope.cancel()


def body_for(*keys: str) -> bytes:
    """The answer to submits with these keys; each id is made of the key."""
    body: bytes = msgpack.packb({"results": [{"invocation_id": f"id-of-{key}"} for key in keys]})
    return body


def good(*keys: str, headers: tuple[bytes, ...] = ()) -> bytes:
    body = body_for(*keys)
    return b"\r\n".join([b"HTTP/1.1 200 OK", *headers, b"content-length: %d" % len(body), b"", body])


async def submit(plane: dls.HttpDispatch, key: str) -> str:
    return await plane.submit("q", b"x", key=key)


# Good ones -----------------------------------------------------------------------------------------------------------


async def test_a_connection_is_used_again_after_a_good_answer(place: Place) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"

    def reply(request: Request) -> list[Step]:
        body = body_for(request.key)
        if request.number % 2:
            return [good(request.key)]
        return [chunked, b"3\r\n" + body[:3] + b"\r\n", b"%x\r\n" % (len(body) - 3) + body[3:] + b"\r\n0\r\n\r\n"]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        for number in range(4):
            assert await submit(plane, f"k{number}") == f"id-of-k{number}"
        assert server.connections == 1
        assert server.requests[0].head.splitlines()[:2] == [
            "POST /v1/producer/submit-many HTTP/1.1",
            f"host: {server.url.partition('://')[2]}",
        ]


@pytest.mark.parametrize("closing", [b"connection: close", b"Connection: keep-alive, Close"])
async def test_a_connection_that_the_server_closes_is_not_used_again(place: Place, closing: bytes) -> None:
    async with (
        raw_server(place, lambda one: [good(one.key, headers=(closing,))]) as server,
        dls.HttpDispatch(server.url) as plane,
    ):
        for number in range(3):
            assert await submit(plane, f"k{number}") == f"id-of-k{number}"
        assert server.connections == 3


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
async def test_a_body_without_a_length_ends_with_the_connection(place: Place, version: bytes) -> None:
    """Over TLS only where the server says that it closes: a connection that was cut off looks the same otherwise."""

    def reply(request: Request) -> list[Step]:
        return [version + b" 200 OK\r\n\r\n", body_for(request.key), None]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        if place.server_context is None:
            assert await submit(plane, "k1") == "id-of-k1"
            assert await submit(plane, "k2") == "id-of-k2"
            assert server.connections == 2
        else:
            plane.patience = 0.0
            with pytest.raises(dls.PlaneUnavailable, match="the connection was closed in the middle of an answer"):
                await submit(plane, "k1")


async def test_a_connection_that_went_stale_is_replaced_without_a_word(place: Place) -> None:
    """The server closes it after the first answer, or when it sees the second request: that one goes out again."""
    stale = anyio.Event()

    def reply(request: Request) -> list[Step]:
        if request.connection == 1:
            return [good(request.key)] if request.number == 1 else [None]
        return [good(request.key), stale, None]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        plane.patience = 0.0
        assert await submit(plane, "k1") == "id-of-k1"
        assert await submit(plane, "k2") == "id-of-k2"
        assert [(one.connection, one.key) for one in server.requests] == [(1, "k1"), (1, "k2"), (2, "k2")]
        stale.set()
        await anyio.sleep(0.05)
        assert await submit(plane, "k3") == "id-of-k3"
        assert server.connections == 3


async def test_large_bodies_go_both_ways(place: Place) -> None:
    large = bytes(3 << 20)

    def reply(request: Request) -> list[Step]:
        (item,) = request.fields["items"]
        body = msgpack.packb({"results": [{"invocation_id": f"id-of-{item['run_config']['key']}", "more": large}]})
        assert item["args_blob"] == large
        return [b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body), body]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        for number in range(2):
            assert await plane.submit("q", large, key=f"k{number}") == f"id-of-k{number}"
        assert server.connections == 1


@pytest.mark.timing("pieces come 0.1 s apart, and a pause of 0.5 s ends the answer")
async def test_each_piece_of_an_answer_gives_it_more_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "MIN_ANSWER_TIMEOUT", 0.5)

    def reply(request: Request) -> list[Step]:
        answer = good(request.key)
        slow: list[Step] = []
        for at in range(10, 20):
            slow += [answer[at : at + 1], 0.1]
        return [answer[:10], *slow, answer[20:]]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        plane.patience = 0.0
        assert await submit(plane, "k1") == "id-of-k1"
        assert len(server.requests) == 1


# Bad ones ------------------------------------------------------------------------------------------------------------

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
NOTHING = OK + b"content-length: 1\r\n\r\n\x80"
"""An answer without fields."""
NO_HTTP = "expected an HTTP/1.1 answer, got something else: "


def other(head: bytes) -> bytes:
    """A head, and the answer to a submit of somebody else behind it."""
    return head + good("somebody-else")


BAD: dict[str, tuple[bytes, str]] = {
    "two lengths": (OK + b"content-length: 5\r\ncontent-length: 60\r\n\r\n", NO_HTTP + "conflicting Content-Length"),
    "two lengths in one": (OK + b"content-length: 5, 60\r\n\r\n", NO_HTTP + "conflicting Content-Length"),
    "a length with a sign": (OK + b"content-length: +1\r\n\r\n\x80", NO_HTTP + "bad Content-Length"),
    "a coding beside a length": (
        OK + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n",
        "expected an HTTP/1.1 answer, got one with both Transfer-Encoding and Content-Length",
    ),
    "an unknown coding": (
        OK + b"transfer-encoding: gzip\r\n\r\n",
        NO_HTTP + "Only Transfer-Encoding: chunked is supported",
    ),
    "an unknown coding beside a length": (
        OK + b"transfer-encoding: identity\r\ncontent-length: 1\r\n\r\n\x80",
        NO_HTTP + "Only Transfer-Encoding: chunked is supported",
    ),
    "two codings": (
        OK + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        NO_HTTP + "Only Transfer-Encoding: chunked is supported",
    ),
    "a folded length": (
        OK + b"content-length: 1\r\n 2\r\n\r\n\x80",
        NO_HTTP + "bad Content-Length",
    ),
    "a folded header": (
        OK + b"x-some: thing\r\n more\r\ncontent-length: 1\r\n\r\n\x80",
        "expected an HTTP/1.1 answer, got one with a header over several lines, or a bare LF",
    ),
    "a fold at the start": (OK + b" x: y\r\ncontent-length: 1\r\n\r\n\x80", NO_HTTP + "continuation line"),
    "a bare LF in the head": (
        b"HTTP/1.1 200 OK\ncontent-length: 1\r\n\r\n\x80",
        "expected an HTTP/1.1 answer, got one with a header over several lines, or a bare LF",
    ),
    "a bare LF that ends the head": (
        OK + b"content-length: 1\r\n\n\x80",
        "expected an HTTP/1.1 answer, got one with a header over several lines, or a bare LF",
    ),
    "a NUL in a header": (OK + b"x: a\x00b\r\ncontent-length: 1\r\n\r\n\x80", NO_HTTP + "illegal header line"),
    "no status": (b"HTTP/1.1 what\r\n\r\n", NO_HTTP + "illegal status line"),
    "an odd status": (b"HTTP/1.1 099 What\r\n\r\n", NO_HTTP + "InformationalResponse status_code should be"),
    "no HTTP": (b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n", NO_HTTP + "illegal status line"),
    "an endless head": (OK + b"x: " + b"y" * (200 << 10), NO_HTTP + "Receive buffer too long"),
    "too many interim answers": (
        b"HTTP/1.1 102 Processing\r\n\r\n" * 100,
        "expected an answer after at most 16 interim ones, got more",
    ),
    "endless trailers": (CHUNKED + b"1\r\n\x80\r\n0\r\n" + b"a: b\r\n" * 70_000, NO_HTTP + "Receive buffer too long"),
    "a chunk of odd size": (CHUNKED + b"0x1\r\n\x80\r\n0\r\n\r\n", NO_HTTP + "illegal chunk header"),
    "a chunk with a plus": (CHUNKED + b"+1\r\n\x80\r\n0\r\n\r\n", NO_HTTP + "illegal chunk header"),
    "a chunk with a minus": (CHUNKED + b"-1\r\n\x80\r\n0\r\n\r\n", NO_HTTP + "illegal chunk header"),
    "a chunk with a long size": (CHUNKED + b"1" * 21 + b"\r\n", NO_HTTP + "illegal chunk header"),
    "a chunk without its end": (CHUNKED + b"1\r\n\x80xx0\r\n\r\n", NO_HTTP + "malformed chunk footer"),
    "a chunk header with a bare LF": (CHUNKED + b"1\n\x80\r\n0\r\n\r\n", NO_HTTP),
}


@pytest.mark.parametrize("name", BAD)
async def test_an_answer_that_is_no_http_is_an_error_and_the_end_of_its_connection(place: Place, name: str) -> None:
    """Behind each comes an answer of somebody else, which the next request on that connection would take for its own."""
    answer, sentence = BAD[name]

    def reply(request: Request) -> list[Step]:
        return [other(answer)] if request.key == "k1" else [good(request.key)]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        plane.patience = 0.0
        with anyio.fail_after(20):
            with pytest.raises(dls.PlaneUnavailable) as caught:
                await submit(plane, "k1")
        assert sentence in str(caught.value)
        assert f"no answer to POST /producer/submit-many at {server.url}, request " in str(caught.value)
        assert await submit(plane, "k2") == "id-of-k2"
        assert len({one.connection for one in server.requests}) == len(server.requests)


async def test_a_bad_answer_is_asked_for_again(place: Place) -> None:
    """Within the plane's patience the caller does not notice it."""

    def reply(request: Request) -> list[Step]:
        return [good(request.key)] if request.connection > 1 else [other(BAD["two lengths"][0])]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        assert await submit(plane, "k1") == "id-of-k1"
        assert [one.connection for one in server.requests] == [1, 2]


async def test_a_body_longer_than_its_length_costs_the_connection(place: Place) -> None:
    """The rest of it would be the beginning of the next answer."""

    def reply(request: Request) -> list[Step]:
        return [good(request.key) + good("somebody-else")]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        for number in range(3):
            assert await submit(plane, f"k{number}") == f"id-of-k{number}"
        assert server.connections == 3


@pytest.mark.parametrize("head", [OK + b"content-length: 500\r\n\r\n", CHUNKED + b"1f4\r\n", OK + b"content-le"])
async def test_a_body_shorter_than_its_length_is_an_error(place: Place, head: bytes) -> None:
    def reply(request: Request) -> list[Step]:
        if request.key != "k1":
            return [good(request.key)]
        return [head, body_for("k1"), None] if head.endswith(b"\n") else [head, None]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        plane.patience = 0.0
        with pytest.raises(dls.PlaneUnavailable, match=r"the connection was closed in the middle of an answer$"):
            await submit(plane, "k1")
        assert await submit(plane, "k2") == "id-of-k2"


async def test_an_answer_to_no_request_is_nobody_s(place: Place) -> None:
    """It lies on the idle connection, right behind the answer before it or some time later."""
    later = anyio.Event()

    def reply(request: Request) -> list[Step]:
        if request.connection == 1:
            return [good(request.key), good("somebody-else")]
        if request.connection == 2:
            return [good(request.key), later, good("somebody-else"), good("and-another")]
        return [good(request.key)]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        assert await submit(plane, "k1") == "id-of-k1"
        await anyio.sleep(0.05)
        assert await submit(plane, "k2") == "id-of-k2"
        later.set()
        await anyio.sleep(0.05)
        assert await submit(plane, "k3") == "id-of-k3"
        assert await submit(plane, "k4") == "id-of-k4"
        assert [(one.connection, one.key) for one in server.requests] == [(1, "k1"), (2, "k2"), (3, "k3"), (3, "k4")]


async def test_a_server_that_talks_first_is_no_control_plane(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    connect = anyio.connect_tcp

    async def slow_connect(*args: Any, **kwargs: Any) -> Any:
        stream = await connect(*args, **kwargs)
        await anyio.sleep(0.1)  # for the greeting to arrive
        return stream

    monkeypatch.setattr(anyio, "connect_tcp", slow_connect)
    async with raw_server(place, lambda one: [good(one.key)], greeting=good("somebody-else")) as server:
        async with dls.HttpDispatch(server.url) as plane:
            plane.patience = 0.0
            with pytest.raises(dls.PlaneUnavailable, match="expected a server that waits for a request, got bytes"):
                await submit(plane, "k1")
        assert server.requests == []


async def test_a_silent_server_is_given_up(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt, "MIN_ANSWER_TIMEOUT", 0.3)
    for pieces in ([], [OK], [OK + b"content-length: 5\r\n\r\n\x80"]):
        silence: list[Step] = [*pieces, anyio.Event()]
        async with raw_server(place, lambda one: silence) as server, dls.HttpDispatch(server.url) as plane:  # noqa: B023
            plane.patience = 0.0
            with anyio.fail_after(20):
                with pytest.raises(dls.PlaneUnavailable, match=r"TimeoutError: no byte of an answer within 0\.3 s$"):
                    await submit(plane, "k1")


async def test_requests_at_the_same_time_get_their_own_answers(place: Place) -> None:
    """Some on connections that bad answers end, some cancelled: none gets what another asked for."""
    answers: dict[int, str] = {}

    def reply(request: Request) -> list[Step]:
        if "/daemon/release" in request.head:
            return [NOTHING]
        if "/daemon/poll" in request.head:
            return [anyio.Event()]
        kind = len(server.requests) % 5
        if kind == 0:
            return [good(*request.keys) + good("somebody-else")]
        if kind == 1:
            return [other(BAD["two lengths"][0])]
        if kind == 2:
            return [OK + b"content-length: 500\r\n\r\n" + body_for("somebody-else"), None]
        return [good(*request.keys)]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:

        async def caller(number: int) -> None:
            for turn in range(5):
                answers[number * 10 + turn] = await submit(plane, f"k{number}-{turn}")

        async with anyio.create_task_group() as group:
            for _ in range(20):
                with anyio.move_on_after(0.01):
                    await plane.claim(["q"], "w", timeout=None)
            for number in range(1, 4):
                group.start_soon(caller, number)
        assert answers == {number * 10 + turn: f"id-of-k{number}-{turn}" for number in range(1, 4) for turn in range(5)}


# TLS -----------------------------------------------------------------------------------------------------------------


async def test_a_certificate_that_nobody_vouches_for_is_refused(
    certificate: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate)
    async with raw_server(Place(context), lambda one: [good(one.key)]) as server:
        async with dls.HttpDispatch(server.url) as plane:
            plane.patience = 0.0
            with pytest.raises(dls.PlaneUnavailable, match=r"no connection: .*CERTIFICATE_VERIFY_FAILED"):
                await submit(plane, "k1")
        assert server.requests == []


async def test_a_server_without_tls_is_no_https(certificate: tuple[Path, Path]) -> None:
    async with raw_server(Place(None), lambda one: [good(one.key)]) as server:
        async with dls.HttpDispatch(server.url.replace("http:", "https:")) as plane:
            plane.patience = 0.0
            with anyio.fail_after(20):
                with pytest.raises(dls.PlaneUnavailable, match="no connection"):
                    await submit(plane, "k1")


async def test_polls_that_their_callers_leave_close_their_connections(place: Place) -> None:
    def reply(request: Request) -> list[Step]:
        if "/daemon/release" in request.head:
            return [NOTHING]
        return [anyio.Event()] if "/daemon/poll" in request.head else [good(request.key)]

    async with raw_server(place, reply) as server, dls.HttpDispatch(server.url) as plane:
        for _ in range(3):
            async with anyio.create_task_group() as group:
                before = len(server.requests)
                group.start_soon(partial(plane.claim, ["q"], "w", timeout=None))
                await wait_until(lambda: len(server.requests) > before, description="the poll")  # noqa: B023
                group.cancel_scope.cancel()
        assert await submit(plane, "k1") == "id-of-k1"
