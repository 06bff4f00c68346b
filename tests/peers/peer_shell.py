"""Runs in a peer's interpreter: reads scripts from stdin, one JSON document a line, and says what came of each.

A script has `plane`, `bodies`, `argv`, `say(value)` for what the test wants to know, and `raised(call, ...)`.
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import TYPE_CHECKING, Any

import peer_bodies

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from collections.abc import Callable


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str] | None:
    """The class and the text of what a call raises."""
    try:
        call(*args, **kwargs)
    except Exception as exc:
        return [type(exc).__name__, str(exc)]
    return None


def run(script: str, argv: list[Any], plane: dict[str, Any]) -> dict[str, Any]:
    said: list[Any] = []
    names = {"dls": dls, "bodies": peer_bodies, "argv": argv, "say": said.append, "raised": raised}
    try:
        names["plane"] = dls.HttpDispatch(**plane)
        exec(compile(script, "<script>", "exec"), names)
    except BaseException:
        return {"failed": traceback.format_exc()}
    return {"said": said}


for line in sys.stdin:
    sys.stdout.write(json.dumps(run(**json.loads(line))) + "\n")
    sys.stdout.flush()
