"""The driver: a client for one event loop, the collections behind it, and what its exceptions are to everybody else."""

from __future__ import annotations

import re
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import anyio
from bson import ObjectId, Timestamp
from bson.codec_options import CodecOptions, DatetimeConversion
from bson.errors import BSONError
from pymongo import AsyncMongoClient, IndexModel, ReadPreference, WriteConcern
from pymongo import errors as driver
from pymongo.uri_parser import parse_uri

from ...concurrency.tasks import run_to_end
from ...errors import DispatchError, LakeshoreError, NotAuthorized, PlaneUnavailable, WireError
from .bodies import Bodies
from .clock import DatabaseClock
from .documents import INDEXES, VERSION, Document, Index, key_of
from .incarnation import Incarnations

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Sequence

    from pymongo.asynchronous.collection import AsyncCollection
    from pymongo.asynchronous.database import AsyncDatabase

__all__ = [
    "DUPLICATE",
    "Database",
    "call_driver",
    "check_mongo_url",
    "check_redis_url",
    "foreign",
    "guarded",
    "shown_url",
]

T = TypeVar("T")

DATABASE = "lakeshore"
"""The database of an address that names none."""
DUPLICATE = 11000
_OPTIONS: dict[str, Any] = {
    # A call ends within these, and the plane asks again: who waits can be cancelled in between.
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "socketTimeoutMS": 20_000,
    "waitQueueTimeoutMS": 10_000,
    "maxPoolSize": 64,
}
_FIXED: dict[str, Any] = {
    # The plane repeats operations, each of which can be. The driver, which would repeat a claim on its own, may be handed
    # a second row by a server that does not know its way of numbering them.
    "retryWrites": False,
    "tz_aware": False,
    "appname": "dreamlake-lakeshore",
}
_DENIED = frozenset({13, 18, 8000})
_TRANSIENT = frozenset({6, 7, 50, 64, 89, 91, 112, 189, 262, 9001, 10107, 11600, 11601, 11602, 13435, 13436})
"""Codes of failures that pass: the network, a primary that steps down, a limit of time, a conflict of writes."""


# Addresses ----------------------------------------------------------------------------------------------------------


def _check(url: object, schemes: tuple[str, ...], example: str, read: Callable[[str], object]) -> str:
    why = ""
    if isinstance(url, str) and url.partition("://")[0] in schemes:
        try:
            _check_whole(url, schemes)
            read(url)
        except (ValueError, TypeError, OSError, driver.PyMongoError) as exc:  # their texts name options, no values
            why = f": {exc!s:.200}"
        else:
            return url
    shown = shown_url(url) if isinstance(url, str) else type(url).__name__
    raise ValueError(f"expected an address such as {example}, got {shown!r:.200}{why}")


def _check_whole(url: str, schemes: tuple[str, ...]) -> None:
    """Raises ValueError unless all of an address is where it belongs: the first half of a password that is not encoded
    passes for a host, and a line's end for a part of the database's name."""
    if re.search(r"[\s\x00-\x1f]", url):
        raise ValueError("there is white space in it")
    try:
        _, netloc, path, _, rest = urlsplit(url.partition("?")[0])
    except ValueError:  # it says what of the brackets is wrong, and nothing else
        raise ValueError("it names no host") from None
    if "@" in path + rest:
        raise ValueError("what is special in a user or a password is to be percent-encoded")
    hosts = netloc.rpartition("@")[2].split(",")
    if not all(re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+)(:\d{1,5})?", unquote(host)) for host in hosts):
        if not (schemes[0] == "redis" and hosts == [""]):
            raise ValueError("it names no host, or an odd port")


def check_mongo_url(url: object) -> str:
    """The address, when it is one of MongoDB; else ValueError, which never shows a password."""
    return _check(url, ("mongodb", "mongodb+srv"), "mongodb://HOST:27017/DATABASE", _read_mongo_url)


def _read_mongo_url(url: str) -> None:
    if url.startswith("mongodb:"):  # the name of the other kind is looked up first
        parse_uri(url, validate=True, warn=False)


def check_redis_url(url: object) -> str:
    """The address, when it is one of Redis; else ValueError, which never shows a password."""
    return _check(url, ("redis", "rediss", "unix"), "redis://HOST:6379/0", _read_redis_url)


def _read_redis_url(url: str) -> None:
    from redis.asyncio import ConnectionPool

    parts = urlsplit(url)
    if parts.scheme != "unix" and not re.fullmatch(r"(/\d*)?", parts.path):  # the driver would take its database 0
        raise ValueError("a database of Redis is a number")
    pool: Any = ConnectionPool
    pool.from_url(url).make_connection()  # which connects to nothing yet


def shown_url(url: str) -> str:
    """An address without what is secret in it: who logs in, and the options."""
    head, _, options = url.partition("?")
    if "@" in options and "@" not in head:  # the question mark may be a password's
        return f"{head.partition('://')[0]}://..." if "://" in head else "..."
    return re.sub(r"(?<=//).*@", "", head, flags=re.DOTALL)


# Exceptions ---------------------------------------------------------------------------------------------------------


def foreign(exc: BaseException, name: str) -> LakeshoreError:
    """What an exception of the driver is to everybody else."""
    said = _said(exc)
    if isinstance(exc, BSONError | UnicodeError | OverflowError | driver.DocumentTooLarge | driver.InvalidName):
        return WireError(f"expected what a document of {name} can hold, got: {said}")
    if isinstance(exc, driver.OperationFailure):
        if exc.code in _DENIED:
            return NotAuthorized(f"{name} refused who asks: {said}; check the user, the password and the rights")
        passes = exc.code in _TRANSIENT or exc.timeout or isinstance(exc, driver.WriteConcernError)
        if not passes and not exc.has_error_label("RetryableWriteError"):
            return DispatchError(f"{name} refused an operation: {said}")
    if isinstance(exc, driver.ConfigurationError):
        return DispatchError(f"{name} cannot be used: {said}; check its address")
    return PlaneUnavailable(f"{name} does not answer: {said}")


def _said(exc: BaseException) -> str:
    """What the driver says, without the description of the whole topology that follows."""
    if isinstance(exc, UnicodeEncodeError):
        return f"a text that is no UTF-8, {exc.object!r:.100}"
    text = str(exc).partition(", full error")[0].partition(" (configured timeouts")[0].partition(", Timeout:")[0]
    return f"{type(exc).__name__}: {text:.300}"


@contextmanager
def guarded(name: str) -> Generator[None]:
    """Inside, no exception of the driver gets out."""
    try:
        yield
    except (driver.PyMongoError, BSONError, UnicodeError, OverflowError, OSError) as exc:
        raise foreign(exc, name) from exc
    except RuntimeError as exc:  # a client whose loop is ending
        if isinstance(exc, LakeshoreError):
            raise
        raise PlaneUnavailable(f"{name} cannot be asked any more: {exc}") from exc


async def call_driver(name: str, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await `fn(*args)`, which calls the driver of the database `name`, with the driver's exceptions translated.

    Cancellation: the caller leaves at once, and the driver's call runs to its end: a driver that is interrupted closes its
    connection, and has to make another for the next call.
    """

    async def call() -> T:
        with guarded(name):
            return await fn(*args)

    return await run_to_end(call, may_leave=True)


# The database -------------------------------------------------------------------------------------------------------


class Database:
    """One client, of one event loop, and the collections of one namespace's plane.

    Writes are in the journals of a majority before they are answered: what is done stays done when the primary is lost, and
    when a server that stands alone is killed.
    """

    def __init__(self, url: str, ns: str, name: str) -> None:
        self.ns, self.name = ns, name
        with guarded(name):
            given = {option.partition("=")[0].lower() for option in re.split("[&;]", url.partition("?")[2])}
            options = {option: value for option, value in _OPTIONS.items() if option.lower() not in given}
            try:
                self.client: AsyncMongoClient[Document] = AsyncMongoClient(url, **options, **_FIXED)
            except (ValueError, TypeError) as exc:
                raise DispatchError(f"{name} cannot be used: {_said(exc)}; check its address") from exc
        codec = CodecOptions[Document](datetime_conversion=DatetimeConversion.DATETIME_MS)
        # Whatever the address says of these: an operation is judged by what was written just before it, here or elsewhere.
        self.database: AsyncDatabase[Document] = self.client.get_default_database(
            DATABASE,
            codec_options=codec,
            read_preference=ReadPreference.PRIMARY,
            write_concern=WriteConcern("majority", j=True),
        )
        self.invocations: AsyncCollection[Document] = self.database["invocations"]
        self.frames: AsyncCollection[Document] = self.database["frames"]
        self.bodies = Bodies(self.database)
        self.clock = DatabaseClock(self._time)
        self.incarnations = Incarnations(self._born)
        self.uid = ""
        self.stamps = True
        """Whether the server fills in the timestamps of submits."""

    async def open(self) -> None:
        """Reach the server, make what is missing, and refuse what is not ours."""
        with guarded(self.name):
            await self.clock.read()
            about = await self._about()
            for collection, indexes in INDEXES.items():
                await self.database[collection].create_indexes([_model(index) for index in indexes])
        version = about.get("version")
        if version != VERSION:
            raise DispatchError(
                f"{self.name} is of version {version!r}, and this package knows version {VERSION}: "
                "upgrade dreamlake-lakeshore, or name another database"
            )
        self.uid, self.stamps = str(about["uid"]), about["madeAt"] != Timestamp(0, 0)

    async def _about(self) -> Document:
        collection = self.database["about"]
        about = await collection.find_one({"_id": "plane"})
        if about is None:
            try:
                made = {"_id": "plane", "version": VERSION, "uid": str(ObjectId()), "madeAt": Timestamp(0, 0)}
                await collection.insert_one(made)
            except driver.DuplicateKeyError:
                pass  # somebody else has just made it
            about = await collection.find_one({"_id": "plane"})
        if about is None:
            raise PlaneUnavailable(f"{self.name} did not keep what was just written to it; it is being dropped")
        return about

    async def _time(self) -> float:
        said = await self.client.admin.command("hello", codec_options=self.database.codec_options)
        return int(said["localTime"]) / 1000

    async def _born(self, ids: Sequence[str]) -> list[Document]:
        with guarded(self.name):
            wanted = {"_id": {"$in": [key_of(self.ns, id) for id in ids]}}
            return await self.invocations.find(wanted, {"id": 1, "submittedAt": 1}).to_list()

    def submitted_at(self) -> Timestamp:
        """The timestamp for a new document: one that the server fills in, where it does."""
        return Timestamp(0, 0) if self.stamps else self.clock.stamp()

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.client.close()


def _model(index: Index) -> IndexModel:
    options: dict[str, Any] = {"name": index.name, "unique": index.unique}
    if index.partial is not None:
        options["partialFilterExpression"] = index.partial
    return IndexModel(index.keys, **options)
