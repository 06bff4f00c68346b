"""Installs the old peers that tests/peers runs against: `python tests/peers/install_peers.py DIR`.

Each version gets a virtual environment `DIR/VERSION` of its own; one that is complete is left as it is. Afterwards
LAKESHORE_TEST_PEERS=DIR lets the tests find them.
"""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

VERSIONS = ("0.3.7", "0.5.0")
BESIDE = ("numpy>=2.0",)  # arrays cross the wire both ways


def install(folder: Path, version: str) -> None:
    """The environment of one version. The file `complete` is written last and says what is in it."""
    home, wanted = folder / version, (f"dreamlake-lakeshore=={version}", *BESIDE)
    complete = home / "complete"
    if complete.exists() and complete.read_text() == "\n".join(wanted):
        return
    venv.create(home, clear=True, with_pip=True, symlinks=True)
    python = home / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted], check=True)
    complete.write_text("\n".join(wanted))


def main(*args: str) -> None:
    if len(args) != 1 or args[0].startswith("-"):
        sys.exit(__doc__)
    for version in VERSIONS:
        install(Path(args[0]).resolve(), version)


if __name__ == "__main__":
    main(*sys.argv[1:])
