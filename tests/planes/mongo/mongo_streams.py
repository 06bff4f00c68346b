"""A live stream of a plane, from one that writes to one that reads, and what can be seen of the Redis between them."""

from __future__ import annotations

import logging
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio
from helpers import wait_until
from mongo_kit import fence, fresh_ns

from dreamlake.lakeshore.planes.contract.operations import Claimed, FinalFrame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest
    from mongo_kit import Place
    from mongo_services import Service

    import dreamlake.lakeshore as dls


def admin(service: Service, **options: Any) -> Any:
    """A blocking client of ours."""
    import redis

    return redis.Redis(**{"port": service.port, "decode_responses": True, **options})


def subscribers(service: Service) -> int:
    """Connections that wait for something: messages of a channel, or entries of a stream."""
    client = admin(service)
    try:
        infos = client.client_list()
    finally:
        client.close()
    waiting = {"xread", "subscribe", "psubscribe", "ssubscribe"}
    return sum(info["cmd"].partition("|")[0] in waiting or int(info["sub"]) + int(info["psub"]) > 0 for info in infos)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the package has logged about Redis, from warnings on."""
    return [
        record.getMessage()
        for record in caplog.records
        if record.name.startswith("dreamlake.lakeshore")
        and record.levelno >= logging.WARNING
        and "redis" in record.getMessage().lower()
    ]


class Stream:
    """An invocation that is running on one plane, and read live on another."""

    def __init__(self, writer: dls.MongoDispatch, claimed: Claimed) -> None:
        self.writer, self.claimed, self.sent = writer, claimed, 0
        self.got: list[tuple[int, bytes]] = []
        self.closed = False

    async def send(self, count: int = 1, size: int = 10) -> None:
        for _ in range(count):
            frame = (b"%d " % self.sent).ljust(size, b".")
            assert await self.writer.append(fence(self.claimed), self.sent, [frame]) == (1, 0)
            self.sent += 1

    async def read(self, reader: dls.MongoDispatch) -> None:
        while not self.closed:
            page = await reader.next_page(self.claimed.id, len(self.got) - 1)
            self.got += page.frames
            self.closed = page.closed

    async def page(self) -> int:
        """How many frames somebody sees who comes only now, without a gap."""
        frames = (await self.writer.page(self.claimed.id)).frames
        assert [(seq, int(frame.split()[0])) for seq, frame in frames] == [(n, n) for n in range(len(frames))]
        return len(frames)

    async def arrives(self, seconds: float = 20.0) -> float:
        """Wait until all that was sent has been read; the seconds that it took."""
        began = time.monotonic()
        await wait_until(lambda: len(self.got) >= self.sent, seconds, f"{self.sent} frames")
        return time.monotonic() - began

    async def end(self) -> None:
        await self.writer.finish(fence(self.claimed), "succeeded", final=FinalFrame(self.sent, b"END"))

    def check(self) -> None:
        assert self.closed
        assert [seq for seq, _ in self.got] == list(range(self.sent + 1))
        assert [int(frame.split()[0]) for _, frame in self.got[:-1]] == list(range(self.sent))


async def begun(writer: dls.MongoDispatch) -> Stream:
    """A new invocation that is running."""
    await writer.submit("q", b"body")
    (claimed,) = await writer.claim(["q"], "w", lease=600.0)
    return Stream(writer, claimed)


@asynccontextmanager
async def streaming(place: Place, redis_url: str | None) -> AsyncIterator[Stream]:
    """Two planes, one that writes and one that reads; at the end the stream is ended, read whole, and judged."""
    place, ns = place._replace(redis=redis_url), fresh_ns()
    async with place.plane(ns) as writer, place.plane(ns) as reader:
        stream = await begun(writer)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.read, reader)
            yield stream
            await stream.end()
            with anyio.fail_after(30):
                await wait_until(lambda: stream.closed, 30, "the end of the stream")
        stream.check()
