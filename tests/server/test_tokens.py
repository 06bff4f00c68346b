"""The file of tokens: what is in it, who is let in by it, and what becomes of it under many hands."""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from dreamlake.lakeshore import LakeshoreError
from dreamlake.lakeshore.server import tokens
from dreamlake.lakeshore.server.tokens import (
    ROLES,
    Caller,
    TokenError,
    TokenFile,
    create_token,
    read_tokens,
    revoke_token,
)

if TYPE_CHECKING:
    from pathlib import Path


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "tokens"


@pytest.fixture
def clock() -> Clock:
    return Clock()


def bearer(token: str) -> str:
    return f"Bearer {token}"


# --- what is in it --------------------------------------------------------------------------------------------------


def test_a_token_is_let_in_as_whom_it_was_made_for(path: Path) -> None:
    made = {role: create_token(path, f"the-{role}", role, "team") for role in ROLES}
    file = TokenFile(path)
    assert file.required
    for role, token in made.items():
        assert re.fullmatch(r"lks_[0-9A-Za-z_-]{43}", token)
        assert file.check(bearer(token)) == Caller(f"the-{role}", role, "team")
    assert len(set(made.values())) == len(file) == 3


def test_a_role_includes_those_before_it() -> None:
    allowed = {role: [other for other in ROLES if Caller("n", role, "ns").may(other)] for role in ROLES}
    assert allowed == {
        "producer": ["producer"],
        "worker": ["producer", "worker"],
        "admin": ["producer", "worker", "admin"],
    }


def test_the_token_itself_is_nowhere(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    token = create_token(path, "mine", "worker", "default")
    file = TokenFile(path)
    assert file.check(bearer(token))
    assert file.check(bearer(token[:-1] + "!")) is None
    (one,) = read_tokens(path)
    (line,) = path.read_text().splitlines()
    assert json.loads(line).keys() == {"name", "role", "namespace", "created", "salt", "sha256"}
    for text in (line, repr(file), repr(one), repr(one.caller), caplog.text):
        assert token[4:] not in text
    for text in (repr(file), repr(one), repr(vars(file)), caplog.text):
        for part in (one.hash, one.salt):
            assert part.hex() not in text
            assert repr(part) not in text
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", one.created)


def test_two_hashes_of_one_token_differ(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens.secrets, "token_urlsafe", lambda size: "x" * 43)
    token = create_token(path, "a", "worker", "default")
    assert create_token(path, "b", "worker", "default") == token
    one, other = read_tokens(path)
    assert one.hash != other.hash


def test_only_the_owner_can_read_what_is_made(path: Path) -> None:
    before = os.umask(0)
    try:
        create_token(path, "a", "worker", "default")
        create_token(path, "b", "worker", "default")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [one.name for one in path.parent.iterdir()] == ["tokens"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_that_others_reach_is_refused_with_the_fix(path: Path, mode: int) -> None:
    create_token(path, "a", "worker", "default")
    path.chmod(mode)
    sentence = (
        f"the token file {str(path)!r} can be read or written by others (mode {mode:o}): "
        f"close it with `chmod 600 {path}`"
    )
    with pytest.raises(TokenError, match=f"^{re.escape(sentence)}$") as caught:
        TokenFile(path)
    assert isinstance(caught.value, LakeshoreError)
    for edit in (lambda: create_token(path, "b", "worker", "default"), lambda: revoke_token(path, "a")):
        with pytest.raises(TokenError, match=f"^{re.escape(sentence)}$"):
            edit()
    path.chmod(0o600)
    assert [one.name for one in read_tokens(path)] == ["a"]


LINE = {"name": "a", "role": "worker", "namespace": "default", "salt": "00", "sha256": "00" * 32}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "lks_plain",
            (
                "expected a token as a JSON object in {file}, line 2, got something else: the file of a server holds "
                "no plain tokens; make one with `lakeshore token create`"
            ),
        ),
        ("[" * 100_000, "expected a token as a JSON object in {file}, line 2, got something else: "),
        ("17", "expected a token as a JSON object in {file}, line 2, got something else: "),
        ("{}", "{file}, line 2: expected the field `name`, a text"),
        (json.dumps(LINE | {"salt": None}), "{file}, line 2: expected the field `salt`, a text"),
        (json.dumps(LINE | {"salt": "secret"}), "{file}, line 2: non-hexadecimal number found in fromhex() arg at"),
        (json.dumps(LINE | {"sha256": "00"}), "{file}, line 2: expected `sha256` to be 64 hex digits"),
        (
            json.dumps(LINE | {"role": "root"}),
            "{file}, line 2: expected a role, one of producer, worker, admin, got 'root'",
        ),
        (json.dumps(LINE | {"name": "a b"}), "{file}, line 2: expected a token's name of 1 to 64 letters, digits and"),
        (
            json.dumps(LINE | {"namespace": "a/b"}),
            "{file}, line 2: expected a namespace of 1 to 200 characters without `/`, got 'a/b'",
        ),
    ],
)
def test_a_line_that_is_no_token_is_named_and_not_shown(path: Path, line: str, sentence: str) -> None:
    create_token(path, "good", "worker", "default")
    with path.open("a") as file:
        file.write(f"{line}\n")
    with pytest.raises(TokenError, match=f"^{re.escape(sentence.format(file=repr(str(path))))}") as caught:
        TokenFile(path)
    assert "plain" not in str(caught.value).replace("no plain tokens", "")
    assert "secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_bytes_that_are_no_text(path: Path) -> None:
    create_token(path, "a", "worker", "default")
    path.write_bytes(b"\xff\xfe" * 100)
    with pytest.raises(TokenError, match=r"^expected lines of JSON in the token file '.*', got bytes that are no text"):
        TokenFile(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(TokenError, match=f"^cannot read the tokens in {str(tmp_path)!r}: Is a directory$"):
        TokenFile(tmp_path)
    with pytest.raises(TokenError, match=f"^cannot open the token file {str(tmp_path)!r}: Is a directory$"):
        create_token(tmp_path, "a", "worker", "default")


def test_later_fields_are_left_alone_by_readers(path: Path) -> None:
    token = create_token(path, "a", "worker", "default")
    path.write_text("\n" + json.dumps(json.loads(path.read_text()) | {"expires": "never"}) + "\n\n")
    assert TokenFile(path).check(bearer(token)) == Caller("a", "worker", "default")


# --- who is let in --------------------------------------------------------------------------------------------------


def test_without_a_file_nobody_is_asked_for_a_token(path: Path) -> None:
    file = TokenFile(path)
    assert not file.required
    assert file  # a file of no tokens is not no file: tokens may come
    assert file.check(bearer("lks_" + "x" * 43)) is None
    assert not path.parent.exists()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "{token}",
        "Basic {token}",
        "Bearer lks_{token}",
        "Bearer {token}{token}",
        "Bearer {token},",
        "Bearer" + "\0{token}",
        "Bearer \ud800",
        "Bearer ü",
        "Bearer " + "x" * 100_000,
    ],
)
def test_headers_that_let_nobody_in(path: Path, header: str | None) -> None:
    token = create_token(path, "a", "worker", "default")
    assert TokenFile(path).check(header and header.replace("{token}", token)) is None


@pytest.mark.parametrize("header", ["bearer {token}", "BEARER  {token}", "Bearer {token} "])
def test_headers_as_others_write_them(path: Path, header: str) -> None:
    token = create_token(path, "a", "worker", "default")
    assert TokenFile(path).check(header.replace("{token}", token))


def test_every_hash_is_compared_whichever_it_is(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [create_token(path, f"t{n}", "worker", "default") for n in range(5)]
    file = TokenFile(path)
    compared: list[bytes] = []

    def compare(hash: bytes, other: bytes) -> bool:
        compared.append(hash)
        return hash == other

    monkeypatch.setattr(tokens, "compare_digest", compare)
    for token in (made[0], made[2], made[4], "lks_none"):
        compared.clear()
        file.check(bearer(token))
        assert compared == [one.hash for one in read_tokens(path)]


# --- while a server runs --------------------------------------------------------------------------------------------


def test_a_new_token_is_taken_at_once(path: Path, clock: Clock) -> None:
    file = TokenFile(path, clock=clock)
    assert not file.required
    token = create_token(path, "a", "worker", "default")
    assert file.check(bearer(token)) == Caller("a", "worker", "default")
    assert file.required
    other = create_token(path, "b", "admin", "team")
    assert file.check(bearer(other)) == Caller("b", "admin", "team")
    assert file.check(bearer(token)) == Caller("a", "worker", "default")


def test_the_first_token_ends_the_openness_within_a_second(path: Path, clock: Clock) -> None:
    file = TokenFile(path, clock=clock)
    create_token(path, "a", "worker", "default")
    clock.now = tokens.FILE_CHECK_INTERVAL
    assert file.required


def test_a_revoked_token_is_refused_within_a_second(path: Path, clock: Clock) -> None:
    token, other = (create_token(path, name, "worker", "default") for name in "ab")
    file = TokenFile(path, clock=clock)
    assert revoke_token(path, "a")
    clock.now = tokens.FILE_CHECK_INTERVAL * 0.9
    assert file.check(bearer(token))  # not looked at for every request
    clock.now = tokens.FILE_CHECK_INTERVAL
    assert file.check(bearer(token)) is None
    assert file.check(bearer(other))
    assert not revoke_token(path, "a")


def test_requests_do_not_look_at_the_file_more_than_once_a_second(
    path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = create_token(path, "a", "worker", "default")
    file = TokenFile(path, clock=clock)
    looks: list[float] = []
    monkeypatch.setattr(tokens, "_signature", lambda path: looks.append(clock.now))
    for _ in range(80):
        clock.now += tokens.FILE_CHECK_INTERVAL / 8
        assert file.required
        file.check(bearer(token))
    assert len(looks) == 10


@pytest.mark.parametrize("how", ["revoked", "deleted"])
def test_when_the_last_token_goes_nobody_is_let_in(path: Path, clock: Clock, how: str) -> None:
    token = create_token(path, "a", "worker", "default")
    file = TokenFile(path, clock=clock)
    if how == "revoked":
        revoke_token(path, "a")
    else:
        path.unlink()
    clock.now = tokens.FILE_CHECK_INTERVAL
    assert file.check(bearer(token)) is None
    assert file.required


def test_a_file_that_broke_leaves_the_tokens_as_they_were_and_is_logged_once(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    token = create_token(path, "a", "worker", "default")
    good = path.read_text()
    file = TokenFile(path, clock=clock)
    path.write_text(good + "half a li")
    for _ in range(5):
        clock.now += tokens.FILE_CHECK_INTERVAL
        assert file.check(bearer(token))
        assert file.check(bearer("lks_other")) is None
    (record,) = caplog.records
    assert record.name == "dreamlake.lakeshore.server"
    assert record.levelno == logging.ERROR
    assert record.getMessage().startswith(f"expected a token as a JSON object in {str(path)!r}, line 2, ")
    assert record.getMessage().endswith("; the tokens stay as they were")
    path.write_text(good.replace('"a"', '"b"'))
    clock.now += tokens.FILE_CHECK_INTERVAL
    assert file.check(bearer(token)) == Caller("b", "worker", "default")


def test_a_file_that_was_opened_to_others_is_logged_once_and_taken_when_closed(
    path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    create_token(path, "a", "worker", "default")
    file = TokenFile(path, clock=clock)
    token = create_token(path, "b", "worker", "default")
    path.chmod(0o644)
    for _ in range(3):
        clock.now += tokens.FILE_CHECK_INTERVAL
        assert file.check(bearer(token)) is None
    assert [record.getMessage().count("chmod 600") for record in caplog.records] == [1]
    path.chmod(0o600)
    clock.now += tokens.FILE_CHECK_INTERVAL
    assert file.check(bearer(token)) == Caller("b", "worker", "default")


# --- editing --------------------------------------------------------------------------------------------------------


def test_a_name_is_taken_once(path: Path) -> None:
    token = create_token(path, "a", "worker", "default")
    with pytest.raises(
        TokenError,
        match=f"^a token named 'a' is in {re.escape(repr(str(path)))} already: revoke it first, or give another name$",
    ):
        create_token(path, "a", "admin", "team")
    assert TokenFile(path).check(bearer(token)) == Caller("a", "worker", "default")


@pytest.mark.parametrize(
    ("name", "role", "namespace"),
    [
        ("", "worker", "default"),
        ("a\nb", "worker", "default"),
        ("x" * 65, "worker", "default"),
        ("a", "Worker", "default"),
        ("a", "worker", ""),
        ("a", "worker", "a/b"),
        ("a", "worker", "a\x1b"),
        ("a", "worker", "n" * 201),
    ],
)
def test_what_no_token_is_made_of_is_refused_before_anything_is_made(
    path: Path, name: str, role: str, namespace: str
) -> None:
    with pytest.raises(ValueError, match=r"^expected a .*, got '"):
        create_token(path, name, role, namespace)
    assert not path.parent.exists()


def test_many_editors_lose_nothing(path: Path) -> None:
    made: dict[str, str] = {}

    def edit(number: int) -> None:
        for turn in range(5):
            name = f"{number}-{turn}"
            made[name] = create_token(path, name, "worker", "default")
            if turn % 2:
                revoke_token(path, name)

    editors = [threading.Thread(target=edit, args=(number,)) for number in range(6)]
    for editor in editors:
        editor.start()
    for editor in editors:
        editor.join()
    file = TokenFile(path)
    assert {caller.name for token in made.values() if (caller := file.check(bearer(token)))} == {
        f"{number}-{turn}" for number in range(6) for turn in (0, 2, 4)
    }
    assert [one.name for one in path.parent.iterdir()] == ["tokens"]


def test_a_file_that_cannot_be_written_stays_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create_token(path, "a", "worker", "default")
    before = path.read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tokens.os, "replace", full)
    with pytest.raises(TokenError, match=r"^cannot write the token file '.*': No space left on device$"):
        create_token(path, "b", "worker", "default")
    assert path.read_bytes() == before
    assert [one.name for one in path.parent.iterdir()] == ["tokens"]


def test_a_link_to_the_file_stays_one(path: Path, tmp_path: Path) -> None:
    create_token(path, "a", "worker", "default")
    link = tmp_path / "link"
    link.symlink_to(path)
    token = create_token(link, "b", "worker", "default")
    assert link.is_symlink()
    assert TokenFile(path).check(bearer(token)) == Caller("b", "worker", "default")
