"""Run each body in a process or a container of its own, for code that leaks, crashes or must be killed for sure.

    python examples/children.py                       a process for each body
    python examples/children.py docker IMAGE          a container for each body; the image has this package installed

The runner is an option of the worker; the function and its caller do not change.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import dreamlake.lakeshore as dls


@dls.udf(queue="children")
def where() -> int:
    return os.getpid()


@dls.udf(queue="children")
def crash() -> None:
    """Ends its own process as a fault in a C library would. The worker goes on."""
    os.kill(os.getpid(), signal.SIGKILL)


def main(runner: str = "process", image: str = "") -> None:
    with tempfile.TemporaryDirectory(prefix="lakeshore-") as home:
        os.environ["LAKESHORE_HOME"] = home
        command = [sys.executable, "-m", "dreamlake.lakeshore", "worker", "start", "--queue", "children"]
        command += ["--runner", runner, "--workdir", f"{home}/work"]
        if image:
            command += ["--runner-option", f"image={image}"]
        worker = subprocess.Popen(command, cwd=Path(__file__).parent)
        try:
            print("each body has a process of its own:", where() != where())
            try:
                crash()
            except dls.InvocationFailed as exc:
                print("the crash has an outcome:", exc.state)
            print("the worker goes on:", where() != worker.pid)
        finally:
            worker.terminate()
            print(f"the worker ended with code {worker.wait(timeout=60)}")


if __name__ == "__main__":
    # The functions of a script are pickled; those of a module are imported by their name. Children import them.
    importlib.import_module(Path(__file__).stem).main(*sys.argv[1:])
