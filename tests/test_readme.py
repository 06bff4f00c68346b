"""The README is true: its programs run, its commands work, and what it names exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from helpers import wait_until_sync

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
LIMIT = 200.0

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
PROGRAMS = {text.split("\n", 1)[0].removeprefix("# "): text for kind, text in BLOCKS if kind == "python"}
SHELL = [text.splitlines() for kind, text in BLOCKS if kind == "sh"]
FIRST, NEAR, FAR = SHELL
"""What a stranger types first, what runs on one machine, and what on several."""
PROSE = re.sub(r"^```.*?^```", "", README, flags=re.MULTILINE | re.DOTALL)
INLINE = re.findall(r"`(lakeshore [a-z][^`]*)`", PROSE)
"""Commands that the text names."""

# In the shell of a reader whose environment has this interpreter and the package.
NAMES = """
lakeshore() { "$INTERPRETER" -W error -m dreamlake.lakeshore "$@"; }
python() { "$INTERPRETER" -W error "$@"; }
"""


class Reader:
    """A reader of the README, in a folder of their own, with further terminals for what goes on running."""

    worker: subprocess.Popen[bytes]

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
        self.env = kept | {"LAKESHORE_HOME": str(folder / "home"), "INTERPRETER": sys.executable}
        self._started: list[subprocess.Popen[bytes]] = []
        for name, text in PROGRAMS.items():
            (folder / name).write_text(text, encoding="utf-8")

    def types(self, command: str, code: int = 0) -> str:
        """What a command line, typed as it stands, prints."""
        line = ["bash", "-euo", "pipefail", "-c", NAMES + command]
        ran = subprocess.run(line, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=LIMIT)
        assert ran.returncode == code, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran.stdout

    def starts(self, command: str) -> subprocess.Popen[bytes]:
        """A command of ours in a terminal of its own, until it is stopped at the end."""
        name, *rest = command.split()
        assert name == "lakeshore"
        line = [sys.executable, "-W", "error", "-m", "dreamlake.lakeshore", *rest]
        self._started.append(subprocess.Popen(line, cwd=self.folder, env=self.env, stderr=subprocess.DEVNULL))
        return self._started[-1]

    def stops(self, process: subprocess.Popen[bytes]) -> None:
        self._started.remove(process)
        process.terminate()
        assert process.wait(LIMIT) == 0

    def leaves(self) -> None:
        codes: list[int | None] = []
        for process in reversed(self._started):
            process.terminate()
            try:
                codes.append(process.wait(LIMIT))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                codes.append(None)
        assert codes == [0] * len(codes)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    one = Reader(tmp_path)
    yield one
    one.leaves()


@pytest.fixture
def near(reader: Reader) -> Reader:
    """A reader who has started a worker."""
    reader.worker = reader.starts(NEAR[0])
    return reader


def words(name: str) -> int:
    return len(PROGRAMS[name].split())


def test_the_first_program(near: Reader) -> None:
    assert near.types("python words.py") == f"{words('words.py')}\n"


def test_the_stream(near: Reader) -> None:
    assert near.types("python ticks.py").splitlines() == ["[0, 1, 2]", "0 has number 0", "[1, 2, 3, 4]"]


def test_every_program_is_run_here() -> None:
    assert sorted(PROGRAMS) == ["ticks.py", "words.py"]
    body = [line for line in PROGRAMS["words.py"].splitlines() if line and not line.startswith("#")]
    assert len(body) <= 8
    assert NEAR == ["lakeshore worker start --queue words --concurrency 4", "python words.py"]


def test_the_commands(near: Reader) -> None:
    id = near.types("python -c \"import words; print(words.count_words.submit('words.py'))\"").strip()
    near.types(f"lakeshore inv result {id} --timeout 60")
    elsewhere = {
        "lakeshore inv release ID",
        "lakeshore token revoke app",
        "lakeshore plane migrate --from PATH --to URL",
    }
    said = {line: near.types(line.replace("ID", id)) for line in INLINE if line not in elsewhere}
    assert elsewhere < set(INLINE)
    assert len(said) == 8
    assert "words" in said["lakeshore queue list"]
    assert "count_words" in said["lakeshore inv show ID"]
    assert '"state": "succeeded"' in said["lakeshore inv result ID --json"]
    assert said["lakeshore purge --older-than 7d"] == "0 invocations purged\n"
    assert "--retries" in said["lakeshore worker start --help"]


def test_a_plane_is_copied(near: Reader) -> None:
    (command,) = (line for line in INLINE if " migrate " in line)
    near.types("python words.py")
    said = near.types(command.replace("PATH", '"$LAKESHORE_HOME/lakeshore.db"').replace("URL", "copy.db"))
    assert "words" in said
    assert (near.folder / "copy.db").exists()


def test_a_claim_without_a_lease_is_taken_back(reader: Reader) -> None:
    (command,) = (line for line in INLINE if " release " in line)

    async def hold() -> None:
        async with dls.Dispatch(reader.folder / "home" / "lakeshore.db") as plane:
            queue = dls.Queue("old", dispatch=plane)
            id = await queue.submit(1)
            assert await queue.claim(lease=None) is not None
            said = await anyio.to_thread.run_sync(reader.types, command.replace("ID", id))
            assert said == f"{id} is queued again\n"

    anyio.run(hold)


# --- more than one machine ------------------------------------------------------------------------------------------


@pytest.fixture
def far(reader: Reader, free_tcp_port: int) -> Reader:
    """A reader who has typed what the README has for several machines, each line as it stands but for the port."""
    create, server, export, worker, _ = FAR
    reader.types(create)
    reader.starts(f"{server} --port {free_tcp_port}")
    export = export.replace("8750", str(free_tcp_port))
    names = re.findall(r"\b(LAKESHORE_\w+)=", export)
    values = reader.types("; ".join([export, *(f'echo "${name}"' for name in names)])).splitlines()
    reader.env |= dict(zip(names, values, strict=True))
    reader.worker = reader.starts(worker)
    return reader


def test_a_call_through_a_server(far: Reader) -> None:
    assert far.types(FAR[-1]) == f"{words('words.py')}\n"
    token = far.folder / "token"
    assert token.read_text().startswith("lks_")
    assert token.stat().st_mode & 0o777 == 0o600
    assert token.read_text().strip() not in (far.folder / "home" / "tokens").read_text()


def test_a_program_names_the_server_as_its_plane(far: Reader) -> None:
    (spelled,) = re.findall(r"`(dls\.HttpDispatch\(.*?\))`", README)
    given = {"dls": dls, "url": far.env["LAKESHORE_URL"], "token": far.env["LAKESHORE_CLIENT_TOKEN"]}

    async def ask() -> dict[tuple[str, str], int]:
        async with eval(spelled, given) as plane:
            counts: dict[tuple[str, str], int] = await plane.counts()
            return counts

    far.types(FAR[-1])
    assert anyio.run(ask) == {("words", "succeeded"): 1}


def test_a_script_s_own_function_is_refused_by_a_remote_worker(far: Reader) -> None:
    assert far.types("python words.py", code=1) == ""
    (failed,) = re.findall(r"^(\w{26})\b", far.types("lakeshore inv list --state failed"), re.MULTILINE)
    assert "was submitted as a pickle, which this worker refuses" in far.types(f"lakeshore inv show {failed}")


def test_a_token_is_changed(far: Reader) -> None:
    """While the server runs: another is made, the clients are started again with it, and the first is revoked."""
    create, _, _, worker, call = FAR
    (revoke,) = (line for line in INLINE if " revoke " in line)
    old = far.env["LAKESHORE_CLIENT_TOKEN"]
    far.types(call)
    far.types(create.replace("app", "next"))
    far.env["LAKESHORE_CLIENT_TOKEN"] = (far.folder / "token").read_text().strip()
    far.stops(far.worker)
    far.starts(worker)
    far.types(call)
    far.types(revoke)

    def refused() -> bool:
        line = [sys.executable, "-m", "dreamlake.lakeshore", "queue", "list"]
        env = far.env | {"LAKESHORE_CLIENT_TOKEN": old}
        return subprocess.run(line, env=env, capture_output=True, timeout=LIMIT).returncode == 4

    wait_until_sync(refused, LIMIT, "the refusal of the old token")
    assert far.types(call) == f"{words('words.py')}\n"


def test_the_unit_starts_what_there_is() -> None:
    from dreamlake.lakeshore.cli.main import cli

    (text,) = re.findall(r"^```ini\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    unit = ConfigParser(interpolation=None)
    unit.read_string(text)
    service = unit["Service"]
    path, group, name, *options = service["ExecStart"].split()
    assert Path(path).is_absolute()
    assert Path(path).name == "lakeshore"
    groups: Any = cli.commands[group]
    groups.commands[name].make_context(name, options).close()
    assert service["Environment"] == f"LAKESHORE_HOME=/var/lib/{service['StateDirectory']}"
    # systemd lets a service that fails at once start five times in ten seconds, and then never again.
    assert service["Restart"] == "always"
    assert 5 * int(service["RestartSec"]) > 10


def test_the_proxy_waits_and_takes_as_long_and_much_as_the_server() -> None:
    from dreamlake.lakeshore.server.limits import Limits

    (seconds,) = re.findall(r"proxy_read_timeout (\d+)s;", GUIDE)
    (megabytes,) = re.findall(r"client_max_body_size (\d+)m;", GUIDE)
    assert int(seconds) > Limits().held
    assert int(megabytes) << 20 == Limits().body


def test_the_figures_in_it_are_those_of_the_code() -> None:
    from dreamlake.lakeshore.cli.options import PATIENCE as COMMANDS
    from dreamlake.lakeshore.planes.http.store import PATIENCE_AFTER_ANSWER as ANSWERED

    (said,) = re.findall(
        r"`patience`: (\d+) s, (\d+) s once it has answered, commands (\d+) s", " ".join(PROSE.split())
    )
    assert tuple(map(float, said)) == (dls.HttpDispatch.default_patience, ANSWERED, COMMANDS)


def test_the_old_ends_are_those_that_are_tested() -> None:
    installer = (ROOT / "tests" / "peers" / "install_peers.py").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^VERSIONS = \((.*)\)$", installer, re.MULTILINE)
    said = re.findall(r"\b\d+\.\d+\.\d+\b(?!\.)", PROSE.replace("127.0.0.1", "").replace("0.0.0.0", ""))
    assert said == re.findall(r'"(.*?)"', versions)


# --- the text -------------------------------------------------------------------------------------------------------


def test_the_two_commands_of_a_stranger() -> None:
    assert FIRST == [
        "pip install -e . && python examples/quickstart.py",
        "pip install -e '.[test]' && python -m pytest",
    ]


def test_it_is_short() -> None:
    assert len(README.splitlines()) < 150
    assert max(map(len, README.splitlines())) <= 125


def test_the_names_in_it_exist() -> None:
    names = set(re.findall(r"\bdls((?:\.\w+)+)", README))
    assert {".udf", ".thunk", ".Dispatch", ".HttpDispatch", ".run.attempt", ".StreamRestarted"} <= names
    for name in names:
        found = dls
        for part in name.removeprefix(".").split("."):
            found = getattr(found, part)


def test_the_options_in_it_exist() -> None:
    from click.testing import CliRunner

    from dreamlake.lakeshore.cli.main import cli

    groups = [
        "worker start",
        "server start",
        "token create",
        "inv result",
        "inv stream",
        "inv cancel",
        "inv list",
        "plane migrate",
        "purge",
    ]
    helps = "".join(CliRunner().invoke(cli, [*group.split(), "--help"]).output for group in groups)
    for option in set(re.findall(r"--[a-z][a-z-]+", README)):
        assert re.search(rf"{option}\b", helps), option


def test_the_variables_in_it_are_read() -> None:
    from dreamlake.lakeshore.settings import read_settings

    changed = {
        "LAKESHORE_CLIENT_TOKEN": "t",
        "LAKESHORE_HOME": "/h",
        "LAKESHORE_MONGO_URL": "mongodb://127.0.0.1/lakeshore",
        "LAKESHORE_NAMESPACE": "team",
        "LAKESHORE_QUEUE": "q",
        "LAKESHORE_REDIS_URL": "redis://127.0.0.1/0",
        "LAKESHORE_ROOT": "/r",
        "LAKESHORE_RUNTIME_POLICY": "off",
        "LAKESHORE_URL": "http://127.0.0.1:8750",
    }
    assert set(re.findall(r"LAKESHORE_\w+", README)) == changed.keys()
    for name, value in changed.items():
        assert vars(read_settings({name: value})) != vars(read_settings({}))


def test_the_links_lead_somewhere() -> None:
    for text, folder in ((README, ROOT), (GUIDE, ROOT / "examples")):
        for target in re.findall(r"\]\(([^)]+)\)", text):
            path, _, section = target.partition("#")
            assert (folder / path).exists(), target
            assert not section or f"## {section}" in GUIDE.lower().replace(" ", "-").replace("##-", "## "), target
