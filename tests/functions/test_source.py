"""The source of a function as it was loaded: the same text that inspect finds, and never that of another version."""

from __future__ import annotations

import argparse
import functools
import hashlib
import importlib
import inspect
import json
import linecache
import os
import py_compile
import subprocess
import sys
import textwrap
import types
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from dreamlake.lakeshore.functions import source
from dreamlake.lakeshore.functions.source import Source, loaded_source, note_source, source_hash

if TYPE_CHECKING:
    from collections.abc import Callable

OLD = """
LIMIT = 3

def f(x, y=1):
    # the first version
    return x + y

def g(x):
    return x - 1
"""
NEW = OLD.replace("the first version", "the second version").replace("x + y", "x * y").replace("x - 1", "x - 2")


def by_hand(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def source_in(text: str, name: str) -> str:
    """The hash of a function of a module's text."""
    module = types.ModuleType("m")
    filename = f"<{hash(text)}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    exec(compile(text, filename, "exec"), module.__dict__)
    return by_hand(textwrap.dedent(inspect.getsource(getattr(module, name))))


def after_start(monkeypatch: pytest.MonkeyPatch, *, old: bool) -> None:
    """Take all files for older, or for newer, than this process."""
    monkeypatch.setattr(source, "_START_NS", 2**63 if old else 0)


def test_the_hash_is_that_of_the_dedented_source_with_its_decorators() -> None:
    def mark(fn: Callable[..., Any]) -> Callable[..., Any]:
        return fn

    @mark
    def decorated(x: int) -> int:
        """A docstring."""
        return x

    text = textwrap.dedent(inspect.getsource(decorated))
    assert text.startswith("@mark\ndef decorated")
    assert loaded_source(decorated) == Source(text, by_hand(text))
    assert source_hash(decorated) == by_hand(text)


@pytest.mark.parametrize("module", [json, functools, inspect, textwrap, zipfile, argparse])
def test_the_text_is_the_one_that_inspect_finds(module: Any) -> None:
    classes = [one for one in vars(module).values() if inspect.isclass(one)]
    functions = [fn for holder in (module, *classes) for fn in vars(holder).values() if inspect.isfunction(fn)]
    plain = [fn for fn in functions if not fn.__code__.co_filename.startswith("<")]
    assert len(plain) > 3
    for fn in plain:
        assert loaded_source(fn).text == textwrap.dedent(inspect.getsource(fn))


def test_wrappers_methods_and_udfs_lead_to_the_function(fake_udf: Any) -> None:
    def inner(self: object = None) -> None: ...

    @functools.wraps(inner)
    def wrapper() -> None: ...

    class Holder:
        method: Any = inner
        class_method: Any = classmethod(inner)

    expected = source_hash(inner)
    assert expected
    for fn in (
        wrapper,
        fake_udf(inner),
        fake_udf(wrapper),
        Holder().method,
        Holder.class_method,
        functools.cache(inner),
    ):
        assert source_hash(fn) == expected


def test_R72_without_source_there_is_no_hash() -> None:
    made: dict[str, Any] = {}
    exec("def from_text(): pass", made)
    circle = lambda: 1  # noqa: E731
    circle.__wrapped__ = circle  # type: ignore[attr-defined]
    for fn in (len, int, json.JSONEncoder, made["from_text"], functools.partial(len), circle, object()):
        assert loaded_source(fn) == Source()  # type: ignore[arg-type]


def test_R72_a_name_that_any_text_has_tells_of_no_edit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of `python -c` from Python 3.13 on, which keeps the text of the program under it."""
    text = "def of_this(): return 1\n"
    monkeypatch.setattr(source, "_snapshots", {})
    monkeypatch.setitem(linecache.cache, "<string>", (len(text), None, [text], "<string>"))
    made: dict[str, Any] = {}
    exec(text, made)
    exec("def of_another(): return 2", made)
    assert loaded_source(made["of_this"]).text == text
    assert loaded_source(made["of_another"]) == Source()


@pytest.mark.parametrize("line", [4, 99])
def test_R72_code_that_claims_a_line_of_a_file_it_does_not_stand_in(folder: Any, monkeypatch: Any, line: int) -> None:
    after_start(monkeypatch, old=True)
    path = folder.path / "template.txt"
    path.write_text('1\n2\n3\n(unbalanced """\n')
    made: dict[str, Any] = {}
    exec(compile("\n" * (line - 1) + "def f(): pass", str(path), "exec"), made)
    assert loaded_source(made["f"]) == Source()


def test_R72_a_module_without_its_source_file_has_no_hash(folder: Any) -> None:
    name = folder.write(OLD)
    path = folder.path / f"{name}.py"
    py_compile.compile(str(path), cfile=str(folder.path / f"{name}.pyc"))
    path.unlink()
    module = importlib.import_module(name)
    assert module.f(1) == 2
    assert loaded_source(module.f) == Source()


def test_R72_a_module_in_a_zip_has_its_hash(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = folder.write(OLD)
    with zipfile.ZipFile(folder.path / "code.zip", "w") as archive:
        archive.write(folder.path / f"{name}.py", f"{name}.py")
    (folder.path / f"{name}.py").unlink()
    monkeypatch.syspath_prepend(folder.path / "code.zip")
    module = importlib.import_module(name)
    assert ".zip" in str(module.__file__)
    assert source_hash(module.f) == source_in(OLD, "f")


def test_R72_a_notebook_cell_has_its_hash() -> None:
    text = "from __future__ import annotations\ndef cell(x: Unknown) -> int:\n    return await_me\nawait something\n"
    filename = "<ipython-input-1-abc>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    code = compile(text, filename, "exec", flags=__import__("ast").PyCF_ALLOW_TOP_LEVEL_AWAIT)
    function = types.FunctionType(next(c for c in code.co_consts if inspect.iscode(c)), {})
    assert source_hash(function) == by_hand("def cell(x: Unknown) -> int:\n    return await_me\n")


def test_R72_the_interactive_prompt_is_no_error() -> None:
    lines = "from dreamlake.lakeshore.functions.source import *\ndef f(x):\n    return x\n\nprint(source_hash(f))\n"
    done = subprocess.run([sys.executable, "-i", "-q"], input=lines, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("None", by_hand("def f(x):\n    return x\n"))
    assert "Traceback" not in done.stderr


# --- files that change ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", [True, False])
def test_R70_the_hash_is_kept_when_the_file_changes(folder: Any, monkeypatch: pytest.MonkeyPatch, old: bool) -> None:
    after_start(monkeypatch, old=old)
    module = folder.load(OLD)
    before = source_hash(module.f)
    assert before == source_in(OLD, "f")
    folder.write(NEW, module.__name__)
    assert source_hash(module.f) == before
    # The file was read when f was first seen, so it speaks for g, too.
    assert source_hash(module.g) == source_in(OLD, "g")
    assert not loaded_source(module.g).edited


def test_R70_a_decorator_keeps_the_text_of_the_import(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after_start(monkeypatch, old=False)
    module = folder.load(f"from dreamlake.lakeshore.functions.source import note_source\n{OLD}\nnote_source(f)\n")
    changed = OLD.replace("y=1", "y=2")  # which the code of the function does not show
    folder.write(f"from dreamlake.lakeshore.functions.source import note_source\n{changed}\n", module.__name__)
    assert source_hash(module.f) == source_in(OLD, "f") != source_in(changed, "f")


def test_R70_a_file_edited_before_the_first_look_has_no_hash(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after_start(monkeypatch, old=False)
    module = folder.load(OLD)
    folder.write(NEW, module.__name__)
    assert loaded_source(module.f) == Source(edited=True)
    assert source_hash(module.g) is None


@pytest.mark.parametrize("broken", ["def f(:\n", "", "\0", "x = 'é'"])
def test_a_file_that_is_no_code_any_more_is_edited_too(
    folder: Any, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    after_start(monkeypatch, old=False)
    module = folder.load(OLD)
    (folder.path / f"{module.__name__}.py").write_text(broken, encoding="latin-1")
    assert source_hash(module.f) is None
    folder.write(OLD, module.__name__)  # and whole again
    assert source_hash(module.f) == source_in(OLD, "f")


def test_R70_lines_that_move_are_seen(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after_start(monkeypatch, old=False)
    module = folder.load(OLD)
    folder.write("# a comment\n" * 3 + OLD, module.__name__)
    assert loaded_source(module.f) == Source(edited=True)


def test_R70_an_edit_that_sets_the_old_time_again_is_seen(folder: Any) -> None:
    module = folder.load(OLD)
    path = folder.path / f"{module.__name__}.py"
    long_ago = os.stat(path).st_mtime_ns - 10**12
    path.write_text(NEW)
    os.utime(path, ns=(long_ago, long_ago))
    assert loaded_source(module.f).edited


def test_R70_a_reloaded_module_has_its_new_hash(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for old in (True, False):
        after_start(monkeypatch, old=old)
        module = folder.load(OLD)
        first = module.f
        assert source_hash(first) == source_in(OLD, "f")
        longer = f"# longer\n{NEW}"  # another size: the import system compares seconds and sizes only
        folder.write(longer, module.__name__)
        importlib.reload(module)
        assert module.f is not first
        assert source_hash(module.f) == source_in(longer, "f")
        assert source_hash(module.g) == source_in(longer, "g")
        assert source_hash(first) == source_in(OLD, "f")


def test_a_notebook_that_reloads_for_ever_keeps_few_texts(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after_start(monkeypatch, old=False)
    module = folder.load(OLD)
    for n in range(40):
        text = OLD + "#" * n
        folder.write(text, module.__name__)
        importlib.reload(module)
        assert source_hash(module.f) == source_in(OLD, "f")
    assert len(source._snapshots[module.__file__]) <= 16


def test_code_changed_by_an_import_hook_is_trusted_in_a_file_older_than_the_process(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = folder.load(OLD)
    module.f.__code__ = module.f.__code__.replace(co_consts=(None, 99))
    after_start(monkeypatch, old=True)
    assert source_hash(module.f) == source_in(OLD, "f")


def test_hot_code_is_compared_like_cold_code(folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    after_start(monkeypatch, old=False)
    module = folder.load("def f(n):\n    s = 0\n    for i in range(n):\n        s += i * 1.5\n    return s\n")
    for _ in range(200):
        module.f(50)
    assert source_hash(module.f)


def test_a_file_with_form_feeds_and_other_encodings(folder: Any) -> None:
    name = folder.write("")
    text = "# -*- coding: latin-1 -*-\nX = 1\n\x0c\ndef f():\n    return 'é\u2028'.strip()\r\n".replace("\u2028", "")
    (folder.path / f"{name}.py").write_bytes(text.encode("latin-1"))
    module = importlib.import_module(name)
    assert (
        loaded_source(module.f).text
        == textwrap.dedent(inspect.getsource(module.f))
        == "def f():\n    return 'é'.strip()\n"
    )


def test_nothing_keeps_a_function_alive(folder: Any) -> None:
    module = folder.load(OLD)
    note_source(module.f)
    source_hash(module.f)
    held = len(source._found), len(source._noted)
    del module.f
    assert (len(source._found), len(source._noted)) == (held[0] - 1, held[1] - 1)
