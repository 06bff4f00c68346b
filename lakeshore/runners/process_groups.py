"""Process groups of this machine: each is led by a child and ends with it.

On Linux a group also ends with this process, however that ends: every child inherits the reading end of a pipe. When the
writing end, which only this process has, is closed, the kernel sends SIGKILL to the group.
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

__all__ = ["ProcessGroup", "SpawnedGroup", "WarmInterpreter", "kill_with_this_process"]

_WARM_MODULE = ("-P", "-m", "dreamlake.lakeshore.daemon.warm")
FORK_TIMEOUT = 10.0
"""Seconds that the warm interpreter has to fork a child, its own start included."""
_F_SETSIG: int | None = getattr(fcntl, "F_SETSIG", 10 if sys.platform == "linux" else None)


def kill_with_this_process(lifeline: int, group: int) -> None:
    """Let the kernel kill the group when the last writing end of the pipe is closed; `lifeline` is the reading end."""
    if _F_SETSIG is not None:
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -group)
        fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


class ProcessGroup(ABC):
    """A running child, the leader of the process group `pid`."""

    def __init__(self, pid: int, grace: float, lifeline: int) -> None:
        """`grace`: seconds between SIGTERM and SIGKILL. `lifeline`: the writing end of its pipe, closed with the group."""
        self.pid = pid
        self._grace = grace
        self._lifeline = lifeline
        self._code: int | None = None

    async def wait(self) -> Exit:
        while (code := self._poll()) is None:
            await self._wait_for_end()
        return Exit(code)

    async def kill(self) -> Exit:
        self._signal(signal.SIGTERM)
        with anyio.move_on_after(self._grace):
            return await self.wait()
        self._signal(signal.SIGKILL)
        return await self.wait()

    def kill_now(self) -> None:
        """Kill the group and wait for its end, in this thread."""
        self._signal(signal.SIGKILL)
        while self._poll() is None:
            self._wait_for_end_in_thread()

    def _poll(self) -> int | None:
        """Return the exit code if the child has ended, and with it all that it had started."""
        if self._code is None:
            self._code = self._reap()
            if self._code is not None:
                os.close(self._lifeline)
        return self._code

    def _signal(self, number: signal.Signals) -> None:
        if self._poll() is None:
            with suppress(ProcessLookupError, PermissionError):  # macOS permits no signal to those that have ended
                os.killpg(self.pid, number)

    @abstractmethod
    def _reap(self) -> int | None:
        """Return the exit code if the child has ended. Not called again after that."""

    @abstractmethod
    async def _wait_for_end(self) -> None:
        """Wait until the child may have ended."""

    @abstractmethod
    def _wait_for_end_in_thread(self) -> None:
        """The same, blocking this thread."""


class SpawnedGroup(ProcessGroup):
    """A child of this process.

    It is reaped only after its whole group was killed, so that the number of the group cannot belong to another group yet.
    (On macOS before Python 3.13 it is reaped right before that.)
    """

    def __init__(self, process: subprocess.Popen[bytes], grace: float, lifeline: int) -> None:
        super().__init__(process.pid, grace, lifeline)
        self._process = process
        self._pidfd: int | None = None
        with suppress(AttributeError, OSError):  # not every system has it
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

    async def _wait_for_end(self) -> None:
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        else:
            await anyio.to_thread.run_sync(self._wait_for_end_in_thread, abandon_on_cancel=True)

    def _wait_for_end_in_thread(self) -> None:
        if hasattr(os, "waitid"):
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        else:
            self._process.wait()


class ForkedGroup(ProcessGroup):
    """A child of the warm interpreter, which writes the exit code to a pipe; `report` is the reading end.

    If the warm interpreter ends before that, nothing is known of the child's end: its state is `lost`.
    """

    def __init__(self, pid: int, report: int, grace: float, lifeline: int) -> None:
        super().__init__(pid, grace, lifeline)
        self._report = report
        self._lost = False

    async def wait(self) -> Exit:
        ended = await super().wait()
        return replace(ended, state="lost") if self._lost else ended

    def _reap(self) -> int | None:
        if not _readable(self._report, 0.0):
            return None
        data = os.read(self._report, NUMBER.size)
        os.close(self._report)
        if data:
            (code,) = NUMBER.unpack(data)
            return int(code)
        self._lost = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return -signal.SIGKILL

    async def _wait_for_end(self) -> None:
        await anyio.wait_readable(self._report)

    def _wait_for_end_in_thread(self) -> None:
        _readable(self._report, None)


def _readable(fd: int, timeout: float | None) -> bool:
    """Wait until the descriptor is readable, for `timeout` seconds at most; return whether it is."""
    poll = select.poll()  # `select.select` takes no descriptor above 1023
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if timeout is None else timeout * 1000))


class WarmInterpreter:
    """An interpreter that forks children. May be used by any thread.

    It is started with the first child, and again when it has died or has not answered in time. One that has not answered
    gets no more orders, but runs on until its children have ended.
    """

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        self._python = python
        self._environ = environ
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._given_up = list[subprocess.Popen[bytes]]()

    def fork(
        self, folder: Path, environ: Mapping[str, str], fds: Sequence[int], grace: float, lifeline: int
    ) -> ForkedGroup | None:
        """Fork a child.

        Args:
            folder: Its current folder.
            environ: Its whole environment.
            fds: The descriptors that it gets, in the order that `daemon.warm` documents.
            grace: Seconds between SIGTERM and SIGKILL.
            lifeline: The writing end of its pipe.

        Returns:
            The child, or None where the interpreter could not fork one: the caller then spawns it.
        """
        order = json.dumps({"folder": str(folder), "environ": dict(environ)}).encode()
        control: socket.socket | None = None
        report, reporting = os.pipe()
        try:
            with self._lock:
                control = self._running_control()
                socket.send_fds(control, [SIZE.pack(len(order))], [*fds, reporting])
                control.sendall(order)
        except OSError:
            sent = False
        else:
            sent = True
        finally:
            os.close(reporting)  # before reading, so that the pipe ends when the interpreter closes its own end
        answered = sent and _readable(report, FORK_TIMEOUT)
        data = os.read(report, NUMBER.size) if answered else b""
        if data:
            return ForkedGroup(NUMBER.unpack(data)[0], report, grace, lifeline)
        os.close(report)
        if not answered:
            self._give_up(control)
        return None

    def _give_up(self, control: socket.socket | None) -> None:
        """Send no more orders to an interpreter that does not answer. Its children must not end with it."""
        with self._lock:
            if control is not None and control is self._control and self._process is not None:
                control.close()
                self._process.send_signal(signal.SIGCONT)  # it may have been stopped
                self._given_up.append(self._process)
                self._control = None
                self._process = None

    def _running_control(self) -> socket.socket:
        """Return the socket to the interpreter, which is started if it does not run."""
        self._given_up = [process for process in self._given_up if process.poll() is None]
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self._end()
        self._control, theirs = socket.socketpair()
        self._control.settimeout(FORK_TIMEOUT)
        with theirs:
            self._process = subprocess.Popen(
                [self._python, *_WARM_MODULE, str(theirs.fileno())],
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
        self._control = None
        self._process = None
