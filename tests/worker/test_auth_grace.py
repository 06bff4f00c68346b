"""A worker whose token is revoked while its bodies run: it ends with an error that names the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import httpx
import pytest
import worker_bodies as bodies
from helpers import wait_until

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.concurrency.portal import across
from dreamlake.lakeshore.server.app import create_app
from dreamlake.lakeshore.server.tokens import TokenFile, create_token, revoke_token

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio


async def test_a_worker_whose_heartbeats_are_refused_for_a_lease_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its only slot is taken, so it sends no claims that could be rejected."""
    tokens = tmp_path / "tokens"
    token = create_token(tokens, "app", "worker", "default")
    async with dls.Dispatch(tmp_path / "plane.db") as file:
        app = create_app(file, tokens=TokenFile(tokens))
        transport = httpx.ASGITransport(app=app)
        async with dls.HttpDispatch("http://127.0.0.1", token=token, transport=transport) as plane:
            queue, failed = dls.Queue("q", dispatch=plane), list[dls.NotAuthorized]()

            async def work() -> None:
                try:
                    await dls.run_worker(queue, lease=1.0, allow_modules=["worker_bodies"])
                except dls.NotAuthorized as exc:
                    failed.append(exc)

            with anyio.fail_after(60):
                async with anyio.create_task_group() as group:
                    group.start_soon(work)
                    id = await queue.submit(dls.thunk(bodies.sleeper, "s"))
                    await wait_until(lambda: "s began" in bodies.SEEN, 30, "the body")
                    revoke_token(tokens, "app")
        await across("asyncio", app.endpoint.close)
        assert len(failed) == 1
        assert "got one that is not known here" in str(failed[0])
        assert sum("refuses the heartbeats of worker" in line for line in caplog.messages) == 1
        assert (await dls.Queue("q", dispatch=file).get(id)).state in ("queued", "running")
