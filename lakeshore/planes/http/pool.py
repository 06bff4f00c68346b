"""Requests and answers over a pool of connections: our own for plain HTTP, httpx for TLS, proxies and other transports.

Half of what a small request costs in httpx goes into objects that nobody here looks at, and into a timeout around each
step. One request after the other on a connection, HTTP/1.1, is little enough to be written down: RFC 9112.
"""

from __future__ import annotations

import re
import select
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import anyio
import httpx
from anyio.abc import SocketAttribute

if TYPE_CHECKING:
    from collections.abc import Mapping

    from anyio.abc import SocketStream

__all__ = ["CONNECT_S", "Answer", "Broken", "Connections", "HttpxPool", "Pool", "check_address", "proxied"]

CONNECT_S = 5.0
PIECE = 256 << 10
"""Bytes of a large body that are sent at a time: each has the whole time for an answer to itself."""
MOST_HEAD = 64 << 10
REQUEST_ID = "x-request-id"
MOST_LINES = 16
"""Interim answers before an answer, and trailers after it."""
_NO_BODY = frozenset({204, 304})


class Answer(NamedTuple):
    """What came back. headers: by their names in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Pool(Protocol):
    """Where requests are sent. Raises OSError for whatever keeps an answer from coming."""

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes, read: float) -> Answer:
        """One request; read: seconds without a byte after which it is given up. It may be sent twice."""
        ...

    async def aclose(self) -> None: ...


class Broken(OSError):
    """The far side closed the connection in the middle of an answer, or what it said is no answer."""


class _Stale(Broken):
    """The far side had closed the connection before it saw the request, as it may at any time between two."""


class _Connection:
    """One connection, used by one request at a time."""

    def __init__(self, stream: SocketStream) -> None:
        self.stream = stream
        self._socket = stream.extra(SocketAttribute.raw_socket)
        self._buffer = bytearray()
        self._scope = anyio.CancelScope()
        self._read = 0.0

    def spoilt(self) -> bool:
        """Whether there is something to read before anything was asked: an answer to nobody, or the connection's end."""
        return bool(self._buffer) or _readable(self._socket.fileno())

    async def exchange(self, head: bytes, body: bytes, read: float) -> tuple[Answer, bool]:
        """The answer, and whether the connection can be used again."""
        self._read, self._scope = read, anyio.CancelScope(deadline=anyio.current_time() + read)
        with self._scope:
            refused: Exception | None = None
            try:
                await self._send(head, body)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
                refused = exc  # it may have said why before it closed
            try:
                return await self._answer()
            except (anyio.EndOfStream, anyio.BrokenResourceError, anyio.ClosedResourceError) as exc:
                if not self._buffer:
                    raise _Stale("the connection was closed before an answer came") from refused or exc
                raise Broken("the connection was closed in the middle of an answer") from exc
        raise TimeoutError(f"not a byte of an answer for {read:g} s")

    async def _send(self, head: bytes, body: bytes) -> None:
        if len(body) <= PIECE:
            await self.stream.send(head + body)
            return
        await self.stream.send(head)
        view = memoryview(body)
        for start in range(0, len(body), PIECE):
            await self.stream.send(bytes(view[start : start + PIECE]))
            self._scope.deadline = anyio.current_time() + self._read

    async def _more(self) -> None:
        self._buffer += await self.stream.receive(1 << 18)
        self._scope.deadline = anyio.current_time() + self._read

    async def _line(self, end: bytes, most: int) -> bytes:
        """What comes before `end`, which is taken too."""
        start = 0
        while (at := self._buffer.find(end, start)) < 0:
            if len(self._buffer) > most:
                raise Broken(f"expected an answer whose head is at most {most} bytes, got more")
            start = max(0, len(self._buffer) - len(end))
            await self._more()
        line = bytes(self._buffer[:at])
        del self._buffer[: at + len(end)]
        return line

    async def _take(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        return data

    async def _answer(self) -> tuple[Answer, bool]:
        for _ in range(MOST_LINES):
            version, status, headers = _head(await self._line(b"\r\n\r\n", MOST_HEAD))
            if status >= 200:
                break
        else:  # what comes before the answer itself is passed over, but not for ever
            raise Broken(f"expected an answer after at most {MOST_LINES} interim ones, got more")
        keep = version == b"HTTP/1.1" and "close" not in headers.get("connection", "").lower()
        length = headers.get("content-length", "")
        if status in _NO_BODY:
            body = b""
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            body = await self._chunks()
        elif re.fullmatch("[0-9]{1,12}", length):
            body = await self._take(int(length))
        elif length or "transfer-encoding" in headers:
            raise Broken("expected an answer whose length can be told, got another")
        else:
            body, keep = await self._rest(), False
        return Answer(status, headers, body), keep and not self._buffer

    async def _chunks(self) -> bytes:
        parts: list[bytes] = []
        while True:
            line = (await self._line(b"\r\n", MOST_HEAD)).split(b";")[0].strip()
            if not re.fullmatch(b"[0-9a-fA-F]{1,8}", line):
                raise Broken(f"expected the size of a chunk, got {line[:40]!r}")
            size = int(line, 16)
            if size == 0:
                await self._trailers()
                return b"".join(parts)
            parts.append(await self._take(size))
            if await self._take(2) != b"\r\n":
                raise Broken("expected the end of a chunk, got more of it")

    async def _trailers(self) -> None:
        for _ in range(MOST_LINES):
            if not await self._line(b"\r\n", MOST_HEAD):
                return
        raise Broken(f"expected at most {MOST_LINES} lines after the last chunk, got more")

    async def _rest(self) -> bytes:
        while True:
            try:
                await self._more()
            except anyio.EndOfStream:
                return await self._take(len(self._buffer))


def _head(block: bytes) -> tuple[bytes, int, dict[str, str]]:
    first, *lines = block.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    code = rest[:3]
    if not version.startswith(b"HTTP/1.") or not re.fullmatch(b"[1-9][0-9][0-9]", code):
        raise Broken(f"expected an HTTP/1.1 answer, got {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.lower()] = value.strip()
    return version, int(code), headers


class Connections:
    """Connections to one plain HTTP server, kept open between requests. most: how many; None: as many as it takes."""

    def __init__(self, host: str, port: int, most: int | None) -> None:
        self._host, self._port = host, port
        self._places = None if most is None else anyio.Semaphore(most)
        self._idle: list[_Connection] = []
        name = f"[{host}]" if ":" in host else host
        self._name = name if port == 80 else f"{name}:{port}"
        self._closed = False

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes, read: float) -> Answer:
        lines = [f"{method} {target} HTTP/1.1", f"host: {self._name}", *(f"{k}: {v}" for k, v in headers.items())]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1")
        if self._places is None:
            return await self._exchange(head, body, read, headers)
        async with self._places:
            return await self._exchange(head, body, read, headers)

    async def _exchange(self, head: bytes, body: bytes, read: float, headers: Mapping[str, str]) -> Answer:
        while True:
            used = bool(self._idle)
            connection = self._idle.pop() if used else await self._connect()
            keep = False
            try:
                if used and connection.spoilt():
                    continue
                answer, reusable = await connection.exchange(head, body, read)
                _check_echo(headers, answer)
                keep = reusable
                return answer
            except _Stale:
                if not used:
                    raise
            finally:
                if keep and not self._closed:
                    self._idle.append(connection)
                else:
                    await anyio.aclose_forcefully(connection.stream)

    async def _connect(self) -> _Connection:
        if self._closed:
            raise Broken("the plane was closed")
        try:
            with anyio.move_on_after(CONNECT_S):
                return _Connection(await anyio.connect_tcp(self._host, self._port))
        except OSError as exc:  # anyio tells the reason as its cause
            raise Broken(f"no connection: {exc.__cause__ or exc}") from exc
        raise Broken(f"no connection within {CONNECT_S:g} s")

    async def aclose(self) -> None:
        self._closed = True
        while self._idle:
            await anyio.aclose_forcefully(self._idle.pop().stream)


class HttpxPool:
    """The same with httpx."""

    def __init__(self, base: str, most: int | None, transport: httpx.AsyncBaseTransport | None) -> None:
        limits = httpx.Limits(max_connections=most, max_keepalive_connections=most, keepalive_expiry=60.0)
        self._base = base
        self.client = httpx.AsyncClient(limits=limits, transport=transport, follow_redirects=False)

    async def send(self, method: str, target: str, headers: Mapping[str, str], body: bytes, read: float) -> Answer:
        timeout = httpx.Timeout(read, connect=CONNECT_S, pool=None)
        request = self.client.build_request(
            method, self._base + target, content=body or None, headers=dict(headers), timeout=timeout
        )
        try:
            response = await self.client.send(request)
        except httpx.ConnectError as exc:
            raise Broken(f"no connection: {exc}") from exc
        except (httpx.TransportError, RuntimeError) as exc:  # RuntimeError: the client was closed meanwhile
            raise Broken(f"{type(exc).__name__}: {exc}") from exc
        answer = Answer(response.status_code, response.headers, response.content)
        _check_echo(headers, answer)
        return answer

    async def aclose(self) -> None:
        await self.client.aclose()


def _readable(number: int) -> bool:
    if not hasattr(select, "poll"):
        return bool(select.select([number], [], [], 0)[0])
    poll = select.poll()
    poll.register(number, select.POLLIN)
    return bool(poll.poll(0))


def _check_echo(headers: Mapping[str, str], answer: Answer) -> None:
    """Raises Broken for an answer that says another request's id; what proxies put there does not look like ours."""
    asked, got = headers.get(REQUEST_ID), answer.headers.get(REQUEST_ID)
    if asked is not None and got is not None and got != asked and re.fullmatch("[0-9A-Z]{26}", got):
        raise Broken(f"expected the answer to request {asked}, got that to request {got}")


def proxied(host: str) -> bool:
    """Whether the environment wants requests to this host to go through a proxy."""
    proxies = getproxies()
    return ("http" in proxies or "all" in proxies) and not proxy_bypass(host)


def check_address(url: str, token: str | None) -> None:
    """Raises ValueError for what is no URL of a control plane, or no token: both become lines of a request."""
    such = "expected the URL of a control plane, such as http://127.0.0.1:8750"
    said = f"{such}, got {url.rpartition('@')[2]!r}"
    try:
        parts = urlsplit(url)
        whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        raise ValueError(f"{said}: a port is a number from 1 to 65535, an address of IPv6 stands in brackets") from None
    if "@" in url or parts.query or parts.fragment:
        safe = f"{parts.scheme}://{parts.hostname}" if parts.hostname else re.split("[?#]", url.rpartition("@")[2])[0]
        raise ValueError(
            f"{such}, without a user or a query in it, got {safe!r}: "
            "give a token with token=, LAKESHORE_CLIENT_TOKEN or --token-file"
        )
    if parts.scheme not in ("http", "https"):
        hint = f": write http://{url}" if re.fullmatch(r"[\w.-]+(:[0-9]+)?(/\S*)?", url, re.ASCII) else ""
        raise ValueError(f"{said}: it begins with http:// or https://{hint}")
    if not whole or not _is_plain(url):
        raise ValueError(f"{said}: behind http:// or https:// comes the name of a host, in plain ASCII without spaces")
    if token is not None and (not token or not _is_plain(token)):
        raise ValueError(
            f"expected a token, printable ASCII without spaces, got {len(token)} characters of another kind: "
            "take the one line that `lakeshore token create` printed"
        )


def _is_plain(text: str) -> bool:
    return text.isascii() and text.isprintable() and " " not in text
