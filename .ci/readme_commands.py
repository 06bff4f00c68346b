"""Writes the README's install-and-run commands, one a line, as they stand there: `readme_commands.py README.md OUT`.

They are the lines of its shell blocks that begin with an editable install. There must be exactly the two that a
stranger types: the first example, and the tests.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```(?:sh|bash|shell|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def commands(readme: str) -> list[str]:
    """The commands in order; a prompt before one is not part of it."""
    lines = [line.strip().removeprefix("$ ") for block in BLOCK.findall(readme) for line in block.splitlines()]
    return [line for line in lines if line.startswith("pip install -e ")]


def main(readme: str, out: str) -> int:
    found = commands(Path(readme).read_text(encoding="utf-8"))
    for line in found:
        print(line)
    if len(found) != 2 or "examples/quickstart.py" not in found[0] or "pytest" not in found[1]:
        print(
            f"expected two lines `pip install -e ...` in the shell blocks of {readme}, the first one running "
            f"examples/quickstart.py and the second one pytest; found {len(found)}"
        )
        return 1
    Path(out).write_text("".join(f"{line}\n" for line in found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
