"""Every import in the package keeps to the floors of tests/layering_table.py."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from layering_table import DEBTS, DRIVERS, FLOORS, HEAVY, LATE, STRANGERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = Path(__file__).resolve().parents[1] / "lakeshore"


# --- reading the package --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Import:
    """One import: of a module of ours (its dotted name inside the package) or of a foreign top-level module."""

    line: int
    target: str
    ours: bool
    late: bool
    """Inside a function."""
    typing: bool
    """Under `if TYPE_CHECKING`."""

    @property
    def standard(self) -> bool:
        return not self.ours and self.target in sys.stdlib_module_names

    @property
    def absolute(self) -> bool:
        """Names this package as if it were a foreign one."""
        return not self.ours and self.target in ("dreamlake", "lakeshore")


@dataclass
class Module:
    name: str
    path: Path
    imports: list[Import] = field(default_factory=list[Import])

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def package(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]


def read(package: Path) -> dict[str, Module]:
    """Every module below the folder, with its imports; the folder's own `__init__` has the name ''."""
    house: dict[str, Module] = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        house[name] = Module(name, path)
    for module in house.values():
        tree = ast.parse(module.path.read_text(encoding="utf-8"))
        module.imports.extend(_imports(tree, module, set(house), late=False, typing=False))
    return house


def _imports(node: ast.AST, module: Module, known: set[str], *, late: bool, typing: bool) -> Iterator[Import]:
    for target, ours in _targets(node, module, known):
        yield Import(getattr(node, "lineno", 0), target, ours, late, typing)
    late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    checked = node.body if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING") else []
    for child in ast.iter_child_nodes(node):
        yield from _imports(child, module, known, late=late, typing=typing or child in checked)


def _targets(node: ast.AST, module: Module, known: set[str]) -> Iterator[tuple[str, bool]]:
    match node:
        case ast.Import(names=names):
            yield from ((alias.name.partition(".")[0], False) for alias in names)
        case ast.ImportFrom(level=0, module=str(source)):
            yield source.partition(".")[0], False
        case ast.ImportFrom(level=level, module=source, names=names):
            base = _climb(module, level, source or "")
            inner = [f"{base}.{alias.name}".lstrip(".") for alias in names]
            yield from dict.fromkeys((name if name in known else base, True) for name in inner)
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]):
            if called in ("import_module", "__import__"):
                level = len(name) - len(name.lstrip("."))
                yield (_climb(module, level, name.lstrip(".")), True) if level else (name.partition(".")[0], False)
        case _:
            pass


def _climb(module: Module, level: int, source: str) -> str:
    """The module that a relative import begins from; `..` when it leaves the package."""
    parts = module.package.split(".") if module.package else []
    if level - 1 > len(parts):
        return ".."
    return ".".join([*parts[: len(parts) - (level - 1)], *filter(None, [source])])


def room_of(module: str) -> str | None:
    """The room that a module is in: an entry point (`__main__`) and the package itself stand above all floors."""
    rooms = [room for floor in FLOORS for room in floor if module == room or module.startswith(f"{room}.")]
    if module.rpartition(".")[2] in ("", "__main__"):
        return ""
    return max(rooms, key=len, default=None)


def floor_of(room: str) -> int:
    """The floor of a room, counted from the ground."""
    for number, rooms in enumerate(FLOORS):
        if room in rooms:
            return number
    return len(FLOORS)


# --- the rules ------------------------------------------------------------------------------------------------------


def unknown_rooms(house: dict[str, Module]) -> list[str]:
    return [
        f"{name} is in no room: add its folder or its name to FLOORS in tests/layering_table.py"
        for name in house
        if room_of(name) is None
    ]


def climbing_imports(house: dict[str, Module]) -> list[str]:
    """Imports of a higher floor, or of a room that is a stranger."""
    faults: list[str] = []
    for module, one in _own_imports(house):
        here = room_of(module.name) or ""
        there = room_of(one.target) or ""
        strangers = here != there and here in STRANGERS and there in STRANGERS
        climbs = floor_of(there) > floor_of(here)
        if (climbs or strangers) and (module.name, one.target) not in DEBTS:
            faults.append(
                f"{_place(module, one)}: {module.name} may not import {one.target or 'the package itself'}, which is on "
                "a higher floor or in a room beside it: see FLOORS in tests/layering_table.py"
            )
    return faults


def late_imports(house: dict[str, Module]) -> list[str]:
    """Imports inside functions, but for heavy packages and for what LATE lists."""
    faults: list[str] = []
    for module in house.values():
        for one in module.imports:
            if not one.late or one.typing or one.standard:
                continue
            here = room_of(module.name)
            allowed = {(module.name, one.target), (here, "*")} & LATE.keys()
            if not (allowed or module.name == "" or (not one.ours and one.target in HEAVY)):
                faults.append(
                    f"{_place(module, one)}: {one.target} is imported inside a function: import it at the top, or add "
                    "the pair to LATE in tests/layering_table.py with the reason"
                )
    return faults


def absolute_imports(house: dict[str, Module]) -> list[str]:
    return [
        f"{_place(module, one)}: import the package's own modules relatively; by another name they are loaded twice"
        for module in house.values()
        for one in module.imports
        if one.absolute or one.target == ".."
    ]


def named_loops(house: dict[str, Module]) -> list[str]:
    return [
        f"{_place(module, one)}: only concurrency.loops names {one.target}; use anyio, or what that module offers"
        for name, module in house.items()
        for one in module.imports
        if not one.ours and one.target in ("asyncio", "trio") and name != "concurrency.loops"
    ]


def scattered_drivers(house: dict[str, Module]) -> list[str]:
    faults: list[str] = []
    for module in house.values():
        for one in module.imports:
            if one.ours or one.typing or one.standard or one.absolute or one.target in ("anyio", "trio"):
                continue
            homes = DRIVERS.get(one.target, ())
            if room_of(module.name) not in homes:
                faults.append(
                    f"{_place(module, one)}: {one.target} may be imported in {', '.join(homes) or 'no room'}: see "
                    "DRIVERS in tests/layering_table.py"
                )
    return faults


def circles(house: dict[str, Module]) -> list[str]:
    """A circle of modules that import each other, those inside functions included."""
    edges: dict[str, set[str]] = {name: set() for name in house}
    for module, one in _own_imports(house):
        # A package that gathers names from its own modules is not what they import when they import each other.
        gathers = house[one.target].is_package if one.target in house else False
        if (module.name, one.target) not in DEBTS and not gathers and not module.is_package:
            edges[module.name].add(one.target)
    return [f"{' -> '.join(names)}: these modules import each other in a circle" for names in cycle(edges)]


def cycle(edges: dict[str, set[str]]) -> list[list[str]]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as exc:
        return [list(exc.args[1])]
    return []


def loading_edges(house: dict[str, Module]) -> dict[str, set[str]]:
    """Which modules load which when they are imported, the packages around a target included."""
    edges: dict[str, set[str]] = {}
    for name, module in house.items():
        loads: set[str] = set()
        for one in module.imports:
            if one.ours and not one.late and not one.typing:
                parts = one.target.split(".")
                around = {".".join(parts[:end]) for end in range(1, len(parts))}
                outside = {package for package in around if name != package and not name.startswith(f"{package}.")}
                loads |= {one.target} | outside
        edges[name] = loads
    return edges


def paid_debts(house: dict[str, Module]) -> list[str]:
    """Lines of LATE and DEBTS that the package no longer needs."""
    found = {(module.name, one.target) for module, one in _own_imports(house)}
    late = {(module.name, one.target) for module, one in _own_imports(house) if one.late}
    stale = [pair for pair in DEBTS if pair not in found]
    stale += [pair for pair in LATE if pair[1] != "*" and pair not in late]
    return [f"{one} no longer imports {other}: remove the line from tests/layering_table.py" for one, other in stale]


def _own_imports(house: dict[str, Module]) -> Iterator[tuple[Module, Import]]:
    for module in house.values():
        for one in module.imports:
            if one.ours and not one.typing:
                yield module, one


def _place(module: Module, one: Import) -> str:
    folder = f"{module.package.replace('.', '/')}/".lstrip("/")
    return f"{folder}{module.path.name}:{one.line}"


# --- the tests ------------------------------------------------------------------------------------------------------

RULES: list[Callable[[dict[str, Module]], list[str]]] = [
    unknown_rooms, climbing_imports, late_imports, absolute_imports, named_loops, scattered_drivers, circles,
]  # fmt: skip


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    found = read(PACKAGE)
    assert "errors" in found, f"no package at {PACKAGE}"
    return found


@pytest.mark.parametrize("rule", [*RULES, paid_debts], ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(house: dict[str, Module], rule: Callable[[dict[str, Module]], list[str]]) -> None:
    faults = rule(house)
    assert not faults, "\n" + "\n".join(faults)


def test_no_modules_load_each_other_in_a_circle(house: dict[str, Module]) -> None:
    assert cycle(loading_edges(house)) == []


BREACHES = [
    ("attic/clock.py", "", "attic.clock is in no room"),
    ("settings.py", "from .client.queue import Queue", "settings may not import client.queue"),
    ("body/keys.py", "def f():\n    from ..client import queue", "body.keys may not import client.queue"),
    ("body/keys.py", "from .. import run", "body.keys may not import the package itself"),
    ("body/keys.py", "import httpx", "httpx may be imported in planes.http"),
    ("body/keys.py", "import unheard", "unheard may be imported in no room"),
    (
        "body/keys.py",
        "from importlib import import_module as i\nimport importlib as m\nm.import_module('httpx')",
        "httpx",
    ),
    ("planes/sqlite/store.py", "from ..http import store", "planes.sqlite.store may not import planes.http.store"),
    ("client/queue.py", "def f():\n    from ..wire import codec", "wire.codec is imported inside a function"),
    ("planes/__init__.py", "from ..client.queue import Queue", "planes may not import client.queue"),
    ("__init__.py", "import msgpack", "msgpack may be imported in wire"),
    (
        "client/queue.py",
        "from dreamlake.lakeshore.errors import WireError",
        "queue.py:1: import the package's own modules",
    ),
    ("client/queue.py", "from .... import other", "queue.py:1: import the package's own modules"),
    ("client/queue.py", "import asyncio.subprocess", "only concurrency.loops names asyncio"),
    ("client/queue.py", "if TYPE_CHECKING:\n    import trio", "only concurrency.loops names trio"),
    (
        "client/job.py",
        "def f():\n    from . import queue\nfrom .queue import Queue",
        "job.py:2: client.queue is imported",
    ),
    ("wire/frames.py", "from .codec import pack", "import each other in a circle"),
]
SOUND = {
    "errors.py": "",
    "body/keys.py": "",
    "client/queue.py": "if TYPE_CHECKING:\n    from ..cli import main\nfrom ..wire.codec import pack",
    "client/job.py": "from .queue import Queue",
    "functions/pickles.py": "import os\nimport cloudpickle\nfrom ..errors import WireError",
    "planes/http/store.py": "import httpx",
    "wire/__init__.py": "from .codec import pack",
    "wire/codec.py": "import msgpack\nfrom . import frames",
    "wire/frames.py": "",
}


@pytest.mark.parametrize(("file", "source", "sentence"), BREACHES)
def test_a_breach_is_seen_and_named(tmp_path: Path, file: str, source: str, sentence: str) -> None:
    _write(tmp_path, SOUND)
    assert [fault for rule in RULES for fault in rule(read(tmp_path))] == []
    _write(tmp_path, {file: source})
    faults = [fault for rule in RULES for fault in rule(read(tmp_path))]
    assert any(sentence in fault for fault in faults), faults


def test_a_line_that_is_not_needed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "LATE", {("client.queue", "wire.codec"): "it is heavy"})
    monkeypatch.setattr(sys.modules[__name__], "DEBTS", set())
    _write(tmp_path, SOUND)
    assert paid_debts(read(tmp_path)) == [
        "client.queue no longer imports wire.codec: remove the line from tests/layering_table.py"
    ]


def test_a_circle_is_seen_also_through_a_package(tmp_path: Path) -> None:
    _write(tmp_path, SOUND | {"wire/codec.py": "from ..planes.contract import Row"})
    assert cycle(loading_edges(read(tmp_path))) == []
    _write(tmp_path, {"planes/contract.py": "from .. import wire"})
    (found,) = cycle(loading_edges(read(tmp_path)))
    assert {"wire", "wire.codec", "planes.contract"} == set(found)


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
