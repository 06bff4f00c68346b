"""Doorbells: how a commit wakes the engines that wait for what it wrote, in this process and in others.

Between processes they are datagram sockets. In the folder beside the database, `bells` holds the socket of each engine
that waits for something. While it waits for a topic (`ends`: outcomes and frames; `cancels`; `jobs/...`: jobs of one
queue), a hard link to its socket is in the folder of that topic. A commit sends one byte to the sockets that it finds
there, once a batch. A ring is a hint: the watcher also reads the database every `net` seconds.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import time
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias

import anyio
from anyio.lowlevel import current_token

from ...concurrency.loops import on_readable, run_sync_soon
from . import forks
from .liveness import list_folder, remove_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .batch import Wakeups
    from .liveness import FileLiveness

__all__ = [
    "CANCELS",
    "ENDS",
    "JOBS",
    "Bell",
    "Doorbells",
    "EventBell",
    "FileDoorbells",
    "MemoryDoorbells",
    "SocketBell",
    "queue_topic",
]

JOBS = "jobs"
ENDS = "ends"
CANCELS = "cancels"
KIND_BYTES = {JOBS: b"j", ENDS: b"e", CANCELS: b"c"}
"""What is sent for each kind of topic."""
EVERY_KIND_BYTE = b"*"
KINDS_BY_BYTE = {data[0]: kind for kind, data in KIND_BYTES.items()}
EVERY_KIND = frozenset(KIND_BYTES)

MAX_ADDRESS_BYTES = 100
"""Bytes of a socket's path from which a short form is used: the system takes 107."""
MAX_NAME_BYTES = 60
"""Bytes of a topic and a holder's name, rounded up."""
SOCKET_CHECK_INTERVAL = 5.0
"""Seconds without a ring after which an engine makes sure that its socket is still in its folder."""
MTIME_STEP = 100_000_000
"""Nanoseconds by which the clock of file times goes forward at once, at most, on any file system."""
MAX_LISTED_TOPICS = 1000
"""Topics whose listing is remembered: of more queues than this, folders are listed at each commit."""

OnRing: TypeAlias = "Callable[[set[str]], set[str]]"


@lru_cache(maxsize=1024)
def queue_topic(ns: str, queue: str) -> str:
    """The topic of a queue's jobs. The queue's name may have any characters, so a hash stands for it."""
    name = f"{ns}\0{queue}".encode("utf-8", "surrogatepass")
    return f"{JOBS}/{hashlib.blake2b(name, digest_size=8).hexdigest()}"


def _topics(ns: str, wakeups: Wakeups) -> dict[str, int | None]:
    """The topics to ring after a commit, and how many of the engines that wait for it; None: all of them."""
    topics: dict[str, int | None] = {queue_topic(ns, queue): count for queue, count in wakeups.jobs.items()}
    if wakeups.outcomes:
        topics[ENDS] = None
    if wakeups.cancels:
        topics[CANCELS] = None
    return topics


def _kind(topic: str) -> str:
    return topic.partition("/")[0]


class Bell(Protocol):
    """What wakes one engine. It belongs to the loop on which it was made."""

    on_ring: OnRing | None
    """Called first, on the loop but in no task, with the kinds that were rung; what it returns is left to `wait`."""

    async def wait(self) -> frozenset[str]:
        """Wait for a ring, and return the kinds of topics that were rung since the last call."""
        ...

    def listen(self, topic: str) -> None:
        """From now on be rung for `topic`: ENDS, CANCELS, or one of `queue_topic`."""
        ...

    def stop_listening(self, topic: str) -> None:
        """The end of `listen`."""
        ...

    def ring_all(self) -> None:
        """Ring this bell for every kind of topic. Thread-safe."""
        ...

    def close(self) -> None: ...


class EventBell:
    """A bell inside this process. closed: called with it when it is closed."""

    def __init__(self, closed: Callable[[EventBell], None] | None = None) -> None:
        self._token = current_token()
        self._event = anyio.Event()
        self._rung: set[str] = set()
        self._topics: set[str] = set()
        self._closed = closed
        self.on_ring: OnRing | None = None

    async def wait(self) -> frozenset[str]:
        while not self._rung:
            await self._event.wait()
            self._event = anyio.Event()
        rung = frozenset(self._rung)
        self._rung.clear()
        return rung

    def listen(self, topic: str) -> None:
        self._topics.add(topic)

    def stop_listening(self, topic: str) -> None:
        self._topics.discard(topic)

    def ring(self, topics: Iterable[str]) -> None:
        """Ring this bell if it listens to one of `topics`. Thread-safe."""
        kinds = {_kind(topic) for topic in self._topics.intersection(topics)}
        if kinds:
            run_sync_soon(self._token, self._ring, kinds)

    def ring_all(self) -> None:
        run_sync_soon(self._token, self._ring, EVERY_KIND)

    def _ring(self, kinds: Iterable[str]) -> None:
        rung = set(kinds)
        self._rung |= rung if self.on_ring is None else self.on_ring(rung)
        if self._rung:
            self._event.set()

    def close(self) -> None:
        if self._closed is not None:
            self._closed(self)


class Doorbells(Protocol):
    """The bells of all engines that use a database, as one of them sees them."""

    def ring(self, wakeups: Wakeups) -> None:
        """Wake engines, after a commit. Thread-safe; never raises."""
        ...

    def bell(self) -> Bell:
        """Make this engine's own bell."""
        ...

    def remove(self, holder: str) -> None:
        """Remove what a dead engine has left."""
        ...

    def close(self) -> None: ...


class MemoryDoorbells:
    """For engines of one process on one in-memory database, which share `bells`."""

    def __init__(self, ns: str, bells: set[EventBell]) -> None:
        self._ns = ns
        self._bells = bells

    def ring(self, wakeups: Wakeups) -> None:
        topics = _topics(self._ns, wakeups)
        for bell in list(self._bells):
            bell.ring(topics)

    def bell(self) -> Bell:
        bell = EventBell(self._bells.discard)
        self._bells.add(bell)
        return bell

    def remove(self, holder: str) -> None: ...

    def close(self) -> None: ...


class FileDoorbells:
    """For engines of processes that share a database file. Raises OSError when its folders cannot be made."""

    def __init__(self, folder: Path, ns: str, liveness: FileLiveness) -> None:
        self._folder = folder
        self._base = str(folder)
        self._ns = ns
        self._liveness = liveness
        for name in ("bells", *KIND_BYTES):
            (folder / name).mkdir(mode=0o700, exist_ok=True)
        self._addresses = SocketAddresses(folder)
        self._listed: dict[str, tuple[int, list[str]]] = {}
        self._sender: socket.socket | None = None
        try:
            self._sender = datagram_socket()
        except BaseException:
            self.close()
            raise
        forks.close_in_forked_child(self)

    def bell(self) -> Bell:
        try:
            return SocketBell(self._folder, self._addresses, self._liveness.holder)
        except OSError:
            return EventBell()  # there are no datagrams here: only the watcher's reads every `net` seconds ring it

    def ring(self, wakeups: Wakeups) -> None:
        sender = self._sender
        if sender is None:
            return
        for topic, count in _topics(self._ns, wakeups).items():
            names = self._listeners(topic)
            if len(names) > 1:
                names = random.sample(names, len(names))
            rung = 0
            for name in names:
                if rung == count:
                    break
                if self._ring_one(sender, topic, name):
                    rung += 1

    def _listeners(self, topic: str) -> list[str]:
        """The other engines that listen to a topic. Its folder is listed only when it has changed."""
        path = f"{self._base}/{topic}"
        try:
            changed = os.stat(path).st_mtime_ns
        except OSError:
            return []
        known = self._listed.get(topic)
        if known is not None and known[0] == changed:
            return known[1]
        now = time.time_ns()
        names = [name for name in list_folder(path) if name != self._liveness.holder]
        if len(self._listed) >= MAX_LISTED_TOPICS:
            self._listed.clear()
        if now - changed > MTIME_STEP:  # otherwise the next change of the folder may get the same time
            self._listed[topic] = changed, names
        return names

    def _ring_one(self, sender: socket.socket, topic: str, name: str) -> bool:
        """Ring one bell, and return whether there is an engine behind it."""
        try:
            sender.sendto(KIND_BYTES[_kind(topic)], self._addresses.of(topic, name))
        except BlockingIOError:
            pass  # enough rings wait for it already
        except ConnectionRefusedError:  # no socket is open there: its process has died, or it never was a socket
            remove_file(self._folder / topic / name)
            if self._liveness.is_alive(name) is not True:
                remove_file(self._folder / "bells" / name)
            return False
        except OSError:
            return False  # it has just stopped to listen
        return True

    def remove(self, holder: str) -> None:
        if holder == self._liveness.holder:
            return
        queues = [f"{JOBS}/{name}" for name in list_folder(self._folder / JOBS)]
        for place in (ENDS, CANCELS, *queues, "bells"):
            remove_file(self._folder / place / holder)

    def close(self) -> None:
        forks.keep_in_forked_child(self)
        self.close_inherited()

    def close_inherited(self) -> None:
        if self._sender is not None:
            self._sender.close()
        self._addresses.close()


class SocketAddresses:
    """Addresses of the sockets in a folder, short enough whatever the folder's path."""

    def __init__(self, folder: Path) -> None:
        self._base = str(folder)
        self._fd = -1
        is_long = len(os.fsencode(self._base)) + MAX_NAME_BYTES > MAX_ADDRESS_BYTES
        if is_long and os.path.isdir("/proc/self/fd"):
            self._fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            self._base = f"/proc/self/fd/{self._fd}"

    def of(self, place: str, name: str) -> str:
        """The address of the socket `name` in the subfolder `place`."""
        return f"{self._base}/{place}/{name}"

    def close(self) -> None:
        fd = self._fd
        self._fd = -1
        if fd >= 0:
            os.close(fd)


class SocketBell:
    """A bell that other processes can ring. Raises OSError where there are no unix datagram sockets."""

    def __init__(self, folder: Path, addresses: SocketAddresses, name: str) -> None:
        self._folder = folder
        self._name = name
        self._path = folder / "bells" / name
        self._address = addresses.of("bells", name)
        self._topics: set[str] = set()
        self._rung: set[str] = set()
        self._event = anyio.Event()
        self._stop_reading: Callable[[], None] | None = None
        """Set while the loop itself calls `_read`: loops that cannot do so have `wait` wait for the socket."""
        self.on_ring: OnRing | None = None
        sock = datagram_socket()
        if sock is None:
            raise OSError("no unix datagrams on this platform")
        self._socket = sock
        try:
            self._path.unlink(missing_ok=True)
            sock.bind(self._address)
        except BaseException:
            sock.close()
            raise

    async def wait(self) -> frozenset[str]:
        """Raises OSError when the socket was removed, so that nobody can ring it: another bell is to be made."""
        if self._stop_reading is None:
            self._stop_reading = on_readable(self._socket, self._read)
        while not self._rung:
            with anyio.move_on_after(SOCKET_CHECK_INTERVAL) as scope:
                if self._stop_reading is None:
                    await anyio.wait_readable(self._socket)
                    self._read()
                else:
                    await self._event.wait()
                    self._event = anyio.Event()
            if scope.cancelled_caught and not os.path.exists(self._path):  # noqa: ASYNC240 -- every few seconds
                raise OSError("the socket was removed from its folder")
        rung = frozenset(self._rung)
        self._rung.clear()
        return rung

    def _read(self) -> None:
        """Read the rings that wait in the socket, and pass on their kinds."""
        rung: set[str] = set()
        while True:
            try:
                data = self._socket.recv(16)
            except BlockingIOError:
                break
            if data == EVERY_KIND_BYTE:
                rung |= EVERY_KIND
            elif data:
                rung.add(KINDS_BY_BYTE.get(data[0], JOBS))
        self._rung |= rung if self.on_ring is None else self.on_ring(rung)
        if self._rung:
            self._event.set()

    def listen(self, topic: str) -> None:
        self._topics.add(topic)
        path = self._folder / topic / self._name
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            os.link(self._path, path)
        except OSError:
            pass  # it is there already, or there are no links here: the watcher's reads every `net` seconds remain

    def stop_listening(self, topic: str) -> None:
        self._topics.discard(topic)
        remove_file(self._folder / topic / self._name)

    def ring_all(self) -> None:
        try:
            self._socket.sendto(EVERY_KIND_BYTE, self._address)
        except OSError:
            pass  # enough rings wait already; or the socket was removed, which `wait` notices

    def close(self) -> None:
        if self._stop_reading is not None:
            self._stop_reading()
            self._stop_reading = None
        for topic in list(self._topics):
            self.stop_listening(topic)
        remove_file(self._path)
        self._socket.close()


def datagram_socket() -> socket.socket | None:
    """A socket that never blocks; None where there are none of this kind."""
    if not hasattr(socket, "AF_UNIX"):
        return None
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    sock.setblocking(False)
    return sock
