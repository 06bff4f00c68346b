"""A Redis that is absent, is none or refuses who asks, addresses that are none, and passwords, which nobody gets to see."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import anyio
import pytest
from helpers import wait_until
from mongo_kit import own_redis
from mongo_services import free_port
from mongo_streams import streaming, subscribers, told

import dreamlake.lakeshore as dls
from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from pathlib import Path

    from mongo_kit import Place

pytestmark = pytest.mark.anyio
asyncio_only = pytest.mark.parametrize("anyio_backend", ["asyncio"])

SECRET = "hunter2-not-for-any-log"


@pytest.mark.usefixtures("patient")
async def test_no_redis_at_the_start(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The plane opens, works, says so once, and uses it when it comes."""
    with own_redis(tmp_path / "redis") as redis:
        redis.kill()
        async with streaming(place, redis.url) as stream:
            await stream.send(10)
            await stream.arrives()
            await wait_until(lambda: told(caplog), description="what is said of Redis")
            assert len(told(caplog)) <= 2, told(caplog)
            redis.start()
            await stream.send(5)
            await wait_until(lambda: subscribers(redis) > 0, 30, "a reader who has come to Redis")
            await stream.send(10)
            await stream.arrives()


@asyncio_only
@pytest.mark.parametrize(
    "answer",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", b"\x00" * 100, b"+OK\r\n" * 50],
    ids=["http", "silent", "zeros", "agrees"],
)
async def test_a_redis_that_is_none(place: Place, answer: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Another server listens at its port."""

    async def serve(stream: anyio.abc.SocketStream) -> None:
        async with stream:
            try:
                while await stream.receive():
                    await stream.send(answer or b"\xff")
                    if not answer:
                        return
            except (anyio.EndOfStream, anyio.BrokenResourceError):
                return

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with anyio.create_task_group() as group:
            group.start_soon(listener.serve, serve)
            async with streaming(place, f"redis://127.0.0.1:{port}") as stream:
                with anyio.fail_after(60):
                    await stream.send(5)
                    await stream.arrives()
            group.cancel_scope.cancel()
    assert 1 <= len(told(caplog)) <= 2, told(caplog)


@asyncio_only
@pytest.mark.usefixtures("patient")
async def test_a_password_that_is_wrong(place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Said once, without the password; the right one works."""
    caplog.set_level(logging.DEBUG)
    with own_redis(tmp_path / "redis", "--requirepass", "the-right-one") as redis:
        wrong = f"redis://:{SECRET}@127.0.0.1:{redis.port}/0"
        async with streaming(place, wrong) as stream:
            await stream.send(5)
            await stream.arrives()
            assert SECRET not in repr(stream.writer)
        assert 1 <= len(told(caplog)) <= 2, told(caplog)
        caplog.clear()
        async with streaming(place, f"redis://:the-right-one@127.0.0.1:{redis.port}/0") as stream:
            await stream.send(5)
            await stream.arrives()
        assert told(caplog) == []
    assert SECRET not in caplog.text
    assert "the-right-one" not in caplog.text


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1/", "127.0.0.1:6379", "mongodb://127.0.0.1/x", "redis://127.0.0.1:x/"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis://") as failure:
        dls.MongoDispatch("mongodb://127.0.0.1/x", url)
    assert type(failure.value).__module__.partition(".")[0] in ("builtins", "dreamlake")


@pytest.mark.parametrize("url", ["http://127.0.0.1/", "127.0.0.1:27017", "redis://127.0.0.1", "mongodb://h:port/x"])
def test_an_address_of_a_database_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=r"mongodb://"):
        dls.MongoDispatch(url)


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("mongodb://u:hun?ter2@h/x", "it names no host"),
        ("mongodb://u:12/hunter2@h/x", "what is special in a user or a password is to be percent-encoded"),
        ("mongodb://u:hunter2%@h/x", "Username and password must be escaped"),
        ("mongodb://u:hunter2@h/x\n", "there is white space in it"),
        ("mongodb://u:hun\nter2@h/x", "there is white space in it"),
        ("mongodb://u:hunter2@h:99999/x", "Port must be an integer between 0 and 65535"),
        ("mongodb://h/x?maxPoolSiz=hunter2", "Unknown option"),
        ("mongodb://h/x?socketTimeoutMS=hunter2", "sockettimeoutms must be"),
        ("redis://:12/hunter2@h/0", "what is special in a user or a password is to be percent-encoded"),
        ("redis://:hunter2@h/name", "a database of Redis is a number"),
        ("redis://h/0?passwort=hunter2", "unexpected keyword argument 'passwort'"),
        ("redis://h/0?socket_timeout=hunter2", "Invalid value for 'socket_timeout'"),
    ],
)
def test_an_address_that_the_driver_would_misread_is_refused_without_what_is_secret(url: str, sentence: str) -> None:
    mongo, redis = (url, None) if url.startswith("mongodb") else ("mongodb://h/x", url)
    with pytest.raises(ValueError, match=r"expected an address such as (mongodb|redis)://HOST") as refused:
        dls.MongoDispatch(mongo, redis)
    assert sentence in str(refused.value)
    assert not any(part in str(refused.value) for part in ("hun", "ter2", "12/"))


@pytest.mark.parametrize(
    "url",
    [
        "mongodb://u:p%40%2F%3F@a:1,b:2,[::1]:3/x?replicaSet=r&retryWrites=true&w=majority&appName=@me@",
        "mongodb+srv://u:p@cluster.example/x?retryWrites=true",
        "redis://u:p%2F@h:6379/3",
        "rediss://h?ssl_cert_reqs=none",
        "unix://:p@/run/redis.sock?db=1",
    ],
)
def test_an_address_as_it_is_handed_out_is_taken(url: str) -> None:
    mongo, redis = (url, None) if url.startswith("mongodb") else ("mongodb://h/x", url)
    assert "p@" not in repr(dls.MongoDispatch(mongo, redis))


# Secrets -------------------------------------------------------------------------------------------------------------


@asyncio_only
async def test_no_password_is_in_what_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the name of the plane, nor in errors and their causes, nor in any log."""
    caplog.set_level(logging.DEBUG)
    dead = free_port()
    mongo = f"mongodb://user:{SECRET}@127.0.0.1:{dead}/x?serverSelectionTimeoutMS=300"
    plane = dls.MongoDispatch(mongo, f"redis://:{SECRET}@127.0.0.1:{dead}")
    plane.patience = 0.1
    assert SECRET not in repr(plane)
    assert f"127.0.0.1:{dead}" in repr(plane)
    with pytest.raises(dls.PlaneUnavailable) as failure:
        await plane.submit("q", b"body", id=new_id())
    exc: BaseException | None = failure.value
    while exc is not None:
        assert SECRET not in f"{exc!r} {exc}"
        exc = exc.__cause__ or exc.__context__
    await plane.aclose()
    for bad in (f"mongodb://user:{SECRET}@h:port/x", f"mongodb://user:{SECRET}@/x", f"redis://u:{SECRET}@h"):
        with pytest.raises(ValueError) as refused:
            dls.MongoDispatch(bad)
        assert SECRET not in str(refused.value)
    with pytest.raises(ValueError) as refused:
        dls.MongoDispatch("mongodb://127.0.0.1/x", f"http://u:{SECRET}@h")
    assert SECRET not in str(refused.value)
    assert SECRET not in caplog.text
