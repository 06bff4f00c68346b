"""What holds for the children of every engine: a real worker, a plane in a file, and one test for each way of an end.

`test_conformance_*.py` have a class for each engine, so that what one engine needs is started once, in one process.
"""

from __future__ import annotations

import signal
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, ClassVar

import conformance_bodies as bodies
import pytest
from conformance_kit import LIMIT, Site, Worker, skip_without
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import InvocationFailed, InvocationKilled

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from engine_kit import Engine

__all__ = ["Conformance"]

SECONDS = 60.0
"""Within which a failure that waits for nothing is reported: far below what would count as a hang."""
CANCELLED = ("killed", "Cancelled", "cancelled while running")


class Conformance:
    """The tests of one `engine`."""

    # what an engine starts from may have to be made first
    pytestmark: ClassVar = [pytest.mark.slow, pytest.mark.timeout(300)]
    engine: ClassVar[Engine]
    timeout: ClassVar[float] = 6.0
    """Seconds in which a child begins, imports and all, unless the machine stands still."""

    @pytest.fixture(scope="class")
    @classmethod
    def site(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
        skip_without(cls.engine.missing())
        with cls.engine.up() as arguments:
            site = Site(cls.engine, arguments, tmp_path_factory.mktemp(cls.engine.name))
            try:
                yield site
            finally:
                site.close()

    @pytest.fixture(autouse=True)
    def _clean(self, site: Site) -> Iterator[None]:
        yield
        site.is_clean()

    @pytest.fixture(scope="class")
    @classmethod
    def _shared(cls, site: Site) -> Iterator[None]:
        """A worker for the tests that do not harm theirs, of the queue `q`."""
        with site.worker("q", "--concurrency", 2):
            yield

    @pytest.fixture
    def q(self, site: Site, _shared: None) -> dls.SyncQueue:
        return site.queue("q")

    # What comes of a body

    def test_values(self, site: Site, q: dls.SyncQueue) -> None:
        assert q.result(q.submit(dls.thunk(bodies.double, "ab")), timeout=LIMIT) == "abab"
        id = q.submit(dls.thunk(bodies.surroundings))
        seen = q.result(id, timeout=LIMIT)
        assert (seen["folder"], seen["id"], seen["attempt"]) == (id, id, 1)
        assert "args.msgpack" in seen["files"]
        assert seen["environ"]["DREAMLAKE_INVOCATION_ID"] == id
        assert seen["environ"]["LAKESHORE_ALLOW_PICKLED"] == "1"
        assert "LAKESHORE_CLIENT_TOKEN" not in seen["environ"]

    def test_an_exception_with_its_traceback(self, site: Site, q: dls.SyncQueue) -> None:
        id = q.submit(dls.thunk(bodies.boom, "no such thing"))
        assert site.failure(id) == ("failed", "LookupError", "no such thing")
        with pytest.raises(LookupError, match="no such thing") as caught:
            q.result(id)
        assert isinstance(caught.value, InvocationFailed)
        assert caught.value.traceback is not None
        assert "in boom\n    raise LookupError(text)" in caught.value.traceback
        assert (site.work / id / "args.msgpack").exists()
        assert {path.stat().st_mode & 0o777 for path in (site.work, site.work / id)} == {0o700}
        assert "no such thing" in (site.work / id / "error.json").read_text()

    def test_sys_exit(self, site: Site, q: dls.SyncQueue) -> None:
        assert site.failure(q.submit(dls.thunk(bodies.exits, 3))) == ("failed", "SystemExit", "3")

    def test_R15_a_segfault(self, site: Site, q: dls.SyncQueue) -> None:
        state, type, message = site.failure(q.submit(dls.thunk(bodies.segfault)))
        assert (state, type) == ("failed", "DaemonError")
        assert any(words in message for words in ("was killed by SIGSEGV", "ended with exit code 139")), message

    def test_R28_kill_9_of_the_child(self, site: Site, q: dls.SyncQueue) -> None:
        id = q.submit(dls.thunk(bodies.stubborn, "killed-child"))
        site.begun("killed-child")
        at = time.monotonic()
        site.engine.kill_child(id)
        state, type, message = site.failure(id)
        assert time.monotonic() - at < SECONDS
        assert (state, type) == ("failed", "DaemonError")
        assert any(words in message for words in ("was killed by SIGKILL", "ended with exit code 137")), message
        site.stays_still("killed-child")

    def test_a_large_result(self, q: dls.SyncQueue) -> None:
        size = 100_000_000
        got = q.result(q.submit(dls.thunk(bodies.big, size)), timeout=LIMIT)
        assert len(got) == size
        assert got[:1] == got[-1:] == b"\x5a"

    def test_the_first_item_comes_while_the_child_runs(self, site: Site, q: dls.SyncQueue) -> None:
        id = q.submit(dls.thunk(bodies.one_then_waits, "gate-of-items"))
        items = q.stream(id, timeout=LIMIT)
        assert next(items) == 1
        assert q.get(id).state == "running"
        (site.root / "gate-of-items").touch()
        assert list(items) == [2]
        assert q.result(id, timeout=LIMIT) is None

    def test_two_at_a_time_overlap(self, q: dls.SyncQueue) -> None:
        ids = q.submit_many([dls.thunk(bodies.meets, "meeting", 2) for _ in range(2)])
        assert [q.result(id, timeout=LIMIT) for id in ids] == [2, 2]

    # What may run

    def test_a_pickled_function(self, q: dls.SyncQueue) -> None:
        assert q.result(q.submit(dls.thunk(lambda x: x + 1, 41)), timeout=LIMIT) == 42

    def test_a_pickled_function_of_another_python(self, site: Site, q: dls.SyncQueue) -> None:
        envelope = dls.thunk(lambda: None).to_envelope()
        envelope.fn["runtime"] = {**envelope.fn["runtime"], "python": "3.99.0"}
        state, type, message = site.failure(site.submit("q", envelope))
        assert (state, type) == ("failed", "TransportError")
        assert message.startswith("the function was pickled under python '3.99.0' of 'cpython'")

    def test_R30_a_missing_module(self, site: Site, q: dls.SyncQueue) -> None:
        envelope = dls.thunk(bodies.double, 1).to_envelope()
        envelope.fn["module"] = "no_such_module_anywhere"
        state, type, message = site.failure(site.submit("q", envelope))
        assert (state, type) == ("failed", "TransportError")
        assert "no_such_module_anywhere" in message

    def test_R30_another_python(self, site: Site) -> None:
        """One that does not exist, and one that lacks the package: the engine's message is in the error, and soon."""
        bare = site.root / "bare-python"
        bare.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n')
        bare.chmod(0o755)
        for name, path, said in (
            ("absent", site.root / "no-python", "no-python"),
            ("bare", bare, "No module named 'dreamlake'"),
        ):
            q = site.queue(f"python-{name}")
            with site.worker(q.name, "--runner-option", f"python={path}"):
                at = time.monotonic()
                state, type, message = site.failure(q.submit(dls.thunk(bodies.double, 1)))
                assert time.monotonic() - at < SECONDS
                assert (state, type) == ("failed", "DaemonError")
                assert said in message

    # What stops a body

    def test_R84_cancel(self, site: Site, q: dls.SyncQueue) -> None:
        for fn, name in ((bodies.sleeps, "cancelled"), (bodies.aendless, "cancelled-items")):
            id = q.submit(dls.thunk(fn, name))
            if fn is bodies.sleeps:
                site.begun(name)
            else:
                assert next(q.stream(id, timeout=LIMIT)) == 0
            assert q.cancel(id, wait=True)
            assert site.failure(id) == CANCELLED
            assert site.notes(name)[-1:] == ["cleaned up"]
            with pytest.raises(InvocationKilled):
                q.result(id)

    def test_R83_a_timeout_and_a_refusal(self, site: Site) -> None:
        """A body that cannot be asked to stop, and a pickle that is not allowed: on one worker, which has both rules."""
        q = site.queue("strict")
        options = ["--timeout", self.timeout, "--no-allow-pickled", "--runner-option", "grace=0.5"]
        with site.worker("strict", *options):
            state, type, message = site.failure(q.submit(dls.thunk(lambda: None)))
            assert (state, type) == ("failed", "TransportError")
            assert "was submitted as a pickle, which this worker refuses" in message
            for name in ("timed-out", "timed-out-2", "timed-out-3"):  # one may have had no time to begin
                id = q.submit(dls.thunk(bodies.stubborn, name))
                state, type, message = site.failure(id)
                assert (state, type) == ("timeout", "TimeoutError")
                assert message == f"the body ran longer than this worker's timeout of {self.timeout} s"
                assert q.get(id).attempt == 1
                if "goes on" in site.notes(name):
                    break
            assert "goes on" in site.notes(name)
            site.stays_still(name)

    # The end of the worker

    def test_kill_9_of_the_daemon(self, site: Site) -> None:
        with self._second_time(site, "daemon-killed") as (worker, _):
            worker.kill()
            site.is_still()
            worker.is_gone()
            site.stays_still("goes-on")

    def test_kill_9_of_the_daemon_and_of_the_child(self, site: Site) -> None:
        with self._second_time(site, "both-killed") as (worker, id):
            worker.kill()
            with suppress(ProcessLookupError):
                site.engine.kill_child(id)

    @contextmanager
    def _second_time(self, site: Site, name: str) -> Generator[tuple[Worker, str]]:
        """What runs in a worker that dies in this block is run again by the next one."""
        q = site.queue(name)
        with site.worker(name) as worker:
            id = q.submit(dls.thunk(bodies.second_time, name))
            site.begun(name)
            yield worker, id
            assert worker.process.returncode == -signal.SIGKILL
        with site.worker(name):
            assert q.result(id, timeout=LIMIT) == 2
            assert q.get(id).lost == 1

    def test_a_worker_that_is_asked_to_end_lets_its_children_finish(self, site: Site) -> None:
        q = site.queue("drain")
        with site.worker("drain") as worker:
            id = q.submit(dls.thunk(bodies.finishes, "drained", "gate-of-drain"))
            later = q.submit(dls.thunk(bodies.double, 1))
            site.begun("drained")
            worker.signal()
            wait_until_sync(lambda: "claiming no more" in worker.said, LIMIT, "the worker to hear the signal")
            (site.root / "gate-of-drain").touch()
            worker.ends(asked=True)
        assert q.result(id, timeout=LIMIT) == "finished"
        assert q.get(later).state == "queued"
        q.cancel(later)

    @pytest.mark.parametrize("on_shutdown", ["killed", "release"])
    def test_past_its_grace_a_worker_ends_its_children(self, site: Site, on_shutdown: str) -> None:
        name = f"past-grace-{on_shutdown}"
        q = site.queue(name)
        options = ["--grace", 0.5, "--runner-option", "grace=0.5", "--on-shutdown", on_shutdown]
        with site.worker(name, *options) as worker:
            id = q.submit(dls.thunk(bodies.stubborn, name))
            site.begun(name)
            worker.ends()
        site.is_still()
        site.stays_still(name)
        if on_shutdown == "killed":
            assert site.failure(id) == ("killed", "Cancelled", "daemon shutdown grace expired")
        else:
            row = q.get(id)
            assert (row.state, row.failures, row.lost) == ("queued", 0, 0)
            q.cancel(id)
