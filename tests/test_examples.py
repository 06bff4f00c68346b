"""Each example, run as a stranger runs it: a process of its own, in an empty folder, with nothing set up."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from helpers import needs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LIMIT = 200.0
"""Seconds that an example gets; each takes a few."""


@pytest.fixture
def example(tmp_path: Path) -> Callable[..., str]:
    """Runs an example and gives what it printed; afterwards nothing of it is left."""
    empty, home, temporary = (tmp_path / name for name in ("empty", "home", "tmp"))

    def run(name: str, *modules: str) -> str:
        for module in modules:
            needs(module)
        for folder in (empty, home, temporary):
            folder.mkdir()
        env = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
        env |= {"HOME": str(home), "TMPDIR": str(temporary)}
        ran = subprocess.run(
            [sys.executable, "-W", "error", str(EXAMPLES / f"{name}.py")],
            cwd=empty,
            env=env,
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        assert "Traceback" not in ran.stderr
        assert [path for folder in (empty, home, temporary) for path in folder.iterdir()] == []
        return ran.stdout

    return run


GUIDE = (EXAMPLES / "README.md").read_text(encoding="utf-8")
TASKS = dict(re.findall(r"^## (.+?)$\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL))
"""The sections of the guide by their headings."""


def test_every_example_is_run_here() -> None:
    run = re.findall(r'^    printed = example\("(\w+)"', Path(__file__).read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted([*run, "fleet"]) == sorted(
        path.stem for path in EXAMPLES.glob("*.py")
    )  # tests/planes/mongo runs that


def test_the_guide_names_every_example() -> None:
    named = set(re.findall(r"\]\((\w+\.\w+)\)", GUIDE))
    assert named == {path.name for path in EXAMPLES.glob("*.*") if path.suffix in (".py", ".ipynb")}


def test_each_task_of_the_guide_has_a_program_and_a_few_sentences() -> None:
    for task, text in TASKS.items():
        assert re.match(r"\n\[\w+\.(py|ipynb)\]", text), f"the section {task!r} does not begin with its program"
        prose = re.split(r"^1\. |^A systemd unit", text, maxsplit=1, flags=re.MULTILINE)[0]
        sentences = len(re.findall(r"[.:?](?=\s|$)", prose)) - 1  # the program's name ends with a full stop, too
        assert 3 <= sentences <= 10, f"the section {task!r} has {sentences} sentences"
        anchor = task.lower().replace(" ", "-")
        assert f"(#{anchor})" in GUIDE, f"the list at the top of the guide does not lead to {task!r}"


def test_quickstart(example: Callable[..., str]) -> None:
    printed = example("quickstart")
    (here,) = re.findall(r"this is process (\d+)$", printed, re.MULTILINE)
    rows = re.findall(r"^(\w+\.py) +(\d+) +(\d+) +(\w+ \(\d+\)) +(\d+)$", printed, re.MULTILINE)
    assert "ast.py" in [row[0] for row in rows]
    workers = {row[4] for row in rows}
    assert len(workers) == 1
    assert here not in workers
    assert f"{sum(int(row[2]) for row in rows)} words in {len(rows)} modules" in printed
    assert f"{len(rows)} invocations are queued, such as 01" in printed
    assert printed.endswith("the worker ended with code 0\n")


def test_fan_out(example: Callable[..., str]) -> None:
    printed = example("fan_out", "numpy")
    assert "12 blocks are queued" in printed
    (error,) = re.findall(r"^shape \(1200, 300\), dtype float64, largest error (\S+)$", printed, re.MULTILINE)
    assert float(error) < 1e-9


def test_data_udf(example: Callable[..., str]) -> None:
    printed = example("data_udf")
    assert "here:   ['process/index.json', 'process/size.txt'] 4 of 6\n" in printed
    assert "worker: ['process/index.json', 'process/size.txt'] 4 of 5\n" in printed
    assert "refused: function 'forgetful' wrote 'process/forgotten.txt'" in printed
    assert "   scenes/0008/process/index.json\n" in printed


def test_trio_app(example: Callable[..., str]) -> None:
    printed = example("trio_app", "trio")
    for _ in range(4):  # the call is left after half a second: on a machine that stands still before its body begins
        if "cancelled before it started" not in printed:
            break
        printed = example("trio_app", "trio")
    assert "collatz: 112 values, the highest is 9232, the last is 1\n" in printed
    assert "patient: the worker was told, and the `finally` of the body ran\n" in printed
    assert printed.endswith("ended killed: Cancelled: cancelled while running\n")


def test_streaming(example: Callable[..., str]) -> None:
    printed = example("streaming")
    lines = re.findall(r"^  reader (\d+): (\d+) pi is about (3\.14\d+), after", printed, re.MULTILINE)
    assert [int(seq) for _, seq, _ in lines] == list(range(24))
    assert [reader for reader, _, _ in lines] == [lines[0][0]] * 8 + [lines[-1][0]] * 16
    assert lines[0][0] != lines[-1][0]
    assert "the first reader was killed after value 7; the body goes on\n" in printed
    assert printed.endswith("nothing is missing, nothing came twice: True\n")


def test_stream_to_browser(example: Callable[..., str]) -> None:
    printed = example("stream_to_browser", "starlette", "uvicorn")
    assert printed == "all events: [0, 1, 4, 9, 16]\nafter event 2: [9, 16]\n"


def test_retry_and_timeout(example: Callable[..., str]) -> None:
    printed = example("retry_and_timeout")
    assert printed == "flaky: attempt 3 worked\nbroken: True 3 attempts\nslow: timeout\n"


def test_submit_once(example: Callable[..., str]) -> None:
    printed = example("submit_once")
    assert "the same invocation: True another one: True\n" in printed
    assert "the report of monday and the report of tuesday\n" in printed
    assert printed.endswith("invocations in the queue: 2\n")


def test_children(example: Callable[..., str]) -> None:
    printed = example("children")
    assert "each body has a process of its own: True\n" in printed
    assert "the crash has an outcome: failed\n" in printed
    assert "the worker goes on: True\n" in printed
    assert printed.endswith("the worker ended with code 0\n")


def test_own_functions(example: Callable[..., str]) -> None:
    printed = example("test_own_functions", "pytest")
    assert printed == "both tests passed\n"


def test_own_functions_with_pytest(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    line += ["-c", os.devnull, str(EXAMPLES / "test_own_functions.py")]
    ran = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout


def test_not_running(example: Callable[..., str]) -> None:
    printed = example("not_running")
    assert "no worker has taken it from queue 'gpu' yet" in printed
    assert "the row: queued in queue 'gpu' after 0 attempts\n" in printed
    assert printed.endswith("the result: hello lake\n")


def test_the_notebook(tmp_path: Path) -> None:
    """Its cells, one after the other in one module and on one event loop, as a kernel runs them."""
    script = """
        import ast, asyncio, inspect, json, sys
        from pathlib import Path

        async def run(cells):
            for cell in cells:
                code = compile("".join(cell["source"]), "<cell>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                found = eval(code, globals())
                if inspect.isawaitable(found):
                    await found

        cells = json.loads(Path(sys.argv[1]).read_text())["cells"]
        asyncio.run(run([cell for cell in cells if cell["cell_type"] == "code"]))
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
    line = [sys.executable, "-W", "error", "-c", textwrap.dedent(script), str(EXAMPLES / "notebook.ipynb")]
    env = kept | {"LAKESHORE_HOME": str(tmp_path)}
    ran = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert ran.stdout == "3.0\n26 49.5\n"


def test_async_service(example: Callable[..., str]) -> None:
    printed = example("async_service", "starlette", "uvicorn")
    assert "GET /primes/1000000: {'below': 1000000, 'primes': 78498}\n" in printed
    (posted,) = re.findall(r"^POST /jobs/3000000: (\w+)$", printed, re.MULTILINE)
    assert f"GET /jobs/{posted}: {{'state': 'succeeded', 'primes': 216816}}\n" in printed
    assert printed.endswith("GET /jobs/nobody: 404\n")


def test_remote(example: Callable[..., str]) -> None:
    printed = example("remote", "starlette", "uvicorn")
    (here,) = re.findall(r"^the plane is http://127\.0\.0\.1:\d+, this is process (\d+)$", printed, re.MULTILINE)
    assert "60: [1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60]\n97: [1, 97]\n360: [1, 2, 3, " in printed
    left, workers = zip(*re.findall(r"^(\d) left, says process (\d+)$", printed, re.MULTILINE), strict=True)
    assert left == ("3", "2", "1")
    assert len({here, *workers}) == 2
    assert printed.endswith("the worker ended with code 0\nthe server ended with code 0\n")


@pytest.fixture
def through_a_server(tmp_path: Path, free_tcp_port: int) -> Iterator[Callable[[str, str], str]]:
    """Runs an example's `main` with a server in the environment, from a module that the worker can import."""
    for module in ("starlette", "uvicorn"):
        needs(module)
    lakeshore = [sys.executable, "-W", "error", "-m", "dreamlake.lakeshore"]
    tokens, url = str(tmp_path / "tokens"), f"http://127.0.0.1:{free_tcp_port}"
    create = [*lakeshore, "token", "create", "--name", "test", "--role", "worker", "--token-file", tokens]
    token = subprocess.run(create, check=True, capture_output=True, text=True, timeout=LIMIT).stdout.strip()
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
    env = kept | {"HOME": str(tmp_path), "TMPDIR": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    start = ["server", "start", "--port", str(free_tcp_port), "--db", str(tmp_path / "db"), "--token-file", tokens]
    server = subprocess.Popen([*lakeshore, *start], env=env, stderr=subprocess.DEVNULL)
    env |= {"LAKESHORE_URL": url, "LAKESHORE_CLIENT_TOKEN": token}

    def run(name: str, main: str) -> str:
        line = [sys.executable, "-W", "error", "-c", f"import anyio, {name}; {main}"]
        ran = subprocess.run(line, cwd=EXAMPLES, env=env, capture_output=True, text=True, timeout=LIMIT)
        assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
        assert f"the plane is HttpDispatch('{url}')" in ran.stdout
        return ran.stdout

    yield run
    server.terminate()
    assert server.wait(LIMIT) == 0


def test_what_needs_no_file_runs_through_a_server_too(through_a_server: Callable[[str, str], str]) -> None:
    """The other examples open a plane of their own, whatever the environment says."""
    assert "nothing came twice: True\n" in through_a_server("streaming", "streaming.main()")
    assert "words in" in through_a_server("quickstart", "quickstart.main()")
    assert "GET /jobs/nobody: 404\n" in through_a_server("async_service", "anyio.run(async_service.main)")
