"""A function over files that never sees a path: it reads and writes keys, and the scope around it says where they lie.

    python examples/data_udf.py

The same function runs here and through a queue; what it returns, the keys of what it wrote, is the same.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import anyio

import dreamlake.lakeshore as dls


@dls.udf
def index_words(source: str) -> list[str]:
    """Keys in, keys out: `dls.run` turns a key into a local path, below the scope's prefix and the worker's root."""
    words = dls.run.read(source).read_text(encoding="utf-8").split()
    index = {word: [at for at, other in enumerate(words) if other == word] for word in sorted(set(words))}
    dls.run.write("process/index.json").write_text(json.dumps(index), encoding="utf-8")
    dls.run.write("process/size.txt").write_text(f"{len(index)} of {len(words)}\n", encoding="utf-8")
    # A key that was written and is not returned is an error: nobody would know of it.
    return ["process/index.json", "process/size.txt"]


@dls.udf
def forgetful(source: str) -> str:
    dls.run.write("process/forgotten.txt").write_text(source, encoding="utf-8")
    return source


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as folder:
        root = Path(folder) / "root"
        for scene, text in (("0007", "to be or not to be"), ("0008", "the one and the other")):
            source = root / "scenes" / scene / "source" / "words.txt"
            source.parent.mkdir(parents=True)
            source.write_text(text, encoding="utf-8")

        # Here: the call is an ordinary one, and the root is the scope's.
        with dls.scope("scenes/0007", root=root):
            print("here:  ", index_words("source/words.txt"), dls.run.read("process/size.txt").read_text().strip())
            try:
                forgetful("source/words.txt")
            except dls.KeyContractError as exc:
                print("refused:", exc)

        # In a worker: the prefix travels with the invocation, the root is the worker's own.
        async with dls.Dispatch(Path(folder) / "lakeshore.db") as plane, anyio.create_task_group() as group:
            queue = dls.Queue("scenes", dispatch=plane)
            stop = anyio.Event()
            group.start_soon(lambda: dls.run_worker(queue, root=root, stop=stop))
            with dls.scope("scenes/0008"):
                keys = await queue.call(dls.thunk(index_words, "source/words.txt"))
            with dls.scope("scenes/0008", root=root):
                print("worker:", keys, dls.run.read("process/size.txt").read_text().strip())
            stop.set()

        print("files:")
        for path in sorted(root.rglob("*.*")):
            print("  ", path.relative_to(root).as_posix())


if __name__ == "__main__":
    anyio.run(main)
