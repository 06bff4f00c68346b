"""Keys: their one spelling, the root they never leave, and the rule that written keys are returned."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamlake.lakeshore.body.keys import (
    Ledger,
    Manifest,
    ReturnedKeys,
    check_returned,
    join_prefix,
    normalise_key,
    resolve,
)
from dreamlake.lakeshore.errors import KeyContractError, LakeshoreError

RULE = "a key is a relative path such as 'process/mesh.ply'"


@pytest.mark.parametrize(
    ("key", "normal"),
    [
        ("a", "a"),
        ("./a", "a"),
        ("a/", "a"),
        ("a//b", "a/b"),
        ("a/../b", "b"),
        (".", "."),
        ("a/..", "."),
        ("../a", "../a"),
        ("~/a", "~/a"),
        ("frames/t:1.png", "frames/t:1.png"),
        ("é" * 127, "é" * 127),
        ("x" * 255, "x" * 255),
    ],
)
def test_a_key_has_one_spelling(key: str, normal: str) -> None:
    assert normalise_key(key) == normal
    assert normalise_key(normal) == normal


@pytest.mark.parametrize(
    ("key", "fault"),
    [
        ("", "key '' is empty: "),
        ("/etc/passwd", "key '/etc/passwd' is absolute; leave out the leading part that "),
        ("//x", "key '//x' is absolute"),
        ("a\0b", "key 'a\\x00b' holds a NUL character: "),
        ("..\\x", "key '..\\\\x' holds a backslash, which is a separator on some systems only; write '/' between"),
        ("C:/x", "key 'C:/x' begins with a drive letter: "),
        ("c:x", "key 'c:x' begins with a drive letter: "),
        ("./C:/x", "key './C:/x' begins with a drive letter: "),
        ("a/../C:x", "key 'a/../C:x' begins with a drive letter: "),
        ("x" * 256, "has a part of 256 bytes, more than the 255 that file systems take: "),
        ("é" * 150, "has a part of 300 bytes, more than the 255"),
        ("a/" * 600, "is 1200 bytes long, more than 1024: "),
        ("a\ud800", "holds half a surrogate pair, which UTF-8 cannot write: "),
    ],
)
def test_R115_what_is_no_key_is_refused_by_name(key: str, fault: str) -> None:
    with pytest.raises(KeyContractError) as caught:
        normalise_key(key)
    assert fault in str(caught.value)
    assert str(caught.value).endswith(RULE)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(("key", "shown"), [(None, "None of type NoneType"), (b"a", "b'a' of type bytes"), (7, "7 of")])
def test_a_key_is_a_str(key: object, shown: str) -> None:
    with pytest.raises(KeyContractError) as caught:
        normalise_key(key)
    assert str(caught.value).startswith(f"expected a key, got {shown}")


def test_a_path_is_no_key() -> None:
    with pytest.raises(KeyContractError, match=r"got PosixPath\('a'\) of type PosixPath: a key is .*, as a str"):
        normalise_key(Path("a"))


@pytest.mark.parametrize(
    ("prefix", "sub", "place"),
    [
        ("", "", ""),
        ("", "a", "a"),
        ("a", "", "a"),
        ("a/b", "../c", "a/c"),
        ("a", "..", ""),
        ("a", ".", "a"),
        ("a", "../../b", None),
        ("", "..", None),
        ("..", "a", None),
        ("a", "/b", None),
        ("a\0", "b", None),
        ("a", "../C:x", None),
    ],
)
def test_prefixes_join_inside_the_root(prefix: str, sub: str, place: str | None) -> None:
    if place is not None:
        assert join_prefix(prefix, sub) == place
        return
    with pytest.raises(KeyContractError):
        join_prefix(prefix, sub)


def test_a_climb_out_of_the_root_says_so(tmp_path: Path) -> None:
    assert resolve(tmp_path, "a/b", "../../c") == tmp_path / "c"
    assert resolve(tmp_path, "", ".") == tmp_path
    with pytest.raises(KeyContractError) as caught:
        resolve(tmp_path, "a/b", "../../../c")
    assert str(caught.value) == (
        "key '../../../c' leads out of the root (prefix 'a/b'): '..' may climb out of the prefix, never out of the root"
    )


# --- symbolic links -------------------------------------------------------------------------------------------------


def test_R115_a_link_never_leads_out_of_the_root(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "a").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret").write_text("s")
    (root / "folder").symlink_to(outside)
    (root / "file").symlink_to(outside / "secret")
    (root / "dangling").symlink_to(outside / "not there yet")
    (root / "relative").symlink_to("../outside")
    (root / "a" / "chain").symlink_to("../folder")
    (root / "sibling").symlink_to(tmp_path / "root-of-another")  # whose name begins like the root's
    for key in ("folder", "folder/secret", "file", "dangling", "relative/secret", "a/chain/secret", "sibling/x"):
        for prefix, spelled in (("", key), ("a", f"../{key}"), (os.path.dirname(key), os.path.basename(key))):
            with pytest.raises(KeyContractError) as caught:
                resolve(root, prefix, spelled)
            assert f"leads out of the root {str(root)!r} through a symbolic link, to " in str(caught.value)


def test_a_link_inside_the_root_and_a_linked_root_are_followed(tmp_path: Path) -> None:
    root, alias = tmp_path / "root", tmp_path / "alias"
    (root / "a").mkdir(parents=True)
    (root / "b").symlink_to("a")
    (root / "loop").symlink_to("loop")
    alias.symlink_to(root)
    assert resolve(root, "", "b/x") == root / "b" / "x"
    assert resolve(alias, "b", "x") == alias / "b" / "x"
    assert resolve(root, "", "loop") == root / "loop"
    assert not (root / "loop").exists()


def test_the_file_system_root_may_be_the_root() -> None:
    assert resolve(Path("/"), "", "tmp/x") == Path("/tmp/x")


parts = st.sampled_from(["..", ".", "", "a", "b", "link", "up", "~", "C:", "x" * 256, "\\", "\0", "é"])
paths = st.one_of(st.text(max_size=20), st.lists(parts, max_size=8).map("/".join))


@pytest.fixture(scope="module")
def linked_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("keys")
    root = base / "root"
    (root / "a" / "b").mkdir(parents=True)
    (root / "link").symlink_to(base)
    (root / "a" / "up").symlink_to("../..")
    (root / "b").symlink_to("a")
    return root


@given(prefix=paths, key=paths)
def test_no_prefix_and_key_escape_the_root(linked_root: Path, prefix: str, key: str) -> None:
    try:
        path = resolve(linked_root, prefix, key)
    except KeyContractError:
        return
    assert path.is_relative_to(linked_root)
    assert ".." not in path.parts
    assert Path(os.path.realpath(path)).is_relative_to(os.path.realpath(linked_root))


@given(st.text())
def test_a_normal_key_stays_as_it_is(key: str) -> None:
    try:
        normal = normalise_key(key)
    except KeyContractError:
        return
    assert normalise_key(normal) == normal
    assert normal
    assert not normal.startswith("/")


# --- return-your-keys -----------------------------------------------------------------------------------------------


def ledger(*keys: str) -> Ledger:
    made = Ledger()
    for key in keys:
        made.record(key, key)
    return made


@pytest.mark.parametrize(
    "value",
    [
        "a",
        "./a",
        ["a"],
        ("x", ["a"]),
        {"mesh": "a"},
        {"mesh": [{"deep": ("a", 3)}]},
        ["a", "/data/x", "", "C:\\x", "not \0 a key", 7, None],
        {"a": "a"},
    ],
)
def test_a_written_key_may_be_anywhere_in_the_value(value: Any) -> None:
    check_returned(ledger("a"), value)


@pytest.mark.parametrize("value", [None, 7, "b", [], {"a": "b"}, {"a": 1}, b"a", {"a"}, Path("a"), "a/b", "A"])
def test_a_written_key_that_is_not_returned_is_an_error(value: Any) -> None:
    with pytest.raises(
        KeyContractError, match=r"^the function wrote 'a' through dls.run.write but returned no such key"
    ):
        check_returned(ledger("a"), value)


def test_the_error_names_the_missing_keys_what_came_and_the_fix() -> None:
    with pytest.raises(KeyContractError) as caught:
        check_returned(ledger("a", "b", "c"), ["b", "/data"])
    assert str(caught.value) == (
        "the function wrote 'a', 'c' through dls.run.write but returned no such key (strings it returned: '/data', 'b'): "
        "return each written key, not its path, alone or in a list, tuple or dict's values"
    )
    with pytest.raises(KeyContractError, match="strings it returned: '0', '1', '2', '3', '4' and 3 more"):
        check_returned(ledger("a"), [str(n) for n in range(8)])
    with pytest.raises(KeyContractError, match="strings it returned: none"):
        check_returned(ledger("a"), 1)


def test_the_reverse_is_never_enforced() -> None:
    check_returned(ledger(), ["a", "/x", ""])
    check_returned(Ledger(), object())


def test_a_value_that_holds_itself_ends() -> None:
    value: list[Any] = ["b"]
    value.append(value)
    value.append({"again": value})
    with pytest.raises(KeyContractError):
        check_returned(ledger("a"), value)
    check_returned(ledger("b"), value)


def test_a_deep_value_needs_no_recursion() -> None:
    value: Any = "a"
    for _ in range(50_000):
        value = [value]
    check_returned(ledger("a"), value)


def test_a_key_of_an_inner_scope_counts_as_written_and_as_seen_from_the_call() -> None:
    written = Ledger()
    written.record("x", "p/inner/x")
    for value in ("x", "inner/x", "../p/inner/x"):
        check_returned(written, value, "p")
    for value in ("p/inner/x", "inner", "inner/y"):
        with pytest.raises(KeyContractError):
            check_returned(written, value, "p")


def test_generators_return_the_union_of_their_items() -> None:
    written = Ledger()
    returned = ReturnedKeys(written)
    returned.add(["early"])  # yielded before it is written
    for key in ("early", "late"):
        written.record(key, key)
    with pytest.raises(KeyContractError, match=r"^function 'f' wrote 'late' through dls.run.write but yielded no such"):
        returned.check("function 'f'", "yield")
    returned.add({"n": 1})
    returned.add({"k": "late"})
    returned.check("function 'f'", "yield")


def test_a_ledger_is_shared_by_threads() -> None:
    written = Ledger()

    def work(n: int) -> None:
        for i in range(500):
            written.record(f"{n}/{i}", "")

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written.entries()) == 4000


# --- manifests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("items", "manifest"),
    [
        ([], None),
        (["a", "b"], ["a", "b"]),
        (["a", ["b", "c"], ("d",)], ["a", "b", "c", "d"]),
        ([{"x": "1"}, {"y": "2"}, {"x": "3"}], {"x": "3", "y": "2"}),
        ([{"x": "1"}, "a", {"y": "2"}], ["a", "1", "2"]),
        ([[]], []),
        ([{}], {}),
        ([0], None),
        (["a", 0, "b"], None),
        (["a", None], None),
        ([["a", 1]], None),
        ([{"x": 1}], None),
        ([{1: "x"}], None),
        ([{"x": ["a"]}], None),
        ([b"a"], None),
        ([{"a"}], None),
    ],
)
def test_a_manifest_is_made_of_strings_only(items: list[Any], manifest: Any) -> None:
    merged = Manifest()
    for item in items:
        merged.add(item)
    assert merged.value() == manifest


def test_a_manifest_copies_what_it_saw() -> None:
    merged, item = Manifest(), {"x": "1"}
    merged.add(item)
    first = merged.value()
    merged.add({"y": "2"})
    assert (first, item) == ({"x": "1"}, {"x": "1"})


def test_the_errors_are_of_the_house() -> None:
    assert issubclass(KeyContractError, (LakeshoreError, ValueError))
