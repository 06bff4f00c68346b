"""Proves that this interpreter imports the package from its virtual environment: `imports_wheel.py VENV`."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import dreamlake.lakeshore as dls


def main(venv: str) -> int:
    home = Path(dls.__file__).resolve()
    print(f"dreamlake-lakeshore {version('dreamlake-lakeshore')} from {home.parent}")
    if Path(venv).resolve() not in home.parents or "site-packages" not in home.parts:
        print(f"expected the installed wheel below {venv}: the source, or another installation, comes first")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
