"""Functions for children to run. What they note goes into files, which outlive them."""

from __future__ import annotations

import atexit
import ctypes
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


def note(path: str, text: object) -> None:
    """One line, in one write."""
    with open(path, "ab", buffering=0) as out:
        out.write(f"{text}\n".encode())


def notes(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except FileNotFoundError:
        return []


def wait_for(path: str) -> None:
    while not os.path.exists(path):
        time.sleep(0.005)


# --- values ----------------------------------------------------------------------------------------------------------


def nothing() -> None: ...


def double(x: Any) -> Any:
    return x * 2


async def adouble(x: Any) -> Any:
    await checkpoint()
    return x * 2


def big(n: int) -> bytes:
    return bytes(n)


def removes_its_folder() -> None:
    shutil.rmtree(os.getcwd())


def leaves_exit_handlers(path: str) -> str:
    atexit.register(note, path, "at exit")
    atexit.register(boom, "too late")
    return "done"


def unencodable() -> object:
    return object()


def pid() -> int:
    return os.getpid()


def around() -> dict[str, Any]:
    """What the body sees of its surroundings."""
    return {
        "folder": os.getcwd(),
        "group": os.getpgrp(),
        "pid": os.getpid(),
        "root": str(dls.run.root),
        "prefix": dls.run.prefix,
        "id": dls.run.invocation_id,
        "attempt": dls.run.attempt,
        "main thread": threading.current_thread() is threading.main_thread(),
        "environ": {name: value for name, value in os.environ.items() if isinstance(value, str)},
    }


# --- failures --------------------------------------------------------------------------------------------------------


def boom(text: str) -> None:
    raise LookupError(text)


async def aboom(text: str) -> None:
    raise LookupError(text)


def fails_once(path: str) -> int:
    note(path, os.getpid())
    if len(notes(path)) < 2:
        raise LookupError("the first time")
    return len(notes(path))


def exits(code: object) -> None:
    sys.exit(code)  # type: ignore[arg-type]


def exits_hard(code: int) -> None:
    sys.stderr.write("the last words\n")
    sys.stderr.flush()
    os._exit(code)


def segfault() -> None:
    ctypes.string_at(0)


def kills_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def allocates(n: int) -> int:
    return len(bytearray(n))


# --- long ones -------------------------------------------------------------------------------------------------------


def sleeps(path: str) -> None:
    try:  # first: whoever reads the note may ask it to stop before the next line
        note(path, f"began {os.getpid()}")
        time.sleep(60)
    finally:
        note(path, "cleaned up")


async def asleeps(path: str) -> None:
    try:
        note(path, f"began {os.getpid()}")
        await anyio.sleep(60)
    finally:
        note(path, "cleaned up")


def stubborn(path: str) -> None:
    """Cannot be asked to stop."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(path, f"began {os.getpid()}")
    while True:
        note(path, "goes on")
        time.sleep(0.01)


def finishes_anyway(path: str) -> str:
    try:
        note(path, f"began {os.getpid()}")
        time.sleep(60)
    except SystemExit:
        return "finished anyway"
    return "was never asked"


def orphan(path: str) -> str:
    """The first attempt ignores all requests and writes into its folder for ever; the second one ends."""
    note(path, f"began {os.getpid()}")
    if len(notes(path)) > 1:
        return "the second attempt"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while True:
        Path("result.msgpack").write_bytes(b"\xc3")
        time.sleep(0.001)


def leaves_a_process(path: str) -> None:
    note(path, subprocess.Popen(["sleep", "1000"]).pid)


def leaves_a_thread() -> str:
    threading.Thread(target=time.sleep, args=(1000,)).start()
    return "done"


def meets(folder: str, count: int) -> int:
    """Ends when `count` of them run at the same time."""
    Path(folder, str(os.getpid())).touch()
    while len(os.listdir(folder)) < count:
        time.sleep(0.005)
    return os.getpid()


# --- generators ------------------------------------------------------------------------------------------------------


def count(n: int) -> Iterator[int]:
    yield from range(n)


async def acount(n: int) -> AsyncIterator[int]:
    for i in range(n):
        yield i


def keys(*names: str) -> Iterator[str]:
    for name in names:
        dls.run.write(name).write_text(name)
        yield name


def one_then_waits(path: str) -> Iterator[int]:
    yield 1
    wait_for(path)
    yield 2


def endless(path: str) -> Iterator[int]:
    i = 0
    try:
        note(path, f"began {os.getpid()}")
        while True:
            yield i
            i += 1
            time.sleep(0.001)
    finally:
        note(path, "cleaned up")


async def aendless(path: str) -> AsyncIterator[int]:
    i = 0
    try:
        note(path, f"began {os.getpid()}")
        while True:
            yield i
            i += 1
            await anyio.sleep(0.001)
    finally:
        note(path, "cleaned up")


def two_then_dies() -> Iterator[int]:
    yield 1
    yield 2
    os.kill(os.getpid(), signal.SIGKILL)


def large_items(n: int, size: int) -> Iterator[bytes]:
    for i in range(n):
        yield bytes([i]) * size


def yields_unencodable() -> Iterator[object]:
    yield 1
    yield object()


def spoils_its_frames(path: str) -> Iterator[int]:
    try:
        yield 1
        with open("frames.msgpack", "ab") as out:
            out.write(b"\xc1")
        time.sleep(60)
    finally:
        note(path, "cleaned up")


def parent() -> int:
    return os.getppid()


def waits_and_tells(path: str, gate: str) -> str:
    note(path, os.getppid())
    wait_for(gate)
    return "told"


def second_time(path: str) -> int:
    """Which attempt this is; the first one goes on for ever."""
    note(path, "began")
    while dls.run.attempt == 1:
        time.sleep(0.01)
    return dls.run.attempt or 0


def leaves_its_group(path: str) -> str:
    """Fails the first time, and leaves a process in a session of its own that has all that the child had open."""
    if dls.run.attempt == 1:
        if os.fork() == 0:
            os.setsid()
            note(path, os.getpid())
            time.sleep(1000)
        while not notes(path):
            time.sleep(0.005)
        raise LookupError("the first time")
    return "the second attempt"


def spoils_its_lock() -> str:
    if dls.run.attempt == 1:
        os.unlink(".lock")
        os.mkdir(".lock")
        raise LookupError("the first time")
    return "the second attempt"


def leaves_as_result(n: int) -> None:
    """Ends with a result file of so many bytes in which nothing is."""
    with open("result.msgpack", "wb") as out:
        out.truncate(n)
    os._exit(0)


def leaves_a_large_frame() -> None:
    with open("frames.msgpack", "wb") as out:
        out.write(b"\x94\x01\x00\xc6\xff\xff\xff\xff" + bytes(4 << 20))
    time.sleep(60)


def sets_environ(name: str, value: str) -> None:
    os.environ[name] = value


def chance() -> float:
    return random.random()


def cleans_up_slowly(path: str, gate: str) -> None:
    try:
        note(path, "began")
        time.sleep(60)
    finally:
        note(path, "cleaning up")
        wait_for(gate)
        note(path, "cleaned up")


def killed_by(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(60)


def yields_when_stopped(path: str) -> Iterator[bytes]:
    try:
        note(path, "began")
        time.sleep(60)
    except SystemExit:
        yield bytes(1 << 20)


def hoards(n: int) -> None:
    """Keeps so many bytes of memory that were written to."""
    held = b"\x01" * n
    time.sleep(600)
    del held


def result_arrives_late(seconds: float) -> None:
    """Its exit code 0 is there before its result is."""
    subprocess.Popen(
        ["sh", "-c", f"sleep {seconds}; printf '\\007' > .r && mv .r result.msgpack"],
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os._exit(0)
