"""R79: type checkers see through the decorator. tests/typing/ holds what they must accept; the wrong calls are here."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import needs

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[1]
RIGHT = ROOT / "tests" / "typing" / "calls.py"

# Each line is an error, and the only one on it.
WRONG = """
embed(1)
embed()
embed("x", 3)
embed("x", width="3")
embed("x", depth=3)
embed("x", _key="k")
embed.local(1)
embed.remote(1)
embed.remote()
embed.submit(1)
embed.submit()
embed.submit("x", depth=3)
embed.submit("x", _key=3)
embed.submit("x", _priority="high")
embed.submit("x", _dispatch="plane")
embed.submit("x") + 1
wrong_value: str = embed("x")
stats("abc")
stats.submit([1], scale="big")
numbers("3")
numbers.submit("3")
wrong_items: Iterator[str] = numbers(3)
wrong_marks: AsyncIterator[int] = marks(3)
bound("1")
bound.submit(1, c=2)
model.grow("2")
model.grow()
model.grow.local("2")
model.steps.submit("2")
Model.parse(1)
dls.thunk(embed, 1)
dls.thunk(plain)
dls.udf(plain, queue=3)
dls.udf(plain, retries=3)
dls.udf("gpu")
dls.Queue("gpu").stream("id", on_restart="ignore")
dls.Queue(1)
dls.SyncQueue("gpu").submit(1, key=2)
""".strip().splitlines()

WRONG_ASYNC = """
await fetch(3)
await fetch.local(3)
await fetch.submit(3)
wrong_id: int = await fetch.submit("u")
wrong_bytes: str = await fetch("u")
await model.predict("x")
await model.predict.submit(1.0, rounds="2")
await ticks.submit("3")
ticks("3")
fetch.submit("u").upper()
""".strip().splitlines()


def _mypy(*files: Path, cache: Path) -> set[tuple[str, int]]:
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(cache), "--no-error-summary"]
    ran = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found = re.findall(r"^(.*?):(\d+): error:", ran.stdout, re.MULTILINE)
    return {(Path(file).name, int(line)) for file, line in found if Path(file).name in {one.name for one in files}}


def _pyright(*files: Path, cache: Path) -> set[tuple[str, int]]:
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable]
    ran = subprocess.run([*command, *map(str, files)], cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {(Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in found if one["severity"] == "error"}


@pytest.mark.parametrize("check", [_mypy, _pyright], ids=["mypy", "pyright"])
def test_R79_right_calls_pass_and_each_wrong_one_is_an_error(
    check: Callable[..., set[tuple[str, int]]], tmp_path: Path
) -> None:
    needs("mypy")
    needs("pyright")
    text = RIGHT.read_text(encoding="utf-8")
    right = len(text.splitlines())
    lines = [*WRONG, "async def wrong() -> None:", *(f"    {line}" for line in WRONG_ASYNC)]
    wrong = tmp_path / "wrong_calls.py"
    wrong.write_text(text + "\n".join(lines) + "\n", encoding="utf-8")

    found = check(wrong, cache=tmp_path / "cache")

    rejected = {lines[line - right - 1].strip() for _, line in found if line > right}
    assert {line for _, line in found if line <= right} == set(), "errors in tests/typing/calls.py"
    assert rejected == {*WRONG, *WRONG_ASYNC}
