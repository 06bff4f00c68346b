"""Count the words of a part of Python's own library, in a worker that is another process, and print a table.

    python examples/quickstart.py

The script starts the worker itself, with the same command that you would type in another terminal.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import dreamlake.lakeshore as dls


@dls.udf(queue="words")
def count_words(path: str) -> dict[str, Any]:
    """The body runs in the worker; its arguments and its result travel there and back as data."""
    text = Path(path).read_text(encoding="utf-8")
    words = Counter(re.findall(r"[a-z]{4,}", text.lower()))
    word, times = words.most_common(1)[0]
    return {
        "lines": text.count("\n"),
        "words": words.total(),
        "favourite": f"{word} ({times})",
        "worker": os.getpid(),
    }


def main() -> None:
    # Everything of this example lies in a folder of its own, which both processes find through the environment.
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        os.environ["LAKESHORE_HOME"] = home
        print(f"the plane is {dls.default_dispatch()}, this is process {os.getpid()}")

        # Functions of a script are not importable elsewhere, so they cross by value; those of a module by their name.
        # With LAKESHORE_URL set the worker would refuse the former: see remote.py.
        command = [sys.executable, "-m", "dreamlake.lakeshore", "worker", "start", "--queue", "words"]
        worker = subprocess.Popen([*command, "--concurrency", "4"])
        try:
            fan_out()
        finally:
            worker.terminate()  # it finishes what it runs, and ends
            print(f"the worker ended with code {worker.wait(timeout=60)}")


def fan_out() -> None:
    files = sorted(Path(os.__file__).parent.glob("[a-b]*.py"))

    # Each submit returns at once: with an id, a plain string that any process may wait for, now or after a restart.
    ids = {path.name: count_words.submit(str(path)) for path in files}
    print(f"{len(ids)} invocations are queued, such as {ids[files[0].name]}")

    queue = dls.SyncQueue("words")
    rows: list[dict[str, Any]] = [{"module": name, **queue.result(id, timeout=60)} for name, id in ids.items()]
    print_table(sorted(rows, key=lambda row: row["words"], reverse=True))
    print(f"{sum(row['words'] for row in rows)} words in {len(rows)} modules")


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = {name: max(len(str(row[name])) for row in [*rows, {name: name}]) for name in rows[0]}
    for row in [dict(zip(columns, columns, strict=True)), *rows]:
        print("  ".join(str(row[name]).ljust(width) for name, width in columns.items()).rstrip())


if __name__ == "__main__":
    main()
