"""The child program, started the way any daemon can start it: with files, an environment and a process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import child_bodies as bodies
import pytest
from child_bodies import notes
from child_kit import HERE, environ
from helpers import wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.daemon.workdir import ChildSettings
from dreamlake.lakeshore.wire import FrameDecoder, FrameKind, unpack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dreamlake.lakeshore.wire import Envelope

PROGRAM = (sys.executable, "-m", "dreamlake.lakeshore.daemon.entry")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "01HX2K3M4N5P"
    made.mkdir()
    return made


def begin(folder: Path, fn: Any, *args: Any, **env: str) -> subprocess.Popen[bytes]:
    """Start a child in its folder, for a function or an envelope."""
    envelope: Envelope = fn if isinstance(fn, dls.wire.Envelope) else dls.thunk(fn, *args).to_envelope()
    (folder / "args.msgpack").write_bytes(envelope.to_bytes())
    return subprocess.Popen(PROGRAM, cwd=folder, env={**environ(), **env}, stderr=subprocess.PIPE)


def end(child: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Return the exit code and what was written to stderr."""
    _, err = child.communicate(timeout=60)
    return child.returncode, err.decode()


def run(folder: Path, fn: Any, *args: Any, **more: str) -> tuple[int, str]:
    return end(begin(folder, fn, *args, **more))


def error(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "error.json").read_text())
    return found


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def frames(folder: Path) -> list[Any]:
    decoder = FrameDecoder()
    found = list(decoder.feed((folder / "frames.msgpack").read_bytes()))
    decoder.close()
    assert [frame.seq for frame in found] == list(range(len(found)))
    assert {frame.kind for frame in found} <= {FrameKind.VALUE}
    return [frame.body for frame in found]


@pytest.mark.parametrize("fn", [bodies.double, bodies.adouble])
def test_a_result_and_exit_0(folder: Path, fn: Callable[..., Any]) -> None:
    assert run(folder, fn, 21) == (0, "")
    assert unpack((folder / "result.msgpack").read_bytes()) == 42
    assert names(folder) == {"args.msgpack", "result.msgpack"}


def test_a_foreign_daemon_sets_no_variable_at_all(folder: Path) -> None:
    envelope = dls.thunk(bodies.around).to_envelope()
    (folder / "args.msgpack").write_bytes(envelope.to_bytes())
    bare = {"PATH": os.environ["PATH"], "PYTHONPATH": str(HERE)}
    assert end(subprocess.Popen(PROGRAM, cwd=folder, env=bare, stderr=subprocess.PIPE)) == (0, "")
    seen = unpack((folder / "result.msgpack").read_bytes())
    assert (seen["folder"], seen["root"], seen["id"]) == (str(folder), str(folder), envelope.id)
    assert (seen["attempt"], seen["prefix"]) == (1, "")
    assert seen["main thread"]


@pytest.mark.parametrize("fn", [bodies.boom, bodies.aboom])
def test_an_error_and_exit_1(folder: Path, fn: Callable[..., Any]) -> None:
    code, err = run(folder, fn, "no such thing")
    said = error(folder)
    assert code == 1
    assert set(said) == {"type", "message", "traceback"}
    assert (said["type"], said["message"]) == ("LookupError", "no such thing")
    assert err == said["traceback"]
    assert err.endswith("LookupError: no such thing\n")
    assert names(folder) == {"args.msgpack", "error.json"}


@pytest.mark.parametrize(("code", "message"), [(0, "0"), (3, "3"), ("so long", "so long")])
def test_sys_exit_in_the_body_is_an_error(folder: Path, code: object, message: str) -> None:
    assert run(folder, bodies.exits, code)[0] == 1
    assert (error(folder)["type"], error(folder)["message"]) == ("SystemExit", message)
    assert not (folder / "result.msgpack").exists()


def test_what_cannot_be_packed_is_an_error(folder: Path) -> None:
    assert run(folder, bodies.unencodable)[0] == 1
    assert error(folder)["type"] == "EncodeError"
    assert error(folder)["message"].startswith("the result of 'unencodable' cannot be packed")


def test_missing_and_garbled_arguments_are_errors(folder: Path) -> None:
    child = subprocess.Popen(PROGRAM, cwd=folder, env=environ(), stderr=subprocess.PIPE)
    assert end(child)[0] == 1
    assert error(folder)["type"] == "FileNotFoundError"
    (folder / "args.msgpack").write_bytes(b"\x93\x01")
    child = subprocess.Popen(PROGRAM, cwd=folder, env=environ(), stderr=subprocess.PIPE)
    assert end(child)[0] == 1
    assert error(folder)["type"] == "WireError"


def test_leftovers_of_an_earlier_run_are_gone(folder: Path) -> None:
    for name in ("result.msgpack", "error.json", "frames.msgpack"):
        (folder / name).write_bytes(b"old")
    assert run(folder, bodies.boom, "new")[0] == 1
    assert names(folder) == {"args.msgpack", "error.json"}
    assert error(folder)["message"] == "new"
    assert run(folder, bodies.double, 1)[0] == 0
    assert names(folder) == {"args.msgpack", "result.msgpack"}


def test_the_environment_says_where_and_who(folder: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    orders = ChildSettings(
        folder, root, "abc", "mother", "grandmother", "scenes/7", "off", False, ("child_bodies", "x"), 3
    )
    assert ChildSettings.read(orders.environ()) == orders
    child = begin(folder, bodies.around, **orders.environ())
    assert end(child) == (0, "")
    seen = unpack((folder / "result.msgpack").read_bytes())
    assert (seen["id"], seen["attempt"], seen["prefix"], seen["root"]) == ("abc", 3, "scenes/7", str(root))
    assert seen["environ"]["DREAMLAKE_ROOT_INVOCATION_ID"] == "grandmother"


def test_the_folder_may_be_another_one_than_the_current(folder: Path, tmp_path: Path) -> None:
    envelope = dls.thunk(bodies.around).to_envelope(prefix="own")
    (folder / "args.msgpack").write_bytes(envelope.to_bytes())
    env = {**environ(), "DREAMLAKE_WORKDIR": str(folder), "DREAMLAKE_PREFIX": "other", "LAKESHORE_ALLOW_PICKLED": ""}
    child = subprocess.Popen(PROGRAM, cwd=tmp_path, env=env, stderr=subprocess.PIPE)
    assert end(child) == (0, "")
    seen = unpack((folder / "result.msgpack").read_bytes())
    assert (seen["id"], seen["attempt"], seen["prefix"]) == (envelope.id, 1, "own")
    assert seen["root"] == seen["folder"] == str(tmp_path)


def test_pickles_are_allowed_unless_the_daemon_says_no(folder: Path) -> None:
    envelope = dls.thunk(lambda: "pickled").to_envelope()
    assert run(folder, envelope)[0] == 0
    assert unpack((folder / "result.msgpack").read_bytes()) == "pickled"
    assert run(folder, envelope, LAKESHORE_ALLOW_PICKLED="0")[0] == 1
    assert error(folder)["type"] == "TransportError"
    assert error(folder)["final"] is True


def test_the_daemon_says_how_alike_the_pythons_must_be(folder: Path) -> None:
    envelope = dls.thunk(lambda: "pickled").to_envelope()
    envelope.fn["runtime"] = {**envelope.fn["runtime"], "python": "3.99.0"}
    assert run(folder, envelope)[0] == 1
    assert error(folder)["type"] == "TransportError"
    assert error(folder)["message"].startswith("the function was pickled under python '3.99.0' of 'cpython'")
    assert run(folder, envelope, LAKESHORE_RUNTIME_POLICY="off")[0] == 0
    assert unpack((folder / "result.msgpack").read_bytes()) == "pickled"


@pytest.mark.parametrize("fn", [bodies.segfault, bodies.kills_itself])
def test_a_child_that_dies_leaves_no_outcome(folder: Path, fn: Callable[..., Any]) -> None:
    code, _ = run(folder, fn)
    assert code == (-signal.SIGSEGV if fn is bodies.segfault else -signal.SIGKILL)
    assert names(folder) == {"args.msgpack"}


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("LAKESHORE_ALLOW_PICKLED", "yes", "expected LAKESHORE_ALLOW_PICKLED to be 1 or 0, got 'yes'"),
        ("LAKESHORE_ATTEMPT", "second", "expected LAKESHORE_ATTEMPT to be a number from 1, got 'second'"),
        ("LAKESHORE_RUNTIME_POLICY", "hm", "expected the runtime policy 'strict', 'minor' or 'off', got 'hm'"),
    ],
)
def test_an_environment_that_makes_no_sense_is_an_error(folder: Path, name: str, value: str, message: str) -> None:
    assert run(folder, bodies.double, 1, **{name: value})[0] == 1
    assert error(folder)["message"] == message


@pytest.mark.parametrize("fn", [bodies.count, bodies.acount])
def test_generators_leave_frames(folder: Path, fn: Callable[..., Any]) -> None:
    assert run(folder, fn, 300) == (0, "")
    assert frames(folder) == list(range(300))
    assert unpack((folder / "result.msgpack").read_bytes()) is None
    assert run(folder, fn, 0) == (0, "")
    assert frames(folder) == []


def test_a_generator_of_keys_results_in_its_manifest(folder: Path) -> None:
    assert run(folder, bodies.keys, "a", "b/c")[0] == 0
    assert frames(folder) == unpack((folder / "result.msgpack").read_bytes()) == ["a", "b/c"]
    assert (folder / "b" / "c").read_text() == "b/c"


def test_frames_are_there_while_the_body_runs(folder: Path) -> None:
    child = begin(folder, bodies.one_then_waits, str(folder / "gate"))
    path = folder / "frames.msgpack"
    wait_until_sync(lambda: path.exists() and path.stat().st_size, description="the first frame")
    assert frames(folder) == [1]
    (folder / "gate").touch()
    assert end(child) == (0, "")
    assert frames(folder) == [1, 2]


def test_a_yielded_value_that_cannot_be_packed_ends_the_body(folder: Path) -> None:
    assert run(folder, bodies.yields_unencodable)[0] == 1
    assert frames(folder) == [1]
    assert error(folder)["message"].startswith("a value that 'yields_unencodable' yielded cannot be packed")


@pytest.mark.parametrize("fn", [bodies.sleeps, bodies.asleeps, bodies.endless, bodies.aendless])
def test_R38_sigterm_stops_the_body_and_runs_its_finally(folder: Path, fn: Callable[..., Any]) -> None:
    path = folder / "notes"
    child = begin(folder, fn, str(path))
    wait_until_sync(lambda: notes(path), description="the begin of the body")
    child.send_signal(signal.SIGTERM)
    assert end(child) == (1, "Cancelled: stopped by SIGTERM\n")
    assert notes(path) == [f"began {child.pid}", "cleaned up"]
    assert error(folder) == {"type": "Cancelled", "message": "stopped by SIGTERM", "traceback": ""}


def test_a_body_that_finishes_anyway_has_its_result(folder: Path) -> None:
    child = begin(folder, bodies.finishes_anyway, str(folder / "notes"))
    wait_until_sync(lambda: notes(folder / "notes"), description="the begin of the body")
    child.send_signal(signal.SIGTERM)
    assert end(child) == (0, "")
    assert unpack((folder / "result.msgpack").read_bytes()) == "finished anyway"


def test_ctrl_c_is_an_error(folder: Path) -> None:
    child = begin(folder, bodies.sleeps, str(folder / "notes"))
    wait_until_sync(lambda: notes(folder / "notes"), description="the begin of the body")
    child.send_signal(signal.SIGINT)
    assert end(child)[0] == 1
    assert error(folder)["type"] == "KeyboardInterrupt"


def test_a_thread_that_the_body_left_does_not_keep_the_child(folder: Path) -> None:
    assert run(folder, bodies.leaves_a_thread)[0] == 0
    assert unpack((folder / "result.msgpack").read_bytes()) == "done"


def test_files_appear_complete(folder: Path) -> None:
    """A result file is complete from the moment that it exists."""
    child = begin(folder, bodies.big, 64 << 20)
    path = folder / "result.msgpack"
    wait_until_sync(path.exists, 90.0, "the result")
    assert path.stat().st_size > 64 << 20
    assert end(child)[0] == 0


def test_a_disk_without_space_is_an_error_on_stderr(folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from dreamlake.lakeshore.daemon import entry\n"
        "def full(folder, name, data): raise OSError(28, 'No space left on device')\n"
        "entry.write_file = full\n"
        "entry.main()"
    )
    (folder / "args.msgpack").write_bytes(dls.thunk(bodies.double, 1).to_envelope().to_bytes())
    child = subprocess.Popen([sys.executable, "-c", script], cwd=folder, env=environ(), stderr=subprocess.PIPE)
    code, err = end(child)
    assert code == 1
    assert "No space left on device" in err
    assert error(folder)["type"] == "OSError"


def test_a_folder_that_is_gone_is_an_error_on_stderr(folder: Path) -> None:
    code, err = run(folder, bodies.removes_its_folder)
    assert code == 1
    assert "FileNotFoundError" in err
    assert "error.json could not be written: [Errno 2]" in err


def test_exit_handlers_run_and_change_nothing(folder: Path) -> None:
    code, err = run(folder, bodies.leaves_exit_handlers, str(folder / "notes"))
    assert code == 0
    assert notes(folder / "notes") == ["at exit"]
    assert "LookupError: too late" in err
    assert unpack((folder / "result.msgpack").read_bytes()) == "done"


def test_further_signals_do_not_disturb_the_cleaning_up(folder: Path) -> None:
    path, gate = folder / "notes", folder / "gate"
    child = begin(folder, bodies.cleans_up_slowly, str(path), str(gate))
    wait_until_sync(lambda: notes(path), description="the begin of the body")
    child.send_signal(signal.SIGTERM)
    wait_until_sync(lambda: len(notes(path)) == 2, description="the begin of the cleaning up")
    child.send_signal(signal.SIGTERM)
    gate.touch()
    assert end(child)[0] == 1
    assert notes(path) == ["began", "cleaning up", "cleaned up"]
