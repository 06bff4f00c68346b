"""The guide's program for a fleet, as its reader runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mongo_kit import Place

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "fleet.py"


def test_two_servers_share_one_database(place: Place, tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("LAKESHORE_")}
    line = [sys.executable, "-W", "error", str(EXAMPLE), place.mongo, place.redis]
    env = kept | {"LAKESHORE_HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    ran = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, f"{ran.stdout}\n{ran.stderr}"
    assert "through two servers: [0, 2, 4, 6, 8]\n" in ran.stdout
    assert ran.stdout.count("the server ended with code 0\n") == 2
    assert ran.stdout.count("the worker ended with code 0\n") == 1
