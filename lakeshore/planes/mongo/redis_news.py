"""Redis: what makes the plane quick across servers, and nothing that it needs.

After a change its news is published on one channel of the namespace, with the outcome of what ended where that is small.
Frames are also added, under their own numbers, to a stream for each invocation, whose key tells it from an earlier one of
its id: readers of a live journal are served from memory. All of it is in the database first. A failure of Redis is said
once, and swallowed: until it is back nothing is sent to it but now and then.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import anyio
from redis import asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError, ResponseError

from ...concurrency.tasks import spawn
from ...errors import LakeshoreError
from .connection import shown_url
from .redis_messages import Told, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..contract.news import News
    from .incarnation import Incarnations

__all__ = ["RedisNews"]

logger = logging.getLogger("dreamlake.lakeshore.mongo")

PATIENCE = 2.0
"""Seconds within which Redis answers, or counts as gone."""
AGAIN = 1.0
"""Seconds after a failure before which nothing is sent."""
MOST = 1000
"""Frames that a stream keeps, about."""
LARGE = 64 * 1024
"""Bytes above which a frame is read from the database only."""
TTL = 900
"""Seconds after the last frame for which a stream is kept."""
BACKLOG = 10_000
"""Changes that wait to be sent; beyond that they are dropped, and readers find them in the database."""
HEARD = 1000
"""News that are handed on at once, about: they may come as fast as they are read."""
_FAILURES = (RedisError, OSError, EOFError, TimeoutError, ValueError, TypeError, RuntimeError)


class RedisNews:
    """One engine's connection to Redis. Made, used and closed on one event loop of asyncio."""

    def __init__(self, url: str, uid: str, ns: str, incarnations: Incarnations) -> None:
        self._incarnations = incarnations
        self._prefix, self._name = f"lakeshore:{uid}:{ns}", shown_url(url)
        client: Any = redis.Redis
        self._client: Any = client.from_url(
            url,
            socket_timeout=PATIENCE,
            socket_connect_timeout=PATIENCE,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._heard: Any = None
        self._waiting: list[tuple[str, Any]] = []
        self._sending: anyio.Event | None = None
        self._until = 0.0
        self._refuses = False
        """Whether it refused what was to be written: it has answered when it takes such again, not before."""
        self.down = False
        """Whether it failed, and has not answered since."""

    # What goes out

    def tell(self, news: Iterable[News], incarnations: Mapping[str, str] | None = None) -> None:
        """Publish news soon; outcomes only of invocations whose incarnations, as known before they ended, are given."""
        known = incarnations or {}
        self._send([("news", Told(one, None if one.name is None else known.get(one.name))) for one in news])

    def add(self, id: str, first_seq: int, frames: Sequence[bytes]) -> None:
        """Add frames that the database has, soon."""
        self._send(
            [("frame", (id, first_seq + place, data)) for place, data in enumerate(frames) if len(data) <= LARGE]
        )

    def _send(self, changes: list[tuple[str, Any]]) -> None:
        if not changes or time.monotonic() < self._until or len(self._waiting) > BACKLOG:
            return
        self._waiting += changes
        if self._sending is None:
            self._sending = anyio.Event()
            spawn(self._pump, self._pumped)

    def _pumped(self) -> None:
        if self._sending is not None:
            self._sending.set()
        self._sending = None

    async def _pump(self) -> None:
        while self._waiting:
            changes, self._waiting = self._waiting, []
            try:
                with anyio.fail_after(2 * PATIENCE):
                    await self._push(changes)
            except _FAILURES as exc:
                self._failed(exc)
                self._refuses |= isinstance(exc, ResponseError) and _writes(changes)
                self._waiting.clear()
            else:
                self._answered(_writes(changes))

    async def _push(self, changes: list[tuple[str, Any]]) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            incarnations = await self._births_of({data[0] for what, data in changes if what == "frame"})
            streams: dict[str, None] = {}
            for what, data in changes:
                if what != "news" and (birth := incarnations.get(data[0])) is not None:
                    stream, seq, frame = self._stream(data[0], birth), data[1], data[2]
                    # An entry's own number is the frame's, from 1 on: a page is a range of them, and a gap is seen.
                    pipe.xadd(stream, {"frame": frame}, id=f"{seq + 1}-0", maxlen=MOST, approximate=True)
                    streams[stream] = None
            for stream in streams:
                pipe.expire(stream, TTL)
            if message := pack(data for what, data in changes if what == "news"):
                pipe.publish(self._prefix, message)
            for answer in await pipe.execute(raise_on_error=False):
                if isinstance(answer, RedisError) and not _is_missing(answer):
                    raise answer

    async def _births_of(self, ids: set[str]) -> dict[str, str]:
        try:
            with anyio.move_on_after(PATIENCE):  # or Redis would be blamed for a database that does not answer
                return await self._incarnations.of(list(ids)) if ids else {}
        except LakeshoreError:
            pass
        return {}  # these frames will be missing

    def _stream(self, id: str, birth: str) -> str:
        return f"{self._prefix}:frames:{id}:{birth}"

    # What comes in

    async def frames(self, id: str, birth: str, since: int, upto: int) -> list[tuple[int, bytes]] | None:
        """Frames since + 1 to `upto`, if the stream has each of them; None otherwise."""
        if self.down or not 0 < upto - since <= MOST:
            return None
        try:
            with anyio.fail_after(PATIENCE):
                found = await self._client.xrange(self._stream(id, birth), f"{since + 2}-0", f"{upto + 1}-0")
            frames = [(int(number.partition(b"-")[0]) - 1, bytes(fields[b"frame"])) for number, fields in found]
        except KeyError:
            return None
        except _FAILURES as exc:
            if not _is_missing(exc):
                self._failed(exc)
            return None
        return frames if [seq for seq, _ in frames] == list(range(max(since, -1) + 1, upto + 1)) else None

    async def hear(self, timeout: float) -> tuple[bool, list[News]] | None:
        """News that others have published, waiting up to `timeout` seconds for the first: whether this is the first time
        since the connection was made, and the news. None: Redis is out of reach."""
        try:
            fresh = self._heard is None
            if fresh:
                self._heard = self._client.pubsub()
                with anyio.fail_after(PATIENCE):
                    await self._heard.subscribe(self._prefix)
                    while await self._heard.get_message(timeout=PATIENCE) is None:
                        pass
                self._answered()
                return True, []
            if self.down and not self._refuses:  # this connection may have outlived what failed: who only reads asks
                with anyio.fail_after(PATIENCE):
                    await self._client.ping()
                self._answered()
            news: list[News] = []
            wait = timeout
            while len(news) < HEARD:
                message = await self._heard.get_message(ignore_subscribe_messages=True, timeout=wait)
                if message is None:
                    break
                news += [self._believed(told) for told in unpack(message.get("data"))]
                wait = 0.0
            return False, news
        except _FAILURES as exc:
            self._failed(exc)
            await self.deafen()
            return None
        except BaseException:  # left in the middle of a message, perhaps
            with anyio.CancelScope(shield=True):
                await self.deafen()
            raise

    def _believed(self, told: Told) -> News:
        """News with its outcome, if that is of the very invocation that was last seen here under this id."""
        news, birth = told
        if news.outcome is not None and birth != self._incarnations.known(news.outcome.id):
            return news._replace(outcome=None)
        return news

    async def deafen(self) -> None:
        """Stop listening."""
        heard, self._heard = self._heard, None
        if heard is not None:
            try:
                await heard.aclose()
            except _FAILURES as exc:
                logger.debug("a connection to Redis did not close: %s", exc)

    # How it stands

    def _failed(self, exc: BaseException) -> None:
        self._until = time.monotonic() + AGAIN
        logger.debug("Redis at %s: %s: %s", self._name, type(exc).__name__, exc)
        if not self.down:
            self.down = True
            said = "does not answer"
            if isinstance(exc, AuthenticationError | AuthorizationError | NoPermissionError):
                said = "refuses who asks, check the password"
            elif isinstance(exc, ResponseError):
                said = f"refuses what it is told ({exc!s:.80})"
            logger.warning("Redis at %s %s; readers go on from MongoDB until it does", self._name, said)

    def _answered(self, wrote: bool = False) -> None:
        """It did what it was told; wrote: writing was among that."""
        if self.down and (wrote or not self._refuses):
            self.down = self._refuses = False
            logger.info("Redis at %s answers again", self._name)

    async def close(self) -> None:
        """Send what waits, for a moment, and disconnect."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(1.0):
                if self._sending is not None:
                    await self._sending.wait()
            await self.deafen()
            try:
                await self._client.aclose()
            except _FAILURES as exc:
                logger.debug("a connection to Redis did not close: %s", exc)


def _writes(changes: Iterable[tuple[str, Any]]) -> bool:
    return any(what == "frame" for what, _ in changes)


def _is_missing(exc: BaseException) -> bool:
    """Whether an entry is refused for what its stream holds, one that comes after a later one, or is no stream: then it is
    missing there, and nothing is wrong with the server."""
    return isinstance(exc, ResponseError) and ("equal or smaller" in str(exc) or "WRONGTYPE" in str(exc))
