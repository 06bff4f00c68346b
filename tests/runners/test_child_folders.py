"""After a failure the worker logs which folder holds the output of the child."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import child_bodies as bodies
import pytest
from child_kit import children

import dreamlake.lakeshore as dls

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, ...]]:
    pattern = r"the files of (\S+), with stdout\.log and stderr\.log, are kept in (.*)"
    return [found.groups() for line in caplog.messages if (found := re.fullmatch(pattern, line))]


async def test_the_folder_of_a_failure_is_named(
    queue: dls.Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dreamlake.lakeshore.worker")
    async with children(queue, tmp_path):
        assert await queue.call(dls.thunk(bodies.double, 2)) == 4
        id = await queue.submit(dls.thunk(bodies.exits_hard, 9))
        with pytest.raises(dls.InvocationFailed):
            await queue.result(id)
    assert said(caplog) == [(id, str(tmp_path / "work" / id))]
    assert (tmp_path / "work" / id / "stderr.log").read_text().strip() == "the last words"


async def test_where_none_stays_none_is_named(
    queue: dls.Queue, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dreamlake.lakeshore.worker")
    async with children(queue, tmp_path, rules={"keep": 0}):
        with pytest.raises(dls.InvocationFailed):
            await queue.call(dls.thunk(bodies.exits_hard, 9))
    assert said(caplog) == []
    assert list((tmp_path / "work").iterdir()) == []
