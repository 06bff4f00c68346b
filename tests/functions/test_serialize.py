"""How callables cross: what counts as importable, both arms of the `fn` field, and the pickle limit."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import operator
import os
import subprocess
import sys
import textwrap
import threading
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from dreamlake.lakeshore.client.thunk import thunk
from dreamlake.lakeshore.errors import TransportError
from dreamlake.lakeshore.functions.resolve import resolve_fn
from dreamlake.lakeshore.functions.serialize import INLINE_PICKLE_LIMIT, importable, serialize_fn
from dreamlake.lakeshore.functions.source import source_hash
from dreamlake.lakeshore.wire import pack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def at_module_level(x: int = 1) -> int:
    return x + 1


def of_anything(x: Any) -> Any:
    return x


def wrapped_inner(x: int = 1) -> int:
    return x + 2


@functools.wraps(wrapped_inner)
def wrapper(x: int = 1) -> int:
    return wrapped_inner(x)


wrapper.__qualname__ = "wrapper"


@functools.lru_cache
def cached(x: int = 1) -> int:
    return x


class Accumulator:
    total = 1

    def add(self, n: int) -> int:
        return self.total + n

    @staticmethod
    def static(n: int) -> int:
        return n

    @classmethod
    def of_class(cls, n: int) -> int:
        return cls.total + n

    def __call__(self, n: int) -> int:
        return self.total + n

    class Inner:
        @staticmethod
        def deep() -> str:
            return "deep"


class Child(Accumulator):
    total = 5


renamed = at_module_level
anonymous = lambda x=1: x  # noqa: E731 -- the lambda is the point


def local() -> Callable[[int], int]:
    def inner(x: int = 1) -> int:
        return x

    return inner


class Replaced:
    """Whose name leads to another object than the first one."""

    @staticmethod
    def f() -> int:
        return 1


first_f = Replaced.f
Replaced.f = staticmethod(lambda: 2)  # type: ignore[method-assign]

IMPORTABLE: list[Any] = [
    at_module_level, renamed, wrapper, cached, Accumulator.static, Accumulator.of_class, Accumulator().static,
    Accumulator.Inner.deep, Accumulator.add, Accumulator, json.dumps, len, os.path.join, Child.static,
]  # fmt: skip
OTHERS: dict[str, Any] = {
    "lambda": anonymous,
    "local function": local(),
    "bound method": Accumulator().add,
    "inherited class method": Child.of_class,
    "instance": Accumulator(),
    "partial": functools.partial(at_module_level, 2),
    "the name leads elsewhere": first_f,
    "inner of a wrapper": wrapped_inner,
    "method of a builtin": [].append,
    "attrgetter": operator.attrgetter("x"),
}
globals()["wrapped_inner"] = wrapper


@pytest.mark.parametrize("fn", IMPORTABLE)
def test_a_name_that_leads_back_is_importable(fn: Any) -> None:
    assert importable(fn)
    arm = serialize_fn(fn)
    assert list(arm) == ["kind", "module", "qualname", "src_hash"]
    assert (arm["kind"], arm["module"], arm["qualname"]) == ("ref", fn.__module__, fn.__qualname__)
    assert resolve_fn(arm, allow_pickled=True) == fn


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_D8_what_no_name_leads_back_to_goes_by_value(fn: Any) -> None:
    assert not importable(fn)
    with pytest.raises(TransportError) as caught:
        serialize_fn(fn, "ref")
    assert "cannot cross with transport='ref': " in str(caught.value)
    assert str(caught.value).endswith(", or use transport='auto' and a worker that allows pickled functions")
    if fn is not OTHERS["method of a builtin"]:
        assert serialize_fn(fn)["kind"] == "pickle"


def test_the_refusal_of_a_reference_names_the_reason_and_the_fix() -> None:
    reasons = {
        "lambda": "'<lambda>' is no name that an import reaches: define it with def at module level",
        "local function": "'local.<locals>.inner' is no name that an import reaches: define it with def at module level",
        "bound method": "it is bound to an instance of Accumulator: pass that as an argument to a function",
        "instance": "a Accumulator object has no name of its own: wrap it in a function at module level",
        "partial": "a partial object has no name of its own: wrap it in a function at module level",
        "the name leads elsewhere": f"the name {__name__}.Replaced.f leads to something else: "
        "give it a name of its own at module level",
    }
    for name, reason in reasons.items():
        with pytest.raises(TransportError) as caught:
            serialize_fn(OTHERS[name], "ref")
        assert f"cannot cross with transport='ref': {reason}, or use" in str(caught.value)


def test_another_transport_is_refused() -> None:
    with pytest.raises(TransportError) as caught:
        serialize_fn(at_module_level, "value")
    assert str(caught.value) == "expected transport 'auto', 'ref' or 'pickle', got 'value'"


def test_D8_a_bound_method_runs_with_its_instance() -> None:
    accumulator = Accumulator()
    accumulator.total = 10
    assert resolve_fn(serialize_fn(accumulator.add), allow_pickled=True)(2) == 12


def test_the_reference_carries_the_hash_of_the_unwrapped_source() -> None:
    text = textwrap.dedent(inspect.getsource(at_module_level))
    expected = f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    assert serialize_fn(at_module_level)["src_hash"] == source_hash(at_module_level) == expected
    assert serialize_fn(len)["src_hash"] is None


def test_a_udf_crosses_as_its_function_names_it(fake_udf: Any, folder: Any) -> None:
    module = folder.load("def f(x):\n    return x\n")
    function = module.f
    assert serialize_fn(fake_udf(local()))["kind"] == "pickle"
    udf = module.f = fake_udf(function)
    for fn in (udf, function):  # the name leads to the UDF, of both
        arm = serialize_fn(fn, "ref")
        assert arm["qualname"] == "f"
        assert arm["src_hash"] == source_hash(function)
        assert resolve_fn(arm, allow_pickled=False) is udf
    other = fake_udf(function)
    module.f = at_module_level
    assert not importable(other)
    snapshot = serialize_fn(udf, "pickle")
    assert resolve_fn(snapshot, allow_pickled=True)(3) == 3
    assert snapshot["qualname"] == "f"


def test_a_wrapper_of_a_udf_is_no_udf(fake_udf: Any) -> None:
    udf = fake_udf(at_module_level, "pickle")

    @functools.wraps(udf, assigned=())
    def around() -> int:
        return 1

    assert thunk(around).to_envelope().fn["where"].startswith("test_a_wrapper_of_a_udf_is_no_udf.<locals>.around (")
    assert thunk(udf).to_envelope().fn["kind"] == "pickle"


# --- by value -------------------------------------------------------------------------------------------------------


def test_the_pickle_arm_says_what_it_is() -> None:
    fn = local()
    arm = serialize_fn(fn)
    assert list(arm) == ["kind", "blob", "hash", "source", "qualname", "where", "runtime"]
    assert arm["hash"] == f"sha256:{hashlib.sha256(arm['blob']).hexdigest()}"
    assert arm["source"] == "def inner(x: int = 1) -> int:\n    return x\n"
    assert arm["qualname"] == "local.<locals>.inner"
    assert arm["where"] == f"local.<locals>.inner ({__file__}:{fn.__code__.co_firstlineno})"
    runtime = arm["runtime"]
    assert list(runtime) == ["python", "impl", "cloudpickle", "pickle_protocol", "platform"]
    assert runtime["python"] == ".".join(map(str, sys.version_info[:3]))
    assert (runtime["impl"], runtime["cloudpickle"]) == (sys.implementation.name, cloudpickle.__version__)
    assert runtime["pickle_protocol"] == 5
    assert runtime["platform"].startswith(f"{sys.platform}-")


def test_what_has_no_source_or_line_still_has_a_name() -> None:
    arm = serialize_fn(operator.attrgetter("x"))
    assert (arm["source"], arm["qualname"], arm["where"]) == ("", "attrgetter", "attrgetter")
    arm = serialize_fn(functools.partial(at_module_level, 2))
    assert (arm["qualname"], arm["source"]) == ("at_module_level", inspect.getsource(at_module_level))
    assert serialize_fn(Accumulator().add)["qualname"] == "Accumulator.add"
    assert serialize_fn(Accumulator())["qualname"] == "Accumulator"


def capturing(size: int) -> Callable[[], int]:
    data = os.urandom(size)
    return lambda: len(data)


def test_the_limit_is_32768_bytes_exactly() -> None:
    assert INLINE_PICKLE_LIMIT == 32768
    size = 30_000
    for _ in range(5):
        size += INLINE_PICKLE_LIMIT - len(serialize_fn(capturing(size))["blob"])
    fits = capturing(size)
    assert len(serialize_fn(fits)["blob"]) == INLINE_PICKLE_LIMIT
    assert resolve_fn(serialize_fn(fits), allow_pickled=True)() == size
    with pytest.raises(TransportError) as caught:
        serialize_fn(capturing(size + 1))
    assert str(caught.value) == (
        "function 'capturing.<locals>.<lambda>' pickles to 32769 bytes, more than the 32768 that may travel with an "
        "invocation: it captures data, so pass the data as arguments instead"
    )


def test_state_that_cannot_be_pickled_is_named_with_the_fix() -> None:
    lock = threading.Lock()
    with pytest.raises(TransportError) as caught:
        serialize_fn(lambda: lock)
    assert str(caught.value).endswith(
        "cannot be pickled: TypeError: cannot pickle '_thread.lock' object; what it captures travels with it, so pass "
        "data as arguments and open files, locks and connections inside the function"
    )


SNAPSHOT = """
    import collections, enum
    RATE = 2
    class Shape:
        def __init__(self, n): self.n = n
        def area(self): return helper(self.n)
    class Color(enum.Enum):
        RED = 1
    def helper(n): return n * RATE
    def f(n): return Shape(n).area() + Color.RED.value
    def fact(n): return 1 if n < 2 else n * fact(n - 1)
    async def af(n): return helper(n)
"""


@pytest.mark.parametrize("name", ["f", "fact"])
def test_D9_pickle_snapshots_an_importable_function_too(folder: Any, name: str) -> None:
    module = folder.load(SNAPSHOT)
    fn = getattr(module, name)
    assert importable(fn)
    arm, expected = serialize_fn(fn, "pickle"), fn(5)
    assert arm["kind"] == "pickle"
    # Neither another module of that name nor none at all makes a difference.
    folder.write("def f(n): return 'new'\ndef fact(n): return 'new'\ndef helper(n): return 'new'\n", module.__name__)
    del sys.modules[module.__name__]
    assert resolve_fn(arm, allow_pickled=True)(5) == expected
    assert module.__name__ not in sys.modules
    (folder.path / f"{module.__name__}.py").unlink()
    assert resolve_fn(arm, allow_pickled=True)(5) == expected


UDFS = """
    import dreamlake.lakeshore as dls

    @dls.udf
    def inner(n): return n * 2

    class Holder:
        @dls.udf
        @staticmethod
        def static(n): return inner(n)
        @dls.udf
        def method(self, n): return Holder.static(n)

    @dls.udf(queue="gpu", transport="pickle")
    def outer(n): return 1 if n < 1 else Holder().method(n) + outer.local(n - 1)
"""


def test_D9_a_snapshot_takes_the_udfs_of_its_module_along(folder: Any) -> None:
    module = folder.load(UDFS)
    arm, expected = thunk(module.outer, 3).to_envelope().fn, module.outer.local(3)
    del sys.modules[module.__name__]
    (folder.path / f"{module.__name__}.py").unlink()
    assert resolve_fn(arm, allow_pickled=True)(3) == expected == 13
    assert elsewhere(arm) == "13"


def test_a_property_that_fails_is_no_way_to_a_function(folder: Any) -> None:
    module = folder.load("""
        class Meta(type):
            @property
            def f(cls): raise ValueError
        class C(metaclass=Meta): pass
        def f(): return 1
        f.__qualname__ = "C.f"
    """)
    assert not importable(module.f)


def test_a_snapshot_changes_nothing_for_other_pickles(folder: Any) -> None:
    module = folder.load(SNAPSHOT)
    before = cloudpickle.dumps(module.f)
    stop = threading.Event()
    others: list[bytes] = []

    def pickle_meanwhile() -> None:
        while not stop.is_set():
            others.append(cloudpickle.dumps(module.f))

    thread = threading.Thread(target=pickle_meanwhile)
    thread.start()
    blobs = {serialize_fn(module.f, "pickle")["blob"] for _ in range(200)}
    stop.set()
    thread.join()
    assert set(others) == {before}
    assert len(before) < 100 < min(map(len, blobs))
    assert not cloudpickle.list_registry_pickle_by_value()


def test_auto_takes_along_what_is_captured_and_names_the_rest() -> None:
    offset = 40
    arm = serialize_fn(lambda x: at_module_level(x) + offset)
    offset = 0
    assert resolve_fn(arm, allow_pickled=True)(1) == 42
    assert len(arm["blob"]) < 1500


R77_LOADS = """
import sys
from dreamlake.lakeshore.functions.resolve import resolve_fn
from dreamlake.lakeshore.wire import unpack
sys.stdout.write(str(resolve_fn(unpack(sys.stdin.buffer.read()), allow_pickled=True)(3)))
"""


def elsewhere(arm: dict[str, Any], environment: dict[str, str] | None = None) -> str:
    """What a process that knows nothing of this test's modules makes of it."""
    done = subprocess.run(
        [sys.executable, "-c", R77_LOADS], input=pack(arm), capture_output=True, timeout=60, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_R77_annotations_that_only_the_submitter_can_import(folder: Any) -> None:
    client = folder.load("class OnlyOnClient: pass\n")
    source = """
        from {client} import OnlyOnClient
        def make():
            def f(p: OnlyOnClient, *more: "OnlyOnClient") -> list[OnlyOnClient]:
                return p + 1
            return f
    """
    module = folder.load(source.format(client=client.__name__))
    assert module.make().__annotations__["p"] is client.OnlyOnClient
    assert elsewhere(serialize_fn(module.make())) == "4"
    late = folder.load(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        f"    from {client.__name__}_gone import Other\ndef f(p: Other) -> Other:\n    return p + 2\n"
    )
    assert serialize_fn(late.f)["kind"] == "ref"
    assert elsewhere(serialize_fn(late.f), folder.environment()) == "5"
    assert module.make().__annotations__["p"] is client.OnlyOnClient  # the submitter's own function is as before


MAIN = """
import sys
from dreamlake.lakeshore.errors import TransportError
from dreamlake.lakeshore.functions.serialize import serialize_fn, importable
from dreamlake.lakeshore.functions.resolve import resolve_fn

def f(x):
    return helper(x) + 1

def helper(x):
    return x * 2

if __name__ == "__main__":
    assert not importable(f)
    arm = serialize_fn(f)
    assert arm["kind"] == "pickle"
    assert resolve_fn(arm, allow_pickled=True)(4) == 9
    try:
        serialize_fn(f, "ref")
    except TransportError as exc:
        sys.stdout.write(str(exc))
"""


@pytest.mark.parametrize("how", [["app.py"], ["./app.py"], ["-m", "app"], ["-m", "pkg.app"]])
def test_R73_functions_of_the_started_script(tmp_path: Path, how: list[str]) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    for path in (tmp_path / "app.py", tmp_path / "pkg" / "app.py"):
        path.write_text(MAIN)
    done = subprocess.run([sys.executable, *how], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == (
        "function 'f' cannot cross with transport='ref': it is defined in the script that was started (__main__), which "
        "a worker cannot import: move it into a module and import it from there, or use transport='auto' and a worker "
        "that allows pickled functions"
    )
