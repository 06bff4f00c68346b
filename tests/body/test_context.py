"""`dls.scope` and `dls.run`: prefixes, roots, reading and writing by key, and where the record is seen."""

from __future__ import annotations

import contextvars
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest

from dreamlake.lakeshore.body.context import (
    BodyContext,
    current_invocation,
    invocation_context,
    local_context,
    run,
    scope,
)
from dreamlake.lakeshore.errors import KeyContractError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    """Whatever a test does, the record outside is the empty one again afterwards."""
    yield
    assert (run.prefix, run.invocation_id, run.attempt, run.root) == ("", None, None, Path.cwd())


# --- scope ----------------------------------------------------------------------------------------------------------


def test_scopes_nest_and_restore(tmp_path: Path) -> None:
    with scope("scenes", root=tmp_path) as inside:
        assert inside is run
        assert (run.prefix, run.root) == ("scenes", tmp_path)
        with scope("0007/"):
            assert (run.prefix, run.root) == ("scenes/0007", tmp_path)
            with scope("../0008"):
                assert run.prefix == "scenes/0008"
            with scope():
                assert run.prefix == "scenes/0007"
            with scope(root=tmp_path / "other"):
                assert (run.prefix, run.root) == ("scenes/0007", tmp_path / "other")
            with scope("../.."):
                assert run.prefix == ""
        assert run.prefix == "scenes"


def test_a_scope_restores_after_an_exception() -> None:
    def fails() -> None:
        with scope("a"), scope("b"):
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()


@pytest.mark.parametrize("sub", ["/abs", "..", "a/../..", "a\\b", "a\0", "C:/x"])
def test_a_scope_is_a_key_inside_the_root(sub: str) -> None:
    with pytest.raises(KeyContractError), scope(sub):
        pytest.fail("entered")


def test_the_default_root_is_the_current_folder_at_each_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        assert run.root == tmp_path / name
        assert run.write("x") == tmp_path / name / "x"


def test_a_relative_root_is_taken_from_the_current_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with scope(root="data"):
        monkeypatch.chdir("/")
        assert run.root == tmp_path / "data"


# --- reading and writing --------------------------------------------------------------------------------------------


def test_a_written_key_is_read_again(tmp_path: Path) -> None:
    with scope("p", root=tmp_path):
        path = run.write("process/mesh.ply")
        assert path == tmp_path / "p" / "process" / "mesh.ply"
        path.write_text("mesh")
        assert run.read("process/mesh.ply").read_text() == "mesh"
        assert run.read("./process//mesh.ply") == path
        folder = run.write("frames", dir=True)
        assert folder.is_dir()
        assert run.read("frames") == folder
        assert run.read(".") == tmp_path / "p"
        run.write("../shared/x").write_text("x")
    with scope("q", root=tmp_path):
        assert run.read("../shared/x").read_text() == "x"


def test_a_missing_key_is_named_with_prefix_and_root(tmp_path: Path) -> None:
    with scope("p", root=tmp_path), pytest.raises(KeyContractError) as caught:
        run.read("gone/x")
    assert str(caught.value) == (
        f"nothing is there under key 'gone/x' (prefix 'p', root {str(tmp_path)!r}): "
        "write it first, or check the key, the dls.scope around the call and the root"
    )


def test_R115_reads_and_writes_stay_inside_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (outside / "hostname").write_text("secret")
    (root / "ln").symlink_to(outside)
    with scope(root=root):
        for key in ("ln/hostname", "../outside/hostname", str(outside / "hostname"), "a\0", "..\\x", "C:/x", "y" * 300):
            for use in (run.read, run.write):
                with pytest.raises(KeyContractError):
                    use(key)
    assert sorted(path.name for path in outside.iterdir()) == ["hostname"]


def test_all_forms_mirror_the_shape_of_the_keys(tmp_path: Path) -> None:
    with scope(root=tmp_path):
        keys: Any = {"one": "a", "more": ["b", ("c/d", "e")], 3: ("f",), "none": []}
        paths = {
            "one": tmp_path / "a",
            "more": [tmp_path / "b", (tmp_path / "c/d", tmp_path / "e")],
            3: (tmp_path / "f",),
            "none": [],
        }
        assert run.write_all(keys) == paths
        with pytest.raises(KeyContractError, match="nothing is there under key 'a'"):
            run.read_all(keys)
        for name in ("a", "b", "c/d", "e", "f"):
            (tmp_path / name).touch()
        assert run.read_all(keys) == paths
        assert run.read_all("a") == tmp_path / "a"
        with pytest.raises(KeyContractError, match="expected a key, got 7 of type int"):
            run.write_all(["a", 7])


def test_outside_a_call_nothing_asks_for_the_written_keys(tmp_path: Path) -> None:
    with scope(root=tmp_path):
        run.write("x")


def test_repr_shows_the_record(tmp_path: Path) -> None:
    with scope("p", root=tmp_path):
        assert repr(run) == f"<dls.run prefix='p' root={str(tmp_path)!r} invocation_id=None>"


# --- the record of a call -------------------------------------------------------------------------------------------


def test_an_invocation_is_seen_inside_its_body_only(tmp_path: Path) -> None:
    call = invocation_context(tmp_path, "p", "01ABC", 2)

    def body(fn: int, *, self: int) -> tuple[Any, ...]:  # names that the machinery uses too
        return fn, self, run.prefix, run.root, run.invocation_id, run.attempt, current_invocation()

    assert call.step(body, 1, self=2) == (1, 2, "p", tmp_path, "01ABC", 2, "01ABC")
    assert current_invocation() is None


def test_an_invocation_from_afar_brings_no_hostile_prefix(tmp_path: Path) -> None:
    for prefix in ("/etc", "..", "a/../..", "a\0"):
        with pytest.raises(KeyContractError):
            invocation_context(tmp_path, prefix, "01ABC", 1)


def test_a_local_call_keeps_the_record_and_has_its_own_ledger(tmp_path: Path) -> None:
    outer = invocation_context(tmp_path, "p", "01ABC", 1)

    def body() -> str:
        run.write("outer")
        inner = local_context()
        assert inner.step(lambda: (run.prefix, run.invocation_id, run.root)) == ("p", "01ABC", tmp_path)
        inner.step(run.write, "inner")
        inner.check_value("inner", body)
        return "outer"

    outer.check_value(outer.step(body), body)


def test_keys_written_in_an_inner_scope_and_in_threads_count(tmp_path: Path) -> None:
    call = invocation_context(tmp_path, "", "01ABC", 1)

    def body() -> None:
        with scope("sub"):
            run.write("x")
        context = contextvars.copy_context()
        thread = threading.Thread(target=lambda: context.run(run.write, "y"))
        thread.start()
        thread.join()

    call.step(body)
    with pytest.raises(KeyContractError) as caught:
        call.check_value(["z"], body)
    assert "body' wrote 'x', 'y' through dls.run.write but returned no such key" in str(caught.value)
    call.check_value(["sub/x", "y"], body)


def test_each_step_finds_the_record_that_the_body_left(tmp_path: Path) -> None:
    call = invocation_context(tmp_path, "p", "01ABC", 1)
    held = scope("deep")
    call.step(held.__enter__)
    assert run.prefix == ""
    with scope("consumer"):
        assert call.step(lambda: run.prefix) == "p/deep"
        assert run.prefix == "consumer"
    contextvars.copy_context().run(call.step, held.__exit__, None, None, None)  # in another context than it was entered
    assert call.step(lambda: run.prefix) == "p"


@pytest.mark.anyio
async def test_R89_tasks_and_worker_threads_see_the_scope(tmp_path: Path) -> None:
    seen: dict[str, str] = {}

    async def task(name: str) -> None:
        with scope(name):
            await anyio.lowlevel.checkpoint()
            seen[name] = await anyio.to_thread.run_sync(lambda: run.prefix)

    with scope("p", root=tmp_path):
        async with anyio.create_task_group() as group:
            for name in ("a", "b", "c"):
                group.start_soon(task, name)
        assert run.prefix == "p"
    assert seen == {"a": "p/a", "b": "p/b", "c": "p/c"}


@pytest.mark.anyio
async def test_concurrent_calls_do_not_mix(tmp_path: Path) -> None:
    async def body(name: str) -> str:
        for _ in range(5):
            await anyio.lowlevel.checkpoint()
            run.write(f"{name}/file")
            assert run.invocation_id == name
        return f"{name}/file"

    async def one(name: str) -> None:
        call = invocation_context(tmp_path, "", name, 1)
        call.check_value(await call.astep(body, name), body)
        assert current_invocation() is None

    async with anyio.create_task_group() as group:
        for n in range(20):
            group.start_soon(one, f"id{n}")


@pytest.mark.anyio
async def test_a_cancelled_step_restores_the_record(tmp_path: Path) -> None:
    call = invocation_context(tmp_path, "p", "01ABC", 1)
    ended: list[str] = []

    async def body() -> None:
        try:
            left.cancel()
            await anyio.sleep_forever()
        finally:
            ended.append(run.prefix)

    with scope("outside"):
        with anyio.CancelScope() as left:
            await call.astep(body)
        assert run.prefix == "outside"
    assert ended == ["p"]


def test_a_coroutine_closed_in_a_foreign_context_changes_nothing_there(tmp_path: Path) -> None:
    call: BodyContext = invocation_context(tmp_path, "p", "01ABC", 1)

    class Pause:
        def __await__(self) -> Generator[None]:
            yield

    async def body() -> None:
        await Pause()

    coroutine = call.astep(body)
    contextvars.copy_context().run(coroutine.send, None)
    with scope("mine"):
        coroutine.close()
        assert run.prefix == "mine"


# --- imports --------------------------------------------------------------------------------------------------------

FRESH = """
import sys
from dreamlake.lakeshore.body import call, context
from dreamlake.lakeshore.client.thunk import thunk
from dreamlake.lakeshore.functions import source
def f(x): return x
def g(x): yield x
with context.scope("p"):
    assert call.call_local(f, call.body_kind(f), (1,), {}) == 1
    assert list(call.call_local(g, call.body_kind(g), (1,), {})) == [1]
source.note_source(f)
t = thunk(f, 1)
heavy = {"msgpack", "httpx", "aiosqlite", "numpy", "cloudpickle", "ulid", "torch", "PIL"} & set(sys.modules)
assert not heavy, heavy
"""


def test_a_local_call_loads_no_driver() -> None:
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
