"""The tests' own proxy numbers the calls of both protocols, and drops connections before a call or after it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from mongo_services import port_of, through_port
from wire_proxy import CallProxy

if TYPE_CHECKING:
    from wire_proxy import When


@pytest.mark.parametrize("when", ["before", "after"])
def test_calls_of_mongodb(mongo_database: str, when: When) -> None:
    from pymongo import MongoClient
    from pymongo.errors import AutoReconnect

    with CallProxy(port_of(mongo_database), "mongodb") as proxy:
        url = through_port(mongo_database, proxy.port, "retryWrites=false")
        with MongoClient[Any](url) as client, MongoClient[Any](mongo_database) as direct:
            things, seen = client.get_default_database().things, direct.get_default_database().things
            proxy.reset()
            things.insert_many([{"_id": n, "text": "x" * 200_000} for n in range(3)])
            assert len(list(things.find())) == 3
            assert dict(proxy.counts) == {"insert": 1, "find": 1}
            assert proxy.trips == 2
            proxy.drop(1, when)
            assert things.count_documents({"_id": 0}) == 1
            with pytest.raises(AutoReconnect):
                things.insert_one({"_id": 9})
            assert seen.count_documents({"_id": 9}) == (when == "after")
            assert things.count_documents({"_id": 1}) == 1
            assert proxy.calls == ["aggregate", "insert", "aggregate"]
            assert proxy.dropped == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_calls_of_redis(redis_url: str, when: When) -> None:
    import redis

    with CallProxy(port_of(redis_url), "redis") as proxy:
        client = redis.Redis.from_url(through_port(redis_url, proxy.port), retry=None)
        direct = redis.Redis.from_url(redis_url)
        try:
            direct.delete("proxied")
            with client.pipeline(transaction=False) as pipe:
                pipe.rpush("proxied", b"*3\r\n$4\r\nEVAL" * 20_000)
                pipe.expire("proxied", 100)
                pipe.execute()
            assert client.llen("proxied") == 1
            assert proxy.calls == ["RPUSH", "EXPIRE", "LLEN"]
            assert proxy.trips == 2
            proxy.drop(0, when)
            with pytest.raises(redis.ConnectionError):
                client.rpush("proxied", b"x")
            assert direct.llen("proxied") == 1 + (when == "after")
            assert client.llen("proxied") == 1 + (when == "after")
            assert proxy.dropped == 1
        finally:
            direct.delete("proxied")
            client.close()
            direct.close()
