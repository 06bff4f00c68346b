"""Requests that are too large, too slow, cut short or none at all: each ends soon, in bounded memory, alone."""

from __future__ import annotations

import contextlib
import socket
import textwrap
import time
from typing import TYPE_CHECKING

import pytest
import raw_kit
from raw_kit import (
    AWAIT,
    CHUNK,
    MB,
    PATIENCE,
    SOCKET,
    SUBMIT,
    TYPE,
    Wire,
    head,
    pack,
    server_process,
    still_serves,
    stream_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from raw_kit import Server

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue


# --- large bodies ----------------------------------------------------------------------------------------------------


@SOCKET
async def test_a_body_of_1_GB_that_is_announced_is_a_413_before_it_is_sent(server: Server) -> None:
    before = server.memory()
    with Wire(server.port) as wire:
        wire.send(head(TYPE, f"Content-Length: {1 << 30}") + b"x" * 1000)
        status, fields = wire.answer()
        assert (status, fields["error"]["type"]) == (413, "TooLarge")
        assert str(128 * MB) in fields["error"]["message"], "the limit is named"
    assert server.memory() - before < 16 * MB
    async with server.api() as api:
        await still_serves(api)


@SOCKET
async def test_a_client_that_sends_its_1_GB_body_all_the_same_is_cut_off(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head(TYPE, f"Content-Length: {1 << 30}"))
        sent = 0
        with contextlib.suppress(OSError):
            while sent < 1 << 30:
                wire.send(bytes(MB))
                sent += MB
        assert wire.closed()
    assert server.memory() < 400 * MB
    async with server.api() as api:
        await still_serves(api)


def chunks_until_answered(wire: Wire, most: int) -> int:
    """Send a chunked body until the server says something; the bytes that it took."""
    sent, piece = 0, b"%x\r\n" % MB + bytes(MB) + b"\r\n"
    wire.socket.setblocking(False)
    view = memoryview(piece)
    while sent < most:
        with contextlib.suppress(BlockingIOError):
            if wire.socket.recv(1, socket.MSG_PEEK):
                break
        try:
            count = wire.socket.send(view)
        except BlockingIOError:
            time.sleep(0.001)
            continue
        except OSError:
            break
        sent += count
        view = view[count:] or memoryview(piece)
    wire.socket.settimeout(PATIENCE)
    return sent


@SOCKET
async def test_a_body_of_1_GB_in_chunks_is_a_413_once_it_passes_the_limit(server: Server) -> None:
    with Wire(server.port) as wire:
        wire.send(head(TYPE, "Transfer-Encoding: chunked"))
        sent = chunks_until_answered(wire, 1 << 30)
        status, fields = wire.answer()
        assert (status, fields["error"]["type"]) == (413, "TooLarge")
        assert sent < 200 * MB
    assert server.memory("VmHWM") < 600 * MB
    async with server.api() as api:
        await still_serves(api)


@SOCKET
async def test_the_limit_of_a_body_is_the_servers_to_choose(tmp_path: Path, queue: str) -> None:
    with server_process(tmp_path / "plane.db", "--max-body", "1M") as small:
        async with small.api() as api:
            id = await api.submit(queue, bytes(MB - 1000))
            for number in range(20):
                answer = await api.ask(
                    SUBMIT, {"invocation_id": f"big-{number}", "args_blob": bytes(MB), "queue": queue}
                )
                assert answer.error == (413, "TooLarge")
            assert [body["invocation_id"] for body in await api.poll(queue, max_commands=9)] == [id]
        before = small.memory("VmHWM")
        for _ in range(20):
            with Wire(small.port) as wire:
                wire.send(head(TYPE, "Transfer-Encoding: chunked"))
                assert chunks_until_answered(wire, 64 * MB) < 16 * MB
                assert wire.answer()[0] == 413
        assert small.memory("VmHWM") - before < 32 * MB


@SOCKET
async def test_readers_that_do_not_read_do_not_fill_the_servers_memory(server: Server, queue: str) -> None:
    """Ten of them, before 100 MB of frames each."""
    async with server.api() as api:
        id = await api.running(queue)
        for seq in range(100):
            await api.do(CHUNK, {"invocation_id": id, "seq": seq, "bytes": bytes(MB)})
        before = server.memory()
        with contextlib.ExitStack() as stack:
            for _ in range(10):
                wire = stack.enter_context(Wire(server.port))
                wire.send(f"GET {stream_of(id)} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                assert wire.socket.recv(15) == b"HTTP/1.1 200 OK"
            await still_serves(api)
            assert server.memory() - before < 300 * MB, "of the 1000 that there are to send"
        await still_serves(api)


# --- slow, cut and malformed requests --------------------------------------------------------------------------------

IMPATIENT = """
    import logging, sys
    import anyio
    import dreamlake.lakeshore as dls
    from dreamlake.lakeshore.server.app import create_app
    from dreamlake.lakeshore.server.limits import Limits
    from dreamlake.lakeshore.server.serve import Bounds, addresses, listen, serve, url_of

    async def main():
        logging.basicConfig(level=logging.DEBUG)
        app = create_app(dls.Dispatch(sys.argv[1]), limits=Limits(body=1 << 20, body_timeout=0.5))
        (sock,) = listen(addresses("127.0.0.1", 0))
        await serve(
            app, [sock], stop=anyio.Event(), cut=anyio.Event(), grace=1, drain=app.drain,
            ready=lambda: print(" on " + url_of(sock), file=sys.stderr, flush=True), bounds=Bounds(headers_s=0.5),
        )

    anyio.run(main)
"""


@pytest.fixture(scope="module")
def impatient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with the deadlines of half a second, which logs whatever there is to log."""
    db = tmp_path_factory.mktemp("impatient") / "plane.db"
    with raw_kit.script_process(textwrap.dedent(IMPATIENT), str(db)) as made:
        yield made
        assert made.alive


SLOW = {
    "nothing": b"",
    "half a line": b"POST /v1/produ",
    "half of the headers": head(TYPE, "X: y")[:-2],
    "a header without end": head("X: ")[:-4] + b"x" * 2000,
}


@SOCKET
@pytest.mark.parametrize("slow", SLOW)
async def test_a_client_that_never_ends_its_headers_is_cut_off(impatient: Server, slow: str) -> None:
    """Slow loris: also when it sends a byte now and then."""
    with Wire(impatient.port) as wire:
        wire.send(SLOW[slow])
        with contextlib.suppress(OSError):
            for _ in range(100):
                if SLOW[slow]:
                    wire.send(b"x")
                time.sleep(0.02)
        assert wire.closed()


@SOCKET
async def test_a_client_that_never_ends_its_body_is_told_so_and_cut_off(impatient: Server) -> None:
    with Wire(impatient.port) as wire:
        wire.send(head(TYPE, "Content-Length: 1000") + b"x" * 10)
        status, fields = wire.answer()
        assert status == 408
        assert fields["error"]["type"]
        assert wire.closed()


@SOCKET
async def test_many_slow_clients_hold_nobody_up(impatient: Server) -> None:
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(impatient.port)) for _ in range(200)]
        for number, wire in enumerate(wires):
            wire.send([b"", b"POST /v1", head(TYPE, "Content-Length: 9") + b"x"][number % 3])
        async with impatient.api() as api:
            for _ in range(3):
                await still_serves(api)
        assert all(wire.closed() for wire in wires)


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello over TLS\r\n\r\n",
    "garbage": bytes(range(256)) * 8,
    "no version": b"POST /v1/producer/submit\r\n\r\n",
    "another version": b"POST /v1/producer/submit HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n",
    "a length that is none": head(TYPE, "Content-Length: x"),
    "a negative length": head(TYPE, "Content-Length: -5"),
    "a length too long": head(TYPE, "Content-Length: " + "9" * 30),
    "two lengths": head(TYPE, "Content-Length: 1", "Content-Length: 2") + b"\x80",
    "a length and chunks": head(TYPE, "Content-Length: 1", "Transfer-Encoding: chunked") + b"1\r\n\x80\r\n0\r\n\r\n",
    "a chunk that is none": head(TYPE, "Transfer-Encoding: chunked") + b"zz\r\n",
    "a chunk of 2^64": head(TYPE, "Transfer-Encoding: chunked") + b"fffffffffffffffff\r\n",
    "an encoding that is none": head(TYPE, "Transfer-Encoding: odd") + b"\x80",
    "a header of 1 MB": head(TYPE, "X: " + "x" * MB),
    "100 000 headers": head(TYPE, *(f"X-{n}: y" for n in range(100_000))),
    "a path of 1 MB": head(TYPE, path="/v1/" + "x" * MB),
    "a NUL in the path": head(TYPE, "Content-Length: 0", path="/v1/producer/invocations/\0"),
    "a NUL in a header": head(TYPE, "X: \0", "Content-Length: 0"),
}


@SOCKET
@pytest.mark.parametrize("malformed", MALFORMED)
async def test_what_is_no_request_is_refused_and_closed(impatient: Server, malformed: str) -> None:
    with Wire(impatient.port) as wire:
        with contextlib.suppress(OSError):
            wire.send(MALFORMED[malformed])
        with contextlib.suppress(OSError):
            wire.socket.shutdown(socket.SHUT_WR)
        first = b""
        with contextlib.suppress(OSError):
            first = wire.socket.recv(100)
        assert not first or first.startswith(b"HTTP/1.1 4"), first
        assert wire.closed()
    async with impatient.api() as api:
        await still_serves(api)
    assert impatient.memory() < 400 * MB


@SOCKET
async def test_clients_that_leave_in_the_middle_of_anything_are_forgotten(impatient: Server, queue: str) -> None:
    whole = head(TYPE, "Content-Length: 100") + bytes(100)
    for cut in (1, 10, 30, len(whole) - 100, len(whole) - 1, len(whole)):
        for linger in (None, 0):
            with Wire(impatient.port) as wire:
                if linger is not None:
                    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset
                wire.send(whole[:cut])
    async with impatient.api() as api:
        await still_serves(api)
    assert "Traceback" not in impatient.err, impatient.err


@SOCKET
async def test_requests_may_come_one_after_the_other_without_waiting_for_answers(impatient: Server) -> None:
    body = pack({"invocation_id": "none", "timeout_s": 0})
    request = head(TYPE, f"Content-Length: {len(body)}", path=AWAIT) + body
    with Wire(impatient.port) as wire:
        wire.send(request * 16)  # more of them are refused, see test_serve.py
        got = b""
        while got.count(b"HTTP/1.1 404") < 16:
            got += wire.socket.recv(65536)
