"""Process groups of this machine: each is led by a child, and ends with it.

On Linux a group also ends with this process, however that ends: every child inherits the reading end of a pipe that the
kernel answers with SIGKILL for the group once the writing end, which is here alone, is gone.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from ..daemon.warm import NUMBER, SIZE
from ..worker.runner import Exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Group", "Spawned", "WarmInterpreter", "end_with_us"]

WARM = ("-P", "-m", "dreamlake.lakeshore.daemon.warm")
PATIENCE = 10.0
"""Seconds that the warm interpreter has to fork a child, its own start included."""
_F_SETSIG: int | None = getattr(fcntl, "F_SETSIG", 10 if sys.platform == "linux" else None)


def end_with_us(reading: int, group: int) -> None:
    """Have the kernel kill the group when the last writing end of the pipe is gone."""
    if _F_SETSIG is not None:
        fcntl.fcntl(reading, fcntl.F_SETOWN, -group)
        fcntl.fcntl(reading, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(reading, fcntl.F_SETFL, fcntl.fcntl(reading, fcntl.F_GETFL) | os.O_ASYNC)


class Group(ABC):
    """A running child, leader of the process group `pid`. `lifeline`: the writing end of its pipe."""

    def __init__(self, pid: int, grace: float, lifeline: int) -> None:
        self.pid = pid
        self._grace, self._lifeline = grace, lifeline
        self._code: int | None = None

    async def wait(self) -> Exit:
        while (code := self._look()) is None:
            await self._ended()
        return Exit(code)

    async def kill(self) -> Exit:
        self._signal(signal.SIGTERM)
        with anyio.move_on_after(self._grace):
            return await self.wait()
        self._signal(signal.SIGKILL)
        return await self.wait()

    def end_at_once(self) -> None:
        """Kill it and wait, in this thread."""
        self._signal(signal.SIGKILL)
        while self._look() is None:
            self._block()

    def _look(self) -> int | None:
        """Its exit code if it has ended, and with it all that it had started."""
        if self._code is None:
            self._code = self._reap()
            if self._code is not None:
                os.close(self._lifeline)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        if self._look() is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to those that have ended
                os.killpg(self.pid, number)

    @abstractmethod
    def _reap(self) -> int | None:
        """The exit code if it has ended; called no more once it has."""

    @abstractmethod
    async def _ended(self) -> None:
        """Wait until it may have ended."""

    @abstractmethod
    def _block(self) -> None:
        """The same in this thread."""


class Spawned(Group):
    """A child of this process. Not reaped before its whole group was killed, so that the group's number is nobody else's
    (on macOS before Python 3.13 right before)."""

    def __init__(self, process: subprocess.Popen[bytes], grace: float, lifeline: int) -> None:
        super().__init__(process.pid, grace, lifeline)
        self._process = process
        self._pidfd: int | None = None
        with suppress(AttributeError, OSError):  # there is no such thing everywhere
            self._pidfd = os.pidfd_open(process.pid)

    def _reap(self) -> int | None:
        if hasattr(os, "waitid"):
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return None
        elif self._process.poll() is None:
            return None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if self._pidfd is not None:
            os.close(self._pidfd)
        return self._process.wait()

    async def _ended(self) -> None:
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        else:
            await anyio.to_thread.run_sync(self._block, abandon_on_cancel=True)

    def _block(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()


class Forked(Group):
    """A child of the warm interpreter, which tells of its end through `told`. Without that one it is `lost`, since nobody
    knows how it ended."""

    def __init__(self, pid: int, told: int, grace: float, lifeline: int) -> None:
        super().__init__(pid, grace, lifeline)
        self._told = told
        self._lost = False

    async def wait(self) -> Exit:
        ended = await super().wait()
        return replace(ended, state="lost") if self._lost else ended

    def _reap(self) -> int | None:
        if not _readable(self._told, 0.0):
            return None
        said = os.read(self._told, NUMBER.size)
        os.close(self._told)
        if said:
            (code,) = NUMBER.unpack(said)
            return int(code)
        self._lost = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL

    async def _ended(self) -> None:
        await anyio.wait_readable(self._told)

    def _block(self) -> None:
        _readable(self._told, None)


def _readable(fd: int, timeout: float | None) -> bool:
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class WarmInterpreter:
    """An interpreter that forks children: started with the first one, and again when it has died, or has not answered in
    time. Then it goes on until its children have ended. For any thread."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        self._python, self._environ = python, environ
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._given_up = list[subprocess.Popen[bytes]]()

    def fork(
        self, folder: Path, environ: Mapping[str, str], fds: Sequence[int], grace: float, lifeline: int
    ) -> Forked | None:
        """A child in `folder` with the whole environment `environ`; None where none could be had: start one plainly."""
        order = json.dumps({"folder": str(folder), "environ": dict(environ)}).encode()
        control: socket.socket | None = None
        told, telling = os.pipe()
        try:
            with self._lock:
                control = self._running()
                socket.send_fds(control, [SIZE.pack(len(order))], [*fds, telling])
                control.sendall(order)
        except OSError:
            sent = False
        else:
            sent = True
        finally:
            os.close(telling)  # before the answer: what tells nothing is heard when nobody can tell any more
        answers = sent and _readable(told, PATIENCE)
        said = os.read(told, NUMBER.size) if answers else b""
        if said:
            return Forked(NUMBER.unpack(said)[0], told, grace, lifeline)
        os.close(told)
        if not answers:
            self._give_up(control)
        return None

    def _give_up(self, control: socket.socket | None) -> None:
        """Give no more orders to an interpreter that does not answer: what it has forked is not to end with it."""
        with self._lock:
            if control is not None and control is self._control and self._process is not None:
                control.close()
                self._process.send_signal(signal.SIGCONT)  # it may have been stopped
                self._given_up.append(self._process)
                self._control = self._process = None

    def _running(self) -> socket.socket:
        self._given_up = [one for one in self._given_up if one.poll() is None]
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(PATIENCE)
        with theirs:
            self._process = subprocess.Popen(
                [self._python, *WARM, str(theirs.fileno())],
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )
        return self._control

    def close(self) -> None:
        """End the interpreter; `fork` starts another."""
        with self._lock:
            for process in self._given_up:
                process.kill()
                process.wait()
            self._given_up.clear()
            self._end()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None
