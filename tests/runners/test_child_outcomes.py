"""The outcomes of bodies that run in a child process."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import WARM, children, environ, folders, process_runner, runs
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id
from dreamlake.lakeshore.planes.contract.operations import Submit
from dreamlake.lakeshore.runners.process.runner import ProcessOptions, ProcessRunner
from dreamlake.lakeshore.wire import pack

if TYPE_CHECKING:
    from pathlib import Path

    from dreamlake.lakeshore.planes.contract.records import Row

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("each_start")]


async def row_of(queue: dls.Queue, id: str) -> Row:
    await queue.dispatch.outcome(id, timeout=60)
    return await queue.get(id)


async def failure_of(queue: dls.Queue, fn: Any, *args: Any) -> tuple[str, str, str, str]:
    """State, type, message and traceback of an invocation that fails."""
    row = await row_of(queue, await queue.submit(dls.thunk(fn, *args)))
    assert row.error is not None
    return row.state, row.error.type, row.error.message, row.error.traceback or ""


async def test_values_of_plain_and_async_bodies(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        assert await queue.call(dls.thunk(bodies.double, 21)) == 42
        assert await queue.call(dls.thunk(bodies.adouble, "a")) == "aa"
        assert await queue.call(dls.thunk(bodies.nothing)) is None
        assert await queue.call(dls.thunk(bodies.pid)) != os.getpid()
    assert folders(tmp_path) == []


async def test_the_child_sees_its_surroundings_and_no_secrets(
    queue: dls.Queue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKESHORE_CLIENT_TOKEN", "a secret")
    monkeypatch.setenv("MINE", "not kept")
    async with children(queue, tmp_path):
        id = await queue.submit(dls.thunk(bodies.around))
        seen = await queue.result(id)
    env = seen["environ"]
    assert seen["folder"] == env["DREAMLAKE_WORKDIR"] == str(tmp_path / "work" / id)
    assert seen["group"] == seen["pid"]
    assert (seen["root"], seen["prefix"], seen["id"], seen["attempt"]) == (str(tmp_path), "", id, 1)
    assert seen["main thread"]
    assert (env["DREAMLAKE_INVOCATION_ID"], env["LAKESHORE_ROOT"]) == (id, str(tmp_path))
    assert (env["LAKESHORE_ALLOW_PICKLED"], env["LAKESHORE_RUNTIME_POLICY"]) == ("1", "minor")
    assert "LAKESHORE_CLIENT_TOKEN" not in env
    assert "MINE" not in env


async def test_the_run_config_gives_a_prefix_and_the_submitter_a_family(queue: dls.Queue, tmp_path: Path) -> None:
    mother = await queue.submit(dls.thunk(bodies.nothing))
    child = new_id()
    envelope = dls.thunk(bodies.around).to_envelope(id=child).to_bytes()
    config = pack({"run_config": {"prefix": "scenes/7"}})
    await queue.dispatch.do(Submit(child, "q", envelope, parent=mother, config=config))
    scoped = dls.thunk(bodies.around).to_envelope(id=new_id(), prefix="own")
    await queue.dispatch.do(Submit(scoped.id, "q", scoped.to_bytes(), config=config))
    async with children(queue, tmp_path):
        seen = await queue.result(child)
        env = seen["environ"]
        assert seen["prefix"] == env["DREAMLAKE_PREFIX"] == "scenes/7"
        assert env["DREAMLAKE_PARENT_INVOCATION_ID"] == env["DREAMLAKE_ROOT_INVOCATION_ID"] == mother
        assert (await queue.result(scoped.id))["prefix"] == "own"


async def test_an_exception_comes_with_its_traceback_and_the_folder_stays(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        for fn in (bodies.boom, bodies.aboom):
            id = await queue.submit(dls.thunk(fn, "no such thing"))
            row = await row_of(queue, id)
            assert row.error is not None
            assert (row.state, row.error.type, row.error.message) == ("failed", "LookupError", "no such thing")
            assert f"in {fn.__name__}" in (row.error.traceback or "")
            assert "lakeshore/invoke.py" not in (row.error.traceback or "")
            kept = tmp_path / "work" / id
            assert (kept / "args.msgpack").exists()
            assert "no such thing" in (kept / "stderr.log").read_text()
            assert kept.stat().st_mode & 0o777 == kept.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("code", "message"), [(0, "0"), (3, "3"), ("so long", "so long"), (None, "")])
async def test_sys_exit_is_a_failure_that_says_so(queue: dls.Queue, tmp_path: Path, code: object, message: str) -> None:
    async with children(queue, tmp_path):
        assert (await failure_of(queue, bodies.exits, code))[:3] == ("failed", "SystemExit", message)


async def test_R29_a_child_that_leaves_without_a_word_fails_at_once(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        assert (await failure_of(queue, bodies.exits_hard, 9))[:3] == (
            "failed",
            "DaemonError",
            "the child ended with exit code 9 and wrote no error.json; the end of its output:\nthe last words",
        )
        assert (await failure_of(queue, bodies.exits_hard, 0))[:3] == (
            "failed",
            "DaemonError",
            "the child ended with exit code 0 and wrote no result.msgpack; the end of its output:\nthe last words",
        )


async def test_R15_R21_a_killed_child_is_a_failure_that_names_the_signal(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        killed = "the child was killed by SIGKILL and wrote no error.json"
        assert (await failure_of(queue, bodies.kills_itself))[:3] == ("failed", "DaemonError", killed)
        segfault = "the child was killed by SIGSEGV and wrote no error.json"
        assert (await failure_of(queue, bodies.segfault))[:3] == ("failed", "DaemonError", segfault)
        id, path = await queue.submit(dls.thunk(bodies.sleeps, str(tmp_path / "notes"))), tmp_path / "notes"
        await wait_until(lambda: notes(path))
        os.kill(int(notes(path)[0].split()[1]), signal.SIGKILL)
        row = await row_of(queue, id)
        assert row.error is not None
        assert row.error.message == killed
        assert await queue.call(dls.thunk(bodies.double, 1)) == 2


async def test_what_cannot_be_packed_is_refused_for_good(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, retries=3):
        state, type, message, _ = await failure_of(queue, bodies.unencodable)
        assert (state, type) == ("failed", "EncodeError")
        assert message.startswith("the result of 'unencodable' cannot be packed")


async def test_R30_a_module_that_does_not_import_fails_in_seconds(queue: dls.Queue, tmp_path: Path) -> None:
    (tmp_path / "broken_module.py").write_text("def f(:\n")
    missing = dls.thunk(bodies.double, 1).to_envelope()
    broken = dls.thunk(bodies.double, 1).to_envelope()
    missing.fn, broken.fn = ({"kind": "ref", "module": m, "qualname": "f"} for m in ("no_such_module", "broken_module"))
    for envelope in (missing, broken):
        await queue.dispatch.do(Submit(envelope.id, "q", envelope.to_bytes()))
    runner = process_runner({**environ(), "PYTHONPATH": str(tmp_path)})
    async with children(queue, tmp_path, runner, retries=3):
        row = await row_of(queue, missing.id)
        assert row.error is not None
        assert (row.error.type, row.failures) == ("TransportError", 0)
        assert "No module named 'no_such_module'" in row.error.message
        row = await row_of(queue, broken.id)
        assert row.error is not None
        assert "SyntaxError" in row.error.message


async def test_R30_a_python_that_is_none_or_lacks_the_package_says_so(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, process_runner(python=str(tmp_path / "python"))):
        state, type, message, _ = await failure_of(queue, bodies.nothing)
        assert (state, type) == ("failed", "DaemonError")
        assert message.startswith("the process runner could not start a child: [Errno 2] No such file or directory")
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    async with children(queue, tmp_path, process_runner(python=str(bare))):
        message = (await failure_of(queue, bodies.nothing))[2]
        assert message.startswith("the child ended with exit code 1 and wrote no error.json; the end of its output:\n")
        assert "No module named 'dreamlake'" in message


async def test_the_end_of_a_long_output_is_shown(queue: dls.Queue, tmp_path: Path) -> None:
    loud = tmp_path / "loud"
    loud.write_text("#!/bin/sh\nyes 'much ado' | head -n 5000\necho about nothing\nexit 7\n")
    loud.chmod(0o755)
    async with children(queue, tmp_path, process_runner(python=str(loud))):
        message = (await failure_of(queue, bodies.nothing))[2]
    assert message.startswith("the child ended with exit code 7 and wrote no error.json; the end of its output:\n")
    assert message.endswith("much ado\nabout nothing")
    assert 4000 < len(message) < 4250


async def test_pickled_functions_follow_the_trust_of_their_rows(queue: dls.Queue, tmp_path: Path) -> None:
    envelope = dls.thunk(lambda: "pickled").to_envelope()
    async with children(queue, tmp_path):
        await queue.dispatch.do(Submit(envelope.id, "q", envelope.to_bytes()))
        assert await queue.result(envelope.id) == "pickled"
        other = new_id()
        await queue.dispatch.do(Submit(other, "q", envelope.to_bytes(), trusted=False))
        row = await row_of(queue, other)
        assert row.error is not None
        assert "which this worker refuses because loading one runs its code" in row.error.message
    async with children(queue, tmp_path, rules={"allow_pickled": False}, retries=3):
        other = new_id()
        await queue.dispatch.do(Submit(other, "q", envelope.to_bytes()))
        row = await row_of(queue, other)
        assert (row.state, row.failures, row.attempt) == ("failed", 0, 1)


async def test_a_worker_that_refuses_pickles_calls_what_its_operator_named(queue: dls.Queue, tmp_path: Path) -> None:
    envelope = dls.thunk(bodies.double, 1).to_envelope()
    envelope.fn = {"kind": "ref", "module": "operator", "qualname": "neg"}

    async def ask() -> str:
        id = new_id()
        await queue.dispatch.do(Submit(id, "q", envelope.to_bytes(), trusted=False))
        return id

    async with children(queue, tmp_path):
        row = await row_of(queue, await ask())
        assert row.error is not None
        assert "--allow-module" in row.error.message
    async with children(queue, tmp_path, rules={"allow_modules": ("_operator", "operator")}):
        assert await queue.result(await ask()) == -1


async def test_bytes_that_are_no_envelope_are_refused(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        id = new_id()
        await queue.dispatch.do(Submit(id, "q", b"\xc1"))
        row = await row_of(queue, id)
        assert row.error is not None
        assert (row.state, row.error.type) == ("failed", "WireError")


async def test_a_retry_begins_with_an_empty_folder(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path, retries=1):
        assert await queue.call(dls.thunk(bodies.fails_once, str(path))) == 2
    assert len(set(notes(path))) == 2
    assert folders(tmp_path) == []


async def test_the_newest_folders_of_failures_stay(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, rules={"keep": 2}):
        ids = [await queue.submit(dls.thunk(bodies.boom, str(i))) for i in range(4)]
        for id in ids:
            await row_of(queue, id)
        assert folders(tmp_path) == sorted(ids[2:])
        await queue.call(dls.thunk(bodies.nothing))
    assert folders(tmp_path) == sorted(ids[2:])
    async with children(queue, tmp_path, rules={"keep": 0}):
        await row_of(queue, await queue.submit(dls.thunk(bodies.boom, "0")))
    assert folders(tmp_path) == []


async def test_a_large_result(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path):
        assert len(await queue.call(dls.thunk(bodies.big, 100 << 20))) == 100 << 20


async def test_ten_at_once(queue: dls.Queue, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    async with children(queue, tmp_path, concurrency=10):
        ids = [await queue.submit(dls.thunk(bodies.meets, str(meeting), 10)) for _ in range(10)]
        assert len({await queue.result(id) for id in ids}) == 10
    assert folders(tmp_path) == []


async def test_nothing_that_a_body_started_outlives_it(queue: dls.Queue, tmp_path: Path) -> None:
    path = tmp_path / "notes"
    async with children(queue, tmp_path):
        await queue.call(dls.thunk(bodies.leaves_a_process, str(path)))
        await wait_until(lambda: not runs(int(notes(path)[0])), description="the end of what the body started")


# --- script and as_user ----------------------------------------------------------------------------------------------


async def submit_with(queue: dls.Queue, fn: Any = bodies.around, **run_config: Any) -> str:
    id = new_id()
    envelope = dls.thunk(fn).to_envelope(id=id).to_bytes()
    await queue.dispatch.do(Submit(id, "q", envelope, config=pack({"run_config": run_config})))
    return id


async def test_script_and_as_user_are_refused_unless_allowed(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, retries=2):
        for name, what in (("script", "a shell command of"), ("as_user", "its body as the user that")):
            id = await submit_with(queue, **{name: "nobody"})
            row = await row_of(queue, id)
            assert row.error is not None
            assert (row.state, row.error.type, row.failures) == ("failed", "TransportError", 0)
            option = f"--allow-{name.replace('_', '-')}"
            assert row.error.message.startswith(f"invocation {id!r} asks with `{name}` for {what}")
            assert row.error.message.endswith(f"start it with {option} if everybody who can submit may do that there")
        row = await row_of(queue, await submit_with(queue, script=7))
        assert row.error is not None
        assert row.error.message == "expected `script` of the run_config to be text, got int"


async def test_a_script_runs_in_place_of_the_entry(queue: dls.Queue, tmp_path: Path) -> None:
    async with children(queue, tmp_path, rules={"allow_script": True}):
        id = await submit_with(queue, script=f"echo $DREAMLAKE_INVOCATION_ID > {tmp_path}/said; test -s args.msgpack")
        assert await queue.result(id) is None
        assert (tmp_path / "said").read_text() == f"{id}\n"
        assert await queue.result(await submit_with(queue, script=r"printf '\x07' > result.msgpack")) == 7
        row = await row_of(queue, await submit_with(queue, script="echo no luck >&2; exit 5"))
        assert row.error is not None
        assert row.error.message == (
            "the child ended with exit code 5 and wrote no error.json; the end of its output:\nno luck"
        )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run as somebody else")
async def test_as_user_runs_as_that_user(queue: dls.Queue, tmp_path: Path) -> None:
    for folder in [tmp_path, *list(tmp_path.parents)[:-2]]:
        folder.chmod(folder.stat().st_mode | 0o011)
    async with children(queue, tmp_path, rules={"allow_script": True, "allow_as_user": True}):
        id = await submit_with(queue, as_user="nobody", script="id -un > who; stat -c %U args.msgpack >> who; exit 3")
        await row_of(queue, id)
        assert (tmp_path / "work" / id / "who").read_text() == "nobody\nnobody\n"
        row = await row_of(queue, await submit_with(queue, as_user="no-such-user"))
        assert row.error is not None
        assert row.error.message == (
            "the process runner could not start a child: `as_user` names 'no-such-user', and there is no such user here"
        )


# --- limits and options ----------------------------------------------------------------------------------------------


async def test_limits_hold_in_the_child(queue: dls.Queue, tmp_path: Path) -> None:
    runner = ProcessRunner.from_options(
        {"rlimit_as": "1g", "rlimit_nofile": "64", "warm": str(int(WARM[0]))}, environ()
    )
    async with children(queue, tmp_path, runner):
        assert (await failure_of(queue, bodies.allocates, 2 << 30))[:2] == ("failed", "MemoryError")
        assert await queue.call(dls.thunk(bodies.allocates, 1 << 20)) == 1 << 20
    runner = ProcessRunner.from_options({"rlimit_cpu": "1"}, environ())
    async with children(queue, tmp_path, runner):
        busy = await queue.submit(dls.thunk(bodies.count, 10**9))
        row = await row_of(queue, busy)
        assert row.error is not None
        assert "was killed by SIG" in row.error.message


def test_options_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ValueError, match="the process runner knows no option image: it has python, grace, warm, rlimit_as"
    ):
        ProcessRunner.from_options({"image": "x"}, {})
    with pytest.raises(ValueError, match="expected the runner option warm to be 1 or 0, got 'yes'"):
        ProcessRunner.from_options({"warm": "yes"}, {})
    with pytest.raises(ValueError, match=r"expected a number from 0 for the runner option grace, .* got 'soon'"):
        ProcessRunner.from_options({"grace": "soon"}, {})
    runner = ProcessRunner.from_options({"grace": "0.5", "rlimit_core": "0", "rlimit_fsize": "2m"}, {})
    assert (runner.options.grace, sorted(runner.options.limits().values())) == (0.5, [0, 2 << 20])


async def test_slow_starts_block_neither_each_other_nor_the_rest(queue: dls.Queue, tmp_path: Path) -> None:
    gate = tmp_path / "gate"

    class Slow(ProcessRunner):
        """Starts the first child when the gate is open."""

        first = True

        async def start(self, launch: Any) -> Any:
            slow, self.first = self.first, False
            if slow:
                await wait_until(gate.exists, 60.0)
            return await super().start(launch)

    async with children(
        queue, tmp_path, Slow(ProcessOptions(warm=WARM[0]), environ=environ()), concurrency=2, lease=1.0
    ):
        slow = await queue.submit(dls.thunk(bodies.double, 1))
        await wait_until(lambda: folders(tmp_path))
        for i in range(3):
            assert await queue.call(dls.thunk(bodies.double, i)) == 2 * i
        gate.touch()
        assert await queue.result(slow) == 2
        assert (await queue.get(slow)).attempt == 1
