"""Values made to break whoever reads them: each is served or refused by name, and the server goes on."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import matrix
import msgpack
import pytest
import raw_kit
from helpers import each_row
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from raw_kit import (
    ACK,
    ACK_MANY,
    AWAIT,
    AWAIT_MANY,
    CANCEL,
    CHUNK,
    CHUNKS,
    HEARTBEAT,
    INVOCATIONS,
    MB,
    PATIENCE,
    POLL,
    PURGE,
    QUEUES,
    REAP,
    RELEASE,
    RETRY,
    SOCKET,
    SUBMIT,
    SUBMIT_MANY,
    pack,
    still_serves,
    stream_of,
)

from dreamlake.lakeshore.ids import new_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from raw_kit import Api, Server

pytestmark = pytest.mark.anyio
place, anyio_backend = raw_kit.place, raw_kit.anyio_backend
server, api, queue = raw_kit.server, raw_kit.api, raw_kit.queue


# --- wrong values in every field of every route ----------------------------------------------------------------------

FENCE = {"invocation_id": "a", "worker_id": "w", "attempt": 1}
ERROR = {"type": "T", "message": "m", "traceback": "t"}
SUBMITTED = {
    "invocation_id": "a", "queue": "q", "function": {}, "args_blob": b"x", "code_context": {}, "config": b"",
    "run_config": {"queue": "q", "priority": 0, "key": None, "prefix": ""}, "parent_invocation_id": "p",
}  # fmt: skip
ACKED = {
    **FENCE, "state": "failed", "result_blob": b"r", "error": ERROR, "final_frame": {"seq": 0, "bytes": b"f"},
}  # fmt: skip
APPENDED = {**FENCE, "seq": 0, "bytes": b"f", "frames": [b"f"], "final": False}
GOOD: dict[str, dict[str, Any]] = {
    SUBMIT: SUBMITTED,
    SUBMIT_MANY: {"items": [SUBMITTED]},
    AWAIT: {"invocation_id": "a", "timeout_s": 0},
    AWAIT_MANY: {
        "items": [{"invocation_id": "a"}], "streams": [{"invocation_id": "a", "since": 0, "limit": 1, "max_bytes": 1}],
        "timeout_s": 0, "linger_s": 0, "watch": "w",
    },
    CANCEL: {"invocation_id": "a"},
    POLL: {
        "worker_id": "w", "queue": "q", "queues": ["q"], "timeout_s": 0, "max_commands": 1, "lease_s": 0.01, "max_lost": 1,
        "poll_id": "p",
    },
    ACK: ACKED,
    ACK_MANY: {"items": [ACKED]},
    CHUNK: APPENDED,
    CHUNKS: {"items": [APPENDED]},
    HEARTBEAT: {"worker_id": "w", "claims": [["a", 1]], "lease_s": 1, "wait_s": 0, "known": [["a", 1]]},
    RELEASE: {"worker_id": "w", "claims": [["a", 1]], "poll_id": "p", "items": [FENCE]},
    RETRY: {"worker_id": "w", "claims": [["a", 1]], "delay_s": 0, "error": ERROR, "items": [FENCE]},
    REAP: {"dead": ["d"], "alive": ["a"], "counted": True},
    PURGE: {"older_than_s": 0},
}  # fmt: skip
HOLDS = ("timeout_s", "wait_s", "linger_s")
"""Fields by which a request may be held for as long as it likes: here it may not."""

TEXTS = st.sampled_from(["", "a", "../../x", "\0", "é\u202e", "'; DROP TABLE x; --", "x" * 5000, "%s%n", "running"])
LEAVES = st.one_of(
    st.none(), st.booleans(), st.sampled_from([0, -1, 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]),
    st.sampled_from([0.0, -0.0, 0.5, -1.5, 1e308, 5e-324, float("inf"), float("-inf"), float("nan")]), TEXTS,
    st.sampled_from([b"", b"\xff", b"\xc1", bytes(5000)]),
    st.sampled_from([msgpack.ExtType(5, b"x"), msgpack.ExtType(127, b""), msgpack.Timestamp(0, 0)]),
)  # fmt: skip
NAMES = st.sampled_from(
    sorted({name for fields in GOOD.values() for name in fields} | {"priority", "key", "seq", "type"})
)
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=5
)


def tame(fields: dict[Any, Any]) -> dict[Any, Any]:
    """The same, but held for a moment at most."""
    for name in HOLDS:
        if fields.get(name) is None or (type(fields[name]) in (int, float) and fields[name] > 0.01):
            fields[name] = 0.01
    return fields


def check(answer: raw_kit.Answer, path: str, fields: Any) -> None:
    """Served or refused by name, and never a failure of the server."""
    said = path, fields, answer
    assert answer.status < 500, said
    if answer.status >= 300:
        assert answer.status in (400, 404, 409, 413), said
        assert answer.error[1] in ("WireError", "ValueError", "InvocationNotFound", "ClaimLost", "TooLarge"), said
        assert len(answer.message) < 2000, said
    else:
        for result in answer.fields.get("results", ()):
            error = (result[1] if isinstance(result, list) else result).get("error")
            assert error is None or "state" in result or error["type"] != "ServerError", said


HYPOTHESIS = settings(
    deadline=None, max_examples=matrix.examples(40), derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    """A blocking client: a generated test is run many times with the fixtures of one."""
    headers = {"content-type": raw_kit.MSGPACK}
    with httpx.Client(base_url=server.url, headers=headers, trust_env=False, timeout=PATIENCE) as client:
        yield client


@pytest.mark.parametrize("path", GOOD)
@HYPOTHESIS
@given(data=st.data())
def test_any_values_in_any_fields_are_served_or_refused_by_name(
    client: httpx.Client, path: str, data: st.DataObject
) -> None:
    good = GOOD[path]
    odd = data.draw(st.dictionaries(st.sampled_from(sorted(good)), VALUES, min_size=1, max_size=3))
    gone = data.draw(st.lists(st.sampled_from(sorted(good)), max_size=2))
    fields = tame({name: value for name, value in {**good, **odd}.items() if name not in gone})
    check(raw_kit.Answer(client.post(path, content=pack(fields))), path, fields)
    if "items" in good:
        item = data.draw(st.dictionaries(st.sampled_from(sorted(good["items"][0])), VALUES, min_size=1, max_size=3))
        fields = tame({**good, "items": [{**good["items"][0], **item}, data.draw(VALUES)]})
        check(raw_kit.Answer(client.post(path, content=pack(fields))), path, fields)


ODD: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, float("nan"), float("inf"), 2**64 - 1, -(2**63), "", "a", "../../x", "\0",
    "x" * 70_000, b"", b"\xff", bytes(70_000), [], [1], [None], [[]], [["a"]], [["a", 1, 2]], [[1, "a"]], [["a", -1]],
    [["a", 2**63]], {}, {"a": 1}, {1: 2}, {b"\xff": None}, msgpack.ExtType(5, b"x"), msgpack.ExtType(0, bytes(5000)),
    msgpack.Timestamp(2**33, 5),
]  # fmt: skip


@SOCKET
@pytest.mark.parametrize("path", GOOD)
async def test_each_field_of_a_wrong_kind_is_served_or_refused_by_name(server: Server, path: str) -> None:
    """One field at a time, and inside of what is nested, over a socket."""
    async with server.api() as api:
        for fields in spoiled(GOOD[path]):
            check(await api.ask(path, tame(fields)), path, fields)
        await still_serves(api)


def spoiled(good: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for name, value in good.items():
        for odd in ODD:
            yield {**good, name: odd}
        if isinstance(value, dict) and value:
            yield from ({**good, name: inner} for inner in spoiled(value))
        if isinstance(value, list) and value and isinstance(value[0], dict):
            yield from ({**good, name: [inner, value[0]]} for inner in spoiled(value[0]))


@each_row("body", [None, 5, [], "text", b"", {}, {1: 2}, {b"a": 1}, {None: None}, {"items": {"a": 1}}])
async def test_bodies_of_another_shape_are_served_or_refused_by_name(api: Api, body: Any) -> None:
    for path in GOOD:
        answer = (
            await api.ask(path, {})
            if body is None
            else await api.send("POST", path, pack(tame(body) if body == {} else body))
        )
        if path == AWAIT_MANY or answer.status == 200:
            continue
        check(answer, path, body)


QUERIES = [
    "id=../../x", "id=%00", "id=", "state=%00", "state=odd", "limit=0", "limit=-1", "limit=x", "limit=99999999999999999999",
    "limit=1e3", "queue=%ff", "queue=%", "key=%00", "since=x", "since=-99999999999", "since=9223372036854775808", "body=x",
    "&&&&", "=", "?", "a=b" * 2000, "&".join(f"a{n}=1" for n in range(200)), "root=%E2%80%AE", "limit=%D9%A1", "id=a&id=b",
]  # fmt: skip


@each_row("path", [INVOCATIONS, f"{INVOCATIONS}/nobody", QUEUES, stream_of("nobody")])
@each_row("query", QUERIES, ids=range(len(QUERIES)))
async def test_any_query_is_served_or_refused_by_name(api: Api, path: str, query: str) -> None:
    check(await api.send("GET", f"{path}?{query}"), path, query)


async def test_a_batch_of_more_items_than_one_request_may_have_is_a_400(api: Api) -> None:
    for path, name in ((SUBMIT_MANY, "items"), (ACK_MANY, "items"), (AWAIT_MANY, "streams"), (HEARTBEAT, "claims")):
        answer = await api.ask(path, {"worker_id": "w", name: [{}] * 10_001, "timeout_s": 0})
        assert answer.error == (400, "WireError")
        assert f"at most 10000 `{name}`" in answer.message


# --- what a run_config carries must be handed out again --------------------------------------------------------------


def nested_map(depth: int) -> bytes:
    """A map in a map in a map, as bytes: no packer goes as deep as readers do."""
    return b"\x81\xa1a" * depth + b"\xc0"


@each_row("depth", [400, 510, 600, *range(1010, 1026)])
async def test_a_run_config_nested_too_deep_to_be_handed_out_is_refused_when_it_comes(
    api: Api, queue: str, depth: int
) -> None:
    """Otherwise its invocation would break every poll that takes it."""
    id = new_id()
    for number, field in enumerate((b"\xaarun_config", b"\xa8function", b"\xaccode_context")):
        name = f"{queue}-{number}"
        good = pack({"invocation_id": f"{id}-{number}", "queue": name, "args_blob": b"x"})
        body = bytes([good[0] + 1]) + good[1:] + field + nested_map(depth)
        answer = await api.send("POST", SUBMIT, body)
        if answer.status == 200:
            assert (await api.claim(name))["invocation_id"] == f"{id}-{number}"
        else:
            assert answer.error in ((400, "WireError"), (400, "ValueError"))


@each_row("path", GOOD)
async def test_nesting_in_any_field_is_served_or_refused_by_name(api: Api, path: str) -> None:
    """As deep as a body may be read, which is deeper than a packer goes or the text of a value can be made."""
    good = GOOD[path]
    for name in good:
        for opener in (b"\x91", b"\x81\xa4type", b"\x81\xa1a"):
            for depth in (600, 1015):
                rest = {key: value for key, value in good.items() if key != name}
                packed = pack(rest)
                assert packed[0] < 0x8F
                for wrap in (b"", b"\x91", b"\x91\x91", b"\x81\xa4type", b"\x91\x81\xa5error"):
                    body = bytes([packed[0] + 1]) + packed[1:] + pack(name) + wrap + opener * depth + b"\xc0"
                    check(await api.send("POST", path, body), path, (name, opener, depth, wrap))


# --- R50: bytes that claim more than they are ------------------------------------------------------------------------

LIARS = {
    "array of 4 Gi": b"\xdd\xff\xff\xff\xff",
    "map of 4 Gi": b"\xdf\xff\xff\xff\xff",
    "bytes of 4 GiB": b"\xc6\xff\xff\xff\xff",
    "text of 4 GiB": b"\xdb\xff\xff\xff\xff",
    "ext of 4 GiB": b"\xc9\xff\xff\xff\xff\x05",
    "map with bytes of 4 GiB": b"\x81\xa9args_blob\xc6\xff\xff\xff\xffabc",
    "map with an array of 4 Gi": b"\x81\xa5items\xdd\xff\xff\xff\xff",
    "10 000 lists": b"\x91" * 10_000,
    "10 000 maps": b"\x81\xa1a" * 10_000,
    "10 000 maps as keys": b"\x81" * 10_000,
    "10 000 lists in a field": b"\x81\xa5items" + b"\x91" * 10_000 + b"\xc0",
    "a million lists": b"\x91" * 1_000_000,
    "array of arrays": b"\xdc\xff\xff" * 300,
    "empty ext": b"\xc7\x00\x05",
    "an odd timestamp": b"\x81\xa1a\xc7\x0c\xff" + b"\xff" * 12,
    "never used": b"\xc1",
    "cut short": pack({"invocation_id": "a"})[:-1],
    "with a tail": pack({"invocation_id": "a"}) + b"\x00",
    "text that is not UTF-8": b"\x81\xadinvocation_id\xa2\xff\xff",
}


@SOCKET
@pytest.mark.parametrize("liar", LIARS)
async def test_R50_bytes_that_claim_more_than_they_are_get_a_400_at_once(server: Server, liar: str) -> None:
    before = server.memory()
    async with server.api() as api:
        began = time.monotonic()
        for path in GOOD:
            answer = await api.send("POST", path, LIARS[liar])
            if path != AWAIT_MANY or answer.status != 200:
                assert answer.error == (400, "WireError"), path
                assert "expected" in answer.message
        assert time.monotonic() - began < PATIENCE
        await still_serves(api)
    assert server.memory() - before < 64 * MB


async def test_a_compressed_body_is_not_unpacked(api: Api) -> None:
    for kind in ("gzip", "deflate", "br"):
        answer = await api.send("POST", SUBMIT, b"\x1f\x8b\x08\x00" + bytes(100), {"content-encoding": kind})
        assert answer.error == (400, "WireError")


# --- ids that lead elsewhere -----------------------------------------------------------------------------------------


@each_row("id", ["../../x", "..", ".", "/etc/passwd", "a/b", "a\\b", "a\0", "a\n", "C:", "a" * 65, "", "ä", "٣"])
async def test_an_id_that_could_be_a_path_is_refused_wherever_one_is_named(api: Api, id: str) -> None:
    for path, good in GOOD.items():
        if "invocation_id" in good:
            assert (await api.ask(path, {**good, "invocation_id": id})).error == (400, "WireError"), path
        elif "items" in good and path not in (RELEASE, RETRY):
            fields = tame({**good, "items": [{**good["items"][0], "invocation_id": id}]})
            (result,) = (await api.do(path, fields))["results"]
            assert (result[-1] if isinstance(result, list) else result)["error"]["type"] == "WireError", path
        elif "claims" in good:
            answer = await api.ask(path, {"worker_id": "w", "claims": [[id, 1]]})
            assert answer.error == (400, "WireError"), path
    for field, path in (("parent_invocation_id", SUBMIT), ("poll_id", POLL), ("poll_id", RELEASE)):
        if id:
            assert (await api.ask(path, {**GOOD[path], field: id})).error == (400, "WireError"), (field, path)


@pytest.mark.parametrize("id", ["..%2f..%2fx", "%2e%2e", "a%2fb", "a%00", "a%0a", "a%5cb", "%ff"])
async def test_an_id_in_a_path_is_not_led_astray_by_quoting(api: Api, id: str) -> None:
    for path in (f"{INVOCATIONS}/{id}", stream_of(id)):
        answer = await api.send("GET", path)
        assert answer.error[0] in (400, 404)
        assert answer.error[1] in ("WireError", "NoSuchRoute")
