"""A TCP proxy of the tests' own, in a thread: it passes, refuses, stalls, delays, and cuts, also in the middle of answers.

It knows just enough of HTTP/1.1 to tell which request the bytes of an answer belong to: clients here have one request
at a time on a connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

T = TypeVar("T")

START = 30.0
"""Seconds that its thread gets to begin, to end, and to do what it is told."""


class _Link:
    """One connection of a client, and ours to the server."""

    def __init__(self, near: asyncio.StreamWriter, far: asyncio.StreamWriter) -> None:
        self.near, self.far = near, far
        self.route = ""
        """The method and path of the request under way."""
        self.forgotten = False

    def abort(self) -> None:
        for writer in (self.near, self.far):
            writer.transport.abort()


class _Cut:
    """Answers that are cut off: of requests to `route`, those that `wanted` says, after `size` bytes, `times` times."""

    def __init__(self, route: str, size: int, times: int, wanted: Callable[[bytes], bool]) -> None:
        self.route, self.size, self.left, self.wanted = route, size, times, wanted


class Proxy:
    """Stands before one server, at a port of its own. `with Proxy(port) as proxy:`; every method works from any thread.

    `answers_cut` counts what `cut_answers` has cut off, `connections` what has been accepted; `requests` are the methods
    and paths of what was passed on, in order.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port, self.port = server_port, 0
        self.connections = self.answers_cut = 0
        self.requests: list[str] = []
        self._links: set[_Link] = set()
        self._cuts: list[_Cut] = []
        self._delay = 0.0
        self._kept_back: dict[str, asyncio.Event] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # What goes wrong

    def cut(self) -> int:
        """End every connection as if a cable had been pulled out and the peer had noticed; how many there were."""
        return self._do(self._cut)

    def refuse(self) -> None:
        """Accept no connections, and end those that are there."""
        self._do(self._refuse)

    def stall(self) -> None:
        """Accept everything and pass nothing on, in neither direction: what a lost network looks like."""
        self._do(self._set_passing, False)

    def mend(self) -> None:
        """Pass everything on again; what was stalled is dropped, since nobody can say what has become of it."""
        self._do(self._mend)

    def forget(self) -> None:
        """Pass nothing more on what is connected now, and say nothing; new connections work."""
        self._do(self._forget)

    def delay(self, seconds: float) -> None:
        """Pass everything on so much later, in either direction."""
        self._do(self._set_delay, seconds)

    def keep_back(self, route: str) -> None:
        """Pass requests whose line holds `route` on, and their answers only after `hand_out`."""
        self._do(self._keep_back, route)

    def hand_out(self) -> None:
        """Pass on what was kept back."""
        self._do(self._hand_out)

    def cut_answers(
        self, route: str, size: int = 0, times: int = 1, wanted: Callable[[bytes], bool] = lambda answer: True
    ) -> None:
        """Drop the connections of the next `times` answers to requests whose line holds `route`, after `size` bytes.

        wanted: looks at the first bytes of an answer.
        """
        self._do(self._add_cut, _Cut(route, size, times, wanted))

    # In its thread

    async def _cut(self) -> int:
        count = len(self._links)
        for link in list(self._links):
            link.abort()
        return count

    async def _refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._cut()

    async def _set_passing(self, passing: bool) -> None:
        (self._passing.set if passing else self._passing.clear)()

    async def _mend(self) -> None:
        if not self._passing.is_set():
            await self._cut()
            self._passing.set()
        if self._server is None:
            await self._listen()

    async def _forget(self) -> None:
        for link in self._links:
            link.forgotten = True

    async def _set_delay(self, seconds: float) -> None:
        self._delay = seconds

    async def _keep_back(self, route: str) -> None:
        self._kept_back[route] = asyncio.Event()

    async def _hand_out(self) -> None:
        while self._kept_back:
            self._kept_back.popitem()[1].set()

    async def _add_cut(self, cut: _Cut) -> None:
        self._cuts.append(cut)

    async def _listen(self) -> None:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", self.port))
        self.port = sock.getsockname()[1]
        self._server = await asyncio.start_server(self._accept, sock=sock, backlog=1000)

    async def _accept(self, from_near: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(from_near, near)
        finally:
            self._tasks.discard(task)

    async def _serve(self, from_near: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            from_far, far = await asyncio.open_connection("127.0.0.1", self.server_port)
        except OSError:
            near.transport.abort()
            return
        link = _Link(near, far)
        self._links.add(link)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(link, from_near, far, self._request))
                group.create_task(self._pump(link, from_far, near, self._answer))
        except* (OSError, EOFError):
            pass
        finally:
            self._links.discard(link)
            link.abort()

    async def _pump(
        self,
        link: _Link,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        look: Callable[[_Link, bytes], bytes | None],
    ) -> None:
        while data := await reader.read(1 << 16):
            if self._delay:
                await asyncio.sleep(self._delay)
            await self._passing.wait()
            if writer is link.near:
                for route, handed_out in list(self._kept_back.items()):
                    if route in link.route:
                        await handed_out.wait()
            rest = look(link, data)
            if link.forgotten:
                continue
            if rest is None:
                writer.write(data)
                await writer.drain()
            else:
                self.answers_cut += 1
                writer.write(rest)
                await writer.drain()
                writer.close()  # what was written arrives, unlike after an abort
                raise EOFError
        await self._passing.wait()
        if not link.forgotten or writer is link.far:  # the client has given it up
            raise EOFError  # either end ends both

    def _request(self, link: _Link, data: bytes) -> None:
        line, _, _ = data[:1000].partition(b"\r\n")
        if line.endswith(b" HTTP/1.1"):
            link.route = line.decode("latin-1")
            self.requests.append(link.route)

    def _answer(self, link: _Link, data: bytes) -> bytes | None:
        """What to pass on of an answer that is to be cut off; None for any other."""
        for cut in self._cuts:
            if cut.left > 0 and cut.route in link.route and data.startswith(b"HTTP/1.1 ") and cut.wanted(data):
                cut.left -= 1
                return data[: cut.size]
        return None

    # The thread

    def __enter__(self) -> Proxy:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(START)
        return self

    def __exit__(self, *exc: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(START)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop, self._end, self._passing = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
        self._passing.set()
        await self._listen()
        self._started.set()
        await self._end.wait()
        self._passing.set()
        await self._hand_out()
        await self._refuse()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while self._tasks:
                    await asyncio.wait(self._tasks)

    def _do(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        return asyncio.run_coroutine_threadsafe(fn(*args), self._loop).result(START)


@contextlib.contextmanager
def proxy_before(server_port: int) -> Iterator[Proxy]:
    with Proxy(server_port) as proxy:
        yield proxy
