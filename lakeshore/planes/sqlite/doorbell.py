"""Bells that wake waiting engines: datagram sockets between processes, events inside one.

In a folder beside the database, `bells` holds a socket of each engine that waits for something; it is linked into a
folder for each kind of news (`ends`, `cancels`, and in `jobs` one for each queue) while somebody there waits for that
kind. Who commits rings after the commit, once a batch. A bell is a hint: what is missed is found by the next look.
"""

from __future__ import annotations

import hashlib
import os
import socket
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio
from anyio.lowlevel import current_token

from ...concurrency.loops import on_readable, run_sync_soon

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .rows import Changes

__all__ = [
    "CANCELS",
    "ENDS",
    "EVERYTHING",
    "JOBS",
    "PLACES",
    "Bell",
    "EventBell",
    "Near",
    "SocketBell",
    "datagram_socket",
    "jobs_of",
    "listed",
    "places",
    "remove",
    "ring_at",
]

JOBS, ENDS, CANCELS = "jobs", "ends", "cancels"
EVERYTHING = frozenset({JOBS, ENDS, CANCELS})
_BYTES = {JOBS: b"j", ENDS: b"e", CANCELS: b"c"}
_KINDS = {data[0]: kind for kind, data in _BYTES.items()}
_PATH_LIMIT = 100  # of the 107 bytes that a socket's address holds
_LOOK = 5.0  # seconds after which a bell that was not rung makes sure that it still hangs


PLACES = tuple(_BYTES)


@lru_cache(maxsize=1024)
def jobs_of(ns: str, queue: str) -> str:
    """Where the bells of those hang who wait for jobs of a queue, whatever its name is made of."""
    name = f"{ns}\0{queue}".encode("utf-8", "surrogatepass")
    return f"{JOBS}/{hashlib.blake2b(name, digest_size=8).hexdigest()}"


Hear: TypeAlias = "Callable[[set[str]], set[str]]"


class Bell(Protocol):
    """What one engine hears. `wait` gives the kinds rung since; `poke`, from any thread, rings it for all kinds.

    `hear`, if set, is called with them first, on the loop but in no task: what it gives back is left to `wait`.
    """

    hear: Hear | None

    async def wait(self) -> frozenset[str]: ...

    def hang(self, place: str, waited_for: bool) -> None:
        """Say whether somebody waits for what is rung at `place`: ENDS, CANCELS, or what `jobs_of` gives."""
        ...

    def poke(self) -> None: ...

    def close(self) -> None: ...


class EventBell:
    """A bell inside this process."""

    def __init__(self, closed: Callable[[EventBell], None] = lambda bell: None) -> None:
        self._token, self._event = current_token(), anyio.Event()
        self._rung: set[str] = set()
        self._hung: set[str] = set()
        self._closed = closed
        self.hear: Hear | None = None

    async def wait(self) -> frozenset[str]:
        while not self._rung:
            await self._event.wait()
            self._event = anyio.Event()
        rung = frozenset(self._rung)
        self._rung.clear()
        return rung

    def hang(self, place: str, waited_for: bool) -> None:
        (self._hung.add if waited_for else self._hung.discard)(place)

    def ring(self, places: Iterable[str]) -> None:
        """Thread-safe: wake the waiter if it waits for what is rung at one of `places`."""
        heard = {place.partition("/")[0] for place in self._hung.intersection(places)}
        if heard:
            run_sync_soon(self._token, self._hear, heard)

    def poke(self) -> None:
        run_sync_soon(self._token, self._hear, EVERYTHING)

    def _hear(self, kinds: Iterable[str]) -> None:
        self._rung |= set(kinds) if self.hear is None else self.hear(set(kinds))
        if self._rung:
            self._event.set()

    def close(self) -> None:
        self._closed(self)


def places(ns: str, changes: Changes) -> dict[str, int | None]:
    """Where to ring after a commit, and at how many of the bells there; None: at all of them."""
    places: dict[str, int | None] = {jobs_of(ns, queue): count for queue, count in changes.jobs.items()}
    if changes.outcomes:
        places[ENDS] = None
    if changes.cancels:
        places[CANCELS] = None
    return places


def listed(folder: Path | str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def remove(path: Path) -> None:
    try:
        path.unlink()
    except OSError:
        pass  # gone already, or nothing of ours


class Near:
    """Addresses of sockets in the folder, short enough whatever the folder's path."""

    def __init__(self, folder: Path) -> None:
        self._base, self._fd = str(folder), -1
        if len(os.fsencode(self._base)) + 60 > _PATH_LIMIT and os.path.isdir("/proc/self/fd"):
            self._fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            self._base = f"/proc/self/fd/{self._fd}"

    def __call__(self, kind: str, name: str) -> str:
        return f"{self._base}/{kind}/{name}"

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class SocketBell:
    """A bell that other processes can ring."""

    def __init__(self, folder: Path, near: Near, name: str) -> None:
        self._folder, self._near, self._name = folder, near, name
        self._hung: set[str] = set()
        self._rung: set[str] = set()
        self._event = anyio.Event()
        self._deaf: Callable[[], None] | None = None  # where the loop itself tells when there is something to hear
        self.hear: Hear | None = None
        self._path = folder / "bells" / name
        socket = datagram_socket()
        if socket is None:
            raise OSError("no unix datagrams on this platform")
        self._socket = socket
        try:
            self._path.unlink(missing_ok=True)
            self._socket.bind(near("bells", name))
        except BaseException:
            self._socket.close()
            raise

    async def wait(self) -> frozenset[str]:
        """Raises OSError when nobody could ring it any more: another one is to be hung up."""
        if self._deaf is None:
            self._deaf = on_readable(self._socket, self._rang)
        while not self._rung:
            with anyio.move_on_after(_LOOK) as patience:
                if self._deaf is None:
                    await anyio.wait_readable(self._socket)
                    self._rang()
                else:
                    await self._event.wait()
                    self._event = anyio.Event()
            if patience.cancelled_caught and not os.path.exists(self._path):  # noqa: ASYNC240 -- every few seconds
                raise OSError("the socket was removed from its folder")
        rung, self._rung = frozenset(self._rung), set()
        return rung

    def _rang(self) -> None:
        rung = self._received()
        self._rung |= rung if self.hear is None else self.hear(rung)
        if self._rung:
            self._event.set()

    def _received(self) -> set[str]:
        rung: set[str] = set()
        while True:
            try:
                data = self._socket.recv(16)
            except BlockingIOError:
                return rung
            rung |= EVERYTHING if data == b"*" else {_KINDS.get(data[0], JOBS)} if data else set()

    def hang(self, place: str, waited_for: bool) -> None:
        path = self._folder / place / self._name
        if not waited_for:
            self._hung.discard(place)
            remove(path)
            return
        self._hung.add(place)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.link(self._path, path)
        except OSError:
            pass  # there already, or no links here: the looks of every `net` seconds remain

    def poke(self) -> None:
        try:
            self._socket.sendto(b"*", self._near("bells", self._name))
        except OSError:
            pass  # full of bells already; or removed, which `wait` finds out

    def close(self) -> None:
        deaf, self._deaf = self._deaf, None
        if deaf is not None:
            deaf()
        for place in list(self._hung):
            self.hang(place, False)
        remove(self._path)
        self._socket.close()


def datagram_socket() -> socket.socket | None:
    if not hasattr(socket, "AF_UNIX"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)
    return sock


def ring_at(out: socket.socket, address: str, place: str) -> None:
    """Ring the bell at `address` that hangs at `place`. Raises OSError as the system does."""
    out.sendto(_BYTES[place.partition("/")[0]], address)
