"""What is shipped: the wheel against the tree, the public names, and what an import costs, each in its own process."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import dreamlake.lakeshore as dls

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "lakeshore"
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))

PUBLIC = {
    "udf", "UDF", "thunk", "Thunk", "scope", "run", "Queue", "SyncQueue", "Job", "Dispatch", "HttpDispatch",
    "MongoDispatch", "default_dispatch", "run_worker", "wire",
    # errors
    "LakeshoreError", "EncodeError", "WireError", "TransportError", "KeyContractError", "DispatchError",
    "InvocationNotFound", "ClaimLost", "PlaneUnavailable", "NotAuthorized", "InvocationFailed", "InvocationKilled",
    "InvocationTimedOut", "StreamRestarted",
}  # fmt: skip
TOP_LEVEL = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "lakeshore", "tests", "benchmarks", "examples"}
# What tools leave behind; git ignores it.
LEAVINGS = re.compile(r"__pycache__|build|dist|.*\.egg-info|\.(git|venv|hypothesis|.*_cache|coverage.*)")
# Neither an import nor a local call may load one of these.
HEAVY = [
    "msgpack",
    "h11",
    "httpx",
    "aiosqlite",
    "numpy",
    "cloudpickle",
    "anyio",
    "trio",
    "PIL",
    "torch",
    "click",
    "rich",
]


def left_behind(entry: Path) -> bool:
    """Whether tools made it; a virtual environment may have any name."""
    return LEAVINGS.fullmatch(entry.name) is not None or (entry / "pyvenv.cfg").is_file()


def tree(folder: Path) -> set[str]:
    """The files below a folder, relative to it, without what tools leave behind."""
    found: set[str] = set()
    for entry in folder.iterdir():
        if left_behind(entry):
            continue
        if entry.is_dir() and not entry.is_symlink():
            found |= {f"{entry.name}/{name}" for name in tree(entry)}
        else:
            found.add(entry.name)
    return found


def fresh(program: str, *options: str, env: dict[str, str] | None = None) -> Any:
    """What a program prints as JSON, run by an interpreter of its own."""
    ran = subprocess.run(
        [sys.executable, *options, "-c", program],
        capture_output=True,
        text=True,
        timeout=250,
        env={**os.environ, **(env or {})},
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel: that of LAKESHORE_TEST_WHEEL, which must be what the tests import, or one built now."""
    given = os.environ.get("LAKESHORE_TEST_WHEEL")
    if given:
        assert dls.__file__ is not None
        assert SOURCE not in Path(dls.__file__).resolve().parents, (
            "LAKESHORE_TEST_WHEEL is set, yet the source is tested"
        )
        return Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(SOURCE, source / "lakeshore", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(source)]
    if find_spec("setuptools") and _setuptools() >= 77:
        command.append("--no-build-isolation")
    ran = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, ran.stderr
    (built,) = folder.glob("*.whl")
    return built


def _setuptools() -> int:
    from importlib.metadata import version

    return int(version("setuptools").partition(".")[0])


# --- the wheel ------------------------------------------------------------------------------------------------------


def test_the_wheel_holds_the_whole_tree_and_nothing_else(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if not name.endswith("/")}
    info = f"dreamlake_lakeshore-{PROJECT['project']['version']}.dist-info/"
    packed = {name.removeprefix("dreamlake/lakeshore/") for name in names if not name.startswith(info)}
    assert packed == tree(SOURCE) - {"README.md"}  # the map, for whoever changes the code
    assert {"py.typed", "planes/sqlite/schema.sql", "__init__.py"} <= packed
    assert "dreamlake/__init__.py" not in names
    assert f"{info}licenses/LICENSE" in names


def test_pyproject_names_each_subpackage() -> None:
    folders = {Path(name).parent for name in tree(SOURCE) if name.endswith(".py")}
    expected = sorted(".".join(("dreamlake.lakeshore", *folder.parts)) for folder in folders)
    assert PROJECT["tool"]["setuptools"]["packages"] == expected
    assert all((SOURCE / folder / "__init__.py").exists() for folder in folders)


@pytest.mark.parametrize("init", ["", "__init__.py"], ids=["namespace", "regular package"])
def test_it_imports_beside_another_distribution_of_the_namespace(wheel: Path, tmp_path: Path, init: str) -> None:
    # A wheel of pure Python is a zip of what lies in site-packages; the other distribution is unpacked into the same.
    zipfile.ZipFile(wheel).extractall(tmp_path)
    other = {"dreamlake/other.py": "WHERE = __file__", "dreamlake_other-1.dist-info/METADATA": "Name: dreamlake-other"}
    if init:
        other[f"dreamlake/{init}"] = ""
    for name, text in other.items():
        path = tmp_path / name
        assert not path.exists()
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    program = (
        "import json, dreamlake.lakeshore as dls, dreamlake.other; from dreamlake.lakeshore import errors;"
        "print(json.dumps([dls.__file__, errors.__file__, dreamlake.other.WHERE]))"
    )
    # -S: neither the environment's own copy nor any dependency can be found.
    found = fresh(program, "-S", env={"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"})
    assert [Path(one).relative_to(tmp_path).as_posix() for one in found] == [
        "dreamlake/lakeshore/__init__.py",
        "dreamlake/lakeshore/errors.py",
        "dreamlake/other.py",
    ]


# --- names and imports ----------------------------------------------------------------------------------------------


def test_the_public_names_are_those_of_the_specification() -> None:
    assert set(dls.__all__) == PUBLIC
    assert list(dls.__all__) == sorted(dls.__all__)
    assert {name for name in dir(dls) if not name.startswith("__")} == PUBLIC
    assert [name for name in dls.__all__ if getattr(dls, name) is None] == []
    with pytest.raises(AttributeError, match=r"^module 'dreamlake\.lakeshore' has no attribute 'gather'$"):
        dls.gather  # noqa: B018


def test_every_error_is_public() -> None:
    from dreamlake.lakeshore import errors

    classes = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, Exception)}
    assert classes <= PUBLIC


LOADED = "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules} & set(heavy))))"


def test_an_import_loads_no_dependency_and_no_module_of_the_package() -> None:
    program = f"import json, sys; heavy = {HEAVY!r}; import dreamlake.lakeshore as dls; repr(dir(dls)); {LOADED}"
    assert fresh(program) == []
    program = (
        "import json, sys, dreamlake.lakeshore;"
        "print(json.dumps([name for name in sys.modules if name.startswith('dreamlake.lakeshore.')]))"
    )
    assert fresh(program) == []


def test_a_local_call_loads_no_dependency() -> None:
    program = f"""
import json, sys
heavy = {HEAVY!r}
import dreamlake.lakeshore as dls

@dls.udf
def plain(x): return x + 1

@dls.udf(queue="elsewhere")
async def later(x): return x + 2

@dls.udf
def many(x): yield x + 3

class Model:
    @dls.udf
    def method(self, x): return x + 4

assert plain(1) == plain.local(1) == 2
try:
    later.local(1).send(None)
except StopIteration as stop:
    assert stop.value == 3
assert list(many(1)) == [4]
assert Model().method(1) == 5
{LOADED}
"""
    assert fresh(program) == []


def test_wire_loads_no_value_library() -> None:
    program = f"""
import json, sys
heavy = {sorted(set(HEAVY) - {"msgpack"})!r}
from dreamlake.lakeshore import wire
assert wire.unpack(wire.pack([1, "a", None])) == [1, "a", None]
{LOADED}
"""
    assert fresh(program) == []


# A subpackage called like a public name would take its place as an attribute once it is imported.
EVERY_MODULE = """
import json, pkgutil, sys
from importlib import import_module
import dreamlake.lakeshore as dls

def import_every_module():
    names = [one.name for one in pkgutil.walk_packages(dls.__path__, "dreamlake.lakeshore.")]
    for name in names:
        if not name.endswith("__main__"):
            import_module(name)
    return names

def kinds():
    return {name: type(getattr(dls, name)).__name__ for name in dls.__all__}
"""


def test_importing_every_module_replaces_no_public_name() -> None:
    before = fresh(f"{EVERY_MODULE}\nprint(json.dumps(kinds()))")
    after = fresh(f"{EVERY_MODULE}\nnames = import_every_module()\nprint(json.dumps([kinds(), names]))")
    assert before == after[0]
    assert {name for name, kind in before.items() if kind == "module"} == {"wire"}
    modules = {name.removesuffix(".py").replace("/", ".").removesuffix(".__init__") for name in tree(SOURCE)}
    assert {f"dreamlake.lakeshore.{name}" for name in modules if (SOURCE / name.replace(".", "/")).is_dir()} <= set(
        after[1]
    )


# --- the repository -------------------------------------------------------------------------------------------------


def test_the_top_level_is_as_specified() -> None:
    here = {entry.name for entry in ROOT.iterdir() if not entry.name.startswith(".") and not left_behind(entry)}
    assert here <= TOP_LEVEL
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "lakeshore", "tests"} <= here


def test_a_virtual_environment_is_no_part_of_the_repository(tmp_path: Path) -> None:
    for name in ("venv/pyvenv.cfg", "venv/lib/code.py", "mine/pyvenv.cfg", "kept/code.py", "build/code.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert tree(tmp_path) == {"kept/code.py"}


def test_the_changelog_is_at_the_version() -> None:
    version = PROJECT["project"]["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [one for one in headings if one != "[Unreleased]"]
    assert headings, "CHANGELOG.md has no section"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", one) for one in released), released
    # Nothing released yet, or the newest section is that of the version in pyproject.toml.
    assert not released or released[0].startswith(f"[{version}]")


def test_each_dependency_has_a_lower_bound_and_a_reason() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
    for one in (*PROJECT["project"]["dependencies"], *(one for extra in extras.values() for one in extra)):
        if one.startswith("dreamlake-lakeshore["):
            continue
        bound = r"[a-z0-9-]+(\[[a-z,]+\])?>=\d+(\.\d+)*(,<\d+(\.\d+)*)?(; sys_platform != 'win32')?"
        assert re.fullmatch(bound, one), f"{one}: expected one lower bound, and an upper one at most"
        assert re.search(rf'^    "{re.escape(one)}", +# \w', text, re.MULTILINE), (
            f"{one}: say on its line what it is for"
        )


def test_arrays_and_images_are_no_dependencies() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[>]", one)[0] for one in requirements}

    assert not names(PROJECT["project"]["dependencies"]) & {"numpy", "torch", "pillow", "trio"}
    extras = {extra: names(found) for extra, found in PROJECT["project"]["optional-dependencies"].items()}
    assert {"numpy", "pillow", "trio"} <= extras["test"]
    assert not any("torch" in found for found in extras.values())


def test_nothing_names_the_machine_it_was_written_on() -> None:
    places = [re.escape(f"{place}/") for place in (ROOT, Path.home(), Path(sys.prefix)) if len(place.parts) > 1]
    names_one = re.compile(rf"(?<![\w.)}}])(?:{'|'.join(places)})".encode())
    for name in tree(ROOT):
        path = ROOT / name
        if path.is_symlink():
            target = path.readlink()
            assert not target.is_absolute(), f"{name} links to {target}"
            assert path.resolve().is_relative_to(ROOT), f"{name} leads out of the repository"
        else:
            found = names_one.search(path.read_bytes())
            assert found is None, f"{name} names {found.group().decode()}"
