"""Redis makes the fleet plane fast across servers; the plane works without it.

After each change this module publishes its news on one channel of the namespace, with small outcomes of ended invocations.
It also adds frames, under their own numbers, to one Redis stream per incarnation of an invocation, so that readers of live
journals are served from memory. Everything is committed to the database first. A failure of Redis is logged once and
otherwise ignored; until Redis answers again, requests to it are rare.
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
from .redis_messages import PublishedNews, pack, unpack

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from ..contract.news import News
    from .incarnation import Incarnations

__all__ = ["RedisNews"]

logger = logging.getLogger("dreamlake.lakeshore.mongo")

ANSWER_TIMEOUT = 2.0
"""Seconds after which a Redis that has not answered counts as down."""
PAUSE_AFTER_FAILURE = 1.0
"""Seconds after a failure during which nothing is sent."""
MAX_STREAM_FRAMES = 1000
"""The approximate number of frames that a Redis stream keeps."""
MAX_FRAME_BYTES = 64 * 1024
"""Larger frames are read from the database only."""
STREAM_EXPIRY = 900
"""Seconds after its last frame for which a Redis stream is kept."""
MAX_BACKLOG = 10_000
"""Changes that may wait to be sent; more are dropped, and readers find them in the database."""
MAX_NEWS = 1000
"""The approximate number of news that one call of `receive` returns: they may arrive as fast as they are read."""
_FAILURES = (RedisError, OSError, EOFError, TimeoutError, ValueError, TypeError, RuntimeError)


class RedisNews:
    """The connection of one engine to Redis; created, used and closed on one asyncio event loop."""

    def __init__(self, url: str, uid: str, ns: str, incarnations: Incarnations) -> None:
        self._incarnations = incarnations
        self._prefix = f"lakeshore:{uid}:{ns}"
        self._name = shown_url(url)
        client: Any = redis.Redis
        self._client: Any = client.from_url(
            url,
            socket_timeout=ANSWER_TIMEOUT,
            socket_connect_timeout=ANSWER_TIMEOUT,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._subscription: Any = None
        self._backlog: list[tuple[str, Any]] = []
        self._sending: anyio.Event | None = None
        self._paused_until = 0.0
        self._rejects_writes = False
        """True after Redis rejected a write, until it accepts one again."""
        self.down = False
        """True after a failure, until Redis answers again."""

    # Sending

    def publish(self, news: Iterable[News], incarnations: Mapping[str, str] | None = None) -> None:
        """Publish news soon. Outcomes are sent only for ids in `incarnations`, as they were known before the end."""
        known = incarnations or {}
        changes: list[tuple[str, Any]] = []
        for one in news:
            incarnation = None if one.name is None else known.get(one.name)
            changes.append(("news", PublishedNews(one, incarnation)))
        self._send(changes)

    def add(self, id: str, first_seq: int, frames: Sequence[bytes]) -> None:
        """Add frames that the database already has, soon."""
        changes: list[tuple[str, Any]] = []
        for seq, data in enumerate(frames, first_seq):
            if len(data) <= MAX_FRAME_BYTES:
                changes.append(("frame", (id, seq, data)))
        self._send(changes)

    def _send(self, changes: list[tuple[str, Any]]) -> None:
        if not changes or time.monotonic() < self._paused_until or len(self._backlog) > MAX_BACKLOG:
            return
        self._backlog += changes
        if self._sending is None:
            self._sending = anyio.Event()
            spawn(self._pump, self._pumped)

    def _pumped(self) -> None:
        if self._sending is not None:
            self._sending.set()
        self._sending = None

    async def _pump(self) -> None:
        while self._backlog:
            changes = self._backlog
            self._backlog = []
            try:
                with anyio.fail_after(2 * ANSWER_TIMEOUT):
                    await self._push(changes)
            except _FAILURES as exc:
                self._failed(exc)
                self._rejects_writes |= isinstance(exc, ResponseError) and _writes(changes)
                self._backlog.clear()
            else:
                self._answered(_writes(changes))

    async def _push(self, changes: list[tuple[str, Any]]) -> None:
        async with self._client.pipeline(transaction=True) as pipe:
            incarnations = await self._incarnations_of({data[0] for what, data in changes if what == "frame"})
            streams: dict[str, None] = {}
            for what, data in changes:
                if what == "news":
                    continue
                id, seq, frame = data
                incarnation = incarnations.get(id)
                if incarnation is not None:
                    stream = self._stream(id, incarnation)
                    # The number of an entry is that of its frame plus 1: a page is a range of entries, and gaps show.
                    pipe.xadd(stream, {"frame": frame}, id=f"{seq + 1}-0", maxlen=MAX_STREAM_FRAMES, approximate=True)
                    streams[stream] = None
            for stream in streams:
                pipe.expire(stream, STREAM_EXPIRY)
            if message := pack(data for what, data in changes if what == "news"):
                pipe.publish(self._prefix, message)
            for answer in await pipe.execute(raise_on_error=False):
                if isinstance(answer, RedisError) and not _is_missing(answer):
                    raise answer

    async def _incarnations_of(self, ids: set[str]) -> dict[str, str]:
        if not ids:
            return {}
        try:
            # A time limit of its own, or a slow database would count as a failure of Redis.
            with anyio.move_on_after(ANSWER_TIMEOUT):
                return await self._incarnations.of(list(ids))
        except LakeshoreError:
            pass
        return {}  # the stream will lack these frames

    def _stream(self, id: str, incarnation: str) -> str:
        return f"{self._prefix}:frames:{id}:{incarnation}"

    # Receiving

    async def frames(self, id: str, incarnation: str, since: int, upto: int) -> list[tuple[int, bytes]] | None:
        """The frames since + 1 to `upto`; None unless Redis has all of them."""
        if self.down or not 0 < upto - since <= MAX_STREAM_FRAMES:
            return None
        try:
            with anyio.fail_after(ANSWER_TIMEOUT):
                found = await self._client.xrange(self._stream(id, incarnation), f"{since + 2}-0", f"{upto + 1}-0")
            frames = [(int(number.partition(b"-")[0]) - 1, bytes(fields[b"frame"])) for number, fields in found]
        except KeyError:
            return None
        except _FAILURES as exc:
            if not _is_missing(exc):
                self._failed(exc)
            return None
        wanted = list(range(max(since, -1) + 1, upto + 1))
        if [seq for seq, _ in frames] != wanted:
            return None
        return frames

    async def receive(self, timeout: float) -> tuple[bool, list[News]] | None:
        """Wait up to `timeout` seconds for news that others publish.

        Returns whether the subscription is new, so that earlier news was missed, and the news; None if Redis is down.
        """
        try:
            fresh = self._subscription is None
            if fresh:
                self._subscription = self._client.pubsub()
                with anyio.fail_after(ANSWER_TIMEOUT):
                    await self._subscription.subscribe(self._prefix)
                    while await self._subscription.get_message(timeout=ANSWER_TIMEOUT) is None:
                        pass
                self._answered()
                return True, []
            if (
                self.down and not self._rejects_writes
            ):  # the subscription may have survived the failure of another connection
                with anyio.fail_after(ANSWER_TIMEOUT):
                    await self._client.ping()
                self._answered()
            news: list[News] = []
            wait = timeout
            while len(news) < MAX_NEWS:
                message = await self._subscription.get_message(ignore_subscribe_messages=True, timeout=wait)
                if message is None:
                    break
                news += [self._checked(published) for published in unpack(message.get("data"))]
                wait = 0.0
            return False, news
        except _FAILURES as exc:
            self._failed(exc)
            await self.unsubscribe()
            return None
        except BaseException:  # cancelled, perhaps in the middle of a message
            with anyio.CancelScope(shield=True):
                await self.unsubscribe()
            raise

    def _checked(self, published: PublishedNews) -> News:
        """The news, without its outcome if that belongs to another incarnation than the one last seen here."""
        news = published.news
        if news.outcome is not None and published.incarnation != self._incarnations.known(news.outcome.id):
            return news._replace(outcome=None)
        return news

    async def unsubscribe(self) -> None:
        """Close the subscription."""
        subscription = self._subscription
        self._subscription = None
        if subscription is not None:
            try:
                await subscription.aclose()
            except _FAILURES as exc:
                logger.debug("a connection to Redis did not close: %s", exc)

    # State

    def _failed(self, exc: BaseException) -> None:
        self._paused_until = time.monotonic() + PAUSE_AFTER_FAILURE
        logger.debug("Redis at %s: %s: %s", self._name, type(exc).__name__, exc)
        if not self.down:
            self.down = True
            problem = "does not answer"
            if isinstance(exc, AuthenticationError | AuthorizationError | NoPermissionError):
                problem = "rejects the credentials, check the password"
            elif isinstance(exc, ResponseError):
                problem = f"rejects a command ({exc!s:.80})"
            logger.warning("Redis at %s %s; readers use MongoDB meanwhile", self._name, problem)

    def _answered(self, wrote: bool = False) -> None:
        """Note that Redis answered. wrote: whether the request wrote something."""
        if self.down and (wrote or not self._rejects_writes):
            self.down = False
            self._rejects_writes = False
            logger.info("Redis at %s answers again", self._name)

    async def close(self) -> None:
        """Send the backlog for at most a second, then disconnect."""
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(1.0):
                if self._sending is not None:
                    await self._sending.wait()
            await self.unsubscribe()
            try:
                await self._client.aclose()
            except _FAILURES as exc:
                logger.debug("a connection to Redis did not close: %s", exc)


def _writes(changes: Iterable[tuple[str, Any]]) -> bool:
    return any(what == "frame" for what, _ in changes)


def _is_missing(exc: BaseException) -> bool:
    """True if Redis rejects an entry because its stream holds a later one, or because the key is not a stream.

    Then the entry is missing, and nothing is wrong with the server.
    """
    return isinstance(exc, ResponseError) and ("equal or smaller" in str(exc) or "WRONGTYPE" in str(exc))
