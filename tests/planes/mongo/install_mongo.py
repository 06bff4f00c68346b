"""Installs the MongoDB-compatible server of the fleet plane's tests: `python tests/planes/mongo/install_mongo.py DIR`.

It gets a virtual environment DIR of its own, since it is no dependency of this package; one that is complete is left as
it is. Afterwards LAKESHORE_TEST_SECANTUS=DIR/bin/secantusd-py lets the tests find it.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

WANTED = "secantusdb==0.7.0b3"


def install(home: Path) -> None:
    """The environment. The file `complete` is written last and says what is in it."""
    complete = home / "complete"
    if complete.exists() and complete.read_text() == WANTED:
        return
    venv.create(home, clear=True, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", WANTED], check=True)
    complete.write_text(WANTED)


def main(*args: str) -> None:
    if len(args) != 1 or args[0].startswith("-"):
        sys.exit(__doc__)
    install(Path(args[0]).resolve())


if __name__ == "__main__":
    main(*sys.argv[1:])
