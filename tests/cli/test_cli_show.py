"""`lakeshore queue`, `inv` and `purge`: what they print for people and for programs, and their exit codes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import anyio
import cli_jobs
import pytest
from cli_kit import HERE, LIMIT, Process, cli, environment, worker
from helpers import needs, wait_until_sync

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.cli.output import clean, jsonable, value_text

if TYPE_CHECKING:
    from pathlib import Path

    from cli_kit import Work

STATES = ["queued", "running", "succeeded", "failed", "killed", "timeout"]


# --- queues ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def three(q: dls.SyncQueue, work: Work) -> list[str]:
    """One that succeeded, one that failed, one that is queued; and one in a queue of an odd name."""
    ids = [q.submit(dls.thunk(cli_jobs.add, 1, b=2)), q.submit(dls.thunk(cli_jobs.boom, "bad\x1b[31m luck"))]
    work()
    ids.append(q.submit(dls.thunk(cli_jobs.count, 2)))
    ids.append(dls.SyncQueue("[red]", dispatch=q.dispatch).submit(dls.thunk(cli_jobs.add, 1)))
    return ids


def test_queue_list(db: Path, three: list[str]) -> None:
    ran = cli("queue", "list", "--db", db)
    assert ran.code == 0
    assert [line.split() for line in ran.out.splitlines()] == [
        ["queue", *STATES],
        ["[red]", "1", "0", "0", "0", "0", "0"],
        ["q", "1", "0", "1", "1", "0", "0"],
    ]
    assert cli("queue", "list", "--db", db, "--json").document == [
        {"name": "[red]", **dict.fromkeys(STATES, 0), "queued": 1},
        {"name": "q", **dict.fromkeys(STATES, 0), "queued": 1, "succeeded": 1, "failed": 1},
    ]


def test_queue_show(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    job = q.claim()
    assert job is not None
    assert job.id == three[2]
    document = cli("queue", "show", "q", "--db", db, "--json").document
    assert [row["id"] for row in document.pop("running_now")] == [job.id]
    assert document == {"name": "q", **dict.fromkeys(STATES, 0), "running": 1, "succeeded": 1, "failed": 1}
    lines = [line.split() for line in cli("queue", "show", "q", "--db", db).out.splitlines()]
    assert lines[: len(STATES) + 1] == [
        ["state", "invocations"],
        *([state, str(document[state])] for state in STATES),
    ]
    assert lines[-1][:4] == [job.id, "q", "running", "1"]
    q.ack(job)


def test_a_queue_without_invocations_is_named_with_those_that_have_some(db: Path, three: list[str]) -> None:
    ran = cli("queue", "show", "gpu", "--db", db)
    sentence = "no invocation is in a queue 'gpu' on this plane; queues with invocations: '[red]', 'q'"
    assert (ran.code, ran.out, ran.err) == (1, "", f"lakeshore: {sentence}\n")
    ran = cli("queue", "show", "gpu", "--db", db, "--json")
    assert ran.code == 1
    assert ran.document == {"error": {"type": "DispatchError", "message": sentence}}


# --- invocations ----------------------------------------------------------------------------------------------------


def test_inv_list(db: Path, three: list[str]) -> None:
    lines = cli("inv", "list", "--db", db).out.splitlines()
    assert lines[0].split() == ["id", "queue", "state", "attempt", "age", "seconds", "function", "error"]
    assert [line.split()[0] for line in lines[1:]] == three[::-1]
    assert lines[3].endswith(r"ValueError: bad\x1b[31m luck")
    assert [row["id"] for row in cli("inv", "list", "--db", db, "--json").document] == three[::-1]
    assert [row["id"] for row in cli("inv", "list", "--db", db, "--json", "--limit", 1).document] == three[3:]
    assert [row["id"] for row in cli("inv", "list", "--db", db, "--json", "--state", "failed").document] == three[1:2]
    assert [row["id"] for row in cli("inv", "list", "--db", db, "--json", "--queue", "[red]").document] == three[3:]
    assert cli("inv", "list", "--db", db, "--json", "--queue", "none").document == []


def test_the_row_of_an_invocation(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    row = q.get(three[0])
    (shown,) = cli("inv", "list", "--db", db, "--json", "--state", "succeeded").document
    assert shown == {name: value for name, value in row._asdict().items() if name != "body"} | {
        "function": "cli_jobs.add"
    }
    assert {"attempt", "failures", "lost", "worker", "submitted_at", "finished_at", "error"} <= shown.keys()


def test_inv_show(db: Path, three: list[str]) -> None:
    lines = dict(line.split(maxsplit=1) for line in cli("inv", "show", three[0], "--db", db).out.splitlines())
    assert lines["id"] == three[0]
    assert lines["call"] == "cli_jobs.add(1, b=2)"
    assert lines["state"] == "succeeded"
    assert "lease" not in lines
    call = cli("inv", "show", three[0], "--db", db, "--json").document["call"]
    assert call.pop("function").keys() == {"kind", "module", "qualname", "src_hash"}
    assert call == {"args": [1], "kwargs": {"b": 2}, "prefix": "", "unreadable": None}


def test_inv_show_gives_the_error_with_its_traceback(db: Path, three: list[str]) -> None:
    ran = cli("inv", "show", three[1], "--db", db)
    assert ran.code == 0
    assert "call             cli_jobs.boom('bad\\x1b[31m luck')\n" in ran.out
    _, _, error = ran.out.partition("\n\n")
    assert error.startswith("Traceback (most recent call last):\n")
    assert 'cli_jobs.py", line ' in error
    assert error.endswith("ValueError: bad\\x1b[31m luck\n")
    error = cli("inv", "show", three[1], "--db", db, "--json").document["error"]
    assert (error["type"], error["message"]) == ("ValueError", "bad\x1b[31m luck")
    assert "cli_jobs.py" in error["traceback"]


class Bomb:
    """Unpickling it would end the process."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.abort, ()


def test_R108_inv_show_never_unpickles(db: Path, q: dls.SyncQueue) -> None:
    bomb = Bomb()
    with dls.scope("scenes/1"):
        id = q.submit(dls.thunk(lambda x: bomb, "argument"))
    ran = cli("inv", "show", id, "--db", db)
    assert ran.code == 0
    assert "<lambda>('argument')\n" in ran.out
    assert "prefix           scenes/1\n" in ran.out
    assert f"pickled          test_R108_inv_show_never_unpickles.<locals>.<lambda> ({__file__}:" in ran.out
    function = cli("inv", "show", id, "--db", db, "--json").document["call"]["function"]
    assert "blob" not in function
    assert function["kind"] == "pickle"
    assert function["source"].strip().startswith("id = q.submit(dls.thunk(lambda x: bomb")


def test_what_cannot_be_read_is_described(db: Path, q: dls.SyncQueue) -> None:
    plain = q.submit({"plain": "value"})
    ran = cli("inv", "show", plain, "--db", db)
    assert "? (13 bytes, for those who claim by hand: not an Envelope: " in ran.out
    assert cli("inv", "show", plain, "--db", db, "--json").document["call"]["function"] is None
    large = q.submit(dls.thunk(cli_jobs.echo, "x" * 2_000_000))
    assert "cli_jobs.echo (2000007 bytes of arguments)\n" in cli("inv", "show", large, "--db", db).out
    long = q.submit(dls.thunk(cli_jobs.echo, "x" * 1000))
    assert len(cli("inv", "show", long, "--db", db).out) < 1000
    garbled = dls.thunk(cli_jobs.echo, 1).to_envelope()
    garbled.args = b"\xc1"
    anyio.run(q.aio.dispatch.submit, "q", garbled.to_bytes())
    (row,) = q.list(limit=1)
    assert (
        "cli_jobs.echo (2 bytes of arguments that cannot be read here: " in cli("inv", "show", row.id, "--db", db).out
    )


# --- results --------------------------------------------------------------------------------------------------------


def test_inv_result(db: Path, three: list[str]) -> None:
    ran = cli("inv", "result", three[0], "--db", db)
    assert (ran.code, ran.out, ran.err) == (0, "3\n", "")
    ran = cli("inv", "result", three[0], "--db", db, "--json")
    assert ran.document == {"id": three[0], "state": "succeeded", "value": 3}


def test_the_result_of_a_failed_invocation_is_its_error(db: Path, three: list[str]) -> None:
    ran = cli("inv", "result", three[1], "--db", db)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("Traceback (most recent call last):\n")
    assert ran.err.endswith(f"lakeshore: invocation '{three[1]}' ended failed: ValueError: bad\\x1b[31m luck\n")
    ran = cli("inv", "result", three[1], "--db", db, "--json")
    assert ran.code == 1
    assert ran.document.keys() == {"id", "state", "error"}
    assert ran.document["state"] == "failed"
    assert ran.document["error"]["message"] == "bad\x1b[31m luck"


def test_a_wait_has_a_limit_and_leaves_the_invocation_alone(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    started = time.monotonic()
    ran = cli("inv", "result", three[2], "--db", db, "--timeout", "0.1s", "--json")
    assert time.monotonic() - started < 50
    sentence = (
        f"invocation '{three[2]}' had not ended after 0.1 s; no worker has taken it from queue 'q' yet (all are busy, or "
        "none serves it), wait again with its id"
    )
    assert (ran.code, ran.err) == (1, f"lakeshore: {sentence}\n")
    assert ran.document == {"error": {"type": "TimeoutError", "message": sentence}}
    assert q.get(three[2]).state == "queued"


def test_ctrl_c_ends_a_wait_and_leaves_the_invocation_alone(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    with Process("inv", "stream", three[2], "--db", db, "--json") as process:
        job = q.claim()
        assert job is not None
        q.post(job, "first")
        wait_until_sync(lambda: "first" in process.out, LIMIT, "the first item")
        process.signal(signal.SIGINT)
        ran = process.ends()
    assert ran.code == 130
    assert ran.document == [{"seq": 0, "value": "first"}]
    assert "Traceback" not in ran.err
    assert q.get(three[2]).state == "running"
    q.ack(job)


VALUES = [
    (None, None),
    ([True, 1, 2**63, "ä\x00\n", 1.5], [True, 1, 2**63, "ä\x00\n", 1.5]),
    ((1, (2,)), [1, [2]]),
    (b"\x00\xff", {"$type": "bytes", "base64": "AP8="}),
    ([float("nan"), -float("inf")], [{"$type": "float", "repr": "nan"}, {"$type": "float", "repr": "-inf"}]),
    ({"a": {"b": b""}}, {"a": {"b": {"$type": "bytes", "base64": ""}}}),
    ({1: "x", (2, 3): None}, {"$type": "dict", "items": [[1, "x"], [[2, 3], None]]}),
    ({"$type": "bytes"}, {"$type": "dict", "items": [["$type", "bytes"]]}),
]


@pytest.mark.parametrize(("value", "expected"), VALUES, ids=lambda value: repr(value)[:30])
def test_values_as_json(value: Any, expected: Any) -> None:
    assert jsonable(value) == expected
    json.dumps(jsonable(value), allow_nan=False)


def test_arrays_and_foreign_values_as_json() -> None:
    np = needs("numpy")
    array = np.asfortranarray(np.arange(6, dtype="<f8").reshape(2, 3))
    shown = jsonable(array)
    assert shown == {"$type": "ndarray", "dtype": "<f8", "shape": [2, 3], "base64": shown["base64"]}
    back = np.frombuffer(base64.b64decode(shown["base64"]), shown["dtype"]).reshape(shown["shape"])
    assert np.array_equal(back, array)
    record = np.zeros(2, dtype=[("x", "<i4"), ("y", "<f8", (2,))])
    assert jsonable(record)["dtype"] == [["x", "<i4"], ["y", "<f8", [2]]]
    assert jsonable([np.float32(1.5), np.int8(-1), np.bool_(True)]) == [1.5, -1, True]
    assert jsonable(np.float64("nan")) == {"$type": "float", "repr": "nan"}
    assert jsonable(np.datetime64("2020-01-01")) == {"$type": "numpy.datetime64", "repr": "np.datetime64('2020-01-01')"}
    ext = dls.wire.unpack(b"\xd4\x2a\x07")
    assert jsonable(ext) == {"$type": "ext", "code": 42, "base64": "Bw=="}


def test_results_that_json_cannot_hold(db: Path, q: dls.SyncQueue, work: Work) -> None:
    for value, expected in VALUES:
        id = q.submit(dls.thunk(cli_jobs.echo, value))
        work()
        assert cli("inv", "result", id, "--db", db, "--json").document["value"] == expected
        assert cli("inv", "result", id, "--db", db).out == f"{value_text(value)}\n"


def test_a_value_too_deep_to_be_shown_is_one_sentence(db: Path, q: dls.SyncQueue, work: Work) -> None:
    value: Any = None
    for level in range(3000):
        value = (value,) if level % 300 == 0 else [value]
    ids = [q.submit(dls.thunk(cli_jobs.echo, value)), q.submit(dls.thunk(cli_jobs.give, value))]
    work()
    for id, command, what in zip(ids, ("result", "stream"), ("the value", "value 0"), strict=True):
        for options in ([], ["--json"]):
            ran = cli("inv", command, id, "--db", db, *options)
            sentence = f"{what} of invocation {id!r} is nested too deep to be shown: read it in Python"
            if ran.code == 0:  # since 3.12 repr goes deeper than Python's own functions do
                assert (options, ran.out.count("[")) == ([], 2990)
            else:
                assert (ran.code, ran.err) == (1, f"lakeshore: {sentence}\n")
    assert "cli_jobs.echo([[[[" in cli("inv", "show", ids[0], "--db", db).out
    call = cli("inv", "show", ids[0], "--db", db, "--json").document["call"]
    assert (call["args"], call["unreadable"]) == (None, "it is nested too deep to be shown")


def test_control_characters_from_afar_do_not_reach_the_terminal() -> None:
    assert clean("plain ä 漢") == "plain ä 漢"
    assert clean("a\tb\nc") == "a\tb\nc"
    assert clean("\x1b]0;title\x07\r\x9b\u202e") == "\\x1b]0;title\\x07\\r\\x9b\\u202e"
    assert value_text(["\x1b[2J", "two\nlines"], one_line=True) == r"['\x1b[2J', 'two\nlines']"


# --- streams --------------------------------------------------------------------------------------------------------


def test_inv_stream(db: Path, q: dls.SyncQueue, work: Work) -> None:
    id = q.submit(dls.thunk(cli_jobs.count, 3))
    work()
    ran = cli("inv", "stream", id, "--db", db)
    assert (ran.code, ran.out, ran.err) == (0, "0\t{'n': 0}\n1\t{'n': 1}\n2\t{'n': 2}\n", "")
    assert cli("inv", "stream", id, "--db", db, "--since", 0).out == "1\t{'n': 1}\n2\t{'n': 2}\n"
    whole = [{"seq": n, "value": {"n": n}} for n in range(3)]
    assert cli("inv", "stream", id, "--db", db, "--json").document == whole
    assert cli("inv", "stream", id, "--db", db, "--json", "--since", 2).document == []


def test_a_stream_that_fails_is_a_whole_document_that_says_so(db: Path, q: dls.SyncQueue, work: Work) -> None:
    id = q.submit(dls.thunk(cli_jobs.count_and_fail, 2))
    work()
    ran = cli("inv", "stream", id, "--db", db)
    assert (ran.code, ran.out) == (1, "0\t0\n1\t1\n")
    assert ran.err.endswith(f"lakeshore: invocation {id!r} ended failed: ValueError: no more\n")
    ran = cli("inv", "stream", id, "--db", db, "--json")
    assert ran.code == 1
    *values, last = ran.document
    assert values == [{"seq": 0, "value": 0}, {"seq": 1, "value": 1}]
    assert (last["id"], last["state"], last["error"]["message"]) == (id, "failed", "no more")


def test_a_stream_that_begins_again_ends_or_goes_on(db: Path, q: dls.SyncQueue) -> None:
    id = q.submit(dls.thunk(cli_jobs.count_again, 3))
    with worker(db, "--retries", 1):
        wait_until_sync(lambda: q.get(id).state == "succeeded", LIMIT, "its second try")
    ran = cli("inv", "stream", id, "--db", db)
    assert (ran.code, ran.out) == (1, "0\t0\n1\t1\n")
    (seq,) = re.findall(r"was restarted as attempt 2: .* read on with since=(\d+)", ran.err)
    again = cli("inv", "stream", id, "--db", db, "--since", seq)
    assert (again.code, [line.split("\t")[1] for line in again.out.splitlines()]) == (0, ["0", "1", "2"])
    whole = cli("inv", "stream", id, "--db", db, "--on-restart", "continue")
    assert (whole.code, whole.out) == (0, ran.out + again.out)


def test_a_stream_is_read_live_and_resumed(db: Path, q: dls.SyncQueue) -> None:
    id = q.submit("by hand")
    job = q.claim()
    assert job is not None
    with Process("inv", "stream", id, "--db", db) as reader:
        q.post(job, "first")
        wait_until_sync(lambda: reader.out == "0\t'first'\n", LIMIT, "the first value, before there is a second")
    with Process("inv", "stream", id, "--since", 0, "--db", db) as reader:
        q.post(job, "second")
        q.ack(job)
        ran = reader.ends()
    assert (ran.code, ran.out) == (0, "1\t'second'\n")


def test_a_reader_that_leaves_the_pipe_ends_it_quietly(db: Path, q: dls.SyncQueue, work: Work) -> None:
    id = q.submit(dls.thunk(cli_jobs.count, 20_000))
    work()
    command = f"{sys.executable} -m dreamlake.lakeshore inv stream {id} --db {db} | head -n 1"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=LIMIT, env=environment())
    assert (ran.stdout, ran.stderr) == ("0\t{'n': 0}\n", "")


# --- ending them ----------------------------------------------------------------------------------------------------


def test_inv_cancel(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    ran = cli("inv", "cancel", three[2], "--db", db)
    assert (ran.code, ran.out) == (0, f"{three[2]} ended killed\n")
    ran = cli("inv", "cancel", three[2], "--db", db)
    assert (ran.code, ran.out) == (0, f"{three[2]} had ended before: killed\n")
    ran = cli("inv", "cancel", three[0], "--db", db, "--wait")
    assert (ran.code, ran.out) == (0, f"{three[0]} had ended before: succeeded\n")
    q.submit("by hand")
    job = q.claim()
    assert job is not None
    ran = cli("inv", "cancel", job.id, "--db", db)
    assert (ran.code, ran.out) == (0, f"{job.id} is running, and its worker is asked to end it\n")
    q.nack(job)


def test_R84_cancel_waits_for_the_end_where_asked(db: Path, q: dls.SyncQueue, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    with worker(db):
        id = q.submit(dls.thunk(cli_jobs.wait_forever, str(begun)))
        wait_until_sync(begun.exists, LIMIT, "the body")
        ran = cli("inv", "cancel", id, "--wait", "--db", db)
    assert (ran.code, ran.out) == (0, f"{id} ended killed\n")


def test_inv_release(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    held = q.claim(lease=None)
    assert held is not None
    ran = cli("inv", "release", held.id, "--db", db)
    assert (ran.code, ran.out) == (0, f"{held.id} is queued again\n")
    with pytest.raises(dls.ClaimLost):
        q.ack(held)
    leased = q.claim(lease=60)
    assert leased is not None
    ran = cli("inv", "release", leased.id, "--db", db)
    assert ran.code == 1
    assert ran.err == (
        f"lakeshore: invocation {leased.id!r} is held by worker {leased.worker!r} under a lease: if that worker is "
        "gone, the invocation returns to its queue by itself; to end it, use `lakeshore inv cancel`\n"
    )
    q.ack(leased)
    ran = cli("inv", "release", leased.id, "--db", db)
    assert ran.code == 1
    assert ran.err == (
        f"lakeshore: invocation {leased.id!r} ended succeeded: nothing holds it, so there is nothing to release\n"
    )


def test_purge(db: Path, q: dls.SyncQueue, three: list[str]) -> None:
    assert cli("purge", "--older-than", "7d", "--db", db).out == "0 invocations purged\n"
    assert cli("purge", "--older-than", "0s", "--db", db).out == "2 invocations purged\n"
    assert [row["id"] for row in cli("inv", "list", "--db", db, "--json").document] == [three[3], three[2]]
    cli("inv", "cancel", three[2], "--db", db)
    assert cli("purge", "--older-than", "0s", "--db", db).out == "1 invocation purged\n"


@pytest.mark.parametrize(
    ("age", "seconds"),
    [("90s", 90), ("1.5s", 1.5), (".5s", 0.5), ("0m", 0), ("10m", 600), ("2h", 7200), ("7d", 604800), ("4w", 2419200)],
)
def test_ages(db: Path, age: str, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    async def purge(plane: Any, older_than: float) -> int:
        seen.append(older_than)
        return 0

    dls.SyncQueue("q", dispatch=dls.Dispatch(db)).submit(1)
    monkeypatch.setattr(dls.Dispatch, "purge", purge)
    assert cli("purge", "--older-than", age, "--db", db).code == 0
    assert seen == [seconds]


@pytest.mark.parametrize("number", ["7", "0", "1.5", "7.", " 7 "])
def test_what_deletes_takes_no_bare_number(db: Path, three: list[str], number: str) -> None:
    ran = cli("purge", "--older-than", number, "--db", db)
    assert (ran.code, ran.out) == (2, "")
    assert (
        "expected a number with a unit, one of s, m, h, d and w (seconds, minutes, hours, days, weeks), "
        f"got {number!r}: write 7d for seven days"
    ) in ran.err
    assert len(cli("inv", "list", "--db", db, "--json").document) == len(three)


def test_the_function_is_listed_without_a_look_at_its_arguments(db: Path, q: dls.SyncQueue) -> None:
    q.submit(b"by hand")
    garbled = dls.thunk(cli_jobs.add, 1).to_envelope()
    garbled.args = b"\xc1"
    anyio.run(q.aio.dispatch.submit, "q", garbled.to_bytes())
    assert [row["function"] for row in cli("inv", "list", "--db", db, "--json").document] == ["cli_jobs.add", None]
    assert q.claim() is not None
    q.claim()
    running = cli("queue", "show", "q", "--db", db, "--json").document["running_now"]
    assert {row["function"] for row in running} == {"cli_jobs.add", None}


def test_times_have_their_zone(db: Path, three: list[str]) -> None:
    shown = dict(line.split("  ", 1) for line in cli("inv", "show", three[0], "--db", db).out.splitlines())
    for name in ("submitted at", "started at", "finished at"):
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d [+-]\d{4}", shown[name].strip())


# --- errors ---------------------------------------------------------------------------------------------------------

SHOWING = [("inv", "show", "X"), ("inv", "result", "X"), ("inv", "stream", "X")]
ENDING = [("inv", "cancel", "X"), ("inv", "release", "X")]
READING = [("queue", "list"), ("queue", "show", "q"), ("inv", "list"), *SHOWING]


@pytest.mark.parametrize("command", [*SHOWING, *ENDING], ids=" ".join)
def test_an_id_that_is_not_there(db: Path, three: list[str], command: tuple[str, ...]) -> None:
    ran = cli(*command, "--db", db)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"lakeshore: {dls.InvocationNotFound('X')}\n"


@pytest.mark.parametrize("command", [*READING, *ENDING, ("purge", "--older-than", "7d")], ids=" ".join)
def test_a_plane_that_is_not_there_is_not_created(tmp_path: Path, command: tuple[str, ...]) -> None:
    db = tmp_path / "typo.db"
    ran = cli(*command, "--db", db)
    assert (ran.code, ran.out) == (5, "")
    assert ran.err == (
        f"lakeshore: no plane at {str(db)!r}: nothing was ever submitted there; check --db or LAKESHORE_HOME\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_with_json_every_error_is_one_document(tmp_path: Path, command: tuple[str, ...]) -> None:
    ran = cli(*command, "--json", "--db", tmp_path / "typo.db")
    assert ran.code == 5
    found = ran.document[-1] if command[1] == "stream" else ran.document
    assert found["error"]["type"] == "PlaneUnavailable"


def test_a_file_that_is_no_plane(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("dear diary, " * 100)
    ran = cli("queue", "list", "--db", file)
    assert (ran.code, ran.out) == (1, "")
    assert "notes.txt' is not a plane of this package: " in ran.err
    assert file.read_text() == "dear diary, " * 100


@pytest.mark.parametrize(
    "command",
    [
        ("inv", "list", "--state", "done"),
        ("inv", "list", "--limit", "0"),
        ("inv", "result", "X", "--timeout", "0"),
        ("inv", "show"),
        ("purge",),
        ("purge", "--older-than", "-1"),
        ("purge", "--older-than", "a week"),
        ("queue", "list", "--db", ":memory:"),
        ("nothing",),
    ],
    ids=" ".join,
)
def test_usage_errors(command: tuple[str, ...]) -> None:
    ran = cli(*command)
    assert (ran.code, ran.out) == (2, "")
    assert "Error: " in ran.err


def test_not_authorised_is_a_code_of_its_own(monkeypatch: pytest.MonkeyPatch, db: Path, three: list[str]) -> None:
    async def counts(*args: Any) -> Any:
        raise dls.NotAuthorized("no token")

    monkeypatch.setattr(dls.Dispatch, "counts", counts)  # a file asks for none
    ran = cli("queue", "list", "--db", db)
    assert (ran.code, ran.err) == (4, "lakeshore: no token\n")


def test_a_server_in_the_environment_is_meant_unless_a_file_is_given(db: Path, three: list[str]) -> None:
    env = environment(LAKESHORE_URL="http://127.0.0.1:1")
    ran = Process("queue", "list", env=env).ends()
    assert ran.code == 5
    assert " at http://127.0.0.1:1, " in ran.err
    assert Process("queue", "list", "--db", db, env=env).ends().code == 0


# --- the program ----------------------------------------------------------------------------------------------------


def test_the_default_plane_is_that_of_the_environment(tmp_path: Path) -> None:
    plane = dls.Dispatch(tmp_path / "lakeshore.db")
    dls.SyncQueue("q", dispatch=plane).submit(1)
    ran = Process("queue", "list", "--json", env=environment(LAKESHORE_HOME=str(tmp_path))).ends()
    assert [queue["name"] for queue in ran.document] == ["q"]


def test_version_and_help() -> None:
    from importlib.metadata import version

    assert cli("--version").out == f"lakeshore, version {version('dreamlake-lakeshore')}\n"
    helps = {name: cli(*name.split(), "--help").out for name in ("worker start", "worker once", "inv list", "purge")}
    for option in (
        "--queue --concurrency --retries --timeout --lease --max-lost --grace --root --allow-pickled --allow-module "
        "--runtime-policy --namespace --db"
    ).split():
        assert option in helps["worker start"]
        assert option in helps["worker once"]
    assert cli("inv", "--help").out.count("\n  ") >= 6


def test_every_reading_command_takes_json() -> None:
    assert [command for command in READING if "--json" not in cli(*command[:2], "--help").out] == []


def test_help_loads_no_driver_and_no_rich() -> None:
    script = (
        "import sys; from dreamlake.lakeshore.cli.main import run; run(['worker', 'start', '--help']);"
        "print(sorted({'rich', 'aiosqlite', 'msgpack', 'httpx'} & sys.modules.keys()))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=LIMIT)
    assert ran.stdout.splitlines()[-1] == "[]", ran.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo terminal")
def test_on_a_terminal_there_are_tables_and_ids_stay_whole(db: Path, three: list[str]) -> None:
    import pty

    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "dreamlake.lakeshore", "inv", "list", "--db", str(db)]
    env = environment(COLUMNS="70", TERM="xterm")
    process = subprocess.Popen(command, stdout=terminal, stderr=terminal, env=env, cwd=HERE)
    os.close(terminal)
    shown = b"".join(itertools.takewhile(bool, iter(lambda: _read(main), b""))).decode()
    os.close(main)
    assert process.wait(LIMIT) == 0
    assert "\x1b[1mid" in shown
    assert all(id in shown for id in three)
    assert "[red]" in shown
    assert "\x1b[31m luck" not in shown


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # how Linux says that the other side is closed
        return b""
