"""The map of the code, lakeshore/README.md, names rooms and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

from layering_table import FLOORS

PACKAGE = Path(__file__).resolve().parents[1] / "lakeshore"
MAP = (PACKAGE / "README.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)$\n(.*?)(?=^## |\Z)", MAP, re.MULTILINE | re.DOTALL))


def test_the_rooms_are_those_of_the_layering_table() -> None:
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", SECTIONS["Rooms"], re.MULTILINE)
    rooms = {
        name.strip("/").replace("/", "."): int(floor) for floor, names in rows for name in re.findall(r"`(.+?)`", names)
    }
    assert rooms == {room: floor for floor, some in enumerate(FLOORS, 1) for room in some}


def test_every_file_on_the_map_exists() -> None:
    named = set(re.findall(r"`((?:\w+/)*\w+)`", SECTIONS["Where is it"]))
    named |= set(re.findall(r"`((?:\w+/)+\w+)`", SECTIONS["Three walks"]))
    missing = sorted(name for name in named if not (PACKAGE / f"{name}.py").exists())
    assert missing == []


def test_every_answer_of_the_map_is_a_file() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", SECTIONS["Where is it"], re.MULTILINE)[2:]
    assert len(rows) >= 26
    assert [question for question, answer in rows if not re.search(r"`\w+", answer)] == []
