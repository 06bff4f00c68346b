"""The benchmarks run, say what they measured, and leave nothing behind. How fast things are is no test's business."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import wait_until_sync

pytestmark = pytest.mark.slow

_FOLDER = Path(__file__).parents[1] / "benchmarks"
_BOUND = 250.0  # seconds


def _start(temporary: Path, *args: str, script: str = "local.py") -> subprocess.Popen[str]:
    """The benchmark as the leader of a group of its own, with all its files in `temporary`."""
    return subprocess.Popen(
        [sys.executable, str(_FOLDER / script), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(temporary)},
        start_new_session=True,
    )


def _end(process: subprocess.Popen[str], code: int) -> tuple[str, str]:
    """What it wrote, after it ended with `code`; whatever happens nothing of its group lives on."""
    try:
        out, err = process.communicate(timeout=_BOUND)
        assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return out, err
    finally:
        if _alive(process.pid):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _alive(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def _measure(temporary: Path, *args: str, script: str = "local.py") -> str:
    process = _start(temporary, "--quick", "--rounds", "1", *args, script=script)
    out, _ = _end(process, 0)
    assert not _alive(process.pid)
    assert list(temporary.iterdir()) == []
    return out


def _figures(temporary: Path, *args: str, script: str = "local.py") -> dict[str, dict[str, Any]]:
    document = json.loads(_measure(temporary, "--json", *args, script=script))
    assert list(document) == ["figures"]
    for figure in document["figures"]:
        assert list(figure) == ["name", "value", "unit", "ratio", "target", "met", "rounds"]
        # Those that are differences may come to nothing.
        assert figure["value"] > 0 or figure["unit"] == "a minute" or figure["name"].endswith("-imports"), figure
        assert figure["unit"], figure
        assert len(figure["rounds"]) == 1, figure
        assert figure["rounds"][0] == (figure["value"] if figure["ratio"] is None else figure["ratio"])
    return {figure["name"]: figure for figure in document["figures"]}


def test_figures_are_told_as_json(tmp_path: Path) -> None:
    found = _figures(tmp_path, "--only", "submit", "pack-1kb", "local-call", "call-async")
    assert list(found) == [
        *("raw-submit-1", "raw-submit-100", "plane-submit", "queue-submit", "submit-many", "call-async", "pack-1kb"),
        "local-call",
    ]
    for name in ("raw-submit-1", "raw-submit-100"):
        assert found[name]["ratio"] is found[name]["target"] is found[name]["met"] is None
    assert found["plane-submit"]["target"] == ">= 0.5"
    assert found["plane-submit"]["met"] is (found["plane-submit"]["ratio"] >= 0.5)
    assert found["call-async"]["target"] == "<= 5"
    assert found["call-async"]["met"] is (found["call-async"]["ratio"] <= 5)
    assert found["local-call"]["ratio"] is None
    assert found["local-call"]["met"] is (found["local-call"]["value"] <= 3)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_every_figure_of_two_processes_can_be_measured(tmp_path: Path, backend: str) -> None:
    found = _figures(tmp_path, "--backend", backend, "--only", "cycle", "drain", "call", "gather", "frames", "kill")
    missing = {"cycle", "drain-async", "drain-def", "call-sync", "gather", "frames-def", "first-frame"} - set(found)
    assert missing == set()
    assert 0 < found["kill-to-restart"]["value"] < 60
    if backend == "trio":
        assert {figure["target"] for figure in found.values()} == {None}


def test_every_figure_of_a_server_can_be_measured(tmp_path: Path) -> None:
    found = _figures(tmp_path, script="http.py")
    assert list(found) == [
        *("submit-local", "submit", "submit-one-by-one", "submit-coalesced", "cycle-local", "cycle"),
        *("bare-post", "call-local", "call", "results-requests", "single-awaits-cpu", "results-cpu"),
        *("frames-local", "frames", "first-frame-local", "first-frame"),
        *("idle-worker", "idle-worker-requests", "idle-waiter", "idle-waiter-requests"),
        *("crowd-server", "crowd-memory", "crowd-submit"),
    ]
    assert found["call"]["target"] == "<= 8"
    assert found["call"]["met"] is (found["call"]["ratio"] <= 8)
    assert found["results-requests"]["ratio"] is None
    assert found["results-requests"]["met"] is (found["results-requests"]["value"] <= 60)
    for name in ("submit-local", "submit-one-by-one", "cycle-local", "bare-post", "single-awaits-cpu"):
        assert found[name]["ratio"] is found[name]["target"] is found[name]["met"] is None


def test_figures_of_a_server_can_be_measured_on_trio(tmp_path: Path) -> None:
    found = _figures(tmp_path, "--backend", "trio", "--only", "call", script="http.py")
    assert list(found) == ["bare-post", "call-local", "call"]
    assert {figure["target"] for figure in found.values()} == {None}


def test_figures_of_children_can_be_measured(tmp_path: Path) -> None:
    found = _figures(tmp_path, "--only", "process", script="runners.py")
    assert list(found) == ["process-bare", "process-imports", "process", "process-warm"]
    whole, imports, bare = (found[name]["value"] for name in ("process", "process-imports", "process-bare"))
    assert found["process"]["ratio"] == pytest.approx((whole - imports) / bare)
    assert found["process-warm"]["ratio"] == pytest.approx(found["process-warm"]["value"] / whole)
    assert found["process-warm"]["met"] is (found["process-warm"]["ratio"] <= 0.2)


def test_figures_are_told_as_a_table(tmp_path: Path) -> None:
    head, row = _measure(tmp_path, "--only", "local-call").splitlines()
    assert head.split() == ["figure", "value", "unit", "ratio", "min", "-", "max", "target"]
    assert row.startswith("local-call ")
    assert row.rstrip().endswith(("<= 3    met", "<= 3    MISSED"))


def test_an_unknown_figure_is_refused(tmp_path: Path) -> None:
    _, err = _end(_start(tmp_path, "--only", "speed"), 2)
    assert "invalid choice: 'speed'" in err


@pytest.mark.parametrize("script", ["local.py", "http.py"])
def test_a_terminated_run_leaves_nothing(tmp_path: Path, script: str) -> None:
    process = _start(tmp_path, "--quick", "--only", "idle", script=script)
    try:
        wait_until_sync(lambda: list(tmp_path.glob("*/*/plane.db")), 200, "the first plane of the run")
    finally:
        process.send_signal(signal.SIGTERM)
        _end(process, 143)
    assert not _alive(process.pid)
    assert list(tmp_path.iterdir()) == []


def test_the_walks_are_counted(tmp_path: Path) -> None:
    out, _ = _end(_start(tmp_path, "--json", script="walks.py"), 0)
    walks = json.loads(out)["walks"]
    assert [walk["name"] for walk in walks] == ["submit", "call", "submit-http", "frame"]
    assert all(walk["calls"] > walk["switches"] > walk["files"] > 1 for walk in walks)
    assert list(tmp_path.iterdir()) == []
