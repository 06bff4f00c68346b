"""The gates between an Envelope's `fn` and a callable: in order, before any unpickle, and closed to library functions."""

from __future__ import annotations

import builtins
import copy
import functools
import hashlib
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from helpers import each_row
from hypothesis import given
from hypothesis import strategies as st

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.errors import TransportError
from dreamlake.lakeshore.functions import source
from dreamlake.lakeshore.functions.resolve import resolve_fn
from dreamlake.lakeshore.functions.runtime import check_runtime, this_runtime
from dreamlake.lakeshore.functions.serialize import serialize_fn, source_hash

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = this_runtime()
PYTHON = ".".join(map(str, sys.version_info[:3]))
MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"


def own(x: int = 0) -> int:
    return x + 1


def refused(spec: Any, **options: Any) -> str:
    with pytest.raises(TransportError) as caught:
        resolve_fn(spec, **{"allow_pickled": True, **options})
    return str(caught.value)


def ref(module: Any, qualname: Any, **more: Any) -> dict[str, Any]:
    return {"kind": "ref", "module": module, "qualname": qualname, **more}


def pickled(fn: Callable[..., Any]) -> dict[str, Any]:
    return serialize_fn(fn, "pickle")


# --- pickles --------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickling it leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


def bomb(mark: Path, **changes: Any) -> dict[str, Any]:
    """A pickle that would leave a mark, in a spec that passes every gate."""
    blob = pickle.dumps(Bomb(mark))
    spec = {
        "kind": "pickle",
        "blob": blob,
        "hash": f"sha256:{hashlib.sha256(blob).hexdigest()}",
        "qualname": "f",
        "where": "f (/x.py:1)",
        "runtime": dict(HERE),
    }
    return spec | changes


def test_the_bomb_works(tmp_path: Path) -> None:
    message = refused(bomb(tmp_path / "mark"))
    assert message == "function 'f (/x.py:1)' is a NoneType, which cannot be called: submit a function"
    assert (tmp_path / "mark").exists()


def test_R108_a_pickle_is_never_loaded_without_permission(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    message = refused(bomb(mark), allow_pickled=False)
    assert message == (
        "function 'f (/x.py:1)' was submitted as a pickle, which this worker refuses because loading one runs its code: "
        "submit a function that the worker can import, or start it with --allow-pickled (allow_pickled=True) if "
        "everybody who can submit may run code there"
    )
    # Also not by way of a registry, a hash, a policy or another spelling of the kind.
    for spec in (
        bomb(mark, src_hash="sha256:0"),
        bomb(mark, kind="Pickle"),
        bomb(mark, kind="ref"),
        bomb(mark, kind=b""),
    ):
        refused(spec, allow_pickled=False, runtime_policy="off", registry={"g": own}, allow_modules=("os", "posix"))
    assert not mark.exists()


def test_R108_a_pickle_in_any_other_field_is_not_loaded(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    blob = pickle.dumps(Bomb(mark))
    for allow in (True, False):
        for field in ("kind", "module", "qualname", "src_hash", "where", "source", "runtime", "hash"):
            for spec in ({**ref(__name__, "own"), field: blob}, bomb(mark, blob=b"", **{field: blob})):
                try:
                    assert resolve_fn(spec, allow_pickled=allow) is own
                except TransportError:
                    pass
    assert not mark.exists()


def test_R75_another_runtime_is_refused_before_the_unpickle(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    there = {**HERE, "python": "2.7.18"}
    message = refused(bomb(mark, runtime=there))
    assert message == (
        f"the function was pickled under python '2.7.18' of 'cpython' with cloudpickle {HERE['cloudpickle']!r}, this "
        f"worker runs python {PYTHON!r} of 'cpython' with cloudpickle {HERE['cloudpickle']!r}: the runtime policy "
        "'minor' does not let python '2.7.18' pass; use the same on both sides, a function that the worker can import, "
        "or at your own risk the policy 'off'"
    )
    runtimes: list[Any] = [None, {}, [], "3.11", {**HERE, "python": None}, {**HERE, "impl": "pypy"}]
    for runtime in runtimes:
        refused(bomb(mark, runtime=runtime))
    refused(bomb(mark), runtime_policy="whatever")
    assert not mark.exists()


def test_D11_a_blob_of_another_hash_is_refused_before_the_unpickle(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    spec = bomb(mark)
    actual = spec["hash"]
    wrong = f"sha256:{'0' * 64}"
    assert refused({**spec, "hash": wrong}) == (
        f"function 'f (/x.py:1)': the pickle hashes to {actual}, its submitter stated {wrong!r}: it was damaged or "
        "changed on the way; submit it again"
    )
    for stated in (None, "", actual.upper(), actual[7:], actual.encode(), [actual]):
        refused({**spec, "hash": stated}, runtime_policy="off")
    for blob in (None, "", list(spec["blob"]), bytearray(spec["blob"])):
        assert "expected the pickle's bytes under 'blob', got " in refused({**spec, "blob": blob})
    assert not mark.exists()


def test_the_gates_stand_in_their_order(tmp_path: Path) -> None:
    spec = bomb(tmp_path / "mark", runtime={}, blob=None, hash=None)
    assert "refuses because loading" in refused(spec, allow_pickled=False)
    assert "the function was pickled under" in refused(spec)
    assert "under 'blob'" in refused({**spec, "runtime": HERE})
    assert "the pickle hashes to" in refused({**spec, "runtime": HERE, "blob": b""})


def test_a_pickle_that_cannot_be_loaded_says_why() -> None:
    blob = b"cno_such_module_of_ours\nf\n."
    spec = {"kind": "pickle", "blob": blob, "hash": f"sha256:{hashlib.sha256(blob).hexdigest()}", "runtime": HERE}
    message = refused(spec)
    assert message.startswith(
        "function None cannot be unpickled here: ModuleNotFoundError: No module named 'no_such_module_of_ours'; "
        f"the worker runs in {os.getcwd()!r} with sys.path ["
    )
    assert message.endswith(": make what it uses importable on the worker")
    for exits in (b"csys\nexit\n(I3\ntR.", b"", b"\x80\xff", b"(" * 100_000):
        changed = {**spec, "blob": exits, "hash": f"sha256:{hashlib.sha256(exits).hexdigest()}"}
        assert "cannot be unpickled here: " in refused(changed)


def test_a_pickled_function_runs_where_it_is_allowed() -> None:
    y = 5
    for policy in ("strict", "minor", "off"):
        assert resolve_fn(pickled(lambda x: x + y), allow_pickled=True, runtime_policy=policy)(1) == 6


# --- the runtime ----------------------------------------------------------------------------------------------------

MAJOR = HERE["cloudpickle"].split(".")[0]


@each_row(
    "changes, strict, minor, off",
    [
        ({}, True, True, True),
        ({"platform": "plan9-vax"}, True, True, True),
        ({"python": f"{MINOR}.999"}, False, True, True),
        ({"python": f"{MINOR}"}, False, True, True),
        ({"python": f"{MINOR}0.1"}, False, False, True),
        ({"python": "3.1.1"}, False, False, True),
        ({"python": "3"}, False, False, True),
        ({"python": None}, False, False, True),
        ({"python": 3.11}, False, False, True),
        ({"cloudpickle": f"{MAJOR}.999"}, False, True, True),
        ({"cloudpickle": f"{MAJOR}0.0"}, False, False, True),
        ({"cloudpickle": None}, False, False, True),
        ({"impl": "pypy"}, False, False, True),
        ({"impl": None}, False, False, True),
        ({"pickle_protocol": 4}, True, True, True),
        ({"pickle_protocol": pickle.HIGHEST_PROTOCOL + 1}, False, False, True),
        ({"pickle_protocol": None}, False, False, True),
        ({"pickle_protocol": True}, False, False, True),
        ({"pickle_protocol": "5"}, False, False, True),
    ],
)
def test_D10_the_policies(changes: dict[str, Any], strict: bool, minor: bool, off: bool) -> None:
    for policy, passes in (("strict", strict), ("minor", minor), ("off", off)):
        if passes:
            check_runtime({**HERE, **changes}, policy)
        else:
            with pytest.raises(TransportError):
                check_runtime({**HERE, **changes}, policy)


def test_minor_is_the_default_policy() -> None:
    check_runtime({**HERE, "python": f"{MINOR}.999"})


@pytest.mark.parametrize("policy", ["", "Strict", "none", "major", None])
def test_another_policy_is_an_error(policy: Any) -> None:
    expected = f"expected the runtime policy 'strict', 'minor' or 'off', got {policy!r}"
    with pytest.raises(TransportError) as caught:
        check_runtime(HERE, policy)
    assert str(caught.value) == expected
    assert refused(ref(__name__, "own"), runtime_policy=policy) == expected


def test_a_newer_protocol_says_what_to_do() -> None:
    with pytest.raises(TransportError) as caught:
        check_runtime({**HERE, "pickle_protocol": 9})
    assert str(caught.value) == (
        "the function was pickled with protocol 9, this worker reads up to 5: run the worker on the submitter's python"
    )


@pytest.mark.parametrize("meta", [[], "cpython", 3])
def test_a_runtime_is_a_map(meta: Any) -> None:
    with pytest.raises(TransportError, match="expected a map that describes the submitter's runtime, got "):
        check_runtime(meta)
    check_runtime(meta, "off")


# --- references: what goes wrong ------------------------------------------------------------------------------------


def test_a_reference_is_imported(folder: Any) -> None:
    name = folder.write("class C:\n    class D:\n        @staticmethod\n        def f(x):\n            return x\n")
    for allow in (True, False):
        assert resolve_fn(ref(name, "C.D.f"), allow_pickled=allow)(3) == 3
    del sys.modules[name]
    assert resolve_fn({"module": name, "qualname": "C.D.f", "src_hash": None}, allow_pickled=False)(3) == 3


def test_a_module_written_a_moment_ago_is_found(folder: Any) -> None:
    name = folder.write("")
    refused(ref(f"{name}_later", "f"))
    folder.write("def f():\n    return 'there'\n", f"{name}_later")
    folder.names.append(f"{name}_later")
    assert resolve_fn(ref(f"{name}_later", "f"), allow_pickled=False)() == "there"


def test_R78_a_missing_module_names_the_place_and_the_fix() -> None:
    message = refused(ref("no_such_module_of_ours", "f"))
    assert message == (
        "cannot import the module of function 'no_such_module_of_ours.f': ModuleNotFoundError: No module named "
        f"'no_such_module_of_ours'; the worker runs in {os.getcwd()!r} with sys.path {sys.path[:5]!r} ...: install it "
        "there, set PYTHONPATH, or start the worker in the project's folder."
    )
    message = refused(ref("no_such_module_of_ours", "f"), cfg={"code": {"commit": "abc"}})
    assert message.endswith(
        "folder. The submitter stated a code archive (cfg.code), which this version does not fetch."
    )
    assert "archive" not in refused(ref("no_such_module_of_ours", "f"), cfg={"code": None})


R78 = """
import os, sys
from dreamlake.lakeshore.errors import TransportError
from dreamlake.lakeshore.functions.resolve import resolve_fn
os.chdir(sys.argv[1])
os.rmdir(sys.argv[1])
try:
    resolve_fn({"module": "nowhere", "qualname": "f"}, allow_pickled=False)
except TransportError as exc:
    sys.stdout.write(str(exc))
"""


def test_R78_also_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", R78, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    assert "the worker runs in 'a folder that was removed' with sys.path [" in done.stdout


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise ValueError('at import')", "ValueError: at import"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("import no_such_module_of_ours", "ModuleNotFoundError: No module named 'no_such_module_of_ours'"),
        ("def f(:", "SyntaxError: "),
        ("class Odd(BaseException): pass\nraise Odd('odd')", "Odd: odd"),
    ],
)
def test_whatever_an_import_raises_is_a_refusal(folder: Any, body: str, said: str) -> None:
    with pytest.raises(TransportError) as caught:
        resolve_fn(ref(folder.write(body), "f"), allow_pickled=False)
    assert f"': {said}" in str(caught.value)
    assert type(caught.value.__cause__).__name__ == said.partition(":")[0]


def test_only_the_users_own_interrupt_ends_the_loading(folder: Any) -> None:
    blob = b"cbuiltins\nexec\n(S'raise KeyboardInterrupt'\ntR."
    stop = {"kind": "pickle", "blob": blob, "hash": f"sha256:{hashlib.sha256(blob).hexdigest()}", "runtime": HERE}
    for spec in (ref(folder.write("raise KeyboardInterrupt"), "f"), stop):
        with pytest.raises(KeyboardInterrupt):  # Ctrl-C comes to the main thread
            resolve_fn(spec, allow_pickled=True)
        with ThreadPoolExecutor(1) as threads:
            assert "KeyboardInterrupt" in threads.submit(refused, spec).result(timeout=60)


@each_row(
    "spec, sentence",
    [
        (None, "expected a map that describes a function, got NoneType"),
        ([], "expected a map that describes a function, got list"),
        ({"kind": "wasm"}, "expected a function of kind 'ref' or 'pickle', got 'wasm': upgrade dreamlake-lakeshore on"),
        ({"kind": None}, "expected a function of kind 'ref' or 'pickle', got None: upgrade"),
        ({"kind": ["ref"]}, "expected a function of kind 'ref' or 'pickle', got a list: upgrade"),
        ({}, "expected the names of a module and a function in it, got None and None: submit the function again, or"),
        (ref("", "f"), "expected the names of a module and a function in it, got '' and 'f': "),
        (ref(b"m", 7), "expected the names of a module and a function in it, got a bytes and 7: "),
        (ref("m", ""), "expected the names of a module and a function in it, got 'm' and ''"),
        (ref("__main__", "f"), "function '__main__.f' stands in the submitter's script; __main__ is another module on"),
        (ref("__mp_main__", "f"), "function '__mp_main__.f' stands in the submitter's script"),
        (
            ref("m", "g.<locals>.f"),
            "function 'm.g.<locals>.f' is a lambda or local function, which no import reaches: ",
        ),
        (ref("m", "<lambda>"), "function 'm.<lambda>' is a lambda or local function, which no import reaches: define"),
        (ref(".m", "f"), "cannot import the module of function '.m.f': TypeError: "),
        (ref("..", "f"), "cannot import the module of function '...f': TypeError: "),
        (ref("a\0b", "f"), "cannot import the module of function 'a\\x00b.f': "),
        (ref(__name__, "gone"), f"function '{__name__}.gone' is not there: AttributeError: module "),
        (ref(__name__, "own.gone"), f"function '{__name__}.own.gone' is not there: AttributeError: "),
        (ref(__name__, "own."), f"function '{__name__}.own.' is not there: AttributeError: "),
        (ref(__name__, "MINOR"), f"function '{__name__}.MINOR' is a str, which cannot be called: submit a function"),
        (ref("m" * 100_000, "f"), f"cannot import the module of function '{'m' * 200}...': "),
    ],
)
@each_row("allow", [True, False])
def test_what_cannot_be_a_function_is_refused_in_a_sentence(spec: Any, sentence: str, allow: bool) -> None:
    message = refused(spec, allow_pickled=allow)
    assert message.startswith(sentence)
    assert len(message) < 120_000


nested: Any = []
for _ in range(100_000):
    nested = [nested]
junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.binary(max_size=20), st.just([]), st.just({}),
    st.just(nested), st.sampled_from(["ref", "pickle", "os", "sys", "builtins", "own", "system", __name__, "eval"]),
)  # fmt: skip
fields = ("kind", "module", "qualname", "src_hash", "blob", "hash", "runtime", "where", "source")


@given(st.dictionaries(st.sampled_from(fields), junk))
def test_any_map_gives_own_functions_or_a_refusal(spec: dict[str, Any]) -> None:
    try:
        fn = resolve_fn(spec, allow_pickled=False)
    except TransportError:
        return
    assert fn.__module__ == __name__


# --- references: what a worker that refuses pickles admits ------------------------------------------------------------

USER = """
    import collections, contextlib, functools, json, os, pickle, random, subprocess, textwrap
    from dataclasses import dataclass
    from os import system
    from subprocess import run as renamed
    from subprocess import *
    import dreamlake.lakeshore.functions.pickles as p
    from hypothesis import given as third_party
    from hypothesis.strategies import integers

    def own(x=1):
        return x

    @functools.wraps(own)
    def wrapped_by_own(x=1):
        return own(x)

    class C(json.JSONEncoder, collections.UserDict):
        @staticmethod
        def static(x=1):
            return x
        @classmethod
        def of_class(cls, x=1):
            return x
        def method(self):
            return 1
        def __call__(self):
            return 1
        inherited = subprocess.Popen.wait
        stolen = staticmethod(subprocess.run)

    @dataclass
    class Data:
        x: int = 1

    instance = C()
    bound = instance.method
    part = functools.partial(os.system, "true")
    own_part = functools.partial(own, 1)
    cached = functools.lru_cache(own)
    liar = subprocess.call
    attribute = staticmethod(subprocess.check_output)

    def made_of_text():
        space = {"__name__": __name__}
        exec("def g(): return 1", space)
        return space["g"]
    of_text = made_of_text()
    nameless = own.__class__(own.__code__, {})
    disguised = functools.wraps(own)(textwrap.dedent.__class__(textwrap.dedent.__code__, {}))

    @contextlib.contextmanager
    def managed():
        yield
"""
ADMITTED = ["own", "wrapped_by_own", "C.static", "C.of_class", "C.method", "made_of_text"]
NOT_ADMITTED = [
    "os.system", "system", "subprocess.run", "renamed", "run", "Popen", "pickle.loads", "json.loads", "random.random",
    "C.inherited", "C.stolen", "C.default", "C.encode", "C.setdefault", "C.fromkeys", "C", "Data", "Data.__init__",
    "instance", "instance.method", "bound", "part", "own_part", "cached", "liar", "attribute", "of_text",
    "nameless", "disguised", "managed", "third_party", "integers", "p.loads", "p.dumps",
    "p.cloudpickle.loads", "own.__call__", "own.__globals__.get", "own.__class__", "own.__builtins__.get",
    "C.__subclasses__", "C.__class__.__call__",
    "__loader__.exec_module", "__spec__.loader.get_data", "__builtins__.get", "collections.namedtuple",
]  # fmt: skip


@pytest.mark.parametrize("qualname", ADMITTED)
def test_own_functions_are_admitted(folder: Any, qualname: str) -> None:
    module = folder.load(USER)
    assert callable(resolve_fn(ref(module.__name__, qualname), allow_pickled=False))


@each_row("qualname", NOT_ADMITTED)
def test_D12_R108_other_callables_are_refused_whatever_name_leads_to_them(folder: Any, qualname: str) -> None:
    module = folder.load(USER)
    message = refused(ref(module.__name__, qualname), allow_pickled=False)
    assert message.startswith(
        f"function '{module.__name__}.{qualname}' is refused: this worker refuses pickles, and with them references to "
        "anything but UDFs and functions of your own modules; this one belongs to '"
    )
    assert "Decorate what is to be called with @dls.udf, or start the worker with --allow-module " in message


@each_row(
    "module, qualname",
    [
        ("os", "system"), ("posix", "system"), ("subprocess", "run"), ("pickle", "loads"), ("builtins", "eval"),
        ("importlib", "import_module"), ("runpy", "run_path"), ("code", "interact"), ("os.path", "join"),
        ("cloudpickle", "loads"), ("hypothesis", "given"), ("pytest", "main"), ("_pytest.config", "main"),
        ("dreamlake.lakeshore.functions.pickles", "loads"), ("dreamlake.lakeshore.functions.resolve", "resolve_fn"),
    ],
)  # fmt: skip
def test_D12_library_functions_are_refused(module: str, qualname: str) -> None:
    message = refused(ref(module, qualname), allow_pickled=False)
    assert f"function '{module}.{qualname}' is refused: this worker refuses pickles" in message
    assert callable(resolve_fn(ref(module, qualname), allow_pickled=True))


def test_the_refusal_names_the_module_to_allow() -> None:
    assert refused(ref("subprocess", "run"), allow_pickled=False) == (
        "function 'subprocess.run' is refused: this worker refuses pickles, and with them references to anything but "
        "UDFs and functions of your own modules; this one belongs to 'subprocess'. Decorate what is to be called with "
        "@dls.udf, or start the worker with --allow-module subprocess (allow_modules=('subprocess',))"
    )


CLOSED = """
import sys
from dreamlake.lakeshore.errors import TransportError
from dreamlake.lakeshore.functions.resolve import resolve_fn
for name in ("antigravity", "this", "idlelib.idle", "json.__main__", "user_main.__main__", "turtledemo.clock"):
    try:
        resolve_fn({"module": name, "qualname": "f"}, allow_pickled=False)
    except TransportError as exc:
        assert "is refused" in str(exc), exc
        assert name not in sys.modules, name
    else:
        raise AssertionError(name)
"""


def test_modules_that_nothing_may_be_called_in_are_not_even_imported(tmp_path: Path) -> None:
    (tmp_path / "user_main").mkdir()
    (tmp_path / "user_main" / "__init__.py").touch()
    (tmp_path / "user_main" / "__main__.py").write_text("raise AssertionError('it ran')")
    done = subprocess.run([sys.executable, "-c", CLOSED], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_second_copy_of_this_package_is_refused_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker started in a checkout finds the folder under its own name.
    (tmp_path / "alias_of_ours").symlink_to(Path(dls.__file__).parent)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        message = refused(ref("alias_of_ours.functions.pickles", "loads"), allow_pickled=False)
        assert "is refused: this worker refuses pickles" in message
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "alias_of_ours"]:
            del sys.modules[name]


def test_a_udf_is_admitted_wherever_it_stands(folder: Any, fake_udf: Any) -> None:
    module = folder.load(USER)
    module.shell = fake_udf(subprocess.run)
    assert resolve_fn(ref(module.__name__, "shell"), allow_pickled=False) is module.shell
    refused(ref(module.__name__, "shell.__wrapped__"), allow_pickled=False)
    refused(ref(module.__name__, "shell.__init__"), allow_pickled=False, allow_modules=("os",))

    class Pretender:
        __module__ = module.__name__

        def __call__(self) -> None: ...

    module.pretender = Pretender()
    module.pretender.__lakeshore_udf__ = True
    refused(ref(module.__name__, "pretender"), allow_pickled=False)


def test_allowed_modules_are_meant_by_where_a_callable_belongs(folder: Any) -> None:
    user = folder.load(USER).__name__

    def admitted(module: str, qualname: str, *allow: str) -> bool:
        options: dict[str, Any] = {"allow_pickled": False, "allow_modules": allow}
        try:
            return callable(resolve_fn(ref(module, qualname), **options))
        except TransportError:
            return "is refused: this worker" not in refused(ref(module, qualname), **options)

    assert admitted("json", "dumps", "json")
    assert admitted("json.decoder", "scanstring", "_json", "json")
    assert admitted("math", "sqrt", "other", "math")
    assert admitted(user, "renamed", "subprocess")
    assert admitted(user, "Data", user)
    assert admitted(user, "bound", user)
    assert not admitted("json", "dumps", "js")
    assert not admitted("json", "codecs.open", "json")
    assert not admitted(user, "os.system", user)
    assert not admitted(user, "part", user)
    assert not admitted("xml.dom.minidom", "parse", "xml.dom.expatbuilder")
    assert admitted("xml.dom.minidom", "parse", "xml")
    assert not admitted("dreamlake.lakeshore.functions.pickles", "loads", "dreamlake", "dreamlake.lakeshore")
    assert callable(resolve_fn(ref("json", "dumps"), allow_pickled=False, allow_modules="json"))
    refused(ref("json", "dumps"), allow_pickled=False, allow_modules="j")


# --- the registry ---------------------------------------------------------------------------------------------------


def test_the_registry_wins_over_import() -> None:
    def other() -> int:
        return 2

    for spec in (ref(__name__, "own"), {"qualname": "own"}, ref("no_such_module_of_ours", "own")):
        for allow in (True, False):
            assert resolve_fn(spec, registry={"own": other}, allow_pickled=allow) is other
    assert resolve_fn(ref(__name__, "own"), registry={"f": other}, allow_pickled=False) is own
    assert resolve_fn({"qualname": "run"}, registry={"run": subprocess.run}, allow_pickled=False) is subprocess.run
    stale = ref(__name__, "own", src_hash=source_hash(own))
    assert "is sha256:" in refused(stale, registry={"own": other})
    assert resolve_fn(stale, registry={"own": other}, allow_pickled=False, runtime_policy="off") is other


def test_the_registry_never_stands_in_for_a_pickle() -> None:
    spec = pickled(own)
    refused(spec, registry={"own": own}, allow_pickled=False)
    assert resolve_fn(spec, registry={"own": builtins.print}, allow_pickled=True)(1) == 2


# --- the source -----------------------------------------------------------------------------------------------------


def test_another_source_is_refused_naming_both() -> None:
    here = source_hash(own)
    assert resolve_fn(ref(__name__, "own", src_hash=here), allow_pickled=False) is own
    there = "sha256:0123456789abcdef"
    assert refused(ref(__name__, "own", src_hash=there)) == (
        f"the source of function 'own' is '{there}' at the submitter and is {here} in this worker: deploy the same code "
        "on both sides and restart whichever still runs the old one, or set the runtime policy to 'off'"
    )
    for policy in ("strict", "minor"):
        refused(ref(__name__, "own", src_hash=there), runtime_policy=policy)


def test_the_check_is_skipped_without_a_hash_without_source_and_when_off() -> None:
    there = "sha256:0123456789abcdef"
    assert resolve_fn(ref(__name__, "own", src_hash=None), allow_pickled=False) is own
    assert resolve_fn(ref(__name__, "own"), allow_pickled=False) is own
    assert resolve_fn(ref(__name__, "own", src_hash=there), allow_pickled=False, runtime_policy="off") is own
    assert resolve_fn(ref("math", "sqrt", src_hash=there), allow_pickled=True)(4) == 2


OLD = "def f():\n    return 'old'\n\ndef g():\n    return 'old'\n"
NEW = OLD.replace("old", "new!")


def hash_of(folder: Any, text: str, name: str) -> str:
    """The hash that a submitter with this text has."""
    hash = source_hash(getattr(folder.load(text), name))
    assert hash
    return hash


@pytest.mark.parametrize("old_file", [True, False])
def test_R70_a_module_edited_after_its_import_never_runs_the_old_code_silently(
    folder: Any, monkeypatch: pytest.MonkeyPatch, old_file: bool
) -> None:
    monkeypatch.setattr(source, "_START_NS", 2**63 if old_file else 0)
    name = folder.write(OLD)
    first = ref(name, "f", src_hash=hash_of(folder, OLD, "f"))
    assert resolve_fn(first, allow_pickled=False)() == "old"
    folder.write(NEW, name)
    for function in ("f", "g"):
        new = ref(name, function, src_hash=hash_of(folder, NEW, function))
        assert f"the source of function '{function}' is 'sha256:" in refused(new, allow_pickled=False)
        old = ref(name, function, src_hash=hash_of(folder, OLD, function))
        assert resolve_fn(old, allow_pickled=False)() == "old"


def test_R70_a_module_that_was_imported_and_edited_unseen_is_refused(
    folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "_START_NS", 0)
    module = folder.load(OLD)
    folder.write(NEW, module.__name__)
    new = ref(module.__name__, "f", src_hash=hash_of(folder, NEW, "f"))
    assert refused(new, allow_pickled=False) == (
        f"the source of function 'f' is {new['src_hash']!r} at the submitter and has changed on disk since this worker "
        "imported it: deploy the same code on both sides and restart whichever still runs the old one, or set the "
        "runtime policy to 'off'"
    )
    assert resolve_fn(new, allow_pickled=False, runtime_policy="off")() == "old"
    assert serialize_fn(module.f)["src_hash"] is None


def test_R70_a_look_without_a_hash_keeps_the_text_all_the_same(folder: Any) -> None:
    name = folder.write(OLD)
    assert resolve_fn(ref(name, "f"), allow_pickled=False, runtime_policy="off")() == "old"
    folder.write(NEW, name)
    new = ref(name, "g", src_hash=hash_of(folder, NEW, "g"))
    assert "is sha256:" in refused(new, allow_pickled=False)


SUBMIT = """
import importlib, json, sys
from dreamlake.lakeshore.functions.serialize import serialize_fn
module = importlib.import_module(sys.argv[1])
if "wait" in sys.argv:
    print("imported", flush=True)
    sys.stdin.readline()
print(json.dumps(serialize_fn(module.f)))
"""


def test_R70_a_submitter_that_runs_old_code_says_so_or_nothing(folder: Any) -> None:
    """Between real processes: import, edit, submit."""
    name = folder.write(OLD)
    environment = folder.environment()
    command = [sys.executable, "-c", SUBMIT, name]
    fresh = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, "wait"], env=environment, **pipes) as submitter:
        assert submitter.stdout
        assert submitter.stdout.readline() == "imported\n"
        folder.write(NEW, name)
        edited, _ = submitter.communicate("\n", timeout=60)
    expected = hash_of(folder, OLD, "f")
    assert json.loads(fresh.stdout)["src_hash"] == expected
    assert json.loads(edited)["src_hash"] is None


def test_resolving_changes_no_spec(folder: Any) -> None:
    for spec in (pickled(own), ref(__name__, "own", src_hash=source_hash(own))):
        before = copy.deepcopy(spec)
        resolve_fn(spec, allow_pickled=True)
        assert spec == before


def test_a_class_method_keeps_its_class(folder: Any) -> None:
    module = folder.load(
        "class A:\n    @classmethod\n    def name(cls):\n        return cls.__name__\nclass B(A): pass\n"
    )
    assert resolve_fn(ref(module.__name__, "B.name"), allow_pickled=False)() == "B"
    assert functools.partial(resolve_fn(serialize_fn(module.A.name), allow_pickled=False))() == "A"
