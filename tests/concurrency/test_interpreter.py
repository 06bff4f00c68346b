"""Ctrl-C, fork and the end of the interpreter: nothing hangs, whatever was left open."""

from __future__ import annotations

import signal

import pytest
from helpers import fresh_python, run_python

# Ctrl-C

INTERRUPTED = """
import anyio, sys, threading, warnings
from dreamlake.lakeshore.concurrency.run_sync import run_sync
warnings.simplefilter("ignore", RuntimeWarning)
how, then = sys.argv[1:]
back, cleaned_up = threading.Event(), threading.Event()

async def wait():
    try:
        print("waiting", flush=True)
        await anyio.sleep_forever()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(20):
            while not back.is_set():
                await anyio.sleep(0.01)
            await anyio.sleep(0.2)
        with anyio.CancelScope(shield=True):
            print("cleaned up", flush=True)
            cleaned_up.set()

def call():
    try:
        run_sync(wait, hint="")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        back.set()
        if then == "lives on":
            print("cancelled:", cleaned_up.wait(20))
        raise SystemExit(130)

async def main():
    call()

if how == "plain":
    call()
else:
    anyio.run(main, backend=how)
"""


@pytest.mark.parametrize("then", ["lives on", "exits"])
@pytest.mark.parametrize("how", ["plain", "asyncio", "trio"])
def test_ctrl_c_returns_at_once_and_cancels(how: str, then: str) -> None:
    process = fresh_python(INTERRUPTED, how, then)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    # It is back before the clean-up, which goes on beside it; the exit waits for that.
    expected = ["interrupted", "cleaned up"] + (["cancelled: True"] if then == "lives on" else [])
    assert (process.returncode, out.splitlines(), err) == (130, expected, "")


# Fork


def test_a_forked_child_has_a_portal_of_its_own() -> None:
    out, err = run_python(
        """
        import anyio, gc, os, threading
        from dreamlake.lakeshore.concurrency import portal as _portal
        from dreamlake.lakeshore.concurrency.portal import portal
        from dreamlake.lakeshore.concurrency.run_sync import run_sync

        async def pid():
            await anyio.sleep(0.01)
            return os.getpid()

        stop = threading.Event()
        def busy():
            while not stop.is_set():
                run_sync(pid, hint="")
        threads = [threading.Thread(target=busy) for _ in range(4)]
        for thread in threads: thread.start()
        parent = portal()
        for _ in range(20):
            with _portal._starting:  # another thread is just starting the portal
                if (child := os.fork()) == 0:
                    assert run_sync(pid, hint="") == os.getpid()
                    assert portal() is not parent
                    gc.collect()
                    assert _portal._forked[0].portal is parent  # to free its loop would disturb that of the parent
                    raise SystemExit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert run_sync(pid, hint="") == os.getpid()
        stop.set()
        for thread in threads: thread.join()
        print("done")
        """
    )
    assert (out, err) == ("done\n", "")


def test_a_child_of_multiprocessing_too() -> None:
    out, err = run_python(
        """
        import multiprocessing, os, sys
        from dreamlake.lakeshore.concurrency.run_sync import run_sync
        async def pid(): return os.getpid()
        def child(queue): queue.put(run_sync(pid, hint="") == os.getpid())
        run_sync(pid, hint="")
        fork = multiprocessing.get_context("fork")
        queue = fork.Queue()
        process = fork.Process(target=child, args=(queue,))
        process.start()
        print(queue.get())
        process.join()
        print(process.exitcode)
        """
    )
    assert (out.split(), err) == (["True", "0"], "")


# The end of the interpreter

RESOURCE = """
import anyio, asyncio, contextlib, threading, time, warnings
import aiosqlite
from dreamlake.lakeshore.concurrency.loops import loop_token, run_sync_soon
from dreamlake.lakeshore.concurrency.per_loop import PerLoop
from dreamlake.lakeshore.concurrency.portal import across
from dreamlake.lakeshore.concurrency.run_sync import run_sync
from dreamlake.lakeshore.concurrency.threads import on_daemon_thread
from dreamlake.lakeshore.errors import PlaneUnavailable

begun = threading.Event()

class Connection:
    async def close(self):
        await self.connection.close()
        print("closed", flush=True)

async def opener():
    opened = Connection()
    opened.connection = await on_daemon_thread(lambda: aiosqlite.connect(":memory:"))
    await opened.connection.create_function("begun", 0, lambda: begun.set() or 1)
    return opened

connections = PerLoop(opener)

async def use(statement="select 1"):
    opened = await across("portal", connections.get)
    return await across("portal", opened.connection.execute_fetchall, statement)

async def use_here():
    opened = await connections.get()
    await opened.connection.execute_fetchall("select 1")

async def token():
    return loop_token()

def sync(statement="select 1"):
    return run_sync(use, statement, hint="")

def loop_in_daemon_thread():
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop

def in_daemon_thread(fn, *args):
    def run():
        with contextlib.suppress(PlaneUnavailable):  # it ended meanwhile
            run_sync(fn, *args, hint="")
    threading.Thread(target=run, daemon=True).start()
    assert begun.wait(30)

async def forever():
    begun.set()
    await anyio.sleep_forever()
"""
SLOW = "with recursive n(x) as (select begun() union all select x + 1 from n where x < 3000000000) select max(x) from n"
ENDINGS = {
    "the portal was used": ("sync()", 0, 1),
    "asyncio.run": ("asyncio.run(use_here())", 0, 1),
    "asyncio.run and the portal": ("sync(); asyncio.run(use_here()); asyncio.run(use())", 0, 2),
    "trio.run": ("anyio.run(use, backend='trio')", 0, 1),
    "a loop that is never ended": ("loop = asyncio.new_event_loop(); loop.run_until_complete(use_here())", 0, 0),
    "a loop in a daemon thread": (
        "asyncio.run_coroutine_threadsafe(use_here(), loop_in_daemon_thread()).result()",
        0,
        0,
    ),
    "an exception": ("sync(); raise SystemExit('sorry')", 1, 1),
    "a statement is under way": (f"sync(); in_daemon_thread(use, {SLOW!r})", 0, 0),
    "a daemon thread waits": ("sync(); in_daemon_thread(forever)", 0, 1),
    "a callback blocks the portal": (
        "sync(); run_sync_soon(run_sync(token, hint=''), time.sleep, 600)",
        0,
        0,
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_no_way_to_exit_the_interpreter_hangs(ending: str) -> None:
    script, code, closed = ENDINGS[ending]
    out, err = run_python(RESOURCE + script.replace("; ", "\n"), code=code)
    assert out.count("closed") == closed
    assert err == ("sorry\n" if code else "")


def test_a_call_after_the_end_is_an_error() -> None:
    out, err = run_python(
        """
        import atexit

        async def nothing(): ...

        def late():
            try:
                run_sync(nothing, hint="")
            except Exception as exc:
                print(f"{type(exc).__name__}: {exc}")

        atexit.register(late)  # runs after the package's own handler, which comes with the import below
        from dreamlake.lakeshore.concurrency.run_sync import run_sync

        def early():
            print(run_sync(nothing, hint=""))

        atexit.register(early)  # runs before it
        run_sync(nothing, hint="")
        """
    )
    late = "the interpreter is exiting and starts no event loop for this call any more; make it before the exit"
    assert out.splitlines() == ["None", f"PlaneUnavailable: {late}"]
    assert err == ""
