"""Who else uses this database, on this machine: who is dead, whom to wake, and whose turn it is to write.

Beside the database lies a folder. In it, `holders` holds a file of each engine, locked by it for life. The kernel drops
the lock when the process dies, however it dies; so whoever can lock the file knows that its claims have no holder. The
rest of the folder are the bells, see there.
"""

from __future__ import annotations

import os
import random
import secrets
import time
import weakref
from typing import TYPE_CHECKING, Any, Protocol

from ...limits import CLOCK_STEP, CLOCK_STEP_GRACE
from .doorbell import (
    CANCELS,
    ENDS,
    JOBS,
    PLACES,
    Bell,
    EventBell,
    Near,
    SocketBell,
    datagram_socket,
    listed,
    places,
    remove,
    ring_at,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from .rows import Changes

try:
    import fcntl as _fcntl
except ImportError:  # Windows: no locks, no datagrams; leases and the looks of every `net` seconds remain
    fcntl: Any = None
else:
    fcntl = _fcntl

__all__ = ["FilePresence", "LocalPresence", "Presence", "Steps", "Turn"]

_DRAFT = ".new"
_PATIENCE = 5.0  # seconds
_SETTLED = 100_000_000  # nanoseconds: more than the clock of any file system's times goes in one step
_MOST_LISTED = 1000


class Presence(Protocol):
    """One engine among those that use the database."""

    holder: str

    def ring(self, changes: Changes) -> None:
        """Wake others, after a commit. Thread-safe; never raises."""
        ...

    def bell(self) -> Bell: ...

    def judge(self, holders: Iterable[str]) -> tuple[list[str], list[str]]:
        """Which of `holders` are dead, and which are alive; those of which nobody can tell are in neither list."""
        ...

    def bury(self, holders: Iterable[str]) -> None:
        """Forget the dead whose claims have all been given back."""
        ...

    def left_behind(self) -> list[str]:
        """The dead who have not been buried."""
        ...

    def leave(self) -> None:
        """Stop being a holder, as the last act: everything that named it has been given back."""
        ...

    def forget(self) -> None:
        """Stop being a holder without a word: for others it is dead, and they give back what names it. Idempotent."""
        ...


class LocalPresence:
    """Engines of one process on one in-memory database: nobody else can see it, and nobody dies alone."""

    def __init__(self, ns: str, bells: set[EventBell]) -> None:
        self.holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._ns, self._bells = ns, bells

    def ring(self, changes: Changes) -> None:
        rung = places(self._ns, changes)
        for bell in list(self._bells):
            bell.ring(rung)

    def bell(self) -> Bell:
        bell = EventBell(self._bells.discard)
        self._bells.add(bell)
        return bell

    def judge(self, holders: Iterable[str]) -> tuple[list[str], list[str]]:
        return [], list(holders)

    def bury(self, holders: Iterable[str]) -> None:
        pass

    def left_behind(self) -> list[str]:
        return []

    def leave(self) -> None:
        pass

    def forget(self) -> None:
        pass


class FilePresence:
    """An engine among the processes that use one database file. Blocking, but only for the time of a few system calls."""

    def __init__(self, folder: Path, ns: str) -> None:
        self.holder = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._folder, self._base, self._ns = folder, str(folder), ns
        for part in (folder, *(folder / name for name in ("holders", "bells", *PLACES))):
            part.mkdir(mode=0o700, exist_ok=True)
        self._listed: dict[str, tuple[int, list[str]]] = {}
        self._out: socket.socket | None = None
        self._near = Near(folder)
        self._lock: int | None = None
        try:
            self._lock = self._take_lock()
            self._out = datagram_socket()
        except BaseException:
            self.leave()
            raise
        _open.add(self)

    # The lock

    def _take_lock(self) -> int | None:
        """Lock a file before it has its name: under that name it is never seen unlocked while its holder lives."""
        if fcntl is None:
            return None
        path = self._folder / "holders" / self.holder
        draft = path.with_suffix(_DRAFT)
        lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.rename(draft, path)
        except BaseException:
            remove(draft)
            os.close(lock)
            raise
        return lock

    def judge(self, holders: Iterable[str]) -> tuple[list[str], list[str]]:
        dead: list[str] = []
        alive: list[str] = []
        for holder in holders:
            found = False if holder == self.holder else self._is_dead(holder)
            if found is not None:
                (dead if found else alive).append(holder)
        return dead, alive

    def _is_dead(self, holder: str) -> bool | None:
        """None: nobody can tell, and the lease alone decides. A killed holder leaves its file; it may have been removed."""
        if fcntl is None:
            return None
        try:
            lock = os.open(self._folder / "holders" / holder, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        else:
            return True
        finally:
            os.close(lock)

    def bury(self, holders: Iterable[str]) -> None:
        for holder in holders:
            if holder != self.holder:
                queues = [f"{JOBS}/{name}" for name in listed(self._folder / JOBS)]
                for place in (ENDS, CANCELS, *queues, "bells", "holders"):
                    remove(self._folder / place / holder)

    def left_behind(self) -> list[str]:
        names = listed(self._folder / "holders")
        return self.judge([name for name in names if not name.endswith(_DRAFT)])[0]

    def leave(self) -> None:
        if self._lock is not None:
            remove(self._folder / "holders" / self.holder)
        self.forget()

    def forget(self) -> None:
        """Close it all and remove nothing. In a forked child that is what it has inherited: the lock is its parent's."""
        _open.discard(self)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        if self._out is not None:
            self._out.close()
        self._near.close()

    # The bells

    def bell(self) -> Bell:
        try:
            return SocketBell(self._folder, self._near, self.holder)
        except OSError:
            return EventBell()  # no datagrams here: only the looks of every `net` seconds poke it

    def ring(self, changes: Changes) -> None:
        if self._out is None:
            return
        for place, count in places(self._ns, changes).items():
            names = self._hung_at(place)
            for name in random.sample(names, len(names)) if len(names) > 1 else names:
                if count == 0:
                    break
                if self._send(self._out, place, name) and count is not None:
                    count -= 1

    def _hung_at(self, place: str) -> list[str]:
        """Whose bells hang there, listed only when the folder has changed."""
        path = f"{self._base}/{place}"
        try:
            changed = os.stat(path).st_mtime_ns
        except OSError:
            return []
        known = self._listed.get(place)
        if known is not None and known[0] == changed:
            return known[1]
        now = time.time_ns()
        names = [name for name in listed(path) if name != self.holder]
        if len(self._listed) >= _MOST_LISTED:
            self._listed.clear()
        if now - changed > _SETTLED:  # or a change still to come might get the same time
            self._listed[place] = changed, names
        return names

    def _send(self, out: socket.socket, place: str, name: str) -> bool:
        """Ring one bell; whether somebody hears it."""
        try:
            ring_at(out, self._near(place, name), place)
        except BlockingIOError:
            pass  # its queue is full of bells already
        except ConnectionRefusedError:  # nobody listens: its process is gone, or it was no socket at all
            remove(self._folder / place / name)
            if self._is_dead(name) is not False:
                remove(self._folder / "bells" / name)
            return False
        except OSError:
            return False  # it has just stopped waiting
        return True


class Turn:
    """Whose turn it is to write: a lock file around each transaction, fair where SQLite's own busy handler is not.

    The kernel drops it with the process. Where it cannot be had (Windows, some network file systems), or not for seconds
    (its holder is stopped), the busy handler alone keeps writers apart.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600) if fcntl else -1
        self._taken = False
        _open.add(self)

    def __enter__(self) -> None:
        until, pause = time.monotonic() + _PATIENCE, 0.0001
        while self._fd >= 0 and not self.take_at_once() and time.monotonic() < until:
            time.sleep(pause * random.uniform(0.5, 1.5))
            pause = min(pause * 1.5, 0.002)

    def __exit__(self, *_: object) -> None:
        self.give()

    def take_at_once(self) -> bool:
        """Take the turn if it is free now; `give` it back. False where turns cannot be had."""
        if self._fd < 0:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            self.forget()
            return False
        self._taken = True
        return True

    def give(self) -> None:
        """Let the next one write."""
        if self._taken:
            self._taken = False
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        _open.discard(self)
        self.forget()

    def forget(self) -> None:
        """Close what a forked child has inherited: the turn is its parent's."""
        fd, self._fd, self._taken = self._fd, -1, False
        if fd >= 0:
            os.close(fd)


class Steps:
    """Whether the clock was set, or the machine asleep, a moment ago: then holders get the time to renew first."""

    def __init__(self, steady: Callable[[], float]) -> None:
        self._steady = steady
        self._offset: float | None = None
        self._mercy = 0.0

    def merciful(self, now: float) -> bool:
        """Whether no lease is to be judged now, by the clock's `now`. To be asked again and again."""
        ticks = self._steady()
        offset, self._offset = self._offset, now - ticks
        if offset is not None and self._offset - offset > CLOCK_STEP:
            self._mercy = ticks + CLOCK_STEP_GRACE
        return ticks < self._mercy


_open: weakref.WeakSet[FilePresence | Turn] = weakref.WeakSet()


def _forget_all() -> None:
    for one in list(_open):
        one.forget()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
