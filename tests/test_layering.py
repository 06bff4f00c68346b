"""Every import in the package keeps to the table of the house, tests/layering_table.py."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from layering_table import GROUND, LONG, MOST_LINES, NAME_A_LOOP, SECOND_HOME, TABLE, Row

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


def _within(name: str, allowed: str) -> bool:
    return any(one == "*" or name == one or name.startswith(f"{one}.") for one in allowed.split())


def row_of(module: Module) -> Row | None:
    return TABLE.get(module.name) or TABLE.get(module.package)


# --- the rules ------------------------------------------------------------------------------------------------------


def unknown_modules(house: dict[str, Module]) -> list[str]:
    return [
        f"{name} has no row in the table of tests/layering_table.py: add one that says what it may import, beside the "
        "modules of its layer"
        for name, module in house.items()
        if row_of(module) is None and not module.is_package
    ]


def forbidden_imports(house: dict[str, Module]) -> list[str]:
    """Imports that the table does not allow."""
    return [
        f"{_place(module, one)}: {name or '__init__'} may not import {one.target or '__init__'}"
        f"{'' if one.late else ' at module level'}: move the code to a layer that may, or change its row in "
        f"tests/layering_table.py, which allows {_said(row_of(module) or Row())}"
        for name, module in house.items()
        for one in module.imports
        if not (one.typing or one.standard or one.absolute or _allowed(module, one))
    ]


def _allowed(module: Module, one: Import) -> bool:
    if module.is_package:  # gathers names of its own modules; the outermost one does it when a name is first used
        return one.ours and (one.target.startswith(f"{module.name}.") or (module.name == "" and one.late))
    row = row_of(module) or Row("*", "*")
    at_once = _within(one.target, f"errors {row.ours}" if one.ours else row.drivers)
    return at_once or (one.late and _within(one.target, row.late))


def absolute_imports(house: dict[str, Module]) -> list[str]:
    return [
        f"{_place(module, one)}: import the package's own modules relatively; by another name they are loaded twice"
        for module in house.values()
        for one in module.imports
        if one.absolute or one.target == ".."
    ]


def named_loops(house: dict[str, Module]) -> list[str]:
    return [
        f"{_place(module, one)}: only _loops names {one.target}; use anyio, or what _loops offers"
        for name, module in house.items()
        for one in module.imports
        if not one.ours and one.target in ("asyncio", "trio") and name not in {"_loops", *NAME_A_LOOP}
    ]


def scattered_drivers(house: dict[str, Module]) -> list[str]:
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for module in house.values():
        for one in module.imports:
            if not (one.ours or one.typing or one.standard or one.absolute or one.target == GROUND):
                homes[one.target].add(module.package or module.name or "__init__")
    return [
        f"{driver} is imported in {', '.join(sorted(found))}: a driver has one home, the others ask there"
        for driver, found in homes.items()
        if len(found - {SECOND_HOME.get(driver, "")}) > 1
    ]


def cycle(edges: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as exc:
        return [" -> ".join(name or "__init__" for name in exc.args[1])]
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
                loads |= {one.target} | {package for package in around if not _within(name, package)}
        edges[name] = loads
    return edges


def long_modules(house: dict[str, Module]) -> list[str]:
    counts = {name: len(module.path.read_text(encoding="utf-8").splitlines()) for name, module in house.items()}
    return [
        f"{name or '__init__'} has {count} lines, more than {MOST_LINES}: cut it where it has a seam"
        for name, count in counts.items()
        if count > MOST_LINES and name not in LONG
    ]


def _place(module: Module, one: Import) -> str:
    folder = f"{module.package.replace('.', '/')}/".lstrip("/")
    return f"{folder}{module.path.name}:{one.line}"


def _said(row: Row) -> str:
    late = f" and, inside functions, {row.late}" if row.late else ""
    return f"{' '.join(filter(None, ['errors', row.ours, row.drivers]))}{late}"


# --- the tests ------------------------------------------------------------------------------------------------------

RULES: list[Callable[[dict[str, Module]], list[str]]] = [
    unknown_modules, forbidden_imports, absolute_imports, named_loops, scattered_drivers, long_modules,
]  # fmt: skip


@pytest.fixture(scope="module")
def house() -> dict[str, Module]:
    found = read(PACKAGE)
    assert "errors" in found, f"no package at {PACKAGE}"
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(house: dict[str, Module], rule: Callable[[dict[str, Module]], list[str]]) -> None:
    faults = rule(house)
    assert not faults, "\n" + "\n".join(faults)


def test_no_modules_load_each_other_in_a_circle(house: dict[str, Module]) -> None:
    assert cycle(loading_edges(house)) == []


def test_the_table_has_no_circle_and_its_planes_no_siblings() -> None:
    edges = {name: {other for other in TABLE if other != name and _within(other, TABLE[name].ours)} for name in TABLE}
    assert cycle(edges) == []
    plane = {name: name.split(".")[1] for name in TABLE if name.startswith("planes.") and name.count(".") == 2}
    assert set(plane.values()) == {"sqlite", "http", "mongo"}
    assert [(one, other) for one in plane for other in edges[one] & plane.keys() if plane[one] != plane[other]] == []


BREACHES = [
    ("planes/clock.py", "", "planes.clock has no row in the table"),
    ("keys.py", "from .queue import Queue", "keys may not import queue at module level"),
    ("keys.py", "def f():\n    from . import queue", "keys may not import queue:"),
    ("keys.py", "from . import run", "keys may not import __init__ at module level"),
    ("keys.py", "import httpx", "keys may not import httpx at module level"),
    ("keys.py", "from importlib import import_module as i\nimport importlib as m\nm.import_module('httpx')", "httpx"),
    ("planes/sqlite/store.py", "from ..http import store", "planes.sqlite.store may not import planes.http"),
    ("queue.py", "from .planes.sqlite.store import Dispatch", "queue may not import planes.sqlite.store at module"),
    ("planes/__init__.py", "from ..queue import Queue", "planes may not import queue at module level"),
    ("__init__.py", "import msgpack", "__init__ may not import msgpack"),
    ("queue.py", "from dreamlake.lakeshore.errors import WireError", "queue.py:1: import the package's own modules"),
    ("queue.py", "from .. import other", "queue.py:1: import the package's own modules"),
    ("queue.py", "import asyncio.subprocess", "only _loops names asyncio"),
    ("queue.py", "if TYPE_CHECKING:\n    import trio", "only _loops names trio"),
    ("queue.py", "import cloudpickle", "cloudpickle is imported in functions, queue: a driver has one home"),
    ("queue.py", "\n" * 401, "queue has 401 lines, more than 400"),
]
# A house of its own for these tests, so that the real table can change alone.
SMALL = {
    "errors": Row(),
    "keys": Row(),
    "wire.codec": Row(drivers="msgpack"),
    "planes.contract": Row("wire"),
    "planes.http.store": Row("planes.contract", "httpx"),
    "planes.sqlite.store": Row("planes.contract"),
    "functions.pickles": Row(drivers="cloudpickle"),
    "functions.ship": Row(late="functions.pickles"),
    "queue": Row("functions", late="planes.sqlite.store"),
}
SOUND = {
    "errors.py": "",
    "queue.py": "if TYPE_CHECKING:\n    from .cli import main\ndef f():\n    from .planes.sqlite.store import Dispatch",
    "functions/pickles.py": "import os\nimport cloudpickle\nfrom ..errors import WireError",
    "functions/ship.py": "def f():\n    from . import pickles",
    "planes/http/store.py": "import httpx",
    "wire/__init__.py": "from .codec import pack",
    "wire/codec.py": "import msgpack",
}


@pytest.mark.parametrize(("file", "source", "sentence"), BREACHES)
def test_a_breach_is_seen_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, source: str, sentence: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "TABLE", SMALL)
    _write(tmp_path, SOUND)
    assert [fault for rule in RULES for fault in rule(read(tmp_path))] == []
    _write(tmp_path, {file: source})
    faults = [fault for rule in RULES for fault in rule(read(tmp_path))]
    assert any(sentence in fault for fault in faults), faults


def test_a_circle_is_seen_also_through_a_package(tmp_path: Path) -> None:
    _write(tmp_path, SOUND | {"wire/codec.py": "from ..planes.contract import Row"})
    assert cycle(loading_edges(read(tmp_path))) == []
    _write(tmp_path, {"planes/contract.py": "from .. import wire"})
    (found,) = cycle(loading_edges(read(tmp_path)))
    assert {"wire", "wire.codec", "planes.contract"} == set(found.split(" -> "))


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
