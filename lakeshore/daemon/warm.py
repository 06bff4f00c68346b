"""`python3 -m dreamlake.lakeshore.daemon.warm FD`: an interpreter that has loaded what children need, and forks them.

It has one thread and no running event loop, and it loads nothing of the user's: what an invocation imports is as new as in
an interpreter of its own.

Requests come over the socket FD. Each is its size, then JSON, and brings six descriptors: the child's stdout and stderr,
two that the child only keeps open (the lock of its folder, and a pipe to its daemon), its gate, and the pipe for reports.
There this process writes two numbers: the child's process id at once, and its exit code when the child has ended together
with everything that it had started.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from . import entry

__all__ = ["NUMBER", "SIZE", "main"]

SIZE = struct.Struct("!I")
"""The beginning of a request: the bytes of JSON that follow."""
NUMBER = struct.Struct("!i")
"""A process id or an exit code in a report."""
DESCRIPTORS = 6
"""How many descriptors come with each request."""


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """One child to fork."""

    folder: str
    environ: dict[str, str]
    """The child's whole environment."""
    stdout: int
    stderr: int
    kept_open: tuple[int, int]
    """Descriptors that the child keeps open and does not use."""
    gate: int
    report: int

    @property
    def child_descriptors(self) -> tuple[int, ...]:
        """The descriptors that the child needs and this process does not."""
        return (self.stdout, self.stderr, *self.kept_open, self.gate)


def main() -> None:
    """Fork children until the other end of the socket is closed, and report their ends until none is left.

    A forked child goes on from here, and never returns.
    """
    control = socket.socket(fileno=int(sys.argv[1]))
    _preload()
    request = ForkServer(control).serve()
    if request is not None:
        _become_child(request)
        entry.main()


def _preload() -> None:
    """Load what the first async body would load, and what reading a function's source for the first time prepares."""
    import inspect

    import anyio
    import anyio.lowlevel

    anyio.run(anyio.lowlevel.checkpoint)
    inspect.getblock(["def body():\n", "    pass\n"])  # compiles regular expressions, which takes as long as a fork
    gc.collect()
    gc.freeze()  # the memory of what is loaded stays shared with the children


class ForkServer:
    """Forks children at requests, and reports how they end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._reports: dict[int, int] = {}  # process id -> the pipe for its report
        self._wake_receiver, self._wake_sender = os.pipe()
        os.set_blocking(self._wake_receiver, False)
        os.set_blocking(self._wake_sender, False)
        signal.signal(signal.SIGCHLD, _do_nothing)  # the default would not write to the wakeup descriptor
        signal.set_wakeup_fd(self._wake_sender, warn_on_full_buffer=False)

    def serve(self) -> ForkRequest | None:
        """Fork and reap children until there are no more requests and no children: then return None.

        In a forked child, return its request.
        """
        control = [self._control.fileno()]
        while control or self._reports:
            ready, _, _ = select.select([*control, self._wake_receiver], [], [])
            if self._wake_receiver in ready:
                with suppress(BlockingIOError):
                    os.read(self._wake_receiver, 4096)
            self._reap()
            if control and control[0] in ready:
                request = _receive(self._control)
                if request is None:
                    control.clear()
                    self._control.close()
                elif self._fork(request):
                    return request
        return None

    def _fork(self, request: ForkRequest) -> bool:
        """Fork a child. Return whether this is the child. A failure is reported by closing the pipe without a number."""
        try:
            pid = os.fork()
        except OSError:
            for fd in (*request.child_descriptors, request.report):
                os.close(fd)
            return False
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._wake_receiver, self._wake_sender, request.report, *self._reports.values()):
                os.close(fd)
            self._control.close()
            return True
        with suppress(PermissionError, ProcessLookupError):  # it has ended already
            os.setpgid(pid, pid)
        for fd in request.child_descriptors:
            os.close(fd)
        self._reports[pid] = request.report
        _write_number(request.report, pid)
        return False

    def _reap(self) -> None:
        """Report children that have ended. Each is reaped only after its group was killed: its id is its own until then."""
        while self._reports:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(found.si_pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            report = self._reports.pop(found.si_pid)
            _write_number(report, os.waitstatus_to_exitcode(status))
            os.close(report)


def _do_nothing(*_: object) -> None: ...


def _receive(control: socket.socket) -> ForkRequest | None:
    """Receive the next request; None if the other end has closed the socket."""
    head, descriptors, _, _ = socket.recv_fds(control, SIZE.size, DESCRIPTORS)
    if len(head) != SIZE.size or len(descriptors) != DESCRIPTORS:
        return None
    (size,) = SIZE.unpack(head)
    data = b""
    while len(data) < size:
        more = control.recv(size - len(data))
        if not more:
            return None
        data += more
    fields: Any = json.loads(data)
    stdout, stderr, lock, line, gate, report = descriptors
    return ForkRequest(fields["folder"], fields["environ"], stdout, stderr, (lock, line), gate, report)


def _write_number(report: int, number: int) -> None:
    with suppress(BrokenPipeError):  # the daemon no longer reads it
        os.write(report, NUMBER.pack(number))


def _become_child(request: ForkRequest) -> None:
    """Give this process what a child has that was started as a program of its own."""
    for fd, standard in ((request.stdout, 1), (request.stderr, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    os.chdir(request.folder)
    os.environ.clear()
    os.environ.update(request.environ)
    sys.argv = [entry.__file__]
    entry.wait_at_gate(request.gate)


if __name__ == "__main__":
    main()
