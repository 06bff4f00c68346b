"""Serve an ASGI application with uvicorn: its addresses, its bounds and its shutdown."""

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
"""Seconds for which a connection may stay open between two requests. Clients and proxies use shorter times, so they close
first, and no request arrives on a connection that the server is closing."""
UNREAD_TIMEOUT = 300
"""Seconds for which a client may leave sent data unread."""
ABORT_TIMEOUT = 1.0
"""Seconds that requests get to release their claims after their connections were closed."""
RESERVED_FILE_DESCRIPTORS = 128
"""File descriptors that connections do not use."""


# --- where ----------------------------------------------------------------------------------------------------------

Address = tuple[socket.AddressFamily, Any]


def addresses(host: str, port: int) -> list[Address]:
    """Look up the addresses of a host name. Raises DispatchError if it has none."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise DispatchError(f"cannot listen on {host!r}: {reason}; {_NOT_HERE}") from None
    return list(dict.fromkeys((family, where) for family, _, _, _, where in found))


def loopback_only(where: Sequence[Address]) -> bool:
    """Whether only this machine can reach these addresses."""
    return all(ip_address(str(address[0]).partition("%")[0]).is_loopback for _, address in where)


def listen(where: Sequence[Address]) -> list[socket.socket]:
    """Open listening sockets, all on the port of the first one. Raises DispatchError.

    Of several addresses of one name, those that this machine does not have are skipped.
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
        # Connections inherit these options. They detect a client whose machine is gone although nothing is written to it,
        # and close the connection of a client that never reads.
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
    """The URL of a listening socket."""
    host, port, *_ = sock.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


# --- connections ----------------------------------------------------------------------------------------------------


def _most_connections(wanted: int) -> int:
    """The wanted number of connections, or fewer if the system allows this process fewer files."""
    if resource is None:
        return wanted
    soft: int
    hard: int
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted + RESERVED_FILE_DESCRIPTORS:
        more: int = wanted + RESERVED_FILE_DESCRIPTORS
        if hard != resource.RLIM_INFINITY:
            more = min(hard, more)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
            soft = more
        except (ValueError, OSError):
            pass  # some systems have a lower limit than the one that they report
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, soft - RESERVED_FILE_DESCRIPTORS))


# --- serving --------------------------------------------------------------------------------------------------------


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers: it sleeps until `stop`, and calls `ready` once it accepts requests."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._ready = ready
        self._stopping = anyio.Event()

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
            pass  # older versions of uvicorn return instead
        if not self.started:
            raise DispatchError("the server did not start: its application failed, see the log")
        self._ready()

    async def main_loop(self) -> None:
        counter = 0
        while not await self.on_tick(counter):  # only every tenth tick does something, once a second
            counter += 10
            with anyio.move_on_after(1.0):
                await self._stopping.wait()

    def close(self) -> None:
        """Accept no more connections. Call it before the sockets are closed, or uvloop waits for ever."""
        for server in getattr(self, "servers", ()):
            server.close()

    def cut(self) -> int:
        """Abort all connections; return how many there were."""
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
    """Serve `app` until `stop` is set; on asyncio only.

    After `stop` the server accepts no connections and calls `drain`. Running requests get `grace` seconds. Then, or as
    soon as `cut` is set, the remaining connections are aborted.

    Args:
        app: the ASGI application.
        sockets: listening sockets; this function closes them.
        stop: begins the shutdown.
        cut: ends the grace at once.
        grace: seconds that running requests get after `stop`.
        drain: makes the application end its held requests.
        ready: is called once the server accepts requests.
        bounds: the bounds of connections.

    Raises:
        DispatchError: the application did not start.
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
        proxy_headers=False,  # access depends on the token, not on the client's address
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_TIMEOUT,
        workers=1,
    )
    server = _Server(config, ready)
    failure: Exception | None = None
    with _quiet():
        async with anyio.create_task_group() as group:

            async def end() -> None:
                await _end(server, stop, cut, grace, drain)
                group.cancel_scope.cancel()

            group.start_soon(end)
            try:
                await server.serve(sockets)
            except Exception as exc:  # raised below, so that it is not wrapped in a group
                failure = exc
            finally:
                server.close()
                for sock in sockets:
                    sock.close()
            group.cancel_scope.cancel()
    if failure is not None:
        raise failure


async def _end(server: _Server, stop: anyio.Event, cut: anyio.Event, grace: float, drain: Callable[[], object]) -> None:
    """Shut down in steps after `stop`: drain, abort connections, cancel requests. `serve` cancels this when it is done."""
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
    """Keep uvicorn from logging requests that the shutdown cancels as failures of the application."""

    def wanted(record: logging.LogRecord) -> bool:
        cancelled = anyio.get_cancelled_exc_class()
        return not (record.exc_info and isinstance(record.exc_info[1], cancelled))

    log = logging.getLogger("uvicorn.error")
    log.addFilter(wanted)
    try:
        yield
    finally:
        log.removeFilter(wanted)
