"""Every statement is served by the indexes that the comment above it names, also in a file that is full of rows."""

from __future__ import annotations

import ast
import re
import sqlite3
from contextlib import closing
from importlib.resources import files
from inspect import getsource
from typing import TYPE_CHECKING

import pytest

from dreamlake.lakeshore.planes.sqlite import queries

if TYPE_CHECKING:
    from collections.abc import Iterator

IN_PLAN = re.compile(r"^(?:SEARCH|SCAN) (\S+)(?: AS \S+)?(?: USING (.*?))?(?: \(|$)")
TABLES = ("invocation", "i", "o", "f", "outcome", "frame", "blob", "piece")

BUILT = {
    # Statements that functions build: the comment of the template, and the text.
    "_CLAIM": queries.claim(2, without_frames=False),
    "_WITHOUT_FRAMES": queries.claim(1, without_frames=True),
    "_CLAIMABLE": queries.claimable(1),
    "_COPIES": queries.copies(0),
}


def named_indexes() -> dict[str, set[str]]:
    """By statement: the indexes of the comment above it, "" for the table itself in the order of its rowid."""
    source = getsource(queries)
    lines = source.splitlines()
    named: dict[str, set[str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Name):
            continue
        above = node.lineno - 2
        comment = ""
        while lines[above].startswith("#"):
            comment = f"{lines[above][1:]}{comment}"
            above -= 1
        found = re.search(r"Index: (none|[\w, ]+)", comment)
        if found is not None:
            named[node.targets[0].id] = {name.strip() for name in found[1].split(",")}
    return named


@pytest.fixture(scope="module")
def db() -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(files("dreamlake.lakeshore.planes.sqlite").joinpath("schema.sql").read_text(encoding="utf-8"))
        yield db


def indexes_of(db: sqlite3.Connection, sql: str) -> set[str]:
    """What the plan of a statement uses, {"none"} if it reads no table."""
    marks = sql.count("?")
    used: set[str] = set()
    for *_, detail in db.execute(f"EXPLAIN QUERY PLAN {sql}", (None,) * marks):
        match = IN_PLAN.match(detail)
        if match is None or match[1] not in TABLES:
            continue
        how = match[2] or "walk"
        used.add("rowid" if "PRIMARY KEY" in how else how.split()[-1])
    return used or {"none"}


def test_every_statement_uses_the_indexes_that_its_comment_names(db: sqlite3.Connection) -> None:
    named = named_indexes()
    assert len(named) > 40, "the comments are not found any more"
    wrong: list[str] = []
    for name, indexes in named.items():
        sql = BUILT.get(name) or getattr(queries, name)
        if sql.startswith("PRAGMA") or "sqlite_sequence" in sql:
            continue
        used = indexes_of(db, sql)
        if name == "_WITHOUT_FRAMES":
            used -= {"invocation_ready", "rowid"}
        if used != indexes:
            wrong.append(f"{name}: {sorted(used)} instead of {sorted(indexes)}")
    assert not wrong, "\n".join(wrong)


def test_every_statement_has_a_comment() -> None:
    """But for those whose text depends on what is asked for, which no one index serves, and lists of columns."""
    free = {"_ROWS", "SUBMIT_COLUMNS", "OUTCOME_COLUMNS", "FRAME_COLUMNS", "CLAIMED_COLUMNS", "CLAIM_ROW_COLUMNS"}
    texts = {name for name, value in vars(queries).items() if isinstance(value, str) and not name.startswith("__")}
    assert texts - named_indexes().keys() == free
