"""A proxy that knows the calls of MongoDB's and of Redis's protocol: it numbers them, and drops connections at one.

As the proxy of the HTTP tests, from which it comes, it also refuses, stalls, delays and cuts.
"""

from __future__ import annotations

import struct
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "http"))  # where proxy lies

from proxy import Proxy

if TYPE_CHECKING:
    from collections.abc import Iterator

When: TypeAlias = Literal["before", "after"]
"""A connection is dropped before the call reaches the server, or after the server acted, before its answer comes."""

_HOUSEKEEPING = {
    *("hello", "ismaster", "isMaster", "endSessions", "saslStart", "saslContinue", "buildInfo"),
    *("HELLO", "AUTH", "SELECT", "CLIENT", "PING"),
}
"""What the drivers ask for themselves."""


class Drop(NamedTuple):
    at: int
    when: When
    times: int


class _Reader:
    """What one connection has said so far, cut into calls."""

    def feed(self, data: bytes) -> Iterator[str]:
        """The names of the calls whose first bytes are in `data`."""
        raise AssertionError


class _MongoReader(_Reader):
    """OP_MSG: a header of 16 bytes, 4 of flags, and a section that begins with the command's document."""

    def __init__(self) -> None:
        self._rest = 0  # bytes of the call under way that are still to come
        self._head = b""

    def feed(self, data: bytes) -> Iterator[str]:
        while data:
            if self._rest:
                passed = min(self._rest, len(data))
                self._rest -= passed
                data = data[passed:]
                continue
            self._head += data
            data = b""
            if len(self._head) < 16:
                continue
            (length,) = struct.unpack_from("<i", self._head)
            if len(self._head) < min(length, 200):
                continue
            whole, self._head = self._head, b""
            self._rest, data = length, whole
            yield self._name(whole[:length])

    @staticmethod
    def _name(call: bytes) -> str:
        (code,) = struct.unpack_from("<i", call, 12)
        if code != 2013:  # the oldest form, which only greets
            return "hello"
        return call[26 : call.index(b"\0", 26)].decode()


class _RedisReader(_Reader):
    """Arrays of strings: `*N`, then N times `$LENGTH` and the string."""

    def __init__(self) -> None:
        self._data = b""
        self._skip = self._words = 0
        self._first = False

    def feed(self, data: bytes) -> Iterator[str]:
        self._data += data
        while self._data:
            if self._skip:
                if self._first:
                    if len(self._data) < self._skip:
                        return
                    self._first = False
                    yield self._data[: self._skip - 2].decode().upper()
                passed = min(self._skip, len(self._data))
                self._skip -= passed
                self._data = self._data[passed:]
                continue
            line, end, rest = self._data.partition(b"\r\n")
            if not end:
                return
            self._data = rest
            if line.startswith(b"*"):
                self._words, self._first = int(line[1:]), True
            elif line.startswith(b"$"):
                self._skip = int(line[1:]) + 2
                self._words -= 1


class CallProxy(Proxy):
    """Stands before a MongoDB server or a Redis. `calls` are the names of what was asked, without the driver's own.

    `trips` counts round trips: what is sent on a connection before its next answer comes is one.
    """

    def __init__(self, server_port: int, kind: Literal["mongodb", "redis"]) -> None:
        super().__init__(server_port)
        self._kind = kind
        self.calls: list[str] = []
        self.trips = self.dropped = 0
        self._drop: Drop | None = None

    @property
    def counts(self) -> Counter[str]:
        return Counter(self.calls)

    def reset(self) -> None:
        """Count anew, and drop nothing."""
        self._do(self._reset)

    def drop(self, at: int, when: When, times: int = 1) -> None:
        """Count anew; drop the connections of call number `at`, from 0, and of the `times` - 1 calls that follow."""
        self._do(self._reset, Drop(at, when, times))

    async def _reset(self, drop: Drop | None = None) -> None:
        self.calls, self.trips, self.dropped, self._drop = [], 0, 0, drop

    def _request(self, link: Any, data: bytes) -> bytes | None:  # type: ignore[override]
        if not hasattr(link, "reader"):
            link.reader = _MongoReader() if self._kind == "mongodb" else _RedisReader()
            link.asking = link.cutting = False
        names = [name for name in link.reader.feed(data) if name not in _HOUSEKEEPING]
        self.trips += bool(names) and not link.asking
        link.asking = link.asking or bool(names)
        for name in names:
            self.calls.append(name)
            drop = self._drop
            if drop is not None and drop.at < len(self.calls) <= drop.at + drop.times:
                self.dropped += 1
                if drop.when == "before":
                    return b""
                link.cutting = True
        return None

    def _answer(self, link: Any, data: bytes) -> bytes | None:
        cutting = getattr(link, "cutting", False)
        link.asking = link.cutting = False
        return b"" if cutting else None
