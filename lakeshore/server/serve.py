"""Serving an ASGI application by uvicorn: on which addresses, within which bounds, and how it ends."""

from __future__ import annotations

import errno
import logging
import math
import socket
import sys
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any, cast

import anyio
import uvicorn

from ..errors import DispatchError
from .connections import BOUNDS, Bounds, Connection

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Sequence

try:
    import resource as _resource
except ImportError:  # Windows, where sockets are no file descriptors
    resource: Any = None
else:
    resource = _resource

__all__ = ["BOUNDS", "Address", "Bounds", "addresses", "listen", "loopback_only", "serve", "url_of"]

_log = logging.getLogger("dreamlake.lakeshore.server")

KEEP_ALIVE_TIMEOUT = 75
"""Seconds that a connection may stay open between two requests: longer than clients and proxies keep theirs, so that it
is they who close, and no request meets a connection that is being closed."""
UNREAD_TIMEOUT = 300
"""Seconds for which a client may leave what it is sent unread."""
ABORT_TIMEOUT = 1.0
"""Seconds that requests get when their connections were cut, to give back what they hold."""
RESERVED_FILE_DESCRIPTORS = 128
"""File descriptors that are not for connections."""


# --- where ----------------------------------------------------------------------------------------------------------

Address = tuple[socket.AddressFamily, Any]


def addresses(host: str, port: int) -> list[Address]:
    """Where a server of this name listens. Raises DispatchError for a name that is none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        said = exc.strerror if isinstance(exc, OSError) else exc
        raise DispatchError(f"cannot listen on {host!r}: {said}; {_NOT_HERE}") from None
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def loopback_only(where: Sequence[Address]) -> bool:
    """Whether only this machine reaches all of these addresses."""
    return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for _, address in where)


def listen(where: Sequence[Address]) -> list[socket.socket]:
    """Sockets that listen there, all on the port that the first one has. Raises DispatchError.

    Of several addresses of a name, those that this machine does not have are left out.
    """
    sockets: list[socket.socket] = []
    for family, (host, port, *rest) in where:
        port = port or (sockets[0].getsockname()[1] if sockets else 0)
        try:
            sockets.append(_listening(family, (host, port, *rest)))
        except OSError as exc:
            if exc.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(where) > 1:
                continue
            for sock in sockets:
                sock.close()
            raise _not_listening(f"{host}:{port}", exc) from None
    if not sockets:
        raise DispatchError(f"cannot listen on any of {', '.join(str(at[0]) for _, at in where)}: {_NOT_HERE}")
    return sockets


_NOT_HERE = "give --host an address or a name of this machine"


def _not_listening(where: str, exc: OSError) -> DispatchError:
    fix = {
        errno.EADDRINUSE: "a server may be running there already: give another --port, or 0 for one that is free",
        errno.EACCES: "give a --port that everybody may use, or 0 for one that is free",
    }
    return DispatchError(f"cannot listen on {where}: {exc.strerror}; {fix.get(exc.errno or 0, _NOT_HERE)}")


def _listening(family: socket.AddressFamily, where: Any) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit these: a client whose machine is gone is noticed although nothing is written to it, and one
        # that never reads what is written to it is given up.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_TIMEOUT * 1000)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(where)
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def url_of(sock: socket.socket) -> str:
    """The address of a listening socket, for people and clients."""
    host, port, *_ = sock.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# --- connections ----------------------------------------------------------------------------------------------------


def _most_connections(wanted: int) -> int:
    """As many as wanted, or as the system lets this process have."""
    if resource is None:
        return wanted
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + RESERVED_FILE_DESCRIPTORS:
        more = (
            wanted + RESERVED_FILE_DESCRIPTORS
            if hard == resource.RLIM_INFINITY
            else min(hard, wanted + RESERVED_FILE_DESCRIPTORS)
        )
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except (ValueError, OSError):
            pass  # some systems have a limit below the one that they tell
    return wanted if soft == resource.RLIM_INFINITY else max(1, min(wanted, soft - RESERVED_FILE_DESCRIPTORS))


# --- serving --------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn's, which leaves signals to others, sleeps until it is told to end, and says when it accepts."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready, self._stopping = ready, anyio.Event()

    def stop(self) -> None:
        self.should_exit = True
        self._stopping.set()

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except SystemExit:
            pass  # older ones come back instead
        if not self.started:
            raise DispatchError("the server did not start: its application failed, see the log")
        self._ready()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):  # of its ticks every tenth does something, once a second
            counter += 10
            with anyio.move_on_after(1.0):
                await self._stopping.wait()

    def close(self) -> None:
        """Accept no more. Before the sockets are closed: uvloop waits for ever for one that was closed behind its back."""
        for server in getattr(self, "servers", ()):
            server.close()

    def cut(self) -> int:
        """End all connections; how many there were."""
        connections = [*self.server_state.connections]
        for connection in connections:
            transport: Any = connection.transport
            transport.abort()
        return len(connections)

    def cancel(self) -> None:
        for task in [*self.server_state.tasks]:
            task.cancel()


async def serve(
    app: Any,
    sockets: list[socket.socket],
    *,
    stop: anyio.Event,
    cut: anyio.Event,
    grace: float,
    drain: Callable[[], object],
    ready: Callable[[], object],
    bounds: Bounds = BOUNDS,
) -> None:
    """Serve `app` on these sockets, which it closes, until `stop`; on asyncio.

    ready: called when requests are accepted. After `stop` no connection is accepted, `drain` is called, by which the
    application ends what it holds, and requests under way have `grace` seconds; what is left then, or when `cut` comes,
    is cut off. Raises DispatchError when the application does not start.
    """
    bounds = bounds._replace(connections=_most_connections(bounds.connections))
    config = uvicorn.Config(
        app,
        http=cast("Any", partial(Connection, bounds)),
        ws="none",
        interface="asgi3",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # nothing here depends on who asks, but on the token
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
        workers=1,
    )
    server, failure = _Server(config, ready), None
    with _quiet():
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await _end(server, stop, cut, grace, drain)
                group.cancel_scope.cancel()

            group.start_soon(end)
            try:
                await server.serve(sockets)
            except Exception as exc:  # raised below, out of the group's wrapping
                failure = exc
            finally:
                server.close()
                for sock in sockets:
                    sock.close()
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _end(server: _Server, stop: anyio.Event, cut: anyio.Event, grace: float, drain: Callable[[], object]) -> None:
    """From `stop` on: ever less polite, until `serve` comes back and cancels this."""
    await stop.wait()
    server.stop()
    drain()
    with anyio.move_on_after(grace if math.isfinite(grace) else None):
        await cut.wait()
    if count := server.cut():
        _log.warning("%d connection%s cut off", count, " is" if count == 1 else "s are")
    await anyio.sleep(ABORT_TIMEOUT)
    server.cancel()
    await anyio.sleep(ABORT_TIMEOUT)


@contextmanager
def _quiet() -> Generator[None]:
    """Requests that are cancelled at the end are no failures of the application, which is what uvicorn logs."""

    def wanted(record: logging.LogRecord) -> bool:
        cancelled = anyio.get_cancelled_exc_class()
        return not (record.exc_info and isinstance(record.exc_info[1], cancelled))

    log = logging.getLogger("uvicorn.error")
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)
