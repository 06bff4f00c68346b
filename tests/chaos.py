"""A storm: worker processes die by SIGKILL every moment while others submit, wait and read streams on one file.

`python tests/chaos.py [--seconds N]`: with no arguments about a minute. At the end everything has succeeded, each exactly
as often as its attempts say, no stream has a gap, no row is running, the file is whole; else the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

SECONDS = 45.0
WORKERS, CALLERS, TASKS = 4, 2, 8
PAUSE = 0.3  # seconds between two kills
MOST_KILLS = 1_000_000  # of one invocation: nothing is to fail for the storm alone
ITEMS = 200
PATIENCE = 120.0  # seconds that the rest may take once the storm is over


# --- bodies ---------------------------------------------------------------------------------------------------------


async def ajob(log: str, name: str) -> str:
    note(log, name)
    await anyio.sleep(random.uniform(0.0, 0.02))
    return name


def job(log: str, name: str) -> str:
    note(log, name)
    time.sleep(random.uniform(0.0, 0.02))
    return name


async def astream(log: str, name: str) -> AsyncIterator[int]:
    note(log, name)
    for i in range(ITEMS):
        yield i
        if i % 20 == 19:
            await anyio.sleep(random.uniform(0.0, 0.02))


def stream(log: str, name: str) -> Iterator[int]:
    note(log, name)
    for i in range(ITEMS):
        yield i
        if i % 20 == 19:
            time.sleep(random.uniform(0.0, 0.02))


async def large(log: str, name: str) -> bytes:
    """A result that goes by the lane of the large ones."""
    note(log, name)
    return name.encode() * 300_000


BODIES = [ajob, job, ajob, job, astream, stream, large]


def note(log: str, name: str) -> None:
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(out, f"{name}\n".encode())
    finally:
        os.close(out)


# --- the three parties ----------------------------------------------------------------------------------------------


async def work(db: str) -> None:
    """One worker process; it never ends by itself."""
    async with dls.Dispatch(db) as plane:
        await dls.run_worker(
            dls.Queue("storm", dispatch=plane), concurrency=4, max_lost=MOST_KILLS, root=Path(db).parent
        )


class Storm(threading.Thread):
    """Keeps workers running, and kills one of them again and again."""

    def __init__(self, db: Path) -> None:
        super().__init__(daemon=True)
        self._db, self.calm, self.over = db, threading.Event(), threading.Event()
        self.kills = 0
        self.faults: list[str] = []

    def run(self) -> None:
        crew = [self._start() for _ in range(WORKERS)]
        try:
            while not self.over.wait(PAUSE * random.uniform(0.5, 1.5)):
                for at, process in enumerate(crew):
                    if process.poll() is not None:
                        self._buried(process, killed=False)
                        crew[at] = self._start()
                if not self.calm.is_set():
                    at = random.randrange(WORKERS)
                    crew[at].kill()
                    self.kills += 1
                    self._buried(crew[at], killed=True)
                    crew[at] = self._start()
        finally:
            for process in crew:
                process.kill()
                self._buried(process, killed=True)

    def _start(self) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-W", "error", str(Path(__file__).resolve()), "--work", str(self._db)]
        return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)

    def _buried(self, process: subprocess.Popen[str], *, killed: bool) -> None:
        _, err = process.communicate()
        if not killed or process.returncode != -signal.SIGKILL:
            self.faults.append(f"a worker ended by itself with exit code {process.returncode}")
        if "Traceback" in err:
            self.faults.append(f"a worker said:\n{err.strip()}")


class Caller:
    """Submits and waits, or submits and reads along; every answer is checked."""

    def __init__(self, queue: dls.Queue, log: str) -> None:
        self._queue, self._log = queue, log
        self.names: dict[str, str] = {}
        self.faults: list[str] = []
        self.restarts = 0

    async def call_until(self, end: float, number: str) -> None:
        count = 0
        while anyio.current_time() < end:
            count += 1
            body, name = BODIES[count % len(BODIES)], f"{number}-{count}"
            id = await self._queue.submit(dls.thunk(body, self._log, name))
            self.names[id] = name
            try:
                await (self._read(id) if body in (stream, astream) else self._wait(id, body, name))
            except dls.LakeshoreError as exc:
                self.faults.append(f"{body.__name__} {name}: {exc!r}")

    async def _wait(self, id: str, body: Any, name: str) -> None:
        value = await self._queue.result(id)
        expected = name.encode() * 300_000 if body is large else name
        if value != expected:
            self.faults.append(f"{body.__name__} {name} gave {value!r:.100}")

    async def _read(self, id: str) -> None:
        """What came before a restart is a beginning of the whole, what comes after it begins anew."""
        values, got = self._queue.stream(id), list[int]()
        while True:
            try:
                async for value in values:
                    got.append(value)
                break
            except dls.StreamRestarted:
                self.restarts += 1
                if got != list(range(len(got))):
                    self.faults.append(f"stream {self.names[id]} had a gap before its restart: {got}")
                got.clear()
        if got != list(range(ITEMS)):
            self.faults.append(f"stream {self.names[id]} gave {len(got)} values of {ITEMS}: {got[:5]} ... {got[-5:]}")


async def call(db: str, log: str, number: str, seconds: str) -> None:
    """One process of callers; what it submitted, what went wrong, and how many streams began anew, as JSON."""
    async with dls.Dispatch(db) as plane, anyio.create_task_group() as group:
        caller = Caller(dls.Queue("storm", dispatch=plane), log)
        for task in range(TASKS):
            group.start_soon(caller.call_until, anyio.current_time() + float(seconds), f"{number}-{task}")
    print(json.dumps([caller.names, caller.faults, caller.restarts]))


# --- the reckoning --------------------------------------------------------------------------------------------------


def check_file(db: Path, names: dict[str, str], log: Path) -> list[str]:
    """What is wrong with what the storm has left."""
    connection = sqlite3.connect(f"file:{db}?mode=ro", uri=True)
    faults: list[str] = []

    def same(what: str, came: Any, expected: Any) -> None:
        if came != expected:
            faults.append(f"{what}: expected {expected!r:.500}, came {came!r:.500}")

    try:
        same("integrity_check", connection.execute("PRAGMA integrity_check").fetchall(), [("ok",)])
        states = dict(connection.execute("SELECT state, count(*) FROM invocation GROUP BY state").fetchall())
        same("rows by state", states, {"succeeded": len(names)})
        rows = connection.execute("SELECT id, attempt, lost, failures FROM invocation").fetchall()
        same("the ids", sorted(id for id, *_ in rows), sorted(names))
        (outcomes,) = connection.execute("SELECT count(*) FROM outcome").fetchone()
        same("outcomes", outcomes, len(names))
        runs = Counter(log.read_text().splitlines())
        for id, attempt, lost, failures in rows:
            same(f"failures of {names.get(id)}", failures, 0)
            if attempt <= lost:
                faults.append(f"{names[id]} was lost {lost} times in {attempt} attempts")
            if not 1 <= runs[names[id]] <= lost + 1:
                faults.append(f"{names[id]} ran {runs[names[id]]} times, and was lost {lost} times")
        faults += check_journals(connection)
    finally:
        connection.close()
    return faults


def check_journals(connection: sqlite3.Connection) -> list[str]:
    """Each numbered from 0 without a gap, attempts in order, each but the first announced, and closed by one END."""
    faults: list[str] = []
    journals: dict[int, list[tuple[int, int, int, dls.wire.Frame]]] = {}
    found = connection.execute("SELECT inv, seq, attempt, final, bytes FROM frame ORDER BY inv, seq")
    for inv, seq, attempt, final, data in found:
        journals.setdefault(inv, []).append((seq, attempt, final, dls.wire.Frame.from_bytes(data)))
    for inv, frames in journals.items():
        seqs = [seq for seq, *_ in frames]
        if seqs != list(range(len(frames))) or seqs != [frame.seq for *_, frame in frames]:
            faults.append(f"journal {inv} is not numbered 0 to {len(frames) - 1}")
        by_attempt: dict[int, list[Any]] = {}
        for _, attempt, _, frame in frames:
            by_attempt.setdefault(attempt, []).append(frame)
        if [attempt for _, attempt, *_ in frames] != sorted(attempt for _, attempt, *_ in frames):
            faults.append(f"journal {inv} has its attempts out of order")
        for number, part in enumerate(by_attempt.values()):
            kinds = [int(frame.kind) for frame in part]
            last = number == len(by_attempt) - 1
            values = [frame.body for frame in part if frame.kind == dls.wire.FrameKind.VALUE]
            expected = [4] * (number > 0) + [0] * len(values) + [3] * last
            if kinds != expected or values != list(range(ITEMS if last else len(values))):
                faults.append(f"attempt {number} in journal {inv} holds the kinds {kinds[:5]} ... {kinds[-5:]}")
        if [final for *_, final, _ in frames] != [0] * (len(frames) - 1) + [1]:
            faults.append(f"journal {inv} is not closed by its last frame alone")
    return faults


class Party:
    """A process that calls, and what it had to say at its end."""

    def __init__(self, db: Path, log: Path, number: int, seconds: float) -> None:
        words = [str(db), str(log), str(number), str(seconds)]
        arguments = [sys.executable, "-W", "error", str(Path(__file__).resolve()), "--call", *words]
        self._process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.names: dict[str, str] = {}
        self.faults: list[str] = []
        self.restarts = 0

    def join(self, timeout: float) -> None:
        try:
            out, err = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, err = self._process.communicate()
            self.faults.append(f"not everything had ended {PATIENCE:g} s after the storm")
        if self._process.returncode == 0:
            self.names, self.faults, self.restarts = json.loads(out)
        else:
            self.faults.append(f"a caller ended with exit code {self._process.returncode}:\n{err.strip()}")


def main(seconds: float) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lakeshore-chaos-") as folder:
        db, log = Path(folder) / "storm.db", Path(folder) / "log"
        log.touch()
        storm = Storm(db)
        storm.start()
        parties = [Party(db, log, number, seconds) for number in range(CALLERS)]
        threading.Timer(seconds, storm.calm.set).start()
        try:
            for party in parties:
                party.join(max(1.0, began + seconds + PATIENCE - time.monotonic()))
        finally:
            storm.over.set()
            storm.join()
        names = {id: name for party in parties for id, name in party.names.items()}
        faults = storm.faults + [fault for party in parties for fault in party.faults] + check_file(db, names, log)
        kills, restarts = storm.kills, sum(party.restarts for party in parties)
    print(
        f"chaos: {len(names)} invocations, {kills} workers killed, {restarts} streams restarted, {len(faults)} faults, "
        f"{time.monotonic() - began:.0f} s"
    )
    for fault in faults[:50]:
        print(f"fault: {fault}")
    return 1 if faults else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="how long the storm lasts")
    parser.add_argument("--work", metavar="DB", help=argparse.SUPPRESS)
    parser.add_argument("--call", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import chaos  # its functions, under a name that workers can import

    if arguments.work:
        logging.basicConfig(level=logging.ERROR)
        anyio.run(chaos.work, arguments.work)
    elif arguments.call:
        anyio.run(chaos.call, *arguments.call)
    else:
        sys.exit(chaos.main(arguments.seconds))
