"""`python3 -m dreamlake.lakeshore.daemon.warm FD`: an interpreter that has loaded what children need, and forks them.

It has one thread and no event loop running, and loads nothing of the user's: what an invocation imports is as new as in
an interpreter of its own. Orders come over the socket FD, each with six descriptors: the child's stdout and stderr, two
that the child only keeps open (the lock of its folder, the line to its daemon), its gate, and one to which this process
writes two numbers: the child's process id at once, and its exit code when it has ended, with whatever it had started.
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
from typing import Any, NamedTuple

from . import entry

__all__ = ["NUMBER", "SIZE", "main"]

SIZE = struct.Struct("!I")
"""Before each order: how many bytes of JSON follow."""
NUMBER = struct.Struct("!i")
_FDS = 6


class Order(NamedTuple):
    """One child to fork: its folder, its whole environment, its descriptors."""

    folder: str
    environ: dict[str, str]
    fds: list[int]


def main() -> None:
    """Fork children until the other end of the socket is gone, and tell of their ends until none is left. A child goes on
    from here, and never returns."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _load()
    order = Forks(control).serve()
    if order is not None:
        _become(order)
        entry.main()


def _load() -> None:
    """What the first async body would load, and what a first look at a function's source prepares."""
    import inspect

    import anyio
    import anyio.lowlevel

    anyio.run(anyio.lowlevel.checkpoint)
    inspect.getblock(["def body():\n", "    pass\n"])  # compiles patterns, which takes as long as forking does
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the children


class Forks:
    """The children that run, and where to say how they end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._telling: dict[int, int] = {}
        self._woken, self._wake = os.pipe()
        for end in (self._woken, self._wake):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, _wake_up)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)

    def serve(self) -> Order | None:
        """Fork and reap until there are no more orders, and no children: None. In a child: its order."""
        control = [self._control.fileno()]
        while control or self._telling:
            ready, _, _ = select.select([*control, self._woken], [], [])
            if self._woken in ready:
                with suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            self._reap()
            if control and control[0] in ready:
                order = _receive(self._control)
                if order is None:
                    control.clear()
                    self._control.close()
                elif self._fork(order):
                    return order
        return None

    def _fork(self, order: Order) -> bool:
        """Whether this is the child now. Where none can be forked, that is told by telling nothing."""
        telling = order.fds.pop()
        try:
            pid = os.fork()
        except OSError:
            for fd in (*order.fds, telling):
                os.close(fd)
            return False
        if pid == 0:
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in (self._woken, self._wake, telling, *self._telling.values()):
                os.close(fd)
            self._control.close()
            return True
        with suppress(PermissionError, ProcessLookupError):  # it has ended already
            os.setpgid(pid, pid)
        for fd in order.fds:
            os.close(fd)
        self._telling[pid] = telling
        _tell(telling, pid)
        return False

    def _reap(self) -> None:
        """Say how children ended. None is reaped before its group was killed: till then its number is its own."""
        while self._telling:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(found.si_pid, signal.SIGKILL)
            _, status = os.waitpid(found.si_pid, 0)
            telling = self._telling.pop(found.si_pid)
            _tell(telling, os.waitstatus_to_exitcode(status))
            os.close(telling)


def _wake_up(*_: object) -> None: ...


def _receive(control: socket.socket) -> Order | None:
    """The next order; None when there are no more."""
    head, fds, _, _ = socket.recv_fds(control, SIZE.size, _FDS)
    data = b""
    if len(head) == SIZE.size and len(fds) == _FDS:
        (size,) = SIZE.unpack(head)
        while len(data) < size and (more := control.recv(size - len(data))):
            data += more
    if not data:
        return None
    said: Any = json.loads(data)
    return Order(said["folder"], said["environ"], list(fds))


def _tell(telling: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody wants to know any more
        os.write(telling, NUMBER.pack(number))


def _become(order: Order) -> None:
    """Have what a child has that was started on its own."""
    out, err, _, _, gate = order.fds
    for fd, standard in ((out, 1), (err, 2)):
        os.dup2(fd, standard)
        os.close(fd)
    os.chdir(order.folder)
    os.environ.clear()
    os.environ.update(order.environ)
    sys.argv = [entry.__file__]
    entry.wait_at(gate)


if __name__ == "__main__":
    main()
